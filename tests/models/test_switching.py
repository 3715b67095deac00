"""Ready models with regimes, against their equations in scipy and against the library's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import retrodict as rd
from retrodict.models import READY, ModelError, entry_name, named_parameters, with_parameters
from retrodict.models import _by_regime as by_regime

SWITCHING = {"markov_switching", "hmm", "switching_level", "recurrent_switching"}
NUM_TIMES = 9
normal = stats.norm.logpdf


def of_chain(p: dict, zs: np.ndarray) -> float:
    """The law of a path of regimes that starts in its stationary law."""
    matrix = p["transition"]
    values, vectors = np.linalg.eig(matrix.T)
    law = np.real(vectors[:, np.argmax(np.real(values))])
    law = law / law.sum()
    return np.log(law[zs[0]]) + np.log(matrix[zs[:-1], zs[1:]]).sum()


def of_means(p: dict, zs: Any, xs: Any, ys: Any) -> float:
    return of_chain(p, zs) + normal(ys, p["mean"][zs], p["scale"][zs]).sum()


def of_lagged_means(p: dict, zs: Any, xs: Any, ys: Any) -> float:
    """Hamilton's autoregression: each lag is centred at the mean of its own regime."""
    centred = ys - p["mean"][zs]
    lag = p["coefficients"][0]
    expected = p["mean"][zs][2:] + lag[0] * centred[1:-1] + lag[1] * centred[:-2]
    return of_chain(p, zs) + normal(ys[2:], expected, p["scale"]).sum()


def of_intercepts(p: dict, zs: Any, xs: Any, ys: Any) -> float:
    lag = p["coefficients"][zs[1:], :, 0]
    return (
        of_chain(p, zs) + normal(ys[1:], p["intercept"][zs[1:]] + lag * ys[:-1], p["scale"]).sum()
    )


def of_counts(p: dict, zs: Any, xs: Any, ys: Any) -> float:
    return of_chain(p, zs) + stats.poisson.logpmf(ys, p["rate"][zs]).sum()


def of_walk(p: dict, zs: Any, xs: Any, ys: Any) -> float:
    moves = normal(xs[1:], xs[:-1] + p["drift"][zs[1:]], p["level_scale"])
    first = normal(xs[0], p["prior.mean"], p["prior.scale_tril.std"]).sum()
    return of_chain(p, zs) + first + moves.sum() + normal(ys, xs, p["obs_scale"][zs]).sum()


def of_recurrent(p: dict, zs: Any, xs: Any, ys: Any) -> float:
    """Regimes that depend on the state before them."""
    total = normal(xs[0], p["prior.mean"], p["prior.scale_tril.std"]).sum()
    first = p["regimes.initial_logits"]
    total += (first - np.logaddexp.reduce(first))[zs[0]]
    for z, before, z_next, x in zip(zs[:-1], xs[:-1], zs[1:], xs[1:], strict=True):
        logits = p["regimes.transition_logits"][z] + p["regimes.state_weight"] @ before
        total += (logits - np.logaddexp.reduce(logits))[z_next]
        name = f"transition[{z_next}]"
        mean = p[f"{name}.weight"] @ before + p[f"{name}.bias"]
        total += normal(x, mean, p[f"{name}.scale_tril.std"]).sum()
    seen = xs @ p["emission.weight"].T + p["emission.bias"]
    return total + normal(ys, seen, p["emission.scale_tril.std"]).sum()


class Case(NamedTuple):
    name: str
    options: dict[str, Any]
    obs_dim: int
    oracle: Callable[..., float]
    digits: int = 0  # lags whose regimes are part of the state of the chain


