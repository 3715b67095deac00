"""Particle smoothing of an additive functional along a stream."""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from retrodict._arrays import PRNGKey, Scalar
from retrodict._expectations import AbstractFunctional
from retrodict._families import input_dim_of
from retrodict._model import Series, StateSpaceModel, unwrap
from retrodict.online.stream import (
    AbstractStream,
    cast,
    complete,
    finite_rows,
    float_type,
    read_in_loop,
    require_key,
    skip_nonfinite,
    zeros_like_shapes,
)
from retrodict.particles import (
    AbstractBackwardSampler,
    AdditiveSmoother,
    OnlineState,
    RejectionBackward,
    Scheme,
)

_REJECTION = RejectionBackward()


class OnlineOutput(eqx.Module):
    """The output after row k of a stream, with a leading axis `time` for several rows.

    Attributes:
        value: the smoothed functional E[H(x_{0:k}) | y_{0:k}].
        log_evidence: an estimate of log p(y_{0:k}) of the rows that were not skipped.
        ess: the effective sample size.
        skipped: whether row k was read as missing, since no particle had a positive weight or a
            result was non-finite.
    """

    value: PyTree
    log_evidence: Scalar
    ess: Scalar
    skipped: Bool[Array, "..."]


class OnlineSmoother(AbstractStream[OnlineState, OnlineOutput]):
    """A smoothed additive functional along a stream, by particles.

    With `backward` the recursion is that of `paris`; without, that of `forward_smoother`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> smoother = rd.online.OnlineSmoother(model, rd.StateSum(), num_particles=50)
        >>> state = smoother.init(jax.random.key(0))
        >>> state, out = smoother.update(state, jnp.ones(1))
        >>> out.value.shape
        (1,)

    Args:
        model: the model; its transition must have a density.
        functional: any additive functional; by default its data is the row `Series(ys, mask,
            inputs)`, as `LogJoint` and `Score` read it.
        num_particles: the number of particles.
        backward: the sampler of the backward kernel; `None` for the expectation over all
            particles, at a cost of N² per row.
        num_draws: the number of draws that each particle averages; at least two, since with one
            draw the particles would follow the genealogy.
        resampling: the resampling scheme of the filter.
        threshold: the share of the particles below which the filter resamples.
        input_dim: the dimension of the inputs, for a model that does not determine it.
    """

    _takes_data: ClassVar[bool] = True
    smoother: AdditiveSmoother
    input_dim: int = eqx.field(static=True)

    def __init__(
        self,
        model: StateSpaceModel,
        functional: AbstractFunctional,
        num_particles: int = 1000,
        *,
        backward: AbstractBackwardSampler | None = _REJECTION,
        num_draws: int = 2,
        resampling: Scheme = "systematic",
        threshold: float = 0.5,
        input_dim: int | None = None,
    ):
        owner = "OnlineSmoother"
        self.smoother = AdditiveSmoother(
            owner, model, functional, num_particles, backward, num_draws, resampling, threshold
        )
        self.input_dim = input_dim_of(owner, unwrap(model), input_dim)

    def _start(self, key: PRNGKey | None, data: PyTree) -> OnlineState:
        model, dtype = self._checked_against, self._dtype
        u = jnp.zeros(self.input_dim, dtype) if self.input_dim else None

        def first(key: PRNGKey) -> OnlineState:
            x = jnp.asarray(model.prior.sample(key))
            y = jnp.asarray(model.emission.sample(key, x, u)).astype(dtype)
            row = Series(y, jnp.ones(y.shape, bool), u)
            return self.smoother.start(key, row, row if data is None else data)

        key = require_key(self, key)
        shapes = jax.eval_shape(first, key)
        state = zeros_like_shapes(eqx.tree_at(lambda state: state.key, shapes, None))
        time = jnp.full_like(state.status_time, -1)
        return dataclasses.replace(state, key=key, status_time=time)

    @property
    def _checked_against(self) -> StateSpaceModel:
        return self.smoother.filter.model

    @property
    def _dtype(self) -> Any:
        return float_type(self.smoother.filter.model)

    def _advance(
        self, state: OnlineState, series: Series, data: PyTree
    ) -> tuple[OnlineState, OnlineOutput]:
        rows = (cast(series, self._dtype).rows, data)
        return read_in_loop(self._read, state, rows, series.length)

    def _read(self, state: OnlineState, row: tuple) -> tuple[OnlineState, OnlineOutput]:
        """Read one row, as missing if the filter fails at it."""
        series, data = jax.tree.map(lambda leaf: leaf[None], row)
        series = complete(series)
        # Particles without weight have a log weight of −∞.
        state, out = skip_nonfinite(self._try, state, series, data, check_state=False)
        return state, jax.tree.map(lambda leaf: leaf[0], out)

    def _try(
        self, state: OnlineState, series: Series, data: PyTree
    ) -> tuple[OnlineState, OnlineOutput, Bool[Array, "time"]]:
        rows = series.rows
        row, data = jax.tree.map(lambda leaf: leaf[0], (rows, rows if data is None else data))
        after = lax.cond(
            state.num_read == 0,
            lambda: self.smoother.start(state.key, row, data),
            lambda: self.smoother.advance(state, row, data),
        )
        out = OnlineOutput(after.value, after.log_evidence, after.ess, jnp.zeros((), bool))
        out = jax.tree.map(lambda leaf: leaf[None], out)
        return after, out, finite_rows(out) & (after.status == 0)
