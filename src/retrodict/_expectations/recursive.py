"""Expectations carried forward in time: O(1) memory, one step for each new observation."""

from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._expectations.closed_form import refuse_unless_quadratic
from retrodict._expectations.estimator import AbstractEstimator, existing_rows
from retrodict._expectations.functionals import (
    AbstractFunctional,
    AbstractTerm,
    Data,
    increment_value,
    initial_value,
)
from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import Gaussian, dense_scale
from retrodict._numerics import linalg
from retrodict._types import State
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


class Recursive(AbstractEstimator):
    """Exact expectations of quadratic functionals by a recursion that runs forward in time.

    T_k(x_k) = E_{q_{k-1|k}}[T_{k-1}(X_{k-1}) + h_k(X_{k-1}, x_k)] stays quadratic under
    linear-Gaussian backward kernels, and E_{q_k} T_k is the smoothed functional given the data up
    to time k. It needs the last law and kernel alone, so that it follows a stream.

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

    def init(
        self, functional: AbstractFunctional, law: Gaussian, data: Data = None
    ) -> RecursiveState:
        """The statistic T_0 = h_0 after the first observation.

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
        """The statistic one time step later.

        Args:
            functional: the functional that the state was started with.
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
        """The expectation E_{q_k} T_k = c + ½ tr(A Σ_k) given the data so far."""
        covariance = linalg.outer_gram(state.scale)
        return jax.tree.map(
            lambda c, a: c + 0.5 * _contract(a, covariance), state.constant, state.hessian
        )

    @property
    def num_replicates(self) -> None:
        """None: nothing is drawn."""
        return None

    @property
    def error(self) -> Literal["none"]:
        """None."""
        return "none"

    def view(
        self, chain: AbstractBackwardChain, *, parallel: Parallel = False
    ) -> LinearGaussianChain:
        """The chain itself, refused unless it is linear Gaussian."""
        if not isinstance(chain, LinearGaussianChain):
            raise TypeError(
                f"Recursive follows a LinearGaussianChain, got {type(chain).__name__}. Use"
                " BackwardSampling(num_samples) with a key: it takes any chain."
            )
        if parallel:
            raise ValueError(
                "Recursive goes forward one row after another. Use ClosedForm(), which gives the"
                " same value, or parallel=False."
            )
        return chain

    def draw(
        self,
        terms: Sequence[AbstractTerm],
        view: LinearGaussianChain,
        key: Any,
        *,
        parallel: Parallel = False,
    ) -> None:
        """Nothing."""
        return None

    def evaluate(
        self, terms: Sequence[AbstractTerm], view: LinearGaussianChain, noise: None, data: PyTree
    ) -> PyTree:
        """The recursion over a whole chain."""
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
    def initial(x: State) -> PyTree:
        return initial_value(terms, x, data)

    slope = jax.jacfwd(initial)
    return RecursiveState(mean, scale, initial(mean), slope(mean), jax.jacfwd(slope)(mean))


def _advance(
    terms: Sequence[AbstractTerm],
    state: RecursiveState,
    mean: Array,
    scale: Array,
    kernel: LinearGaussianKernel,
    data: Data,
) -> RecursiveState:
    """One step of the recursion.

    With x_{k-1} = G x + g + s e and r = G μ_k + g − μ_{k-1}, the part of T_{k-1} is the quadratic
    with value c + b·r + ½ rᵀA r + ½ tr(sᵀA s), gradient Gᵀ(b + A r) and Hessian GᵀA G at μ_k. That
    of h_k is its expansion around μ_k, plus half the trace of its Hessian in e.
    """
    gain, spread = kernel.weight, dense_scale(kernel.scale_tril)
    past = linalg.matvec(gain, mean) + kernel.bias
    shift = past - state.mean

    def increment(x: State, e: Array) -> PyTree:
        before = linalg.matvec(gain, x) + kernel.bias + linalg.matvec(spread, e)
        return increment_value(terms, before, x, data)

    none = jnp.zeros_like(mean)
    slope = jax.jacfwd(increment)
    value, gradient = increment(mean, none), slope(mean, none)
    hessian = jax.jacfwd(slope)(mean, none)
    noise = jax.jacfwd(jax.jacfwd(increment, argnums=1), argnums=1)(mean, none)
    noise_covariance = linalg.outer_gram(spread)

    def carry(value: Array, noise: Array, c: Array, b: Array, a: Array) -> Array:
        linear = jnp.tensordot(b, shift, 1, precision=lax.Precision.HIGHEST)
        square = _contract(a, shift[:, None] * shift[None, :] + noise_covariance)
        return value + c + linear + 0.5 * (square + jnp.trace(noise, axis1=-2, axis2=-1))

    def tilt(gradient: Array, b: Array, a: Array) -> Array:
        inner = b + jnp.tensordot(a, shift, 1, precision=lax.Precision.HIGHEST)
        return gradient + jnp.tensordot(inner, gain, 1, precision=lax.Precision.HIGHEST)

    def bend(hessian: Array, a: Array) -> Array:
        right = jnp.tensordot(a, gain, 1, precision=lax.Precision.HIGHEST)
        left = jnp.tensordot(jnp.swapaxes(right, -1, -2), gain, 1, precision=lax.Precision.HIGHEST)
        return hessian + jnp.swapaxes(left, -1, -2)

    c, b, a = state.constant, state.gradient, state.hessian
    return RecursiveState(
        mean,
        scale,
        jax.tree.map(carry, value, noise, c, b, a),
        jax.tree.map(tilt, gradient, b, a),
        jax.tree.map(bend, hessian, a),
    )


def _contract(a: Float[Array, "*value state state"], matrix: Array) -> Float[Array, "*value"]:
    """The trace of a times a symmetric matrix, over the last two axes."""
    return jnp.tensordot(a, matrix, 2, precision=lax.Precision.HIGHEST)


def _refuse_unless_gaussian(law: Any, kernel: Any = None) -> None:
    """Refuses factors of families whose kernels are drawn from."""
    if isinstance(law, Gaussian) and (kernel is None or isinstance(kernel, LinearGaussianKernel)):
        return
    got = type(law).__name__ if kernel is None else f"{type(law).__name__}, {type(kernel).__name__}"
    raise TypeError(
        f"Recursive follows Gaussian laws and linear-Gaussian kernels, got {got}. Infer the chain"
        " of the series so far, and use BackwardSampling(num_samples)."
    )
