"""Multi-Bin's regressor: least absolute error, binned afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import InvalidValueError
from core.forecast import QUANTILES
from predictor.linear import fit_linear


def test_outliers_do_not_move_it() -> None:
    """Least squares would be drawn to the tenth of outputs that are ten thousand tokens long."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(1000, 3)).astype(np.float32)
    lens = np.round(500 + 100 * features[:, 0]).astype(int)
    lens[rng.choice(1000, 100, replace=False)] = 10_000
    model = fit_linear(features, lens)
    assert model.weights == pytest.approx([100, 0, 0, 500], abs=1.5)


def test_bins_hold_equal_shares_and_give_their_own_outputs() -> None:
    features = np.arange(1000, dtype=np.float32)[:, None]
    model = fit_linear(features, np.arange(1000), num_bins=4)
    assert np.diff(model.begin).tolist() == pytest.approx([250] * 4, abs=2)
    found = model.distribution(np.array([[-50], [300], [1200]], np.float32), QUANTILES)
    assert found.mean == pytest.approx([124.5, 374.5, 874.5], abs=2)
    assert found.quantiles[1, QUANTILES.index(0.5)] == pytest.approx(374.5, abs=2)
    assert found.rank == pytest.approx([-50, 300, 1200], abs=2)
    assert (np.diff(found.quantiles, axis=1) >= 0).all()


def test_features_that_never_change_leave_one_bin() -> None:
    model = fit_linear(np.ones((50, 2), np.float32), np.arange(50))
    found = model.distribution(np.ones((3, 2), np.float32), QUANTILES)
    assert found.num_samples.tolist() == [50] * 3
    assert found.mean.tolist() == [24.5] * 3


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(InvalidValueError, match="at least 2"):
        fit_linear(np.ones((1, 2), np.float32), np.array([1]))
    with pytest.raises(InvalidValueError, match="num_bins"):
        fit_linear(np.ones((3, 2), np.float32), np.arange(3), 0)
    with pytest.raises(InvalidValueError, match=r"\(rows, 2\)"):
        fit_linear(np.ones((3, 2), np.float32), np.arange(3)).distribution(np.ones((1, 3), np.float32), QUANTILES)
