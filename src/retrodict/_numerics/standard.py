"""Gaussian steps in standard coordinates: prediction, conditioning and reversal of scales.

A law N(m, S Sᵀ) is written x = m + S z with standard normal z. The steps below transform the scale
S. None of them depends on the data, so that one computation serves all series with the same mask.

    predict     [w S, s] = B q, with orthonormal rows q:   w x + b + s ε = (w m + b) + B e
    condition   e given B, H and the innovation r:         e = K r + M z'
    reverse     z given e:                                 z = q₁ᵀ e + s' ε'

Every gain between standard coordinates has norm at most one. Nothing is divided by a width of the
state, so that singular, narrow and decaying directions need no special case.

Small states use unrolled Gram–Schmidt and scalar updates. Larger ones use Cholesky factors of Gram
matrices, which are several times faster than LAPACK's QR, where these are accurate to ε^(3/4), and
QR or scalar updates elsewhere. The choice is made at run time for each batch of rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._numerics import linalg
from retrodict._numerics.scalar_updates import process_entries


class StandardKernel(NamedTuple):
    """The backward kernel of z_{k-1} given z_k, with x_k = m_k + S_k z_k for filtering laws (m, S).

    The kernel is z_{k-1} = gain z_k + offset + scale ε. For any S the gain has norm at most one and
    the scale is at most the identity: no division by a width of the state occurs.
    """

    gain: Float[Array, "*time d d"]
    offset: Float[Array, "*time d"]
    scale: Float[Array, "*time d d"]


class Conditioning(NamedTuple):
    """The law of standard normal e given r = F e + ε: e = gain r + shrinkage z.

    Attributes:
        shrinkage: M, lower triangular, with M Mᵀ = (I + FᵀF)⁻¹.
        gain: K = (I + FᵀF)⁻¹ Fᵀ.
        whitener: W, lower triangular, with WᵀW = (I + F Fᵀ)⁻¹.
    """

    shrinkage: Float[Array, "*time d d"]
    gain: Float[Array, "*time d p"]
    whitener: Float[Array, "*time p p"]


class Reversal(NamedTuple):
    """The backward kernel of one transition, without its data.

    Between standard coordinates z_{k-1} = gain z_k + response r_k + scale ε, with the innovation
    r_k. Between states x_{k-1} = m_{k-1} + state_gain (x_k − a_k) + state_scale ε, with the
    predicted mean a_k.
    """

    gain: Float[Array, "*time d d"]
    response: Float[Array, "*time d p"]
    scale: Float[Array, "*time d d"]
    state_gain: Float[Array, "*time d d"]
    state_scale: Float[Array, "*time d d"]


def predict_scale(
    scale: Float[Array, "*time d d"],
    weight: Float[Array, "*time e d"],
    noise: Float[Array, "*time e k"],
) -> tuple[Float[Array, "*time e e"], Float[Array, "*time e d_plus_k"]]:
    """Return B and q with [w S, s] = B q: the scale of w x + b + s ε, and its directions."""
    return triangularise(jnp.concatenate([_matmul(weight, scale), noise], axis=-1))


def predicted_factor(
    scale: Float[Array, "*time d d"],
    weight: Float[Array, "*time e d"],
    noise: Float[Array, "*time e k"],
) -> Float[Array, "*time e e"]:
    """Return B of `predict_scale` alone, at a lower cost for larger matrices."""
    return lower_factor(jnp.concatenate([_matmul(weight, scale), noise], axis=-1))


def triangularise(
    rows: Float[Array, "*time r c"],
) -> tuple[Float[Array, "*time r r"], Float[Array, "*time r c"]]:
    """Factor rows = B q, with a lower triangular B of nonnegative diagonal and unit rows q.

    For r ≤ `linalg.UNROLLED` the rows q are orthogonal only if the rows are well conditioned: see
    `linalg.rotation`.
    """
    if rows.shape[-2] > linalg.UNROLLED:
        return _triangularise_large(rows)

    def single(rows: Array) -> tuple[Array, Array]:
        lower, diagonal, q = linalg.gram_schmidt(rows)
        return lower * linalg.safe_sqrt(diagonal)[None, :], q

    return _over_rows(single, rows)


@jax.custom_jvp
def _triangularise_large(rows: Float[Array, "*time r c"]) -> tuple[Array, Array]:
    gram = _matmul(rows, _transpose(rows))
    lower = jnp.tril(lax.linalg.cholesky(gram, symmetrize_input=False))
    return lax.cond(
        _resolved(lower),
        lambda: (lower, _solve(lower, rows)),
        lambda: _over_rows(linalg.lower_and_rows_by_qr, rows),
    )


@_triangularise_large.defjvp
def _triangularise_large_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple, tuple]:
    """Differentiate rows = B q under q qᵀ = I.

    With solved = B⁻¹ rows' and mixed = solved qᵀ, dB = B C and dq = solved − C q for the lower
    triangular C with C + Cᵀ = mixed + mixedᵀ. A pivot of zero counts as one, and its row and column
    of C are those of `mixed`. There dB is not lower triangular, but dB Bᵀ + B dBᵀ is still the
    derivative of rows rowsᵀ, which the part of rows' in no direction q affects to second order.
    """
    lower, q = _triangularise_large(*primals)
    pivots = jnp.diagonal(lower, axis1=-2, axis2=-1)
    sizes = jnp.sqrt(jnp.sum(lower**2, axis=-1))
    dependent = pivots <= 10 * lower.shape[-1] * jnp.finfo(lower.dtype).eps * sizes
    eye = _identity_like(lower)
    filled = jnp.where(dependent[..., None, :], eye, lower)
    solved = _solve(filled, tangents[0])
    mixed = _matmul(solved, _transpose(q))
    change = jnp.tril(mixed + _transpose(mixed), -1) + mixed * eye
    change = jnp.where(dependent[..., None, :] | dependent[..., None], mixed, change)
    return (lower, q), (_matmul(filled, change), solved - _matmul(change, q))


def lower_factor(rows: Float[Array, "*time r c"]) -> Float[Array, "*time r r"]:
    """Return the factor B of `triangularise` alone, at a lower cost for larger matrices."""
    if rows.shape[-2] > linalg.UNROLLED:
        return _lower_factor_large(rows)
    return triangularise(rows)[0]


@jax.custom_jvp
def _lower_factor_large(rows: Float[Array, "*time r c"]) -> Float[Array, "*time r r"]:
    gram = _matmul(rows, _transpose(rows))
    lower = jnp.tril(lax.linalg.cholesky(gram, symmetrize_input=False))
    return lax.cond(_resolved(lower), lambda: lower, lambda: _over_rows(linalg.tria_by_qr, rows))


@_lower_factor_large.defjvp
def _lower_factor_large_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (lower, _), (change, _) = jax.jvp(_triangularise_large, primals, tangents)
    return lower, change


def _resolved(lower: Float[Array, "*time d d"]) -> Bool[Array, ""]:
    """Return whether all factors are finite and have no narrow direction."""
    return jnp.all(narrowness(lower) > linalg.smallest_share(lower.dtype))


def narrowness(lower: Float[Array, "*time d d"]) -> Float[Array, "*time"]:
    """Return a bound from below of the squared width of every direction of factors.

    Widths are relative to the coordinates, which are the norms of the rows. With rows of norm one
    the bound is 1 / |B⁻¹|², in the Frobenius norm. It is at most d times too small. The product of
    the squared pivots is a bound too, but far too small for many coordinates.
    """
    sizes = jnp.sqrt(jnp.sum(lower**2, axis=-1))
    inverse = _solve(lower, _identity_like(lower) * sizes[..., None, :])
    bound = 1.0 / jnp.sum(inverse**2, axis=(-2, -1))
    # The solution for small matrices is finite where a pivot is zero.
    return jnp.where(jnp.all(jnp.diagonal(lower, axis1=-2, axis2=-1) > 0, axis=-1), bound, 0.0)


def condition_standard(design: Float[Array, "*time p d"]) -> Conditioning:
    """Condition standard normal e on r = F e + ε, for a design F and standard normal ε."""
    if design.shape[-1] > linalg.UNROLLED:
        by_entries = partial(_over_rows, _condition_by_entries)
        return lax.cond(_is_moderate(design), _condition_by_cholesky, by_entries, design)
    return _over_rows(_condition_by_entries, design)


def shrinkage_of(design: Float[Array, "*time p d"]) -> Float[Array, "*time d d"]:
    """Return the shrinkage M of `condition_standard` alone, at a lower cost for larger states."""
    if design.shape[-1] <= linalg.UNROLLED:
        return condition_standard(design).shrinkage
    return lax.cond(
        _is_moderate(design),
        _shrinkage_by_cholesky,
        lambda design: _over_rows(_condition_by_entries, design).shrinkage,
        design,
    )


def _is_moderate(design: Float[Array, "*time p d"]) -> Bool[Array, ""]:
    """Return whether I + FᵀF represents its identity part to ε^(2/3)."""
    largest = jnp.max(jnp.sum(design**2, axis=(-2, -1)))
    return largest * linalg.narrowest(design.dtype) < 1.0


def _shrinkage_by_cholesky(design: Float[Array, "*time p d"]) -> Float[Array, "*time d d"]:
    """Return U⁻ᵀ for the upper triangular U with U Uᵀ = I + FᵀF."""
    gram = _matmul(_transpose(design), design)
    eye = _identity_like(gram)
    information = eye + gram
    flipped = lax.linalg.cholesky(jnp.flip(information, (-2, -1)), symmetrize_input=False)
    upper = jnp.flip(jnp.tril(flipped), (-2, -1))
    return jnp.tril(_solve(_transpose(upper), eye))


def _condition_by_cholesky(design: Float[Array, "*time p d"]) -> Conditioning:
    gram = _matmul(design, _transpose(design))
    eye = _identity_like(gram)
    root = jnp.tril(lax.linalg.cholesky(eye + gram, symmetrize_input=False))
    whitener = jnp.tril(_solve(root, eye))
    gain = _matmul(_matmul(_transpose(design), _transpose(whitener)), whitener)
    return Conditioning(_shrinkage_by_cholesky(design), gain, whitener)


def _condition_by_entries(design: Float[Array, "p d"]) -> Conditioning:
    eye = jnp.eye(design.shape[0], dtype=design.dtype)
    shrinkage, gain, whitener, _ = process_entries(design, eye)
    return Conditioning(shrinkage, gain, whitener)


def condition_on(
    design: Float[Array, "p d"], value: Float[Array, "p"]
) -> tuple[Float[Array, "d"], Float[Array, "d d"], Float[Array, "p"], Float[Array, "p"]]:
    """Condition standard normal e on value = design e + ε, for one value.

    Returns:
        The conditional mean K r, the shrinkage M and the whitened value W r of `Conditioning`, and
        the diagonal of W.
    """
    if design.shape[1] > linalg.UNROLLED:
        update = condition_standard(design)
        mean, white = linalg.matvec(update.gain, value), linalg.matvec(update.whitener, value)
        return mean, update.shrinkage, white, jnp.diagonal(update.whitener)
    shrinkage, mean, white, pivots = process_entries(design, value[:, None])
    return mean[:, 0], shrinkage, white[:, 0], pivots


def reverse_scale(
    scale: Float[Array, "time d d"],
    weight: Float[Array, "time d d"],
    noise: Float[Array, "time d k"],
    predicted: Float[Array, "time d d"],
    q: Float[Array, "time d d_plus_k"],
    conditioning: Conditioning,
) -> Reversal:
    """Return the backward kernels of transitions, given the output of `predict_scale`.

    With q₁ the first d columns of q, z given e has mean q₁ᵀ e. A factor of its covariance is given
    by the rows of [I, 0] minus their projection on the rows of q.

    Between states, directions of x_k that are narrower than ε^(1/3) times its coordinates are
    omitted. Their gains g would amplify a rounding error ε of one time step to ε g.
    """
    d = scale.shape[-1]
    if d > linalg.UNROLLED:
        rotation, remaining = q, _remaining_scale_large(q)
        state_gain, state_scale = _reverse_states_large(
            scale, weight, noise, predicted, q, remaining
        )
    else:
        rotation = jax.vmap(linalg.rotation)(q)
        remaining = lower_factor(jax.vmap(project_out_of_identity)(rotation))
        state_gain, state_scale = jax.vmap(reverse_states)(scale, weight, noise)
    transposed = _transpose(rotation[..., :d])
    return Reversal(
        _matmul(transposed, conditioning.shrinkage),
        _matmul(transposed, conditioning.gain),
        remaining,
        state_gain,
        state_scale,
    )


def _remaining_scale_large(q: Float[Array, "time d d_plus_k"]) -> Float[Array, "time d d"]:
    """Return a factor of I − q₁ᵀq₁, the covariance of z given e, for orthonormal rows q.

    The difference is precise if no direction of the factor is narrow beside the identity.
    """
    d = q.shape[-2]
    first = q[..., :d]
    covariance = _identity_like(first) - _matmul(_transpose(first), first)
    lower = jnp.tril(lax.linalg.cholesky(covariance, symmetrize_input=False))
    widths = jnp.min(jnp.sum(lower**2, axis=-1), axis=-1) * narrowness(lower)
    return lax.cond(
        jnp.all(widths > linalg.smallest_share(q.dtype)),
        lambda: lower,
        lambda: lower_factor(_over_rows(project_out_of_identity, q)),
    )


def _reverse_states_large(
    scale: Array, weight: Array, noise: Array, predicted: Array, q: Array, remaining: Array
) -> tuple[Array, Array]:
    """Return the gain S q₁ᵀ B⁻¹ and the scale of the backward kernels between states."""

    def direct() -> tuple[Array, Array]:
        coefficients = _matmul(q[..., : scale.shape[-1]], _transpose(scale))
        gain = _transpose(_solve(predicted, coefficients, transpose=True))
        return gain, _matmul(scale, remaining)

    def omitting() -> tuple[Array, Array]:
        return jax.vmap(reverse_states)(scale, weight, noise)

    return lax.cond(_resolved(predicted), direct, omitting)


def reverse_states(
    scale: Float[Array, "d d"], weight: Float[Array, "e d"], noise: Float[Array, "e k"]
) -> tuple[Float[Array, "d e"], Float[Array, "d d"]]:
    """Return the backward kernel between states: the gain S q₁ᵀ B⁻¹ and the conditional scale.

    With [w S, s] = B q as in `predict_scale`. Directions of w x + b + s ε that are narrower than
    ε^(1/3) times its coordinates are omitted: a gain g would amplify a rounding error ε of one time
    step to ε g, and to ε g² relative to the narrowest direction of the next step. Omitting a
    direction causes an error of 1/g. Kernels between standard coordinates have no such limit.
    """
    rows = linalg.fence(jnp.concatenate([linalg.matmul(weight, scale), noise], axis=1))
    lower, diagonal, q = linalg.gram_schmidt(rows, tolerance=linalg.narrowest(rows.dtype))
    rotation = linalg.rotation(q)
    coefficients = linalg.matmul(rotation[:, : scale.shape[0]], scale.T)
    inverse = linalg.safe_reciprocal(linalg.safe_sqrt(diagonal))
    gain = linalg.solve_triangular(lower, inverse[:, None] * coefficients, transpose=True).T
    return gain, linalg.tria(linalg.matmul(scale, project_out_of_identity(rotation)))


def project_out_of_identity(rotation: Float[Array, "d c"]) -> Float[Array, "d c"]:
    """Return the rows of [I, 0] minus their projection on the orthonormal rows q.

    Projecting twice preserves the relative precision of rows with a small remainder.
    """
    d = rotation.shape[0]
    remainder = jnp.eye(*rotation.shape, dtype=rotation.dtype) - linalg.matmul(
        rotation[:, :d].T, rotation
    )
    return remainder - linalg.matmul(linalg.matmul(remainder, rotation.T), rotation)


def _over_rows(fn, rows: Float[Array, "*time r c"]):
    return jax.vmap(fn)(rows) if rows.ndim == 3 else fn(rows)


def _identity_like(a: Float[Array, "*time d d"]) -> Float[Array, "*time d d"]:
    return jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)


def _transpose(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def _matmul(a: Float[Array, "*time r k"], b: Float[Array, "*time k c"]) -> Array:
    """Return the product a b of single matrices or of stacks of matrices."""
    if a.ndim == 2 and b.ndim == 2:
        return linalg.matmul(a, b)
    axes = (0 if a.ndim == 3 else None, 0 if b.ndim == 3 else None)
    return jax.vmap(linalg.matmul, in_axes=axes)(a, b)


def _solve(lower: Array, b: Array, *, transpose: bool = False) -> Array:
    solve = partial(linalg.solve_triangular, transpose=transpose)
    return jax.vmap(solve)(lower, b) if lower.ndim == 3 else solve(lower, b)
