"""Posteriors carried along a stream against what the whole series up to each row would give."""

import functools
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close
from jax import lax
from linear_models import IncompleteSeries, incomplete_series, linear_model, random_model
from registry import FAMILIES
from scipy.stats import multivariate_normal

import retrodict as rd
from retrodict.online import RunningOutput, RunningState, samples
from retrodict.online.quantities import kahan_add
from retrodict.online.samples import backward_law, log_weights

N, CHUNK, LAG = 6, 3, 2
KEY = jax.random.key(11)
FUNCTIONALS = {"moments": rd.SecondMoments(), "sum": rd.StateSum()}


def _slow(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


# Quick runs try the exact family and one that is not, which share their program.
QUICK = ("kalman", "shifted")
OTHERS = [name for name, case in FAMILIES.items() if not case.sampled and name != "kalman"]
LINEAR = [*QUICK, *_slow(*OTHERS)]


@functools.cache
def model() -> rd.StateSpaceModel:
    return random_model(np.random.default_rng(1), 2, 2, 1)


@functools.cache
def stream() -> IncompleteSeries:
    return incomplete_series(model(), N, missing_row=3)


@functools.cache
def family(name: str) -> Any:
    if name == "shifted":
        # Not the posterior of the model, but near it: weights are neither even nor lost.
        wrong = eqx.tree_at(
            lambda m: (m.transition.bias, m.emission.scale_tril),
            model(),
            (model().transition.bias + 0.3, 1.4 * model().emission.scale_tril),
        )
        return rd.KalmanFamily(wrong)
    return FAMILIES[name].make(model(), 2, 2, 1)


METHODS = {
    "exact": rd.Recursive(),
    "all": rd.online.WeightedSamples(8, num_replicates=2),
    "unbiased": rd.online.WeightedSamples(6, normalised=False, num_replicates=4000),
    "paris": rd.online.WeightedSamples(8, 2, num_replicates=2),
}


@functools.cache
def running(name: str, method: str = "exact", **options: Any) -> rd.online.RunningPosterior:
    return rd.online.RunningPosterior(
        family(name), model(), functionals=FUNCTIONALS, lag=LAG, method=METHODS[method], **options
    )


def read(posterior: rd.online.RunningPosterior, state: RunningState, start: int, stop: int) -> Any:
    """Reads some of the rows, padded with nonsense to the length of all: compiled once."""
    s, exists = stream(), np.arange(N)[:, None] < stop - start
    ys = np.where(exists & np.roll(s.mask, -start, 0), np.roll(s.ys, -start, 0), np.nan)
    inputs = np.where(exists, np.roll(s.inputs, -start, 0), np.nan)
    mask = np.roll(s.mask, -start, 0)
    state, out = posterior.scan(state, ys, mask=mask, inputs=inputs, length=stop - start)
    assert np.all(np.isnan(out.filtered.mean[stop - start :]))
    assert all(np.all(np.isnan(leaf[stop - start :])) for leaf in jax.tree.leaves(out.values))
    return state, row(out, slice(stop - start))


@functools.cache
def scanned(name: str, method: str = "exact") -> tuple[RunningState, RunningOutput]:
    posterior = running(name, method)
    return read(posterior, posterior.init(KEY), 0, N)


@functools.cache
def offline(name: str) -> list[tuple[Any, Any]]:
    """The bound and the functionals of the first k+1 rows, taken from their chain."""
    s = stream()

    @jax.jit
    def at(length: jax.Array) -> tuple[Any, Any]:
        chain = family(name).infer(s.ys, mask=s.mask, inputs=s.inputs, length=length)
        bound = rd.elbo(model(), chain, s.ys, mask=s.mask, inputs=s.inputs)
        return bound, {key: rd.expectation(chain, f) for key, f in FUNCTIONALS.items()}

    return [at(jnp.asarray(k + 1)) for k in range(N)]


def row(tree: Any, k: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[k], tree)


@pytest.mark.parametrize("name", LINEAR)
def test_running_rows_equal_offline_prefixes(name: str):
    out = scanned(name)[1]
    for k, (bound, values) in enumerate(offline(name)):
        assert float(out.elbo[k]) == pytest.approx(float(bound), abs=1e-9)
        assert_close(row(out.values, k), values, 1e-9)
    assert_close(np.cumsum(out.elbo_increment), out.elbo, 1e-9)
    assert not np.any(out.elbo_standard_error) and out.ess is None
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(out.standard_errors))


