"""Ready models against formulas written anew with numpy and scipy, and against statsmodels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_models import linear_transition_model
from scipy import linalg, optimize, stats

import retrodict as rd
from retrodict.models import READY, ModelError
from retrodict.models._equations import Lagged, Regular

NUM_TIMES = 9

RNG = np.random.default_rng(5)
WALK = np.cumsum(RNG.normal(size=40)) + np.tile([0.0, 2.0, -1.0, -1.0], 10) + RNG.normal(size=40)


def with_lags(lags: Any, **values: Any) -> rd.StateSpaceModel:
    """An autoregression with these coefficients, one line a column."""
    columns, order = np.shape(lags)
    model = rd.models.autoregressive(order=order, obs_dim=columns, **values)
    return rd.models.with_parameters(model, {"coefficients": lags})


normal = stats.norm.logpdf


# --- the log joint density of each model, without its prior ---------------------------------------


def of_level(p: dict, xs: Any, ys: Any, us: Any) -> float:
    moves = normal(xs[1:], xs[:-1], p["level_scale"])
    return moves.sum() + normal(ys, xs, p["obs_scale"]).sum()


def of_uneven_level(p: dict, xs: Any, ys: Any, us: Any) -> float:
    moves = normal(xs[1:], xs[:-1], p["level_scale"] * np.sqrt(us[1:]))
    return moves.sum() + normal(ys, xs, p["obs_scale"]).sum()


def of_trend(p: dict, xs: Any, ys: Any, us: Any) -> float:
    level, slope = xs.T
    return (
        normal(level[1:], level[:-1] + slope[:-1], p["level_scale"]).sum()
        + normal(slope[1:], slope[:-1], p["slope_scale"]).sum()
        + normal(ys[:, 0], level, p["obs_scale"]).sum()
    )


def of_season(p: dict, xs: Any, ys: Any, us: Any) -> float:
    """Level and the effects of a period of four steps."""
    level, seasons = xs[:, 0], xs[:, 1:]
    return (
        normal(level[1:], level[:-1], p["level_scale"]).sum()
        + normal(seasons[1:, 0], -seasons[:-1].sum(1), p["seasonal_scale"]).sum()
        + normal(seasons[1:, 1:], seasons[:-1, :-1], 1e-3 * p["seasonal_scale"]).sum()
        + normal(ys[:, 0], level + seasons[:, 0], p["obs_scale"]).sum()
    )


def of_two_lags(p: dict, xs: Any, ys: Any, us: Any) -> float:
    centred = xs - p["mean"][0]
    expected = p["mean"] + centred[:-1] @ p["coefficients"][0]
    return (
        normal(xs[1:, 0], expected, p["scale"]).sum()
        + normal(xs[1:, 1], xs[:-1, 0], 1e-3 * p["scale"]).sum()
        + normal(ys[:, 0], xs[:, 0], p["obs_scale"]).sum()
    )


def reverting(p: dict, xs: Any) -> float:
    expected = p["mean"] + p["persistence"] * (xs[:-1] - p["mean"])
    return normal(xs[1:], expected, p["scale"]).sum()


def of_one_lag(p: dict, xs: Any, ys: Any, us: Any) -> float:
    return reverting(p, xs) + normal(ys, xs, p["obs_scale"]).sum()


def of_volatility(p: dict, xs: Any, ys: Any, us: Any) -> float:
    return reverting(p, xs) + normal(ys, 0.0, np.exp(xs / 2)).sum()


def of_leverage(p: dict, xs: Any, ys: Any, us: Any) -> float:
    x, z = xs.T
    c, rho, size = np.sqrt(0.9), p["leverage"], np.exp(x / 2)
    expected = p["mean"] + p["persistence"] * (x[:-1] - p["mean"]) + p["scale"] * c * z[:-1]
    return (
        normal(x[1:], expected, p["scale"] * np.sqrt(0.1)).sum()
        + normal(z[1:]).sum()
        + normal(ys[:, 0], size * rho / c * z, size * np.sqrt(1 - rho**2 / 0.9)).sum()
    )


def of_poisson(p: dict, xs: Any, ys: Any, us: Any) -> float:
    return reverting(p, xs) + stats.poisson.logpmf(ys, us * np.exp(xs)).sum()


def of_negative_binomial(p: dict, xs: Any, ys: Any, us: Any) -> float:
    k = p["concentration"]
    walk = normal(xs[1:], xs[:-1], p["level_scale"]).sum()
    return walk + stats.nbinom.logpmf(ys, k, k / (k + np.exp(xs))).sum()


def of_binomial(p: dict, xs: Any, ys: Any, us: Any) -> float:
    return reverting(p, xs) + stats.binom.logpmf(ys, us, 1 / (1 + np.exp(-xs))).sum()


def moving(p: dict, xs: Any) -> float:
    block = p["velocity_scale"] ** 2 * np.array([[1 / 3, 1 / 2], [1 / 2, 1]])
    pairs = np.stack([xs[1:, :2] - xs[:-1, :2] - xs[:-1, 2:], xs[1:, 2:] - xs[:-1, 2:]], axis=-1)
    return stats.multivariate_normal.logpdf(pairs.reshape(-1, 2), np.zeros(2), block).sum()


def of_velocity(p: dict, xs: Any, ys: Any, us: Any) -> float:
    return moving(p, xs) + normal(ys, xs[:, :2], p["obs_scale"]).sum()


def of_range_and_bearing(p: dict, xs: Any, ys: Any, us: Any) -> float:
    place = (xs[:, 0] - 1.0) + 1j * (xs[:, 1] + 2.0)
    residual = np.angle(np.exp(1j * (ys[:, 1] - np.angle(place))))
    return (
        moving(p, xs)
        + normal(ys[:, 0], np.abs(place), p["range_scale"]).sum()
        + normal(residual, 0, p["bearing_scale"]).sum()
    )


def of_decoder(p: dict, xs: Any, ys: Any, us: Any) -> float:
    hidden = np.tanh(xs @ p["emission.fn.layers[0].weight"].T + p["emission.fn.layers[0].bias"])
    mean = hidden @ p["emission.fn.layers[1].weight"].T + p["emission.fn.layers[1].bias"]
    moves = normal(xs[1:], xs[:-1] @ p["dynamics"].T, p["state_scale"]).sum()
    return moves + normal(ys, mean, p["obs_scale"]).sum()


class Case(NamedTuple):
    name: str
    options: dict[str, Any]
    obs_dim: int
    oracle: Callable[..., float]
    inputs: Any
    values: dict[str, Any]


STEPS = np.array([0.0, 1.0, 0.5, 2.0, 0.1, 1.0, 3.0, 0.7, 1.0])[:, None]
TOTALS = np.array([5.0, 9.0, 1.0, 30.0, 7.0, 7.0, 7.0, 20.0, 12.0])[:, None]
PATH = {"prior.mean": 0.3, "prior.scale_tril.std": 1.3}
CASES = {
    "level": Case("local_level", {}, 2, of_level, None, {"level_scale": [0.5, 2.0]}),
    "uneven level": Case("local_level", {"irregular": True}, 1, of_uneven_level, STEPS, {}),
    "trend": Case("local_trend", {}, 1, of_trend, None, {"slope_scale": 0.3}),
    "season": Case("seasonal", {"period": 4}, 1, of_season, None, {"seasonal_scale": 0.4}),
    "one lag": Case("autoregressive", {}, 2, of_one_lag, None, {"persistence": [-0.4, 0.8]}),
    "two lags": Case(
        "autoregressive", {"order": 2}, 1, of_two_lags, None, {"coefficients": [[0.5, 0.2]]}
    ),
    "volatility": Case("stochastic_volatility", {}, 2, of_volatility, None, {"mean": -1.0}),
    "leverage": Case(
        "stochastic_volatility", {"leverage": True}, 1, of_leverage, None, {"leverage": -0.6}
    ),
    "poisson": Case("poisson_counts", {"exposure": True}, 2, of_poisson, TOTALS, {}),
    "negative binomial": Case(
        "negative_binomial_counts",
        {"walk": True},
        1,
        of_negative_binomial,
        None,
        {"concentration": 3.0},
    ),
    "binomial": Case("binomial_counts", {}, 1, of_binomial, TOTALS, {}),
    "velocity": Case("constant_velocity", {}, 2, of_velocity, None, {"velocity_scale": 0.7}),
    "range and bearing": Case(
        "range_bearing",
        {"sensor": [1.0, -2.0]},
        2,
        of_range_and_bearing,
        None,
        {"bearing_scale": 0.1},
    ),
    "decoder": Case("neural_decoder", {"width": 3}, 2, of_decoder, None, {}),
}


WITHOUT_REGIMES = [name for name, ready in READY.items() if "regimes" not in ready.options]
"""The others are tested in test_switching.py."""


def test_every_ready_model_has_a_case():
    assert {case.name for case in CASES.values()} == set(WITHOUT_REGIMES)


def build(case: Case) -> rd.StateSpaceModel:
    return rd.models.from_options(
        case.name, case.options, obs_dim=case.obs_dim, key=jax.random.key(3)
    )


@eqx.filter_jit
def value_and_gradient(model: rd.StateSpaceModel, xs: Any, ys: Any, us: Any) -> Any:
    return eqx.filter_value_and_grad(lambda model: model.log_joint(xs, ys, inputs=us))(model)


QUICK = ("uneven level", "season", "leverage", "poisson", "range and bearing")
"""One of each kind; each compiles its own programs, and the others are run with the slow tests."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_ready_model_equals_its_equation(name: str, tmp_path: Path):
    case = CASES[name]
    bare = rd.models.with_parameters(build(case), case.values)
    is_stationary = "prior.mean" not in rd.models.named_parameters(bare, fixed=True)
    bare = bare if is_stationary else rd.models.with_parameters(bare, PATH)
    xs, ys = bare.simulate(jax.random.key(1), NUM_TIMES, inputs=case.inputs)
    assert xs.shape == (NUM_TIMES, bare.state_dim) and ys.shape == (NUM_TIMES, case.obs_dim)

    value, gradient = value_and_gradient(bare, xs, ys, case.inputs)
    p = {k: np.asarray(v) for k, v in rd.models.named_parameters(bare, fixed=True).items()}
    expected = case.oracle(p, np.asarray(xs), np.asarray(ys), case.inputs)
    prior = rd.unwrap(bare).prior
    if is_stationary:
        mean, covariance = np.asarray(prior.mean), np.asarray(prior.covariance)  # tested below
        law: Any = stats.multivariate_normal
        expected += law.logpdf(np.asarray(xs[0]), mean, covariance)
    else:
        expected += normal(xs[0], p["prior.mean"], p["prior.scale_tril.std"]).sum()
    np.testing.assert_allclose(value, expected, rtol=2e-7, err_msg=name)

    # Learning moves what is listed as learned, and nothing else.
    learned = rd.models.named_parameters(bare)
    assert learned and not any(key.startswith("prior.") for key in learned)
    slopes = jax.tree.leaves(gradient)
    assert all(np.all(np.isfinite(leaf)) for leaf in slopes)
    assert sum(bool(np.any(leaf != 0)) for leaf in slopes) == len(learned)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient.prior))

    started = rd.models.start_from(bare, ys, inputs=case.inputs)
    assert not eqx.tree_equal(started, bare)
    assert np.isfinite(value_and_gradient(started, xs, ys, case.inputs)[0])

    rd.save(tmp_path / "model.rd", started)
    assert eqx.tree_equal(rd.load(tmp_path / "model.rd"), started)


