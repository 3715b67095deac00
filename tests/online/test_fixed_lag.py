"""Fixed-lag smoothing of a stream against offline smoothing of all that it has read."""

import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import pytest
from assertions import assert_close
from linear_models import IncompleteSeries, incomplete_series, random_model, singular_models
from registry import FAMILIES

import retrodict as rd
from retrodict.online import LagOutput, LagState

N, CHUNK = 9, 3
KEY = jax.random.key(11)


def _slow(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def _marked(name: str, *rest: Any) -> Any:
    """Quick runs try the exact family and one that draws."""
    quick = name in ("kalman", "mixture")
    return pytest.param(name, *rest) if quick else _slow((name, *rest))[0]


LINEAR = [_marked(name, 3) for name, case in FAMILIES.items() if not case.sampled]
SAMPLED = [_marked(name) for name, case in FAMILIES.items() if case.sampled]


@functools.cache
def stream() -> IncompleteSeries:
    return incomplete_series(model(), N, missing_row=4)


@functools.cache
def model() -> rd.StateSpaceModel:
    return random_model(np.random.default_rng(1), 2, 2, 1)


@functools.cache
def family(name: str) -> Any:
    return FAMILIES[name].make(model(), 2, 2, 1)


@functools.cache
def offline(name: str) -> Any:
    """The chain of the whole stream; its prefixes are the chains of what was read before."""
    s = stream()
    return family(name).infer(s.ys, mask=s.mask, inputs=s.inputs)


def read(live: rd.online.FixedLag, state: LagState, start: int, stop: int, **options: Any):
    s = stream()
    rows = slice(start, stop)
    return live.scan(state, s.ys[rows], mask=s.mask[rows], inputs=s.inputs[rows], **options)


def read_one(live: rd.online.FixedLag, state: LagState, k: int):
    s = stream()
    return live.update(state, s.ys[k], mask=s.mask[k], inputs=s.inputs[k])


@functools.cache
def scanned(name: str, lag: int) -> tuple[LagState, LagOutput]:
    """All rows in one call; for families that draw, with few paths."""
    live = rd.online.FixedLag(family(name), lag, num_samples=8)
    return read(live, live.init(KEY), 0, N)


def pushed_back(chain: rd.LinearGaussianChain, k: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The moments of a row given the rows up to k: q_k through one kernel after another."""
    mean, covariance = np.asarray(chain.laws.mean[k]), np.asarray(chain.laws.covariance[k])
    for j in range(k - 1, row - 1, -1):
        gain, scale = np.asarray(chain.kernels.weight[j]), np.asarray(chain.kernels.scale_tril[j])
        mean = gain @ mean + np.asarray(chain.kernels.bias[j])
        covariance = gain @ covariance @ gain.T + scale @ scale.T
    return mean, covariance


@pytest.mark.parametrize("name, lag", [*LINEAR, *_slow(*(("kalman", lag) for lag in (1, 6, 20)))])
def test_rows_equal_offline_smoothing(name: str, lag: int):
    live, (state, out) = rd.online.FixedLag(family(name), lag), scanned(name, lag)
    chain = offline(name)
    np.testing.assert_allclose(out.filtered.mean, chain.laws.mean, atol=1e-10)
    np.testing.assert_allclose(out.filtered.covariance, chain.laws.covariance, atol=1e-10)
    for k in range(N):
        row = max(k - lag, 0)
        mean, covariance = pushed_back(chain, k, row)
        assert int(out.row[k]) == row and bool(out.ready[k]) == (k >= lag)
        np.testing.assert_allclose(out.smoothed.mean[k], mean, atol=1e-10)
        np.testing.assert_allclose(out.smoothed.covariance[k], covariance, atol=1e-10)
    assert not np.any(out.smoothed.mean_standard_error)
    laws, last = chain.marginals(), live.flush(state)
    np.testing.assert_array_equal(last.row, np.arange(N - lag, N))
    np.testing.assert_array_equal(last.ready, last.row >= 0)
    ready = np.asarray(last.ready)
    rows = np.asarray(last.row)[ready]
    np.testing.assert_allclose(last.smoothed.mean[ready], laws.mean[rows], atol=1e-10)
    np.testing.assert_allclose(last.smoothed.covariance[ready], laws.covariance[rows], atol=1e-10)
    assert np.all(np.isnan(last.smoothed.mean[~ready]))


def test_row_equals_smoothing_of_series_ending_there():
    s, out = stream(), scanned("kalman", 3)[1]
    chain = family("kalman").infer(s.ys[:7], mask=s.mask[:7], inputs=s.inputs[:7])
    laws = chain.marginals()
    np.testing.assert_allclose(out.smoothed.mean[6], laws.mean[3], atol=1e-10)
    np.testing.assert_allclose(out.smoothed.covariance[6], laws.covariance[3], atol=1e-10)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_rows_equal_offline_paths_with_the_same_noise(name: str):
    lag, count = 3, 8
    out, chain = scanned(name, lag)[1], offline(name)
    for k in range(N):
        key, row = jax.random.fold_in(KEY, k), max(k - lag, 0)
        noise = jax.random.normal(key, (count, lag + 1, chain.noise_dim))
        # One shape for all rows, so that it is compiled once: rows after k are padding, in which
        # only the last row's noise is read.
        shorter = eqx.tree_at(lambda c: c.length, chain, jnp.asarray(k + 1), is_leaf=_is_none)
        filled = jnp.zeros((count, N, chain.noise_dim))
        filled = filled.at[:, row:k].set(noise[:, row - k - 1 : -1]).at[:, -1].set(noise[:, -1])
        trace = shorter.trace(filled)
        means, covariances = np.asarray(trace.means[:, row]), np.asarray(trace.covariances[:, row])
        mean = means.mean(0)
        spread = np.cov(means.T) + covariances.mean(0)
        np.testing.assert_allclose(out.smoothed.mean[k], mean, atol=1e-10)
        np.testing.assert_allclose(out.smoothed.covariance[k], spread, atol=1e-10)
        error = means.std(0, ddof=1) / np.sqrt(count)
        np.testing.assert_allclose(out.smoothed.mean_standard_error[k], error, atol=1e-10)


def _is_none(leaf: Any) -> bool:
    return leaf is None


@pytest.mark.statistical
def test_flushed_rows_of_sampled_family_equal_offline_paths():
    # 2 rows of 2 means, each beyond 5 joint standard errors with probability 6e-7.
    live = rd.online.FixedLag(family("mixture"), 3, num_samples=500)
    state, _ = read(live, live.init(KEY), 0, N)
    last = live.flush(state)
    laws = rd.marginals(
        offline("mixture"), estimator=rd.BackwardSampling(2000), key=jax.random.key(5)
    )
    error = np.hypot(last.smoothed.mean_standard_error[:2], laws.mean_standard_error[-3:-1])
    assert np.all(error > 0)
    assert np.all(np.abs(last.smoothed.mean[:2] - laws.mean[-3:-1]) < 5 * error)
    # The last row is filtered, and its mean is known.
    np.testing.assert_allclose(last.smoothed.mean[-1], laws.mean[-1], atol=1e-10)


@pytest.mark.slow  # `test_stream` has a quick form of it
@pytest.mark.parametrize("name", ["kalman", "mixture"])
def test_chunks_give_the_same_rows(name: str):
    live, (end, out) = rd.online.FixedLag(family(name), 3, num_samples=8), scanned(name, 3)
    state, parts = live.init(KEY), []
    for start in range(0, N, CHUNK):
        state, part = read(live, state, start, start + CHUNK)
        parts.append(part)
    assert_close(jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts), out)
    assert_close(_arrays(state), _arrays(end))

    state, parts = live.init(KEY), []
    for k in range(N):
        state, part = read_one(live, state, k)
        parts.append(part)
    assert_close(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), out)
    assert_close(_arrays(state), _arrays(end))


def _arrays(state: LagState) -> Any:
    return state.family, state.law, state.steps, state.num_read


@pytest.mark.slow  # `test_stream` has a quick form of it
@pytest.mark.parametrize("name", ["kalman", "mixture"])
def test_partly_filled_chunk_gives_the_same_rows(name: str):
    live, s = rd.online.FixedLag(family(name), 3, num_samples=8), stream()
    end, out = scanned(name, 3)
    filler = np.full((N - 4, 1), np.nan)
    state, first = live.scan(
        live.init(KEY),
        np.concatenate([s.ys[:4], np.repeat(filler, 2, 1)]),
        mask=s.mask,
        inputs=np.concatenate([s.inputs[:4], filler]),
        length=4,
    )
    assert int(state.num_read) == 4
    assert_close(jax.tree.map(lambda leaf: leaf[:4], first), jax.tree.map(lambda a: a[:4], out))
    assert np.all(np.isnan(first.smoothed.mean[4:])) and not np.any(first.ready[4:])
    state, rest = live.scan(
        state,
        np.concatenate([s.ys[4:], s.ys[:4]]),
        mask=np.concatenate([s.mask[4:], s.mask[:4]]),
        inputs=np.concatenate([s.inputs[4:], s.inputs[:4]]),
        length=N - 4,
    )
    last_rows = jax.tree.map(lambda leaf: leaf[: N - 4], rest)
    assert_close(last_rows, jax.tree.map(lambda leaf: leaf[4:], out))
    assert_close(_arrays(state), _arrays(end))


def test_a_padded_chunk_is_not_recompiled():
    live, traces = rd.online.FixedLag(family("kalman"), 3), []

    @jax.jit
    def run(state: LagState, ys: Any, mask: Any, inputs: Any, length: Any) -> Any:
        traces.append(1)
        return live.scan(state, ys, mask=mask, inputs=inputs, length=length)

    state, s = live.init(), stream()
    for length in (N, 4, 1):
        state, _ = run(state, *s, jnp.asarray(length))
    assert len(traces) == 1 and int(state.num_read) == N + 5


@pytest.mark.parametrize("name", [*_slow(("kalman",)), "mixture"])
def test_saved_state_resumes_bit_for_bit(name: str, tmp_path: Path):
    live = rd.online.FixedLag(family(name), 3, num_samples=8)
    state, _ = read(live, live.init(KEY), 0, CHUNK)
    rd.save(tmp_path / "state.rd", state)
    restored = rd.load(tmp_path / "state.rd")
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    going_on, resumed = (read(live, each, CHUNK, 2 * CHUNK)[1] for each in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, going_on, resumed)


def test_nan_is_a_missing_entry():
    live, s = rd.online.FixedLag(family("kalman"), 3), stream()
    ys = np.where(s.mask, s.ys, np.nan)
    _, out = live.scan(live.init(), ys, inputs=s.inputs)
    assert_close(out, scanned("kalman", 3)[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thin factor, 1e-10", "level and cycle"])
def test_nearly_singular_models_equal_joint_gaussian(name: str):
    model, num_times = singular_models()[name], 40
    _, ys = model.simulate(jax.random.key(0), num_times)
    oracle = joint_gaussian.posterior(model, ys)
    family = rd.KalmanFamily(model)
    np.testing.assert_allclose(family.infer(ys).marginals().mean, oracle.mean, atol=1e-9)
    live = rd.online.FixedLag(family, lag=num_times - 1)
    _, out = live.scan(live.init(), ys)
    np.testing.assert_allclose(out.smoothed.mean[-1], oracle.mean[0], atol=1e-9)
    np.testing.assert_allclose(out.filtered.mean[-1], oracle.mean[-1], atol=1e-9)


def test_fixed_lag_works_under_vmap():
    live, s = rd.online.FixedLag(family("kalman"), 3), stream()
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), live.init())
    ys = jnp.stack([jnp.asarray(s.ys), jnp.ones_like(s.ys)])
    run = jax.vmap(lambda state, y: live.scan(state, y, mask=s.mask, inputs=s.inputs))
    states, out = run(states, ys)
    assert_close(jax.tree.map(lambda leaf: leaf[0], out), scanned("kalman", 3)[1])


@pytest.mark.slow
def test_float32_stream_stays_float32_with_x64_on():
    small = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf,
        family("kalman"),
    )
    live = rd.online.FixedLag(small, 3)
    state, out = read(live, live.init(), 0, N)
    assert out.smoothed.mean.dtype == state.law.mean.dtype == jnp.float32
    np.testing.assert_allclose(
        out.smoothed.mean, scanned("kalman", 3)[1].smoothed.mean, rtol=1e-4, atol=1e-4
    )


def test_fixed_lag_refuses_bad_arguments(untyped: None):
    wrong: Any = "family"
    with pytest.raises(TypeError, match="expects a family"):
        rd.online.FixedLag(wrong, 3)
    with pytest.raises(ValueError, match="lag must be at least 1"):
        rd.online.FixedLag(family("kalman"), 0)
    with pytest.raises(ValueError, match="init needs a key"):
        rd.online.FixedLag(family("mixture"), 3).init()
    live = rd.online.FixedLag(family("kalman"), 3)
    state = live.init()
    with pytest.raises(ValueError, match="no row was read"):
        live.flush(state)
    with pytest.raises(ValueError, match="inputs must be given"):
        live.update(state, np.zeros(2))
    with pytest.raises(ValueError, match="must be finite"):
        live.update(state, np.array([np.inf, 0.0]), inputs=np.zeros(1))
    with pytest.raises(ValueError, match="must have 2 columns"):
        live.scan(state, np.zeros((4, 3)), inputs=np.zeros((4, 1)))
