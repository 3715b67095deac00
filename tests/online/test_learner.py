"""Learning along a stream: what is learned, what is left out, and how it goes on."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import retrodict as rd
from retrodict.online import LearnerState


def model(weight: jax.Array) -> rd.StateSpaceModel:
    """A model of which the transition's weight alone is learned."""
    d = weight.shape[0]
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(d), jnp.eye(d))),
        transition=rd.LinearGaussianKernel(
            weight, rd.Frozen(jnp.zeros(d)), rd.Frozen(0.5 * jnp.eye(d))
        ),
        emission=rd.Frozen(
            rd.LinearGaussianKernel(jnp.eye(d), jnp.zeros(d), rd.Diagonal(0.4 * jnp.ones(d)))
        ),
    )


TRUTH = np.array([[0.8, 0.2], [-0.2, 0.7]])


@pytest.fixture(scope="module")
def stream() -> jax.Array:
    return model(jnp.asarray(TRUTH)).simulate(jax.random.key(0), 3000)[1]


@pytest.fixture(scope="module")
def exact() -> rd.online.OnlineLearner:
    optimiser = optax.adam(rd.online.robbins_monro(0.05))
    return rd.online.OnlineLearner(
        None, model(jnp.zeros((2, 2))), rd.online.KalmanScore(), optimiser
    )


def weight(learner: rd.online.OnlineLearner, state: LearnerState) -> np.ndarray:
    return np.asarray(learner.model(state).transition.weight)


def test_learner_learns_a_model_from_a_stream(exact: rd.online.OnlineLearner, stream: jax.Array):
    state, rows = exact.scan(exact.init(jax.random.key(1)), stream)
    errors = np.abs(weight(exact, state) - TRUTH)
    assert np.max(errors) < 0.06
    assert int(state.num_read) == 3000 and int(state.num_skipped) == 0
    # The last rows are filtered and smoothed as at the true model.
    true = rd.kalman_smoother(model(jnp.asarray(TRUTH)), stream[-200:]).chain
    assert np.max(np.abs(rows.filtered.mean[-50:] - true.laws.mean[-50:])) < 0.1
    smoothed = jax.vmap(lambda k, m: k.weight @ m + k.bias)(true.kernels, true.laws.mean[1:])
    assert np.max(np.abs(rows.smoothed.mean[-50:] - smoothed[-50:])) < 0.1
    assert np.all(np.isnan(rows.smoothed.mean[0]))


@pytest.mark.slow
def test_learner_learns_family_and_model_together(stream: jax.Array):
    start = model(jnp.zeros((2, 2)))
    learner = rd.online.OnlineLearner(
        rd.KalmanFamily(start),
        start,
        rd.online.TruncatedBackprop(4),
        optax.adam(rd.online.robbins_monro(0.05)),
    )
    state, rows = learner.scan(learner.init(jax.random.key(1)), stream)
    assert np.max(np.abs(weight(learner, state) - TRUTH)) < 0.06
    family = learner.family(state)
    assert np.max(np.abs(family.model.transition.weight - TRUTH)) < 0.1
    evidence = rd.kalman_smoother(model(jnp.asarray(TRUTH)), stream).log_evidence / 3000
    assert abs(float(jnp.mean(rows.elbo_increment[-1000:])) - float(evidence)) < 0.1


def test_constant_step_size_tracks_a_change():
    turned = [model(sign * 0.8 * jnp.eye(1)) for sign in (1, -1)]
    ys = [m.simulate(jax.random.key(i), 1500)[1] for i, m in enumerate(turned)]
    learner = rd.online.OnlineLearner(None, turned[0], rd.online.KalmanScore(), optax.adam(5e-3))
    state, before = learner.scan(learner.init(jax.random.key(1)), ys[0])
    assert abs(weight(learner, state).item() - 0.8) < 0.1
    state, after = learner.scan(state, ys[1])
    assert abs(weight(learner, state).item() + 0.8) < 0.1
    gained = jnp.mean(after.elbo_increment[-200:]) - jnp.mean(after.elbo_increment[:50])
    assert gained > 0.2


@pytest.fixture(scope="module")
def windowed() -> rd.online.OnlineLearner:
    """A learner whose every part is exercised: a family that is learned, windows, two steps."""
    start = model(jnp.full((1, 1), 0.3))
    family = rd.KalmanFamily(start)
    return rd.online.OnlineLearner(family, start, rd.online.TruncatedBackprop(2), steps_per_row=2)


def rough(num_rows: int) -> jax.Array:
    """Rows with a gap, an outlier, and one at which densities overflow."""
    ys = model(0.8 * jnp.eye(1)).simulate(jax.random.key(2), num_rows)[1]
    return ys.at[3:6].set(jnp.nan).at[8].set(1e6).at[12].set(1e200)


def test_gaps_and_outliers_leave_no_non_finite_value(windowed: rd.online.OnlineLearner):
    state, rows = windowed.scan(windowed.init(jax.random.key(1)), rough(20))
    assert rows.skipped.tolist() == [k == 12 for k in range(20)]
    assert int(state.num_skipped) == 1
    for leaf in jax.tree.leaves(
        eqx.filter((state, rows.elbo_increment[13:]), eqx.is_inexact_array)
    ):
        assert np.all(np.isfinite(leaf))
    assert np.all(np.abs(weight(windowed, state)) < 1)


