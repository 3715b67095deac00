"""The grid smoother: a forward and a backward pass on a grid, and their diagnosis."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar, is_concrete
from retrodict._exact.grid.diagnosis import Diagnostics, ErrorEstimate, judge
from retrodict._exact.grid.mesh import Grid
from retrodict._exact.grid.posterior import GridPosterior, Held
from retrodict._exact.grid.transition import (
    Kind,
    correction,
    kind_of,
    map_rows,
    operators,
    product,
    refuse_without_density,
)
from retrodict._model import Series, StateSpaceModel, prepare_data, unwrap

SAFETY = 3.0
"""The factor from the difference between two grids to a bound on the error of the finer one.

With an error C h^p and a comparison at spacing 4h/3, the difference is ((4/3)^p - 1) C h^p. This
is a third of the error for p = 1 and more for larger p.
"""

VALUES_PER_POINT = 256
"""The assumed number of values that an emission needs per point; it sets block sizes."""


class Passes(eqx.Module):
    """The output of the two passes over a series.

    Attributes:
        filter_weights: probabilities of x_k at the points given y_{0:k}.
        weights: probabilities of x_k at the points given the whole series.
        mean: smoothed means.
        covariance: smoothed covariances.
        increments: log p(y_k | y_{0:k-1}), zero for rows that do not exist.
        escaping: the shortfall below 1 of the row sums of the transition into k ≥ 1, averaged over
            the smoothing law at k-1, in row k-1.
        excess: the excess of the row sums over 1, averaged likewise.
    """

    filter_weights: Float[Array, "time point"]
    weights: Float[Array, "time point"]
    mean: Float[Array, "time state"]
    covariance: Float[Array, "time state state"]
    increments: Float[Array, "time"]
    escaping: Float[Array, "pair"]
    excess: Float[Array, "pair"]


def grid_smoother(
    model: StateSpaceModel,
    ys: Any,
    grid: Grid,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    tolerance: float = 1e-4,
    throw: bool = True,
) -> GridPosterior:
    """Smooth a series on a grid of states, for any model with densities.

    The result is exact up to the discretisation error of the grid.

    The integrals of the filtering and smoothing recursions,

        p(x_k | y_{0:k-1}) = ∫ m(x_{k-1}, x_k) p(x_{k-1} | y_{0:k-1}) dx_{k-1},
        p(x_k | y_{0:k}) ∝ g(x_k, y_k) p(x_k | y_{0:k-1}),
        p(x_{k-1} | y) = p(x_{k-1} | y_{0:k-1})
            ∫ m(x_{k-1}, x_k) p(x_k | y) / p(x_k | y_{0:k-1}) dx_k

    are computed by the trapezoidal rule. For smooth densities its error decreases faster than any
    power of the spacing: a spacing below the smallest standard deviation of the posterior and of
    the transition gives at least six digits.

    Transitions are applied in blocks, so that memory stays at a few hundred MiB for any grid. In
    two dimensions a transition with independent coordinates (a `Diagonal` scale, or a distribution
    whose `log_prob` has shape `(state,)`) is applied as a matrix product, which is many times
    faster.

    A grid that does not cover the mass, or is too coarse, raises a `ValueError` with the remedy.
    Under `jax.jit` and `jax.vmap`, where values are not concrete, no error is raised. Call `check`
    on the result, which has a `status`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.3 * jnp.ones(1))),
        ... )
        >>> _, ys = model.simulate(jax.random.key(0), num_times=10)
        >>> oracle = rd.grid_smoother(model, ys, rd.Grid([-12.0], [12.0], 200))
        >>> oracle.mean.shape, oracle.covariance.shape, oracle.log_evidence.shape
        ((10, 1), (10, 1, 1), ())

    Args:
        model: a model with a state of dimension 1 or 2, whose transition has a density.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        grid: the points, over a box that contains the states at all times.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist. The other rows do not contribute and repeat the
            terminal law.
        tolerance: the largest mass of a posterior marginal allowed in the outer 2% of the box.
        throw: whether to raise an error for a grid that is not good enough.

    Returns:
        The posterior on the grid, with an estimate of its discretisation error.

    Raises:
        ValueError: if shapes do not match, or the grid does not cover the mass or is too coarse.
    """
    model = unwrap(model)
    check_grid(grid, model.state_dim, "ffbsi, or kalman_smoother if the model is linear Gaussian")
    series = prepare_data(model, ys, mask=mask, inputs=inputs, length=length)
    transition: Any = model.transition
    u = None if series.inputs is None else series.inputs[0]
    refuse_without_density(transition, 0.5 * (grid.lower + grid.upper), u)
    kinds = (kind_of(transition, grid, u), kind_of(transition, grid.coarser(), u))
    # An array, so that a different tolerance does not trigger a new compilation.
    posterior = _run(model, series, grid, kinds, jnp.asarray(tolerance, jnp.result_type(float)))
    if throw and is_concrete(posterior.status):
        posterior.check()
    return posterior


@eqx.filter_jit
def _run(
    model: StateSpaceModel, series: Series, grid: Grid, kinds: tuple[Kind, Kind], tolerance: Scalar
) -> GridPosterior:
    grid = _in_common_precision(model, series, grid)
    passes = _smooth(model, series, grid, kinds[0])
    rough = _smooth(model, series, grid.coarser(), kinds[1])
    first = jax.tree.map(lambda leaf: leaf[0], (series.ys, series.mask, series.inputs))
    outside = mass_outside(
        lambda points: log_prior(model, points) + log_emission(model, points, *first), grid
    )
    diagnostics = diagnose(passes, grid, outside)
    status, time = judge(passes.increments, diagnostics, tolerance)
    return GridPosterior(
        grid=grid,
        weights=passes.weights,
        filter_weights=passes.filter_weights,
        mean=passes.mean,
        covariance=passes.covariance,
        log_evidence=jnp.sum(passes.increments),
        log_evidence_increments=passes.increments,
        error=estimate_errors(passes, rough, diagnostics.boundary_mass, grid),
        diagnostics=diagnostics,
        status=status,
        status_time=time,
        inputs=series.inputs,
        length=series.length,
        transition=Held(model.transition),
        tolerance=tolerance,
        kind=kinds[0],
    )


def _in_common_precision(model: StateSpaceModel, series: Series, grid: Grid) -> Grid:
    """Return the grid in the widest data type of its corners, the observations and the prior."""
    density = jax.eval_shape(lambda x: jnp.asarray(model.prior.log_prob(x)), grid.lower)
    dtype = jnp.result_type(grid.lower.dtype, series.ys.dtype, density.dtype)
    return Grid(grid.lower.astype(dtype), grid.upper.astype(dtype), grid.num_points)


def check_grid(grid: Any, state_dim: int, others: str) -> None:
    """Refuse anything but a grid of the dimension of the state.

    Args:
        grid: the grid.
        state_dim: the dimension of the state.
        others: the smoothers to use for other dimensions.
    """
    if not isinstance(grid, Grid):
        raise TypeError(f"grid_smoother expects a Grid, got {type(grid).__name__}.")
    if state_dim not in (1, 2):
        raise ValueError(
            f"grid_smoother takes a state of dimension 1 or 2, got a model with state dimension"
            f" {state_dim}. Use {others}."
        )
    if grid.dim != state_dim:
        raise ValueError(
            f"The model has a state of dimension {state_dim}: `lower` and `upper` of the grid"
            f" must have shape ({state_dim},), got ({grid.dim},)."
        )


def _smooth(model: StateSpaceModel, series: Series, grid: Grid, kind: Kind) -> Passes:
    """Run the forward and the backward pass.

    Forward, with quadrature weights q_j at the points x_j and filter probabilities f,

        p_k(j) = Σ_i f_{k-1}(i) m(x_i, x_j),   f_k(j) = q_j p_k(j) g(x_j, y_k) / Z_k,

    and log Z_k is the increment of the log-evidence. Backward, with smoothing probabilities s,

        s_{k-1}(i) = f_{k-1}(i) Σ_j m(x_i, x_j) s_k(j) / p_k(j),

    which is the backward kernel f_{k-1}(i) m(x_i, x_j) / p_k(j) applied to s_k. Every column of
    that kernel sums to 1 on any grid, so that the backward pass loses no mass.
    """
    transition: Any = model.transition
    move = operators(transition, grid, kind)
    filter_weights, predicted, increments = _forward(model, series, grid, move)
    exists = series.exists()
    exists = jnp.ones(series.num_times, bool) if exists is None else exists

    def back(smoothed: Array, step: Any) -> tuple[Array, tuple[Array, Array, Array]]:
        before, density, u, real = step
        operator, rows = move(u)
        earlier = before * operator.pull(correction(smoothed, density))
        escaping = jnp.sum(earlier * jnp.maximum(1.0 - rows, 0.0))
        excess = jnp.sum(earlier * jnp.maximum(rows - 1.0, 0.0))
        earlier = jnp.where(real, earlier, smoothed)
        return earlier, (earlier, jnp.where(real, escaping, 0.0), jnp.where(real, excess, 0.0))

    later = None if series.inputs is None else series.inputs[1:]
    _, (weights, escaping, excess) = jax.lax.scan(
        back, filter_weights[-1], (filter_weights[:-1], predicted, later, exists[1:]), reverse=True
    )
    weights = jnp.concatenate([weights, filter_weights[-1:]])
    mean, covariance = moments_on_points(weights, grid.points)
    return Passes(filter_weights, weights, mean, covariance, increments, escaping, excess)


def _forward(
    model: StateSpaceModel, series: Series, grid: Grid, move: Callable
) -> tuple[Float[Array, "time point"], Float[Array, "pair point"], Float[Array, "time"]]:
    points, log_quadrature = grid.points, grid.log_quadrature

    def update(log_predicted: Array, row: Any) -> tuple[Array, Array]:
        log_joint = log_predicted + log_quadrature + log_emission(model, points, *row)
        peak = jax.lax.stop_gradient(jnp.max(log_joint))
        joint = jnp.exp(log_joint - peak)
        total = jnp.sum(joint)
        return joint / total, peak + jnp.log(total)

    def step(before: Array, row: Any) -> tuple[Array, tuple[Array, Array, Array]]:
        y, mask, u, real = row
        operator, _ = move(u)
        density = operator.push(before)
        # The gradient of the logarithm is infinite at zero: exclude such points.
        log_density = jnp.where(
            density > 0, jnp.log(jnp.where(density > 0, density, 1.0)), -jnp.inf
        )
        after, increment = update(log_density, (y, mask, u))
        if real is not None:
            after = jnp.where(real, after, before)
            increment = jnp.where(real, increment, 0.0)
        return after, (after, density, increment)

    rows = (series.ys, series.mask, series.inputs, series.exists())
    first = jax.tree.map(lambda leaf: leaf[0], rows[:3])
    initial, increment = update(log_prior(model, points), first)
    _, (weights, predicted, increments) = jax.lax.scan(
        step, initial, jax.tree.map(lambda leaf: leaf[1:], rows)
    )
    weights = jnp.concatenate([initial[None], weights])
    return weights, predicted, jnp.concatenate([increment[None], increments])


@eqx.filter_jit
def increments(
    model: StateSpaceModel, series: Series, grid: Grid, kind: Kind
) -> Float[Array, "time"]:
    """Return the increments of the log-evidence, by the forward pass alone."""
    transition: Any = model.transition
    return _forward(model, series, grid, operators(transition, grid, kind))[2]


def log_prior(model: StateSpaceModel, points: Array) -> Float[Array, "point"]:
    """Return the log density of the prior at the points."""
    return at_points(lambda x: jnp.sum(jnp.asarray(model.prior.log_prob(x))), points)


def log_emission(
    model: StateSpaceModel, points: Array, y: Array, mask: Array | None, u: Array | None
) -> Float[Array, "point"]:
    """Return the log density of the observed entries at one time, at the points."""
    emission: Any = model.emission
    return at_points(lambda x: emission.log_prob(x, y, u=u, mask=mask), points)


def at_points(fn: Callable[[Array], Array], points: Array) -> Float[Array, "point *values"]:
    """Return the values of a function at all points, a block of points at a time."""
    return map_rows(fn, points, VALUES_PER_POINT).astype(points.dtype)


def mass_outside(log_joint: Callable[[Array], Array], grid: Grid) -> Float[Array, ""]:
    """Return the fraction of p(x_0 | y_0) outside of the box, within a box three times as wide.

    Args:
        log_joint: a function of points to log p(x_0, y_0) at these points.
        grid: the grid.
    """
    wide, outside = grid.surroundings()
    log_mass = log_joint(wide.points) + wide.log_quadrature
    # Outside of the box a model may be undefined, for example the logarithm of a negative state.
    log_mass = jax.lax.stop_gradient(jnp.where(jnp.isfinite(log_mass), log_mass, -jnp.inf))
    mass = jnp.exp(log_mass - jnp.max(log_mass))
    return jnp.sum(jnp.where(outside, mass, 0.0)) / jnp.sum(mass)


def moments_on_points(
    weights: Float[Array, "time point"], points: Float[Array, "point state"]
) -> tuple[Float[Array, "time state"], Float[Array, "time state state"]]:
    """Return the means and covariances of laws on the points."""

    def of_one(law: Array) -> tuple[Array, Array]:
        mean = product(law, points)
        centred = points - mean[None, :]
        return mean, product((law[:, None] * centred).T, centred)

    return map_rows(of_one, weights, 3 * points.size)


def _resolution(weights: Float[Array, "time point"], grid: Grid) -> Float[Array, "time"]:
    """Return the smallest width of each law, as the standard deviation of a Gaussian in spacings.

    The overlap of a Gaussian of standard deviation σ with its copy shifted by one spacing h is
    c = Σ_j s_j s_{j+1} / Σ_j s_j² = exp(-h² / 4σ²), so that σ / h = ½ (-log c)^(-1/2). Unlike the
    standard deviation, the overlap detects narrow peaks that are far apart.
    """
    table = weights.reshape(-1, *grid.num_points)
    overlaps = []
    for axis in range(grid.dim):
        along = jnp.moveaxis(table, axis + 1, 1).reshape(table.shape[0], grid.num_points[axis], -1)
        overlaps.append(jnp.sum(along[:, 1:] * along[:, :-1], axis=(1, 2)))
    ratio = jnp.min(jnp.stack(overlaps), axis=0) / jnp.sum(weights**2, axis=1)
    limits = jnp.finfo(weights.dtype)
    return 0.5 / jnp.sqrt(-jnp.log(jnp.clip(ratio, limits.tiny, 1.0 - limits.eps)))


def diagnose(passes: Passes, grid: Grid, outside: Scalar) -> Diagnostics:
    """Measure how well the grid represents the posterior.

    Args:
        passes: the output of both passes.
        grid: the grid.
        outside: the fraction of p(x_0 | y_0) outside of the box.
    """
    edge = jnp.asarray(grid.at_edge, passes.weights.dtype)
    return Diagnostics(
        boundary_mass=jnp.sum(passes.weights * edge[None, :], axis=1),
        escaping_mass=jnp.concatenate([outside[None], passes.escaping]),
        transition_excess=jnp.pad(passes.excess, (1, 0)),
        resolution=_resolution(passes.weights, grid),
    )


def estimate_errors(
    fine: Passes, rough: Passes, boundary_mass: Float[Array, "time"], grid: Grid
) -> ErrorEstimate:
    """Estimate errors from a second run with three quarters of the points and the mass at the edge.

    For smooth densities the trapezoidal rule converges faster than any power of the spacing. The
    difference between both runs is then mostly the error of the coarser run. The estimate bounds
    the error of the finer run, with a margin that grows with its accuracy. The mass in the outer 2%
    of the box is a proxy for the mass outside of the box, which no grid in the box can measure.
    """
    width = grid.upper - grid.lower
    # Mass that is cut off at one time affects all other times.
    beyond = jnp.max(boundary_mass) * jnp.broadcast_to(width, fine.mean.shape)
    rounding = 8 * jnp.finfo(fine.mean.dtype).eps
    # The sign of the error alternates in time, and the difference is uninformative where it
    # changes sign. Absolute errors are therefore summed, or their maximum over time is used.
    evidence_error = (
        SAFETY * jnp.sum(jnp.abs(fine.increments - rough.increments))
        + jnp.sum(boundary_mass)
        + rounding * (1.0 + jnp.sum(jnp.abs(fine.increments)))
    )
    std = jnp.sqrt(jnp.diagonal(fine.covariance, axis1=1, axis2=2))
    stds = std[:, :, None] * std[:, None, :]
    shift = jnp.max(jnp.abs(fine.mean - rough.mean) / std, axis=0)
    stretch = jnp.max(jnp.abs(fine.covariance - rough.covariance) / stds, axis=0)
    size = jnp.maximum(jnp.abs(grid.lower), jnp.abs(grid.upper))
    mean_error = SAFETY * shift[None] * std + beyond + rounding * size[None, :]
    covariance_error = (
        SAFETY * stretch[None] * stds
        + beyond[:, :, None] * width[None, None, :]
        + rounding * (width[:, None] * width[None, :])[None]
    )
    worst = jnp.maximum(jnp.max(mean_error / std), jnp.max(covariance_error / stds))
    return ErrorEstimate(
        evidence_error, mean_error, covariance_error, jnp.maximum(evidence_error, worst)
    )
