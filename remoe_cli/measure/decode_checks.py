"""What options of `remoe decode` do not go together, each with the command that mends it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remoe_cli.cache import choose
from remoe_cli.errors import command, UsageError

if TYPE_CHECKING:
    from remoe_cli.measure.decode_options import Again, Asked


def check_heavy(asked: "Asked", batches: Sequence[int], again: "Again") -> None:
    if asked.heavy is None:
        return
    if not 0 <= asked.heavy <= 1:
        raise UsageError(f"--heavy is a share of the routing weight, from 0 to 1, not {asked.heavy}.", again(heavy=0.6))
    if asked.pack is None:
        raise UsageError(
            "--heavy reads light misses in fewer bits: it needs a --pack in int8 or int4.",
            command("pack", "MODEL", experts="int4", out="DIR"),
        )
    if batches[-1] > 1 or asked.floor:
        other = "floor" if asked.floor else "batch"
        raise UsageError(
            f"--heavy tells misses apart one token at a time: it takes no --{other}.", again(**{other: None})
        )


def check_sessions(asked: "Asked", batches: Sequence[int], again: "Again") -> None:
    if asked.sessions < 1:
        raise UsageError(f"--sessions is at least 1, not {asked.sessions}.", again(sessions=None))
    if asked.sessions == 1:
        return
    if asked.warm != "carry":
        raise UsageError(
            "sessions take turns in one cache for all prompts: --sessions goes with --warm carry.", again(warm="carry")
        )
    if asked.prompts is None:
        raise UsageError("--sessions takes a prompt of each: it needs --prompts.", again(prompt=None, prompts="demo"))
    if batches[-1] > 1 or asked.reroute is not None:
        other = "reroute" if asked.reroute is not None else "batch"
        raise UsageError(
            f"sessions run one token at a time, each its own: --sessions takes no --{other}.", again(**{other: None})
        )
    if choose(asked.policy).policy.refines:
        raise UsageError(
            f"--policy {asked.policy} loads ahead of a request's next token, and with --sessions another request's comes next.",
            again(policy=None),
        )
