"""Gate next, shared: as gate_next, with what the shared experts put out added to the hidden state."""

from __future__ import annotations

from remoe_cli.cache.prefetch.base import Kind, MOST
from remoe_cli.cache.prefetch.gate_next import GateNext


class GateNextShared(GateNext):
    field = "guess_shared"


KIND = Kind(
    title="as gate_next, the shared experts' output added to the hidden state",
    source="Speculating Experts, arXiv 2603.19289, without its normalisation of the residual",
    make=GateNextShared,
    parameters=(MOST,),
    needs=("guess_shared",),
)
