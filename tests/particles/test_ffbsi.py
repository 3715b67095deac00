"""Particle filters and FFBSi against Kalman, the grid and sums written out in numpy.

Keys are fixed. A Monte Carlo average may be off by 4.5 standard errors, which happens to one
average in 150,000, and by its bias of order 1/N where it has one.
"""

from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from assertions import assert_close, assert_means_agree
from linear_models import linear_transition_model, planar_model
from nonlinear_models import (
    heavy_tailed_count_model,
    nonlinear_emission_model,
    paper_model,
    uniform_emission,
)

import retrodict as rd
from retrodict._exact import KalmanPosterior

UNTYPED = cast(Any, rd)
"""The library as it is called by those who do not read types."""

LINEAR = planar_model(
    design=jnp.array([[1.0, 0.4], [0.0, 1.0]]),
    offset=jnp.array([0.2, 0.0]),
    error=jnp.diag(jnp.array([0.7, 1.0])),
)
NUM_TIMES = 6


def _drive(u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A transition of which weight, bias and scale all depend on the input."""
    weight = jnp.array([[0.9, 0.2], [-0.3, 0.8]]) * (1 - 0.3 * u[0])
    return weight, jnp.array([1.0, -1.0]) * u[1], jnp.diag(0.4 + u**2)


DRIVEN = rd.StateSpaceModel(
    LINEAR.prior,
    rd.VaryingLinearGaussianKernel(_drive),
    rd.LinearGaussianKernel(
        jnp.array([[1.0, 0.4], [0.0, 1.0]]),
        jnp.zeros(2),
        jnp.array([[0.7, 0.0], [0.4, 0.8]]),
        jnp.array([[1.0, 0.0], [-1.0, 2.0]]),
    ),
)
SLOPE = -1.545546939136267
NONLINEAR = paper_model()
"""The model of the paper's section 5.2."""

YS = LINEAR.simulate(jax.random.key(5), NUM_TIMES)[1]
SHARP = {"resampling": "multinomial", "threshold": 1.0}


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def pairs_of(samples: jax.Array) -> jax.Array:
    """Covariances of neighbours (x_{k-1}, x_k), of shape `(time-1, 2d, 2d)`."""
    stacked = jnp.concatenate([samples[:, :-1], samples[:, 1:]], axis=-1)
    centred = stacked - stacked.mean(0, keepdims=True)
    return jnp.einsum("mta,mtb->tab", centred, centred) / samples.shape[0]


def summary(posterior: rd.ParticlePosterior) -> dict[str, jax.Array]:
    value, error = posterior.expectation(rd.StateSum())
    return {
        "mean": posterior.mean,
        "covariance": posterior.covariance,
        "pairs": pairs_of(posterior.samples),
        "log_evidence": posterior.log_evidence,
        "filter_mean": posterior.filtered.mean,
        "filter_covariance": posterior.filtered.covariance,
        "sum": value,
        "sum_error": error,
        "log_evidence_error": posterior.filtered.log_evidence_standard_error(),
    }


def exact_summary(exact: KalmanPosterior, length: int) -> dict[str, np.ndarray]:
    laws = exact.chain.marginals()
    return {
        "mean": np.asarray(laws.mean),
        "covariance": np.asarray(laws.covariance),
        "pairs": np.asarray(exact.chain.pairwise().covariance),
        "filter_mean": np.asarray(exact.chain.laws.mean),
        "filter_covariance": np.asarray(exact.chain.laws.covariance),
        "sum": np.asarray(laws.mean)[:length].sum(0),
    }


def smoothed(
    model: rd.StateSpaceModel, num_particles: int, num_keys: int, ys: Any = YS, **options: Any
) -> dict[str, np.ndarray]:
    """Summaries of many runs, with a leading axis for the keys."""

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> dict[str, jax.Array]:
        return summary(rd.ffbsi(key, model, ys, num_particles, **options))

    return {name: np.asarray(value) for name, value in run(keys(num_keys)).items()}


# --- against Kalman -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharp_runs() -> dict[str, np.ndarray]:
    return smoothed(LINEAR, 100, 200, **SHARP)


def test_smoothed_moments_of_linear_model_equal_kalman(sharp_runs: dict):
    exact = exact_summary(rd.kalman_smoother(LINEAR, YS), NUM_TIMES)
    assert_means_agree(sharp_runs, exact, 100)


def test_standard_errors_of_one_run_are_calibrated(sharp_runs: dict):
    # The standard deviation of 200 z-scores has a relative standard error of 5 %.
    exact = rd.kalman_smoother(LINEAR, YS)
    sums = np.asarray(exact.chain.marginals().mean).sum(0)
    scores = (sharp_runs["sum"] - sums) / sharp_runs["sum_error"]
    assert np.all((scores.std(0) > 0.75) & (scores.std(0) < 1.3)), scores.std(0)
    error = sharp_runs["log_evidence"] - float(exact.log_evidence)
    scores = error / sharp_runs["log_evidence_error"]
    assert 0.75 < scores.std() < 1.3, scores.std()


def driven_series() -> tuple[np.ndarray, dict[str, Any]]:
    """A series of 7 rows of which 5 exist, with inputs, missing entries and a missing row."""
    rng = np.random.default_rng(1)
    inputs = rng.uniform(-0.8, 0.8, size=(7, 2))
    ys = np.array(DRIVEN.simulate(jax.random.key(8), 7, inputs=inputs)[1])
    mask = np.ones((7, 2), bool)
    mask[1, 0], mask[2], mask[4, 1] = False, False, False
    return ys, {"mask": mask, "inputs": inputs, "length": 5}


@pytest.mark.statistical
def test_smoothed_moments_with_inputs_masks_and_padding_equal_kalman():
    ys, rest = driven_series()
    exact = rd.kalman_smoother(DRIVEN, ys, **rest)
    estimates = smoothed(DRIVEN, 100, 200, ys, **rest)
    expected = exact_summary(exact, 5)
    # Neighbours beyond the end are one and the same state, whose covariance stands in both blocks.
    assert_means_agree(estimates, expected, 100)
    ratio = np.exp(estimates["log_evidence"] - float(exact.log_evidence))
    assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(200)
    assert (
        np.abs(np.mean(estimates["log_evidence_error"]) / estimates["log_evidence"].std() - 1) < 0.4
    )


@pytest.mark.statistical
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backward": rd.particles.RejectionBackward()},
        {"backward": rd.particles.MCMCBackward(2)},
        {"backward": rd.particles.Genealogy()},
        {"lookahead": rd.particles.mean_lookahead(LINEAR)},
        {"resampling": "residual", "backward": rd.particles.MCMCBackward(1)},
    ],
    ids=["exact", "rejection", "mcmc", "genealogy", "auxiliary", "residual"],
)
def test_smoothed_moments_of_every_backward_sampler_equal_kalman(options: dict):
    exact = exact_summary(rd.kalman_smoother(LINEAR, YS), NUM_TIMES)
    assert_means_agree(smoothed(LINEAR, 200, 200, **options), exact, 200)


