"""The grid smoother, against joint Gaussians written out in numpy and brute-force quadrature."""

import subprocess
import sys
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import joint_gaussian
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats
from linear_models import linear_model, linear_transition_model, planar_model
from nonlinear_models import nonlinear_emission_model, paper_model, poisson_emission

import retrodict as rd
from retrodict._exact.grid import diagnosis, transition

# ---------------------------------------------------------------------------------------------
# Oracles: numpy alone.
# ---------------------------------------------------------------------------------------------


def brute_force(log_joint, nodes):
    """Moments of a path of scalar states by summing over all tuples of nodes.

    Args:
        log_joint: a function of n broadcasting arrays, one for each time.
        nodes: equally spaced points, the same for each time, all of weight equal to the spacing.
    """
    n, spacing = log_joint.__code__.co_argcount, nodes[1] - nodes[0]
    axes = np.meshgrid(*[nodes] * n, indexing="ij", sparse=True)
    values = log_joint(*axes) + n * np.log(spacing)
    peak = values.max()
    weights = np.exp(values - peak)
    total = weights.sum()
    weights = weights / total
    mean = np.array([(weights * x).sum() for x in axes])
    second = np.array([[(weights * x * z).sum() for x in axes] for z in axes])
    return mean, second - np.outer(mean, mean), peak + np.log(total)


# ---------------------------------------------------------------------------------------------
# A scalar linear-Gaussian model with two observations, and its oracle.
# ---------------------------------------------------------------------------------------------

WEIGHT, BIAS, STD = np.array([[0.9]]), np.array([0.1]), np.array([[0.5]])
EMIT, OFFSET = np.array([[1.0], [-0.5]]), np.array([0.2, 0.0])
EMIT_TRIL = np.array([[0.6, 0.0], [0.2, 0.5]])
INPUT_WEIGHT, EMIT_INPUT = np.array([[0.7]]), np.array([[0.3], [0.4]])
NUM_TIMES = 8
GRID = (np.array([-9.0]), np.array([9.0]), 160)


def two_sensors(*, inputs: bool = False) -> rd.StateSpaceModel:
    """Return a scalar model with two observations per time step."""
    return linear_model(
        mean=jnp.array([0.3]),
        prior=1.2,
        weight=WEIGHT,
        bias=BIAS,
        noise=STD,
        input_weight=INPUT_WEIGHT if inputs else None,
        design=EMIT,
        offset=OFFSET,
        error=EMIT_TRIL,
        design_input=EMIT_INPUT if inputs else None,
    )


def joint_posterior(ys):
    return joint_gaussian.posterior(two_sensors(), ys)


@pytest.fixture(scope="module")
def ys():
    return np.asarray(two_sensors().simulate(jax.random.key(3), NUM_TIMES)[1])


@pytest.fixture(scope="module")
def oracle(ys):
    return rd.grid_smoother(two_sensors(), ys, rd.Grid(*GRID))


def assert_agrees(posterior, joint, tolerance=1e-9):
    np.testing.assert_allclose(posterior.mean, joint.mean, atol=tolerance)
    covariances = joint.marginal_covariances()
    np.testing.assert_allclose(posterior.covariance, covariances, atol=tolerance)
    np.testing.assert_allclose(posterior.log_evidence, joint.log_evidence, atol=tolerance)
    cross = posterior.cross_covariance()
    np.testing.assert_allclose(cross, joint.cross_covariances(), atol=tolerance)
    assert int(posterior.status) == 0


# ---------------------------------------------------------------------------------------------
# Linear Gaussian models
# ---------------------------------------------------------------------------------------------