# --- what the equations imply ---------------------------------------------------------------------


def test_leverage_correlates_return_with_next_log_volatility():
    """With z integrated out, (ε_t, η_{t+1}) is a Gaussian pair with correlation ρ."""
    mean, phi, scale, rho, x, y, after = -0.5, 0.9, 0.3, -0.7, 0.4, -1.1, 0.1
    model = rd.models.stochastic_volatility(
        leverage=True, mean=mean, persistence=phi, scale=scale, correlation=rho
    )
    nodes = np.linspace(-9.0, 9.0, 601)
    plain = rd.unwrap(model)
    states = jnp.stack([jnp.full(601, x), jnp.asarray(nodes)], axis=1)
    densities = jax.vmap(
        lambda s: (
            plain.emission.log_prob(s, jnp.array([y]))
            + plain.transition.log_prob(s, jnp.array([after, 0.0]))
        )
    )(states)
    # The new z is independent of all else; its density at 0 is divided out.
    mass = stats.norm.pdf(nodes) * (nodes[1] - nodes[0])
    integral = np.sum(mass * np.exp(densities)) / stats.norm.pdf(0.0)
    pair = [y * np.exp(-x / 2), (after - mean - phi * (x - mean)) / scale]
    covariance: Any = [[1, rho], [rho, 1]]
    exact = stats.multivariate_normal.pdf(pair, np.zeros(2), covariance)
    np.testing.assert_allclose(integral, exact * np.exp(-x / 2) / scale, rtol=1e-8)


