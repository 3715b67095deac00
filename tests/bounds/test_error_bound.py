"""Error bounds of Gaussian chains and on grids, against dense matrices and exact errors."""

import importlib
import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as nd
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
from linear_models import (
    linear_kernel,
    linear_model,
    linear_transition_model,
    lower_factor,
    random_mask,
    random_model,
)
from nonlinear_models import hide_linearity, nonlinear_emission_model, uniform_emission

import retrodict as rd
from retrodict._model import Series
from retrodict.bounds import ErrorBound, curvature, distances, grid_bounds, lipschitz, wasserstein
from retrodict.bounds import hypotheses as mixing
from retrodict.bounds.theorems import BoundValue
from retrodict.particles.pareto import pareto_shape

# The package exports the function of the same name.
driver = importlib.import_module("retrodict.bounds.error_bound")

N = 12
WINDOW = 64


def gaussian(rng: np.random.Generator, d: int) -> rd.Gaussian:
    return rd.Gaussian(jnp.asarray(rng.normal(size=d)), jnp.asarray(lower_factor(rng, d)))


def perturbed(rng: np.random.Generator, tree: Any, size: float) -> Any:
    """Every array of a tree, multiplied entry by entry by a random factor near 1."""
    return jax.tree.map(lambda a: a * (1 + size * jnp.asarray(rng.normal(size=a.shape))), tree)


def perturbed_chain(
    rng: np.random.Generator, chain: rd.LinearGaussianChain, size: float
) -> rd.LinearGaussianChain:
    """A chain whose laws and kernels are perturbed; what it derives from them is derived again."""
    return rd.LinearGaussianChain(*perturbed(rng, (chain.laws, chain.kernels), size))


class Instance:
    """A model, data, and a chain that is wrong: that of another model, or a shaken exact one."""

    def __init__(self, seed: int, d: int, n: int = N):
        rng = np.random.default_rng(seed)
        self.model = random_model(rng, d, d)
        _, self.ys = self.model.simulate(jax.random.key(seed), n)
        size = float(np.exp(rng.uniform(np.log(0.01), np.log(0.3))))
        exact = rd.kalman_smoother(self.model, self.ys)
        self.exact, self.log_evidence = exact.chain, exact.log_evidence
        if seed % 2:
            self.chain = rd.kalman_smoother(perturbed(rng, self.model, size), self.ys).chain
        else:
            self.chain = perturbed_chain(rng, self.exact, size)

    def bound(self, functional: Any, **options: Any) -> ErrorBound:
        return rd.error_bound(self.model, self.chain, self.ys, functional, **options)

    def worst_case(self) -> float:
        """The largest error of a Lipschitz functional: a sum of W₁, by projections from below."""
        ours, exact = self.chain.marginals(), self.exact.marginals()
        d = self.model.state_dim
        angles = np.linspace(0, np.pi, 16, endpoint=False)
        ways = [np.ones(1)] if d == 1 else [np.array([np.cos(a), np.sin(a)]) for a in angles]
        total = 0.0
        for k in range(self.ys.shape[0]):
            total += max(
                folded_mean(
                    float((ours.mean[k] - exact.mean[k]) @ way),
                    float(np.linalg.norm(way @ ours.scale_tril[k]))
                    - float(np.linalg.norm(way @ exact.scale_tril[k])),
                )
                for way in ways
            )
        return total


def folded_mean(shift: float, spread: float) -> float:
    """E|shift + spread Z|."""
    if spread == 0:
        return abs(shift)
    shift, spread = abs(shift), abs(spread)
    density = spread * math.sqrt(2 / math.pi) * math.exp(-0.5 * (shift / spread) ** 2)
    return density + shift * math.erf(shift / spread / math.sqrt(2))


# Distances


@pytest.mark.parametrize("shift, spread", [(0.0, 0.5), (1.3, 0.0), (0.4, 0.7), (-2.0, 0.1)])
def test_wasserstein_distance_in_1d_equals_integral_over_quantiles(shift: float, spread: float):
    p = rd.Gaussian(jnp.zeros(1), jnp.eye(1))
    q = rd.Gaussian(jnp.array([shift]), (1 + spread) * jnp.eye(1))
    levels = (np.arange(200_000) + 0.5) / 200_000
    z = scipy.stats.norm.ppf(levels)
    expected = np.mean(np.abs(z - (shift + (1 + spread) * z)))
    assert distances.gaussian_distance(p, q) == pytest.approx(expected, rel=1e-4)


def test_bures_distance_equals_formula_with_matrix_roots(key: Any):
    rng = np.random.default_rng(0)
    p, q = gaussian(rng, 3), gaussian(rng, 3)
    a, b = np.asarray(p.covariance), np.asarray(q.covariance)
    root = np.asarray(scipy.linalg.sqrtm(a))
    cross = np.real(np.asarray(scipy.linalg.sqrtm(root @ b @ root)))
    squared = np.sum((p.mean - q.mean) ** 2) + np.trace(a + b - 2 * cross)
    assert distances.bures(p, q) == pytest.approx(math.sqrt(squared), rel=1e-10)


def test_bures_distance_resolves_tiny_differences():
    law = gaussian(np.random.default_rng(1), 2)
    near = rd.Gaussian(law.mean, law.scale_tril * (1 + 1e-12))
    assert float(distances.bures(law, near)) == pytest.approx(
        1e-12 * float(jnp.linalg.norm(law.scale_tril)), rel=1e-2
    )


@pytest.mark.slow
def test_distance_on_a_mesh_is_at_least_the_optimal_transport_cost():
    rng = np.random.default_rng(2)
    shape, spacing = (3, 4), np.array([0.5, 0.3])
    points = np.array(list(itertools.product(*(np.arange(n) for n in shape)))) * spacing
    costs = np.linalg.norm(points[:, None] - points[None], axis=2)
    size = len(points)
    sums = np.concatenate([np.kron(np.eye(size), np.ones(size)), np.tile(np.eye(size), size)])
    for _ in range(5):
        p, q = rng.dirichlet(np.ones(size)), rng.dirichlet(np.ones(size))
        plan = scipy.optimize.linprog(costs.ravel(), A_eq=sums, b_eq=np.concatenate([p, q]))
        distance = distances.table_distance(
            jnp.asarray(p.reshape(shape)), jnp.asarray(q.reshape(shape)), jnp.asarray(spacing)
        )
        assert plan.fun <= float(distance) <= 3 * plan.fun
    # Moved by one column as a whole, the distance is one spacing.
    table = np.pad(rng.dirichlet(np.ones(6)).reshape(3, 2), ((0, 0), (0, 2)))
    moved = np.roll(table, 1, axis=1)
    distance = distances.table_distance(*map(jnp.asarray, (table, moved, spacing)))
    assert float(distance) == pytest.approx(0.3)


