"""State-space models: the law of what they simulate, and their density against a plain loop."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from linear_models import linear_model, linear_transition_model
from nonlinear_models import count_model

import retrodict as rd

# Its stub takes no array for the covariance.
multivariate_normal: Any = scipy.stats.multivariate_normal

# Monte Carlo averages are held to Z standard errors; one exceeds them with probability 5.7e-7.
Z = 5.0

RNG = np.random.default_rng(0)
PRIOR_MEAN, PRIOR_SCALE = np.array([1.0, -0.5]), np.array([[1.0, 0.0], [0.4, 0.6]])
A, A_BIAS = np.array([[0.8, 0.3], [-0.2, 0.7]]), np.array([0.1, -0.3])
A_SCALE, A_INPUT = np.array([[0.5, 0.0], [0.2, 0.4]]), np.array([[1.0], [-2.0]])
B, B_BIAS = np.array([[1.0, -0.5], [0.3, 0.9]]), np.array([0.2, 0.0])
B_SCALE, B_INPUT = np.array([[0.3, 0.0], [0.25, 0.5]]), np.array([[0.5], [3.0]])
N = 5
XS, YS, US = RNG.normal(size=(N, 2)), RNG.normal(size=(N, 2)), RNG.normal(size=(N, 1))


def make_model(
    inputs: bool = True, noise: float = 1.0, dtype: type = np.float64
) -> rd.StateSpaceModel:
    def array(a: np.ndarray) -> jax.Array:
        return jnp.asarray(a, dtype)

    return linear_model(
        2,
        mean=array(PRIOR_MEAN),
        prior=array(noise * PRIOR_SCALE),
        weight=array(A),
        bias=array(A_BIAS),
        noise=array(noise * A_SCALE),
        input_weight=array(A_INPUT) if inputs else None,
        design=array(B),
        offset=array(B_BIAS),
        error=array(noise * B_SCALE),
        design_input=array(B_INPUT) if inputs else None,
    )


def log_joint_by_loop(
    xs: np.ndarray, ys: np.ndarray, mask: np.ndarray, us: np.ndarray, length: int
) -> float:
    def density(x: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> float:
        return float(multivariate_normal(mean, scale @ scale.T).logpdf(x))

    total = density(xs[0], PRIOR_MEAN, PRIOR_SCALE)
    for k in range(length):
        if k > 0:
            total += density(xs[k], A @ xs[k - 1] + A_BIAS + A_INPUT @ us[k], A_SCALE)
        if mask[k].any():
            mean, rows = B @ xs[k] + B_BIAS + B_INPUT @ us[k], mask[k]
            total += density(ys[k][rows], mean[rows], B_SCALE[rows])
    return total


@eqx.filter_jit
def log_joint(model, xs, ys, mask=None, inputs=None, length=None):
    return model.log_joint(xs, ys, mask=mask, inputs=inputs, length=length)


@eqx.filter_jit
def log_joint_and_gradients(model, xs, ys, inputs=None, length=None):
    @eqx.filter_value_and_grad
    def value_and_slopes(both):
        model, xs = both
        return model.log_joint(xs, ys, inputs=inputs, length=length)

    value, (model_slopes, slope) = value_and_slopes((model, xs))
    return value, slope, model_slopes


ALL = np.ones((N, 2), bool)


# --- density --------------------------------------------------------------------------------------


def test_log_joint_equals_loop():
    got = log_joint(make_model(inputs=False), XS, YS)
    np.testing.assert_allclose(got, log_joint_by_loop(XS, YS, ALL, 0 * US, N), rtol=1e-12)
    got = log_joint(make_model(), XS, YS, None, US)
    np.testing.assert_allclose(got, log_joint_by_loop(XS, YS, ALL, US, N), rtol=1e-12)


@given(mask=hnp.arrays(bool, (N, 2)), length=st.integers(1, N))
def test_log_joint_with_mask_inputs_and_length_equals_loop(mask: np.ndarray, length: int):
    """Missing entries by mask and by NaN, and padding that holds NaN everywhere it may."""
    model = make_model()
    expected = log_joint_by_loop(XS, YS, mask, US, length)
    holes = np.where(mask, YS, np.nan)
    xs, ys = XS.copy(), YS.copy()
    xs[length:] = ys[length:] = holes[length:] = np.nan
    by_mask = log_joint(model, xs, ys, mask, US, jnp.asarray(length))
    by_nan = log_joint(model, xs, holes, None, US, jnp.asarray(length))
    np.testing.assert_allclose(by_mask, expected, rtol=1e-12)
    np.testing.assert_allclose(by_nan, expected, rtol=1e-12)


def test_log_joint_ignores_padding():
    """Neither the value nor the gradients, whatever stands in the padding."""
    model, length = make_model(), 3
    exact, xs_slope, model_slopes = log_joint_and_gradients(
        model, XS[:length], YS[:length], US[:length]
    )
    xs, ys = XS.copy(), YS.copy()
    xs[length:] = ys[length:] = np.nan
    padded, padded_slope, padded_slopes = log_joint_and_gradients(
        model, xs, ys, US, jnp.asarray(length)
    )
    np.testing.assert_allclose(padded, exact, rtol=1e-12)
    np.testing.assert_allclose(padded_slope[:length], xs_slope, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(padded_slope[length:], 0.0)
    for got, expected in zip(
        jax.tree.leaves(padded_slopes), jax.tree.leaves(model_slopes), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


def test_log_joint_ignores_inputs_of_padding():
    inputs = np.where(np.arange(N)[:, None] < 3, US, np.nan)
    model = make_model()
    exact = log_joint_by_loop(XS, YS, ALL, US, 3)
    value, slope, model_slopes = log_joint_and_gradients(model, XS, YS, inputs, jnp.asarray(3))
    np.testing.assert_allclose(value, exact, rtol=1e-12)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((slope, model_slopes)))


def test_missing_row_differs_from_padding():
    """Time passes through a missing row at the end, and its transition counts."""
    model = make_model(inputs=False)
    holes = YS.copy()
    holes[N - 1] = np.nan
    missing, padded = log_joint(model, XS, holes), log_joint(model, XS, YS, None, None, N - 1)
    mean = A @ XS[N - 2] + A_BIAS
    step = multivariate_normal(mean, A_SCALE @ A_SCALE.T).logpdf(XS[N - 1])
    np.testing.assert_allclose(missing - padded, step, rtol=1e-10)


def test_gradients_are_finite_with_missing_rows():
    holes = YS.copy()
    holes[0] = holes[2, 1] = holes[4] = np.nan
    value, slope, model_slopes = log_joint_and_gradients(make_model(), XS, holes, US)
    np.testing.assert_allclose(
        value, log_joint_by_loop(XS, YS, ~np.isnan(holes), US, N), rtol=1e-12
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((slope, model_slopes)))
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves((slope, model_slopes)))


def test_log_joint_gradient_equals_finite_differences():
    _, slope, _ = log_joint_and_gradients(make_model(), XS, YS, US)
    direction, step = RNG.normal(size=XS.shape), 1e-6
    up = log_joint_by_loop(XS + step * direction, YS, ALL, US, N)
    down = log_joint_by_loop(XS - step * direction, YS, ALL, US, N)
    np.testing.assert_allclose(np.sum(slope * direction), (up - down) / (2 * step), rtol=1e-6)


def test_log_joint_under_vmap_handles_unequal_lengths():
    lengths = np.array([2, N, 4])
    batch = (
        jnp.asarray(np.stack([XS, XS + 0.1, XS - 0.2])),
        jnp.asarray(np.stack([YS, -YS, 2 * YS])),
    )
    got = jax.jit(jax.vmap(lambda xs, ys, n: make_model(inputs=False).log_joint(xs, ys, length=n)))(
        *batch, jnp.asarray(lengths)
    )
    for value, xs, ys, length in zip(got, *batch, lengths, strict=True):
        expected = log_joint_by_loop(np.asarray(xs), np.asarray(ys), ALL, 0 * US, length)
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_integer_counts_and_numpyro_priors_are_accepted():
    model = replace(count_model(weight=1.0), prior=dist.Normal(jnp.zeros(1), 1.0).to_event(1))
    xs, ys = np.array([[0.3], [0.1]]), np.array([[2], [0]])
    # -1/2 log 2π twice, the two squares, and two Poisson terms y x - exp(x) - log y!.
    expected = -np.log(2 * np.pi) - 0.5 * (0.3**2 + 0.2**2)
    expected += 2 * 0.3 - np.exp(0.3) - np.log(2.0) - np.exp(0.1)
    np.testing.assert_allclose(log_joint(model, xs, ys), expected, rtol=1e-12)
    with_missing = np.array([[2.0], [np.nan]])
    np.testing.assert_allclose(
        log_joint(model, xs, with_missing), expected + np.exp(0.1), rtol=1e-12
    )
    assert model.state_dim == 1


def test_a_row_of_dependent_entries_is_masked_as_a_whole():
    model = linear_transition_model(
        rd.DistributionKernel(
            lambda x: dist.MultivariateNormal(x, scale_tril=jnp.asarray(B_SCALE))
        ),
        2,
        weight=1.0,
    )
    half, none = YS.copy(), YS.copy()
    half[1, 0] = none[1] = np.nan
    full, half, none = (log_joint(model, XS, ys) for ys in (YS, half, none))
    np.testing.assert_allclose(half, none, rtol=1e-14)
    assert abs(float(half - full)) > 1e-3


# --- simulation -----------------------------------------------------------------------------------


def moments_in_closed_form(n: int, us: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of (x_0, …, x_{n-1}, y_0, …, y_{n-1}) as one linear map of the noise.

    Columns of the maps belong to n draws of the state's noise and n of the observation's.
    """
    x_mean, x_map = PRIOR_MEAN, np.zeros((2, 4 * n))
    x_map[:, :2] = PRIOR_SCALE
    x_means, x_maps, y_means, y_maps = [], [], [], []
    for k in range(n):
        if k > 0:
            x_mean = A @ x_mean + A_BIAS + A_INPUT @ us[k]
            x_map = A @ x_map
            x_map[:, 2 * k : 2 * k + 2] += A_SCALE
        y_map = B @ x_map
        y_map[:, 2 * n + 2 * k : 2 * n + 2 * k + 2] += B_SCALE
        x_means.append(x_mean)
        x_maps.append(x_map)
        y_means.append(B @ x_mean + B_BIAS + B_INPUT @ us[k])
        y_maps.append(y_map)
    total = np.concatenate([*x_maps, *y_maps])
    return np.concatenate([*x_means, *y_means]), total @ total.T


