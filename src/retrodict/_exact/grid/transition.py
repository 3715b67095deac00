"""Transitions as operators on a grid, with the memory of one block of rows.

An operator represents the densities m(x_i, x_j) between all pairs of points. `push` propagates a
law forward, and `pull` propagates a function of the next state backward. Densities are not
renormalised. The row sums Σ_j q_j m(x_i, x_j), with the quadrature weights q, are computed as well.
They are below 1 where the transition leaves the box, and differ from 1 where its noise is narrower
than the spacing. A renormalisation would hide both.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import is_concrete
from retrodict._exact.grid.mesh import Grid
from retrodict._model import (
    LOG_2PI,
    AbstractGaussianKernel,
    AbstractKernel,
    Diagonal,
    Gaussian,
    LinearGaussianKernel,
    NonlinearGaussianKernel,
    dense_scale,
    scale_diagonal,
    scale_log_det,
    scale_solve,
)
from retrodict._numerics import sum_of

BLOCK_ENTRIES = 2**22
"""The largest number of densities per block: 32 MiB of float64, for any number of points."""

DENSE_ENTRIES = 2**24
"""The largest number of densities stored as one matrix: 128 MiB of float64, or 4096 points."""

Kind: TypeAlias = Literal["dense", "separable", "blocked"]


product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
"""The matrix product, in full precision on accelerators too."""


class Operator(NamedTuple):
    """The densities m(x_i, x_j) between the points of a grid, for one input.

    Attributes:
        push: returns the density Σ_i w_i m(x_i, x_j) of the next state at every point j.
        pull: returns the sum Σ_j m(x_i, x_j) v_j for every point i.
    """

    push: Callable[[Float[Array, "point"]], Float[Array, "point"]]
    pull: Callable[[Float[Array, "point"]], Float[Array, "point"]]


def dense_operator(matrix: Float[Array, "point point"]) -> Operator:
    """Return the operator of densities that are computed once and stored as one matrix."""
    return Operator(
        lambda weights: product(weights, matrix), lambda values: product(matrix, values)
    )


def separable_operator(first: Float[Array, "point a"], second: Float[Array, "point b"]) -> Operator:
    """Return the operator of a state whose two coordinates are independent given the one before.

    With m(x_i, (a, b)) = s(i, a) t(i, b), `push` is the matrix product sᵀ diag(w) t. It costs as
    much as a dense product, but needs two tables of N √N entries instead of one of N².
    """

    def push(weights: Array) -> Array:
        return product(first.T, weights[:, None] * second).reshape(-1)

    def pull(values: Array) -> Array:
        inner = product(first, values.reshape(first.shape[1], second.shape[1]))
        return jnp.sum(inner * second, axis=1)

    return Operator(push, pull)


def blocked_operator(
    kernel: AbstractKernel, points: Float[Array, "point state"], u: Float[Array, "input"] | None
) -> Operator:
    """Return an operator that recomputes its densities at each use, one block of rows at a time."""

    def push(weights: Array) -> Array:
        def add(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
            sources, mass = block
            return total + product(mass, densities(kernel, sources, points, u)), None

        blocks = in_blocks(points), in_blocks(weights, points.shape[0])
        return jax.lax.scan(add, jnp.zeros_like(weights), blocks)[0]

    def pull(values: Array) -> Array:
        def integrate(sources: Array) -> Array:
            return product(densities(kernel, sources, points, u), values)

        return jax.lax.map(integrate, in_blocks(points)).reshape(-1)[: values.shape[0]]

    return Operator(push, pull)


def correction(smoothed: Array, predicted: Array) -> Array:
    """Return r = s_k / p_k; f_{k-1}(i) m(x_i, x_j) r(j) is then the joint law of a pair."""
    return jnp.where(predicted > 0, smoothed / jnp.where(predicted > 0, predicted, 1.0), 0.0)


def densities(
    kernel: AbstractKernel,
    sources: Float[Array, "source state"],
    targets: Float[Array, "target state"],
    u: Float[Array, "input"] | None,
) -> Float[Array, "source target"]:
    """Return the table of the densities m(x_i, x_j)."""
    if isinstance(kernel, AbstractGaussianKernel):
        return _gaussian_densities(kernel, sources, targets, u)

    def row(x: Array) -> Array:
        return jax.vmap(lambda value: kernel.log_prob(x, value, u=u))(targets)

    return jnp.exp(jax.vmap(row)(sources)).astype(sources.dtype)


def _gaussian_densities(
    kernel: AbstractGaussianKernel, sources: Array, targets: Array, u: Array | None
) -> Float[Array, "source target"]:
    def law_of(x: Array) -> tuple[Array, Array, Array]:
        law = kernel.law(x, u)
        eye = jnp.eye(law.dim, dtype=x.dtype)
        constant = -0.5 * law.dim * LOG_2PI - scale_log_det(law.scale_tril)
        return law.mean, scale_solve(law.scale_tril, eye), constant

    # XLA would fuse the law of a source into the loop over pairs and recompute it for each pair.
    # This was seven times slower for a transition with one sine.
    laws = jax.lax.optimization_barrier(jax.vmap(law_of)(sources))
    means, whiteners, constants = laws
    differences = [targets[None, :, i] - means[:, None, i] for i in range(targets.shape[1])]
    exponents = constants[:, None]
    for i in range(targets.shape[1]):
        terms = [whiteners[:, None, i, j] * differences[j] for j in range(i + 1)]
        exponents = exponents - 0.5 * sum_of(terms) ** 2
    return jnp.exp(exponents).astype(sources.dtype)


def in_blocks(rows: Array, num_points: int | None = None, entries: int = 1) -> Array:
    """Split an array over the points into blocks, with padding in the last block.

    Args:
        rows: an array with one row per point.
        num_points: the number of densities per row; by default, the number of points.
        entries: the number of values that are computed per density.
    """
    count = rows.shape[0]
    block = max(1, min(count, BLOCK_ENTRIES // ((num_points or count) * entries)))
    num_blocks = -(-count // block)
    pad = [(0, num_blocks * block - count)] + [(0, 0)] * (rows.ndim - 1)
    # Padding repeats the last point, since a density might be non-finite at zero. Masses are
    # padded with zeros.
    padded = jnp.pad(rows, pad, mode="edge") if rows.ndim > 1 else jnp.pad(rows, pad)
    return padded.reshape(num_blocks, block, *rows.shape[1:])


def map_rows(fn: Callable[[Any], Any], rows: Any, entries: int) -> Any:
    """Apply a function to every row, in batches that fit into a block.

    Args:
        fn: a function of one row.
        rows: a pytree of arrays with a common leading axis.
        entries: the number of values that the function needs in memory per row.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    batch = max(1, BLOCK_ENTRIES // entries)
    # Without a loop, which would take time to compile, if one batch is enough.
    return jax.vmap(fn)(rows) if count <= batch else jax.lax.map(fn, rows, batch_size=batch)


def kind_of(kernel: AbstractKernel, grid: Grid, u: Float[Array, "input"] | None) -> Kind:
    """Return how to apply a transition; call it outside of jit, where scales are concrete."""
    if grid.dim == 2 and _is_separable(kernel, grid.lower, u):
        return "separable"
    return "dense" if grid.size**2 <= DENSE_ENTRIES else "blocked"


def operators(
    kernel: AbstractKernel, grid: Grid, kind: Kind
) -> Callable[[Float[Array, "input"] | None], tuple[Operator, Float[Array, "point"]]]:
    """Return a function from the input to the operator and its row sums.

    A kernel that takes no input has one operator. It is built once, so that scans over time close
    over it.
    """
    points = grid.points

    def build(u: Array | None) -> tuple[Operator, Array]:
        if kind == "separable":
            operator = separable_operator(*_coordinate_tables(kernel, grid, u))
        elif kind == "dense":
            operator = dense_operator(densities(kernel, points, points, u))
        else:
            operator = blocked_operator(kernel, points, u)
        return operator, operator.pull(jnp.exp(grid.log_quadrature))

    if kernel.takes_input:
        return build
    built = build(None)
    return lambda u: built


def _coordinate_tables(kernel: AbstractKernel, grid: Grid, u: Any) -> tuple[Array, Array]:
    """Return the densities of each coordinate of the next state, one row per point."""
    first, second = grid.axes
    longest = max(grid.num_points)
    # One evaluation at (first[a], second[a]) gives an entry of either table.
    values = jnp.stack(
        [jnp.pad(axis, (0, longest - axis.shape[0]), mode="edge") for axis in (first, second)],
        axis=1,
    )

    def row(x: Array) -> Array:
        law = kernel.law(x, u)
        return jnp.exp(jax.vmap(lambda value: _coordinate_log_prob(law, value))(values))

    table = map_rows(row, grid.points, 2 * longest).astype(first.dtype)
    return table[:, : first.shape[0], 0], table[:, : second.shape[0], 1]


def _coordinate_log_prob(law: Any, value: Float[Array, "state"]) -> Float[Array, "state"]:
    """Return the log density of each coordinate, for a law with independent coordinates."""
    if not isinstance(law, Gaussian):
        return jnp.asarray(law.log_prob(value))
    std = jnp.abs(scale_diagonal(law.scale_tril))
    return -0.5 * (((value - law.mean) / std) ** 2 + LOG_2PI) - jnp.log(std)


def _is_separable(kernel: AbstractKernel, x: Array, u: Any) -> bool:
    if isinstance(kernel, (LinearGaussianKernel, NonlinearGaussianKernel)):
        scale = kernel.scale_tril
        if isinstance(scale, Diagonal):
            return True
        # A dense scale may have diagonal values, for example 0.1 * eye: check concrete values.
        return is_concrete(scale) and not np.tril(np.asarray(scale), -1).any()
    law: Any = kernel.law(x, u)
    if isinstance(kernel, AbstractGaussianKernel):
        return isinstance(law.scale_tril, Diagonal)
    return jax.eval_shape(lambda value: jnp.asarray(law.log_prob(value)), x).shape == x.shape


def refuse_without_density(kernel: AbstractKernel, x: Array, u: Any) -> None:
    """Raise a `ValueError` for a Gaussian transition with a concrete singular scale."""
    if not isinstance(kernel, AbstractGaussianKernel):
        return
    law: Any = kernel.law(x, u)
    scale = dense_scale(law.scale_tril)
    if is_concrete(scale) and (np.diagonal(np.asarray(scale)) == 0).any():
        raise ValueError(
            "grid_smoother expects a transition with a density, got a scale_tril with a zero on its"
            " diagonal. Use kalman_smoother, which takes semidefinite scales, or add some noise."
        )
