"""Gaussian steps in standard coordinates: prediction, conditioning and reversal of scales.

A law N(m, S Sᵀ) is written x = m + S z with standard normal z. The steps below transform the scale
S. None of them depends on the data, so that one computation serves all series with the same mask.

    predict     [w S, s] = B q, with orthonormal rows q:   w x + b + s ε = (w m + b) + B e
    condition   e given B, H and the innovation r:         e = K r + M z'
    reverse     z given e:                                 z = q₁ᵀ e + s' ε'

Every gain between standard coordinates has norm at most one. Nothing is divided by a width of the
state, so that singular, narrow and decaying directions need no special case.

Small states use unrolled Gram–Schmidt and scalar updates. Larger ones use Cholesky factors of Gram
matrices, which are several times faster than LAPACK's QR, where these are accurate to ε^(2/3), and
QR or scalar updates elsewhere. The choice is made at run time for each batch of rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._numerics import linalg


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

    With solved = B⁻¹ rows', dB = B C and dq = solved − C q, where C + Cᵀ = mixed + mixedᵀ for
    mixed = solved qᵀ. C is lower triangular, so that dB is. Where a pivot of B is zero, its row and
    its column of C are those of `mixed`, and the pivot counts as one. Then dB is no longer lower
    triangular there, but dB Bᵀ + B dBᵀ is the derivative of rows rowsᵀ. The part of rows' that is
    in no direction q is lost: it affects this product to second order.
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
    """Return whether all factors are finite and have no narrow direction.

    A row of a Cholesky factor has the norm of the rows that it factors. Divided by these norms, its
    squared pivots have a product that bounds the squared width of any direction from below, up to a
    factor of e. Single pivots do not: each may be moderate in a factor with a narrow direction.
    """
    pivots = jnp.diagonal(lower, axis1=-2, axis2=-1) ** 2
    shares = pivots / jnp.sum(lower**2, axis=-1)
    return jnp.all(jnp.prod(shares, axis=-1) > linalg.narrowest(lower.dtype))


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
    shrinkage, gain, whitener, _ = _process_entries(design, eye)
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
    shrinkage, mean, white, pivots = _process_entries(design, value[:, None])
    return mean[:, 0], shrinkage, white[:, 0], pivots


def _process_entries(
    design: Float[Array, "p d"], values: Float[Array, "p q"]
) -> tuple[Float[Array, "d d"], Float[Array, "d q"], Float[Array, "p q"], Float[Array, "p"]]:
    """Condition on one scalar entry after another (Bierman's update), for q columns of values.

    The law of e given the entries so far is L diag(D) Lᵀ, with a unit lower triangular L, and its
    means are X. For the entry v_i = f e + ε, with f L in place of f and α_j = 1 + Σ_{l>j} f_l² D_l,
    column j of L becomes L_j − (f_j/α_j) Σ_{l>j} L_l D_l f_l and D_j becomes
    D_j α_j / (α_j + f_j² D_j). The columns X follow the formula of a column of L, with f X − v_i in
    place of f_j and the sum over all l. D is multiplied by ratios, and nothing is subtracted from
    it. The rows [f L | f X − v] of later entries are stored below [L | X] and are updated with it.

    Returns:
        The factor L √D, the means X, the whitened values, and the diagonal of their whitener.
    """
    (p, d), width, dtype = design.shape, design.shape[1] + values.shape[1], design.dtype
    # later[l, j]: whether column l of L enters the sums of column j.
    later = np.concatenate([np.tril(np.ones((d, d)), -1), np.ones((d, width - d))], axis=1)
    later, is_diagonal = later.astype(dtype), np.arange(width) < d
    identity = jnp.eye(d, width, dtype=dtype)
    stack = linalg.fence(jnp.concatenate([identity, jnp.concatenate([design, -values], axis=1)]))
    spread = jnp.asarray(is_diagonal, dtype)
    if d > linalg.UNROLLED:
        stack, spread, rows, variances = _process_entries_in_a_loop(
            stack, spread, jnp.asarray(later)
        )
        return _processed(stack[:d], spread, rows[:, d:], variances)
    rows, variances = [], []
    for i in range(p):
        f = stack[d]
        alpha = 1.0 + linalg.sum_of([later[k] * (f[k] * f[k] * spread[k]) for k in range(d)])
        # Storing both in one array gives one loop; its last entry is the innovation variance.
        after = jnp.where(is_diagonal, spread * (alpha / (alpha + f * f * spread)), alpha)
        step = linalg.fence(jnp.stack([f / alpha, after]))
        sums = linalg.sum_of(
            [stack[:, k, None] * (later[k] * (f[k] * spread[k]))[None, :] for k in range(d)]
        )
        moved = stack - sums * step[0][None, :]
        rest = jnp.concatenate([moved[:d], moved[d + 1 :]]) if i < p - 1 else moved[:d]
        stack = linalg.fence(rest)
        spread = step[1]
        rows.append(step[0, d:])
        variances.append(step[1, -1:])
    return _processed(stack, spread, jnp.stack(rows), jnp.concatenate(variances))


def _processed(
    stack: Float[Array, "d c"],
    spread: Float[Array, "c"],
    rows: Float[Array, "p q"],
    variances: Float[Array, "p"],
) -> tuple[Float[Array, "d d"], Float[Array, "d q"], Float[Array, "p q"], Float[Array, "p"]]:
    """Return the results of `_process_entries` from those of its loop."""
    d, deviations = stack.shape[0], jnp.sqrt(variances)
    return (
        stack[:, :d] * linalg.safe_sqrt(spread[:d])[None, :],
        stack[:, d:],
        -rows * deviations[:, None],
        1.0 / deviations,
    )


def _process_entries_in_a_loop(
    stack: Float[Array, "d_plus_p c"], spread: Float[Array, "c"], later: Float[Array, "d c"]
) -> tuple[Float[Array, "d_plus_p c"], Float[Array, "c"], Float[Array, "p c"], Float[Array, "p"]]:
    """Run the loop of `_process_entries` without unrolling it, for larger states.

    Returns:
        The stack, D, the rows when they are processed, divided by their variances, and the
        variances.
    """
    d = later.shape[0]
    is_diagonal = np.arange(stack.shape[1]) < d

    def step(state: tuple[Array, Array], i: Array) -> tuple[tuple, tuple]:
        stack, spread = state
        f = stack[d + i]
        products = later * (f[:d] * spread[:d])[:, None]
        alpha = 1.0 + linalg.matvec(products.T, f[:d])
        sums = linalg.matmul(stack[:, :d], products)
        after = jnp.where(is_diagonal, spread * (alpha / (alpha + f * f * spread)), alpha)
        return (stack - sums * (f / alpha)[None, :], after), (f / alpha, alpha[-1])

    (stack, spread), rows = lax.scan(step, (stack, spread), jnp.arange(stack.shape[0] - d))
    return stack, spread, *rows


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
        rotation = q
        state_gain, state_scale = _reverse_states_large(scale, weight, noise, predicted, q)
    else:
        rotation = jax.vmap(linalg.rotation)(q)
        state_gain, state_scale = jax.vmap(reverse_states)(scale, weight, noise)
    transposed = _transpose(rotation[..., :d])
    return Reversal(
        _matmul(transposed, conditioning.shrinkage),
        _matmul(transposed, conditioning.gain),
        lower_factor(_over_rows(project_out_of_identity, rotation)),
        state_gain,
        state_scale,
    )


def _reverse_states_large(
    scale: Array, weight: Array, noise: Array, predicted: Array, q: Array
) -> tuple[Array, Array]:
    """Return the gain S q₁ᵀ B⁻¹ and the scale of the backward kernels between states."""

    def direct() -> tuple[Array, Array]:
        coefficients = _matmul(q[..., : scale.shape[-1]], _transpose(scale))
        gain = _transpose(_solve(predicted, coefficients, transpose=True))
        rows = _matmul(scale, _over_rows(project_out_of_identity, q))
        return gain, lower_factor(rows)

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
