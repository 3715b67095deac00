"""Laws of pairs of a linear-Gaussian chain, and their derivatives, in many dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd
from retrodict._chains import pair_laws

NUM_TIMES = 4


def chain_of(d: int, t: jax.Array | float = 0.0) -> rd.LinearGaussianChain:
    """Return a chain whose arrays move with t."""
    rng = np.random.default_rng(d)
    lower = np.tril(rng.normal(size=(2, NUM_TIMES, d, d)), -1) / d + np.eye(d)
    gains = 0.9 * np.eye(d) + rng.normal(size=(NUM_TIMES - 1, d, d)) / d**2
    means, offsets = rng.normal(size=(NUM_TIMES, d)), rng.normal(size=(NUM_TIMES - 1, d))
    return rd.LinearGaussianChain.from_arrays(
        (1 + t) * means,
        (1 + t**2) * lower[0],
        jnp.cos(t) * gains,
        (1 - t) * offsets,
        (1 + 2 * t) * lower[1, 1:],
    )


@pytest.mark.parametrize("d", [3, 8])
def test_pair_laws_and_their_derivatives_equal_those_of_triangularised_factors(d: int):
    def pairs(t):
        chain = chain_of(d, t)
        laws, reach, scale = pair_laws(chain)
        past = jnp.concatenate([reach, scale], axis=2)
        square = jnp.swapaxes(laws.scale_tril[1:], -1, -2)
        return laws.mean, past @ jnp.swapaxes(past, -1, -2), reach @ square

    def expected(t):
        laws = chain_of(d, t).pairwise()
        means = jnp.concatenate([laws.mean[:, :d], laws.mean[-1:, d:]])
        return means, laws.covariance[:, :d, :d], laws.covariance[:, :d, d:]

    orders = (lambda f: f, jax.jacrev, lambda f: jax.jacfwd(jax.jacrev(f)))
    for order in orders:
        got, wanted = (jax.jit(order(fn))(0.1) for fn in (pairs, expected))
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
