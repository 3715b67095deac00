"""Gaussian kernels: linear ones, with fixed or varying parameters, and those of any mean."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from retrodict._arrays import Input, State
from retrodict._model.gaussian import (
    Gaussian,
    Scale,
    as_scale,
    check_scale,
    dense_scale,
    factor_of_covariance,
    scale_dim,
    shape_of,
)
from retrodict._model.kernel import AbstractGaussianKernel, require_input
from retrodict._model.parameters import as_parameter, unwrap
from retrodict._numerics import linalg


class AbstractLinearGaussianKernel(AbstractGaussianKernel):
    """A kernel that is linear Gaussian in the state once the input is known.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> class Decay(rd.AbstractLinearGaussianKernel):
        ...     # Exponential decay over the time step, which is the input.
        ...     rate: float
        ...     takes_input = True
        ...     def at(self, u):
        ...         weight = jnp.exp(-self.rate * u[None])
        ...         return rd.LinearGaussianKernel(weight, jnp.zeros(1), jnp.eye(1))
        ...     def law(self, x, u=None):
        ...         return self.at(u).law(x)
        >>> print(np.array(Decay(0.5).law(jnp.array([1.0]), jnp.array([2.0])).mean).round(3))
        [0.368]
    """

    @abstractmethod
    def at(self, u: Input | None) -> "LinearGaussianKernel":
        """Return the kernel x ↦ N(w x + b, s sᵀ) at this input."""

    def propagate(
        self, mean: Float[Array, "state"], covariance: Float[Array, "state state"], u: Any = None
    ) -> tuple[Float[Array, "out"], Float[Array, "out out"]]:
        """Return the moments w m + b and w P wᵀ + s sᵀ, for x of mean m and covariance P."""
        kernel = self.at(u)
        spread = linalg.matmul(linalg.matmul(kernel.weight, covariance), kernel.weight.T)
        noise = linalg.outer_gram(dense_scale(kernel.scale_tril))
        return linalg.matvec(kernel.weight, mean) + kernel.bias, spread + noise


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
        cls, weight: Any, bias: Any, covariance: Any, input_weight: Any = None
    ) -> "LinearGaussianKernel":
        """Build the kernel from the covariance of its noise, which must be positive definite."""
        scale = factor_of_covariance("LinearGaussianKernel.from_covariance", covariance)
        return cls(weight, bias, scale, input_weight)

    @property
    def takes_input(self) -> bool:
        """Whether there is an input_weight."""
        return self.input_weight is not None

    def at(self, u: Input | None) -> "LinearGaussianKernel":
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

    def law(self, x: State, u: Input | None = None) -> Gaussian:
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

    def at(self, u: Input | None) -> LinearGaussianKernel:
        """Return the kernel with the parameters fn(u)."""
        parameters = unwrap(self).fn(require_input(u))
        if not isinstance(parameters, tuple) or len(parameters) != 3:
            raise ValueError(
                "VaryingLinearGaussianKernel expects fn(u) to return (weight, bias, scale_tril),"
                f" got {type(parameters).__name__}."
            )
        return unwrap(LinearGaussianKernel(*parameters))

    def law(self, x: State, u: Input | None = None) -> Gaussian:
        """Return N(w(u) x + b(u), s(u) s(u)ᵀ)."""
        return self.at(u).law(x)


class NonlinearGaussianKernel(AbstractGaussianKernel):
    """The kernel x ↦ N(f(x), s sᵀ), or x, u ↦ N(f(x, u), s sᵀ).

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> kernel = rd.NonlinearGaussianKernel(lambda x: jnp.cos(x), rd.Diagonal(jnp.ones(1)))
        >>> kernel.law(jnp.zeros(1)).mean.tolist()
        [1.0]

    Args:
        fn: f, any function that JAX can trace; an `equinox.nn` network is learned with the model.
        scale_tril: s, a lower Cholesky factor of shape `(out, out)`, or a `Diagonal`.
        takes_input: whether f is called as `fn(x, u)`.
        curvature: for error bounds, a function of the value (and of u, if the kernel takes inputs)
            to a matrix of shape `(state, state)` that −∇² log N(value; f(x), s sᵀ) is at least at
            every x.
    """

    fn: Callable[..., Any]
    scale_tril: Scale = eqx.field(converter=as_scale)
    takes_input: bool = eqx.field(static=True, default=False)  # pyright: ignore
    curvature: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                "NonlinearGaussianKernel expects a function of the state, got"
                f" {type(self.fn).__name__}. For a matrix use LinearGaussianKernel."
            )
        if shape_of(self.scale_tril) == ():
            raise ValueError(
                "NonlinearGaussianKernel expects scale_tril of shape (out, out), a lower Cholesky"
                " factor, got one number. Use number * jnp.eye(out)."
            )
        dim = scale_dim(self.scale_tril)
        if dim is not None:
            check_scale("NonlinearGaussianKernel", self.scale_tril, dim)

    def law(self, x: State, u: Input | None = None) -> Gaussian:
        """Return N(f(x, u), s sᵀ)."""
        kernel = unwrap(self)
        mean = kernel.fn(x, require_input(u)) if self.takes_input else kernel.fn(x)
        dim = scale_dim(kernel.scale_tril)
        if getattr(mean, "shape", None) != (dim,):
            raise ValueError(
                f"NonlinearGaussianKernel has a scale of dimension {dim}, so that its function must"
                f" return shape ({dim},), got {getattr(mean, 'shape', type(mean).__name__)}."
            )
        return Gaussian(mean, kernel.scale_tril)