CASES = {
    "means": Case("markov_switching", {"regimes": 3, "switching": "mean,variance"}, 2, of_means),
    "lagged means": Case("markov_switching", {"order": 2}, 1, of_lagged_means, 2),
    "intercepts": Case(
        "markov_switching", {"order": 1, "switching": "intercept, autoregression"}, 1, of_intercepts
    ),
    "hmm": Case("hmm", {}, 2, of_means),
    "counts": Case("hmm", {"emission": "poisson", "regimes": 3}, 1, of_counts),
    "walk": Case("switching_level", {"switching": "drift,obs_scale"}, 1, of_walk),
    "recurrent": Case("recurrent_switching", {"regimes": 2}, 3, of_recurrent),
}


def build(case: Case) -> rd.switching.SwitchingModel:
    """Build a model whose shared parameters are not at special values."""
    key = jax.random.key(3)
    model: Any = rd.models.from_options(case.name, case.options, obs_dim=case.obs_dim, key=key)
    values = {"coefficients": 0.3, "prior.mean": 0.4, "prior.scale_tril.std": 1.2}
    known = named_parameters(model, fixed=True)
    model = with_parameters(model, {name: v for name, v in values.items() if name in known})
    if "transition" in known:
        matrix = np.full(known["transition"].shape, 0.2) + 0.3 * np.eye(len(known["transition"]))
        matrix[0] = matrix[0][::-1]
        matrix /= matrix.sum(axis=1, keepdims=True)
        model = with_parameters(model, {"transition": matrix})
    return model


def test_every_model_with_regimes_has_a_case():
    assert {case.name for case in CASES.values()} == SWITCHING <= set(READY)


@pytest.mark.parametrize("name", CASES)
def test_model_with_regimes_equals_its_equation(name: str, tmp_path: Path):
    case = CASES[name]
    model = build(case)
    states, xs, ys = model.simulate(jax.random.key(1), NUM_TIMES)
    digits = getattr(rd.unwrap(model).regimes, "digits", None)
    zs = np.asarray(states) if digits is None else digits[np.asarray(states), 0]

    value = model.log_joint(states, xs if model.state_dim else None, ys)
    p = {k: np.asarray(v) for k, v in named_parameters(model, fixed=True).items()}
    expected = case.oracle(p, zs, np.asarray(xs), np.asarray(ys))
    if digits is not None and case.digits:  # the first state holds the regimes before it, too
        first = digits[int(states[0])][::-1]
        expected += of_chain(p, first) - of_chain(p, first[-1:])
    np.testing.assert_allclose(value, expected, rtol=1e-9, err_msg=name)

    rd.save(tmp_path / "model.rd", model)
    assert eqx.tree_equal(rd.load(tmp_path / "model.rd"), model)


def test_markov_switching_equals_the_autoregression_of_the_library():
    """Two parametrisations of Hamilton's model have the same evidence."""
    library = rd.switching.markov_autoregression(2, order=3, switching_scale=True)
    coefficients = [[0.3, 0.1, -0.2]]
    library = eqx.tree_at(lambda m: m.emission.coefficients, library, jnp.array(coefficients))
    emission, regimes = library.emission, rd.unwrap(library).regimes
    ready = with_parameters(
        rd.models.markov_switching(order=3, switching="mean,variance"),
        {
            "mean": np.asarray(rd.unwrap(emission.levels))[:, None],
            "scale": np.asarray(rd.unwrap(emission.std))[:, None],
            "coefficients": coefficients,
            "transition": np.exp(np.asarray(regimes.base_transition())),
        },
    )
    ys = np.random.default_rng(0).normal(size=(30, 1)).cumsum(axis=0)
    expected = rd.switching.log_evidence(library, ys)
    np.testing.assert_allclose(rd.switching.log_evidence(ready, ys), expected, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in CASES if name != "recurrent"])
