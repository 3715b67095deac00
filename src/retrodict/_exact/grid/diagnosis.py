"""Whether a grid was good enough: status, error estimate and messages with the remedy."""

from enum import IntEnum
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._exact.grid.mesh import EDGE, Grid
from retrodict._exact.grid.recursion import Passes, moments, resolution
from retrodict._types import Scalar

MOST_ESCAPING = 0.25
"""How much of a transition may leave the box before the grid is refused.

What leaves is no error in itself, since an observation may exclude it; only modes of the posterior
that lie wholly outside would be missed, which is why the figure is loose.
"""

MOST_EXCESS = 0.02
"""How far above 1 the rows of a transition may sum on average."""

LEAST_RESOLUTION = 0.5
"""The smallest width of a posterior in spacings; the trapezoidal rule then errs by about 1%."""

SAFETY = 3.0
"""What the difference between two grids is multiplied by to bound the error of the finer.

With an error C h^p and a comparison at spacing 4h/3, the difference is ((4/3)^p - 1) C h^p, a third
of the error for p = 1 and more for every larger p.
"""


class Status(IntEnum):
    """How a grid fared; anything but `FINE` is refused."""

    FINE = 0
    IMPOSSIBLE = 1  # no point explains an observation, or a density is not a number
    EDGE = 2
    COARSE_POSTERIOR = 3
    COARSE_TRANSITION = 4
    ESCAPING = 5


class Diagnostics(eqx.Module):
    """What was measured of the grid at each time.

    Attributes:
        boundary_mass: posterior probability of the outer 2% of the box.
        escaping_mass: how much of the transition into k leaves the box from where the posterior at
            k-1 lies; at time 0, the share of p(x_0 | y_0) outside of the box.
        transition_excess: by how much rows of the discretised transition exceed 1, on the same
            average: not zero if its noise is narrower than the spacing.
        resolution: the width of the posterior in spacings, as a standard deviation.
    """

    boundary_mass: Float[Array, "time"]
    escaping_mass: Float[Array, "time"]
    transition_excess: Float[Array, "time"]
    resolution: Float[Array, "time"]


class ErrorEstimate(eqx.Module):
    """Estimated errors of what the grid computed, each in its own units.

    Attributes:
        log_evidence: in nats.
        mean: in the units of the state.
        covariance: in the square of those.
        worst: the largest of the error of the log-evidence in nats, of a mean in posterior standard
            deviations, and of a covariance in products of them.
    """

    log_evidence: Scalar
    mean: Float[Array, "time state"]
    covariance: Float[Array, "time state state"]
    worst: Scalar


class Summary(eqx.Module):
    """What two runs are compared by."""

    increments: Float[Array, "time"]
    mean: Float[Array, "time state"]
    covariance: Float[Array, "time state state"]

    def __init__(self, passes: Passes, grid: Grid):
        self.increments = passes.increments
        self.mean, self.covariance = moments(passes.weights, grid.points)


def diagnose(passes: Passes, grid: Grid, outside: Scalar) -> Diagnostics:
    """Measures how well the grid held the posterior.

    Args:
        passes: what both passes gave.
        grid: the grid.
        outside: the share of p(x_0 | y_0) outside of the box.
    """
    edge = jnp.asarray(grid.at_edge, passes.weights.dtype)
    return Diagnostics(
        boundary_mass=jnp.sum(passes.weights * edge[None, :], axis=1),
        escaping_mass=jnp.concatenate([outside[None], passes.escaping]),
        transition_excess=jnp.pad(passes.excess, (1, 0)),
        resolution=resolution(passes.weights, grid),
    )