def test_grid_posterior_equals_joint_gaussian(oracle, ys):
    assert_agrees(oracle, joint_posterior(ys))
    np.testing.assert_allclose(oracle.weights.sum(axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(oracle.filter_weights.sum(axis=1), 1.0, atol=1e-12)
    np.testing.assert_allclose(oracle.weights[-1], oracle.filter_weights[-1])


def test_log_evidence_increments_equal_those_of_prefixes(oracle, ys):
    prefixes = [joint_posterior(ys[:k]).log_evidence for k in range(1, NUM_TIMES + 1)]
    np.testing.assert_allclose(np.cumsum(oracle.log_evidence_increments), prefixes, atol=1e-9)


def test_missing_entries_and_rows_equal_joint_gaussian(ys):
    observed = np.ones_like(ys, bool)
    observed[2] = observed[3] = False
    observed[0, 1] = observed[5, 0] = False
    joint = joint_posterior(np.where(observed, ys, np.nan))
    grid = rd.Grid(*GRID)
    by_nan = rd.grid_smoother(two_sensors(), np.where(observed, ys, np.nan), grid)
    assert_agrees(by_nan, joint)
    # What stands where nothing was seen is not read.
    by_mask = rd.grid_smoother(two_sensors(), np.where(observed, ys, 1e6), grid, mask=observed)
    np.testing.assert_array_equal(by_mask.weights, by_nan.weights)


def test_unobserved_series_gives_the_predicted_prior():
    nothing = np.full((NUM_TIMES, 2), np.nan)
    posterior = rd.grid_smoother(two_sensors(), nothing, rd.Grid(*GRID))
    mean, cov = 0.3, 1.44
    for k in range(NUM_TIMES):
        np.testing.assert_allclose(posterior.mean[k], [mean], atol=1e-9)
        np.testing.assert_allclose(posterior.covariance[k], [[cov]], atol=1e-9)
        mean, cov = 0.9 * mean + 0.1, 0.81 * cov + 0.25
    assert abs(float(posterior.log_evidence)) < 1e-9


def test_inputs_and_padding_equal_joint_gaussian(ys):
    us, length = np.sin(np.arange(NUM_TIMES))[:, None], 5
    observed = np.ones_like(ys, bool)
    observed[3, 0] = False
    padded = np.where(observed & (np.arange(NUM_TIMES) < length)[:, None], ys, np.nan)
    model, grid = two_sensors(inputs=True), rd.Grid(*GRID)
    joint = joint_gaussian.posterior(model, padded[:length], us)
    # What stands in the padding is not read.
    junk = np.where(np.arange(NUM_TIMES)[:, None] < length, us, 1e6)
    long = rd.grid_smoother(model, padded, grid, inputs=junk, length=length)
    mean, cross_covariances = joint.mean, joint.cross_covariances()
    np.testing.assert_allclose(long.mean[:length], mean, atol=1e-9)
    np.testing.assert_allclose(long.mean[length:], mean[-1:].repeat(3, 0), atol=1e-9)
    np.testing.assert_allclose(long.covariance[:length], joint.marginal_covariances(), atol=1e-9)
    np.testing.assert_allclose(long.log_evidence, joint.log_evidence, atol=1e-9)
    np.testing.assert_array_equal(long.log_evidence_increments[length:], 0.0)
    cross = long.cross_covariance()
    np.testing.assert_allclose(cross[: length - 1], cross_covariances, atol=1e-9)
    np.testing.assert_array_equal(cross[length - 1 :], 0.0)
    pairs = long.expectation_pairwise(lambda x, z: x[0] * z[0])
    products = cross_covariances[:, 0, 0] + mean[:-1, 0] * mean[1:, 0]
    np.testing.assert_allclose(pairs[: length - 1], products, atol=1e-9)
    np.testing.assert_array_equal(pairs[length - 1 :], 0.0)
    paths = long.sample(jax.random.key(0), 7)
    np.testing.assert_array_equal(paths[:, length:], paths[:, length - 1 : length].repeat(3, 1))
    with pytest.raises(ValueError, match="between 1 and 4, got 5"):
        long.pairwise(5)


@pytest.mark.slow
def test_irregular_time_steps_equal_joint_gaussian():
    steps = np.array([1.0, 0.3, 2.0, 0.7, 1.5])
    ys = np.array([[0.1], [0.4], [-0.9], [np.nan], [0.5]])
    model = replace(
        linear_model(error=0.5),
        transition=rd.VaryingLinearGaussianKernel(
            lambda u: (jnp.eye(1), jnp.zeros(1), rd.Diagonal(jnp.sqrt(u)))
        ),
    )
    posterior = rd.grid_smoother(model, ys, rd.Grid([-14.0], [14.0], 160), inputs=steps[:, None])
    assert_agrees(posterior, joint_gaussian.posterior(model, ys, steps[:, None]))


def test_parameters_are_unwrapped(oracle, ys):
    plain = two_sensors()
    learned = eqx.tree_at(
        lambda m: m.transition.scale_tril, plain, rd.PositiveTril(plain.transition.scale_tril)
    )
    posterior = rd.grid_smoother(learned, ys, rd.Grid(*GRID))
    np.testing.assert_allclose(posterior.mean, oracle.mean, atol=1e-12)


def two_states(scale):
    return planar_model(noise=scale, design=np.array([[1.0, 0.5]]))


YS_2D = np.array([[0.4], [1.1], [-0.3], [0.8]])
GRID_2D = (np.array([-7.5, -7.0]), np.array([8.0, 6.5]), (46, 42))


@pytest.mark.parametrize(
    "kind, scale",
    [
        ("separable", rd.Diagonal(np.array([0.8, 0.7]))),
        pytest.param("separable", np.array([[0.8, 0.0], [0.0, 0.7]]), marks=pytest.mark.slow),
        pytest.param("dense", np.array([[0.8, 0.0], [0.4, 0.7]]), marks=pytest.mark.slow),
        pytest.param("blocked", np.array([[0.8, 0.0], [0.4, 0.7]]), marks=pytest.mark.slow),
    ],
)
def test_two_dimensional_grid_equals_joint_gaussian(kind, scale, monkeypatch):
    if kind == "blocked":
        # Blocks of 30 rows, which do not divide the number of points.
        monkeypatch.setattr(transition, "DENSE_ENTRIES", 0)
        monkeypatch.setattr(transition, "BLOCK_ENTRIES", 30 * 46 * 42 + 5)
    model = two_states(jax.tree.map(jnp.asarray, scale))
    posterior = rd.grid_smoother(model, YS_2D, rd.Grid(*GRID_2D))
    assert posterior.kind == kind
    assert_agrees(posterior, joint_gaussian.posterior(model, YS_2D), tolerance=1e-6)
    paths = posterior.sample(jax.random.key(1), 3)
    assert paths.shape == (3, 4, 2)


@pytest.mark.slow
def test_blocked_pair_sums_in_two_dimensions_are_exact(monkeypatch):
    monkeypatch.setattr(transition, "BLOCK_ENTRIES", 50_000)
    grid = rd.Grid(np.array([-6.5, -6.0]), np.array([7.0, 5.5]), 24)
    scale = rd.Diagonal(jnp.array([0.9, 0.9]))
    posterior = rd.grid_smoother(two_states(scale), YS_2D[:3], grid)
    outer = posterior.expectation_pairwise(lambda x, z: x[:, None] * z[None, :])
    product = posterior.mean[:-1, :, None] * posterior.mean[1:, None, :]
    np.testing.assert_allclose(outer - product, posterior.cross_covariance(), atol=1e-10)


# ---------------------------------------------------------------------------------------------
# Other models
# ---------------------------------------------------------------------------------------------


def square(x):
    return x**2


def square_model(noise, emission_std):
    return nonlinear_emission_model(square, emission_std, weight=0.95, noise=noise)


def test_bimodal_posterior_equals_brute_force():
    model = square_model(0.4, 0.5)
    ys = np.array([[1.2], [0.7], [1.6]])

    def log_joint(a, b, c):
        normal = scipy.stats.norm.logpdf
        prior = normal(a) + normal(b, 0.95 * a, 0.4) + normal(c, 0.95 * b, 0.4)
        return prior + sum(normal(y, x**2, 0.5) for y, x in zip(ys[:, 0], (a, b, c), strict=True))

    # Other nodes than those of the grid, over another box.
    mean, cov, log_evidence = brute_force(log_joint, np.linspace(-3.51, 3.47, 130))
    posterior = rd.grid_smoother(model, ys, rd.Grid([-4.0], [4.0], 121))
    np.testing.assert_allclose(posterior.mean[:, 0], mean, atol=1e-7)
    np.testing.assert_allclose(posterior.covariance[:, 0, 0], np.diag(cov), atol=1e-7)
    np.testing.assert_allclose(posterior.cross_covariance()[:, 0, 0], np.diag(cov, 1), atol=1e-7)
    np.testing.assert_allclose(posterior.log_evidence, log_evidence, atol=1e-7)
    # The emission is even and the prior symmetric.
    positive = posterior.expectation(lambda x: jnp.where(jnp.abs(x[0]) < 1e-9, 0.5, x[0] > 0))
    np.testing.assert_allclose(positive, 0.5, atol=1e-9)


@pytest.mark.slow
def test_counts_with_heavy_tails_equal_brute_force():
    model = rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(1), 0.8 * jnp.eye(1)),
        rd.DistributionKernel(lambda x: dist.StudentT(4.0, 0.8 * x, 0.5)),
        poisson_emission(),
    )
    ys = np.array([[2], [0], [5]])

    def log_joint(a, b, c):
        student, poisson = scipy.stats.t.logpdf, scipy.stats.poisson.logpmf
        paths = scipy.stats.norm.logpdf(a, 0, 0.8)
        paths = paths + student(b, 4, 0.8 * a, 0.5) + student(c, 4, 0.8 * b, 0.5)
        return paths + sum(poisson(y, np.exp(x)) for y, x in zip(ys[:, 0], (a, b, c), strict=True))

    # A polynomial tail is cut at the same place in both, so that the cut itself does not count.
    lower, upper = -12.0, 6.0
    mean, cov, log_evidence = brute_force(log_joint, np.linspace(lower, upper, 181))
    posterior = rd.grid_smoother(model, ys, rd.Grid([lower], [upper], 271))
    np.testing.assert_allclose(posterior.mean[:, 0], mean, atol=2e-5)
    np.testing.assert_allclose(posterior.covariance[:, 0, 0], np.diag(cov), atol=5e-5)
    np.testing.assert_allclose(posterior.log_evidence, log_evidence, atol=2e-5)


