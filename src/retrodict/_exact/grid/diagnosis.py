"""Diagnosis of a grid: status, error estimate, and messages with the remedy."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import Scalar, is_concrete
from retrodict._exact.grid.mesh import EDGE, Grid

MAX_ESCAPING = 0.25
"""The largest fraction of a transition that may leave the box.

Mass that leaves the box is not an error by itself, since an observation may exclude it. Only modes
of the posterior entirely outside of the box would be missed. The limit is therefore loose.
"""

MAX_EXCESS = 0.02
"""The largest average excess over 1 of the row sums of a transition."""

MIN_RESOLUTION = 0.5
"""The smallest posterior width in spacings; the trapezoidal rule then has an error of about 1%."""


class Status(IntEnum):
    """The outcome of the diagnosis of a grid; every value except `FINE` is a failure."""

    FINE = 0
    IMPOSSIBLE = 1  # no point explains an observation, or a density is NaN
    EDGE = 2
    COARSE_POSTERIOR = 3
    COARSE_TRANSITION = 4
    ESCAPING = 5


class Diagnostics(eqx.Module):
    """Measures of the quality of a grid, per time.

    Attributes:
        boundary_mass: posterior probability of the outer 2% of the box.
        escaping_mass: the fraction of the transition into k that leaves the box, averaged over the
            posterior at k-1; at time 0, the fraction of p(x_0 | y_0) outside of the box.
        transition_excess: the excess over 1 of the row sums of the discretised transition, averaged
            likewise. It is not zero if the noise is narrower than the spacing.
        resolution: the standard deviation of the posterior in spacings.
    """

    boundary_mass: Float[Array, "time"]
    escaping_mass: Float[Array, "time"]
    transition_excess: Float[Array, "time"]
    resolution: Float[Array, "time"]


class ErrorEstimate(eqx.Module):
    """Estimated discretisation errors.

    Attributes:
        log_evidence: in nats.
        mean: in the units of the state.
        covariance: in squared units of the state.
        worst: the largest of the error of the log-evidence in nats, of a mean in posterior standard
            deviations, and of a covariance in products of posterior standard deviations.
    """

    log_evidence: Scalar
    mean: Float[Array, "time state"]
    covariance: Float[Array, "time state state"]
    worst: Scalar


def judge(
    increments: Float[Array, "time"], diagnostics: Diagnostics, tolerance: Scalar
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the status, and the time at which its criterion is violated most."""
    # Causes come before their symptoms: a posterior cut off at the edge is also narrow, and a
    # posterior on a single point has inaccurate row sums.
    criteria = [
        (Status.IMPOSSIBLE, ~jnp.isfinite(increments), 0),
        (Status.EDGE, diagnostics.boundary_mass, tolerance),
        (Status.COARSE_POSTERIOR, 1.0 / diagnostics.resolution, 1.0 / MIN_RESOLUTION),
        (Status.COARSE_TRANSITION, diagnostics.transition_excess, MAX_EXCESS),
        (Status.ESCAPING, diagnostics.escaping_mass, MAX_ESCAPING),
    ]
    return first_violation(criteria)


