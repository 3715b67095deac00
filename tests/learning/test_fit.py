"""Learning: families, models and both; interruptions, restarts and what must be refused."""

import importlib
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from assertions import arrays_equal
from fit_options import fit_options
from linear_models import linear_model, singular_models
from nonlinear_models import nonlinear_kernel

import retrodict as rd
from retrodict._learning import fit_checkpoint
from retrodict._learning.dataset import Minibatch, draw_indices
from retrodict._learning.elbo_loss import ElboLoss
from retrodict._learning.train import MAX_SKIPPED_IN_A_ROW, keep, start
from retrodict._model import prepare_batch

# The package exports the function under the same name.
fit_module = importlib.import_module("retrodict._learning.fit")

N, BATCH = 12, 6


def scalar_model(weight=0.8, noise=0.3, error=0.2, slope=1.0):
    return linear_model(
        weight=weight,
        bias=0.1,
        noise=noise,
        design=slope,
        error=rd.Diagonal(jnp.array([error])),
    )


def tanh_model():
    return replace(scalar_model(), emission=nonlinear_kernel(jnp.tanh, 0.2))


@pytest.fixture(scope="module")
def ys():
    keys = jax.random.split(jax.random.key(0), BATCH)
    return jax.vmap(lambda key: scalar_model().simulate(key, N)[1])(keys)


def conjugate(seed=0, width=4):
    return rd.ConjugateFamily(jax.random.key(seed), 1, 1, width=width, depth=1)


def fit(family, model, ys, **kwargs):
    defaults = {"num_steps": 20, "chunk_size": 5, "batch_size": 3, "progress": False, "restarts": 1}
    return rd.fit(jax.random.key(1), family, model, ys, **fit_options(**{**defaults, **kwargs}))


def unwrapped_weight(family):
    return family.model.transition.weight


def evidence(model, ys):
    return jnp.sum(jax.vmap(lambda y: rd.kalman_smoother(model, y, mask=True).log_evidence)(ys))


@pytest.fixture(scope="module")
def progress_calls():
    """What a function that is given as `progress` is told, by the fit below."""
    return []


@pytest.fixture(scope="module")
def full_fit(ys, progress_calls):
    return fit(conjugate(), tanh_model(), ys, progress=lambda *at: progress_calls.append(at))


@pytest.mark.slow
def test_progress_accepts_a_callback(full_fit, progress_calls):
    assert [step for step, _ in progress_calls] == [5, 10, 15, 20]
    best = np.maximum.accumulate(full_fit.held_out)[1:]
    np.testing.assert_allclose([value for _, value in progress_calls], best)


def test_fit_raises_the_elbo_and_records_its_history(full_fit):
    assert full_fit.status == "finished"
    assert full_fit.history.shape == (20,)
    assert full_fit.held_out_steps.tolist() == [0, 5, 10, 15, 20]
    assert full_fit.held_out[-1] > full_fit.held_out[0] + 0.05
    assert full_fit.num_skipped == 0


def test_fit_keeps_the_parameters_of_best_held_out_score(full_fit, ys):
    def per_step(family):
        chain = jax.vmap(lambda y: family.infer(y, mask=True))(ys)
        bounds = jax.vmap(lambda c, y: rd.elbo(tanh_model(), c, y, mask=True))(chain, ys)
        return float(jnp.sum(bounds)) / ys.size

    assert per_step(full_fit.family) == pytest.approx(full_fit.held_out.max(), abs=1e-10)
    assert full_fit.held_out_steps[np.argmax(full_fit.held_out)] == full_fit.kept_step


def test_last_of_indistinguishable_scores_is_kept():
    """The best of many noisy grades is a lucky draw: it must not decide."""

    def trained_on(scores, noises):
        state = start(jnp.zeros(1), optax.sgd(0.1), None)
        for step, (score, noise) in enumerate(zip(scores, noises, strict=True)):
            moved = eqx.tree_at(
                lambda s: (s.parameters, s.step), state, (jnp.full(1, float(step)), jnp.array(step))
            )
            state = keep(moved, jnp.asarray(score), jnp.asarray(noise))
        return int(state.kept_step), float(state.kept[0]), float(state.kept_score)

    # 1.0 is not told from the least, 0.9, at a noise of 0.05; 1.3 is.
    assert trained_on([2.0, 0.9, 1.3, 1.0], [0.05] * 4) == (3, 3.0, 1.0)
    assert trained_on([2.0, 0.9, 1.0, 1.3], [0.05] * 4) == (2, 2.0, 1.0)
    # Small losses do not add up: each is compared with the least of all.
    assert trained_on([1.0, 1.1, 1.2, 1.3], [0.05] * 4) == (1, 1.0, 1.1)
    assert trained_on([2.0, 0.9, 1.3, 1.0], [0.0] * 4) == (1, 1.0, 0.9)
    # What has gone astray is not excused by the noise of its own grade.
    assert trained_on([2.0, 0.9, 1e6], [0.05, 0.05, 1e6]) == (1, 1.0, 0.9)
    assert trained_on([2.0, 0.9, float("nan")], [0.05] * 3) == (1, 1.0, 0.9)
    assert trained_on([float("nan"), 0.9, 1.0], [float("nan")] * 3) == (1, 1.0, 0.9)