@pytest.mark.slow
def test_separable_transition_equals_dense_transition(monkeypatch):
    model = rd.StateSpaceModel(
        dist.Normal(jnp.zeros(2), 1.0).to_event(1),
        rd.DistributionKernel(lambda x: dist.StudentT(5.0, jnp.sin(x), 0.8)),
        rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), rd.Diagonal(0.8 * jnp.ones(2))),
    )
    grid = rd.Grid([-5.0, -5.0], [5.0, 5.5], (22, 24))
    ys = np.array([[0.4, -0.2], [1.0, np.nan]])
    fast = rd.grid_smoother(model, ys, grid, tolerance=1.0, throw=False)
    assert fast.kind == "separable"
    monkeypatch.setattr(transition, "_is_separable", lambda *_: False)
    slow = rd.grid_smoother(model, ys, grid, tolerance=1.0, throw=False)
    assert slow.kind == "dense"
    np.testing.assert_allclose(fast.weights, slow.weights, atol=1e-13)


@pytest.mark.slow
def test_the_papers_model_does_not_depend_on_the_grid():
    model = paper_model()
    _, ys = model.simulate(jax.random.key(5), 50)
    # Boxes whose points never coincide.
    rough = rd.grid_smoother(model, ys, rd.Grid([-2.0], [1.6], 400))
    fine = rd.grid_smoother(model, ys, rd.Grid([-1.9], [1.5], 400))
    np.testing.assert_allclose(rough.mean, fine.mean, atol=1e-9)
    np.testing.assert_allclose(rough.covariance, fine.covariance, atol=1e-9)
    np.testing.assert_allclose(rough.log_evidence, fine.log_evidence, atol=1e-8)
    assert float(fine.discretisation_error) < 1e-6