@pytest.mark.statistical
def test_simulated_returns_have_leverage_correlation():
    """Two-sided at 4.5 standard errors: a false alarm in 1.5e5 seeds."""
    model = rd.models.stochastic_volatility(leverage=True, correlation=-0.6, persistence=0.9)
    xs, ys = model.simulate(jax.random.key(0), 50_000)
    x, y = np.asarray(xs[:, 0]), np.asarray(ys[:, 0])
    noise, step = (y * np.exp(-x / 2))[:-1], (x[1:] - 0.9 * x[:-1]) / 0.2
    error = (1 - 0.36) / np.sqrt(len(step))
    assert abs(np.corrcoef(noise, step)[0, 1] + 0.6) < 4.5 * error
    assert abs(noise.std() - 1) < 0.02 and abs(step.std() - 1) < 0.02


@pytest.mark.parametrize(
    "model",
    [
        rd.models.local_level(irregular=True, obs_dim=2, level_scale=[0.5, 2.0]),
        rd.models.local_trend(irregular=True, slope_scale=0.7),
        rd.models.seasonal(period=6, harmonics=2, slope=True, irregular=True),
        rd.models.autoregressive(irregular=True, mean=2.0, persistence=0.6),
        rd.models.constant_velocity(irregular=True, dim=2),
    ],
    ids=["level", "trend", "season", "autoregressive", "velocity"],
)
def test_two_short_time_steps_equal_one_long_step(model: rd.StateSpaceModel):
    """Models of uneven times are processes in continuous time, seen at some times."""
    kernel = rd.unwrap(model).transition
    first, second, both = (kernel.at(jnp.array([step])) for step in (0.4, 1.3, 1.7))
    noise = lambda k: k.scale_tril @ k.scale_tril.T  # noqa: E731
    np.testing.assert_allclose(second.weight @ first.weight, both.weight, atol=1e-12)
    np.testing.assert_allclose(second.weight @ first.bias + second.bias, both.bias, atol=1e-12)
    passed = second.weight @ noise(first) @ second.weight.T + noise(second)
    np.testing.assert_allclose(passed, noise(both), atol=1e-12)


