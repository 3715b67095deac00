"""Expectations of a term in one row: in closed form, or as integrals over standard normal noise."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import Scalar
from retrodict._expectations.functionals import (
    AbstractPairTerm,
    AbstractTerm,
    LogEmission,
    LogPrior,
    LogTransition,
)
from retrodict._expectations.moments import PairRow, StateRow
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Gaussian,
    NonlinearGaussianKernel,
    Series,
    masked_scale,
    scale_inverse,
    scale_solve,
    unwrap,
    whitened_log_density,
)
from retrodict._numerics import linalg


def expected_value(term: Any, row: Any, data: PyTree) -> PyTree:
    """Return the exact expectation of a quadratic term in one row.

    Log densities of linear-Gaussian kernels are computed as sums of squares, without cancellation.
    Callers map this function over time, so that quantities that do not depend on the row, such as
    the inverse of a fixed scale, are computed once.
    """
    if isinstance(term, LogPrior) and isinstance(term.law, Gaussian):
        return _expected_log_prior(term.law, row)
    if isinstance(term, LogEmission) and isinstance(term.kernel, AbstractLinearGaussianKernel):
        return _expected_log_emission(term.kernel, row, data)
    if isinstance(term, LogTransition) and isinstance(term.kernel, AbstractLinearGaussianKernel):
        return _expected_log_transition(term.kernel, row, data)
    if isinstance(row, StateRow):
        means, factors = (row.mean,), (row.scale,)
    else:
        means, factors = (row.before.mean, row.after.mean), row.factors()
    value: Any = term
    return _expected_quadratic(lambda *states: value(*states, data), means, factors)


def _expected_quadratic(
    fn: Callable[..., PyTree], means: tuple[Array, ...], factors: tuple[Array, ...]
) -> PyTree:
    """E h(m + F ε) = h(m) + ½ Σ_j D²h(m)[F_j, F_j] for a quadratic h and the columns F_j of F."""

    def curvature(*column: Array) -> PyTree:
        def slope(*at: Array) -> PyTree:
            return jax.jvp(fn, at, column)[1]

        return jax.jvp(slope, means, column)[1]

    curvatures = jax.vmap(curvature, in_axes=1)(*factors)
    return jax.tree.map(lambda h, c: h + 0.5 * jnp.sum(c, axis=0), fn(*means), curvatures)


def _expected_log_prior(law: Gaussian, row: StateRow) -> Scalar:
    """E log N(x; m, s sᵀ) = −½ (‖s⁻¹(m_0 − m)‖² + ‖s⁻¹S_0‖² + d log 2π) − log |s|."""
    whitener = scale_inverse(law.scale_tril, row.mean.dtype)
    shift = linalg.matvec(whitener, row.mean - law.mean)
    spread = linalg.matmul(whitener, row.scale)
    return whitened_log_density(law.scale_tril, law.dim, shift, spread)


def _expected_log_emission(
    kernel: AbstractLinearGaussianKernel, row: StateRow, data: Series
) -> Scalar:
    """E log N(y; w x + b, s sᵀ) of the observed entries of y.

    The expected square is ‖s⁻¹(y − w m − b)‖² + ‖s⁻¹w S‖²; a missing entry becomes a row of zeros
    in both.
    """
    fixed = kernel.at(data.inputs)
    weight, scale, count = fixed.weight, fixed.scale_tril, data.ys.shape[0]
    residual = data.ys - linalg.matvec(weight, row.mean) - fixed.bias
    if data.mask is not None:
        observed = data.mask.astype(residual.dtype)
        scale, count = masked_scale(scale, observed), jnp.sum(observed)
        weight, residual = weight * observed[:, None], residual * observed
    spread = linalg.matmul(scale_solve(scale, weight), row.scale)
    return whitened_log_density(scale, count, scale_solve(scale, residual), spread)


def _expected_log_transition(
    kernel: AbstractLinearGaussianKernel, row: PairRow, data: Series
) -> Scalar:
    """E log N(x_k; w x_{k-1} + b, s sᵀ) under the law of a pair.

    The residual x_k − w x_{k-1} − b has mean m_k − w m_{k-1} − b and factor [S − w R, −w s_k],
    which s⁻¹ turns into a sum of squares. s⁻¹ and s⁻¹w are formed once if they do not depend on
    the input, so that a row costs products instead of triangular solves.
    """
    fixed = kernel.at(data.inputs)
    before, after = row.before, row.after
    whitener = scale_inverse(fixed.scale_tril, after.mean.dtype)
    whitened = linalg.matmul(whitener, fixed.weight)
    residual = after.mean - linalg.matvec(fixed.weight, before.mean) - fixed.bias
    contrast = after.scale - linalg.matmul(fixed.weight, row.reach)
    spread = linalg.matmul(whitener, contrast)
    rest = linalg.matmul(whitened, row.scale)
    shift = linalg.matvec(whitener, residual)
    return whitened_log_density(fixed.scale_tril, shift.shape[0], shift, spread, rest)


def noise_dim(term: AbstractTerm, state_dim: int) -> int:
    """Return the number of standard normal variables over which a term is integrated per row."""
    return state_dim * (1 + (isinstance(term, AbstractPairTerm) and not _is_nonlinear(term)))


def integrand(
    term: Any, row: StateRow | PairRow, data: PyTree
) -> Callable[[Float[Array, "noise"]], PyTree]:
    """Return the function of z whose expectation under N(0, I) is that of the term in this row.

    Quantities that do not depend on z are computed outside of the function, once per row.
    """
    if isinstance(row, StateRow):
        return lambda z: term(row.mean + linalg.matvec(row.scale, z), data)
    if _is_nonlinear(term):
        return _transition_given_the_past(term.kernel, row, data)
    past, present = row.factors()
    return lambda z: term(
        row.before.mean + linalg.matvec(past, z), row.after.mean + linalg.matvec(present, z), data
    )


def _is_nonlinear(term: AbstractTerm) -> bool:
    """Return whether a term is the log density of a nonlinear-Gaussian transition."""
    return isinstance(term, LogTransition) and isinstance(term.kernel, NonlinearGaussianKernel)


def _transition_given_the_past(
    kernel: NonlinearGaussianKernel, row: PairRow, data: Series
) -> Callable[[Float[Array, "noise"]], Scalar]:
    """Return the expected log density of a nonlinear-Gaussian transition, given x_{k-1}.

    log N(x_k; f(x_{k-1}), s sᵀ) is quadratic in x_k, so that x_k is integrated in closed form. With
    x_{k-1} = m_{k-1} + S_{k-1} z and x_k = m_k + S_k e, the noise e given z is Gaussian:

    - its mean is Bᵀ z with B = S_{k-1}⁻¹ R, as x_{k-1} = m_{k-1} + R e + s_k e';
    - its precision is I + MᵀM with M = s_k⁻¹ R, by conditioning on one such observation of e.

    With I + MᵀM = L Lᵀ the spread of s⁻¹x_k around its mean is ‖s⁻¹ S_k L⁻ᵀ‖², a sum of squares,
    where ‖s⁻¹S_k‖² − ‖s⁻¹S_k Bᵀ‖² would cancel.
    """
    kernel, before, after = unwrap(kernel), row.before, row.after
    whitener = scale_inverse(kernel.scale_tril, after.mean.dtype)
    reach = row.reach
    regression = linalg.solve_triangular(before.scale, reach)
    ratio = linalg.solve_triangular(row.scale, reach)
    eye = jnp.eye(after.mean.shape[0], dtype=reach.dtype)
    lower = linalg.cholesky(eye + linalg.matmul(ratio.T, ratio))
    spread = linalg.solve_triangular(lower, linalg.matmul(whitener, after.scale).T)

    def value(z: Float[Array, "noise"]) -> Scalar:
        past = before.mean + linalg.matvec(before.scale, z)
        mean = after.mean + linalg.matvec(after.scale, linalg.matvec(regression.T, z))
        residual = linalg.matvec(whitener, mean - kernel.law(past, data.inputs).mean)
        return whitened_log_density(kernel.scale_tril, mean.shape[0], residual, spread)

    return value
