"""What the decoder gives back: tokens, counts, times, and the trace of who was asked for.

Shape letters: B requests, T tokens of a prompt, L MoE layers, K experts a token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TYPE_CHECKING

import numpy as np
import torch

from remoe_cli.offload.ledger import InPlaceCount, Ledger
from remoe_cli.offload.store import IoCount
from remoe_cli.offload.timing import Latency, Split
from remoe_cli.routing import RoutingTrace

if TYPE_CHECKING:
    from remoe_cli.offload.block import ExpertBlock

Loads = list[list[tuple[int, int]]]  # each decode step's (layer, expert), in the order in which they were begun


class Counts(NamedTuple):
    """Of the decode steps, summed over layers: accesses = hits + misses, the distinct experts that each step asked for;
    evictions; proactive: loads that the policy made ahead of need, hits where they were asked for, in time or not; guesses:
    experts read before their router had chosen; guessed: misses that a guess had brought or begun. So D = misses - guessed,
    P = proactive + guesses, and decode.reads = D + P - in_place.spared. rerouted: experts that ran in place of the router's own. light: misses that
    were read in fewer bits (settings.heavy). prefill: what the prompt streamed. With warm="batch" the prompt's own hits
    and misses are not in here. io: "direct" | "buffered"."""

    accesses: int
    hits: int
    misses: int
    evictions: int
    proactive: int
    guesses: int
    guessed: int
    rerouted: int
    decode: IoCount
    prefill: IoCount
    io: str
    light: int = 0
    in_place: InPlaceCount = InPlaceCount()


class Decoded(NamedTuple):
    """ids: the n new tokens (the forced ones where they were given). trace: the prompt's tokens, flagged prefill, then
    the n - 1 tokens that were fed one by one (the last new token is not fed). logits: [n, vocabulary], what each new
    token was (or would have been) chosen from, where asked for."""

    ids: list[int]
    trace: RoutingTrace
    latency: Latency
    counts: Counts
    split: Split
    loads: Loads
    logits: torch.Tensor | None = None


class DecodedBatch(NamedTuple):
    """The same of B requests: ids a list for each; trace: one request after the other; latency: of all together; logits:
    [B, n, vocabulary]."""

    ids: list[list[int]]
    trace: RoutingTrace
    latency: Latency
    counts: Counts
    split: Split
    loads: Loads
    logits: torch.Tensor | None = None


class Floor(NamedTuple):
    """Loads alone, without the model. token_s: seconds of each decode token during which it would have waited for them; bytes:
    of all; busy_s: time during which a read was under way."""

    token_s: tuple[float, ...]
    bytes: int
    busy_s: float

    @property
    def tpot_s(self) -> float | None:
        return sum(self.token_s) / len(self.token_s) if self.token_s else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second while reading."""
        return self.bytes / self.busy_s if self.busy_s else None


def counts_of(
    blocks: "Sequence[ExpertBlock]", before: Sequence[tuple[int, int, int, int]], ledger: Ledger, io: str
) -> Counts:
    """before: `cache_counts` of each layer when decoding began."""
    now = [block.cache_counts() for block in blocks]
    hits, misses, evictions, proactive = (sum(b[i] - a[i] for a, b in zip(before, now, strict=True)) for i in range(4))
    return Counts(
        hits + misses, hits, misses, evictions, proactive, ledger.guesses, ledger.guessed, ledger.rerouted, ledger.decode,
        ledger.prefill, io, ledger.light, ledger.in_place,
    )  # fmt: skip


def trace_of(
    blocks: "Sequence[ExpertBlock]",
    n_requests: int,
    n_prompt: int,
    n_new: int,
    n_experts: int,
    provenance: dict[str, Any],
) -> RoutingTrace:
    """The routing of a batch whose prompts are all n_prompt tokens."""
    n_tokens = n_prompt + n_new - 1

    def by_request(passes: Sequence[np.ndarray]) -> np.ndarray:
        """[B x tokens, ...] from the passes, whose rows are [B x T] for the prompt and [B] for each step."""
        prompt = passes[0].reshape(n_requests, n_prompt, *passes[0].shape[1:])
        return np.concatenate([prompt, *(one[:, None] for one in passes[1:])], 1).reshape(
            n_requests * n_tokens, *passes[0].shape[1:]
        )

    return RoutingTrace(
        experts=np.stack([by_request(block.experts) for block in blocks], 1),
        borders=np.arange(n_requests + 1) * n_tokens,
        prefill=np.tile(np.arange(n_tokens) < n_prompt, n_requests),
        n_experts=n_experts,
        weights=np.stack([by_request(block.weights) for block in blocks], 1),
        provenance=provenance,
        **{kind: np.stack([by_request(block.scores[kind]) for block in blocks], 1) for kind in blocks[0].scores},
    )