@pytest.mark.statistical
@pytest.mark.parametrize("backward", [rd.particles.ExactBackward(), rd.particles.MCMCBackward(2)])
def test_smoothed_moments_of_guided_filter_equal_kalman(
    backward: rd.particles.AbstractBackwardSampler,
):
    exact = rd.kalman_smoother(LINEAR, YS)
    options = {"proposal": rd.particles.ChainProposal(exact.chain, 1.5), "backward": backward}
    assert_means_agree(smoothed(LINEAR, 200, 200, **options), exact_summary(exact, NUM_TIMES), 200)


@pytest.mark.statistical
def test_errors_fall_with_the_root_of_num_particles():
    # Over 60 keys the slopes have standard deviations of at most 0.05: 0.2 is four of them.
    exact = rd.kalman_smoother(LINEAR, YS)
    expected = exact_summary(exact, NUM_TIMES) | {"log_evidence": np.asarray(exact.log_evidence)}
    sizes = np.array([50, 200, 800])
    runs = [smoothed(LINEAR, int(size), 60) for size in sizes]
    for name, value in expected.items():
        errors = [np.sqrt(np.mean((run[name] - value) ** 2)) for run in runs]
        slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
        assert -0.7 < slope < -0.3, f"{name}: {slope:.2f}"


@pytest.mark.slow
@pytest.mark.statistical
def test_standard_errors_are_calibrated_on_a_longer_series():
    # The standard deviation of 60 z-scores has a relative standard error of 9 %. With 200 particles
    # in place of 800, errors of the sum would come out a quarter too small here.
    ys = LINEAR.simulate(jax.random.key(6), 40)[1]
    exact = rd.kalman_smoother(LINEAR, ys)
    sums = np.asarray(exact.chain.marginals().mean).sum(0)
    sharp = smoothed(LINEAR, 800, 60, ys, **SHARP)
    scores = (sharp["sum"] - sums) / sharp["sum_error"]
    assert np.all((scores.std(0) > 0.75) & (scores.std(0) < 1.3)), scores.std(0)
    usual = smoothed(LINEAR, 200, 100, ys)
    scores = (usual["log_evidence"] - float(exact.log_evidence)) / usual["log_evidence_error"]
    assert 0.75 < scores.std() < 1.3, scores.std()


# --- against the grid -----------------------------------------------------------------------------


