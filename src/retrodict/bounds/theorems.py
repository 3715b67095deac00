"""The methods of `error_bound`: each evaluates one theorem, or declines with the reason."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from retrodict._chains import AbstractBackwardChain
from retrodict._kernels import AbstractLinearGaussianKernel
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._types import Scalar
from retrodict.bounds import curvature as curved
from retrodict.bounds import grid_bounds, wasserstein
from retrodict.bounds.comparison import (
    DEVIATIONS,
    Basis,
    Comparison,
    Declined,
    Gap,
    grid_words,
    refuse_misfit,
)
from retrodict.bounds.contributions import (
    closed_form_contributions,
    grid_contributions,
    has_pairs,
    values_at_points,
)

CLOSED_FORM = "exact: the posterior of a linear-Gaussian model in closed form"


class BoundValue(NamedTuple):
    """The result of one method; fields as in `ErrorBound`."""

    value: Scalar
    per_step: Float[Array, "time"]
    rests_on: str
    basis: Basis = "closed form"
    error: PyTree = None
    standard_error: Scalar | float = 0.0


def largest_error(by_time: Float[Array, "time entry"], like: PyTree) -> dict[str, Any]:
    """Return the largest absolute error of an entry, its contributions, and all signed errors."""
    errors = jnp.sum(by_time, axis=0)
    entry = jnp.argmax(jnp.abs(errors))
    return {
        "value": jnp.abs(errors[entry]),
        "per_step": by_time[:, entry],
        "error": ravel_pytree(like)[1](errors),
    }


def example_value(comparison: Comparison) -> PyTree:
    """Return a value of the functional, for its structure."""
    x = jnp.zeros(comparison.chain.state_dim, comparison.series.ys.dtype)
    row = jax.tree.map(lambda leaf: leaf[0], comparison.data)
    value = comparison.functional.initial(x, row)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, x.dtype), value)


def exact(comparison: Comparison) -> BoundValue:
    """Compute the error itself, in closed form or on a grid."""
    functional, chain = comparison.one_functional(), comparison.linear_chain()
    quadratic = all(term.quadratic for term in functional.terms())
    grid, data = comparison.grid, comparison.data
    if comparison.linear_gaussian and quadratic:
        approximate = closed_form_contributions(chain, functional, data)
        truth = closed_form_contributions(comparison.exact.chain, functional, data)
        errors = largest_error(approximate - truth, example_value(comparison))
        return BoundValue(rests_on="exact: both expectations in closed form", **errors)
    if grid is None:
        raise Declined("there is no closed form and no grid to compute the error with")
    if not quadratic:
        return _exact_by_cells(comparison)
    approximate = closed_form_contributions(chain, functional, data)
    truth = grid_contributions(grid, functional, data)
    errors = largest_error(approximate - truth, example_value(comparison))
    return BoundValue(rests_on=grid_words(grid), basis="grid", **errors)


def _exact_by_cells(comparison: Comparison) -> BoundValue:
    """Compute the error of any functional of single states, by both laws on a grid.

    A function with jumps is averaged over the cell of each point. The change of the error through
    this averaging measures the variation of the function within cells, and is added to the value.
    """
    grid: Any = comparison.grid
    functional = comparison.one_functional()
    if has_pairs(functional):
        raise Declined("the functional depends on pairs of states and is not quadratic")
    weights, misfit = grid_bounds.marginals_on(grid.grid, comparison.linear_chain())
    refuse_misfit(misfit)
    difference = weights - grid.weights

    def errors(shifts: Float[Array, "shift state"]) -> Array:
        tables = [
            values_at_points(
                functional, grid.points + shift[None], comparison.data, comparison.num_times
            )
            for shift in shifts
        ]
        return jnp.einsum("tp,tpe->te", difference, sum(tables) / len(tables), precision="highest")

    averaged = errors(jnp.asarray(grid_bounds.within_cell(grid.grid), grid.points.dtype))
    plain = errors(jnp.zeros((1, grid.grid.dim), grid.points.dtype))
    largest = largest_error(averaged, example_value(comparison))
    moved = jnp.max(jnp.abs(jnp.sum(averaged - plain, axis=0)))
    words = f"{grid_words(grid)}; values within cells of the grid move it by {float(moved):.1e}"
    largest["value"] += moved
    return BoundValue(rests_on=words, basis="grid", **largest)


def _sum_of(per_step: Float[Array, "time"], rests_on: str, basis: Basis) -> BoundValue:
    return BoundValue(jnp.sum(per_step), per_step, rests_on, basis)


def wasserstein_phi(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 4, Wφ: the variational kernels under the exact marginals."""
    chain, sensitivity = comparison.linear_chain(), comparison.sensitivity()
    grid, window = comparison.grid, comparison.window
    if comparison.linear_gaussian:
        per_step = wasserstein.phi(chain, comparison.exact, sensitivity, window)
        return _sum_of(per_step, CLOSED_FORM, "closed form")
    if grid is None:
        raise Declined("the exact marginals are not known: pass a GridPosterior as reference")
    if comparison.pairs:
        moves, _ = comparison.kernel_distances
        per_step = grid_bounds.phi_of_pairs(chain, moves, sensitivity, window)
    else:
        per_step, misfit = grid_bounds.phi(chain, grid, sensitivity, window)
        refuse_misfit(misfit)
    return _sum_of(per_step, grid_words(grid), "grid")


