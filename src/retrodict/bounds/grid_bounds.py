"""Bounds with a grid as the exact posterior, for any model with one or two state dimensions.

They hold up to the error of the grid, and neglect states outside of its box.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import erf
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._chains import LinearGaussianChain
from retrodict._exact import (
    Grid,
    GridPosterior,
    blocked_operator,
    densities,
    log_emission,
    operators,
)
from retrodict._model import AbstractKernel, Gaussian, LinearGaussianKernel, StateSpaceModel
from retrodict._numerics import linalg
from retrodict.bounds.distances import interval_distance, spectral_norm, table_distance
from retrodict.bounds.lipschitz import decayed_sums

CELL_POINTS = 8
"""The number of points per coordinate over which a function is averaged within a cell."""


def check_unpadded(chain: Any, owner: str) -> None:
    """Refuse a chain that is not linear Gaussian, or has padding."""
    if not isinstance(chain, LinearGaussianChain):
        raise TypeError(f"{owner} expects a LinearGaussianChain, got {type(chain).__name__}.")
    if chain.length is not None:
        raise ValueError(f"{owner} expects a chain without padding: take chain.prefix(length).")


def law_on(grid: Grid, law: Gaussian) -> tuple[Float[Array, "point"], Scalar]:
    """Return the probabilities of a Gaussian law at the points, and |1 − their sum|."""
    constant = LinearGaussianKernel(
        jnp.zeros((law.dim, law.dim), law.mean.dtype), law.mean, law.scale_tril
    )
    table = densities(constant, grid.points[:1], grid.points, None)[0]
    return normalised(table * jnp.exp(grid.log_quadrature))


def kernel_on(
    grid: Grid, kernel: AbstractKernel, u: Float[Array, "input"] | None
) -> tuple[Float[Array, "from to"], Float[Array, "from"]]:
    """Return the probabilities of a kernel between the points, and |1 − their sums|."""
    table = densities(kernel, grid.points, grid.points, u) * jnp.exp(grid.log_quadrature)[None, :]
    return jax.vmap(normalised)(table)


def likelihood_on(grid: Grid, model: StateSpaceModel, row: tuple) -> Float[Array, "point"]:
    """Return the likelihood of one row of a series at the points, scaled to a maximum of one."""
    logs = log_emission(model, grid.points, *row)
    return jnp.exp(logs - jnp.max(logs))


def within_cell(grid: Grid) -> Float[np.ndarray, "shift state"]:
    """Return shifts that spread points evenly over the cell of each point of a grid."""
    steps = (np.arange(CELL_POINTS) + 0.5) / CELL_POINTS - 0.5
    mesh = np.meshgrid(*(steps * float(h) for h in grid.spacing), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in mesh], axis=1)


def normalised(weights: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Scalar]:
    """Return weights with a sum of one, and |1 − their sum|; zeros stay zero."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1.0), jnp.abs(1.0 - total)


def _distance(grid: Grid, p: Array, q: Array) -> Scalar:
    """Return W₁ in one dimension, an upper bound of it in two."""
    if grid.dim == 1:
        return interval_distance(p, q, grid.spacing[0])
    return table_distance(p.reshape(grid.num_points), q.reshape(grid.num_points), grid.spacing)


@eqx.filter_jit
def marginals_on(
    grid: Grid, chain: LinearGaussianChain
) -> tuple[Float[Array, "time point"], Scalar]:
    """Return the marginal laws of a chain at the points, and the largest misfit of their sums."""
    weights, misfits = lax.map(lambda law: law_on(grid, law), chain.marginals())
    return weights, jnp.max(misfits)


@eqx.filter_jit
def marginal_distances(
    chain: LinearGaussianChain, posterior: GridPosterior
) -> tuple[Float[Array, "time"], Scalar]:
    """Compute the distances of Wφ with the marginals of the grid.

    Returns:
        W(φ_{j+1|n} q_{j|j+1}, φ_{j|n}) for each j, with W(q_{n-1}, φ_{n-1}) at the end; and the
        largest misfit of a law on the grid.
    """
    grid = posterior.grid

    def step(at: tuple) -> tuple[Array, Array]:
        kernel, later, earlier = at
        moved = blocked_operator(kernel, grid.points, None).push(later)
        law, misfit = normalised(moved * jnp.exp(grid.log_quadrature))
        return _distance(grid, law, earlier), misfit

    steps, misfits = lax.map(step, (chain.kernels, posterior.weights[1:], posterior.weights[:-1]))
    last, misfit = law_on(grid, chain.terminal)
    steps = jnp.append(steps, _distance(grid, last, posterior.weights[-1]))
    return steps, jnp.maximum(misfit, jnp.max(misfits, initial=0.0))


