"""The forward and the backward pass on a grid, and measures of the quality of the grid."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._exact.grid.mesh import Grid
from retrodict._exact.grid.transition import Kind, map_rows, operators, product
from retrodict._model import StateSpaceModel
from retrodict._series import Series

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


def smooth(model: StateSpaceModel, series: Series, grid: Grid, kind: Kind) -> Passes:
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
    mean, covariance = _moments(weights, grid.points)
    return Passes(filter_weights, weights, mean, covariance, increments, escaping, excess)


def correction(smoothed: Array, predicted: Array) -> Array:
    """Return r = s_k / p_k; f_{k-1}(i) m(x_i, x_j) r(j) is then the joint law of a pair."""
    return jnp.where(predicted > 0, smoothed / jnp.where(predicted > 0, predicted, 1.0), 0.0)


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
    return _at_points(lambda x: jnp.sum(jnp.asarray(model.prior.log_prob(x))), points)


def log_emission(
    model: StateSpaceModel, points: Array, y: Array, mask: Array | None, u: Array | None
) -> Float[Array, "point"]:
    """Return the log density of the observed entries at one time, at the points."""
    emission: Any = model.emission
    return _at_points(lambda x: emission.log_prob(x, y, u=u, mask=mask), points)


def _at_points(fn: Callable[[Array], Array], points: Array) -> Float[Array, "point"]:
    return map_rows(fn, points, VALUES_PER_POINT).astype(points.dtype)


def mass_outside(model: StateSpaceModel, series: Series, grid: Grid) -> Float[Array, ""]:
    """Return the fraction of p(x_0 | y_0) outside of the box, within a box three times as wide."""
    wide, outside = grid.surroundings()
    mask = None if series.mask is None else series.mask[0]
    u = None if series.inputs is None else series.inputs[0]
    log_mass = log_prior(model, wide.points) + wide.log_quadrature
    log_mass = log_mass + log_emission(model, wide.points, series.ys[0], mask, u)
    # Outside of the box a model may be undefined, for example the logarithm of a negative state.
    log_mass = jax.lax.stop_gradient(jnp.where(jnp.isfinite(log_mass), log_mass, -jnp.inf))
    mass = jnp.exp(log_mass - jnp.max(log_mass))
    return jnp.sum(jnp.where(outside, mass, 0.0)) / jnp.sum(mass)


def _moments(
    weights: Float[Array, "time point"], points: Float[Array, "point state"]
) -> tuple[Float[Array, "time state"], Float[Array, "time state state"]]:
    """Return the means and covariances of laws on the points."""

    def of_one(law: Array) -> tuple[Array, Array]:
        mean = product(law, points)
        centred = points - mean[None, :]
        return mean, product((law[:, None] * centred).T, centred)

    return map_rows(of_one, weights, 3 * points.size)


def resolution(weights: Float[Array, "time point"], grid: Grid) -> Float[Array, "time"]:
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
