"""Assertions on errors, on trees of arrays, and on averages over random keys."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest


def raises_with(kind: type[Exception], *phrases: str) -> Any:
    """Return a context that expects an error whose message has all phrases, in this order."""
    return pytest.raises(kind, match="(?s)" + ".*".join(re.escape(phrase) for phrase in phrases))


def arrays_equal(one: Any, other: Any) -> bool:
    """Return whether all arrays of two trees are equal; other leaves are ignored."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs if eqx.is_array(a))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare all leaves of two trees of the same structure; random keys must be equal."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_means_agree(estimates: dict, exact: dict, num_particles: int, bias: float = 3.0) -> None:
    """Compare averages over keys with exact moments.

    They may differ by 4.5 standard errors and by a bias of `bias` standard deviations per particle.

    Args:
        estimates: arrays by name, with a leading axis for the keys.
        exact: their expectations, among them the `covariance` of the states.
        num_particles: number of particles of each estimate.
        bias: allowed bias, times the number of particles.
    """
    for name, value in exact.items():
        runs = estimates[name]
        error = np.abs(runs.mean(0) - value)
        standard_error = runs.std(0) / np.sqrt(len(runs))
        scale = np.sqrt(np.abs(exact["covariance"]).max()) if "mean" in name else 1.0
        allowed = 4.5 * standard_error + bias * scale / num_particles
        assert np.all(error <= allowed), f"{name}: {np.max(error / allowed):.2f} of what is allowed"
