"""Smoothed additive functionals along a series, in memory that does not grow with its length.

Each particle carries an estimate of T_k(x) = E[H(x_{0:k}) | x_k = x, y_{0:k}], which satisfies

    T_k(x_k) = E[T_{k-1}(x_{k-1}) + h_k(x_{k-1}, x_k) | x_k, y_{0:k-1}],

an expectation under the backward kernel of the filter. It is taken over all particles, at a cost of
N² per step, or over two draws per particle (PaRIS, Olsson and Westerborn 2017).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._expectations import (
    AbstractFunctional,
    AbstractPairTerm,
    AbstractStateTerm,
    AbstractTerm,
    add,
)
from retrodict._model import (
    Series,
    StateSpaceModel,
    check_densities,
    prepare_data,
    prepare_rows,
    unwrap,
)
from retrodict._numerics import in_parts
from retrodict.particles.backward_samplers import (
    AbstractBackwardSampler,
    RejectionBackward,
    check_sampler,
)
from retrodict.particles.backward_weights import BackwardWeights
from retrodict.particles.cloud import Filter, Step, keep_where_padding
from retrodict.particles.moments import FINE, check_functional, refuse_failure, status_of
from retrodict.particles.power_of_two import LOG2_E
from retrodict.particles.resampling import Scheme

Weights = Float[Array, "before"]


def sum_of_terms(functional: AbstractFunctional, kind: type[AbstractTerm], *args: Any) -> PyTree:
    """Return the sum of the terms of one kind at these arguments; `None` if there are none."""
    values = [term(*args) for term in functional.terms() if isinstance(term, kind)]  # pyright: ignore
    return add(values) if values else None


def plus(more: PyTree, values: PyTree) -> PyTree:
    """Add two pytrees; `None` in the first one counts as zero. Dtypes are those of the second."""
    return jax.tree.map(
        lambda added, value: value if added is None else (value + added).astype(value.dtype),
        more,
        values,
        is_leaf=lambda leaf: leaf is None,
    )


def average_over_all(
    statistics: PyTree,
    increment: Callable[[Array, Array, Scalar], PyTree],
    log_weights: Callable[[Array], Weights],
    befores: Float[Array, "before state"],
    xs: Float[Array, "now state"],
    tile: int,
    weigh: Callable[[Weights], Weights] = jax.nn.softmax,
) -> tuple[PyTree, Float[Array, "now"]]:
    """Return the averages over all states of time k-1, and the effective sample sizes.

    Args:
        statistics: T_{k-1} at each state, with a leading axis.
        increment: the terms of h_k that depend on both states, from x_{k-1}, x_k and the log
            weight; `None` for parts of the statistics without such terms.
        log_weights: the log weights of all states, given x_k.
        befores: the states of time k-1.
        xs: the states of time k.
        tile: the number of pairs that are weighted at once.
        weigh: the weights of an average, from the log weights.
    """

    def one(x: Float[Array, "state"]) -> tuple[PyTree, Scalar]:
        logs = log_weights(x)
        weights = weigh(logs)

        def average(leaf: Array) -> Array:
            return jnp.tensordot(weights, leaf, axes=1, precision="highest")

        added = jax.vmap(lambda before, log: increment(before, x, log))(befores, logs)
        values = plus(jax.tree.map(average, added), jax.tree.map(average, statistics))
        return values, 1.0 / jnp.sum(jax.nn.softmax(logs) ** 2)

    return in_parts(one, xs, max(1, tile // befores.shape[0]))


def average_over_draws(
    statistics: PyTree,
    increment: Callable[[Array, Array], PyTree],
    befores: Float[Array, "before state"],
    xs: Float[Array, "draw state"],
    chosen: Int[Array, "draw"],
    num_draws: int,
) -> PyTree:
    """Return the averages over a few draws of states of time k-1.

    Args:
        statistics: T_{k-1} at each state, with a leading axis.
        increment: the terms of h_k that depend on both states, from x_{k-1} and x_k; `None` for
            parts of the statistics without such terms.
        befores: the states of time k-1.
        xs: the states of time k, each repeated `num_draws` times.
        chosen: one index of a state of time k-1 for each of them.
        num_draws: the number of draws per state.
    """

    def average(leaf: Array) -> Array:
        return jnp.mean(leaf.reshape(-1, num_draws, *leaf.shape[1:]), axis=1)

    added = jax.vmap(increment)(befores[chosen], xs)
    carried = jax.tree.map(lambda leaf: leaf[chosen], statistics)
    return plus(jax.tree.map(average, added), jax.tree.map(average, carried))


_REJECTION = RejectionBackward()

TILE = 2**20
"""The number of pairs of particles that the forward-only smoother weights at once."""


class OnlineState(eqx.Module):
    """The state of an `AdditiveSmoother`.

    Attributes:
        key: the key for later rows.
        particles: the particles at the current time.
        log_weights: their normalised log weights.
        statistics: T_k at each particle: the functional's pytree with a leading axis.
        log_evidence: an estimate of log p(y_{0:k}).
        ess: the effective sample size.
        status: 0 for success; 1 if no particle explained an observation, 2 if a weight was
            undefined.
        status_time: the first time with a non-zero status; −1 if there is none.
        num_read: the number of rows that were read.
    """

    key: PRNGKey
    particles: Float[Array, "particle state"]
    log_weights: Float[Array, "particle"]
    statistics: PyTree
    log_evidence: Scalar
    ess: Scalar
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    num_read: Int[Array, ""]

    @property
    def value(self) -> PyTree:
        """The smoothed functional E[H(x_{0:k}) | y_{0:k}]."""
        weights = jnp.exp(self.log_weights)
        return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), self.statistics)

    def after(self, key: PRNGKey, step: Step, statistics: PyTree) -> "OnlineState":
        """Return the state after a step of the filter."""
        status, _ = status_of(step.impossible[None], step.undefined[None])
        first = (self.status == FINE) & (status != FINE)
        return OnlineState(
            key,
            step.particles,
            step.log_weights,
            statistics,
            self.log_evidence + step.increment,
            step.ess,
            jnp.where(first, status, self.status).astype(jnp.int32),
            jnp.where(first, self.num_read, self.status_time).astype(jnp.int32),
            self.num_read + 1,
        )


class AdditiveSmoother(eqx.Module):
    """A particle filter whose particles carry the statistic of an additive functional.

    Args:
        owner: the name of the caller, for messages.
        model: the model; its transition must have a density.
        functional: any additive functional.
        num_particles: the number of particles.
        backward: the sampler of the backward kernel; `None` for the expectation over all particles.
        num_draws: the number of backward draws per particle.
        resampling: the scheme of the filter.
        threshold: the share of the particles below which the filter resamples.
    """

    filter: Filter
    functional: AbstractFunctional
    backward: AbstractBackwardSampler | None
    num_draws: int = eqx.field(static=True)

    def __init__(
        self,
        owner: str,
        model: StateSpaceModel,
        functional: AbstractFunctional,
        num_particles: int,
        backward: AbstractBackwardSampler | None,
        num_draws: int,
        resampling: Scheme,
        threshold: float,
    ):
        check_functional(functional, owner)
        if backward is not None:
            check_sampler(backward, owner)
        model = unwrap(model)
        check_densities(model, owner, ("transition",))
        self.filter = Filter(model, None, None, resampling, threshold, num_particles)
        self.functional, self.backward = functional, backward
        self.num_draws = check_count(num_draws, "num_draws")

    def start(self, key: PRNGKey, row: Series, data: PyTree) -> OnlineState:
        """Return the state after the first row; called inside `jax.jit`."""
        key, filter_key = jax.random.split(key)
        step = self.filter.start(filter_key, row)
        statistics = jax.vmap(lambda x: self.functional.initial(x, data))(step.particles)
        zero, none = jnp.zeros_like(step.increment), jnp.zeros((), int)
        before = OnlineState(key, *step[:2], statistics, zero, zero, none, none - 1, none)
        return before.after(key, step, statistics)

    def advance(
        self, state: OnlineState, row: Series, data: PyTree, exists: Any = None
    ) -> OnlineState:
        """Return the state after one more row; called inside `jax.jit`."""
        key, noise_key, select_key, back_key = jax.random.split(state.key, 4)
        cloud = (state.particles, state.log_weights)
        noise = self.filter.noise(noise_key, state.particles.dtype)
        step = keep_where_padding(
            exists, self.filter.move(cloud, select_key, noise, row, None), cloud
        )
        statistics = self._carried(state, step, row, data, back_key)
        here = jax.vmap(lambda x: sum_of_terms(self.functional, AbstractStateTerm, x, data))
        statistics = plus(here(step.particles), statistics)
        if exists is not None:
            statistics = jax.tree.map(
                lambda new, old: jnp.where(exists, new, old), statistics, state.statistics
            )
        return state.after(key, step, statistics)

    def _carried(
        self, state: OnlineState, step: Step, row: Series, data: PyTree, key: PRNGKey
    ) -> PyTree:
        """Return the expectation of T_{k-1} and of the pair terms, at each particle."""
        befores, draws = state.particles, self.num_draws
        pairs = BackwardWeights.of(self.filter.model.transition, row.inputs, befores)

        def increment(before: Array, x: Array, log_weight: Any = None) -> PyTree:
            return sum_of_terms(self.functional, AbstractPairTerm, before, x, data)

        if self.backward is None:
            return average_over_all(
                state.statistics,
                increment,
                lambda x: state.log_weights + pairs.matrix(pairs.prepare(x[None]))[:, 0] / LOG2_E,
                befores,
                step.particles,
                TILE,
            )[0]
        xs, ancestors = jnp.repeat(step.particles, draws, 0), jnp.repeat(step.ancestors, draws, 0)
        chosen = self.backward.draw(key, pairs, state.log_weights, xs, ancestors)
        return average_over_draws(state.statistics, increment, befores, xs, chosen, draws)

    def run(
        self, owner: str, key: PRNGKey, series: Series, data: PyTree, strict: bool
    ) -> "AdditivePosterior":
        """Smooth the functional of a prepared series.

        Args:
            owner: the name of the caller, for messages.
            key: a typed key.
            series: the series.
            data: what the functional reads, with one row per time step; `None` for the series.
            strict: whether to raise an error if the filter fails.
        """
        check_key(key, owner)
        posterior = self._scan(key, series, prepare_rows(data, series.num_times))
        refuse_failure(owner, posterior.status, posterior.status_time, strict)
        return posterior

    @eqx.filter_jit
    def _scan(self, key: PRNGKey, series: Series, data: PyTree) -> "AdditivePosterior":
        rows = series.rows
        data = rows if data is None else data
        first = self.start(key, *jax.tree.map(lambda leaf: leaf[0], (rows, data)))

        def move(carry: tuple[OnlineState, Scalar], at: tuple) -> tuple[tuple, None]:
            state, least = carry
            state = self.advance(state, *at)
            return (state, jnp.minimum(least, state.ess)), None

        later = jax.tree.map(lambda leaf: leaf[1:], (rows, data, series.exists()))
        (last, least), _ = lax.scan(move, (first, first.ess), later)
        status = (last.status, last.status_time)
        return AdditivePosterior(last.value, last.log_evidence, least, *status)


class AdditivePosterior(NamedTuple):
    """A smoothed functional of a whole series.

    Attributes:
        value: E[H(x_{0:n-1}) | y], as the functional has it.
        log_evidence: an estimate of log p(y); its exponential is unbiased.
        min_ess: the least effective sample size on the way.
        status: 0 if fine; 1 if no particle explained an observation, 2 if a weight was undefined.
        status_time: the first time at which it was not; −1 if there is none.
    """

    value: PyTree
    log_evidence: Scalar
    min_ess: Scalar
    status: Int[Array, ""]
    status_time: Int[Array, ""]


def paris(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    functional: AbstractFunctional,
    num_particles: int = 1000,
    *,
    data: PyTree = None,
    backward: AbstractBackwardSampler = _REJECTION,
    num_draws: int = 2,
    resampling: Scheme = "systematic",
    threshold: float = 0.5,
    strict: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> AdditivePosterior:
    """Smooth an additive functional by PaRIS, in memory that does not grow with the series.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> result = rd.paris(jax.random.key(0), model, ys, rd.StateSum(), num_particles=100)
        >>> bool(jnp.abs(result.value[0] - 6.0) < 1.5)  # the exact value is 6
        True

    Args:
        key: a typed key; run several under `jax.vmap` for a standard error.
        model: the model; its transition must have a density.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        functional: any additive functional; `Score(model)` gives the score of the model.
        num_particles: the number of particles.
        data: a pytree with one row per time step, which the functional reads; `None` for the
            observations, as `LogJoint` and `Score` read them.
        backward: the sampler of the backward kernel. `RejectionBackward` is exact, and needs a
            transition that is Gaussian with one scale or a bound of its density.
        num_draws: the number of draws that each particle averages, at least two.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: the filter resamples once the effective sample size is below this share of the
            particles.
        strict: whether to raise an error if the filter fails; inside `jax.jit` only the status of
            the result is set.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the rest contributes exactly zero.
    """
    smoother = AdditiveSmoother(
        "paris", model, functional, num_particles, backward, num_draws, resampling, threshold
    )
    series = prepare_data(smoother.filter.model, ys, mask=mask, inputs=inputs, length=length)
    return smoother.run("paris", key, series, data, strict)


def forward_smoother(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    functional: AbstractFunctional,
    num_particles: int = 1000,
    *,
    data: PyTree = None,
    resampling: Scheme = "systematic",
    threshold: float = 0.5,
    strict: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> AdditivePosterior:
    """Smooth an additive functional by the forward-only smoother, at a cost of N² per step.

    It is what `paris` tends to with many draws: no backward draw is left to chance.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> key, functional = jax.random.key(0), rd.StateSum()
        >>> result = rd.particles.forward_smoother(key, model, ys, functional, num_particles=100)
        >>> bool(jnp.abs(result.value[0] - 6.0) < 1.5)  # the exact value is 6
        True

    Args:
        key: a typed key; run several under `jax.vmap` for a standard error.
        model: the model; its transition must have a density.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        functional: any additive functional; `Score(model)` gives the score of the model.
        num_particles: the number of particles.
        data: a pytree with one row per time step, which the functional reads; `None` for the
            observations, as `LogJoint` and `Score` read them.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: the filter resamples once the effective sample size is below this share of the
            particles.
        strict: whether to raise an error if the filter fails; inside `jax.jit` only the status of
            the result is set.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; the rest contributes exactly zero.
    """
    smoother = AdditiveSmoother(
        "forward_smoother", model, functional, num_particles, None, 1, resampling, threshold
    )
    series = prepare_data(smoother.filter.model, ys, mask=mask, inputs=inputs, length=length)
    return smoother.run("forward_smoother", key, series, data, strict)
