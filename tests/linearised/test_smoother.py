"""Linearised smoothers: exact on linear models, textbook on others, and honest where lost."""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from assertions import raises_with
from linear_models import (
    linear_kernel,
    linear_model,
    linear_transition_model,
    random_mask,
    random_model,
)
from nonlinear_models import hide_linearity, nonlinear_kernel, paper_model

import retrodict as rd
from retrodict._linearised import LinearisedPosterior, moments, posterior, recursion, rules
from retrodict._model import prepare_data
from retrodict._numerics import GaussianLaw, law_of

METHODS: dict[str, Any] = {
    "extended": rd.extended_smoother,
    "unscented": rd.unscented_smoother,
    "cubature": partial(rd.unscented_smoother, rule=rd.Cubature()),
    "gauss-hermite": partial(rd.unscented_smoother, rule=rd.GaussHermite(3)),
    "iterated": rd.iterated_smoother,
    "iterated extended": partial(rd.iterated_smoother, rule=rd.Taylor()),
}
RULES = [
    rd.Taylor(),
    rd.Unscented(),
    rd.Unscented(0.1, 2.0, 0.0),
    rd.Cubature(),
    rd.GaussHermite(4),
]


def scalar_model(
    emission: Any,
    noise: float = 1.0,
    *,
    prior: float = 1.0,
    weight: float = 0.9,
    scale: float = 0.4,
) -> rd.StateSpaceModel:
    """One state dimension, a linear transition, and an emission from a kernel or a function."""
    if not isinstance(emission, rd.AbstractKernel):
        emission = nonlinear_kernel(emission, noise)
    return linear_transition_model(emission, prior=prior, weight=weight, noise=scale)


SQUARE = scalar_model(jnp.square, 0.1, prior=0.64, weight=0.95, scale=0.2)
SATURATING = scalar_model(jnp.tanh, 0.1)


def pendulum_mean(x: Any) -> Any:
    velocity = x[1] - 0.98 * jnp.sin(x[0])
    return jnp.stack([x[0] + 0.1 * velocity, velocity])


def pendulum_seen(x: Any) -> Any:
    return jnp.stack([jnp.sin(x[0]), x[0] * x[1]])


PENDULUM = rd.StateSpaceModel(
    rd.Gaussian(jnp.array([1.0, 0.0]), jnp.array([[0.3, 0.0], [0.1, 0.3]])),
    rd.NonlinearGaussianKernel(pendulum_mean, jnp.array([[0.05, 0.0], [0.02, 0.1]])),
    rd.NonlinearGaussianKernel(pendulum_seen, jnp.array([[0.2, 0.0], [0.05, 0.2]])),
)


@pytest.fixture(scope="module")
def swing() -> np.ndarray:
    """A series of the pendulum, with an entry and a row missing."""
    ys = np.array(PENDULUM.simulate(jax.random.key(3), 30)[1])
    ys[4, 1] = ys[9] = np.nan
    return ys


@pytest.fixture(scope="module")
def followed(swing: np.ndarray) -> dict[str, LinearisedPosterior]:
    """What two smoothers make of it, compiled once."""
    return {
        "extended": rd.extended_smoother(PENDULUM, swing),
        "unscented": rd.unscented_smoother(PENDULUM, swing),
    }


# --- linear models: the exact posterior, whatever the rule ----------------------------------------


def assert_same_chain(ours: rd.LinearGaussianChain, exact: rd.LinearGaussianChain) -> None:
    for name in ("mean", "covariance"):
        actual, expected = getattr(ours.laws, name), getattr(exact.laws, name)
        np.testing.assert_allclose(actual, expected, atol=1e-10)
    # Filtering laws and kernels are all there is to a chain.
    for name in ("weight", "bias", "scale_tril"):
        actual, expected = getattr(ours.kernels, name), getattr(exact.kernels, name)
        np.testing.assert_allclose(actual, expected, atol=1e-10)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("state", "obs", "method"),
    [
        (1, 1, "extended"),
        (1, 1, "unscented"),
        (1, 1, "iterated"),
        (1, 1, "iterated extended"),
        slow(1, 1, "cubature"),
        slow(1, 1, "gauss-hermite"),
        *(slow(2, 3, name) for name in METHODS),
        *(slow(3, 2, name) for name in METHODS),
        *(slow(2, 4, name) for name in METHODS),
        # Beyond a handful of rows the same functions call LAPACK.
        slow(8, 14, "extended"),
        slow(8, 14, "cubature"),
    ],
)
def test_linear_models_are_smoothed_exactly(state, obs, method):
    rng = np.random.default_rng(10 * state + obs)
    model = random_model(rng, state, obs, 1)
    inputs = rng.normal(size=(9, 1))
    _, ys = model.simulate(jax.random.key(0), 9, inputs=inputs)
    options: Any = dict(mask=random_mask(rng, 9, obs, 0.7), inputs=inputs, length=7)
    exact = rd.kalman_smoother(model, ys, **options)
    posterior = METHODS[method](hide_linearity(model), ys, **options)
    assert_same_chain(posterior.chain, exact.chain)
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-10)
    assert posterior.status == "ok"
    assert float(jnp.max(posterior.diagnostics.update_error)) < 1e-10
    assert np.all(np.asarray(posterior.changes) < 1e-10)