@pytest.mark.slow
def test_the_same_key_gives_the_same_parameters(full_fit, ys):
    assert arrays_equal(full_fit.family, fit(conjugate(), tanh_model(), ys).family)


def test_a_fit_compiles_each_program_once(ys, caplog):
    jax.clear_caches()
    with jax.log_compiles():
        fit(conjugate(), tanh_model(), ys)
    messages = [record.getMessage() for record in caplog.records]

    def count(event: str) -> int:
        return sum(event in message for message in messages)

    for program in ("_score", "_take_steps", "keep", "start"):
        assert count(f"Compiling jit({program}) with") == 1
        # Those that are compiled side by side are not compiled again when called.
        ahead = program in ("_score", "_take_steps")
        assert count(f"Finished XLA compilation of jit({program})") == (0 if ahead else 1)


def test_killed_fit_resumes_bit_for_bit(full_fit, ys, tmp_path, monkeypatch):
    path = tmp_path / "fit.rd"
    write, calls = fit_checkpoint.write_checkpoint, []

    def die(*arguments):
        write(*arguments)
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(fit_checkpoint, "write_checkpoint", die)
    with pytest.raises(KeyboardInterrupt):
        fit(conjugate(), tanh_model(), ys, checkpoint=path)
    monkeypatch.setattr(fit_checkpoint, "write_checkpoint", write)
    resumed = fit(conjugate(), tanh_model(), ys, checkpoint=path)
    assert arrays_equal(full_fit.family, resumed.family)
    assert np.array_equal(full_fit.history, resumed.history)
    # A checkpoint that was cut short: the one before it is gone on from.
    path.write_bytes(path.read_bytes()[:-100])
    assert arrays_equal(full_fit.family, fit(conjugate(), tanh_model(), ys, checkpoint=path).family)


class Slope(eqx.Module):
    """A function of a user's, which no file may name."""

    slope: Any

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.slope * x)


class Steps(NamedTuple):
    """The state of an optimiser of a user's."""

    count: Any


