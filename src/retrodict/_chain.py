"""Backward chains: laws of a whole path that factorise backward in time.

    q(x_{0:n-1}) = q_{n-1}(x_{n-1}) ∏_{k=1}^{n-1} q_{k-1|k}(x_k, x_{k-1})

Exact posteriors, variational posteriors and running online posteriors are all chains.
"""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict import _linalg as linalg
from retrodict._factored import Factored, propagate
from retrodict._gaussian import LOG_2PI, Gaussian
from retrodict._kernel import LinearGaussianKernel
from retrodict._mask import prepare_length
from retrodict._model import prepare_path
from retrodict._prefix import affine_suffix_scan
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key


class AbstractBackwardChain(eqx.Module):
    """A law of paths that can be sampled backward in time and whose density is known."""

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
        """Draws paths."""

    @abstractmethod
    def log_prob(self, xs: Any) -> Scalar:
        """The log density of one path."""

    @abstractmethod
    def prefix(self, num_times: int) -> "AbstractBackwardChain":
        """The chain of the first rows, given their data alone."""


class LinearGaussianChain(AbstractBackwardChain):
    """A chain with Gaussian filtering laws and linear-Gaussian backward kernels.

    The kernel in row k-1 is q_{k-1|k}(x_k, ·) = N(G_k x_k + c_k, s_k s_kᵀ): `kernels.weight` holds
    the gains G, `kernels.bias` the offsets c and `kernels.scale_tril` the scales s. Every
    expectation of a path's first two moments is then closed form.

    Rows from `length` on do not exist. Their laws repeat the terminal one and their kernels are the
    identity, so that a sampled path stays where it ended, and their densities count as zero.

    Attributes:
        laws: the filtering laws q_k, a `Gaussian` with a leading time axis.
        kernels: the backward kernels, a `LinearGaussianKernel` with a leading axis `time-1`.
        length: how many rows exist; `None` if all of them do.
    """

    laws: Gaussian
    kernels: LinearGaussianKernel
    length: Int[Array, ""] | None = None

    @classmethod
    def from_arrays(
        cls,
        means: Float[Array, "time state"],
        scales: Float[Array, "time state state"],
        gains: Float[Array, "time-1 state state"],
        offsets: Float[Array, "time-1 state"],
        kernel_scales: Float[Array, "time-1 state state"],
        length: Any = None,
    ) -> "LinearGaussianChain":
        """Builds a chain from stacked parameters.

        Args:
            means: means of the filtering laws.
            scales: lower Cholesky factors of the filtering laws.
            gains: G, one a backward kernel.
            offsets: c, one a backward kernel.
            kernel_scales: lower Cholesky factors s of the backward kernels.
            length: how many rows exist.
        """
        n, d = jnp.shape(means)
        expected = {
            "scales": (scales, (n, d, d)),
            "gains": (gains, (n - 1, d, d)),
            "offsets": (offsets, (n - 1, d)),
            "kernel_scales": (kernel_scales, (n - 1, d, d)),
        }
        for name, (array, shape) in expected.items():
            if jnp.shape(array) != shape:
                raise ValueError(
                    f"LinearGaussianChain expects {name} of shape {shape} beside means of shape"
                    f" {(n, d)}, got {jnp.shape(array)}."
                )
        kernels = jax.vmap(LinearGaussianKernel)(gains, offsets, kernel_scales)
        return cls(jax.vmap(Gaussian)(means, scales), kernels, prepare_length(length, n))

    @property
    def num_times(self) -> int:
        """The number of rows, padding included."""
        self._check_single()
        return self.laws.mean.shape[0]

    @property
    def state_dim(self) -> int:
        """The dimension of the state."""
        return self.laws.mean.shape[-1]

    @property
    def terminal(self) -> Gaussian:
        """The law of the last state that exists."""
        self._check_single()
        return jax.tree.map(lambda leaf: leaf[-1], self.laws)

    def marginals(self, *, parallel: bool = False) -> Gaussian:
        """The marginal laws of the states, given the whole series.

        Backward in time, m_{k-1} = G_k m_k + c_k and P_{k-1} = G_k P_k G_kᵀ + s_k s_kᵀ, carried as
        factors, so that covariances are positive semidefinite by construction.

        Args:
            parallel: whether to compose kernels by an associative scan, which is quicker on
                accelerators for long series.

        Returns:
            A `Gaussian` with a leading time axis: `.mean`, `.scale_tril`, `.covariance`, `.std`.
        """
        self._check_single()
        if parallel:
            return self._marginals_in_parallel()
        terminal = jax.tree.map(lambda leaf: leaf[-1], self.laws)
        last = Factored.from_scale(terminal.mean, terminal.scale_tril)

        def back(law: Factored, kernel: LinearGaussianKernel) -> tuple[Factored, Factored]:
            law = propagate(law, kernel.weight, kernel.bias, kernel.scale_tril)
            return law, law

        _, laws = lax.scan(back, last, self.kernels, reverse=True)
        laws = jax.tree.map(lambda rest, end: jnp.concatenate([rest, end[None]]), laws, last)
        return jax.vmap(Gaussian)(laws.mean, laws.scale_tril)

    def pairwise(self) -> Gaussian:
        """The joint laws of (x_{k-1}, x_k), k = 1..n-1, as stacked vectors of dimension 2d.

        Returns:
            A `Gaussian` with a leading axis `time-1`; row k-1 holds the pair (x_{k-1}, x_k).
        """
        marginals = self.marginals()
        d = self.state_dim

        def joint(gain: Array, scale: Array, mean: Array, after: Array, spread: Array) -> Gaussian:
            past = jnp.concatenate([linalg.matmul(gain, spread), scale], axis=1)
            present = jnp.concatenate([spread, jnp.zeros((d, d), spread.dtype)], axis=1)
            return Gaussian(
                jnp.concatenate([mean, after]), linalg.tria(jnp.concatenate([past, present]))
            )

        return jax.vmap(joint)(
            self.kernels.weight,
            self.kernels.scale_tril,
            marginals.mean[:-1],
            marginals.mean[1:],
            marginals.scale_tril[1:],
        )

    def sample(self, key: PRNGKey, num_samples: int) -> Float[Array, "sample time state"]:
        """Draws paths: the terminal state, then one kernel after another.

        Args:
            key: a typed key.
            num_samples: how many paths.
        """
        check_key(key, "LinearGaussianChain.sample")
        num_samples = check_count(num_samples, "num_samples")
        n, d = self.num_times, self.state_dim
        noise = jax.random.normal(key, (n, num_samples, d), self.laws.mean.dtype)
        terminal = self.terminal
        last = jax.vmap(lambda e: terminal.mean + linalg.matvec(terminal.scale_tril, e))(noise[-1])

        def back(xs: Array, step: tuple[LinearGaussianKernel, Array]) -> tuple[Array, Array]:
            kernel, e = step
            xs = jax.vmap(
                lambda x, e: (
                    linalg.matvec(kernel.weight, x)
                    + kernel.bias
                    + linalg.matvec(kernel.scale_tril, e)
                )
            )(xs, e)
            return xs, xs

        _, rest = lax.scan(back, last, (self.kernels, noise[:-1]), reverse=True)
        return jnp.swapaxes(jnp.concatenate([rest, last[None]]), 0, 1)

    def log_prob(self, xs: Any) -> Scalar:
        """The log density log q(x_{0:n-1}) of one path of shape `(time, state)`."""
        path = prepare_path(xs, self.state_dim, self.num_times)
        if self.length is not None:
            path = jnp.where((jnp.arange(self.num_times) < self.length)[:, None], path, 0.0)
        terminal, end = self.terminal, self._end()
        kernels, exists = self._finite_kernels()
        steps = jax.vmap(lambda kernel, before, after: kernel.log_prob(after, before))(
            kernels, path[:-1], path[1:]
        )
        return terminal.log_prob(path[end]) + jnp.sum(jnp.where(exists, steps, 0.0))

    def entropy(self) -> Scalar:
        """−E log q, which for linear-Gaussian kernels is the sum of their entropies."""
        kernels, exists = self._finite_kernels()
        pivots = jnp.diagonal(kernels.scale_tril, axis1=-2, axis2=-1)
        steps = 0.5 * self.state_dim * (1.0 + LOG_2PI) + jnp.sum(jnp.log(pivots), axis=-1)
        return self.terminal.entropy() + jnp.sum(jnp.where(exists, steps, 0.0))

    def prefix(self, num_times: int) -> "LinearGaussianChain":
        """The chain of the first rows: the law of their states given their data alone.

        Nothing is computed: a backward kernel does not depend on what came after it.

        Args:
            num_times: how many rows to keep, from 1 to `self.num_times`.
        """
        count, n = check_count(num_times, "num_times"), self.num_times
        if count > n:
            raise ValueError(f"The chain has {n} rows, so that prefix({count}) does not exist.")
        return LinearGaussianChain(
            jax.tree.map(lambda leaf: leaf[:count], self.laws),
            jax.tree.map(lambda leaf: leaf[: count - 1], self.kernels),
            None if self.length is None else jnp.minimum(self.length, count),
        )

    def _marginals_in_parallel(self) -> Gaussian:
        """Marginals by composing all backward kernels, the terminal law as a constant map."""
        terminal, kernels = self.terminal, self.kernels
        zero = jnp.zeros((1, self.state_dim, self.state_dim), terminal.mean.dtype)
        spreads = jax.vmap(linalg.outer_gram)(kernels.scale_tril)
        means, covariances = affine_suffix_scan(
            jnp.concatenate([kernels.weight, zero]),
            jnp.concatenate([kernels.bias, terminal.mean[None]]),
            jnp.concatenate([spreads, terminal.covariance[None]]),
        )
        return jax.vmap(Gaussian)(means, jax.vmap(linalg.cholesky)(covariances))

    def _finite_kernels(self) -> tuple[LinearGaussianKernel, Array]:
        """Kernels whose densities are finite, and which of them are between rows that exist."""
        n, d = self.num_times, self.state_dim
        if self.length is None:
            return self.kernels, jnp.ones(n - 1, bool)
        exists = jnp.arange(1, n) < self.length
        eye = jnp.eye(d, dtype=self.kernels.scale_tril.dtype)
        scales = jnp.where(exists[:, None, None], self.kernels.scale_tril, eye)
        return eqx.tree_at(lambda k: k.scale_tril, self.kernels, scales), exists

    def _end(self) -> Array:
        return jnp.asarray(self.num_times - 1) if self.length is None else self.length - 1

    def _check_single(self) -> None:
        shape = jnp.shape(self.laws.mean)
        if len(shape) != 2:
            raise ValueError(
                f"This chain holds a batch of series: its means have shape {shape}, where one"
                " series has (time, state). Call its methods under jax.vmap, for example"
                " jax.vmap(lambda chain: chain.marginals())(chains)."
            )