def test_linear_kernels_are_used_exactly_and_never_lost():
    # Data that the model cannot have made: the innovations say so, and the posterior is exact.
    model = scalar_model(linear_kernel(scale=0.1))
    ys = 100.0 + np.zeros((9, 1))
    exact = rd.kalman_smoother(model, ys)
    posterior = rd.extended_smoother(model, ys)
    assert_same_chain(posterior.chain, exact.chain)
    assert float(jnp.max(posterior.diagnostics.innovation_ratio)) > 4.0
    assert posterior.status == "ok" and not bool(posterior.lost)
    assert posterior.check() is posterior


@pytest.mark.slow
@pytest.mark.parametrize("method", ["extended", "unscented"])
def test_singular_noise_and_prior_are_smoothed_exactly(method):
    model = random_model(np.random.default_rng(3), 2, 1, singular=True)
    known = jnp.zeros((2, 2)).at[-1, -1].set(1.0)
    model = eqx.tree_at(lambda m: m.prior.scale_tril, model, known)
    _, ys = model.simulate(jax.random.key(0), 6)
    exact = rd.kalman_smoother(model, ys)
    posterior = METHODS[method](hide_linearity(model), ys)
    np.testing.assert_allclose(
        posterior.chain.marginals().covariance, exact.chain.marginals().covariance, atol=1e-10
    )
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-9)


# --- nonlinear models: the textbook, in numpy -----------------------------------------------------


def square(scale: Any) -> np.ndarray:
    return np.asarray(scale) @ np.asarray(scale).T


def textbook(ys: np.ndarray, linearise_move: Any, linearise_seen: Any) -> tuple:
    """Filter and Rauch-Tung-Striebel smoother on covariances, one matrix at a time.

    The two arguments map a mean and a covariance to a predicted mean, its covariance without noise,
    and the cross-covariance with the state.
    """
    mean, spread = np.asarray(PENDULUM.prior.mean), square(PENDULUM.prior.scale_tril)
    noise, error = (square(k.scale_tril) for k in (PENDULUM.transition, PENDULUM.emission))
    filtered, predicted, log_evidence = [], [], 0.0
    for k, y in enumerate(ys):
        if k > 0:
            moved, inner, cross = linearise_move(mean, spread)
            predicted.append((moved, inner + noise, cross))
            mean, spread = moved, inner + noise
        observed = ~np.isnan(y)
        if observed.any():
            expected, inner, cross = linearise_seen(mean, spread)
            total = (inner + error)[np.ix_(observed, observed)]
            gain = np.linalg.solve(total, cross[:, observed].T).T
            innovation = (y - expected)[observed]
            log_evidence -= 0.5 * (
                innovation @ np.linalg.solve(total, innovation)
                + np.linalg.slogdet(2 * np.pi * total)[1]
            )
            mean, spread = mean + gain @ innovation, spread - gain @ total @ gain.T
        filtered.append((mean, spread))
    smoothed = [filtered[-1]]
    for (mean, spread), (moved, total, cross) in zip(
        filtered[-2::-1], predicted[::-1], strict=True
    ):
        gain = np.linalg.solve(total, cross.T).T
        after, after_spread = smoothed[-1]
        smoothed.append(
            (mean + gain @ (after - moved), spread + gain @ (after_spread - total) @ gain.T)
        )
    means, spreads = zip(*smoothed[::-1], strict=True)
    return np.array(means), np.array(spreads), log_evidence


def by_jacobian(fn: Any) -> Any:
    value, slope = jax.jit(fn), jax.jit(jax.jacrev(fn))

    def linearise(mean: np.ndarray, spread: np.ndarray) -> tuple:
        w = np.asarray(slope(jnp.asarray(mean)))
        return np.asarray(value(jnp.asarray(mean))), w @ spread @ w.T, spread @ w.T

    return linearise


def by_unscented_transform(fn: Any, alpha: float, beta: float, kappa: float) -> Any:
    """The transform of Julier and Uhlmann as it is printed, negative weights and all."""
    evaluate = jax.jit(jax.vmap(fn))

    def linearise(mean: np.ndarray, spread: np.ndarray) -> tuple:
        d = len(mean)
        lam = alpha**2 * (d + kappa) - d
        root = np.linalg.cholesky((d + lam) * spread)
        points = np.array([mean, *(mean + root.T), *(mean - root.T)])
        mean_weights = np.full(2 * d + 1, 0.5 / (d + lam))
        mean_weights[0] = lam / (d + lam)
        weights = mean_weights.copy()
        weights[0] += 1 - alpha**2 + beta
        values = np.asarray(evaluate(jnp.asarray(points)))
        expected = mean_weights @ values
        moved, states = values - expected, points - mean
        return expected, moved.T * weights @ moved, states.T * weights @ moved

    return linearise


def assert_textbook(posterior: LinearisedPosterior, expected: tuple) -> None:
    marginals = posterior.chain.marginals()
    np.testing.assert_allclose(marginals.mean, expected[0], atol=1e-9)
    np.testing.assert_allclose(marginals.covariance, expected[1], atol=1e-9)
    assert float(posterior.log_evidence) == pytest.approx(expected[2], abs=1e-8)
    assert float(jnp.sum(posterior.log_evidence_increments)) == pytest.approx(expected[2], abs=1e-8)