def test_fit_with_user_classes_resumes(ys, tmp_path):
    model = tanh_model()
    kernel = rd.NonlinearGaussianKernel(Slope(jnp.ones(1)), model.emission.scale_tril)
    model = eqx.tree_at(lambda m: m.emission, model, kernel)

    def count(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return updates, Steps(state.count + 1.0)

    counting = optax.GradientTransformation(lambda params: Steps(jnp.zeros(())), count)
    options: dict[str, Any] = {
        "learn": "both",
        "num_steps": 5,
        "optimiser": optax.chain(optax.sgd(1e-3), counting),
        "checkpoint": tmp_path / "fit.rd",
    }
    first = fit(conjugate(), model, ys, **options)
    again = fit(conjugate(), model, ys, **options)
    assert arrays_equal(first.family, again.family)
    assert again.model.emission.fn.slope == first.model.emission.fn.slope != 1.0


def test_checkpoint_of_another_fit_is_refused(ys, tmp_path):
    path = tmp_path / "fit.rd"
    fit(conjugate(), tanh_model(), ys, checkpoint=path)
    before = path.read_bytes()
    with pytest.raises(rd.CheckpointError, match="another family"):
        fit(conjugate(width=5), tanh_model(), ys, checkpoint=path)
    with pytest.raises(ValueError, match="other data"):
        fit(conjugate(), tanh_model(), ys + 1.0, checkpoint=path)
    with pytest.raises(ValueError, match="num_steps=20, and this fit has num_steps=10"):
        fit(conjugate(), tanh_model(), ys, checkpoint=path, num_steps=10)
    with pytest.raises(ValueError, match="growing=False, and this fit has growing=True"):
        fit(conjugate(), tanh_model(), ys, checkpoint=path, growing=True)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_tournament_continues_with_the_best_restart(full_fit, ys, tmp_path):
    path = tmp_path / "fit.rd"
    result = fit(conjugate(), tanh_model(), ys, restarts=3, tournament=0.5, checkpoint=path)
    assert result.restart_scores.shape == (3,)
    assert result.held_out.max() == pytest.approx(result.restart_scores[0])
    assert result.held_out_steps.tolist() == [0, 5, 10, 15, 20]
    assert result.history.shape == (20,)
    # The given family is one of the starts: none that lost stood higher than what was kept.
    assert result.restart_scores[0] >= max(result.restart_scores[1:])
    again = fit(conjugate(), tanh_model(), ys, restarts=3, tournament=0.5, checkpoint=path)
    assert arrays_equal(again.family, result.family)


@pytest.mark.slow
def test_learned_model_equals_maximum_likelihood_with_exact_family(ys):
    model = scalar_model(0.5, 0.5, 0.4)
    exact = rd.fit_evidence(jax.random.key(0), model, ys, num_steps=400, progress=False)
    both = fit(rd.KalmanFamily(model), model, ys, learn="both", num_steps=400, batch_size=BATCH)
    assert float(evidence(rd.unwrap(both.model), ys)) == pytest.approx(
        float(evidence(rd.unwrap(exact.model), ys)), abs=0.05
    )
    assert exact.log_evidence == pytest.approx(float(evidence(rd.unwrap(exact.model), ys)))
    assert exact.log_evidence > float(evidence(scalar_model(), ys))


@pytest.mark.slow
def test_learn_option_selects_family_or_model(ys):
    model = scalar_model()
    family = rd.KalmanFamily(model)
    moved = fit(family, model, ys, num_steps=5, learn="model")
    assert arrays_equal(moved.family, family)
    assert float(moved.model.transition.weight[0, 0]) != 0.8
    other = rd.KalmanFamily(scalar_model(0.5))
    fitted = fit(other, model, ys, num_steps=5)
    assert arrays_equal(fitted.model, model)
    assert not arrays_equal(fitted.family, other)


@pytest.mark.slow
def test_learn_accepts_single_leaves(ys):
    model, family = scalar_model(), rd.KalmanFamily(scalar_model(0.5))
    nothing = jax.tree.map(lambda _: False, (family, model))
    learn = eqx.tree_at(lambda pair: unwrapped_weight(pair[0]), nothing, True)
    result = fit(family, model, ys, num_steps=5, learn=learn, prepare=False)
    moved = unwrapped_weight(result.family)
    assert arrays_equal(result.family, eqx.tree_at(unwrapped_weight, family, moved))
    assert not arrays_equal(result.family, family)


def test_a_short_fit_that_breaks_down_has_diverged(ys):
    # Fewer steps than the skipped steps in a row that end a fit.
    broken = optax.chain(optax.scale(-1.0), optax.scale_by_schedule(lambda step: jnp.inf))
    options: Any = {"optimiser": broken, "chunk_size": 5, "estimator": rd.Quadrature(3)}
    result = fit(conjugate(), tanh_model(), ys, num_steps=10, **options)
    assert result.status == "diverged" and result.num_skipped > 0


def test_steps_whose_squared_gradient_overflows_are_skipped(ys):
    # Clipping would divide such a gradient by infinity, and take no step without a word.
    outlier = jnp.asarray(ys).at[0, 2].set(1e150)
    options: Any = {"learn": "both", "estimator": rd.Quadrature(3)}
    result = fit(conjugate(), tanh_model(), outlier, num_steps=10, **options)
    assert result.num_skipped > 0


def test_steps_without_a_finite_gradient_are_skipped_and_counted(ys):
    # With an optimiser that explodes at once every later gradient is NaN.
    broken = optax.chain(optax.scale(-1.0), optax.scale_by_schedule(lambda step: jnp.inf))
    result = fit(
        conjugate(),
        tanh_model(),
        ys,
        optimiser=broken,
        num_steps=4 * MAX_SKIPPED_IN_A_ROW,
        chunk_size=60,
        estimator=rd.Quadrature(3),
    )
    assert result.status == "diverged"
    assert result.num_skipped >= MAX_SKIPPED_IN_A_ROW
    assert result.history.shape[0] < 4 * MAX_SKIPPED_IN_A_ROW
    arrays = jax.tree.leaves(eqx.filter(result.family, eqx.is_inexact_array))
    assert all(np.isfinite(leaf).all() for leaf in arrays)


def test_a_fit_far_below_its_training_series_is_called_overfitted(ys):
    """Held-out series of another law represent series to which a family does not generalise."""
    result = fit(conjugate(), tanh_model(), ys, held_out=10.0 + ys)
    assert result.status == "overfitted"
    assert "ELBO of the held-out series is" in result.reason
    assert result.history[: result.kept_step].mean() - result.held_out.max() > 0.5
    good = fit(conjugate(), tanh_model(), ys, held_out=ys)
    assert good.status == "finished" and good.reason == ""


def test_a_fit_far_below_the_particle_evidence_is_called_underfitted(ys, monkeypatch):
    monkeypatch.setattr(fit_module, "MIN_COMPARED_STEPS", 1)
    # An untrained family is far off if the noise is this small.
    sharp = eqx.tree_at(lambda m: m.emission.scale_tril.std, tanh_model(), jnp.array([0.01]))
    result = fit(conjugate(), sharp, ys)
    assert result.status == "underfitted"
    assert "a particle estimate of their log-evidence" in result.reason


@pytest.mark.slow
def test_patience_stops_a_fit_that_does_not_improve(ys):
    result = fit(
        conjugate(), tanh_model(), ys, optimiser=optax.set_to_zero(), num_steps=100, patience=2
    )
    assert result.status == "stopped early"
    assert result.history.shape == (10,)
    assert result.kept_step == 0


@pytest.mark.slow
def test_held_out_series_grade_the_fit(ys):
    result = fit(conjugate(), tanh_model(), ys[2:], held_out=ys[:2], num_steps=5)
    padded = fit(
        conjugate(),
        tanh_model(),
        ys[2:],
        held_out=(ys[:2], {"length": np.array([N, N])}),
        num_steps=5,
    )
    assert np.allclose(result.held_out, padded.held_out, rtol=1e-10)


@pytest.mark.slow
def test_window_increment_is_exact_for_exact_filter(ys):
    """At λ = θ the windows' increments add up to the log-evidence."""
    model, begin = scalar_model(), 4
    pair = (rd.KalmanFamily(model), model)
    parameters, fixed = eqx.partition(pair, eqx.is_inexact_array)
    objective = ElboLoss(fixed, rd.ClosedForm(), None, 0.0)
    series = prepare_batch(ys, mask=None, inputs=None, length=None, takes_input=False)
    batch = Minibatch(series, BATCH)

    def windowed(parameters):
        head = objective.over_window(parameters, batch, jax.random.key(0), jnp.array(0), begin)
        tail = objective.over_window(
            parameters, batch, jax.random.key(0), jnp.array(begin), N - begin
        )
        return head * begin * BATCH + tail * (N - begin) * BATCH

    value, gradient = jax.jit(jax.value_and_grad(windowed))(parameters)
    assert -float(value) == pytest.approx(float(evidence(model, ys)), abs=1e-9)
    # The gradient in λ vanishes at the optimum, window by window.
    family_gradient = jax.tree.leaves(gradient[0])
    assert max(float(jnp.abs(leaf).max()) for leaf in family_gradient) < 1e-8


@pytest.mark.slow
def test_windows_of_a_long_series_train_the_family(ys):
    long = ys.reshape(1, -1, 1)
    lengths = np.array([70])
    result = fit(
        conjugate(), tanh_model(), long, window=8, length=lengths, num_steps=40, batch_size=1
    )
    assert result.held_out[-1] > result.held_out[0] + 0.05


@pytest.mark.slow
def test_growing_prefixes_end_with_whole_series(full_fit, ys):
    result = fit(conjugate(), tanh_model(), ys, growing=True)
    assert result.status == "finished"
    assert result.history.shape == full_fit.history.shape
    assert not np.array_equal(result.history[:5], full_fit.history[:5])
    assert result.held_out[-1] > result.held_out[0]


@pytest.mark.slow
def test_parameter_prior_shrinks_parameters(ys):
    def log_prior(model):
        return -0.5 * 1e6 * jnp.sum((model.transition.weight - 0.3) ** 2)

    mapped = rd.fit_evidence(
        jax.random.key(0), scalar_model(), ys, num_steps=300, log_prior=log_prior, progress=False
    )
    assert float(rd.unwrap(mapped.model).transition.weight[0, 0]) == pytest.approx(0.3, abs=1e-2)
    joint = fit(
        rd.KalmanFamily(scalar_model()),
        scalar_model(),
        ys,
        learn="both",
        num_steps=300,
        log_prior=log_prior,
    )
    assert float(rd.unwrap(joint.model).transition.weight[0, 0]) == pytest.approx(0.3, abs=1e-2)


@pytest.mark.slow
def test_padding_and_missing_rows_do_not_move_a_fit(full_fit, ys):
    junk = jnp.concatenate([ys, jnp.full((BATCH, 3, 1), 1e3)], axis=1)
    padded = fit(conjugate(), tanh_model(), junk, length=np.full(BATCH, N))
    assert np.allclose(padded.history, full_fit.history, rtol=1e-9)
    holes = ys.at[:, 5].set(jnp.nan)
    masked = fit(conjugate(), tanh_model(), holes)
    assert masked.status == "finished"
    assert np.isfinite(masked.history).all()


# Families whose chains are drawn: the same loop, by another estimator.

DRAWN = {
    "mixture": lambda: rd.MixtureFamily(
        jax.random.key(0), 1, 1, num_components=2, hidden=4, width=4
    ),
    "nonlinear": lambda: rd.NonlinearFamily(
        jax.random.key(0), 1, 1, num_components=1, hidden=4, width=4
    ),
    "nonlinear mixture": lambda: rd.NonlinearFamily(
        jax.random.key(0), 1, 1, num_components=2, hidden=4, width=4
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_sampled_family_is_trained_by_default(ys, name):
    result = fit(DRAWN[name](), tanh_model(), ys, num_steps=30, chunk_size=10)
    assert result.status == "finished" and result.num_skipped == 0
    assert result.held_out[-1] > result.held_out[0] + 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_sampled_family_supports_windows_and_restarts(ys, name):
    long = ys.reshape(1, -1, 1)
    result = fit(
        DRAWN[name](),
        tanh_model(),
        long,
        window=8,
        length=np.array([70]),
        num_steps=40,
        chunk_size=20,
        batch_size=1,
        restarts=2,
        tournament=0.5,
    )
    assert result.status == "finished" and result.num_skipped == 0
    assert result.restart_scores.shape == (2,)
    assert result.held_out[-1] > result.held_out[0] + 0.05


@pytest.mark.slow
def test_window_increment_is_exact_for_exact_sampled_filter(ys):
    """Under the exact posterior each path of each window gives its share of the log-evidence."""
    model, begin = scalar_model(), 4
    pair = (ExactButDrawn(rd.KalmanFamily(model), 1, 1, 0), model)  # pyright: ignore
    parameters, fixed = eqx.partition(pair, eqx.is_inexact_array)
    objective = ElboLoss(fixed, rd.BackwardSampling(1, stop_score=True), None, 0.0)
    series = prepare_batch(ys, mask=None, inputs=None, length=None, takes_input=False)
    batch = Minibatch(series, BATCH)

    def windowed(parameters):
        key = jax.random.key(0)
        head = objective.over_window(parameters, batch, key, jnp.array(0), begin)
        tail = objective.over_window(parameters, batch, key, jnp.array(begin), N - begin)
        return head * begin * BATCH + tail * (N - begin) * BATCH

    value, gradient = jax.jit(jax.value_and_grad(windowed))(parameters)
    assert -float(value) == pytest.approx(float(evidence(model, ys)), abs=1e-9)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient[0]))
    assert largest < 1e-8


class Affine(rd.AbstractBackwardKernel):
    """A linear-Gaussian kernel of which nothing but draws and densities is used."""

    def law(self, step, x):
        return step.law(x, None)


class ExactButDrawn(rd.AbstractSampledFamily):
    """A Kalman family whose chains are drawn."""

    inner: rd.KalmanFamily
    state_dim: int = eqx.field(static=True)
    obs_dim: int = eqx.field(static=True)
    input_dim: int = eqx.field(static=True)

    def prepare(self, model, ys, *, mask=None, inputs=None, length=None):
        return self

    def redraw(self, key):
        return self

    def init(self):
        return self.inner.init()

    def embed(self, row):
        return self.inner.embed(row)

    def advance(self, state, embedded):
        return self.inner.advance(state, embedded)

    def advance_in_parallel(self, embedded, exists, parallel=True):
        return self.inner.advance_in_parallel(embedded, exists, parallel)

    def read(self, before, after, embedded):
        return self.inner.read(before, after, embedded)

    def shared(self):
        return Affine()


@pytest.mark.slow
def test_killed_fit_of_sampled_family_resumes_bit_for_bit(ys, tmp_path, monkeypatch):
    path, write = tmp_path / "fit.rd", fit_checkpoint.write_checkpoint
    family, options = DRAWN["mixture"](), {"num_steps": 10}
    uninterrupted = fit(family, tanh_model(), ys, **options)

    def die(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_checkpoint, "write_checkpoint", die)
    with pytest.raises(KeyboardInterrupt):
        fit(family, tanh_model(), ys, checkpoint=path, **options)
    monkeypatch.setattr(fit_checkpoint, "write_checkpoint", write)
    resumed = fit(family, tanh_model(), ys, checkpoint=path, **options)
    assert arrays_equal(uninterrupted.family, resumed.family)
    assert np.array_equal(uninterrupted.history, resumed.history)


@pytest.mark.parametrize("name", ["common factor", pytest.param("shares", marks=pytest.mark.slow)])
def test_em_keeps_states_on_their_line_or_plane(name):
    model = singular_models()[name]
    ys = np.stack([model.simulate(jax.random.key(i), 20)[1] for i in range(2)])
    start = eqx.tree_at(lambda m: m.emission.scale_tril, model, 2.0 * model.emission.scale_tril)
    result = rd.em(jax.random.key(0), start, ys, num_iterations=5)
    history = np.asarray(result.history)
    assert np.all(np.isfinite(history)) and np.all(np.diff(history) > -1e-9)
    assert history[-1] > history[0] + 0.01


@pytest.mark.parametrize(("offset", "unit"), [(1e8, 1.0), (0.0, 1e9)])
def test_em_does_not_depend_on_offset_and_unit_of_the_data(offset, unit):
    ys = np.cumsum(np.random.default_rng(0).normal(size=(40, 1)), axis=0) % 5.0

    def learned(offset, unit):
        start = linear_model(prior=unit, weight=0.5, noise=unit, offset=offset, error=unit)
        result = rd.em(jax.random.key(0), start, unit * ys + offset, num_iterations=5)
        model = rd.unwrap(result.model)
        scales = model.transition.scale_tril / unit, model.emission.scale_tril / unit
        return result.history + np.log(unit), (model.transition.weight, *scales)

    history, values = learned(offset, unit)
    expected_history, expected_values = learned(0.0, 1.0)
    np.testing.assert_allclose(history, expected_history, atol=1e-6)
    np.testing.assert_allclose(values, expected_values, rtol=1e-5)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_em_ends_near_the_maximum_from_a_start_in_other_units(unit: float):
    """From a start far wider than the data, the first iteration almost removes the state."""
    ys = np.cumsum(np.random.default_rng(0).normal(size=(20, 1)), axis=0)
    start = linear_model(prior=1.0, weight=0.5, noise=1.0, offset=0.0, error=1.0)
    options = {"num_iterations": 60, "tolerance": 1e-4}
    expected = rd.em(jax.random.key(0), start, ys, **options)
    result = rd.em(jax.random.key(0), start, unit * ys, **options)
    last, best = result.history[-1] + np.log(unit), expected.history[-1]
    np.testing.assert_allclose(last, best, atol=0.1)


def test_em_keeps_what_no_row_determines(ys):
    """Series of one row have no transition."""
    model = scalar_model()
    result = rd.em(jax.random.key(0), model, ys[:, :1], num_iterations=3)
    assert np.all(np.isfinite(result.history))
    after, before = (rd.unwrap(each.transition) for each in (result.model, model))
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(rd.unwrap(result.model)))


