"""Additive functionals of a path, as sums of terms.

    H(x_{0:n-1}) = initial(x_0, data_0) + Σ_{k=1}^{n-1} increment(x_{k-1}, x_k, data_k)

A functional is a tuple of terms. A term is a function of x_0, of every x_k, or of every pair
(x_{k-1}, x_k), and declares whether it is quadratic in the states. Estimators integrate the terms
one by one, each by the cheapest method that it allows.
"""

import functools
import math
import numbers
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import Scalar, State
from retrodict._model import (
    AbstractKernel,
    AbstractLinearGaussianKernel,
    Gaussian,
    Series,
    StateSpaceModel,
    require_model,
    unwrap,
)

Data: TypeAlias = Any
"""The row of the data at one time: a pytree, or `None` if there is no data."""


class Variation(NamedTuple):
    """Constants of a function h(x_{k-1}, x_k), per entry of its value; infinite where unknown.

    Attributes:
        before: a Lipschitz constant in x_{k-1}.
        now: a Lipschitz constant in x_k.
        oscillation: sup h − inf h.
    """

    before: float
    now: float
    oscillation: float


def check_constant(value: float | None, name: str) -> float:
    """Return a declared constant, which must be finite and nonnegative; infinity for `None`."""
    if value is None:
        return math.inf
    if not (isinstance(value, (numbers.Real, np.number)) and 0 <= value < math.inf):
        raise ValueError(f"{name} must be a finite nonnegative number, got {value!r}.")
    return float(value)


class AbstractTerm(eqx.Module):
    """One summand of a functional. Error bounds read its `lipschitz` and `oscillation`, if any."""

    @property
    @abstractmethod
    def quadratic(self) -> bool:
        """Whether the term is a polynomial of degree at most two in the states."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the term in messages."""


class AbstractInitialTerm(AbstractTerm):
    """A term at x_0 alone."""

    @abstractmethod
    def __call__(self, x: State, data: Data) -> PyTree:
        """Return the value at x_0 and the data of time 0."""


class AbstractStateTerm(AbstractTerm):
    """A term at every x_k."""

    @abstractmethod
    def __call__(self, x: State, data: Data) -> PyTree:
        """Return the value at x_k and the data of time k."""


class AbstractPairTerm(AbstractTerm):
    """A term at every pair (x_{k-1}, x_k), k ≥ 1."""

    @abstractmethod
    def __call__(self, before: State, x: State, data: Data) -> PyTree:
        """Return the value at x_{k-1}, x_k and the data of time k."""


_AT_THE_START = (AbstractInitialTerm, AbstractStateTerm)


class AbstractFunctionTerm(AbstractTerm):
    """A term that is a user's function, with the constants that the user declares."""

    fn: Callable[..., Any]
    quadratic: bool = eqx.field(static=True, default=False)  # pyright: ignore
    name: str = eqx.field(static=True, default="a term")  # pyright: ignore
    lipschitz: Any = eqx.field(static=True, default=None)
    oscillation: float | None = eqx.field(static=True, default=None)

    def __call__(self, *states_and_data: Any) -> PyTree:
        """Return the value of the function."""
        return self.fn(*states_and_data)


class InitialTerm(AbstractFunctionTerm, AbstractInitialTerm):  # pyright: ignore
    """A function of x_0 and the data of time 0.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> term = rd.InitialTerm(lambda x, data: x**2, quadratic=True)
        >>> term(jnp.array([3.0]), None).tolist()
        [9.0]

    Args:
        fn: called as `fn(x, data)`.
        quadratic: whether it is a polynomial of degree at most two in x.
        name: the name of the term in messages.
        lipschitz: a Lipschitz constant of each entry of its value, if one is known.
        oscillation: sup − inf of each entry of its value, if it is bounded.
    """

    name: str = eqx.field(static=True, default="an initial term")  # pyright: ignore


class StateTerm(AbstractFunctionTerm, AbstractStateTerm):  # pyright: ignore
    """A function of x_k and the data of time k, for every k.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> term = rd.StateTerm(lambda x, data: (x - data) ** 2, quadratic=True, name="residual")
        >>> term(jnp.array([3.0]), jnp.array([1.0])).tolist()
        [4.0]

    Args:
        fn: called as `fn(x, data)`.
        quadratic: whether it is a polynomial of degree at most two in x.
        name: the name of the term in messages.
        lipschitz: a Lipschitz constant of each entry of its value, if one is known.
        oscillation: sup − inf of each entry of its value, if it is bounded.
    """

    name: str = eqx.field(static=True, default="a state term")  # pyright: ignore