def test_simulated_series_have_the_moments_of_the_model(key: jax.Array):
    """12 means and 78 covariances at Z = 5: false alarms at a rate below 6e-5."""
    n, count = 3, 20_000
    mean, covariance = moments_in_closed_form(n, US)
    model = make_model()
    draw = jax.jit(jax.vmap(lambda key: model.simulate(key, n, inputs=jnp.asarray(US[:n]))))
    xs, ys = draw(jax.random.split(key, count))
    assert xs.shape == (count, n, 2) and ys.shape == (count, n, 2)
    paths = np.concatenate([xs.reshape(count, -1), ys.reshape(count, -1)], axis=1)
    deviations = paths - mean
    variances = np.diagonal(covariance)
    assert np.all(np.abs(deviations.mean(0)) < Z * np.sqrt(variances / count))
    spread = np.sqrt((np.outer(variances, variances) + covariance**2) / count)
    assert np.all(np.abs(deviations.T @ deviations / count - covariance) < Z * spread)


def test_inputs_drive_the_transition_into_their_row_and_the_emission_at_it(key: jax.Array):
    """Almost without noise, one input at a time: what it moves and what it does not."""
    model = make_model(noise=1e-9)
    draw = jax.jit(lambda inputs: model.simulate(key, N, inputs=inputs))
    for row in range(N):
        inputs = np.zeros((N, 1))
        inputs[row] = 1.0
        xs, ys = draw(jnp.asarray(inputs))
        expected = PRIOR_MEAN
        for k in range(N):
            if k > 0:
                expected = A @ expected + A_BIAS + A_INPUT @ inputs[k]
            np.testing.assert_allclose(xs[k], expected, atol=1e-7)
            image = B @ expected + B_BIAS + B_INPUT @ inputs[k]
            np.testing.assert_allclose(ys[k], image, atol=1e-7)
        if row == 0:
            np.testing.assert_array_equal(xs, draw(jnp.zeros((N, 1)))[0])


