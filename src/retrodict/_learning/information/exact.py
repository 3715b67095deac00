"""The observed information from two derivatives of the log-evidence, and parameters at an edge.

The evidence is exact for a linear-Gaussian model, and exact up to a grid for one or two states.

A scale v that the data do not support converges to zero. A log-likelihood depends on its square,
log p(y) ≈ a − c v², so that its standard error is 1 / √(2c): v is at the edge if it is a small
fraction of that. In the coordinate log v, in which it is learned, both derivatives vanish as v²,
the inverse information diverges, and an interval would be unbounded.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import Scalar
from retrodict._exact import Grid, Kind, grid_smoother, increments, kind_of, log_evidence_of
from retrodict._learning.coordinates import ModelCoordinates
from retrodict._learning.information.result import Information
from retrodict._model import Series, StateSpaceModel, unwrap
from retrodict._numerics import UNROLLED, in_parts

Total: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""The sum of an array over all processes."""

Evidence: TypeAlias = Callable[[Any, Series], Scalar]
"""The log-evidence of an unwrapped model and a series."""

DIRECTIONS = 16
"""The number of directions in which a gradient is differentiated at once."""

SERIES_AT_ONCE = 8
"""The number of series that are differentiated at once."""

MANY = 500_000
"""A program is compiled with optimisation for at least this many rows times directions."""

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options for programs that run once: half the compilation time, and several times slower."""

FLAT = 0.02
"""The information in log v, 4cv², below which v is within 0.1 standard errors of zero."""

NEGLIGIBLE = 1e-3
"""The fraction of the spread of the data up to which a scale can be at the edge of zero."""

FAR_OUT = 5.0
"""The coordinate beyond which a logistic function is within a hundredth of its bounds."""


def exact_information(coordinates: ModelCoordinates, batch: Series, total: Total) -> Information:
    """Return the information of a linear-Gaussian model, summed over all processes."""
    spread, theta = _spread_of(batch, total), coordinates.theta()
    raised = _raised(np.asarray(theta, np.float64), coordinates, spread)
    sums = _two_derivatives(coordinates.moved(jnp.asarray(raised, theta.dtype)), batch)
    score, information = (total(np.asarray(each, float)) for each in sums)
    information = (information + information.T) / 2
    edges = _edges_of(coordinates, raised, score, information, spread)
    return Information(score, information, edges=edges)


def _two_derivatives(
    coordinates: ModelCoordinates, batch: Series
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    """Return the gradient of log p_θ(y), summed over the series, and minus its Hessian."""
    if not batch.ys.shape[0]:  # a process may hold no series
        theta = coordinates.theta()
        return jnp.zeros_like(theta), jnp.zeros((theta.size, theta.size), theta.dtype)
    work = batch.ys.shape[0] * batch.ys.shape[1] * len(coordinates.names)
    if jax.default_backend() == "cpu" and coordinates.model.state_dim > UNROLLED:
        return _by_differences(coordinates, batch, log_evidence_of)
    quick = work < MANY and jax.default_backend() == "cpu"
    return (_compiled_quickly if quick else _compiled)(coordinates, batch)


def _information(
    coordinates: ModelCoordinates, batch: Series
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    theta = coordinates.theta()

    def one(series: Series) -> tuple[Array, Array]:
        def log_evidence(theta: Array) -> Scalar:
            return log_evidence_of(unwrap(coordinates.model_at(theta)), series)

        def along(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(jax.grad(log_evidence), (theta,), (direction,))

        basis = jnp.eye(theta.shape[0], dtype=theta.dtype)
        gradients, columns = in_parts(along, basis, DIRECTIONS)
        return gradients[0], -columns

    scores, information = in_parts(one, batch, SERIES_AT_ONCE)
    return jnp.sum(scores, axis=0), jnp.sum(information, axis=0)


_compiled = eqx.filter_jit(_information)
_compiled_quickly = eqx.filter_jit(_information, compiler_options=QUICKLY)  # pyright: ignore[reportCallIssue]


def evidence_information(
    coordinates: ModelCoordinates, batch: Series, evidence: Evidence
) -> Information:
    """Return the information of any differentiable log-evidence, by differences of gradients."""
    spread, theta = _spread_of(batch, np.asarray), np.asarray(coordinates.theta(), np.float64)
    raised = jnp.asarray(_raised(theta, coordinates, spread), coordinates.theta().dtype)
    sums = _by_differences(coordinates.moved(raised), batch, evidence)
    score, information = (np.asarray(each, float) for each in sums)
    edges = _edges_of(coordinates, np.asarray(raised, np.float64), score, information, spread)
    return Information(score, information, edges=edges)


@eqx.filter_jit
def _by_differences(
    coordinates: ModelCoordinates, batch: Series, evidence: Evidence
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    """Return the same by central differences of exact gradients, to eight digits in float64.

    This is for states whose factors are computed by LAPACK: a second derivative contains two such
    calls in parallel, each waits for threads of one pool, and on two cores they deadlock (observed
    with jaxlib 0.10.2). It is also for evidences other than that of the Kalman filter, whose second
    derivatives would store all steps of a series at once.
    """
    theta = coordinates.theta()
    step = jnp.finfo(theta.dtype).eps ** (1 / 3) * jnp.maximum(1.0, jnp.abs(theta))

    def gradient(at: Array) -> Array:
        def log_evidence(theta: Array, series: Series) -> Scalar:
            return evidence(unwrap(coordinates.model_at(theta)), series)

        each = jax.lax.map(lambda series: jax.grad(log_evidence)(at, series), batch)
        return jnp.sum(each, axis=0)

    offsets = jnp.diag(step)
    points = jnp.concatenate([theta[None], theta[None] + offsets, theta[None] - offsets])
    score, *sides = jnp.split(jax.lax.map(gradient, points), [1, 1 + theta.shape[0]])
    hessian = (sides[0] - sides[1]) / (2.0 * step[:, None])
    return score[0], -0.5 * (hessian + hessian.T)


class GridEvidence(eqx.Module):
    """The log-evidence log p(y) by a differentiable forward pass on a grid."""

    grid: Grid
    kind: Kind = eqx.field(static=True)

    def __call__(self, model: StateSpaceModel, series: Series) -> Scalar:
        """Return the log-evidence of one series under an unwrapped model."""
        return jnp.sum(increments(model, series, self.grid, self.kind))


def grid_information(coordinates: ModelCoordinates, batch: Series, grid: Grid) -> Information:
    """Return the information from the evidence on a grid.

    Raises:
        ValueError: if the grid does not cover the states of a series, or is too coarse.
    """
    plain = unwrap(coordinates.model)
    statuses = np.asarray(_statuses(plain, batch, grid))
    if np.any(statuses):
        wrong = np.flatnonzero(statuses).tolist()
        raise ValueError(
            f"The grid does not cover the states of the series {wrong[:5]}, or is too coarse. Use a"
            " wider or a finer grid; `grid_smoother` of one of these series reports which."
        )
    u = None if batch.inputs is None else batch.inputs[0, 0]
    evidence = GridEvidence(grid, kind_of(plain.transition, grid, u))
    score, information = _by_differences(coordinates, batch, evidence)
    return Information(np.asarray(score, float), np.asarray(information, float))


@eqx.filter_jit
def _statuses(model: StateSpaceModel, batch: Series, grid: Grid) -> Int[Array, "batch"]:
    """Return the status of the grid for each series, zero if it is accurate."""
    return jax.lax.map(
        lambda series: grid_smoother(model, series.ys, grid, **series.options()).status, batch
    )


def _spread_of(batch: Series, total: Total) -> float:
    """Return the largest standard deviation of a column, or its size if nothing varies."""
    ys = np.asarray(batch.ys, np.float64).reshape(-1, batch.ys.shape[-1])
    mask = np.ones(ys.shape, bool) if batch.mask is None else np.asarray(batch.mask)
    mask = mask.reshape(ys.shape)
    count = np.maximum(total(mask.sum(axis=0).astype(np.float64)), 1.0)
    mean = total(np.where(mask, ys, 0.0).sum(axis=0)) / count
    variance = total(np.where(mask, (ys - mean) ** 2, 0.0).sum(axis=0)) / count
    return float(np.sqrt(np.max(variance)) or np.max(np.abs(mean)) or 1.0)


def _raised(
    theta: Float[np.ndarray, "parameter"], coordinates: ModelCoordinates, spread: float
) -> Float[np.ndarray, "parameter"]:
    """Return θ with negligible scales raised to the rounding error of the data.

    Data whitened by a scale of 1e-150 overflow. At the rounding error of the data they do not, and
    the likelihood is the same.
    """
    least = float(np.finfo(coordinates.theta().dtype).eps) * spread
    lowest = math.log(math.expm1(least)) if least < 1.0 else least
    return np.where(coordinates.is_scale, np.maximum(theta, lowest), theta)


def _edges_of(
    coordinates: ModelCoordinates,
    theta: Float[np.ndarray, "parameter"],
    score: Float[np.ndarray, "parameter"],
    information: Float[np.ndarray, "parameter parameter"],
    spread: float,
) -> dict[int, float]:
    """Return the coordinates at an edge, and the value of that edge."""
    edges = {}
    for i, (lower, upper) in enumerate(coordinates.edges):
        if math.isinf(lower):
            continue
        if math.isfinite(upper):
            # A logistic function, whose distance to a bound is exponential in the coordinate.
            slope, near = 1.0, abs(theta[i]) > FAR_OUT
        else:
            value = np.logaddexp(0.0, theta[i])
            slope = value / -np.expm1(-value)  # of the coordinate in log v: v / sigmoid(theta)
            near = value < NEGLIGIBLE * spread
        flat = abs(score[i] * slope) < FLAT and abs(information[i, i] * slope**2) < FLAT
        if near and flat:
            edges[i] = lower if math.isinf(upper) or theta[i] < 0 else upper
    return edges
