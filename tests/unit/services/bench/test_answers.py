"""How streams are read."""

from __future__ import annotations

import pytest

from services.bench.answers import Answer, CountedBy, StreamReader

CHUNK = b'data: {"id":"x","choices":[{"index":0,"text":"a \\"usage\\": {","finish_reason":null}]}\n\n'
SPACED = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}], "usage": null}\r\n\r\n'
LAST = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"length"}]}\n\n'
LAST_EMPTY = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


def read(*pieces: bytes, asked_tokens: int = 7) -> Answer:
    """Piece ``i`` arrives at second ``i``."""
    answer = Answer(0, "", sent_at=-1.0)
    reader = StreamReader(answer)
    for now, piece in enumerate(pieces):
        reader.feed(piece, float(now))
    reader.finish(asked_tokens)
    return answer


def test_times_and_usage() -> None:
    answer = read(CHUNK, SPACED, LAST, USAGE, DONE)
    assert answer.failure is None
    assert answer.chunks_at == [0.0, 1.0, 2.0]
    assert (answer.num_tokens, answer.prompt_tokens, answer.counted_by) == (7, 4, CountedBy.USAGE)
    assert answer.ttft_s == 1.0
    assert answer.tpot_s == pytest.approx(2 / 6)
    assert answer.tokens_per_gap == 3.0
    assert answer.mtpot_s == 1.0


def test_bytes_may_be_cut_anywhere() -> None:
    whole = CHUNK + SPACED + LAST + USAGE + DONE
    answer = read(*(whole[i : i + 5] for i in range(0, len(whole), 5)))
    assert (answer.failure, answer.num_tokens, len(answer.chunks_at)) == (None, 7, 3)


def test_without_usage_an_end_by_length_tells_the_tokens() -> None:
    answer = read(CHUNK, LAST, DONE, asked_tokens=9)
    assert (answer.num_tokens, answer.counted_by) == (9, CountedBy.LENGTH)


def test_without_either_the_chunks_are_counted_but_not_an_empty_last_one() -> None:
    answer = read(CHUNK, CHUNK, LAST_EMPTY, DONE)
    assert (answer.num_tokens, answer.counted_by) == (2, CountedBy.CHUNKS)
    assert answer.chunks_at == [0.0, 1.0]


def test_an_empty_last_chunk_counts_if_it_may_carry_a_token() -> None:
    usage = USAGE.replace(b":7", b":3")
    assert len(read(CHUNK, CHUNK, LAST_EMPTY, usage, DONE).chunks_at) == 3
    assert len(read(CHUNK, CHUNK, CHUNK, LAST_EMPTY, usage, DONE).chunks_at) == 3
    assert len(read(LAST_EMPTY, USAGE.replace(b":7", b":1"), DONE).chunks_at) == 1


def test_usage_may_come_with_the_last_choice() -> None:
    answer = read(CHUNK, LAST.replace(b"}]}", b'}],"usage":{"completion_tokens":2}}'), DONE)
    assert (answer.num_tokens, answer.counted_by, len(answer.chunks_at)) == (2, CountedBy.USAGE, 2)


def test_the_role_of_a_chat_is_no_token() -> None:
    answer = read(ROLE, DELTA, DELTA, DONE)
    assert answer.chunks_at == [1.0, 2.0]


def test_an_empty_text_may_be_a_token() -> None:
    answer = read(CHUNK.replace(b"a \\", b"\\"), DELTA.replace(b'"a"', b'""'), DONE)
    assert answer.num_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([CHUNK], "stream cut"),
        ([], "stream cut"),
        ([DONE], "no token"),
        ([CHUNK, b'data: {"error":{"message":"full"}}\n\n'], "error in the stream"),
        ([CHUNK, b'data: {"error":{"message":"full"}}\n\n', DONE], "error in the stream"),
    ],
)
def test_answers_that_are_not_whole(pieces: list[bytes], kind: str) -> None:
    failure = read(*pieces).failure
    assert failure is not None and failure.kind == kind


def test_an_end_without_done_is_an_end() -> None:
    assert read(CHUNK, LAST).failure is None


def test_a_last_line_without_its_end() -> None:
    assert read(CHUNK, DONE.strip()).failure is None


@pytest.mark.parametrize("event", [b'data: {"choices":[{"finish_reason":"length"\n', b'data: ["choices"]\n'])
def test_an_event_that_is_not_json_is_refused(event: bytes) -> None:
    with pytest.raises(ValueError):
        read(event)
