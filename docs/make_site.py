"""What the site adds to docs/ when mkdocs builds it.

Files elsewhere in the repository that a page links to become part of the site, so that one link serves both; the notebook becomes
a page; guides that mkdocs.yml does not name are listed all the same; and llms.txt lists every page with its first sentence
(https://llmstxt.org).
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "recipes/demo/README.md",
    "recipes/**/*.yaml",
    "docs/**/*.ipynb",
)
RENAMED = {
    "README.md": "readme.md",
    "docs/notebook/demo.ipynb": "notebook.md",
}  # mkdocs takes a README.md for its front page
LINK = re.compile(r"(\]\()([^)#\s]+)")
_listed: dict[str, str] = {}  # a page's line in llms.txt


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Nav: every command's page, and the guides that are not named."""
    sections = {next(iter(entry)): next(iter(entry.values())) for entry in config.nav if isinstance(entry, dict)}
    docs = Path(config.docs_dir)
    sections["Commands"] += [f"commands/{path.name}" for path in sorted((docs / "commands").glob("*.md"))]
    named = {
        page for entry in config.nav for page in (sections[next(iter(entry))] if isinstance(entry, dict) else [entry])
    }
    sections["Guides"] += sorted({path.name for path in docs.glob("*.md")} - named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix == ".ipynb":
                files.append(File.generated(config, RENAMED[name], content=notebook(json.loads(path.read_text()))))
            else:
                files.append(File.generated(config, RENAMED.get(name, name), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links, as they are right in the repository, to where the site has what they mean."""
    name = page.file.src_uri
    source = next((old for old, new in RENAMED.items() if new == name), name)
    folder = posixpath.dirname(source if (ROOT / source).exists() else f"docs/{source}")

    def moved(found: re.Match) -> str:
        target = found[2]
        if re.match(r"[a-z]+:", target):
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, target))
        place = RENAMED.get(place, place.removeprefix("docs/"))
        return found[1] + posixpath.relpath(place, posixpath.dirname(name) or ".")

    _listed[name] = f"- [{page.title}]({page.file.url}): {first_sentence(markdown) or page.title}"
    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for entry in config.nav:
        title, pages = next(iter(entry.items())) if isinstance(entry, dict) else ("", [entry])
        lines += [f"## {title}", ""] if title else []
        lines += [*(_listed[page] for page in pages), ""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines))


def first_sentence(markdown: str) -> str:
    """Of the first paragraph that is plain text."""
    for block in re.split(r"\n\s*\n", re.sub(r"<!--.*?-->", "", markdown, flags=re.S)):
        if re.match(r"[A-Za-z`\[*]", block):
            text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", " ".join(block.split()))
            return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0]
    return ""


def notebook(content: dict) -> str:
    """Markdown of a notebook: its texts, its code and what that printed."""
    parts = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![]({'data:image/png;base64,' + ''.join(data['image/png']).strip()})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"