def first_violation(
    criteria: Sequence[tuple[int, Array, Any]],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the status of the first violated criterion, and the time of its largest violation.

    Args:
        criteria: a status, the measure per time and its limit; zeros are returned if none exceeds.
    """
    status, time = jnp.zeros((), int), jnp.zeros((), int)
    for code, measured, limit in reversed(criteria):
        violated = jnp.any(measured > limit)
        status = jnp.where(violated, int(code), status)
        time = jnp.where(violated, jnp.argmax(measured), time)
    return status, time


def refuse_inadequate(posterior: Any) -> None:
    """Raise a `ValueError` with the remedy if the status of a posterior on a grid is not fine."""
    status = posterior.status
    if not is_concrete(status):
        raise ValueError("check needs a concrete status: call it outside of jit and vmap.")
    if np.all(np.asarray(status) == Status.FINE):
        return
    if np.ndim(status) > 0:
        raise ValueError(
            f"The grid is inadequate for the series {np.flatnonzero(status).tolist()} of the batch."
            " Check each separately: jax.tree.map(lambda leaf: leaf[i], posterior).check()."
        )
    raise ValueError(
        explain(
            Status(int(status)),
            int(posterior.status_time),
            posterior.diagnostics,
            posterior.grid,
            (posterior.mean, posterior.covariance),
            float(posterior.tolerance),
        )
    )


def explain(
    status: Status,
    time: int,
    diagnostics: Diagnostics,
    grid: Grid,
    posterior_moments: tuple[Any, Any],
    tolerance: float,
) -> str:
    """Return an error message with the measured defect of the grid and the remedy."""
    box = f"from {_numbers(grid.lower)} to {_numbers(grid.upper)}"
    if status == Status.IMPOSSIBLE:
        return (
            f"No point of the grid {box} explains the observation at time {time}: its likelihood is"
            " zero or NaN at all points. Widen the box or use more points. If the observation is an"
            " outlier, use float64, in which smaller densities can be represented."
        )
    if status == Status.COARSE_POSTERIOR:
        width = float(diagnostics.resolution[time])
        return (
            f"The grid is too coarse: the posterior at time {time} has a standard deviation of only"
            f" {width:.2g} spacings, and at least {MIN_RESOLUTION} are needed. Use"
            f" num_points={_more_points(grid, width)} or a narrower box."
        )
    if status == Status.COARSE_TRANSITION:
        excess = float(diagnostics.transition_excess[time])
        return (
            f"The grid is too coarse for the transition into time {time}: its rows sum to"
            f" {1 + excess:.3g} instead of 1, which means that its noise is narrower than the"
            f" spacing {_numbers(grid.spacing)}. Use"
            f" num_points={_more_points(grid, _width_of(excess))} or a narrower box."
        )
    remedy = f"Use {_wider_box(grid, *posterior_moments)}."
    if status == Status.EDGE:
        return (
            "The grid does not cover the mass: a fraction"
            f" {float(diagnostics.boundary_mass[time]):.2g} of the posterior at time {time} is in"
            f" the outer {EDGE:.0%} of the box {box}, more than the tolerance {tolerance:.2g}."
            f" {remedy}"
        )
    law = "of p(x_0 | y_0)" if time == 0 else f"of the transition into time {time}"
    return (
        f"The grid does not cover the mass: a fraction {float(diagnostics.escaping_mass[time]):.2g}"
        f" {law} is outside of the box {box}, so that modes might be missed. {remedy}"
    )


def _width_of(excess: float) -> float:
    # Rows of a Gaussian transition of standard deviation σ sum to at most 1 + 2 exp(-2π²σ²/h²) if
    # σ is near the spacing h, and to h / (σ √2π) if σ is much smaller.
    if excess > 0.3:
        return 0.4 / (1.0 + excess)
    return float(np.sqrt(np.log(2.0 / excess) / 2.0) / np.pi)


def _more_points(grid: Grid, width: float) -> tuple[int, ...]:
    factor = float(np.clip(1.0 / width, 1.5, 50.0))
    return tuple(int(np.ceil(n * factor)) for n in grid.num_points)


def _wider_box(grid: Grid, mean: Any, covariance: Any) -> str:
    lower, upper, mean = (np.asarray(a, float) for a in (grid.lower, grid.upper, mean))
    std = np.sqrt(np.diagonal(np.asarray(covariance, float), axis1=1, axis2=2))
    # A law cut off by the box appears too narrow, so that both sides are always extended.
    margin = 0.5 * (upper - lower)
    wide_lower = np.minimum(lower - margin, (mean - 8 * std).min(axis=0))
    wide_upper = np.maximum(upper + margin, (mean + 8 * std).max(axis=0))
    stretch = (wide_upper - wide_lower) / (upper - lower)
    points = tuple(int(np.ceil(n * s)) for n, s in zip(grid.num_points, stretch, strict=True))
    return f"Grid({_numbers(wide_lower)}, {_numbers(wide_upper)}, {points})"


def _numbers(values: Any) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in np.asarray(values).tolist()) + "]"
