"""Smoothed additive functionals along a series, in memory that does not grow with its length.

Each particle carries an estimate of T_k(x) = E[H(x_{0:k}) | x_k = x, y_{0:k}], which satisfies

    T_k(x_k) = E[T_{k-1}(x_{k-1}) + h_k(x_{k-1}, x_k) | x_k, y_{0:k-1}],

an expectation under the backward kernel of the filter. It is taken over all particles, at a cost of
N² per step, or over two draws per particle (PaRIS, Olsson and Westerborn 2017).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from retrodict._expectations import AbstractFunctional, add
from retrodict._model import StateSpaceModel, check_densities, prepare_data
from retrodict._parameters import unwrap
from retrodict._series import Series, prepare_rows
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key
from retrodict.particles.backward_samplers import (
    AbstractBackwardSampler,
    RejectionBackward,
    check_sampler,
)
from retrodict.particles.backward_weights import Pairs
from retrodict.particles.cloud import Filter, Step, frozen_where
from retrodict.particles.particle_filter import make_filter
from retrodict.particles.power_of_two import LOG2_E
from retrodict.particles.resampling import Scheme
from retrodict.particles.status import FINE, IMPOSSIBLE, UNDEFINED, refuse_failure

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


class AdditiveSmoother(eqx.Module):
    """A particle filter whose particles carry the statistic of an additive functional.

    Args:
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
        model: StateSpaceModel,
        functional: AbstractFunctional,
        num_particles: int,
        *,
        backward: AbstractBackwardSampler | None = _REJECTION,
        num_draws: int = 2,
        resampling: Scheme = "systematic",
        threshold: float = 0.5,
        owner: str = "OnlineSmoother",
    ):
        if not isinstance(functional, AbstractFunctional):
            raise TypeError(
                f"{owner} expects a functional, such as StateSum(), got"
                f" {type(functional).__name__}."
            )
        if backward is not None:
            check_sampler(backward, owner)
        check_densities(unwrap(model), owner, ("transition",))
        self.filter = make_filter(unwrap(model), num_particles, None, None, resampling, threshold)
        self.functional, self.backward = functional, backward
        self.num_draws = check_count(num_draws, "num_draws")

    def start(self, key: PRNGKey, row: Series, data: PyTree) -> OnlineState:
        """Return the state after the first row; called inside `jax.jit`."""
        key, filter_key = jax.random.split(key)
        step = self.filter.start(filter_key, row)
        statistics = jax.vmap(lambda x: self.functional.initial(x, data))(step.particles)
        status = (jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32))
        zero = jnp.zeros_like(step.increment)
        return _state(key, step, statistics, zero, status, jnp.zeros((), int))

    def advance(
        self, state: OnlineState, row: Series, data: PyTree, exists: Any = None
    ) -> OnlineState:
        """Return the state after one more row; called inside `jax.jit`."""
        key, noise_key, select_key, back_key = jax.random.split(state.key, 4)
        cloud, model = (state.particles, state.log_weights), self.filter.model
        noise = self.filter.noise(noise_key, state.particles.dtype)
        step = frozen_where(exists, self.filter.move(cloud, select_key, noise, row, None), cloud)
        pairs = Pairs.of(model.transition, row.inputs, cloud[0])
        if self.backward is None:
            statistics = _over_all(self, state, pairs, step.particles, data)
        else:
            statistics = _over_draws(self, state, pairs, step, data, back_key)

        def select(new: Array, old: Array) -> Array:
            new = new.astype(old.dtype)
            return new if exists is None else jnp.where(exists, new, old)

        statistics = jax.tree.map(select, statistics, state.statistics)
        status = (state.status, state.status_time)
        return _state(key, step, statistics, state.log_evidence, status, state.num_read)


def _state(
    key: PRNGKey,
    step: Step,
    statistics: PyTree,
    log_evidence: Scalar,
    status: tuple[Array, Array],
    num_read: Array,
) -> OnlineState:
    code = jnp.where(step.undefined, UNDEFINED, jnp.where(step.impossible, IMPOSSIBLE, FINE))
    first = (status[0] == FINE) & (code != FINE)
    return OnlineState(
        key,
        step.particles,
        step.log_weights,
        statistics,
        log_evidence + step.increment,
        step.ess,
        jnp.where(first, code, status[0]),
        jnp.where(first, num_read, status[1]).astype(status[1].dtype),
        num_read + 1,
    )


