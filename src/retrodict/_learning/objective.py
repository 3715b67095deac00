"""What a fit ascends: the ELBO of whole series, of prefixes, or of windows of long ones."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from retrodict._chains import AbstractKernelChain
from retrodict._expectations import AbstractEstimator, Estimate, elbo_of_series
from retrodict._families import AbstractFactorFamily, advance_over, factors, infer_series, rows_of
from retrodict._learning.segments import elbo_in_segments, first_law
from retrodict._learning.source import AbstractSource, Batch
from retrodict._learning.train import Stage
from retrodict._model import StateSpaceModel
from retrodict._parameters import Frozen, unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count
from retrodict.distributed import Parallel

SHORTEST_PREFIX = 8
"""The rows with which a growing prefix begins."""


class Objective(eqx.Module):
    """The negative ELBO of a batch in nats a time step, and the prior's share of it.

    Attributes:
        fixed: what of `(family, model)` is not learned.
        estimator: how the ELBO is taken.
        log_prior: the log density of the model's parameters, or `None`.
        share: one over the number of rows of all data, which is what the prior is spread over.
        parallel: whether whole series are read in O(log n) depth.
        segment: how many rows are kept in memory at a time where derivatives are taken; `None` for
            all of them.
    """

    fixed: PyTree
    estimator: AbstractEstimator
    log_prior: Callable[[StateSpaceModel], Scalar] | None
    share: float
    parallel: Parallel = eqx.field(static=True, default=False)
    segment: int | None = eqx.field(static=True, default=None)

    def __call__(self, parameters: PyTree, batch: Batch, key: PRNGKey) -> Scalar:
        """The value for whole series."""
        return self.graded(parameters, batch, key)[0]

    def graded(self, parameters: PyTree, batch: Batch, key: PRNGKey) -> tuple[Scalar, Scalar]:
        """The value for whole series, and its standard error, zero for what does not draw."""

        def one(parameters: PyTree, series: Series, key: PRNGKey) -> Estimate:
            family, model = self.pair(parameters)
            return self.bound(model, family, series, key)

        found, rows = batch.each(one, parameters, batch.keys(key)), batch.num_rows()
        value = self.total(batch.total(found.value), rows, parameters)
        if self.estimator.error != "sampled":
            return value, jnp.zeros_like(value)
        return value, jnp.sqrt(batch.total(found.standard_error**2)) / rows

    def over_window(
        self, parameters: PyTree, batch: Batch, key: PRNGKey, begin: Any, count: int
    ) -> Scalar:
        """The value of the increment of the ELBO over rows begin..begin+count-1.

        If q_{a-1} were exact, the ELBO of rows 0..b-1 less that of rows 0..a-1 would be the ELBO of
        rows a..b-1 under the prior q_{a-1} for the state before them. That prior is held fixed.
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
                chain, unseen_first = _window_chain(family, state, rows)
                local = under(jax.tree.map(lambda leaf: leaf[0], chain.laws))
                return elbo_of_series(local, chain, unseen_first, self.estimator, key).value
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
        return self.total(batch.total(values), rows, parameters)

    def bound(
        self, model: StateSpaceModel, family: AbstractFactorFamily, series: Series, key: PRNGKey
    ) -> Estimate:
        """The ELBO of a series from its first row on."""
        if self.segment is None or series.num_times < 2:
            chain = infer_series(family, series, parallel=self.parallel)
            return elbo_of_series(model, chain, series, self.estimator, key, self.parallel)
        state = family.init()
        return elbo_in_segments(model, family, state, series, self.estimator, key, self.segment)

    def pair(self, parameters: PyTree) -> tuple[Any, StateSpaceModel]:
        """Family and model with these parameters, unwrapped."""
        return unwrap(eqx.combine(parameters, self.fixed))

    def total(self, elbo: Scalar, rows: Any, parameters: PyTree) -> Scalar:
        """The loss from the ELBO of all series of a batch."""
        value = -elbo / rows
        if self.log_prior is not None:
            value = value - self.share * self.log_prior(self.pair(parameters)[1])
        return value


def _window_chain(
    family: AbstractFactorFamily, state: Any, rows: Series
) -> tuple[AbstractKernelChain, Series]:
    """The chain of a window and of the row before it, and those rows, the first of them unseen."""
    exists = rows.exists()
    read, _ = factors(family, state, rows_of(rows), exists)
    seen = jnp.ones(rows.ys.shape, bool) if rows.mask is None else rows.mask
    unseen_first = Series(rows.ys, seen.at[0].set(False), rows.inputs, rows.length)
    return family.assemble(read, exists, rows.length), unseen_first


def _rows(series: Series, begin: Any, count: int) -> Series:
    """Some consecutive rows of one series; at least one of them exists."""

    def cut(array: Array | None) -> Array | None:
        return None if array is None else lax.dynamic_slice_in_dim(array, begin, count)

    length = None if series.length is None else jnp.clip(series.length - begin, 1, count)
    return Series(
        lax.dynamic_slice_in_dim(series.ys, begin, count),
        cut(series.mask),
        cut(series.inputs),
        length,
    )


def stages_of(
    objective: Objective,
    num_times: int,
    num_steps: int,
    window: int | None,
    growing: bool,
    chunk_size: int,
) -> list[Stage]:
    """The losses of a fit, one after another; the first part of their data is a source."""
    n = num_times

    def on_rows(count: int) -> Callable[..., Scalar]:
        def loss(
            parameters: PyTree, data: tuple[AbstractSource, Any], key: PRNGKey, step: Array
        ) -> Scalar:
            batch = data[0].draw(key, step)
            draw_key = jax.random.fold_in(jax.random.fold_in(key, 1), step)
            return objective(parameters, batch.first_rows(count), draw_key)

        return loss

    def on_windows(count: int) -> Callable[..., Scalar]:
        starts = -(-n // count)

        def loss(
            parameters: PyTree, data: tuple[AbstractSource, Any], key: PRNGKey, step: Array
        ) -> Scalar:
            batch = data[0].draw(key, step)
            draw_key, place_key = jax.random.split(
                jax.random.fold_in(jax.random.fold_in(key, 1), step)
            )
            begin = jnp.minimum(jax.random.randint(place_key, (), 0, starts) * count, n - count)
            return objective.over_window(parameters, batch, draw_key, begin, count)

        return loss

    if window is not None:
        window = check_count(window, "window")
    rows = n if window is None else min(window, n)
    last = on_rows(n) if rows == n else on_windows(rows)
    prefixes = []
    if growing:
        length = SHORTEST_PREFIX
        while length < rows:
            prefixes.append(length)
            length *= 2
    stages, half = [], num_steps // 2
    for position, prefix in enumerate(prefixes):
        # Stages end at chunk boundaries, where checkpoints are written.
        until = half * (position + 1) // len(prefixes) // chunk_size * chunk_size
        if until > (stages[-1].until if stages else 0):
            stages.append(Stage(until, on_rows(prefix)))
    return [*stages, Stage(num_steps, last)]
