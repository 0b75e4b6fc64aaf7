"""The measures of the house count what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import house
from tools.coverage_table import main
from tools.reference.chats_picture import PICTURE, chats_picture
from tools.reference.regions import DOCS, REGIONS, with_regions
from tools.request_path import ROOT, trace_request
from tools.rooms import ROOMS

CHAIN = {"a": {"b"}, "b": {"c"}, "c": set[str](), "d": {"c"}}


def test_floors_are_the_longest_chain_of_imports() -> None:
    assert house.floors(CHAIN) == 3
    assert house.floors({}) == 0
    assert house.circles(CHAIN) == []
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_a_name_of_two_classes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("class Both: ...\nclass _Own: ...\n" + f"class Only{name}: ...\n")
    monkeypatch.setattr(house, "python_files", lambda *_: sorted(tmp_path.glob("*.py")))
    assert house.class_names_twice() == ["Both"]
    assert house.num_lines() == 6


def test_no_room_goes_in_circles() -> None:
    for room in ROOMS:
        assert house.circles(house.imports_of(room)) == [], room


def test_every_measure_has_an_aim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(house, "files_to_first_token", lambda preset: 40 + len(preset))
    monkeypatch.setattr(sys, "argv", ["house"])
    house.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(house.AIMS)
    assert "44  at most      45" in lines[list(house.AIMS).index("files_to_first_token")]


def test_rooms_are_added_up(tmp_path: Path) -> None:
    def file(branches: int, taken: int, statements: int, run: int) -> dict[str, object]:
        counts = {
            "num_branches": branches,
            "covered_branches": taken,
            "num_statements": statements,
            "covered_lines": run,
        }
        return {"summary": counts | {"percent_covered": 12.5, "percent_covered_display": "12"}}

    files = {"engine/kv/a.py": file(4, 1, 10, 5), "core/a.py": file(0, 0, 2, 2), "engine/b.py": file(2000, 2, 10, 8)}
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    report.write_text(json.dumps({"meta": {"timestamp": "2026-11-22T16:00:00.1"}, "files": files}))
    main(report, page)
    text = page.read_text()
    assert "measured on 2026-11-22" in text
    assert [line for line in text.splitlines() if line.startswith("| ")][1:] == [
        "| `core/` | 0 | 0 | - | 2 | 2 | 100.0 % |",
        "| `engine/` | 2,004 | 3 | 0.1 % | 20 | 13 | 65.0 % |",
        "| all | 2,004 | 3 | 0.1 % | 22 | 15 | 68.2 % |",
    ]


@pytest.mark.parametrize("page", REGIONS)
def test_the_page_is_up_to_date(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert with_regions(page, text) == text, "run: python -m tools.reference"


def test_the_picture_is_up_to_date() -> None:
    assert (DOCS / PICTURE).read_text("utf-8") == chats_picture(DOCS), "run: python -m tools.reference"


STATIONS = (
    "services/api/app.py",
    "services/ingress/engine_client.py",
    "actors/scheduling/router.py",
    "policies/fleet/request_table.py",
    "policies/replica/scheduler.py",
    "policies/order/fcfs.py",
    "actors/worker/model_worker.py",
    "kvcache/lease.py",
    "engine/worker.py",
    "engine/sampling/sampler.py",
    "actors/worker/token_channels.py",
)


@pytest.mark.torch
async def test_every_station_of_a_request_is_found(tmp_path: Path) -> None:
    files = await trace_request("fcfs", tmp_path)
    assert set(STATIONS) <= files.keys()
    assert all((ROOT / name).is_file() for name in files)
    assert files["policies/replica/scheduler.py"]["ReplicaScheduler.handle"] > 0
    assert "policies/order/gittins.py" not in files, "another preset's"