def _over_draws(
    smoother: AdditiveSmoother,
    state: OnlineState,
    pairs: Pairs,
    step: Step,
    data: PyTree,
    key: PRNGKey,
) -> PyTree:
    """T_k at each particle as the mean over a few backward draws."""
    count, draws = step.particles.shape[0], smoother.num_draws
    xs, ancestors = jnp.repeat(step.particles, draws, 0), jnp.repeat(step.ancestors, draws, 0)
    chosen = smoother.backward.draw(key, pairs, state.log_weights, xs, ancestors)  # pyright: ignore
    befores = state.particles[chosen]
    added = jax.vmap(lambda a, b: smoother.functional.increment(a, b, data))(befores, xs)
    before = jax.tree.map(lambda leaf: leaf[chosen], state.statistics)
    return jax.tree.map(
        lambda leaf: jnp.mean(leaf.reshape(count, draws, *leaf.shape[1:]), axis=1),
        add([before, added]),
    )


def _over_all(
    smoother: AdditiveSmoother,
    state: OnlineState,
    pairs: Pairs,
    xs: Float[Array, "particle state"],
    data: PyTree,
) -> PyTree:
    """T_k at each particle as the expectation over all particles of the time before."""

    def one(x: Float[Array, "state"]) -> PyTree:
        log_weights = LOG2_E * state.log_weights + pairs.matrix(pairs.prepare(x[None]))[:, 0]
        weights = jax.nn.softmax(log_weights / LOG2_E)
        added = jax.vmap(lambda before: smoother.functional.increment(before, x, data))(
            state.particles
        )
        return jax.tree.map(
            lambda leaf: jnp.tensordot(weights, leaf, axes=1), add([state.statistics, added])
        )

    return lax.map(one, xs, batch_size=max(1, TILE // xs.shape[0]))


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

    Args:
        key: a typed key; run several under `jax.vmap` for a standard error.
        model: the model; its transition must have a density.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        functional: any additive functional; `Score(model)` gives the score of the model.
        num_particles: how many particles.
        data: a pytree with one row a time step that the functional reads; `None` for the
            observations, as `LogJoint` and `Score` read them.
        backward: how the backward kernel is drawn from. `RejectionBackward` is exact, and needs a
            transition that is Gaussian with one scale or a bound of its density.
        num_draws: how many draws each particle averages, at least two.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: the filter resamples once the effective sample size is below this share of the
            particles.
        strict: whether to raise an error if the filter fails; inside `jax.jit` the status says so.
        mask: true where an entry was seen; `True` alone promises that everything was.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist; the rest contributes exactly zero.
    """
    smoother = AdditiveSmoother(
        model,
        functional,
        num_particles,
        backward=backward,
        num_draws=num_draws,
        resampling=resampling,
        threshold=threshold,
        owner="paris",
    )
    rest = {"mask": mask, "inputs": inputs, "length": length}
    return _whole_series("paris", smoother, key, ys, data, strict, rest)


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

    Args:
        key: a typed key; run several under `jax.vmap` for a standard error.
        model: the model; its transition must have a density.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        functional: any additive functional; `Score(model)` gives the score of the model.
        num_particles: how many particles.
        data: a pytree with one row a time step that the functional reads; `None` for the
            observations, as `LogJoint` and `Score` read them.
        resampling: `"systematic"`, `"stratified"`, `"residual"` or `"multinomial"`.
        threshold: the filter resamples once the effective sample size is below this share of the
            particles.
        strict: whether to raise an error if the filter fails; inside `jax.jit` the status says so.
        mask: true where an entry was seen; `True` alone promises that everything was.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist; the rest contributes exactly zero.
    """
    smoother = AdditiveSmoother(
        model,
        functional,
        num_particles,
        backward=None,
        resampling=resampling,
        threshold=threshold,
        owner="forward_smoother",
    )
    rest = {"mask": mask, "inputs": inputs, "length": length}
    return _whole_series("forward_smoother", smoother, key, ys, data, strict, rest)


def _whole_series(
    owner: str,
    smoother: AdditiveSmoother,
    key: PRNGKey,
    ys: Any,
    data: PyTree,
    strict: bool,
    rest: dict[str, Any],
) -> AdditivePosterior:
    check_key(key, owner)
    series = prepare_data(smoother.filter.model, ys, **rest)
    data = prepare_rows(data, series.num_times)
    found = _scan(smoother, key, series, data)
    refuse_failure(owner, found.status, found.status_time, strict)
    return found


@eqx.filter_jit
def _scan(
    smoother: AdditiveSmoother, key: PRNGKey, series: Series, data: PyTree
) -> AdditivePosterior:
    rows = series.rows
    data = rows if data is None else jax.tree.map(jnp.asarray, data)
    first = smoother.start(key, *jax.tree.map(lambda leaf: leaf[0], (rows, data)))

    def move(carry: tuple[OnlineState, Scalar], at: tuple) -> tuple[tuple, None]:
        state, least = carry
        state = smoother.advance(state, *at)
        return (state, jnp.minimum(least, state.ess)), None

    later = jax.tree.map(lambda leaf: leaf[1:], (rows, data, series.exists()))
    (last, least), _ = lax.scan(move, (first, first.ess), later)
    return AdditivePosterior(last.value, last.log_evidence, least, last.status, last.status_time)
