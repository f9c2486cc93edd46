"""The documentation site: builds strictly, a wrong link stops it, and its pages fit a phone and a desk in a real browser."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from browser import chromium

pytest.importorskip("material", reason="make docs needs the group docs")
ROOT = Path(__file__).parent.parent
SHOTS = os.environ.get("REMOE_SHOTS")  # a folder for pictures of every page, to look at
SCROLLS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def build(config: Path, site: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    ran = build(ROOT / "mkdocs.yml", folder)
    assert ran.returncode == 0, ran.stderr
    return folder


def test_wrong_links_stop_the_build(tmp_path):
    for name in ("docs", "recipes", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    with open(tmp_path / "docs" / "faq.md", "a") as page:
        page.write("\n[x](nowhere.md) [x](glossary.md#no-such-word) [x](../recipes/none.yaml)\n")
    ran = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert ran.returncode != 0
    for word in ("nowhere.md", "no-such-word", "none.yaml"):
        assert word in ran.stderr


def test_every_page_is_listed_for_readers_that_are_programs(site):
    listed = re.findall(r"^- \[.+\]\((\S+)\): \S", (site / "llms.txt").read_text(), re.M)
    assert set(listed) == {path.relative_to(site).as_posix() for path in site.glob("**/*.html")} - {"404.html"}


def test_pages_fit_and_ask_for_nothing_elsewhere(site):
    with chromium() as browser:
        found = [*looked_at(browser, site, 360, "dark"), *looked_at(browser, site, 1280, "light")]
    assert not found, "\n".join(found)


def looked_at(browser, site: Path, width: int, scheme: str) -> list[str]:
    """What is wrong with the pages at that width."""
    found: list[str] = []
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view.on("console", lambda said: found.append(f"{view.url}: {said.text}") if said.type == "error" else None)
    view.on("pageerror", lambda error: found.append(f"{view.url}: {error}"))
    view.on("request", lambda asked: None if asked.url.startswith(site.as_uri()) else found.append(asked.url))
    for page in sorted({*site.glob("**/*.html")} - {site / "404.html"}):
        view.goto(page.as_uri())
        if view.evaluate(SCROLLS):
            found.append(f"{page.name} scrolls sideways at {width}")
        if SHOTS:
            view.screenshot(path=Path(SHOTS, f"{page.relative_to(site).with_suffix('')}-{width}.png"), full_page=True)
    return found


def test_a_page_that_is_too_wide_is_seen(tmp_path):
    (tmp_path / "wide.html").write_text("<div style='width:2000px'>wide</div>")
    with chromium() as browser:
        view = browser.new_page(viewport={"width": 360, "height": 900})
        view.goto((tmp_path / "wide.html").as_uri())
        assert view.evaluate(SCROLLS)
