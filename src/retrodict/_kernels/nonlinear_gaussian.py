"""Gaussian kernels whose mean is any function of the state."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from retrodict._kernels.base import AbstractGaussianKernel, require_input
from retrodict._laws import Gaussian, Scale, as_scale, check_scale, scale_dim, shape_of
from retrodict._parameters import unwrap


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

    def law(self, x: Float[Array, "state"], u: Float[Array, "input"] | None = None) -> Gaussian:
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