class PairTerm(AbstractFunctionTerm, AbstractPairTerm):  # pyright: ignore
    """A function of x_{k-1}, x_k and the data of time k, for every k ≥ 1.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> term = rd.PairTerm(lambda before, x, data: jnp.abs(x - before), lipschitz=(1.0, 1.0))
        >>> term(jnp.array([3.0]), jnp.array([1.0]), None).tolist()
        [2.0]

    Args:
        fn: called as `fn(before, x, data)`.
        quadratic: whether it is a polynomial of degree at most two in both states together.
        name: the name of the term in messages.
        lipschitz: Lipschitz constants of each entry of its value in x_{k-1} and in x_k, if known.
        oscillation: sup − inf of each entry of its value, if it is bounded.
    """

    name: str = eqx.field(static=True, default="a pair term")  # pyright: ignore


class AbstractKernelTerm(AbstractTerm):
    """The log density of a kernel of a model, quadratic if the kernel is linear Gaussian."""

    kernel: AbstractKernel

    @property
    def quadratic(self) -> bool:
        """Whether the kernel is linear Gaussian."""
        return isinstance(self.kernel, AbstractLinearGaussianKernel)

    @property
    def name(self) -> str:
        """The name of the term in messages."""
        part = type(self).__name__.removeprefix("Log").lower()
        return f"the log density of the {part} ({type(self.kernel).__name__})"


class LogPrior(AbstractInitialTerm):
    """The term log χ(x_0), quadratic if the prior is Gaussian."""

    law: Any

    @property
    def quadratic(self) -> bool:
        """Whether the prior is Gaussian."""
        return isinstance(self.law, Gaussian)

    @property
    def name(self) -> str:
        """The name of the term in messages."""
        return f"the log density of the prior ({type(self.law).__name__})"

    def __call__(self, x: State, data: Data) -> Scalar:
        """Return the log density at x_0."""
        return jnp.sum(jnp.asarray(self.law.log_prob(x)))


class LogEmission(AbstractKernelTerm, AbstractStateTerm):
    """The terms log g(x_k, y_k) of the observed entries."""

    def __call__(self, x: State, data: Series) -> Scalar:
        """Return the log density of the entries observed at time k."""
        return self.kernel.log_prob(x, data.ys, data.inputs, data.mask)


class LogTransition(AbstractKernelTerm, AbstractPairTerm):
    """The terms log m(x_{k-1}, x_k)."""

    def __call__(self, before: State, x: State, data: Series) -> Scalar:
        """Return the log density of x_k given x_{k-1}."""
        return self.kernel.log_prob(before, x, data.inputs)


class AbstractFunctional(eqx.Module):
    """An additive functional of a path: the sum of its terms over time.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> class Roughness(rd.AbstractFunctional):
        ...     def terms(self):
        ...         return (rd.PairTerm(lambda before, x, data: (x - before) ** 2, quadratic=True),)
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> print(np.array(rd.expectation(chain, Roughness())).round(3))
        [2.406]
    """

    @abstractmethod
    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return the terms, whose values have the same structure."""

    def initial(self, x: State, data: Data = None) -> PyTree:
        """Return the summand of time 0, h_0(x_0, data_0)."""
        return initial_value(self.terms(), x, data)

    def increment(self, before: State, x: State, data: Data = None) -> PyTree:
        """Return the summand of time k, h_k(x_{k-1}, x_k, data_k)."""
        return increment_value(self.terms(), before, x, data)


def initial_value(terms: Sequence[AbstractTerm], x: State, data: Data) -> PyTree:
    """Return the sum of initial and state terms at x_0; zero if there are none."""
    values = [term(x, data) for term in terms if isinstance(term, _AT_THE_START)]
    if values:
        return add(values)
    shapes = jax.eval_shape(lambda: increment_value(terms, x, x, data))
    return jax.tree.map(jnp.zeros_like, shapes)


def increment_value(terms: Sequence[AbstractTerm], before: State, x: State, data: Data) -> PyTree:
    """Return the sum of state and pair terms at one pair; zero if there are none."""
    values = []
    for term in terms:
        if isinstance(term, AbstractStateTerm):
            values.append(term(x, data))
        elif isinstance(term, AbstractPairTerm):
            values.append(term(before, x, data))
    if values:
        return add(values)
    return jax.tree.map(jnp.zeros_like, initial_value(terms, x, data))


def add(values: Sequence[PyTree]) -> PyTree:
    """Return the sum of pytrees of the same structure."""
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.add, leaves), *values)


class StateSum(AbstractFunctional):
    """The sum Σ_k x_k, a vector of shape `(state,)`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> rd.StateSum().increment(jnp.zeros(2), jnp.ones(2)).tolist()
        [1.0, 1.0]
    """

    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return one linear term at every state."""
        return (StateTerm(_state, quadratic=True, name="the state", lipschitz=1.0),)


