"""Fit a family, a model, or both, by maximising the ELBO.

`fit` reads, from top to bottom, as the path from arrays to a gradient: a dataset, the parameters,
the loss of a minibatch, the state of training, the steps, and the result.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._expectations import (
    AbstractEstimator,
    BackwardSampling,
    ClosedForm,
    LogJoint,
    Quadrature,
    RaoBlackwellised,
)
from retrodict._families import AbstractFamily, AbstractLinearGaussianFamily
from retrodict._learning.dataset import Minibatch, batch_for
from retrodict._learning.elbo_loss import ElboLoss, stages_of
from retrodict._learning.fit_checkpoint import FitCheckpoint, fingerprint
from retrodict._learning.fit_result import (
    FitResult,
    compare_with_particles,
    compare_with_training,
    result_of,
)
from retrodict._learning.on_disk import AbstractSeriesStore
from retrodict._learning.open_dataset import open_dataset
from retrodict._learning.options import Objective, Optimisation
from retrodict._learning.partition import Learn, partition
from retrodict._learning.shared import SharedSeries
from retrodict._learning.train import (
    LossStage,
    Placement,
    ProgressLine,
    Trained,
    best_start,
    default_optimiser,
    start,
    train,
)
from retrodict._model import AbstractModel, Series, StateSpaceModel, unwrap
from retrodict.distributed import MeshLike, as_mesh, together

NUM_PREPARED = 4096
"""The largest number of training series that determine the units of a family."""

NUM_EVALUATED = 256
"""The number of training series that evaluate the parameters if nothing is held out."""

MIN_COMPARED_STEPS = 1000
"""The least number of steps of a fit whose ELBO is compared with a particle estimate of the
evidence. The comparison takes some seconds."""

STARTS = "start"
"""The axis of a mesh over which several starts are sharded."""


@together()
def fit(
    key: PRNGKey,
    family: AbstractFamily,
    model: AbstractModel,
    ys: Any,
    *,
    num_steps: int = 4000,
    learn: Learn | PyTree = "family",
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    held_out: Any = None,
    objective: Objective | None = None,
    optimisation: Optimisation | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | Callable[[int, float], None] = True,
    mesh: MeshLike = "all",
) -> FitResult:
    """Maximise the ELBO over the parameters of a family, of the model, or of both.

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
            on disk from `data.open_series`, or `SharedSeries` of several processes, both of which
            contain mask, inputs and lengths.
        num_steps: the number of steps.
        learn: the parameters that move: `"family"`, `"model"`, `"both"`, or a pytree of booleans
            over `(family, model)`. With a name, the scales of a learned model are kept positive.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
        held_out: observations with which parameters are evaluated, shaped as `ys`, or a pair of
            them and a dictionary with their `mask`, `inputs` and `length`.
        objective: the objective: estimator, prior, windows, and how rows are computed.
        optimisation: the optimisation: minibatches, learning rate, starts and evaluations.
        checkpoint: a file in which the state is saved after each chunk. If it exists, the fit
            resumes from it, and ends with the parameters of an uninterrupted fit.
        progress: whether to show a progress line, or a function that is called after each chunk
            with the number of steps taken and the best evaluation so far, in nats per time step.
        mesh: the devices: `"all"`, including those of other processes, a `jax.sharding.Mesh`, or
            `None` for JAX's default device. Series are sharded over all axes of the mesh, and every
            device holds a copy of the parameters; several starts are sharded over an axis named
            `"start"`. The result is that of one device up to rounding. All processes of a mesh must
            call `fit` with the same arguments, and one of them writes checkpoints; instead of all
            series, each may hold its share, as `SharedSeries`. A `time_mesh` as
            `objective.parallel` replaces this mesh.

    Returns:
        The family and the model with the best parameters, the history, and the status.

    Raises:
        ValueError: if family, model and data do not fit, or a checkpoint belongs to another fit.
        TypeError: if an argument is of the wrong type.
        ProcessLostError: if another process of the mesh has ended.
    """
    check_key(key, "fit")
    _check_types(family, model, objective, optimisation)
    num_steps = check_count(num_steps, "num_steps")
    objective, options = objective or Objective(), optimisation or Optimisation()
    devices = as_mesh(mesh) if isinstance(objective.parallel, bool) else None

    # Data: series in memory, on disk, or shared between processes.
    dataset = open_dataset(
        unwrap(model), ys, mask=mask, inputs=inputs, length=length, mesh=devices, owner="fit"
    )
    validation = dataset.first(NUM_EVALUATED) if held_out is None else _held_out(model, held_out)

    # Parameters: the leaves of (family, model) that move, for every start.
    if options.prepare:
        series = dataset.spaced(NUM_PREPARED)
        family = family.prepare(model, series.ys, **series.options())
    parameters, fixed = partition(family, model, learn, "fit")
    others = _redrawn(key, family, options.restarts - 1)
    others = [partition(other, model, learn, "fit").parameters for other in others]
    parameters, num_starts = _stacked(parameters, others)

    # Loss: the negative ELBO of a minibatch as a function of the parameters. Its gradient is taken
    # by `train`, step by step.
    estimator = objective.estimator or default_estimator(family, unwrap(model))
    segment, share = objective.segment(dataset.num_times), 1.0 / dataset.num_rows
    loss = ElboLoss(fixed, estimator, objective.log_prior, share, objective.parallel, segment)
    stages = stages_of(loss, dataset.num_times, num_steps, objective, options.chunk_size)
    evaluation = dataclasses.replace(loss, estimator=_for_evaluation(estimator))

    # State: before the first step, or from a checkpoint.
    optimiser = options.optimiser or default_optimiser(options.learning_rate, num_steps)
    trained, file = Trained(start(parameters, optimiser, num_starts)), None
    if checkpoint is not None:
        settings = fingerprint(key, dataset, estimator, num_steps, objective, options, segment)
        file = FitCheckpoint(Path(checkpoint), settings, devices)
        trained = file.resume(trained, num_starts)

    # Steps: of all starts up to the end of the tournament, then of the best one.
    show = _progress_line(progress, num_steps)

    def run(stages: Sequence[LossStage], trained: Trained, starts: int | None) -> Trained:
        placement, axes = _placement(devices, starts)
        with closing(dataset.loader(key, options.batch_size, options.chunk_size, axes)) as loader:
            return train(
                key,
                stages,
                evaluation.score,
                trained,
                loader.load,
                Minibatch.on_devices(validation, devices, axes),
                optimiser=optimiser,
                chunk_size=options.chunk_size,
                steps_per_load=loader.steps_per_load,
                patience=options.patience,
                at_chunk=None if file is None else file.write,
                show=show,
                placement=placement,
            )

    if trained.state.kept_score.ndim == 1:
        until_cut = _until(stages, _tournament_end(num_steps, options))
        trained = best_start(run(until_cut, trained, num_starts))
    if trained.status != "diverged":
        trained = run(stages, trained, None)

    # Result: the parameters with the best evaluation.
    result = result_of(trained, fixed)
    if held_out is not None:
        result = compare_with_training(result)
    one_process = devices is None or not devices.is_multi_process
    is_comparable = isinstance(model, StateSpaceModel) and objective.log_prior is None
    if num_steps >= MIN_COMPARED_STEPS and one_process and is_comparable:
        result = compare_with_particles(result, evaluation, trained.state.kept, validation)
    return result


def _check_types(family: Any, model: Any, objective: Any, optimisation: Any) -> None:
    """Raise if an argument is of the wrong type."""
    for value, kind, what in (
        (family, AbstractFamily, "a family"),
        (model, AbstractModel, "a StateSpaceModel or a SwitchingModel"),
        (objective, Objective | None, "`objective` to be a retrodict.Objective"),
        (optimisation, Optimisation | None, "`optimisation` to be a retrodict.Optimisation"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"fit expects {what}, got {type(value).__name__}.")


def _held_out(model: AbstractModel, held_out: Any) -> Series:
    """Return the held-out series, checked against the model."""
    ys, options = held_out if isinstance(held_out, tuple) else (held_out, {})
    if isinstance(ys, SharedSeries | AbstractSeriesStore):
        raise TypeError(
            "fit expects `held_out` to be arrays, the same in every process, got"
            f" {type(ys).__name__}. Some hundred series are enough."
        )
    options = {"mask": None, "inputs": None, "length": None, **options}
    return batch_for(unwrap(model), ys, learner="fit", **options)


def _redrawn(key: PRNGKey, family: AbstractFamily, count: int) -> list[AbstractFamily]:
    """Return the family with new random weights, `count` times."""
    if count == 0:
        return []
    return [family.redraw(each) for each in jax.random.split(jax.random.fold_in(key, 2), count)]


def _stacked(first: PyTree, others: list[PyTree]) -> tuple[PyTree, int | None]:
    """Return the parameters of all starts that differ from the first, and the number of starts."""
    others = [each for each in others if not eqx.tree_equal(each, first)]
    if not others:
        return first, None
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), first, *others), 1 + len(others)


def default_estimator(family: AbstractFamily, model: Any) -> AbstractEstimator:
    """Return the cheapest estimator of the ELBO that family and model allow."""
    if not isinstance(family, AbstractLinearGaussianFamily):
        return BackwardSampling(family.num_paths, by_component=True, stop_score=True)
    if all(term.quadratic for term in LogJoint(model).terms()):
        return ClosedForm()
    if model.state_dim == 1:
        return Quadrature(20)
    if model.state_dim == 2:
        return Quadrature(8)
    return RaoBlackwellised(1)


def _for_evaluation(estimator: AbstractEstimator) -> AbstractEstimator:
    """Return the estimator, with two replicates if it has one, and so no standard error."""
    if estimator.num_replicates != 1 or not hasattr(estimator, "num_samples"):
        return estimator
    return dataclasses.replace(estimator, num_samples=2 * estimator.num_samples)  # pyright: ignore


def _placement(mesh: Mesh | None, num_starts: int | None) -> tuple[Placement, tuple[str, ...]]:
    """Return where parameters are, and the axes over which series are sharded."""
    axes = () if mesh is None else mesh.axis_names
    if mesh is None or num_starts is None or STARTS not in axes:
        return Placement(num_starts, mesh), axes
    if num_starts % mesh.shape[STARTS]:
        raise ValueError(
            f"The number of starts ({num_starts}) must be a multiple of the size of the mesh axis"
            f" {STARTS!r} ({mesh.shape[STARTS]})."
        )
    return Placement(num_starts, mesh, STARTS), tuple(axis for axis in axes if axis != STARTS)


def _progress_line(
    progress: bool | Callable[[int, float], None], num_steps: int
) -> Callable[[int, float], None] | None:
    """Return the function that is called with step and loss after each chunk."""
    if callable(progress):
        return lambda step, loss: progress(step, -loss)
    return ProgressLine("ELBO {:.4f} nats per time step", num_steps) if progress else None


def _tournament_end(num_steps: int, options: Optimisation) -> int:
    """Return the step after which the best start continues alone, at the end of a chunk."""
    chunks = -(-int(options.tournament * num_steps) // options.chunk_size)
    return min(num_steps, chunks * options.chunk_size)


def _until(stages: Sequence[LossStage], step: int) -> list[LossStage]:
    """Return the stages up to a step."""
    complete = [stage for stage in stages if stage.until < step]
    return [*complete, LossStage(step, stages[len(complete)].loss)]