def test_em_stops_where_the_noise_reaches_zero():
    """Constant data have an unbounded evidence."""
    result = rd.em(jax.random.key(0), scalar_model(), np.full((1, N, 1), 3.0), num_iterations=300)
    assert result.status == "stopped early"
    assert float(rd.unwrap(result.model).emission.scale_tril.std[0]) > 0
    assert np.all(np.isfinite(result.history))


@pytest.mark.slow
def test_em_never_lowers_the_evidence_and_ends_near_its_maximum(ys):
    result = rd.em(jax.random.key(0), scalar_model(0.3, 0.6, 0.5), ys, num_iterations=100)
    assert np.diff(result.history).min() > -1e-10
    model = rd.unwrap(result.model)
    # EM moves slowly along flat directions: what is left to gain is little.
    best = rd.fit_evidence(jax.random.key(0), result.model, ys, num_steps=200, progress=False)
    assert best.log_evidence - float(evidence(model, ys)) < 0.5


@pytest.mark.slow
def test_m_step_maximises_the_em_quantity(ys):
    """No small change of any parameter of the M-step's model raises E_q[log p]."""
    from retrodict._learning.em import maximise

    model = scalar_model(0.4, 0.5, 0.5)
    batch = prepare_batch(ys, mask=None, inputs=None, length=None, takes_input=False)
    chains = jax.vmap(lambda y: rd.kalman_smoother(model, y, mask=True).chain)(ys)
    after = rd.unwrap(maximise(model, chains, batch))

    def quantity(model):
        def one(chain, y):
            return rd.expectation(chain, rd.LogJoint(model), model.series(y, mask=True))

        return jnp.sum(jax.vmap(one)(chains, ys))

    gradient = eqx.filter_grad(quantity)(after)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) < 1e-8
    assert float(quantity(after)) > float(quantity(model))


