"""The family of switching models: its start, its protocol, and its training by `fit`."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import arrays_equal

import retrodict as rd
from retrodict.switching import SwitchingFamily

EYE, ZERO = jnp.eye(1), jnp.zeros(1)
N, BATCH = 10, 16


def linear_model(*, inputs: bool = False) -> rd.switching.SwitchingModel:
    moved = jnp.ones((2, 1)) if inputs else None
    regimes = rd.switching.Regimes(
        jnp.array([0.0, 0.3]),
        jnp.array([[1.0, -0.5], [0.2, 0.7]]),
        input_weight=jnp.array([[0.5], [-0.5]]) if inputs else None,
    )
    weight = jnp.array([[0.9, 0.2], [-0.1, 0.8]])
    return rd.switching.SwitchingModel(
        regimes,
        prior=rd.Gaussian(jnp.ones(2), jnp.eye(2)),
        transition=[
            rd.LinearGaussianKernel(weight, jnp.full(2, shift), scale * jnp.eye(2), moved)
            for shift, scale in ((-1.0, 0.3), (1.0, 0.8))
        ],
        emission=[
            rd.LinearGaussianKernel(jnp.array([[1.0, slope]]), ZERO + 3.0, 0.4 * EYE)
            for slope in (0.5, -0.5)
        ],
    )


def tanh_model(*, error: float = 0.2) -> rd.switching.SwitchingModel:
    return rd.switching.SwitchingModel(
        rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        prior=rd.Gaussian(ZERO, EYE),
        transition=[
            rd.LinearGaussianKernel(0.8 * EYE, ZERO + shift, scale * EYE)
            for shift, scale in ((-0.3, 0.3), (0.3, 0.6))
        ],
        emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(jnp.array([error]))),
    )


def simulate(model: Any, count: int, num_times: int = N, inputs: Any = None) -> jax.Array:
    keys = jax.random.split(jax.random.key(0), count)
    return jax.vmap(lambda key: model.simulate(key, num_times, inputs=inputs)[2])(keys)


def network_family(state_dim: int = 1, input_dim: int = 0, **options: Any) -> SwitchingFamily:
    return SwitchingFamily(
        jax.random.key(1), state_dim, 1, 2, input_dim=input_dim, width=8, depth=1, **options
    )


def rows(inputs: bool) -> tuple[Any, dict[str, Any]]:
    """One series with gaps and padding, and inputs if they are wanted."""
    us = np.linspace(-1.0, 1.0, N)[:, None] if inputs else None
    ys = np.array(simulate(linear_model(inputs=inputs), 1, inputs=us)[0])
    mask = np.ones((N, 1), bool)
    mask[2:4] = False
    ys[2:4], ys[8:] = np.nan, np.nan
    return ys, {"mask": mask, "inputs": us, "length": 8}


@pytest.mark.parametrize("inputs", [False, True])
def test_family_of_model_is_its_smoother(inputs):
    model = linear_model(inputs=inputs)
    ys, options = rows(inputs)
    chain = SwitchingFamily.of_model(model).infer(ys, **options)
    exact = rd.switching.gpb2_smoother(model, ys, **options).chain
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), chain, exact)


def test_family_of_a_nonlinear_model_linearises_it():
    model = tanh_model()
    ys = simulate(model, 1)[0]
    chain = SwitchingFamily.of_model(model).infer(ys)
    exact = rd.switching.gpb2_smoother(model, ys).chain
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), chain, exact)


@pytest.mark.parametrize("inputs", [False, True])
def test_prepared_family_starts_near_the_smoother_of_a_linear_model(inputs):
    """The network starts with a tenth of the prior's precision and a hundredth of its weights."""
    model = linear_model(inputs=inputs)
    ys, options = rows(inputs)
    family = network_family(2, int(inputs)).prepare(model, ys, **options)
    chain = family.infer(ys, **options)
    exact = rd.switching.gpb2_smoother(model, ys, **options).chain
    np.testing.assert_allclose(chain.filtered, exact.filtered, atol=0.05)
    np.testing.assert_allclose(chain.laws.means, exact.laws.means, atol=0.3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-8), chain.moves, exact.moves)


@pytest.mark.parametrize("per_regime", [False, True])
def test_stream_and_batch_agree(per_regime):
    ys, options = rows(False)
    family = network_family(2, per_regime=per_regime).prepare(linear_model(), ys, **options)
    chain, state = family.infer(ys, **options), family.init()
    for k in range(8):
        state, factor = family.step(state, ys[k], mask=options["mask"][k])
        law = jax.tree.map(lambda leaf, k=k: leaf[k], chain.laws)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), factor.law, law)
        if k:
            moves = jax.tree.map(lambda leaf, k=k: leaf[k - 1], chain.moves)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), factor.kernel, moves
            )


