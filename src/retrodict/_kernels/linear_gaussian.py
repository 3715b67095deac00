"""Linear-Gaussian kernels, with parameters that are fixed or depend on the input."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from retrodict._kernels.base import AbstractGaussianKernel, require_input
from retrodict._laws import Gaussian, Scale, as_scale, check_scale, factor_of_covariance, shape_of
from retrodict._numerics import linalg
from retrodict._parameters import as_parameter, unwrap


class AbstractLinearGaussianKernel(AbstractGaussianKernel):
    """A kernel that is linear Gaussian in the state once the input is known."""

    @abstractmethod
    def at(self, u: Float[Array, "input"] | None) -> "LinearGaussianKernel":
        """Return the kernel x ↦ N(w x + b, s sᵀ) at this input."""


class LinearGaussianKernel(AbstractLinearGaussianKernel):
    """The kernel x, u ↦ N(w x + v u + b, s sᵀ).

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> kernel = rd.LinearGaussianKernel(0.5 * jnp.eye(2), jnp.ones(2), 0.1 * jnp.eye(2))
        >>> kernel.law(jnp.zeros(2)).mean.tolist()
        [1.0, 1.0]

    Args:
        weight: w, of shape `(out, state)`.
        bias: b, of shape `(out,)`.
        scale_tril: s, a lower Cholesky factor of shape `(out, out)`, or a `Diagonal`.
        input_weight: v, of shape `(out, input)`; the kernel takes inputs if it is given.
    """

    weight: Any = eqx.field(converter=lambda value: as_parameter(value, "weight"))
    bias: Any = eqx.field(converter=lambda value: as_parameter(value, "bias"))
    scale_tril: Scale = eqx.field(converter=as_scale)
    input_weight: Any = eqx.field(
        default=None,
        converter=lambda value: None if value is None else as_parameter(value, "input_weight"),
    )

    def __check_init__(self) -> None:
        weight, bias = shape_of(self.weight), shape_of(self.bias)
        if weight is None or bias is None:
            return
        owner = "LinearGaussianKernel"
        if len(weight) != 2:
            raise ValueError(f"{owner} expects a weight of shape (out, state), got {weight}.")
        if bias != (weight[0],):
            raise ValueError(
                f"{owner} expects a bias of shape ({weight[0]},) beside a weight of shape {weight},"
                f" got {bias}."
            )
        check_scale(owner, self.scale_tril, weight[0])
        inputs = shape_of(self.input_weight)
        if inputs is not None and (len(inputs) != 2 or inputs[0] != weight[0]):
            raise ValueError(
                f"{owner} expects an input_weight of shape ({weight[0]}, input), got {inputs}."
            )

    @classmethod
    def from_covariance(
        cls,
        weight: Any,
        bias: Any,
        covariance: Any,
        input_weight: Any = None,
    ) -> "LinearGaussianKernel":
        """Build the kernel from the covariance of its noise, which must be positive definite."""
        scale = factor_of_covariance("LinearGaussianKernel.from_covariance", covariance)
        return cls(weight, bias, scale, input_weight)

    @property
    def takes_input(self) -> bool:
        """Whether there is an input_weight."""
        return self.input_weight is not None

    def at(self, u: Float[Array, "input"] | None) -> "LinearGaussianKernel":
        """Return the kernel with v u added to its bias."""
        kernel = unwrap(self)
        if kernel.input_weight is None:
            return kernel
        u = require_input(u)
        if u.shape != kernel.input_weight.shape[1:]:
            raise ValueError(
                f"LinearGaussianKernel has an input_weight of shape {kernel.input_weight.shape}, so"
                f" that an input must have shape {kernel.input_weight.shape[1:]}, got {u.shape}."
            )
        shift = linalg.matvec(kernel.input_weight, u)
        return LinearGaussianKernel(kernel.weight, kernel.bias + shift, kernel.scale_tril)

    def law(self, x: Float[Array, "state"], u: Float[Array, "input"] | None = None) -> Gaussian:
        """Return N(w x + v u + b, s sᵀ)."""
        kernel = self.at(u)
        return Gaussian(linalg.matvec(kernel.weight, x) + kernel.bias, kernel.scale_tril)


class VaryingLinearGaussianKernel(AbstractLinearGaussianKernel):
    """The kernel x, u ↦ N(w(u) x + b(u), s(u) s(u)ᵀ), for irregular or varying time.

    Example:
        A random walk observed at uneven times, with the time step as its input.

        >>> import jax.numpy as jnp, retrodict as rd
        >>> walk = rd.VaryingLinearGaussianKernel(
        ...     lambda u: (jnp.eye(1), jnp.zeros(1), rd.Diagonal(jnp.sqrt(u)))
        ... )
        >>> walk.law(jnp.zeros(1), jnp.array([4.0])).std.tolist()
        [2.0]

    Args:
        fn: `u ↦ (weight, bias, scale_tril)`; a function, or a module with learnable parameters.
    """

    fn: Callable[[Any], tuple[Any, Any, Scale]]

    @property
    def takes_input(self) -> bool:
        """Always."""
        return True

    def at(self, u: Float[Array, "input"] | None) -> LinearGaussianKernel:
        """Return the kernel with the parameters fn(u)."""
        parameters = unwrap(self).fn(require_input(u))
        if not isinstance(parameters, tuple) or len(parameters) != 3:
            raise ValueError(
                "VaryingLinearGaussianKernel expects fn(u) to return (weight, bias, scale_tril),"
                f" got {type(parameters).__name__}."
            )
        return unwrap(LinearGaussianKernel(*parameters))

    def law(self, x: Float[Array, "state"], u: Float[Array, "input"] | None = None) -> Gaussian:
        """Return N(w(u) x + b(u), s(u) s(u)ᵀ)."""
        return self.at(u).law(x)