def test_running_elbo_of_exact_family_equals_log_evidence():
    s, out = stream(), scanned("kalman")[1]
    evidence = jax.jit(
        lambda length: (
            rd.kalman_smoother(
                model(), s.ys, mask=s.mask, inputs=s.inputs, length=length
            ).log_evidence
        )
    )
    for k in range(N):
        assert float(out.elbo[k]) == pytest.approx(float(evidence(k + 1)), abs=1e-9)


def test_running_lagged_rows_equal_fixed_lag():
    out, s = scanned("kalman")[1], stream()
    chain = family("kalman").infer(s.ys, mask=s.mask, inputs=s.inputs)
    np.testing.assert_allclose(out.filtered.mean, chain.laws.mean, atol=1e-10)
    mean, kernels = np.asarray(chain.laws.mean[4]), chain.kernels
    for j in (3, 2):
        mean = np.asarray(kernels.weight[j]) @ mean + np.asarray(kernels.bias[j])
    np.testing.assert_allclose(out.smoothed.mean[4], mean, atol=1e-10)
    np.testing.assert_array_equal(out.row, [0, 0, 0, 1, 2, 3])
    np.testing.assert_array_equal(out.ready, [False, False, True, True, True, True])
    last = running("kalman").flush(scanned("kalman")[0])
    np.testing.assert_array_equal(last.row, [4, 5])
    np.testing.assert_allclose(last.smoothed.mean[-1], chain.laws.mean[-1], atol=1e-10)


@pytest.mark.parametrize("method", ["unbiased", *_slow("all", "paris")])
def test_weighted_samples_of_exact_posterior_give_log_evidence(method: str):
    out = scanned("kalman", method)[1]
    np.testing.assert_allclose(out.elbo, scanned("kalman")[1].elbo, rtol=0, atol=1e-10)
    assert np.all(np.asarray(out.elbo_standard_error) < 1e-10)
    assert np.all(np.isnan(out.ess[1:])) if method == "paris" else np.all(out.ess > 1)


def errors(name: str, out: RunningOutput) -> tuple[np.ndarray, np.ndarray]:
    """Estimates less exact values at all rows after the first, and their standard errors."""
    exact = scanned(name)[1]

    def flat(elbo: Any, values: Any) -> np.ndarray:
        leaves = [np.asarray(leaf)[1:].reshape(N - 1, -1) for leaf in jax.tree.leaves(values)]
        return np.concatenate([np.asarray(elbo)[1:, None], *leaves], axis=1)

    return flat(out.elbo, out.values) - flat(exact.elbo, exact.values), flat(
        out.elbo_standard_error, out.standard_errors
    )


def sampled(name: str, method: rd.online.WeightedSamples) -> RunningOutput:
    posterior = rd.online.RunningPosterior(
        family(name), model(), functionals=FUNCTIONALS, method=method
    )
    return read(posterior, posterior.init(KEY), 0, N)[1]


@pytest.mark.statistical
def test_unnormalised_weights_are_unbiased():
    # 5 rows of 11 numbers, each beyond 4.9 standard errors with probability 1e-6: 6e-5 in all.
    difference, error = errors("shifted", scanned("shifted", "unbiased")[1])
    assert np.all(np.abs(difference) < 4.9 * error)
    assert np.max(error) < 0.5


@functools.cache
def biases(count: int, draws: int | None, replicates: int) -> tuple[np.ndarray, np.ndarray]:
    method = rd.online.WeightedSamples(count, draws, num_replicates=replicates)
    return errors("shifted", sampled("shifted", method))


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("draws", [None, 2])
def test_bias_of_normalised_weights_falls_with_sample_size(draws: int | None):
    # Six draws are seen to be biased, and a bias of order 1/N is eight times less with 48. Each of
    # 55 comparisons fails by chance with probability below 1e-6.
    few, few_error = biases(6, None, 4000)
    many, many_error = biases(48, draws, 1000)
    significant = np.abs(few) > 8 * few_error
    assert np.any(significant)
    assert np.all(
        np.abs(many)[significant] < 0.5 * np.abs(few)[significant] + 4.9 * many_error[significant]
    )


