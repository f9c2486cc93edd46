"""Rewrites the table of docs/families.md from remoe_cli/families/table.py and tests/conformance/rows.py.

python docs/make_families.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from remoe_cli.families import FAMILIES, Family, Score

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- begin: python docs/make_families.py -->", "<!-- end -->"
SUITES = ("gates", "names", "choice", "training", "gradient", "delta", "peft", "offload", "streamed")


def table() -> str:
    """Markdown, a row a family."""
    sys.path.insert(0, str(ROOT / "tests"))
    from conformance.rows import ROWS

    head = [
        "model type",
        "gate on disk",
        "score",
        "K weights",
        "selection bias",
        "loads too",
        "offload",
        "streamed",
        "GGUF",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in sorted(FAMILIES):
        family, row = FAMILIES[name], ROWS[name]
        cells = [
            f"`{name}`",
            " ".join(f"`{family.disk_name(0, tensor).partition('.0.')[2]}`" for tensor in family.tensors),
            _score(family),
            _weights(family),
            f"`{family.bias.rpartition('.')[2]}`" if family.bias else "",
            " ".join(f"`{wrapper}`" for wrapper in family.wrappers),
            "no" if "offload" in row.gaps else "yes",
            "no" if "streamed" in row.gaps else "yes",
            row.gguf.lower(),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    passed = {suite: sum(suite not in row.gaps for row in ROWS.values()) for suite in SUITES}
    passed["gguf"] = sum(bool(row.gguf) for row in ROWS.values())
    counts = ", ".join(f"{suite} {count}" for suite, count in passed.items())
    return "\n".join([f"{len(ROWS)} families; rows of the suite that pass: {counts}.", "", *lines])


def page() -> str:
    """The whole document, its table anew."""
    before, _, rest = DOC.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def _score(family: Family) -> str:
    return family.score.name if isinstance(family.score, Score) else "by configuration"


def _weights(family: Family) -> str:
    if not family.reroutes:
        return "of their own kind"
    always, never = (family.renormalised({"norm_topk_prob": on, "moe_renormalize": on}) for on in (True, False))
    if always != never:
        return "by configuration"
    return "sum to 1" if always else "P x factor"


if __name__ == "__main__":
    DOC.write_text(page())
