"""The page of ``farsight replay --trace``: one file without outside resources, light or dark as its reader's system."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

_WHERE = {
    "device": "found on the device",
    "host": "brought back from the host",
    "disk": "brought back from disk",
    "new": "computed: new",
    "again": "computed again",
}
"""Where prompt tokens came from, in the order in which bars show it."""

_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --surface: #fff; --line: #dfe2e7; --text: #1b1f26; --muted: #5b6472;
  --device: #2f62c9; --host: #1f8a62; --disk: #8a4fbf; --new: #b0892a; --again: #b8336a; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --surface: #1d2128; --line: #323843;
  --text: #e7eaef; --muted: #9aa4b2;
  --device: #7ea2ec; --host: #63c79d; --disk: #bd93e8; --new: #dcc06a; --again: #ec86b0; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 20px 24px; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1080px; margin: 0 auto; display: grid; gap: 14px; }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 15px; margin: 0 0 8px; }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  min-width: 0; }
p { margin: 4px 0 0; } .note { color: var(--muted); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; }
.cards b { display: block; font-size: 26px; line-height: 1.2; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 4px 10px 4px 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--muted); font-weight: 550; font-size: 12px; }
tbody tr { border-top: 1px solid var(--line); }
.row { display: grid; grid-template-columns: 90px minmax(0, 1fr); gap: 10px; align-items: center; margin: 6px 0; }
.bar { display: flex; height: 22px; border-radius: 4px; overflow: hidden; background: var(--line); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.device { background: var(--device); } .host { background: var(--host); } .disk { background: var(--disk); }
.new { background: var(--new); } .again { background: var(--again); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--muted); font-size: 12px; }
svg .grid { stroke: var(--line); } svg path { fill: none; stroke-width: 2; }
svg .c0 { stroke: var(--again); } svg .c1 { stroke: var(--host); } svg .c2 { stroke: var(--device); }
svg text.c0, svg text.c1, svg text.c2 { stroke: none; font-weight: 600; }
svg text.c0 { fill: var(--again); } svg text.c1 { fill: var(--host); } svg text.c2 { fill: var(--device); }
"""


def report_page(report: Mapping[str, Any], title: str) -> str:
    """Returns the page of a report.

    Args:
        report: What ``--json`` prints.
        title: One line that says what was replayed, as text.
    """
    runs, ratios = report["runs"], report["ratios"]
    cards = (
        (_number(runs[1]["turn_s"]["mean"], "s"), "mean turn with tiers", _against(ratios["turn_mean_to_one_tier"])),
        (_number(runs[1]["turn_s"]["p99"], "s"), "99th percentile", _against(ratios["turn_p99_to_one_tier"])),
        (_ratio(ratios["computed_to_new"]), "prompt tokens computed, per new token", _one_tier(ratios)),
        (_ratio(ratios["turn_mean_to_all_kept"]), "mean turn, beside a memory without end", "1 is the bound"),
    )
    shown = "".join(f"<section><b>{value}</b>{what}<p class=note>{note}</p></section>" for value, what, note in cards)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Farsight: replay</title><style>{_STYLE}</style></head>
