"""Writes the Grafana dashboard: ``python -m tools.grafana_dashboard``; ``--check`` exits with 1 if the file differs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "deploy/monitoring/grafana/dashboards/farsight.json"
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_WIDTH = 8  # a third of Grafana's 24 columns
_HEIGHT = 8
_COLUMNS = 3
_MODEL = '{model_name=~"$model"}'


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart.

    Args:
        unit: Grafana's name of the unit.
        lines: Legend and PromQL expression of each line.
    """

    title: str
    description: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def _rate(metric: str, by: str = "", labels: str = _MODEL) -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{labels}[$__rate_interval]))"


def _percentiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"p{percent}", f"histogram_quantile({percent / 100:g}, {_rate(f'{metric}_bucket', 'le')})")
        for percent in (50, 90, 99)
    )


PANELS = (
    Panel(
        "Requests in flight",
        "Requests that run in a batch, and requests that wait.",
        "short",
        (
            ("running", f"sum(vllm:num_requests_running{_MODEL})"),
            ("waiting", f"sum(vllm:num_requests_waiting{_MODEL})"),
        ),
    ),
    Panel(
        "Tokens a second",
        "Prompt tokens and output tokens of all replicas.",
        "short",
        (("prompt", _rate("vllm:prompt_tokens_total")), ("output", _rate("vllm:generation_tokens_total"))),
    ),
    Panel(
        "Ends of requests",
        "Answers a second by their finish reason, and requests that were refused.",
        "reqps",
        (
            ("{{finished_reason}}", _rate("vllm:request_success_total", "finished_reason")),
            ("refused", _rate("vllm:admission_rejections_total", labels="")),
        ),
    ),
    Panel(
        "Time to first token",
        "From the arrival of a request to its first token.",
        "s",
        _percentiles("vllm:time_to_first_token_seconds"),
    ),
    Panel(
        "Time between tokens",
        "Gaps between the tokens of a stream.",
        "s",
        _percentiles("vllm:inter_token_latency_seconds"),
    ),
    Panel(
        "Time of a request",
        "From the arrival of a request to its last token.",
        "s",
        _percentiles("vllm:e2e_request_latency_seconds"),
    ),
    Panel(
        "Predicted queue delay",
        "How long a new request would wait, by the forecasts of those before it.",
        "s",
        (("{{model_name}}", f"farsight:predicted_queue_delay_seconds{_MODEL}"),),
    ),
    Panel(
        "KV memory",
        "Share of each replica's KV pool that is in use.",
        "percentunit",
        (("replica {{engine}}", f"vllm:kv_cache_usage_perc{_MODEL}"),),
    ),
    Panel(
        "KV traffic",
        "Bytes a second that move between the device and the host.",
        "Bps",
        (("{{way}}", _rate("farsight:kv_moved_bytes_total", "way")),),
    ),
    Panel(
        "Prefix cache",
        "Share of the prompt tokens that were found in the prefix cache.",
        "percentunit",
        (("hits", f"{_rate('vllm:prefix_cache_hits_total')} / {_rate('vllm:prefix_cache_queries_total')}"),),
    ),
    Panel(
        "Preemptions and recomputed tokens",
        "Sequences a second that lost their place, and tokens a second that were computed once more.",
        "short",
        (
            ("preemptions", _rate("vllm:num_preemptions_total")),
            ("recomputed tokens", _rate("farsight:recomputed_tokens_total")),
        ),
    ),
    Panel(
        "Lengths",
        "Mean tokens of a prompt and of an answer.",
        "short",
        (
            (
                "prompt",
                f"{_rate('vllm:request_prompt_tokens_sum')} / {_rate('vllm:request_prompt_tokens_count')}",
            ),
            (
                "answer",
                f"{_rate('vllm:request_generation_tokens_sum')} / {_rate('vllm:request_generation_tokens_count')}",
            ),
        ),
    ),
    Panel(
        "Processor time",
        "Processor seconds a second of the model's steps, and of the decisions about them.",
        "short",
        (
            ("model", _rate("farsight:model_cpu_seconds_total", labels="")),
            ("scheduling", _rate("farsight:scheduling_cpu_seconds_total")),
        ),
    ),
    Panel(
        "Tenants",
        "Tokens a second of each tenant, prompts and answers.",
        "short",
        (("{{tenant}}", _rate("farsight:tenant_tokens_total", "tenant", "")),),
    ),
    Panel(
        "Deaths",
        "Restarts of components in the last hour. Streams go on meanwhile.",
        "short",
        (("{{component}}", "increase(farsight:component_restarts[1h]) > 0"),),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    return {
        "uid": "farsight",
        "title": "Farsight",
        "tags": ["farsight"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [_model_variable()]},
        "panels": [_panel(index, panel) for index, panel in enumerate(PANELS)],
    }


def _model_variable() -> dict[str, Any]:
    query = "label_values(vllm:num_requests_running, model_name)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": "model"},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {
            "x": index % _COLUMNS * _WIDTH,
            "y": index // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"showLegend": True, "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + line), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for line, (legend, expression) in enumerate(panel.lines)
        ],
    }


def main() -> int:
    """Writes or checks the file; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    wanted = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        TARGET.write_text(wanted, encoding="utf-8")
        return 0
    if TARGET.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{TARGET.name} is old: python -m tools.grafana_dashboard writes it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
