"""The methods: each turns a problem into a bound, or declines with the reason."""

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
from retrodict.bounds import on_grid, wasserstein
from retrodict.bounds.by_time import closed_form_by_time, grid_by_time, has_pairs, values_on
from retrodict.bounds.problem import (
    DEVIATIONS,
    Basis,
    Declined,
    Gap,
    Problem,
    grid_words,
    refuse_misfit,
)


class Found(NamedTuple):
    """What one method gives."""

    value: Scalar
    per_step: Float[Array, "time"]
    rests_on: str
    basis: Basis = "closed form"
    error: PyTree = None
    standard_error: Scalar | float = 0.0


def largest(by_time: Float[Array, "time entry"], like: PyTree) -> tuple[Scalar, Array, PyTree]:
    """The largest error of an entry, what each time adds to it, and the errors of all entries."""
    errors = jnp.sum(by_time, axis=0)
    entry = jnp.argmax(jnp.abs(errors))
    return jnp.abs(errors[entry]), by_time[:, entry], ravel_pytree(like)[1](errors)


def exact(problem: Problem) -> Found:
    """The error itself: by closed forms, or on a grid."""
    functional, chain = problem.one_functional(), problem.linear_chain()
    quadratic = all(term.quadratic for term in functional.terms())
    x = jnp.zeros(problem.chain.state_dim, problem.series.ys.dtype)
    row = jax.tree.map(lambda leaf: leaf[0], problem.data)
    like = jax.tree.map(lambda v: jnp.asarray(v, x.dtype), functional.initial(x, row))
    if problem.linear_gaussian and quadratic:
        ours = closed_form_by_time(chain, functional, problem.data)
        exact = closed_form_by_time(problem.exact().chain, functional, problem.data)
        value, per_step, error = largest(ours - exact, like)
        return Found(value, per_step, "exact: both expectations in closed form", error=error)
    if problem.grid is None:
        raise Declined("there is no closed form and no grid to compute the error with")
    if quadratic:
        ours = closed_form_by_time(chain, functional, problem.data)
    elif has_pairs(functional):
        raise Declined("the functional looks at pairs of states and is not quadratic")
    else:
        return _exact_by_cells(problem, functional, chain, like)
    exact = grid_by_time(problem.grid, functional, problem.data)
    value, per_step, error = largest(ours - exact, like)
    return Found(value, per_step, grid_words(problem.grid), "grid", error)


def _exact_by_cells(problem: Problem, functional: Any, chain: Any, like: PyTree) -> Found:
    """The error of any functional of single states, by both laws at the points of a grid.

    A function with jumps is averaged over the cell of each point. How much that moves the error is
    how far the function's own variation within cells may matter, and is added to the value.
    """
    grid: Any = problem.grid
    weights, misfit = on_grid.marginals_on(grid.grid, chain)
    refuse_misfit(misfit)
    difference = weights - grid.weights

    def errors(shifts: Float[Array, "shift state"]) -> Array:
        tables = [
            values_on(functional, grid.points + shift[None], problem.data, problem.num_times)
            for shift in shifts
        ]
        return jnp.einsum("tp,tpe->te", difference, sum(tables) / len(tables), precision="highest")

    averaged = errors(jnp.asarray(on_grid.within_cell(grid.grid), grid.points.dtype))
    plain = errors(jnp.zeros((1, grid.grid.dim), grid.points.dtype))
    value, per_step, error = largest(averaged, like)
    moved = jnp.max(jnp.abs(jnp.sum(averaged - plain, axis=0)))
    words = f"{grid_words(grid)}; values within cells of the grid move it by {float(moved):.1e}"
    return Found(value + moved, per_step, words, "grid", error)


def wasserstein_phi(problem: Problem) -> Found:
    """Theorem 4, Wφ: the variational kernels under the exact marginals."""
    chain, sensitivity = problem.linear_chain(), problem.sensitivity()
    basis: Basis = "closed form"
    if problem.linear_gaussian:
        per_step = wasserstein.phi(chain, problem.exact(), sensitivity, problem.window)
        words = "exact: the posterior of a linear-Gaussian model in closed form"
    elif problem.grid is None:
        raise Declined("the exact marginals are not known: pass a GridPosterior as reference")
    else:
        words, basis = grid_words(problem.grid), "grid"
        if problem.later.before > 0:
            moves, _ = problem.kernel_distances()
            per_step = on_grid.phi_of_pairs(chain, moves, sensitivity, problem.window)
        else:
            per_step, misfit = on_grid.phi(chain, problem.grid, sensitivity, problem.window)
            refuse_misfit(misfit)
    return Found(jnp.sum(per_step), per_step, words, basis)


def by_reference(bound: Callable[..., Array]) -> Callable[[Problem], Found]:
    """A bound of Theorem 4 that needs the exact chain of a linear-Gaussian model."""

    def attempt(problem: Problem) -> Found:
        lipschitz = problem.lipschitz_in_single_states()
        per_step = bound(problem.linear_chain(), problem.exact(), lipschitz, problem.window)
        words = "exact: the posterior of a linear-Gaussian model in closed form"
        return Found(jnp.sum(per_step), per_step, words)

    return attempt


