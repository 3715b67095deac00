"""A training loop that knows nothing of what it trains: a loss, parameters, data.

Steps run inside one compiled program a chunk, so that Python is idle but at chunk boundaries, where
parameters are graded, progress is shown and checkpoints are written. Several starts are trained
side by side under one `vmap`, on the same minibatches.
"""

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

from retrodict._types import PRNGKey, Scalar
from retrodict.distributed import lay, to_hosts

Loss = Callable[[Any, Any, Any, Any], Scalar]
"""`loss(parameters, data, key, step)`: the loss draws its minibatch from key and step."""

Status = Literal["finished", "converged", "stopped early", "diverged"]
"""How a fit ended: all steps taken, no step gains any more, given up before that, or not finite."""

MAX_SKIPPED_IN_A_ROW = 100
"""How many steps in a row may have a gradient that is not finite before training ends."""


TOLD_APART = 3.0
"""How many standard errors make a noisy grade worse than another."""


class Stage(NamedTuple):
    """A loss, and the step at which the next one takes over."""

    until: int
    loss: Loss


class TrainState(eqx.Module):
    """All that training carries; with several starts each array has a leading axis for them.

    Attributes:
        parameters: where each start stands.
        optimiser: the state of the optimiser.
        kept: the last parameters whose graded loss was the least so far, or not told from it.
        kept_score: their graded loss.
        kept_step: the step at which they were graded.
        least: the least graded loss so far.
        least_noise: the standard error of that grade.
        skipped: how many steps had a gradient that was not finite.
        skipped_in_a_row: how many of the last steps had none that was.
        step: how many steps were taken.
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
    """What was seen on the way.

    Attributes:
        losses: the loss of each step.
        scores: the graded loss at each chunk boundary, that of the start included.
        score_steps: the steps at which those were graded.
        other_scores: the best grades of the starts that were given up, if there were any.
    """

    losses: Float[np.ndarray, "*start step"]
    scores: Float[np.ndarray, "*start chunk"]
    score_steps: Int[np.ndarray, "chunk"]
    other_scores: Float[np.ndarray, "others"] | None = None


class Placement(NamedTuple):
    """Which devices train.

    Attributes:
        mesh: the devices. Parameters lie whole on each of them; the data lie as they were laid.
        starts: the axis of the mesh over which the starts are spread; `None` if each device trains
            all of them.
    """

    mesh: Mesh
    starts: str | None = None

    def specs(self, state: TrainState) -> PyTree:
        """Over which axes each array of a state lies."""
        spread = P() if self.starts is None else P(self.starts)
        return eqx.tree_at(lambda s: s.step, jax.tree.map(lambda _: spread, state), P())

    def place(self, state: TrainState) -> TrainState:
        """The state on the devices."""
        return jax.tree.map(lambda leaf, spec: lay(leaf, self.mesh, spec), state, self.specs(state))

    def held(self, state: TrainState) -> TrainState:
        """The state, where the compiler must leave it as `place` put it."""
        return jax.tree.map(
            lambda leaf, spec: lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec)),
            state,
            self.specs(state),
        )

    def whole(self, tree: PyTree) -> PyTree:
        """What every device, and so every process, must know whole."""
        return lax.with_sharding_constraint(tree, NamedSharding(self.mesh, P()))


class Trained(NamedTuple):
    """What training returns: the last state, the history and how it ended."""

    state: TrainState
    history: TrainHistory
    status: Status


def default_optimiser(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    """Adam with warm-up over a twentieth of the steps, cosine decay, and gradients clipped at 1."""
    warmup = max(1, min(num_steps // 20, 500))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup, max(num_steps, warmup + 1), 1e-3 * learning_rate
    )
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.99)))


def start(
    parameters: PyTree, optimiser: optax.GradientTransformation, num_starts: int | None
) -> TrainState:
    """The state before the first step.

    Args:
        parameters: arrays; with a leading axis if there are several starts.
        optimiser: an optax transformation.
        num_starts: how many starts the leading axis holds; `None` if there is no such axis.
    """
    shape = () if num_starts is None else (num_starts,)
    return TrainState(
        parameters,
        _each(optimiser.init, num_starts)(parameters),
        parameters,
        jnp.full(shape, jnp.inf),
        jnp.zeros(shape, jnp.int32),
        jnp.full(shape, jnp.inf),
        jnp.zeros(shape),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((), jnp.int32),
    )


def train(
    key: PRNGKey,
    stages: Sequence[Stage],
    grade: Callable[[Any, Any], tuple[Scalar, Scalar]],
    state: TrainState,
    data: PyTree,
    *,
    optimiser: optax.GradientTransformation,
    num_starts: int | None,
    chunk_size: int,
    feed: Callable[[int, int, int | None], PyTree] | None = None,
    steps_at_once: int | None = None,
    patience: int | None = None,
    history: TrainHistory | None = None,
    at_chunk: Callable[[TrainState, TrainHistory], None] | None = None,
    show: Callable[[int, float], None] | None = None,
    placement: Placement | None = None,
) -> Trained:
    """Descends a loss, and keeps the parameters that are graded best.

    A step whose loss or gradient is not finite is skipped and counted; after
    `MAX_SKIPPED_IN_A_ROW` of them in a row, for every start, training ends. The same key, state and
    data give the same parameters to the last bit, wherever training was interrupted.

    Args:
        key: a typed key.
        stages: losses, with the step at which each ends; the last one ends training.
        grade: `grade(parameters, data)`, a loss that is the same for the same parameters, and its
            standard error, zero if it is exact. The least is kept; of grades within `TOLD_APART`
            standard errors of the least, the last. The best of many noisy grades is a lucky draw,
            and the last parameters are those that the decaying steps have settled.
        state: where to go on from.
        data: what losses and grade read, passed to the compiled program and not baked into it.
        optimiser: an optax transformation.
        num_starts: how many starts are trained side by side; `None` for one without an axis.
        chunk_size: steps between two grades.
        feed: `feed(first, count, then)`, what losses read at so many steps instead of `data`, for
            data that are brought along as they are needed; the next call begins with step `then`,
            and there is none after `None`.
        steps_at_once: steps that are taken in one call of the compiled program; a whole chunk by
            default.
        patience: how many chunks may pass without a better grade; `None` for all.
        history: what was seen before, if training goes on.
        at_chunk: called after each chunk, for checkpoints, with a state that lies nowhere else than
            in this process.
        show: called after each chunk with the step and the best loss so far.
        placement: the devices; `None` for one. Every process of theirs calls this with the same
            arguments, and finds the same.
    """
    if placement is not None:
        state, key = placement.place(state), lay(key, placement.mesh, P())
    graded = eqx.filter_jit(_known(_each_with(grade, num_starts, placement), placement))
    if history is None:
        scores, noise = graded(state.parameters, data)
        state = keep(state, scores, noise)
        history = TrainHistory(
            np.zeros((*np.shape(scores), 0)), np.asarray(scores)[..., None], np.zeros(1, int)
        )
    for position, stage in enumerate(stages):
        first = stages[position - 1].until if position else 0
        if int(state.step) >= stage.until:
            continue
        count = chunk_size if steps_at_once is None else steps_at_once
        run = _compiled_steps(stage.loss, optimiser, num_starts, count, placement)
        while first <= int(state.step) < stage.until:
            until, seen = min(int(state.step) + chunk_size, stage.until), []
            while (before := int(state.step)) < until:
                then = min(before + count, until)
                then = then if then < stages[-1].until else None
                read = data if feed is None else feed(before, count, then)
                state, losses = run(state, read, key, jnp.asarray(until))
                seen.append(np.asarray(losses)[..., : int(state.step) - before])
            scores, noise = graded(state.parameters, data)
            state = keep(state, scores, noise)
            history = _extend(history, np.concatenate(seen, -1), scores, int(state.step))
            if at_chunk is not None:
                at_chunk(_at_home(state, placement), history)
            if show is not None:
                show(int(state.step), float(np.min(to_hosts(state.kept_score))))
            if np.all(to_hosts(state.skipped_in_a_row) >= MAX_SKIPPED_IN_A_ROW):
                return Trained(_at_home(state, placement), history, "diverged")
            known = np.where(np.isnan(history.scores), np.inf, history.scores)
            best = history.score_steps[np.argmin(known, axis=-1)]
            waited = int(state.step) - int(np.max(best))
            if patience is not None and waited >= patience * chunk_size:
                return Trained(_at_home(state, placement), history, "stopped early")
    return Trained(_at_home(state, placement), history, "finished")


def _at_home(state: TrainState, placement: Placement | None) -> TrainState:
    """The state as one device of this process would hold it."""
    return state if placement is None else jax.tree.map(jnp.asarray, to_hosts(state))


def _known(fn: Callable[..., Any], placement: Placement | None) -> Callable[..., Any]:
    """A function whose answer every process knows."""
    return fn if placement is None else lambda *args: placement.whole(fn(*args))


def _compiled_steps(
    loss: Loss,
    optimiser: optax.GradientTransformation,
    num_starts: int | None,
    count: int,
    placement: Placement | None,
) -> Callable[..., tuple[TrainState, Float[Array, "*start step"]]]:
    """A program that takes so many steps, fewer if the chunk ends before."""
    # An optimiser that searches along a line, such as optax.lbfgs, evaluates the loss itself.
    optimiser = optax.with_extra_args_support(optimiser)

    def one_start(parameters: PyTree, state: PyTree, data: PyTree, key: PRNGKey, step: Array):
        value, gradient = jax.value_and_grad(loss)(parameters, data, key, step)
        leaves = (value, *jax.tree.leaves(gradient))
        ok = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
        # Zeros in place of what is not finite: the optimiser's own arithmetic stays finite too.
        gradient = jax.tree.map(lambda leaf: jnp.where(ok, leaf, 0.0), gradient)
        update, moved = optimiser.update(
            gradient,
            state,
            parameters,
            value=value,
            grad=gradient,
            value_fn=lambda moved: loss(moved, data, key, step),
        )
        parameters = _choose(ok, optax.apply_updates(parameters, update), parameters)
        return parameters, _choose(ok, moved, state), value, ok

    def take(state: TrainState, at: tuple[PyTree, PRNGKey, Array]) -> tuple[TrainState, Array]:
        data, key, until = at
        each = one_start
        if num_starts is not None:
            starts = None if placement is None else placement.starts
            each = jax.vmap(one_start, in_axes=(0, 0, None, None, None), spmd_axis_name=starts)
        parameters, moved, value, ok = each(
            state.parameters, state.optimiser, data, key, state.step
        )
        after = TrainState(
            parameters,
            moved,
            state.kept,
            state.kept_score,
            state.kept_step,
            state.least,
            state.least_noise,
            state.skipped + jnp.where(ok, 0, 1),
            jnp.where(ok, 0, state.skipped_in_a_row + 1),
            state.step + 1,
        )
        return _choose(state.step < until, after, state), value

    @eqx.filter_jit
    def run(state: TrainState, data: PyTree, key: PRNGKey, until: Array):
        state, losses = lax.scan(
            lambda state, _: take(state, (data, key, until)), state, None, length=count
        )
        losses = jnp.moveaxis(losses, 0, -1)
        if placement is None:
            return state, losses
        return placement.held(state), placement.whole(losses)

    return run


@eqx.filter_jit
def keep(
    state: TrainState, scores: Float[Array, "*start"], noise: Float[Array, "*start"]
) -> TrainState:
    """The state with what it keeps replaced where the new grade is better, or as good.

    The margin is that of the least grade: parameters that have gone astray have grades with a large
    standard error of their own, which must not excuse them.
    """
    least = scores < state.least
    better = least | (scores < state.least + TOLD_APART * state.least_noise)

    def choose(new: Array, old: Array) -> Array:
        return jnp.where(better.reshape(better.shape + (1,) * (new.ndim - better.ndim)), new, old)

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
    """One of several starts, without their axis."""
    picked = jax.tree.map(lambda leaf: leaf[index], eqx.tree_at(lambda s: s.step, state, None))
    return eqx.tree_at(lambda s: s.step, picked, state.step, is_leaf=lambda leaf: leaf is None)


def best_start(state: TrainState, history: TrainHistory) -> tuple[TrainState, TrainHistory]:
    """The start of several that was graded best, alone."""
    scores = np.asarray(state.kept_score)
    best = int(np.argmin(scores))
    alone = TrainHistory(
        history.losses[best], history.scores[best], history.score_steps, np.delete(scores, best)
    )
    return one_start(state, best), alone


def _choose(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _each(fn: Callable[[Any], Any], num_starts: int | None) -> Callable[[Any], Any]:
    return fn if num_starts is None else jax.vmap(fn)


def _each_with(
    fn: Callable[[Any, Any], Any], num_starts: int | None, placement: Placement | None
) -> Callable[..., Any]:
    starts = None if placement is None else placement.starts
    return fn if num_starts is None else jax.vmap(fn, in_axes=(0, None), spmd_axis_name=starts)


class ProgressLine:
    """One line on the terminal that says how far training is; silent for the first two seconds.

    Args:
        unit: what the loss is called and how it is printed, such as `"ELBO {:.4f} nats a step"`.
        num_steps: how many steps there are in all.
    """

    def __init__(self, unit: str, num_steps: int):
        self.unit, self.num_steps = unit, num_steps
        self.began, self.first = time.monotonic(), None

    def __call__(self, step: int, loss: float) -> None:
        """Redraws the line."""
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
