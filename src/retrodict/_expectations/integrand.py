"""Terms as functions of standard normal noise, one row at a time.

Quadrature averages these functions over nodes, and Rao–Blackwellised sampling over draws.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._expectations.closed_form import whitener_of
from retrodict._expectations.estimator import PairRow, StateRow
from retrodict._expectations.functionals import (
    AbstractPairTerm,
    AbstractTerm,
    LogTransition,
)
from retrodict._kernels import NonlinearGaussianKernel
from retrodict._laws import LOG_2PI, scale_log_det
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import Scalar


def noise_dim(term: AbstractTerm, state_dim: int) -> int:
    """Return the number of standard normal variables over which a term is integrated per row."""
    if isinstance(term, AbstractPairTerm) and not _is_nonlinear_gaussian(term):
        return 2 * state_dim
    return state_dim


def integrand(
    term: Any, row: StateRow | PairRow, data: PyTree
) -> Callable[[Float[Array, "noise"]], PyTree]:
    """Return the function of z whose expectation under N(0, I) is that of the term in this row.

    Quantities that do not depend on z are computed outside of the function, once per row.
    """
    if isinstance(row, StateRow):
        return lambda z: term(row.mean + linalg.matvec(row.scale, z), data)
    if _is_nonlinear_gaussian(term):
        return _transition_given_the_past(term.kernel, row, data)
    past, present = row.factors()
    return lambda z: term(
        row.before + linalg.matvec(past, z), row.after + linalg.matvec(present, z), data
    )


def _is_nonlinear_gaussian(term: AbstractTerm) -> bool:
    return isinstance(term, LogTransition) and isinstance(term.kernel, NonlinearGaussianKernel)


def _transition_given_the_past(
    kernel: NonlinearGaussianKernel, row: PairRow, data: Series
) -> Callable[[Float[Array, "noise"]], Scalar]:
    """Return the expected log density of a nonlinear-Gaussian transition, given x_{k-1}.

    log N(x_k; f(x_{k-1}), s sᵀ) is quadratic in x_k, so that x_k is integrated in closed form. With
    x_{k-1} = m_{k-1} + S_{k-1} z and x_k = m_k + S_k e, the noise e given z is Gaussian:

    - its mean is Bᵀ z with B = S_{k-1}⁻¹ G S_k, as x_{k-1} = m_{k-1} + G S_k e + s_k e';
    - its precision is I + MᵀM with M = s_k⁻¹ G S_k, by conditioning on one such observation of e.

    With I + MᵀM = L Lᵀ the spread of s⁻¹x_k around its mean is ‖s⁻¹ S_k L⁻ᵀ‖², a sum of squares,
    where ‖s⁻¹S_k‖² − ‖s⁻¹S_k Bᵀ‖² would cancel.
    """
    kernel = unwrap(kernel)
    whitener = whitener_of(kernel.scale_tril, row.after.dtype)
    d = row.after.shape[0]
    reach = linalg.matmul(row.gain, row.after_scale)
    regression = linalg.solve_triangular(row.before_scale, reach)
    ratio = linalg.solve_triangular(row.scale, reach)
    precision = jnp.eye(d, dtype=reach.dtype) + linalg.matmul(ratio.T, ratio)
    lower = linalg.cholesky(precision)
    whitened = linalg.matmul(whitener, row.after_scale)
    spread = linalg.solve_triangular(lower, whitened.T)
    constant = -0.5 * (jnp.sum(spread**2) + d * LOG_2PI) - scale_log_det(kernel.scale_tril)
    u = data.inputs

    def value(z: Float[Array, "noise"]) -> Scalar:
        before = row.before + linalg.matvec(row.before_scale, z)
        after = row.after + linalg.matvec(row.after_scale, linalg.matvec(regression.T, z))
        residual = linalg.matvec(whitener, after - kernel.law(before, u).mean)
        return constant - 0.5 * jnp.sum(residual**2)

    return value
