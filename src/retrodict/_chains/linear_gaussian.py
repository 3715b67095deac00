"""Chains with Gaussian filtering laws and linear-Gaussian backward kernels."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from retrodict._arrays import PRNGKey, Scalar, as_real_array, check_count, check_key
from retrodict._chains.base import AbstractKernelChain, check_single, first_rows
from retrodict._model import (
    LOG_2PI,
    Gaussian,
    LinearGaussianKernel,
    check_lower,
    prepare_length,
    prepare_path,
)
from retrodict._numerics import (
    SETTLED_ROWS,
    UNROLLED,
    QuickStep,
    StandardKernel,
    affine_moments,
    affine_scan,
    affine_suffix_paths,
    factor_if_precise,
    has_settled,
    linalg,
    lower_factor,
    propagate,
    repeated_last,
    scales_agree,
    settling_scan,
)
from retrodict.distributed import Parallel, appended, mesh_of, on_accelerator


class LinearGaussianChain(AbstractKernelChain):
    """A chain with Gaussian filtering laws and linear-Gaussian backward kernels.

    The kernel in row k-1 is q_{k-1|k}(x_k, ·) = N(G_k x_k + c_k, s_k s_kᵀ): `kernels.weight` holds
    the gains G, `kernels.bias` the offsets c and `kernels.scale_tril` the scales s. The first two
    moments of a path, and expectations that depend only on them, have closed forms.

    Rows from `length` on are padding. Their laws repeat the terminal law and their kernels are the
    identity: a sampled path repeats its last state there. Padding adds zero to log densities.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model = rd.models.local_level(prior_scale=1.0)
        >>> chain = rd.kalman_smoother(model, jnp.array([[1.0], [2.0], [4.0]])).chain
        >>> smoothed = chain.marginals()
        >>> print(np.array(smoothed.mean[:, 0]).round(3), np.array(smoothed.std[:, 0]).round(3))
        [1. 2. 3.] [0.62  0.679 0.784]
        >>> chain.pairwise().covariance.shape
        (2, 2, 2)

    Attributes:
        laws: the filtering laws q_k, a `Gaussian` with a leading time axis.
        kernels: the backward kernels, a `LinearGaussianKernel` with a leading axis `time-1`.
        length: the number of rows that exist; `None` if all of them do.
        standard: the backward kernels between the standard coordinates z_k of the filtering laws,
            x_k = m_k + S_k z_k. Exact smoothers provide them. They are accurate where a filtering
            law is singular or narrow in some direction, and `kernels` cannot be. If present, all
            methods use them in place of `kernels`.
        resolved: whether every direction of the filtering laws was resolved. If not, log densities
            and the entropy are NaN. `None` if all directions are resolved by construction.
    """

    laws: Gaussian  # pyright: ignore
    kernels: LinearGaussianKernel
    length: Int[Array, ""] | None = None  # pyright: ignore
    standard: StandardKernel | None = None
    resolved: Bool[Array, ""] | None = None

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
        """Build a chain from stacked parameters.

        Args:
            means: means of the filtering laws, of shape `(time, state)`.
            scales: lower Cholesky factors of the filtering laws, of shape `(time, state, state)`.
            gains: G, one per backward kernel, of shape `(time-1, state, state)`.
            offsets: c, one per backward kernel, of shape `(time-1, state)`.
            kernel_scales: lower Cholesky factors s of the backward kernels, shaped as `gains`.
            length: the number of rows that exist; all of them by default.
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
                    f"LinearGaussianChain expects {name} of shape {shape} to match means of shape"
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
        """Return the law N(G_k x + c_k, s_k s_kᵀ)."""
        return step.law(x, None)

    @property
    def terminal(self) -> Gaussian:
        """The law of the last state that exists."""
        self._check_single()
        return jax.tree.map(lambda leaf: leaf[-1], self.laws)

    def marginals(self, *, parallel: Parallel = False) -> Gaussian:
        """Compute the marginal laws of the states given the whole series.

        Backward in time, m_{k-1} = G_k m_k + c_k and P_{k-1} = G_k P_k G_kᵀ + s_k s_kᵀ. The
        recursion propagates factors, so covariances are positive semidefinite by construction.

        Args:
            parallel: whether to compose kernels by an associative scan, which is faster on
                accelerators for long series; a `time_mesh` runs it over several devices. The scan
                forms covariances, which cannot represent directions that decay below the rounding
                error of others.

        Returns:
            A `Gaussian` with a leading time axis: `.mean`, `.scale_tril`, `.covariance`, `.std`.
        """
        self._check_single()
        return _marginals(self, parallel)

    def pairwise(self, *, parallel: Parallel = False) -> Gaussian:
        """Compute the joint laws of (x_{k-1}, x_k), k = 1..n-1, as stacked vectors of dimension 2d.

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
        """Draw paths: the terminal state first, then one state per kernel, backward in time.

        Args:
            key: a typed key.
            num_samples: the number of paths.
            parallel: whether to compose kernels by an associative scan once their noise is drawn.
                The paths are the same up to rounding.
        """
        check_key(key, "LinearGaussianChain.sample")
        num_samples = check_count(num_samples, "num_samples")
        self._check_single()
        return _sample(self, key, num_samples, parallel)

    @property
    def noise_dim(self) -> int:
        """The number of standard normal variates per state, equal to the state dimension."""
        return self.state_dim

    def from_noise(
        self, noise: Float[Array, "sample time noise"], *, parallel: Parallel = False
    ) -> Float[Array, "sample time state"]:
        """Map noise ε to the paths x_{k-1} = G_k x_k + c_k + s_k ε_{k-1}.

        Args:
            noise: standard normal variates.
            parallel: as in `sample`.
        """
        self._check_single()
        return _from_noise(self, jnp.swapaxes(noise, 0, 1), parallel)

    def log_prob(self, xs: Any) -> Scalar:
        """Compute the log density log q(x_{0:n-1}) of one path of shape `(time, state)`."""
        path = prepare_path(xs, self.state_dim, self.num_times)
        return _log_prob(self, path)

    def entropy(self) -> Scalar:
        """Compute −E log q: the entropies of the terminal law and of all kernels, summed."""
        self._check_single()
        return _entropy(self)

    def prefix(self, num_times: int) -> "LinearGaussianChain":
        """Return the chain of the first rows, conditioned on the data of those rows only.

        This only slices arrays: a backward kernel does not depend on later data.

        Args:
            num_times: the number of rows to keep, from 1 to `self.num_times`.
        """
        laws, kernels, length = first_rows(self, num_times)
        count = laws.mean.shape[0]
        standard = jax.tree.map(lambda leaf: leaf[: count - 1], self.standard)
        return LinearGaussianChain(laws, kernels, length, standard, self.resolved)

    def _check_single(self) -> None:
        check_single(self.laws.mean)


# The functions below are jitted, so that each compiles once per shape: outside of `jax.jit`, a scan
# would compile on every call.


@eqx.filter_jit
def _marginals(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    return _to_states(chain, _recursion_marginals(chain, parallel))


def _recursion_marginals(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    return _marginals_in_parallel(chain, parallel) if parallel else _marginals_one_by_one(chain)


def _marginals_one_by_one(chain: LinearGaussianChain) -> Gaussian:
    terminal, kernels = _recursion(chain)
    last = lower_factor(terminal.scale_tril)
    rows = (kernels.gain, kernels.scale)
    if chain.standard is None and on_accelerator():
        # The kernels of a family differ from row to row. A loop of unknown length waits for the
        # accelerator in every iteration, which takes six times as long as the iteration.
        def back(scale: Array, kernel: tuple[Array, Array]) -> tuple[Array, Array]:
            scale = _move_scale(None, scale, kernel)
            return scale, scale

        scales = lax.scan(back, last, rows, reverse=True)[1]
    else:
        scales = settling_scan(
            _move_scale,
            scales_agree,
            None,
            last,
            rows,
            chain.num_times - 1,
            quick=_BY_COVARIANCES if chain.state_dim > UNROLLED else None,
            reverse=True,
        )
    means = affine_scan(kernels.gain, kernels.offset, terminal.mean, reverse=True)
    return jax.vmap(Gaussian)(
        jnp.concatenate([means, terminal.mean[None]]), jnp.concatenate([scales, last[None]])
    )


def _move_scale(fixed: None, scale: Array, kernel: tuple[Array, Array]) -> Array:
    gain, noise = kernel
    rows = jnp.concatenate([linalg.matmul(gain, scale), noise], axis=1)
    return lower_factor(linalg.fence(rows))


def _move_covariance(fixed: None, covariance: Array, kernel: tuple[Array, Array]) -> Array:
    return propagate(covariance, *kernel)


def _read_scales(
    fixed: None, kernels: tuple[Array, Array], before: Array, after: Array
) -> tuple[Array, Array]:
    return factor_if_precise(before, *kernels, after)


_BY_COVARIANCES = QuickStep(linalg.outer_gram, _move_covariance, _read_scales)


def _recursion(chain: LinearGaussianChain) -> tuple[Gaussian, StandardKernel]:
    """Return the terminal law and the kernels of the backward recursion.

    They act on standard coordinates if the chain has `standard`, and on states otherwise. Callers
    map the results back to states: laws by `_to_states`, paths in `_from_noise`.
    """
    if chain.standard is None:
        kernels = chain.kernels
        return chain.terminal, StandardKernel(kernels.weight, kernels.bias, kernels.scale_tril)
    d, dtype = chain.state_dim, chain.laws.mean.dtype
    return Gaussian(jnp.zeros(d, dtype), jnp.eye(d, dtype=dtype)), chain.standard


def _to_states(chain: LinearGaussianChain, marginals: Gaussian) -> Gaussian:
    """Return the laws of m + S z. The product of two lower factors is a lower factor."""
    if chain.standard is None:
        return marginals
    means = chain.laws.mean + jax.vmap(linalg.matvec)(chain.laws.scale_tril, marginals.mean)
    scales = jax.vmap(linalg.matmul)(chain.laws.scale_tril, marginals.scale_tril)
    return jax.vmap(Gaussian)(means, scales)


def pair_laws(
    chain: LinearGaussianChain, *, parallel: Parallel = False
) -> tuple[Gaussian, Float[Array, "steps state state"], Float[Array, "steps state state"]]:
    """Return the laws of pairs as factors over the same noise; fast to differentiate.

    With standard normal e and e', x_k = m_k + S_k e and x_{k-1} = m_{k-1} + R_k e + s_k e'.

    Returns:
        The marginals N(m_k, S_k S_kᵀ), the factors R and the factors s.
    """
    if chain.standard is None:
        in_parallel = parallel or on_accelerator()
        if chain.state_dim > UNROLLED and not in_parallel:
            return _pairs_with_density(chain)
        terminal, kernels = _recursion(chain)
        marginals = _propagated(kernels, terminal, in_parallel)
    else:
        marginals = _recursion_marginals(chain, parallel)
    return _to_states(chain, marginals), *_pair_factors(chain, marginals)


def _pair_factors(chain: LinearGaussianChain, marginals: Gaussian) -> tuple[Array, Array]:
    """Return R and s of `pair_laws`, given the marginals in the coordinates of the recursion."""
    product = jax.vmap(linalg.matmul)
    _, kernels = _recursion(chain)
    reach, scale = product(kernels.gain, marginals.scale_tril[1:]), kernels.scale
    if chain.standard is None:
        return reach, scale
    frames = chain.laws.scale_tril[:-1]
    return product(frames, reach), product(frames, scale)


def _propagated(kernels: StandardKernel, terminal: Gaussian, parallel: Parallel) -> Gaussian:
    """Return the marginals of all states by propagating covariances; fast to differentiate.

    Covariances are factored after the recursion, for all times at once. Compared with a
    triangularisation in every step, a training step takes a third less time with one state
    dimension, and far less with ten. The result is accurate if no kernel is singular.
    """
    noise = (kernels.offset, jax.vmap(linalg.outer_gram)(kernels.scale))
    last = (terminal.mean, terminal.covariance)
    means, covariances = affine_moments(kernels.gain, noise, last, parallel)
    return jax.vmap(Gaussian)(means, jax.vmap(linalg.semidefinite_cholesky)(covariances))


def _pairs_with_density(chain: LinearGaussianChain) -> tuple[Gaussian, Array, Array]:
    """Compute `pair_laws` as `_propagated` does, for large states.

    Covariances are factored in the scan, which needs the factors of the pairs anyway. In batches of
    large matrices a second pass over all times takes longer than the arithmetic, and so does
    storing what the derivative can recompute.
    """
    terminal, kernels = chain.terminal, chain.kernels
    last = jnp.tril(terminal.scale_tril)

    @jax.checkpoint
    def back(law: tuple[Array, Array], step: tuple) -> tuple[tuple, tuple]:
        mean, scale = law
        gain, offset, noise = step
        reach = linalg.matmul(gain, scale)
        rows = jnp.concatenate([reach, noise], axis=1)
        scale = linalg.semidefinite_cholesky(linalg.matmul(rows, linalg.fence(rows.T)))
        mean = linalg.matvec(gain, mean) + offset
        return (mean, scale), (mean, scale, reach)

    steps = (kernels.weight, kernels.bias, kernels.scale_tril)
    _, (means, scales, reach) = lax.scan(back, (terminal.mean, last), steps, reverse=True)
    laws = jax.vmap(Gaussian)(
        jnp.concatenate([means, terminal.mean[None]]), jnp.concatenate([scales, last[None]])
    )
    return laws, reach, kernels.scale_tril


def _marginals_in_parallel(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    """Compose all backward kernels, with the terminal law as a constant map."""
    terminal, kernels = _recursion(chain)
    count = chain.num_times - 1
    if mesh_of(parallel) is not None or count < 3 * SETTLED_ROWS:
        return _propagated(kernels, terminal, parallel)
    end = _propagated(jax.tree.map(lambda leaf: leaf[-SETTLED_ROWS:], kernels), terminal, parallel)
    middle = end.scale_tril[0]

    def around_the_middle() -> Gaussian:
        means = affine_scan(
            kernels.gain, kernels.offset, terminal.mean, reverse=True, parallel=parallel
        )
        first = jax.tree.map(lambda leaf: leaf[:SETTLED_ROWS], kernels)
        start = _propagated(first, Gaussian(jnp.zeros_like(terminal.mean), middle), parallel)
        start = repeated_last(start.scale_tril[:-1], count - 2 * SETTLED_ROWS)
        return jax.vmap(Gaussian)(
            jnp.concatenate([means, terminal.mean[None]]),
            jnp.concatenate([start, end.scale_tril]),
        )

    # The scales of the middle are those of the last kernels, if these have settled.
    settled = has_settled(kernels.gain) & has_settled(kernels.scale)
    settled &= scales_agree(end.scale_tril[SETTLED_ROWS // 2], middle, roundings=64)
    return lax.cond(settled, around_the_middle, lambda: _propagated(kernels, terminal, parallel))


@eqx.filter_jit
def _pairwise(chain: LinearGaussianChain, parallel: Parallel) -> Gaussian:
    marginals = _recursion_marginals(chain, parallel)
    reach, scale = _pair_factors(chain, marginals)
    laws = _to_states(chain, marginals)
    past = jnp.concatenate([reach, scale], axis=2)
    present = jnp.concatenate([laws.scale_tril[1:], jnp.zeros_like(scale)], axis=2)
    rows = jnp.concatenate([past, present], axis=1)
    pairs = jnp.concatenate([laws.mean[:-1], laws.mean[1:]], axis=1)
    return jax.vmap(Gaussian)(pairs, jax.vmap(linalg.tria)(rows))


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
    paths = _paths_in_parallel(chain, noise, parallel) if parallel else _paths(chain, noise)
    if chain.standard is not None:
        scales = jax.vmap(linalg.matmul)(paths, jnp.swapaxes(chain.laws.scale_tril, -1, -2))
        paths = chain.laws.mean[:, None] + scales
    return jnp.swapaxes(paths, 0, 1)


def _paths(
    chain: LinearGaussianChain, noise: Float[Array, "time sample noise"]
) -> Float[Array, "time sample state"]:
    terminal, kernels = _recursion(chain)
    last = jax.vmap(terminal.from_noise)(noise[-1])

    def move(kernel: StandardKernel, x: Array, e: Array) -> Array:
        return linalg.matvec(kernel.gain, x) + kernel.offset + linalg.matvec(kernel.scale, e)

    def back(xs: Array, step: tuple[StandardKernel, Array]) -> tuple[Array, Array]:
        kernel, e = step
        xs = jax.vmap(move, in_axes=(None, 0, 0))(kernel, xs, e)
        return xs, xs

    _, rest = lax.scan(back, last, (kernels, noise[:-1]), reverse=True)
    return jnp.concatenate([rest, last[None]])


def _paths_in_parallel(
    chain: LinearGaussianChain, noise: Float[Array, "time sample noise"], parallel: Parallel
) -> Float[Array, "time sample state"]:
    """Compose all backward maps x ↦ G x + c + s ε, with the last state as a constant map."""
    terminal, (gains, offsets, scales) = _recursion(chain)
    zero = jnp.zeros((chain.state_dim, chain.state_dim), terminal.mean.dtype)

    def shift(bias: Array, scale: Array, e: Array) -> Array:
        return bias[:, None] + linalg.matmul(scale, e.T)

    shifts = jax.vmap(shift)(offsets, scales, noise[:-1])
    last = jax.vmap(terminal.from_noise)(noise[-1]).T
    paths = affine_suffix_paths(*appended((gains, shifts), (zero, last), parallel), parallel)
    return jnp.swapaxes(paths, 1, 2)


@eqx.filter_jit
def _log_prob(chain: LinearGaussianChain, path: Float[Array, "time state"]) -> Scalar:
    n, end = chain.num_times, -1
    if chain.length is not None:
        path = jnp.where((jnp.arange(n) < chain.length)[:, None], path, 0.0)
        end = chain.length - 1
    terminal, kernels = _recursion(chain)
    if chain.standard is not None:
        path = jax.vmap(linalg.solve_triangular)(chain.laws.scale_tril, path - chain.laws.mean)

    def step(kernel: StandardKernel, before: Array, after: Array) -> Scalar:
        mean = linalg.matvec(kernel.gain, after) + kernel.offset
        return Gaussian(mean, kernel.scale).log_prob(before)

    kernels, exists = _finite_kernels(chain, kernels)
    steps = jax.vmap(step)(kernels, path[:-1], path[1:])
    return (
        terminal.log_prob(path[end]) + jnp.sum(jnp.where(exists, steps, 0.0)) - _log_volume(chain)
    )


@eqx.filter_jit
def _entropy(chain: LinearGaussianChain) -> Scalar:
    terminal, kernels = _recursion(chain)
    kernels, exists = _finite_kernels(chain, kernels)
    # The derivative of `jnp.diagonal` scatters one entry after another.
    on_diagonal = jnp.eye(chain.state_dim, dtype=bool)
    pivots = jnp.sum(jnp.where(on_diagonal, kernels.scale, 0.0), axis=-1)
    steps = 0.5 * chain.state_dim * (1.0 + LOG_2PI) + jnp.sum(jnp.log(jnp.abs(pivots)), axis=-1)
    return terminal.entropy() + jnp.sum(jnp.where(exists, steps, 0.0)) + _log_volume(chain)


def _log_volume(chain: LinearGaussianChain) -> Scalar:
    """Return the log determinant of the map from standard coordinates to states, or 0 if none."""
    if chain.standard is None:
        return jnp.zeros((), chain.laws.mean.dtype)
    pivots = jnp.diagonal(chain.laws.scale_tril, axis1=-2, axis2=-1)
    volumes = jnp.sum(jnp.log(jnp.abs(pivots)), axis=-1)
    if chain.length is not None:
        volumes = jnp.where(jnp.arange(chain.num_times) < chain.length, volumes, 0.0)
    if chain.resolved is not None:
        volumes = jnp.where(chain.resolved, volumes, jnp.nan)
    return jnp.sum(volumes)


def _finite_kernels(
    chain: LinearGaussianChain, kernels: StandardKernel
) -> tuple[StandardKernel, Array]:
    """Return kernels with finite densities, and a mask of those between existing rows."""
    n, d = chain.num_times, chain.state_dim
    if chain.length is None:
        return kernels, jnp.ones(n - 1, bool)
    exists = jnp.arange(1, n) < chain.length
    eye = jnp.eye(d, dtype=kernels.scale.dtype)
    return kernels._replace(scale=jnp.where(exists[:, None, None], kernels.scale, eye)), exists
