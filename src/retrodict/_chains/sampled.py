"""Chains whose backward kernels are any function of the later state.

Such a chain has no marginals in closed form. It is drawn backward in time, and since the law of
each state given the next is known, moments average conditional moments and not states.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._chains.base import AbstractKernelChain, check_single, first_rows
from retrodict._model import prepare_path
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key


class AbstractBackwardKernel(eqx.Module):
    """What the backward kernels of all times share, such as a network: (step, x_k) ↦ q_{k-1|k}.

    Its law is a `Gaussian`, a `GaussianMixture`, or anything else with `mean`, `covariance`,
    `log_prob(x)`, `noise_dim` and `from_noise(e)`, a map under which that many standard normal
    numbers have the law. Gradients of draws are those of `from_noise`. What a kernel holds should
    be arrays, and functions static fields: `jax.vmap` of `infer` returns chains, and thus kernels.
    """

    @abstractmethod
    def law(self, step: PyTree, x: Float[Array, "state"]) -> Any:
        """The law of x_{k-1}, from the parameters of its row and the state x_k = x."""


class Trace(NamedTuple):
    """Paths, and the laws that their states were drawn from.

    Attributes:
        paths: the states.
        means: E[x_{k-1} | x_k] along each path; the mean of the terminal law at the last row.
        covariances: the conditional covariances likewise.
    """

    paths: Float[Array, "sample time state"]
    means: Float[Array, "sample time state"]
    covariances: Float[Array, "sample time state state"]


class SampledChain(AbstractKernelChain):
    """A chain with backward kernels of any form, drawn and not marginalised.

    Rows from `length` on do not exist: what `laws` and `steps` hold there is not read, a path stays
    where it ended, and densities count as zero.

    Attributes:
        laws: the filtering laws q_k, with a leading time axis.
        shared: what all backward kernels share.
        steps: their parameters, arrays with a leading axis `time-1`.
        length: how many rows exist; `None` if all of them do.
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
        """How many standard normal numbers make one state: the most that any of the laws takes."""

        def numbers(step: PyTree, x: Array) -> Array:
            return jnp.zeros(self.kernel_law(step, x).noise_dim)

        step = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.steps
        )
        x = jax.ShapeDtypeStruct((self.state_dim,), self.laws.mean.dtype)
        return max(self.laws.noise_dim, jax.eval_shape(numbers, step, x).shape[0])

    @property
    def terminal(self) -> Any:
        """The law of the last state that exists."""
        check_single(self.laws.mean)
        end = -1 if self.length is None else self.length - 1
        return jax.tree.map(lambda leaf: leaf[end], self.laws)

    def kernel_law(self, step: PyTree, x: Float[Array, "state"]) -> Any:
        """The law q_{k-1|k}(x, ·)."""
        return self.shared.law(step, x)

    def sample(self, key: PRNGKey, num_samples: int) -> Float[Array, "sample time state"]:
        """Draws paths: the terminal state, then one kernel after another.

        Args:
            key: a typed key.
            num_samples: how many paths.
        """
        check_key(key, "SampledChain.sample")
        shape = (check_count(num_samples, "num_samples"), self.num_times, self.noise_dim)
        return self.from_noise(jax.random.normal(key, shape, self.laws.mean.dtype))

    def from_noise(
        self, noise: Float[Array, "sample time noise"]
    ) -> Float[Array, "sample time state"]:
        """The paths of given noise, differentiable in the parameters of the chain."""
        return _trace(self, noise, None).paths

    def trace(
        self,
        noise: Float[Array, "sample time noise"],
        last: Float[Array, "sample state"] | None = None,
    ) -> Trace:
        """The paths of given noise, and the laws that their states were drawn from.

        Args:
            noise: standard normal numbers.
            last: terminal states to start from instead of draws of the terminal law.
        """
        return _trace(self, noise, last)

    def log_prob(self, xs: Any) -> Scalar:
        """The log density log q(x_{0:n-1}) of one path of shape `(time, state)`."""
        return _log_prob(self, prepare_path(xs, self.state_dim, self.num_times))

    def prefix(self, num_times: int) -> "SampledChain":
        """The chain of the first rows: the law of their states given their data alone.

        Args:
            num_times: how many rows to keep, from 1 to `self.num_times`.
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
    drawn = jax.vmap(terminal.from_noise)(noise[-1, :, : terminal.noise_dim])
    end = drawn if last is None else last
    spread = terminal.covariance

    def draw(step: PyTree, x: Array, e: Array) -> tuple[Array, Array, Array]:
        law = chain.kernel_law(step, x)
        return law.from_noise(e[: law.noise_dim]), law.mean, law.covariance

    # In padding the conditional moments are those of the terminal law, which the states repeat.
    def back(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        step, e, real = at
        new = jax.vmap(draw, in_axes=(None, 0, 0))(step, state[0], e)
        if real is not None:
            new = jax.tree.map(lambda drawn, kept: jnp.where(real, drawn, kept), new, state)
        return new, new

    first = (
        end,
        jnp.broadcast_to(terminal.mean, end.shape),
        jnp.broadcast_to(spread, (end.shape[0], *spread.shape)),
    )
    steps = _finite_steps(chain, exists)
    _, rest = lax.scan(back, first, (steps, noise[:-1], exists), reverse=True)
    rows = jax.tree.map(lambda head, end: jnp.concatenate([head, end[None]]), rest, first)
    return Trace(*(jnp.swapaxes(leaf, 0, 1) for leaf in rows))


@eqx.filter_jit
def _log_prob(chain: SampledChain, path: Float[Array, "time state"]) -> Scalar:
    exists = _exists(chain)
    if exists is None or chain.length is None:
        last, before, after = path[-1], path[:-1], path[1:]
    else:
        # What stands in padding may be anything: the last state that exists stands there instead.
        last = path[chain.length - 1]
        path = jnp.where(jnp.concatenate([jnp.ones(1, bool), exists])[:, None], path, last[None])
        before, after = path[:-1], path[1:]
    densities = jax.vmap(lambda step, x, y: chain.kernel_law(step, y).log_prob(x))(
        _finite_steps(chain, exists), before, after
    )
    if exists is not None:
        densities = jnp.where(exists, densities, 0.0)
    return chain.terminal.log_prob(last) + jnp.sum(densities)


def _exists(chain: SampledChain) -> Any:
    """Which of the backward kernels lead between rows that exist; `None` if all of them do."""
    return None if chain.length is None else jnp.arange(1, chain.num_times) < chain.length


def _finite_steps(chain: SampledChain, exists: Any) -> PyTree:
    """The steps, with a copy of the first where nothing exists.

    What is computed there is thrown away, but if it were not finite its gradient would be NaN.
    """
    if exists is None:
        return chain.steps

    def fill(leaf: Array) -> Array:
        return jnp.where(exists.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf[:1])

    return jax.tree.map(fill, chain.steps)
