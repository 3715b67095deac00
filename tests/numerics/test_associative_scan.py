"""Prefix sums under an operator that does not commute, against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from retrodict._numerics.associative_scan import (
    BLOCK,
    SETTLED_ROWS,
    affine_moments,
    affine_scan,
    affine_suffix_scan,
    prefix_scan,
)

LENGTHS = (1, 2, 15, 16, 17, 100)


@jax.jit
def scan_products(elements: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Products of matrices from the start and, later element first, from the end."""
    return (
        prefix_scan(jnp.matmul, elements, jnp.eye(2)),
        prefix_scan(jnp.matmul, elements, jnp.eye(2), reverse=True),
    )


def matrices(n: int) -> np.ndarray:
    """Matrices near a rotation, so that long products neither vanish nor overflow."""
    rng = np.random.default_rng(n)
    angles = rng.uniform(0, 2 * np.pi, n)
    rotations = np.array([[np.cos(angles), -np.sin(angles)], [np.sin(angles), np.cos(angles)]])
    return np.moveaxis(rotations, 2, 0) @ (np.eye(2) + 0.1 * rng.normal(size=(n, 2, 2)))


def products_by_loop(elements: np.ndarray) -> np.ndarray:
    total, totals = np.eye(2), []
    for element in elements:
        total = total @ element
        totals.append(total)
    return np.array(totals)


def test_tested_lengths_straddle_the_block_size():
    assert {BLOCK - 1, BLOCK, BLOCK + 1} <= set(LENGTHS)


@pytest.mark.parametrize("n", LENGTHS)
def test_prefix_products_equal_loop(n: int):
    elements = matrices(n)
    forward, backward = scan_products(jnp.asarray(elements))
    np.testing.assert_allclose(forward, products_by_loop(elements), atol=1e-10)
    np.testing.assert_allclose(backward, products_by_loop(elements[::-1])[::-1], atol=1e-10)


def test_scan_gradients_under_vmap_equal_finite_differences():
    batch = np.stack([matrices(17), matrices(17)[::-1]])
    mapped = jax.jit(jax.vmap(scan_products))
    for elements, forward in zip(batch, mapped(jnp.asarray(batch))[0], strict=True):
        np.testing.assert_allclose(forward, products_by_loop(elements), atol=1e-10)
    check_grads(mapped, (jnp.asarray(batch),), order=1, modes=["rev"], rtol=1e-4)


def test_scan_accepts_pytrees():
    """Affine maps x -> a x + b composed in order, with how many of them counted beside."""
    n = 37
    rng = np.random.default_rng(0)
    a, b = rng.uniform(-1, 1, n), rng.normal(size=n)

    def then(first: dict, second: dict) -> dict:
        return {
            "a": second["a"] * first["a"],
            "b": second["a"] * first["b"] + second["b"],
            "count": first["count"] + second["count"],
        }

    neutral = {"a": jnp.ones(()), "b": jnp.zeros(()), "count": jnp.zeros((), int)}
    elements = {"a": jnp.asarray(a), "b": jnp.asarray(b), "count": jnp.ones(n, int)}
    got = jax.jit(lambda elements: prefix_scan(then, elements, neutral))(elements)
    x, expected = 0.0, []
    for k in range(n):
        x = a[k] * x + b[k]
        expected.append(x)
    np.testing.assert_allclose(got["b"], expected, atol=1e-12)
    np.testing.assert_array_equal(got["count"], np.arange(1, n + 1))


suffixes = jax.jit(affine_suffix_scan)


