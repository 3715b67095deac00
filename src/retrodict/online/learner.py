"""Learning a family and a model from one stream, row by row, in memory that does not grow."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._families import AbstractFactorFamily, AbstractSampledFamily, Factor, Row, rows_of
from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import dense_scale
from retrodict._model import StateSpaceModel
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count
from retrodict.online.fixed_lag import LagMoments, exact_moments, push_forward
from retrodict.online.gradient import AbstractRecursiveGradient, check_gradient
from retrodict.online.parts import Learn, Parts, dtype_of, parts_of
from retrodict.online.stream import (
    AbstractStream,
    all_finite,
    cast,
    choose,
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


class LearnerOutput(eqx.Module):
    """The output after row k of a stream, with a leading axis `time` for several rows.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}, before the optimiser step of
            this row; before the last step if there are several.
        smoothed: the moments of x_{k-1} given y_{0:k}; NaN at the first row.
        elbo_increment: what the row added to the ELBO, in nats.
        gradient_norm: the norm of the gradient of the step, zero at rows without a step.
        skipped: whether the row was skipped, since a result was non-finite.
    """

    filtered: LagMoments
    smoothed: LagMoments
    elbo_increment: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    skipped: Bool[Array, "..."]


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
        rows = rows_of(cast(series, dtype_of(state.parameters)))
        return read_in_loop(partial(learn_row, self), state, rows, series.length)


def default_optimiser() -> optax.GradientTransformation:
    """Return Adam with a constant rate and clipped gradients, so that outliers move it little."""
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3)))


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


# Jitted separately, so that it is traced once, for its shapes and for its loop.
@eqx.filter_jit
def learn_row(
    learner: OnlineLearner, state: LearnerState, row: Row
) -> tuple[LearnerState, LearnerOutput]:
    """Read one row and take the optimiser steps."""
    key = jax.random.fold_in(state.key, state.num_read.astype(jnp.uint32))
    carry = (state.parameters, state.optimiser)

    def step(carry: tuple, number: Array) -> tuple[tuple, StepResult]:
        return _step(learner, state.gradient, row, jax.random.fold_in(key, number), carry)

    if learner.steps_per_row == 1:
        carry, last = step(carry, jnp.zeros((), jnp.uint32))
    else:
        # Every step reads the same row from the state before it; the last result is used.
        steps = jnp.arange(learner.steps_per_row, dtype=jnp.uint32)
        carry, results = lax.scan(step, carry, steps)
        last = jax.tree.map(lambda leaf: leaf[-1], results)
    # If only the step is non-finite, an earlier row may be the cause.
    fallback = choose(last.finite_row, learner.gradient.unseen(state.gradient), state.gradient)
    parameters, optimiser = carry
    state = LearnerState(
        parameters,
        optimiser,
        choose(last.finite, last.gradient, fallback),
        state.num_read + 1,
        state.num_skipped + jnp.where(last.finite, 0, 1),
        state.key,
    )
    family, _ = Parts(state.parameters, learner.parts.fixed).whole
    filtered = exact_moments(last.factor.law.mean, last.factor.law.covariance)
    smoothed = _smoothed(family, last.factor, jax.random.fold_in(key, learner.steps_per_row))
    smoothed = jax.tree.map(lambda leaf: jnp.where(state.num_read > 1, leaf, jnp.nan), smoothed)
    return state, LearnerOutput(filtered, smoothed, last.elbo_increment, last.norm, ~last.finite)


def _step(
    learner: OnlineLearner, before: PyTree, row: Row, key: PRNGKey, carry: tuple
) -> tuple[tuple, StepResult]:
    """Take one optimiser step, unless it is non-finite or the row has no gradient."""
    parameters, optimiser = carry
    after, result = learner.gradient.update(
        Parts(parameters, learner.parts.fixed), before, row, key
    )
    finite_row = all_finite((after, result.elbo_increment))
    finite = finite_row & all_finite(result.increment)
    # Zeros in place of non-finite values keep the arithmetic of the optimiser finite too.
    ascent = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), result.increment)
    descent = jax.tree.map(jnp.negative, ascent)
    update, next_optimiser = learner.optimiser.update(descent, optimiser, parameters)
    next_parameters = optax.apply_updates(parameters, update)
    finite = finite & all_finite((next_parameters, next_optimiser))
    carry = choose(finite & result.due, (next_parameters, next_optimiser), carry)
    norm = jnp.where(result.due, jnp.linalg.norm(ravel_pytree(ascent)[0]), 0.0)
    return carry, StepResult(after, result.factor, result.elbo_increment, norm, finite_row, finite)


def _smoothed(family: Any, factor: Factor, key: PRNGKey) -> LagMoments:
    """Return the moments of x_{k-1} given y_{0:k}: q_k pushed back through the last kernel."""
    law, kernel = factor.law, factor.kernel
    if isinstance(kernel, LinearGaussianKernel):
        noise = linalg.outer_gram(dense_scale(kernel.scale_tril))
        moments = push_forward(kernel.weight, kernel.bias, noise, law.mean, law.covariance)
        return exact_moments(*moments)
    if not isinstance(family, AbstractSampledFamily):
        raise TypeError(f"{type(family).__name__} has no `shared` part of its backward kernels.")
    shared = family.shared()
    noise = jax.random.normal(key, (NUM_DRAWS, law.noise_dim), law.mean.dtype)
    laws = jax.vmap(lambda e: shared.law(kernel, law.from_noise(e)))(noise)
    means, covariances = jax.vmap(lambda one: (one.mean, one.covariance))(laws)
    mean = jnp.mean(means, axis=0)
    off = means - mean[None]
    terms = covariances + off[:, :, None] * off[:, None, :]
    errors = (jnp.std(draws, axis=0, ddof=1) / NUM_DRAWS**0.5 for draws in (means, terms))
    return LagMoments(mean, jnp.mean(terms, axis=0), *errors)
