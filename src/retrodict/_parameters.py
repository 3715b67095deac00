"""Parameters that stay in their domain while they are learned.

A parameter stores an unconstrained array, which an optimiser may move anywhere, and computes the
constrained value from it. Models and kernels hold parameters where they would hold arrays; every
verb calls `unwrap` once, at its entry, and works on plain arrays from there.
"""

from abc import abstractmethod
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from retrodict._validate import as_real_array, is_concrete, known_values

T = TypeVar("T")


class AbstractParameter(eqx.Module):
    """Something that stands for `value` in a pytree, and is replaced by it in `unwrap`."""

    @property
    @abstractmethod
    def value(self) -> Any:
        """What the parameter stands for."""


class Positive(AbstractParameter):
    """A positive array, softplus of an unconstrained one.

    Example:
        >>> import retrodict as rd
        >>> rd.Positive(0.5).value.item()
        0.5

    Args:
        value: the positive value to start from, of any shape.
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


class Bounded(AbstractParameter):
    """An array strictly between two bounds, a logistic function of an unconstrained one.

    Example:
        >>> import retrodict as rd
        >>> round(rd.Bounded(0.5, -1.0, 1.0).value.item(), 6)
        0.5

    Args:
        value: the value to start from, of any shape.
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
        if is_concrete(value) and not bool(
            np.all(np.asarray(value) > self.lower) and np.all(np.asarray(value) < self.upper)
        ):
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


class PositiveTril(AbstractParameter):
    """A lower-triangular matrix with a positive diagonal: the Cholesky factor of a covariance.

    Args:
        value: the factor to start from, of shape `(d, d)`, zero above its diagonal.
    """

    raw: Float[Array, "d d"]

    def __init__(self, value: Any):
        value = _start(value, "PositiveTril")
        if value.ndim != 2 or value.shape[0] != value.shape[1]:
            raise ValueError(f"PositiveTril expects a square matrix, got shape {value.shape}.")
        check_lower("The value of PositiveTril", value)
        diagonal = jnp.diagonal(value)
        _refuse_unless_positive(diagonal, "PositiveTril", "a diagonal")
        self.raw = jnp.tril(value, -1) + jnp.diag(_inverse_softplus(diagonal))

    @property
    def value(self) -> Float[Array, "d d"]:
        """The lower-triangular factor."""
        return jnp.tril(self.raw, -1) + jnp.diag(_positive(jnp.diagonal(self.raw)))


class Frozen(AbstractParameter):
    """A pytree that is not learned: gradients through it are zero.

    Args:
        tree: an array, or any pytree of them, such as a kernel.
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
    """Replaces every parameter in a pytree by its value.

    Args:
        tree: a model, a kernel, a family, or any pytree.

    Returns:
        The same pytree with plain arrays where it had parameters.
    """
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, AbstractParameter) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, AbstractParameter),
    )


def as_parameter(value: Any, name: str) -> Any:
    """Convert what a constructor was given for an array; a parameter keeps its type.

    Integers become floating-point numbers, also in a `Frozen`: an optimiser moves no integer.

    Args:
        value: an array, a parameter, or anything that `as_real_array` accepts.
        name: the name of the argument, for messages.
    """
    if isinstance(value, Frozen):
        return Frozen(as_parameter(value.tree, name))
    return value if isinstance(value, AbstractParameter) else as_real_array(value, name)


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
    """Convert the value that a parameter starts from to the default floating type."""
    return as_real_array(value, f"The value of {owner}").astype(jnp.result_type(float))


def _refuse_unless_positive(value: Array, owner: str, what: str) -> None:
    if is_concrete(value) and not bool(
        np.all(np.isfinite(value)) and np.all(np.asarray(value) > 0)
    ):
        raise ValueError(f"{owner} expects {what} that is positive and finite, got {value}.")


def _positive(raw: Array) -> Array:
    # Softplus underflows to zero far to the left; the smallest normal number keeps it positive.
    return jax.nn.softplus(raw) + jnp.finfo(raw.dtype).tiny


def _inverse_softplus(value: Array) -> Array:
    # log(exp(v) - 1) = v + log(1 - exp(-v)), which neither overflows nor cancels.
    return value + jnp.log(-jnp.expm1(-value))