@pytest.mark.slow
def test_variational_em_learns_linear_part_of_nonlinear_model(ys):
    model = tanh_model()
    wrong = replace(model, transition=scalar_model(0.2, 0.6).transition)
    result = rd.em(
        jax.random.key(0),
        wrong,
        ys,
        family=conjugate(),
        num_iterations=3,
        steps_per_iteration=100,
    )
    assert result.history[-1] > result.history[0]
    assert not arrays_equal(result.model.transition, wrong.transition)
    assert result.family is not None


def test_em_and_fit_evidence_refuse_series_without_observed_entries(ys):
    for learn in (rd.em, rd.fit_evidence):
        with pytest.raises(ValueError, match=f"{learn.__name__} expects observed entries"):
            learn(jax.random.key(0), scalar_model(), jnp.full_like(ys, jnp.nan))


def test_partly_frozen_kernel_has_no_m_step(ys):
    model = scalar_model()
    half = eqx.tree_at(lambda m: m.transition.bias, model, rd.Frozen(jnp.zeros(1)))
    with pytest.raises(ValueError, match="frozen in part"):
        rd.em(jax.random.key(0), half, ys, num_iterations=2)


def test_minibatches_are_stratified_and_cover_all_series():
    steps = jnp.arange(200)
    picks = jax.vmap(lambda step: draw_indices(jax.random.key(0), step, 11, 3))(steps)
    assert np.all(np.diff(picks, axis=1) > 0)
    assert set(np.asarray(picks).ravel().tolist()) == set(range(11))
    all_series = draw_indices(jax.random.key(0), 0, 5, 5)
    assert all_series.tolist() == list(range(5))