@pytest.mark.slow
@pytest.mark.statistical
def test_drawn_indices_have_the_expectation_of_all_pairs():
    # 55 numbers, each beyond 4.9 joint standard errors with probability 1e-6. Indices are drawn
    # with the weights of all pairs: the bias is the same, and only the variance is larger.
    every, every_error = biases(6, None, 4000)
    bias, drawn_error = biases(6, 2, 4000)
    assert np.all(np.abs(bias - every) < 4.9 * np.hypot(every_error, drawn_error))
    assert np.mean(drawn_error) > np.mean(every_error)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("name", ["nonlinear", "mixture"])
@pytest.mark.parametrize("draws", [None, 2])
def test_sampled_families_run_on_streams(name: str, draws: int | None):
    # 6 rows of 11 numbers, each beyond 5 joint standard errors with probability 6e-7; the bias of
    # 200 draws is below the standard errors of 8 replicates, which have heavier tails: 7 instead.
    s = stream()
    out = sampled(name, rd.online.WeightedSamples(200, draws, num_replicates=8))

    @jax.jit
    def at(length: jax.Array) -> Any:
        chain = family(name).infer(s.ys, mask=s.mask, inputs=s.inputs, length=length)
        paths, key = rd.BackwardSampling(4000), jax.random.key(4)
        options: Any = {"estimator": paths, "key": key, "with_standard_error": True}
        bound = rd.elbo(model(), chain, s.ys, mask=s.mask, inputs=s.inputs, **options)
        return bound, {key: rd.expectation(chain, f, **options) for key, f in FUNCTIONALS.items()}

    for k in range(N):
        bound, values = at(jnp.asarray(k + 1))
        error = np.hypot(bound[1], out.elbo_standard_error[k])
        assert abs(float(out.elbo[k] - bound[0])) < 7 * error
        for key, (value, its_error) in values.items():
            mine, my_error = row(out.values[key], k), row(out.standard_errors[key], k)
            jax.tree.map(
                lambda a, b, s, t: np.testing.assert_array_less(
                    np.abs(a - b), 7 * np.hypot(s, t) + 1e-12
                ),
                mine,
                value,
                my_error,
                its_error,
            )


def test_weights_are_ratios_of_densities():
    rng, normal = np.random.default_rng(0), cast(Any, multivariate_normal)
    for d in (1, 5):
        gain, bias = rng.normal(size=(d, d)), rng.normal(size=d)
        scale, spread = np.tril(rng.normal(size=(d, d))), np.tril(rng.normal(size=(d, d)))
        xs, befores = rng.normal(size=(3, d)), rng.normal(size=(4, d))
        got = log_weights(
            backward_law(family("kalman")),
            rd.Gaussian(jnp.zeros(d), jnp.asarray(spread)),
            rd.LinearGaussianKernel(jnp.asarray(gain), jnp.asarray(bias), jnp.asarray(scale)),
            jnp.asarray(xs),
            jnp.asarray(befores),
        )
        for i, x in enumerate(xs):
            kernel = normal(gain @ x + bias, scale @ scale.T).logpdf(befores)
            law = normal(np.zeros(d), spread @ spread.T).logpdf(befores)
            np.testing.assert_allclose(got[i], kernel - law, rtol=1e-9, atol=1e-9)


def test_unbiased_weights_centre_on_the_other_samples():
    rng = np.random.default_rng(0)
    logs = np.concatenate([rng.normal(size=(3, 5)), 12.0 * rng.normal(size=(3, 5))])
    got = np.asarray(jax.vmap(samples._unbiased_weights)(jnp.asarray(logs)))
    for i, w in enumerate(np.exp(logs)):
        values = rng.normal(size=5)
        total = 0.0
        for j in range(5):
            others = np.arange(5) != j
            around = np.sum((w * values)[others]) / np.sum(w[others])
            total += (w[j] * (values[j] - around) + around) / 5
        assert got[i] @ values == pytest.approx(total, rel=1e-9, abs=1e-9)
        assert np.sum(got[i]) == pytest.approx(1.0, abs=1e-9 * np.max(np.abs(got[i])))
    # One weight that dwarfs all others does not make the rest undefined.
    lonely = samples._unbiased_weights(jnp.array([0.0, -800.0, -801.0]))
    assert np.all(np.isfinite(lonely)) and float(jnp.sum(lonely)) == pytest.approx(1.0)


