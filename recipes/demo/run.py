"""make demo: the whole way on the embedded checkpoint, by the commands a user would type.

    python recipes/demo/run.py [FOLDER]

Trains ce-only (the control) and remoe, compares them, pushes to a folder, applies that folder to the base and checks that
the patched checkpoint has the tuned perplexity. Everything lands in FOLDER (demo-out).
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from remoe_cli.environment import pick_device
from remoe_cli.families import find_gates
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.sample import measure_heldout
from remoe_cli.report.renderers.terminal import terminal
from remoe_cli.report.verdict import verdict
from remoe_cli.run import Run
from remoe_cli.train.data import load_documents, load_tokenizer


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out")
    shutil.rmtree(out, ignore_errors=True)
    begin = time.time()
    control, tuned, pushed, patched = (str(out / name) for name in ("ce-only", "remoe", "pushed", "patched"))
    remoe("finetune", "demo", "--recipe", "ce-only", "--out", control)
    remoe("finetune", "demo", "--out", tuned)
    remoe("eval", tuned, "--control", control, "--cache", "8,12", "--threads", "1", quiet=True)
    remoe("push", tuned, "--to", pushed)
    remoe("apply", pushed, "demo", "--out", patched)
    report = json.loads(Path(tuned, "report.json").read_text())
    found, expected = perplexity(Path(patched), Run(Path(tuned))), report["arms"][-1]["text"]["perplexity"]
    agree = f"{found:.4f}" == f"{expected:.4f}"
    print(
        f"\nPatched checkpoint {patched}: perplexity {found:.4f}, tuned {expected:.4f}: {'equal' if agree else 'NOT EQUAL'}\n"
    )
    print(terminal(report))
    print(f"{verdict(report)}\n")
    print(f"{time.time() - begin:.0f} s in all. Pushed folder: {pushed} (README.md is its card)")
    print(f"With pictures: {Path(tuned, 'report.html').resolve().as_uri()}")
    if not agree:
        sys.exit("error: the pushed delta does not reproduce the tuned perplexity.")


def remoe(*arguments: str, quiet: bool = False) -> None:
    print(f"\n$ remoe {' '.join(arguments)}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "remoe_cli", *arguments], check=True, stdout=subprocess.DEVNULL if quiet else None
    )


def perplexity(folder: Path, run: Run) -> float:
    """Held-out perplexity of a checkpoint folder, measured as the run was."""
    import torch

    recipe, checkpoint = run.recipe, resolve(str(folder))
    model = load_resident(checkpoint, getattr(torch, run.facts["dtype"]), pick_device(None))
    documents = load_documents(recipe.data, load_tokenizer(checkpoint), seed=recipe.train.seed)
    return measure_heldout("patched", model, find_gates(model), documents.heldout, recipe).measures().perplexity


if __name__ == "__main__":
    main()