@pytest.mark.statistical
def test_smoothed_moments_of_nonlinear_model_equal_grid():
    ys = NONLINEAR.simulate(jax.random.key(2), 8)[1]
    exact = rd.grid_smoother(
        NONLINEAR, ys, rd.Grid(jnp.array([-3.0]), jnp.array([3.0]), 2000)
    ).check()
    estimates = smoothed(NONLINEAR, 400, 100, ys)
    mean, covariance = np.asarray(exact.mean), np.asarray(exact.covariance)
    cross = np.asarray(exact.cross_covariance())
    pairs = np.block([[covariance[:-1], cross], [cross.transpose(0, 2, 1), covariance[1:]]])
    expected = {"mean": mean, "covariance": covariance, "pairs": pairs, "sum": mean.sum(0)}
    assert_means_agree(estimates, expected, 400)
    ratio = np.exp(estimates["log_evidence"] - float(exact.log_evidence))
    assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / 10
    scores = (estimates["sum"] - mean.sum(0)) / estimates["sum_error"]
    # Systematic resampling is better than what the standard error takes it for.
    assert 0.4 < scores.std() < 1.3, scores.std()


@pytest.mark.statistical
def test_smoothed_moments_of_heavy_tailed_counts_equal_grid():
    model = heavy_tailed_count_model()
    ys = np.array([[1.0], [0.0], [np.nan], [6.0], [2.0]])
    exact = rd.grid_smoother(model, ys, rd.Grid(jnp.array([-8.0]), jnp.array([8.0]), 1500))
    bound = float(scipy.stats.t.logpdf(0.0, 5.0, 0.0, 0.3))
    expected = {"mean": np.asarray(exact.mean), "covariance": np.asarray(exact.covariance)}
    for backward in (rd.particles.ExactBackward(), rd.particles.RejectionBackward(log_bound=bound)):
        estimates = smoothed(model, 300, 100, ys, backward=backward)
        assert_means_agree(estimates, expected, 300)
        ratio = np.exp(estimates["log_evidence"] - float(exact.log_evidence))
        assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / 10


# --- evidence -------------------------------------------------------------------------------------


def _guide_first(data: rd.Series) -> dist.Distribution:
    return dist.Normal(0.5 * data.ys, jnp.array([1.5, 1.2]))


def _guide(before: jax.Array, data: rd.Series) -> dist.Distribution:
    return dist.Normal(0.5 * before + 0.3 * data.ys, jnp.array([1.0, 0.9]))


def filter_options(kind: str) -> dict[str, Any]:
    """Every way to run a filter, by name."""
    name, _, threshold = kind.partition(" ")
    options: dict[str, Any] = {"threshold": float(threshold or 0.5)}
    if name == "guided":
        return options | {"proposal": rd.particles.Guided(_guide_first, _guide)}
    if name == "chain":
        return options | {
            "proposal": rd.particles.ChainProposal(rd.kalman_smoother(LINEAR, YS).chain)
        }
    if name == "auxiliary":
        return options | {"lookahead": rd.particles.mean_lookahead(LINEAR)}
    if name == "both":
        return options | filter_options("guided") | filter_options("auxiliary 1.0")
    return options | {"resampling": name}


@pytest.mark.parametrize(
    "kind",
    [
        "multinomial 1.0",
        "both",
        *(
            pytest.param(kind, marks=pytest.mark.statistical)
            for kind in (
                "systematic 0.5",
                "systematic 1.0",
                "stratified 0.5",
                "stratified 1.0",
                "residual 0.5",
                "residual 1.0",
                "multinomial 0.5",
                "guided 0.5",
                "guided 1.0",
                "chain 0.5",
                "chain 1.0",
                "auxiliary 0.5",
                "auxiliary 1.0",
            )
        ),
    ],
)
def test_the_evidence_is_unbiased(kind: str):
    # With 8 particles and the effective sample size below half of them now and then, so that what
    # is lost or counted twice at resampling would show.
    options = filter_options(kind)

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        filtered = rd.particle_filter(key, LINEAR, YS, 8, **options)
        return filtered.log_evidence, filtered.ess

    log_evidence, ess = (np.asarray(a) for a in run(keys(4000, seed=1)))
    ratio = np.exp(log_evidence - float(rd.kalman_smoother(LINEAR, YS).log_evidence))
    assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(4000)
    if not kind.startswith("chain"):
        assert 0.02 < (ess[:, :-1] < 4).mean() < 0.98, "resampling is not put to the test"


