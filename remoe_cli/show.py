"""remoe report: reports as a table, as one HTML file, and as a picture for a card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.errors import RunError, UsageError
from remoe_cli.report.charts import HEADLINE, headline_png
from remoe_cli.report.renderers.html import html
from remoe_cli.report.stored import beside, read
from remoe_cli.report.verdict import verdict

PAGE = "report.html"


class Shown(NamedTuple):
    """report: the one, or several side by side; verdict: in a sentence; written: page and picture."""

    report: dict[str, Any]
    verdict: str
    written: list[Path]


def show(names: Sequence[str], out: Path | None = None) -> Shown:
    """Of runs, folders or report.json files, without a name the latest run that was evaluated. Writes the page to `out`, by default
    beside the only report, else to ./report.html; a picture goes beside it.

    Raises RunError where there is no report or they do not belong together, UsageError for an `out` that is no .html file.
    """
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: the page is an .html file.", f"remoe report --out {out.with_suffix('.html')}")
    files = [_file(name) for name in names] or [_latest()]
    reports = [read(file) for file in files]
    report = reports[0] if len(reports) == 1 else beside(reports, [str(name) for name in names])
    page = out or (files[0].with_name(PAGE) if len(files) == 1 else Path(PAGE))
    return Shown(report, verdict(report), write(report, page))


def write(report: dict[str, Any], page: Path) -> list[Path]:
    """The page, and the picture of its headline beside it. Returns both paths."""
    picture = page.with_name(HEADLINE if page.name == PAGE else f"{page.stem}.png")
    atomic.write(page, html(report))
    with atomic.new_file(picture) as stream:
        stream.write(headline_png(report, verdict(report)))
    return [page, picture]


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path
    if (path / "report.json").is_file():
        return path / "report.json"
    return runs.named(name).report


def _latest() -> Path:
    found = [run.report for run in runs.every() if run.report.is_file()]
    if not found:
        raise RunError(f"there is no evaluated run in {runs.ROOT.resolve()} yet.", "remoe eval --cache 6")
    return found[-1]
