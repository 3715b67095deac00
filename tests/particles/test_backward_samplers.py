"""Backward draws of particle smoothers.

Laws are compared with probabilities written out in numpy, by chi-square tests. Keys are fixed. A
test that computes a p-value fails below `RARE`, which is the share of keys on which it would raise
a false alarm.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.special
import scipy.stats

import retrodict as rd
from retrodict.particles import backward_samplers as backward_module
from retrodict.particles.backward_weights import BackwardWeights

RARE = 1e-6
more = pytest.mark.statistical


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the counts in each row under the row's probabilities: Pearson's chi-square.

    Cells with less than 8 expected draws are pooled. Draws of what has no probability fail at once.
    """
    assert counts[probabilities == 0].sum() == 0
    statistic, freedom = 0.0, 0
    for row, law in zip(counts, probabilities, strict=True):
        expected = row.sum() * law
        large = expected >= 8
        observed_counts, expectations = row[large], expected[large]
        if expected[~large].sum() > 0:
            observed_counts = np.append(observed_counts, row[~large].sum())
            expectations = np.append(expectations, expected[~large].sum())
            if expectations[-1] < 1:  # too rare for the approximation: judged on its own
                tail = scipy.stats.poisson.sf(observed_counts[-1] - 1, expectations[-1])
                assert tail > RARE
                observed_counts, expectations = observed_counts[:-1], expectations[:-1]
        if len(expectations) > 1:
            statistic += ((observed_counts - expectations) ** 2 / expectations).sum()
            freedom += len(expectations) - 1
    return float(scipy.stats.chi2.sf(statistic, freedom)) if freedom else 1.0


# --- backward draws -------------------------------------------------------------------------------


def linear_kernel(dim: int, rng: np.random.Generator) -> rd.LinearGaussianKernel:
    """A transition whose scale is dense."""
    scale = np.tril(0.15 * rng.normal(size=(dim, dim)), -1) / np.sqrt(dim)
    return rd.LinearGaussianKernel(
        jnp.asarray(np.eye(dim) + 0.1 * rng.normal(size=(dim, dim)) / np.sqrt(dim)),
        jnp.asarray(rng.normal(size=dim)),
        jnp.asarray(scale + np.diag(rng.uniform(0.6, 1.4, dim))),
    )


def linear_log_density(
    kernel: rd.LinearGaussianKernel, befores: np.ndarray, xs: np.ndarray
) -> np.ndarray:
    """Log densities up to a constant, of shape `(state, particle)`, in double precision."""
    weight, bias, scale = (
        np.asarray(a, np.float64) for a in (kernel.weight, kernel.bias, kernel.scale_tril)
    )
    apart = xs[:, None] - (befores @ weight.T + bias)
    return -0.5 * (np.linalg.solve(scale, apart[..., None])[..., 0] ** 2).sum(-1)


DEGREES, WIDTH = 4.0, 0.8


def student_kernel(dim: int) -> rd.DistributionKernel:
    return rd.DistributionKernel(lambda x: dist.StudentT(DEGREES, jnp.sin(x), WIDTH))


def student_log_density(befores: np.ndarray, xs: np.ndarray) -> np.ndarray:
    laws: Any = scipy.stats.t(DEGREES, np.sin(befores)[None], WIDTH)
    return laws.logpdf(xs[:, None]).sum(-1)


def student_bound(dim: int) -> float:
    return float(dim * scipy.stats.t.logpdf(0.0, DEGREES, 0.0, WIDTH))


def normalised(log_weights: np.ndarray) -> np.ndarray:
    return log_weights - scipy.special.logsumexp(log_weights)


def probabilities(log_weights: np.ndarray, log_densities: np.ndarray) -> np.ndarray:
    """The backward law of each state, of shape `(state, particle)`."""
    return scipy.special.softmax(log_weights + log_densities, axis=1)


def sampled_indices(
    sampler: rd.particles.AbstractBackwardSampler,
    kernel: rd.AbstractKernel,
    particles: np.ndarray,
    log_weights: np.ndarray,
    xs: np.ndarray,
    ancestors: np.ndarray,
) -> np.ndarray:
    """One index for each state, as a smoother draws it: compiled."""

    @jax.jit
    def draw(key: jax.Array, *arrays: jax.Array) -> jax.Array:
        befores, log_weights, xs, ancestors = arrays
        pairs = BackwardWeights.of(kernel, None, befores)
        return sampler.draw(key, pairs, log_weights, xs, ancestors)

    arrays = (jnp.asarray(a) for a in (particles, log_weights, xs, ancestors))
    indices = np.asarray(draw(jax.random.key(0), *arrays))
    assert indices.shape == (len(xs),) and indices.min() >= 0 and indices.max() < len(particles)
    return indices