# Sums of products


def sum_of_products(gains_: np.ndarray, lipschitz: np.ndarray) -> np.ndarray:
    sums = []
    for j in range(len(lipschitz)):
        product, total = np.eye(gains_.shape[1]), lipschitz[j]
        for i in range(j - 1, -1, -1):
            product = gains_[i] @ product
            total += lipschitz[i] * np.linalg.norm(product, 2)
        sums.append(total)
    return np.array(sums)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_lipschitz_sums_equal_explicit_sums_of_products(d: int):
    rng = np.random.default_rng(d)
    steps, constants = 0.6 * rng.normal(size=(9, d, d)), rng.uniform(size=10)
    expected = sum_of_products(steps, constants)
    sums = lipschitz.lipschitz_sums(jnp.asarray(steps), jnp.asarray(constants), 10)
    np.testing.assert_allclose(sums, expected, rtol=1e-12)
    backward = lipschitz.forward_lipschitz_sums(jnp.asarray(steps), jnp.asarray(constants), 10)
    assert float(backward[-2]) == pytest.approx(
        constants[-2] + constants[-1] * np.linalg.norm(steps[-1], 2)
    )


def test_windowed_lipschitz_sum_is_a_close_upper_bound():
    rng = np.random.default_rng(3)
    # Rotations that shrink: norms of products decay, and so do those beyond the window.
    steps = 0.8 * np.array([scipy.linalg.expm(a - a.T) for a in rng.normal(size=(59, 2, 2))])
    expected = sum_of_products(steps, np.ones(60))
    for window in (1, 2, 5, 20):
        sums = np.asarray(lipschitz.lipschitz_sums(jnp.asarray(steps), jnp.ones(60), window))
        assert (sums >= expected * (1 - 1e-12)).all()
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    # Shears, whose norms exceed 1 while their products decay: a short window is looser, not wrong.
    shears = np.array([[[0.5, 2.0], [0.0, 0.5]]] * 59)
    expected = sum_of_products(shears, np.ones(60))
    wide = np.asarray(lipschitz.lipschitz_sums(jnp.asarray(shears), jnp.ones(60), 20))
    narrow = np.asarray(lipschitz.lipschitz_sums(jnp.asarray(shears), jnp.ones(60), 2))
    assert (narrow >= expected).all() and narrow[-1] > 10 * expected[-1]
    np.testing.assert_allclose(wide, expected, rtol=1e-2)


# Curvature


def dense(blocks: curvature.Curvature) -> np.ndarray:
    """K₀⁻¹ as one matrix, from what the elimination keeps."""
    n, d = blocks.pivots.shape[:2]
    inverse = np.zeros((n * d, n * d))
    for j in range(n):
        block = np.asarray(blocks.covariances[j])
        for i in range(j, -1, -1):
            inverse[i * d : (i + 1) * d, j * d : (j + 1) * d] = block
            inverse[j * d : (j + 1) * d, i * d : (i + 1) * d] = block.T
            if i > 0:
                block = np.asarray(blocks.gains[i - 1]) @ block
    return inverse


@pytest.mark.parametrize("d", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_curvature_equals_hessian_of_linear_gaussian_model(d: int):
    rng = np.random.default_rng(d)
    model, n = random_model(rng, d, 2), 5
    ys, mask = rng.normal(size=(n, 2)), jnp.asarray(random_mask(rng, n, 2, 0.7))
    curvatures = curvature.curvature(model, Series(jnp.asarray(ys), mask, None, None))

    def log_joint(path: Any) -> Any:
        return model.log_joint(path.reshape(n, d), ys, mask=mask)

    precision = -jax.hessian(log_joint)(jnp.zeros(n * d))
    np.testing.assert_allclose(dense(curvatures), np.linalg.inv(precision), rtol=1e-8, atol=1e-10)
    s = rng.normal(size=(n, d))
    form = float(jnp.sum(curvatures.quadratic_form(jnp.asarray(s))))
    assert form == pytest.approx(s.ravel() @ np.linalg.inv(precision) @ s.ravel())
    blocks = np.linalg.inv(precision).reshape(n, d, n, d).transpose(0, 2, 1, 3)
    sizes, constants = np.linalg.norm(blocks, 2, axis=(2, 3)), rng.uniform(size=n)
    variance = float(jnp.sum(curvatures.largest_variance(jnp.asarray(constants), WINDOW)))
    assert variance == pytest.approx(constants @ sizes @ constants)


@pytest.mark.slow
def test_forward_kernels_equal_conditionals_of_joint_law():
    instance = Instance(4, 2)
    reference = wasserstein.exact_posterior(instance.exact)
    joint = instance.exact.pairwise()
    covariance = np.asarray(joint.covariance)
    gain = covariance[:, 2:, :2] @ np.linalg.inv(covariance[:, :2, :2])
    np.testing.assert_allclose(reference.forward.weight, gain, rtol=1e-8, atol=1e-10)
    noise = covariance[:, 2:, 2:] - gain @ covariance[:, :2, 2:]
    scale = np.asarray(reference.forward.scale_tril)
    np.testing.assert_allclose(scale @ scale.transpose(0, 2, 1), noise, atol=1e-10)


# Theorems 4 and 5 on linear-Gaussian models


RIGOROUS = (
    "wasserstein_phi",
    "wasserstein_b",
    "wasserstein_q",
    "wasserstein_a",
    "elbo_gap",
    "score",
)


@pytest.mark.slow
@pytest.mark.parametrize("d, count, largest_median", [(1, 12, 1.6), (2, 20, 2.2)])
def test_error_bounds_hold_and_the_tightest_is_sharp(d: int, count: int, largest_median: float):
    ratios = []
    for seed in range(count):
        instance = Instance(seed, d)
        bound = instance.bound(rd.bounds.AnyLipschitz(), key=jax.random.key(seed), num_samples=200)
        worst = instance.worst_case()
        assert set(bound.considered) == set(RIGOROUS)
        for name, value in bound.considered.items():
            assert float(value) >= worst * (1 - 1e-9), (seed, name)
        assert float(bound.value) == min(float(v) for v in bound.considered.values())
        assert bound.rigorous and float(jnp.sum(bound.per_step)) == pytest.approx(
            float(bound.value)
        )
        ratios.append(float(bound.considered["wasserstein_phi"]) / worst)
        signed = instance.bound(rd.StateSum())
        assert float(signed.value) <= float(bound.value) * (1 + 1e-9)
    assert np.median(ratios) < largest_median


@pytest.mark.slow
def test_bounds_vanish_at_the_exact_posterior():
    instance = Instance(6, 2)
    bound = rd.error_bound(
        instance.model, instance.exact, instance.ys, rd.bounds.AnyLipschitz(), key=jax.random.key(0)
    )
    for name in ("wasserstein_phi", "wasserstein_b", "wasserstein_q", "wasserstein_a", "score"):
        assert float(bound.considered[name]) < 1e-7, name


@pytest.mark.slow
def test_bound_is_proportional_to_declared_constant():
    instance = Instance(8, 1)
    one, three = (instance.bound(rd.bounds.AnyLipschitz(c)).value for c in (1.0, 3.0))
    assert float(three) == pytest.approx(3 * float(one))


@pytest.mark.slow
def test_the_exact_error_is_the_difference_of_expectations():
    instance = Instance(3, 2)
    bound = instance.bound(rd.SecondMoments())
    ours = rd.expectation(instance.chain, rd.SecondMoments())
    exact = rd.expectation(instance.exact, rd.SecondMoments())
    errors = jax.tree.map(lambda a, b: a - b, ours, exact)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), bound.error, errors)
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in errors)
    assert float(bound.value) == pytest.approx(largest)
    assert abs(float(jnp.sum(bound.per_step))) == pytest.approx(largest)
    assert bound.method == "exact" and bound.rigorous and bound.rests_on.startswith("exact")
    # What time 0 adds is what the functional of the first row alone has.
    first = rd.expectation(instance.chain.prefix(1), rd.SecondMoments())
    assert first.within.shape == (2, 2)


