"""Exact expectations of quadratic terms under linear-Gaussian chains."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from retrodict._chains import AbstractBackwardChain
from retrodict._expectations.estimator import (
    AbstractDeterministicEstimator,
    Moments,
    PairRow,
    StateRow,
)
from retrodict._expectations.functionals import (
    AbstractTerm,
    LogEmission,
    LogPrior,
    LogTransition,
    add,
)
from retrodict._kernels import AbstractLinearGaussianKernel
from retrodict._laws import LOG_2PI, Gaussian, dense_scale, masked_scale, scale_log_det, scale_solve
from retrodict._numerics import linalg
from retrodict._series import Series
from retrodict._types import Scalar
from retrodict.distributed import Parallel


class ClosedForm(AbstractDeterministicEstimator):
    """Exact expectations, for functionals that are quadratic in the states.

    A quadratic h has E h(x) = h(m) + ½ tr(∇²h Cov x) under a Gaussian law of mean m. Log densities
    of linear-Gaussian kernels are computed as sums of squares, without cancellation.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> chain = rd.LinearGaussianChain.from_arrays(
        ...     jnp.ones((2, 1)), jnp.ones((2, 1, 1)), jnp.ones((1, 1, 1)), jnp.zeros((1, 1)),
        ...     jnp.ones((1, 1, 1)),
        ... )
        >>> rd.expectation(chain, rd.StateSum(), estimator=rd.ClosedForm()).tolist()
        [2.0]
    """

    @property
    def error(self) -> Literal["none"]:
        """There is none."""
        return "none"

    def view(self, chain: AbstractBackwardChain, *, parallel: Parallel = False) -> Moments:
        """Return the moments of states and pairs."""
        return Moments.of(chain, "ClosedForm", parallel=parallel)

    def evaluate(
        self, terms: Sequence[AbstractTerm], view: Moments, noise: None, data: PyTree
    ) -> PyTree:
        """Return the exact expectation of the terms, all of which must be quadratic."""
        refuse_unless_quadratic(terms, "ClosedForm")
        return add([closed_form(term, view, data) for term in terms])


def refuse_unless_quadratic(terms: Sequence[AbstractTerm], owner: str) -> None:
    """Refuse terms without a closed form."""
    for term in terms:
        if not term.quadratic:
            raise TypeError(
                f"{owner} expects terms that are quadratic in the states, and {term.name} is not"
                " declared quadratic. Use Quadrature(order), or BackwardSampling(num_samples) or"
                " RaoBlackwellised(num_samples) with a key."
            )


def closed_form(term: AbstractTerm, moments: Moments, data: PyTree) -> PyTree:
    """Return the exact expectation of one quadratic term, summed over time."""
    return moments.total(term, _expectation_in_a_row(term), data)


def _expectation_in_a_row(term: AbstractTerm) -> Callable[..., PyTree]:
    """Return the function that computes the expectation of a term in one row.

    It is mapped over time, so that quantities that do not depend on the row, such as the inverse of
    a fixed scale, are computed once.
    """
    if isinstance(term, LogPrior) and isinstance(term.law, Gaussian):
        return functools.partial(_expected_log_prior, term.law)
    if isinstance(term, LogEmission) and isinstance(term.kernel, AbstractLinearGaussianKernel):
        return functools.partial(_expected_log_emission, term.kernel)
    if isinstance(term, LogTransition) and isinstance(term.kernel, AbstractLinearGaussianKernel):
        return functools.partial(_expected_log_transition, term.kernel)
    return functools.partial(_expected_generic, term)


def _expected_generic(term: Any, row: StateRow | PairRow, data: PyTree) -> PyTree:
    """Return the expectation of any quadratic term, by its second derivatives."""
    if isinstance(row, StateRow):
        return _expected_quadratic(lambda x: term(x, data), (row.mean,), (row.scale,))
    means = (row.before, row.after)
    return _expected_quadratic(lambda before, x: term(before, x, data), means, row.factors())


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


def _expected_log_prior(law: Gaussian, row: StateRow, data: PyTree) -> Scalar:
    """E log N(x; m, s sᵀ) = −½ (‖s⁻¹(m_0 − m)‖² + ‖s⁻¹S_0‖² + d log 2π) − log |s|."""
    shift = scale_solve(law.scale_tril, row.mean - law.mean)
    spread = scale_solve(law.scale_tril, row.scale)
    return _log_density(
        jnp.sum(shift**2) + jnp.sum(spread**2), law.dim, scale_log_det(law.scale_tril)
    )


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
    shift = scale_solve(scale, residual)
    spread = linalg.matmul(scale_solve(scale, weight), row.scale)
    return _log_density(jnp.sum(shift**2) + jnp.sum(spread**2), count, scale_log_det(scale))


def _expected_log_transition(
    kernel: AbstractLinearGaussianKernel, row: PairRow, data: Series
) -> Scalar:
    """E log N(x_k; w x_{k-1} + b, s sᵀ) under the law of a pair.

    The residual x_k − w x_{k-1} − b has mean m_k − w m_{k-1} − b and factor [(I − w G) S, −w s_k],
    which s⁻¹ turns into a sum of squares. s⁻¹ and s⁻¹w are formed once if they do not depend on
    the input, so that a row costs products instead of triangular solves.
    """
    fixed = kernel.at(data.inputs)
    whitener = whitener_of(fixed.scale_tril, row.after.dtype)
    whitened = linalg.matmul(whitener, fixed.weight)
    residual = row.after - linalg.matvec(fixed.weight, row.before) - fixed.bias
    shift = linalg.matvec(whitener, residual)
    contrast = whitener - linalg.matmul(whitened, row.gain)
    spread = linalg.matmul(contrast, row.after_scale)
    rest = linalg.matmul(whitened, row.scale)
    squares = jnp.sum(shift**2) + jnp.sum(spread**2) + jnp.sum(rest**2)
    return _log_density(squares, row.after.shape[0], scale_log_det(fixed.scale_tril))


def whitener_of(scale: Any, dtype: Any) -> Float[Array, "d d"]:
    """Return the inverse s⁻¹ of a scale as a dense matrix."""
    dim = dense_scale(scale).shape[0]
    return scale_solve(scale, jnp.eye(dim, dtype=dtype))


def _log_density(squares: Scalar, count: Any, log_det: Scalar) -> Scalar:
    return -0.5 * (squares + count * LOG_2PI) - log_det