def counted(
    sampler: rd.particles.AbstractBackwardSampler,
    kernel: rd.AbstractKernel,
    particles: np.ndarray,
    log_weights: np.ndarray,
    xs: np.ndarray,
    ancestors: np.ndarray | int,
    num_draws: int = 3000,
) -> np.ndarray:
    """How often each particle is drawn for each state, of shape `(state, particle)`.

    Args:
        ancestors: where draws start from: one index for all, or shape `(state, draw)`.
    """
    starts = np.broadcast_to(ancestors, (len(xs), num_draws)).reshape(-1).astype(np.int32)
    repeated = np.repeat(xs, num_draws, axis=0)
    indices = sampled_indices(sampler, kernel, particles, log_weights, repeated, starts)
    rows = indices.reshape(len(xs), num_draws)
    return np.stack([np.bincount(row, minlength=len(particles)) for row in rows])


def cloud(dim: int, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Particles and weights of unequal size; some weights are zero if there are enough."""
    rng = np.random.default_rng(seed)
    # Many coordinates would leave one particle alone near a state.
    particles = rng.normal(size=(count, dim)) / np.sqrt(max(dim / 3, 1))
    log_weights = 2 * rng.normal(size=count)
    if count > 10:
        log_weights[rng.choice(count, count // 5, replace=False)] = -np.inf
    return particles, normalised(log_weights)


def states(dim: int) -> np.ndarray:
    """Four states of the next time: three near the cloud, and one in its tail."""
    rng = np.random.default_rng(99)
    near = rng.normal(size=(3, dim)) / np.sqrt(max(dim / 3, 1)) + 0.3
    return np.concatenate([near, near[:1] + 3.0 / np.sqrt(dim)])


def sampler_name(value: Any) -> str | None:
    return type(value).__name__ if isinstance(value, rd.particles.AbstractBackwardSampler) else None


@pytest.mark.parametrize(
    ("sampler", "dim", "count"),
    [
        (rd.particles.ExactBackward(), 1, 17),
        (rd.particles.ExactBackward(), 3, 300),
        (rd.particles.ExactBackward(), 40, 17),
        pytest.param(rd.particles.RejectionBackward(), 3, 300, marks=pytest.mark.slow),
        pytest.param(rd.particles.ExactBackward(), 5, 33, marks=more),
        pytest.param(rd.particles.ExactBackward(), 1, 1, marks=more),
        pytest.param(rd.particles.ExactBackward(), 1, 16, marks=more),
        pytest.param(rd.particles.ExactBackward(), 1, 300, marks=more),
        pytest.param(rd.particles.ExactBackward(), 3, 33, marks=more),
        pytest.param(rd.particles.ExactBackward(), 1, 5000, marks=more),
        pytest.param(rd.particles.ExactBackward(), 40, 300, marks=more),
        pytest.param(rd.particles.RejectionBackward(), 1, 17, marks=more),
        pytest.param(rd.particles.RejectionBackward(max_trials=2), 40, 300, marks=more),
        pytest.param(rd.particles.RejectionBackward(), 1, 1, marks=more),
        pytest.param(rd.particles.MCMCBackward(1), 1, 1, marks=more),
    ],
    ids=sampler_name,
)
def test_backward_samplers_have_exact_law_under_gaussian_transition(
    sampler: rd.particles.AbstractBackwardSampler, dim: int, count: int
):
    kernel = linear_kernel(dim, np.random.default_rng(dim))
    particles, log_weights = cloud(dim, count)
    xs = states(dim)
    laws = probabilities(log_weights, linear_log_density(kernel, particles, xs))
    start = int(np.argmax(log_weights))
    counts = counted(sampler, kernel, particles, log_weights, xs, start)
    assert p_value(counts, laws) > RARE


@pytest.mark.parametrize(
    ("sampler", "dim", "count"),
    [
        (rd.particles.ExactBackward(), 1, 300),
        (rd.particles.RejectionBackward(log_bound=student_bound(1)), 1, 17),
        pytest.param(rd.particles.ExactBackward(), 1, 1, marks=more),
        pytest.param(rd.particles.ExactBackward(), 3, 17, marks=more),
        pytest.param(rd.particles.ExactBackward(), 40, 17, marks=more),
        pytest.param(rd.particles.RejectionBackward(3, student_bound(3) + 0.7), 3, 300, marks=more),
    ],
    ids=sampler_name,
)
def test_backward_samplers_have_exact_law_under_student_transition(
    sampler: rd.particles.AbstractBackwardSampler, dim: int, count: int
):
    particles, log_weights = cloud(dim, count)
    xs = states(dim)
    laws = probabilities(log_weights, student_log_density(particles, xs))
    start = int(np.argmax(log_weights))
    counts = counted(sampler, student_kernel(dim), particles, log_weights, xs, start)
    assert p_value(counts, laws) > RARE


@pytest.mark.parametrize("general", [False, True])
def test_one_metropolis_move_has_its_exact_law(general: bool):
    # From particle a to j with probability w_j min(1, m_j / m_a): not just its invariant law.
    particles, log_weights = cloud(1, 33)
    xs = states(1)
    if general:
        kernel, log_m = student_kernel(1), student_log_density(particles, xs)
    else:
        kernel = linear_kernel(1, np.random.default_rng(1))
        log_m = linear_log_density(kernel, particles, xs)
    start = int(np.argsort(log_weights)[-3])
    moves = np.exp(log_weights) * np.minimum(1, np.exp(log_m - log_m[:, start, None]))
    moves[:, start] += 1 - moves.sum(1)
    counts = counted(rd.particles.MCMCBackward(1), kernel, particles, log_weights, xs, start)
    assert p_value(counts, moves) > RARE


@more
def test_metropolis_moves_keep_and_reach_the_backward_law():
    # Noise so wide that densities differ by a factor of 3 at most: 16 moves forget all but 0.2 %
    # of the start, which 3000 draws do not see.
    particles, log_weights = cloud(3, 300)
    particles = 0.25 * particles
    xs = 0.3 * states(3)
    kernel = linear_kernel(3, np.random.default_rng(3))
    laws = probabilities(log_weights, linear_log_density(kernel, particles, xs))
    ratios = laws[:, np.isfinite(log_weights)] / np.exp(log_weights[np.isfinite(log_weights)])
    assert np.all((1 - 1 / ratios.max(1)) ** 16 < 2e-3)
    counts = counted(rd.particles.MCMCBackward(16), kernel, particles, log_weights, xs, 1)
    assert p_value(counts, laws) > RARE
    rng = np.random.default_rng(0)
    starts = np.stack([rng.choice(300, 3000, p=law) for law in laws])
    counts = counted(rd.particles.MCMCBackward(2), kernel, particles, log_weights, xs, starts)
    assert p_value(counts, laws) > RARE


def test_a_nonlinear_transition_with_inputs_is_whitened_by_its_own_mean_and_scale():
    scale = np.array([[0.5, 0.0], [-0.4, 1.1]])
    kernel = rd.NonlinearGaussianKernel(
        lambda x, u: jnp.sin(x) * u, jnp.asarray(scale), takes_input=True
    )
    particles, _ = cloud(2, 40)
    u, xs = np.array([1.5, -0.7]), np.array([[0.4, 0.2], [-1.0, 3.0]])

    @jax.jit
    def both(u: jax.Array, particles: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        pairs = BackwardWeights.of(kernel, u, particles)
        prepared = pairs.prepare(xs)
        place = jnp.array([7, 11])
        return pairs.matrix(prepared), pairs.each(place, prepared)

    matrix, each = (np.asarray(a) for a in both(*map(jnp.asarray, (u, particles, xs))))
    apart = xs[:, None] - np.sin(particles) * u
    exact = -0.5 * (np.linalg.solve(scale, apart[..., None])[..., 0] ** 2).sum(-1)
    # Log densities in units of log 2, up to a constant.
    np.testing.assert_allclose(np.log(2) * matrix.T, exact, rtol=1e-10)
    np.testing.assert_allclose(np.log(2) * each, [exact[0, 7], exact[1, 11]], rtol=1e-10)


@pytest.mark.parametrize("general", [False, True])
def test_chunked_paths_equal_paths_drawn_at_once(general: bool, monkeypatch: pytest.MonkeyPatch):
    kernel = student_kernel(2) if general else linear_kernel(2, np.random.default_rng(0))
    particles, log_weights = cloud(2, 50)
    xs = np.random.default_rng(1).normal(size=(37, 2))
    arrays = (kernel, particles, log_weights, xs, np.zeros(37, np.int32))
    at_once = sampled_indices(rd.particles.ExactBackward(), *arrays)
    monkeypatch.setattr(backward_module, "MAX_TILE", 50 * 5 // (1 if general else 16))
    np.testing.assert_array_equal(sampled_indices(rd.particles.ExactBackward(), *arrays), at_once)


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("count", [17, 300])
def test_extreme_uniforms_select_weighted_particles(uniform: float, count: int):
    rng = np.random.default_rng(0)
    weights = rng.random((count, 50)) * (rng.random((count, 50)) < 0.3)
    weights[:16], weights[-5:], weights[8] = 0, 0, 1e-3
    indices, _ = backward_module.descend(jnp.asarray(weights), jnp.full(50, uniform))
    expected = [np.flatnonzero(column)[0 if uniform == 0 else -1] for column in weights.T]
    np.testing.assert_array_equal(indices, expected)


# --- extreme weights and places -------------------------------------------------------------------


def random_walk(dim: int, kind: Any = np.float64) -> rd.LinearGaussianKernel:
    eye = jnp.eye(dim, dtype=kind)
    return rd.LinearGaussianKernel(eye, jnp.zeros(dim, kind), eye)


@pytest.mark.parametrize(("kind", "span"), [(np.float64, 600.0), (np.float32, 100.0)])
@pytest.mark.parametrize("start", [0, -1])
def test_backward_weights_handle_vanishing_densities(kind: Any, span: float, start: int):
    # Each particle is the less dense the heavier it is, so that all have a share of the law.
    count = 40
    particles = np.sqrt(2 * np.linspace(0, span, count))[:, None].astype(kind)
    law = np.random.default_rng(0).dirichlet(np.full(count, 2.0))
    log_weights = np.log(law) + 0.5 * particles[:, 0].astype(np.float64) ** 2
    log_weights = normalised(log_weights).astype(kind)
    assert log_weights.max() - log_weights.min() > 0.95 * span
    x = np.zeros((1, 1), kind)
    # What single precision makes of the weights is what the draws must follow.
    exact = probabilities(
        log_weights.astype(np.float64), -0.5 * particles[:, 0].astype(np.float64)[None] ** 2
    )
    kernel = random_walk(1, kind)
    counts = counted(
        rd.particles.ExactBackward(), kernel, particles, log_weights, x, start % count, 20_000
    )
    assert p_value(counts, exact) > RARE


@pytest.mark.parametrize(
    "sampler",
    [rd.particles.ExactBackward(), pytest.param(rd.particles.RejectionBackward(), marks=more)],
)
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_backward_weights_span_600_nats(sampler: rd.particles.AbstractBackwardSampler, kind: Any):
    rng = np.random.default_rng(0)
    log_weights = normalised(np.linspace(0, -600, 50)[rng.permutation(50)]).astype(kind)
    particles = rng.normal(size=(50, 1)).astype(kind)
    x = np.array([[0.3], [-4.0]], kind)
    kernel = random_walk(1, kind)
    exact = probabilities(
        log_weights.astype(float), linear_log_density(kernel, particles.astype(float), x)
    )
    exact = np.where(exact < 1e-30, 0, exact)
    lightest = int(np.argmin(log_weights))
    counts = counted(sampler, kernel, particles, log_weights, x, lightest)
    assert p_value(counts, exact) > RARE


@pytest.mark.parametrize(
    ("dim", "count", "far", "kind"),
    [
        (1, 17, 1e6, np.float64),
        (5, 17, 1e8, np.float64),
        (40, 17, 1e3, np.float32),
        pytest.param(3, 300, 1e6, np.float64, marks=more),
        pytest.param(5, 48, 1e8, np.float64, marks=more),
        pytest.param(40, 17, 1e6, np.float64, marks=more),
        pytest.param(3, 17, 1e3, np.float32, marks=more),
        pytest.param(40, 48, 1e3, np.float32, marks=more),
    ],
)
def test_backward_weights_are_accurate_far_from_the_origin(
    dim: int, count: int, far: float, kind: Any
):
    rng = np.random.default_rng(dim)
    particles = (far + rng.normal(size=(count, dim)) / np.sqrt(max(dim / 3, 1))).astype(kind)
    log_weights = normalised(rng.normal(size=count)).astype(kind)
    xs = (far + rng.normal(size=(3, dim)) / np.sqrt(max(dim / 3, 1))).astype(kind)
    kernel = random_walk(dim, kind)
    exact = probabilities(
        log_weights.astype(float),
        linear_log_density(kernel, particles.astype(float), xs.astype(float)),
    )
    counts = counted(rd.particles.ExactBackward(), kernel, particles, log_weights, xs, 0)
    assert p_value(counts, exact) > RARE


@pytest.mark.parametrize(
    ("sampler", "general"),
    [
        (rd.particles.ExactBackward(), False),
        (rd.particles.ExactBackward(), True),
        pytest.param(rd.particles.RejectionBackward(2, 0.0), False, marks=more),
        pytest.param(rd.particles.RejectionBackward(2, 0.0), True, marks=more),
        pytest.param(rd.particles.MCMCBackward(5), False, marks=more),
        pytest.param(rd.particles.MCMCBackward(5), True, marks=more),
    ],
    ids=sampler_name,
)
def test_a_particle_without_weight_is_never_drawn(
    sampler: rd.particles.AbstractBackwardSampler, general: bool
):
    # The particles without weight are those that are nearest to the states.
    rng = np.random.default_rng(0)
    particles = rng.normal(size=(100, 1))
    nearest = np.abs(particles[:, 0]) < 1
    log_weights = normalised(np.where(nearest, -np.inf, rng.normal(size=100)))
    kernel = student_kernel(1) if general else random_walk(1)
    xs = 0.1 * rng.normal(size=(4, 1))
    start = int(np.flatnonzero(~nearest)[0])
    counts = counted(sampler, kernel, particles, log_weights, xs, start, num_draws=2000)
    assert counts[:, nearest].sum() == 0
    assert np.all((counts[:, ~nearest] > 0).sum(1) > 10)


@pytest.mark.parametrize(
    "sampler",
    [rd.particles.ExactBackward(), pytest.param(rd.particles.RejectionBackward(), marks=more)],
)
def test_unreachable_state_keeps_its_ancestor(
    sampler: rd.particles.AbstractBackwardSampler,
):
    ancestors = 3 * np.arange(6, dtype=np.int32)
    arrays = (np.zeros((20, 1)), np.full(20, -np.log(20)), np.full((6, 1), 1e6), ancestors)
    np.testing.assert_array_equal(sampled_indices(sampler, random_walk(1), *arrays), ancestors)


@pytest.mark.parametrize(("kind", "at"), [(np.float64, 30.0), (np.float32, 20.0)])
def test_distant_state_selects_the_nearest_particle(kind: Any, at: float):
    # 20 or 10 standard deviations off, as a guided filter may put it at an outlier. The density of
    # the nearest particle is e^250, or e^150, times that of its ancestor.
    particles = np.array([[0.0], [10.0], [0.5], [-3.0]], kind)
    log_weights, xs = np.full(4, -np.log(4), kind), np.full((5, 1), at, kind)
    kernel = random_walk(1, kind)
    indices = sampled_indices(
        rd.particles.ExactBackward(), kernel, particles, log_weights, xs, np.zeros(5, np.int32)
    )
    np.testing.assert_array_equal(indices, 1)


def test_rejection_needs_log_bound_for_non_gaussian_density(key: jax.Array):
    pairs = BackwardWeights.of(student_kernel(1), None, jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match="upper bound.*DistributionKernel.*log_bound"):
        rd.particles.RejectionBackward().draw(
            key, pairs, jnp.full(3, -np.log(3)), jnp.zeros((2, 1)), jnp.zeros(2, jnp.int32)
        )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: rd.particles.MCMCBackward(0), "num_moves"),
        (lambda: rd.particles.RejectionBackward(max_trials=0), "max_trials"),
    ],
)
def test_samplers_refuse_counts_below_one(make: Callable, name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make()


@pytest.mark.parametrize(
    "sampler", [rd.particles.MCMCBackward(3), rd.particles.ExactBackward()], ids=["mcmc", "exact"]
)
def test_randomness_of_all_steps_gives_the_draws_of_each(
    sampler: rd.particles.AbstractBackwardSampler,
):
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 4)
    particles, xs = jnp.asarray(rng.normal(size=(20, 2))), jnp.asarray(rng.normal(size=(30, 2)))
    pairs = BackwardWeights.of(linear_kernel(2, rng), None, particles)
    log_weights = jax.nn.log_softmax(jnp.asarray(rng.normal(size=20)))
    state = pairs, log_weights, xs, jnp.asarray(rng.integers(20, size=30), jnp.int32)
    draw, randomness = backward_module.draws_by_step(sampler, keys, 30)
    for key, random in zip(keys, randomness, strict=True):
        np.testing.assert_array_equal(draw(random, *state), sampler.draw(key, *state))