@pytest.mark.parametrize(
    "regular, irregular",
    [
        (rd.models.local_level(), rd.models.local_level(irregular=True)),
        (
            rd.models.autoregressive(persistence=0.7, mean=1.0),
            rd.models.autoregressive(persistence=0.7, mean=1.0, irregular=True),
        ),
        (rd.models.constant_velocity(), rd.models.constant_velocity(irregular=True)),
    ],
)
def test_unit_time_steps_equal_regular_model(
    regular: rd.StateSpaceModel, irregular: rd.StateSpaceModel
):
    one, other = rd.unwrap(regular).transition, rd.unwrap(irregular).transition.at(jnp.ones(1))
    for a, b in ((one.weight, other.weight), (one.bias, other.bias)):
        np.testing.assert_allclose(a, b, atol=1e-14)
    np.testing.assert_allclose(one.scale_tril, other.scale_tril, atol=1e-14)


def test_bearing_residuals_wrap_around_the_circle():
    model = rd.models.range_bearing(bearing_scale=0.1, range_scale=1.0)
    flat = rd.models.range_bearing(bearing_scale=0.1, range_scale=1.0, wrap=False)
    behind = jnp.array([-2.0, 1e-3, 0.0, 0.0])
    across = jnp.array([2.0, -np.pi + 0.02])
    near = model.emission.log_prob(behind, across)
    residual = 0.02 + 1e-3 / 2
    expected = normal(0.0) + normal(residual, 0, 0.1)
    np.testing.assert_allclose(near, expected, atol=1e-5)
    assert rd.unwrap(flat).emission.log_prob(behind, across) < near - 1000
    ahead = jnp.array([2.0, 0.3, 0.0, 0.0])
    y = jnp.array([2.1, 0.2])
    np.testing.assert_allclose(
        rd.unwrap(flat).emission.log_prob(ahead, y), model.emission.log_prob(ahead, y), rtol=1e-12
    )
    draws = model.emission.law(behind).sample(jax.random.key(0), (50,))
    assert np.all(np.abs(draws[:, 1]) <= np.pi) and {-1, 1} == set(np.sign(draws[:, 1]).tolist())


# --- the stationary law of the first state --------------------------------------------------------


def lyapunov(weight: Any, bias: Any, noise: Any) -> tuple[np.ndarray, np.ndarray]:
    """The mean and covariance that a step leaves as they are."""
    weight, noise = np.asarray(weight), np.asarray(noise)
    mean = np.linalg.solve(np.eye(len(weight)) - weight, np.asarray(bias))
    return mean, linalg.solve_discrete_lyapunov(weight, noise @ noise.T)


LAGS = [[1.5, -0.6], [0.4, 0.3, -0.5]]
REVERTING: dict[str, Any] = {"mean": [1.0, -2.0], "persistence": [0.6, 0.97], "scale": [0.5, 2.0]}
STATIONARY = {
    "one lag": (rd.models.autoregressive(obs_dim=2, **REVERTING), 1e-12),
    "uneven": (rd.models.autoregressive(obs_dim=2, irregular=True, **REVERTING), 1e-12),
    "volatility": (rd.models.stochastic_volatility(obs_dim=2, **REVERTING), 1e-12),
    "leverage": (rd.models.stochastic_volatility(obs_dim=2, leverage=True, **REVERTING), 1e-12),
    "poisson": (rd.models.poisson_counts(obs_dim=2, **REVERTING), 1e-12),
    "negative binomial": (rd.models.negative_binomial_counts(obs_dim=2, **REVERTING), 1e-12),
    "binomial": (rd.models.binomial_counts(obs_dim=2, total_count=9, **REVERTING), 1e-12),
    # The memory of lags has noise of a thousandth, which the law leaves out.
    "two lags": (with_lags([LAGS[0], [-0.3, 0.2]]), 2e-5),
    "three lags": (with_lags([LAGS[1]]), 2e-5),
    "five lags": (with_lags([[0.9, -0.5, 0.3, 0.1, -0.2]]), 2e-5),
}