@pytest.mark.slow
def test_exact_proposal_gives_exact_evidence():
    # Without resampling every particle then has the weight p(x, y) / p(x | y), whatever x is.
    ys, rest = driven_series()
    exact = rd.kalman_smoother(DRIVEN, ys, **rest)
    filtered = rd.particle_filter(
        jax.random.key(0),
        DRIVEN,
        ys,
        7,
        proposal=rd.particles.ChainProposal(exact.chain, inflation=1.0),
        threshold=1e-9,
        **rest,
    )
    np.testing.assert_allclose(filtered.log_evidence, exact.log_evidence, rtol=1e-10)
    np.testing.assert_allclose(filtered.log_weights[-1], -np.log(7), rtol=1e-8)
    np.testing.assert_allclose(filtered.ess[-1], 7, rtol=1e-8)
    assert filtered.ess[0] < 6.9
    np.testing.assert_array_equal(filtered.ancestors, np.tile(np.arange(7), (7, 1)))


def test_lookahead_that_excludes_all_particles_is_ignored():
    # The means of x_1 are all further from y_1 than the emission allows; draws of x_1 are not.
    model = linear_transition_model(uniform_emission(1.0), prior=0.1, weight=1.0)
    ys = jnp.array([[0.0], [1.9]])
    options: dict[str, Any] = {"threshold": 1.0, "strict": False}
    filtered = rd.particle_filter(
        jax.random.key(0), model, ys, 200, lookahead=rd.particles.mean_lookahead(model), **options
    )
    assert int(filtered.status) == 0
    density = scipy.stats.norm(0, np.sqrt(1.01))
    exact = np.log((density.cdf(2.9) - density.cdf(0.9)) / 4)
    assert abs(float(filtered.log_evidence) - exact) < 0.8


@pytest.mark.parametrize(
    "resampling", [pytest.param("systematic", marks=pytest.mark.slow), "multinomial"]
)
def test_unobserved_rows_have_zero_log_evidence(resampling: Any):
    # Its logarithm is zero whatever is drawn, so that its standard error is as well. An estimate of
    # the variance has a standard deviation of some sqrt(12 / 200³) = 0.0012.
    mask = np.zeros((12, 2), bool)
    filtered = rd.particle_filter(
        jax.random.key(0),
        LINEAR,
        np.zeros((12, 2)),
        200,
        mask=mask,
        resampling=resampling,
        threshold=1.0,
    )
    np.testing.assert_allclose(filtered.log_evidence, 0.0, atol=1e-10)
    assert float(filtered.log_evidence_standard_error()) ** 2 < 5 * 0.0012


# --- what one run says ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def posterior() -> rd.ParticlePosterior:
    ys = LINEAR.simulate(jax.random.key(6), 9)[1]
    return rd.ffbsi(jax.random.key(0), LINEAR, ys, 40, 60)


def test_result_has_expected_shapes_and_normalised_weights(posterior: rd.ParticlePosterior):
    filtered = posterior.filtered
    assert posterior.samples.shape == (60, 9, 2) and posterior.indices.shape == (9, 60)
    assert filtered.particles.shape == (9, 40, 2) and filtered.ancestors.shape == (9, 40)
    assert (
        posterior.length is None and int(posterior.status) == 0 and int(posterior.status_time) == -1
    )
    weights = np.exp(np.asarray(filtered.log_weights))
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(filtered.ess, 1 / (weights**2).sum(1), rtol=1e-10)
    np.testing.assert_allclose(posterior.log_evidence, filtered.log_evidence_increments.sum())
    clouds = np.asarray(filtered.particles)
    paths = [clouds[k][np.asarray(posterior.indices)[k]] for k in range(9)]
    np.testing.assert_array_equal(np.swapaxes(posterior.samples, 0, 1), paths)


def test_moments_equal_averages_of_paths_and_particles(posterior: rd.ParticlePosterior):
    samples = np.asarray(posterior.samples)
    np.testing.assert_allclose(posterior.mean, samples.mean(0), rtol=1e-10)
    for k in range(9):
        expected = np.cov(samples[:, k].T, ddof=0)
        np.testing.assert_allclose(posterior.covariance[k], expected, rtol=1e-9)
        weights = np.exp(np.asarray(posterior.filtered.log_weights[k]))
        expected = np.cov(np.asarray(posterior.filtered.particles[k]).T, aweights=weights, ddof=0)
        np.testing.assert_allclose(posterior.filtered.covariance[k], expected, rtol=1e-9)


@pytest.mark.parametrize("probability", [0.0, 0.05, 0.5, 0.9, 1.0])
def test_quantiles_equal_those_of_paths_and_weighted_particles(
    posterior: rd.ParticlePosterior, probability: float
):
    expected = np.quantile(np.asarray(posterior.samples), probability, axis=0)
    np.testing.assert_allclose(posterior.quantile(probability), expected, rtol=1e-10)
    values = np.asarray(posterior.filtered.particles)
    weights = np.exp(np.asarray(posterior.filtered.log_weights))
    answers = np.asarray(posterior.filtered.quantile(probability))
    for k in range(9):
        for i in range(2):
            order = np.argsort(values[k, :, i])
            reached = np.cumsum(weights[k][order]) >= probability * (1 - 1e-12)
            assert answers[k, i] == values[k, order, i][np.argmax(reached)]


