"""The posterior on a grid: moments, quantiles, pairwise laws and samples."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, as_probabilities, check_count, check_key, is_concrete
from retrodict._exact.grid.diagnosis import Diagnostics, ErrorEstimate, refuse_inadequate
from retrodict._exact.grid.mesh import Grid
from retrodict._exact.grid.transition import (
    BLOCK_ENTRIES,
    DENSE_ENTRIES,
    Kind,
    correction,
    densities,
    in_blocks,
    operators,
    product,
)
from retrodict._model import AbstractKernel, prepare_rows


class Held(eqx.Module):
    """A kernel split into arrays and the rest, so that `jax.jit` and `jax.vmap` may return it."""

    arrays: Any
    rest: Any = eqx.field(static=True)

    def __init__(self, kernel: Any):
        self.arrays, self.rest = eqx.partition(
            kernel, lambda leaf: isinstance(leaf, (jax.Array, np.ndarray))
        )

    @property
    def kernel(self) -> AbstractKernel:
        """The kernel."""
        return eqx.combine(self.arrays, self.rest)


class GridPosterior(eqx.Module):
    """The law of the states given the whole series, on the points of a grid.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> posterior = rd.grid_smoother(model, ys, rd.Grid([-8.0], [12.0], 100))
        >>> print(np.array(posterior.mean[:, 0]).round(3), posterior.density.shape)
        [1. 2. 3.] (3, 100)
        >>> above_zero = posterior.expectation(lambda x: x[0] > 0)
        >>> above_zero.shape
        (3,)

    Attributes:
        grid: the grid.
        weights: smoothing probabilities p(x_k = point | y), each row summing to 1.
        filter_weights: filtering probabilities p(x_k = point | y_{0:k}).
        mean: smoothed means.
        covariance: smoothed covariances.
        log_evidence: log p(y_{0:n-1}), the sum of the increments.
        log_evidence_increments: log p(y_k | y_{0:k-1}), zero where there is no row.
        error: estimated errors of the log-evidence, the means and the covariances.
        diagnostics: measures of how well the grid represents the posterior, per time.
        status: 0 if the grid is good enough; 1 if no point explains an observation; 2 if there is
            mass at the edge; 3 if the grid is too coarse for the posterior, or 4 for the
            transition; 5 if mass leaves the box. `check` raises an error with the explanation.
        status_time: the time at which the criterion of the status is violated most.
        inputs: the inputs, or `None`.
        length: the number of rows that exist, or `None` if all rows exist.
        transition: the transition kernel, wrapped so that `jax.jit` can return it.
        tolerance: the largest mass allowed at the edge.
        kind: how the transition is applied.
    """

    grid: Grid
    weights: Float[Array, "time point"]
    filter_weights: Float[Array, "time point"]
    mean: Float[Array, "time state"]
    covariance: Float[Array, "time state state"]
    log_evidence: Scalar
    log_evidence_increments: Float[Array, "time"]
    error: ErrorEstimate
    diagnostics: Diagnostics
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    inputs: Float[Array, "time input"] | None
    length: Int[Array, ""] | None
    transition: Held
    tolerance: Scalar
    kind: Kind = eqx.field(static=True)

    @property
    def points(self) -> Float[Array, "point state"]:
        """The points of the grid."""
        return self.grid.points

    @property
    def density(self) -> Float[Array, "time point"]:
        """The smoothing density at the points: the weights divided by the quadrature weights."""
        return self.weights * jnp.exp(-self.grid.log_quadrature)[None, :]

    @property
    def boundary_mass(self) -> Float[Array, "*batch time"]:
        """Posterior probability of the outer 2% of the box."""
        return self.diagnostics.boundary_mass

    @property
    def discretisation_error(self) -> Float[Array, "*batch"]:
        """A conservative estimate of the largest discretisation error.

        It is the largest of three errors: of the log-evidence in nats, of any mean in posterior
        standard deviations, and of any covariance in products of standard deviations. `error` holds
        each of them separately. The estimate is the mass at the edge plus three times the
        difference from a second run with three quarters of the points in each coordinate. It is
        accurate to a factor of three if the error is a power of the spacing. For smooth densities
        it is the error of the coarser grid. This is much larger than the error of this grid, about
        its square root.
        """
        return self.error.worst

    def check(self) -> "GridPosterior":
        """Return the posterior; raise a `ValueError` with the remedy if the grid is inadequate."""
        refuse_inadequate(self)
        return self

    def expectation(self, fn: Callable[[Array], Array]) -> Float[Array, "time ..."]:
        """Return E[fn(x_k) | y] for every k.

        Args:
            fn: a function of one state, of shape `(state,)`, to an array of any shape.
        """
        values = jnp.asarray(jax.vmap(fn)(self.points), self.weights.dtype)
        return jnp.tensordot(self.weights, values, axes=1, precision=jax.lax.Precision.HIGHEST)

    def expectation_pairwise(
        self, fn: Callable[..., Array], data: Any = None
    ) -> Float[Array, "pair ..."]:
        """Return E[fn(x_{k-1}, x_k) | y] for k = 1, …, n-1.

        Row k-1 holds the expectation for k. It is zero if row k does not exist. The sum over time
        is the smoothed expectation of an additive functional. Pairs of points are processed in
        blocks, so that memory does not grow with the grid.

        Args:
            fn: a function of two neighbouring states to an array of any shape.
            data: a pytree with one row per time step; with it, `fn(x_{k-1}, x_k, data_k)` is
                called.
        """
        if data is not None:
            data = prepare_rows(data, self.weights.shape[0])
        return _expectation_pairwise(self, fn, data)

    def cross_covariance(self) -> Float[Array, "pair state state"]:
        """Return Cov(x_{k-1}, x_k | y), k = 1, …, n-1, in row k-1; zero if row k does not exist."""
        return _cross_covariance(self)

    def pairwise(self, k: int) -> Float[Array, "point point"]:
        """Return the joint law P(x_{k-1} = point i, x_k = point j | y), with rows over i.

        Args:
            k: the time of the later state, from 1 to n-1.
        """
        last = self.weights.shape[0] - 1
        if self.length is not None and is_concrete(self.length):
            last = int(self.length) - 1
        if not 1 <= k <= last:
            raise ValueError(f"pairwise expects a time k between 1 and {last}, got {k}.")
        if self.grid.size**2 > DENSE_ENTRIES:
            raise ValueError(
                f"The joint law on {self.grid.size} points has {self.grid.size**2} entries. Use"
                " expectation_pairwise or cross_covariance, which do not store it."
            )
        return _pairwise(self, jnp.asarray(k))

    def quantile(self, probabilities: Any) -> Float[Array, "*shape time state"]:
        """Return quantiles of the smoothed law of each coordinate at each time.

        The distribution function is integrated to sixth order in the spacing and interpolated by
        a cubic whose slopes are the densities.

        Args:
            probabilities: one probability or an array of them, strictly between 0 and 1.

        Returns:
            Quantiles, with the axes of `probabilities` first.
        """
        levels = as_probabilities(probabilities, "probabilities").astype(self.weights.dtype)
        columns = [_quantiles(self, axis, levels.reshape(-1)) for axis in range(self.grid.dim)]
        return jnp.stack(columns, axis=-1).reshape(*levels.shape, -1, self.grid.dim)

    def sample(self, key: PRNGKey, num_samples: int) -> Float[Array, "sample time state"]:
        """Draw paths from the joint smoothing law on the grid, backward in time.

        The states of the paths are points of the grid. They are not jittered within their cells, so
        that their moments match `mean` and `covariance` without bias. Rows that do not exist repeat
        the last existing row.

        Args:
            key: a typed key.
            num_samples: the number of paths.
        """
        check_key(key, "sample")
        return _sample(self, key, check_count(num_samples, "num_samples"))


def _later(posterior: GridPosterior) -> tuple[Array, Array, Array | None, Array]:
    """Return the inputs of the steps from k-1 to k, one row per k ≥ 1."""
    num_times = posterior.weights.shape[0]
    exists = jnp.arange(num_times) < (num_times if posterior.length is None else posterior.length)
    us = None if posterior.inputs is None else posterior.inputs[1:]
    return posterior.filter_weights[:-1], posterior.weights[1:], us, exists[1:]


@eqx.filter_jit
def _expectation_pairwise(posterior: GridPosterior, fn: Callable, data: Any) -> Array:
    kernel, points = posterior.transition.kernel, posterior.points
    move = operators(kernel, posterior.grid, posterior.kind)

    def value(x: Array, after: Array, row: Any) -> Array:
        result = fn(x, after) if data is None else fn(x, after, row)
        return jnp.asarray(result, points.dtype)

    # Without data, which is then an empty pytree, these are `None` too.
    rows, first = (jax.tree.map(lambda leaf, at=at: leaf[at], data) for at in (slice(1, None), 0))
    shape = jax.eval_shape(value, points[0], points[0], first).shape
    entries = max(1, int(np.prod(shape)))

    def at_time(step: Any) -> Array:
        (before, smoothed, u, real), row = step
        operator, _ = move(u)
        after = correction(smoothed, operator.push(before))

        def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
            sources, mass = block
            joint = mass[:, None] * densities(kernel, sources, points, u) * after[None, :]
            values = jax.vmap(lambda x: jax.vmap(lambda z: value(x, z, row))(points))(sources)
            # The function may be non-finite where there is no mass.
            values = values.reshape(*joint.shape, entries)
            values = jnp.where(joint[:, :, None] > 0, values, 0.0)
            highest = jax.lax.Precision.HIGHEST
            return total + jnp.einsum("ij,ije->e", joint, values, precision=highest), None

        count = points.shape[0]
        blocks = in_blocks(points, count, entries), in_blocks(before, count, entries)
        total, _ = jax.lax.scan(add, jnp.zeros(entries, points.dtype), blocks)
        return jnp.where(real, total, 0.0).reshape(shape)

    return jax.lax.map(at_time, (_later(posterior), rows))


@eqx.filter_jit
def _cross_covariance(posterior: GridPosterior) -> Array:
    points = posterior.points
    move = operators(posterior.transition.kernel, posterior.grid, posterior.kind)

    def at_time(step: Any) -> Array:
        (before, smoothed, u, real), mean, next_mean = step
        operator, _ = move(u)
        after = correction(smoothed, operator.push(before))
        centred = points - next_mean[None, :]
        pulled = jnp.stack(
            [operator.pull(after * centred[:, i]) for i in range(points.shape[1])], axis=1
        )
        weighted = before[:, None] * (points - mean[None, :])
        return jnp.where(real, product(weighted.T, pulled), 0.0)

    means = posterior.mean
    return jax.lax.map(at_time, (_later(posterior), means[:-1], means[1:]))


@eqx.filter_jit
def _pairwise(posterior: GridPosterior, k: Array) -> Array:
    kernel, points = posterior.transition.kernel, posterior.points
    before, smoothed, u, _ = jax.tree.map(lambda leaf: leaf[k - 1], _later(posterior))
    joint = before[:, None] * densities(kernel, points, points, u)
    return joint * correction(smoothed, jnp.sum(joint, axis=0))[None, :]


@eqx.filter_jit
def _sample(posterior: GridPosterior, key: Array, num_samples: int) -> Array:
    kernel, points = posterior.transition.kernel, posterior.points
    num_times, num_points = posterior.weights.shape
    shape = (num_times, num_samples)
    uniforms = jax.random.uniform(key, shape, points.dtype)
    batch = max(1, min(num_samples, BLOCK_ENTRIES // num_points))

    def draw(law: Array, uniform: Array) -> Array:
        """Draw an index by inverting cumulative sums, with one uniform instead of one per point."""
        cumulative = jnp.cumsum(law)
        # A level below the total excludes points after the last point of positive mass.
        level = jnp.minimum(uniform, 1.0 - jnp.finfo(law.dtype).eps) * cumulative[-1]
        return jnp.searchsorted(cumulative, level, side="right")

    def back(indices: Array, step: Any) -> tuple[Array, Array]:
        (before, _, u, real), uniform = step

        def draw_one(pair: tuple[Array, Array]) -> Array:
            after, level = pair
            return draw(before * densities(kernel, points, points[after][None], u)[:, 0], level)

        earlier = jax.lax.map(draw_one, (indices, uniform), batch_size=batch)
        earlier = jnp.where(real, earlier, indices)
        return earlier, earlier

    last = jax.vmap(lambda level: draw(posterior.weights[-1], level))(uniforms[-1])
    _, earlier = jax.lax.scan(back, last, (_later(posterior), uniforms[:-1]), reverse=True)
    indices = jnp.concatenate([earlier, last[None]])
    return jnp.swapaxes(points[indices], 0, 1)


@eqx.filter_jit
def _quantiles(posterior: GridPosterior, axis: int, levels: Array) -> Array:
    grid = posterior.grid
    table = posterior.weights.reshape(-1, *grid.num_points)
    others = tuple(i + 1 for i in range(grid.dim) if i != axis)
    masses = jnp.sum(table, axis=others)
    halves = jnp.ones(masses.shape[1], masses.dtype).at[jnp.array([0, -1])].set(0.5)
    knots, spacing = grid.axes[axis], grid.spacing[axis]

    def of_one(mass: Array) -> Array:
        slope = mass / halves  # the density times the spacing
        # The integral of the quintic through six points over its middle interval.
        wide = jnp.pad(slope, 2)
        count = slope.shape[0] - 1
        parts = [wide[i : i + count] + wide[5 - i : 5 - i + count] for i in range(3)]
        steps = jnp.maximum(11 * parts[0] - 93 * parts[1] + 802 * parts[2], 0.0)
        heights = jnp.concatenate([jnp.zeros(1, mass.dtype), jnp.cumsum(steps / 1440)])
        slope, heights = slope / heights[-1], heights / heights[-1]
        cell = jnp.clip(jnp.searchsorted(heights, levels, side="right") - 1, 0, knots.shape[0] - 2)
        ends = (heights[cell], heights[cell + 1], slope[cell], slope[cell + 1])
        return knots[cell] + spacing * _invert_cubic(levels, *ends)

    return jnp.swapaxes(jax.lax.map(of_one, masses), 0, 1)


def _invert_cubic(
    level: Array, low: Array, high: Array, slope_low: Array, slope_high: Array
) -> Array:
    """Solve cubic(t) = level for t in [0, 1] by bisection, given end values and end slopes."""

    def halve(interval: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        left, right = interval
        t = 0.5 * (left + right)
        value = (
            (1 + 2 * t) * (1 - t) ** 2 * low
            + t * (1 - t) ** 2 * slope_low
            + t**2 * (3 - 2 * t) * high
            - t**2 * (1 - t) * slope_high
        )
        return (jnp.where(value < level, t, left), jnp.where(value < level, right, t)), None

    ends = (jnp.zeros_like(level), jnp.ones_like(level))
    (left, right), _ = jax.lax.scan(halve, ends, None, length=50)
    return 0.5 * (left + right)
