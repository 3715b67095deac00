"""Chains whose backward kernels are arbitrary functions of the later state.

Such a chain has no closed-form marginals. Paths are sampled backward in time. The law of each state
given the next is known, so moments are estimated by averaging conditional moments, not states.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._chains.base import AbstractKernelChain, check_single, first_rows
from retrodict._model import fill_padding, prepare_path


class AbstractBackwardKernel(eqx.Module):
    """The part of the backward kernels shared by all times, such as a network.

    It maps (step, x_k) to q_{k-1|k}. The law is a `Gaussian`, a `GaussianMixture`, or any object
    with `mean`, `covariance`, `log_prob(x)`, `noise_dim` and `from_noise(e)`. The latter maps
    `noise_dim` standard normal variates to a draw, and defines the gradients of draws. Fields of a
    kernel should be arrays, and functions should be static fields, because `jax.vmap` of `infer`
    returns chains and therefore kernels.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> class Halved(rd.AbstractBackwardKernel):
        ...     def law(self, step, x):
        ...         return rd.Gaussian(x / 2, step["scale_tril"])
        >>> laws = jax.vmap(rd.Gaussian)(jnp.zeros((5, 1)), jnp.ones((5, 1, 1)))
        >>> chain = rd.SampledChain(laws, Halved(), {"scale_tril": jnp.ones((4, 1, 1))})
        >>> chain.kernel_law({"scale_tril": jnp.eye(1)}, jnp.ones(1)).mean.tolist()
        [0.5]
    """

    @abstractmethod
    def law(self, step: PyTree, x: Float[Array, "state"]) -> Any:
        """Return the law of x_{k-1}, from the parameters of its row and the state x_k = x."""


class Trace(NamedTuple):
    """Sampled paths, and the conditional moments of their states.

    Attributes:
        paths: the states.
        means: E[x_{k-1} | x_k] along each path; the mean of the terminal law at the last row.
        covariances: Cov[x_{k-1} | x_k] along each path; the terminal covariance at the last row.
    """

    paths: Float[Array, "sample time state"]
    means: Float[Array, "sample time state"]
    covariances: Float[Array, "sample time state state"]


class SampledChain(AbstractKernelChain):
    """A chain with backward kernels of any form, which is sampled and has no closed-form marginals.

    Rows from `length` on are padding. Their `laws` and `steps` are not used, a sampled path repeats
    its last state there, and they add zero to log densities.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> class Halved(rd.AbstractBackwardKernel):
        ...     def law(self, step, x):
        ...         return rd.Gaussian(x / 2, step["scale_tril"])
        >>> laws = jax.vmap(rd.Gaussian)(jnp.zeros((5, 1)), jnp.ones((5, 1, 1)))
        >>> chain = rd.SampledChain(laws, Halved(), {"scale_tril": jnp.ones((4, 1, 1))})
        >>> options = {"estimator": rd.BackwardSampling(8), "key": jax.random.key(0)}
        >>> moments = rd.marginals(chain, **options)
        >>> moments.mean.shape, moments.mean_standard_error.shape
        ((5, 1), (5, 1))

    Attributes:
        laws: the filtering laws q_k, with a leading time axis.
        shared: the part of the backward kernels shared by all times.
        steps: the parameters of each backward kernel, arrays with a leading axis `time-1`.
        length: the number of rows that exist; `None` if all of them do.
    """

    laws: Any  # pyright: ignore
    shared: AbstractBackwardKernel
    steps: PyTree  # pyright: ignore
    length: Int[Array, ""] | None = None  # pyright: ignore

    @property
    def num_times(self) -> int:
        """The number of rows, padding included."""
        check_single(self.laws.mean)
        return self.laws.mean.shape[0]

    @property
    def state_dim(self) -> int:
        """The dimension of the state."""
        return self.laws.mean.shape[-1]

    @property
    def noise_dim(self) -> int:
        """The number of standard normal variates per state: the maximum over all laws."""

        def noise_like(step: PyTree, x: Array) -> Array:
            return jnp.zeros(self.kernel_law(step, x).noise_dim)

        step = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.steps
        )
        x = jax.ShapeDtypeStruct((self.state_dim,), self.laws.mean.dtype)
        return max(self.laws.noise_dim, jax.eval_shape(noise_like, step, x).shape[0])

    @property
    def terminal(self) -> Any:
        """The law of the last state that exists."""
        check_single(self.laws.mean)
        end = -1 if self.length is None else self.length - 1
        return jax.tree.map(lambda leaf: leaf[end], self.laws)

    def kernel_law(self, step: PyTree, x: Float[Array, "state"]) -> Any:
        """Return the law q_{k-1|k}(x, ·)."""
        return self.shared.law(step, x)

    def sample(self, key: PRNGKey, num_samples: int) -> Float[Array, "sample time state"]:
        """Draw paths: the terminal state first, then one state per kernel, backward in time.

        Args:
            key: a typed key.
            num_samples: the number of paths.
        """
        check_key(key, "SampledChain.sample")
        shape = (check_count(num_samples, "num_samples"), self.num_times, self.noise_dim)
        return self.from_noise(jax.random.normal(key, shape, self.laws.mean.dtype))

    def from_noise(
        self, noise: Float[Array, "sample time noise"]
    ) -> Float[Array, "sample time state"]:
        """Map noise to paths, differentiably in the parameters of the chain."""
        return _trace(self, noise, None).paths

    def trace(
        self,
        noise: Float[Array, "sample time noise"],
        last: Float[Array, "sample state"] | None = None,
    ) -> Trace:
        """Map noise to paths, and return the conditional moments along them as well.

        Args:
            noise: standard normal variates.
            last: terminal states to start from; by default they are drawn from the terminal law.
        """
        return _trace(self, noise, last)

    def log_prob(self, xs: Any) -> Scalar:
        """Compute the log density log q(x_{0:n-1}) of one path of shape `(time, state)`."""
        return _log_prob(self, prepare_path(xs, self.state_dim, self.num_times))

    def prefix(self, num_times: int) -> "SampledChain":
        """Return the chain of the first rows, conditioned on the data of those rows only.

        Args:
            num_times: the number of rows to keep, from 1 to `self.num_times`.
        """
        laws, steps, length = first_rows(self, num_times)
        return SampledChain(laws, self.shared, steps, length)


@eqx.filter_jit
def _trace(
    chain: SampledChain,
    noise: Float[Array, "sample time noise"],
    last: Float[Array, "sample state"] | None,
) -> Trace:
    terminal, exists = chain.terminal, _exists(chain)
    noise = jnp.swapaxes(noise, 0, 1)
    terminal_draws = jax.vmap(terminal.from_noise)(noise[-1, :, : terminal.noise_dim])
    end = terminal_draws if last is None else last
    spread = terminal.covariance

    def draw(step: PyTree, x: Array, e: Array) -> tuple[Array, Array, Array]:
        law = chain.kernel_law(step, x)
        return law.from_noise(e[: law.noise_dim]), law.mean, law.covariance

    # Padding rows repeat the terminal state, with the moments of the terminal law.
    def back(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        step, e, real = at
        new = jax.vmap(draw, in_axes=(None, 0, 0))(step, state[0], e)
        if real is not None:
            new = jax.tree.map(lambda leaf, old: jnp.where(real, leaf, old), new, state)
        return new, new

    first = (
        end,
        jnp.broadcast_to(terminal.mean, end.shape),
        jnp.broadcast_to(spread, (end.shape[0], *spread.shape)),
    )
    steps = fill_padding(chain.steps, exists)
    _, rest = lax.scan(back, first, (steps, noise[:-1], exists), reverse=True)
    rows = jax.tree.map(lambda head, end: jnp.concatenate([head, end[None]]), rest, first)
    return Trace(*(jnp.swapaxes(leaf, 0, 1) for leaf in rows))


@eqx.filter_jit
def _log_prob(chain: SampledChain, path: Float[Array, "time state"]) -> Scalar:
    exists = _exists(chain)
    if exists is None or chain.length is None:
        last, before, after = path[-1], path[:-1], path[1:]
    else:
        # Padding may hold any values: replace them by the last state that exists.
        last = path[chain.length - 1]
        path = jnp.where(jnp.concatenate([jnp.ones(1, bool), exists])[:, None], path, last[None])
        before, after = path[:-1], path[1:]
    densities = jax.vmap(lambda step, x, y: chain.kernel_law(step, y).log_prob(x))(
        fill_padding(chain.steps, exists), before, after
    )
    if exists is not None:
        densities = jnp.where(exists, densities, 0.0)
    return chain.terminal.log_prob(last) + jnp.sum(densities)


def _exists(chain: SampledChain) -> Any:
    """Return a mask of the backward kernels between existing rows; `None` if all rows exist."""
    return None if chain.length is None else jnp.arange(1, chain.num_times) < chain.length
