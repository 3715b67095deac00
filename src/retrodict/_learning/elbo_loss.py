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
from retrodict._expectations import AbstractEstimator, Estimate
from retrodict._families import advance_over
from retrodict._learning.dataset import AbstractBatches, Minibatch
from retrodict._learning.elbo_of_rows import elbo_of_rows
from retrodict._learning.options import Objective
from retrodict._learning.train import LossStage
from retrodict._model import AbstractModel, Frozen, Series, unwrap
from retrodict.distributed import Parallel

MIN_PREFIX = 8
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
    log_prior: Callable[[AbstractModel], Scalar] | None
    share: float
    parallel: Parallel = eqx.field(static=True, default=False)
    segment: int | None = eqx.field(static=True, default=None)

    def __call__(self, parameters: PyTree, batch: Minibatch, key: PRNGKey) -> Scalar:
        """Return the loss of whole series."""
        return self.evaluate(parameters, batch, key)[0]

    def evaluate(self, parameters: PyTree, batch: Minibatch, key: PRNGKey) -> tuple[Scalar, Scalar]:
        """Return the loss of whole series and its standard error, zero if nothing is sampled."""
        elbos, rows = batch.each(self._elbo, parameters, batch.keys(key)), batch.num_rows()
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
        """Return the loss of the increment of the ELBO over rows begin..begin+count-1."""
        keys = batch.keys(key)

        def from_start(parameters: PyTree, series: Series, key: PRNGKey) -> Estimate:
            return self._elbo(parameters, _rows(series, 0, count), key)

        def later(parameters: PyTree, series: Series, key: PRNGKey) -> Estimate:
            family = Frozen(self.pair(parameters)[0]).value
            state = lax.stop_gradient(advance_over(family, series, begin - 1))
            return self._elbo(parameters, _rows(series, begin - 1, count + 1), key, state)

        elbos = lax.cond(
            begin == 0,
            lambda: batch.each(from_start, parameters, keys).value,
            lambda: batch.each(later, parameters, keys).value,
        )
        rows = jnp.maximum(batch.num_rows(begin, begin + count), 1)
        return self.per_row(batch.total(elbos), rows, parameters)

    def _elbo(self, parameters: PyTree, rows: Series, key: PRNGKey, state: Any = None) -> Estimate:
        """Return `elbo_of_rows`, from the start unless a state is given."""
        family, model = self.pair(parameters)
        return elbo_of_rows(
            model,
            family,
            rows,
            self.estimator,
            key,
            state=state,
            segment=self.segment,
            parallel=self.parallel,
        )

    def pair(self, parameters: PyTree) -> tuple[Any, Any]:
        """Return family and model with these parameters, unwrapped."""
        return unwrap(eqx.combine(parameters, self.fixed))

    def per_row(self, elbo: Scalar, rows: Any, parameters: PyTree) -> Scalar:
        """Return the loss from the sum of the ELBOs of a minibatch."""
        value = -elbo / rows
        if self.log_prior is not None:
            value = value - self.share * self.log_prior(self.pair(parameters)[1])
        return value


def _rows(series: Series, begin: Any, count: int) -> Series:
    """Return consecutive rows of one series, of which at least one exists."""
    rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, begin, count), series.rows)
    length = None if series.length is None else jnp.clip(series.length - begin, 1, count)
    return dataclasses.replace(rows, length=length)


class StepLoss(eqx.Module):
    """The loss of a step on the first rows of each series, or on a random window of them.

    Attributes:
        loss: the loss of a minibatch.
        count: the number of rows.
        num_times: the number of rows among which the window lies; `None` for the first rows.
    """

    loss: ElboLoss
    count: int = eqx.field(static=True)
    num_times: int | None = eqx.field(static=True, default=None)

    def __call__(
        self, parameters: PyTree, batches: AbstractBatches, key: PRNGKey, step: Array
    ) -> Scalar:
        """Return the loss of the minibatch of a step."""
        batch = batches.minibatch(key, step)
        key = jax.random.fold_in(jax.random.fold_in(key, 1), step)
        if self.num_times is None:
            return self.loss(parameters, batch.first_rows(self.count), key)
        key, place_key = jax.random.split(key)
        place = jax.random.randint(place_key, (), 0, -(-self.num_times // self.count))
        begin = jnp.minimum(place * self.count, self.num_times - self.count)
        return self.loss.over_window(parameters, batch, key, begin, self.count)


def stages_of(
    loss: ElboLoss, num_times: int, num_steps: int, objective: Objective, chunk_size: int
) -> list[LossStage]:
    """Return the losses of a fit in their order, each with the step at which it ends."""
    rows = min(objective.window or num_times, num_times)
    last, prefixes = StepLoss(loss, rows, None if rows == num_times else num_times), []
    if objective.growing:
        doublings = math.ceil(math.log2(max(1.0, rows / MIN_PREFIX)))
        prefixes = [MIN_PREFIX * 2**doubling for doubling in range(doublings)]
    stages, half = [], num_steps // 2
    for position, prefix in enumerate(prefixes):
        # Stages end at chunk boundaries, where checkpoints are written.
        until = half * (position + 1) // len(prefixes) // chunk_size * chunk_size
        if until > (stages[-1].until if stages else 0):
            stages.append(LossStage(until, StepLoss(loss, prefix)))
    return [*stages, LossStage(num_steps, last)]
