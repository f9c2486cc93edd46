"""One text, said as it comes."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from remoe_cli.hub.checkpoint import Checkpoint, read_object
from remoe_cli.measure.decoded import figures
from remoe_cli.offload import Decoded, OffloadedDecoder
from remoe_cli.offload.past import Past, Token
from remoe_cli.offload.sampling import Sampling
from remoe_cli.report.metrics import ratio
from remoe_cli.report.renderers.generate import so_far
from remoe_cli.talk.pieces import Pieces
from remoe_cli.talk.screen import Screen


class Said(NamedTuple):
    """ended: "end token", "stop text", "length", or "Ctrl-C"."""

    done: Decoded
    text: str
    ended: str


def say(
    decoder: OffloadedDecoder,
    tokenizer: Any,
    past: Past,
    ids: Sequence[int],
    n_new: int,
    sampling: Sampling | None = None,
    *,
    ends: Collection[int] = (),
    stops: Sequence[str] = (),
    screen: Screen | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Said:
    """The text that follows `ids`, which follow on what `past` holds, up to an end token, a stop text, or n_new tokens.

    screen: where it is shown as it comes. stop: asked after each token whether the text is to end there.
    """
    pieces = Pieces(tokenizer, stops)
    ended, n_told, since = "length", 0, 0.0

    def told(token: Token) -> bool:
        nonlocal ended, n_told, since
        n_told, since = n_told + 1, since or monotonic()
        piece = "" if token.id in ends else pieces.add(token.id)
        if screen is not None:
            screen.say(piece)
            screen.tell(so_far(n_told, monotonic() - since, token.hits, token.misses, token.nbytes))
        if token.id in ends:
            ended = "end token"
        elif pieces.stopped:
            ended = "stop text"
        elif stop():
            ended = "Ctrl-C"
        return ended != "length"

    try:
        if screen is not None:
            screen.tell(f"reading {len(ids)} token{'s' * (len(ids) != 1)} of prompt")
        done = decoder.go_on(past, ids, n_new, told, sampling=sampling)
    finally:
        rest = pieces.end()
        if screen is not None:
            screen.say(rest)
    return Said(done, pieces.text, ended)


def row_of(decoder: OffloadedDecoder, said: Said) -> dict[str, Any]:
    """As a row of `remoe decode`, with what was said."""
    steps = said.done.latency.itl_s
    return {
        "capacity": decoder.capacity, "policy": decoder.policy, "admission": decoder.admission,
        "text": said.text, "ids": said.done.ids, "ended": said.ended, "tokens": len(said.done.ids),
        "tokens_a_second": ratio(len(steps), sum(steps)), **figures(decoder, [said.done]),
    }  # fmt: skip


def end_tokens(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Ids that end a text: the tokenizer's, those of config.json and those of generation_config.json."""
    path = Path(checkpoint.folder) / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    found = [tokenizer.eos_token_id]
    for part in (checkpoint.config, checkpoint.config.get("text_config") or {}, generation):
        named = part.get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    return frozenset(token for token in found if isinstance(token, int))
