"""Decoding with experts on disk: honest counts, bytes and times."""

from remoe_cli.offload.decoded import Counts, Decoded, DecodedBatch, Floor
from remoe_cli.offload.decoder import OffloadedDecoder
from remoe_cli.offload.ledger import InPlaceCount
from remoe_cli.offload.sampling import Sampling
from remoe_cli.offload.sessions import check_turns, take_turns
from remoe_cli.offload.settings import Settings
from remoe_cli.offload.store import ExpertStore, IoCount
from remoe_cli.offload.timing import Latency, Split

__all__ = [
    "Counts",
    "Decoded",
    "DecodedBatch",
    "ExpertStore",
    "Floor",
    "InPlaceCount",
    "IoCount",
    "Latency",
    "OffloadedDecoder",
    "Sampling",
    "Settings",
    "Split",
    "check_turns",
    "take_turns",
]
