"""Group sums of embeddings, as in Magnus, §III-B."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import InvalidValueError
from predictor.features import FeatureShape, compress


def test_two_groups_of_eight() -> None:
    assert compress(np.arange(1, 9, dtype=np.float32)[None, :], 2).tolist() == [[5.0, 13.0]]


@pytest.mark.parametrize(("num_groups", "value"), [(16, 6.9282), (4, 13.8564)])
def test_all_ones(num_groups: int, value: float) -> None:
    assert compress(np.ones((2, 768), np.float32), num_groups) == pytest.approx(
        np.full((2, num_groups), value), abs=1e-4
    )


def test_all_groups_leave_all_and_none_leaves_nothing() -> None:
    embeddings = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    assert compress(embeddings, 8).tolist() == embeddings.tolist()
    assert compress(embeddings, 0).shape == (3, 0)


@pytest.mark.parametrize("num_groups", [-1, 3, 9])
def test_groups_must_be_equal(num_groups: int) -> None:
    with pytest.raises(InvalidValueError, match="divisor of the embedding's 8"):
        compress(np.ones((1, 8), np.float32), num_groups)


def test_a_row_is_length_user_input_instruction() -> None:
    user, app = np.full((2, 8), 1, np.float32), np.full((2, 8), 2, np.float32)
    features = FeatureShape(8, d_user=2, d_app=1).matrix(np.array([7, 9]), user, app)
    assert features[:, 0].tolist() == [7, 9]
    assert features[0, 1:] == pytest.approx([2, 2, 16 / 8**0.5])
    assert FeatureShape(768).num_features == 21


def test_what_is_not_looked_at_need_not_be_there() -> None:
    assert FeatureShape(8, 0, 0).matrix(np.array([7]), None, None).tolist() == [[7]]
    with pytest.raises(InvalidValueError, match="user"):
        FeatureShape(8, 2, 0).matrix(np.array([7]), None, None)
    with pytest.raises(InvalidValueError, match="app"):
        FeatureShape(8, 0, 2).matrix(np.array([7]), None, np.ones((1, 4), np.float32))


@pytest.mark.parametrize(("d_user", "d_app", "field"), [(3, 4, "d_user"), (4, -1, "d_app")])
def test_dimensions_that_do_not_divide(d_user: int, d_app: int, field: str) -> None:
    with pytest.raises(InvalidValueError, match=field):
        FeatureShape(8, d_user, d_app)