def test_extended_smoother_equals_textbook_recursion(swing, followed):
    expected = textbook(swing, by_jacobian(pendulum_mean), by_jacobian(pendulum_seen))
    assert_textbook(followed["extended"], expected)


@pytest.mark.parametrize(
    "parameters", [(1.0, 0.0, 1.0), slow((3**0.5, 2.0, 1.0)), slow((0.1, 2.0, 0.0))], ids=str
)
def test_unscented_smoother_equals_textbook_recursion(swing, followed, parameters):
    transform = partial(by_unscented_transform, alpha=parameters[0])
    expected = textbook(
        swing,
        transform(pendulum_mean, beta=parameters[1], kappa=parameters[2]),
        transform(pendulum_seen, beta=parameters[1], kappa=parameters[2]),
    )
    posterior = followed[
        "unscented"
    ]  # in two dimensions, the first of the parameters are the default
    if parameters != (1.0, 0.0, 1.0):
        posterior = rd.unscented_smoother(PENDULUM, swing, rule=rd.Unscented(*parameters))
    assert_textbook(posterior, expected)


def test_prefix_equals_posterior_of_fewer_rows(swing, followed):
    fewer = swing.copy()
    fewer[12:] = np.nan
    posterior = rd.extended_smoother(PENDULUM, fewer).chain.prefix(12)
    assert_same_chain(posterior, followed["extended"].chain.prefix(12))


def wave(x: Any) -> Any:
    return x + 0.4 * jnp.sin(2.0 * x)


WAVES = rd.StateSpaceModel(
    rd.Gaussian(jnp.ones(1), jnp.eye(1)),
    nonlinear_kernel(wave, 0.3),
    nonlinear_kernel(lambda x: x + 0.2 * x**2, 0.5),
)


@pytest.mark.slow
@pytest.mark.parametrize("model", [WAVES, slow(PENDULUM)], ids=["waves", "pendulum"])
def test_iterated_extended_finds_the_most_probable_path(model):
    ys = np.array(model.simulate(jax.random.key(3), 30)[1])
    ys[4, 0] = ys[9] = np.nan
    smooth = partial(rd.iterated_smoother, model, ys, rule=rd.Taylor(), num_iterations=40)
    posterior = smooth()
    # Gauss-Newton: at its fixed point the gradient of the log-joint is zero.
    path = posterior.chain.marginals()
    slope = jax.jit(jax.grad(lambda xs: model.log_joint(xs, ys)))
    assert float(jnp.max(jnp.abs(slope(path.mean) * path.std))) < 1e-8
    assert posterior.changes.shape == (40,)
    assert float(posterior.changes[0]) > 1e-2 and float(posterior.changes[-1]) < 1e-8
    assert posterior.status == "ok"
    # Held back, it does not get there, and says so.
    short = smooth(damping=0.999)
    assert short.status == "not converged" and not bool(short.lost)
    with raises_with(ValueError, "last of 40 iterations", "num_iterations", "damping"):
        short.check()


@pytest.mark.slow
def test_damping_converges_where_full_steps_overshoot():
    # Full Gauss-Newton steps on an arctangent jump from one flat side to the other.
    model = scalar_model(lambda x: jnp.arctan(2.0 * x), 0.1, prior=2.0, scale=2.0)
    ys = jnp.arctan(2.0 * jnp.array([[3.0], [-3.0], [3.0], [-3.0]]))
    smooth = partial(rd.iterated_smoother, model, ys, rule=rd.Taylor(), num_iterations=60)
    full = smooth(damping=0.0)
    assert full.status == "lost" and float(full.changes[-1]) > 1.0
    damped = smooth(damping=0.5)
    assert damped.status == "ok" and float(damped.changes[-1]) < 1e-10
    slope = jax.jit(jax.grad(lambda xs: model.log_joint(xs, ys)))(damped.chain.marginals().mean)
    assert float(jnp.max(jnp.abs(slope))) < 1e-8


# --- conditional moments --------------------------------------------------------------------------


def dense_grid(model: Any, ys: Any, lower: float, upper: float) -> tuple:
    """Means, standard deviations and log-evidence by sums over 600 points, in numpy."""
    xs = np.linspace(lower, upper, 600)
    weight, scale = float(model.transition.weight[0, 0]), float(model.transition.scale_tril[0, 0])
    move = np.exp(-0.5 * ((xs[None, :] - weight * xs[:, None]) / scale) ** 2)
    move *= (xs[1] - xs[0]) / (scale * np.sqrt(2 * np.pi))
    density = jax.jit(jax.vmap(jax.vmap(model.emission.log_prob, (0, None)), (None, 0)))
    log_likelihood = np.nan_to_num(np.asarray(density(xs[:, None], jnp.nan_to_num(ys))))
    log_likelihood[np.isnan(np.asarray(ys))[:, 0]] = 0.0
    law = np.exp(-0.5 * (xs / float(model.prior.scale_tril[0, 0])) ** 2)
    law, filtered, log_evidence = law / law.sum(), [], 0.0
    for k, row in enumerate(log_likelihood):
        law = (law @ move if k else law) * np.exp(row)
        log_evidence += np.log(law.sum())
        law = law / law.sum()
        filtered.append(law)
    smoothed = [law]
    for law in filtered[-2::-1]:
        smoothed.append(law * (move @ (smoothed[-1] / np.maximum(law @ move, 1e-300))))
    weights = np.array(smoothed[::-1])
    mean = weights @ xs
    return mean, np.sqrt(weights @ xs**2 - mean**2), log_evidence


