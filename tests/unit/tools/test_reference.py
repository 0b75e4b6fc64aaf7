"""Generated regions of the documentation say what the code says."""

from __future__ import annotations

import pytest

from tools.reference.beside_vllm import PICTURE, beside_vllm
from tools.reference.regions import DOCS, REGIONS, with_regions


@pytest.mark.parametrize("page", REGIONS)
def test_the_page_is_up_to_date(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert with_regions(page, text) == text, "run: python -m tools.reference"


def test_the_picture_is_up_to_date() -> None:
    assert (DOCS / PICTURE).read_text("utf-8") == beside_vllm(DOCS), "run: python -m tools.reference"
