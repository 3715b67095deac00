"""Rectangular grids with the trapezoidal rule."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from retrodict._arrays import as_real_array, check_count, check_finite, is_concrete

MIN_POINTS = 8
"""The smallest number of points per coordinate; the comparison grid then has six."""

EDGE = 0.02
"""The outer fraction of the box, on either side, that counts as the edge."""


class Grid(eqx.Module):
    """Equally spaced points over a box, in one or two dimensions, with trapezoidal weights.

    Coordinate i has `num_points[i]` points from `lower[i]` to `upper[i]`, both included. The box
    must contain the mass of the states at every time. The spacing must be smaller than about one
    standard deviation of the transition and of the posterior. The trapezoidal rule is then accurate
    to many digits: for a smooth density that vanishes at the edges, its error decreases faster than
    any power of the spacing.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> grid = rd.Grid(jnp.array([-1.0, 0.0]), jnp.array([1.0, 3.0]), (9, 13))
        >>> grid.points.shape, grid.spacing.tolist()
        ((117, 2), [0.25, 0.25])

    Args:
        lower: the lower corner of the box, of shape `(state,)`.
        upper: the upper corner, of shape `(state,)`.
        num_points: the number of points per coordinate; an integer applies to all coordinates.
    """

    lower: Float[Array, "state"]
    upper: Float[Array, "state"]
    num_points: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, lower: Any, upper: Any, num_points: int | tuple[int, ...]):
        lower, upper = as_real_array(lower, "lower"), as_real_array(upper, "upper")
        if lower.ndim != 1 or lower.shape != upper.shape:
            raise ValueError(
                "Grid expects lower and upper of one shape (state,), got"
                f" {lower.shape} and {upper.shape}."
            )
        if lower.shape[0] not in (1, 2):
            raise ValueError(
                f"Grid expects a state of dimension 1 or 2, got {lower.shape[0]} coordinates: the"
                " number of points grows as a power of the dimension. Use ffbsi for more, or"
                " kalman_smoother if the model is linear Gaussian."
            )
        check_finite(lower, "lower")
        check_finite(upper, "upper")
        if is_concrete(lower) and is_concrete(upper):
            if not bool(np.all(np.asarray(lower) < np.asarray(upper))):
                raise ValueError(
                    "Grid expects lower < upper in every coordinate, got"
                    f" {np.asarray(lower)} and {np.asarray(upper)}."
                )
        dtype = jnp.promote_types(lower.dtype, upper.dtype)
        self.lower, self.upper = lower.astype(dtype), upper.astype(dtype)
        self.num_points = _counts(num_points, lower.shape[0])

    @property
    def dim(self) -> int:
        """The dimension of the state."""
        return len(self.num_points)

    @property
    def size(self) -> int:
        """The total number of points."""
        return int(np.prod(self.num_points))

    @property
    def spacing(self) -> Float[Array, "state"]:
        """The distance between neighbouring points, per coordinate."""
        intervals = jnp.asarray(self.num_points, self.lower.dtype) - 1
        return (self.upper - self.lower) / intervals

    @property
    def axes(self) -> tuple[Float[Array, "_"], ...]:
        """The points of each coordinate."""
        return tuple(
            jnp.linspace(self.lower[i], self.upper[i], n) for i, n in enumerate(self.num_points)
        )

    @property
    def points(self) -> Float[Array, "point state"]:
        """All points; the last coordinate varies fastest."""
        mesh = jnp.meshgrid(*self.axes, indexing="ij")
        return jnp.stack([coordinate.reshape(-1) for coordinate in mesh], axis=1)

    @property
    def log_quadrature(self) -> Float[Array, "point"]:
        """Logarithms of the trapezoidal weights, which sum to the volume of the box."""
        halves = np.zeros(self.num_points)
        for axis in range(self.dim):
            ends = np.moveaxis(halves, axis, 0)
            ends[0] += np.log(0.5)
            ends[-1] += np.log(0.5)
        volume = jnp.sum(jnp.log(self.spacing))
        return volume + jnp.asarray(halves.reshape(-1), self.lower.dtype)

    @property
    def at_edge(self) -> Bool[np.ndarray, "point"]:
        """Whether each point is in the outer 2% of the box; the outermost points always are."""
        edge = np.zeros(self.num_points, bool)
        for axis, n in enumerate(self.num_points):
            layer = max(1, round(EDGE * n))
            ends = np.moveaxis(edge, axis, 0)
            ends[:layer] = ends[n - layer :] = True
        return edge.reshape(-1)

    def coarser(self) -> "Grid":
        """Return a grid over the same box with three quarters of the points in each coordinate."""
        return Grid(self.lower, self.upper, tuple((3 * n + 3) // 4 for n in self.num_points))

    def surroundings(self) -> tuple["Grid", Bool[np.ndarray, "around"]]:
        """Return a grid three times as wide with equal spacing, and a mask of points outside."""
        width = self.upper - self.lower
        wide = Grid(
            self.lower - width, self.upper + width, tuple(3 * n - 2 for n in self.num_points)
        )
        outside = np.ones(wide.num_points, bool)
        outside[tuple(slice(n - 1, 2 * n - 1) for n in self.num_points)] = False
        return wide, outside.reshape(-1)


def _counts(num_points: Any, dim: int) -> tuple[int, ...]:
    counts = num_points if isinstance(num_points, (tuple, list)) else (num_points,) * dim
    if len(counts) != dim:
        raise ValueError(
            f"Grid expects num_points with one entry per coordinate ({dim}), got {len(counts)}."
        )
    checked = tuple(check_count(n, "num_points") for n in counts)
    # The limit is three quarters of MIN_POINTS, since `coarser` calls this function too.
    if min(checked) < (3 * MIN_POINTS + 3) // 4:
        raise ValueError(
            f"Grid expects num_points of at least {MIN_POINTS} in every coordinate, got {checked}."
        )
    return checked
