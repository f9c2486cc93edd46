"""Which deltas of a base the Hub knows, and what each says of its own report."""

import math
from typing import Any

from remoe_cli.console import note
from remoe_cli.errors import RemoeError
from remoe_cli.hub.checkpoint import read_object
from remoe_cli.hub.failures import endpoint, explain, timeout
from remoe_cli.hub.resolve import fetch_repository
from remoe_cli.hub.waiting import ask

_FACTS = "remoe.json"
_MOST = 5  # whose facts are fetched
_FIGURES = ("cache", "hit_base", "hit_tuned", "misses_change", "perplexity_change")


def known_deltas(base: str, commit: str | None) -> list[dict[str, Any]]:
    """The repositories whose card names `base` ("org/name") as what they adapt and carries the tag `remoe`, most downloaded first,
    5 at most: id, same_commit (None where it is not told), and the flat figures of its report, empty where it has none.

    Raises HubError where the Hub cannot be asked.
    """
    try:
        names = ask(lambda: _listed([f"base_model:adapter:{base}", "remoe"]))
    except Exception as error:  # httpx's, the library's, or no JSON: explain tells them apart
        raise explain(error, base, "deltas of") from error
    return [_told(name, commit) for name in names]


def _listed(tags: list[str]) -> list[str]:
    """With one request; `list_models` would ask a Hub that fails five times more."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    asked = {"filter": tags, "sort": "downloads", "direction": "-1", "limit": str(_MOST)}
    answer = get_session().get(f"{endpoint()}/api/models", params=asked, headers=build_hf_headers(), timeout=timeout())
    hf_raise_for_status(answer)
    return [str(model["id"]) for model in answer.json()]


def _told(name: str, commit: str | None) -> dict[str, Any]:
    """One that cannot be read is named all the same."""
    try:
        folder, _ = fetch_repository(name, (_FACTS,))
        facts = read_object(folder / _FACTS)
    except RemoeError as error:
        note(f"Note: what {name} says of itself could not be read: {error.message}")
        facts = {}
    report, made_for = facts.get("report"), facts.get("commit")
    report = report if isinstance(report, dict) else {}
    figures = {key: report[key] for key in _FIGURES if _is_number(report.get(key))}
    return {"id": name, "same_commit": made_for == commit if made_for and commit else None, "report": figures}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
