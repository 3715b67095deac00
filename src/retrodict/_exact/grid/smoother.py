"""The grid smoother: the posterior of a model given a series, on a grid."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from retrodict._exact.grid.diagnosis import diagnose, estimate_errors, judge
from retrodict._exact.grid.mesh import Grid
from retrodict._exact.grid.posterior import GridPosterior, Held
from retrodict._exact.grid.recursion import mass_outside, smooth
from retrodict._exact.grid.transition import Kind, kind_of, refuse_without_density
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import Scalar
from retrodict._validate import is_concrete


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
    if not isinstance(grid, Grid):
        raise TypeError(f"grid_smoother expects a Grid, got {type(grid).__name__}.")
    _check_dimension(model, grid)
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
    passes = smooth(model, series, grid, kinds[0])
    rough = smooth(model, series, grid.coarser(), kinds[1])
    diagnostics = diagnose(passes, grid, mass_outside(model, series, grid))
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


def _check_dimension(model: StateSpaceModel, grid: Grid) -> None:
    if model.state_dim not in (1, 2):
        raise ValueError(
            f"grid_smoother takes a state of dimension 1 or 2, got a model with state dimension"
            f" {model.state_dim}. Use ffbsi, or kalman_smoother if the model is linear Gaussian."
        )
    if grid.dim != model.state_dim:
        raise ValueError(
            f"The model has a state of dimension {model.state_dim}: `lower` and `upper` of the grid"
            f" must have shape ({model.state_dim},), got ({grid.dim},)."
        )
