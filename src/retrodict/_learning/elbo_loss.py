"""The loss of `fit`: the negative ELBO of whole series, of prefixes, or of windows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from retrodict._arrays import PRNGKey, Scalar
from retrodict._chains import AbstractKernelChain
from retrodict._expectations import AbstractEstimator, Estimate, elbo_of_series
from retrodict._families import AbstractFactorFamily, advance_over, factors, infer_series, rows_of
from retrodict._learning.dataset import AbstractBatches, Minibatch
from retrodict._learning.options import Objective
from retrodict._learning.segments import elbo_in_segments, first_law
from retrodict._learning.train import Stage
from retrodict._model import Frozen, Series, StateSpaceModel, unwrap
from retrodict.distributed import Parallel

SHORTEST_PREFIX = 8
"""The number of rows of the first growing prefix."""


class ElboLoss(eqx.Module):
    """The negative ELBO of a minibatch in nats per time step, with its share of the log prior.

    Attributes:
        fixed: the leaves of `(family, model)` that are not learned.
        estimator: how the ELBO is estimated.
        log_prior: the log density of the model's parameters, or `None`.
        share: the weight of the log prior, one over the number of rows of all data.
        parallel: whether whole series are processed in O(log n) depth.
        segment: the number of rows to store at a time for derivatives; `None` for all.
    """

    fixed: PyTree
    estimator: AbstractEstimator
    log_prior: Callable[[StateSpaceModel], Scalar] | None
    share: float
    parallel: Parallel = eqx.field(static=True, default=False)
    segment: int | None = eqx.field(static=True, default=None)

    def __call__(self, parameters: PyTree, batch: Minibatch, key: PRNGKey) -> Scalar:
        """Return the loss of whole series."""
        return self.evaluate(parameters, batch, key)[0]

    def evaluate(self, parameters: PyTree, batch: Minibatch, key: PRNGKey) -> tuple[Scalar, Scalar]:
        """Return the loss of whole series and its standard error, zero if nothing is sampled."""

        def one(parameters: PyTree, series: Series, key: PRNGKey) -> Estimate:
            family, model = self.pair(parameters)
            return self.bound(model, family, series, key)

        elbos, rows = batch.each(one, parameters, batch.keys(key)), batch.num_rows()
        value = self.per_row(batch.total(elbos.value), rows, parameters)
        if self.estimator.error != "sampled":
            return value, jnp.zeros_like(value)
        return value, jnp.sqrt(batch.total(elbos.standard_error**2)) / rows

    def score(self, parameters: PyTree, validation: Minibatch) -> tuple[Scalar, Scalar]:
        """Return the same as `evaluate` with a fixed key."""
        return self.evaluate(parameters, validation, jax.random.key(0))

    def over_window(
        self, parameters: PyTree, batch: Minibatch, key: PRNGKey, begin: Any, count: int
    ) -> Scalar:
        """Return the loss of the increment of the ELBO over rows begin..begin+count-1.

        If q_{a-1} were exact, the ELBO of rows 0..b-1 less that of rows 0..a-1 would be the ELBO of
        rows a..b-1 under the prior q_{a-1} of the state before them. That prior is held fixed.
        """
        keys = batch.keys(key)

        def from_start(parameters: PyTree, series: Series, key: PRNGKey) -> Scalar:
            family, model = self.pair(parameters)
            return self.bound(model, family, _rows(series, 0, count), key).value

        def later(parameters: PyTree, series: Series, key: PRNGKey) -> Scalar:
            family, model = self.pair(parameters)
            before = advance_over(Frozen(family).value, rows_of(series), begin - 1)
            state, rows = lax.stop_gradient(before), _rows(series, begin - 1, count + 1)

            def under(law: Any) -> StateSpaceModel:
                return StateSpaceModel(lax.stop_gradient(law), model.transition, model.emission)

            if self.segment is None:
                chain, window = _window_chain(family, state, rows)
                local = under(jax.tree.map(lambda leaf: leaf[0], chain.laws))
                return elbo_of_series(local, chain, window, self.estimator, key).value
            local = under(first_law(family, state, rows))
            return elbo_in_segments(
                local, family, state, rows, self.estimator, key, self.segment, first_counts=False
            ).value

        values = lax.cond(
            begin == 0,
            lambda: batch.each(from_start, parameters, keys),
            lambda: batch.each(later, parameters, keys),
        )
        rows = jnp.maximum(batch.num_rows(begin, begin + count), 1)
        return self.per_row(batch.total(values), rows, parameters)

    def bound(
        self, model: StateSpaceModel, family: AbstractFactorFamily, series: Series, key: PRNGKey
    ) -> Estimate:
        """Return the ELBO of a series from its first row on."""
        if self.segment is None or series.num_times < 2:
            chain = infer_series(family, series, parallel=self.parallel)
            return elbo_of_series(model, chain, series, self.estimator, key, self.parallel)
        state = family.init()
        return elbo_in_segments(model, family, state, series, self.estimator, key, self.segment)

    def pair(self, parameters: PyTree) -> tuple[Any, StateSpaceModel]:
        """Return family and model with these parameters, unwrapped."""
        return unwrap(eqx.combine(parameters, self.fixed))

    def per_row(self, elbo: Scalar, rows: Any, parameters: PyTree) -> Scalar:
        """Return the loss from the sum of the ELBOs of a minibatch."""
        value = -elbo / rows
        if self.log_prior is not None:
            value = value - self.share * self.log_prior(self.pair(parameters)[1])
        return value


def _window_chain(
    family: AbstractFactorFamily, state: Any, rows: Series
) -> tuple[AbstractKernelChain, Series]:
    """Return the chain of a window and the row before it, and these rows, the first one masked."""
    exists = rows.exists()
    read, _ = factors(family, state, rows_of(rows), exists)
    observed = jnp.ones(rows.ys.shape, bool) if rows.mask is None else rows.mask
    window = Series(rows.ys, observed.at[0].set(False), rows.inputs, rows.length)
    return family.assemble(read, exists, rows.length), window


def _rows(series: Series, begin: Any, count: int) -> Series:
    """Return consecutive rows of one series, of which at least one exists."""
    rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, count), series.rows)
    length = None if series.length is None else jnp.clip(series.length - begin, 1, count)
    return dataclasses.replace(rows, length=length)


class PrefixLoss(eqx.Module):
    """The loss of a step on the first rows of each series.

    Attributes:
        loss: the loss of a minibatch.
        count: the number of rows.
    """

    loss: ElboLoss
    count: int = eqx.field(static=True)

    def __call__(
        self, parameters: PyTree, batches: AbstractBatches, key: PRNGKey, step: Array
    ) -> Scalar:
        """Return the loss of the minibatch of a step."""
        batch = batches.minibatch(key, step).first_rows(self.count)
        return self.loss(parameters, batch, _sampling_key(key, step))


class WindowLoss(eqx.Module):
    """The loss of a step on a random window of each series.

    Attributes:
        loss: the loss of a minibatch.
        num_times: the number of rows of each series.
        count: the number of rows of a window.
    """

    loss: ElboLoss
    num_times: int = eqx.field(static=True)
    count: int = eqx.field(static=True)

    def __call__(
        self, parameters: PyTree, batches: AbstractBatches, key: PRNGKey, step: Array
    ) -> Scalar:
        """Return the loss of the minibatch of a step, over one window."""
        batch = batches.minibatch(key, step)
        sampling_key, place_key = jax.random.split(_sampling_key(key, step))
        place = jax.random.randint(place_key, (), 0, -(-self.num_times // self.count))
        begin = jnp.minimum(place * self.count, self.num_times - self.count)
        return self.loss.over_window(parameters, batch, sampling_key, begin, self.count)


def _sampling_key(key: PRNGKey, step: Array) -> PRNGKey:
    """Return the key of a step for all draws but that of the minibatch."""
    return jax.random.fold_in(jax.random.fold_in(key, 1), step)


def stages_of(
    loss: ElboLoss, num_times: int, num_steps: int, objective: Objective, chunk_size: int
) -> list[Stage]:
    """Return the losses of a fit in their order, each with the step at which it ends."""
    rows = min(objective.window or num_times, num_times)
    uses_all_rows, prefixes = rows == num_times, []
    last = PrefixLoss(loss, rows) if uses_all_rows else WindowLoss(loss, num_times, rows)
    if objective.growing:
        doublings = math.ceil(math.log2(max(1.0, rows / SHORTEST_PREFIX)))
        prefixes = [SHORTEST_PREFIX * 2**doubling for doubling in range(doublings)]
    stages, half = [], num_steps // 2
    for position, prefix in enumerate(prefixes):
        # Stages end at chunk boundaries, where checkpoints are written.
        until = half * (position + 1) // len(prefixes) // chunk_size * chunk_size
        if until > (stages[-1].until if stages else 0):
            stages.append(Stage(until, PrefixLoss(loss, prefix)))
    return [*stages, Stage(num_steps, last)]