@pytest.mark.slow
def test_grid_log_evidence_is_differentiable(ys):
    def log_evidence(bias):
        model = eqx.tree_at(lambda m: m.transition.bias, two_sensors(), bias)
        return rd.grid_smoother(model, ys, rd.Grid(*GRID)).log_evidence

    step = 1e-4
    bias = jnp.array(BIAS)
    numeric = (log_evidence(bias + step) - log_evidence(bias - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(log_evidence)(bias), [numeric], rtol=1e-6)


# ---------------------------------------------------------------------------------------------
# What can be asked of a posterior
# ---------------------------------------------------------------------------------------------


def test_quantiles_equal_gaussian_quantiles(oracle, ys):
    joint = joint_posterior(ys)
    levels = np.array([[0.01, 0.25], [0.5, 0.975]])
    std = np.sqrt(np.diag(joint.covariance))
    expected = joint.mean[:, 0] + std * scipy.stats.norm.ppf(levels)[..., None]
    quantiles = oracle.quantile(levels)
    assert quantiles.shape == (2, 2, NUM_TIMES, 1)
    np.testing.assert_allclose(quantiles[..., 0], expected, atol=2e-4)
    np.testing.assert_allclose(oracle.quantile(0.5), quantiles[1, 0])
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        oracle.quantile([0.5, 1.0])


def test_pairwise_weights_have_joint_covariance(oracle, ys):
    joint = oracle.pairwise(3)
    np.testing.assert_allclose(joint.sum(axis=0), oracle.weights[3], atol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=1), oracle.weights[2], atol=1e-12)
    x = oracle.points[:, 0] - oracle.mean[2, 0]
    z = oracle.points[:, 0] - oracle.mean[3, 0]
    np.testing.assert_allclose(x @ joint @ z, joint_posterior(ys).block(2, 3)[0, 0], atol=1e-9)
    with pytest.raises(ValueError, match="between 1 and 7, got 0"):
        oracle.pairwise(0)


