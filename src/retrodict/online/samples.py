"""Statistics T_k at draws of the filtering laws, for any functional and any backward kernel.

New draws ξ_k^i of q_k take over the statistic of the previous draws,

    T_k(ξ_k^i) = Σ_j ω_ij [T_{k-1}(ξ_{k-1}^j) + h_k(ξ_{k-1}^j, ξ_k^i)],

where the weights ω_i· represent the backward kernel q_{k-1|k}(ξ_k^i, ·). Draws ξ^j of q_{k-1} do so
with the weights

    w_j(x) = q_{k-1|k}(x, ξ^j) / q_{k-1}(ξ^j),

for E_{q_{k-1}}[w(x) f] = E_{q_{k-1|k}(x, ·)}[f]. The mean of w_j(x) f(ξ^j) is unbiased; divided by
the mean of the weights, which has expectation one, it is consistent and usually less variable. For
the lower bound

    h_k = log m(x_{k-1}, x_k) g_k(x_k) + log q_{k-1}(x_{k-1}) − log q_k(x_k)
          − log q_{k-1|k}(x_k, x_{k-1}),

which does not vary at all under the exact posterior: any number of draws then gives the
log-evidence.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count
from retrodict._expectations import AbstractPairTerm, AbstractStateTerm
from retrodict._families import AbstractFamily, AbstractSampledFamily
from retrodict._model import LOG_2PI, LinearGaussianKernel, scale_log_det
from retrodict.online.quantities import Quantities, RowFactors, Sums
from retrodict.particles import (
    LOG2_E,
    AbstractBackwardSampler,
    BackwardWeights,
    ExactBackward,
    RejectionBackward,
    average_over_all,
    average_over_draws,
    plus,
    sum_of_terms,
)

BackwardLaw: TypeAlias = Callable[[PyTree, Array], Any]
"""The law q_{k-1|k}(x, ·) from the parameters of its row and the state x."""

TILE = 2**18
"""The number of pairs of draws that are weighted at once."""


class WeightedSamples(eqx.Module):
    """Statistics at draws of the filtering laws, weighted as draws of backward kernels.

    At each row N new draws ξ_k^i of q_k take over the statistics of the previous draws, with
    weights ω_ij ∝ q_{k-1|k}(ξ_k^i, ξ_{k-1}^j) / q_{k-1}(ξ_{k-1}^j): at a cost of N² weights per
    row, or from a few draws of the index j for each i, as PaRIS does for particle filters.

    With `normalised=False` the weights w_ij are not divided by their sum, which makes the estimates
    exactly unbiased: T_k(ξ_k^i) is the mean over j of w_ij (a_ij − b_ij) + b_ij, where a_ij is what
    is averaged and b_ij the weighted mean of all others, which keeps the variance of the weights
    out of the estimate and, not depending on ξ_{k-1}^j, its expectation right. It pays only if
    the weights are nearly equal: in many dimensions its variance is far larger.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.models.local_level(prior_scale=1.0)
        >>> method = rd.online.WeightedSamples(num_samples=16, num_replicates=2)
        >>> running = rd.online.RunningPosterior(rd.KalmanFamily(model), model, method=method)
        >>> ys = jnp.array([[1.0], [2.0], [4.0]])
        >>> state, rows = running.scan(running.init(jax.random.key(0)), ys)
        >>> rows.elbo.shape
        (3,)

    Args:
        num_samples: N, the number of draws per filtering law.
        num_draws: the number of indices per draw, at least two; `None` for all of them.
        normalised: whether weights are divided by their sum: a bias of order 1/N, and less
            variance.
        num_replicates: the number of independent sets of draws, whose spread is the standard error;
            with one it is unavailable. A bias of order 1/N is not part of it.
        backward: the sampler of indices, `ExactBackward()` or `RejectionBackward()`; by default the
            latter under linear-Gaussian kernels, where its cost is linear in N as long as kernels
            are not much narrower than filtering laws.
    """

    num_samples: int = eqx.field(static=True)
    num_draws: int | None = eqx.field(static=True, default=None)
    normalised: bool = eqx.field(static=True, default=True, kw_only=True)
    num_replicates: int = eqx.field(static=True, default=8, kw_only=True)
    backward: AbstractBackwardSampler | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self) -> None:
        if check_count(self.num_samples, "num_samples") < 2:
            raise ValueError(
                "WeightedSamples compares draws with each other: num_samples must be at least 2,"
                f" got {self.num_samples}."
            )
        check_count(self.num_replicates, "num_replicates")
        if self.num_draws is not None:
            if check_count(self.num_draws, "num_draws") < 2:
                raise ValueError(
                    "WeightedSamples expects num_draws of at least 2, got 1: with one draw all"
                    " statistics soon descend from a few."
                )
            if not self.normalised:
                raise ValueError(
                    "Indices are drawn with normalised weights. For unbiased estimates use"
                    " WeightedSamples(num_samples, normalised=False)."
                )
        elif self.backward is not None:
            raise ValueError("backward is the sampler of indices: pass num_draws as well.")
        kinds = (ExactBackward, RejectionBackward)
        if self.backward is not None and not isinstance(self.backward, kinds):
            raise TypeError(
                "WeightedSamples expects ExactBackward() or RejectionBackward() as its backward"
                f" sampler, got {type(self.backward).__name__}: its draws have no ancestors."
            )


class SampleStatistics(eqx.Module):
    """The draws of the last row, and their statistics less the mean.

    Attributes:
        samples: draws ξ_k^i of q_k.
        values: T_k at each of them.
    """

    samples: Float[Array, "... sample state"]
    values: Sums


class _Backward(NamedTuple):
    """The densities of a backward kernel of any form."""

    law_of: BackwardLaw
    step: PyTree

    def log_prob(self, x: Array, value: Array, u: None) -> Scalar:
        return self.law_of(self.step, x).log_prob(value)


class SampledRecursion(NamedTuple):
    """The recursion over draws, for all replicates at once.

    Attributes:
        method: the number of draws, and their weights.
        law_of: the backward kernels, from `backward_law`.
        quantities: the lower bound and functionals to compute.
    """

    method: WeightedSamples
    law_of: BackwardLaw
    quantities: Quantities

    def start(self, at: RowFactors, key: PRNGKey) -> tuple[SampleStatistics, Sums, Scalar]:
        """Return the statistics after the first row, their means, and the number of draws."""
        count = self.method.num_samples

        def one(key: PRNGKey) -> tuple[SampleStatistics, Sums]:
            xs = draw(at.law, key, count)
            values = self.quantities.map(
                lambda h, data: jax.vmap(lambda x: h.initial(x, data))(xs), at.data
            )
            return _centred(xs, values.less(jax.vmap(at.law.log_prob)(xs)))

        statistics, means = jax.vmap(one)(jax.random.split(key, self.method.num_replicates))
        return statistics, means, jnp.full((), count, statistics.samples.dtype)

    def advance(
        self, statistics: SampleStatistics, at: RowFactors, key: PRNGKey
    ) -> tuple[SampleStatistics, Sums, Scalar]:
        """Return the next statistics, the increments of their means, and the ess of the weights."""

        def one(before: SampleStatistics, key: PRNGKey) -> tuple[SampleStatistics, Sums, Array]:
            law_key, draw_key = jax.random.split(key)
            xs = draw(at.law, law_key, self.method.num_samples)
            # Terms of x_k alone need no expectation.
            here = self.quantities.map(
                lambda h, data: jax.vmap(lambda x: sum_of_terms(h, AbstractStateTerm, x, data))(xs),
                at.data,
            )
            here = here.less(jax.vmap(at.law.log_prob)(xs))
            carried, ess = self._carried(before, at, xs, draw_key)
            return *_centred(xs, plus(here, carried)), ess

        keys = jax.random.split(key, self.method.num_replicates)
        after, means, ess = jax.vmap(one)(statistics, keys)
        return after, means, jnp.mean(ess)

    def estimate(self, totals: Sums) -> tuple[Sums, Sums]:
        """Return the mean over replicates and its standard error."""
        count = self.method.num_replicates

        def error(leaf: Array) -> Array:
            if count == 1:
                return jnp.full_like(leaf[0], jnp.nan)
            return jnp.std(leaf, axis=0, ddof=1) / math.sqrt(count)

        means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), totals)
        return means, jax.tree.map(error, totals)

    def _carried(
        self,
        before: SampleStatistics,
        at: RowFactors,
        xs: Float[Array, "sample state"],
        key: PRNGKey,
    ) -> tuple[Sums, Scalar]:
        """Return the expectation of T_{k-1} and of the pair terms, and the mean ess."""
        befores, num_draws = before.samples, self.method.num_draws

        def increment(b: Array, x: Array, log_weight: Scalar) -> Sums:
            pairs = self.quantities.map(
                lambda h, data: sum_of_terms(h, AbstractPairTerm, b, x, data), at.data
            )
            return pairs.less(log_weight)

        if num_draws is None:
            values, ess = average_over_all(
                before.values,
                increment,
                lambda x: log_weights(self.law_of, at.before, at.step, x[None], befores)[0],
                befores,
                xs,
                TILE,
                jax.nn.softmax if self.method.normalised else _unbiased_weights,
            )
            return values, jnp.mean(ess)

        def corrected_increment(b: Array, x: Array) -> Sums:
            return increment(b, x, self.law_of(at.step, x).log_prob(b) - at.before.log_prob(b))

        xs = jnp.repeat(xs, num_draws, axis=0)
        chosen = self._indices(at, befores, xs, key)
        values = average_over_draws(
            before.values, corrected_increment, befores, xs, chosen, num_draws
        )
        return values, jnp.full((), jnp.nan, xs.dtype)

    def _indices(
        self,
        at: RowFactors,
        befores: Float[Array, "sample state"],
        xs: Float[Array, "draw state"],
        key: PRNGKey,
    ) -> Int[Array, "draw"]:
        """Draw one index per state, with the weights of `log_weights`.

        These are the backward draws of a particle smoother whose particles have weights 1/q_{k-1}
        and whose transition density, read from the state back to the particle, is the backward
        kernel.
        """
        linear = isinstance(at.step, LinearGaussianKernel)
        sampler = self.method.backward
        if sampler is None:
            sampler = RejectionBackward() if linear else ExactBackward()
        kernel = at.step if linear else _Backward(self.law_of, at.step)
        pairs = BackwardWeights.of(kernel, None, befores, reverse=True)
        log_proposal = jax.nn.log_softmax(-jax.vmap(at.before.log_prob)(befores))
        start_key, draw_key = jax.random.split(key)
        # If all weights vanish, any draw is used.
        fallback = jax.random.randint(start_key, (xs.shape[0],), 0, befores.shape[0])
        return sampler.draw(draw_key, pairs, log_proposal, xs, fallback)


def draw(law: Any, key: PRNGKey, count: int) -> Float[Array, "sample state"]:
    """Draw states from a law."""
    noise = jax.random.normal(key, (count, law.noise_dim), law.mean.dtype)
    return jax.vmap(law.from_noise)(noise)


def backward_law(family: AbstractFamily) -> BackwardLaw:
    """Return the backward kernels of a family as a function of the step of `read` and of x_k.

    Args:
        family: an unwrapped family.
    """
    if isinstance(family, AbstractSampledFamily):
        return family.shared().law
    return LinearGaussianKernel.law


def log_weights(
    law_of: BackwardLaw,
    before: Any,
    step: PyTree,
    xs: Float[Array, "now state"],
    befores: Float[Array, "before state"],
) -> Float[Array, "now before"]:
    """Return log q_{k-1|k}(x_k^i, x_{k-1}^j) − log q_{k-1}(x_{k-1}^j) of all pairs.

    They are not normalised: the mean of exp(·) over draws x_{k-1}^j of q_{k-1} has expectation one.

    Args:
        law_of: the backward kernels, from `backward_law`.
        before: the filtering law q_{k-1}.
        step: the parameters of the kernel q_{k-1|k}.
        xs: states of time k.
        befores: states of time k-1.
    """
    log_before = jax.vmap(before.log_prob)(befores)
    if isinstance(step, LinearGaussianKernel):
        pairs = BackwardWeights.of(step, None, befores, reverse=True)
        constant = 0.5 * xs.shape[1] * LOG_2PI + scale_log_det(step.scale_tril)
        return pairs.matrix(pairs.prepare(xs)).T / LOG2_E - constant - log_before[None]
    return jax.vmap(lambda x: jax.vmap(law_of(step, x).log_prob)(befores) - log_before)(xs)


def _centred(xs: Float[Array, "sample state"], values: Sums) -> tuple[SampleStatistics, Sums]:
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values)
    around = jax.tree.map(lambda leaf, mean: leaf - mean[None], values, means)
    return SampleStatistics(xs, around), means


def _unbiased_weights(logs: Float[Array, "before"]) -> Float[Array, "before"]:
    """Return weights of the previous draws whose averages are unbiased.

    With a_j what is averaged, w_j the weights, S their sum and b_j = Σ_{l≠j} w_l a_l / (S − w_j),

        (1/N) Σ_j [w_j (a_j − b_j) + b_j] = Σ_l a_l (w_l/N) [1 + Σ_{j≠l} (1 − w_j) / (S − w_j)].

    These sum to one over l. The largest weight is treated separately, since subtracting it from S
    cancels.
    """
    count = logs.shape[0]
    weights = jnp.exp(logs)
    largest = jnp.arange(count) == jnp.argmax(logs)
    rest = jnp.where(largest, 1.0, jnp.sum(weights) - weights)
    ratios = jnp.where(largest, 0.0, (1.0 - weights) / rest)
    others = jax.nn.softmax(jnp.where(largest, -jnp.inf, logs))
    terms = weights * (1.0 + jnp.sum(ratios) - ratios)
    return (terms + (1.0 - jnp.exp(jnp.max(logs))) * others) / count