def test_a_row_whose_step_overflows_does_not_block_later_steps():
    """It comes between two steps, is fine by itself, and no step over it is finite."""
    start = model(jnp.full((1, 1), 0.3))
    learner = rd.online.OnlineLearner(
        rd.KalmanFamily(start), start, rd.online.TruncatedBackprop(1, every=2), optax.adam(1e-2)
    )
    ys = model(0.8 * jnp.eye(1)).simulate(jax.random.key(2), 40)[1].at[10].set(1e100)
    state, rows = learner.scan(learner.init(jax.random.key(1)), ys)
    assert rows.skipped.tolist() == [k == 11 for k in range(40)]
    assert np.all(np.isfinite(rows.elbo_increment))
    assert np.count_nonzero(rows.gradient_norm[12:]) == 14


@pytest.mark.slow  # `test_stream` has a quick form of it
def test_learner_resumes_bit_for_bit(windowed: rd.online.OnlineLearner, tmp_path: Path):
    ys = rough(20)
    start = windowed.init(jax.random.key(1))
    end, rows = windowed.scan(start, ys)
    state, first = windowed.scan(start, ys, length=7)
    one, other = jax.tree.map(lambda leaf: np.nan_to_num(leaf[:7]), (rows, first))
    assert eqx.tree_equal(one, other)
    assert np.all(np.isnan(first.elbo_increment[7:]))
    rd.save(tmp_path / "state.rd", state)
    state = rd.load(tmp_path / "state.rd")
    for y in ys[7:10]:
        state, _ = windowed.update(state, y)
    state, _ = windowed.scan(state, jnp.concatenate([ys[10:], jnp.ones((10, 1))]), length=10)
    assert eqx.tree_equal(state, end)


@pytest.mark.slow
def test_learner_in_float32_stays_float32(x32: None, stream: jax.Array):
    ys = jnp.asarray(np.asarray(stream[:300]), jnp.float32)
    start = model(jnp.zeros((2, 2), jnp.float32))
    optimiser = optax.adam(rd.online.robbins_monro(0.05))
    learner = rd.online.OnlineLearner(None, start, rd.online.KalmanScore(), optimiser)
    state, rows = learner.scan(learner.init(jax.random.key(1)), ys)
    assert weight(learner, state).dtype == np.float32
    assert rows.elbo_increment.dtype == jnp.float32
    assert np.max(np.abs(weight(learner, state) - TRUTH)) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [rd.online.RecursiveScore(16), rd.online.RecursivePathwise(16), rd.online.TruncatedBackprop(2)],
    ids=["score", "pathwise", "truncated"],
)
@pytest.mark.parametrize("kind", ["mixture", "nonlinear"])
def test_learner_learns_sampled_families(method: rd.online.AbstractRecursiveGradient, kind: str):
    make = {"mixture": rd.MixtureFamily, "nonlinear": rd.NonlinearFamily}[kind]
    start = model(jnp.full((1, 1), 0.3))
    ys = model(0.8 * jnp.eye(1)).simulate(jax.random.key(2), 300)[1]
    family = make(jax.random.key(3), 1, 1, hidden=4, width=4).prepare(start, ys)
    learner = rd.online.OnlineLearner(family, start, method, optax.adam(1e-2))
    state, rows = learner.scan(learner.init(jax.random.key(1)), ys)
    assert int(state.num_skipped) == 0
    assert jnp.mean(rows.elbo_increment[-100:]) > jnp.mean(rows.elbo_increment[:100])
    assert np.all(rows.smoothed.mean_standard_error[1:] > 0)


def test_step_sizes_follow_their_schedule():
    schedule = rd.online.robbins_monro(0.1, exponent=0.75, warmup=10)
    assert np.asarray(schedule(0)) == pytest.approx(0.01)
    assert np.asarray(schedule(9)) == pytest.approx(0.1)
    assert np.asarray(schedule(10 + 15)) == pytest.approx(0.1 * 16**-0.75)
    with pytest.raises(ValueError, match="exponent in"):
        rd.online.robbins_monro(0.1, exponent=0.5)
    with pytest.raises(ValueError, match="positive rate"):
        rd.online.robbins_monro(0.0)


@pytest.mark.usefixtures("untyped")
def test_learner_refuses_bad_arguments(exact: rd.online.OnlineLearner):
    start = model(jnp.zeros((1, 1)))
    family = rd.KalmanFamily(start)
    with pytest.raises(TypeError, match="expects a family"):
        rd.online.OnlineLearner(start, family, rd.online.KalmanScore())  # pyright: ignore
    with pytest.raises(ValueError, match="nothing to learn"):
        rd.online.OnlineLearner(None, start, rd.online.KalmanScore(), learn="family")
    with pytest.raises(ValueError, match="'family', 'model', 'both'"):
        rd.online.OnlineLearner(family, start, rd.online.TruncatedBackprop(2), learn="all")
    with pytest.raises(ValueError, match="one observation"):
        exact.update(exact.init(jax.random.key(0)), jnp.zeros((1, 2)))