@pytest.mark.slow  # `test_stream` has a quick form of it
@pytest.mark.parametrize(
    "name, method",
    [("kalman", "exact"), ("kalman", "unbiased"), ("kalman", "paris"), ("mixture", "all")],
)
def test_running_state_resumes_bit_for_bit(name: str, method: str, tmp_path: Path):
    posterior = running(name, method)
    state, _ = read(posterior, posterior.init(KEY), 0, CHUNK)
    rd.save(tmp_path / "state.rd", state)
    restored = rd.load(tmp_path / "state.rd")
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    going_on, resumed = (read(posterior, each, CHUNK, N)[1] for each in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, going_on, resumed)
    # Chunks do not matter, and a state is as large as it was at the start.
    end, out = scanned(name, method)
    assert_close(going_on, row(out, slice(CHUNK, N)), 1e-10)
    assert_close(read(posterior, state, CHUNK, N)[0].totals, end.totals, 1e-10)
    sizes = [[leaf.shape for leaf in jax.tree.leaves(s)] for s in (posterior.init(KEY), state)]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "unbiased"])
def test_single_rows_equal_a_chunk(method: str):
    posterior, s = running("kalman", method), stream()
    state = posterior.init(KEY)
    for k in range(N):
        state, out = posterior.update(state, s.ys[k], mask=s.mask[k], inputs=s.inputs[k])
        assert_close(out, row(scanned("kalman", method)[1], k), 1e-10)


def _single(tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf, tree
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "all", "paris"])
def test_running_posterior_in_float32_stays_float32(method: str):
    posterior = rd.online.RunningPosterior(
        _single(family("kalman")),
        _single(model()),
        functionals=FUNCTIONALS,
        method=METHODS[method],
    )
    state, out = read(posterior, posterior.init(KEY), 0, N)
    inexact = [leaf for leaf in jax.tree.leaves((state, out)) if eqx.is_inexact_array(leaf)]
    assert {leaf.dtype for leaf in inexact} == {jnp.dtype("float32")}
    np.testing.assert_allclose(out.elbo, scanned("kalman")[1].elbo, rtol=1e-4, atol=1e-3)


def test_totals_of_long_streams_keep_precision():
    step = jnp.float32(-1.1)

    def move(carry: Any, _: None) -> tuple[Any, None]:
        total, residue = carry
        return kahan_add(total, residue, step), None

    zero = jnp.zeros((), jnp.float32)
    (total, _), _ = lax.scan(move, (zero, zero), None, length=200_000)
    assert float(total) == pytest.approx(200_000 * float(step), rel=1e-7)


def every_functional(quadratic: bool) -> dict[str, rd.AbstractFunctional]:
    """All functionals of the library; those of the user's own are quadratic, or are not."""

    def way(before: jax.Array, x: jax.Array, data: Any) -> jax.Array:
        return (x - before) ** 2 if quadratic else jnp.abs(x - before)

    def start(x: jax.Array, data: Any) -> jax.Array:
        return x if quadratic else jnp.tanh(x)

    return {
        **FUNCTIONALS,
        "way": rd.AdditiveFunctional(way, start, quadratic=quadratic),
        "way alone": rd.AdditiveFunctional(way, quadratic=quadratic),
        "states": rd.StateFunctional(start, quadratic=quadratic),
        "joint": rd.LogJoint(model()),
        "score": rd.Score(model()),
    }


def after_all_rows(name: str, named: dict[str, rd.AbstractFunctional], **options: Any) -> Any:
    """Their expectations under the chain of the whole series."""
    s = stream()
    chain = family(name).infer(s.ys, mask=s.mask, inputs=s.inputs)
    series = model().series(s.ys, mask=s.mask, inputs=s.inputs)
    at = jax.jit(
        lambda c: {key: rd.expectation(c, f, series, **options) for key, f in named.items()}
    )
    return at(chain)


