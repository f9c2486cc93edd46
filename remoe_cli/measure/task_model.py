"""A model in memory as lm-eval asks it: its own HFLM, with our progress, and a count of what did not fit into the context."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any, TextIO

from lm_eval.models.huggingface import HFLM

from remoe_cli.console import Bar, progress

_LOGITS = 1 << 30  # bytes of a batch's logits, which HFLM keeps of every position
OWN_LENGTH = 256  # tokens of an answer where the task does not say, as HFLM has it


class TaskModel(HFLM):
    """cut: of each of lm-eval's tasks the items whose prompt's beginning was cut off. first: the first prompt."""

    def __init__(self, model: Any, tokenizer: Any, title: str, batch: int, stderr: TextIO) -> None:
        """title: of the progress, which is shown on stderr, whatever stands in for it meanwhile. batch: the most requests that
        are computed together."""
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        self.cut: dict[str, set[int]] = defaultdict(set)
        self.first: str | None = None
        self._title, self._most, self._stderr = title, batch, stderr

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        lengths = [len(self.tok_encode("".join(one.args))) - 1 for one in requests]
        for one, length in zip(requests, lengths, strict=True):
            self._look(one, length)
        row = 4 * min(max(lengths), self.max_length) * self.config.get_text_config().vocab_size
        self.batch_size_per_gpu = max(1, min(self._most, _LOGITS // row))
        return self._answered("choices", super().loglikelihood, requests)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        for one in requests:
            self._look(one, len(self.tok_encode(one.args[0])) + one.args[1].get("max_gen_toks", OWN_LENGTH))
        self.batch_size_per_gpu = self._most
        return self._answered("answers", super().generate_until, requests)

    def bos(self) -> str:
        """Who put the begin token before the first prompt: `tokenizer`, `prompt` (the template) or `none`."""
        begin = self.tokenizer.bos_token_id
        if begin is None or self.tok_encode(self.first or "a")[:1] != [begin]:
            return "none"
        return "prompt" if (self.first or "").startswith(self.tokenizer.bos_token) else "tokenizer"

    def _look(self, request: Any, tokens: int) -> None:
        if self.first is None:
            self.first = request.args[0]
        if tokens > self.max_length:
            self.cut[request.task_name].add(request.doc_id)

    def _answered(self, what: str, answer: Callable[..., list], requests: Sequence[Any]) -> list:
        """lm-eval's own bars are off; stderr is ours meanwhile."""
        with redirect_stderr(self._stderr), progress(f"{self._title}: task {what}", len(requests)) as bar:
            self.set_cache_hook(_Counted(bar, len(requests), self.batch_size_per_gpu))
            return answer(requests, disable_tqdm=True)


class _Counted:
    """lm-eval tells it each answer, as it would a cache; the answers of a batch come at once, after its last one."""

    def __init__(self, bar: Bar, total: int, batch: int) -> None:
        self._bar, self._total, self._batch, self._done = bar, total, batch, 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        self._done += 1
        if self._done % self._batch == 0 or self._done == self._total:
            self._bar.update(self._done)