@pytest.mark.slow
def test_counts_are_linearised_by_conditional_moments():
    counts = rd.DistributionKernel(lambda x: dist.Poisson(jnp.exp(1.0 + x)))
    model = scalar_model(counts, prior=0.5, weight=0.95, scale=0.2)
    ys = model.simulate(jax.random.key(0), 40)[1].at[7].set(jnp.nan)
    mean, std, log_evidence = dense_grid(model, ys, -4.0, 4.0)
    posterior = rd.iterated_smoother(model, ys)
    marginals = posterior.chain.marginals()
    assert np.max(np.abs(marginals.mean[:, 0] - mean) / std) < 0.03
    np.testing.assert_allclose(marginals.std[:, 0], std, rtol=0.01)
    assert float(posterior.log_evidence) == pytest.approx(log_evidence, abs=1.0)
    assert posterior.status == "ok"


class Widening(rd.AbstractGaussianKernel):
    """A Gaussian kernel whose noise grows with the state."""

    takes_input: bool = eqx.field(static=True, default=False)  # pyright: ignore

    def law(self, x: Any, u: Any = None) -> rd.Gaussian:
        return rd.Gaussian(2.0 * x, jnp.diag(0.1 + 0.2 * x**2))


@pytest.mark.slow
def test_state_dependent_noise_is_averaged():
    model = scalar_model(Widening(), prior=0.5)
    y = jnp.array([[0.7]])
    posterior = rd.unscented_smoother(model, y, rule=rd.GaussHermite(7))
    # x ~ N(0, 1/4): E (0.1 + 0.2 x²)² = 0.01 + 0.04/4 + 0.04 · 3/16.
    total = 4 * 0.25 + 0.01 + 0.04 * 0.25 + 0.04 * 3 * 0.25**2
    assert float(posterior.chain.laws.mean[0, 0]) == pytest.approx(0.5 * 0.7 / total, abs=1e-12)
    expanded = rd.extended_smoother(model, y)
    assert float(expanded.chain.laws.mean[0, 0]) == pytest.approx(0.5 * 0.7 / 1.01, abs=1e-12)
    with raises_with(ValueError, "Unscented(alpha=0.1", "lose definiteness", "positive"):
        rd.unscented_smoother(model, y, rule=rd.Unscented(0.1, 2.0, 0.0))


COVARIANCE = jnp.array([[0.3, 0.1], [0.1, 0.2]])


@pytest.mark.parametrize(
    ("law", "covariance"),
    [
        (dist.MultivariateNormal(jnp.ones(2), COVARIANCE), COVARIANCE),
        (dist.MultivariateStudentT(4.0, jnp.ones(2), jnp.eye(2)), 2.0 * jnp.eye(2)),
        (dist.Normal(jnp.ones(2), jnp.array([0.3, 0.2])), jnp.diag(jnp.array([0.09, 0.04]))),
        (dist.Normal(jnp.ones(2), 0.5).to_event(1), 0.25 * jnp.eye(2)),
        (rd.Gaussian(jnp.ones(2), rd.Diagonal(jnp.array([2.0, 3.0]))), jnp.diag(jnp.array([4, 9]))),
    ],
    ids=["dense", "heavy tails", "entries", "event", "gaussian"],
)
def test_conditional_moments_equal_those_of_the_distribution(law, covariance):
    actual = moments.law_moments(law, jnp.dtype("float64"))
    np.testing.assert_allclose(actual.mean, jnp.ones(2), atol=1e-12)
    np.testing.assert_allclose(square(actual.scale), covariance, atol=1e-12)


@pytest.mark.slow
def test_row_with_joint_density_is_masked_as_a_whole():
    # Also: laws of numpyro as prior and emission, at once.
    joint = rd.DistributionKernel(lambda x: dist.MultivariateNormal(jnp.tile(x, 2), COVARIANCE))
    prior = dist.Normal(jnp.zeros(1), jnp.ones(1))
    model = replace(scalar_model(joint), prior=prior)
    ys = np.random.default_rng(0).normal(size=(6, 2))
    left_out = ys.copy()
    ys[2, 0], left_out[2] = np.nan, np.nan
    posterior, expected = rd.extended_smoother(model, ys), rd.extended_smoother(model, left_out)
    np.testing.assert_array_equal(posterior.chain.laws.mean, expected.chain.laws.mean)
    assert posterior.diagnostics.degrees.tolist() == [2, 2, 0, 2, 2, 2]
    assert float(posterior.log_evidence_increments[2]) == 0.0
    # Two readings of the first state, which is all that the linear-Gaussian update takes.
    gain = np.ones(2) @ np.linalg.inv(np.ones((2, 2)) + COVARIANCE)
    assert float(posterior.chain.laws.mean[0, 0]) == pytest.approx(float(gain @ ys[0]), abs=1e-12)


