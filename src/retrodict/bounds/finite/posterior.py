"""The exact posterior on a finite space, and laws of neighbours."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict.bounds.finite.problem import FiniteProblem


def normalise(array: Array) -> Array:
    """Normalise rows to a sum of 1; a row of zeros, which no law visits, becomes uniform."""
    total = jnp.sum(array, axis=-1, keepdims=True)
    return jnp.where(total > 0, array / jnp.where(total > 0, total, 1.0), 1.0 / array.shape[-1])


class Exact(NamedTuple):
    """The law of the states given the observations, in both directions of time.

    Attributes:
        filtered: φ_k, the law of x_k given y_{0:k}.
        betas: β_k(x), the likelihood of the observations after k given x_k = x, with maximum 1.
        smoothed: φ_{k|n}, the law of x_k given all observations.
        forward: F_k(x, y), the transition from x_k to x_{k+1} given all observations.
        backward: b_k(y, x), the transition from x_{k+1} back to x_k.
    """

    filtered: Float[Array, "time state"]
    betas: Float[Array, "time state"]
    smoothed: Float[Array, "time state"]
    forward: Float[Array, "pair state state"]
    backward: Float[Array, "pair state state"]


def exact_posterior(problem: FiniteProblem) -> Exact:
    """Compute φ_k and b_k forward in time, β_k and F_k backward."""
    # Only ratios matter: each step is scaled to a maximum of 1, so that products never underflow.
    peaks = jnp.max(problem.potentials, axis=(1, 2), keepdims=True)
    potentials = problem.potentials / peaks

    def ahead(law: Array, potential: Array) -> tuple[Array, tuple[Array, Array]]:
        joint = law[:, None] * potential
        after = normalise(jnp.sum(joint, axis=0))
        return after, (after, normalise(joint.T))

    def back(beta: Array, potential: Array) -> tuple[Array, tuple[Array, Array]]:
        joint = potential * beta[None, :]
        before = jnp.sum(joint, axis=1)
        before = before / jnp.max(before)
        return before, (before, normalise(joint))

    first, last = normalise(problem.initial), jnp.ones_like(problem.initial)
    _, (filtered, backward) = jax.lax.scan(ahead, first, potentials)
    _, (betas, forward) = jax.lax.scan(back, last, potentials, reverse=True)
    filtered = jnp.concatenate([first[None], filtered])
    betas = jnp.concatenate([betas, last[None]])
    return Exact(filtered, betas, normalise(filtered * betas), forward, backward)


def chain_marginals(problem: FiniteProblem) -> Float[Array, "time state"]:
    """Return the marginals q_{k|n} of the chain."""

    def back(law: Array, kernel: Array) -> tuple[Array, Array]:
        before = jnp.matmul(law, kernel, precision=jax.lax.Precision.HIGHEST)
        return before, before

    last = problem.terminal
    _, laws = jax.lax.scan(back, last, problem.kernels, reverse=True)
    return jnp.concatenate([laws, last[None]])


def pairs_back(laws: Array, kernels: Array) -> Float[Array, "pair state state"]:
    """Return the laws of (x_k, x_{k+1}) with x_{k+1} of law k+1, and x_k by a kernel."""
    return laws[1:, None, :] * jnp.swapaxes(kernels, 1, 2)


def pairs_ahead(laws: Array, kernels: Array) -> Float[Array, "pair state state"]:
    """Return the laws of (x_k, x_{k+1}) with x_k of law k, and x_{k+1} by a kernel."""
    return laws[:-1, :, None] * kernels
