"""The picture of the README that compares: output tokens per second beside vLLM, from the table of the results page."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = "performance_lab.md"
PICTURE = "beside_vllm.svg"
_ROW = re.compile(r"^\| ((?:tiny|medium), [\w-]+(?:, n \d+)?, \d+) \| (\d+) / (\d+): \*\*([\d.]+)\*\*", re.MULTILINE)
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 760, 190, 13, 16, 46


def beside_vllm(docs: Path) -> str:
    """An SVG with two bars for each row of the table "Beside vLLM on one to three threads" that compares with vLLM.

    Raises:
        ValueError: The page has no such row.
    """
    rows = [(name, int(vllm), int(ours), ratio) for name, vllm, ours, ratio in _ROW.findall((docs / PAGE).read_text())]
    if not rows:
        raise ValueError(f"{PAGE} has no row that compares")
    scale = (_WIDTH - _LEFT - 110) / max(max(vllm, ours) for _, vllm, ours, _ in rows)
    height = _TOP + len(rows) * (2 * _BAR + _GAP) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="22" font-size="14" fill="#1b1f24">Output tokens per second through HTTP, one compute thread '
        "(more is better)</text>",
    ]
    for i, (name, vllm, ours, ratio) in enumerate(rows):
        y = _TOP + i * (2 * _BAR + _GAP)
        lines.append(
            f'<text x="{_LEFT - 10}" y="{y + 17}" font-size="12" text-anchor="end" fill="#1b1f24">{name}</text>'
        )
        lines += _bar(y, vllm, scale, "#9aa4af", f"vLLM {vllm:,}")
        lines += _bar(y + _BAR, ours, scale, "#1f6feb", f"Farsight {ours:,} ({ratio} x)")
    return "\n".join([*lines, "</svg>", ""])


def _bar(y: int, value: int, scale: float, colour: str, label: str) -> list[str]:
    width = value * scale
    return [
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" fill="{colour}"/>',
        f'<text x="{_LEFT + width + 6:.1f}" y="{y + 10}" font-size="11" fill="#1b1f24">{label}</text>',
    ]
