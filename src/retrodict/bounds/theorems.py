"""The methods of `error_bound`: each evaluates one theorem, or declines with the reason.

The methods are those of Theorems 1, 3, 4 and 5. Theorem 2, which replaces Proposition 3.1 of the
paper, is evaluated on finite spaces: `finite/bounds.py`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import Scalar
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import AbstractFunctional
from retrodict._model import AbstractLinearGaussianKernel, Series, StateSpaceModel
from retrodict.bounds import contributions, distances, grid_bounds, lipschitz, wasserstein
from retrodict.bounds import curvature as curved
from retrodict.bounds.comparison import (
    DEVIATIONS,
    Basis,
    Comparison,
    Declined,
    Gap,
    grid_words,
    refuse_misfit,
    require,
)
from retrodict.particles import ParticlePosterior, ffbsi, status_words, tempered_smoother

CLOSED_FORM = "exact: the posterior of a linear-Gaussian model in closed form"


class BoundValue(NamedTuple):
    """The result of one method; fields as in `ErrorBound`."""

    value: Scalar
    per_step: Float[Array, "time"]
    rests_on: str
    basis: Basis = "closed form"
    error: PyTree = None
    standard_error: Scalar | float = 0.0


def _largest_error(
    comparison: Comparison,
    by_time: Float[Array, "time entry"],
    rests_on: str,
    basis: Basis = "closed form",
    standard_errors: Float[Array, "entry"] | None = None,
) -> BoundValue:
    """Return the largest absolute error of an entry, its contributions, and all signed errors."""
    errors = jnp.sum(by_time, axis=0)
    entry = jnp.argmax(jnp.abs(errors))
    x = jnp.zeros(comparison.chain.state_dim, comparison.series.ys.dtype)
    row = jax.tree.map(lambda leaf: leaf[0], comparison.data)
    value = comparison.functional.initial(x, row)
    like = jax.tree.map(lambda leaf: jnp.asarray(leaf, x.dtype), value)
    return BoundValue(
        jnp.abs(errors[entry]),
        by_time[:, entry],
        rests_on,
        basis,
        error=ravel_pytree(like)[1](errors),
        standard_error=0.0 if standard_errors is None else standard_errors[entry],
    )


def exact(comparison: Comparison) -> BoundValue:
    """Compute the error itself, in closed form or on a grid."""
    functional, chain = comparison.one_functional(), comparison.linear_chain()
    quadratic, data = contributions.is_quadratic(functional), comparison.data
    if comparison.linear_gaussian and quadratic:
        approximate = contributions.in_closed_form(chain, functional, data)
        truth = contributions.in_closed_form(comparison.exact.chain, functional, data)
        words = "exact: both expectations in closed form"
        return _largest_error(comparison, approximate - truth, words)
    grid = comparison.need_grid("there is no closed form and no grid to compute the error with")
    if not quadratic:
        return _exact_by_cells(comparison, functional, grid)
    approximate = contributions.in_closed_form(chain, functional, data)
    truth = contributions.on_grid(grid, functional, data)
    return _largest_error(comparison, approximate - truth, grid_words(grid), "grid")


def _exact_by_cells(
    comparison: Comparison, functional: AbstractFunctional, grid: GridPosterior
) -> BoundValue:
    """Compute the error of any functional of single states, by both laws on a grid.

    A function with jumps is averaged over the cell of each point. The change of the error through
    this averaging measures the variation of the function within cells, and is added to the value.
    """
    pairs = contributions.has_pairs(functional)
    require(not pairs, "the functional depends on pairs of states and is not quadratic")
    weights, misfit = grid_bounds.marginals_on(grid.grid, comparison.linear_chain())
    refuse_misfit(misfit)
    shifts = jnp.asarray(grid_bounds.within_cell(grid.grid), grid.points.dtype)

    def errors(shifts: Float[Array, "shift state"]) -> Array:
        values = sum(
            contributions.values_at_points(
                functional, grid.points + shift[None], comparison.data, comparison.num_times
            )
            for shift in shifts
        )
        mean = jnp.asarray(values) / len(shifts)
        return jnp.einsum("tp,tpe->te", weights - grid.weights, mean, precision="highest")

    averaged, plain = errors(shifts), errors(jnp.zeros_like(shifts[:1]))
    moved = jnp.max(jnp.abs(jnp.sum(averaged - plain, axis=0)))
    words = f"{grid_words(grid)}; values within cells of the grid move it by {float(moved):.1e}"
    largest = _largest_error(comparison, averaged, words, "grid")
    return largest._replace(value=largest.value + moved)


def _sum_of(per_step: Float[Array, "time"], rests_on: str, basis: Basis) -> BoundValue:
    return BoundValue(jnp.sum(per_step), per_step, rests_on, basis)


def wasserstein_phi(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 4, Wφ: the variational kernels under the exact marginals."""
    chain, sensitivity = comparison.linear_chain(), comparison.sensitivity()
    if comparison.linear_gaussian:
        per_step = wasserstein.phi(chain, comparison.exact, sensitivity, comparison.window)
        return _sum_of(per_step, CLOSED_FORM, "closed form")
    grid = comparison.need_grid(
        "the exact marginals are not known: pass a GridPosterior as reference"
    )
    if comparison.pairs:
        steps, _ = comparison.kernel_distances
    else:
        steps, misfit = grid_bounds.marginal_distances(chain, grid)
        refuse_misfit(misfit)
    gains, window = chain.kernels.weight, comparison.window
    per_step = lipschitz.transport_terms(steps, gains, sensitivity, window)
    return _sum_of(per_step, grid_words(grid), "grid")


