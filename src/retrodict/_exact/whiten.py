"""Observations with unit noise, reduced to about d entries per row.

A missing entry is a row of zeros in the design, so that the functions after `whiten` need no mask.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._arrays import Scalar
from retrodict._model import LOG_2PI, Scale, masked_scale, scale_log_det, scale_solve
from retrodict._numerics import linalg


class Whitened(NamedTuple):
    """Whitened observations value_k = design x_k + ε with standard normal ε.

    The design may have a leading time axis.
    """

    design: Float[Array, "*time whitened state"]
    value: Float[Array, "time whitened"]

    def reduced(self) -> "Reduced":
        """Return the data, with d entries per row if there are more than d + 1: see `_reduce`."""
        if self.value.shape[-1] <= self.design.shape[-1] + 1:
            return Reduced(*self)
        axis = 0 if self.design.ndim == 3 else None
        return Reduced(*jax.vmap(_reduce, in_axes=(axis, 0), out_axes=(axis, 0, 0, 0))(*self))


class Reduced(NamedTuple):
    """Whitened observations with at most d + 1 entries per row.

    Attributes:
        design: the design, possibly with a leading time axis.
        value: the values.
        slope: Hᵀ v of the component of a row orthogonal to the span of its design: zero, with a
            nonzero derivative (see `_reduce`). `None` if rows were not reduced.
        squares: the square norm of that part, which enters the log density alone.
    """

    design: Float[Array, "*time whitened state"]
    value: Float[Array, "time whitened"]
    slope: Float[Array, "time state"] | None = None
    squares: Float[Array, "time"] | None = None


def whiten(
    weight: Float[Array, "obs state"],
    scale: Scale,
    residual: Float[Array, "obs ..."],
    mask: Bool[Array, "obs"] | None,
) -> tuple[Float[Array, "obs state"], Float[Array, "obs ..."], Scalar]:
    """Transform y − b = w x + s ε into observations with unit noise.

    Without a mask, `residual` may be a matrix with one observation per column.

    Returns:
        The design, the values, and the constant that the change of variables adds to the log
        density.
    """
    count = jnp.asarray(residual.shape[0], residual.dtype)
    if mask is not None:
        observed = mask.astype(residual.dtype)
        count = jnp.sum(observed)
        scale = masked_scale(scale, observed)
        weight, residual = weight * observed[:, None], residual * observed
    design, value = scale_solve(scale, weight), scale_solve(scale, residual)
    constant = -0.5 * LOG_2PI * count - scale_log_det(scale)
    return design, value, constant


def reduce_rows(
    design: Float[Array, "obs state"], value: Float[Array, "obs"]
) -> tuple[Float[Array, "whitened state"], Float[Array, "whitened"]]:
    """Rotate observations with unit noise so that at most d + 1 of them remain.

    The last one is the part of the row out of the span of its design. Its design is zero, with a
    derivative.
    """
    if design.shape[0] <= design.shape[1] + 1:
        return design, value
    reduced, values, slope, squares = _reduce(design, value)
    size = linalg.safe_sqrt(squares)
    extra = slope * linalg.safe_reciprocal(size)
    return jnp.concatenate([reduced, extra[None]]), jnp.append(values, size)


@jax.custom_jvp
def _reduce(
    design: Float[Array, "obs state"], value: Float[Array, "obs"]
) -> tuple[Float[Array, "whitened state"], Float[Array, "whitened"], Float[Array, "state"], Scalar]:
    """Rotate observations with unit noise so that d of them remain.

    With B an orthonormal basis of the span of H, the entries B v with design B H have the
    likelihood of v with design H, up to the factor exp(−½ |v − BᵀB v|²) (Jungbacker and Koopman
    2015). The design B H does not depend on the values.

    Differentiation treats B as a constant. The likelihood depends on HᵀH and Hᵀv. A change of H out
    of the span affects HᵀBᵀB H to second order only, but Hᵀ(I − BᵀB) v, which is zero, to first
    order. This vector is returned as well; its derivative completes first derivatives. Second
    derivatives would be wrong, and raise an error.

    Returns:
        The design, the values, Hᵀ(I − BᵀB) v and |v − BᵀB v|².
    """
    basis = row_basis(design.T)
    reduced = linalg.matvec(basis, value)
    rest = value - linalg.matvec(basis.T, reduced)
    # A product, so that under `vmap` it has the axis that its derivative has.
    zero = 0.0 * linalg.matvec(design.T, rest)
    return linalg.matmul(basis, design), reduced, zero, jnp.sum(rest**2)


@_reduce.defjvp
def _reduce_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]):
    (design, value), (design_dot, value_dot) = primals, tangents
    basis = _first_order_only(row_basis(design.T))
    rest = value - linalg.matvec(basis.T, linalg.matvec(basis, value))
    return _reduce(design, value), (
        linalg.matmul(basis, design_dot),
        linalg.matvec(basis, value_dot),
        linalg.matvec(design_dot.T, rest),
        2.0 * jnp.sum(rest * value_dot),
    )


@jax.custom_jvp
def _first_order_only(basis: Array) -> Array:
    return basis


@_first_order_only.defjvp
def _reject_second_derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    raise TypeError(
        "Filtering laws and chains can be differentiated only once where a row has more than d"
        " + 1 entries (d is the state dimension), and the log-evidence only twice. For higher"
        " derivatives process the entries of a row as separate rows, with no transition between"
        " them."
    )


def row_basis(rows: Float[Array, "r c"]) -> Float[Array, "r c"]:
    """Return orthonormal rows with the same span as `rows`; dependent rows become zero."""
    if rows.shape[0] > linalg.UNROLLED:
        return jnp.linalg.qr(rows.T)[0].T
    basis: list[Array] = []
    tiny = jnp.finfo(rows.dtype).eps
    for row in rows:
        size = jnp.sqrt(jnp.sum(row**2))
        for _ in range(2):  # two passes give orthogonality to rounding
            for other in basis:
                row = row - other * jnp.sum(other * row)
        remainder = jnp.sqrt(jnp.sum(row**2))
        keep = remainder > 10 * rows.shape[1] * tiny * size
        basis.append(jnp.where(keep, row / jnp.where(keep, remainder, 1.0), 0.0))
    return jnp.stack(basis)
