"""Backward chains over regimes and states: mixtures whose components carry a regime.

The filtering law of time k is a mixture over components c, each with a regime z^c:

    q_k(z, x) = Σ_{c: z^c = z} w_c N(x; m_c, P_c).

A component moves to regime j with probability t_cj, and its state by N(F_cj x + b_cj, Q_cj). The
backward kernel is the reversal of this move, in closed form: with S = F P_c Fᵀ + Q and the gain G,

    q_{k-1|k}(c, x | z', x') ∝ w_c t_cz' N(x'; F m_c + b, S) N(x; m_c + G (x' − F m_c − b), P̃).

With one component per regime this is the chain of the Gaussian-sum filters and of the families,
with one per particle that of the Rao-Blackwellised particle filter, and without a state that of the
forward–backward algorithm.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key, where_rows
from retrodict._numerics import (
    linalg,
    prefix_scan,
)
from retrodict.particles import descend, uniforms
from retrodict.switching.mixture import Mixture, Moves
from retrodict.switching.model import prepare_regimes, prepare_states
from retrodict.switching.reversal import Reversed, reverse_moves

FEW_PAIRS = 256
"""The largest number of moves per step whose reversals are held in memory for all times."""


class SwitchingMarginals(eqx.Module):
    """Smoothed moments of regimes and states.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 3.0)],
        ... )
        >>> chain = rd.switching.forward_backward(model, jnp.array([[0.1], [2.5], [3.0]])).chain
        >>> moments = chain.marginals()
        >>> moments.regimes.tolist(), moments.pairs.shape
        ([0, 1, 1], (2, 2, 2))

    Attributes:
        probabilities: P(z_k = j), of shape `(time, regime)`.
        mean: E[x_k], of shape `(time, state)`.
        covariance: Cov[x_k], of shape `(time, state, state)`.
        pairs: P(z_{k-1} = i, z_k = j), of shape `(time-1, regime, regime)`.
        probabilities_standard_error: of the Monte Carlo average; zero if exact.
        mean_standard_error: of the Monte Carlo average; zero if exact.
    """

    probabilities: Float[Array, "time regime"]
    mean: Float[Array, "time state"]
    covariance: Float[Array, "time state state"]
    pairs: Float[Array, "time-1 regime regime"]
    probabilities_standard_error: Float[Array, "time regime"]
    mean_standard_error: Float[Array, "time state"]

    @property
    def regimes(self) -> Int[Array, "time"]:
        """The most probable regime of each time."""
        return jnp.argmax(self.probabilities, axis=-1)

    @property
    def std(self) -> Float[Array, "time state"]:
        """The standard deviation of each coordinate of the state."""
        return jnp.sqrt(jnp.diagonal(self.covariance, axis1=-2, axis2=-1))


class SwitchingTrace(NamedTuple):
    """Sampled paths of regimes and states, and the conditional moments along them.

    Attributes:
        zs: regimes.
        xs: states.
        probabilities: P(z_k | z_{k+1}, x_{k+1}) along each path.
        means: E[x_k | z_{k+1}, x_{k+1}].
        covariances: Cov[x_k | z_{k+1}, x_{k+1}].
    """

    zs: Int[Array, "sample time"]
    xs: Float[Array, "sample time state"]
    probabilities: Float[Array, "sample time regime"]
    means: Float[Array, "sample time state"]
    covariances: Float[Array, "sample time state state"]


class SwitchingChain(eqx.Module):
    """A law of paths of regimes and states that factorises backward in time.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 1.0)],
        ... )
        >>> chain = rd.switching.forward_backward(model, jnp.zeros((4, 1))).chain
        >>> zs, xs = chain.sample(jax.random.key(0), 8)
        >>> zs.shape, xs.shape, chain.log_prob(zs[0], xs[0]).shape
        ((8, 4), (8, 4, 0), ())

    Attributes:
        laws: the filtering laws.
        moves: the moves that the backward kernels reverse.
        length: the number of rows that exist; `None` if all of them do.
    """

    laws: Mixture
    moves: Moves
    length: Int[Array, ""] | None = None

    @property
    def num_times(self) -> int:
        """The number of rows, padding included."""
        shape = self.laws.log_weights.shape
        if len(shape) != 2:
            raise ValueError(
                f"This chain holds a batch of series: its weights have shape {shape}, where one"
                " series has (time, component). Call its methods under jax.vmap."
            )
        return shape[0]

    @property
    def num_regimes(self) -> int:
        """The number K of regimes."""
        return self.moves.log_probabilities.shape[-1]

    @property
    def state_dim(self) -> int:
        """The dimension of the state."""
        return self.laws.means.shape[-1]

    @property
    def filtered(self) -> Float[Array, "*batch time regime"]:
        """The probabilities of the regimes under the filtering laws."""
        if self.state_dim == 0:
            return jnp.exp(self.laws.log_weights)
        return self.laws.probabilities(self.num_regimes)

    @property
    def terminal(self) -> Mixture:
        """The law of the last time that exists."""
        end = self.num_times - 1 if self.length is None else self.length - 1
        return jax.tree.map(lambda leaf: leaf[end], self.laws)

    def prefix(self, num_times: int) -> "SwitchingChain":
        """Return the chain of the first rows, conditioned on the data of those rows only."""
        count = check_count(num_times, "num_times")
        if count > self.num_times:
            raise ValueError(
                f"`num_times` must be at most the number of rows ({self.num_times}), got {count}."
            )
        return SwitchingChain(
            jax.tree.map(lambda leaf: leaf[:count], self.laws),
            jax.tree.map(lambda leaf: leaf[: count - 1], self.moves),
            None if self.length is None else jnp.minimum(self.length, count),
        )

    def sample(
        self, key: PRNGKey, num_samples: int
    ) -> tuple[Int[Array, "sample time"], Float[Array, "sample time state"]]:
        """Draw paths of regimes and states, backward in time.

        Args:
            key: a typed key.
            num_samples: the number of paths.

        Returns:
            The regimes, of shape `(sample, time)`, and the states, of shape `(sample, time,
            state)`.
        """
        trace = self.trace(key, num_samples)
        return trace.zs, trace.xs

    def trace(self, key: PRNGKey, num_samples: int) -> SwitchingTrace:
        """Draw paths, and return the conditional moments along them as well."""
        check_key(key, "SwitchingChain.sample")
        return _trace(self, key, check_count(num_samples, "num_samples"))

    def log_prob(self, zs: Any, xs: Any = None) -> Scalar:
        """Compute the log density of one path of regimes and states.

        Args:
            zs: regimes, of shape `(time,)`.
            xs: states, of shape `(time, state)`; `None` without a continuous state.
        """
        zs = prepare_regimes(zs, self.num_regimes, self.num_times)
        return _log_prob(self, zs, prepare_states(xs, self.state_dim, zs, self.laws.means.dtype))

    def marginals(
        self, key: PRNGKey | None = None, *, num_samples: int = 200, parallel: bool = False
    ) -> SwitchingMarginals:
        """Compute smoothed probabilities of regimes and moments of states.

        Without a continuous state they are exact. Otherwise conditional probabilities and moments
        are averaged over sampled paths (Rao–Blackwell).

        Args:
            key: a typed key, for chains with a state.
            num_samples: the number of paths.
            parallel: whether to smooth in O(log n) rounds; without a continuous state only.
        """
        if self.state_dim == 0:
            return _finite_marginals(self, parallel)
        if key is None:
            raise ValueError("The marginals of a chain with a state are sampled: pass `key`.")
        check_key(key, "SwitchingChain.marginals")
        return sampled_marginals(self, self.trace(key, num_samples))


def _exists(chain: SwitchingChain) -> Any:
    """Return which backward kernels join existing rows; `None` if all rows exist."""
    return None if chain.length is None else jnp.arange(1, chain.num_times) < chain.length


def _all_reversed(chain: SwitchingChain) -> Reversed:
    """Reverse the moves of all times at once."""
    earlier = jax.tree.map(lambda leaf: leaf[:-1], chain.laws)
    return jax.vmap(reverse_moves)(earlier, chain.moves)


@eqx.filter_jit
def _trace(chain: SwitchingChain, key: PRNGKey, num_samples: int) -> SwitchingTrace:
    exists, count, dtype = _exists(chain), chain.num_regimes, chain.laws.means.dtype
    share_key, noise_key = jax.random.split(key)
    # The draws of all times at once: a scan would spend most of its time on keys.
    shares = uniforms(share_key, (chain.num_times, num_samples), dtype)
    noise = jax.random.normal(noise_key, (*shares.shape, chain.state_dim), dtype)
    few = chain.moves.log_probabilities[:1].size <= FEW_PAIRS
    kernels = _all_reversed(chain) if few else None

    def back(later: tuple, at: tuple) -> tuple[tuple, tuple]:
        k, moves, kernel, shares, noise, real = at
        # The laws of one row only: a copy of all but the last is as large as the chain.
        laws = jax.tree.map(lambda leaf: leaf[k], chain.laws)
        kernel = reverse_moves(laws, moves) if kernel is None else kernel
        z, x = later
        c = descend(kernel.shares(z, x), shares)[0]
        earlier = laws.regimes[c], kernel.draw(c, z, x, noise)
        if real is not None:
            earlier = jax.tree.map(lambda new, old: jnp.where(real, new, old), earlier, later)
        return earlier, (earlier, None if few else kernel.moments(laws.regimes, count, z, x))

    law = chain.terminal
    weights = jnp.broadcast_to(jnp.exp(law.log_weights)[:, None], (*law.regimes.shape, num_samples))
    c = descend(weights, shares[-1])[0]
    last = law.regimes[c], law.means[c] + jax.vmap(linalg.matvec)(law.scale_trils[c], noise[-1])
    steps = jnp.arange(chain.num_times - 1)
    rows = (steps, chain.moves, kernels, shares[:-1], noise[:-1], exists)
    _, (before, moments) = lax.scan(back, last, rows, reverse=True)
    zs, xs = jax.tree.map(lambda head, end: jnp.concatenate([head, end[None]]), before, last)
    if kernels is not None:
        moments = jax.vmap(lambda kernel, regimes, z, x: kernel.moments(regimes, count, z, x))(
            kernels, chain.laws.regimes[:-1], zs[1:], xs[1:]
        )
    ends = (law.probabilities(count), law.mean, law.covariance)

    def completed(rows: Array, end: Array) -> Array:
        end = jnp.broadcast_to(end, (1, num_samples, *end.shape))
        if exists is not None:
            rows = where_rows(exists, rows, end)
        return jnp.concatenate([rows, end])

    rows = (zs, xs, *(completed(*pair) for pair in zip(moments, ends, strict=True)))
    return SwitchingTrace(*(jnp.swapaxes(leaf, 0, 1) for leaf in rows))


@eqx.filter_jit
def _log_prob(chain: SwitchingChain, zs: Array, xs: Array) -> Scalar:
    exists, terminal = _exists(chain), chain.terminal
    end = chain.num_times - 1 if chain.length is None else chain.length - 1
    if exists is not None:
        inside = jnp.concatenate([jnp.ones(1, bool), exists])
        zs, xs = jnp.where(inside, zs, zs[end]), jnp.where(inside[:, None], xs, xs[end])

    def step(total: Scalar, at: tuple) -> tuple[Scalar, None]:
        laws, moves, z, x, z_next, x_next, real = at
        value = reverse_moves(laws, moves).into(z_next).law(x_next, laws.regimes).log_prob(z, x)
        return total + (value if real is None else jnp.where(real, value, 0.0)), None

    last = terminal.log_prob(zs[end], xs[end])
    earlier = jax.tree.map(lambda leaf: leaf[:-1], chain.laws)
    rows = (earlier, chain.moves, zs[:-1], xs[:-1], zs[1:], xs[1:], exists)
    return lax.scan(step, last, rows)[0]


def _finite_kernel(
    log_law: Float[Array, "regime"],
    log_move: Float[Array, "regime regime"],
    move: Float[Array, "regime regime"],
) -> Float[Array, "regime regime"]:
    """Return P(z_k = i | z_{k+1} = j), with one column per later regime.

    Where all probabilities of a column underflow, the largest of them take all of the mass.
    """
    joint = jnp.exp(log_law)[:, None] * move
    info = jnp.finfo(joint.dtype)
    log_joint = log_law[:, None] + log_move
    largest = log_joint == jnp.max(log_joint, axis=0)[None]
    precise = jnp.sum(joint, axis=0) > info.tiny / info.eps
    masses = jnp.where(precise[None], joint, largest.astype(joint.dtype))
    return masses / jnp.sum(masses, axis=0)[None]


@eqx.filter_jit
def _finite_marginals(chain: SwitchingChain, parallel: bool) -> SwitchingMarginals:
    """Return the exact marginals of a chain without a continuous state."""
    exists, terminal = _exists(chain), jnp.exp(chain.terminal.log_weights)
    same = jnp.eye(chain.num_regimes, dtype=terminal.dtype)

    def kernel(log_law: Array, log_move: Array, move: Array, real: Any) -> Array:
        reversal = _finite_kernel(log_law, log_move, move)
        return reversal if real is None else jnp.where(real, reversal, same)

    log_moves = chain.moves.log_probabilities
    steps = (chain.laws.log_weights[:-1], log_moves, jnp.exp(log_moves), exists)
    kernels = jax.vmap(kernel)(*steps)
    if parallel and chain.num_times > 1:
        products = prefix_scan(lambda a, b: linalg.matmul(b, a), kernels, same, reverse=True)
        earlier = jax.vmap(linalg.matvec, in_axes=(0, None))(products, terminal)
    else:

        def back(later: Array, step: tuple) -> tuple[Array, Array]:
            # Recomputed at each step, since kernels of all times need more memory than time.
            earlier = jnp.sum(kernel(*step) * later[None, :], axis=1)
            return earlier, earlier

        _, earlier = lax.scan(back, terminal, steps, reverse=True)
    probabilities = jnp.concatenate([earlier, terminal[None]])
    pairs = kernels * probabilities[1:, None, :]
    n = chain.num_times
    empty = jnp.zeros((n, 0), probabilities.dtype)
    return SwitchingMarginals(
        probabilities,
        empty,
        jnp.zeros((n, 0, 0), probabilities.dtype),
        pairs,
        jnp.zeros_like(probabilities),
        empty,
    )


@eqx.filter_jit
def sampled_marginals(chain: SwitchingChain, trace: SwitchingTrace) -> SwitchingMarginals:
    """Return averages of the conditional moments along sampled paths."""
    count = trace.zs.shape[0]
    mean = jnp.mean(trace.means, axis=0)
    shifts = trace.means - mean[None]
    between = jnp.einsum("sti,stj->tij", shifts, shifts) / count
    later = jax.nn.one_hot(trace.zs[:, 1:], chain.num_regimes, dtype=mean.dtype)
    pairs = jnp.einsum("sti,stj->tij", trace.probabilities[:, :-1], later) / count
    error = 1.0 / jnp.sqrt(jnp.maximum(count - 1, 1))
    return SwitchingMarginals(
        jnp.mean(trace.probabilities, axis=0),
        mean,
        jnp.mean(trace.covariances, axis=0) + between,
        pairs,
        error * jnp.std(trace.probabilities, axis=0),
        error * jnp.std(trace.means, axis=0),
    )
