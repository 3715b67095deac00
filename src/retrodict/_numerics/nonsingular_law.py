"""Gaussian laws that have a density: products, factors and reversal in the steps of families.

A law is a mean and a lower Cholesky factor. Each step factors one matrix of the form I + BᵀB, which
is never near singular, or a sum of two Gram matrices: nothing is subtracted. These steps are faster
under `vmap` and in derivatives than those of `gaussian_law.py`, which also allow singular laws.

Under `vmap`, XLA's batched product of 10 x 10 matrices takes several times as long on CPU if one
operand is read transposed, which is what the derivative of a product does. For larger matrices a
transpose is therefore a separate copy, behind a fence, at a fraction of the cost of the product; up
to `linalg.UNROLLED` rows products are plain `linalg`, which XLA fuses. The derivatives of the
larger ones are for reverse mode only.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._numerics import elimination, linalg


def reverse(
    mean: Float[Array, "d"],
    scale: Float[Array, "d d"],
    weight: Float[Array, "d d"],
    bias: Float[Array, "d"],
    noise: Float[Array, "d d"],
) -> tuple[Float[Array, "d d"], Float[Array, "d"], Float[Array, "d d"]]:
    """Return the backward kernel of x given z = w x + b + q ε, for x of law N(m, s sᵀ).

    It conditions on d observations q⁻¹(z − b) = h x + ε of design h = q⁻¹w. With B = h s, the
    covariance becomes s (I + BᵀB)⁻¹ sᵀ. Factoring I + BᵀB = U Uᵀ with an upper U makes f = s U⁻ᵀ
    its lower Cholesky factor. The gain is f fᵀ hᵀ q⁻¹, of which hᵀ q⁻¹ is the same for all rows.

    Returns:
        The gain G, the offset m − G (w m + b) and the lower factor f.
    """
    eye = jnp.eye(noise.shape[0], dtype=noise.dtype)
    whitener = linalg.solve_triangular(noise, eye)
    design = linalg.matmul(whitener, weight)
    after = _conditional_scale(scale, shared_product(design, scale))
    covariance = gram(after)
    gain = linalg.matmul(covariance, linalg.matmul(design.T, whitener))
    offset = mean - linalg.matvec(gain, linalg.matvec(weight, mean) + bias)
    return gain, offset, after


def _conditional_scale(
    scale: Float[Array, "d d"], standardised: Float[Array, "p d"]
) -> Float[Array, "d d"]:
    """Return the factor s U⁻ᵀ of a law of scale s given data of design B s⁻¹."""
    eye = jnp.eye(standardised.shape[1], dtype=standardised.dtype)
    information = eye + gram(transposed(standardised))
    return product(scale, inverse_of_upper_factor(information))


def contraction(w: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return a matrix of spectral norm below one: w C⁻ᵀ with I + wᵀw = C Cᵀ.

    Its Gram matrix is I − C⁻¹C⁻ᵀ. Every strict contraction is reached: see `expansion`.
    """
    eye = jnp.eye(w.shape[0], dtype=w.dtype)
    return product(w, transposed(inverse_cholesky(eye + gram(transposed(w)))))