def test_ancestor_and_path_counts_are_exact(posterior: rd.ParticlePosterior):
    indices, ancestors = np.asarray(posterior.indices), np.asarray(posterior.filtered.ancestors)
    assert posterior.num_distinct.tolist() == [len(set(row)) for row in indices]
    alive, counts = set(range(40)), []
    for k in range(8, -1, -1):
        counts.append(len(alive))
        alive = {ancestors[k][i] for i in alive}
    assert posterior.filtered.num_ancestors.tolist() == counts[::-1]
    assert 1 < counts[-1] < 40


@pytest.mark.parametrize("lag", [1, 3, 20])
def test_evidence_variance_equals_its_formula(posterior: rd.ParticlePosterior, lag: int):
    ancestors = np.asarray(posterior.filtered.ancestors)
    weights = np.exp(np.asarray(posterior.filtered.log_weights))

    def squared_shares(time: int, end: int) -> float:
        """Σ_i (the weight at `end` of the descendants of particle i of `time`)²."""
        shares = np.zeros(40)
        for i in range(40):
            place = i
            for k in range(end, time, -1):
                place = ancestors[k][place]
            shares[place] += weights[end][i]
        return (shares**2).sum()

    variance = 0.0
    for p in range(9):
        end = min(p + lag, 8)
        later = 1 / 40 if p == end else squared_shares(p + 1, end)
        variance += squared_shares(p, end) - later
    error = posterior.filtered.log_evidence_standard_error(lag)
    np.testing.assert_allclose(error, np.sqrt(variance), rtol=1e-8)


def test_expectations_are_averages_over_paths(posterior: rd.ParticlePosterior):
    weights = np.linspace(0, 1, 9)
    functional = rd.AdditiveFunctional(
        lambda before, x, data: {"far": data * jnp.sum(jnp.abs(x - before)), "x": x},
        lambda x, data: {"far": data + jnp.sum(x), "x": x},
    )
    value, error = posterior.expectation(functional, jnp.asarray(weights + 0.5))
    samples, indices = np.asarray(posterior.samples), np.asarray(posterior.indices)
    steps = np.abs(np.diff(samples, axis=1)).sum(-1)
    far = 0.5 + samples[:, 0].sum(-1) + steps @ (weights[1:] + 0.5)
    values = np.concatenate([far[:, None], samples.sum(1)], axis=1)
    found_values = np.concatenate([[value["far"]], value["x"]])
    np.testing.assert_allclose(found_values, values.mean(0), rtol=1e-10)
    # Paths that go through one particle at some time, pair by pair.
    centred = values - values.mean(0)
    shared = np.zeros(3)
    for k in range(9):
        for a in range(60):
            for b in range(60):
                if a != b and indices[k, a] == indices[k, b]:
                    shared += centred[a] * centred[b]
    variance = np.maximum(shared, 0) / 60**2 + centred.var(0, ddof=1) / 60
    found_errors = np.concatenate([[error["far"]], error["x"]])
    np.testing.assert_allclose(found_errors, np.sqrt(variance), rtol=1e-8)


# --- missing values, padding, batches -------------------------------------------------------------


def driven_run(key: jax.Array, ys: Any, **rest: Any) -> rd.ParticlePosterior:
    return rd.ffbsi(key, DRIVEN, ys, 30, 50, **rest)


@pytest.fixture(scope="module")
def padded() -> rd.ParticlePosterior:
    ys, rest = driven_series()
    return driven_run(jax.random.key(3), ys, **rest)


@pytest.fixture(scope="module")
def truncated() -> rd.ParticlePosterior:
    ys, rest = driven_series()
    return driven_run(jax.random.key(3), ys[:5], mask=rest["mask"][:5], inputs=rest["inputs"][:5])


def test_padding_does_not_change_earlier_rows(
    padded: rd.ParticlePosterior, truncated: rd.ParticlePosterior
):
    assert_close(padded.log_evidence, truncated.log_evidence, 1e-9)
    assert_close(padded.samples[:, :5], truncated.samples, 1e-9)
    assert_close(padded.indices[:5], truncated.indices, 1e-9)
    assert_close(padded.num_distinct[:5], truncated.num_distinct, 1e-9)
    assert_close(padded.filtered.num_ancestors[:5], truncated.filtered.num_ancestors, 1e-9)
    assert int(padded.length) == 5  # pyright: ignore
    error = padded.filtered.log_evidence_standard_error()
    assert_close(error, truncated.filtered.log_evidence_standard_error(), 1e-9)


