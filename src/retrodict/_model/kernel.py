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
    """A conditional law x, u ↦ distribution: a transition, an emission or a backward kernel."""

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
    """A kernel whose conditional law is `Gaussian`, masked entry by entry."""

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
