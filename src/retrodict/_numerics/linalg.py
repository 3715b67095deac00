"""Linear algebra of small matrices, spelled so that XLA fuses it inside a scan.

A call to LAPACK inside a scan costs more than the arithmetic of a matrix with a handful of rows,
and stops XLA from fusing what stands around it. Up to `UNROLLED` rows the loops over rows and over
inner dimensions are therefore unrolled in Python, over whole rows and not over entries: one entry
at a time gives more, not fewer, fused loops. Beyond it the same functions call LAPACK:
`benchmarks/numerics.py` prints what either costs by dimension.

Everything is written for one matrix; callers `vmap`. Divisions by a pivot that is exactly zero give
zero, so that semidefinite matrices pass.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular as lapack_solve_triangular
from jaxtyping import Array, Float

T = TypeVar("T")

UNROLLED = 6
"""The largest number of rows for which loops are unrolled."""


def steps_a_loop(d: int) -> int:
    """How many steps of a scan over d-dimensional laws to put into one iteration of its loop.

    An iteration costs several fusions by itself. With d = 1 XLA compiles the whole loop as one
    kernel, but only as long as its body is small; for larger d the steps take long to compile.
    """
    return 8 if 2 <= d <= 3 else 1


def sum_of(terms: Sequence[Array]) -> Array:
    """Adds arrays of one shape: Python's `sum` would start from an integer zero."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def fence(tree: T) -> T:
    """The same arrays, computed once: XLA may not recompute them inside the loops that read them.

    Without it a chain of small steps is fused into loops that repeat the whole chain for each of
    their entries. Measured on a Kalman step with d = 3: four times slower, and slower to compile.
    """
    return lax.optimization_barrier(tree)


def matmul(a: Float[Array, "r k"], b: Float[Array, "k c"]) -> Float[Array, "r c"]:
    """The product a b, never in less than the full precision of its type."""
    inner = _inner(a, b)
    if inner > UNROLLED or inner == 0:
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
    return sum_of([a[:, k, None] * b[None, k, :] for k in range(inner)])


def matvec(a: Float[Array, "r k"], x: Float[Array, "k"]) -> Float[Array, "r"]:
    """The product a x."""
    inner = _inner(a, x)
    if inner > UNROLLED or inner == 0:
        return jnp.matmul(a, x, precision=lax.Precision.HIGHEST)
    return sum_of([a[:, k] * x[k] for k in range(inner)])


def _inner(a: Array, b: Array) -> int:
    """The inner dimension of a product; unrolled sums would read past it without a word."""
    if a.shape[1] != b.shape[0]:
        raise TypeError(f"a matrix of shape {a.shape} does not multiply shape {b.shape}.")
    return a.shape[1]


def outer_gram(a: Float[Array, "r k"]) -> Float[Array, "r r"]:
    """The product a aᵀ."""
    return matmul(a, a.T)


def safe_reciprocal(x: Array) -> Array:
    """1/x, and 0 where x is 0, with a gradient that is finite there too."""
    nonzero = x != 0
    return jnp.where(nonzero, 1.0 / jnp.where(nonzero, x, 1.0), 0.0)