def test_padding_repeats_the_last_row_that_exists(padded: rd.ParticlePosterior):
    for k in (5, 6):
        np.testing.assert_array_equal(padded.samples[:, k], padded.samples[:, 4])
        np.testing.assert_array_equal(padded.filtered.particles[k], padded.filtered.particles[4])
        assert_close(padded.filtered.log_weights[k], padded.filtered.log_weights[4], 1e-9)
    np.testing.assert_array_equal(padded.filtered.log_evidence_increments[5:], 0)


@pytest.mark.parametrize("functional", [rd.StateSum(), rd.SecondMoments()], ids=["sum", "squares"])
def test_padding_adds_nothing_to_expectations_and_their_errors(
    padded: rd.ParticlePosterior, truncated: rd.ParticlePosterior, functional: Any
):
    value, error = padded.expectation(functional)
    expected, wanted_error = truncated.expectation(functional)
    assert_close(value, expected, 1e-9)
    assert_close(error, wanted_error, 1e-9)


def test_masked_values_do_not_change_samples(padded: rd.ParticlePosterior):
    ys, rest = driven_series()
    absurd = np.where(rest["mask"], ys, 1e6)
    absurd[5:] = np.nan
    assert_close(driven_run(jax.random.key(3), absurd, **rest).samples, padded.samples, 1e-9)
    holes = np.where(rest["mask"], ys, np.nan)
    del rest["mask"]
    assert_close(driven_run(jax.random.key(3), holes, **rest).samples, padded.samples, 1e-9)
    # Nothing was seen at time 2.
    assert float(padded.filtered.log_evidence_increments[2]) == pytest.approx(0, abs=1e-12)


@pytest.fixture(scope="module")
def batched() -> tuple[rd.ParticlePosterior, Callable[[int], rd.ParticlePosterior]]:
    """Three series of unequal length at once, and a function that runs one of them alone."""
    ys, rest = driven_series()
    batch = jnp.stack([ys, ys[::-1], ys])
    lengths, run_keys = jnp.array([5, 7, 3]), jnp.stack([jax.random.key(i) for i in (3, 1, 2)])
    masks = jnp.stack([rest["mask"], np.ones((7, 2), bool), rest["mask"]])
    arrays = (run_keys, batch, masks, lengths)

    def run(key: jax.Array, ys: Any, mask: Any, length: Any) -> rd.ParticlePosterior:
        return driven_run(key, ys, mask=mask, length=length, inputs=rest["inputs"])

    return jax.vmap(run)(*arrays), lambda i: run(*(array[i] for array in arrays))


@pytest.mark.slow
def test_ffbsi_on_a_batch_equals_single_series(batched: tuple):
    together, alone = batched
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        assert_close(one.indices, alone(i).indices, 1e-9)
        expected = eqx.filter(alone(i), eqx.is_inexact_array)
        assert_close(eqx.filter(one, eqx.is_inexact_array), expected, 1e-9)


@pytest.mark.slow
def test_ffbsi_works_inside_jit(padded: rd.ParticlePosterior):
    ys, rest = driven_series()
    run = jax.jit(
        lambda key, ys, mask, inputs, length: driven_run(
            key, ys, mask=mask, inputs=inputs, length=length
        )
    )
    arrays = map(jnp.asarray, (ys, *rest.values()))
    assert_close(run(jax.random.key(3), *arrays).samples, padded.samples, 1e-9)


# --- small sizes and precision --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_times", "num_particles", "num_samples"),
    [(1, 20, 30), (4, 1, 3), pytest.param(4, 3, None, marks=pytest.mark.slow)],
)
def test_ffbsi_works_with_small_sizes(num_times: int, num_particles: int, num_samples: int | None):
    posterior = rd.ffbsi(jax.random.key(0), LINEAR, YS[:num_times], num_particles, num_samples)
    assert posterior.samples.shape == (num_samples or num_particles, num_times, 2)
    assert np.isfinite(posterior.samples).all() and np.isfinite(posterior.log_evidence)
    assert np.isfinite(posterior.filtered.log_evidence_standard_error())
    if num_particles == 1:
        assert np.all(np.asarray(posterior.indices) == 0)
        particles = np.asarray(posterior.filtered.particles)[:, 0]
        weight, bias = (np.asarray(a) for a in (LINEAR.emission.weight, LINEAR.emission.bias))
        laws: Any = scipy.stats.norm(particles @ weight.T + bias, [0.7, 1.0])
        expected = laws.logpdf(np.asarray(YS[:num_times])).sum()
        np.testing.assert_allclose(posterior.log_evidence, expected, rtol=1e-10)


def in_precision(model: rd.StateSpaceModel, kind: Any) -> rd.StateSpaceModel:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), kind), model)