def last_row(name: str, named: dict[str, rd.AbstractFunctional], method: Any) -> RunningOutput:
    posterior = rd.online.RunningPosterior(family(name), functionals=named, method=method)
    return row(read(posterior, posterior.init(KEY), 0, N)[1], -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_functionals_are_tracked_exactly(name: str):
    named = every_functional(quadratic=True)
    assert_close(last_row(name, named, None).values, after_all_rows(name, named), 1e-9)


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("draws", [None, 2])
def test_functionals_are_tracked_by_weighted_samples(draws: int | None):
    # About 100 numbers, each beyond 7 joint standard errors, of which 16 replicates make up a part,
    # with probability below 5e-6. The bias of 400 draws is below these errors.
    named = every_functional(quadratic=False)
    estimates = last_row("kalman", named, rd.online.WeightedSamples(400, draws, num_replicates=16))
    options: Any = {"key": jax.random.key(4), "with_standard_error": True}
    exact = after_all_rows("kalman", named, estimator=rd.BackwardSampling(20_000), **options)
    for key, (value, error) in exact.items():
        jax.tree.map(
            lambda a, b, s, t: np.testing.assert_array_less(
                np.abs(a - b), 7 * np.hypot(s, t) + 1e-9
            ),
            estimates.values[key],
            value,
            estimates.standard_errors[key],
            error,
        )


@pytest.mark.slow
def test_running_functionals_read_their_data():
    s, price = stream(), np.arange(1.0, N + 1)
    weighed = rd.StateFunctional(lambda x, data: data * x, quadratic=True)
    posterior = rd.online.RunningPosterior(family("kalman"), functionals={"cost": weighed})
    state = posterior.init(data={"cost": np.zeros(())})
    out = posterior.scan(
        state, s.ys, mask=s.mask, inputs=s.inputs, data={"cost": jnp.asarray(price)}
    )[1]
    chain = family("kalman").infer(s.ys, mask=s.mask, inputs=s.inputs)
    assert_close(out.values["cost"][-1], price @ np.asarray(chain.marginals().mean), 1e-9)
    assert out.elbo is None and out.elbo_increment is None
    # Without a lag, what is smoothed is what is filtered.
    np.testing.assert_array_equal(out.row, np.arange(N))
    np.testing.assert_array_equal(out.smoothed.mean, out.filtered.mean)


@pytest.mark.slow
def test_tiled_weights_equal_untiled_weights(monkeypatch: pytest.MonkeyPatch):
    posterior = running("shifted", "all")
    at_once = scanned("shifted", "all")[1]
    monkeypatch.setattr(samples, "TILE", 3 * 8)
    jax.clear_caches()
    assert_close(read(posterior, posterior.init(KEY), 0, N)[1], at_once, 1e-10)


@pytest.mark.slow
def test_running_posterior_works_under_vmap():
    posterior, s = running("kalman", "unbiased"), stream()
    states = jax.vmap(posterior.init)(jnp.stack([KEY, jax.random.key(1)]))
    out = jax.vmap(lambda state: posterior.scan(state, s.ys, mask=s.mask, inputs=s.inputs))(states)
    assert_close(row(out[1], 0), scanned("kalman", "unbiased")[1], 1e-10)


def test_running_posterior_refuses_bad_arguments(untyped: None):
    kalman, mixture = family("kalman"), family("mixture")
    bent = eqx.tree_at(
        lambda m: m.emission,
        model(),
        rd.NonlinearGaussianKernel(lambda x, u: jnp.tanh(x), jnp.eye(2), takes_input=True),
    )
    wrong: Any = "nonsense"
    with pytest.raises(TypeError, match="WeightedSamples"):
        rd.online.RunningPosterior(mixture, model())
    with pytest.raises(TypeError, match="a part of the lower bound"):
        rd.online.RunningPosterior(kalman, bent)
    with pytest.raises(TypeError, match="by name"):
        rd.online.RunningPosterior(kalman, model(), functionals={"sum": wrong})
    with pytest.raises(TypeError, match="expects the method"):
        rd.online.RunningPosterior(kalman, model(), method=wrong)
    with pytest.raises(ValueError, match="non-negative"):
        rd.online.RunningPosterior(kalman, model(), lag=-1)
    with pytest.raises(TypeError, match="StateSpaceModel"):
        rd.online.RunningPosterior(kalman, wrong)
    with pytest.raises(ValueError, match="state_dim"):
        rd.online.RunningPosterior(kalman, random_model(np.random.default_rng(0), 3, 2, 1))
    with pytest.raises(ValueError, match="columns"):
        rd.online.RunningPosterior(kalman, random_model(np.random.default_rng(0), 2, 3, 1))
    with pytest.raises(ValueError, match="init needs a key"):
        running("kalman", "all").init()
    with pytest.raises(ValueError, match="names of functionals"):
        running("kalman").update(
            scanned("kalman")[0], np.zeros(2), inputs=np.zeros(1), data={"no": 1}
        )
    with pytest.raises(ValueError, match="lag=0"):
        rd.online.RunningPosterior(kalman, model()).flush(scanned("kalman")[0])
    for options, message in [
        ({"num_samples": 1}, "at least 2"),
        ({"num_samples": 9, "num_draws": 1}, "at least 2"),
        ({"num_samples": 9, "num_draws": 2, "normalised": False}, "normalised"),
        ({"num_samples": 9, "backward": rd.particles.ExactBackward()}, "num_draws"),
    ]:
        with pytest.raises(ValueError, match=message):
            rd.online.WeightedSamples(**options)
    with pytest.raises(TypeError, match="no ancestors"):
        rd.online.WeightedSamples(9, 2, backward=rd.particles.MCMCBackward())


def assert_same_but_skipped(actual: Any, expected: Any) -> None:
    actual, expected = (eqx.tree_at(lambda o: o.skipped, o, None) for o in (actual, expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), actual, expected
    )


@pytest.mark.parametrize("size", [1e160, pytest.param(1e153, marks=pytest.mark.slow)])
def test_row_with_overflowing_likelihood_is_treated_as_missing(size: float):
    # The square of the first overflows; that of the second only in units of the noise.
    sharp = linear_model(prior=1e-5, noise=1e-5, error=1e-5)
    posterior = rd.online.RunningPosterior(
        rd.KalmanFamily(sharp), sharp, functionals=FUNCTIONALS, lag=LAG
    )
    ys = 1e-5 * np.random.default_rng(0).normal(size=(N, 1))
    ys[[0, 3]] = size
    missing = ys.copy()
    missing[[0, 3]] = np.nan
    state, out = posterior.scan(posterior.init(), ys)
    after, expected = posterior.scan(posterior.init(), missing)
    assert np.flatnonzero(out.skipped).tolist() == [0, 3] and not np.any(expected.skipped)
    assert_same_but_skipped(out, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), state, after)
    # Row by row, and the first is still the first.
    state = posterior.init()
    for k in range(N):
        state, one = posterior.update(state, ys[k])
        assert bool(one.skipped) == (k in (0, 3)) and np.isfinite(one.elbo)
        assert_same_but_skipped(one, row(expected, k))


