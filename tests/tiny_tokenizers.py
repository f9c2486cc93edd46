"""Small real tokenizers for tests, trained when they are asked for."""

from tokenizers import decoders, models, pre_tokenizers, processors, Tokenizer, trainers
from transformers import PreTrainedTokenizerFast

LINES = [
    "User: hello world, what is it?",
    "Assistant: the quick brown fox\njumps over the lazy dog",
    "System: be brief",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE of 400 entries, trained on three lines; <s> is 0, </s> is 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As sentencepiece does it: a mark for each space, <unk> for what was never seen."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    tokenizer.train_from_iterator([*LINES, "two  spaces, one line"], trainers.BpeTrainer(special_tokens=special))
    return tokenizer


def wrapped(tokenizer: Tokenizer | None = None, bos: bool = True, template: str | None = None, **tokens):
    """For transformers. bos: whether it puts <s> first by itself; tokens: other special tokens than <s> and </s>."""
    tokenizer = tokenizer or byte_level()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"bos_token": "<s>", "eos_token": "</s>", **tokens})
    found.chat_template = template
    return found
