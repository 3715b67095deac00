"""Linear algebra for small matrices, written so that XLA fuses it inside a scan.

A LAPACK call inside a scan costs more than the arithmetic of a matrix with few rows, and prevents
XLA from fusing the surrounding operations. Up to `UNROLLED` rows, the loops over rows and over
inner dimensions are therefore unrolled in Python. They are unrolled over whole rows, since
unrolling over entries produces more fused loops, not fewer. Above `UNROLLED` rows the same
functions call LAPACK. `benchmarks/numerics.py` prints the cost of both forms by dimension.

All functions take one matrix; callers use `vmap`. Division by a pivot that is exactly zero gives
zero, so that semidefinite matrices are supported.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular as lapack_solve_triangular
from jaxtyping import Array, Float

from retrodict._numerics import elimination

T = TypeVar("T")

UNROLLED = 6
"""The largest number of rows for which loops are unrolled."""


def narrowest(dtype: jnp.dtype) -> float:
    """Return ε^(1/3), the relative width below which a direction counts as narrow."""
    return float(jnp.finfo(dtype).eps) ** (1 / 3)


def smallest_share(dtype: jnp.dtype) -> float:
    """Return ε^(1/4), the least squared width of a direction at which products are formed.

    The error ε of a product is then at most ε^(3/4) of the direction.
    """
    return float(jnp.finfo(dtype).eps) ** 0.25


def sum_of(terms: Sequence[Array]) -> Array:
    """Return the sum of arrays of one shape, without the integer zero of Python's `sum`."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def fence(tree: T) -> T:
    """Return the same arrays behind an optimisation barrier.

    The barrier prevents XLA from recomputing the arrays inside the loops that read them. Without
    it, a chain of small steps is fused into loops that repeat the whole chain for every entry. On a
    Kalman step with d = 3 this was four times slower, and slower to compile.
    """
    return lax.optimization_barrier(tree)


def matmul(a: Float[Array, "r k"], b: Float[Array, "k c"]) -> Float[Array, "r c"]:
    """Return the product a b, in the full precision of its type."""
    inner = _inner(a, b)
    if inner > UNROLLED or inner == 0:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    return sum_of([a[:, k, None] * b[None, k, :] for k in range(inner)])


def matvec(a: Float[Array, "r k"], x: Float[Array, "k"]) -> Float[Array, "r"]:
    """Return the product a x, in the full precision of its type."""
    inner = _inner(a, x)
    if inner > UNROLLED or inner == 0:
        return jnp.matmul(a, x, precision=lax.Precision.HIGHEST)
    return sum_of([a[:, k] * x[k] for k in range(inner)])


def _inner(a: Array, b: Array) -> int:
    """Return the inner dimension of a product; unrolled sums would not detect a mismatch."""
    if a.shape[1] != b.shape[0]:
        raise TypeError(
            f"The inner dimensions of a product must match, got shapes {a.shape} and {b.shape}."
        )
    return a.shape[1]


def outer_gram(a: Float[Array, "r k"]) -> Float[Array, "r r"]:
    """Return the product a aᵀ."""
    return matmul(a, a.T)


def safe_reciprocal(x: Array) -> Array:
    """Return 1/x, and 0 where x is 0; the gradient is finite everywhere."""
    nonzero = x != 0
    return jnp.where(nonzero, 1.0 / jnp.where(nonzero, x, 1.0), 0.0)


def safe_sqrt(x: Array) -> Array:
    """Return the square root of max(x, 0), with gradient 0 where x is not positive."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def cholesky(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return the lower Cholesky factor l of a symmetric positive-definite a = l lᵀ.

    Only the lower triangle of `a` is read. A pivot that is not positive gives a column of zeros in
    the unrolled form and NaN in the LAPACK form. Callers that accept user input must check it
    first.
    """
    d = a.shape[0]
    if d > UNROLLED:
        return jnp.tril(lax.linalg.cholesky(a, symmetrize_input=False))
    columns = []
    for j in range(d):
        below = a[j:, j]
        for column in columns:
            below = below - column[j:] * column[j]
        pivot = safe_sqrt(below[0])
        column = below * safe_reciprocal(pivot)
        columns.append(jnp.concatenate([jnp.zeros(j, a.dtype), column]))
    return jnp.stack(columns, axis=1)