<body><main>
<header><h1>Replay</h1><p class="note">{html.escape(title)}</p></header>
<div class="cards">{shown}</div>
<section><h2>Where prompt tokens came from</h2>{_sources(runs)}</section>
<section><h2>Seconds of a turn, by percentile</h2>{_curves(runs)}</section>
<section><h2>Runs</h2><div class="scroll">{_runs(runs)}</div></section>
<section><h2>By class of turn</h2><div class="scroll">{_classes(runs)}</div></section>
</main></body></html>
"""


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{f' {unit}' if unit else ''}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _against(value: float | None) -> str:
    return f"{_ratio(value)} of one tier's"


def _one_tier(ratios: Mapping[str, float | None]) -> str:
    return f"{_ratio(ratios['one_tier_computed_to_new'])} with one tier"


def _parts(run: Mapping[str, Any]) -> dict[str, int]:
    """Returns the prompt tokens of a run by where they came from, in the order of bars."""
    again = run["computed_again_tokens"]
    found = {**run["hits"], "new": run["computed_tokens"] - again, "again": again}
    return {name: found[name] for name in _WHERE}


def _sources(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for run in runs:
        parts = _parts(run)
        whole = sum(parts.values()) or 1
        bars = "".join(
            f'<span class="{name}" style="width:{100 * num / whole:.3f}%" title="{_WHERE[name]}: {num:,}"></span>'
            for name, num in parts.items()
            if num
        )
        rows.append(f'<div class="row"><span>{html.escape(run["name"])}</span><div class="bar">{bars}</div></div>')
    key = "".join(f'<span><i class="{name}"></i>{text}</span>' for name, text in _WHERE.items())
    return f'{"".join(rows)}<div class="key">{key}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "",
        "turns",
        "sessions",
        "mean s",
        "p99 s",
        "first token s",
        "session in model s",
        "computed",
        "computed again",
        "busy",
    )
    rows = [
        (
            run["name"],
            f"{run['turns']:,}",
            f"{run['sessions']:,}",
            _number(run["turn_s"]["mean"]),
            _number(run["turn_s"]["p99"]),
            _number(run["first_token_s"]["mean"]),
            _number(run["program_s"]["mean"]),
            f"{run['computed_tokens']:,}",
            f"{run['computed_again_tokens']:,}",
            f"{run['busy_share']:.0%}",
        )
        for run in runs
    ]
    return _table(head, rows)


def _classes(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ["", "turns"]
    for run in runs:
        head += [f"{run['name']}: mean s", "p99 s"]
    rows = []
    for kind, first in runs[0]["by_class"].items():
        cells = [kind, f"{first['turns']:,}"]
        for run in runs:
            times = run["by_class"].get(kind, {"turn_s": {"mean": None, "p99": None}})["turn_s"]
            cells += [_number(times["mean"]), _number(times["p99"])]
        rows.append(cells)
    return _table(head, rows)


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1000, 300, 60, 30


def _curves(runs: Sequence[Mapping[str, Any]]) -> str:
    """Draws the percentiles 1 to 99 of each run, seconds on a logarithmic axis."""
    values = [each for run in runs for each in run["turn_percentiles_s"] if each > 0]
    if not values:
        return '<p class="note">No turn has ended.</p>'
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def y(seconds: float) -> float:
        share = (math.log10(max(seconds, 10**low)) - low) / (high - low)
        return (_HEIGHT - _BOTTOM) * (1 - share) + 10

    def x(percentile: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 110) * percentile / 100

    out = []
    for power in range(low, high + 1):
        at = y(10.0**power)
        label = f"{10.0**power:g} s"
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{x(100):.0f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    out += [f'<text x="{x(p):.0f}" y="{_HEIGHT + 6}" text-anchor="middle">{p} %</text>' for p in (0, 25, 50, 75, 99)]
    for index, run in enumerate(runs):
        points = [f"{x(p + 1):.1f} {y(each):.1f}" for p, each in enumerate(run["turn_percentiles_s"])]
        out.append(f'<path class="c{index}" d="M {" L ".join(points)}"/>')
    for index, at in enumerate(_apart([y(run["turn_percentiles_s"][-1]) for run in runs])):
        out.append(
            f'<text class="c{index}" x="{x(100) + 6:.0f}" y="{at + 4:.1f}">{html.escape(runs[index]["name"])}</text>'
        )
    label = 'role="img" aria-label="Seconds of a turn by percentile"'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 14}" {label}>{"".join(out)}</svg>'


def _apart(heights: Sequence[float], least: float = 16.0) -> list[float]:
    """Returns the heights, moved down where two labels would overlap."""
    found = [0.0] * len(heights)
    last = -math.inf
    for index in sorted(range(len(heights)), key=heights.__getitem__):
        last = found[index] = max(heights[index], last + least)
    return found
