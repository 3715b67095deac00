"""Statistics T_k at draws of the filtering laws, for any functional and any backward kernel.

New draws ξ_k^i of q_k take over the statistic of the previous draws,

    T_k(ξ_k^i) = Σ_j ω_ij [T_{k-1}(ξ_{k-1}^j) + h_k(ξ_{k-1}^j, ξ_k^i)],

where the weights ω_i· represent the backward kernel q_{k-1|k}(ξ_k^i, ·): see `weights`. For the
lower bound

    h_k = log m(x_{k-1}, x_k) g_k(x_k) + log q_{k-1}(x_{k-1}) − log q_k(x_k)
          − log q_{k-1|k}(x_k, x_{k-1}),

which does not vary at all under the exact posterior: any number of draws then gives the
log-evidence.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._expectations import (
    AbstractFunctional,
    AbstractPairTerm,
    AbstractStateTerm,
    LogJoint,
    add,
)
from retrodict._kernels import AbstractKernel, LinearGaussianKernel
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count
from retrodict.online.followed import Arrival, Followed, Sums
from retrodict.online.weights import BackwardLaw, log_weights
from retrodict.particles import AbstractBackwardSampler, ExactBackward, Pairs, RejectionBackward

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


class SampledRecursion(NamedTuple):
    """The recursion over draws, for all replicates at once.

    Attributes:
        method: the number of draws, and their weights.
        law_of: the backward kernels, from `backward_law`.
        followed: the lower bound and functionals to compute.
    """

    method: WeightedSamples
    law_of: BackwardLaw
    followed: Followed

    def start(self, at: Arrival, key: PRNGKey) -> tuple[SampleStatistics, Sums, Scalar]:
        """Return the statistics after the first row, their means, and the number of draws."""
        count = self.method.num_samples

        def one(key: PRNGKey) -> tuple[SampleStatistics, Sums]:
            xs = _draw(at.law, key, count)
            return _centred(xs, _at_first(self.followed, at, xs))

        statistics, means = jax.vmap(one)(jax.random.split(key, self.method.num_replicates))
        return statistics, means, jnp.full((), count, statistics.samples.dtype)

    def advance(
        self, statistics: SampleStatistics, at: Arrival, key: PRNGKey
    ) -> tuple[SampleStatistics, Sums, Scalar]:
        """Return the next statistics, the increments of their means, and the ess of the weights."""
        method, law_of, followed = self

        def one(before: SampleStatistics, key: PRNGKey) -> tuple[SampleStatistics, Sums, Array]:
            law_key, draw_key = jax.random.split(key)
            xs = _draw(at.law, law_key, method.num_samples)
            if method.num_draws is None:
                carried, ess = _over_all(method, law_of, followed, before, at, xs)
            else:
                carried = _over_draws(method, law_of, followed, before, at, xs, draw_key)
                ess = jnp.full((), jnp.nan, xs.dtype)
            values = _plus(carried, _at_states(followed, at, xs))
            values = jax.tree.map(lambda new, old: new.astype(old.dtype), values, before.values)
            return *_centred(xs, values), ess

        keys = jax.random.split(key, method.num_replicates)
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


def _draw(law: Any, key: PRNGKey, count: int) -> Float[Array, "sample state"]:
    noise = jax.random.normal(key, (count, law.noise_dim), law.mean.dtype)
    return jax.vmap(law.from_noise)(noise)


def _centred(xs: Float[Array, "sample state"], values: Sums) -> tuple[SampleStatistics, Sums]:
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), values)
    around = jax.tree.map(lambda leaf, mean: leaf - mean[None], values, means)
    return SampleStatistics(xs, around), means


def _plus(values: Sums, more: Sums) -> Sums:
    """Add two sums; entries missing in `more` count as zero."""
    elbo = values.elbo if more.elbo is None else values.elbo + more.elbo
    named = {
        name: jax.tree.map(jnp.add, value, more.values[name]) if name in more.values else value
        for name, value in values.values.items()
    }
    return Sums(elbo, named)


def _of_kind(functional: AbstractFunctional, kind: type) -> list[Any]:
    return [term for term in functional.terms() if isinstance(term, kind)]


def _at_first(followed: Followed, at: Arrival, xs: Float[Array, "sample state"]) -> Sums:
    """Return the statistics T_0."""
    elbo = None
    if followed.model is not None:
        joint = LogJoint(followed.model)
        elbo = jax.vmap(lambda x: joint.initial(x, at.seen) - at.law.log_prob(x))(xs)
    values = {
        name: jax.vmap(lambda x, f=functional, name=name: f.initial(x, at.data[name]))(xs)
        for name, functional in followed.functionals.items()
    }
    return Sums(elbo, values)


def _at_states(followed: Followed, at: Arrival, xs: Float[Array, "sample state"]) -> Sums:
    """Return the terms that depend on x_k alone, which need no expectation."""
    elbo, values = None, {}
    if followed.model is not None:
        (emission,) = _of_kind(LogJoint(followed.model), AbstractStateTerm)
        elbo = jax.vmap(lambda x: emission(x, at.seen) - at.law.log_prob(x))(xs)
    for name, functional in followed.functionals.items():
        if terms := _of_kind(functional, AbstractStateTerm):
            values[name] = jax.vmap(
                lambda x, terms=terms, name=name: add([term(x, at.data[name]) for term in terms])
            )(xs)
    return Sums(elbo, values)


def _pair_functions(
    followed: Followed, at: Arrival
) -> tuple[Callable[[Array, Array], Scalar] | None, dict[str, Callable[[Array, Array], PyTree]]]:
    """Return the functions of (x_{k-1}, x_k): log m for the bound, and the pair terms."""

    def total(functional: AbstractFunctional, data: PyTree) -> Callable[[Array, Array], PyTree]:
        terms = _of_kind(functional, AbstractPairTerm)
        return lambda before, x: add([term(before, x, data) for term in terms])

    transition = None if followed.model is None else total(LogJoint(followed.model), at.seen)
    named = {
        name: total(functional, at.data[name])
        for name, functional in followed.functionals.items()
        if _of_kind(functional, AbstractPairTerm)
    }
    return transition, named


def _over_all(
    method: WeightedSamples,
    law_of: BackwardLaw,
    followed: Followed,
    before: SampleStatistics,
    at: Arrival,
    xs: Float[Array, "sample state"],
) -> tuple[Sums, Scalar]:
    """Return the expectation over all previous draws, and the mean ess of the weights."""
    befores, count = before.samples, method.num_samples
    transition, functions = _pair_functions(followed, at)

    def some(xs: Float[Array, "now state"]) -> tuple[Sums, Array]:
        logs = log_weights(law_of, at.before, at.step, xs, befores)
        shares = jax.nn.softmax(logs, axis=1)
        weights = shares if method.normalised else _unbiased(logs)

        def over_pairs(fn: Callable[[Array, Array], PyTree]) -> PyTree:
            # x_{k-1} is the outer loop, so that its transition is computed once.
            return jax.vmap(lambda b: jax.vmap(lambda x: fn(b, x))(xs))(befores)

        def paired(values: Array) -> Array:
            return jnp.einsum("ij,ji...->i...", weights, values, precision="highest")

        carried = jax.tree.map(
            lambda leaf: jnp.tensordot(weights, leaf, 1, precision="highest"), before.values
        )
        named = {name: jax.tree.map(paired, over_pairs(fn)) for name, fn in functions.items()}
        elbo = None if transition is None else paired(over_pairs(transition) - logs.T)
        return _plus(carried, Sums(elbo, named)), 1.0 / jnp.sum(shares**2, axis=1)

    rows = max(1, TILE // count)
    if count <= rows:
        values, ess = some(xs)
    else:
        values, ess = _in_tiles(some, xs, rows)
    return values, jnp.mean(ess)


def _in_tiles(fn: Callable[[Array], PyTree], xs: Float[Array, "sample state"], rows: int) -> PyTree:
    """Evaluate a function of many states in tiles."""
    count = xs.shape[0]
    tiles = -(-count // rows)
    padded = jnp.pad(xs, ((0, tiles * rows - count), (0, 0)), mode="edge")
    values = lax.map(fn, padded.reshape(tiles, rows, -1))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], values)


def _unbiased(logs: Float[Array, "now before"]) -> Float[Array, "now before"]:
    """Return weights of the previous draws whose averages are unbiased.

    With a_j what is averaged, w_j the weights, S their sum and b_j = Σ_{l≠j} w_l a_l / (S − w_j),

        (1/N) Σ_j [w_j (a_j − b_j) + b_j] = Σ_l a_l (w_l/N) [1 + Σ_{j≠l} (1 − w_j) / (S − w_j)].

    These sum to one over l. The largest weight is treated separately, since subtracting it from S
    cancels.
    """
    count = logs.shape[1]
    weights = jnp.exp(logs)
    largest = jax.nn.one_hot(jnp.argmax(logs, axis=1), count, dtype=bool)
    rest = jnp.sum(weights, axis=1, keepdims=True) - weights
    ratios = jnp.where(largest, 0.0, (1.0 - weights) / jnp.where(largest, 1.0, rest))
    others = jax.nn.softmax(jnp.where(largest, -jnp.inf, logs), axis=1)
    top = jnp.sum(jnp.where(largest, weights, 0.0), axis=1, keepdims=True)
    terms = weights * (1.0 + jnp.sum(ratios, axis=1, keepdims=True) - ratios)
    return (terms + (1.0 - top) * others) / count


class _Backward(AbstractKernel):
    """A backward kernel of any form as a kernel from x_k to x_{k-1}."""

    law_of: Any
    step: PyTree
    takes_input: bool = eqx.field(static=True, default=False)  # pyright: ignore

    def law(self, x: Float[Array, "state"], u: Array | None = None) -> Any:
        return self.law_of(self.step, x)

    def log_prob(
        self,
        x: Float[Array, "state"],
        value: Float[Array, "state"],
        u: Array | None = None,
        mask: Array | None = None,
    ) -> Scalar:
        return self.law(x).log_prob(value)

    def sample(
        self, key: PRNGKey, x: Float[Array, "state"], u: Array | None = None
    ) -> Float[Array, "state"]:
        law = self.law(x)
        return law.from_noise(jax.random.normal(key, (law.noise_dim,), x.dtype))


def _over_draws(
    method: WeightedSamples,
    law_of: BackwardLaw,
    followed: Followed,
    before: SampleStatistics,
    at: Arrival,
    xs: Float[Array, "sample state"],
    key: PRNGKey,
) -> Sums:
    """Return the mean over a few previous draws for each state."""
    befores, draws = before.samples, method.num_draws or 0
    repeated = jnp.repeat(xs, draws, axis=0)
    chosen = _indices(method, law_of, at, befores, repeated, key)
    earlier = befores[chosen]
    transition, functions = _pair_functions(followed, at)

    def mean(leaf: Array) -> Array:
        return jnp.mean(leaf.reshape(xs.shape[0], draws, *leaf.shape[1:]), axis=1)

    def density(b: Array, x: Array) -> Scalar:
        return law_of(at.step, x).log_prob(b) - at.before.log_prob(b)

    carried = jax.tree.map(lambda leaf: mean(leaf[chosen]), before.values)
    named = {
        name: jax.tree.map(mean, jax.vmap(fn)(earlier, repeated)) for name, fn in functions.items()
    }
    elbo = None
    if transition is not None:
        elbo = mean(jax.vmap(lambda b, x: transition(b, x) - density(b, x))(earlier, repeated))
    return _plus(carried, Sums(elbo, named))


def _indices(
    method: WeightedSamples,
    law_of: BackwardLaw,
    at: Arrival,
    befores: Float[Array, "sample state"],
    xs: Float[Array, "draw state"],
    key: PRNGKey,
) -> Int[Array, "draw"]:
    """Draw one index per state, with the weights of `log_weights`.

    These are the backward draws of a particle smoother whose particles have weights 1/q_{k-1} and
    whose transition density, read from the state back to the particle, is the backward kernel.
    """
    linear = isinstance(at.step, LinearGaussianKernel)
    kernel = at.step if linear else _Backward(law_of, at.step)
    sampler = method.backward
    if sampler is None:
        sampler = RejectionBackward() if linear else ExactBackward()
    pairs = Pairs.of(kernel, None, befores, reverse=True)
    log_proposal = jax.nn.log_softmax(-jax.vmap(at.before.log_prob)(befores))
    start_key, draw_key = jax.random.split(key)
    # If all weights vanish, any draw is used.
    fallback = jax.random.randint(start_key, (xs.shape[0],), 0, befores.shape[0])
    return sampler.draw(draw_key, pairs, log_proposal, xs, fallback)
