"""Generated regions of the documentation say what the code says."""

from __future__ import annotations

import pytest

from tools.reference.regions import DOCS, REGIONS, with_regions


@pytest.mark.parametrize("page", REGIONS)
def test_the_page_is_up_to_date(page: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    assert with_regions(page, text) == text, "run: python -m tools.reference"