def distance_travelled(before: Any, x: Any, data: Any) -> Any:
    return jnp.sum(jnp.abs(x - before))


@pytest.mark.slow
def test_functionals_of_pairs_are_bounded():
    functional = rd.AdditiveFunctional(distance_travelled, lipschitz=(1.0, 1.0))
    for seed in range(10):
        instance = Instance(seed, 1)
        bound = instance.bound(functional, key=jax.random.key(0), num_samples=200)
        assert set(bound.considered) == {"wasserstein_phi", "elbo_gap", "score"}

        def expected(chain: rd.LinearGaussianChain) -> float:
            pairs = chain.pairwise()
            way = jnp.array([-1.0, 1.0])
            return sum(
                folded_mean(float(mean @ way), float(np.linalg.norm(way @ scale)))
                for mean, scale in zip(pairs.mean, pairs.scale_tril, strict=True)
            )

        error = abs(expected(instance.chain) - expected(instance.exact))
        assert all(float(value) >= error for value in bound.considered.values()), seed


def test_bounded_functionals_are_bounded_by_the_gap():
    instance = Instance(5, 1)
    bound = instance.bound(rd.bounds.AnyBounded(2.0))
    gap = instance.log_evidence - rd.elbo(instance.model, instance.chain, instance.ys)
    assert bound.method == "pinsker"
    assert float(bound.value) == pytest.approx(2.0 * N * math.sqrt(float(gap) / 2))
    above = rd.StateFunctional(lambda x, data: 1.0 * (x[0] > 0), oscillation=1.0)
    ours, exact = instance.chain.marginals(), instance.exact.marginals()
    chances = [scipy.stats.norm.cdf(laws.mean / laws.std).sum() for laws in (ours, exact)]
    assert abs(chances[0] - chances[1]) <= float(instance.bound(above).value)


@pytest.mark.slow
def test_padding_and_missing_rows_are_left_out():
    instance = Instance(7, 1)
    ys = np.asarray(instance.ys).copy()
    ys[4] = np.nan
    model = instance.model
    chain = rd.kalman_smoother(perturbed(np.random.default_rng(0), model, 0.1), ys).chain
    unpadded = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), key=jax.random.key(0))
    padded = np.concatenate([ys, np.full((5, 1), 7.0)])
    other = perturbed(np.random.default_rng(0), model, 0.1)
    long = rd.kalman_smoother(other, padded, length=N).chain
    bound = rd.error_bound(model, long, padded, rd.bounds.AnyLipschitz(), key=jax.random.key(0))
    assert bound.per_step.shape == (N,)
    for name in ("wasserstein_phi", "elbo_gap"):
        assert float(bound.considered[name]) == pytest.approx(float(unpadded.considered[name]))


@pytest.mark.slow
def test_bound_in_float32_is_valid_and_float32(x32: None):
    instance = Instance(9, 1)
    bound = instance.bound(rd.bounds.AnyLipschitz(), key=jax.random.key(0), num_samples=100)
    assert bound.value.dtype == jnp.float32
    assert float(bound.value) >= instance.worst_case() * (1 - 1e-3)


# Grids


GRID = rd.Grid([-9.0], [9.0], 300)


def nonlinear_model(emission: Any) -> rd.StateSpaceModel:
    return linear_transition_model(emission, weight=0.8, noise=0.5)


@pytest.fixture(scope="module")
def counts() -> tuple[rd.StateSpaceModel, Any, rd.LinearGaussianChain, rd.GridPosterior]:
    """Counts with a log-linear rate, smoothed by linearising."""
    emission = rd.DistributionKernel(
        lambda x: nd.Poisson(jnp.exp(x)), curvature=lambda y: jnp.zeros((1, 1))
    )
    model = nonlinear_model(emission)
    _, ys = model.simulate(jax.random.key(2), N)
    chain = rd.extended_smoother(model, ys).chain
    return model, ys, chain, rd.grid_smoother(model, ys, GRID)


@pytest.mark.slow
def test_grid_bound_equals_closed_form():
    instance = Instance(11, 1)
    posterior = rd.grid_smoother(instance.model, instance.ys, GRID)
    ones = lipschitz.Sensitivity(jnp.zeros(N), jnp.ones(N))
    reference = wasserstein.exact_posterior(instance.exact)
    expected = wasserstein.phi(instance.chain, reference, ones, WINDOW)
    gains = instance.chain.kernels.weight
    between, misfit = grid_bounds.marginal_distances(instance.chain, posterior)
    terms = lipschitz.transport_terms(between, gains, ones, WINDOW)
    np.testing.assert_allclose(terms, expected, rtol=1e-3, atol=1e-6)
    assert float(misfit) < 1e-6
    # In one dimension the kernels' mean distance is W₁ on the grid and a root mean square of W₂
    # in closed form.
    pairs = lipschitz.Sensitivity(jnp.ones(N).at[0].set(0.0), jnp.ones(N))
    above = wasserstein.phi(instance.chain, reference, pairs, WINDOW)
    moves, variations, _ = grid_bounds.kernel_distances(instance.chain, posterior)
    below = lipschitz.transport_terms(moves, gains, pairs, WINDOW)
    assert (np.asarray(below) <= np.asarray(above) * (1 + 1e-6)).all()
    assert float(jnp.sum(below)) > 0.5 * float(jnp.sum(above))
    assert (np.asarray(variations) <= 1).all()