def safe_sqrt(x: Array) -> Array:
    """The square root of max(x, 0), with gradient 0 where x is not positive."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def cholesky(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The lower factor l of a symmetric positive-definite a = l lᵀ.

    Only the lower triangle of `a` is read. A pivot that is not positive gives a column of zeros in
    the unrolled form and NaN in LAPACK's: callers that accept user input check it first.
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

    A pivot below 10 d ε times the diagonal entry it came from is rounding error, and its column
    is zero. Without this a singular matrix gets a random direction of size √ε, which differs from
    one time step to the next.
    """
    d = a.shape[0]
    smallest = 10 * d * jnp.finfo(a.dtype).eps * jnp.diagonal(a)

    def eliminate(j: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, factor = state
        below = jnp.where(jnp.arange(d) >= j, rest[:, j], 0.0)
        pivot = jnp.where(rest[j, j] > smallest[j], rest[j, j], 0.0)
        column = below * safe_reciprocal(safe_sqrt(pivot))
        return rest - column[:, None] * column[None, :], factor.at[:, j].set(column)

    state = (a, jnp.zeros_like(a))
    if d > UNROLLED:
        return lax.fori_loop(0, d, eliminate, state)[1]
    for j in range(d):
        state = eliminate(j, state)
    return state[1]


def solve_triangular(
    l: Float[Array, "d d"],  # noqa: E741
    b: Float[Array, "d ..."],
    *,
    transpose: bool = False,
) -> Float[Array, "d ..."]:
    """Solves l x = b, or lᵀ x = b, for a lower-triangular l and a vector or matrix b."""
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


def weighted_gram_schmidt(
    w: Float[Array, "r c"], weights: Sequence[Array | None]
) -> tuple[Float[Array, "r r"], Float[Array, "r"]]:
    """Unit-lower l and diagonal d with l diag(d) lᵀ = w diag(weights) wᵀ.

    Modified Gram–Schmidt over the rows of `w` in the inner product of `weights` (Thornton's
    propagation of a factored covariance). No difference of squares is formed, so that small
    eigenvalues survive beside large ones in float32, and no square root is taken.

    Args:
        w: the rows to orthogonalise.
        weights: one nonnegative scalar a column, or `None` for a column that rides along without
            counting.

    Returns:
        The unit-lower factor and the nonnegative diagonal.
    """
    rows = w.shape[0]
    if rows > UNROLLED * 2:
        return _factor_by_qr(w, weights)
    counted = [(k, weight) for k, weight in enumerate(weights) if weight is not None]
    pivots = []
    for i in range(rows):
        products = sum_of([w[:, k] * (w[0, k] * weight) for k, weight in counted])
        # One array for the products and the reciprocal of the pivot makes one loop of them.
        pivot = fence(jnp.concatenate([products, safe_reciprocal(products[:1])]))
        pivots.append(pivot)
        if i < rows - 1:
            w = fence(w[1:] - (pivot[1:-1] * pivot[-1])[:, None] * w[0][None, :])
    zeros, one = (lambda i: jnp.zeros(i, w.dtype)), jnp.ones(1, w.dtype)
    unit_lower = jnp.stack(
        [jnp.concatenate([zeros(i), one, p[1:-1] * p[-1]]) for i, p in enumerate(pivots)], axis=1
    )
    return unit_lower, jnp.concatenate([p[:1] for p in pivots])


def _factor_by_qr(
    w: Float[Array, "r c"], weights: Sequence[Array | None]
) -> tuple[Float[Array, "r r"], Float[Array, "r"]]:
    counted = jnp.asarray([k for k, weight in enumerate(weights) if weight is not None])
    scales = safe_sqrt(jnp.stack([weight for weight in weights if weight is not None]))
    return unit_lower_and_diagonal(tria_by_qr(w[:, counted] * scales[None, :]))


def project_out(
    w: Float[Array, "r c"],
    weights: Float[Array, "c"],
    magnitude: Float[Array, "count c"],
    row_locations: Float[Array, "count"],
    column_locations: Float[Array, "d"],
) -> tuple[Float[Array, "r count"], Float[Array, "r c"]]:
    """Orthogonalise the first rows of `w`, and remove their span from the rows below.

    Modified Gram–Schmidt in the inner product of `weights`, as in `weighted_gram_schmidt`, for
    rows that may depend on each other. What is left of a dependent row is rounding error, and
    dividing by its square would give coefficients of any size. An estimate of the rounding error of
    each entry is therefore carried along, and

    1. an entry within four times its error is zero. Entries have errors of their own because their
       weights may differ by many orders;
    2. a row is dropped if its error may change the projection of a row below by more than √ε times
       what is left of that row;
    3. a row is dropped if a row below has a coefficient of more than 0.3 ε^(-1/3) in it, both in
       units of standard deviations. With a coefficient g, rounding in one time step comes out as
       ε g, and relative to the narrowest direction of the next step as ε g²; dropping costs 1/g;
    4. a row is dropped if the rounding error of its mean, times the coefficient of a column in it,
       is more than ε^(1/5) standard deviations of that column, and more than a quarter of one or
       the rounding error of the column's own mean. A state that decays towards a fixed point
       without noise becomes narrower than the rounding error of its mean, and its past cannot be
       read off it.

    Args:
        w: the rows.
        weights: one nonnegative number per column.
        magnitude: one row for each row to orthogonalise: the size of the terms that its entries
            are sums of, of which they carry the rounding error.
        row_locations: one number for each row to orthogonalise: the size of the terms that its mean
            is a sum of.
        column_locations: the same for the first columns, those that are to be known from the rows.

    Returns:
        The coefficients of the rows in terms of the orthogonal ones (ones on the diagonal, zero in
        the columns of dropped rows), and the rows that are left.
    """
    eps = float(jnp.finfo(w.dtype).eps)
    size, count = w.shape[0], magnitude.shape[0]
    constant = lax.stop_gradient
    stds = constant(jnp.sqrt(jnp.sum(w**2 * weights[None, :], axis=1)))
    column_errors = constant(eps * column_locations)
    column_stds = constant(safe_sqrt(weights[: column_errors.shape[0]]))
    allowed_errors = jnp.clip(1.001 * column_errors, eps**0.2 * column_stds, 0.25 * column_stds)

    def eliminate(i: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
        w, squared_errors, mean_errors, coefficients = state
        row, squared_error = w[i], squared_errors[i]
        is_zero = row**2 <= 16.0 * squared_error
        row = jnp.where(is_zero, 0.0, row)
        squared_error = jnp.where(is_zero, 0.0, squared_error)
        scaled = row * weights
        square = jnp.sum(row * scaled)
        products = jnp.sum(w * scaled[None, :], axis=1)
        rest = constant(w[count:])
        size_squared = constant(square)
        spread = rest**2 * constant(weights)[None, :]
        left_squared = jnp.sum(spread, axis=1)
        # Relative errors of the pivot row, by entry, and what they do to the rows below.
        relative = squared_error * constant(weights) * safe_reciprocal(size_squared)
        change = jnp.sum(spread * safe_reciprocal(left_squared)[:, None] * relative[None], axis=1)
        allowed = eps**0.5 + 100.0 * eps * stds[count:] * safe_reciprocal(jnp.sqrt(left_squared))
        sizes = constant(jnp.abs(products[count:]))
        column_sizes = constant(jnp.abs(scaled[: column_errors.shape[0]]))
        kept = (
            (jnp.sum(relative) < 0.01)
            & jnp.all(change <= allowed**2)
            & jnp.all(sizes * stds[i] <= 0.3 * eps ** (-1 / 3) * stds[count:] * size_squared)
            & jnp.all(column_sizes * mean_errors[i] <= allowed_errors * size_squared)
        )
        inverse = safe_reciprocal(jnp.where(kept, square, 0.0))
        below = (jnp.arange(size) > i) & kept
        column = fence(jnp.where(below, products * inverse, 0.0))
        # The error of the pivot row, and the rounding of the coefficient and of the difference.
        rounding = jnp.sum((w[:count] * (scaled * inverse)[None, :]) ** 2, axis=1)
        rounding = eps**2 * (column[:count] ** 2 + jnp.where(below[:count], rounding, 0.0))
        squared_errors = squared_errors + constant(
            column[:count, None] ** 2 * squared_error[None, :] + rounding[:, None] * row[None] ** 2
        )
        mean_errors = mean_errors + constant(jnp.abs(column[:count])) * mean_errors[i]
        w = w - column[:, None] * row[None, :]
        return w, squared_errors, mean_errors, coefficients.at[:, i].set(column)

    squared_errors = constant(eps * magnitude) ** 2
    state = (
        w,
        squared_errors,
        constant(eps * row_locations),
        jnp.zeros((size, count), w.dtype),
    )
    if count > UNROLLED:
        state = lax.fori_loop(0, count, eliminate, state)
    else:
        for i in range(count):
            state = fence(eliminate(i, state))
    left, _, _, coefficients = state
    return coefficients + jnp.eye(size, count, dtype=w.dtype), left


def tria_by_qr(w: Float[Array, "r c"]) -> Float[Array, "r r"]:
    """The lower factor of w wᵀ with a nonnegative diagonal, by LAPACK's Householder reflections."""
    upper = jnp.linalg.qr(w.T, mode="r")
    upper = jnp.concatenate([upper, jnp.zeros((w.shape[0] - upper.shape[0], w.shape[0]), w.dtype)])
    signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0).astype(w.dtype)
    return jnp.tril(upper.T * signs[None, :])


def tria(w: Float[Array, "r c"]) -> Float[Array, "r r"]:
    """The lower-triangular factor s, with a nonnegative diagonal, of s sᵀ = w wᵀ."""
    if w.shape[0] > UNROLLED * 2:
        return tria_by_qr(w)
    one = jnp.ones((), w.dtype)
    unit_lower, diagonal = weighted_gram_schmidt(w, [one] * w.shape[1])
    return unit_lower * safe_sqrt(diagonal)[None, :]


def unit_lower_and_diagonal(
    scale: Float[Array, "d d"],
) -> tuple[Float[Array, "d d"], Float[Array, "d"]]:
    """Splits a lower factor s into unit-lower l and diagonal d, with l diag(d) lᵀ = s sᵀ.

    A pivot of zero above entries that are not (a semidefinite factor that is not in echelon form)
    is replaced by rounding error times the largest entry, which keeps the product to rounding.
    """
    pivots = jnp.diagonal(scale)
    largest = jnp.max(jnp.abs(scale))
    floor = jnp.finfo(scale.dtype).eps * jnp.where(largest > 0, largest, 1.0)
    column_is_zero = jnp.all(scale == 0, axis=0)
    divisors = jnp.where(pivots == 0, floor, pivots)
    eye = jnp.eye(scale.shape[0], dtype=scale.dtype)
    strictly_lower = jnp.tril(scale, -1) / divisors[None, :]
    return strictly_lower + eye, jnp.where(column_is_zero, 0.0, divisors**2)
