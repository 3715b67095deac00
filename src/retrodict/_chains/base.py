"""Backward chains: laws of whole paths that factorise backward in time.

    q(x_{0:n-1}) = q_{n-1}(x_{n-1}) ∏_{k=1}^{n-1} q_{k-1|k}(x_k, x_{k-1})

Exact posteriors, variational posteriors and running online posteriors are all chains.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count


class AbstractBackwardChain(eqx.Module):
    """A law of paths with backward sampling and a tractable density.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> isinstance(chain, rd.AbstractBackwardChain), chain.num_times, chain.state_dim
        (True, 3, 1)
        >>> paths = chain.sample(jax.random.key(0), 5)
        >>> paths.shape, chain.log_prob(paths[0]).shape
        ((5, 3, 1), ())
    """

    @property
    @abstractmethod
    def num_times(self) -> int:
        """The number of rows, padding included."""

    @property
    @abstractmethod
    def state_dim(self) -> int:
        """The dimension of the state."""

    @abstractmethod
    def sample(self, key: PRNGKey, num_samples: int) -> Float[Array, "sample time state"]:
        """Draw paths."""

    @abstractmethod
    def log_prob(self, xs: Any) -> Scalar:
        """Compute the log density of one path."""

    @abstractmethod
    def prefix(self, num_times: int) -> "AbstractBackwardChain":
        """Return the chain of the first rows, conditioned on the data of those rows only."""


class AbstractKernelChain(AbstractBackwardChain):
    """A chain defined by its filtering laws q_k and its backward kernels q_{k-1|k}.

    A law has `mean`, `covariance`, `log_prob(x)`, `sample(key)` and `from_noise(e)`. The latter
    maps standard normal noise of length `noise_dim` to a draw of the law.

    Attributes:
        laws: the filtering laws, with a leading time axis.
        steps: the parameters of the backward kernels: arrays with a leading axis `time-1`.
        length: the number of rows that exist; `None` if all of them do.
    """

    if TYPE_CHECKING:
        # A type checker would treat abstract variables as arguments of the constructor.

        @property
        def laws(self) -> Any:
            """The filtering laws."""
            ...

        @property
        def steps(self) -> PyTree:
            """The parameters of the backward kernels."""
            ...

        @property
        def length(self) -> Int[Array, ""] | None:
            """The number of rows that exist; `None` if all of them do."""
            ...
    else:
        laws: eqx.AbstractVar[Any]
        steps: eqx.AbstractVar[PyTree]
        length: eqx.AbstractVar[Int[Array, ""] | None]

    @abstractmethod
    def kernel_law(self, step: PyTree, x: Float[Array, "state"]) -> Any:
        """Return the law q_{k-1|k}(x, ·), from row k-1 of `steps` and a state x at time k."""

    @property
    @abstractmethod
    def noise_dim(self) -> int:
        """The number of standard normal variates per state."""

    @abstractmethod
    def from_noise(
        self, noise: Float[Array, "sample time noise"]
    ) -> Float[Array, "sample time state"]:
        """Map noise to paths; standard normal noise gives draws from the chain."""


def first_rows(chain: AbstractKernelChain, num_times: Any) -> tuple[Any, PyTree, Any]:
    """Return the laws, steps and length of the first rows of a chain.

    This only slices arrays: a backward kernel does not depend on later data.

    Raises:
        ValueError: if `num_times` exceeds the number of rows of the chain.
    """
    count, n = check_count(num_times, "num_times"), chain.num_times
    if count > n:
        raise ValueError(f"`num_times` must be at most the number of rows ({n}), got {count}.")
    return (
        jax.tree.map(lambda leaf: leaf[:count], chain.laws),
        jax.tree.map(lambda leaf: leaf[: count - 1], chain.steps),
        None if chain.length is None else jnp.minimum(chain.length, count),
    )


def check_single(mean: Array) -> None:
    """Raise a `ValueError` if the means of a chain's laws belong to a batch of series."""
    shape = jnp.shape(mean)
    if len(shape) != 2:
        raise ValueError(
            f"This chain holds a batch of series: its means have shape {shape}, where one"
            " series has (time, state). Call its methods under jax.vmap, for example"
            " jax.vmap(lambda chain: chain.marginals())(chains)."
        )
