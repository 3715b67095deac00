"""The exact posterior on a finite space, and the constants and coefficients in the bounds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import Scalar, is_concrete
from retrodict.bounds.finite.coefficients import (
    birkhoff,
    divergences,
    dobrushin,
    tilted_distance,
    total_variation,
)
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


class FiniteQuantities(NamedTuple):
    """The constants and coefficients in the bounds.

    Attributes:
        h1: H1's constants, c_0 = 2 TV(q̃_0, φ_0) and, for m ≥ 1,
            c_m = 2 TV(q̃_m ⊗ q_{m-1|m}, q̃_{m-1} L_{m-1} / q̃_{m-1} L_{m-1} 1).
        sigma_minus: H2's σ₋; zero if some density vanishes, and then H2 does not hold.
        sigma_plus: H2's σ₊.
        tilted: τ_0 = TV(t_0, φ_{0|n}) and τ_m = TV(t_m ⊗ q_{m-1|m}, t_{m-1} ⊗ F_{m-1}), with
            t_m ∝ q̃_m β_m.
        tilted_bound: I(B_m, c_m / 2) ≥ τ_m, which needs no posterior.
        kernel_dobrushin: δ(q_{k|k+1}).
        forward_dobrushin: δ(F_k).
        birkhoff: ϑ_k ≥ δ(F_k).
        ratios: B_k ≥ max β_k / min β_k; B_{n-1} = 1.
        evidence_gap: log p(y) - ELBO, the divergence KL(q ‖ φ) of the laws of whole paths.
    """

    h1: Float[Array, "time"]
    sigma_minus: Scalar
    sigma_plus: Scalar
    tilted: Float[Array, "time"]
    tilted_bound: Float[Array, "time"]
    kernel_dobrushin: Float[Array, "pair"]
    forward_dobrushin: Float[Array, "pair"]
    birkhoff: Float[Array, "pair"]
    ratios: Float[Array, "time"]
    evidence_gap: Scalar


def mixing_constants(
    problem: FiniteProblem, measure: Float[Array, "state"] | None = None
) -> tuple[Scalar, Scalar]:
    """Compute the mixing constants of H2: all densities are between σ₋ and σ₊.

    These are the densities ℓ_k of L_k(x, ·) and those of the kernels q_{k|k+1}(y, ·). The scale of
    each likelihood is free, and is chosen to minimise σ₊ / σ₋.

    Args:
        problem: the problem.
        measure: the measure that densities refer to, positive, of shape `(S,)`; `None` counts
            states.

    Returns:
        σ₋ and σ₊.
    """
    measure = jnp.ones_like(problem.initial) if measure is None else measure
    check_measure(problem, measure)
    q = problem.kernels / measure[None, None, :]
    ell = problem.potentials / measure[None, None, :]
    low, high = jnp.min(ell, axis=(1, 2)), jnp.max(ell, axis=(1, 2))
    ratio = jnp.max(jnp.where(low > 0, high / jnp.where(low > 0, low, 1.0), jnp.inf))
    least, greatest = jnp.min(q), jnp.max(q)
    possible = (least > 0) & jnp.isfinite(ratio)
    stretched = jnp.maximum(greatest, least * jnp.where(possible, ratio, 1.0))
    return jnp.where(possible, least, 0.0), stretched


def check_measure(problem: FiniteProblem, measure: Array) -> None:
    """Refuse a measure of the wrong shape or without mass at some state."""
    if measure.shape != problem.initial.shape:
        raise ValueError(
            f"measure must have shape (S,) = {problem.initial.shape}, got {measure.shape}."
        )
    if is_concrete(measure) and not np.all(np.asarray(measure) > 0):
        raise ValueError(f"measure must be positive at every state, got {measure}.")


def quantities_of(
    problem: FiniteProblem, exact: Exact, marginals: Array, measure: Array | None
) -> tuple[FiniteQuantities, Float[Array, "time state"]]:
    """Compute all quantities, and the laws t_m."""
    distances = jax.vmap(total_variation)
    filters = problem.filters
    weighted = filters * exact.betas
    tilts = normalise(weighted)
    tilted = distances(pairs_back(tilts, problem.kernels), pairs_ahead(tilts, exact.forward))
    start = total_variation(tilts[0], exact.smoothed[0])

    moved = pairs_ahead(filters, problem.potentials)
    mass = jnp.sum(moved, axis=(1, 2))
    moved = moved / jnp.where(mass > 0, mass, 1.0)[:, None, None]
    far = distances(pairs_back(filters, problem.kernels), moved)
    # A law that the model cannot continue has the largest distance.
    far = jnp.where(mass > 0, far, 1.0)
    epsilon = jnp.concatenate([total_variation(filters[0], exact.filtered[0])[None], far])

    # Both sets of kernels in one call, as one loop is compiled faster than two.
    both = jnp.stack([problem.kernels, exact.forward])
    kernel_dobrushin, forward_dobrushin = jax.vmap(jax.vmap(dobrushin))(both)
    theta, ratios = jax.vmap(birkhoff)(problem.transitions)
    ratios = jnp.concatenate([ratios, jnp.ones_like(ratios[:1])])
    # Lemma 2 needs laws that can be reweighted. Laws that the future excludes were replaced by
    # others, for which the trivial bound 1 holds.
    excluded = jnp.sum(weighted, axis=1) <= 0
    excluded = excluded | jnp.concatenate([jnp.zeros_like(excluded[:1]), excluded[:-1]])
    sigma_minus, sigma_plus = mixing_constants(problem, measure)
    quantities = FiniteQuantities(
        h1=2.0 * epsilon,
        sigma_minus=sigma_minus,
        sigma_plus=sigma_plus,
        tilted=jnp.concatenate([start[None], tilted]),
        tilted_bound=jnp.where(excluded, 1.0, tilted_distance(ratios, epsilon)),
        kernel_dobrushin=kernel_dobrushin,
        forward_dobrushin=forward_dobrushin,
        birkhoff=theta,
        ratios=ratios,
        evidence_gap=_evidence_gap(problem, exact, marginals),
    )
    return quantities, tilts


def _evidence_gap(problem: FiniteProblem, exact: Exact, marginals: Array) -> Scalar:
    """Return KL(q ‖ φ) = KL(q_{n-1} ‖ φ_{n-1}) + Σ_k E_{q_{k+1|n}} KL(q_{k|k+1} ‖ b_k)."""
    local = divergences(problem.kernels, exact.backward)
    visited = marginals[1:] > 0
    inner = jnp.where(visited, marginals[1:] * jnp.where(visited, local, 0.0), 0.0)
    return divergences(problem.terminal, exact.filtered[-1]) + jnp.sum(inner)
