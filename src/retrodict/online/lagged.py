"""Learning along a stream, together with its fixed-lag posterior."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._families import AbstractFamily, KalmanFamily, Row, rows_of
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict.online.fixed_lag import FixedLag, LagMoments, LagRows, LagState, advance_lag
from retrodict.online.learner import LearnerState, OnlineLearner, learn_row
from retrodict.online.parts import Parts, dtype_of
from retrodict.online.stream import AbstractStream, cast, read_in_loop, require_key


class LaggedLearnerState(eqx.Module):
    """The state of a `LaggedLearner`: arrays whose size does not grow.

    Attributes:
        learner: the state of the learner.
        lag: the last filtering law, and the backward kernels of the last rows.
    """

    learner: LearnerState
    lag: LagState


class LaggedLearnerOutput(eqx.Module):
    """The output after row k of a stream, with a leading axis `time` for several rows.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}.
        smoothed: the moments of x_{k-lag} given y_{0:k}; those of x_0 while k < lag.
        row: the row that `smoothed` belongs to, max(k − lag, 0).
        ready: whether k ≥ lag.
        elbo_increment: what the row added to the ELBO, in nats.
        gradient_norm: the norm of the gradient of the step, zero at rows without a step.
        skipped: whether the row was skipped, since a result was non-finite.
    """

    filtered: LagMoments
    smoothed: LagMoments
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]
    elbo_increment: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    skipped: Bool[Array, "..."]


class LaggedLearner(AbstractStream[LaggedLearnerState, LaggedLearnerOutput]):
    """An `OnlineLearner` together with the fixed-lag posterior of its stream.

    Row k adds one filtering law q_k and one backward kernel q_{k-1|k}, both computed with the
    parameters before the step of that row; earlier laws and kernels stay as they are. The smoothed
    law at k − lag is q_k pushed back through the last `lag` kernels. It equals that of `FixedLag`
    as long as no parameter moves. Parts that all kernels of a family share, such as the network of
    a `NonlinearFamily`, have their current parameters. A row that the learner skips is smoothed as
    a missing row.

    Example:
        >>> import jax, jax.numpy as jnp, optax, retrodict as rd
        >>> model = rd.models.local_level(level_scale=0.1)
        >>> gradient, optimiser = rd.online.KalmanScore(), optax.adam(1e-2)
        >>> learner = rd.online.OnlineLearner(None, model, gradient, optimiser)
        >>> lagged = rd.online.LaggedLearner(learner, lag=2)
        >>> state, rows = lagged.scan(lagged.init(jax.random.key(0)), jnp.ones((5, 1)))
        >>> rows.row.tolist(), rows.smoothed.mean.shape
        ([0, 0, 0, 1, 2], (5, 1))
        >>> lagged.flush(state).row.tolist()
        [3, 4]

    Args:
        learner: the learner; without a family, rows are smoothed by the exact posterior of its
            model.
        lag: the number of rows that a smoothed row waits for.
        num_samples: the number of paths to draw per row, for families that draw samples.
        input_dim: the dimension of the inputs, for a learner without a family and a model that
            does not determine it.
    """

    learner: OnlineLearner
    live: FixedLag

    def __init__(
        self,
        learner: OnlineLearner,
        lag: int,
        *,
        num_samples: int = 256,
        input_dim: int | None = None,
    ):
        if not isinstance(learner, OnlineLearner):
            raise TypeError(
                f"LaggedLearner expects an OnlineLearner, got {type(learner).__name__}."
            )
        self.learner = learner
        family, model = eqx.combine(*learner.parts)
        if family is None:
            family = KalmanFamily(unwrap(model), input_dim=input_dim)
        self.live = FixedLag(family, lag, num_samples)

    @property
    def lag(self) -> int:
        """The number of rows that a smoothed row waits for."""
        return self.live.lag

    def family(self, state: LaggedLearnerState) -> AbstractFamily | None:
        """Return the family as learned so far; `None` if there is none."""
        return self.learner.family(state.learner)

    def model(self, state: LaggedLearnerState) -> StateSpaceModel:
        """Return the model as learned so far."""
        return self.learner.model(state.learner)

    def flush(self, state: LaggedLearnerState) -> LagRows:
        """Return the last `lag` rows, given all rows that were read, as `FixedLag.flush` does."""
        return self._at(state.learner.parameters).flush(state.lag)

    def _start(self, key: PRNGKey | None, data: PyTree) -> LaggedLearnerState:
        key = require_key(self, key)
        # The lag folds the index of each row into the key; this one comes after all of them.
        learner = self.learner.init(jax.random.fold_in(key, jnp.uint32(2**32 - 1)))
        state = LaggedLearnerState(learner, self.live.init(key))
        # Weak types would change in the loop, and the program would be compiled again.
        return jax.tree.map(_strongly_typed, state)

    @property
    def _checked_against(self) -> AbstractFamily:
        return self.live.family

    def _advance(
        self, state: LaggedLearnerState, series: Series, data: PyTree
    ) -> tuple[LaggedLearnerState, LaggedLearnerOutput]:
        rows = rows_of(cast(series, dtype_of(state.learner.parameters)))
        return read_in_loop(partial(_read, self), state, rows, series.length)

    def _at(self, parameters: PyTree) -> FixedLag:
        """Return the fixed-lag smoother at these parameters, in plain arrays."""
        family, model = Parts(parameters, self.learner.parts.fixed).whole
        if family is None:
            family = eqx.tree_at(lambda exact: exact.model, self.live.family, model)
        return FixedLag(family, self.lag, self.live.num_samples)


def _strongly_typed(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _read(
    lagged: LaggedLearner, state: LaggedLearnerState, row: Row
) -> tuple[LaggedLearnerState, LaggedLearnerOutput]:
    """Learn from one row, and smooth with the parameters before its step."""
    learner, learned = learn_row(lagged.learner, state.learner, row)
    observed = row.seen & ~learned.skipped if row.seen is not None else None
    ys, mask, inputs = jax.tree.map(lambda leaf: leaf[None], (row.y, observed, row.u))
    series = Series(ys, mask, inputs, None)
    lag, out, _ = advance_lag(lagged._at(state.learner.parameters), state.lag, series)
    out = jax.tree.map(lambda leaf: leaf[0], out)
    return LaggedLearnerState(learner, lag), LaggedLearnerOutput(
        out.filtered,
        out.smoothed,
        out.row,
        out.ready,
        learned.elbo_increment,
        learned.gradient_norm,
        learned.skipped,
    )
