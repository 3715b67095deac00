"""A training loop for any loss, parameters and data.

The steps of a chunk run in one compiled program. At chunk boundaries Python evaluates the
parameters, shows progress and writes checkpoints. Several starts are trained side by side under one
`vmap`, on the same minibatches.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, where_rows
from retrodict._learning.compile_together import compile_together
from retrodict.distributed import shard_over, to_hosts

Loss = Callable[[Any, Any, Any, Any], Scalar]
"""`loss(parameters, batches, key, step)`: the loss takes its minibatch from `batches`."""

TrainingStatus = Literal["finished", "converged", "stopped early", "diverged"]
"""How a fit ended: all steps taken, no further gain, out of patience, or non-finite."""

MAX_SKIPPED_IN_A_ROW = 100
"""The number of consecutive steps with a non-finite gradient after which training ends."""

SIGNIFICANT = 3.0
"""The number of standard errors by which a noisy score must exceed another to be worse."""


class LossStage(NamedTuple):
    """A loss, and the step at which it ends."""

    until: int
    loss: Loss


class TrainState(eqx.Module):
    """The state of training; with several starts, each array has a leading axis `start`.

    Attributes:
        parameters: the present parameters.
        optimiser: the state of the optimiser.
        kept: the last parameters whose score was the least so far, or within its noise.
        kept_score: their score, which is the loss of the validation series.
        kept_step: the step at which they were evaluated.
        least: the least score so far.
        least_noise: the standard error of that score.
        skipped: the number of steps with a non-finite gradient.
        skipped_in_a_row: the number of such steps since the last finite one.
        step: the number of steps taken.
    """

    parameters: PyTree
    optimiser: PyTree
    kept: PyTree
    kept_score: Float[Array, "*start"]
    kept_step: Int[Array, "*start"]
    least: Float[Array, "*start"]
    least_noise: Float[Array, "*start"]
    skipped: Int[Array, "*start"]
    skipped_in_a_row: Int[Array, "*start"]
    step: Int[Array, ""]


class TrainHistory(eqx.Module):
    """The history of training.

    Attributes:
        losses: the loss of each step.
        scores: the score at the start and at each chunk boundary.
        score_steps: the steps of these scores.
        other_scores: the best scores of the starts that were dropped, if any.
    """

    losses: Float[np.ndarray, "*start step"]
    scores: Float[np.ndarray, "*start chunk"]
    score_steps: Int[np.ndarray, "chunk"]
    other_scores: Float[np.ndarray, "others"] | None = None


class Placement(NamedTuple):
    """The number of starts that are trained side by side, and the devices of training.

    Attributes:
        num_starts: the number of starts; `None` for one without an axis.
        mesh: the devices, each of which holds a copy of the parameters; `None` for one device.
        axis: the axis of the mesh over which the starts are sharded; `None` if each device trains
            all of them.
    """

    num_starts: int | None = None
    mesh: Mesh | None = None
    axis: str | None = None

    def over_starts(
        self, fn: Callable[..., Any], in_axes: tuple[int | None, ...]
    ) -> Callable[..., Any]:
        """Return a function that is mapped over the starts, if there are several."""
        if self.num_starts is None:
            return fn
        return jax.vmap(fn, in_axes=in_axes, spmd_axis_name=self.axis)

    def place(self, state: TrainState) -> TrainState:
        """Return the state on the devices."""
        return self._shard(state, shard_over)

    def constrain(self, state: TrainState) -> TrainState:
        """Return the state with the sharding of `place`, inside of a compiled program."""
        return self._shard(
            state,
            lambda leaf, mesh, spec: lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec)),
        )

    def _shard(self, state: TrainState, put: Callable[[Array, Mesh, P], Array]) -> TrainState:
        if self.mesh is None:
            return state
        mesh, spec = self.mesh, P() if self.axis is None else P(self.axis)
        specs = eqx.tree_at(lambda s: s.step, jax.tree.map(lambda _: spec, state), P())
        return jax.tree.map(lambda leaf, spec: put(leaf, mesh, spec), state, specs)

    def copy(self, tree: PyTree) -> PyTree:
        """Return a tree of which every device holds a copy."""
        return tree if self.mesh is None else shard_over(tree, self.mesh, P())

    def replicate(self, tree: PyTree) -> PyTree:
        """Return the same as `copy`, inside of a compiled program."""
        if self.mesh is None:
            return tree
        return lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))

    def on_host(self, state: TrainState) -> TrainState:
        """Return the state as arrays of this process."""
        return state if self.mesh is None else jax.tree.map(jnp.asarray, to_hosts(state))


ONE_DEVICE = Placement()
"""One start on one device."""

NO_HISTORY = TrainHistory(np.zeros(0), np.zeros(0), np.zeros(0, int))
"""The history before the first evaluation."""


class Trained(NamedTuple):
    """The state of training, its history and its status."""

    state: TrainState
    history: TrainHistory = NO_HISTORY
    status: TrainingStatus = "finished"


@functools.lru_cache
def default_optimiser(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """Return Adam with warm-up over 5% of the steps, cosine decay and gradients clipped at 1."""
    warmup = max(1, min(num_steps // 20, 500))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(num_steps, warmup + 1), 1e-3 * learning_rate
    )
    # Flattened: many small arrays take longer to compile and to update than one vector.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99)))


@eqx.filter_jit
def start(
    parameters: PyTree, optimiser: optax.GradientTransformation, num_starts: int | None
) -> TrainState:
    """Return the state before the first step.

    Args:
        parameters: arrays, with a leading axis for several starts.
        optimiser: an optax transformation.
        num_starts: the size of the leading axis; `None` if there is none.
    """
    shape = () if num_starts is None else (num_starts,)
    return TrainState(
        parameters,
        (optimiser.init if num_starts is None else jax.vmap(optimiser.init))(parameters),
        parameters,
        jnp.full(shape, jnp.inf, float),
        jnp.zeros(shape, jnp.int32),
        jnp.full(shape, jnp.inf, float),
        jnp.zeros(shape),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def train(
    key: PRNGKey,
    stages: Sequence[LossStage],
    evaluate: Callable[[Any, Any], tuple[Scalar, Scalar]],
    begun: Trained,
    fetch: Callable[[int, int, int | None], PyTree],
    validation: PyTree,
    *,
    optimiser: optax.GradientTransformation,
    chunk_size: int,
    steps_per_load: int | None = None,
    patience: int | None = None,
    at_chunk: Callable[[TrainState, TrainHistory], None] | None = None,
    show: Callable[[int, float], None] | None = None,
    placement: Placement = ONE_DEVICE,
) -> Trained:
    """Minimise a loss, and keep the parameters with the best score.

    A step whose loss or gradient is non-finite is skipped and counted. Training ends after
    `MAX_SKIPPED_IN_A_ROW` such steps in a row, for every start. The same key, state and data give
    the same parameters to the last bit, wherever training was interrupted.

    Args:
        key: a typed key.
        stages: losses, with the step at which each ends; the last one ends training.
        evaluate: `evaluate(parameters, validation)`, a score that is the same for the same
            parameters, and its standard error, zero if it is exact. The parameters with the least
            score are kept. Scores within `SIGNIFICANT` standard errors of the least count as equal;
            the latest of them is kept. The minimum of many noisy scores is biased.
        begun: the state and the history to continue from.
        fetch: `fetch(first, count, then)`, the argument `batches` of the losses for `count` steps.
            The next call begins with step `then`; `None` marks the last call.
        validation: the data of `evaluate`, an argument of the compiled program.
        optimiser: an optax transformation.
        chunk_size: the number of steps between two evaluations.
        steps_per_load: the number of steps per call of the compiled program; a whole chunk by
            default.
        patience: the number of chunks without a better score after which training stops; `None` for
            no limit.
        at_chunk: called after each chunk with a state in the memory of this process, to write
            checkpoints.
        show: called after each chunk with the step and the best score so far.
        placement: the starts and the devices. All processes must call this function with the same
            arguments, and get the same result.
    """
    state, history = placement.place(begun.state), begun.history
    key, stages, evaluate = placement.copy((key, list(stages), evaluate))
    score = functools.partial(_score, evaluate, placement)
    count = chunk_size if steps_per_load is None else steps_per_load
    fetch = functools.lru_cache(maxsize=1)(fetch)

    def arguments(state: TrainState, stage: LossStage, until: int) -> tuple:
        """Return the arguments of `_take_steps` for the next call."""
        before = int(state.step)
        then = min(before + count, until)
        batches = fetch(before, count, then if then < stages[-1].until else None)
        return stage.loss, optimiser, placement, count, state, batches, key, jnp.asarray(until)

    def end_of_chunk(state: TrainState, stage: LossStage) -> int:
        return min(int(state.step) + chunk_size, stage.until)

    if not history.score_steps.size:
        first = next((stage for stage in stages if int(state.step) < stage.until), None)
        if placement.mesh is None and first is not None:
            compile_together(
                (_score, (evaluate, placement, state.parameters, validation)),
                (_take_steps, arguments(state, first, end_of_chunk(state, first))),
            )
        scores, noise = score(state.parameters, validation)
        state = keep(state, scores, noise)
        history = TrainHistory(
            np.zeros((*np.shape(scores), 0)), np.asarray(scores)[..., None], np.zeros(1, int)
        )
    for stage in stages:
        while int(state.step) < stage.until:
            until, losses = end_of_chunk(state, stage), []
            while (before := int(state.step)) < until:
                state, values = _take_steps(*arguments(state, stage, until))
                losses.append(np.asarray(values)[..., : int(state.step) - before])
            scores, noise = score(state.parameters, validation)
            state = keep(state, scores, noise)
            history = _extend(history, np.concatenate(losses, -1), scores, int(state.step))
            if at_chunk is not None:
                at_chunk(placement.on_host(state), history)
            if show is not None:
                show(int(state.step), float(np.min(to_hosts(state.kept_score))))
            status = _stopped(state, history, patience, chunk_size)
            if status is not None:
                return Trained(placement.on_host(state), history, status)
    return Trained(placement.on_host(state), history, _status_at_end(state, history))


def _status_at_end(state: TrainState, history: TrainHistory) -> TrainingStatus:
    """Return "diverged" if every start ended with skipped steps at parameters without a score."""
    broken = ~np.isfinite(history.scores[..., -1:]) & (
        np.asarray(to_hosts(state.skipped_in_a_row))[..., None] > 0
    )
    return "diverged" if broken.size and np.all(broken) else "finished"


def _stopped(
    state: TrainState, history: TrainHistory, patience: int | None, chunk_size: int
) -> TrainingStatus | None:
    """Return the status with which training ends at this chunk, `None` if it continues."""
    if np.all(to_hosts(state.skipped_in_a_row) >= MAX_SKIPPED_IN_A_ROW):
        return "diverged"
    if patience is None:
        return None
    scores = np.where(np.isnan(history.scores), np.inf, history.scores)
    best = history.score_steps[np.argmin(scores, axis=-1)]
    waited = int(state.step) - int(np.max(best))
    return "stopped early" if waited >= patience * chunk_size else None


# These programs take losses and optimisers as arguments. A loss that is an equinox module, with the
# same structure as in an earlier call, is not compiled again: a fit that resumes, or the next
# iteration of EM, reuses the program.


@eqx.filter_jit
def _score(
    evaluate: Callable[[Any, Any], Any],
    placement: Placement,
    parameters: PyTree,
    validation: PyTree,
) -> tuple[Array, Array]:
    """Evaluate all starts, with a result in every process."""
    return placement.replicate(placement.over_starts(evaluate, (0, None))(parameters, validation))


@eqx.filter_jit
def _take_steps(
    loss: Loss,
    optimiser: optax.GradientTransformation,
    placement: Placement,
    count: int,
    state: TrainState,
    batches: PyTree,
    key: PRNGKey,
    until: Array,
) -> tuple[TrainState, Float[Array, "*start step"]]:
    """Take `count` steps, fewer at the end of a chunk."""
    # Optimisers with a line search, such as optax.lbfgs, evaluate the loss themselves.
    optimiser = optax.with_extra_args_support(optimiser)

    def move_one_start(parameters: PyTree, state: PyTree, step: Array):
        value, gradient = jax.value_and_grad(loss)(parameters, batches, key, step)
        # Clipping and Adam square the gradient. If that overflows, they take no step at all.
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]
        ok = jnp.all(jnp.isfinite(jnp.stack([value, *squares])))
        # Zeros in place of non-finite gradients keep the arithmetic of the optimiser finite.
        gradient = jax.tree.map(lambda leaf: jnp.where(ok, leaf, 0.0), gradient)
        update, next_state = optimiser.update(
            gradient,
            state,
            parameters,
            value=value,
            grad=gradient,
            value_fn=lambda candidate: loss(candidate, batches, key, step),
        )
        parameters = _choose(ok, optax.apply_updates(parameters, update), parameters)
        return parameters, _choose(ok, next_state, state), value, ok

    move = placement.over_starts(move_one_start, (0, 0, None))

    def step(state: TrainState, _: None) -> tuple[TrainState, Array]:
        parameters, optimiser_state, value, ok = move(state.parameters, state.optimiser, state.step)
        after = dataclasses.replace(
            state,
            parameters=parameters,
            optimiser=optimiser_state,
            skipped=state.skipped + jnp.where(ok, 0, 1),
            skipped_in_a_row=jnp.where(ok, 0, state.skipped_in_a_row + 1),
            step=state.step + 1,
        )
        return _choose(state.step < until, after, state), value

    state, losses = lax.scan(step, state, None, length=count)
    return placement.constrain(state), placement.replicate(jnp.moveaxis(losses, 0, -1))


@eqx.filter_jit
def keep(
    state: TrainState, scores: Float[Array, "*start"], noise: Float[Array, "*start"]
) -> TrainState:
    """Replace the kept parameters where the new score is better, or as good up to noise.

    The margin is the standard error of the least score: the scores of bad parameters have large
    standard errors, which must not widen it.
    """
    least = scores < state.least
    better = least | (scores < state.least + SIGNIFICANT * state.least_noise)

    def choose(new: Array, old: Array) -> Array:
        return where_rows(better, new, old)

    return eqx.tree_at(
        lambda s: (s.kept, s.kept_score, s.kept_step, s.least, s.least_noise),
        state,
        (
            jax.tree.map(choose, state.parameters, state.kept),
            jnp.where(better, scores, state.kept_score),
            jnp.where(better, state.step, state.kept_step),
            jnp.where(least, scores, state.least),
            jnp.where(least & jnp.isfinite(noise), noise, jnp.where(least, 0, state.least_noise)),
        ),
    )


def _extend(history: TrainHistory, losses: np.ndarray, scores: Array, step: int) -> TrainHistory:
    return TrainHistory(
        np.concatenate([history.losses, losses], axis=-1),
        np.concatenate([history.scores, np.asarray(scores)[..., None]], axis=-1),
        np.append(history.score_steps, step),
        history.other_scores,
    )


def one_start(state: TrainState, index: int) -> TrainState:
    """Return one of several starts, without their axis."""
    picked = jax.tree.map(lambda leaf: leaf[index], eqx.tree_at(lambda s: s.step, state, None))
    return eqx.tree_at(lambda s: s.step, picked, state.step, is_leaf=lambda leaf: leaf is None)


def best_start(trained: Trained) -> Trained:
    """Return the start with the best score, without the axis of starts."""
    state, history, status = trained
    scores = np.asarray(state.kept_score)
    best = int(np.argmin(scores))
    chosen = TrainHistory(
        history.losses[best], history.scores[best], history.score_steps, np.delete(scores, best)
    )
    return Trained(one_start(state, best), chosen, status)


def _choose(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


class ProgressLine:
    """A progress line on the terminal, shown after two seconds.

    Args:
        unit: the format of the negative loss, such as `"ELBO {:.4f} nats per step"`.
        num_steps: the total number of steps.
    """

    def __init__(self, unit: str, num_steps: int):
        self.unit, self.num_steps = unit, num_steps
        self.began, self.first = time.monotonic(), None

    def __call__(self, step: int, loss: float) -> None:
        """Redraw the line."""
        elapsed, num_steps = time.monotonic() - self.began, self.num_steps
        if self.first is None:
            self.first = (step, elapsed)  # compilation is not part of the rate
        if elapsed < 2.0 and step < num_steps:
            return
        done = step - self.first[0]
        rate = (elapsed - self.first[1]) / done if done else elapsed / step
        width = 24
        filled = width * step // num_steps
        bar = "█" * filled + "·" * (width - filled)
        left = (
            f"{rate * (num_steps - step):4.0f} s left" if step < num_steps else f"{elapsed:.0f} s"
        )
        end = "\n" if step >= num_steps else ""
        line = f"\r{bar} {step}/{num_steps}  {self.unit.format(-loss)}  {left}   "
        sys.stderr.write(line + end)
        sys.stderr.flush()