@pytest.mark.slow
def test_bounds_of_counts_hold_with_and_without_a_grid(counts: Any):
    model, ys, chain, posterior = counts
    key = jax.random.key(0)
    weights, _ = grid_bounds.marginals_on(GRID, chain)
    spacing = float(GRID.spacing[0])
    worst = spacing * float(jnp.sum(jnp.abs(jnp.cumsum(weights - posterior.weights, axis=1))))
    bound = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), reference=posterior, key=key)
    assert set(bound.considered) == {"wasserstein_phi", "elbo_gap", "score"}
    assert all(float(value) >= worst * (1 - 1e-6) for value in bound.considered.values())
    assert bound.method == "wasserstein_phi" and "grid error" in bound.rests_on
    assert not bound.rigorous and bound.confidence == 1.0
    free = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), key=key)
    assert free.method == "score" and free.rests_on.startswith("truth-free")
    assert not free.rigorous and free.confidence == pytest.approx(scipy.stats.norm.cdf(3))
    assert worst <= float(free.value) <= 30 * worst
    assert 0 < float(free.standard_error) < 0.1 * float(free.value)


def test_grid_reference_gives_exact_errors(counts: Any):
    model, ys, chain, posterior = counts
    error_bound = rd.error_bound(model, chain, ys, rd.StateSum(), reference=posterior)
    expected = jnp.sum(chain.marginals().mean - posterior.mean, axis=0)
    np.testing.assert_allclose(error_bound.error, expected, atol=1e-9)
    high = rd.StateFunctional(lambda x, data: 1.0 * (x[0] > 0), oscillation=1.0)
    exact = rd.error_bound(model, chain, ys, high, reference=posterior)
    laws = chain.marginals()
    ours = scipy.stats.norm.cdf(laws.mean / laws.std).sum()
    theirs = float(jnp.sum(posterior.expectation(lambda x: 1.0 * (x[0] > 0))))
    assert float(exact.error) == pytest.approx(ours - theirs, abs=2e-3)
    key = jax.random.key(0)
    for name in ("total_variation", "hoeffding", "pinsker"):
        bound = rd.error_bound(model, chain, ys, high, reference=posterior, key=key, method=name)
        assert float(bound.value) >= float(exact.value), name
        assert float(jnp.sum(bound.per_step)) == pytest.approx(float(bound.value))


def test_grid_ranges_equal_oscillations_without_memory():
    model = linear_model(weight=0.0)
    posterior = rd.grid_smoother(model, jnp.zeros((4, 1)), GRID)
    values = jnp.stack([k * jnp.tanh(GRID.points[:, 0]) for k in range(4)])
    ranges = grid_bounds.ranges(posterior, values)
    np.testing.assert_allclose(ranges, [0, 2, 4, 6], atol=1e-5)


@pytest.mark.slow
def test_error_bound_holds_on_a_two_dimensional_grid():
    rng = np.random.default_rng(5)
    model = random_model(rng, 2, 2)
    _, ys = model.simulate(jax.random.key(5), 3)
    exact = rd.kalman_smoother(model, ys).chain
    chain = perturbed_chain(rng, exact, 0.1)
    laws = exact.marginals()
    low = np.min(laws.mean - 9 * laws.std, axis=0)
    high = np.max(laws.mean + 9 * laws.std, axis=0)
    posterior = rd.grid_smoother(model, ys, rd.Grid(low, high, 60))
    ones = lipschitz.Sensitivity(jnp.zeros(3), jnp.ones(3))
    between, _ = grid_bounds.marginal_distances(chain, posterior)
    terms = lipschitz.transport_terms(between, chain.kernels.weight, ones, WINDOW)
    closed = wasserstein.phi(chain, wasserstein.exact_posterior(exact), ones, WINDOW)
    # Moving coordinates in turn costs at most √2 times what moving along a diagonal does, and W₂
    # is above W₁.
    assert (np.asarray(terms) <= 2 * np.asarray(closed)).all()
    assert (np.asarray(terms) >= 0.5 * np.asarray(closed)).all()


def test_a_grid_that_misses_the_chain_is_declined(counts: Any):
    model, ys, chain, posterior = counts
    shifted = rd.LinearGaussianChain.from_arrays(
        chain.laws.mean + 20.0,
        chain.laws.scale_tril,
        chain.kernels.weight,
        chain.kernels.bias,
        chain.kernels.scale_tril,
    )
    with pytest.raises(ValueError, match="widen or refine the grid"):
        rd.error_bound(
            model,
            shifted,
            ys,
            rd.bounds.AnyLipschitz(),
            reference=posterior,
            method="wasserstein_phi",
        )


# What is a certificate and what is not


def test_average_over_paths_is_not_rigorous():
    model, share, far = linear_model(), 2e-5, 1e7
    _, ys = model.simulate(jax.random.key(0), 5)
    exact = rd.kalman_smoother(model, ys).chain
    wide = rd.Gaussian(jnp.full(1, far), jnp.eye(1))
    bound = rd.error_bound(
        model, rd.defensive_mixture(exact, wide, share), ys, rd.StateSum(), key=jax.random.key(0)
    )
    # E x_k = (1 − ε) (G_k E x_{k+1} + c_k) + ε w.
    mean = (1 - share) * float(exact.terminal.mean[0]) + share * far
    total = mean
    kernels = zip(exact.kernels.weight.ravel(), exact.kernels.bias.ravel(), strict=True)
    for weight, bias in reversed(list(kernels)):
        mean = (1 - share) * (float(weight) * mean + float(bias)) + share * far
        total += mean
    error = abs(total - float(jnp.sum(exact.marginals().mean)))
    # None of the 1,000 paths met the far law: their mean is no bound, and must not be called one.
    assert error > 1000 and float(bound.value) < 1e-9
    assert bound.method == "score" and not bound.rigorous
    assert bound.confidence == pytest.approx(scipy.stats.norm.cdf(3))
    assert "not a certificate" in bound.rests_on


