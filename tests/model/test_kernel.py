"""The contract of every kernel in the registry, and what is particular to each kind."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
import scipy.stats
from registry import INPUT_DIM, KERNELS, tril, weight

import retrodict as rd

EVERY = pytest.mark.parametrize("name", KERNELS)
WITH_INPUT = pytest.mark.parametrize("name", [n for n, case in KERNELS.items() if case.takes_input])
SCALAR = pytest.mark.parametrize("name", [n for n, case in KERNELS.items() if case.out_dim == 1])

NUM_DRAWS = 2000
# What stands in entries that a mask hides: the fill of missing values, two values outside of some
# supports, and NaN.
JUNK = (0.0, -3.5, 1e6, np.nan)


def state_of(name: str) -> jax.Array:
    return 0.3 + 0.5 * jnp.cos(jnp.arange(KERNELS[name].state_dim, dtype=float))


def input_of(name: str) -> jax.Array | None:
    return 0.4 - 0.3 * jnp.arange(INPUT_DIM, dtype=float) if KERNELS[name].takes_input else None


def value_of(name: str) -> jax.Array:
    """An observation in the support."""
    entries = jnp.arange(KERNELS[name].out_dim, dtype=float)
    return 0.4 - 0.3 * entries if KERNELS[name].support == "real" else 1.0 + entries


class Outputs(NamedTuple):
    """What one kernel is asked for, compiled as one program."""

    masks: jax.Array
    log_prob: jax.Array
    law_log_prob: jax.Array
    masked: jax.Array
    slopes: tuple[jax.Array, jax.Array]  # of the masked density, in state and value
    kernel_slopes: Any


@eqx.filter_jit
def run(kernel: rd.AbstractKernel, x: jax.Array, y: jax.Array, u: jax.Array | None) -> Outputs:
    full, none = jnp.ones_like(y, bool), jnp.zeros_like(y, bool)
    partial = full.at[0].set(False)
    values = jnp.stack([y, y, y, *(y.at[0].set(j) for j in JUNK), jnp.full_like(y, jnp.nan)])
    masks = jnp.stack([full, none, partial, *([partial] * len(JUNK)), none])

    def masked(x: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        return kernel.log_prob(x, value, u, mask)

    values_and_slopes = jax.vmap(jax.value_and_grad(masked, (0, 1)), (None, 0, 0))
    masked_values, slopes = values_and_slopes(x, values, masks)
    log_prob, kernel_slopes = eqx.filter_value_and_grad(lambda k: k.log_prob(x, y, u))(kernel)
    law_log_prob = jnp.sum(jnp.asarray(kernel.law(x, u).log_prob(y)))
    return Outputs(masks, log_prob, law_log_prob, masked_values, slopes, kernel_slopes)


@functools.cache
def outputs(name: str) -> Outputs:
    return run(KERNELS[name].make(), state_of(name), value_of(name), input_of(name))


# --- every kernel ---------------------------------------------------------------------------------


@EVERY
def test_kernels_match_their_registry_entry(name: str):
    case, kernel = KERNELS[name], KERNELS[name].make()
    assert isinstance(kernel, rd.AbstractKernel)
    assert kernel.takes_input == case.takes_input
    assert isinstance(kernel.law(state_of(name), input_of(name)), rd.Gaussian) == (
        isinstance(kernel, rd.AbstractGaussianKernel) or name == "gaussian"
    )


@EVERY
def test_log_prob_is_finite_and_equals_that_of_the_law(name: str):
    got = outputs(name)
    assert got.log_prob.shape == () and np.isfinite(got.log_prob)
    np.testing.assert_allclose(got.log_prob, got.law_log_prob, rtol=1e-13)
    assert np.any(np.abs(got.slopes[0][0]) > 1e-6)


@EVERY
def test_draws_have_expected_shape_and_dtype(name: str, dtype: np.dtype):
    case = KERNELS[name]
    x, u = state_of(name), input_of(name)
    kernel = case.make()

    def both(key: jax.Array, x: jax.Array, u: jax.Array | None):
        value = kernel.sample(key, x, u)
        return value, kernel.log_prob(x, value, u)

    value, log_prob = jax.eval_shape(both, jax.random.key(0), x, u)
    assert value.shape == (case.out_dim,) and log_prob.shape == ()
    assert value.dtype == log_prob.dtype == dtype


@EVERY
def test_parameters_get_finite_gradients(name: str):
    leaves = jax.tree.leaves(outputs(name).kernel_slopes)
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves)
    if isinstance(KERNELS[name].make(), rd.LinearGaussianKernel):
        assert any(np.any(np.asarray(leaf) != 0) for leaf in leaves)


@EVERY
def test_full_and_empty_masks_are_consistent(name: str):
    got = outputs(name)
    np.testing.assert_allclose(got.masked[0], got.log_prob, rtol=1e-12)
    np.testing.assert_array_equal(got.masked[~np.asarray(got.masks).any(axis=1)], 0.0)


@EVERY
def test_a_masked_value_has_no_influence(name: str):
    """Whatever stands in a hidden entry, NaN included: same density, same and finite gradients."""
    got = outputs(name)
    partial = slice(2, 3 + len(JUNK))
    for quantity in (got.masked, *got.slopes):
        assert np.all(np.isfinite(quantity))
        same = np.asarray(quantity[partial])
        np.testing.assert_array_equal(same, np.broadcast_to(same[0], same.shape))
    np.testing.assert_array_equal(got.slopes[1][~np.asarray(got.masks)], 0.0)
    if KERNELS[name].masked_by == "row" or KERNELS[name].out_dim == 1:
        np.testing.assert_array_equal(got.masked[partial], 0.0)
    else:
        assert np.all(got.masked[partial] != 0.0)


@SCALAR
def test_density_integrates_to_one_and_matches_draws(name: str):
    """The density is summed up, and the empirical distribution function of draws held against it.

    By the inequality of Dvoretzky, Kiefer, Wolfowitz and Massart the two differ by more than the
    bound with probability below 1e-6 for each kernel, discrete ones included.
    """
    kernel, x, u = KERNELS[name].make(), state_of(name), input_of(name)

    @jax.jit
    def density_and_draws(points: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        density = jax.vmap(lambda y: jnp.exp(kernel.log_prob(x, y, u)))(points[:, None])
        return density, jax.vmap(lambda key: kernel.sample(key, x, u))(keys)

    if KERNELS[name].support == "counts":
        # Above ten, a binomial of ten has no mass: outside of the support a density is zero.
        points, steps = np.arange(200.0), np.ones(200)
    else:
        # Substitutions that reach far into the tails; the trapezoidal rule is then accurate.
        t = np.linspace(-12.0, 12.0, 4001)
        positive = KERNELS[name].support == "positive"
        points = np.exp(t) if positive else np.sinh(t)
        steps = (t[1] - t[0]) * (points if positive else np.cosh(t))
    keys = jax.random.split(jax.random.key(1), NUM_DRAWS)
    density, draws = density_and_draws(jnp.asarray(points), keys)
    masses = np.asarray(density) * steps
    np.testing.assert_allclose(masses.sum(), 1.0, atol=1e-8)

    draws = np.sort(np.asarray(draws)[:, 0])
    empirical = np.searchsorted(draws, points, side="right") / NUM_DRAWS
    continuous = KERNELS[name].support != "counts"
    cumulative = np.cumsum(masses) - (0.5 * masses if continuous else 0.0)
    bound = np.sqrt(np.log(2 / 1e-6) / (2 * NUM_DRAWS))
    assert np.abs(empirical - cumulative).max() < bound
    assert 0.2 < cumulative[np.searchsorted(points, np.median(draws))] < 0.9


# --- inputs ---------------------------------------------------------------------------------------


@WITH_INPUT
def test_a_missing_input_is_named(name: str):
    kernel, x = KERNELS[name].make(), state_of(name)
    with pytest.raises(ValueError, match="takes an input: pass inputs or u"):
        kernel.law(x)
    with pytest.raises(ValueError, match="takes an input: pass inputs or u"):
        kernel.log_prob(x, jnp.zeros(KERNELS[name].out_dim))


@WITH_INPUT
def test_inputs_change_the_law(name: str):
    kernel, x, u = KERNELS[name].make(), state_of(name), input_of(name)
    assert u is not None
    y = jnp.ones(KERNELS[name].out_dim)
    log_prob = jax.jit(lambda u: kernel.log_prob(x, y, u))
    assert abs(float(log_prob(u) - log_prob(u + 0.5))) > 1e-6


@eqx.filter_jit
def law_at(kernel: rd.AbstractGaussianKernel, x: jax.Array, u: jax.Array | None):
    law = kernel.law(x, u)
    return law.mean, law.covariance


def test_an_input_weight_shifts_the_bias():
    x, u, shift = state_of("linear_gaussian_input"), jnp.array([0.4, -0.7]), weight(2, INPUT_DIM)
    moved = rd.LinearGaussianKernel(weight(2, 2), jnp.ones(2), tril(2), shift)
    fixed = rd.LinearGaussianKernel(weight(2, 2), jnp.ones(2) + shift @ u, tril(2))
    jax.tree.map(np.testing.assert_array_equal, law_at(moved, x, u), law_at(fixed, x, None))
    mean, covariance = law_at(moved, x, u)
    expected = np.asarray(weight(2, 2)) @ np.asarray(x) + 1.0 + np.asarray(shift) @ np.asarray(u)
    np.testing.assert_allclose(mean, expected, rtol=1e-14)
    np.testing.assert_allclose(covariance, np.asarray(tril(2)) @ np.asarray(tril(2)).T, rtol=1e-14)


@pytest.mark.parametrize("diagonal", [True, False])
def test_varying_kernel_equals_fixed_kernel_at_its_parameters(diagonal: bool):
    def parameters(u: jax.Array):
        scale = rd.Diagonal(1.0 + u**2) if diagonal else (1.0 + u[0] ** 2) * tril(2)
        return jnp.outer(u, u) + jnp.eye(2), 3.0 * u, scale

    x, u = jnp.array([0.3, -1.1]), jnp.array([0.5, 0.2])
    varying = rd.VaryingLinearGaussianKernel(parameters)
    fixed = rd.LinearGaussianKernel(*parameters(u))
    assert varying.takes_input and not fixed.takes_input
    for got, expected in zip(law_at(varying, x, u), law_at(fixed, x, None), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-14)
    at = varying.at(u)
    np.testing.assert_allclose(at.weight, np.outer(u, u) + np.eye(2), rtol=1e-14)
    np.testing.assert_allclose(at.bias, 3.0 * np.asarray(u), rtol=1e-14)


def test_varying_kernel_refuses_bad_return_values():
    kernel = rd.VaryingLinearGaussianKernel(lambda u: jnp.eye(2))  # pyright: ignore
    with pytest.raises(ValueError, match=r"return \(weight, bias, scale_tril\), got"):
        kernel.at(jnp.zeros(2))


# --- nonlinear means ------------------------------------------------------------------------------


@pytest.mark.slow
def test_network_and_scale_are_learned():
    """Regression of sin(2x) with noise 0.1: the fit reaches nearly the density of the truth."""
    rng = np.random.default_rng(0)
    xs = jnp.asarray(rng.uniform(-2, 2, (128, 1)))
    ys = jnp.sin(2 * xs) + 0.1 * jnp.asarray(rng.normal(size=(128, 1)))
    network = eqx.nn.MLP(1, 1, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
    kernel = rd.NonlinearGaussianKernel(network, rd.Diagonal(rd.Positive(jnp.ones(1))))
    learned, fixed = eqx.partition(kernel, eqx.is_inexact_array)
    optimiser = optax.adam(1e-2)

    def loss(learned: Any) -> jax.Array:
        return -jnp.mean(jax.vmap(eqx.combine(learned, fixed).log_prob)(xs, ys))

    @jax.jit
    def train(learned: Any):
        def step(carry: Any, _: None):
            learned, state = carry
            value, gradient = jax.value_and_grad(loss)(learned)
            updates, state = optimiser.update(gradient, state)
            return (optax.apply_updates(learned, updates), state), value

        return jax.lax.scan(step, (learned, optimiser.init(learned)), None, length=1000)

    (learned, _), history = train(learned)
    truth = -np.mean(scipy.stats.norm.logpdf(np.asarray(ys - jnp.sin(2 * xs)), scale=0.1))
    assert history[0] > truth + 1.0
    assert history[-1] < truth + 0.1
    np.testing.assert_allclose(
        rd.unwrap(eqx.combine(learned, fixed)).scale_tril.std, 0.1, atol=0.05
    )


def test_a_function_of_the_wrong_dimension_is_refused():
    kernel = rd.NonlinearGaussianKernel(lambda x: x[:1], rd.Diagonal(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"must return shape \(2,\), got \(1,\)"):
        kernel.law(jnp.zeros(2))


# --- distributions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("student_t", lambda x, y: scipy.stats.t.logpdf(y, 5, loc=x, scale=0.7)),
        ("poisson", lambda x, y: scipy.stats.poisson.logpmf(y, np.exp(x))),
        ("binomial", lambda x, y: scipy.stats.binom.logpmf(y, 10, 1 / (1 + np.exp(-x)))),
        ("negative_binomial", lambda x, y: scipy.stats.nbinom.logpmf(y, 3, 3 / (3 + np.exp(x)))),
        ("log_normal", lambda x, y: scipy.stats.lognorm.logpdf(y, 0.4, scale=np.exp(x))),
        (
            "normal_mixture",
            lambda x, y: np.log(
                0.3 * scipy.stats.norm.pdf(y, x - 2, 0.5) + 0.7 * scipy.stats.norm.pdf(y, x + 1)
            ),
        ),
    ],
)
def test_log_probs_equal_scipy(name: str, reference: Any):
    got = outputs(name)
    expected = reference(np.asarray(state_of(name)), np.asarray(value_of(name)))
    np.testing.assert_allclose(got.log_prob, expected.sum(), rtol=1e-9)
    np.testing.assert_allclose(got.masked[2], expected[1:].sum(), rtol=1e-9)


def test_value_outside_support_has_zero_density():
    """A mask hides what was not seen; it does not repair what was."""
    kernel = KERNELS["poisson"].make()
    value, mask = jnp.array([-1.0, 2.0]), jnp.array([True, False])
    assert jax.jit(kernel.log_prob)(jnp.zeros(2), value, None, mask) == -jnp.inf


def test_any_object_with_log_prob_and_sample_is_accepted():
    class Laplace:
        def log_prob(self, value: jax.Array) -> jax.Array:
            return -jnp.abs(value) - jnp.log(2.0)

        def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
            return jax.random.laplace(key, (*sample_shape, 2))

    kernel = rd.DistributionKernel(lambda x: Laplace())
    value, mask = jnp.array([1.0, jnp.nan]), jnp.array([True, False])
    got = kernel.log_prob(jnp.zeros(1), value, None, mask)
    np.testing.assert_allclose(got, -1.0 - np.log(2.0), rtol=1e-15)


def test_non_distributions_are_refused():
    with pytest.raises(TypeError, match="log_prob and sample, got"):
        rd.DistributionKernel(lambda x: x).law(jnp.zeros(1))
    wide = rd.DistributionKernel(lambda x: dist.Normal(jnp.zeros((3, 2)), 1.0))
    with jax.numpy_rank_promotion("allow"):
        with pytest.raises(ValueError, match=r"must have shape \(\) or \(2,\), got \(3, 2\)"):
            wide.log_prob(jnp.zeros(1), jnp.zeros(2))