def test_a_result_can_be_saved_and_loaded(full_fit, tmp_path):
    rd.save(tmp_path / "result.rd", full_fit)
    loaded = rd.load(tmp_path / "result.rd")
    assert arrays_equal(loaded, full_fit)
    assert loaded.status == "finished"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ys": jnp.zeros((2, 5, 2))}, ValueError, "1 columns, got 2|must have 1 columns"),
        ({"ys": jnp.zeros(5)}, ValueError, r"shape \(time, obs\)"),
        ({"family": rd.GatedFamily(jax.random.key(0), 2, 1)}, ValueError, "state_dim=1"),
        ({"learn": "everything"}, ValueError, "'family', 'model', 'both'"),
        ({"mask": True, "ys": jnp.full((2, 5, 1), jnp.nan)}, ValueError, "mask=True declares"),
        ({"ys": jnp.full((2, 5, 1), jnp.nan)}, ValueError, "fit expects observed entries"),
        ({"inputs": jnp.zeros((6, 12, 1))}, ValueError, "takes no inputs"),
        ({"num_steps": 0}, ValueError, "num_steps"),
        ({"family": "gated"}, TypeError, "family"),
        (
            {"length": np.array([1, 2])},
            TypeError,
            "one integer, or one per series \\(6\\)",
        ),
    ],
)
def test_fit_refuses_bad_arguments(ys, change, error, words):
    arguments = {"family": conjugate(), "ys": ys, **change}
    with pytest.raises(error, match=words):
        fit(arguments.pop("family"), tanh_model(), arguments.pop("ys"), **arguments)