def judge(
    increments: Float[Array, "time"], found: Diagnostics, tolerance: Scalar
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The status, and the time at which it was worst."""
    # In order of what explains what: a posterior squeezed against the edge is also narrow, and one
    # that lies on a single point meets rows that are off.
    complaints = [
        (Status.IMPOSSIBLE, 1.0 * ~jnp.isfinite(increments), 0.5),
        (Status.EDGE, found.boundary_mass, tolerance),
        (Status.COARSE_POSTERIOR, 1.0 / found.resolution, 1.0 / LEAST_RESOLUTION),
        (Status.COARSE_TRANSITION, found.transition_excess, MOST_EXCESS),
        (Status.ESCAPING, found.escaping_mass, MOST_ESCAPING),
    ]
    status, time = jnp.zeros((), int), jnp.zeros((), int)
    for code, measured, most in reversed(complaints):
        refused = jnp.any(measured > most)
        status = jnp.where(refused, int(code), status)
        time = jnp.where(refused, jnp.argmax(measured), time)
    return status, time


def estimate_errors(
    fine: Summary, rough: Summary, boundary_mass: Float[Array, "time"], grid: Grid
) -> ErrorEstimate:
    """Errors from a second run with three quarters of the points, and from the mass at the edge.

    The trapezoidal rule converges faster than any power of the spacing for smooth densities, so
    that the difference between both runs is mostly the error of the rougher one: what is returned
    bounds the error of the finer, and by a margin that grows with its accuracy. The mass in the
    outer 2% of the box stands for what lies beyond, which no grid in the box can see.
    """
    width = grid.upper - grid.lower
    # What is cut off at one time is felt at all others.
    beyond = jnp.max(boundary_mass) * jnp.broadcast_to(width, fine.mean.shape)
    rounding = 8 * jnp.finfo(fine.mean.dtype).eps
    # Errors of either sign alternate in time. Their sizes are added, and their largest taken over
    # time, since where the difference changes sign it says nothing.
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


def explain(
    status: Status,
    time: int,
    found: Diagnostics,
    grid: Grid,
    moments_found: tuple[Any, Any],
    tolerance: float,
) -> str:
    """What is wrong with the grid, as it was measured, and what to do."""
    box = f"from {_numbers(grid.lower)} to {_numbers(grid.upper)}"
    if status == Status.IMPOSSIBLE:
        return (
            f"No point of the grid {box} explains the observation at time {time}: its likelihood is"
            " zero or not a number at all of them. Widen the box or take more points; if the"
            " observation is an outlier, use float64, where densities underflow later."
        )
    if status == Status.COARSE_POSTERIOR:
        width = float(found.resolution[time])
        return (
            f"The grid is too coarse: the posterior at time {time} has a standard deviation of only"
            f" {width:.2g} spacings, and at least {LEAST_RESOLUTION} are needed. Take"
            f" num_points={_more_points(grid, width)}, which would make it one, or a narrower box."
        )
    if status == Status.COARSE_TRANSITION:
        excess = float(found.transition_excess[time])
        return (
            f"The grid is too coarse for the transition into time {time}: its rows sum to"
            f" {1 + excess:.3g} instead of 1, so that its noise is narrower than the spacing"
            f" {_numbers(grid.spacing)}. Take num_points={_more_points(grid, _width_of(excess))},"
            " or a narrower box."
        )
    remedy = f"Take {_wider_box(grid, *moments_found)}."
    if status == Status.EDGE:
        return (
            f"The grid does not cover the mass: a fraction {float(found.boundary_mass[time]):.2g}"
            f" of the posterior at time {time} lies in the outer {EDGE:.0%} of the box {box}, more"
            f" than the tolerance {tolerance:.2g}. {remedy}"
        )
    what = "of p(x_0 | y_0) lies" if time == 0 else f"of the transition into time {time} leads"
    return (
        f"The grid does not cover the mass: a fraction {float(found.escaping_mass[time]):.2g}"
        f" {what} outside of the box {box}, so that modes might be missed. {remedy}"
    )


def _width_of(excess: float) -> float:
    # Rows of a Gaussian transition of standard deviation σ sum to at most 1 + 2 exp(-2π²σ²/h²) when
    # σ is near the spacing h, and to h / (σ √2π) when it is far below.
    if excess > 0.3:
        return 0.4 / (1.0 + excess)
    return float(np.sqrt(np.log(2.0 / excess) / 2.0) / np.pi)


def _more_points(grid: Grid, width: float) -> tuple[int, ...]:
    factor = float(np.clip(1.0 / width, 1.5, 50.0))
    return tuple(int(np.ceil(n * factor)) for n in grid.num_points)


def _wider_box(grid: Grid, mean: Any, covariance: Any) -> str:
    lower, upper, mean = (np.asarray(a, float) for a in (grid.lower, grid.upper, mean))
    std = np.sqrt(np.diagonal(np.asarray(covariance, float), axis1=1, axis2=2))
    # A law cut off by the box looks narrower than it is, so that both sides move in any case.
    margin = 0.5 * (upper - lower)
    wide_lower = np.minimum(lower - margin, (mean - 8 * std).min(axis=0))
    wide_upper = np.maximum(upper + margin, (mean + 8 * std).max(axis=0))
    stretch = (wide_upper - wide_lower) / (upper - lower)
    points = tuple(int(np.ceil(n * s)) for n, s in zip(grid.num_points, stretch, strict=True))
    return f"Grid({_numbers(wide_lower)}, {_numbers(wide_upper)}, {points})"


def _numbers(values: Any) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in np.asarray(values).tolist()) + "]"
