"""The tables of presets and parts, as ``docs/policies/README.md`` shows them."""

from __future__ import annotations

from typing import Any

from farsight.policies.batching.base import BATCHERS
from farsight.policies.interfaces import ADMISSIONS, KV_POLICIES, ORDERS
from farsight.policies.parts import Parts, load_parts
from farsight.policies.placement.base import PLACEMENTS
from farsight.policies.presets import PRESETS, Preset
from farsight.policies.speculation.base import SPECULATIONS


def presets_table() -> str:
    """One row a preset of this repository."""
    load_parts()
    rows = ["| preset | mode | placement | order | admission | KV | weights |", "|---|---|---|---|---|---|---|"]
    rows += [_preset_row(preset) for preset in PRESETS.values()]
    return "\n".join(rows)


def _preset_row(preset: Preset) -> str:
    order = preset.order + (f" of {preset.max_num_seqs}" if preset.max_num_seqs else "")
    cells = (f"`{preset.name}`", preset.mode, preset.placement, order, preset.admission, preset.kv, preset.weights)
    return f"| {' | '.join(cells)} |"


def parts_table() -> str:
    """One row a registered part: the setting that names it, and what it declares."""
    rows = [
        "| setting | part | what it does | needs the order | swaps KV | uses prefixes |",
        "|---|---|---|---|---|---|",
    ]
    tables: dict[str, Parts[Any, Any]] = {
        "scheduler.placement": PLACEMENTS,
        "scheduler.order": ORDERS,
        "scheduler.admission": ADMISSIONS,
        "scheduler.kv": KV_POLICIES,
        "(preset of batch mode)": BATCHERS,
        "engine.speculation": SPECULATIONS,
    }
    for setting, table in tables.items():
        for part in (table.find(name) for name in table.names()):
            about = (part.build.__doc__ or "").strip()
            flags = ("yes" if part.swaps else "", "yes" if part.uses_prefixes else "")
            cells = (f"`{setting}`", f"`{part.name}`", about, part.needs and f"`{part.needs}`", *flags)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