def _state(x: Array, data: Data) -> Array:
    return x


class SecondMomentSums(NamedTuple):
    """The value of `SecondMoments`.

    Attributes:
        within: Σ_{k≥0} x_k x_kᵀ, of shape `(state, state)`.
        between: Σ_{k≥1} x_{k-1} x_kᵀ, of shape `(state, state)`.
    """

    within: Float[Array, "state state"]
    between: Float[Array, "state state"]


class SecondMoments(AbstractFunctional):
    """The sums Σ_k x_k x_kᵀ and Σ_{k≥1} x_{k-1} x_kᵀ, as `SecondMomentSums`.

    With `StateSum` they are the sufficient statistics of a linear-Gaussian transition.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> sums = rd.expectation(chain, rd.SecondMoments())
        >>> print(np.array(sums.within).round(3), np.array(sums.between).round(3))
        [[19.219]] [[11.187]]
    """

    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return a quadratic term at every state and one at every pair."""
        return (
            StateTerm(_square, quadratic=True, name="the square of the state"),
            PairTerm(_product, quadratic=True, name="the product of neighbours"),
        )


def _square(x: Array, data: Data) -> SecondMomentSums:
    square = x[:, None] * x[None, :]
    return SecondMomentSums(square, jnp.zeros_like(square))


def _product(before: Array, x: Array, data: Data) -> SecondMomentSums:
    product = before[:, None] * x[None, :]
    return SecondMomentSums(jnp.zeros_like(product), product)


class AdditiveFunctional(AbstractFunctional):
    """A user-defined functional initial(x_0, data_0) + Σ_{k≥1} increment(x_{k-1}, x_k, data_k).

    Example:
        The squared distance that the state moves, in closed form:

        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> moved = rd.AdditiveFunctional(lambda before, x, data: (x - before) ** 2, quadratic=True)
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> print(np.array(rd.expectation(chain, moved)).round(3))
        [2.406]

    Args:
        increment: called as `increment(before, x, data)` with two states and the row of the data at
            the later time (`None` if no data is given); returns any pytree of arrays.
        initial: called as `initial(x, data)` at time 0, with values of the same structure; `None`
            for zero.
        quadratic: declares that both are polynomials of degree at most two in the states, which
            allows closed-form expectations.
        lipschitz: Lipschitz constants of each entry of the increment in x_{k-1} and in x_k, for
            error bounds; the second must hold for `initial` too.
        oscillation: an upper bound of sup − inf of each entry of either function.
    """

    increment_fn: Callable[[Any, Any, Any], Any]
    initial_fn: Callable[[Any, Any], Any] | None
    quadratic: bool = eqx.field(static=True)
    lipschitz: tuple[float, float] | None = eqx.field(static=True)
    oscillation: float | None = eqx.field(static=True)

    def __init__(
        self,
        increment: Callable[[Any, Any, Any], Any],
        initial: Callable[[Any, Any], Any] | None = None,
        quadratic: bool = False,
        *,
        lipschitz: tuple[float, float] | None = None,
        oscillation: float | None = None,
    ):
        for name, fn in (("increment", increment), ("initial", initial)):
            if not callable(fn) and not (name == "initial" and fn is None):
                raise TypeError(
                    f"AdditiveFunctional expects a function as its {name}, got {type(fn).__name__}."
                )
        if lipschitz is not None and not (isinstance(lipschitz, tuple) and len(lipschitz) == 2):
            raise ValueError(
                "AdditiveFunctional expects lipschitz as a pair of constants, in x_{k-1} and in"
                f" x_k, got {lipschitz!r}."
            )
        self.increment_fn, self.initial_fn, self.quadratic = increment, initial, quadratic
        self.lipschitz, self.oscillation = lipschitz, oscillation
        variation(self)

    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return the two functions as terms."""
        name, quadratic = "the increment of AdditiveFunctional", self.quadratic
        pair = PairTerm(self.increment_fn, quadratic, name, self.lipschitz, self.oscillation)
        if self.initial_fn is None:
            return (pair,)
        name = "the initial term of AdditiveFunctional"
        lipschitz = None if self.lipschitz is None else self.lipschitz[1]
        return (InitialTerm(self.initial_fn, quadratic, name, lipschitz, self.oscillation), pair)


