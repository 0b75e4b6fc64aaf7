"""What an encoder keeps of pictures, with and without files that others read."""

from __future__ import annotations

from pathlib import Path

import pytest

from farsight.actors.vision.image_encoder import CarriedRows, RowCache, SharedRows
from farsight.core.images import EncodedImage, ImageSpan, digest_of
from farsight.engine.vision.row_files import RowStore, SharedEmbeddings, rows_name

SIZE = 4 * 3 * 4


def name_of(seed: int) -> str:
    return rows_name(digest_of(bytes([seed])), "")


def image_of(seed: int) -> EncodedImage:
    return EncodedImage(digest_of(bytes([seed])), 3, (1, 3), bytes([seed]) * SIZE)


@pytest.fixture(params=["carried", "shared"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> RowCache:
    return CarriedRows(2 * SIZE) if request.param == "carried" else SharedRows(RowStore(tmp_path, 2 * SIZE, "e"))


def test_the_longest_unused_go_first(cache: RowCache) -> None:
    for seed in (1, 2):
        cache.keep(name_of(seed), image_of(seed))
    assert cache.find(name_of(1)) is not None
    cache.keep(name_of(3), image_of(3))
    assert cache.find(name_of(2)) is None
    found = cache.find(name_of(1))
    assert found is not None and (found.num_tokens, found.grid) == (3, (1, 3))
    assert cache.num_bytes == 2 * SIZE


def test_carried_rows_that_never_fit_are_not_kept() -> None:
    cache = CarriedRows(SIZE - 1)
    assert cache.keep(name_of(1), image_of(1)) == image_of(1)
    assert cache.find(name_of(1)) is None and cache.num_bytes == 0


def test_shared_rows_go_with_no_message(tmp_path: Path) -> None:
    cache = SharedRows(RowStore(tmp_path, 1 << 20, "e"))
    told = cache.keep(name_of(1), image_of(1))
    assert (told.rows, told.embeddings) == (name_of(1), b"")
    span = ImageSpan(0, 3, told.digest, told.grid, rows=told.rows)
    assert SharedEmbeddings(tmp_path).rows(span, 4).tobytes() == image_of(1).embeddings


def test_rows_that_cannot_be_written_go_with_the_answer(tmp_path: Path) -> None:
    store = RowStore(tmp_path, 1 << 20, "e")
    folder = tmp_path / "kept" / "e"
    folder.rmdir()
    folder.write_bytes(b"")  # a file where the directory was
    cache = SharedRows(store)
    assert cache.keep(name_of(1), image_of(1)) == image_of(1)
    assert cache.find(name_of(1)) is None