def test_expectations_equal_moments(oracle):
    np.testing.assert_allclose(oracle.expectation(lambda x: x), oracle.mean, atol=1e-12)
    density = oracle.density.sum(axis=1) * oracle.grid.spacing[0]
    np.testing.assert_allclose(density, 1.0, atol=1e-9)
    times = jnp.arange(NUM_TIMES)
    with_data = oracle.expectation_pairwise(
        lambda x, z, row: row["time"] * (z - x), data={"time": times}
    )
    expected = times[1:, None] * (oracle.mean[1:] - oracle.mean[:-1])
    np.testing.assert_allclose(with_data, expected, atol=1e-11)
    with pytest.raises(ValueError, match="one row per time step, 8 rows"):
        oracle.expectation_pairwise(lambda x, z, row: x, data=jnp.zeros(3))


def test_sampled_paths_are_points_of_the_grid(oracle):
    paths = oracle.sample(jax.random.key(11), 200)
    assert paths.shape == (200, NUM_TIMES, 1)
    assert np.isin(paths, oracle.points).all()
    np.testing.assert_array_equal(paths, oracle.sample(jax.random.key(11), 200))
    assert not np.array_equal(paths, oracle.sample(jax.random.key(12), 200))


@pytest.mark.statistical
def test_sampled_paths_have_the_moments_of_the_posterior(oracle, ys):
    mean, covariance, _ = joint_posterior(ys)
    num_samples = 20_000
    paths = np.asarray(oracle.sample(jax.random.key(11), num_samples))
    # 8 means and 36 second moments, each within 5 standard errors: a right sampler fails for one
    # key in 40,000. Standard errors of second moments are those of a Gaussian.
    centred = paths[:, :, 0] - mean[:, 0]
    std = np.sqrt(np.diag(covariance))
    assert np.all(np.abs(centred.mean(axis=0)) < 5 * std / np.sqrt(num_samples))
    products = centred.T @ centred / num_samples
    errors = np.sqrt((np.outer(std, std) ** 2 + covariance**2) / num_samples)
    assert np.all(np.abs(products - covariance) < 5 * errors)


# ---------------------------------------------------------------------------------------------
# Transformations and precision
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grid_smoother_works_under_jit_and_vmap(oracle, ys):
    model = two_sensors()

    @jax.jit
    def smooth_all(batch, lengths, lower, upper):
        def smooth(ys, length):
            return rd.grid_smoother(model, ys, rd.Grid(lower, upper, GRID[2]), length=length)

        return jax.vmap(smooth)(batch, lengths)

    batch, lengths = np.stack([ys, ys[::-1]]), np.array([NUM_TIMES, 4])
    both = smooth_all(batch, lengths, GRID[0], GRID[1])
    np.testing.assert_allclose(both.mean[0], oracle.mean, atol=1e-11)
    np.testing.assert_allclose(both.log_evidence[0], oracle.log_evidence, atol=1e-12)
    joint = joint_posterior(batch[1, :4])
    np.testing.assert_allclose(both.mean[1, :4], joint.mean, atol=1e-9)
    np.testing.assert_allclose(both.log_evidence[1], joint.log_evidence, atol=1e-9)
    # What stands in the padding contributes exactly nothing.
    other = smooth_all(
        np.stack([ys, np.roll(ys[::-1], 1, 0)[[1, 2, 3, 4, 0, 0, 0, 0]]]), lengths, GRID[0], GRID[1]
    )
    assert abs(float(other.log_evidence[1] - both.log_evidence[1])) < 1e-12
    assert both.check() is both
    second = jax.tree.map(lambda leaf: leaf[1], both)
    assert second.sample(jax.random.key(0), 2).shape == (2, NUM_TIMES, 1)

    # A grid that does not do is told by its status, and raised later.
    bad = smooth_all(batch, lengths, np.array([-0.5]), np.array([0.5]))
    np.testing.assert_array_equal(bad.status, diagnosis.Status.EDGE)
    with pytest.raises(ValueError, match=r"inadequate for the series \[0, 1\]"):
        bad.check()
    with pytest.raises(ValueError, match="does not cover the mass"):
        jax.tree.map(lambda leaf: leaf[0], bad).check()
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda posterior: posterior.check().mean)(second)