@eqx.filter_jit
def kernel_distances(
    chain: LinearGaussianChain, posterior: GridPosterior
) -> tuple[Float[Array, "time"], Float[Array, "time"], Scalar]:
    """Compute mean distances of the variational backward kernels to the exact ones, for d = 1.

    Returns:
        E_{φ_{j+1|n}} W₁(q_{j|j+1}(X, ·), b_j(X, ·)) for each j, with W₁(q_{n-1}, φ_{n-1}) at the
        end; the same with total variations; and the largest misfit of a mean law on the grid.
    """
    grid, transition = posterior.grid, posterior.transition.kernel

    def distances(p: Array, q: Array) -> Array:
        return jnp.stack([_distance(grid, p, q), 0.5 * jnp.sum(jnp.abs(p - q))])

    def step(at: tuple) -> tuple[Array, Array]:
        kernel, filtered, later, u = at
        ours, misfit = kernel_on(grid, kernel, None)
        joint = filtered[None, :] * densities(transition, grid.points, grid.points, u).T
        exact, _ = jax.vmap(normalised)(joint)
        means = jnp.sum(later[:, None] * jax.vmap(distances)(ours, exact), axis=0)
        return means, jnp.sum(later * misfit)

    us = None if posterior.inputs is None else posterior.inputs[1:]
    rows = (chain.kernels, posterior.filter_weights[:-1], posterior.weights[1:], us)
    steps, misfits = lax.map(step, rows)
    last, misfit = law_on(grid, chain.terminal)
    moves, variations = jnp.vstack([steps, distances(last, posterior.weights[-1])]).T
    return moves, variations, jnp.maximum(misfit, jnp.max(misfits, initial=0.0))


@eqx.filter_jit
def total_variation(
    chain: LinearGaussianChain,
    grid: Grid,
    variations: Float[Array, "time"],
    oscillations: Float[Array, "time"],
    pairs: bool,
) -> Float[Array, "time"]:
    """Compute S2φ on the box, for bounded functionals.

        TV(q_{n-1}, φ_{n-1}) u_{n-1} + Σ_j τ_j (u_j + o_{j+1}),
        τ_j = E_{φ_{j+1|n}} TV(q_{j|j+1}(X, ·), b_j(X, ·)),

    with u_{j+1} = δ_j u_j + o_{j+1} and u_0 = o_0, o_k the oscillation of h_k, and δ_j the
    Dobrushin coefficient of q_{j|j+1} on a box of diameter D: two states at distance D give
    Gaussian laws with TV = erf(‖s⁻¹G‖ D / 2√2) at most. If h_k depends on x_k only,
    o_{j+1} drops out of the sum over j.
    """
    diameter = jnp.linalg.norm(grid.upper - grid.lower)

    def contraction(kernel: LinearGaussianKernel) -> Array:
        whitened = linalg.solve_triangular(kernel.scale_tril, kernel.weight)
        return erf(spectral_norm(whitened) * diameter / np.sqrt(8.0))

    u = decayed_sums(jax.vmap(contraction)(chain.kernels), oscillations)
    return variations * (u + jnp.append(oscillations[1:], 0.0) if pairs else u)


@eqx.filter_jit
def ranges(posterior: GridPosterior, values: Float[Array, "time point"]) -> Float[Array, "time"]:
    """Compute the ranges D_j of Theorem 3 of Σ_k f_k(x_k), given by its values at the points.

    Under the exact posterior the functional is a sum of martingale increments. The increment of
    time j given x_{j-1} has the range D_j = osc(f_j + V_{j+1}), where V_{j+1}(x) is the expected
    sum of the later terms given x_j = x.
    """
    move = operators(posterior.transition.kernel, posterior.grid, posterior.kind)

    us = None if posterior.inputs is None else posterior.inputs[1:]
    densities_ahead = lax.map(
        lambda at: move(at[1])[0].push(at[0]), (posterior.filter_weights[:-1], us)
    )

    def back(ahead: Array, at: tuple) -> tuple[Array, Array]:
        smoothed, density, value, u = at
        reached = ahead + value
        ratio = jnp.where(density > 0, smoothed / jnp.where(density > 0, density, 1.0), 0.0)
        operator, _ = move(u)
        mass = operator.pull(ratio)
        mean = operator.pull(ratio * reached) / jnp.where(mass > 0, mass, 1.0)
        # Points without mass ahead have no mean: they take the middle of the range.
        middle = 0.5 * (jnp.max(reached) + jnp.min(reached))
        return jnp.where(mass > 0, mean, middle), jnp.ptp(reached)

    rows = (posterior.weights[1:], densities_ahead, values[1:], us)
    ahead, later = lax.scan(back, jnp.zeros_like(values[0]), rows, reverse=True)
    return jnp.append(jnp.ptp(ahead + values[0]), later)
