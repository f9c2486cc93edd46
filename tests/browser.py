"""A page in a headless Chromium: what its console said, and what is wider than the window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_TOO_WIDE = """() => [...document.querySelectorAll("body *")]
    .filter(one => !one.closest("svg svg, svg *, details:not([open]) > *, [data-scrolls]"))
    .filter(one => { const box = one.getBoundingClientRect(); return box.width && box.right > document.documentElement.clientWidth + 0.5 })
    .map(one => one.tagName + ": " + one.textContent.trim().slice(0, 60))"""
_CLIPPED = """() => [...document.querySelectorAll("figure svg")].flatMap(svg => {
    const whole = svg.getBoundingClientRect()
    return [...svg.querySelectorAll("text")]
        .filter(one => { const box = one.getBoundingClientRect(); return box.left < whole.left - 6 || box.right > whole.right + 6 })
        .map(one => one.textContent)
})"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def faults(browser: Any, page: Path, width: int, scheme: str, picture: Path | None = None) -> list[str]:
    """Console errors, requests for other files, and what does not fit in a window of that width. scheme: light or dark."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view = context.new_page()
    found: list[str] = []
    view.on(
        "console", lambda said: found.append(f"console: {said.text}") if said.type in ("error", "warning") else None
    )
    view.on("pageerror", lambda error: found.append(f"error: {error}"))
    view.on(
        "request",
        lambda asked: (
            found.append(f"request: {asked.url}")
            if asked.url != page.as_uri() and not asked.url.startswith("data:")
            else None
        ),
    )
    view.goto(page.as_uri())
    view.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    found += [f"too wide: {one}" for one in view.evaluate(_TOO_WIDE)] + [
        f"clipped: {one}" for one in view.evaluate(_CLIPPED)
    ]
    if view.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
        found.append("the page scrolls sideways")
    if picture is not None:
        view.screenshot(path=str(picture), full_page=True)
    context.close()
    return found