@pytest.mark.parametrize(
    "optimiser", ["lbfgs", pytest.param(optax.lbfgs(), id="optax", marks=pytest.mark.slow)]
)
def test_a_quasi_newton_optimiser_finds_scales_in_thousands(optimiser: Any):
    """Adam's steps of 0.01 would take a hundred thousand of them."""
    rng = np.random.default_rng(5)
    steps, noise = rng.standard_normal((2, 60, 1))
    ys = 1000 * (np.cumsum(0.5 * steps, axis=0) + noise)
    one, none = rd.Frozen(jnp.eye(1)), rd.Frozen(jnp.zeros(1))
    starts = [rd.Diagonal(rd.Positive(jnp.array([start]))) for start in (300.0, 2000.0)]
    result = rd.fit_evidence(
        jax.random.key(0),
        rd.StateSpaceModel(
            rd.Frozen(rd.Gaussian(jnp.zeros(1), 1e4 * jnp.eye(1))),
            rd.LinearGaussianKernel(one, none, starts[0]),
            rd.LinearGaussianKernel(one, none, starts[1]),
        ),
        ys,
        optimiser=optimiser,
        num_steps=60,
        chunk_size=20,
        progress=False,
    )
    fitted = rd.unwrap(result.model)
    scales = np.array([fitted.transition.scale_tril.std[0], fitted.emission.scale_tril.std[0]])
    rows = np.arange(60)
    walk = np.minimum(rows[:, None], rows[None, :])

    def log_evidence(move: float, obs: float) -> float:
        covariance = 1e8 + move**2 * walk + obs**2 * np.eye(60)
        _, logdet = np.linalg.slogdet(covariance)
        return -0.5 * float(logdet + ys[:, 0] @ np.linalg.solve(covariance, ys[:, 0]))

    best = log_evidence(*scales)
    for factors in ((1.02, 1.0), (0.98, 1.0), (1.0, 1.02), (1.0, 0.98)):
        assert log_evidence(*(scales * factors)) < best
    constant = -30 * np.log(2 * np.pi)
    assert result.log_evidence == pytest.approx(best + constant, rel=1e-6)
    assert result.history[-1] == pytest.approx(result.log_evidence / 60, rel=1e-6)


def hourly_temperatures(num_rows: int) -> np.ndarray:
    """A day, a year and an autoregression, like hourly temperatures."""
    rng, hours = np.random.default_rng(2), np.arange(num_rows)
    noise = 0.7 * rng.normal(size=num_rows)
    weather = np.zeros(num_rows)
    for k in range(1, num_rows):
        weather[k] = 0.97 * weather[k - 1] + noise[k]
    year = 10 * np.cos(2 * np.pi * (hours / 8766 - 0.55))
    day = (3 + 0.9 * np.cos(2 * np.pi * hours / 8766)) * np.cos(2 * np.pi * (hours / 24 - 0.6))
    return (12 + year + day + weather + 0.05 * rng.normal(size=num_rows))[:, None]