def test_padding_and_hidden_values_are_ignored():
    ys, options = rows(False)
    family = network_family(2).prepare(linear_model(), ys, **options)
    chain = family.infer(ys, **options)
    junk = np.where(np.isnan(ys), 1e6, ys)
    other = family.infer(junk, **options)
    assert arrays_equal(chain, other)
    short = family.infer(ys[:8], mask=options["mask"][:8])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a[: len(b)], b, atol=1e-12), chain.laws, short.laws
    )


def fit(family: Any, model: Any, ys: Any, **options: Any) -> Any:
    optimisation = {"batch_size": 8, "chunk_size": 10, **options.pop("optimisation", {})}
    return rd.fit(
        jax.random.key(2),
        family,
        model,
        ys,
        optimisation=rd.Optimisation(**optimisation),
        **{"num_steps": 20, "progress": False, **options},
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "learn",
    [
        pytest.param("family", marks=SLOW),
        pytest.param("model", marks=SLOW),
        pytest.param("both", marks=SLOW),
    ],
)
def test_fit_moves_what_it_learns(learn):
    model = linear_model()
    ys, family = simulate(model, BATCH), network_family(2)
    result = fit(family, model, ys, learn=learn)
    moved = not arrays_equal(rd.unwrap(result.model), model)
    assert moved == (learn != "family")
    assert result.status == "finished" and np.all(np.isfinite(result.history))
    prepared = family.prepare(model, ys)
    assert arrays_equal(result.family, prepared) == (learn == "model")


@pytest.mark.slow
def test_fit_takes_masks_lengths_inputs_restarts_and_held_out_series():
    model = linear_model(inputs=True)
    us = np.linspace(-1.0, 1.0, N)[:, None]
    ys = np.array(simulate(model, BATCH, inputs=us))
    mask = np.random.default_rng(0).uniform(size=ys.shape) < 0.7
    length = np.arange(BATCH) % N + 1
    data = {"mask": mask, "inputs": np.broadcast_to(us, ys.shape), "length": length}
    held_out = (ys[:4], {name: value[:4] for name, value in data.items()})
    options = {"optimisation": {"restarts": 2}, "held_out": held_out, **data}
    result = fit(network_family(2, 1), model, ys, **options)
    hidden = np.where(mask & (np.arange(N)[:, None] < length[:, None, None]), ys, 1e3)
    other = fit(network_family(2, 1), model, hidden, **options)
    np.testing.assert_array_equal(result.history, other.history)
    assert result.restart_scores.shape == (2,) and np.all(np.isfinite(result.held_out))


