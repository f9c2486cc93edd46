"""Decoding with experts on disk: honest counts, bytes and times."""

from remoe_cli.offload.decoder import Counts, Decoded, OffloadedDecoder
from remoe_cli.offload.store import ExpertStore, IoCount
from remoe_cli.offload.timing import Clock, Latency

__all__ = ["Clock", "Counts", "Decoded", "ExpertStore", "IoCount", "Latency", "OffloadedDecoder"]
