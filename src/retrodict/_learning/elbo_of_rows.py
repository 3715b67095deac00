"""The ELBO of rows of a series, from its start or as an increment."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, Scalar
from retrodict._expectations import AbstractEstimator, Estimate, elbo_of_series
from retrodict._families import AbstractFactorFamily, infer_series
from retrodict._learning.segments import elbo_in_segments
from retrodict._model import Gaussian, Series, StateSpaceModel, dense_scale
from retrodict.distributed import Parallel


@functools.singledispatch
def elbo_of_rows(
    model: StateSpaceModel,
    family: AbstractFactorFamily,
    rows: Series,
    estimator: AbstractEstimator,
    key: Any,
    *,
    state: Any = None,
    from_start: Any = None,
    segment: int | None = None,
    parallel: Parallel = False,
) -> Estimate:
    """Compute the ELBO of rows 0..b-1 of a series, or its increment by rows a..b-1.

    Other classes of models register a function of their own, with the same arguments.

    The increment is ELBO(0..b-1) − ELBO(0..a-1). It is approximated by the ELBO of rows a..b-1 with
    prior q_{a-1}, held fixed. It is exact if q_{a-1} is.

    Args:
        model: an unwrapped model.
        family: an unwrapped family.
        rows: rows 0..b-1; for the increment, rows a-1..b-1.
        estimator: how expectations are estimated.
        key: a typed key, or `None` if the estimator does not sample.
        state: the state of the family before the first of the rows; by default that of `init`.
        from_start: whether the rows are 0..b-1, possibly traced; by default if there is no `state`.
        segment: the number of rows to store at a time for derivatives; `None` for all.
        parallel: whether to run in O(log n) depth; from the start, without segments.
    """
    from_start = state is None if from_start is None else from_start
    state = family.init() if state is None else state
    segment = None if rows.num_times < 2 else segment
    read = rows if segment is None else rows.rows.at(slice(0, 1))
    chain, data = infer_series(family, read, state, parallel=parallel), rows
    if from_start is not True:
        law = lax.stop_gradient(jax.tree.map(lambda leaf: leaf[0], chain.laws))
        prior = law if from_start is False else _selected(from_start, model.prior, law)
        model = StateSpaceModel(prior, model.transition, model.emission)
        observed = jnp.ones(rows.ys.shape, bool) if rows.mask is None else rows.mask
        data = dataclasses.replace(rows, mask=observed.at[0].set(observed[0] & from_start))
    if segment is None:
        return elbo_of_series(model, chain, data, estimator, key, parallel)
    return elbo_in_segments(model, family, state, rows, data, estimator, key, segment)


class _SelectedLaw(eqx.Module):
    """One of two laws, selected at run time."""

    first: Bool[Array, ""]
    one: Any
    other: Any

    def log_prob(self, x: Float[Array, "state"]) -> Scalar:
        """Return the log density of the selected law."""
        one = jnp.sum(jnp.asarray(self.one.log_prob(x)))
        return jnp.where(self.first, one, self.other.log_prob(x))

    def sample(self, key: PRNGKey) -> Float[Array, "state"]:
        """Draw from the selected law."""
        return jnp.where(self.first, self.one.sample(key), self.other.sample(key))


def _selected(first: Bool[Array, ""], one: Any, other: Any) -> Any:
    if isinstance(one, Gaussian) and isinstance(other, Gaussian):
        # A Gaussian has expectations in closed form.
        pairs = [(law.mean, dense_scale(law.scale_tril)) for law in (one, other)]
        return Gaussian(*jax.tree.map(lambda a, b: jnp.where(first, a, b), *pairs))
    return _SelectedLaw(first, one, other)