@pytest.mark.slow
def test_float32_results_are_float32_and_accurate(x32, ys):
    posterior = rd.grid_smoother(two_sensors(), ys.astype(np.float32), rd.Grid(*GRID))
    assert posterior.mean.dtype == posterior.weights.dtype == jnp.float32
    joint = joint_posterior(ys)
    np.testing.assert_allclose(posterior.mean, joint.mean, atol=2e-5)
    np.testing.assert_allclose(posterior.covariance, joint.marginal_covariances(), atol=2e-5)
    np.testing.assert_allclose(posterior.log_evidence, joint.log_evidence, atol=1e-4)
    assert posterior.quantile(0.5).dtype == jnp.float32
    assert posterior.sample(jax.random.key(0), 2).dtype == jnp.float32


# ---------------------------------------------------------------------------------------------
# Its own error, and refusals
# ---------------------------------------------------------------------------------------------


# Boxes of one number of points, so that nothing is compiled anew.
@pytest.mark.parametrize("half_width", [50.0, 42.0, 34.0, 26.0])
def test_the_error_estimate_bounds_the_error(half_width, ys):
    joint = joint_posterior(ys)
    covariances = joint.marginal_covariances()
    grid = rd.Grid([-half_width], [half_width], GRID[2])
    posterior = rd.grid_smoother(two_sensors(), ys, grid, throw=False)
    wrong_evidence = abs(float(posterior.log_evidence) - joint.log_evidence)
    wrong_mean = np.abs(posterior.mean - joint.mean)
    wrong_cov = np.abs(posterior.covariance - covariances)
    assert wrong_evidence <= float(posterior.error.log_evidence)
    assert np.all(wrong_mean <= posterior.error.mean)
    assert np.all(wrong_cov <= posterior.error.covariance)
    std = np.sqrt(covariances[:, :, 0])
    worst = max(wrong_evidence, (wrong_mean / std).max(), (wrong_cov / std[:, :, None] ** 2).max())
    # It is near the square root of the error, by a factor of 30 at most.
    assert worst <= float(posterior.discretisation_error) <= 30 * np.sqrt(worst + 1e-12)


@pytest.mark.parametrize("lower", [-3.4, -3.1, -2.8])
def test_error_estimate_covers_truncation_of_the_box(lower, ys):
    mean, _, log_evidence = joint_posterior(ys)
    grid = rd.Grid([lower], [9.0], GRID[2])
    posterior = rd.grid_smoother(two_sensors(), ys, grid, throw=False)
    wrong = abs(float(posterior.log_evidence) - log_evidence)
    assert 1e-12 < wrong <= float(posterior.error.log_evidence)
    assert np.all(np.abs(posterior.mean - mean) <= posterior.error.mean)


def refused(model, ys, grid, **options):
    with pytest.raises(ValueError) as caught:
        rd.grid_smoother(model, ys, grid, **options)
    posterior = rd.grid_smoother(model, ys, grid, throw=False, **options)
    return str(caught.value), diagnosis.Status(int(posterior.status)), posterior


def test_mass_at_the_edge_is_refused(ys):
    message, status, posterior = refused(two_sensors(), ys, rd.Grid([-0.5], [0.5], GRID[2]))
    assert status == diagnosis.Status.EDGE
    worst = int(np.argmax(posterior.boundary_mass))
    fraction = f"a fraction {float(posterior.boundary_mass[worst]):.2g} of the posterior at time"
    assert f"{fraction} {worst} is in the outer 2% of the box from [-0.5] to [0.5]" in message
    assert "Use Grid([" in message
    # A wide tolerance lets it pass this test; the box is then found too small by what leaves it.
    _, status, _ = refused(two_sensors(), ys, rd.Grid([-0.5], [0.5], GRID[2]), tolerance=1.0)
    assert status == diagnosis.Status.ESCAPING