def test_fit_resumes_and_the_family_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # As after many steps, when fits of other models are compared with particle filters.
    module = importlib.import_module("retrodict._learning.fit")
    monkeypatch.setattr(module, "MIN_COMPARED_STEPS", 1)
    model = linear_model()
    ys, path = simulate(model, BATCH), tmp_path / "fit.rd"
    whole = fit(network_family(2), model, ys, learn="both")

    class Stop(Exception):
        pass

    def interrupt(step: int, value: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        fit(network_family(2), model, ys, learn="both", checkpoint=path, progress=interrupt)
    result = fit(network_family(2), model, ys, learn="both", checkpoint=path)
    assert arrays_equal(result.family, whole.family) and arrays_equal(result.model, whole.model)
    rd.save(tmp_path / "result.rd", result)
    assert arrays_equal(rd.load(tmp_path / "result.rd"), result)


@pytest.mark.slow
def test_increments_of_windows_add_up_for_an_exact_family():
    """Regimes that change nothing: filtering laws are exact, and so are increments."""
    kernel = rd.LinearGaussianKernel(0.9 * EYE, ZERO, EYE)
    model = rd.switching.SwitchingModel(
        rd.switching.Regimes(jnp.zeros(2), jnp.zeros((2, 2))),
        prior=rd.Gaussian(ZERO, EYE),
        transition=kernel,
        emission=rd.LinearGaussianKernel(EYE, ZERO, EYE),
    )
    ys, family = simulate(model, 4), SwitchingFamily.of_model(model)
    exact = jax.vmap(lambda y: rd.switching.gpb2_smoother(model, y, mask=True))(ys)
    for seed in range(3):
        result = rd.fit(
            jax.random.key(seed),
            family,
            model,
            ys,
            num_steps=1,
            progress=False,
            objective=rd.Objective(window=5),
            optimisation=rd.Optimisation(batch_size=4, learning_rate=1e-12),
        )
        halves = np.sum(exact.log_evidence_increments.reshape(4, 2, 5), axis=2).mean(axis=0) / 5
        assert np.min(np.abs(result.history[0] - halves)) < 1e-9


@pytest.mark.usefixtures("untyped")
def test_what_does_not_fit_is_refused():
    model, ys = linear_model(), simulate(linear_model(), 4)
    with pytest.raises(ValueError, match="num_regimes=3, and the model has 2"):
        fit(SwitchingFamily(jax.random.key(0), 2, 1, 3), model, ys)
    with pytest.raises(TypeError, match="GatedFamily approximates posteriors of a StateSpaceModel"):
        fit(rd.GatedFamily(jax.random.key(0), 2, 1), model, ys)
    with pytest.raises(TypeError, match="approximates posteriors of a SwitchingModel"):
        fit(network_family(1), rd.models.local_level(), ys)
    with pytest.raises(ValueError, match="`remat` is not available"):
        fit(network_family(2), model, ys, objective=rd.Objective(remat=True))
    with pytest.raises(ValueError, match="no parallel form"):
        network_family(2).infer(ys[0], parallel=True)
    with pytest.raises(ValueError, match="`input_dim` must be 0"):
        SwitchingFamily.of_model(model, input_dim=2)


def bound(model: Any, chains: Any, ys: Any) -> float:
    """The mean ELBO per row."""
    keys = jax.random.split(jax.random.key(7), len(ys))

    def one(chain: Any, y: Any, key: Any) -> jax.Array:
        return rd.switching.elbo(model, chain, y, key=key, num_samples=32, mask=True).value

    return float(jnp.mean(jax.vmap(one)(chains, ys, keys))) / ys.shape[1]


@pytest.mark.slow
def test_training_improves_on_the_linearised_smoother():
    model = tanh_model()
    ys = simulate(model, 64, 20)
    result = fit(network_family(), model, ys, num_steps=300, optimisation={"batch_size": 16})
    smoothed = jax.vmap(lambda y: rd.switching.gpb2_smoother(model, y, mask=True).chain)(ys)
    inferred = jax.vmap(lambda y: result.family.infer(y, mask=True))(ys)
    assert bound(model, inferred, ys) > bound(model, smoothed, ys) + 0.03


@pytest.mark.slow
def test_training_from_a_wrong_start_reaches_the_smoother_of_the_model():
    model = linear_model()
    ys = simulate(model, 64, 20)
    wrong = jax.tree.map(
        lambda leaf: leaf + 0.3 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape),
        SwitchingFamily.of_model(model),
    )
    result = fit(
        wrong,
        model,
        ys,
        num_steps=600,
        optimisation={"batch_size": 16, "learning_rate": 2e-2},
    )
    smoothed = jax.vmap(lambda y: rd.switching.gpb2_smoother(model, y, mask=True).chain)(ys)
    exact = bound(model, smoothed, ys)
    before = bound(model, jax.vmap(lambda y: wrong.infer(y, mask=True))(ys), ys)
    after = bound(model, jax.vmap(lambda y: result.family.infer(y, mask=True))(ys), ys)
    assert before < exact - 0.3 and after > exact - 0.01


@pytest.mark.slow
def test_split_posterior_stays_split():
    """The law of y is that of both regimes: (z, x) and (1 − z, −x) have the same density."""
    model = rd.switching.SwitchingModel(
        rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.98, 0.02], [0.02, 0.98]]),
        prior=rd.Gaussian(ZERO, 0.5 * EYE),
        transition=[rd.LinearGaussianKernel(EYE, ZERO + m, 0.3 * EYE) for m in (-1.0, 1.0)],
        emission=[rd.LinearGaussianKernel(m * EYE, ZERO, 0.3 * EYE) for m in (-1.0, 1.0)],
    )
    ys = simulate(model, 64, 12)
    result = fit(network_family(), model, ys, num_steps=300, optimisation={"batch_size": 16})
    moved = jax.tree.leaves(result.family.network)[0] - jax.tree.leaves(network_family().network)[0]
    assert np.max(np.abs(moved)) > 1e-3
    keys = jax.random.split(jax.random.key(3), 64)
    moments = jax.vmap(
        lambda y, key: result.family.infer(y, mask=True).marginals(key, num_samples=50)
    )(ys, keys)
    shares = np.array(moments.probabilities[:, -1, 0])
    assert np.min(shares) > 0.2 and np.max(shares) < 0.8