class Unknown(eqx.Module):
    """A law that says nothing of its moments."""

    location: jax.Array

    def log_prob(self, value: Any) -> Any:
        return -jnp.abs(value - self.location)

    def sample(self, key: Any, sample_shape: Any = ()) -> Any:
        return self.location + jax.random.laplace(key, (*sample_shape, *self.location.shape))


class MeanAlone(Unknown):
    @property
    def mean(self) -> jax.Array:
        return self.location


@pytest.mark.parametrize(
    ("law", "kind", "phrases"),
    [
        (Unknown, TypeError, ("emission cannot be linearised", "Unknown", "`mean` and `variance`")),
        (MeanAlone, TypeError, ("emission", "MeanAlone", "neither `covariance_matrix`")),
        (
            lambda x: dist.Dirichlet(jnp.exp(jnp.stack([x[0], -x[0]]))),
            TypeError,
            ("Dirichlet", "one density for all entries", "`covariance_matrix`"),
        ),
        (lambda x: dist.Cauchy(x, 1.0), ValueError, ("emission", "not finite", "Cauchy")),
    ],
    ids=["nothing", "mean", "dependent", "infinite"],
)
def test_laws_without_moments_are_refused(law, kind, phrases):
    model = scalar_model(rd.DistributionKernel(law))
    width = jax.eval_shape(lambda: model.simulate(jax.random.key(0), 1)[1]).shape[1]
    with raises_with(kind, *phrases):
        rd.extended_smoother(model, jnp.full((3, width), 0.5))


def test_a_prior_without_moments_is_refused():
    model = SATURATING
    model = replace(SATURATING, prior=Unknown(jnp.zeros(1)))
    with raises_with(TypeError, "prior cannot be linearised", "Unknown"):
        rd.unscented_smoother(model, jnp.zeros((3, 1)))


# --- being lost -----------------------------------------------------------------------------------


def many(smooth: Any, model: rd.StateSpaceModel, num_times: int, count: int) -> Any:
    """Simulated series, and what a smoother makes of them, all at once."""
    keys = jax.random.split(jax.random.key(11), count)
    ys = jax.vmap(lambda key: model.simulate(key, num_times)[1])(keys)
    return ys, jax.jit(jax.vmap(lambda y: smooth(model, y, mask=True)))(ys)


VARIANTS = ("cubature", "gauss-hermite", "iterated", "iterated extended")
"""Methods that share their code with another one here: theirs are run with the slow tests."""


@pytest.mark.parametrize("name", [slow(name) if name in VARIANTS else name for name in METHODS])
def test_linearised_smoothers_are_lost_on_a_square(name):
    _, posterior = many(METHODS[name], SQUARE, 40, 8)
    assert bool(jnp.all(posterior.lost)), posterior.code
    # They return the prior, of which the mean is zero.
    assert float(jnp.max(jnp.abs(posterior.chain.laws.mean))) < 1e-12
    assert float(jnp.min(jnp.max(posterior.diagnostics.relative_error, axis=1))) > 0.9


@pytest.mark.parametrize("num_times", [1, slow(7)])
def test_lost_status_works_on_short_series(num_times):
    posterior = rd.unscented_smoother(SQUARE, jnp.full((num_times, 1), 1.0))
    assert posterior.status == "lost" and int(posterior.status_time) == num_times - 1
    with raises_with(ValueError, "lost", "relative error of 95%", "grid_smoother"):
        posterior.check()


@pytest.mark.slow
def test_uninformative_conditional_mean_is_lost():
    # Stochastic volatility: the conditional mean is flat, so that its moments say nothing of x,
    # and the innovations are as large as they should be.
    volatility = rd.DistributionKernel(lambda x: dist.Normal(0.0 * x, jnp.exp(x / 2)))
    model = scalar_model(volatility, weight=0.95, scale=0.3)
    _, posterior = many(rd.unscented_smoother, model, 60, 4)
    assert bool(jnp.all(posterior.lost))


@pytest.fixture(scope="module")
def saturated() -> tuple:
    """Series of a saturating emission: the linearisation is often poor, and never lost."""
    return many(rd.extended_smoother, SATURATING, 100, 32)


def test_saturating_emission_is_not_lost(saturated):
    assert not bool(jnp.any(saturated[1].lost)), saturated[1].code


