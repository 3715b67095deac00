"""Parameters that stay in their domain while they are learned.

A parameter stores an unconstrained array, which is optimised, and computes the constrained value
from it. Models and kernels may hold parameters in place of arrays. Every function calls `unwrap`
once, at its entry, and works on plain arrays from there.
"""

import math
from abc import abstractmethod
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import as_real_array, check_finite, known_values

T = TypeVar("T")

UNBOUNDED = (-math.inf, math.inf)
"""The domain of an array that is no parameter."""


class AbstractParameter(eqx.Module):
    """A pytree node that `unwrap` replaces by its `value`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> class Stable(rd.AbstractParameter):
        ...     # A square matrix of norm below 1.
        ...     raw: object
        ...     @property
        ...     def value(self):
        ...         return self.raw / jnp.sqrt(1.0 + jnp.sum(self.raw**2))
        >>> kernel = rd.LinearGaussianKernel(Stable(jnp.array([[3.0]])), jnp.zeros(1), jnp.eye(1))
        >>> print(np.array(rd.unwrap(kernel).weight).round(3))
        [[0.949]]
    """

    @property
    @abstractmethod
    def value(self) -> Any:
        """The constrained value."""


class AbstractConstrained(AbstractParameter):
    """A parameter that stores one unconstrained array, `raw`."""

    @abstractmethod
    def domain(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the open interval of the number that an entry of `raw` stands for."""


class AbstractTied(AbstractParameter):
    """A parameter whose value is computed from other parts of its `AbstractWhole`."""

    @property
    def value(self) -> Any:
        """Refuse: the value depends on the whole."""
        raise TypeError(
            f"{type(self).__name__} has no value outside of its model: unwrap the whole model."
        )

    @abstractmethod
    def value_in(self, whole: Any) -> Any:
        """Compute the value from the whole, in which parameters are not unwrapped."""


class AbstractWhole(eqx.Module):
    """A module with `AbstractTied` parameters, which `unwrap` computes from it."""


class Positive(AbstractConstrained):
    """A positive array, softplus of an unconstrained one.

    Example:
        >>> import retrodict as rd
        >>> rd.Positive(0.5).value.item()
        0.5

    Args:
        value: the initial positive value, of any shape.
    """

    raw: Float[Array, "..."]

    def __init__(self, value: Any):
        value = _start(value, "Positive")
        _refuse_unless_positive(value, "Positive", "a value")
        self.raw = _inverse_softplus(value)

    @property
    def value(self) -> Float[Array, "..."]:
        """The positive array."""
        return _positive(self.raw)

    def domain(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the interval of positive numbers."""
        return 0.0, math.inf


class Bounded(AbstractConstrained):
    """An array strictly between two bounds, a logistic function of an unconstrained one.

    Example:
        >>> import retrodict as rd
        >>> round(rd.Bounded(0.5, -1.0, 1.0).value.item(), 6)
        0.5

    Args:
        value: the initial value, of any shape.
        lower: the lower bound, one number.
        upper: the upper bound, one number.
    """

    raw: Float[Array, "..."]
    lower: float = eqx.field(static=True)
    upper: float = eqx.field(static=True)

    def __init__(self, value: Any, lower: float, upper: float):
        self.lower, self.upper = float(lower), float(upper)
        value = _start(value, "Bounded")
        if not -np.inf < self.lower < self.upper < np.inf:
            raise ValueError(
                f"Bounded expects finite bounds, the lower one first, got {lower} and {upper}."
            )
        values = known_values(value)
        if values is not None and not np.all((values > self.lower) & (values < self.upper)):
            raise ValueError(
                f"Bounded expects a value strictly between {self.lower} and {self.upper}, got"
                f" {value}."
            )
        self.raw = jnp.log(value - self.lower) - jnp.log(self.upper - value)

    @property
    def value(self) -> Float[Array, "..."]:
        """The array between the bounds."""
        lower, upper = (np.asarray(bound, self.raw.dtype) for bound in (self.lower, self.upper))
        value = lower + (upper - lower) * jax.nn.sigmoid(self.raw)
        # The logistic function rounds to 0 and 1 far out; the neighbours of the bounds are inside.
        return jnp.clip(value, np.nextafter(lower, upper), np.nextafter(upper, lower))

    def domain(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the bounds."""
        return self.lower, self.upper


class StationaryCoefficients(AbstractConstrained):
    """Coefficients φ_1, ..., φ_p of a stationary autoregression, by its partial autocorrelations.

    Any partial autocorrelations strictly between −1 and 1 belong to exactly one stationary
    autoregression (Barndorff-Nielsen and Schou 1973). They are logistic functions of the stored,
    unconstrained array.

    Args:
        value: the initial coefficients, of shape `(..., p)`.
    """

    raw: Float[Array, "... p"]

    def __init__(self, value: Any):
        value = jnp.asarray(value, jnp.result_type(float))
        partial = partial_autocorrelations(value)
        values = known_values(partial)
        if values is not None and not np.all(np.abs(values) < 1):
            raise ValueError(
                "StationaryCoefficients expects the coefficients of a stationary autoregression,"
                f" whose partial autocorrelations are between -1 and 1; got {value} with partial"
                f" autocorrelations {partial}"
            )
        self.raw = jnp.log1p(partial) - jnp.log1p(-partial)

    @property
    def value(self) -> Float[Array, "... p"]:
        """The coefficients."""
        one = np.ones((), self.raw.dtype)
        limit = np.nextafter(one, 0 * one)
        # The recursion of Durbin and Levinson, upwards in the order k.
        coefficients: list[Array] = []
        for k in range(self.raw.shape[-1]):
            r = jnp.clip(jnp.tanh(0.5 * self.raw[..., k]), -limit, limit)
            reversed_ = coefficients[::-1]
            coefficients = [a - r * b for a, b in zip(coefficients, reversed_, strict=True)]
            coefficients.append(r)
        return jnp.stack(coefficients, axis=-1)

    def domain(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the interval of a partial autocorrelation."""
        return -1.0, 1.0


def partial_autocorrelations(coefficients: Float[Array, "... p"]) -> Float[Array, "... p"]:
    """Compute the partial autocorrelations of an autoregression from its coefficients.

    Those of a stationary one are strictly between −1 and 1. If one is not, those of lower order
    are meaningless.
    """
    rest = [coefficients[..., k] for k in range(coefficients.shape[-1])]
    partial: list[Array] = []
    while rest:
        *rest, r = rest
        partial.append(r)
        # (1 − r)(1 + r) keeps its digits near the edge; past it the recursion stays finite.
        shrink = (1.0 - r) * (1.0 + r)
        shrink = jnp.where(shrink == 0, 1.0, shrink)
        rest = [(a + r * b) / shrink for a, b in zip(rest, rest[::-1], strict=True)]
    return jnp.stack(partial[::-1], axis=-1)


class PositiveTril(AbstractConstrained):
    """A lower-triangular matrix with a positive diagonal: the Cholesky factor of a covariance.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> law = rd.Gaussian(jnp.zeros(2), rd.PositiveTril([[2.0, 0.0], [0.5, 1.0]]))
        >>> print(np.array(rd.unwrap(law).scale_tril).round(3))
        [[2.  0. ]
         [0.5 1. ]]

    Args:
        value: the initial factor, of shape `(d, d)`, zero above its diagonal.
    """

    raw: Float[Array, "d d"]

    def __init__(self, value: Any):
        value = _start(value, "PositiveTril")
        if value.ndim != 2 or value.shape[0] != value.shape[1]:
            raise ValueError(f"PositiveTril expects a square matrix, got shape {value.shape}.")
        check_lower("The value of PositiveTril", value)
        diagonal = jnp.diagonal(value)
        _refuse_unless_positive(diagonal, "PositiveTril", "a diagonal")
        check_finite(value, "The value of PositiveTril")
        self.raw = jnp.tril(value, -1) + jnp.diag(_inverse_softplus(diagonal))

    @property
    def value(self) -> Float[Array, "d d"]:
        """The lower-triangular factor."""
        return jnp.tril(self.raw, -1) + jnp.diag(_positive(jnp.diagonal(self.raw)))

    def domain(self, index: tuple[int, ...]) -> tuple[float, float]:
        """Return the interval of positive numbers on the diagonal, and all numbers off it."""
        return (0.0, math.inf) if index[0] == index[1] else UNBOUNDED


class Frozen(AbstractParameter):
    """A pytree that is not learned: gradients through it are zero.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> def loss(parameter):
        ...     return jnp.sum(rd.unwrap(parameter) ** 2)
        >>> jax.grad(loss)(rd.Frozen(jnp.array([3.0]))).tree.tolist()
        [0.0]

    Args:
        tree: an array, or a pytree of arrays, such as a kernel.
    """

    tree: PyTree

    @property
    def value(self) -> PyTree:
        """The pytree itself, with gradients stopped."""
        return jax.tree.map(
            lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_inexact_array(leaf) else leaf,
            unwrap(self.tree),
        )


def unwrap(tree: T) -> T:
    """Replace every parameter in a pytree by its value.

    Example:
        >>> import numpy as np, retrodict as rd
        >>> model = rd.models.local_level(obs_scale=2.0)
        >>> print(np.array(rd.unwrap(model).emission.scale_tril.std).round(3))
        [2.]

    Args:
        tree: a model, a kernel, a family, or any pytree.

    Returns:
        The same pytree with plain arrays where it had parameters.
    """
    return jax.tree.map(_value_of, tree, is_leaf=_is_unwrapped_at_once)


def _value_of(node: Any) -> Any:
    if isinstance(node, AbstractWhole):
        return jax.tree.map(
            lambda part: part.value_in(node) if isinstance(part, AbstractTied) else _value_of(part),
            node,
            is_leaf=lambda part: part is not node and _is_unwrapped_at_once(part),
        )
    return node.value if isinstance(node, AbstractParameter) else node


def _is_unwrapped_at_once(node: Any) -> bool:
    return isinstance(node, (AbstractParameter, AbstractWhole))


def as_parameter(value: Any, name: str) -> Any:
    """Convert an argument of a constructor to an array; a parameter keeps its type.

    Integers become floating-point numbers, also in a `Frozen`, since optimisers ignore integers.

    Args:
        value: an array, a parameter, or anything that `as_real_array` accepts.
        name: the name of the argument, for messages.

    Raises:
        TypeError: if the value does not hold real numbers.
        ValueError: if a known value is NaN or infinite.
    """
    if isinstance(value, Frozen):
        return Frozen(as_parameter(value.tree, name))
    if isinstance(value, AbstractParameter):
        return value
    array = as_real_array(value, name)
    check_finite(array, name)
    return array


def check_lower(name: str, factor: Any) -> None:
    """Refuse a factor with known entries above its diagonal, which would be cut off.

    Args:
        name: the name of the argument, for messages.
        factor: one square matrix or a batch of them.
    """
    values = known_values(factor)
    if values is None:
        return
    above = np.triu(values, 1)
    if np.any((above != 0) & ~np.isnan(above)):
        raise ValueError(
            f"{name} must be a lower Cholesky factor, zero above its diagonal, got\n{values}.\n"
            "For a covariance use Gaussian.from_covariance, LinearGaussianKernel.from_covariance or"
            " jnp.linalg.cholesky; transpose an upper factor."
        )


def _start(value: Any, owner: str) -> Array:
    """Convert the initial value of a parameter to the default floating type."""
    return as_real_array(value, f"The value of {owner}").astype(jnp.result_type(float))


def _refuse_unless_positive(value: Array, owner: str, what: str) -> None:
    values = known_values(value)
    if values is not None and not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(f"{owner} expects {what} that is positive and finite, got {value}.")


@jax.jit
def _positive(raw: Array) -> Array:
    # Softplus underflows to zero far to the left; the smallest normal number keeps it positive.
    return jax.nn.softplus(raw) + jnp.finfo(raw.dtype).tiny


@jax.jit
def _inverse_softplus(value: Array) -> Array:
    # log(exp(v) - 1) = v + log(1 - exp(-v)), which neither overflows nor cancels.
    return value + jnp.log(-jnp.expm1(-value))
