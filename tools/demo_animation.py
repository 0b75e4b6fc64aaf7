"""Draws a race of ``farsight demo --record FILE`` as an animated SVG, which plays in a README without a script.

``python -m tools.demo_animation FILE docs/race.svg``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 920, 430
PANEL_WIDTH, PANEL_HEIGHT, TOP = 440, 330, 74
PLAY_S = 12.0
HOLD_S = 5.0
"""Seconds that the whole race takes, and that its end stands still."""

FRAMES = 40
"""Times that the running means change."""

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1f26; } .small { font-size: 11px; fill: #5b6472; }
.name { font-weight: 650; font-size: 15px; } .big { font-size: 22px; font-weight: 650; }
.wait { fill: #d8bd7a; } .k0 { fill: #2f62c9; } .k1 { fill: #1f8a62; } .pause { fill: #8f98a6; }
.kill { stroke: #a81f1f; stroke-width: 1.5; stroke-dasharray: 5 3; } .frame { fill: #ffffff; stroke: #dfe2e7; }
"""

Lane = list[Any]
"""``[due, first token, last token, ended, pauses]``, seconds; see ``RaceLane.row``."""


def drawing(view: dict[str, Any]) -> str:
    """The SVG.

    Args:
        view: What ``--record`` wrote.

    Raises:
        ValueError: Not every request has ended.
    """
    if not view["over"]:
        raise ValueError("the race was ended before all of its requests were")
    horizon = max(lane[2] for side in view["sides"] for lane in side["lanes"] if lane[2] is not None)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(_summary(view))}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#f4f5f7" rx="10"/>',
    ]
    kinds = sorted(set(view["kinds"]))
    tones = [("wait", "waiting"), *((f"k{i}", kind or "answering") for i, kind in enumerate(kinds[:2]))]
    parts += _legend([*tones, ("pause", "paused")])
    for index, side in enumerate(view["sides"]):
        parts += _panel(index, side, view, horizon)
    broken = sum(side["broken"] for side in view["sides"])
    says = "" if view["simulated"] is None else f"; the simulator says {view['simulated']:.2f}"
    parts.append(
        f'<text class="small" x="15" y="{HEIGHT - 8}">The same {len(view["kinds"])} requests on two emulated A100s,'
        f" live. Ratio of the means at the end: {view['ratio']:.2f}{says}. {broken} broken streams.</text>"
    )
    return "\n".join([*parts, "</svg>\n"])


def _summary(view: dict[str, Any]) -> str:
    names = " and ".join(side["preset"] for side in view["sides"])
    return f"Requests under {names} side by side; ratio of mean completion times {view['ratio']:.2f}"


def _legend(tones: list[tuple[str, str]]) -> Iterator[str]:
    for number, (name, text) in enumerate(tones):
        left = WIDTH - 15 - 76 * (len(tones) - number)
        yield f'<rect class="{name}" x="{left}" y="17" width="10" height="10" rx="2"/>'
        yield f'<text class="small" x="{left + 15}" y="26">{escape(text)}</text>'


def _panel(index: int, side: dict[str, Any], view: dict[str, Any], horizon: float) -> Iterator[str]:
    left = 15 + index * (PANEL_WIDTH + 10)
    yield f'<text class="name" x="{left}" y="26">{escape(side["preset"])}</text>'
    yield f'<text class="small" x="{left}" y="62">mean completion of the requests that have ended</text>'
    yield from _means(left, side["lanes"], horizon)
    yield f'<rect class="frame" x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" rx="6"/>'
    yield f'<clipPath id="c{index}"><rect x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}">'
    yield _sweep("width", 0, PANEL_WIDTH)
    yield f'</rect></clipPath><g clip-path="url(#c{index})">'
    kinds = sorted(set(view["kinds"]))
    row = PANEL_HEIGHT / len(side["lanes"])
    for number, lane in enumerate(side["lanes"]):
        kind = kinds.index(view["kinds"][number]) % 2
        yield from _bars(lane, kind, left, TOP + number * row, row, PANEL_WIDTH / horizon)
    for instant in side["kills"]:
        at = left + instant * PANEL_WIDTH / horizon
        yield f'<line class="kill" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + PANEL_HEIGHT}"/>'
        yield f'<text class="small" x="{at + 4:.1f}" y="{TOP + 14}">SIGKILL</text>'
    yield "</g>"


def _bars(lane: Lane, kind: int, left: float, top: float, row: float, scale: float) -> Iterator[str]:
    due, first, last, _, pauses = lane
    if first is None:
        return
    for name, began, ended in [("wait", due, first), (f"k{kind}", first, last), *(("pause", *pair) for pair in pauses)]:
        yield (
            f'<rect class="{name}" x="{left + began * scale:.1f}" y="{top:.1f}"'
            f' width="{max((ended - began) * scale, 0.6):.1f}" height="{0.8 * row:.1f}"/>'
        )


def _means(left: float, lanes: list[Lane], horizon: float) -> Iterator[str]:
    """A text for each frame, seen during that frame alone; the last one stays."""
    whole = PLAY_S + HOLD_S
    for frame in range(FRAMES):
        now = horizon * (frame + 1) / FRAMES
        ended = [lane[2] - lane[0] for lane in lanes if lane[2] is not None and lane[2] <= now]
        text = f"{fmean(ended):.1f} s" if ended else "-"
        begin = PLAY_S * frame / FRAMES / whole
        end = 1.0 if frame == FRAMES - 1 else PLAY_S * (frame + 1) / FRAMES / whole
        shown = "1" if frame == FRAMES - 1 else "0"
        values, times = ("1;0", f"0;{end:.4f}") if not frame else ("0;1;0", f"0;{begin:.4f};{end:.4f}")
        yield (
            f'<text class="big" x="{left}" y="48" opacity="{shown}">{text}<animate attributeName="opacity"'
            f' calcMode="discrete" values="{values}" keyTimes="{times}" dur="{whole}s"'
            f' repeatCount="indefinite"/></text>'
        )


def _sweep(attribute: str, begin: float, end: float) -> str:
    played = PLAY_S / (PLAY_S + HOLD_S)
    return (
        f'<animate attributeName="{attribute}" values="{begin};{end};{end}" keyTimes="0;{played:.4f};1"'
        f' dur="{PLAY_S + HOLD_S}s" repeatCount="indefinite"/>'
    )


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    target.write_text(drawing(json.loads(source.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"written: {target}")


if __name__ == "__main__":
    main()
