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

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key, where_rows
from retrodict._model import LOG_2PI
from retrodict._numerics import (
    GaussianLaw,
    gram,
    inverse_cholesky,
    linalg,
    nonsingular_law,
    prefix_scan,
)
from retrodict.particles import descend, uniforms
from retrodict.switching.model import prepare_regimes, prepare_states

T = TypeVar("T")

FEW_PAIRS = 256
"""The largest number of moves per step whose reversals are held in memory for all times."""


class Mixture(eqx.Module):
    """The filtering laws q_k: mixtures whose components carry a regime.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> law = rd.switching.Mixture(
        ...     jnp.log(jnp.array([0.25, 0.75])), jnp.zeros((2, 1)), jnp.ones((2, 1, 1)),
        ...     jnp.array([0, 1]),
        ... )
        >>> law.probabilities(2).round(2).tolist(), law.covariance.tolist()
        ([0.25, 0.75], [[1.0]])

    Attributes:
        log_weights: log w, of shape `(time, component)`, normalised at each time.
        means: m, of shape `(time, component, state)`.
        scale_trils: lower Cholesky factors of P, of shape `(time, component, state, state)`.
        regimes: the regime of each component, of shape `(time, component)`.
    """

    log_weights: Float[Array, "*time component"]
    means: Float[Array, "*time component state"]
    scale_trils: Float[Array, "*time component state state"]
    regimes: Int[Array, "*time component"]

    def probabilities(self, num_regimes: int) -> Float[Array, "*time regime"]:
        """Return the probability of each regime."""
        members = jax.nn.one_hot(self.regimes, num_regimes, dtype=self.log_weights.dtype)
        return jnp.einsum("...c,...cj->...j", jnp.exp(self.log_weights), members)

    def log_prob(self, z: Int[Array, ""], x: Float[Array, "state"]) -> Scalar:
        """Return log q(z, x) of one time."""
        terms = jax.vmap(log_normal, in_axes=(None, 0, 0))(x, self.means, self.scale_trils)
        return jax.nn.logsumexp(self.log_weights + terms, where=self.regimes == z)

    @property
    def mean(self) -> Float[Array, "*time state"]:
        """The mean of the state, over all regimes."""
        return jnp.einsum("...c,...cd->...d", jnp.exp(self.log_weights), self.means)

    @property
    def covariance(self) -> Float[Array, "*time state state"]:
        """The covariance of the state, over all regimes."""
        shifts = self.means - self.mean[..., None, :]
        weights, scales = jnp.exp(self.log_weights), self.scale_trils
        within = jnp.einsum("...c,...cij,...ckj->...ik", weights, scales, scales)
        return within + jnp.einsum("...c,...ci,...cj->...ij", weights, shifts, shifts)


class Moves(eqx.Module):
    """How the components of one time move to the regimes of the next.

    The axis `source` has one entry per component, or a single one if all components of a time move
    alike.

    Example:
        A chain of two rows and one regime, which is a random walk:

        >>> import jax.numpy as jnp, retrodict as rd
        >>> laws = rd.switching.Mixture(
        ...     jnp.zeros((2, 1)), jnp.zeros((2, 1, 1)), jnp.ones((2, 1, 1, 1)),
        ...     jnp.zeros((2, 1), int),
        ... )
        >>> one = jnp.ones((1, 1, 1, 1, 1))
        >>> moves = rd.switching.Moves(jnp.zeros((1, 1, 1)), one, 0 * one[..., 0], one)
        >>> chain = rd.switching.SwitchingChain(laws, moves)
        >>> print(round(float(chain.log_prob(jnp.array([0, 0]), jnp.zeros((2, 1)))), 3))
        -1.491

    Attributes:
        log_probabilities: log t, of shape `(time-1, component, regime)`.
        weights: F, of shape `(time-1, source, regime, state, state)`.
        biases: b, of shape `(time-1, source, regime, state)`.
        scale_trils: lower factors of Q, of shape `(time-1, source, regime, state, state)`.
        origins: the law of the state of a component that moves to each regime, with axes
            `(time-1, component, regime)`; `None` if it is the law of the component, as where the
            regimes do not depend on the state.
    """

    log_probabilities: Float[Array, "*time component regime"]
    weights: Float[Array, "*time source regime state state"]
    biases: Float[Array, "*time source regime state"]
    scale_trils: Float[Array, "*time source regime state state"]
    origins: GaussianLaw | None = None

    def sources(self, laws: Mixture) -> tuple[GaussianLaw, int | None]:
        """Return the laws of the states that move, and their axis `regime`; `None` without one.

        Args:
            laws: the filtering laws of one time.
        """
        if self.origins is None:
            return GaussianLaw(laws.means, laws.scale_trils), None
        return self.origins, 0