def wasserstein_by(terms: Callable[..., Array]) -> Callable[[Comparison], BoundValue]:
    """Return the method of a bound of Theorem 4 that needs a linear-Gaussian model."""

    def evaluate(comparison: Comparison) -> BoundValue:
        constants = comparison.lipschitz_in_single_states()
        per_step = terms(comparison.linear_chain(), comparison.exact, constants, comparison.window)
        return _sum_of(per_step, CLOSED_FORM, "closed form")

    return evaluate


def _curvature(comparison: Comparison) -> tuple[curved.Curvature, Float[Array, "time"]]:
    """Compute K₀, and the terms of the largest variance of a functional under it."""
    sensitivity = comparison.sensitivity().whole()
    model, series = comparison.model, comparison.series
    reason, mask = curved.why_unknown(model), series.mask
    require(reason is None, f"the model is not known to be log-concave: {reason}")
    declared = not isinstance(model.emission, AbstractLinearGaussianKernel)
    whole_rows = mask is None or bool(jnp.all(jnp.any(mask, 1) == jnp.all(mask, 1)))
    words = "curvature is declared for whole rows, and some were observed in part"
    require(whole_rows or not declared, words)
    curvature = curved.curvature(model, series)
    words = "the curvature bound K₀ is not positive definite: declare a larger one"
    require(curvature.definite, words)
    if declared:
        excess, time = curved.least_excess(model, series, comparison.paths[:100])
        if float(excess) < -1e-6:
            raise ValueError(
                "The emission declares more curvature than it has: at time"
                f" {int(time)} −∇² log g is below the declared matrix at a state that the chain"
                " draws. Declare less, or nothing."
            )
    return curvature, curvature.largest_variance(sensitivity, comparison.window)


