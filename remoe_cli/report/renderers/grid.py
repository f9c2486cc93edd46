"""A table of aligned columns for a terminal of any width: figures are never cut, columns that do not fit go below."""

from collections.abc import Callable, Sequence

GAP = "  "


def grid(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    left: int = 1,
    align: Callable[[str, int], str] = str.ljust,
) -> list[str]:
    """Lines; the first `left` columns begin each block, aligned so, the others stand right. rows: of texts, as long as `heads`.

    Where not even one column fits beside those: each row as its first columns, and below them a line a figure.
    """
    table = [list(heads), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    fixed = sum(widths[:left]) + len(GAP) * (left - 1)
    blocks: list[list[int]] = []
    room = 0
    for at, wide in enumerate(widths[left:], left):
        if fixed + len(GAP) + wide > width:
            return _stacked(heads, rows, left)
        if not blocks or wide + len(GAP) > room:
            blocks.append([])
            room = width - fixed
        blocks[-1].append(at)
        room -= wide + len(GAP)
    lines: list[str] = []
    for block in blocks or [[]]:
        if lines:
            lines.append("")
        for row in table:
            cells = [align(row[at], widths[at]) for at in range(left)] + [row[at].rjust(widths[at]) for at in block]
            lines.append(GAP.join(cells).rstrip())
    return lines


def _stacked(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    lines = []
    for row in rows:
        lines.append(GAP.join(filter(None, row[:left])).rstrip())
        indent = " " * (len(lines[-1]) - len(lines[-1].lstrip()) + len(GAP))
        lines += [f"{indent}{head}: {cell}" for head, cell in zip(heads[left:], row[left:]) if cell]
    return lines
