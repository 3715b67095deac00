"""Nonlinear models that several test files use."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from linear_models import linear_transition_model

import retrodict as rd


def nonlinear_kernel(fn: Callable[..., Any], std: Any, dim: int = 1) -> rd.NonlinearGaussianKernel:
    """Return a kernel with mean `fn(x)` and independent noise of this standard deviation."""
    return rd.NonlinearGaussianKernel(fn, rd.Diagonal(std * jnp.ones(dim)))


def nonlinear_emission_model(
    fn: Callable[..., Any], error: Any = 1.0, dim: int = 1, **dynamics: Any
) -> rd.StateSpaceModel:
    """Return a model with a linear transition that is observed as `fn(x)` with noise `error`."""
    return linear_transition_model(nonlinear_kernel(fn, error, dim), dim, **dynamics)


def count_model(**dynamics: Any) -> rd.StateSpaceModel:
    """Return a scalar model with a linear transition and Poisson counts of rate exp(x)."""
    return linear_transition_model(poisson_emission(), **dynamics)


def heavy_tailed_count_model() -> rd.StateSpaceModel:
    """Return a scalar model with Student noise in the transition and Poisson counts."""
    return rd.StateSpaceModel(
        dist.Normal(jnp.zeros(1), 0.5),
        rd.DistributionKernel(lambda x: dist.StudentT(5.0, 0.8 * x, 0.3)),
        poisson_emission(),
    )


def poisson_emission() -> rd.DistributionKernel:
    """Return the kernel of Poisson counts of rate exp(x)."""
    return rd.DistributionKernel(lambda x: dist.Poisson(jnp.exp(x)))


def uniform_emission(radius: float = 2.0) -> rd.DistributionKernel:
    """Return the kernel of observations that are uniform within `radius` of the state."""
    return rd.DistributionKernel(lambda x: UniformLaw(x, radius))


def paper_model() -> rd.StateSpaceModel:
    """Return the nonlinear model of section 5.2 of the paper."""
    return rd.StateSpaceModel(
        rd.Gaussian.from_covariance(jnp.zeros(1), 0.1 * jnp.eye(1)),
        rd.LinearGaussianKernel.from_covariance(
            -0.8980038681557039 * jnp.eye(1), -0.4 * jnp.ones(1), 0.01 * jnp.eye(1)
        ),
        nonlinear_kernel(lambda x: jnp.cos(jnp.tanh(-1.545546939136267 * x)), 0.001**0.5),
    )


def hide_linearity(model: rd.StateSpaceModel) -> rd.StateSpaceModel:
    """Return a model of the same law whose kernels are not declared to be linear."""

    def hidden(kernel: Any) -> rd.NonlinearGaussianKernel:
        takes_input = kernel.takes_input
        return rd.NonlinearGaussianKernel(_Mean(kernel), kernel.scale_tril, takes_input=takes_input)

    return rd.StateSpaceModel(model.prior, hidden(model.transition), hidden(model.emission))


class _Mean(eqx.Module):
    """The mean of a kernel, as a function whose parameters can be differentiated."""

    kernel: Any

    def __call__(self, x: Any, u: Any = None) -> Any:
        return self.kernel.law(x, u).mean


class UniformLaw(eqx.Module):
    """The uniform law of points less than `radius` from x, in every coordinate.

    Its support is bounded, and packages differ in their density outside of it.
    """

    x: Any
    radius: float = eqx.field(static=True)

    def log_prob(self, value: Any) -> Any:
        inside = jnp.abs(value - self.x) < self.radius
        return jnp.where(inside, -jnp.log(2.0 * self.radius), -jnp.inf)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        shape = (*sample_shape, *jnp.shape(self.x))
        noise = jax.random.uniform(key, shape, minval=-self.radius, maxval=self.radius)
        return self.x + noise
