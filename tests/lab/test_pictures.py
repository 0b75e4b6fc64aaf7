"""The pictures of the policy pages are what the code draws today."""

from __future__ import annotations

import importlib
import io
import pkgutil

import matplotlib as mpl
import pytest

import lab.pictures
from lab.pictures.__main__ import STYLE, TARGET

NAMES = [each.name for each in pkgutil.iter_modules(lab.pictures.__path__) if each.name != "__main__"]


def test_every_page_with_a_picture_has_code_that_draws_it() -> None:
    assert {path.stem for path in TARGET.glob("*.svg")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_up_to_date(name: str) -> None:
    drawn = io.BytesIO()
    with mpl.rc_context(STYLE):
        importlib.import_module(f"lab.pictures.{name}").draw().savefig(drawn, format="svg", metadata={"Date": None})
    assert drawn.getvalue() == (TARGET / f"{name}.svg").read_bytes(), f"run: python -m lab.pictures {name}"
