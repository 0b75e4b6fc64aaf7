"""What an encoder keeps of pictures in its own memory."""

from __future__ import annotations

from farsight.actors.vision.image_encoder import CarriedRows
from farsight.core.images import EncodedImage

SIZE = 4 * 3 * 4


def image_of(seed: int) -> EncodedImage:
    return EncodedImage(bytes([seed]) * 8, 3, (1, 3), bytes([seed]) * SIZE)


def test_the_longest_unused_go_first() -> None:
    cache = CarriedRows(2 * SIZE)
    for name, seed in (("a", 1), ("b", 2)):
        assert cache.keep(name, image_of(seed)) == image_of(seed)
    assert cache.find("a") is not None
    cache.keep("c", image_of(3))
    assert cache.find("b") is None
    assert cache.find("a") == image_of(1)
    assert cache.num_bytes == 2 * SIZE


def test_rows_that_never_fit_are_not_kept() -> None:
    cache = CarriedRows(SIZE - 1)
    assert cache.keep("a", image_of(1)) == image_of(1)
    assert cache.find("a") is None and cache.num_bytes == 0