def test_grid_that_misses_a_mode_is_not_rigorous():
    # The posterior is symmetric around zero, and the box and its surroundings hold half of it.
    model = nonlinear_emission_model(jnp.square, prior=3.0, weight=1.0, noise=0.1)
    ys = jnp.full((4, 1), 9.0)
    half = rd.grid_smoother(model, ys, rd.Grid([2.0], [4.0], 200))
    chain = rd.extended_smoother(
        eqx.tree_at(lambda m: m.prior.mean, model, jnp.full(1, 3.0)), ys
    ).chain
    error = abs(float(jnp.sum(chain.marginals().mean)))
    for functional in (rd.StateSum(), rd.bounds.AnyLipschitz()):
        bound = rd.error_bound(model, chain, ys, functional, reference=half)
        assert float(bound.value) < 1 < error
        assert not bound.rigorous and "beyond the box is not bounded" in bound.rests_on


def test_rigorous_bound_wins_over_smaller_estimate(monkeypatch: pytest.MonkeyPatch):
    values: dict[str, Any] = {
        "exact": ("grid", 2.0),
        "score": ("samples", 1e-9),
        "pinsker": ("grid", 3.0),
    }
    values |= {"wasserstein_phi": ("closed form", 5.0), "elbo_gap": ("closed form", 4.0)}

    def returned(names: list[str]) -> ErrorBound:
        methods = {
            name: lambda problem, name=name: BoundValue(
                jnp.asarray(values[name][1]), jnp.ones(N), "", values[name][0]
            )
            for name in names
        }
        module = importlib.import_module("retrodict.bounds.error_bound")
        monkeypatch.setattr(module, "_METHODS", methods)
        return instance.bound(rd.bounds.AnyLipschitz())

    instance = Instance(1, 1)
    assert returned(list(values)).method == "elbo_gap"
    assert returned(list(values)).rigorous and returned(list(values)).confidence == 1.0
    assert returned(["score", "pinsker", "exact"]).method == "exact"
    assert returned(["score"]).method == "score" and not returned(["score"]).rigorous


def test_an_emission_without_noise_at_one_row_has_no_closed_form():
    model = eqx.tree_at(
        lambda m: m.emission,
        linear_model(),
        rd.VaryingLinearGaussianKernel(lambda u: (jnp.eye(1), jnp.zeros(1), u[:, None])),
    )
    ys, inputs = jnp.array([[1.0], [0.5], [-1.0]]), jnp.array([[1.0], [0.0], [1.0]])
    chain = rd.kalman_smoother(linear_model(), ys).chain
    for functional in (rd.bounds.AnyLipschitz(), rd.bounds.AnyBounded()):
        with pytest.raises(ValueError, match="scale of the emission is singular"):
            rd.error_bound(model, chain, ys, functional, inputs=inputs)


def exactly(array: Any) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(np.asarray(array, float))


