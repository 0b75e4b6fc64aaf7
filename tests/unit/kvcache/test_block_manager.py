"""Blocks: asked for before taken, given back whole, never in two hands."""

from __future__ import annotations

import pytest

from core.errors import IntegrityError
from kvcache import BlockManager


def test_a_sequence_grows_by_whole_blocks() -> None:
    blocks = BlockManager(num_blocks=4, block_size=8)
    blocks.grow("a", 8)
    assert len(blocks.table("a")) == 1
    blocks.grow("a", 9)
    assert (len(blocks.table("a")), blocks.num_free) == (2, 2)
    blocks.grow("a", 3)
    assert len(blocks.table("a")) == 2, "growing never shrinks"
    blocks.check_integrity()


def test_a_sequence_that_cannot_grow_keeps_what_it_has() -> None:
    blocks = BlockManager(num_blocks=2, block_size=8)
    assert blocks.grow("a", 8) == [0]
    assert blocks.grow("a", 17) is None
    assert blocks.table("a") == [0]
    assert blocks.num_free == 1
    blocks.check_integrity()


def test_release_gives_back_everything_once() -> None:
    blocks = BlockManager(num_blocks=3, block_size=8)
    blocks.grow("a", 20)
    assert blocks.release("a") == 3
    assert blocks.release("a") == 0
    assert blocks.num_free == 3
    blocks.check_integrity()


def test_integrity_sees_a_block_in_two_hands() -> None:
    blocks = BlockManager(num_blocks=3, block_size=8)
    blocks.grow("a", 8)
    blocks.grow("b", 8)
    blocks.table("a")[0] = blocks.table("b")[0]
    with pytest.raises(IntegrityError):
        blocks.check_integrity()


def test_integrity_sees_a_lost_block() -> None:
    blocks = BlockManager(num_blocks=3, block_size=8)
    blocks.grow("a", 8)
    blocks.table("a").clear()
    with pytest.raises(IntegrityError):
        blocks.check_integrity()