PAPER = paper_model()
PRECISE = scalar_model(jnp.tanh, 0.01, prior=0.3, scale=0.1)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        slow(PAPER, "unscented"),
        slow(PAPER, "extended"),
        slow(PAPER, "iterated"),
        slow(PRECISE, "extended"),
        slow(PRECISE, "unscented"),
        slow(SATURATING, "unscented"),
        slow(SATURATING, "iterated"),
        slow(SATURATING, "iterated extended"),
        slow(PENDULUM, "extended"),
        slow(PENDULUM, "iterated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_suitable_models_are_not_lost(model, method):
    _, posterior = many(METHODS[method], model, 100, 32)
    assert not bool(jnp.any(posterior.lost)), posterior.code


@pytest.mark.slow
def test_mild_curvature_gives_small_diagnostics():
    model = scalar_model(lambda x: x + 0.1 * jnp.sin(x), 0.1)
    _, posterior = many(rd.extended_smoother, model, 100, 32)
    assert not bool(jnp.any(posterior.code))
    assert float(jnp.max(posterior.diagnostics.relative_error)) < 0.2
    # A mean of 3200 squares of standard normal variables, each of variance 2.
    squares = posterior.diagnostics.squared_innovations
    assert float(jnp.mean(squares)) == pytest.approx(1.0, abs=5 * np.sqrt(2 / 3200))


@pytest.mark.slow
def test_iterated_smoother_is_closer_to_exact_posterior(saturated):
    ys = saturated[0][1]
    mean, std, _ = dense_grid(SATURATING, ys, -8.0, 8.0)

    def error(smooth: Any) -> float:
        marginals = smooth(SATURATING, ys).chain.marginals()
        return float(np.mean(np.abs(marginals.mean[:, 0] - mean) / std))

    assert error(rd.iterated_smoother) < min(0.2, 0.6 * error(rd.extended_smoother))


def test_diagnostic_distances_equal_dense_grid(saturated):
    ys, posterior = saturated
    xs = np.linspace(-8, 8, 8001)
    means, variances = (
        np.asarray(a) for a in (posterior.chain.laws.mean, posterior.chain.laws.covariance)
    )

    def normalised(log_density: np.ndarray) -> np.ndarray:
        density = np.exp(log_density - log_density.max())
        return density / density.sum()

    for i, k in ((0, 0), (0, 3), (1, 50), (2, 20), (3, 99)):
        mean, variance = 0.0, 1.0
        if k > 0:
            mean, variance = 0.9 * means[i, k - 1, 0], 0.81 * variances[i, k - 1, 0, 0] + 0.16
        prediction = -0.5 * (xs - mean) ** 2 / variance
        update = prediction - 0.5 * (float(ys[i, k, 0]) - np.tanh(xs)) ** 2 / 0.01
        made = -0.5 * (xs - means[i, k, 0]) ** 2 / variances[i, k, 0, 0]
        exact, before, after = (normalised(a) for a in (update, prediction, made))
        size, error = 0.5 * np.abs(exact - before).sum(), 0.5 * np.abs(exact - after).sum()
        assert float(posterior.diagnostics.update_size[i, k]) == pytest.approx(size, abs=0.03)
        assert float(posterior.diagnostics.update_error[i, k]) == pytest.approx(error, abs=0.03)


def test_a_wrong_state_shows_in_the_innovations():
    # Two wells, a linear emission, and a prior that is sure of the wrong well: each linearised
    # update is exact, and the transition pulls back what it learned.
    well = rd.NonlinearGaussianKernel(
        lambda x: x + 0.9 * x * (1 - x**2) / (1 + x**2), rd.Diagonal(jnp.array([0.02]))
    )
    model = replace(linear_model(mean=1.0, prior=0.02, error=0.3), transition=well)
    ys = -1.0 + 0.3 * np.random.default_rng(0).normal(size=(40, 1))
    posterior = rd.extended_smoother(model, ys)
    assert float(jnp.max(posterior.diagnostics.relative_error)) < 1e-10
    assert posterior.status == "lost" and int(posterior.status_time) == 19
    with raises_with(ValueError, "lost", "up to time 19", "squared innovations", "does not fit"):
        posterior.check()


def test_overflow_has_status_not_finite():
    explosion = rd.NonlinearGaussianKernel(lambda x: x**5, rd.Diagonal(jnp.ones(1)))
    model = replace(linear_model(mean=2.0), transition=explosion)
    posterior = rd.extended_smoother(model, jnp.full((12, 1), jnp.nan).at[0].set(3.0))
    assert posterior.status == "not finite" and 1 < int(posterior.status_time) < 11
    with raises_with(ValueError, f"not finite from time {int(posterior.status_time)} on"):
        posterior.check()


def test_status_averages_over_observed_rows():
    values = np.arange(60.0)
    observed = np.random.default_rng(0).random(60) < 0.6
    average = jax.jit(posterior._average)
    averages = np.asarray(average(values, observed))
    for k in range(60):
        rows = values[: k + 1][observed[: k + 1]]
        expected = rows[-20:].mean() if len(rows) >= 20 else 0.0
        assert averages[k] == pytest.approx(expected, abs=1e-12)
    few = np.asarray(average(values[:9], observed[:9]))
    assert few[-1] == pytest.approx(values[:9][observed[:9]].mean())
    assert not np.any(average(values, np.zeros(60, bool)))


@pytest.mark.slow
def test_diagnostics_of_long_series_are_batched(swing, followed, monkeypatch):
    model, measured = PENDULUM, followed["extended"].diagnostics
    series = prepare_data(model, swing)

    @eqx.filter_jit
    def update_sizes_and_errors() -> Any:
        filtered = recursion.linearised_filter(model, series, rd.Taylor())
        return posterior._readings(model, series, filtered)

    monkeypatch.setattr(posterior, "BATCH", 8)
    size, error = update_sizes_and_errors()
    np.testing.assert_allclose(size, measured.update_size, atol=1e-12)
    np.testing.assert_allclose(error, measured.update_error, atol=1e-12)


def test_missing_rows_have_zero_diagnostics(swing, followed):
    diagnostics = followed["extended"].diagnostics
    assert diagnostics.degrees[4] == 1 and diagnostics.degrees[9] == 0
    for values in (
        diagnostics.squared_innovations,
        diagnostics.update_size,
        diagnostics.update_error,
    ):
        assert float(values[9]) == 0.0
    blind = rd.extended_smoother(PENDULUM, np.full_like(swing, np.nan))
    assert blind.status == "ok" and float(blind.log_evidence) == 0.0


# --- batches, padding, precision, gradients -------------------------------------------------------


@pytest.mark.slow
def test_batches_and_padding_equal_single_series():
    ys = jax.vmap(lambda key: SATURATING.simulate(key, 8)[1])(
        jax.random.split(jax.random.key(2), 3)
    )
    lengths = jnp.array([8, 1, 5])

    def smooth(y: Any, length: Any) -> LinearisedPosterior:
        return rd.extended_smoother(SATURATING, y, length=length)

    batch, single = jax.jit(jax.vmap(smooth))(ys, lengths), jax.jit(smooth)
    posteriors = jax.tree.map(np.asarray, batch)

    def close(ours: Any, theirs: Any) -> None:
        np.testing.assert_allclose(ours, theirs, atol=1e-10)

    for i in range(3):
        ours = jax.tree.map(lambda leaf, i=i: leaf[i], posteriors)
        jax.tree.map(close, ours, single(ys[i], lengths[i]))
    # What stands in the padding does not matter, and the terminal law is repeated there.
    alone = rd.extended_smoother(SATURATING, np.asarray(ys)[2, :5])
    padded = jax.tree.map(lambda leaf: leaf[2], posteriors)
    close(padded.log_evidence, alone.log_evidence)
    close(padded.chain.laws.mean[:5], alone.chain.laws.mean)
    close(padded.chain.laws.mean[5:], np.tile(np.asarray(alone.chain.laws.mean)[-1:], (3, 1)))
    close(padded.chain.kernels.weight[:4], alone.chain.kernels.weight)
    close(padded.chain.kernels.weight[4:], np.ones((3, 1, 1)))
    close(padded.diagnostics.relative_error[4], alone.diagnostics.relative_error[-1])
    with raises_with(ValueError, "batch of posteriors", "jax.tree.map"):
        _ = batch.status
    with raises_with(ValueError, "not known inside"):
        jax.eval_shape(lambda y: smooth(y, 8).status, ys[0])


def test_linearised_chains_work_with_elbo_and_expectation(swing, followed):
    estimator = rd.BackwardSampling(64)
    bounds = {
        name: rd.elbo(PENDULUM, posterior.chain, swing, estimator=estimator, key=jax.random.key(0))
        for name, posterior in followed.items()
    }
    assert all(np.isfinite(float(bound)) for bound in bounds.values())


@pytest.mark.parametrize("name", ["iterated", slow("extended"), slow("unscented")])
@pytest.mark.slow
def test_linearised_smoothers_in_float32_stay_float32(x32, name):
    model = scalar_model(jnp.tanh, 0.1)
    posterior = METHODS[name](model, np.tanh(np.sin(0.3 * np.arange(30.0)))[:, None].astype("f4"))
    for leaf in jax.tree.leaves(jax.tree.map(np.asarray, posterior)):
        assert leaf.dtype in (np.int32, np.float32)
        assert np.all(np.isfinite(leaf))
    assert posterior.status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unscented", slow("extended"), slow("iterated")])
def test_gradients_of_evidence_and_means_equal_finite_differences(name):
    smooth = METHODS[name] if name != "iterated" else partial(METHODS[name], num_iterations=2)
    ys = SATURATING.simulate(jax.random.key(0), 6)[1].at[2].set(jnp.nan)

    def at(step: Any) -> Any:
        moved = eqx.tree_at(
            lambda m: (m.prior.mean, m.emission.scale_tril.std),
            SATURATING,
            (SATURATING.prior.mean + step, SATURATING.emission.scale_tril.std * (1.0 + step)),
        )
        posterior = smooth(moved, ys)
        return posterior.log_evidence + jnp.sum(posterior.chain.kernels.bias)

    run = jax.jit(jax.value_and_grad(at))
    (high, _), (low, _) = run(1e-5), run(-1e-5)
    assert float(run(0.0)[1]) == pytest.approx(float(high - low) / 2e-5, rel=1e-6)


# --- rules and misuse -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("singular", [False, True])
def test_rules_recover_linear_functions(rule, singular):
    rng = np.random.default_rng(0)
    weight, bias = jnp.asarray(rng.normal(size=(3, 2))), jnp.asarray(rng.normal(size=3))
    noise = jnp.asarray(np.tril(rng.normal(size=(3, 3)), -1) + np.eye(3))
    scale = jnp.array([[0.0 if singular else 0.5, 0.0], [0.3, 0.2]])
    law = law_of(jnp.array([1.0, -2.0]), scale)

    def moments_at(x: Any) -> GaussianLaw:
        return GaussianLaw(weight @ x + bias, noise)

    for constant in (True, False):
        if not constant and rule == rd.Unscented(0.1, 2.0, 0.0):
            continue
        run = jax.jit(lambda law, c=constant: rule.linearise(moments_at, law, constant_scale=c))
        linearisation = run(law)
        x = law.mean + scale @ jnp.array([0.7, -0.4])
        np.testing.assert_allclose(
            linearisation.weight @ x + linearisation.bias, weight @ x + bias, atol=1e-11
        )
        np.testing.assert_allclose(square(linearisation.scale), square(noise), atol=1e-11)


def test_gradients_are_finite_at_a_linear_function():
    # There the residuals of a regression are zero, and so is the square root of their covariance.
    def total(weight: Any, law: GaussianLaw) -> Any:
        def moments_at(x: Any) -> GaussianLaw:
            return GaussianLaw(weight @ x, jnp.zeros((2, 2)))

        affine = rd.Unscented().linearise(moments_at, law, constant_scale=True)
        return sum(jnp.sum(leaf) for leaf in affine)

    law = law_of(jnp.ones(2), jnp.array([[0.5, 0.0], [0.3, 0.0]]))
    slopes = jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.eye(2), law)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("parameters", [(1.0, 0.0, 1.0), (3**0.5, 2.0, 1.0), (0.1, 2.0, 0.0)])