def inverted(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a positive definite matrix of fractions."""
    n = len(matrix)
    rows = np.concatenate([matrix, exactly(np.eye(n))], axis=1)
    for i in range(n):
        rows[i] = rows[i] / rows[i, i]
        for j in range(n):
            if j != i:
                rows[j] = rows[j] - rows[j, i] * rows[i]
    return rows[:, n:]


def moments_of_walk(model: rd.StateSpaceModel, ys: Any) -> tuple[np.ndarray, np.ndarray]:
    """The exact posterior as one Gaussian law, in rational arithmetic."""
    n, prior, move, see = len(ys), model.prior, model.transition, model.emission
    a, b, m = (exactly(v).item() for v in (move.weight, move.bias, prior.mean))
    p, q, r = (
        1 / exactly(v).item() ** 2 for v in (prior.scale_tril, move.scale_tril, see.scale_tril)
    )
    precision, shift = exactly(r * np.eye(n)), r * exactly(ys)[:, 0]
    precision[0, 0] += p
    shift[0] += p * m
    for k in range(1, n):
        precision[k - 1 : k + 1, k - 1 : k + 1] += q * np.array([[a * a, -a], [-a, 1]], object)
        shift[k - 1 : k + 1] += q * b * np.array([-a, 1], object)
    covariance = inverted(precision)
    return covariance @ shift, np.diagonal(covariance)


def moments_of_chain(chain: rd.LinearGaussianChain) -> tuple[np.ndarray, np.ndarray]:
    mean = [exactly(chain.terminal.mean).item()]
    variance = [exactly(chain.terminal.scale_tril).item() ** 2]
    steps = (exactly(v).ravel()[::-1] for v in jax.tree.leaves(_arrays(chain.kernels)))
    for weight, bias, scale in zip(*steps, strict=True):
        mean.append(weight * mean[-1] + bias)
        variance.append(weight**2 * variance[-1] + scale**2)
    return np.array(mean[::-1], object), np.array(variance[::-1], object)


def _arrays(kernels: Any) -> tuple:
    return kernels.weight, kernels.bias, kernels.scale_tril


ADVERSE = {
    "plain": {},
    "slow states": {"noise": 1e-10},
    "sharp sensor": {"error": 1e-10},
    "blunt sensor": {"error": 1e8},
    "far from zero": {"mean": 1e8, "bias": 1e7},
    "unstable": {"weight": 3.0},
    "no memory": {"weight": 0.0},
    "diffuse": {"prior": 1e8},
    "tiny units": {"noise": 1e-12, "error": 1e-12, "prior": 1e-12},
    "huge units": {"noise": 1e90, "error": 1e90, "prior": 1e90},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADVERSE)
def test_rigorous_bounds_exceed_error_in_rational_arithmetic(name: str):
    model = linear_model(**ADVERSE[name])
    _, ys = model.simulate(jax.random.key(1), 5)
    mean, variance = moments_of_walk(model, ys)
    rng = np.random.default_rng(3)
    exact = rd.kalman_smoother(model, ys).chain
    others = [perturbed_chain(rng, exact, size) for size in (1e-9, 0.1)]
    others.append(rd.kalman_smoother(perturbed(rng, model, 0.3), ys).chain)
    for chain in [exact, *others]:
        ours, spread = moments_of_chain(chain)
        shifts = [float(shift) for shift in ours - mean]
        apart = [
            float(a - b) / (math.sqrt(a) + math.sqrt(b))
            for a, b in zip(spread, variance, strict=True)
        ]
        worst = sum(folded_mean(*pair) for pair in zip(shifts, apart, strict=True))
        second = abs(float(np.sum(spread + ours**2 - variance - mean**2)))
        size = float(np.max(np.abs(ours))) + math.sqrt(max(spread))
        rounding = 1e-14 * size
        for functional, error, slack in (
            (rd.StateSum(), abs(float(np.sum(ours - mean))), rounding),
            (rd.SecondMoments(), second, size * rounding),
            (rd.bounds.AnyLipschitz(), worst, rounding),
        ):
            bound = rd.error_bound(model, chain, ys, functional)
            assert bound.rigorous
            values = [float(value) for value in bound.considered.values()]
            assert min(values) >= error * (1 - 1e-12) - slack


# Where nothing is rigorous


@pytest.mark.slow
def test_bound_without_rigorous_method_is_labelled_an_estimate():
    emission = rd.NonlinearGaussianKernel(jnp.cos, rd.Diagonal(0.3 * jnp.ones(1)))
    model = nonlinear_model(emission)
    _, ys = model.simulate(jax.random.key(3), N)
    chain = rd.kalman_smoother(nonlinear_model(linear_kernel()), ys).chain
    key = jax.random.key(0)
    bound = rd.error_bound(model, chain, ys, rd.StateSum(), key=key, num_samples=500)
    assert bound.method == "estimate" and not bound.rigorous
    assert "not a bound" in bound.rests_on
    posterior = rd.grid_smoother(model, ys, GRID)
    error = float(jnp.sum(chain.marginals().mean - posterior.mean))
    # One draw, three standard errors: a false alarm in 400 keys, and the key is fixed.
    assert float(bound.error[0]) == pytest.approx(error, abs=3 * float(bound.standard_error))
    worst = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), key=key, num_samples=500)
    sharp = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), reference=posterior)
    assert worst.confidence is None and sharp.confidence == 1.0
    assert not worst.rigorous and not sharp.rigorous
    assert float(worst.value) == pytest.approx(float(sharp.value), rel=0.2)
    reasons = dict(worst.declined)
    assert "declares no curvature" in reasons["score"]
    with pytest.raises(ValueError, match="No bound applies"):
        rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz())


@pytest.mark.slow
def test_a_degenerate_particle_smoother_gives_no_estimate():
    """A sharp sensor: all paths of a bootstrap filter go through a few particles."""
    model = nonlinear_model(rd.NonlinearGaussianKernel(jnp.sin, rd.Diagonal(1e-4 * jnp.ones(1))))
    _, ys = model.simulate(jax.random.key(3), 4)
    chain = rd.extended_smoother(model, ys).chain
    degenerate = rd.ffbsi(jax.random.key(0), model, ys, 100)
    assert int(degenerate.status) == 3
    key, sums = jax.random.key(0), rd.StateSum()
    estimate = rd.error_bound(model, chain, ys, sums, key=key, num_samples=100)
    assert estimate.method == "estimate" and "with tempered particles" in estimate.rests_on
    for functional in (sums, rd.bounds.AnyLipschitz()):
        with pytest.raises(ValueError, match="paths go through fewer than 10 particles at time"):
            rd.error_bound(model, chain, ys, functional, reference=degenerate, key=key)


def test_overdeclared_curvature_is_refused(counts: Any):
    _, ys, chain, _ = counts
    wrong = rd.DistributionKernel(
        lambda x: nd.Poisson(jnp.exp(x)), curvature=lambda y: 5.0 * jnp.ones((1, 1))
    )
    with pytest.raises(ValueError, match="declares more curvature than it has"):
        rd.error_bound(
            nonlinear_model(wrong), chain, ys, rd.bounds.AnyLipschitz(), key=jax.random.key(0)
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"functional": "sum"}, "expects a functional"),
        ({"reference": 3}, "GridPosterior or a ParticlePosterior"),
        ({"method": "guess"}, "expects method 'auto' or one of"),
        ({"method": "score"}, "draws paths: pass key"),
        ({"method": "total_variation"}, "declares no oscillation"),
        ({"ys": np.zeros((N + 1, 1))}, "as many rows as the chain"),
        ({"chain": Instance}, "expects a backward chain"),
    ],
)
def test_error_bound_refuses_bad_arguments(untyped: None, change: dict, message: str):
    instance = Instance(1, 1)
    arguments = {
        "model": instance.model,
        "chain": instance.chain,
        "ys": instance.ys,
        "functional": rd.bounds.AnyLipschitz(),
    }
    with pytest.raises((ValueError, TypeError), match=message):
        rd.error_bound(**(arguments | change))


def test_functional_constants_are_validated(untyped: None):
    with pytest.raises(ValueError, match="lipschitz must be a finite nonnegative number"):
        rd.StateFunctional(lambda x, data: x, lipschitz=-1.0)
    with pytest.raises(ValueError, match="as a pair of constants"):
        rd.AdditiveFunctional(distance_travelled, lipschitz=1.0)  # pyright: ignore
    with pytest.raises(ValueError, match="constant must be a finite nonnegative number"):
        rd.bounds.AnyLipschitz(math.inf)


# Where a bound would be zero by accident


@pytest.mark.parametrize("d", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_indefinite_curvature_is_refused(d: int):
    """Seven states are eliminated by LAPACK, whose Cholesky factor of such a matrix is NaN."""
    # A truthful declaration: −∂² log g is at least −4(|y| + 1)/0.09 for y = cos 2x + noise.
    emission = rd.NonlinearGaussianKernel(
        lambda x: jnp.cos(2 * x),
        rd.Diagonal(0.3 * jnp.ones(d)),
        curvature=lambda y: jnp.diag(-4 * (jnp.abs(y) + 1) / 0.09),
    )
    model = linear_transition_model(emission, d, noise=0.5)
    _, ys = model.simulate(jax.random.key(0), N)
    chain = rd.kalman_smoother(linear_model(d, noise=0.5), ys).chain
    with pytest.raises(ValueError, match="not positive definite"):
        rd.error_bound(
            model, chain, ys, rd.bounds.AnyLipschitz(), key=jax.random.key(0), method="score"
        )


@pytest.mark.parametrize("method", ["score", "elbo_gap"])
def test_methods_that_need_densities_are_skipped_for_singular_laws(method: Any):
    instance = Instance(19, 1)
    chain = instance.exact
    point = rd.LinearGaussianChain.from_arrays(
        chain.laws.mean,
        0 * chain.laws.scale_tril,
        chain.kernels.weight,
        chain.kernels.bias,
        0 * chain.kernels.scale_tril,
    )
    with pytest.raises(ValueError, match="singular at some time"):
        rd.error_bound(
            instance.model,
            point,
            instance.ys,
            rd.bounds.AnyLipschitz(),
            key=jax.random.key(0),
            method=method,
        )


@pytest.mark.slow
def test_a_time_step_of_zero_leaves_the_wasserstein_bounds():
    def random_walk(scale: float) -> rd.StateSpaceModel:
        return replace(
            linear_model(),
            transition=rd.VaryingLinearGaussianKernel(
                lambda u: (jnp.eye(1), jnp.zeros(1), scale * jnp.sqrt(u)[:, None])
            ),
        )

    inputs = jnp.array([1.0, 1.0, 0.0, 1.0, 0.5])[:, None]
    _, ys = random_walk(1.0).simulate(jax.random.key(0), 5, inputs=inputs)
    chain = rd.kalman_smoother(random_walk(0.8), ys, inputs=inputs).chain
    bound = rd.error_bound(
        random_walk(1.0), chain, ys, rd.bounds.AnyLipschitz(), inputs=inputs, key=jax.random.key(0)
    )
    assert "elbo_gap" not in bound.considered and "score" not in bound.considered
    signed = rd.error_bound(random_walk(1.0), chain, ys, rd.StateSum(), inputs=inputs)
    assert 0 < float(signed.value) <= float(bound.value)


@pytest.mark.slow
def test_elbo_gap_of_close_chain_exceeds_rounding(x32: None):
    model = random_model(np.random.default_rng(0), 1, 1)
    model = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model)
    _, ys = model.simulate(jax.random.key(0), 200)
    near = jax.tree.map(lambda leaf: leaf * 1.0003, model)
    chain = rd.kalman_smoother(near, ys).chain
    worst = rd.error_bound(model, chain, ys, rd.StateSum())
    bound = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), method="elbo_gap")
    assert float(bound.value) >= float(worst.value) > 0


@pytest.mark.slow
def test_elbo_gap_equals_log_evidence_minus_elbo():
    for d in (1, 2):
        instance = Instance(21, d)
        gap = instance.log_evidence - rd.elbo(instance.model, instance.chain, instance.ys)
        reference = wasserstein.exact_posterior(instance.exact)
        divergence = wasserstein.divergence(instance.chain, reference)
        assert float(divergence) == pytest.approx(float(gap), rel=1e-8)


def test_bound_ignores_signs_of_scale_columns():
    instance = Instance(23, 1)
    chain = instance.chain
    flipped = rd.LinearGaussianChain.from_arrays(
        chain.laws.mean,
        -chain.laws.scale_tril,
        chain.kernels.weight,
        chain.kernels.bias,
        -chain.kernels.scale_tril,
    )
    bound = rd.error_bound(instance.model, flipped, instance.ys, rd.bounds.AnyBounded())
    assert float(bound.value) == pytest.approx(float(instance.bound(rd.bounds.AnyBounded()).value))


@pytest.mark.slow
def test_mass_outside_the_grid_enters_the_bound():
    model = nonlinear_emission_model(lambda x: x, weight=0.0)
    ys = jnp.zeros((4, 1))
    posterior = rd.grid_smoother(model, ys, rd.Grid([-7.0], [7.0], 200))
    far = rd.LinearGaussianChain.from_arrays(
        jnp.full((4, 1), 12.0),
        jnp.ones((4, 1, 1)),
        jnp.zeros((3, 1, 1)),
        jnp.full((3, 1), 12.0),
        jnp.ones((3, 1, 1)),
    )
    beyond = rd.StateFunctional(lambda x, data: 1.0 * (x[0] > 9), oscillation=1.0)
    bound = rd.error_bound(model, far, ys, beyond, reference=posterior, key=jax.random.key(0))
    assert set(bound.considered) == {"pinsker"} and float(bound.value) > 3.9


@pytest.mark.slow
def test_indicator_jumps_within_grid_cells_enter_the_bound():
    instance = Instance(25, 1)
    model = replace(instance.model, emission=hide_linearity(instance.model).emission)
    posterior = rd.grid_smoother(model, instance.ys, rd.Grid([-9.0], [9.0], 121))
    for level in (-0.31, 0.02, 0.44):
        above = rd.StateFunctional(lambda x, data, level=level: 1.0 * (x[0] > level))
        bound = rd.error_bound(
            model, instance.chain, instance.ys, above, reference=posterior, method="exact"
        )
        truth = sum(
            sign * scipy.stats.norm.sf((level - laws.mean) / laws.std).sum()
            for sign, laws in ((1, instance.chain.marginals()), (-1, instance.exact.marginals()))
        )
        assert abs(truth) <= float(bound.value) * (1 + 1e-6), level


def test_a_reference_of_another_series_or_model_is_refused(counts: Any):
    model, ys, chain, posterior = counts
    with pytest.raises(ValueError, match="another model or another series"):
        rd.error_bound(model, chain, ys[::-1], rd.bounds.AnyLipschitz(), reference=posterior)
    particles = rd.ffbsi(jax.random.key(0), model, ys, 50)
    with pytest.raises(ValueError, match="its observations differ"):
        rd.error_bound(model, chain, ys[::-1], rd.StateSum(), reference=particles)


# The paper's own quantities


def test_h1_constants_equal_corrected_formula():
    instance = Instance(13, 2)
    constants = np.asarray(rd.bounds.h1_constants(instance.model, instance.chain, instance.ys))
    model, chain, d = instance.model, instance.chain, 2
    a, h = np.asarray(model.transition.weight), np.asarray(model.emission.weight)
    noise = np.asarray(model.transition.scale_tril @ model.transition.scale_tril.T)
    error = np.asarray(model.emission.scale_tril @ model.emission.scale_tril.T)
    k = 3
    law, after = (np.asarray(chain.laws.mean[i]) for i in (k - 1, k))
    spread = [np.asarray(chain.laws.covariance[i]) for i in (k - 1, k)]
    # The pair given y_k, from x_{k-1} ~ q_{k-1}.
    mean = np.concatenate([law, a @ law + np.asarray(model.transition.bias)])
    joint = np.block([[spread[0], spread[0] @ a.T], [a @ spread[0], a @ spread[0] @ a.T + noise]])
    design = np.concatenate([np.zeros((d, d)), h], axis=1)
    gain = joint @ design.T @ np.linalg.inv(design @ joint @ design.T + error)
    y = np.asarray(instance.ys[k]) - np.asarray(model.emission.bias)
    mean, joint = mean + gain @ (y - design @ mean), joint - gain @ design @ joint
    # The pair under the chain.
    g, c = np.asarray(chain.kernels.weight[k - 1]), np.asarray(chain.kernels.bias[k - 1])
    s = np.asarray(chain.kernels.scale_tril[k - 1])
    ours = np.block([[g @ spread[1] @ g.T + s @ s.T, g @ spread[1]], [spread[1] @ g.T, spread[1]]])
    shift = np.concatenate([g @ after + c, after]) - mean
    inverse = np.linalg.inv(joint)
    squared = (
        np.log(np.linalg.det(joint) / np.linalg.det(ours))
        + shift @ inverse @ shift
        + np.trace(inverse @ ours)
        - 2 * d
    )
    assert constants[k] == pytest.approx(min(2.0, math.sqrt(squared)), rel=1e-8)
    exact = np.asarray(rd.bounds.h1_constants(instance.model, instance.exact, instance.ys))
    assert (exact < 1e-6).all()


@pytest.mark.slow
def test_h1_constants_agree_on_grid_and_by_sampling(counts: Any):
    model, ys, chain, _ = counts
    by_grid = np.asarray(rd.bounds.h1_constants(model, chain, ys, grid=GRID))
    by_paths = np.asarray(
        rd.bounds.h1_constants(model, chain, ys, key=jax.random.key(0), num_samples=4000)
    )
    np.testing.assert_allclose(by_paths, by_grid, rtol=0.15)
    # Pinsker's closed form is above the sum over a grid, where both apply.
    instance = Instance(15, 1)
    above = np.asarray(rd.bounds.h1_constants(instance.model, instance.chain, instance.ys))
    series = Series(instance.ys, None, None, None)
    summed, misfit = mixing._over_grid(instance.model, instance.chain, series, GRID)
    assert float(misfit) < 1e-6
    summed = np.asarray(summed)
    assert (summed <= above + 1e-6).all() and (summed > 0.5 * above).all()
    with pytest.raises(ValueError, match="widen or refine it"):
        rd.bounds.h1_constants(model, chain, ys, grid=rd.Grid([0.0], [1.0], 50))
    with pytest.raises(ValueError, match="pass a grid, or a key"):
        rd.bounds.h1_constants(model, chain, ys)


def test_h2_constants_bound_densities_on_the_domain(counts: Any):
    model, _, chain, _ = counts
    domain = rd.Grid([-1.0], [1.0], 41)
    constants = rd.bounds.h2_constants(model, chain, domain)

    def density(x: float) -> float:
        return float(scipy.stats.norm.pdf(x, scale=0.5))

    # The transition's own extremes: at its mean, and from one end of the box to the other.
    assert float(constants.sigma_plus) >= density(0.0) * (1 - 1e-3)
    assert 0 < float(constants.sigma_minus) <= density(1.8)
    ratio = float(constants.sigma_minus / constants.sigma_plus)
    assert float(constants.rho) == pytest.approx(1 - ratio)
    assert float(constants.rho_bar) == pytest.approx((1 - ratio) / (1 + ratio))


# Checks of a posterior


@pytest.mark.parametrize("shape", [0.3, 0.7, 1.2])
def test_pareto_shape_is_recovered(shape: float):
    draws = scipy.stats.genpareto(shape).rvs(20_000, random_state=1)
    estimate = pareto_shape(np.log(1.0 + draws))
    # The tail of 425 draws has a standard error of about (1 + shape) / 20.
    assert estimate == pytest.approx(shape, abs=3 * (1 + shape) / 20)


def test_weights_of_huge_range_have_large_pareto_shape():
    spread = 1000 * np.random.default_rng(0).normal(size=1000)
    assert pareto_shape(spread.astype(np.float32)) > 10


@pytest.mark.slow
def test_an_exact_posterior_passes_every_check():
    instance = Instance(17, 1)
    key = jax.random.key(0)
    check = rd.check_posterior(key, instance.model, instance.exact, instance.ys)
    assert check.kinds == check.messages == () and float(check.k_hat) == -math.inf
    assert check.verdict == "passed" and check.reference == "grid"
    assert abs(float(check.gap)) < 4 * float(check.log_evidence_standard_error)


@pytest.mark.slow
@pytest.mark.parametrize("shift, factor", [(0.35, 1.0), (0.0, 1.4), (0.0, 1 / 1.4)])
def test_a_law_whose_intervals_are_wrong_does_not_pass(shift: float, factor: float):
    """With standard deviations too small by 1.4, a 90% interval covers 76%."""
    instance = Instance(17, 1)
    laws, kernels = instance.exact.laws, instance.exact.kernels
    stds = instance.exact.marginals().scale_tril[:, :, 0]
    # The means of all marginals are shifted by their standard deviations.
    moves = stds[:-1] - jnp.einsum("tij,tj->ti", kernels.weight, stds[1:])
    laws = eqx.tree_at(
        lambda law: (law.mean, law.scale_tril),
        laws,
        (laws.mean + shift * stds, factor * laws.scale_tril),
    )
    kernels = eqx.tree_at(
        lambda kernel: (kernel.bias, kernel.scale_tril),
        kernels,
        (kernels.bias + shift * moves, factor * kernels.scale_tril),
    )
    chain = rd.LinearGaussianChain(laws, kernels)
    check = rd.check_posterior(jax.random.key(0), instance.model, chain, instance.ys)
    assert "wrong law" in check.kinds and check.verdict == "failed"


@pytest.mark.slow
def test_check_posterior_reports_lost_mode():
    model = nonlinear_emission_model(jnp.square, 0.3, weight=0.99, noise=0.1)
    ys = jnp.full((N, 1), 1.5)
    # A chain that sits on the positive root alone.
    unimodal = replace(model, emission=linear_kernel(scale=0.12))
    chain = rd.kalman_smoother(unimodal, jnp.sqrt(ys)).chain
    particles = rd.ffbsi(jax.random.key(1), model, ys, 500)
    grid = rd.grid_smoother(model, ys, rd.Grid([-6.0], [6.0], 400))
    for reference in (None, particles, grid):
        check = rd.check_posterior(jax.random.key(0), model, chain, ys, reference=reference)
        assert "mode loss" in check.kinds and len(check.kinds) == len(check.messages)
        assert check.verdict == "failed" and 0.3 < float(jnp.max(check.missed)) < 0.7


@pytest.mark.slow
def test_check_posterior_with_degenerate_reference_does_not_pass():
    instance = Instance(17, 1)
    few = rd.ffbsi(jax.random.key(0), instance.model, instance.ys, 5)
    check = rd.check_posterior(
        jax.random.key(0), instance.model, instance.exact, instance.ys, reference=few
    )
    assert check.verdict == "not checked" and "particles" in check.kinds
    assert "not checked" in check.messages[0]


@pytest.mark.slow
def test_chain_outside_model_support_has_loose_elbo():
    ys = jnp.zeros((4, 1))
    model = linear_transition_model(uniform_emission())
    chain = rd.kalman_smoother(linear_model(design=0.9), ys).chain
    check = rd.check_posterior(jax.random.key(0), model, chain, ys)
    # The weights could correct it, since it covers what the model allows.
    assert check.kinds == ("loose ELBO",) and "minus infinity" in check.messages[0]
    assert float(check.elbo) == -math.inf and float(check.k_hat) < 0.7