def test_box_far_from_the_mass_is_refused(ys):
    message, status, _ = refused(two_sensors(), ys, rd.Grid([20.0], [30.0], GRID[2]))
    assert status == diagnosis.Status.EDGE and "a fraction 1 " in message


def test_the_suggested_box_is_accepted(ys):
    lower, upper = [-1.0], [1.0]
    for _ in range(3):
        grid = rd.Grid(lower, upper, GRID[2])
        posterior = rd.grid_smoother(two_sensors(), ys, grid, throw=False)
        if int(posterior.status) == 0:
            return
        suggested = diagnosis._wider_box(grid, posterior.mean, posterior.covariance)
        lower, upper, _ = eval(suggested.removeprefix("Grid"))
    raise AssertionError(f"still refused: {lower}, {upper}")


def test_a_mode_outside_of_the_box_is_refused():
    ys = np.full((3, 1), 2.25)
    message, status, _ = refused(square_model(0.1, 0.2), ys, rd.Grid([0.4], [4.0], 121))
    assert status == diagnosis.Status.ESCAPING
    assert "a fraction 0.5 of p(x_0 | y_0) is outside" in message


def test_a_transition_that_leaves_the_box_is_refused():
    # Observations hold the posterior inside, while one step in three leads outside.
    model = eqx.tree_at(
        lambda m: (m.transition.weight, m.transition.bias, m.transition.scale_tril),
        two_sensors(),
        (jnp.eye(1), jnp.zeros(1), 5.0 * jnp.eye(1)),
    )
    ys = np.tile(OFFSET, (NUM_TIMES, 1))
    message, status, _ = refused(model, ys, rd.Grid([-5.0], [5.0], GRID[2]))
    assert status == diagnosis.Status.ESCAPING
    assert "a fraction 0.32 of the transition into time" in message


def test_a_grid_too_coarse_for_the_posterior_is_refused(ys):
    grid = rd.Grid([-99.0], [99.0], GRID[2])
    message, status, posterior = refused(two_sensors(), ys, grid)
    assert status == diagnosis.Status.COARSE_POSTERIOR
    assert "at least 0.5 are needed. Use num_points=(" in message
    (suggested,) = diagnosis._more_points(grid, float(posterior.diagnostics.resolution.min()))
    narrower = 99.0 * GRID[2] / suggested  # the same spacing as with the suggested number
    grid = rd.Grid([-narrower], [narrower], GRID[2])
    assert int(rd.grid_smoother(two_sensors(), ys, grid).status) == 0


def test_a_grid_too_coarse_for_the_transition_is_refused(ys):
    narrow = eqx.tree_at(lambda m: m.transition.scale_tril, two_sensors(), 0.04 * jnp.eye(1))
    grid = rd.Grid([-16.0], [16.0], GRID[2])
    message, status, posterior = refused(narrow, ys, grid)
    assert status == diagnosis.Status.COARSE_TRANSITION
    assert "instead of 1" in message and "noise is narrower than the spacing [0.201]" in message
    excess = float(posterior.diagnostics.transition_excess.max())
    (suggested,) = diagnosis._more_points(grid, diagnosis._width_of(excess))
    narrower = 16.0 * GRID[2] / suggested
    fine = rd.grid_smoother(narrow, ys, rd.Grid([-narrower], [narrower], GRID[2]), throw=False)
    assert float(fine.diagnostics.transition_excess.max()) < 1e-3


class Window:
    """A law that is zero beyond a distance of 1 from its centre."""

    def __init__(self, centre):
        self.centre = centre

    def log_prob(self, value):
        return jnp.where(jnp.abs(value - self.centre) < 1.0, -jnp.log(2.0), -jnp.inf)

    def sample(self, key, sample_shape=()):
        return self.centre + jax.random.uniform(key, (*sample_shape, 1), minval=-1.0, maxval=1.0)


def test_an_observation_that_no_point_explains_is_refused():
    model = linear_transition_model(rd.DistributionKernel(Window), noise=0.5)
    ys = np.array([[0.0], [0.2], [50.0], [0.0]])
    message, status, _ = refused(model, ys, rd.Grid([-8.0], [8.0], 100))
    assert status == diagnosis.Status.IMPOSSIBLE
    assert "explains the observation at time 2" in message


