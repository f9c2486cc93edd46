"""Requests that share one cache and take turns, token by token, as sessions of one server do."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TYPE_CHECKING

import numpy as np
import torch

from remoe_cli.cache import choose
from remoe_cli.errors import UsageError
from remoe_cli.families.loader import kept_cache
from remoe_cli.offload.block import ExpertBlock
from remoe_cli.offload.checks import check_prompts
from remoe_cli.offload.compute import running
from remoe_cli.offload.decoded import Counts, Decoded, trace_of
from remoe_cli.offload.ledger import doubt_direct, Ledger
from remoe_cli.offload.sampling import chooser, Sampling
from remoe_cli.offload.store import storage_bytes
from remoe_cli.offload.timing import Latency, Split

if TYPE_CHECKING:
    from remoe_cli.offload.decoder import OffloadedDecoder


class _Session(NamedTuple):
    """What one request leaves behind. noted: of each block; counts: hits, misses, evictions of its own steps."""

    ledger: Ledger
    noted: list[SimpleNamespace]
    counts: np.ndarray
    ids: list[torch.Tensor]
    logits: list[torch.Tensor]

    def run(self, blocks: Sequence[ExpertBlock]) -> None:
        """From here on the blocks note what they do with this request."""
        for block, noted in zip(blocks, self.noted, strict=True):
            block.ledger, block.experts, block.weights, block.scores = (
                self.ledger,
                noted.experts,
                noted.weights,
                noted.scores,
            )


def check_turns(policy: str) -> None:
    """Raises UsageError for a policy that loads ahead of the next token of the request that runs."""
    if choose(policy).policy.refines:
        raise UsageError(
            f"policy {policy} loads ahead of a request's next token, and with sessions another request's comes next.",
            "remoe decode MODEL --cache C --policy lru --warm carry --sessions 4",
        )


def take_turns(
    decoder: OffloadedDecoder,
    prompts: Sequence[Sequence[int]],
    n_new: int,
    *,
    forced: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | None = None,
    keep_logits: bool = False,
) -> list[Decoded]:
    """Requests that share the cache and come at once: their prompts one after the other, then a token of each in turn.

    Each has what was counted in its own steps. Its times run on while others have their turn: ttft from the first prompt on,
    itl from its token to its next; `split` is of its own steps. Options as of `OffloadedDecoder.decode`; the cache is
    carried on only with settings.warm "carry". Raises UsageError as `check_turns`.
    """
    check_turns(decoder.policy)
    for place, prompt in enumerate(prompts):
        check_prompts([prompt], n_new, None if forced is None else [forced[place]], 1)
    first, blocks, tiers, timeline = (
        decoder._start(n_new, None, False),
        decoder._blocks,
        decoder._tiers,
        decoder._timeline,
    )
    kinds = list(blocks[0].scores)
    sessions = [
        _Session(
            Ledger([[] for _ in first.loads]),
            [SimpleNamespace(experts=[], weights=[], scores={kind: [] for kind in kinds}) for _ in blocks],
            np.zeros(3, np.int64),
            [],
            [],
        )
        for _ in prompts
    ]
    choose_ids = [chooser(sampling, decoder.device) for _ in prompts]
    state: list[dict[str, Any]] = [{} for _ in prompts]

    def take(place: int, step: int) -> None:
        """The prompt of a request, or its next token."""
        session = sessions[place]
        session.run(blocks)
        session.ledger.step = step - 1
        read, busy, before = storage_bytes(), tiers.busy_s, _counted(blocks)
        fed = torch.tensor([list(prompts[place])], device=decoder.device) if not step else session.ids[-1]
        out = decoder._model(input_ids=fed, use_cache=True, logits_to_keep=1, **state[place])
        state[place] = kept_cache(out)
        if keep_logits:
            session.logits.append(out.logits[0, -1].clone())
        if forced is None:
            session.ids.append(choose_ids[place](out.logits[:, -1]))
        else:
            session.ids.append(torch.tensor([[int(forced[place][step])]], device=decoder.device))
        timeline.token()
        if step:
            session.counts[:] += _counted(blocks) - before
        now, count = storage_bytes(), session.ledger.count
        known = None not in (read, now, count.storage_bytes if step > 1 else 0)
        count.storage_bytes = (count.storage_bytes or 0) + now - read if known else None  # type: ignore[operator]
        count.busy_s += tiers.busy_s - busy

    with torch.inference_mode(), running(decoder.device, decoder.threads):
        timeline.start()
        for step in range(n_new):
            for place in range(len(prompts)):
                take(place, step)
    whole, parts = timeline.finish()
    times = [_times(whole, parts, place, len(prompts)) for place in range(len(prompts))]
    tiers.settle(drop=False)
    for block in blocks:
        block.land()
    decoder._strays.sweep()
    for session in sessions:
        decoder.io_reason = doubt_direct(decoder.io, session.ledger) or decoder.io_reason
    decoder._kept = True
    kind = "forced" if forced is not None else "greedy" if sampling is None else "sampled"
    return [
        Decoded(
            [int(one) for one in session.ids],
            trace_of(session.noted, 1, len(prompt), n_new, decoder.n_experts, decoder._provenance(kind)),  # type: ignore[arg-type]
            latency,
            _counts(session, decoder.io),
            split,
            session.ledger.loads,
            torch.stack(session.logits) if keep_logits else None,
        )
        for session, prompt, (latency, split) in zip(sessions, prompts, times, strict=True)
    ]


def _counts(session: _Session, io: str) -> Counts:
    hits, misses, evictions = session.counts.tolist()
    ledger = session.ledger
    return Counts(
        hits + misses, hits, misses, evictions, 0, ledger.guesses, ledger.guessed, ledger.rerouted, ledger.decode, ledger.prefill, io, ledger.light,
        ledger.in_place,
    )  # fmt: skip


def _counted(blocks: Sequence[ExpertBlock]) -> np.ndarray:
    return np.array([block.cache_counts()[:3] for block in blocks]).sum(axis=0)


def _times(latency: Latency, split: Split, place: int, sessions: int) -> tuple[Latency, Split]:
    """Of one session, from those of all passes in order."""
    ends = np.cumsum([latency.ttft_s, *latency.itl_s])[place::sessions]
    parts = {name: (split.prefill[name], *split.tokens[name])[place::sessions] for name in split.prefill}
    return (
        Latency(float(ends[0]), tuple(np.diff(ends).tolist())),
        Split({name: of[0] for name, of in parts.items()}, {name: of[1:] for name, of in parts.items()}),
    )