@pytest.mark.slow
def test_ffbsi_in_float32_stays_float32(x32: None):
    model, ys = in_precision(LINEAR, np.float32), np.asarray(YS, np.float32)
    posterior = rd.ffbsi(jax.random.key(0), model, ys, 500)
    exact = rd.kalman_smoother(model, ys)
    for leaf in jax.tree.leaves(eqx.filter(posterior, eqx.is_inexact_array)):
        assert leaf.dtype == np.float32
    # The error of means is 0.7/sqrt(500) of a standard deviation and more.
    laws = exact.chain.marginals()
    assert np.abs((posterior.mean - laws.mean) / laws.std).max() < 0.3
    assert abs(float(posterior.log_evidence - exact.log_evidence)) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("ys_kind", [np.float32, np.float64])
def test_float32_model_stays_float32_with_x64_on(ys_kind: Any):
    model, ys = in_precision(LINEAR, np.float32), jnp.asarray(YS, ys_kind)
    posterior = rd.ffbsi(jax.random.key(0), model, ys, 20)
    dtype = rd.kalman_smoother(model, ys).log_evidence.dtype
    assert posterior.samples.dtype == posterior.log_evidence.dtype == dtype
    assert posterior.filtered.log_weights.dtype == dtype


# --- what goes wrong ------------------------------------------------------------------------------

BOUNDED = linear_transition_model(uniform_emission())
OUTLIER = np.array([[0.0], [0.5], [1000.0], [0.0], [-1000.0]])


@pytest.mark.parametrize(
    "verb",
    [
        lambda *args, **options: UNTYPED.particle_filter(*args, 20, **options),
        lambda *args, **options: UNTYPED.ffbsi(*args, 20, **options),
        pytest.param(
            lambda *args, **options: UNTYPED.paris(*args, rd.StateSum(), 20, **options),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda *args, **options: UNTYPED.particles.forward_smoother(
                *args, rd.StateSum(), 20, **options
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["particle_filter", "ffbsi", "paris", "forward_smoother"],
)
def test_impossible_observation_raises_with_its_time(verb: Callable):
    with pytest.raises(FloatingPointError, match="no particle.*time 2.*strict=False"):
        verb(jax.random.key(0), BOUNDED, OUTLIER)
    result = verb(jax.random.key(0), BOUNDED, OUTLIER, strict=False)
    assert (int(result.status), int(result.status_time)) == (1, 2)
    assert float(result.log_evidence) == -np.inf
    for name in ("samples", "value"):
        assert np.all(np.isfinite(getattr(result, name, 0.0)))


def test_failure_inside_jit_is_a_status():
    run = jax.jit(lambda ys: rd.particle_filter(jax.random.key(0), BOUNDED, ys, 20).status)
    assert int(run(jnp.asarray(OUTLIER))) == 1


def test_nan_weight_raises_with_its_time():
    # The state is about k at time k, and the emission undefined beyond 5.
    model = nonlinear_emission_model(
        lambda x: jnp.sqrt(5 - x), prior=0.1, weight=1.0, bias=1.0, noise=0.1
    )
    ys = jnp.ones((8, 1))
    with pytest.raises(FloatingPointError, match="NaN.*time 5"):
        rd.particle_filter(jax.random.key(0), model, ys, 50)
    filtered = rd.particle_filter(jax.random.key(0), model, ys, 50, strict=False)
    assert (int(filtered.status), int(filtered.status_time)) == (2, 5)
    assert np.all(np.isfinite(filtered.log_weights[:5]))


@pytest.mark.slow
def test_coinciding_paths_are_reported():
    ys = LINEAR.simulate(jax.random.key(6), 60)[1]
    posterior = rd.ffbsi(jax.random.key(0), LINEAR, ys, 30, backward=rd.particles.Genealogy())
    counts = np.asarray(posterior.num_distinct)
    assert counts.min() < 10 <= counts.max()
    assert (int(posterior.status), int(posterior.status_time)) == (3, np.argmin(counts))
    # The genealogy is what the filter says it is.
    ancestors, indices = np.asarray(posterior.filtered.ancestors), np.asarray(posterior.indices)
    for k in range(1, 60):
        np.testing.assert_array_equal(indices[k - 1], ancestors[k][indices[k]])


# --- misuse ---------------------------------------------------------------------------------------


STUDENT = eqx.tree_at(
    lambda model: model.transition,
    BOUNDED,
    rd.DistributionKernel(lambda x: dist.StudentT(4.0, x, 1.0)),
)
KEY = jax.random.key(0)
SMALL = np.zeros((3, 1))


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: UNTYPED.particle_filter(KEY, LINEAR, YS, 5, resampling="random"),
            ValueError,
            "resampling must be one of 'systematic'.*'multinomial', got 'random'",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, threshold=0.0),
            ValueError,
            r"`threshold` must be in \(0, 1\], got 0",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, threshold=1.5),
            ValueError,
            r"`threshold` must be in \(0, 1\], got 1.5",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, proposal=lambda x: x),
            TypeError,
            "proposal must be a proposal.*Guided.*function",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, lookahead=3.0),
            TypeError,
            "lookahead must be a function.*float",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, backward="exact"),
            TypeError,
            "ffbsi expects a backward sampler.*ExactBackward.*str",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, backward=rd.particles.ExactBackward),
            TypeError,
            "ffbsi expects a backward sampler",
        ),
        (
            lambda: UNTYPED.ffbsi(
                KEY, STUDENT, SMALL, 5, backward=rd.particles.RejectionBackward()
            ),
            ValueError,
            "upper bound.*DistributionKernel.*log_bound",
        ),
        (lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 0), ValueError, "num_particles must be at least 1"),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 2.5),
            TypeError,
            "num_particles must be a Python int",
        ),
        (
            lambda: UNTYPED.particle_filter(KEY, LINEAR, YS, 0),
            ValueError,
            "num_particles must be at",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS, 5, 0),
            ValueError,
            "num_samples must be at least 1",
        ),
        (lambda: UNTYPED.ffbsi(0, LINEAR, YS, 5), TypeError, "ffbsi expects one typed key"),
        (
            lambda: UNTYPED.particle_filter(0, LINEAR, YS, 5),
            TypeError,
            "particle_filter expects one",
        ),
        (
            lambda: UNTYPED.ffbsi(KEY, LINEAR, YS[:, :1], 5),
            ValueError,
            "must have 2 columns, got 1",
        ),
        (
            lambda: UNTYPED.ffbsi(
                KEY,
                LINEAR,
                YS,
                5,
                proposal=rd.particles.ChainProposal(rd.kalman_smoother(LINEAR, YS[:4]).chain),
            ),
            ValueError,
            "made for 4 rows.*has 6",
        ),
        (
            lambda: UNTYPED.particles.ChainProposal(rd.kalman_smoother(LINEAR, YS)),
            TypeError,
            "expects a LinearGaussianChain, got KalmanPosterior.*chain",
        ),
        (
            lambda: UNTYPED.particles.ChainProposal(rd.kalman_smoother(LINEAR, YS).chain, 0.0),
            ValueError,
            "positive inflation, got 0",
        ),
        (
            lambda: UNTYPED.particles.Guided(1.0, _guide),
            TypeError,
            "function as its initial, got float",
        ),
        (
            lambda: UNTYPED.particles.Guided(_guide_first, None),
            TypeError,
            "function as its move, got NoneType",
        ),
        (
            lambda: rd.particles.mean_lookahead(STUDENT),
            TypeError,
            "Gaussian transition.*DistributionKernel",
        ),
    ],
)
def test_ffbsi_refuses_bad_arguments(call: Callable, kind: type[Exception], message: str):
    with pytest.raises(kind, match="(?s)" + message):
        call()