# ---------------------------------------------------------------------------------------------
# Misuse
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lower, upper, num_points, error, message",
    [
        ([0.0] * 3, [1.0] * 3, 10, ValueError, "dimension 1 or 2, got 3 coordinates"),
        (0.0, 1.0, 10, ValueError, r"one shape \(state,\), got \(\) and \(\)"),
        ([0.0], [1.0, 2.0], 10, ValueError, r"got \(1,\) and \(2,\)"),
        ([0.0, 2.0], [1.0, 2.0], 10, ValueError, "lower < upper in every coordinate"),
        ([1.0], [0.0], 10, ValueError, "lower < upper"),
        ([np.nan], [0.0], 10, ValueError, "lower must be finite"),
        ([0.0], [np.inf], 10, ValueError, "upper must be finite"),
        ([0.0], [1.0], 5, ValueError, "num_points of at least 8"),
        ([0.0, 0.0], [1.0, 1.0], (10,), ValueError, r"one entry per coordinate \(2\), got 1"),
        (["a"], [1.0], 10, TypeError, "array of numbers"),
    ],
)
def test_grid_refuses_bad_arguments(lower, upper, num_points, error, message):
    with pytest.raises(error, match=message):
        rd.Grid(lower, upper, num_points)


def test_grid_smoother_refuses_bad_arguments(ys):
    model, grid = two_sensors(), rd.Grid(*GRID)
    with pytest.raises(ValueError, match="must have 2 columns, got 1"):
        rd.grid_smoother(model, ys[:, :1], grid)
    with pytest.raises(ValueError, match=r"shape \(time, obs\)"):
        rd.grid_smoother(model, ys[:, 0], grid)
    with pytest.raises(ValueError, match=r"must have shape \(1,\), got \(2,\)"):
        rd.grid_smoother(model, ys, rd.Grid(*GRID_2D))
    with pytest.raises(ValueError, match="takes no inputs"):
        rd.grid_smoother(model, ys, grid, inputs=np.zeros((NUM_TIMES, 1)))
    singular = eqx.tree_at(lambda m: m.transition.scale_tril, model, jnp.zeros((1, 1)))
    with pytest.raises(ValueError, match="expects a transition with a density"):
        rd.grid_smoother(singular, ys, grid)
    spatial = linear_model(3, weight=1.0)
    with pytest.raises(ValueError, match="dimension 1 or 2, got a model with state dimension 3"):
        rd.grid_smoother(spatial, np.zeros((2, 3)), grid)


def test_pairwise_beyond_memory_is_refused(oracle, monkeypatch):
    monkeypatch.setattr("retrodict._exact.grid.posterior.DENSE_ENTRIES", 1000)
    with pytest.raises(ValueError, match="Use expectation_pairwise or cross_covariance"):
        oracle.pairwise(1)


# ---------------------------------------------------------------------------------------------
# Size
# ---------------------------------------------------------------------------------------------

# Linux counts in ru_maxrss what the process that started this one held until then.
LARGE = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)
import retrodict as rd

num_times, correlation = int(sys.argv[1]), float(sys.argv[2])
weight = jnp.array([[0.9, 0.2], [-0.2, 0.8]])
model = rd.StateSpaceModel(
    rd.Gaussian(jnp.zeros(2), jnp.eye(2)),
    rd.NonlinearGaussianKernel(
        lambda x: weight @ x + 0.1 * jnp.sin(x), jnp.array([[0.5, 0.0], [correlation, 0.4]])
    ),
    rd.LinearGaussianKernel(jnp.array([[1.0, 0.5]]), jnp.zeros(1), 0.4 * jnp.eye(1)),
)
_, ys = model.simulate(jax.random.key(1), num_times)
posterior = rd.grid_smoother(model, ys, rd.Grid([-9.0, -8.0], [9.0, 8.0], 200))
jax.block_until_ready(posterior.mean)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(posterior.kind, int(peak) // 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "kind, num_times, correlation", [("separable", 20, 0.0), ("blocked", 2, 0.2)]
)
def test_forty_thousand_points_use_at_most_two_gibibytes(kind, num_times, correlation):
    run = subprocess.run(
        [sys.executable, "-c", LARGE, str(num_times), str(correlation)],
        capture_output=True,
        text=True,
        check=True,
    )
    used_kind, mebibytes = run.stdout.split()
    assert used_kind == kind
    assert int(mebibytes) < 2048
