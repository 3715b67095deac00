"""A model, a chain and a functional as tables over the points of a grid."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from retrodict._chains import LinearGaussianChain
from retrodict._exact import Grid, densities, log_emission, log_prior
from retrodict._expectations import (
    AbstractFunctional,
    LogJoint,
    check_model,
    series_of_chain,
)
from retrodict._kernels import AbstractKernel
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._series import Series, prepare_rows
from retrodict._validate import is_concrete
from retrodict.bounds.grid_bounds import law_on

MAX_POINTS = 600
"""The largest number of points: bounds cost its cube at every time."""

MAX_ENTRIES = 2e7
"""The largest number of entries of a table over times and pairs of points: 160 MB of float64."""


def tabulate(
    model: StateSpaceModel,
    chain: LinearGaussianChain,
    ys: Any,
    grid: Grid,
    functional: AbstractFunctional,
    data: PyTree,
    mask: Any,
    inputs: Any,
) -> dict[str, Array]:
    """Return checked arguments of `FiniteProblem.from_model`; see `FiniteProblem.from_grid`."""
    _check_types(chain, grid, functional)
    model = unwrap(model)
    check_model(model, chain, "from_grid")
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs)
    _check_sizes(series, grid)
    if isinstance(functional, LogJoint) and data is None:
        data = series.rows
    data = prepare_rows(data, series.num_times)
    _check_scalar(functional, grid, data)
    tables = _tabulate(model, chain, series, grid, functional, data)
    names = {"transitions": "the transition", "kernels": "the chain", "filters": "the chain"}
    for name, whose in names.items():
        table = tables[name]
        if is_concrete(table) and not np.asarray(table).any(axis=-1).all():
            raise ValueError(
                f"The points of the grid have no mass of a law of {whose}: it is outside of the"
                " box or between two points. Widen or refine the grid."
            )
    return tables


@eqx.filter_jit
def _tabulate(
    model: StateSpaceModel,
    chain: LinearGaussianChain,
    series: Series,
    grid: Grid,
    functional: AbstractFunctional,
    data: PyTree,
) -> dict[str, Array]:
    points, quadrature = grid.points, jnp.exp(grid.log_quadrature)

    def laws(kernel: AbstractKernel, u: Array | None) -> Float[Array, "from to"]:
        table = densities(kernel, points, points, u) * quadrature[None, :]
        mass = jnp.sum(table, axis=1, keepdims=True)
        return table / jnp.where(mass > 0, mass, 1.0)

    def increments(row: PyTree) -> Float[Array, "before now"]:
        def value(before: Array, x: Array) -> Array:
            return _number(functional.increment(before, x, row), points.dtype)

        return jax.vmap(lambda before: jax.vmap(lambda x: value(before, x))(points))(points)

    def step(at: tuple) -> tuple[Array, Array, Array]:
        kernel, u, row = at
        return laws(model.transition, u), laws(kernel, None), increments(row)

    def likelihood(row: tuple) -> Float[Array, "point"]:
        logs = log_emission(model, points, *row)
        return jnp.exp(logs - jnp.max(logs))

    us, later = jax.tree.map(lambda leaf: leaf[1:], (series.inputs, data))
    transitions, kernels, functionals = lax.map(step, (chain.kernels, us, later))
    first = jax.tree.map(lambda leaf: leaf[0], data)
    start = jax.vmap(lambda x: _number(functional.initial(x, first), points.dtype))(points)
    log_first = log_prior(model, points) + grid.log_quadrature
    return {
        "prior": jnp.exp(log_first - jnp.max(log_first)),
        "transitions": transitions,
        "likelihoods": lax.map(likelihood, (series.ys, series.mask, series.inputs)),
        "kernels": kernels,
        "filters": lax.map(lambda law: law_on(grid, law)[0], chain.laws),
        "functional": functionals.at[0].add(start[:, None]),
    }


def _number(value: PyTree, dtype: Any) -> Array:
    (leaf,) = jax.tree.leaves(value)
    return jnp.asarray(leaf, dtype).reshape(())


def _check_types(chain: Any, grid: Any, functional: Any) -> None:
    for value, expected in (
        (chain, LinearGaussianChain),
        (grid, Grid),
        (functional, AbstractFunctional),
    ):
        if not isinstance(value, expected):
            raise TypeError(f"from_grid expects a {expected.__name__}, got {type(value).__name__}.")
    if chain.length is not None:
        raise ValueError("from_grid expects a chain without padding, got one with a length.")
    if grid.dim != chain.state_dim:
        raise ValueError(
            f"The grid has {grid.dim} dimensions, and the chain {chain.state_dim} state dimensions."
        )


def _check_sizes(series: Series, grid: Grid) -> None:
    n, size = series.num_times, grid.size
    if n < 2:
        raise ValueError(f"from_grid expects a series of two rows or more, got {n}.")
    if size > MAX_POINTS or n * size**2 > MAX_ENTRIES:
        raise ValueError(
            f"from_grid tabulates all pairs of points at all times: at most {MAX_POINTS} points"
            f" and {MAX_ENTRIES:.0e} entries, got {size} points and {n} · {size}² ="
            f" {n * size**2:.1e} entries. Take a coarser grid, or error_bound with a GridPosterior"
            " as its reference."
        )


def _check_scalar(functional: AbstractFunctional, grid: Grid, data: PyTree) -> None:
    row = jax.tree.map(lambda leaf: leaf[0], data)
    value = jax.eval_shape(lambda x: functional.increment(x, x, row), grid.lower)
    shapes = [leaf.shape for leaf in jax.tree.leaves(value)]
    if [math.prod(shape) for shape in shapes] != [1]:
        raise ValueError(
            "from_grid expects a functional whose value is one number, got arrays of shapes"
            f" {shapes}. Write one for a single entry, with AdditiveFunctional or StateFunctional."
        )