class Reversed(NamedTuple):
    """The moves of one time, reversed: for each component c and later regime j.

    Attributes:
        log_weights: log (w_c t_cj), of shape `(component, regime)`.
        predicted: F m + b.
        whitener: the lower k with kᵀk the inverse of F P Fᵀ + Q.
        gain: G.
        offset: the mean of x is G x' + offset.
        scale_tril: the lower factor of the covariance of x given x'.
    """

    log_weights: Float[Array, "component regime"]
    predicted: Float[Array, "component regime state"]
    whitener: Float[Array, "component regime state state"]
    gain: Float[Array, "component regime state state"]
    offset: Float[Array, "component regime state"]
    scale_tril: Float[Array, "component regime state state"]

    def shares(
        self, zs: Int[Array, "sample"], xs: Float[Array, "sample state"]
    ) -> Float[Array, "component sample"]:
        """Return the probability of each component, given later regimes and states."""
        shifts = -jax.vmap(jax.vmap(linalg.matvec))(self.whitener, self.predicted)

        def logs(constants: Array, whitener: Array, shift: Array) -> Array:
            white = _affine(whitener, shift, xs)
            start = jnp.broadcast_to(constants[:, None], (*constants.shape, *zs.shape))
            return linalg.sum_of([start, *(-0.5 * entry**2 for entry in white)])

        return jax.nn.softmax(_by_regime(logs, zs, self.constants, self.whitener, shifts), axis=0)

    @property
    def constants(self) -> Float[Array, "component *regime"]:
        """The log weights of the moves, with the constants of the densities of x'."""
        pivots = jnp.diagonal(self.whitener, axis1=-2, axis2=-1)
        return self.log_weights + jnp.sum(jnp.log(pivots) - 0.5 * LOG_2PI, axis=-1)

    def draw(
        self,
        c: Int[Array, "sample"],
        zs: Int[Array, "sample"],
        xs: Float[Array, "sample state"],
        noise: Float[Array, "sample state"],
    ) -> Float[Array, "sample state"]:
        """Draw earlier states of these components, given later regimes and states."""
        matvec = jax.vmap(linalg.matvec)
        gain, offset, scale = (leaf[c, zs] for leaf in (self.gain, self.offset, self.scale_tril))
        return matvec(gain, xs) + offset + matvec(scale, noise)

    def moments(
        self,
        regimes: Int[Array, "component"],
        num_regimes: int,
        zs: Int[Array, "sample"],
        xs: Float[Array, "sample state"],
    ) -> tuple[
        Float[Array, "sample regime"],
        Float[Array, "sample state"],
        Float[Array, "sample state state"],
    ]:
        """Return the moments of the earlier regime and state, given the later ones."""
        weights = self.shares(zs, xs)
        members = jax.nn.one_hot(regimes, num_regimes, dtype=weights.dtype)
        probabilities = jnp.einsum("cs,cj->sj", weights, members, precision="highest")
        if not xs.shape[1]:
            return probabilities, xs, xs[:, :, None] * xs[:, None]
        means = _by_regime(lambda g, b: _affine(g, b, xs), zs, self.gain, self.offset)
        mean = [jnp.sum(weights * entry, axis=0) for entry in means]
        shifts = [entry - average[None] for entry, average in zip(means, mean, strict=True)]

        def within(scales: Array) -> list[list[Array]]:
            covariances = jax.vmap(linalg.outer_gram)(scales)[..., None]
            like = (weights.shape[0], zs.shape[0])
            return [
                [jnp.broadcast_to(covariances[:, i, j], like) for j in range(i + 1)]
                for i in range(len(means))
            ]

        lower = [
            [
                jnp.sum(weights * (entry + a * b), axis=0)
                for entry, b in zip(row, shifts[: i + 1], strict=True)
            ]
            for i, (row, a) in enumerate(
                zip(_by_regime(within, zs, self.scale_tril), shifts, strict=True)
            )
        ]
        covariance = jnp.array(
            [[lower[max(i, j)][min(i, j)] for j in range(len(mean))] for i in range(len(mean))]
        )
        return probabilities, jnp.stack(mean, axis=-1), jnp.moveaxis(covariance, -1, 0)

    def into(self, z: Int[Array, ""]) -> "Reversed":
        """Return the moves into one regime, without the axis `regime`."""
        return jax.tree.map(lambda leaf: leaf[:, z], self)

    def log_joint(self, x: Float[Array, "state"]) -> Float[Array, "component"]:
        """Return the log density of each component and x', for the regime that `into` took."""
        white = jax.vmap(linalg.matvec)(self.whitener, x[None] - self.predicted)
        return self.constants - 0.5 * jnp.sum(white**2, axis=-1)

    def log_posterior(self, x: Float[Array, "state"]) -> Float[Array, "component"]:
        """Return the log weight of each component, given x' and the regime that `into` took."""
        return jax.nn.log_softmax(self.log_joint(x))

    def law(self, x: Float[Array, "state"], regimes: Int[Array, "component"]) -> Mixture:
        """Return the law of the earlier regime and state, given the later regime and state x'."""
        means = jnp.einsum("cij,j->ci", self.gain, x, precision="highest") + self.offset
        return Mixture(self.log_posterior(x), means, self.scale_tril, regimes)


