"""Draws docs/pictures/*.svg for docs/concepts.md:  python docs/make_pictures.py

Loads and hits in them are counted by remoe's own cache. Colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from remoe_cli.cache import ExpertCache

HERE = Path(__file__).with_name("pictures")
WIDTH = 480
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1f2933 }
.small { font-size: 13px } .bold { font-weight: 600 } .middle { text-anchor: middle } .end { text-anchor: end }
.box { fill: #eef2f5; stroke: #9aa5b1 } .hit { fill: #2aa793; stroke: none } .miss { fill: #e07b39; stroke: none }
.soft { fill: #b9e3db; stroke: none } .on { fill: #fff } .line { stroke: #52606d; stroke-width: 1.5; fill: none }
.head { fill: #52606d } .dashed { stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
 text { fill: #e4e7eb } .box { fill: #2f3640; stroke: #7b8794 } .hit { fill: #1d8a78 } .miss { fill: #c2601f }
 .soft { fill: #2b5c54 } .on { fill: #fff } .line { stroke: #9aa5b1 } .head { fill: #9aa5b1 }
}"""


class Picture:
    """Shapes in a drawing WIDTH wide; colours are the classes of STYLE."""

    def __init__(self, name: str, title: str, height: int) -> None:
        self.name, self.title, self.height, self.parts = name, title, height, list[str]()

    def box(self, x: float, y: float, w: float, h: float, kind: str = "box", label: str = "", more: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" class="{kind}"/>')
        if label:
            on = " on" if kind in ("hit", "miss") else ""
            self.text(x + w / 2, y + h / 2 + 5, label, f"middle{on} {more}")

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, kind: str = "") -> None:
        self.parts.append(f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" class="line {kind}" marker-end="url(#head)"/>')

    def write(self) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" role="img">'
            f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" class="head"/></marker></defs>'
        )
        (HERE / f"{self.name}.svg").write_text("\n".join([head, *self.parts, "</svg>", ""]))


def routing() -> Picture:
    one = Picture("routing", "A router picks two of eight experts for a token", 230)
    one.box(10, 90, 80, 40, label="token")
    one.arrow(90, 110, 122, 110)
    one.box(125, 80, 90, 60, "soft", "router")
    one.text(170, 158, "gate + rule", "small middle")
    scores = (0.05, 0.31, 0.04, 0.08, 0.06, 0.29, 0.1, 0.07)
    for expert, score in enumerate(scores):
        y, chosen = 8 + 26 * expert, score > 0.2
        one.box(300, y, 70, 22, "hit" if chosen else "box", f"E{expert}", "small")
        one.box(380, y + 4, 260 * score, 14, "hit" if chosen else "soft")
        if chosen:
            one.arrow(215, 110, 297, y + 11)
    one.text(10, 20, "8 experts, 2 run", "bold")
    one.text(10, 40, "bars: how much the", "small")
    one.text(10, 57, "gate wants each", "small")
    return one


SCATTERED = [(0, 3), (1, 5), (0, 6), (2, 5), (3, 7), (0, 1)]
CACHEABLE = [(0, 3), (0, 3), (0, 6), (0, 6), (6, 7), (0, 6)]


def cache() -> Picture:
    """Six tokens of one layer, before and after tuning; each small box is an expert that the token uses."""
    one = Picture("cache", "The same cache serves scattered and cacheable routing", 330)
    for top, title, steps in (
        (0, "Base gates: neighbours share little", SCATTERED),
        (165, "Tuned gates: neighbours share more", CACHEABLE),
    ):
        hits, loads = 0, 0
        held = ExpertCache(3, "lru", n_experts=8)
        one.text(10, top + 22, title, "bold")
        for column, step in enumerate(steps):
            x = 10 + 78 * column
            one.text(x + 34, top + 45, f"token {column + 1}", "small middle")
            found = held.step(step)
            for row, expert in enumerate(step):
                there = expert in found.hits
                hits, loads = hits + there, loads + (not there)
                one.box(x, top + 52 + 32 * row, 68, 27, "hit" if there else "miss", f"E{expert}")
        one.text(10, top + 138, f"{loads} loads for {hits + loads} uses; 3 slots, LRU", "small")
    one.box(300, 317 - 12, 14, 12, "miss")
    one.text(319, 316, "loaded", "small")
    one.box(380, 317 - 12, 14, 12, "hit")
    one.text(399, 316, "was there", "small")
    return one


ORDER = "ABCABCADABCA"


def policies() -> Picture:
    """One expert a token, two slots; what each rule keeps after every token."""
    one = Picture("policies", "Which expert leaves decides how many are loaded", 330)
    one.text(10, 22, "What a layer asks for, token by token (2 slots)", "bold")
    future = ["ABCD".index(name) for name in ORDER]
    rules = (
        ("lru", "forced", "LRU: the longest unused leaves"),
        ("belady", "forced", "Belady: needed last leaves"),
        ("belady", "bypass", "Belady with bypass: may keep nothing new"),
    )
    for number, (policy, admission, title) in enumerate(rules):
        top = 40 + 98 * number
        held = ExpertCache(2, policy, n_experts=4, admission=admission, future=future if policy == "belady" else None)
        for at, name in enumerate(ORDER):
            found = held.step(["ABCD".index(name)])
            one.box(10 + 38 * at, top + 26, 34, 26, "hit" if found.hits else "miss", name)
            kept = "".join("ABCD"[expert] for expert in sorted(held.resident))
            one.text(27 + 38 * at, top + 68, kept, "small middle")
        one.text(10, top + 18, f"{title}: {held.misses} loads", "small")
    return one


def token() -> Picture:
    """Where the time of one layer goes; widths are only in proportion to what is typical when storage is slow."""
    one = Picture("token", "Loads run beside what can be computed without them", 250)
    one.text(10, 22, "One layer of one token, experts on disk", "bold")
    for row, (name, y) in enumerate((("compute", 60), ("disk", 120))):
        one.text(10, y + 18, name, "small")
        assert row < 2
    for x, w, kind, label in (
        (75, 70, "box", "attention"),
        (148, 48, "soft", "router"),
        (200, 90, "hit", "E3 is there"),
        (395, 75, "miss", "E6"),
    ):
        one.box(x, 60, w, 28, kind, label, "small")
    one.box(200, 120, 192, 28, "miss", "read E6", "small")
    one.box(293, 60, 99, 28, "box dashed", "wait", "small")
    one.arrow(196, 90, 204, 117)
    one.arrow(392, 117, 400, 91)
    one.text(10, 185, "Only the router knows what is missing, so nothing before it can", "small")
    one.text(10, 204, "hide a read. Shared experts and those in the cache can. What is", "small")
    one.text(10, 223, "left is the wait: fewer misses, less of it.", "small")
    return one


def terms() -> Picture:
    """The ReMoE objective, a panel a term."""
    one = Picture("terms", "What each term of the ReMoE objective pulls on", 370)
    one.text(10, 22, "Router probabilities of two neighbouring tokens", "bold")
    before, after = (0.32, 0.06, 0.27, 0.05, 0.16, 0.14), (0.1, 0.3, 0.22, 0.05, 0.08, 0.25)
    for x, title, values in ((40, "token t-1", before), (270, "token t", after)):
        one.text(x + 80, 48, title, "small middle")
        chosen = sorted(range(6), key=lambda expert: -values[expert])[:2]
        for expert, value in enumerate(values):
            kind = "hit" if expert in chosen else "soft"
            one.box(x + 28 * expert, 150 - 280 * value, 22, 280 * value, kind)
            one.text(x + 11 + 28 * expert, 167, str(expert), "small middle")
    lines = (
        ("cross entropy", "the text is still predicted"),
        ("trust", "stay near the gate as it was, token by token"),
        ("reuse", "probability at t on what t-1 executed (0 and 2)"),
        ("smooth, lag", "alike to the last token, and 1 to 16 before"),
        ("window", "few experts in all over 16 tokens"),
    )
    for row, (name, what) in enumerate(lines):
        one.text(116, 205 + 30 * row, name, "end bold small")
        one.text(128, 205 + 30 * row, what, "small")
    one.text(10, 358, "Strong colour: the two experts that run.", "small")
    return one


def flow() -> Picture:
    one = Picture("flow", "From a checkpoint to a delta and back into a runtime", 330)
    for x, y, w, label, kind in (
        (10, 10, 130, "checkpoint", "box"), (10, 60, 130, "texts", "box"), (190, 35, 110, "finetune", "soft"), (350, 35, 120, "delta, MB", "hit"),
        (350, 120, 120, "push / pull", "soft"), (350, 195, 120, "apply", "soft"), (190, 120, 110, "eval", "soft"), (10, 120, 130, "report", "box"),
    ):  # fmt: skip
        one.box(x, y, w, 36, kind, label)
    for x, y, to_x, to_y in (
        (140, 28, 187, 46),
        (140, 78, 187, 62),
        (300, 53, 347, 53),
        (410, 71, 410, 117),
        (350, 66, 303, 122),
        (187, 138, 143, 138),
        (410, 156, 410, 192),
        (410, 231, 410, 258),
    ):
        one.arrow(x, y, to_x, to_y)
    for x, form, runs in (
        (10, "copy", "any loader"),
        (128, "overlay", "vLLM, HF"),
        (246, "peft", "adapters"),
        (364, "gguf", "llama.cpp"),
    ):
        one.box(x, 262, 106, 34, "box", form)
        one.text(x + 53, 314, runs, "small middle")
    one.text(10, 240, "the tuned gates in the form you run", "small")
    return one


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for picture in (routing(), cache(), policies(), token(), terms(), flow()):
        picture.write()


if __name__ == "__main__":
    main()
