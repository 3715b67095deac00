"""The guided smoother against Kalman and the grid, under chains that are right and wrong.

Keys are fixed. A Monte Carlo average may be off by 4.5 standard errors, which happens to one
average in 150,000, and by its bias of order 1/N where it has one.
"""

import math
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from assertions import assert_means_agree
from backward_chains import shifted_chain
from jaxtyping import Array
from linear_models import linear_transition_model, random_model
from nonlinear_models import heavy_tailed_count_model, nonlinear_kernel, uniform_emission

import retrodict as rd
from retrodict._chains import AbstractKernelChain
from retrodict._exact import KalmanPosterior
from retrodict.particles import GuidedPosterior
from retrodict.particles.backward_weights import BackwardWeights

UNTYPED = cast(Any, rd)
"""The library as it is called by those who do not read types."""

N = 6
MODEL = random_model(np.random.default_rng(3), 2, 2)
YS = MODEL.simulate(jax.random.key(4), N)[1]
EXACT = rd.kalman_smoother(MODEL, YS)
WRONG = shifted_chain(EXACT.chain)
SAMPLERS = [
    rd.particles.MCMCBackward(),
    *(
        pytest.param(sampler, marks=pytest.mark.statistical)
        for sampler in (
            rd.particles.ExactBackward(),
            rd.particles.RejectionBackward(),
            rd.particles.Genealogy(),
            rd.particles.MCMCBackward(1),
        )
    ),
]


