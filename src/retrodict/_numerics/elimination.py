"""Cholesky factors and their inverses by elimination, with the batch in the last axis.

LAPACK factors one small matrix after another, with the overhead of a call for each. Elimination of
a batch in its last axis is a few vectorised loops: factor and inverse of 64 matrices of 10 x 10
take 8 µs in float64, and 33 µs by LAPACK. `jax.vmap` therefore moves its axis to the end here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

LARGEST = 24
"""The largest number of rows to eliminate. The loop is unrolled, and its compilation grows."""


@jax.custom_vjp
def inverse_of_upper_factor(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return s = u⁻ᵀ for the upper u with a = u uᵀ: the lower Cholesky factor of a⁻¹."""
    return eliminate(a[::-1, ::-1])[1][::-1, ::-1].T


def _inverse_of_upper_factor_forward(a: Array) -> tuple[Array, Array]:
    scale = inverse_of_upper_factor(a)
    return scale, scale


def _inverse_of_upper_factor_backward(scale: Array, g: Array) -> tuple[Array]:
    """Return the cotangent −s φ(sᵀ g) sᵀ, from ds = −s φ(sᵀ da s)."""
    turned = lax.optimization_barrier(scale.T)
    lower = lax.optimization_barrier(-half_lower(_matmul(turned, g)))
    return (_matmul(_matmul(scale, lower), turned),)


inverse_of_upper_factor.defvjp(_inverse_of_upper_factor_forward, _inverse_of_upper_factor_backward)


def semidefinite_factor(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return the lower factor l of a symmetric positive-semidefinite a = l lᵀ.

    A pivot below 10 d ε times its diagonal entry counts as zero, and so does its column of l.
    """
    return eliminate(a, semidefinite=True)[0]


def eliminate(
    a: Float[Array, "d d"], *, semidefinite: bool = False
) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """Return the lower factor l of a symmetric a = l lᵀ, and its inverse.

    Args:
        a: a positive-definite matrix; NaN follows from one that is not.
        semidefinite: whether columns of small pivots are zero. The inverse is that of l with unit
            columns in their place.
    """
    return tuple(_eliminate_p.bind(a, semidefinite=semidefinite))


def half_lower(a: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Return the lower triangle with half the diagonal."""
    d = a.shape[0]
    return a * jnp.asarray(np.tril(np.ones((d, d))) - 0.5 * np.eye(d), a.dtype)


def _matmul(a: Float[Array, "d d"], b: Float[Array, "d d"]) -> Float[Array, "d d"]:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _eliminate(a: Float[Array, "d d *batch"], *, semidefinite: bool) -> list[Array]:
    """Compute `eliminate` for batches of matrices in the last axes.

    The rows of [a, I] are eliminated from the top. Columns of a that are done make room for those
    of the inverse, so that each step is two loops over one array.
    """
    d, tail = a.shape[0], a.shape[2:]
    smallest = 10 * d * jnp.finfo(a.dtype).eps
    rest, columns, rows = a, [], []
    for j in range(d):
        pivot, column = rest[0, :1], rest[0, : d - j]
        if semidefinite:
            is_zero = pivot <= smallest * a[j, j : j + 1]
            pivot = jnp.where(is_zero, 1.0, pivot)
            column = jnp.where(is_zero, 0.0, column)
        root = lax.rsqrt(pivot)
        row = jnp.concatenate([column * root, rest[0, d - j :] * root, root])
        row = lax.optimization_barrier(row)
        column = row[: d - j]
        columns.append(jnp.concatenate([jnp.zeros((j, *tail), a.dtype), column]))
        rows.append(jnp.concatenate([row[d - j :], jnp.zeros((d - 1 - j, *tail), a.dtype)]))
        wide = jnp.concatenate([rest[1:, 1:], jnp.zeros_like(rest[1:, :1])], axis=1)
        rest = lax.optimization_barrier(wide - column[1:, None] * row[None, 1:])
    return [jnp.stack(columns, axis=1), jnp.stack(rows)]


def _slopes(lower: Array, inverse: Array, change: Array, semidefinite: bool) -> list[Array]:
    """Differentiate l lᵀ = a and k = l⁻¹: dl = l φ and dk = −φ k.

    φ is the lower triangle of k da kᵀ with half its diagonal. The derivative of a zero column is
    zero. Tangents are on the left of every product, so that reverse mode contracts no leading axis,
    which XLA is slow at.
    """
    turned, filled = lax.optimization_barrier(inverse.T), lower
    mixed = half_lower(_matmul(_matmul(change, turned).T, turned).T)
    if semidefinite:
        is_zero = jnp.diagonal(lower) == 0
        mixed = jnp.where(is_zero[None, :], 0.0, mixed)
        filled = lower + jnp.diag(is_zero.astype(lower.dtype))
    moved = _matmul(mixed.T, lax.optimization_barrier(filled.T)).T
    return [moved, -_matmul(mixed, inverse)]


def _batch_last(args: tuple, dims: tuple, **options: bool) -> tuple[list[Array], list[int]]:
    values = _eliminate_p.bind(jnp.moveaxis(args[0], dims[0], -1), **options)
    return [jnp.moveaxis(value, -1, 0) for value in values], [0, 0]


def _differentiate(primals: tuple, tangents: tuple, *, semidefinite: bool) -> tuple[list, list]:
    lower, inverse = _eliminate_p.bind(*primals, semidefinite=semidefinite)
    slopes = partial(_slopes, semidefinite=semidefinite)
    for _ in lower.shape[2:]:
        slopes = jax.vmap(slopes, in_axes=-1, out_axes=-1)
    return [lower, inverse], slopes(lower, inverse, ad.instantiate_zeros(tangents[0]))


# `jax.custom_batching.custom_vmap` would do, but it has no derivative, and JAX drops custom
# derivatives where it differentiates a scan twice.
_eliminate_p = Primitive("eliminate")
_eliminate_p.multiple_results = True
_eliminate_p.def_impl(jax.jit(_eliminate, static_argnames="semidefinite"))
_eliminate_p.def_abstract_eval(lambda a, semidefinite: 2 * [a.update(weak_type=False)])
mlir.register_lowering(_eliminate_p, mlir.lower_fun(_eliminate, multiple_results=True))
batching.primitive_batchers[_eliminate_p] = _batch_last
ad.primitive_jvps[_eliminate_p] = _differentiate
