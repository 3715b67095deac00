"""Powers of two in float64 and float32, against extended precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict.particles.power_of_two import power_of_two


@pytest.mark.parametrize(
    ("kind", "lowest", "highest", "accuracy"),
    [(np.float64, -1021.0, 1023.9, 1e-12), (np.float32, -125.0, 127.9, 3e-7)],
)
def test_power_of_two_is_accurate_over_its_range(
    kind: Any, lowest: float, highest: float, accuracy: float
):
    t = np.concatenate(
        [np.linspace(lowest, highest, 200_001), np.arange(lowest, highest), [-0.5, 0.5, 1e-30]]
    ).astype(kind)
    powers = np.asarray(jax.jit(power_of_two)(jnp.asarray(t)))
    assert powers.dtype == kind
    exact = np.exp2(t.astype(np.longdouble))
    np.testing.assert_array_less(np.abs(powers - exact) / exact, accuracy)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_power_of_two_handles_nan_and_underflow(kind: Any):
    tiny = np.array([-np.inf, -1e30, -5000.0, np.finfo(kind).minexp - 1.0], kind)
    assert np.all(np.asarray(power_of_two(jnp.asarray(tiny))) == 0)
    assert np.isnan(power_of_two(jnp.full(3, np.nan, kind))).all()
    mixed = np.asarray(power_of_two(jnp.array([np.nan, 0.0, -np.inf], kind)))
    assert np.isnan(mixed[0]) and mixed[1] == pytest.approx(1, rel=3e-7) and mixed[2] == 0
