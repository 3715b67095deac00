"""Learning a family and a model from one stream, row by row, in memory that does not grow."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count
from retrodict._expectations import Marginals
from retrodict._families import (
    AbstractFactorFamily,
    AbstractFamily,
    Factor,
    KalmanFamily,
)
from retrodict._model import LinearGaussianKernel, Series, StateSpaceModel, dense_scale, unwrap
from retrodict._numerics import linalg
from retrodict.online.fixed_lag import (
    AbstractLagOutput,
    FixedLag,
    LagRows,
    LagState,
    advance_lag,
    moments_of_paths,
    push_forward,
)
from retrodict.online.gradient import (
    AbstractRecursiveGradient,
    Learn,
    Parts,
    check_gradient,
    parts_of,
)
from retrodict.online.stream import (
    AbstractStream,
    all_finite,
    cast,
    choose,
    complete,
    read_in_loop,
    require_key,
)

NUM_DRAWS = 64
"""The number of states drawn for the smoothed moments of families that draw samples."""


class LearnerState(eqx.Module):
    """The state of an `OnlineLearner`: arrays whose size does not grow.

    Attributes:
        parameters: the learned parameters: `(family, model)` with `None` for all fixed leaves.
        optimiser: the state of the optimiser.
        gradient: the state of the recursive gradient.
        num_read: the number of rows that were read.
        num_skipped: the number of rows that were skipped, since a result was non-finite.
        key: the key from which the noise of each row is derived.
    """

    parameters: PyTree
    optimiser: PyTree
    gradient: PyTree
    num_read: Int[Array, ""]
    num_skipped: Int[Array, ""]
    key: PRNGKey


class LearnerOutput(AbstractLagOutput):
    """The output after row k of a stream, with a leading axis `time` for several rows.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}, before the optimiser step of
            this row; before the last step if there are several.
        smoothed: the moments of x_{k-lag} given y_{0:k}, with lag 1 for an `OnlineLearner`. While
            k < lag, those of x_0 by a `LaggedLearner`, and NaN by an `OnlineLearner`.
        row: the row that `smoothed` belongs to, max(k − lag, 0).
        ready: whether k ≥ lag.
        skipped: whether the row was skipped, since a result was non-finite.
        elbo_increment: what the row added to the ELBO, in nats.
        gradient_norm: the norm of the gradient of the step, zero at rows without a step.
    """

    elbo_increment: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]


class StepResult(NamedTuple):
    """The result of one optimiser step at a row.

    Attributes:
        gradient: the next state of the recursive gradient.
        factor: the factors of the row.
        elbo_increment: what the row added to the ELBO.
        norm: the norm of the gradient.
        finite_row: whether the state and the increment are finite.
        finite: whether the step is finite as well.
    """

    gradient: PyTree
    factor: Factor
    elbo_increment: Scalar
    norm: Scalar
    finite_row: Bool[Array, ""]
    finite: Bool[Array, ""]


class OnlineLearner(AbstractStream[LearnerState, LearnerOutput]):
    """A family λ, a model θ or both, learned from one stream together with its posterior.

    Each row adds to the gradient of the ELBO at the current parameters, and an optimiser step
    ascends what it added. For θ this is recursive maximum likelihood, by the difference of
    successive expectations of Fisher's identity. The part of a gradient that belongs to earlier
    rows was computed at earlier parameters: a bias of the order of a step, which vanishes as steps
    shrink. A row is skipped and counted if its step or the state after it is non-finite; if only
    the step is, the rows that a window still holds are treated as missing. The noise of a row
    depends on the key and its index alone.

    Example:
        >>> import jax, jax.numpy as jnp, optax, retrodict as rd
        >>> def model(weight):
        ...     return rd.StateSpaceModel(
        ...         prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...         transition=rd.LinearGaussianKernel(
        ...             weight * jnp.eye(1), rd.Frozen(jnp.zeros(1)), rd.Frozen(jnp.eye(1))
        ...         ),
        ...         emission=rd.Frozen(
        ...             rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), 0.5 * jnp.eye(1))
        ...         ),
        ...     )
        >>> _, ys = model(0.9).simulate(jax.random.key(0), num_times=500)
        >>> gradient, optimiser = rd.online.KalmanScore(), optax.sgd(rd.online.robbins_monro(0.1))
        >>> learner = rd.online.OnlineLearner(
        ...     None, model(0.1), gradient, optimiser, learn="model"
        ... )
        >>> state, rows = learner.scan(learner.init(jax.random.key(1)), ys)
        >>> abs(float(learner.model(state).transition.weight[0, 0]) - 0.9) < 0.1
        True

    Args:
        family: the initial family, in the units of the data (`family.prepare`); `None` for
            gradients that need no family.
        model: the initial model.
        gradient: the recursive gradient, such as `TruncatedBackprop(window=8)`.
        optimiser: an optax transformation; by default Adam with a constant rate of 1e-3 and
            gradients clipped at 10, which tracks parameters that drift.
        learn: what to learn: `"family"`, `"model"`, `"both"`, or a pytree of booleans over
            `(family, model)`. Scales of a model that is learned by name stay positive; `Frozen`
            parts stay fixed.
        steps_per_row: the number of optimiser steps per row, each with its own gradient and noise.
    """

    parts: Parts
    gradient: AbstractRecursiveGradient
    optimiser: optax.GradientTransformation
    steps_per_row: int = eqx.field(static=True)

    def __init__(
        self,
        family: AbstractFactorFamily | None,
        model: StateSpaceModel,
        gradient: AbstractRecursiveGradient,
        optimiser: optax.GradientTransformation | None = None,
        *,
        learn: Learn | PyTree = "both",
        steps_per_row: int = 1,
    ):
        check_gradient(gradient, "OnlineLearner")
        if family is None and isinstance(learn, str) and learn == "both":
            learn = "model"
        self.parts = parts_of(family, model, learn, "OnlineLearner")
        gradient.check(self.parts)
        self.gradient = gradient
        self.optimiser = default_optimiser() if optimiser is None else optimiser
        self.steps_per_row = check_count(steps_per_row, "steps_per_row")

    def family(self, state: LearnerState) -> Any:
        """Return the family as learned so far; `None` if there is none."""
        return eqx.combine(state.parameters, self.parts.fixed)[0]

    def model(self, state: LearnerState) -> StateSpaceModel:
        """Return the model as learned so far."""
        return eqx.combine(state.parameters, self.parts.fixed)[1]

    def _start(self, key: PRNGKey | None, data: PyTree) -> LearnerState:
        parameters = self.parts.parameters
        zero = jnp.zeros((), jnp.result_type(int))
        optimiser, gradient = self.optimiser.init(parameters), self.gradient.init(self.parts)
        return LearnerState(parameters, optimiser, gradient, zero, zero, require_key(self, key))

    @property
    def _checked_against(self) -> StateSpaceModel:
        return unwrap(eqx.combine(*self.parts)[1])

    def _advance(
        self, state: LearnerState, series: Series, data: PyTree
    ) -> tuple[LearnerState, LearnerOutput]:
        rows = cast(series, self.parts.dtype).rows
        return read_in_loop(self.learn, state, rows, series.length)

    # Jitted separately, so that it is traced once, for its shapes and for its loop.
    @eqx.filter_jit
    def learn(self, state: LearnerState, row: Series) -> tuple[LearnerState, LearnerOutput]:
        """Read one row and take the optimiser steps."""
        key = jax.random.fold_in(state.key, state.num_read.astype(jnp.uint32))
        carry = (state.parameters, state.optimiser)

        def step(carry: tuple, number: Array) -> tuple[tuple, StepResult]:
            return self._step(state.gradient, row, jax.random.fold_in(key, number), carry)

        if self.steps_per_row == 1:
            carry, last = step(carry, jnp.zeros((), jnp.uint32))
        else:
            # Every step reads the same row from the state before it; the last result is used.
            steps = jnp.arange(self.steps_per_row, dtype=jnp.uint32)
            carry, results = lax.scan(step, carry, steps)
            last = jax.tree.map(lambda leaf: leaf[-1], results)
        # If only the step is non-finite, an earlier row may be the cause.
        fallback = choose(
            last.finite_row, self.gradient.mark_rows_missing(state.gradient), state.gradient
        )
        gradient = choose(last.finite, last.gradient, fallback)
        num_skipped = state.num_skipped + jnp.where(last.finite, 0, 1)
        parameters, optimiser = carry
        state = LearnerState(
            parameters, optimiser, gradient, state.num_read + 1, num_skipped, state.key
        )
        family, _ = Parts(state.parameters, self.parts.fixed).whole
        filtered = Marginals.exact(last.factor.law.mean, last.factor.law.covariance)
        smoothed = _smoothed(family, last.factor, jax.random.fold_in(key, self.steps_per_row))
        ready = state.num_read > 1
        smoothed = jax.tree.map(lambda leaf: jnp.where(ready, leaf, jnp.nan), smoothed)
        lag = (filtered, smoothed, jnp.maximum(state.num_read - 2, 0), ready, ~last.finite)
        return state, LearnerOutput(*lag, last.elbo_increment, last.norm)

    def _step(
        self, before: PyTree, row: Series, key: PRNGKey, carry: tuple
    ) -> tuple[tuple, StepResult]:
        """Take one optimiser step, unless it is non-finite or the row has no gradient."""
        parameters, optimiser = carry
        parts = Parts(parameters, self.parts.fixed)
        after, result = self.gradient.update(parts, before, row, key)
        finite_row = all_finite((after, result.elbo_increment))
        finite = finite_row & all_finite(result.increment)
        # Zeros in place of non-finite values keep the arithmetic of the optimiser finite too.
        ascent = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), result.increment)
        descent = jax.tree.map(jnp.negative, ascent)
        update, next_optimiser = self.optimiser.update(descent, optimiser, parameters)
        next_parameters = optax.apply_updates(parameters, update)
        finite = finite & all_finite((next_parameters, next_optimiser))
        carry = choose(finite & result.due, (next_parameters, next_optimiser), carry)
        norm = jnp.where(result.due, jnp.linalg.norm(ravel_pytree(ascent)[0]), 0.0)
        return carry, StepResult(
            after, result.factor, result.elbo_increment, norm, finite_row, finite
        )


def default_optimiser() -> optax.GradientTransformation:
    """Return Adam with a constant rate and clipped gradients, so that outliers move it little."""
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3)))


def _smoothed(family: Any, factor: Factor, key: PRNGKey) -> Marginals:
    """Return the moments of x_{k-1} given y_{0:k}: q_k pushed back through the last kernel."""
    law, kernel = factor.law, factor.kernel
    if isinstance(kernel, LinearGaussianKernel):
        noise = linalg.outer_gram(dense_scale(kernel.scale_tril))
        affine = (kernel.weight, kernel.bias, noise)
        return Marginals.exact(*push_forward(affine, law.mean, law.covariance))
    steps = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), kernel)
    return moments_of_paths(family, steps, law, NUM_DRAWS, key)


class LaggedLearnerState(eqx.Module):
    """The state of a `LaggedLearner`: arrays whose size does not grow.

    Attributes:
        learner: the state of the learner.
        lag: the last filtering law, and the backward kernels of the last rows.
    """

    learner: LearnerState
    lag: LagState


class LaggedLearner(AbstractStream[LaggedLearnerState, LearnerOutput]):
    """An `OnlineLearner` together with the fixed-lag posterior of its stream.

    Series k adds one filtering law q_k and one backward kernel q_{k-1|k}, both computed with the
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
    ) -> tuple[LaggedLearnerState, LearnerOutput]:
        rows = cast(series, self.learner.parts.dtype).rows
        return read_in_loop(self._read, state, rows, series.length)

    def _read(
        self, state: LaggedLearnerState, row: Series
    ) -> tuple[LaggedLearnerState, LearnerOutput]:
        """Learn from one row, and smooth with the parameters before its step."""
        learner, learned = self.learner.learn(state.learner, row)
        # A row that the learner skips is smoothed as a missing row.
        observed: Any = row.mask
        row = dataclasses.replace(row, mask=observed & ~learned.skipped)
        series = complete(jax.tree.map(lambda leaf: leaf[None], row))
        lag, out, _ = advance_lag(self._at(state.learner.parameters), state.lag, series)
        out = jax.tree.map(lambda leaf: leaf[0], out)
        lagged = {**vars(learned), **vars(out), "skipped": learned.skipped}
        return LaggedLearnerState(learner, lag), LearnerOutput(**lagged)

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
