"""Gaussian mixtures: densities, moments, draws, and derivatives of draws."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from scipy import special, stats

import retrodict as rd

COUNT = 3
DIMS = [1, 2, 3]


class Parameters(NamedTuple):
    """What a mixture is made of, with log weights that need not be normalised."""

    logits: jax.Array
    means: jax.Array
    scales: jax.Array


def mixture(parameters: Parameters) -> rd.GaussianMixture:
    logits, means, scales = parameters
    return rd.GaussianMixture(jax.nn.log_softmax(logits), means, scales)


@functools.cache
def parameters_of(d: int, count: int = COUNT) -> Parameters:
    """Components that overlap, with dense scales."""
    rng = np.random.default_rng(10 * d + count)
    lower = np.tril(0.3 * rng.normal(size=(count, d, d)), -1)
    return Parameters(
        jnp.asarray(rng.normal(size=count)),
        jnp.asarray(rng.normal(size=(count, d))),
        jnp.asarray(lower + rng.uniform(0.5, 1.2, (count, 1, d)) * np.eye(d)),
    )


def law_of(d: int, count: int = COUNT) -> rd.GaussianMixture:
    return mixture(parameters_of(d, count))


# One program a shape: without them every operation would be compiled by itself.
log_probs = jax.jit(jax.vmap(lambda law, x: law.log_prob(x), (None, 0)))
draws_of = jax.jit(jax.vmap(lambda law, noise: law.from_noise(noise), (None, 0)))
moments = jax.jit(lambda law: (law.mean, law.covariance, law.std))


@jax.jit
def slopes_of(parameters: Parameters, noise: jax.Array) -> Parameters:
    """The derivatives of draws, in reverse mode."""
    return jax.vmap(jax.jacrev(lambda p, e: mixture(p).from_noise(e)), (None, 0))(parameters, noise)


def noise_of(seed: int, num: int, d: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (num, d + 1))


# --- density and moments --------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
def test_mixture_densities_and_moments_equal_definition(d: int):
    law = law_of(d)
    xs = np.random.default_rng(0).normal(scale=3.0, size=(5, d))
    logs, means, scales = (np.asarray(leaf) for leaf in jax.tree.leaves(law))
    covariances = scales @ np.swapaxes(scales, 1, 2)
    each = [
        stats.multivariate_normal(m, c).logpdf(xs) for m, c in zip(means, covariances, strict=True)
    ]
    expected: Any = special.logsumexp(logs[:, None] + np.stack(each).reshape(COUNT, -1), axis=0)
    np.testing.assert_allclose(log_probs(law, jnp.asarray(xs)), expected, rtol=1e-11)
    mean, covariance, std = moments(law)
    first = np.exp(logs) @ means
    seconds = covariances + means[:, :, None] * means[:, None, :]
    second = np.tensordot(np.exp(logs), seconds, 1) - np.outer(first, first)
    np.testing.assert_allclose(mean, first, atol=1e-12)
    np.testing.assert_allclose(covariance, second, atol=1e-12)
    np.testing.assert_allclose(std**2, np.diagonal(second), rtol=1e-12)
    assert law.dim == d and law.num_components == COUNT and law.noise_dim == d + 1
    np.testing.assert_array_equal(law.components.mean, means)


@pytest.mark.slow
def test_mixture_of_one_component_equals_gaussian():
    """The map from noise is then the affine one, of which the derivative is known."""
    _, means, scales = parameters_of(2, 1)
    noise = noise_of(0, 4, 2)
    np.testing.assert_allclose(
        draws_of(law_of(2, 1), noise), means + noise[:, 1:] @ scales[0].T, rtol=1e-12
    )
    slopes = slopes_of(parameters_of(2, 1), noise)
    np.testing.assert_allclose(slopes.logits, 0.0, atol=1e-12)
    np.testing.assert_allclose(slopes.means[:, :, 0], np.stack([np.eye(2)] * 4), atol=1e-12)
    for e, slope in zip(noise[:, 1:], slopes.scales[:, :, 0], strict=True):
        expected = np.tril(np.eye(2)[:, :, None] * np.asarray(e)[None, None, :])
        np.testing.assert_allclose(slope, expected, atol=1e-12)


@pytest.mark.slow
def test_component_of_zero_weight_changes_nothing():
    logits, means, scales = parameters_of(2)
    alone = Parameters(logits[:2], means[:2], scales[:2])
    more = Parameters(logits.at[2].set(-jnp.inf), means, scales)
    xs, noise = jnp.array([[0.0, 0.0], [1.0, 9.0]]), noise_of(0, 4, 2)
    np.testing.assert_allclose(
        log_probs(mixture(more), xs), log_probs(mixture(alone), xs), rtol=1e-12
    )
    np.testing.assert_allclose(
        draws_of(mixture(more), noise), draws_of(mixture(alone), noise), rtol=1e-12
    )
    slopes = slopes_of(more, noise)
    np.testing.assert_array_equal(slopes.means[:, :, 2], 0.0)
    gradient = jax.jit(jax.grad(lambda p: mixture(p).log_prob(xs[0])))(more)
    assert all(np.all(np.isfinite(leaf)) for leaf in (*slopes, *gradient))


@pytest.mark.slow
def test_mixture_ignores_signs_of_scale_columns():
    """A column of a factor may be turned: the covariance is the same, as with `Gaussian`."""
    logits, means, scales = parameters_of(2)
    turned = Parameters(logits, means, scales.at[0].multiply(jnp.array([[-1.0, 1.0]])))
    xs, noise = jnp.array([[0.2, 0.5], [0.0, 0.0]]), noise_of(0, 4, 2)
    np.testing.assert_allclose(log_probs(mixture(turned), xs), log_probs(law_of(2), xs), rtol=1e-12)
    # A draw of a component whose scale was not turned is the same, and so is its derivative.
    same = np.all(draws_of(mixture(turned), noise) == draws_of(law_of(2), noise), axis=1)
    assert np.any(same)
    ours, theirs = slopes_of(turned, noise), slopes_of(parameters_of(2), noise)
    np.testing.assert_allclose(ours.means[same], theirs.means[same], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.logits[same], theirs.logits[same], rtol=1e-9, atol=1e-12)


# --- draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2])
def test_mixture_draws_follow_the_density(d: int):
    """40,000 draws: 3 + d + d² comparisons at 5 standard errors, one false alarm in 150,000."""
    law, num = law_of(d), 40_000
    draws = np.asarray(draws_of(law, noise_of(1, num, d)))
    centred = draws - np.asarray(law.mean)
    assert np.all(np.abs(centred.mean(0)) < 5 * np.asarray(law.std) / np.sqrt(num))
    products = centred[:, :, None] * centred[:, None, :]
    spread = products.std(0) / np.sqrt(num)
    assert np.all(np.abs(products.mean(0) - np.asarray(law.covariance)) < 5 * spread)
    # Components that stand far apart can be told by where a draw is.
    apart = rd.GaussianMixture(
        law.log_weights,
        jnp.asarray(np.outer(100.0 * np.arange(COUNT), np.ones(d))),
        law.scale_trils,
    )
    samples = np.asarray(draws_of(apart, noise_of(2, num, d)))
    shares = np.bincount(np.round(samples[:, 0] / 100).astype(int), minlength=COUNT) / num
    weights = np.exp(law.log_weights)
    assert np.all(np.abs(shares - weights) < 5 * np.sqrt(weights * (1 - weights) / num))


def test_mixture_draws_have_the_requested_shape():
    key, law = jax.random.key(0), law_of(2)
    sample = functools.partial(jax.eval_shape, law.sample)
    assert sample(key).shape == (2,)
    several = jax.jit(lambda key: law.sample(key, (3, 4)))(key)
    assert several.shape == (3, 4, 2)
    np.testing.assert_allclose(
        several.reshape(-1, 2), draws_of(law, noise_of(0, 12, 2)), rtol=1e-12
    )


# --- derivatives of draws -------------------------------------------------------------------------


def test_one_dimensional_draw_derivative_equals_quantile_derivative():
    """dx/dθ = −(∂F/∂θ)/f, with F from scipy and ∂F/∂θ by central differences."""
    parameters = parameters_of(1)
    flat, rebuild = ravel_pytree(parameters)

    def cumulative(theta: np.ndarray, x: float) -> float:
        logits, means, scales = (np.asarray(leaf).ravel() for leaf in rebuild(jnp.asarray(theta)))
        weights = np.exp(logits) / np.exp(logits).sum()
        return float(np.sum(weights * stats.norm.cdf(x, means, scales)))

    noise = noise_of(3, 4, 1)
    draw = jax.jit(jax.vmap(lambda theta, e: mixture(rebuild(theta)).from_noise(e)[0], (None, 0)))
    slopes = jax.jacobian(lambda theta: draw(theta, noise))(flat)
    for x, slope in zip(draw(flat, noise), slopes, strict=True):
        density = float(jnp.exp(mixture(parameters).log_prob(x[None])))
        for i, got in enumerate(slope):
            step = np.zeros(flat.size)
            step[i] = 1e-6
            theta = np.asarray(flat)
            moved = (cumulative(theta + step, x) - cumulative(theta - step, x)) / 2e-6
            assert float(got) == pytest.approx(-moved / density, rel=1e-6, abs=1e-7)


def smooth(x: jax.Array) -> jax.Array:
    """A function of which no symmetry makes the gradient of an expectation vanish."""
    return jnp.sin(x[0] + 0.3) + 0.5 * jnp.sum(x) ** 2 + jnp.prod(jnp.cos(x))


@functools.cache
def slopes_by_noise(d: int):
    """Gradients of `smooth` through single draws, compiled once for both tests below."""

    def of(parameters: Parameters, noise: jax.Array) -> jax.Array:
        return smooth(mixture(parameters).from_noise(noise))

    return jax.jit(jax.vmap(jax.grad(of), (None, 0)))


@pytest.mark.statistical
@pytest.mark.parametrize("d", DIMS)
def test_reparameterised_gradients_equal_expectation_gradients(d: int):
    """Against the enumeration of components, each reparameterised on its own.

    200,000 draws each: at most 54 comparisons at 5 joint standard errors, one false alarm in
    30,000.
    """
    parameters, num = parameters_of(d), 200_000

    def enumerated(parameters: Parameters, noise: jax.Array) -> jax.Array:
        law = mixture(parameters)
        values = jax.vmap(lambda m, s: smooth(rd.Gaussian(m, s).from_noise(noise)))(
            law.means, law.scale_trils
        )
        return jnp.sum(jnp.exp(law.log_weights) * values)

    noise = jax.random.normal(jax.random.key(5), (num, d))
    exact = jax.jit(jax.vmap(jax.grad(enumerated), (None, 0)))(parameters, noise)
    got = slopes_by_noise(d)(parameters, noise_of(4, num, d))
    for ours, theirs in zip(got, exact, strict=True):
        error = np.sqrt((np.var(ours, axis=0) + np.var(theirs, axis=0)) / num)
        # Above the diagonal nothing is read, and nothing varies.
        off = np.abs(np.mean(ours, axis=0) - np.mean(theirs, axis=0))
        assert np.all(off <= 5 * error)
        assert np.any(error > 0)


def test_forward_and_reverse_mode_agree():
    parameters, noise = parameters_of(2), noise_of(0, 4, 2)
    forward = jax.jit(jax.jacfwd(lambda p: draws_of(mixture(p), noise)))(parameters)
    for one, other in zip(forward, slopes_of(parameters, noise), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
        assert np.any(one != 0)
    np.testing.assert_array_equal(forward.scales[..., 0, 1], 0.0)


@pytest.mark.slow
def test_draw_derivatives_satisfy_continuity_equation():
    """The continuity equation ∂q/∂θ + ∇·(q v) = 0 in two dimensions, where v is dx/dθ.

    Noise that leads anywhere is found by inverting one component: a draw x has the same velocity
    whichever component it was drawn from.
    """
    logits, means, scales = parameters_of(2)
    rng = np.random.default_rng(7)
    direction = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)), parameters_of(2)
    )
    # A number that chooses the first component, whose noise is solved for.
    chooses = float(stats.norm.ppf(0.5 * special.softmax(logits)[0]))

    def velocity(x: jax.Array) -> jax.Array:
        noise = jnp.linalg.solve(scales[0], x - means[0])
        noise = jax.lax.stop_gradient(jnp.concatenate([jnp.array([chooses]), noise]))
        moved = jax.jvp(lambda p: mixture(p).from_noise(noise), (parameters_of(2),), (direction,))
        return moved[1]

    @jax.jit
    @jax.vmap
    def both(x: jax.Array) -> tuple[Any, Any]:
        def density(p: Parameters) -> jax.Array:
            return jnp.exp(mixture(p).log_prob(x))

        _, rate = jax.jvp(density, (parameters_of(2),), (direction,))
        step, eye = 1e-5, jnp.eye(2)

        def flow(i: int, by: float) -> jax.Array:
            at = x + by * eye[i]
            return jnp.exp(law_of(2).log_prob(at)) * velocity(at)[i]

        return rate, sum((flow(i, step) - flow(i, -step)) / (2 * step) for i in range(2))

    rate, divergence = both(jnp.asarray(rng.normal(size=(5, 2))))
    np.testing.assert_allclose(rate, -divergence, rtol=1e-6, atol=1e-9)


# --- single precision -----------------------------------------------------------------------------


@pytest.mark.slow
def test_far_tails_are_finite_in_float32(x32):
    """Draws of seven deviations, of components that are far apart and of very different widths."""
    law = rd.GaussianMixture(
        jnp.log(jnp.array([1e-6, 0.5, 0.499999])),
        jnp.array([[-30.0, 5.0], [0.0, 0.0], [1e4, -1e4]]),
        jnp.stack([1e-2 * jnp.eye(2), jnp.eye(2), 1e2 * jnp.eye(2)]),
    )
    first = jnp.array([-6.0, -5.0, 0.0, 0.1, 5.0])
    noise = jnp.stack(jnp.meshgrid(first, jnp.array([-7.0, 0.0, 7.0]), jnp.array([-7.0, 7.0])))
    noise = noise.reshape(3, -1).T
    value = jax.jit(
        jax.vmap(jax.value_and_grad(lambda law, e: jnp.sum(law.from_noise(e))), (None, 0))
    )
    draws, gradients = value(law, noise)
    assert draws.dtype == jnp.float32
    for leaf in (draws, *jax.tree.leaves(gradients)):
        assert np.all(np.isfinite(leaf))
    densities = jax.vmap(law.log_prob)(jnp.array([[1e5, 1e5], [-1e8, 0.0]]))
    assert np.all(np.isfinite(densities))


@pytest.mark.slow
def test_distant_component_keeps_weight_in_other_coordinates():
    """In single precision as in double: what it weighs is not lost beside how far it is."""

    def slope() -> np.ndarray:
        means = jnp.array([[0.0, 0.0], [0.5, 3e4]])
        law = rd.GaussianMixture(jnp.log(jnp.array([0.5, 0.5])), means, jnp.stack([jnp.eye(2)] * 2))
        noise = jnp.array([-1.0, 0.4, 0.3])
        gradient = jax.jit(jax.grad(lambda law: law.from_noise(noise)[1]))(law)
        return np.asarray(gradient.means)

    double = slope()
    with jax.enable_x64(False):
        single = slope()
    np.testing.assert_allclose(single, double, rtol=1e-4, atol=1e-4)


# --- batches and misuse ---------------------------------------------------------------------------


def test_mixtures_work_under_vmap():
    logits, means, scales = parameters_of(2)
    laws = jax.vmap(lambda shift: mixture(Parameters(logits, means + shift, scales)))(
        jnp.arange(3.0)
    )
    mean, covariance, std = moments(laws)
    assert mean.shape == std.shape == (3, 2) and covariance.shape == (3, 2, 2)
    assert laws.num_components == COUNT and laws.dim == 2
    np.testing.assert_allclose(mean[2] - mean[0], 2.0, rtol=1e-12)
    np.testing.assert_allclose(covariance[2], moments(law_of(2))[1], rtol=1e-10)


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    "shapes",
    [
        ((3,), (3, 2), (3, 2)),
        ((3,), (2, 2), (2, 2, 2)),
        ((), (2,), (2, 2)),
        ((3,), (3, 2), (3, 3, 3)),
        ((3, 1), (3, 2), (3, 2, 2)),
    ],
)
def test_mixture_refuses_mismatched_shapes(shapes):
    with pytest.raises(ValueError, match=r"log_weights of shape \(component,\).* got"):
        rd.GaussianMixture(*(jnp.ones(shape) for shape in shapes))