def test_order_of_regimes_does_not_change_the_evidence(name: str):
    model = build(CASES[name])
    _, _, ys = model.simulate(jax.random.key(1), NUM_TIMES)
    started: Any = rd.models.start_from(model, ys)
    assert not eqx.tree_equal(started, model)
    value = rd.switching.log_evidence(started, ys)
    assert np.isfinite(value)

    count = len(rd.models.regime_names(model))
    reversed_model = by_regime.with_regimes(started, np.arange(count)[::-1])
    np.testing.assert_allclose(rd.switching.log_evidence(reversed_model, ys), value, rtol=1e-9)
    order = by_regime.canonical_order(reversed_model)
    assert order is not None and order.tolist() == list(range(count))[::-1]
    sorted_model = by_regime.with_regimes(reversed_model, order)
    for before, after in zip(
        named_parameters(started).values(), named_parameters(sorted_model).values(), strict=True
    ):
        np.testing.assert_allclose(after, before, rtol=1e-9)


def test_transition_probabilities_keep_their_value():
    matrix = np.array([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05], [0.3, 0.3, 0.4]])
    parameter = by_regime.TransitionProbabilities(matrix)
    np.testing.assert_allclose(parameter.value, matrix, atol=1e-12)
    assert parameter.raw.shape == (3, 2) and parameter.domain((0, 0)) == (0.0, 1.0)
    single = by_regime.TransitionProbabilities([[1.0]])
    assert single.raw.shape == (1, 0) and single.value.tolist() == [[1.0]]


@pytest.mark.parametrize("matrix", [[[0.5, 0.4], [0.5, 0.5]], [[1.0, 0.0], [0.5, 0.5]], [0.5, 0.5]])
def test_matrices_without_probabilities_are_refused(matrix: Any):
    with pytest.raises(ValueError, match="TransitionProbabilities expects"):
        by_regime.TransitionProbabilities(matrix)


def test_parameters_are_named_by_regime_and_column():
    model = rd.models.markov_switching(order=1, switching="mean", obs_dim=2)
    columns = ["gdp", "jobs"]
    names = {
        entry_name(model, name, index, columns)
        for name, value in named_parameters(model).items()
        for index in np.ndindex(value.shape)
    }
    assert {"mean[regime_2,jobs]", "scale[gdp]", "transition[regime_1,regime_2]"} <= names
    assert {"coefficients[jobs,0]"} <= names and len(names) == 4 + 4 + 2 + 2


BAD_OPTIONS = {
    "no regimes": ("hmm", {"regimes": 0}, "regimes must be at least 1, got 0"),
    "too many regimes": ("hmm", {"regimes": 51}, "regimes must be at most 50, got 51"),
    "negative order": ("markov_switching", {"order": -1}, "`order` must be at least 0"),
    "too many states": ("markov_switching", {"order": 11}, "use a smaller order"),
    "unknown part": ("markov_switching", {"switching": "drift"}, "must name one or more of mean"),
    "nothing": ("switching_level", {"switching": ""}, "must name one or more of level_scale"),
    "no lags": ("markov_switching", {"switching": "autoregression"}, "needs lags: set `order`"),
    "two levels": ("markov_switching", {"switching": "mean,intercept"}, "not both"),
    "unknown law": ("hmm", {"emission": "gamma"}, "`emission` must be gaussian or poisson"),
    "a number": ("hmm", {"emission": 3}, "emission must be a text, got 3"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused(name: str):
    model, options, words = BAD_OPTIONS[name]
    with pytest.raises(ModelError, match=words):
        rd.models.from_options(model, options)


def test_one_regime_is_the_model_without_regimes():
    """K = 1: a Gaussian sample, and a local level."""
    ys = np.random.default_rng(0).normal(size=(20, 1))
    alone = rd.models.markov_switching(regimes=1)
    expected = normal(ys, 0.0, 1.0).sum()
    np.testing.assert_allclose(rd.switching.log_evidence(alone, ys), expected, rtol=1e-12)
    level = rd.switching.log_evidence(rd.models.switching_level(regimes=1), ys)
    plain = rd.kalman_smoother(rd.models.local_level(), ys).log_evidence
    np.testing.assert_allclose(level, plain, rtol=1e-12)