def runs(
    model: rd.StateSpaceModel,
    chain: AbstractKernelChain,
    ys: Any,
    num_particles: int,
    num_keys: int,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Summaries of many runs, with a leading axis for the keys."""

    @jax.jit
    @jax.vmap
    def run(key: jax.Array) -> dict[str, jax.Array]:
        posterior = rd.guided_smoother(key, model, chain, ys, num_particles, **options)
        value, error = posterior.expectation(rd.StateSum())
        moments, _ = posterior.expectation(rd.SecondMoments())
        return {
            "mean": posterior.mean,
            "covariance": posterior.covariance,
            "sum": value,
            "between": moments.between,
            "log_evidence": posterior.log_evidence,
            "sum_error": error,
            "log_evidence_error": posterior.log_evidence_standard_error(),
        }

    keys = jax.random.split(jax.random.key(0), num_keys)
    return {name: np.asarray(value) for name, value in run(keys).items()}


def expected_moments(exact: KalmanPosterior, length: int) -> dict[str, np.ndarray]:
    laws = exact.chain.marginals()
    return {
        "mean": np.asarray(laws.mean),
        "covariance": np.asarray(laws.covariance),
        "sum": np.asarray(laws.mean)[:length].sum(0),
        "between": np.asarray(rd.expectation(exact.chain, rd.SecondMoments()).between),
    }


def check_evidence(estimates: dict, log_evidence: Any) -> None:
    """The exponential of the estimate is unbiased."""
    ratio = np.exp(estimates["log_evidence"] - float(log_evidence))
    assert abs(ratio.mean() - 1) < 4.5 * ratio.std() / np.sqrt(len(ratio))


# --- an exact chain -------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", SAMPLERS)
def test_exact_chain_gives_equal_weights(
    forward: rd.particles.AbstractBackwardSampler, key: jax.Array
):
    posterior = rd.guided_smoother(key, MODEL, EXACT.chain, YS, 200, 100, forward=forward)
    np.testing.assert_allclose(posterior.log_weights, -np.log(200), rtol=0, atol=1e-9)
    np.testing.assert_allclose(posterior.ess, 200, rtol=1e-9)
    assert float(posterior.log_evidence) == pytest.approx(float(EXACT.log_evidence), abs=1e-9)
    assert float(posterior.log_evidence_standard_error()) < 1e-6
    assert posterior.samples.shape == (100, N, 2) and posterior.indices.shape == (N, 100)
    assert int(posterior.status) == 0 and int(posterior.status_time) == -1
    here = np.arange(200)
    np.testing.assert_array_equal(posterior.ancestors, np.broadcast_to(here, (N, 200)))


@pytest.mark.slow
def test_genealogy_without_resampling_has_independent_paths(key: jax.Array):
    posterior = rd.guided_smoother(
        key, MODEL, EXACT.chain, YS, 400, forward=rd.particles.Genealogy()
    )
    np.testing.assert_array_equal(posterior.num_distinct, 400)
    value, error = posterior.expectation(rd.StateSum())
    sums = np.asarray(posterior.samples.sum(1))
    np.testing.assert_allclose(error, sums.std(0, ddof=1) / 20, rtol=1e-9)
    assert np.all(np.abs(value - EXACT.chain.marginals().mean.sum(0)) < 4.5 * error)


@pytest.mark.slow
def test_guided_smoother_works_on_one_row(key: jax.Array):
    exact = rd.kalman_smoother(MODEL, YS[:1])
    result = rd.guided_smoother(key, MODEL, exact.chain, YS[:1], 50)
    assert float(result.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-9)
    result = runs(MODEL, shifted_chain(exact.chain), YS[:1], 50, 200)
    check_evidence(result, exact.log_evidence)
    expected = expected_moments(exact, 1)
    del expected["between"]  # which one row does not have
    assert_means_agree(result, expected, 50)


# --- a wrong chain --------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", SAMPLERS)
def test_wrong_chain_is_corrected_to_kalman_moments(forward: rd.particles.AbstractBackwardSampler):
    expected = expected_moments(EXACT, N)
    estimates = runs(MODEL, WRONG, YS, 100, 300, forward=forward)
    assert_means_agree(estimates, expected, 100, bias=10.0)
    check_evidence(estimates, EXACT.log_evidence)
    # What the chain itself says would be refused.
    uncorrected = {
        name: value[None] for name, value in expected_moments(kalman_like(WRONG), N).items()
    }
    with pytest.raises(AssertionError, match="of what is allowed"):
        assert_means_agree(uncorrected, expected, 100, bias=10.0)
    # Resampling that is better than multinomial, or seldom, leaves standard errors too large.
    scores = (estimates["sum"] - expected["sum"]) / estimates["sum_error"]
    if not isinstance(forward, rd.particles.Genealogy):
        assert np.all((scores.std(0) > 0.5) & (scores.std(0) < 1.2)), scores.std(0)
    scores = (estimates["log_evidence"] - float(EXACT.log_evidence)) / estimates[
        "log_evidence_error"
    ]
    assert 0.6 < scores.std() < 1.5, scores.std()


def kalman_like(chain: rd.LinearGaussianChain) -> KalmanPosterior:
    return eqx.tree_at(lambda exact: exact.chain, EXACT, chain)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("chain", "options"),
    [
        (rd.defensive_mixture(WRONG, None, 0.2), {}),
        (WRONG, {"resampling": "multinomial", "threshold": 1.0}),
        (WRONG, {"resampling": "residual", "forward": rd.particles.ExactBackward()}),
        (rd.defensive_mixture(WRONG, None, 0.1), {"resampling": "stratified", "threshold": 0.9}),
    ],
    ids=["covered", "multinomial", "residual", "stratified"],
)
def test_wrong_chain_is_corrected_with_every_option(chain: AbstractKernelChain, options: dict):
    estimates = runs(MODEL, chain, YS, 200, 200, **options)
    assert_means_agree(estimates, expected_moments(EXACT, N), 200, bias=10.0)
    check_evidence(estimates, EXACT.log_evidence)


@pytest.mark.statistical
def test_guided_errors_fall_with_the_root_of_num_particles():
    # Over 60 keys the slopes have standard deviations of at most 0.05: 0.2 is four of them.
    expected = expected_moments(EXACT, N) | {"log_evidence": np.asarray(EXACT.log_evidence)}
    sizes = np.array([100, 400, 1600])
    estimates = [runs(MODEL, WRONG, YS, int(size), 60) for size in sizes]
    for name, value in expected.items():
        errors = [np.sqrt(np.mean((run[name] - value) ** 2)) for run in estimates]
        slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
        assert -0.7 < slope < -0.3, f"{name}: {slope:.2f}"


@pytest.mark.statistical
def test_defensive_laws_correct_overconfident_kernels():
    # Filtering laws that cover, and kernels of a fifth of the width.
    sure = eqx.tree_at(
        lambda q: q.kernels.scale_tril, EXACT.chain, 0.2 * EXACT.chain.kernels.scale_tril
    )
    plain = runs(MODEL, sure, YS, 300, 100)
    estimates = runs(MODEL, rd.defensive_mixture(sure, None, 0.3), YS, 300, 100)
    assert estimates["log_evidence"].std() < 0.5 * plain["log_evidence"].std()
    check_evidence(estimates, EXACT.log_evidence)


BIMODAL = rd.StateSpaceModel(
    rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
    nonlinear_kernel(lambda x: x + 0.5 * jnp.sin(x), 0.5),
    nonlinear_kernel(lambda x: 0.3 * x**2 + x, 0.6),
)


@pytest.mark.statistical
@pytest.mark.parametrize("forward", [rd.particles.MCMCBackward(), rd.particles.ExactBackward()])
def test_wide_unimodal_chain_finds_both_modes(
    forward: rd.particles.AbstractBackwardSampler,
):
    ys = BIMODAL.simulate(jax.random.key(2), 8)[1]
    exact = rd.grid_smoother(
        BIMODAL, ys, rd.Grid(jnp.array([-9.0]), jnp.array([9.0]), 1500)
    ).check()
    # It knows nothing of the data: a walk over the range of both modes.
    chain = rd.LinearGaussianChain.from_arrays(
        jnp.zeros((8, 1)),
        jnp.full((8, 1, 1), 3.0),
        jnp.full((7, 1, 1), 0.9),
        jnp.zeros((7, 1)),
        jnp.full((7, 1, 1), 0.8),
    )
    estimates = runs(BIMODAL, chain, ys, 400, 100, forward=forward)
    mean = np.asarray(exact.mean)
    expected = {"mean": mean, "covariance": np.asarray(exact.covariance), "sum": mean.sum(0)}
    assert_means_agree(estimates, expected, 400, bias=10.0)
    check_evidence(estimates, exact.log_evidence)


# --- a chain that is elsewhere --------------------------------------------------------------------

WIDE = rd.Gaussian(jnp.zeros(1), 3.0 * jnp.eye(1))
"""It covers the states of the bimodal model."""

COVERS = [
    pytest.param((WIDE, 0.3), id="wide"),
    pytest.param((None, 0.3), id="own", marks=pytest.mark.slow),
]


def elsewhere(num_times: int) -> rd.LinearGaussianChain:
    """A chain that is sure of states to which the posterior gives next to nothing."""
    return rd.LinearGaussianChain.from_arrays(
        jnp.full((num_times, 1), 2.5),
        jnp.full((num_times, 1, 1), 0.2),
        jnp.full((num_times - 1, 1, 1), 0.1),
        jnp.full((num_times - 1, 1), 2.25),
        jnp.full((num_times - 1, 1, 1), 0.2),
    )


@pytest.mark.parametrize("cover", COVERS)
def test_no_resampling_equals_importance_sampling_of_paths(
    cover: tuple[rd.Gaussian | None, float], key: jax.Array
):
    ys, chain = jnp.array([[0.1], [-0.6], [1.2]]), rd.defensive_mixture(elsewhere(3), *cover)
    posterior = rd.guided_smoother(
        key, BIMODAL, chain, ys, 40, threshold=1e-9, forward=rd.particles.Genealogy(), strict=False
    )
    paths = jnp.swapaxes(posterior.particles, 0, 1)
    weigh = jax.jit(jax.vmap(lambda x: BIMODAL.log_joint(x, ys) - chain.log_prob(x)))
    log_weights = weigh(paths)
    total = float(jax.nn.logsumexp(log_weights))
    assert float(posterior.log_evidence) == pytest.approx(total - math.log(40), abs=1e-9)
    np.testing.assert_allclose(posterior.log_weights[0], log_weights - total, atol=1e-9)
    # The wide law was drawn from, and where it was, the chain alone would have no such state.
    far = float(jnp.mean(jnp.abs(paths - 2.5) > 2.0))
    assert 0.1 < far < 0.4 if cover[0] is not None else far == 0.0


def scores(estimates: dict, exact: rd.GridPosterior) -> np.ndarray:
    """The z-scores of evidence and means over independent runs.

    With Ẑ the estimated evidence and m the mean over the paths of a run, Ẑ is an unbiased estimate
    of the evidence and Ẑ m of its product with the smoothed mean: there is no bias to allow for.
    """
    ratio = np.exp(estimates["log_evidence"] - float(exact.log_evidence))
    off = estimates["mean"][..., 0] - np.asarray(exact.mean)[:, 0]
    values = np.concatenate([ratio[:, None] - 1, ratio[:, None] * off], axis=1)
    return values.mean(0) / (values.std(0, ddof=1) / np.sqrt(len(values)))


@pytest.mark.statistical
def test_defensive_mixture_is_corrected_far_from_the_posterior():
    # Six z-scores below 4.5: a false alarm in 25,000.
    ys = BIMODAL.simulate(jax.random.key(2), 5)[1]
    grid = rd.Grid(jnp.array([-9.0]), jnp.array([9.0]), 1500)
    exact = rd.grid_smoother(BIMODAL, ys, grid).check()
    estimates = runs(BIMODAL, rd.defensive_mixture(elsewhere(5), WIDE, 0.5), ys, 2000, 200)
    assert np.max(np.abs(scores(estimates, exact))) < 4.5, scores(estimates, exact)
    # An evidence that is wrong by a fifth would be refused,
    ratio = np.exp(estimates["log_evidence"] - float(exact.log_evidence))
    assert 4.5 * ratio.std() / np.sqrt(200) < 0.2
    # and without the cover so are the same runs: all of them miss all of the mass.
    alone = runs(BIMODAL, elsewhere(5), ys, 2000, 200)
    with np.errstate(divide="ignore"):
        assert np.max(np.abs(scores(alone, exact))) > 100
    assert np.min(np.abs(alone["mean"] - np.asarray(exact.mean))) > 1


# --- chains and models of other forms -------------------------------------------------------------


class HeavyLaw(eqx.Module):
    """Student's law with 4 degrees of freedom, scaled: a draw takes more noise than coordinates."""

    mean: Array
    std: Array

    @property
    def covariance(self) -> Array:
        return jnp.diag(2.0 * self.std**2)

    @property
    def noise_dim(self) -> int:
        return self.mean.shape[-1] + 4

    def log_prob(self, x: Array) -> Array:
        return jnp.sum(jax.scipy.stats.t.logpdf(x, 4.0, self.mean, self.std))

    def from_noise(self, noise: Array) -> Array:
        # One χ² for each draw is right in one dimension alone, which is all that is tested.
        return self.mean + self.std * noise[:1] / jnp.sqrt(jnp.mean(noise[1:] ** 2, keepdims=True))

    def sample(self, key: jax.Array) -> Array:
        return self.from_noise(jax.random.normal(key, (self.noise_dim,)))


class CurvedKernel(rd.AbstractBackwardKernel):
    """Curved kernels of another kind than the filtering laws, with noise of another length."""

    def law(self, step: Array, x: Array) -> HeavyLaw:
        return HeavyLaw(jnp.tanh(x) + step, 0.7 + 0.1 * x**2 / (1 + x**2))


@pytest.mark.statistical
@pytest.mark.parametrize("share", [None, 0.2])
def test_curved_chain_is_corrected_for_heavy_tailed_counts(share: float | None):
    model = heavy_tailed_count_model()
    ys = np.array([[1.0], [0.0], [np.nan], [6.0], [2.0]])
    exact = rd.grid_smoother(model, ys, rd.Grid(jnp.array([-8.0]), jnp.array([8.0]), 1500))
    laws = jax.vmap(rd.Gaussian)(jnp.full((5, 1), 0.3), jnp.ones((5, 1, 1)))
    chain = rd.SampledChain(laws, CurvedKernel(), jnp.zeros((4, 1)))
    chain = chain if share is None else rd.defensive_mixture(chain, None, share)
    expected = {"mean": np.asarray(exact.mean), "covariance": np.asarray(exact.covariance)}
    bound = float(scipy.stats.t.logpdf(0.0, 5.0, 0.0, 0.3))
    for forward in (
        rd.particles.MCMCBackward(),
        rd.particles.ExactBackward(),
        rd.particles.RejectionBackward(log_bound=bound),
    ):
        estimates = runs(model, chain, ys, 300, 100, forward=forward)
        assert_means_agree(estimates, expected, 300, bias=10.0)
        check_evidence(estimates, exact.log_evidence)


@pytest.mark.parametrize("general", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reversed_pairs_are_densities_of_moves_to_the_particles(general: bool):
    rng = np.random.default_rng(0)
    kernel: Any = MODEL.transition
    if general:
        kernel = rd.DistributionKernel(
            lambda x: dist.StudentT(5.0, jnp.tanh(x), 0.3 + x**2).to_event(1)
        )
    particles, xs = jnp.asarray(rng.normal(size=(5, 2))), jnp.asarray(rng.normal(size=(3, 2)))
    pairs = BackwardWeights.of(kernel, None, particles, reverse=True)
    assert pairs.whitened is not general
    log_densities = np.asarray(pairs.matrix(pairs.prepare(xs)))
    density = jax.vmap(jax.vmap(kernel.log_prob, in_axes=(0, None)), in_axes=(None, 0))
    expected = np.asarray(density(xs, particles)) / np.log(2)
    shift = 0.0 if general else log_densities[0, 0] - expected[0, 0]
    np.testing.assert_allclose(log_densities, expected + shift, rtol=1e-9)
    one = pairs.each(jnp.array([4, 0, 2]), pairs.prepare(xs))
    np.testing.assert_allclose(one, log_densities[[4, 0, 2], [0, 1, 2]], rtol=1e-9)


# --- masks, inputs and lengths --------------------------------------------------------------------


def driven() -> tuple[rd.StateSpaceModel, np.ndarray, dict[str, Any]]:
    """A series of 7 rows of which 4 exist, with inputs, missing entries and a missing row."""
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2, 1)
    inputs = rng.normal(size=(7, 1))
    ys = np.array(model.simulate(jax.random.key(1), 7, inputs=inputs)[1])
    mask = np.ones((7, 2), bool)
    mask[1, 0], mask[2] = False, False
    return model, ys, {"mask": mask, "inputs": inputs, "length": 4}


@pytest.mark.slow
def test_exact_chain_with_inputs_masks_and_padding_gives_equal_weights(key: jax.Array):
    model, ys, options = driven()
    exact = rd.kalman_smoother(model, ys, **options)
    posterior = rd.guided_smoother(key, model, exact.chain, ys, 100, **options)
    np.testing.assert_allclose(posterior.log_weights, -np.log(100), rtol=0, atol=1e-9)
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), abs=1e-9)
    assert float(posterior.log_evidence_standard_error()) < 1e-6
    # Beyond the end paths stay where they are, to the last bits: processors fuse operations or not.
    last = np.broadcast_to(posterior.samples[:, 3:4], (100, 3, 2))
    np.testing.assert_allclose(posterior.samples[:, 4:], last, rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("length", [4, 1])
def test_padding_changes_nothing(key: jax.Array, length: int):
    model, ys, options = driven()
    options |= {"length": length}
    chain = shifted_chain(rd.kalman_smoother(model, ys, **options).chain)
    padded = rd.guided_smoother(key, model, chain, ys, 50, **options)
    short = eqx.tree_at(lambda q: q.length, chain.prefix(length), None)
    cut = {name: options[name][:length] for name in ("mask", "inputs")}
    unpadded = rd.guided_smoother(key, model, short, ys[:length], 50, **cut)
    np.testing.assert_array_equal(padded.indices[:length], unpadded.indices)
    np.testing.assert_allclose(padded.samples[:, :length], unpadded.samples, rtol=1e-12)
    np.testing.assert_allclose(padded.ess[:length], unpadded.ess, rtol=1e-9)
    assert float(padded.log_evidence) == pytest.approx(float(unpadded.log_evidence), rel=1e-9)
    ours, theirs = (each.log_evidence_standard_error() for each in (padded, unpadded))
    assert float(ours) == pytest.approx(float(theirs), rel=1e-9)
    for ours, theirs in zip(
        padded.expectation(rd.StateSum()), unpadded.expectation(rd.StateSum()), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)


@pytest.mark.statistical
def test_guided_moments_with_inputs_masks_and_padding_equal_kalman():
    model, ys, options = driven()
    exact = rd.kalman_smoother(model, ys, **options)
    estimates = runs(model, shifted_chain(exact.chain), ys, 200, 200, **options)
    assert_means_agree(estimates, expected_moments(exact, 4), 200, bias=10.0)
    check_evidence(estimates, exact.log_evidence)


@pytest.mark.slow
def test_guided_smoother_handles_unequal_lengths(key: jax.Array):
    model, ys, options = driven()
    rest = {name: options[name] for name in ("mask", "inputs")}

    def smooth(length: Any) -> GuidedPosterior:
        chain = rd.kalman_smoother(model, ys, length=length, **rest).chain
        return rd.guided_smoother(key, model, shifted_chain(chain), ys, 30, length=length, **rest)

    batch = jax.jit(jax.vmap(smooth))(jnp.array([1, 4]))
    with pytest.raises(ValueError, match="batch of series"):
        _ = batch.mean
    for row, length in enumerate((1, 4)):
        alone = smooth(length)
        np.testing.assert_allclose(batch.samples[row], alone.samples, rtol=1e-9)
        assert float(batch.log_evidence[row]) == pytest.approx(float(alone.log_evidence))


# --- precision and failure ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "forward",
    [
        rd.particles.MCMCBackward(),
        pytest.param(rd.particles.ExactBackward(), marks=pytest.mark.slow),
    ],
)
def test_guided_smoother_in_float32_stays_float32(
    x32: None, key: jax.Array, forward: rd.particles.AbstractBackwardSampler
):
    model = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), MODEL)
    ys = np.asarray(YS, np.float32)
    exact = rd.kalman_smoother(model, ys)
    chain = rd.defensive_mixture(exact.chain, None, 0.1)
    posterior = rd.guided_smoother(key, model, chain, ys, 100, forward=forward)
    assert posterior.samples.dtype == posterior.log_weights.dtype == jnp.float32
    assert abs(float(posterior.log_evidence - exact.log_evidence)) < 0.5
    posterior = rd.guided_smoother(key, model, exact.chain, ys, 100, forward=forward)
    assert float(posterior.log_evidence) == pytest.approx(float(exact.log_evidence), rel=1e-5)
    np.testing.assert_allclose(posterior.ess, 100, rtol=1e-3)


