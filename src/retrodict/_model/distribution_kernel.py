"""Kernels around any distribution: counts, heavy tails, mixtures."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from retrodict._arrays import Input, PRNGKey, Scalar, State, Value
from retrodict._model.kernel import AbstractKernel, Distribution, require_input
from retrodict._model.parameters import unwrap


class DistributionKernel(AbstractKernel):
    """The kernel x ↦ fn(x), or x, u ↦ fn(x, u), for any law with `log_prob` and `sample`.

    Distributions of numpyro can be used. If `log_prob` returns shape `(out,)` the entries are
    independent and a mask leaves out single entries; if it returns shape `()`, a row with a missing
    entry is left out as a whole.

    Example:
        Counts with a log-linear rate:

        >>> import jax.numpy as jnp, numpyro.distributions as dist, retrodict as rd
        >>> emission = rd.DistributionKernel(lambda x: dist.Poisson(jnp.exp(x)))
        >>> round(float(emission.log_prob(jnp.zeros(1), jnp.array([2.0]))), 3)
        -1.693

    Args:
        fn: a function of the state that returns a distribution over the observation.
        takes_input: whether it is called as `fn(x, u)`.
        curvature: for error bounds, a function of the observation (and of u, if the kernel takes
            inputs) to a matrix of shape `(state, state)` that −∇² log g(x, y) is at least at every
            x; `lambda y: jnp.zeros((1, 1))` declares that the density is log-concave in the state.
    """

    fn: Callable[..., Any]
    takes_input: bool = eqx.field(static=True, default=False)  # pyright: ignore
    curvature: Callable[..., Any] | None = None

    def __check_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(
                "DistributionKernel expects a function x -> distribution, got"
                f" {type(self.fn).__name__}."
            )

    def law(self, x: State, u: Input | None = None) -> Distribution:
        """Return the distribution fn(x, u)."""
        kernel = unwrap(self)
        law = kernel.fn(x, require_input(u)) if self.takes_input else kernel.fn(x)
        if not isinstance(law, Distribution):
            raise TypeError(
                "DistributionKernel expects fn to return an object with log_prob and sample, got"
                f" {type(law).__name__}."
            )
        return law

    def log_prob(
        self, x: State, value: Value, u: Input | None = None, mask: Array | None = None
    ) -> Scalar:
        """Return the log density of the observed entries of `value`."""
        law = self.law(x, u)
        if mask is not None:
            # Outside its support a density is -inf with a NaN gradient: fill before evaluating.
            value = jnp.where(mask, value, _feasible(law, value))
        log_prob = jnp.asarray(law.log_prob(value))
        if log_prob.shape not in ((), value.shape):
            raise ValueError(
                f"log_prob of an observation of shape {value.shape} must have shape () or"
                f" {value.shape}, got {log_prob.shape}."
            )
        if mask is None:
            return jnp.sum(log_prob)
        keep = jnp.all(mask) if log_prob.shape == () else mask
        return jnp.sum(jnp.where(keep, log_prob, 0.0))

    def sample(self, key: PRNGKey, x: State, u: Input | None = None) -> Value:
        """Draw a value; counts are returned as floating-point numbers."""
        return jnp.asarray(self.law(x, u).sample(key)).astype(x.dtype)


def _feasible(law: Distribution, value: Value) -> Array:
    """Return a point of the support: numpyro's if the law has one, else zero."""
    feasible_like = getattr(getattr(law, "support", None), "feasible_like", None)
    if feasible_like is not None:
        return jnp.asarray(feasible_like(value)).astype(value.dtype)
    return jnp.zeros_like(value)
