"""The ELBO of a long series by segments, whose gradient needs little memory.

Reverse-mode differentiation stores intermediate values of every row. Here the rows after the first
are divided into segments of L. A forward pass stores the state of the family at their ends only. A
backward pass reads each segment again, given the law of its last state from the segments after it:

    ELBO = E[log χ(x_0) + log g(x_0, y_0) − log q_{n-1}(x_{n-1})]
           + Σ_segments Σ_{k in it} E[log m(x_{k-1}, x_k) + log g(x_k, y_k) − log q_{k-1|k}].

The values of a segment are recomputed for its derivative, so that memory grows with L + n / L, or
with √n for L = √n. Each row is read three times instead of once.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import Scalar
from retrodict._chains import (
    AbstractBackwardKernel,
    AbstractKernelChain,
    LinearGaussianChain,
    SampledChain,
)
from retrodict._expectations import (
    AbstractEstimator,
    BackwardSampling,
    Estimate,
    LogJoint,
    Paths,
    along_path,
    average,
    estimate,
    existing_rows,
    initial_value,
)
from retrodict._families import AbstractFactorFamily, factors
from retrodict._model import (
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    fill_padding,
)


def elbo_in_segments(
    model: StateSpaceModel,
    family: AbstractFactorFamily,
    state: Any,
    series: Series,
    data: Series,
    estimator: AbstractEstimator,
    key: Any,
    segment: int,
) -> Estimate:
    """Compute the same as `elbo_of_series` for the chain of a family, in less memory.

    Args:
        model: an unwrapped model; its prior is the law of the state in the first row.
        family: an unwrapped family.
        state: the family's state before the first row.
        series: a prepared series of two rows or more, as the family reads it.
        data: the same as the model reads it: the mask of the first row may differ.
        estimator: how expectations are estimated.
        key: a typed key, or `None` if the estimator does not sample.
        segment: the number of rows per segment.
    """
    _, state = factors(family, state, series.rows.at(slice(0, 1)))
    segments = _segments(family, state, series, segment)
    if isinstance(estimator, BackwardSampling):
        method = _BySampling(model, family, estimator, key)
    else:
        method = _ByMoments(model, family, estimator, key)

    def back(onward: PyTree, segment: _Segment) -> tuple[PyTree, None]:
        return method.back(onward, segment), None

    last = jax.tree.map(lambda leaf: leaf[-1], segments)
    onward = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(method.begin, last)
    )
    onward, _ = lax.scan(jax.checkpoint(back), onward, segments, reverse=True)
    return method.end(onward, data.rows.at(slice(0, 1)))


class _Segment(eqx.Module):
    """The rows of a segment, and a node for the row before them.

    Attributes:
        state: the state of the family after that row.
        rows: the rows of the segment, and the number of them that exist.
        has_later_rows: whether a row after the segment exists.
        contains_last_row: whether the chain ends in the segment.
        number: the index of the segment.
    """

    state: Any
    rows: Series
    has_later_rows: Bool[Array, "*segment"]
    contains_last_row: Bool[Array, "*segment"]
    number: Int[Array, "*segment"]

    def chain(self, family: AbstractFactorFamily) -> AbstractKernelChain:
        """Return the chain of the nodes. The law of the first is a filler unless it is the last."""
        read, _ = factors(family, self.state, self.rows)
        with_first = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:1], leaf]), read)
        length: Any = self.rows.length
        return family.assemble(with_first, length + 1)

    def data(self) -> Series:
        """Return the observations at the nodes, without that of the first."""
        data = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:1], leaf]), self.rows.rows)
        mask = jnp.ones(data.ys.shape, bool) if data.mask is None else data.mask
        return dataclasses.replace(data, mask=mask.at[0].set(False))


def _segments(family: AbstractFactorFamily, state: Any, series: Series, count: int) -> _Segment:
    """Return all segments, with a leading axis; the last is padded with rows that do not exist."""
    following = series.num_times - 1
    count = min(count, following)  # segments are padded to their size
    number = -(-following // count)
    missing = number * count - following

    def cut(leaf: Array) -> Array:
        filled = jnp.concatenate([leaf[1:], jnp.repeat(leaf[-1:], missing, axis=0)])
        return filled.reshape(number, count, *leaf.shape[1:])

    length = jnp.asarray(series.num_times) if series.length is None else series.length
    begin = count * jnp.arange(number)  # the row before each segment
    rows = jax.tree.map(cut, series.rows)
    rows = dataclasses.replace(rows, length=jnp.clip(length - begin - 1, 0, count))

    def advance(state: Any, rows: Series) -> tuple[Any, Any]:
        return factors(family, state, rows)[1], state

    _, states = lax.scan(jax.checkpoint(advance), state, rows)
    has_later_rows = begin + count + 1 < length
    contains_last_row = ~has_later_rows & ((begin + 1 < length) | (begin == 0))
    return _Segment(states, rows, has_later_rows, contains_last_row, jnp.arange(number))


class _Marginal(NamedTuple):
    """The result of later segments if expectations are computed from moments.

    Attributes:
        law: the law of the state before them.
        value: their part of the ELBO.
        square: the square of its standard error.
    """

    law: Gaussian
    value: Scalar
    square: Scalar


class _ByMoments(eqx.Module):
    """Expectations of linear-Gaussian chains from their marginal laws."""

    model: StateSpaceModel
    family: AbstractFactorFamily
    estimator: AbstractEstimator
    key: Any

    def begin(self, segment: _Segment) -> _Marginal:
        """Return a value of the right shape, which the last segment ignores."""
        law = self._chain(segment).terminal
        return _Marginal(law, jnp.sum(law.mean), jnp.sum(law.mean))

    def back(self, onward: _Marginal, segment: _Segment) -> _Marginal:
        """Return the result of the segments from this one on."""
        chain = self._chain(segment)
        last = jax.tree.map(
            lambda later, here: jnp.where(segment.has_later_rows, later, here),
            onward.law,
            chain.terminal,
        )
        laws = jax.tree.map(lambda leaf, end: leaf.at[-1].set(end), chain.laws, last)
        chain = LinearGaussianChain(laws, chain.kernels, chain.length)
        terms = LogJoint(self.model).terms()[1:]
        data = fill_padding(segment.data(), existing_rows(chain))
        view = self.estimator.view(chain)
        noise = self.estimator.draw(terms, view, _segment_key(self.key, segment.number + 1))
        terms_mean = average(
            self.estimator,
            lambda noise: self.estimator.evaluate(terms, view, noise, data),
            noise,
        )
        entropy = chain.entropy() - jnp.where(
            segment.contains_last_row, 0.0, chain.terminal.entropy()
        )
        return _Marginal(
            Gaussian(view.states.mean[0], view.states.scale[0]),
            onward.value + terms_mean.value + entropy,
            onward.square + terms_mean.standard_error**2,
        )

    def end(self, onward: _Marginal, data: Series) -> Estimate:
        """Return the ELBO, with the terms of the first row."""
        mean, scale = onward.law.mean[None], onward.law.scale_tril[None]
        chain = LinearGaussianChain.from_arrays(mean, scale, scale[:0], mean[:0], scale[:0])
        first = estimate(
            chain, LogJoint(self.model), data, self.estimator, _segment_key(self.key, 0)
        )
        error = jnp.sqrt(onward.square + first.standard_error**2)
        return Estimate(onward.value + first.value, error)

    def _chain(self, segment: _Segment) -> LinearGaussianChain:
        chain = segment.chain(self.family)
        if not isinstance(chain, LinearGaussianChain):
            raise TypeError(
                f"{type(self.estimator).__name__} reads the moments of a LinearGaussianChain, got"
                f" {type(chain).__name__}. Use BackwardSampling(num_samples) with a key."
            )
        return chain


class _PathsSoFar(NamedTuple):
    """The result of later segments if paths are sampled.

    Attributes:
        paths: the states before them, and the weights of their paths.
        values: their part of the ELBO, one per replicate.
    """

    paths: Paths
    values: Float[Array, "replicate"]


class _BySampling(eqx.Module):
    """Expectations of any chain from paths, continued from each segment to the one before."""

    model: StateSpaceModel
    family: AbstractFactorFamily
    estimator: BackwardSampling
    key: Any

    def begin(self, segment: _Segment) -> _PathsSoFar:
        """Return a value of the right shape, which the last segment ignores."""
        trace, weights = self.estimator.trace(self._chain(segment), self.key)
        return _PathsSoFar(Paths(trace.paths[:, :, 0], weights), jnp.sum(weights, axis=1))

    def back(self, onward: _PathsSoFar, segment: _Segment) -> _PathsSoFar:
        """Return the result of the segments from this one on."""
        chain = self._chain(segment)
        later, later_weights = onward.paths

        def last(states: Float[Array, "path state"]) -> Float[Array, "path state"]:
            return jnp.where(segment.has_later_rows, later.reshape(states.shape), states)

        key = _segment_key(self.key, segment.number)
        trace, weights = self.estimator.trace(chain, key, last)
        weights = jnp.where(segment.has_later_rows, later_weights, weights)
        terms = LogJoint(self.model).terms()[1:]
        data = fill_padding(segment.data(), existing_rows(chain))
        density = Frozen(chain).value if self.estimator.stop_score else chain

        def along(path: Float[Array, "node state"]) -> Scalar:
            # Later segments sampled the last state of a chain that goes on.
            again = jnp.where(segment.contains_last_row, 0.0, density.terminal.log_prob(path[-1]))
            return along_path(terms, chain, path, data) - density.log_prob(path) + again

        groups = Paths(trace.paths, weights)
        values = jax.vmap(lambda group: self.estimator.over_group(along, group))(groups)
        return _PathsSoFar(Paths(trace.paths[:, :, 0], weights), onward.values + values)

    def end(self, onward: _PathsSoFar, data: Series) -> Estimate:
        """Return the ELBO, with the terms of the first row."""
        terms, row = LogJoint(self.model).terms(), jax.tree.map(lambda leaf: leaf[0], data)
        values = jax.vmap(
            lambda group: self.estimator.over_group(lambda x: initial_value(terms, x, row), group)
        )(onward.paths)
        return average(self.estimator, lambda value: value, onward.values + values)

    def _chain(self, segment: _Segment) -> SampledChain:
        chain = segment.chain(self.family)
        if isinstance(chain, LinearGaussianChain):
            return SampledChain(chain.laws, _LinearKernel(), chain.kernels, chain.length)
        return chain  # pyright: ignore


class _LinearKernel(AbstractBackwardKernel):
    """Linear-Gaussian kernels for a chain whose paths are sampled."""

    def law(self, step: LinearGaussianKernel, x: Float[Array, "state"]) -> Gaussian:
        """Return N(G x + c, s sᵀ)."""
        return step.law(x, None)


def _segment_key(key: Any, number: Any) -> Any:
    """Return the key of one segment; `None` for an estimator that does not sample."""
    return None if key is None else jax.random.fold_in(key, number)