def bounded(ys: np.ndarray) -> tuple[rd.StateSpaceModel, rd.LinearGaussianChain]:
    model = linear_transition_model(uniform_emission())
    near = eqx.tree_at(lambda m: m.emission, model, model.transition)
    return model, rd.kalman_smoother(near, ys).chain


@pytest.mark.parametrize(
    "time", [pytest.param(0, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_guided_smoother_names_impossible_row(key: jax.Array, time: int):
    ys = np.zeros((5, 1))
    model, chain = bounded(ys)
    posterior = rd.guided_smoother(key, model, chain, ys, 200)
    assert int(posterior.status) == 0 and np.isfinite(posterior.log_evidence)
    ys[time] = 1e3
    with pytest.raises(FloatingPointError, match=f"guided_smoother: no particle.*at time {time}"):
        rd.guided_smoother(key, model, chain, ys, 200)
    posterior = rd.guided_smoother(key, model, chain, ys, 200, strict=False)
    assert (int(posterior.status), int(posterior.status_time)) == (1, time)
    assert float(posterior.log_evidence) == -math.inf


@pytest.mark.slow
def test_low_effective_sample_size_is_reported(key: jax.Array):
    posterior = rd.guided_smoother(key, MODEL, WRONG, YS, 5)
    assert int(posterior.status) == 3 and 0 <= int(posterior.status_time) < N


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"chain": EXACT}, TypeError, r"filtering laws.*got KalmanPosterior\. Pass its \.chain"),
        ({"chain": 3}, TypeError, "LinearGaussianChain, got int"),
        ({"model": "model"}, TypeError, "guided_smoother expects a StateSpaceModel, got str"),
        ({"ys": YS[:-1]}, ValueError, "as many rows as the chain, 6, got 5"),
        ({"length": 3}, ValueError, "the chain has 6 rows and no padding"),
        ({"num_particles": 0}, ValueError, "num_particles must be at least 1, got 0"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"key": 0}, TypeError, "guided_smoother expects one typed key"),
        ({"forward": "exact"}, TypeError, "guided_smoother expects a backward sampler"),
        ({"threshold": 0.0}, ValueError, r"`threshold` must be in \(0, 1\]"),
        ({"resampling": "best"}, ValueError, "resampling must be one of"),
        (
            {"model": random_model(np.random.default_rng(0), 2, 2, singular=True)},
            ValueError,
            "guided_smoother expects a transition with a density",
        ),
    ],
)
def test_guided_smoother_refuses_bad_arguments(change: dict, kind: type[Exception], words: str):
    arguments = {"key": jax.random.key(0), "model": MODEL, "chain": WRONG, "ys": YS}
    with pytest.raises(kind, match=words):
        UNTYPED.guided_smoother(**(arguments | {"num_particles": 10} | change))


@pytest.mark.slow
@pytest.mark.usefixtures("untyped")
def test_guided_posterior_refuses_bad_arguments(key: jax.Array):
    posterior: Any = rd.guided_smoother(key, MODEL, EXACT.chain, YS, 20)
    with pytest.raises(TypeError, match="expects a functional"):
        posterior.expectation(lambda x: x)
    with pytest.raises(ValueError, match="one row per time step, 6 rows"):
        posterior.expectation(rd.StateSum(), jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        posterior.quantile(1.5)
    np.testing.assert_allclose(posterior.quantile(0.5), np.median(posterior.samples, axis=0))
