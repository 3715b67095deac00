"""The recursion T_k(x_k) = E_{q_{k-1|k}}[T_{k-1}(X_{k-1}) + h_k(X_{k-1}, x_k)], in `_advance`.

It runs forward in time with memory that does not grow, one step per observation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import State
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._expectations.estimators import (
    AbstractDeterministicEstimator,
    refuse_unless_quadratic,
)
from retrodict._expectations.functionals import (
    AbstractFunctional,
    AbstractTerm,
    Data,
    add,
    increment_value,
    initial_value,
)
from retrodict._expectations.moments import existing_rows
from retrodict._model import Gaussian, LinearGaussianKernel, dense_scale
from retrodict._numerics import linalg
from retrodict.distributed import Parallel


class RecursiveState(eqx.Module):
    """The statistic T_k(x) = c + b·(x − μ_k) + ½ (x − μ_k)ᵀ A (x − μ_k), and the law q_k.

    Attributes:
        mean: μ_k, the mean of q_k.
        scale: the lower factor of the covariance of q_k.
        constant: c, with the structure of the functional's value.
        gradient: b, with one more axis `state` in each array.
        hessian: A, with two more.
    """

    mean: Float[Array, "state"]
    scale: Float[Array, "state state"]
    constant: PyTree
    gradient: PyTree
    hessian: PyTree


class Recursive(AbstractDeterministicEstimator):
    """Exact expectations of quadratic functionals by a recursion that runs forward in time.

    T_k(x_k) = E_{q_{k-1|k}}[T_{k-1}(X_{k-1}) + h_k(X_{k-1}, x_k)] stays quadratic under
    linear-Gaussian backward kernels, and E_{q_k} T_k is the smoothed functional given the data up
    to time k. It needs the last law and kernel only, so that it can process a stream.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> recursive, functional = rd.Recursive(), rd.StateSum()
        >>> law = rd.Gaussian(jnp.ones(1), jnp.eye(1))
        >>> kernel = rd.LinearGaussianKernel(0.5 * jnp.eye(1), jnp.zeros(1), jnp.eye(1))
        >>> state = recursive.init(functional, law)
        >>> state = recursive.update(functional, state, law, kernel)
        >>> recursive.value(state).tolist()
        [1.5]
    """

    error = "none"

    def init(
        self, functional: AbstractFunctional, law: Gaussian, data: Data = None
    ) -> RecursiveState:
        """Return the statistic T_0 = h_0 after the first observation.

        Args:
            functional: a functional whose terms are all quadratic.
            law: the filtering law q_0.
            data: the row of the data at time 0.
        """
        terms = functional.terms()
        refuse_unless_quadratic(terms, "Recursive")
        _refuse_unless_gaussian(law)
        return _start(terms, law.mean, dense_scale(law.scale_tril), data)

    def update(
        self,
        functional: AbstractFunctional,
        state: RecursiveState,
        law: Gaussian,
        kernel: LinearGaussianKernel,
        data: Data = None,
    ) -> RecursiveState:
        """Return the statistic one time step later.

        Args:
            functional: the functional that was passed to `init`.
            state: the statistic T_{k-1}.
            law: the filtering law q_k.
            kernel: the backward kernel q_{k-1|k}.
            data: the row of the data at time k.
        """
        terms = functional.terms()
        refuse_unless_quadratic(terms, "Recursive")
        _refuse_unless_gaussian(law, kernel)
        return _advance(terms, state, law.mean, dense_scale(law.scale_tril), kernel, data)

    def value(self, state: RecursiveState) -> PyTree:
        """Return the expectation E_{q_k} T_k = c + ½ tr(A Σ_k) given the data so far."""
        covariance = linalg.outer_gram(state.scale)

        def value(c: Array, a: Array) -> Array:
            return c + 0.5 * jnp.tensordot(a, covariance, 2, precision=lax.Precision.HIGHEST)

        return jax.tree.map(value, state.constant, state.hessian)

    def view(
        self, chain: AbstractBackwardChain, *, parallel: Parallel = False
    ) -> LinearGaussianChain:
        """Return the chain itself, refused unless it is linear Gaussian."""
        if not isinstance(chain, LinearGaussianChain):
            raise TypeError(
                f"Recursive expects a LinearGaussianChain, got {type(chain).__name__}. Use"
                " BackwardSampling(num_samples) with a key: it takes any chain."
            )
        if parallel:
            raise ValueError(
                "Recursive has no parallel form. Use ClosedForm(), which returns the same value, or"
                " parallel=False."
            )
        return chain

    def evaluate(
        self, terms: Sequence[AbstractTerm], view: LinearGaussianChain, noise: None, data: PyTree
    ) -> PyTree:
        """Run the recursion over a whole chain."""
        refuse_unless_quadratic(terms, "Recursive")
        laws, exists = view.laws, existing_rows(view)
        first, later = (jax.tree.map(lambda leaf, i=i: leaf[i], data) for i in (0, slice(1, None)))
        start = _start(terms, laws.mean[0], laws.scale_tril[0], first)

        def move(state: RecursiveState, row: tuple) -> tuple[RecursiveState, None]:
            mean, scale, kernel, data, real = row
            after = _advance(terms, state, mean, scale, kernel, data)
            if real is not None:
                after = jax.tree.map(lambda new, old: jnp.where(real, new, old), after, state)
            return after, None

        real = None if exists is None else exists[1:]
        rows = (laws.mean[1:], laws.scale_tril[1:], view.kernels, later, real)
        return self.value(lax.scan(move, start, rows)[0])


def _start(terms: Sequence[AbstractTerm], mean: Array, scale: Array, data: Data) -> RecursiveState:
    """Return T_0 = h_0."""
    return _expand(lambda x, e: initial_value(terms, x, data), mean, scale)


def _advance(
    terms: Sequence[AbstractTerm],
    state: RecursiveState,
    mean: Array,
    scale: Array,
    kernel: LinearGaussianKernel,
    data: Data,
) -> RecursiveState:
    """Return T_k(x) = E[T_{k-1}(X) + h_k(X, x)] for X = G x + g + s e, of law q_{k-1|k}(x, ·)."""

    def statistic(x: State, e: Array) -> PyTree:
        before = linalg.matvec(kernel.weight, x) + kernel.bias
        before = before + linalg.matvec(dense_scale(kernel.scale_tril), e)
        return add([_evaluate(state, before), increment_value(terms, before, x, data)])

    return _expand(statistic, mean, scale)


def _evaluate(state: RecursiveState, x: State) -> PyTree:
    """Return T_k(x)."""
    shift = x - state.mean

    def value(c: Array, b: Array, a: Array) -> Array:
        slope = b + 0.5 * jnp.tensordot(a, shift, 1, precision=lax.Precision.HIGHEST)
        return c + jnp.tensordot(slope, shift, 1, precision=lax.Precision.HIGHEST)

    return jax.tree.map(value, state.constant, state.gradient, state.hessian)


def _expand(
    statistic: Callable[[State, Array], PyTree], mean: Array, scale: Array
) -> RecursiveState:
    """Return E_e statistic(x, e), e standard normal, as a quadratic function of x around the mean.

    For a quadratic function the expectation is the value at e = 0 plus half the trace of the
    Hessian in e.
    """
    zero = jnp.zeros_like(mean)
    slope = jax.jacfwd(statistic)
    noise = jax.jacfwd(jax.jacfwd(statistic, argnums=1), argnums=1)(mean, zero)
    constant = jax.tree.map(
        lambda value, h: value + 0.5 * jnp.trace(h, axis1=-2, axis2=-1),
        statistic(mean, zero),
        noise,
    )
    hessian = jax.jacfwd(slope)(mean, zero)
    return RecursiveState(mean, scale, constant, slope(mean, zero), hessian)


def _refuse_unless_gaussian(law: Any, kernel: Any = None) -> None:
    """Refuse factors of families without linear-Gaussian kernels."""
    if isinstance(law, Gaussian) and (kernel is None or isinstance(kernel, LinearGaussianKernel)):
        return
    got = type(law).__name__ if kernel is None else f"{type(law).__name__}, {type(kernel).__name__}"
    raise TypeError(
        f"Recursive expects Gaussian laws and linear-Gaussian kernels, got {got}. Infer the chain"
        " of the series so far, and use BackwardSampling(num_samples)."
    )
