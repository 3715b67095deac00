"""Products, factors and reversal of nonsingular laws, against JAX's derivatives of plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._numerics import elimination, linalg, nonsingular_law

SIZES = pytest.mark.parametrize("d", [3, 8, elimination.LARGEST + 2])


def plain_reverse(mean, scale, weight, bias, noise):
    """Return the gain, the offset and the covariance by Bayes' rule for covariances."""
    covariance = scale @ scale.T
    predicted = weight @ covariance @ weight.T + noise @ noise.T
    gain = jnp.linalg.solve(predicted, weight @ covariance).T
    rest = jnp.eye(len(mean)) - gain @ weight
    spread = rest @ covariance @ rest.T + gain @ noise @ noise.T @ gain.T
    return gain, mean - gain @ (weight @ mean + bias), spread


def arguments(d: int, spread: float) -> tuple:
    rng = np.random.default_rng(d)
    scale, noise = (np.tril(rng.normal(size=(d, d)), -1) / d + np.eye(d) for _ in range(2))
    widths = np.geomspace(1.0, spread, d)[:, None]
    weight = widths * (0.9 * np.eye(d) + rng.normal(size=(d, d)) / d**2) / widths.T
    values = (rng.normal(size=d), widths * scale, weight, rng.normal(size=d), widths * noise)
    return tuple(map(jnp.asarray, values))


@pytest.mark.parametrize("spread", [1.0, 1e-4])
@SIZES
def test_reversal_and_its_derivatives_equal_those_of_covariances(d: int, spread: float):
    """Values, gradients and second derivatives along a line."""
    given = arguments(d, spread)
    widths = np.geomspace(1.0, spread, d)
    rng = np.random.default_rng(1)
    weights = [jnp.asarray(rng.normal(size=shape)) for shape in [(d, d), (d,), (d, d)]]

    def reverse(*arguments):
        gain, offset, scale = nonsingular_law.reverse(*arguments)
        return gain, offset, scale @ scale.T

    def value(fn):
        def along(t):
            moved = (leaf * (1 + t * (i + 1)) for i, leaf in enumerate(given))
            gain, offset, covariance = fn(*moved)
            units = (
                gain * widths[None] / widths[:, None],
                offset,
                covariance / widths[None] / widths[:, None],
            )
            return sum(jnp.sum(w * jnp.sin(leaf)) for w, leaf in zip(weights, units, strict=True))

        return along

    orders = (lambda f: f, jax.jacrev, lambda f: jax.jacrev(jax.jacrev(f)))
    for order in orders:
        got, expected = (jax.jit(order(value(fn)))(0.0) for fn in (reverse, plain_reverse))
        np.testing.assert_allclose(got, expected, rtol=1e-7)


@SIZES
def test_derivatives_of_products_and_inverse_factors_equal_the_plain_ones(d: int):
    rng = np.random.default_rng(d)
    a, b = (jnp.asarray(rng.normal(size=(d, d)) / d) for _ in range(2))
    weights = jnp.asarray(rng.normal(size=(d, d)))

    def by_hand(a, b):
        information = jnp.eye(d) + nonsingular_law.gram(a, b)
        return nonsingular_law.product(nonsingular_law.inverse_cholesky(information), a)

    def plain(a, b):
        return jnp.linalg.inv(linalg.cholesky(jnp.eye(d) + a @ a.T + b @ b.T)) @ a

    def slopes(fn):
        def value(a, b):
            return jnp.sum(weights * jnp.sin(fn(a, b)))

        first = jax.grad(value, argnums=(0, 1))
        second = jax.grad(lambda a, b: sum(jnp.sum(jnp.cos(g)) for g in first(a, b)), (0, 1))
        return jax.jit(lambda a, b: (value(a, b), first(a, b), second(a, b)))(a, b)

    for got, expected in zip(
        jax.tree.leaves(slopes(by_hand)), jax.tree.leaves(slopes(plain)), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-11)