def test_fit_evidence_leaves_maximum_with_zero_scales():
    """From where start_from begins, L-BFGS drives slope and noise to zero, 43 nats too low."""
    ys = hourly_temperatures(300)
    model = rd.models.start_from(rd.models.local_trend(), ys)
    options: Any = {"optimiser": "lbfgs", "progress": False}
    alone = rd.fit_evidence(jax.random.key(0), model, ys, num_starts=1, **options)
    best = rd.fit_evidence(jax.random.key(0), model, ys, **options)
    assert alone.status == best.status == "converged"
    assert best.log_evidence > alone.log_evidence + 40
    values = rd.models.named_parameters(best.model)
    assert min(float(v[0]) for v in values.values()) > 0.2
    # It also leaves that maximum if it is started there.
    again = rd.fit_evidence(jax.random.key(0), alone.model, ys, **options)
    assert again.log_evidence == pytest.approx(best.log_evidence, abs=1e-3)


@pytest.mark.parametrize(
    "name", ["local_trend", pytest.param("autoregressive", marks=pytest.mark.slow)]
)
def test_fit_evidence_does_not_depend_on_units(name: str):
    """Data in units of 1e-9 or 1e9 give the same estimates in those units."""
    ys = hourly_temperatures(80)
    estimates = {}
    for unit in (1.0, 1e9, 1e-9):
        model = rd.models.start_from(rd.models.from_options(name), unit * ys)
        estimates[unit] = rd.fit_evidence(
            jax.random.key(0), model, unit * ys, optimiser="lbfgs", progress=False
        )
        assert estimates[unit].status == "converged"
    plain = rd.models.named_parameters(estimates[1.0].model)
    for unit in (1e9, 1e-9):
        shift = len(ys) * np.log(unit)
        assert estimates[unit].log_evidence + shift == pytest.approx(
            estimates[1.0].log_evidence, abs=1e-5
        )
        for key, value in rd.models.named_parameters(estimates[unit].model).items():
            size = np.asarray(value) / (1.0 if key == "persistence" else unit)
            # What is at the edge of zero is only that.
            np.testing.assert_allclose(size, plain[key], rtol=1e-4, atol=1e-4, err_msg=key)


def test_lbfgs_reports_convergence_if_a_line_search_fails_at_the_maximum(
    monkeypatch: pytest.MonkeyPatch,
):
    """On autoregressions of sea temperatures, rounding ended the last line search."""
    ys = hourly_temperatures(40)
    model = rd.models.start_from(rd.models.local_level(), ys)
    minimize = scipy.optimize.minimize

    def abnormal(*arguments: Any, **options: Any) -> Any:
        result = minimize(*arguments, **options)
        result.success = False
        return result

    options: Any = {"optimiser": "lbfgs", "progress": False, "num_starts": 1}
    plain = rd.fit_evidence(jax.random.key(0), model, ys, **options)
    monkeypatch.setattr(scipy.optimize, "minimize", abnormal)
    rounded = rd.fit_evidence(jax.random.key(0), model, ys, **options)
    assert rounded.log_evidence == pytest.approx(plain.log_evidence, abs=1e-6)
    assert rounded.status == "converged"


def test_lbfgs_reports_convergence():
    ys = hourly_temperatures(40)
    model = rd.models.start_from(rd.models.local_level(), ys)
    options: Any = {"optimiser": "lbfgs", "progress": False, "num_starts": 1}
    assert rd.fit_evidence(jax.random.key(0), model, ys, **options).status == "converged"
    short = rd.fit_evidence(jax.random.key(0), model, ys, num_steps=2, **options)
    assert short.status == "finished" and len(short.history) == 2
    broken = rd.models.with_parameters(model, {"prior.mean": 1e200})
    assert rd.fit_evidence(jax.random.key(0), broken, ys, **options).status == "diverged"


@pytest.mark.parametrize("num_starts", [None, 1])
@pytest.mark.parametrize(("outlier", "status"), [(1e40, "converged"), (1e150, "diverged")])
def test_a_quasi_newton_fit_of_an_enormous_row_tells_how_it_ended(outlier, status, num_starts):
    # The squared gradient of 1e300 nats overflows, and L-BFGS would take a step to NaN.
    model = rd.models.local_level(level_scale=1.0, obs_scale=1.0, prior_scale=10.0)
    ys = np.random.default_rng(0).normal(size=(12, 1))
    ys[5] = outlier
    options: Any = {"optimiser": "lbfgs", "num_starts": num_starts, "progress": False}
    result = rd.fit_evidence(jax.random.key(0), model, ys, **options)
    assert result.status == status
    before, after = (rd.kalman_smoother(each, ys).log_evidence for each in (model, result.model))
    assert after >= before
