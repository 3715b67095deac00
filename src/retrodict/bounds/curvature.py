"""A lower bound K₀ of the curvature −∇² log p(x_{0:n-1}, y) of a log-concave joint density.

K₀ is block tridiagonal: prior and transition are linear Gaussian, whose curvature is known exactly,
and the emission adds a declared matrix at each time. As the precision of a Gaussian law of paths it
has backward gains, marginal covariances, and

    sᵀ K₀⁻¹ s = Σ_k ‖l_k⁻¹ r_k‖²,   r_k = s_k + G_{k-1}ᵀ r_{k-1},   D_k = l_k l_kᵀ,

by one elimination forward in time.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._arrays import Scalar
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Gaussian,
    Series,
    StateSpaceModel,
    dense_scale,
)
from retrodict._numerics import linalg
from retrodict.bounds.distances import norms
from retrodict.bounds.lipschitz import windowed_lipschitz_sums


class Curvature(NamedTuple):
    """The elimination of K₀, and its inverse near the diagonal.

    Attributes:
        pivots: l_k, the lower factors of the pivots D_k.
        gains: G_k = −D_k⁻¹ K₀[k, k+1], so that K₀⁻¹[i, j] = G_i ⋯ G_{j-1} K₀⁻¹[j, j] for i ≤ j.
        covariances: K₀⁻¹[k, k].
        definite: whether all pivots are positive beyond rounding; otherwise the other fields are
            invalid.
    """

    pivots: Float[Array, "time d d"]
    gains: Float[Array, "pair d d"]
    covariances: Float[Array, "time d d"]
    definite: Bool[Array, ""]

    def quadratic_form(self, s: Float[Array, "time d"]) -> Float[Array, "time"]:
        """Return the terms of sᵀ K₀⁻¹ s, one per time."""

        def step(before: Array, at: tuple) -> tuple[Array, Array]:
            gain, pivot, here = at
            rest = here + linalg.matvec(gain.T, before)
            return rest, jnp.sum(linalg.solve_triangular(pivot, rest) ** 2)

        gains = jnp.concatenate([jnp.zeros_like(self.pivots[:1]), self.gains])
        return lax.scan(step, jnp.zeros_like(s[0]), (gains, self.pivots, s))[1]

    @eqx.filter_jit
    def largest_variance(
        self, lipschitz: Float[Array, "time"], window: int
    ) -> Float[Array, "time"]:
        """Return the terms of Σ_{i,j} ℓ_i ℓ_j ‖K₀⁻¹[i, j]‖, an upper bound of ∇hᵀ K₀⁻¹ ∇h."""
        sums = windowed_lipschitz_sums(self.gains, lipschitz, self.covariances, window)
        return lipschitz * (2 * sums - lipschitz * norms(self.covariances))


def eliminate(blocks: Float[Array, "time d d"], between: Float[Array, "pair d d"]) -> Curvature:
    """Eliminate a block-tridiagonal matrix, which should be positive definite.

    Args:
        blocks: K₀[k, k].
        between: K₀[k, k+1].
    """

    def step(pivot: Array, at: tuple) -> tuple[Array, tuple]:
        block, across = at
        half = linalg.solve_triangular(pivot, across)
        gain = -linalg.solve_triangular(pivot, half, transpose=True)
        after = linalg.cholesky(block - linalg.matmul(half.T, half))
        return after, (after, gain)

    first = linalg.cholesky(blocks[0])
    _, (later, gains) = lax.scan(step, first, (blocks[1:], between))
    pivots = jnp.concatenate([first[None], later])
    eye = jnp.eye(blocks.shape[-1], dtype=blocks.dtype)
    inverses = jax.vmap(lambda pivot: linalg.solve_triangular(pivot, eye))(pivots)
    noises = jax.vmap(lambda inverse: linalg.matmul(inverse.T, inverse))(inverses)

    def back(after: Array, at: tuple) -> tuple[Array, Array]:
        gain, noise = at
        here = linalg.matmul(linalg.matmul(gain, after), gain.T) + noise
        return here, here

    _, earlier = lax.scan(back, noises[-1], (gains, noises[:-1]), reverse=True)
    sizes = jnp.diagonal(blocks, axis1=1, axis2=2)
    squares = jnp.diagonal(pivots, axis1=1, axis2=2) ** 2
    # A pivot that is not positive becomes zero or NaN, and neither is above rounding.
    definite = jnp.all(squares > 1e3 * jnp.finfo(blocks.dtype).eps * jnp.abs(sizes))
    return Curvature(pivots, gains, jnp.concatenate([earlier, noises[-1:]]), definite)


def why_unknown(model: StateSpaceModel) -> str | None:
    """Return why a model has no curvature bound; `None` if it has one."""
    if not isinstance(model.prior, Gaussian):
        return f"the prior is {type(model.prior).__name__}, not Gaussian"
    if not isinstance(model.transition, AbstractLinearGaussianKernel):
        return f"the transition is {type(model.transition).__name__}, not linear Gaussian"
    if isinstance(model.emission, AbstractLinearGaussianKernel):
        return None
    if getattr(model.emission, "curvature", None) is None:
        return (
            f"the emission ({type(model.emission).__name__}) declares no curvature: if its density"
            " is log-concave in the state, give it curvature=lambda y: jnp.zeros((d, d)), or more"
            " if more is known"
        )
    return None


@eqx.filter_jit
def curvature(model: StateSpaceModel, series: Series) -> Curvature:
    """Compute K₀ of an unwrapped model for which `why_unknown` is `None`, without padding."""
    prior: Any = model.prior
    d, n = prior.dim, series.num_times
    dtype = series.ys.dtype

    def precision(scale: Any) -> Array:
        whitener = linalg.solve_triangular(dense_scale(scale), jnp.eye(d, dtype=dtype))
        return linalg.matmul(whitener.T, whitener)

    def moved(u: Array | None) -> tuple[Array, Array, Array]:
        kernel = model.transition.at(u)
        weight, tight = kernel.weight, precision(kernel.scale_tril)
        across = -linalg.matmul(weight.T, tight)
        return -linalg.matmul(across, weight), across, tight

    us = None if series.inputs is None else series.inputs[1:]
    past, between, present = jax.vmap(moved, axis_size=n - 1)(us)
    rows = (series.ys, series.mask, series.inputs)
    emitted = jax.vmap(partial(emission_curvature, model))(*rows)
    blocks = emitted.at[0].add(precision(prior.scale_tril)).at[:-1].add(past).at[1:].add(present)
    return eliminate(blocks, between)


def emission_curvature(
    model: StateSpaceModel, y: Array, mask: Array | None, u: Array | None
) -> Float[Array, "d d"]:
    """Return the curvature of the emission: exact if it is linear Gaussian, else as declared."""
    kernel: Any = model.emission
    if isinstance(kernel, AbstractLinearGaussianKernel):
        point = jnp.zeros(kernel.at(u).weight.shape[1], y.dtype)
        return -jax.hessian(lambda x: kernel.log_prob(x, y, u, mask))(point)
    declared = kernel.curvature(y, u) if kernel.takes_input else kernel.curvature(y)
    d = model.prior.dim
    declared = jnp.asarray(declared, y.dtype)
    if declared.shape != (d, d):
        raise ValueError(
            f"The curvature of an emission must have shape ({d}, {d}), one row and column per"
            f" coordinate of the state, got {declared.shape}."
        )
    # A missing row has no curvature; the driver refuses rows that were observed in part.
    return declared if mask is None else jnp.where(jnp.any(mask), declared, 0.0)


@eqx.filter_jit
def least_excess(
    model: StateSpaceModel, series: Series, paths: Float[Array, "sample time d"]
) -> tuple[Scalar, Array]:
    """Return the least excess of the emission's curvature at sampled states over its declaration.

    Returns:
        The least eigenvalue of −∇² log g(x_k, y_k) minus the declared matrix, relative to the size
        of either, and its time. Below zero, the declaration is wrong.
    """

    def at(x: Array, y: Array, mask: Array | None, u: Array | None) -> Array:
        actual = -jax.hessian(lambda x: model.emission.log_prob(x, y, u, mask))(x)
        declared = emission_curvature(model, y, mask, u)
        size = jnp.linalg.norm(actual) + jnp.linalg.norm(declared)
        return jnp.linalg.eigvalsh(actual - declared)[0] / jnp.where(size > 0, size, 1.0)

    rows = (series.ys, series.mask, series.inputs)
    excess = jax.vmap(lambda path: jax.vmap(at)(path, *rows))(paths)
    times = jnp.min(excess, axis=0)
    return jnp.min(times), jnp.argmin(times)