def score(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 5 without the posterior, √(v E_q[sᵀ K₀⁻¹ s]), s = ∇ log q − ∇ log p."""
    comparison.refuse_singular()
    curvature, variances = _curvature(comparison)
    terms = score_terms(
        comparison.model, comparison.chain, comparison.series, curvature, comparison.paths
    )
    forms = jnp.sum(terms, axis=1)
    error = jnp.std(forms, ddof=1) / math.sqrt(forms.shape[0])
    mean, variance = jnp.mean(forms), jnp.sum(variances)
    value = jnp.sqrt(variance * (mean + DEVIATIONS * error))
    positive = jnp.where(mean > 0, mean, 1.0)
    declared = "" if comparison.linear_gaussian else " and the curvature that the emission declares"
    return BoundValue(
        value,
        value * jnp.mean(terms, axis=0) / positive,
        f"truth-free: the model's densities alone{declared}; {comparison.sampling_words}",
        "samples",
        standard_error=0.5 * jnp.sqrt(variance / positive) * error,
    )


@eqx.filter_jit
def score_terms(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    series: Series,
    curvature: curved.Curvature,
    paths: Float[Array, "sample time state"],
) -> Float[Array, "sample time"]:
    """Return the terms of sᵀ K₀⁻¹ s with s = ∇ log q − ∇ log p(·, y), along each path."""

    def difference(path: Array) -> Scalar:
        joint = model.log_joint(path, series.ys, **series.rows.options())
        return chain.log_prob(path) - joint

    return jax.lax.map(
        lambda path: curvature.quadratic_form(jax.grad(difference)(path)), paths, batch_size=50
    )


def elbo_gap(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 5 with a known evidence, √(2 v (log p(y) − ELBO))."""
    gap = comparison.gap
    _, variances = _curvature(comparison)
    return _from_gap(gap, variances)


def total_variation(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 1, S2φ, on the box of a grid."""
    oscillations = comparison.oscillations()
    _, variations = comparison.kernel_distances
    grid = comparison.need_grid("it needs a GridPosterior as reference")
    per_step = grid_bounds.total_variation(
        comparison.linear_chain(), grid.grid, variations, oscillations, comparison.pairs
    )
    return _sum_of(per_step, f"{grid_words(grid)}; for states inside the box", "grid")


def hoeffding(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 3, √(½ (log p(y) − ELBO) Σ_j D_j²), with the ranges D_j on a grid."""
    comparison.oscillations()
    functional = comparison.one_functional()
    grid = comparison.need_grid("the ranges of its increments are computed on a GridPosterior")
    pairs = contributions.has_pairs(functional)
    require(not pairs, "the functional depends on pairs of states")
    _, misfit = grid_bounds.marginals_on(grid.grid, comparison.linear_chain())
    refuse_misfit(misfit)
    gap = comparison.gap
    values = contributions.values_at_points(
        functional, grid.points, comparison.data, comparison.num_times
    )
    entries = [grid_bounds.ranges(grid, values[:, :, i]) for i in range(values.shape[2])]
    squares = jnp.max(jnp.stack(entries), axis=0) ** 2
    if gap.basis == "closed form":
        # The ranges are computed on the grid all the same.
        gap = gap._replace(rests_on=f"{gap.rests_on}; ranges {grid_words(grid)}", basis="grid")
    gap = gap._replace(rests_on=f"{gap.rests_on}; for states inside the box")
    return _from_gap(gap, 0.25 * squares)


def pinsker(comparison: Comparison) -> BoundValue:
    """Evaluate Pinsker's bound: the oscillation of the functional times √(½ (log p(y) − ELBO))."""
    oscillations = comparison.oscillations()
    return _from_gap(comparison.gap, 0.25 * oscillations * jnp.sum(oscillations))


def _from_gap(gap: Gap, variances: Array) -> BoundValue:
    """Return √(2 v KL) with the terms of a sub-Gaussian variance proxy v."""
    variance = jnp.sum(variances)
    upper = jnp.maximum(gap.value + DEVIATIONS * gap.error, 0.0)
    value = jnp.sqrt(2 * variance * upper)
    slope = jnp.sqrt(0.5 * variance / jnp.where(upper > 0, upper, 1.0))
    shares = variances / jnp.where(variance > 0, variance, 1.0)
    error = slope * gap.error
    return BoundValue(value, value * shares, gap.rests_on, gap.basis, standard_error=error)


def estimate_by_particles(comparison: Comparison) -> BoundValue:
    """Estimate the error against the paths of a particle smoother."""
    particles, name = _particles(comparison)
    words = f"estimated by {name} with {particles.samples.shape[0]} paths, so not a bound"
    if isinstance(comparison.functional, AbstractFunctional):
        return _estimated_error(comparison, particles, words)
    chain, constants = comparison.linear_chain(), comparison.lipschitz_in_single_states()
    key = comparison.draw_key(3, "it draws from the backward kernels: pass key=jax.random.key(0)")
    paths = particles.samples[:, : comparison.num_times]
    u = lipschitz.lipschitz_sums(chain.kernels.weight, constants, comparison.window)
    per_step = _marginal_distances(chain, paths, key) * u
    if comparison.chain.state_dim > 1:
        words = f"{words}; distances are those of Gaussian laws with the same moments"
    return _sum_of(per_step, words, "particles")


def _particles(comparison: Comparison) -> tuple[ParticlePosterior, str]:
    """Return paths of a particle smoother that did not fail; decline if there are none.

    Where a bootstrap filter fails or degenerates, a tempered one replaces it.
    """
    particles, name = comparison.reference, "FFBSi"
    if not isinstance(particles, ParticlePosterior):
        words = "it runs a particle smoother: pass key=jax.random.key(0), or paths"
        key, count = comparison.draw_key(2, words), comparison.num_samples
        model, series = comparison.model, comparison.series
        particles = ffbsi(key, model, series.ys, count, strict=False, **comparison.options)
        if int(particles.status) != 0:
            particles = tempered_smoother(key, model, series, count)
            name = "FFBSi with tempered particles"
    if int(particles.status) != 0:
        reason = status_words(particles.status, particles.status_time)
        raise Declined(f"the particle smoother failed: {reason}")
    return particles, name


def _estimated_error(
    comparison: Comparison, particles: ParticlePosterior, words: str
) -> BoundValue:
    functional, data, n = comparison.functional, comparison.data, comparison.num_times
    truth = jnp.mean(contributions.along_paths(functional, particles.samples[:, :n], data), axis=0)
    # A reference with padding expects rows of data for it, which do not count.
    extra = particles.samples.shape[1] - n
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[-1:].repeat(extra, 0)]), data)
    errors = ravel_pytree(particles.expectation(functional, padded)[1])[0]
    if contributions.is_quadratic(functional) and isinstance(comparison.chain, LinearGaussianChain):
        approximate = contributions.in_closed_form(comparison.chain, functional, data)
    else:
        along = contributions.along_paths(functional, comparison.paths, data)
        approximate = jnp.mean(along, axis=0)
        chain_errors = jnp.std(jnp.sum(along, axis=1), axis=0, ddof=1) / math.sqrt(along.shape[0])
        errors = jnp.sqrt(errors**2 + chain_errors**2)
    return _largest_error(comparison, approximate - truth, words, "particles", errors)


@eqx.filter_jit
def _marginal_distances(
    chain: LinearGaussianChain, paths: Float[Array, "sample time state"], key: Any
) -> Float[Array, "time"]:
    """Return the distances of Wφ with paths for the exact marginals; noise makes them larger."""
    noise = jax.random.normal(key, paths.shape, paths.dtype)

    def distance(xs: Array, zs: Array) -> Array:
        if xs.shape[1] == 1:
            return distances.empirical_distance(xs[:, 0], zs[:, 0])
        return distances.gaussian_distance(
            distances.sample_moments(xs), distances.sample_moments(zs)
        )

    def step(row: tuple) -> Array:
        kernel, later, earlier, e = row
        moved = later @ kernel.weight.T + kernel.bias[None] + e @ kernel.scale_tril.T
        return distance(moved, earlier)

    by_time, noise = jnp.swapaxes(paths, 0, 1), jnp.swapaxes(noise, 0, 1)
    steps = jax.lax.map(step, (chain.kernels, by_time[1:], by_time[:-1], noise[:-1]))
    last = chain.terminal
    ends = last.mean[None] + noise[-1] @ last.scale_tril.T
    return jnp.append(steps, distance(ends, by_time[-1]))