def _curvature(problem: Problem) -> tuple[curved.Curvature, Float[Array, "time"]]:
    """K₀, and the terms of the largest variance of a functional under it."""
    whole = problem.sensitivity().whole()
    reason = curved.why_unknown(problem.model)
    if reason is not None:
        raise Declined(f"the model is not known to be log-concave: {reason}")
    mask = problem.series.mask
    declared = not isinstance(problem.model.emission, AbstractLinearGaussianKernel)
    if declared and mask is not None and bool(jnp.any(jnp.any(mask, 1) != jnp.all(mask, 1))):
        raise Declined("curvature is declared for whole rows, and some were seen in part")
    found = curved.curvature(problem.model, problem.series)
    if not bool(found.definite):
        raise Declined("the curvature bound K₀ is not positive definite: declare more, if there is")
    if declared:
        _, paths = problem.draw()
        excess, time = curved.least_excess(problem.model, problem.series, paths[:100])
        if float(excess) < -1e-6:
            raise ValueError(
                "The emission declares more curvature than it has: at time"
                f" {int(time)} −∇² log g is below the declared matrix at a state that the chain"
                " holds for possible. Declare less, or nothing."
            )
    return found, found.largest_variance(whole, problem.window)


def score(problem: Problem) -> Found:
    """Theorem 5 without truth: √(v E_q[sᵀ K₀⁻¹ s]) with s = ∇ log q − ∇ log p(·, y)."""
    problem.refuse_singular()
    found, variances = _curvature(problem)
    _, paths = problem.draw()
    terms = score_terms(problem.model, problem.chain, problem.series, found, paths)
    forms = jnp.sum(terms, axis=1)
    error = jnp.std(forms, ddof=1) / math.sqrt(forms.shape[0])
    mean, variance = jnp.mean(forms), jnp.sum(variances)
    value = jnp.sqrt(variance * (mean + DEVIATIONS * error))
    shares = jnp.mean(terms, axis=0) / jnp.where(mean > 0, mean, 1.0)
    declared = "" if problem.linear_gaussian else " and the curvature that the emission declares"
    return Found(
        value,
        value * shares,
        f"truth-free: the model's densities alone{declared}; {problem.sampling_words()}",
        "samples",
        standard_error=0.5 * jnp.sqrt(variance / jnp.where(mean > 0, mean, 1.0)) * error,
    )


@eqx.filter_jit
def score_terms(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    series: Series,
    found: curved.Curvature,
    paths: Float[Array, "sample time state"],
) -> Float[Array, "sample time"]:
    """The terms of sᵀ K₀⁻¹ s with s = ∇ log q − ∇ log p(·, y), along each path."""

    def difference(path: Array) -> Scalar:
        joint = model.log_joint(
            path, series.ys, mask=True if series.mask is None else series.mask, inputs=series.inputs
        )
        return chain.log_prob(path) - joint

    return jax.lax.map(
        lambda path: found.quadratic_form(jax.grad(difference)(path)), paths, batch_size=50
    )


def elbo_gap(problem: Problem) -> Found:
    """Theorem 5 with a known evidence: √(2 v (log p(y) − ELBO))."""
    gap = problem.gap()
    _, variances = _curvature(problem)
    return _from_gap(gap, variances)


def total_variation(problem: Problem) -> Found:
    """Theorem 1, S2φ, on the box of a grid."""
    oscillations, grid = problem.oscillations(), problem.grid
    _, variations = problem.kernel_distances()
    if grid is None:
        raise Declined("it needs a GridPosterior as reference")
    chain = problem.linear_chain()
    per_step = on_grid.total_variation(
        chain, grid.grid, variations, oscillations, problem.later.before > 0
    )
    words = f"{grid_words(grid)}; for states inside the box"
    return Found(jnp.sum(per_step), per_step, words, "grid")


def hoeffding(problem: Problem) -> Found:
    """Theorem 3: √(½ (log p(y) − ELBO) Σ_j D_j²) with the ranges D_j on a grid."""
    problem.oscillations()
    functional, grid = problem.one_functional(), problem.grid
    if grid is None:
        raise Declined("the ranges of its increments are computed on a GridPosterior")
    if has_pairs(functional):
        raise Declined("the functional looks at pairs of states")
    _, misfit = on_grid.marginals_on(grid.grid, problem.linear_chain())
    refuse_misfit(misfit)
    gap = problem.gap()
    values = values_on(functional, grid.points, problem.data, problem.num_times)
    entries = [on_grid.ranges(grid, values[:, :, i]) for i in range(values.shape[2])]
    squares = jnp.max(jnp.stack(entries), axis=0) ** 2
    if gap.basis == "closed form":
        # The ranges are computed on the grid all the same.
        gap = gap._replace(rests_on=f"{gap.rests_on}; ranges {grid_words(grid)}", basis="grid")
    gap = gap._replace(rests_on=f"{gap.rests_on}; for states inside the box")
    return _from_gap(gap, 0.25 * squares)


def pinsker(problem: Problem) -> Found:
    """Pinsker: the oscillation of the whole functional times √(½ (log p(y) − ELBO))."""
    oscillations = problem.oscillations()
    return _from_gap(problem.gap(), 0.25 * oscillations * jnp.sum(oscillations))


def _from_gap(gap: Gap, variances: Array) -> Found:
    """√(2 v KL) with the terms of a sub-Gaussian variance proxy v."""
    variance = jnp.sum(variances)
    upper = jnp.maximum(gap.value + DEVIATIONS * gap.error, 0.0)
    value = jnp.sqrt(2 * variance * upper)
    slope = jnp.sqrt(0.5 * variance / jnp.where(upper > 0, upper, 1.0))
    shares = variances / jnp.where(variance > 0, variance, 1.0)
    error = slope * gap.error
    return Found(value, value * shares, gap.rests_on, gap.basis, standard_error=error)
