"""Elimination with the batch in the last axis, against LAPACK and JAX's own derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._numerics import elimination, linalg

SIZES = (7, 10, elimination.LARGEST)
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}


def covariances(d: int, spread: float = 1.0) -> np.ndarray:
    """Return a batch of 2 x 3 matrices with coordinates of widths 1 to `spread`."""
    rng = np.random.default_rng(d)
    factors = np.tril(rng.normal(size=(2, 3, d, d)), -1) / np.sqrt(d) + np.eye(d)
    factors *= np.geomspace(1.0, spread, d)[rng.permutation(d), None]
    return factors @ np.swapaxes(factors, -1, -2)


@pytest.mark.parametrize("d", SIZES)
def test_batches_of_batches_equal_lapack(d: int, dtype: np.dtype):
    a = covariances(d)
    lower, inverse = jax.vmap(jax.vmap(elimination.eliminate))(jnp.asarray(a, dtype))
    upper = jax.vmap(jax.vmap(elimination.inverse_of_upper_factor))(jnp.asarray(a, dtype))
    assert lower.dtype == inverse.dtype == upper.dtype == dtype
    expected = np.linalg.cholesky(a)
    tolerance = TOLERANCE[np.dtype(dtype).name]
    np.testing.assert_allclose(lower, expected, atol=tolerance)
    np.testing.assert_allclose(inverse, np.linalg.inv(expected), atol=10 * tolerance)
    np.testing.assert_allclose(upper, np.linalg.cholesky(np.linalg.inv(a)), atol=10 * tolerance)


def test_an_indefinite_matrix_gives_nan():
    lower, _ = elimination.eliminate(jnp.diag(jnp.array([1.0] * 6 + [-1.0])))
    assert np.isnan(lower[-1, -1])


@pytest.mark.parametrize("spread", [1.0, 1e-5])
def test_derivatives_of_the_upper_factor_are_those_of_lapack(spread: float):
    """Along symmetric changes, in reverse mode and twice; ill-conditioned too."""
    a, change = jnp.asarray(covariances(8, spread)[0, :2])
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)))

    def by_lapack(a):
        return linalg.cholesky(jnp.linalg.inv(a))

    def along(factor):
        def value(t):
            moved = a + t * change
            scale = factor(0.5 * (moved + moved.T))
            return jnp.sum(jnp.sin(weights * scale * jnp.sqrt(jnp.diagonal(a))[None]))

        return value

    for order in (jax.jacrev, lambda f: jax.jacrev(jax.jacrev(f))):
        got, expected = (
            order(along(factor))(0.1) for factor in (elimination.inverse_of_upper_factor, by_lapack)
        )
        np.testing.assert_allclose(got, expected, rtol=1e-7)
