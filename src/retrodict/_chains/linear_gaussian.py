"""Chains with Gaussian filtering laws and linear-Gaussian backward kernels."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._chains.base import AbstractKernelChain, check_single, kept_rows
from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import LOG_2PI, Gaussian
from retrodict._model import prepare_path
from retrodict._numerics import Factored, affine_suffix_paths, affine_suffix_scan, linalg, propagate
from retrodict._parameters import check_lower
from retrodict._series import prepare_length
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import as_real_array, check_count, check_key
from retrodict.distributed import Parallel, appended


class LinearGaussianChain(AbstractKernelChain):
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

    laws: Gaussian  # pyright: ignore
    kernels: LinearGaussianKernel
    length: Int[Array, ""] | None = None  # pyright: ignore

    @classmethod
    def from_arrays(
        cls,
        means: Any,
        scales: Any,
        gains: Any,
        offsets: Any,
        kernel_scales: Any,
        length: Any = None,
    ) -> "LinearGaussianChain":
        """Builds a chain from stacked parameters.

        Args:
            means: means of the filtering laws, of shape `(time, state)`.
            scales: lower Cholesky factors of the filtering laws, of shape `(time, state, state)`.
            gains: G, one per backward kernel, of shape `(time-1, state, state)`.
            offsets: c, one per backward kernel, of shape `(time-1, state)`.
            kernel_scales: lower Cholesky factors s of the backward kernels, shaped as `gains`.
            length: how many rows exist.
        """
        means, scales = as_real_array(means, "means"), as_real_array(scales, "scales")
        gains, offsets = as_real_array(gains, "gains"), as_real_array(offsets, "offsets")
        kernel_scales = as_real_array(kernel_scales, "kernel_scales")
        if means.ndim != 2:
            raise ValueError(
                f"LinearGaussianChain expects means of shape (time, state), got {means.shape}."
            )
        n, d = means.shape
        expected = {
            "scales": (scales, (n, d, d)),
            "gains": (gains, (n - 1, d, d)),
            "offsets": (offsets, (n - 1, d)),
            "kernel_scales": (kernel_scales, (n - 1, d, d)),
        }
        for name, (array, shape) in expected.items():
            if array.shape != shape:
                raise ValueError(
                    f"LinearGaussianChain expects {name} of shape {shape} beside means of shape"
                    f" {(n, d)}, got {array.shape}."
                )
        check_lower("scales", scales)
        check_lower("kernel_scales", kernel_scales)
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
    def steps(self) -> LinearGaussianKernel:
        """The backward kernels."""
        return self.kernels

    def kernel_law(self, step: LinearGaussianKernel, x: Float[Array, "state"]) -> Gaussian:
        """The law N(G_k x + c_k, s_k s_kᵀ)."""
        return step.law(x, None)

    @property
    def terminal(self) -> Gaussian:
        """The law of the last state that exists."""
        self._check_single()
        return jax.tree.map(lambda leaf: leaf[-1], self.laws)

    def marginals(self, *, parallel: Parallel = False) -> Gaussian:
        """The marginal laws of the states, given the whole series.

        Backward in time, m_{k-1} = G_k m_k + c_k and P_{k-1} = G_k P_k G_kᵀ + s_k s_kᵀ, carried as
        factors, so that covariances are positive semidefinite by construction.

        Args:
            parallel: whether to compose kernels by an associative scan, which is quicker on
                accelerators for long series; a `time_mesh` to do so over several devices. It forms
                covariances, which cannot hold directions that decay below the rounding error of
                others.

        Returns:
            A `Gaussian` with a leading time axis: `.mean`, `.scale_tril`, `.covariance`, `.std`.
        """
        self._check_single()
        return _marginals(self, parallel)

    def pairwise(self, *, parallel: Parallel = False) -> Gaussian:
        """The joint laws of (x_{k-1}, x_k), k = 1..n-1, as stacked vectors of dimension 2d.

        Args:
            parallel: as in `marginals`.

        Returns:
            A `Gaussian` with a leading axis `time-1`; row k-1 holds the pair (x_{k-1}, x_k).
        """
        self._check_single()
        return _pairwise(self, parallel)

    def sample(
        self, key: PRNGKey, num_samples: int, *, parallel: Parallel = False
    ) -> Float[Array, "sample time state"]:
        """Draws paths: the terminal state, then one kernel after another.

        Args:
            key: a typed key.
            num_samples: how many paths.
            parallel: whether to compose kernels by an associative scan, once their noise is drawn;
                the paths are the same to rounding.
        """
        check_key(key, "LinearGaussianChain.sample")
        num_samples = check_count(num_samples, "num_samples")
        self._check_single()
        return _sample(self, key, num_samples, parallel)

    @property
    def noise_dim(self) -> int:
        """How many standard normal numbers make one state: as many as it has coordinates."""
        return self.state_dim

    def from_noise(
        self, noise: Float[Array, "sample time noise"], *, parallel: Parallel = False
    ) -> Float[Array, "sample time state"]:
        """The paths x_{k-1} = G_k x_k + c_k + s_k ε_{k-1} of given noise.

        Args:
            noise: standard normal numbers.
            parallel: as in `sample`.
        """
        self._check_single()
        return _from_noise(self, jnp.swapaxes(noise, 0, 1), parallel)

    def log_prob(self, xs: Any) -> Scalar:
        """The log density log q(x_{0:n-1}) of one path of shape `(time, state)`."""
        path = prepare_path(xs, self.state_dim, self.num_times)
        return _log_prob(self, path)

    def entropy(self) -> Scalar:
        """−E log q, which for linear-Gaussian kernels is the sum of their entropies."""
        self._check_single()
        return _entropy(self)

    def prefix(self, num_times: int) -> "LinearGaussianChain":
        """The chain of the first rows: the law of their states given their data alone.

        Nothing is computed: a backward kernel does not depend on what came after it.

        Args:
            num_times: how many rows to keep, from 1 to `self.num_times`.
        """
        return LinearGaussianChain(*kept_rows(self, num_times))

    def _check_single(self) -> None:
        check_single(self.laws.mean)


# Compiled once a shape, whoever calls: a scan that is run outside of `jax.jit` compiles each time.


@eqx.filter_jit
def _marginals(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    return _marginals_in_parallel(chain, parallel) if parallel else _marginals_one_by_one(chain)


def _marginals_one_by_one(chain: LinearGaussianChain) -> Gaussian:
    terminal = chain.terminal
    last = Factored.from_scale(terminal.mean, terminal.scale_tril)

    def back(law: Factored, kernel: LinearGaussianKernel) -> tuple[Factored, Factored]:
        law = propagate(law, kernel.weight, kernel.bias, kernel.scale_tril)
        return law, law

    unroll = linalg.steps_a_loop(chain.state_dim)
    _, laws = lax.scan(back, last, chain.kernels, reverse=True, unroll=unroll)
    laws = jax.tree.map(lambda rest, end: jnp.concatenate([rest, end[None]]), laws, last)
    return jax.vmap(Gaussian)(laws.mean, laws.scale_tril)


def marginals_with_density(chain: LinearGaussianChain, *, parallel: Parallel = False) -> Gaussian:
    """The marginals of a chain whose kernels all have a density, quick to differentiate.

    Covariances are carried in the scan and factored after it, all times at once: a third less time
    for a training step with one state dimension than a triangularisation in every step, far less
    with ten, and safe where nothing is singular.
    """
    if parallel:
        return _marginals_in_parallel(chain, parallel)
    terminal, kernels = chain.terminal, chain.kernels
    spreads = jax.vmap(linalg.outer_gram)(kernels.scale_tril)

    def back(law: tuple[Array, Array], step: tuple) -> tuple[tuple, tuple]:
        mean, covariance = law
        gain, offset, spread = step
        # Fenced, the transpose is a copy of its own: products that transpose are slower than both.
        moved = linalg.matmul(linalg.matmul(gain, covariance), linalg.fence(gain.T)) + spread
        law = (linalg.matvec(gain, mean) + offset, moved)
        return law, law

    last = (terminal.mean, terminal.covariance)
    steps = (kernels.weight, kernels.bias, spreads)
    _, (means, covariances) = lax.scan(back, last, steps, reverse=True)
    scales = jax.vmap(linalg.semidefinite_cholesky)(covariances)
    return jax.vmap(Gaussian)(
        jnp.concatenate([means, terminal.mean[None]]),
        jnp.concatenate([scales, terminal.scale_tril[None]]),
    )


def _marginals_in_parallel(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    """Marginals by composing all backward kernels, the terminal law as a constant map."""
    terminal, kernels = chain.terminal, chain.kernels
    zero = jnp.zeros((chain.state_dim, chain.state_dim), terminal.mean.dtype)
    spreads = jax.vmap(linalg.outer_gram)(kernels.scale_tril)
    rows = (kernels.weight, kernels.bias, spreads)
    maps = appended(rows, (zero, terminal.mean, terminal.covariance), parallel)
    means, covariances = affine_suffix_scan(*maps, parallel)
    return jax.vmap(Gaussian)(means, jax.vmap(linalg.semidefinite_cholesky)(covariances))


@eqx.filter_jit
def _pairwise(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    marginals, d = _marginals(chain, parallel), chain.state_dim

    def joint(gain: Array, scale: Array, mean: Array, after: Array, spread: Array) -> Gaussian:
        past = jnp.concatenate([linalg.matmul(gain, spread), scale], axis=1)
        present = jnp.concatenate([spread, jnp.zeros((d, d), spread.dtype)], axis=1)
        return Gaussian(
            jnp.concatenate([mean, after]), linalg.tria(jnp.concatenate([past, present]))
        )

    return jax.vmap(joint)(
        chain.kernels.weight,
        chain.kernels.scale_tril,
        marginals.mean[:-1],
        marginals.mean[1:],
        marginals.scale_tril[1:],
    )


@eqx.filter_jit
def _sample(
    chain: LinearGaussianChain, key: PRNGKey, num_samples: int, parallel: Parallel
) -> Float[Array, "sample time state"]:
    shape = (chain.num_times, num_samples, chain.state_dim)
    return _from_noise(chain, jax.random.normal(key, shape, chain.laws.mean.dtype), parallel)


@eqx.filter_jit
def _from_noise(
    chain: LinearGaussianChain, noise: Float[Array, "time sample noise"], parallel: Parallel
) -> Float[Array, "sample time state"]:
    if parallel:
        return _from_noise_in_parallel(chain, noise, parallel)
    terminal = chain.terminal
    last = jax.vmap(terminal.from_noise)(noise[-1])

    def move(kernel: LinearGaussianKernel, x: Array, e: Array) -> Array:
        mean = linalg.matvec(kernel.weight, x) + kernel.bias
        return mean + linalg.matvec(kernel.scale_tril, e)

    def back(xs: Array, step: tuple[LinearGaussianKernel, Array]) -> tuple[Array, Array]:
        kernel, e = step
        xs = jax.vmap(move, in_axes=(None, 0, 0))(kernel, xs, e)
        return xs, xs

    _, rest = lax.scan(back, last, (chain.kernels, noise[:-1]), reverse=True)
    return jnp.swapaxes(jnp.concatenate([rest, last[None]]), 0, 1)


def _from_noise_in_parallel(
    chain: LinearGaussianChain, noise: Float[Array, "time sample noise"], parallel: Parallel
) -> Float[Array, "sample time state"]:
    """Paths by composing all backward maps x ↦ G x + c + s ε, the last state as a constant one."""
    terminal, kernels = chain.terminal, chain.kernels
    zero = jnp.zeros((chain.state_dim, chain.state_dim), terminal.mean.dtype)

    def moved(bias: Array, scale: Array, e: Array) -> Array:
        return bias[:, None] + linalg.matmul(scale, e.T)

    shifts = jax.vmap(moved)(kernels.bias, kernels.scale_tril, noise[:-1])
    last = jax.vmap(terminal.from_noise)(noise[-1]).T
    paths = affine_suffix_paths(
        *appended((kernels.weight, shifts), (zero, last), parallel), parallel
    )
    return jnp.transpose(paths, (2, 0, 1))


@eqx.filter_jit
def _log_prob(chain: LinearGaussianChain, path: Float[Array, "time state"]) -> Scalar:
    n, end = chain.num_times, -1
    if chain.length is not None:
        path = jnp.where((jnp.arange(n) < chain.length)[:, None], path, 0.0)
        end = chain.length - 1
    kernels, exists = _finite_kernels(chain)
    steps = jax.vmap(lambda kernel, before, after: kernel.log_prob(after, before))(
        kernels, path[:-1], path[1:]
    )
    return chain.terminal.log_prob(path[end]) + jnp.sum(jnp.where(exists, steps, 0.0))


@eqx.filter_jit
def _entropy(chain: LinearGaussianChain) -> Scalar:
    kernels, exists = _finite_kernels(chain)
    pivots = jnp.diagonal(kernels.scale_tril, axis1=-2, axis2=-1)
    steps = 0.5 * chain.state_dim * (1.0 + LOG_2PI) + jnp.sum(jnp.log(jnp.abs(pivots)), axis=-1)
    return chain.terminal.entropy() + jnp.sum(jnp.where(exists, steps, 0.0))


def _finite_kernels(chain: LinearGaussianChain) -> tuple[LinearGaussianKernel, Array]:
    """Kernels whose densities are finite, and which of them are between rows that exist."""
    n, d = chain.num_times, chain.state_dim
    if chain.length is None:
        return chain.kernels, jnp.ones(n - 1, bool)
    exists = jnp.arange(1, n) < chain.length
    eye = jnp.eye(d, dtype=chain.kernels.scale_tril.dtype)
    scales = jnp.where(exists[:, None, None], chain.kernels.scale_tril, eye)
    return eqx.tree_at(lambda k: k.scale_tril, chain.kernels, scales), exists