def test_regression_equals_unscented_transform(parameters):
    mean, scale = np.array([0.5, -0.2]), np.array([[0.4, 0.0], [0.1, 0.3]])
    rule = rd.Unscented(*parameters)
    law = law_of(jnp.asarray(mean), jnp.asarray(scale))

    def moments_at(x: Any) -> GaussianLaw:
        return GaussianLaw(pendulum_seen(x), jnp.zeros((2, 2)))

    linearisation = jax.jit(lambda law: rule.linearise(moments_at, law, constant_scale=True))(law)
    expected, inner, cross = by_unscented_transform(pendulum_seen, *parameters)(mean, square(scale))
    w = np.asarray(linearisation.weight)
    np.testing.assert_allclose(w @ mean + linearisation.bias, expected, atol=1e-11)
    np.testing.assert_allclose(square(scale) @ w.T, cross, atol=1e-11)
    np.testing.assert_allclose(
        w @ square(scale) @ w.T + square(linearisation.scale), inner, atol=1e-11
    )


@pytest.mark.parametrize("rule", RULES[1:], ids=str)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_points_have_mean_zero_and_unit_covariance(rule, dim):
    nodes, weights, reference, spreads, excess = rule.points(dim)
    assert weights.sum() == pytest.approx(1.0) and reference.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(weights @ nodes, np.zeros(dim), atol=1e-12)
    np.testing.assert_allclose(nodes.T * weights @ nodes, np.eye(dim), atol=1e-12)
    assert spreads.min() >= 0 and excess >= 0
    # The opposite of each point is a point of the same weight.
    mirror = rules._mirror(nodes)
    np.testing.assert_allclose(nodes[mirror], -nodes, atol=1e-12)
    np.testing.assert_allclose(weights[mirror], weights, atol=1e-12)