def wasserstein_by(terms: Callable[..., Array]) -> Callable[[Comparison], BoundValue]:
    """Return the method of a bound of Theorem 4 that needs a linear-Gaussian model."""

    def evaluate(comparison: Comparison) -> BoundValue:
        lipschitz = comparison.lipschitz_in_single_states()
        per_step = terms(comparison.linear_chain(), comparison.exact, lipschitz, comparison.window)
        return _sum_of(per_step, CLOSED_FORM, "closed form")

    return evaluate


def _curvature(comparison: Comparison) -> tuple[curved.Curvature, Float[Array, "time"]]:
    """Compute K₀, and the terms of the largest variance of a functional under it."""
    whole = comparison.sensitivity().whole()
    model, series = comparison.model, comparison.series
    reason = curved.why_unknown(model)
    if reason is not None:
        raise Declined(f"the model is not known to be log-concave: {reason}")
    mask = series.mask
    declared = not isinstance(model.emission, AbstractLinearGaussianKernel)
    if declared and mask is not None and bool(jnp.any(jnp.any(mask, 1) != jnp.all(mask, 1))):
        raise Declined("curvature is declared for whole rows, and some were observed in part")
    curvature = curved.curvature(model, series)
    if not bool(curvature.definite):
        raise Declined("the curvature bound K₀ is not positive definite: declare a larger one")
    if declared:
        excess, time = curved.least_excess(model, series, comparison.paths[:100])
        if float(excess) < -1e-6:
            raise ValueError(
                "The emission declares more curvature than it has: at time"
                f" {int(time)} −∇² log g is below the declared matrix at a state that the chain"
                " draws. Declare less, or nothing."
            )
    return curvature, curvature.largest_variance(whole, comparison.window)


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
        joint = model.log_joint(
            path, series.ys, mask=True if series.mask is None else series.mask, inputs=series.inputs
        )
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
    oscillations, grid = comparison.oscillations(), comparison.grid
    _, variations = comparison.kernel_distances
    if grid is None:
        raise Declined("it needs a GridPosterior as reference")
    per_step = grid_bounds.total_variation(
        comparison.linear_chain(), grid.grid, variations, oscillations, comparison.pairs
    )
    return _sum_of(per_step, f"{grid_words(grid)}; for states inside the box", "grid")


def hoeffding(comparison: Comparison) -> BoundValue:
    """Evaluate Theorem 3, √(½ (log p(y) − ELBO) Σ_j D_j²), with the ranges D_j on a grid."""
    comparison.oscillations()
    functional, grid = comparison.one_functional(), comparison.grid
    if grid is None:
        raise Declined("the ranges of its increments are computed on a GridPosterior")
    if has_pairs(functional):
        raise Declined("the functional depends on pairs of states")
    _, misfit = grid_bounds.marginals_on(grid.grid, comparison.linear_chain())
    refuse_misfit(misfit)
    gap = comparison.gap
    values = values_at_points(functional, grid.points, comparison.data, comparison.num_times)
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
