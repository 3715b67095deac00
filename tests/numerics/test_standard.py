"""Gaussian steps in standard coordinates against covariances, for few and many states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._numerics import (
    condition_standard,
    lower_factor,
    predict_scale,
    reverse_scale,
    shrinkage_of,
)

STATES = [2, 9]
"""Below and above the number of rows for which loops are unrolled."""


def matrices(d, rows, cols, width=1.0):
    rng = np.random.default_rng(d)
    a = rng.normal(size=(3, rows, cols))
    a[:, -1] = a[:, 0] + width * a[:, -1]  # `width` narrows one direction off the axes
    return jnp.asarray(a)


def transpose(a):
    return np.swapaxes(a, -1, -2)


@pytest.mark.parametrize("width", [1.0, 1e-7])
@pytest.mark.parametrize("d", STATES)
def test_lower_factors_are_triangular_and_give_the_same_covariance(d, width):
    rows = matrices(d, d, d + 2, width)
    lower = lower_factor(rows)
    np.testing.assert_allclose(lower, np.tril(lower))
    assert np.all(np.diagonal(lower, axis1=-2, axis2=-1) >= 0)
    np.testing.assert_allclose(lower @ transpose(lower), rows @ transpose(rows), atol=1e-12)
    # The narrow direction keeps its relative accuracy, which a covariance would lose.
    expected = np.linalg.slogdet(rows @ transpose(rows))[1] if width == 1.0 else None
    if expected is None:
        expected = [2 * np.sum(np.log(np.abs(np.diag(np.linalg.qr(r.T)[1])))) for r in rows]
    log_determinant = 2 * np.sum(np.log(np.diagonal(lower, axis1=-2, axis2=-1)), axis=-1)
    np.testing.assert_allclose(log_determinant, expected, rtol=1e-7)


@pytest.mark.parametrize("d", [6, 7, 9])
def test_a_narrow_direction_of_factors_with_moderate_pivots_is_kept(d):
    # Each pivot is a tenth of its row, and one direction is narrower than 0.1^(d-1).
    rows = jnp.asarray(0.1 * np.eye(d) + np.eye(d, k=-1))
    factors = [
        lower_factor(rows),
        lower_factor(rows[None])[0],
        predict_scale(rows, *identity(d))[0],
    ]
    for factor in factors:
        pivots = np.abs(np.diag(factor))
        assert np.sum(np.log(pivots)) == pytest.approx(d * np.log(0.1), rel=1e-9)


def identity(d):
    """A prediction that changes nothing: the weight and the scale of its noise."""
    return jnp.eye(d), jnp.zeros((d, d))


@pytest.mark.parametrize("size", [1.0, 1e7])
@pytest.mark.parametrize("p", [1, 4])
@pytest.mark.parametrize("d", STATES)
def test_conditioning_on_rows_equals_joint_gaussian(d, p, size):
    design = size * np.random.default_rng(0).normal(size=(3, p, d))
    shrinkage, gain, whitener = jax.tree.map(np.asarray, condition_standard(jnp.asarray(design)))
    # Products with the precise rows come before products that would round them away.
    rows, columns = design @ shrinkage, whitener @ design
    precision = transpose(shrinkage) @ shrinkage + transpose(rows) @ rows
    np.testing.assert_allclose(precision, [np.eye(d)] * 3, atol=1e-7)
    variance = whitener @ transpose(whitener) + columns @ transpose(columns)
    np.testing.assert_allclose(variance, [np.eye(p)] * 3, atol=1e-7)
    # K r minimises |r - F e|^2 + |e|^2.
    problems = [np.concatenate([f, np.eye(d)]) for f in design]
    expected = [np.linalg.lstsq(a, np.eye(p + d, p), rcond=None)[0] for a in problems]
    np.testing.assert_allclose(gain, expected, atol=1e-7 / size)


@pytest.mark.parametrize("d", STATES)
def test_conditioning_keeps_the_relative_precision_of_narrow_laws(d):
    # All directions become 1e-12 times as wide. An error of ε in the shrinkage would be 1e-4 of it.
    design = 1e12 * np.random.default_rng(0).normal(size=(3, d, d))
    shrinkage = np.asarray(condition_standard(jnp.asarray(design)).shrinkage)
    np.testing.assert_allclose(shrinkage, shrinkage_of(jnp.asarray(design)), rtol=1e-9)
    rows = design @ shrinkage
    np.testing.assert_allclose(transpose(rows) @ rows, [np.eye(d)] * 3, atol=1e-9)


@pytest.mark.parametrize("d", STATES)
def test_backward_kernels_equal_joint_gaussian(d):
    rng = np.random.default_rng(d)
    scale = np.tril(rng.normal(size=(3, d, d)))
    weight, noise = rng.normal(size=(2, 3, d, d))
    design = rng.normal(size=(3, 2, d))
    before, moving, driving = map(jnp.asarray, (scale, weight, noise))
    predicted, q = predict_scale(before, moving, driving)
    conditioning = condition_standard(jnp.asarray(design) @ predicted)
    kernel = reverse_scale(before, moving, driving, predicted, q, conditioning)
    predicted, conditioning, kernel = jax.tree.map(np.asarray, (predicted, conditioning, kernel))

    covariance = scale @ transpose(scale)
    after = weight @ covariance @ transpose(weight) + noise @ transpose(noise)
    gain = covariance @ transpose(weight) @ np.linalg.inv(after)
    np.testing.assert_allclose(kernel.state_gain, gain, atol=1e-8)
    np.testing.assert_allclose(
        kernel.state_scale @ transpose(kernel.state_scale),
        covariance - gain @ weight @ covariance,
        atol=1e-8,
    )
    # In standard coordinates: x = m + S z, and z_k has the scale of the filtering law of row k.
    filtered = predicted @ conditioning.shrinkage
    np.testing.assert_allclose(scale @ kernel.gain, gain @ filtered, atol=1e-8)
    assert np.all(np.linalg.norm(kernel.gain, ord=2, axis=(-2, -1)) <= 1 + 1e-12)
    # z_{k-1} has unit covariance before row k is seen.
    unit = (
        kernel.gain @ transpose(kernel.gain)
        + kernel.response
        @ (np.eye(2) + design @ after @ transpose(design))
        @ transpose(kernel.response)
        + kernel.scale @ transpose(kernel.scale)
    )
    np.testing.assert_allclose(unit, [np.eye(d)] * 3, atol=1e-8)


@pytest.mark.parametrize("d", STATES)
def test_derivatives_of_lower_factors_equal_finite_differences(d):
    rows = matrices(d, d, d + 2)

    def covariance(rows):
        lower = lower_factor(rows)
        return jnp.sum(jnp.sin(lower @ jnp.swapaxes(lower, -1, -2)))

    expected = jax.grad(lambda rows: jnp.sum(jnp.sin(rows @ jnp.swapaxes(rows, -1, -2))))(rows)
    np.testing.assert_allclose(jax.grad(covariance)(rows), expected, atol=1e-9)


@pytest.mark.parametrize("d", STATES)
def test_derivatives_of_lower_factors_of_dependent_rows(d):
    # Pivots are rounding errors. A division by them would make derivatives of the order 1/ε.
    rng = np.random.default_rng(d)
    rows = np.zeros((3, d, 2 * d))
    rows[:, :, 0] = 0.9 * rng.normal(size=(3, d))
    rows[:, :, d] = 0.3 * rows[:, :, 0]
    direction = rng.normal(size=rows.shape)

    def covariance(rows):
        lower = lower_factor(rows)
        return lower @ jnp.swapaxes(lower, -1, -2)

    _, change = jax.jvp(covariance, (jnp.asarray(rows),), (jnp.asarray(direction),))
    expected = rows @ transpose(direction) + direction @ transpose(rows)
    np.testing.assert_allclose(change, expected, atol=1e-9)