@pytest.mark.usefixtures("untyped")
def test_particle_posterior_refuses_bad_arguments(posterior: rd.ParticlePosterior):
    with pytest.raises(ValueError, match="`probability` must be between 0 and 1, got 1.5"):
        posterior.quantile(1.5)
    with pytest.raises(ValueError, match="`probability` must be between 0 and 1, got -0.1"):
        posterior.filtered.quantile(-0.1)
    with pytest.raises(TypeError, match="expects a functional.*StateSum.*function"):
        posterior.expectation(lambda path: path)  # pyright: ignore
    with pytest.raises(ValueError, match="lag must be at least 1"):
        posterior.filtered.log_evidence_standard_error(0)


@pytest.mark.usefixtures("untyped")
def test_moments_of_a_batched_result_are_refused(posterior: rd.ParticlePosterior):
    # The leading axis is the batch, over which nothing may be averaged: as chains do, refuse.
    together = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), posterior)
    for read in (
        lambda batch: batch.mean,
        lambda batch: batch.covariance,
        lambda batch: batch.quantile(0.5),
        lambda batch: batch.expectation(rd.StateSum()),
        lambda batch: batch.filtered.mean,
    ):
        with pytest.raises(ValueError, match="vmap"):
            read(together)


@pytest.mark.parametrize("data", [np.ones(4), np.float64(1.0)], ids=["rows", "scalar"])
@pytest.mark.usefixtures("untyped")
def test_functional_data_of_wrong_length_are_refused(posterior: rd.ParticlePosterior, data: Any):
    functional = rd.AdditiveFunctional(lambda before, x, data: data * x)
    with pytest.raises(ValueError, match="one row per time step"):
        posterior.expectation(functional, jnp.asarray(data))