class StateFunctional(AbstractFunctional):
    """A user-defined sum over states, Σ_k fn(x_k, data_k).

    Example:
        The expected number of rows with a state above 2:

        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> above = rd.StateFunctional(lambda x, data: 1.0 * (x[0] > 2), oscillation=1.0)
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> options = {"estimator": rd.BackwardSampling(64), "key": jax.random.key(0)}
        >>> bool(0 < rd.expectation(chain, above, **options) < 3)
        True

    Args:
        fn: called as `fn(x, data)` with a state and the row of the data at its time (`None` if no
            data is given); returns any pytree of arrays.
        quadratic: declares that it is a polynomial of degree at most two in the state.
        lipschitz: a Lipschitz constant of each entry of its value, for error bounds.
        oscillation: an upper bound of sup − inf of each entry of its value.
    """

    fn: Callable[[Any, Any], Any]
    quadratic: bool = eqx.field(static=True, default=False)
    lipschitz: float | None = eqx.field(static=True, default=None, kw_only=True)
    oscillation: float | None = eqx.field(static=True, default=None, kw_only=True)

    def __check_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                f"StateFunctional expects a function of a state, got {type(self.fn).__name__}."
            )
        variation(self)

    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return one term at every state."""
        name = "the function of StateFunctional"
        return (StateTerm(self.fn, self.quadratic, name, self.lipschitz, self.oscillation),)


def variation(functional: AbstractFunctional) -> tuple[Variation, Variation]:
    """Return the constants of the summand at time 0, and of that at every later time."""

    def total(*kinds: type) -> Variation:
        terms = [_variation(term) for term in functional.terms() if isinstance(term, kinds)]
        return Variation(*map(math.fsum, zip(*terms, (0.0, 0.0, 0.0), strict=True)))

    return total(*_AT_THE_START), total(AbstractStateTerm, AbstractPairTerm)


def _variation(term: AbstractTerm) -> Variation:
    """Return the declared constants of a term. Log densities declare none."""
    lipschitz = getattr(term, "lipschitz", None)
    if not isinstance(term, AbstractPairTerm):
        lipschitz = (0.0, lipschitz)
    before, now = (None, None) if lipschitz is None else lipschitz
    return Variation(
        check_constant(before, "lipschitz"),
        check_constant(now, "lipschitz"),
        check_constant(getattr(term, "oscillation", None), "oscillation"),
    )


class LogJoint(AbstractFunctional):
    """The log joint density log χ(x_0) + Σ_{k≥0} log g(x_k, y_k) + Σ_{k≥1} log m(x_{k-1}, x_k).

    Under the posterior chain of another model θ' its expectation is EM's intermediate quantity
    Q(θ, θ'). The data is `model.series(ys)`.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> exact = rd.kalman_smoother(model, ys)
        >>> energy = rd.expectation(exact.chain, rd.LogJoint(model), data=model.series(ys))
        >>> bool(jnp.isclose(energy + exact.chain.entropy(), exact.log_evidence, rtol=1e-4))
        True

    Args:
        model: the model with parameters θ.
    """

    model: StateSpaceModel

    def __check_init__(self) -> None:
        require_model(self.model, "LogJoint")

    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return the log densities of prior, emission and transition."""
        model = unwrap(self.model)
        return LogPrior(model.prior), LogEmission(model.emission), LogTransition(model.transition)


class Score(AbstractFunctional):
    """The gradient ∇_θ of the log joint density, in the arrays θ of a model.

    By Fisher's identity its expectation under the exact posterior is the gradient of the
    log-evidence. The value has the structure of `equinox.filter(model, equinox.is_inexact_array)`;
    derivatives in a parameter such as `Positive` are those in its unconstrained array. The data is
    `model.series(ys)`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> score = rd.expectation(chain, rd.Score(model), data=model.series(ys))
        >>> print(np.array(score.emission.fn.obs_scale.raw).round(3))
        [-0.02]

    Args:
        model: the model to differentiate.
    """

    model: StateSpaceModel

    def __check_init__(self) -> None:
        require_model(self.model, "Score")

    def terms(self) -> tuple[AbstractTerm, ...]:
        """Return the gradients of the terms of `LogJoint`, quadratic where those are."""
        # A polynomial in the states has a gradient in its coefficients of the same degree.
        kinds = (InitialTerm, StateTerm, PairTerm)
        return tuple(
            kind(_Gradient(self.model, i), term.quadratic, f"the gradient of {term.name}")
            for i, (kind, term) in enumerate(zip(kinds, LogJoint(self.model).terms(), strict=True))
        )


class _Gradient(eqx.Module):
    """The gradient, in the arrays of a model, of one term of its log joint density."""

    model: StateSpaceModel
    position: int = eqx.field(static=True)

    def __call__(self, *states_and_data: Any) -> PyTree:
        def value(model: StateSpaceModel) -> Scalar:
            term: Any = LogJoint(model).terms()[self.position]
            return term(*states_and_data)

        return eqx.filter_grad(value)(self.model)
