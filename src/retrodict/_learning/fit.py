"""Fitting a family, a model, or both, by ascent of the ELBO."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Float, Int, PyTree

from retrodict._checkpoint import write_checkpoint
from retrodict._expectations import (
    AbstractEstimator,
    BackwardSampling,
    ClosedForm,
    LogJoint,
    Quadrature,
    RaoBlackwellised,
)
from retrodict._families import AbstractFamily, AbstractLinearGaussianFamily
from retrodict._learning.batch import batch_for, first_rows, num_rows, num_series, take
from retrodict._learning.given import Wanted, given_for
from retrodict._learning.objective import Objective, stages_of
from retrodict._learning.resume import fingerprint, resume
from retrodict._learning.segments import default_segment
from retrodict._learning.shared import SharedSeries
from retrodict._learning.source import Batch, spread
from retrodict._learning.stored import AbstractSeriesStore
from retrodict._learning.train import (
    Placement,
    ProgressLine,
    Stage,
    Status,
    Trained,
    TrainHistory,
    TrainState,
    best_start,
    default_optimiser,
    start,
    train,
)
from retrodict._model import StateSpaceModel, learnable
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key
from retrodict.distributed import MeshLike, Parallel, as_mesh, together, writes_for
from retrodict.particles import particle_filter

NUM_GRADED = 256
"""How many training series grade the parameters where nothing is held out."""


FitStatus = Status | Literal["overfitted", "underfitted"]
"""How a fit ended; the last two override "finished" and "stopped early"."""

FAR_BELOW = 0.5
"""How many nats per row make an ELBO far below another one, or below the evidence: as much as a
Gaussian law loses that is off by one standard deviation in each row."""

FEWEST_COMPARED = 1000
"""With fewer steps, the ELBO is not compared with a particle evidence, which takes some seconds."""

NUM_COMPARED = 2
"""For how many series it is."""

MOST_COMPARED_ROWS = 200
"""For how many of their first rows it is."""

NUM_AVERAGED = 100
"""Over how many steps before the kept one the ELBO of the training series is averaged."""

NUM_PARTICLES = 1000
"""How many particles estimate the evidence."""


STARTS = "start"
"""The axis of a mesh over which several starts are spread."""


NUM_PATHS = 1
"""How many paths of each series a step draws where nothing has a closed form: with the score left
out of the gradient, more steps with one path were seen to gain more than more paths."""


class FitResult(eqx.Module):
    """What `fit` found.

    Attributes:
        family: the family with the parameters that were graded best; where the ELBO is drawn, the
            last of those that were not graded worse by more than the noise of a grade.
        model: the model, with those that were learned with it.
        history: the ELBO of each step's minibatch, in nats a time step.
        held_out: the ELBO at the chunk boundaries, in nats a time step: of the held-out series, or
            of a fixed part of the training series if nothing was held out.
        held_out_steps: the steps at which `held_out` was taken.
        kept_step: the step whose parameters were kept.
        restart_scores: the best of `held_out` of each start, for as long as it was trained; the
            first is that of `family`.
        num_skipped: how many steps were skipped since their gradient was not finite.
        status: `"finished"` if all steps were taken, `"stopped early"` if patience ran out, or
            `"diverged"` if too many steps in a row had to be skipped. Instead of the first two:
            `"overfitted"` if the ELBO of `held_out` series is
            more than 0.5 nats per row below that of the training series; `"underfitted"` if the
            ELBO of the first two graded series is more than 0.5 nats per row below a particle
            estimate of their evidence, which is looked at after 1,000 steps or more. `"finished"`
            does not promise that the posterior is right: see `check_posterior`.
        reason: the figures behind `"overfitted"` and `"underfitted"`; empty otherwise.
    """

    family: AbstractFamily
    model: StateSpaceModel
    history: Float[np.ndarray, "step"]
    held_out: Float[np.ndarray, "chunk"]
    held_out_steps: Int[np.ndarray, "chunk"]
    kept_step: int = eqx.field(static=True)
    restart_scores: Float[np.ndarray, "restart"]
    num_skipped: int = eqx.field(static=True)
    status: FitStatus = eqx.field(static=True)
    reason: str = eqx.field(static=True, default="")


@together()
def fit(
    key: PRNGKey,
    family: AbstractFamily,
    model: StateSpaceModel,
    ys: Any,
    *,
    num_steps: int = 4000,
    learn: Literal["family", "model", "both"] | PyTree = "family",
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    estimator: AbstractEstimator | None = None,
    batch_size: int = 64,
    window: int | None = None,
    growing: bool = False,
    restarts: int = 1,
    tournament: float = 0.3,
    learning_rate: float = 1e-2,
    optimiser: optax.GradientTransformation | None = None,
    log_prior: Callable[[StateSpaceModel], Scalar] | None = None,
    held_out: Any = None,
    patience: int | None = None,
    chunk_size: int = 100,
    checkpoint: str | Path | None = None,
    prepare: bool = True,
    parallel: Parallel = False,
    remat: bool | int = False,
    progress: bool | Callable[[int, float], None] = True,
    mesh: MeshLike = "all",
) -> FitResult:
    """Ascends the ELBO in the parameters of a family, of the model, or of both.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.1 * jnp.ones(1))),
        ... )
        >>> keys = jax.random.split(jax.random.key(0), 8)
        >>> ys = jax.vmap(lambda key: model.simulate(key, num_times=10)[1])(keys)
        >>> family = rd.ConjugateFamily(jax.random.key(1), state_dim=1, obs_dim=1, width=4)
        >>> result = rd.fit(jax.random.key(2), family, model, ys, num_steps=20, progress=False)
        >>> result.status, bool(result.held_out[-1] > result.held_out[0])
        ('finished', True)

    Args:
        key: a typed key.
        family: the family to start from.
        model: the model.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series; or series
            that stay on disk, from `data.open_series`, or `SharedSeries` of several processes: both
            come with mask, inputs and lengths.
        num_steps: how many steps to take.
        learn: what moves: `"family"`, `"model"`, `"both"`, or a pytree of booleans over
            `(family, model)`. Scales of a model that is learned by name are held positive.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: how many rows exist, one integer a series or one for all.
        estimator: how the ELBO is taken. By default closed form for linear-Gaussian models,
            quadrature for one or two state dimensions, one draw of the emission term for more; for
            families whose chains are sampled, one path a series, or one a component of a terminal
            mixture, without the score of the chain.
        batch_size: how many series a step sees.
        window: how many rows of each series a step sees, for long series: the family runs from the
            start up to the window without a gradient, and the step ascends the increment of the
            ELBO over the window. `None` for all rows.
        growing: whether to train on prefixes that double in length first, for half of the steps.
        restarts: how many starts to train side by side: the given one and fresh draws. A family
            without random weights has one.
        tournament: the share of the steps after which only the best start goes on; 1 to train all
            of them to the end.
        learning_rate: the largest rate of the default optimiser, which is Adam with warm-up, cosine
            decay and clipping.
        optimiser: an optax transformation instead.
        log_prior: a log density of the model's parameters, for maximum a posteriori estimates;
            called with the unwrapped model.
        held_out: observations by which parameters are graded, shaped as `ys`, or a pair of them and
            a dictionary with their `mask`, `inputs` and `length`.
        patience: how many chunks may pass without a better grade before the fit stops.
        chunk_size: steps between two visits of Python at which parameters are graded.
        checkpoint: a file in which the state is kept after each chunk; if it exists, the fit goes
            on from it, to the parameters that it would have ended with.
        prepare: whether to set the units of the family first; `False` goes on with a family that
            was trained before.
        parallel: whether series are read and graded in O(log n) depth, for long series on
            accelerators and a family that is parallel in time, or over the devices of a
            `time_mesh`; not with a `window`.
        remat: whether rows are read again where derivatives are taken, instead of being kept, so
            that memory grows with the square root of the rows that a step sees and not with their
            number; or how many rows are kept at a time. For short series a step takes longer.
        progress: whether to show a progress line, or a function that is called after each chunk
            with the number of steps taken and the best grade so far, in nats a time step.
        mesh: the devices: `"all"`, those of other processes included, a `jax.sharding.Mesh`, or
            `None` for JAX's default device. Series are laid over all axes of the mesh, and
            parameters lie whole on each device; with several starts, an axis named `"start"` is
            theirs. The result is that of one device up to rounding. All processes of a mesh must
            call `fit` with the same arguments, and one of them writes checkpoints; instead of all
            series, each may hold its share of them, as `SharedSeries`. With a `time_mesh` as
            `parallel`, its devices are used instead.

    Returns:
        The family and the model with the best parameters, the history, and how it ended.

    Raises:
        ValueError: if family, model and data do not fit, or a checkpoint belongs to another fit.
        TypeError: if an argument is of the wrong kind.
        ProcessLostError: if another process of the mesh has ended.
    """
    check_key(key, "fit")
    devices = as_mesh(mesh) if isinstance(parallel, bool) else None
    num_steps, chunk_size = check_count(num_steps, "num_steps"), check_count(chunk_size, "chunk")
    restarts, batch_size = check_count(restarts, "restarts"), check_count(batch_size, "batch_size")
    _check_kinds(family, model)
    if parallel and window is not None:
        raise ValueError(
            f"fit reads a series row by row up to a window, got window={window} and parallel=True."
            " Leave out the window, or the option."
        )
    if parallel and remat:
        raise ValueError(
            "fit keeps few rows by reading a series one after another, got remat and parallel=True."
            " Leave out one of them."
        )
    given = given_for(unwrap(model), ys, mask=mask, inputs=inputs, length=length, mesh=devices)
    if prepare:
        family = _prepared(family, model, given.across())
    if isinstance(learn, str) and learn != "family":
        model = learnable(model)
    estimator = default_estimator(family, unwrap(model)) if estimator is None else estimator
    graded = given.first(NUM_GRADED) if held_out is None else _held_out(model, held_out)

    moving = _moving((family, model), learn)
    _, fixed = eqx.partition((family, model), moving)
    parameters, num_starts = _starts(key, family, model, moving, restarts)
    cut = _chunks(num_steps, tournament, chunk_size) if num_starts else 0

    longest = given.num_times if window is None else check_count(window, "window")
    segment = _segment(remat, min(longest, given.num_times))
    objective = Objective(fixed, estimator, log_prior, 1.0 / given.num_rows, parallel, segment)
    stages = stages_of(objective, given.num_times, num_steps, window, growing, chunk_size)
    judge = eqx.tree_at(lambda o: o.estimator, objective, _for_grades(estimator))
    grade_key = jax.random.key(0)

    def grade(parameters: PyTree, data: tuple[Any, Batch]) -> tuple[Scalar, Scalar]:
        return judge.graded(parameters, data[1], grade_key)

    optimiser = default_optimiser(learning_rate, num_steps) if optimiser is None else optimiser
    state, history = start(parameters, optimiser, num_starts), None
    at_chunk = None
    if checkpoint is not None:
        path = Path(checkpoint)
        numbers = (num_steps, restarts, chunk_size, batch_size, window, growing, segment)
        metadata = fingerprint(key, given.digest(), estimator, tournament, numbers)
        state, history = resume(path, state, num_starts, metadata, devices)

        def write(state: TrainState, history: TrainHistory) -> None:
            if writes_for(devices):
                write_checkpoint(path, (state, history), metadata)

        at_chunk = write

    def go_on(
        stages: Sequence[Stage], state: TrainState, history: TrainHistory | None, starts: int | None
    ) -> Trained:
        placement, axes = _placed(devices, starts)
        supply = given.supply(Wanted(key, batch_size, devices, axes, chunk_size))
        feed = supply.feed
        try:
            return train(
                key,
                stages,
                grade,
                state,
                (supply.source, spread(graded, devices, axes)),
                optimiser=optimiser,
                num_starts=starts,
                chunk_size=chunk_size,
                feed=None if feed is None else lambda *steps: (feed(*steps), None),
                steps_at_once=supply.steps_at_once,
                patience=patience,
                history=history,
                at_chunk=at_chunk,
                show=show,
                placement=placement,
            )
        finally:
            supply.close()

    show = _shown(progress, num_steps)
    trained = None
    if state.kept_score.ndim == 1:
        trained = go_on(_until(stages, cut), state, history, num_starts)
        if trained.status != "diverged":
            state, history = best_start(trained.state, trained.history)
            trained = None
    if trained is None:
        trained = go_on(stages, state, history, None)
    else:
        trained = Trained(*best_start(trained.state, trained.history), trained.status)
    result = _result(trained, fixed)
    if held_out is not None:
        result = _compared_with_training(result)
    alone = devices is None or not devices.is_multi_process
    if num_steps >= FEWEST_COMPARED and alone and not callable(log_prior):
        some = first_rows(take(graded, slice(0, NUM_COMPARED)), MOST_COMPARED_ROWS)
        result = _compared_with_particles(result, judge, trained.state.kept, some)
    return result


def _compared_with_training(result: FitResult) -> FitResult:
    """Set the status if held-out series have a far lower ELBO than those trained on."""
    if result.status == "diverged":
        return result
    steps = result.history[max(0, result.kept_step - NUM_AVERAGED) : result.kept_step]
    steps = steps[np.isfinite(steps)]
    graded = result.held_out[result.held_out_steps == result.kept_step]
    if not steps.size or not graded.size:
        return result
    noise = float(np.std(steps)) / np.sqrt(steps.size)
    training, value = float(np.mean(steps)), float(graded[-1])
    if training - value <= FAR_BELOW + 3 * noise:
        return result
    reason = (
        f"The ELBO of the held-out series is {value:.3f} nats per row, and that of the training"
        f" series {training:.3f}: more series, a smaller family or fewer steps are needed."
    )
    return _with_status(result, "overfitted", reason)


def _compared_with_particles(
    result: FitResult, judge: Objective, kept: PyTree, some: Series
) -> FitResult:
    """Set the status if the ELBO is far below an estimate of the evidence of the same series.

    A bootstrap filter estimates the evidence from below on average: what it finds above the ELBO is
    missing. Where it fails nothing is said.
    """
    if result.status in ("diverged", "overfitted"):
        return result
    model, rows = unwrap(result.model), float(num_rows(some))
    try:
        filters = [
            particle_filter(
                jax.random.key(i),
                model,
                take(some, i).ys,
                NUM_PARTICLES,
                strict=False,
                mask=True if some.mask is None else some.mask[i],
                inputs=None if some.inputs is None else some.inputs[i],
                length=None if some.length is None else some.length[i],
            )
            for i in range(num_series(some))
        ]
    except (TypeError, ValueError):
        return result  # a part of the model has no density
    evidence = sum(float(each.log_evidence) for each in filters) / rows
    error = np.sqrt(sum(float(each.log_evidence_standard_error()) ** 2 for each in filters)) / rows
    value, noise = jax.tree.map(
        float, eqx.filter_jit(judge.graded)(kept, Batch(some, num_series(some)), jax.random.key(0))
    )
    if any(int(each.status) for each in filters) or not np.isfinite(evidence):
        return result
    if evidence + value <= FAR_BELOW + 3 * np.hypot(error, noise):
        return result
    reason = (
        f"The ELBO of {num_series(some)} series is {-value:.3f} nats per row, and a particle"
        f" estimate of their log-evidence {evidence:.3f} ± {error:.3f}: the posterior of the family"
        " is far off. More steps, more series, restarts or another family are needed."
    )
    return _with_status(result, "underfitted", reason)


def _with_status(result: FitResult, status: FitStatus, reason: str) -> FitResult:
    return dataclasses.replace(result, status=status, reason=reason)


def _placed(mesh: Mesh | None, num_starts: int | None) -> tuple[Placement | None, tuple[str, ...]]:
    """Where parameters lie, and the axes of the mesh over which series do."""
    if mesh is None:
        return None, ()
    if num_starts is None or STARTS not in mesh.axis_names:
        return Placement(mesh), mesh.axis_names
    if num_starts % mesh.shape[STARTS]:
        raise ValueError(
            f"{num_starts} starts cannot be spread over an axis {STARTS!r} of"
            f" {mesh.shape[STARTS]} devices in equal shares."
        )
    return Placement(mesh, STARTS), tuple(axis for axis in mesh.axis_names if axis != STARTS)


def _segment(remat: bool | int, num_times: int) -> int | None:
    """How many rows are kept at a time; `None` for all."""
    if remat is True:
        return default_segment(num_times)
    return check_count(remat, "remat") if remat else None


def _prepared(family: AbstractFamily, model: StateSpaceModel, some: Series) -> AbstractFamily:
    """The family in the units of the data."""
    return family.prepare(model, some.ys, mask=some.mask, inputs=some.inputs, length=some.length)


def _shown(
    progress: bool | Callable[[int, float], None], num_steps: int
) -> Callable[[int, float], None] | None:
    """What is called with the step and the loss after each chunk."""
    if callable(progress):
        return lambda step, loss: progress(step, -loss)
    return ProgressLine("ELBO {:.4f} nats a time step", num_steps) if progress else None


def _chunks(num_steps: int, share: float, chunk_size: int) -> int:
    """A share of the steps, rounded up to whole chunks."""
    if not 0 < share <= 1:
        raise ValueError(f"fit expects a tournament in (0, 1], a share of the steps, got {share}.")
    return min(num_steps, -(-int(share * num_steps) // chunk_size) * chunk_size)


def _until(stages: Sequence[Stage], step: int) -> list[Stage]:
    """The stages up to a step."""
    kept = [stage for stage in stages if stage.until < step]
    return [*kept, Stage(step, stages[len(kept)].loss)]


def _starts(
    key: PRNGKey, family: AbstractFamily, model: StateSpaceModel, moving: PyTree, restarts: int
) -> tuple[PyTree, int | None]:
    """The parameters of each start, those that were given and fresh draws, and how many."""
    given = eqx.filter((family, model), moving)
    keys = jax.random.split(jax.random.fold_in(key, 2), restarts - 1)
    fresh = [eqx.filter((family.redraw(each), model), moving) for each in keys]
    drawn = [each for each in fresh if not eqx.tree_equal(each, given)]
    if not drawn:
        return given, None
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), given, *drawn), 1 + len(drawn)


def _moving(pair: tuple[AbstractFamily, StateSpaceModel], learn: Any) -> PyTree:
    """A pytree of booleans over (family, model): which leaves are learned."""
    arrays = jax.tree.map(eqx.is_inexact_array, pair)
    if isinstance(learn, str):
        if learn not in ("family", "model", "both"):
            raise ValueError(
                "fit expects learn 'family', 'model', 'both' or a pytree of booleans over (family,"
                f" model), got {learn!r}."
            )
        chosen = {"family": (True, False), "model": (False, True), "both": (True, True)}[learn]
        spread = tuple(
            jax.tree.map(lambda leaf, keep=keep: leaf and keep, part)
            for keep, part in zip(chosen, arrays, strict=True)
        )
        return spread
    try:
        return jax.tree.map(lambda given, array: bool(given) and array, learn, arrays)
    except ValueError as error:
        raise ValueError(
            "fit expects learn to be a pytree of booleans of the structure of (family, model) after"
            " family.prepare(model, ys): call it first, and pass prepare=False. " + str(error)
        ) from error


def _held_out(model: StateSpaceModel, held_out: Any) -> Series:
    """The series by which parameters are graded, checked against the model."""
    ys, rest = held_out if isinstance(held_out, tuple) else (held_out, {})
    if isinstance(ys, SharedSeries | AbstractSeriesStore):
        raise TypeError(
            "fit expects held_out to be arrays, the same in every process, got"
            f" {type(ys).__name__}: some hundred series are enough."
        )
    given = {"mask": None, "inputs": None, "length": None, **rest}
    return batch_for(unwrap(model), ys, owner="fit", **given)


def default_estimator(family: AbstractFamily, model: StateSpaceModel) -> AbstractEstimator:
    """The cheapest estimator of the ELBO that family and model allow."""
    if not isinstance(family, AbstractLinearGaussianFamily):
        return BackwardSampling(NUM_PATHS, by_component=True, stop_score=True)
    if all(term.quadratic for term in LogJoint(model).terms()):
        return ClosedForm()
    if model.state_dim == 1:
        return Quadrature(20)
    if model.state_dim == 2:
        return Quadrature(8)
    return RaoBlackwellised(1)


def _for_grades(estimator: AbstractEstimator) -> AbstractEstimator:
    """The estimator with twice as many draws if it has one replicate, and so no standard error."""
    if estimator.num_replicates != 1 or not hasattr(estimator, "num_samples"):
        return estimator
    return dataclasses.replace(estimator, num_samples=2 * estimator.num_samples)  # pyright: ignore


def _check_kinds(family: Any, model: Any) -> None:
    if not isinstance(family, AbstractFamily):
        raise TypeError(f"fit expects a family, got {type(family).__name__}.")
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"fit expects a StateSpaceModel, got {type(model).__name__}.")


def _result(trained: Trained, fixed: PyTree) -> FitResult:
    state, history = trained.state, trained.history
    family, model = eqx.combine(state.kept, fixed)
    scores = np.atleast_1d(np.asarray(state.kept_score))
    if history.other_scores is not None:
        scores = np.concatenate([scores, history.other_scores])
    return FitResult(
        family=family,
        model=model,
        history=-history.losses,
        held_out=-history.scores,
        held_out_steps=history.score_steps,
        kept_step=int(state.kept_step),
        restart_scores=-scores,
        num_skipped=int(state.skipped),
        status=trained.status,
    )
