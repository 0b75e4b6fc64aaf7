"""The README's picture that compares: tokens a second of real chats beside other servers, from the results page."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = "performance.md"
PICTURE = "chats.svg"
_TABLE = re.compile(r"^\| ([\w.-]+), in flight \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^\| (\d+) \| ([\d,.]+) / ([\d,.]+): \**([\d.]+)", re.MULTILINE)
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 760, 190, 13, 16, 46


def chats_picture(docs: Path) -> str:
    """An SVG with two bars for each row of the page's tables of chats, of which each names its server in the head.

    Raises:
        ValueError: The page has no such row.
    """
    rows = [
        (server, in_flight, float(theirs), float(ours), ratio)
        for server, table in _TABLE.findall((docs / PAGE).read_text("utf-8"))
        for in_flight, theirs, ours, ratio in _ROW.findall(table)
    ]
    if not rows:
        raise ValueError(f"{PAGE} has no row that compares")
    scale = (_WIDTH - _LEFT - 150) / max(max(theirs, ours) for _, _, theirs, ours, _ in rows)
    height = _TOP + len(rows) * (2 * _BAR + _GAP) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="22" font-size="14" fill="#1b1f24">Real chats with SmolLM2, two processors, output tokens a '
        "second</text>",
    ]
    for i, (server, in_flight, theirs, ours, ratio) in enumerate(rows):
        y = _TOP + i * (2 * _BAR + _GAP)
        lines.append(
            f'<text x="{_LEFT - 10}" y="{y + 17}" font-size="12" text-anchor="end" fill="#1b1f24">'
            f"{in_flight} in flight</text>"
        )
        lines += _bar(y, theirs, scale, "#9aa4af", f"{server} {theirs:.0f}")
        lines += _bar(y + _BAR, ours, scale, "#1f6feb", f"Farsight {ours:.0f} ({ratio} x)")
    return "\n".join([*lines, "</svg>", ""])


def _bar(y: int, value: float, scale: float, colour: str, label: str) -> list[str]:
    width = value * scale
    return [
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" fill="{colour}"/>',
        f'<text x="{_LEFT + width + 6:.1f}" y="{y + 10}" font-size="11" fill="#1b1f24">{label}</text>',
    ]
