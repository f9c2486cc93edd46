"""Runs docs/notebook/demo.ipynb and keeps what it printed and drew:  python docs/make_notebook.py

The cells are written here; the file holds them with their outputs.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOK = Path(__file__).parent / "notebook" / "demo.ipynb"
CELLS = [
    """# Notebook

Tunes the gates of the embedded demo for a few steps, records which experts it uses before and after, and looks at what a cache would
make of that. No GPU, no download; about a minute. Few steps move gates a little: `make demo` does the whole of it.""",
    """import os
import tempfile

from remoe_cli.cli import app

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.chdir(tempfile.mkdtemp())  # runs and traces land here


def remoe(command):
    app(command.split(), standalone_mode=False)


remoe("inspect demo --cache 8")""",
    """## Tune

Everything but the gates is frozen. One line a progress note: the loss, its terms, and EOR, the share of experts that neighbouring
tokens have in common.""",
    """remoe("finetune demo --steps 40 --set train.micro_batch=2 --set train.lr=2e-3 --set evaluate.rows=16 --out run")""",
    """## Record

Held-out text is fed token by token, the same for both; the trace says which experts each token used in each layer.""",
    """for name, delta in ("base", ""), ("tuned", "--delta run"):
    remoe(f"trace demo {delta} --requests 8 -o {name}.trace")""",
    """## Look

`experts` has a row a token, a layer, a choice.""",
    """from pathlib import Path

from remoe_cli.report import locality
from remoe_cli.routing import read

traces = {name: read(Path(f"{name}.trace")) for name in ("base", "tuned")}
for name, trace in traces.items():
    print(f"{name}: {trace.experts.shape} tokens, layers, experts; EOR {locality.eor(trace):.3f}")""",
    """Experts of one layer, token by token: dark where the token before used the same one.""",
    """import matplotlib.pyplot as plt
import numpy as np

figure, panels = plt.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
for panel, (name, trace) in zip(panels, traces.items()):
    chosen = trace.experts[trace.borders[0] : trace.borders[1], 2][~trace.prefill[: trace.borders[1]]][:64]
    kept = [np.isin(now, before) for before, now in zip(chosen, chosen[1:])]
    for token, (experts, again) in enumerate(zip(chosen[1:], kept), 1):
        panel.scatter([token] * len(experts), experts, c=np.where(again, "#12705f", "#e0a37a"), s=12, marker="s")
    panel.set(title=f"{name}: {np.mean(kept):.0%} used by the token before", ylabel="expert")
panels[-1].set_xlabel("decoded token")
plt.show()""",
    """## What a cache makes of it

LRU hits at every cache size, from one pass over the trace.""",
    """from remoe_cli.cache.curve import lru_curve

plt.figure(figsize=(8, 3.5), layout="constrained")
for name, trace in traces.items():
    accesses = (~trace.prefill).sum() * trace.experts.shape[1] * trace.experts.shape[2]
    hits = lru_curve(trace).sum(0) / accesses
    plt.plot(range(6, 65), hits[6:], label=name)
    print(f"{name}: LRU hit at 6, 8, 12 slots a layer: " + ", ".join(f"{hits[size]:.3f}" for size in (6, 8, 12)))
plt.xlabel("expert slots a layer")
plt.ylabel("hit ratio")
plt.legend()
plt.show()""",
    """## Decode

The same, for real: experts stay on disk, eight of them a layer in memory.""",
    """remoe("decode demo --delta run --cache 8 --prompt def --tokens 24")""",
    """From here: [the report](../report.md) of `remoe eval`, [every policy](../replay.md) by `remoe replay`, and
[the concepts](../concepts.md) behind the words.""",
]


def run(shorter: bool = False) -> nbformat.NotebookNode:
    """The notebook with its outputs. Raises where a cell does. shorter: trained and measured on next to nothing, for tests."""
    kinds = [new_markdown_cell if text.startswith("#") or not _is_code(text) else new_code_cell for text in CELLS]
    cells = [kind(text, id=f"cell-{number}") for number, (kind, text) in enumerate(zip(kinds, CELLS))]
    if shorter:
        for cell in cells:
            cell.source = cell.source.replace("--steps 40", "--steps 2").replace("rows=16", "rows=2")
    book = new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    NotebookClient(book, timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    for cell in book.cells:
        if cell.cell_type == "code":
            joined(cell)
    return book


def joined(cell: nbformat.NotebookNode) -> None:
    """Text that follows text becomes one output (rich shows each line by itself); what tqdm says of widgets goes."""
    kept: list[nbformat.NotebookNode] = []
    for one in cell.outputs:
        data = one.get("data", {})
        if any(kind.startswith("image/") for kind in data):
            kept.append(one)
            continue
        text = one.get("text", data.get("text/plain", ""))
        if "TqdmWarning" in text:
            continue
        if kept and kept[-1].output_type == "stream":
            kept[-1].text += text
        else:
            kept.append(new_output("stream", name="stdout", text=text))
    cell.outputs = kept


def _is_code(text: str) -> bool:
    try:
        compile(text, "cell", "exec")
    except SyntaxError:
        return False
    return True


if __name__ == "__main__":
    nbformat.write(run(), NOTEBOOK)
