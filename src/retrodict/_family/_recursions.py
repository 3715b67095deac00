"""Prediction, conditioning and reversal of Gaussian laws that have a density.

Laws travel as a mean and a lower Cholesky factor. Each step factors one matrix of the form I + BᵀB,
which is never near singular, or a sum of two Gram matrices: nothing is subtracted.

The transition is mostly the same for all rows and series. Under `vmap` a product w x with a shared
w would gather the rows of all x into one matrix, across the whole batch; `shared_matmul` writes it
as (xᵀwᵀ)ᵀ, which moves entries within each x alone.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from retrodict import _linalg as linalg
from retrodict._chain import cholesky_and_inverse, shared_matmul
from retrodict._gaussian import Gaussian
from retrodict._kalman._operations import Prior, Transition, Whitened
from retrodict._kalman._parallel import filter_laws_in_parallel
from retrodict._kernel import LinearGaussianKernel


class GaussianState(NamedTuple):
    """The state of a family whose recurrence is a Gaussian law.

    Attributes:
        mean: m, the mean of q_k; of the prior before anything was seen.
        scale: s, its lower Cholesky factor.
        count: how many rows were read.
    """

    mean: Float[Array, "*time d"]
    scale: Float[Array, "*time d d"]
    count: Int[Array, "*time"]


def before_anything(prior: Gaussian) -> GaussianState:
    """The state that stands for the prior."""
    return GaussianState(prior.mean, prior.scale_tril, jnp.zeros((), jnp.int32))


def predicted(
    state: GaussianState, kernel: LinearGaussianKernel
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """The law of the next state: the prior itself at the first row, its image later on."""
    first = state.count == 0
    mean, scale = predict(state.mean, state.scale, kernel.weight, kernel.bias, kernel.scale_tril)
    return jnp.where(first, state.mean, mean), jnp.where(first, state.scale, scale)


def predict(
    mean: Float[Array, "d"],
    scale: Float[Array, "d d"],
    weight: Float[Array, "d d"],
    bias: Float[Array, "d"],
    noise: Float[Array, "d d"],
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """The law of w x + b + q ε for x of law N(m, s sᵀ)."""
    moved = shared_matmul(weight, scale)
    covariance = linalg.outer_gram(moved) + linalg.outer_gram(noise)
    return linalg.matvec(weight, mean) + bias, cholesky_and_inverse(covariance)[0]


def condition(
    mean: Float[Array, "d"],
    scale: Float[Array, "d d"],
    design: Float[Array, "p d"],
    value: Float[Array, "p"],
) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
    """The law of x given value = h x + ε, for x of law N(m, s sᵀ) and standard normal ε.

    With B = h s the covariance becomes s (I + BᵀB)⁻¹ sᵀ, and factoring I + BᵀB = U Uᵀ with an upper
    U makes s U⁻ᵀ its lower Cholesky factor.
    """
    seen = linalg.matmul(design, scale)
    after = linalg.matmul(scale, _inverse_of_upper_factor(seen))
    gained = linalg.matvec(design.T, value - linalg.matvec(design, mean))
    return mean + linalg.matvec(after, linalg.matvec(after.T, gained)), after


def reverse(
    mean: Float[Array, "d"],
    scale: Float[Array, "d d"],
    weight: Float[Array, "d d"],
    bias: Float[Array, "d"],
    noise: Float[Array, "d d"],
) -> tuple[Float[Array, "d d"], Float[Array, "d"], Float[Array, "d d"]]:
    """The backward kernel of x given z = w x + b + q ε, for x of law N(m, s sᵀ).

    It is `condition` on the d observations q⁻¹(z − b) of design h = q⁻¹w: with the conditional
    factor f, the gain is f fᵀ hᵀ q⁻¹, of which hᵀ q⁻¹ is the same for all rows.

    Returns:
        The gain G, the offset m − G (w m + b) and the lower factor f.
    """
    eye = jnp.eye(noise.shape[0], dtype=noise.dtype)
    whitener = linalg.solve_triangular(noise, eye)
    design = linalg.matmul(whitener, weight)
    after = linalg.matmul(scale, _inverse_of_upper_factor(shared_matmul(design, scale)))
    gain = linalg.matmul(linalg.outer_gram(after), linalg.matmul(design.T, whitener))
    offset = mean - linalg.matvec(gain, linalg.matvec(weight, mean) + bias)
    return gain, offset, after


def filtered_in_parallel(
    prior: GaussianState,
    kernel: LinearGaussianKernel,
    design: Float[Array, "time p d"],
    value: Float[Array, "time p"],
    exists: Bool[Array, "time"] | None,
) -> GaussianState:
    """The states after every row by an associative scan.

    Args:
        prior: the state before anything was seen.
        kernel: the transition, the same at all times or with a row for each; the first is not used.
        design: h of each row.
        value: what each row observed of h x + ε.
        exists: which rows exist.
    """
    varies = kernel.bias.ndim == 2
    arrays = (kernel.weight, kernel.bias, kernel.scale_tril)
    transition = Transition(*(leaf[1:] if varies else leaf for leaf in arrays))
    laws, _ = filter_laws_in_parallel(
        Prior(prior.mean, prior.scale), transition, Whitened(design, value), exists
    )
    counts = jnp.arange(1, value.shape[0] + 1, dtype=prior.count.dtype)
    return GaussianState(laws.mean, laws.scale_tril, counts)


def contraction(w: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """A matrix of spectral norm below one: w C⁻ᵀ with I + wᵀw = C Cᵀ.

    Its Gram matrix is I − C⁻¹C⁻ᵀ. Every strict contraction is reached: see `expansion`.
    """
    eye = jnp.eye(w.shape[0], dtype=w.dtype)
    _, inverse = cholesky_and_inverse(eye + linalg.matmul(w.T, w))
    return linalg.matmul(w, inverse.T)


def expansion(g: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The w with `contraction(w)` = g, for g of spectral norm below one."""
    eye = jnp.eye(g.shape[0], dtype=g.dtype)
    left = linalg.cholesky(eye - linalg.matmul(g.T, g))
    return linalg.solve_triangular(left, g.T).T


def _inverse_of_upper_factor(b: Float[Array, "p d"]) -> Float[Array, "d d"]:
    """U⁻ᵀ, which is lower, for the upper U with I + bᵀb = U Uᵀ."""
    eye = jnp.eye(b.shape[1], dtype=b.dtype)
    gram = eye + linalg.matmul(b.T, b)
    _, inverse = cholesky_and_inverse(gram[::-1, ::-1])
    return inverse[::-1, ::-1].T