def test_rules_refuse_bad_options():
    with raises_with(ValueError, "positive alpha", "-1.0"):
        rd.Unscented(alpha=-1.0)
    with raises_with(ValueError, "kappa above -2", "got -2.0"):
        rd.Unscented(kappa=-2.0).points(2)
    with raises_with(ValueError, "lose definiteness", "beta of at least alpha ** 2", "Cubature()"):
        rd.Unscented(alpha=1.0, beta=0.0, kappa=-1.0).points(2)
    with raises_with(ValueError, "order of at least 2"):
        rd.GaussHermite(1)
    with raises_with(ValueError, "10^6 points", "Cubature()"):
        rd.GaussHermite(10).points(6)


@pytest.mark.usefixtures("untyped")
def test_linearised_smoothers_refuse_bad_arguments_with_a_remedy():
    model: Any = SATURATING
    ys = np.zeros((3, 1))
    with raises_with(TypeError, "order must be a Python integer"):
        rd.GaussHermite(2.5)  # pyright: ignore[reportArgumentType]
    with raises_with(TypeError, "sigma points", "Taylor", "extended_smoother"):
        rd.unscented_smoother(model, ys, rule=rd.Taylor())  # pyright: ignore[reportArgumentType]
    with raises_with(TypeError, "expects a rule", "str"):
        rd.iterated_smoother(model, ys, rule="unscented")  # pyright: ignore[reportArgumentType]
    with raises_with(ValueError, "num_iterations must be at least 1"):
        rd.iterated_smoother(model, ys, num_iterations=0)
    with raises_with(ValueError, "damping", "got 1.0"):
        rd.iterated_smoother(model, ys, damping=1.0)
    with raises_with(ValueError, "1 columns", "got 2"):
        rd.extended_smoother(model, np.zeros((3, 2)))
    with raises_with(ValueError, "jax.vmap"):
        rd.extended_smoother(model, np.zeros((2, 3, 1)))
    with raises_with(ValueError, "inputs must be left out"):
        rd.extended_smoother(model, ys, inputs=ys)
    with raises_with(ValueError, "an emission with a density", "[0.]"):
        rd.extended_smoother(scalar_model(jnp.tanh, 0.0), ys)
    with raises_with(ValueError, "prior's parameters must be finite", "nan"):
        rd.extended_smoother(eqx.tree_at(lambda m: m.prior.mean, model, jnp.full(1, jnp.nan)), ys)
