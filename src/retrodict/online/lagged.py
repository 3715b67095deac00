"""Learning along a stream, while each row is answered as a frozen stream would answer it."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from retrodict._families import AbstractFamily, KalmanFamily, Row
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._types import PRNGKey
from retrodict._validate import check_key
from retrodict.online.fixed_lag import (
    FixedLag,
    LagMoments,
    LagRows,
    LagState,
    advance_rows,
    chunk_for,
)
from retrodict.online.learner import LearnerState, OnlineLearner, along, learn_row
from retrodict.online.parts import Parts, dtype_of


class LaggedLearnerState(eqx.Module):
    """What a `LaggedLearner` carries from one row to the next: arrays of a size that stays.

    Attributes:
        learner: what is learned, and what it takes to go on learning.
        lag: the last filtering law, and the backward kernels of the last rows.
    """

    learner: LearnerState
    lag: LagState


class LaggedLearnerOutput(eqx.Module):
    """What is known after row k of a stream; along a leading axis `time` after many of them.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}.
        smoothed: the moments of x_{k-lag} given y_{0:k}; those of x_0 before that many have come.
        row: the row that `smoothed` is of, k − lag or 0.
        ready: whether k has come to the lag.
        elbo_increment: what the row added to the ELBO, in nats.
        gradient_norm: the norm of what was ascended, zero at rows without a gradient.
        skipped: whether the row was skipped, since what followed from it was not finite.
    """

    filtered: LagMoments
    smoothed: LagMoments
    row: Int[Array, "..."]
    ready: Bool[Array, "..."]
    elbo_increment: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    skipped: Bool[Array, "..."]


class LaggedLearner(eqx.Module):
    """An `OnlineLearner`, and beside it the posterior of its stream with a fixed lag.

    Row k adds one filtering law q_k and one backward kernel q_{k-1|k}, both read with the
    parameters as they stood before the step of that row; what was there before stays. The smoothed
    law at k − lag is q_k pushed back through the last `lag` kernels, as in `FixedLag`, and is equal
    to it as long as nothing moves. Each row is read once. What the kernels of a family share, such
    as the network of a `NonlinearFamily`, is as it stands now. A row that the learner skips is
    answered as one in which nothing was seen.

    However a stream is cut into chunks, stored and gone on with, answers and parameters are the
    same to the last bit.

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
        learner: what is learned, and how; without a family, rows are answered by the exact
            posterior of its model.
        lag: how many rows a smoothed row waits for.
        num_samples: how many paths to draw at each row, for families that draw.
        input_dim: the dimension of the inputs, for a learner without a family and a model off which
            it cannot be read.
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
        """How many rows a smoothed row waits for."""
        return self.live.lag

    def init(self, key: PRNGKey) -> LaggedLearnerState:
        """The state before anything was read.

        Args:
            key: a typed key; what the lag draws is what `FixedLag` draws with it.
        """
        check_key(key, "LaggedLearner.init")
        # The lag folds the number of each row into the key; this one comes after all of them.
        learner = self.learner.init(jax.random.fold_in(key, jnp.uint32(2**32 - 1)))
        state = LaggedLearnerState(learner, self.live.init(key))
        # Weakly typed arrays would come back as others, and the program be compiled again.
        return jax.tree.map(_strongly_typed, state)

    def family(self, state: LaggedLearnerState) -> AbstractFamily | None:
        """The family as it is learned so far; `None` if there is none."""
        return self.learner.family(state.learner)

    def model(self, state: LaggedLearnerState) -> StateSpaceModel:
        """The model as it is learned so far."""
        return self.learner.model(state.learner)

    def scan(
        self,
        state: LaggedLearnerState,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> tuple[LaggedLearnerState, LaggedLearnerOutput]:
        """Reads rows in one compiled program, with a step at each.

        Args:
            state: what `init` or the previous call returned.
            ys: observations, of shape `(time, obs)` with at least two rows; NaN where missing.
            mask: true where an entry was seen.
            inputs: inputs of shape `(time, input)`, if the model takes them.
            length: how many of the rows exist. A chunk that is padded to the size of the others is
                not compiled anew; a single row is padded to two.

        Returns:
            The next state, and what was known after each row; NaN from `length` on.
        """
        rows, count = chunk_for(self.live.family, ys, mask=mask, inputs=inputs, length=length)
        if rows.y.shape[0] < 2:
            # A loop of a single step is compiled without the loop, and rounds otherwise.
            raise ValueError(
                f"LaggedLearner.scan expects at least two rows, got {rows.y.shape[0]}. Pad them and"
                " give their length."
            )
        return _scan(self, state, rows, count)

    def flush(self, state: LaggedLearnerState) -> LagRows:
        """The last `lag` rows, given all that was read, as `FixedLag.flush` gives them."""
        family = _family(self, state.learner.parameters)
        return FixedLag(family, self.lag, self.live.num_samples).flush(state.lag)


def _strongly_typed(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.lax.convert_element_type(leaf, leaf.dtype)


def _family(lagged: LaggedLearner, parameters: Any) -> AbstractFamily:
    """The family at these parameters, in plain arrays; that of the model if there is no other."""
    family, model = Parts(parameters, lagged.learner.parts.fixed).whole
    if family is not None:
        return family
    return eqx.tree_at(lambda exact: exact.model, lagged.live.family, model)


@eqx.filter_jit
def _scan(
    lagged: LaggedLearner, state: LaggedLearnerState, rows: Row, count: Int[Array, ""]
) -> tuple[LaggedLearnerState, LaggedLearnerOutput]:
    dtype = dtype_of(state.learner.parameters)
    u = None if rows.u is None else rows.u.astype(dtype)
    rows = Row(rows.y.astype(dtype), rows.seen, u)
    return along(partial(_read, lagged), state, rows, count)


def _read(
    lagged: LaggedLearner, state: LaggedLearnerState, row: Row
) -> tuple[LaggedLearnerState, LaggedLearnerOutput]:
    """Learns from one row, and answers it at the parameters before its step."""
    learner, learned = learn_row(lagged.learner, state.learner, row)
    seen = None if row.seen is None else row.seen & ~learned.skipped
    one = jax.tree.map(lambda leaf: leaf[None], row._replace(seen=seen))
    live = FixedLag(_family(lagged, state.learner.parameters), lagged.lag, lagged.live.num_samples)
    lag, out, _ = advance_rows(live, state.lag, one, None)
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
