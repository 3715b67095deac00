"""Statistics T_k at draws of the filtering laws, for any functional and any backward kernel.

Fresh draws ξ_k^i of q_k carry the statistic of the draws before them,

    T_k(ξ_k^i) = Σ_j ω_ij [T_{k-1}(ξ_{k-1}^j) + h_k(ξ_{k-1}^j, ξ_k^i)],

where ω_i· stands for the backward kernel q_{k-1|k}(ξ_k^i, ·): see `weights`. For the lower bound

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
"""How many pairs of draws are weighed at once."""


class WeightedSamples(eqx.Module):
    """Statistics carried by draws of the filtering laws, weighed as draws of backward kernels.

    At each row N fresh draws ξ_k^i of q_k take over the statistics of those before them, with
    weights ω_ij ∝ q_{k-1|k}(ξ_k^i, ξ_{k-1}^j) / q_{k-1}(ξ_{k-1}^j): at a cost of N² weights a row,
    or from a few draws of the index j for each i, as PaRIS does for particle filters.

    With `normalised=False` the weights w_ij are not divided by their sum, which makes the estimates
    exactly unbiased: T_k(ξ_k^i) is the mean over j of w_ij (a_ij − b_ij) + b_ij, where a_ij is what
    is averaged and b_ij the weighted mean of all others, which keeps the variance of the weights
    out of the estimate and, not depending on ξ_{k-1}^j, its expectation right. It pays only where
    the weights are even: in many dimensions it is far more variable.

    Args:
        num_samples: N, how many draws of each filtering law.
        num_draws: how many indices each of them averages, at least two; `None` for all of them.
        normalised: whether weights are divided by their sum: a bias of order 1/N, and less
            variance.
        num_replicates: how many sets of draws run side by side, whose spread is the standard error;
            with one it is not known. A bias of order 1/N is not part of it.
        backward: how indices are drawn, `ExactBackward()` or `RejectionBackward()`; by default the
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
                "WeightedSamples weighs draws against each other: num_samples must be at least 2,"
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
                    "Indices are drawn with weights that are normalised. For unbiased estimates use"
                    " WeightedSamples(num_samples, normalised=False)."
                )
        elif self.backward is not None:
            raise ValueError("backward says how indices are drawn: it needs num_draws as well.")
        kinds = (ExactBackward, RejectionBackward)
        if self.backward is not None and not isinstance(self.backward, kinds):
            raise TypeError(
                "WeightedSamples expects ExactBackward() or RejectionBackward() as its backward"
                f" sampler, got {type(self.backward).__name__}: its draws have no ancestors."
            )


class SampleStatistics(eqx.Module):
    """The draws of the last row, and the statistics at them less their mean.

    Attributes:
        samples: draws ξ_k^i of q_k.
        values: T_k at each of them.
    """

    samples: Float[Array, "... sample state"]
    values: Sums


class SampledRecursion(NamedTuple):
    """The recursion over draws, of all replicates side by side.

    Attributes:
        method: how many draws, and how they are weighed.
        law_of: the backward kernels, from `backward_law`.
        followed: what the statistics are of.
    """

    method: WeightedSamples
    law_of: BackwardLaw
    followed: Followed

    def start(self, at: Arrival, key: PRNGKey) -> tuple[SampleStatistics, Sums, Scalar]:
        """The statistics after the first row, their means, and the number of draws."""
        count = self.method.num_samples

        def one(key: PRNGKey) -> tuple[SampleStatistics, Sums]:
            xs = _draw(at.law, key, count)
            return _centred(xs, _at_first(self.followed, at, xs))

        statistics, means = jax.vmap(one)(jax.random.split(key, self.method.num_replicates))
        return statistics, means, jnp.full((), count, statistics.samples.dtype)

    def advance(
        self, statistics: SampleStatistics, at: Arrival, key: PRNGKey
    ) -> tuple[SampleStatistics, Sums, Scalar]:
        """The statistics one row later, what it adds to their means, and the ess of the weights."""
        method, law_of, followed = self

        def one(before: SampleStatistics, key: PRNGKey) -> tuple[SampleStatistics, Sums, Array]:
            own, draw_key = jax.random.split(key)
            xs = _draw(at.law, own, method.num_samples)
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
        """The mean over replicates and its standard error."""
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
    """The sum, of which `more` may leave out what it adds nothing to."""
    elbo = values.elbo if more.elbo is None else values.elbo + more.elbo
    named = {
        name: jax.tree.map(jnp.add, value, more.values[name]) if name in more.values else value
        for name, value in values.values.items()
    }
    return Sums(elbo, named)


