"""The interface of conditional laws: a density and a draw given the state and the input."""

from abc import abstractmethod
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from retrodict._arrays import Input, PRNGKey, Scalar, State, Value


@runtime_checkable
class Distribution(Protocol):
    """Anything with a density and a draw: `Gaussian`, or a distribution of numpyro."""

    def log_prob(self, value: Any) -> Any:
        """Return the log density at `value`."""
        ...

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        """Draw a value."""
        ...


def require_input(u: Input | None) -> Input:
    """Return the input, refused if there is none."""
    if u is None:
        raise ValueError("This kernel takes an input: pass inputs or u, got None.")
    return jnp.asarray(u)


class AbstractKernel(eqx.Module):
    """A conditional law x, u ↦ distribution: a transition, an emission or a backward kernel.

    Example:
        >>> import jax.numpy as jnp, numpyro.distributions as dist, retrodict as rd
        >>> class HeavyTailed(rd.AbstractKernel):
        ...     # A random walk whose steps have Student's t law.
        ...     takes_input = False
        ...     def law(self, x, u=None):
        ...         return dist.StudentT(3.0, x).to_event(1)
        ...     def log_prob(self, x, value, u=None, mask=None):
        ...         return self.law(x).log_prob(value)
        ...     def sample(self, key, x, u=None):
        ...         return self.law(x).sample(key)
        >>> round(float(HeavyTailed().log_prob(jnp.zeros(1), jnp.ones(1))), 3)
        -1.576
    """

    @property
    @abstractmethod
    def takes_input(self) -> bool:
        """Whether the law depends on an input; a kernel that takes none ignores it."""

    @abstractmethod
    def law(self, x: State, u: Input | None = None) -> Distribution:
        """Return the law given the state x and, if the kernel takes one, the input u."""

    @abstractmethod
    def log_prob(
        self, x: State, value: Value, u: Input | None = None, mask: Array | None = None
    ) -> Scalar:
        """Return the log density of `value` given x and u, of its observed entries under a mask."""

    @abstractmethod
    def sample(self, key: PRNGKey, x: State, u: Input | None = None) -> Value:
        """Draw a value given x and u."""


class AbstractGaussianKernel(AbstractKernel):
    """A kernel whose conditional law is `Gaussian`, masked entry by entry.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> class Growth(rd.AbstractGaussianKernel):
        ...     # Logistic growth of a population, x ↦ N(x + rate x (1 − x), 0.1²).
        ...     rate: float
        ...     takes_input = False
        ...     def law(self, x, u=None):
        ...         return rd.Gaussian(x + self.rate * x * (1 - x), 0.1 * jnp.eye(1))
        >>> print(np.array(Growth(0.5).law(jnp.array([0.2])).mean).round(3))
        [0.28]
    """

    @abstractmethod
    def law(self, x: State, u: Input | None = None) -> Any:
        """Return the Gaussian law given x and u."""

    def log_prob(
        self, x: State, value: Value, u: Input | None = None, mask: Array | None = None
    ) -> Scalar:
        """Return log N(value; m(x, u), s sᵀ), of the entries where `mask` is true."""
        law = self.law(x, u)
        if mask is None:
            return law.log_prob(value)
        return law.masked_log_prob(value, mask.astype(value.dtype))

    def sample(self, key: PRNGKey, x: State, u: Input | None = None) -> Value:
        """Draw m(x, u) + s ε."""
        return self.law(x, u).sample(key)
