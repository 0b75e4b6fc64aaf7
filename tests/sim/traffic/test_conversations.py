"""Conversations of a file, and their turns as they come due."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.conversations import AFTER_TOOL, AFTER_USER, FIRST, ClosedLoop, read_conversations
from farsight.simulator.traffic.traces import TraceError


def entry(prompt_len: int, blocks: list[list[int]], after: str = "tool", **fields: Any) -> dict[str, Any]:
    return {"in": prompt_len, "out": 10, "h": blocks, "think": 5.0, "after": after, **fields}


def written(path: Path, *conversations: list[dict[str, Any]], block: int = 4) -> Path:
    lines = [
        json.dumps({"id": f"c{number}", "block": block, "requests": each}) for number, each in enumerate(conversations)
    ]
    path.write_text("\n".join(lines), "utf-8")
    return path


TURNS = [entry(9, [[1, 2]], "user"), entry(17, [[1, 2], [7, 2]]), entry(21, [[1, 2], [7, 3]], "user", out=0)]


def test_turns_come_their_gap_after_the_answer_before(tmp_path: Path) -> None:
    trace = read_conversations(written(tmp_path / "t", TURNS, TURNS[:1]))
    assert (trace.block_size, trace.num_turns) == (4, 4)
    loop = ClosedLoop(trace, [0.0, 3.0])
    assert loop.next_at == 0.0
    [first] = loop.take(0.0)
    assert (first.request_id, first.app, first.session) == ("c0/0", FIRST, "c0")
    assert loop.next_at == 3.0, "nothing comes of the first conversation before its answer"
    [other] = loop.take(3.0)
    assert not set(first.prefix) & set(other.prefix), "ids are of one conversation"
    loop.ended("c1/0", 4.0)
    assert loop.next_at == math.inf
    loop.ended("c0/0", 50.0)
    [second] = loop.take(loop.next_at)
    assert (second.arrived_at, second.app, len(second.prefix)) == (55.0, AFTER_TOOL, 4)
    assert second.prefix[:2] == first.prefix and second.max_new_tokens == 10, "its length is not told"
    loop.ended("c0/1", 60.0)
    [third] = loop.take(65.0)
    assert (third.app, third.output_len) == (AFTER_USER, 1)


def test_subagents_are_left_out_and_missing_gaps_follow_from_the_instants(tmp_path: Path) -> None:
    turns = [entry(9, [], "user", t=0.0, api=3.0), {"t": 2.0, "sub": [entry(5, [])] * 2}, entry(9, [], t=30.0)]
    del turns[2]["think"]
    trace = read_conversations(written(tmp_path / "t", turns))
    assert trace.num_left_out == 2 and [turn.gap_s for turn in trace.conversations[0].turns] == [0.0, 27.0]


def test_parts_of_a_file_hold_each_conversation_once(tmp_path: Path) -> None:
    path = written(tmp_path / "t", TURNS, TURNS, TURNS)
    parts = [[each.name for each in read_conversations(path, part, 2).conversations] for part in (1, 2)]
    assert parts == [["c0", "c2"], ["c1"]]
    for part in ((0, 2), (3, 2), (4, 4)):
        with pytest.raises(InvalidValueError, match="part"):
            read_conversations(path, *part)


def test_tokens_scale_with_blocks(tmp_path: Path) -> None:
    trace = read_conversations(written(tmp_path / "t", TURNS)).scaled(0.5)
    assert trace.block_size == 2 and [turn.prompt_len for turn in trace.conversations[0].turns] == [4, 8, 10]
    with pytest.raises(InvalidValueError, match="scale"):
        trace.scaled(0.1)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"in": -1}, r"t:1: requests\[1\]\.in is negative"),
        ({"h": [[1, 5]]}, r"names 5 blocks of 4 tokens for 17 prompt tokens"),
        ({"h": [[-1, 2]]}, r"requests\[1\]\.h is not a list of runs"),
        ({"h": [[1]]}, r"requests\[1\]\.h is not a list of runs"),
        ({"h": [[1 << 40, 1]]}, r"requests\[1\]\.h is not a list of runs"),
        ({"after": "dog"}, "neither tool nor user: 'dog'"),
        ({"think": "long"}, r"requests\[1\]\.think is not a number"),
        ({"out": None}, r"missing column requests\[1\]\.out"),
    ],
)
def test_a_wrong_turn_is_named(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    path = written(tmp_path / "t", [TURNS[0], TURNS[1] | changed])
    with pytest.raises(TraceError, match=expected):
        read_conversations(path)


def test_blocks_of_several_sizes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t", TURNS)
    other = json.loads(path.read_text("utf-8")) | {"block": 8, "requests": TURNS[:1]}
    path.write_text(path.read_text("utf-8") + "\n" + json.dumps(other), "utf-8")
    with pytest.raises(TraceError, match="blocks of"):
        read_conversations(path)