@pytest.mark.parametrize("n", [1, 2, 17, 100])
def test_affine_suffix_scan_equals_loop(n: int):
    rng = np.random.default_rng(n)
    weights, biases = 0.6 * rng.normal(size=(n, 2, 2)), rng.normal(size=(n, 2))
    roots = rng.normal(size=(n, 2, 2))
    covariances = roots @ np.swapaxes(roots, 1, 2)
    mean, spread = np.zeros(2), np.zeros((2, 2))
    means, spreads = np.empty((n, 2)), np.empty((n, 2, 2))
    for k in range(n - 1, -1, -1):
        mean = weights[k] @ mean + biases[k]
        spread = weights[k] @ spread @ weights[k].T + covariances[k]
        means[k], spreads[k] = mean, spread
    got = suffixes(*(jnp.asarray(a) for a in (weights, biases, covariances)))
    np.testing.assert_allclose(got[0], means, atol=1e-11 * np.abs(means).max())
    np.testing.assert_allclose(got[1], spreads, atol=1e-11 * np.abs(spreads).max())


def moments_by_loop(weights, noise, last, parallel):
    """The recursion of `affine_moments`, which JAX differentiates."""
    del parallel
    (biases, covariances), (mean, covariance) = noise, last
    means, spreads = [mean], [covariance]
    for k in reversed(range(len(weights))):
        mean = weights[k] @ mean + biases[k]
        covariance = weights[k] @ covariance @ weights[k].T + covariances[k]
        means, spreads = [mean, *means], [covariance, *spreads]
    return jnp.stack(means), jnp.stack(spreads)


def moment_arguments(n: int) -> tuple:
    rng = np.random.default_rng(n)
    roots = rng.normal(size=(n, 2, 2))
    covariances = jnp.asarray(roots @ np.swapaxes(roots, 1, 2))
    weights = jnp.asarray(0.6 * rng.normal(size=(n - 1, 2, 2)))
    means = jnp.asarray(rng.normal(size=(n, 2)))
    return weights, (means[:-1], covariances[:-1]), (means[-1], covariances[-1])


def of_moments(function, parallel: bool):
    """A number that depends on all moments; the cotangents of covariances are not symmetric."""

    def value(arguments: tuple):
        means, covariances = function(*arguments, parallel)
        weights = jnp.cos(jnp.arange(covariances.size, dtype=float)).reshape(covariances.shape)
        return jnp.sum(jnp.sin(means)) + jnp.sum(weights * jnp.sin(covariances))

    return value


@pytest.mark.parametrize("n", [1, 2, 18])
@pytest.mark.parametrize("parallel", [False, True])
def test_moments_and_their_derivatives_equal_those_of_a_loop(n: int, parallel: bool):
    arguments = moment_arguments(n)

    def everything(function) -> tuple:
        value = of_moments(function, parallel)
        gradient = jax.grad(value)
        second = jax.jvp(gradient, (arguments,), (moment_arguments(n),))[1]
        return function(*arguments, parallel), gradient(arguments), second

    got, expected = (
        jax.jit(everything, static_argnums=0)(f) for f in (affine_moments, moments_by_loop)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, expected)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("changes_at", [SETTLED_ROWS, SETTLED_ROWS + 1])
def test_affine_scan_with_weights_that_settle_equals_loop(reverse, changes_at):
    # Weights that still change after `SETTLED_ROWS` rows are composed row by row.
    n = 2 * SETTLED_ROWS + 37
    weights = 0.98 * matrices(n)
    weights[changes_at:] = 0.98 * matrices(2)[1]
    rng = np.random.default_rng(0)
    biases, start = rng.normal(size=(2, n, 2)), rng.normal(size=2)

    def solve(biases, parallel):
        return affine_scan(
            jnp.asarray(weights), biases, jnp.asarray(start), reverse=reverse, parallel=parallel
        )

    in_parallel = jax.jit(jax.vmap(lambda biases: solve(biases, True)))(jnp.asarray(biases))
    for i in range(2):
        expected = solve(jnp.asarray(biases[i]), False)
        np.testing.assert_allclose(in_parallel[i], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("x32")
def test_float32_stays_float32():
    shapes = ((17, 2, 2), (17, 2), (17, 2, 2))
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    assert [leaf.dtype for leaf in jax.eval_shape(affine_suffix_scan, *arrays)] == [jnp.float32] * 2