def _affine(
    weights: Float[Array, "component out state"],
    offsets: Float[Array, "component out"],
    xs: Float[Array, "sample state"],
) -> list[Float[Array, "component sample"]]:
    """Return each coordinate of w_c x_s + b_c, as a matrix of components and samples.

    Separate coordinates fuse with what follows, in loops over samples: a fifteenth of the time of
    one array with an axis of two coordinates.
    """
    dim = xs.shape[1]

    def coordinate(weight: Array, offset: Array) -> Array:
        if dim > linalg.UNROLLED:
            return jnp.matmul(weight, xs.T, precision="highest") + offset[:, None]
        terms = [weight[:, i, None] * xs[None, :, i] for i in range(dim)]
        return linalg.sum_of([offset[:, None], *terms])

    return [coordinate(weights[:, i], offsets[:, i]) for i in range(dim)]


def _by_regime(fn: Callable[..., T], zs: Int[Array, "sample"], *leaves: Array) -> T:
    """Return the entries of fn(leaves of regime z_s) for each sample s, its last axis.

    Selecting between the regimes takes a fortieth of the time of gathering the leaves of each
    sample, for 10,000 components, 3 regimes and 100 samples.

    Args:
        fn: a function of the leaves of one regime to arrays whose last axis is `sample`.
        zs: the regimes.
        *leaves: arrays of shape `(component, regime, ...)`.
    """
    by_regime = tuple(jnp.moveaxis(leaf, 1, 0) for leaf in leaves)

    def choose(values: T, at: tuple) -> tuple[T, None]:
        j, leaves = at

        def select(new: Array, old: Array) -> Array:
            return jnp.where(jnp.broadcast_to(zs == j, old.shape), new, old)

        return jax.tree.map(select, fn(*leaves), values), None

    first = fn(*(leaf[0] for leaf in by_regime))
    rest = (jnp.arange(1, by_regime[0].shape[0]), tuple(leaf[1:] for leaf in by_regime))
    return lax.scan(choose, first, rest, unroll=8)[0]


def reverse_moves(laws: Mixture, moves: Moves) -> Reversed:
    """Reverse the moves out of one time under its filtering law; the arrays have no axis `time`."""
    count, num_regimes = moves.log_probabilities.shape
    weights = laws.log_weights[:, None] + moves.log_probabilities
    if laws.means.shape[-1] == 0:
        empty = jnp.zeros((count, num_regimes, 0), weights.dtype)
        square = empty[..., None, :][..., :0, :]
        return Reversed(weights, empty, square, square, empty, square)

    def reverse(mean: Array, scale: Array, weight: Array, bias: Array, noise: Array) -> tuple:
        predicted = linalg.matvec(weight, mean) + bias
        spread = gram(linalg.matmul(weight, scale)) + linalg.outer_gram(noise)
        back = nonsingular_law.reverse(mean, scale, weight, bias, noise)
        return predicted, inverse_cholesky(spread), *back

    origins, axis = moves.sources(laws)
    over_targets = jax.vmap(reverse, in_axes=(axis, axis, 0, 0, 0))
    shared = moves.weights.shape[0] == 1
    over_sources = jax.vmap(over_targets, in_axes=(0, 0, *([None if shared else 0] * 3)))
    kernels = (moves.weights, moves.biases, moves.scale_trils)
    if shared:
        kernels = tuple(leaf[0] for leaf in kernels)
    return Reversed(weights, *over_sources(*origins, *kernels))


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


def log_normal(x: Float[Array, "d"], mean: Float[Array, "d"], scale: Float[Array, "d d"]) -> Scalar:
    """Return log N(x; m, s sᵀ); zero without coordinates."""
    if not x.shape[0]:
        return jnp.zeros((), mean.dtype)
    white = linalg.solve_triangular(scale, x - mean)
    return jnp.sum(-0.5 * (white**2 + LOG_2PI) - jnp.log(jnp.diagonal(scale)))


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
