"""The page adds up the files of a room and says when it was measured."""

from __future__ import annotations

import json
from pathlib import Path

from tools.coverage_table import main


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