def test_an_input_may_be_read_by_one_kernel_alone(key: jax.Array):
    full, plain = make_model(noise=1e-9), make_model(inputs=False, noise=1e-9)
    model = replace(full, transition=plain.transition)
    assert model.takes_input and full.takes_input and not plain.takes_input
    xs, ys = jax.jit(lambda key: model.simulate(key, 2, inputs=jnp.ones((2, 1))))(key)
    np.testing.assert_allclose(xs[1], A @ PRIOR_MEAN + A_BIAS, atol=1e-7)
    np.testing.assert_allclose(ys[0], B @ PRIOR_MEAN + B_BIAS + B_INPUT[:, 0], atol=1e-7)


def test_simulation_depends_only_on_its_key(key: jax.Array):
    model = make_model(inputs=False)
    draw = jax.jit(lambda key: model.simulate(key, 1))
    (xs, ys), again, other = draw(key), draw(key), draw(jax.random.key(1))
    assert xs.shape == ys.shape == (1, 2)
    np.testing.assert_array_equal(xs, again[0])
    np.testing.assert_array_equal(ys, again[1])
    assert not np.any(np.asarray(xs) == np.asarray(other[0]))


def test_states_and_observations_use_independent_noise(key: jax.Array):
    """A key used twice would give the same standardised noise in two places."""
    model = make_model(inputs=False)
    xs, ys = map(np.asarray, jax.jit(lambda key: model.simulate(key, 4))(key))
    noise = [np.linalg.solve(PRIOR_SCALE, xs[0] - PRIOR_MEAN)]
    noise += [np.linalg.solve(A_SCALE, xs[k] - A @ xs[k - 1] - A_BIAS) for k in range(1, 4)]
    noise += [np.linalg.solve(B_SCALE, ys[k] - B @ xs[k] - B_BIAS) for k in range(4)]
    flat = np.sort(np.concatenate(noise))
    assert np.min(np.diff(flat)) > 1e-6


def test_simulation_precision_follows_the_arrays(key: jax.Array, dtype: np.dtype):
    model = make_model(inputs=False, dtype=dtype.type)
    xs, ys = jax.eval_shape(lambda: model.simulate(key, 3))
    assert xs.dtype == ys.dtype == dtype
    value = log_joint(model, jnp.asarray(XS, dtype), jnp.asarray(YS, dtype))
    assert value.dtype == dtype
    exact = log_joint_by_loop(XS, YS, ALL, 0 * US, N)
    np.testing.assert_allclose(value, exact, rtol=1e-12 if dtype == np.float64 else 1e-5)


def test_a_simulation_is_differentiable_in_the_model(key: jax.Array):
    """Draws are reparameterised: the sum of states moves with the prior's mean by powers of A."""
    model = make_model(inputs=False)
    total = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(model.simulate(key, 3)[0])))(model)
    expected = np.ones(2) @ (np.eye(2) + A + A @ A)
    np.testing.assert_allclose(total.prior.mean, expected, rtol=1e-12)