def expansion(g: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return the w with `contraction(w)` = g, for g of spectral norm below one."""
    eye = jnp.eye(g.shape[0], dtype=g.dtype)
    left = linalg.cholesky(eye - linalg.matmul(g.T, g))
    return linalg.solve_triangular(left, g.T).T


def inverse_of_upper_factor(precision: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return U⁻ᵀ for the upper U with Λ = U Uᵀ: the lower Cholesky factor of Λ⁻¹."""
    if linalg.UNROLLED < precision.shape[0] <= elimination.LARGEST:
        return elimination.inverse_of_upper_factor(precision)
    return transposed(inverse_cholesky(precision[::-1, ::-1])[::-1, ::-1])


def transposed(a: Float[Array, "r c"]) -> Float[Array, "c r"]:
    """Return the transpose as an operand of `product`."""
    return a.T if max(a.shape) <= linalg.UNROLLED else linalg.fence(a.T)


def product(a: Float[Array, "r k"], b: Float[Array, "k c"]) -> Float[Array, "r c"]:
    """Return the product a b of two matrices that both differ along the batch."""
    return linalg.matmul(a, b) if a.shape[1] <= linalg.UNROLLED else _product(a, b)


@jax.custom_vjp
def _product(a: Array, b: Array) -> Array:
    return linalg.matmul(a, b)


def _product_forward(a: Array, b: Array) -> tuple[Array, tuple]:
    return linalg.matmul(a, b), (a, b)


def _product_backward(operands: tuple, g: Array) -> tuple[Array, Array]:
    a, b = operands
    return linalg.matmul(g, linalg.fence(b.T)), linalg.matmul(linalg.fence(a.T), g)


_product.defvjp(_product_forward, _product_backward)


def gram(*blocks: Float[Array, "r _"]) -> Float[Array, "r r"]:
    """Return the sum of the products a aᵀ of matrices of as many rows.

    For larger matrices it is one product, and so is its derivative.
    """
    if blocks[0].shape[0] <= linalg.UNROLLED:
        return linalg.sum_of([linalg.outer_gram(block) for block in blocks])
    return _gram(jnp.concatenate(blocks, axis=1))


@jax.custom_vjp
def _gram(a: Array) -> Array:
    return linalg.matmul(a, linalg.fence(a.T))


def _gram_forward(a: Array) -> tuple[Array, Array]:
    return linalg.matmul(a, linalg.fence(a.T)), a


def _gram_backward(a: Array, g: Array) -> tuple[Array]:
    return (linalg.matmul(g + g.T, a),)


_gram.defvjp(_gram_forward, _gram_backward)


def shared_product(a: Float[Array, "r k"], b: Float[Array, "k c"]) -> Float[Array, "r c"]:
    """Return the product a b, for an `a` shared by a batch of b's, as (bᵀaᵀ)ᵀ.

    Under `vmap` a b would gather the rows of all b's, which are far apart in memory; bᵀaᵀ is one
    product of a long matrix, after entries were moved within each b.
    """
    if a.shape[1] <= linalg.UNROLLED:
        return linalg.matmul(a, b)
    return linalg.fence(linalg.matmul(linalg.fence(b.T), a.T)).T


def inverse_cholesky(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return the inverse l⁻¹ of the lower factor of a symmetric positive-definite a = l lᵀ."""
    return _inverse_cholesky(a) if a.shape[0] <= linalg.UNROLLED else _large_inverse_cholesky(a)


def _inverse_cholesky(a: Array) -> Array:
    if a.shape == (1, 1):
        # One operation, where the general form has five that XLA does not fuse.
        return lax.rsqrt(a)
    return _inverse_of_lower(linalg.cholesky(a))


BLOCK = 32
"""The largest number of rows of a triangular matrix that is inverted in one call."""


def _inverse_of_lower(lower: Array) -> Array:
    """Invert a lower factor by halves: [a 0; c b]⁻¹ = [a⁻¹ 0; −b⁻¹ c a⁻¹ b⁻¹].

    Products of large blocks are quicker than a triangular solve against the identity: eleven times
    with d = 100 in float64 on two busy cores.
    """
    count = lower.shape[0]
    if count <= BLOCK:
        return linalg.solve_triangular(lower, jnp.eye(count, dtype=lower.dtype))
    half = count // 2
    one, other = _inverse_of_lower(lower[:half, :half]), _inverse_of_lower(lower[half:, half:])
    below = -linalg.matmul(linalg.matmul(other, lower[half:, :half]), one)
    zeros = jnp.zeros((half, count - half), lower.dtype)
    return jnp.block([[one, zeros], [below, other]])


@jax.custom_vjp
def _large_inverse_cholesky(a: Array) -> Array:
    """Compute `inverse_cholesky`, with a derivative of products alone.

    With k = l⁻¹ and Φ(x) the lower triangle of x with half its diagonal, dk = −Φ(k da kᵀ) k. The
    adjoint of a cotangent g is −kᵀ Φ(g kᵀ) k.
    """
    return (
        elimination.eliminate(a)[1] if a.shape[0] <= elimination.LARGEST else _inverse_cholesky(a)
    )


def _large_inverse_cholesky_forward(a: Array) -> tuple[Array, Array]:
    inverse = _large_inverse_cholesky(a)
    return inverse, inverse


def _large_inverse_cholesky_backward(inverse: Array, g: Array) -> tuple[Array]:
    turned = linalg.fence(inverse.T)
    lower = linalg.fence(elimination.half_lower(linalg.matmul(g, turned)))
    return (-linalg.matmul(linalg.matmul(turned, lower), inverse),)


_large_inverse_cholesky.defvjp(_large_inverse_cholesky_forward, _large_inverse_cholesky_backward)