@pytest.mark.parametrize("name", STATIONARY)
def test_a_mean_reverting_model_starts_from_its_stationary_law(name: str):
    model, tolerance = STATIONARY[name]
    plain = rd.unwrap(model)
    for step in (1.0, 0.3, 7.0) if plain.transition.takes_input else (1.0,):
        kernel = plain.transition.at(jnp.array([step]))
        mean, covariance = lyapunov(kernel.weight, kernel.bias, kernel.scale_tril)
        np.testing.assert_allclose(plain.prior.mean, mean, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(
            plain.prior.covariance, covariance, rtol=tolerance, atol=tolerance
        )
    # It has no parameters of its own, and follows those of the process.
    assert not any(key.startswith("prior") for key in rd.models.named_parameters(model, fixed=True))
    wider = rd.models.with_parameters(
        model, {"scale": 3 * rd.models.named_parameters(model)["scale"]}
    )
    is_process = np.asarray(plain.prior.mean) != 0  # and not the noise that leverage adds
    ratio = np.asarray(rd.unwrap(wider).prior.std) / np.asarray(plain.prior.std)
    np.testing.assert_allclose(ratio[is_process], 3.0, rtol=1e-9)


def test_given_prior_is_kept():
    model = rd.models.autoregressive(order=2, prior_mean=3.0, prior_scale=0.5)
    started = rd.models.start_from(model, WALK[:, None])
    law = rd.unwrap(started).prior
    np.testing.assert_allclose(law.mean, [3.0, 3.0])
    np.testing.assert_allclose(law.covariance, 0.25 * np.eye(2))
    half = rd.unwrap(rd.models.poisson_counts(persistence=0.6, scale=0.8, prior_mean=2.0)).prior
    np.testing.assert_allclose([half.mean[0], half.std[0]], [2.0, 1.0])


@pytest.mark.parametrize(
    "lags",
    [pytest.param(LAGS[0], id="two"), pytest.param(LAGS[1], id="three", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("noise", [0.0, 0.7], ids=["exact", "noisy"])
def test_autoregressive_evidence_equals_statsmodels(lags: Any, noise: float, monkeypatch: Any):
    from statsmodels.tsa.statespace.sarimax import SARIMAX

    monkeypatch.setattr("retrodict.models._equations.LAG_NOISE", 0.0)
    jax.clear_caches()  # of programs with the usual noise
    mean, scale = 2.0, 1.3
    model = with_lags([lags], mean=mean, scale=scale, obs_scale=noise or 1e-7)
    other = SARIMAX(WALK, order=(len(lags), 0, 0), trend="c", measurement_error=noise > 0)
    variances = [noise**2, scale**2] if noise else [scale**2]
    expected = other.loglike([mean * (1 - sum(lags)), *lags, *variances])
    got = rd.kalman_smoother(model, WALK[:, None]).log_evidence
    np.testing.assert_allclose(got, expected, atol=1e-8 if noise else 1e-6)


@pytest.mark.slow
def test_short_autoregressive_series_are_fitted_by_exact_likelihood():
    """The first two of twelve rows have a law of their own, which says much of the lags."""
    rng = np.random.default_rng(1)
    xs, noise = np.zeros((60, 112)), rng.normal(size=(60, 112))
    for t in range(2, 112):
        xs[:, t] = 1.5 * xs[:, t - 1] - 0.6 * xs[:, t - 2] + noise[:, t]
    ys = xs[:, 100:, None]

    def loss(theta: np.ndarray) -> float:
        phi, (mean, scale) = theta[:2], theta[2:]
        roots = np.abs(np.linalg.eigvals(np.array([phi, [1.0, 0.0]])))
        if roots.max() >= 1 or scale <= 0:
            return np.inf
        law = lyapunov([phi, [1.0, 0.0]], np.zeros(2), np.diag([scale, 0.0]))[1]
        lags = list(law[0])
        for _ in range(10):
            lags.append(phi @ lags[-1:-3:-1])
        full = stats.multivariate_normal(np.full(12, mean), linalg.toeplitz(lags))  # pyright: ignore
        return -np.sum(full.logpdf(ys[:, :, 0]))

    options = {"maxiter": 2000, "xatol": 1e-6, "fatol": 1e-7}
    exact = optimize.minimize(loss, [1.2, -0.4, 0.5, 1.0], method="Nelder-Mead", options=options)
    start = rd.models.start_from(rd.models.autoregressive(order=2), ys)
    start = rd.models.with_parameters(start, {"obs_scale": 1e-4})
    start = rd.models.fix_parameters(start, ["obs_scale"])
    result = rd.fit_evidence(jax.random.key(0), start, ys, optimiser="lbfgs", progress=False)
    values = rd.models.named_parameters(result.model)
    got = np.concatenate([values[k].ravel() for k in ("coefficients", "mean", "scale")])
    np.testing.assert_allclose(got, exact.x, atol=2e-4)
    np.testing.assert_allclose(result.log_evidence, -exact.fun, atol=1e-2)


def test_autoregressive_coefficients_stay_stationary():
    with pytest.raises(ModelError, match=r"coefficients .*stationary autoregression"):
        rd.models.with_parameters(rd.models.autoregressive(order=2), {"coefficients": [0.7, 0.5]})
    entries = {"coefficients[0,0]": 1.5, "coefficients[0,1]": -0.6}
    moved = rd.models.with_parameters(rd.models.autoregressive(order=2), entries)
    np.testing.assert_allclose(rd.models.named_parameters(moved)["coefficients"], [[1.5, -0.6]])

    def first(raw: Any) -> Any:
        """The log density of a first state, which moves with the coefficients."""
        model = eqx.tree_at(lambda m: m.transition.fn.coefficients.raw, moved, raw.reshape(1, 2))
        return rd.unwrap(model).prior.log_prob(jnp.array([0.3, -1.1]))

    both = jax.jit(lambda raw: (first(raw), jax.grad(first)(raw), jax.hessian(first)(raw)))
    for raw in ([30.0, 0.0], [80.0, 80.0], [-60.0, -90.0], [500.0, -500.0]):
        assert all(np.all(np.isfinite(part)) for part in both(jnp.array(raw))), raw
    at, step = jnp.array([1.2, -0.8]), 1e-5
    columns = [(both(at + step * e)[1] - both(at - step * e)[1]) / (2 * step) for e in jnp.eye(2)]
    np.testing.assert_allclose(both(at)[2], np.stack(columns), rtol=1e-6, atol=1e-6)


def test_files_of_models_with_free_coefficients_still_load(tmp_path: Path):
    """Files of models whose prior was a fixed Gaussian, and whose coefficients were free."""
    started = rd.models.autoregressive(order=2)
    equation = Lagged(jnp.zeros(1), jnp.array([[0.4, 0.2]]), rd.Positive(jnp.ones(1)))
    law = rd.Gaussian(jnp.zeros(2), rd.Diagonal(rd.Positive(jnp.full(2, 10.0))))
    old = rd.StateSpaceModel(rd.Frozen(law), Regular(equation), started.emission)
    rd.save(tmp_path / "model.rd", old)
    read = rd.load(tmp_path / "model.rd")
    assert eqx.tree_equal(read, old)
    assert np.isfinite(rd.kalman_smoother(read, WALK[:, None]).log_evidence)
    np.testing.assert_allclose(rd.models.named_parameters(read)["coefficients"], [[0.4, 0.2]])


# --- against statsmodels --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, options, parameters, tolerance",
    [
        (
            rd.models.local_level(level_scale=0.8, obs_scale=1.2, prior_scale=30.0),
            {"level": "local level"},
            [1.2**2, 0.8**2],
            1e-9,
        ),
        (
            rd.models.seasonal(
                period=4, slope=True, level_scale=0.8, slope_scale=0.2, seasonal_scale=0.3,
                obs_scale=1.2, prior_scale=30.0,
            ),
            {"level": "local linear trend", "seasonal": 4},
            [1.2**2, 0.8**2, 0.2**2, 0.3**2],
            1e-4,  # the noise of what only remembers
        ),
        pytest.param(
            rd.models.seasonal(
                period=4, harmonics=1, level_scale=0.8, seasonal_scale=0.3, obs_scale=1.2,
                prior_scale=30.0,
            ),
            {"level": "local level", "freq_seasonal": [{"period": 4, "harmonics": 1}]},
            [1.2**2, 0.8**2, 0.3**2],
            1e-9,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["level", "trend and season", "cycle"],
)  # fmt: skip
def test_structural_evidence_equals_statsmodels(
    model: rd.StateSpaceModel, options: dict, parameters: list[float], tolerance: float
):
    from statsmodels.tsa.statespace.structural import UnobservedComponents

    other = UnobservedComponents(WALK, **options)
    d = model.state_dim
    other.ssm.initialize_known(np.zeros(d), 900 * np.eye(d))
    other.loglikelihood_burn = 0
    exact = rd.kalman_smoother(model, WALK[:, None])
    np.testing.assert_allclose(exact.log_evidence, other.loglike(parameters), rtol=tolerance)
    smoothed = other.smooth(parameters).smoothed_state[0]
    got = exact.chain.marginals().mean[:, 0]
    np.testing.assert_allclose(got, smoothed, atol=30 * tolerance)


# --- learning -------------------------------------------------------------------------------------


def test_fit_evidence_learns_only_free_parameters():
    model = rd.models.start_from(rd.models.local_level(), WALK[:, None])
    model = rd.models.fix_parameters(model, ["obs_scale"])
    assert set(rd.models.named_parameters(model)) == {"level_scale"}
    result = rd.fit_evidence(
        jax.random.key(0), model, WALK[:, None], num_steps=30, chunk_size=30, progress=False
    )
    before = rd.models.named_parameters(model, fixed=True)
    after = rd.models.named_parameters(result.model, fixed=True)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {"level_scale"} and after["level_scale"] > 0
    assert result.log_evidence > rd.kalman_smoother(model, WALK[:, None]).log_evidence
    # A start from the same data leaves alone what was fixed.
    again = rd.models.start_from(result.model, 10 * WALK[:, None])
    assert rd.models.named_parameters(again, fixed=True)["obs_scale"] == before["obs_scale"]


@pytest.mark.slow
def test_kalman_family_accepts_ready_model_with_uneven_times():
    model = rd.models.local_trend(irregular=True, prior_scale=5.0)
    steps, ys = jnp.asarray(STEPS), jnp.asarray(WALK[:NUM_TIMES, None])
    family = rd.KalmanFamily(model, input_dim=1)
    exact = rd.kalman_smoother(model, ys, inputs=steps).chain.marginals()
    chain: Any = family.infer(ys, inputs=steps)
    np.testing.assert_allclose(chain.marginals().mean, exact.mean, atol=1e-8)


def test_em_refuses_models_without_m_step():
    with pytest.raises(ValueError, match=r"is a Regular.*fit_evidence"):
        rd.em(jax.random.key(0), rd.models.local_level(), WALK[:, None], num_iterations=1)


@pytest.mark.slow
def test_a_family_and_a_model_are_learned_together():
    model = rd.models.stochastic_volatility(leverage=True, correlation=-0.5)
    _, ys = model.simulate(jax.random.key(0), 60)
    start = rd.models.start_from(model, ys)
    family = rd.GatedFamily(jax.random.key(1), state_dim=2, obs_dim=1, width=8)
    result = rd.fit(
        jax.random.key(2), family, start, ys[None], num_steps=50, learn="both", progress=False
    )
    before, after = (rd.models.named_parameters(m, fixed=True) for m in (start, result.model))
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {"mean", "persistence", "scale", "leverage"}
    assert abs(after["leverage"]) < 0.9 and abs(after["persistence"]) < 1 and after["scale"] > 0


# --- starts ---------------------------------------------------------------------------------------


def test_starting_values_have_the_scale_of_the_data():
    ys = 1e4 + 50 * RNG.normal(size=(200, 1))
    level = rd.models.named_parameters(rd.models.start_from(rd.models.local_level(), ys))
    assert 5 < level["level_scale"] < 500 and 5 < level["obs_scale"] < 500
    counts = RNG.poisson(40.0, size=(200, 1))
    rate = rd.models.named_parameters(rd.models.start_from(rd.models.poisson_counts(), counts))
    np.testing.assert_allclose(rate["mean"], np.log(40), atol=0.2)
    returns = 0.01 * RNG.normal(size=(500, 1))
    log_variance = rd.models.named_parameters(
        rd.models.start_from(rd.models.stochastic_volatility(), returns)
    )
    np.testing.assert_allclose(log_variance["mean"], np.log(1e-4), atol=0.4)


WITH_WEIGHTS = ("neural_decoder", "recurrent_switching")
"""Models with random weights, which are not started from data."""


@pytest.mark.parametrize("name", [name for name in READY if name not in WITH_WEIGHTS])
@pytest.mark.parametrize("kind", ["missing", "constant", "short"])
def test_starting_values_are_finite_for_any_data(name: str, kind: str):
    options = {"total_count": 9} if name == "binomial_counts" else {}
    model = rd.models.from_options(name, options, obs_dim=2)
    ys = {
        "missing": np.full((5, 2), np.nan),
        "constant": np.full((5, 2), 3.0),
        "short": np.array([[2.0, 1.0]]),
    }[kind]
    started = rd.models.start_from(model, ys)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(started))


def test_starting_values_ignore_missing_and_padded_rows():
    ys = np.concatenate([RNG.normal(size=(20, 1)), np.full((20, 1), 1e6)])
    model = rd.models.local_level()
    short = rd.models.start_from(model, ys[:20])
    assert eqx.tree_equal(rd.models.start_from(model, ys, length=20), short)
    assert eqx.tree_equal(rd.models.start_from(model, ys, mask=ys < 1e5), short)
    assert eqx.tree_equal(rd.models.start_from(model, np.where(ys < 1e5, ys, np.nan)), short)


# --- parameters by name ---------------------------------------------------------------------------


def user_model() -> rd.StateSpaceModel:
    emission = rd.LinearGaussianKernel(
        jnp.ones((1, 2)), rd.Frozen(jnp.zeros(1)), rd.Diagonal(rd.Positive(jnp.ones(1)))
    )
    return linear_transition_model(emission, 2, weight=0.5, noise=0.1)


def test_parameters_of_any_model_are_named_by_path():
    model = user_model()
    names = set(rd.models.named_parameters(model, fixed=True))
    assert names == {
        "prior.mean", "prior.scale_tril", "transition.weight", "transition.bias",
        "transition.scale_tril", "emission.weight", "emission.bias", "emission.scale_tril.std",
    }  # fmt: skip
    assert "emission.bias" not in rd.models.named_parameters(model)
    entries = rd.models.named_parameters(model, entries=True)
    assert entries["transition.weight[1,1]"] == 0.5 and entries["transition.weight[0,1]"] == 0
    moved = rd.models.with_parameters(
        model,
        {"transition.weight[0,1]": 0.25, "emission.scale_tril.std": 2.0, "emission.bias": 1.0},
    )
    plain = rd.unwrap(moved)
    np.testing.assert_array_equal(plain.transition.weight, [[0.5, 0.25], [0, 0.5]])
    np.testing.assert_allclose(plain.emission.scale_tril.std, [2.0])
    assert isinstance(moved.emission.bias, rd.Frozen) and plain.emission.bias == 1.0
    assert rd.models.start_from(model, WALK[:, None]) is model


def test_a_set_parameter_keeps_its_domain():
    model = rd.models.stochastic_volatility(leverage=True)
    for values, reason in [
        ({"scale": -1.0}, "positive"),
        ({"persistence": 1.5}, "strictly between"),
        ({"mean": [1.0, 2.0]}, r"of shape \(1,\) cannot be"),
        ({"mean": "high"}, "cannot be 'high'"),
        ({"mean": np.nan}, "finite"),
        ({"scal": 1.0}, "no parameter scal. Did you mean scale?"),
        ({"mean[3]": 1.0}, r"mean\[3\] cannot be set"),
    ]:
        with pytest.raises(ModelError, match=reason):
            rd.models.with_parameters(model, values)
    with pytest.raises(ModelError, match="only all of mean can be fixed"):
        rd.models.fix_parameters(model, ["mean[0]"])
    fixed = rd.models.fix_parameters(model, iter(["mean", "scale", "mean"]))
    assert set(rd.models.named_parameters(fixed)) == {"persistence", "leverage"}
    assert rd.models.fix_parameters(model, []) is model


@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda: rd.models.seasonal(period=1), "`period` must be at least 2"),
        (lambda: rd.models.seasonal(period=4, harmonics=3), "`harmonics` must be between 0 and 2"),
        (lambda: rd.models.seasonal(irregular=True), "`harmonics` must be at least 1"),
        (lambda: rd.models.autoregressive(order=2, irregular=True), "`order` must be 1"),
        (lambda: rd.models.stochastic_volatility(leverage=True, irregular=True), "regular times"),
        (lambda: rd.models.range_bearing(sensor=(1.0,)), "two coordinates"),
        (lambda: rd.models.binomial_counts(total_count=-1), "at least 0"),
        (lambda: rd.models.from_options("local_levle"), "Did you mean local_level?"),
        (lambda: rd.models.from_options("range_bearing", obs_dim=1), "model of 2 columns, got 1"),
        (lambda: rd.models.from_options("neural_decoder"), "pass key="),
        (
            lambda: rd.models.from_options("seasonal", {"period": 4.0}),
            "period must be a whole number",
        ),
        (lambda: rd.models.from_options("seasonal", {"slope": 1}), "slope must be true or false"),
    ],
)
def test_wrong_options_are_refused(call: Callable[[], Any], reason: str):
    with pytest.raises(ValueError, match=reason):
        call()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("autoregressive", {"order": 3}, ["signal", "signal_lag1", "signal_lag2"]),
        ("seasonal", {"period": 4}, ["level", "season", "season_lag1", "season_lag2"]),
        ("stochastic_volatility", {"leverage": True}, ["log_variance", "shock"]),
        ("local_trend", {}, ["level", "slope"]),
    ],
)
def test_states_and_parameters_have_names(name: str, options: dict, expected: list[str]):
    model = rd.models.from_options(name, options)
    assert rd.models.state_names(model) == expected
    assert rd.models.is_memory(model) == ["_lag" in state for state in expected]
    assert rd.models.entry_name(model, "prior.mean", (0,), ["y"]) == f"prior.mean[{expected[0]}]"


def test_state_named_like_a_column_gets_a_suffix():
    model = rd.models.autoregressive()
    assert rd.models.state_names(model, ["value"]) == ["signal"]
    assert rd.models.state_names(model, ["signal"]) == ["signal_state"]


@pytest.mark.parametrize("name", ["poisson_counts", "negative_binomial_counts"])
def test_models_refuse_bad_counts(name: str):
    for value in (2.5, -1.0):
        ys = np.array([[3.0], [np.nan], [value]])
        with pytest.raises(ValueError, match=f"row 3 of series 1, column 1, holds {value:g}"):
            rd.models.start_from(rd.models.from_options(name, {}, obs_dim=1), ys)