def semidefinite_cholesky(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return a lower factor of a symmetric positive-semidefinite matrix, to rounding.

    A pivot below 10 d ε times its original diagonal entry is treated as rounding error, and its
    column is set to zero. Otherwise the factor of a singular matrix would contain a random
    direction of size √ε that differs between time steps.
    """
    d = a.shape[0]
    if d > UNROLLED:
        if d <= elimination.LARGEST:
            return elimination.semidefinite_factor(a)
        return _semidefinite_cholesky_in_a_loop(a)
    state = (a, jnp.zeros_like(a))
    for j in range(d):
        state = _eliminate(_smallest_pivots(a), j, state)
    return state[1]


@jax.custom_jvp
def _semidefinite_cholesky_in_a_loop(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    step = partial(_eliminate, _smallest_pivots(a))
    return lax.fori_loop(0, a.shape[0], step, (a, jnp.zeros_like(a)))[1]


@_semidefinite_cholesky_in_a_loop.defjvp
def _semidefinite_cholesky_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """Differentiate l lᵀ = a: dl = l Φ(l⁻¹ da l⁻ᵀ).

    Φ takes the lower triangle and half the diagonal. A column of zeros counts as one of the
    identity, and its derivative is zero. Differentiating the loop takes twice as long.
    """
    lower = _semidefinite_cholesky_in_a_loop(*primals)
    change = jnp.tril(tangents[0])
    change = change + jnp.tril(change, -1).T
    eye = jnp.eye(lower.shape[0], dtype=lower.dtype)
    is_zero = jnp.diagonal(lower) == 0
    filled = jnp.where(is_zero[None, :], eye, lower)
    inverse = solve_triangular(filled, eye)
    mixed = matmul(matmul(inverse, change), inverse.T)
    moved = matmul(filled, jnp.tril(mixed) - 0.5 * mixed * eye)
    return lower, jnp.where(is_zero[None, :], 0.0, moved)


def _smallest_pivots(a: Float[Array, "d d"]) -> Float[Array, "d"]:
    return 10 * a.shape[0] * jnp.finfo(a.dtype).eps * jnp.diagonal(a)


def _eliminate(
    smallest: Float[Array, "d"], j: Any, state: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Store column j of the factor, and subtract its product from the rest."""
    rest, factor = state
    below = jnp.where(jnp.arange(len(smallest)) >= j, rest[:, j], 0.0)
    pivot = jnp.where(rest[j, j] > smallest[j], rest[j, j], 0.0)
    column = below * safe_reciprocal(safe_sqrt(pivot))
    return rest - column[:, None] * column[None, :], factor.at[:, j].set(column)


def solve_triangular(
    l: Float[Array, "d d"],  # noqa: E741
    b: Float[Array, "d ..."],
    *,
    transpose: bool = False,
) -> Float[Array, "d ..."]:
    """Solve l x = b, or lᵀ x = b, for a lower-triangular l and a vector or matrix b."""
    d = l.shape[0]
    if d > UNROLLED:
        return lapack_solve_triangular(l, b, lower=True, trans=1 if transpose else 0)
    a = l.T if transpose else l
    order = range(d - 1, -1, -1) if transpose else range(d)
    rows: dict[int, Array] = {}
    for i in order:
        rest = b[i]
        for k, row in rows.items():
            rest = rest - a[i, k] * row
        rows[i] = rest * safe_reciprocal(a[i, i])
    return jnp.stack([rows[i] for i in range(d)])


def gram_schmidt(
    w: Float[Array, "r c"], *, tolerance: float = 0.0
) -> tuple[Float[Array, "r r"], Float[Array, "r"], Float[Array, "r c"]]:
    """Factor w = l diag(√d) q, with unit-lower l and unit rows q, by modified Gram–Schmidt.

    No difference of squares is formed. Small eigenvalues of w wᵀ are therefore preserved beside
    large ones in float32, and l diag(d) lᵀ = w wᵀ to rounding. The rows q are orthogonal only if w
    is well conditioned: see `rotation`.

    Args:
        w: the rows to orthogonalise.
        tolerance: a row is treated as dependent if less than this fraction of it is independent of
            the rows before it. Its entry of d and its row of q are then zero.

    Returns:
        The factor l, the nonnegative d, and the rows q.
    """
    rows, columns = w.shape
    if rows > UNROLLED * 2 and tolerance == 0.0:
        lower, q = lower_and_rows_by_qr(w)
        return *unit_lower_and_diagonal(lower), q
    # Unrolled sums fuse with what follows. Sums over many columns are reductions, which compile.
    unrolled = rows <= UNROLLED * 2 and columns <= UNROLLED * 4
    smallest = tolerance**2 * jnp.sum(w**2, axis=1) if tolerance > 0.0 else None
    pivots, remainders = [], []
    for i in range(rows):
        if unrolled:
            products = sum_of([w[:, k] * w[0, k] for k in range(columns)])
        else:
            products = jnp.sum(w * w[0][None, :], axis=1)
        if smallest is not None:
            products = jnp.where(products[0] > smallest[i], products, 0.0)
        # Storing the products and the reciprocal of the pivot in one array gives one loop.
        pivot = fence(jnp.concatenate([products, safe_reciprocal(products[:1])]))
        pivots.append(pivot)
        remainders.append(w[0])
        if i < rows - 1:
            w = fence(w[1:] - (pivot[1:-1] * pivot[-1])[:, None] * w[0][None, :])
    zeros, one = (lambda i: jnp.zeros(i, w.dtype)), jnp.ones(1, w.dtype)
    unit_lower = jnp.stack(
        [jnp.concatenate([zeros(i), one, p[1:-1] * p[-1]]) for i, p in enumerate(pivots)], axis=1
    )
    lengths = jnp.stack([p[-1] for p in pivots])
    q = jnp.stack(remainders) * safe_sqrt(lengths)[:, None]
    return unit_lower, jnp.concatenate([p[:1] for p in pivots]), q


def rotation(q: Float[Array, "r c"]) -> Float[Array, "r c_plus_r"]:
    """Return orthonormal rows [y, t] with l diag(√d) [y, t] = [w, 0] to rounding.

    If rows of w nearly depend on others, the rows q of `gram_schmidt` are far from
    orthogonal. But the algorithm is equivalent to Householder's with the reflections I − v vᵀ,
    v = (q_i, −e_i), applied to rows extended by zeros (Björck and Paige 1992). The product of these
    reflections is orthogonal for any q with unit rows: y equals q where q is orthogonal, and t
    completes y to orthonormal rows. A row of zeros becomes (0, e_i).
    """
    size = q.shape[0]
    eye = jnp.eye(size, dtype=q.dtype)
    # If XLA computes a remainder of rounding error twice, the two results may differ.
    q = fence(q * safe_reciprocal(safe_sqrt(jnp.sum(q**2, axis=1)))[:, None])
    extended = jnp.concatenate([jnp.zeros_like(q), eye], axis=1)
    is_zero = jnp.all(q == 0, axis=1)
    for i in reversed(range(size)):
        mirror = jnp.concatenate([q[i], jnp.where(is_zero[i], 0.0, -eye[i])])
        overlaps = matvec(extended, mirror)
        extended = fence(extended - overlaps[:, None] * mirror[None, :])
    return extended


def tria_by_qr(w: Float[Array, "r c"]) -> Float[Array, "r r"]:
    """Return the lower factor of w wᵀ with a nonnegative diagonal, by Householder reflections."""
    upper = jnp.linalg.qr(w.T, mode="r")
    upper = jnp.concatenate([upper, jnp.zeros((w.shape[0] - upper.shape[0], w.shape[0]), w.dtype)])
    return jnp.tril(upper.T * _signs(jnp.diagonal(upper))[None, :])


def lower_and_rows_by_qr(
    w: Float[Array, "r c"],
) -> tuple[Float[Array, "r r"], Float[Array, "r c"]]:
    """Factor w = s q by Householder reflections: s as in `tria_by_qr`, q with orthonormal rows."""
    columns, upper = jnp.linalg.qr(w.T)
    signs = _signs(jnp.diagonal(upper))
    return jnp.tril(upper.T * signs[None, :]), (columns * signs[None, :]).T


def _signs(pivots: Array) -> Array:
    return jnp.where(pivots < 0, -1.0, 1.0).astype(pivots.dtype)


def tria(w: Float[Array, "r c"]) -> Float[Array, "r r"]:
    """Return the lower-triangular s with a nonnegative diagonal and s sᵀ = w wᵀ."""
    if w.shape[0] > UNROLLED * 2:
        return tria_by_qr(w)
    unit_lower, diagonal, _ = gram_schmidt(w)
    return unit_lower * safe_sqrt(diagonal)[None, :]


def unit_lower_and_diagonal(
    scale: Float[Array, "d d"],
) -> tuple[Float[Array, "d d"], Float[Array, "d"]]:
    """Split a lower factor s into unit-lower l and diagonal d, with l diag(d) lᵀ = s sᵀ.

    A zero pivot above nonzero entries (a semidefinite factor that is not in echelon form) is
    replaced by ε times the largest entry, which changes the product by rounding error only.
    """
    pivots = jnp.diagonal(scale)
    largest = jnp.max(jnp.abs(scale))
    floor = jnp.finfo(scale.dtype).eps * jnp.where(largest > 0, largest, 1.0)
    column_is_zero = jnp.all(scale == 0, axis=0)
    divisors = jnp.where(pivots == 0, floor, pivots)
    eye = jnp.eye(scale.shape[0], dtype=scale.dtype)
    strictly_lower = jnp.tril(scale, -1) / divisors[None, :]
    return strictly_lower + eye, jnp.where(column_is_zero, 0.0, divisors**2)