def test_overflowing_functional_data_are_skipped():
    linear = rd.StateFunctional(lambda x, data: data * x, quadratic=True)
    posterior = rd.online.RunningPosterior(family("kalman"), functionals={"linear": linear})
    s, weights = stream(), np.ones(N)
    weights[2] = 1e308
    state = posterior.init(data={"linear": weights[0]})
    s = s._replace(ys=np.where(s.mask, s.ys, np.nan))
    ys = s.ys.copy()
    ys[2] = 1e100
    state, out = posterior.scan(state, ys, inputs=s.inputs, data={"linear": weights})
    assert np.flatnonzero(out.skipped).tolist() == [2]
    assert np.all(np.isfinite(out.values["linear"]))


def test_row_that_overflows_the_filter_is_treated_as_missing():
    live = rd.online.FixedLag(family("kalman"), LAG)
    s = stream()
    ys = np.where(s.mask, s.ys, np.nan)
    ys[1], ys[4] = [1.7e308, -1.7e308], [-1.7e308, 1.7e308]
    state, out = live.scan(live.init(), ys, inputs=s.inputs)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((state, out)))
    assert np.any(out.skipped)
    missing = np.where(np.asarray(out.skipped)[:, None], np.nan, ys)
    _, expected = live.scan(live.init(), missing, inputs=s.inputs)
    assert not np.any(expected.skipped)
    np.testing.assert_allclose(out.smoothed.mean, expected.smoothed.mean, rtol=1e-12)