def _of_kind(functional: AbstractFunctional, kind: type) -> list[Any]:
    return [term for term in functional.terms() if isinstance(term, kind)]


def _at_first(followed: Followed, at: Arrival, xs: Float[Array, "sample state"]) -> Sums:
    """The statistics T_0."""
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
    """What depends on x_k alone: it needs no expectation."""
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
    """What depends on (x_{k-1}, x_k): log m for the bound, and the pair terms of functionals."""

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
    """The expectation over all draws of the time before, and the mean ess of the weights."""
    befores, count = before.samples, method.num_samples
    transition, functions = _pair_functions(followed, at)

    def some(xs: Float[Array, "now state"]) -> tuple[Sums, Array]:
        logs = log_weights(law_of, at.before, at.step, xs, befores)
        shares = jax.nn.softmax(logs, axis=1)
        weights = shares if method.normalised else _unbiased(logs)

        def over_pairs(fn: Callable[[Array, Array], PyTree]) -> PyTree:
            # Over x_{k-1} outside: what a transition makes of it is computed once.
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
    """A function of many states, taken over some of them at a time."""
    count = xs.shape[0]
    tiles = -(-count // rows)
    padded = jnp.pad(xs, ((0, tiles * rows - count), (0, 0)), mode="edge")
    found = lax.map(fn, padded.reshape(tiles, rows, -1))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], found)


def _unbiased(logs: Float[Array, "now before"]) -> Float[Array, "now before"]:
    """What the draws before count for, with expectations as under the kernel itself.

    With a_j what is averaged, w_j the weights, S their sum and b_j = Σ_{l≠j} w_l a_l / (S − w_j),

        (1/N) Σ_j [w_j (a_j − b_j) + b_j] = Σ_l a_l (w_l/N) [1 + Σ_{j≠l} (1 − w_j) / (S − w_j)].

    These sum to one over l. The part of the largest weight is taken apart, since S less it cancels.
    """
    count = logs.shape[1]
    weights = jnp.exp(logs)
    largest = jax.nn.one_hot(jnp.argmax(logs, axis=1), count, dtype=bool)
    rest = jnp.sum(weights, axis=1, keepdims=True) - weights
    ratios = jnp.where(largest, 0.0, (1.0 - weights) / jnp.where(largest, 1.0, rest))
    others = jax.nn.softmax(jnp.where(largest, -jnp.inf, logs), axis=1)
    top = jnp.sum(jnp.where(largest, weights, 0.0), axis=1, keepdims=True)
    own = weights * (1.0 + jnp.sum(ratios, axis=1, keepdims=True) - ratios)
    return (own + (1.0 - top) * others) / count


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
    """The mean over a few draws, for each state, from those of the time before."""
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
    """One index for each state, with the weights of `log_weights`.

    These are the backward draws of a particle smoother whose particles have weights 1/q_{k-1} and
    whose transition density, read from the state back to the particle, is the backward kernel.
    """
    linear = isinstance(at.step, LinearGaussianKernel)
    kernel = at.step if linear else _Backward(law_of, at.step)
    sampler = method.backward
    if sampler is None:
        sampler = RejectionBackward() if linear else ExactBackward()
    pairs = Pairs.of(kernel, None, befores, reverse=True)
    own = jax.nn.log_softmax(-jax.vmap(at.before.log_prob)(befores))
    start_key, draw_key = jax.random.split(key)
    # Where all weights vanish nothing tells draws apart, and any of them is taken.
    fallback = jax.random.randint(start_key, (xs.shape[0],), 0, befores.shape[0])
    return sampler.draw(draw_key, pairs, own, xs, fallback)
