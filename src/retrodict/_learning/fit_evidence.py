"""Learn a linear-Gaussian model by maximising its exact log-evidence."""

import sys
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._exact import check_linear_gaussian, log_evidence_of
from retrodict._learning.dataset import InMemoryBatches, Minibatch
from retrodict._learning.on_disk import AbstractSeriesStore
from retrodict._learning.open_dataset import open_dataset
from retrodict._learning.partition import is_learnable
from retrodict._learning.quasi_newton import minimise
from retrodict._learning.train import (
    LossStage,
    Placement,
    ProgressLine,
    Trained,
    TrainingStatus,
    default_optimiser,
    start,
    train,
)
from retrodict._model import Series, StateSpaceModel, unwrap
from retrodict.distributed import MeshLike, as_mesh, together


class EvidenceResult(eqx.Module):
    """The result of `fit_evidence`.

    Attributes:
        model: the model with the greatest log-evidence.
        history: the log-evidence of each step's series, in nats per time step; of several starts,
            that of the best one.
        log_evidence: the log-evidence of all series under `model`, plus the log prior if given, in
            nats.
        num_skipped: the number of steps that were skipped because of a non-finite gradient.
        status: `"converged"` if no step of `"lbfgs"` increases the evidence, `"finished"` if all
            steps were taken, `"stopped early"` if patience ran out or a line search failed before
            that, and `"diverged"` if too many steps were non-finite.
    """

    model: StateSpaceModel
    history: Float[np.ndarray, "step"]
    log_evidence: float = eqx.field(static=True)
    num_skipped: int = eqx.field(static=True)
    status: TrainingStatus = eqx.field(static=True)


@together()
def fit_evidence(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    *,
    num_steps: int = 2000,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    batch_size: int | None = None,
    learning_rate: float = 1e-2,
    optimiser: optax.GradientTransformation | Literal["lbfgs"] | None = None,
    log_prior: Callable[[StateSpaceModel], Scalar] | None = None,
    num_starts: int | None = None,
    patience: int | None = None,
    chunk_size: int = 100,
    progress: bool = True,
    mesh: MeshLike = "all",
) -> EvidenceResult:
    """Maximise the exact log-evidence log p_θ(y) of a linear-Gaussian model over its parameters θ.

    Scales are kept positive. Wrap known parameters in `Frozen`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> ys = jnp.array([[1.0], [2.0], [1.5], [3.0], [2.5]])
        >>> model = rd.models.start_from(rd.models.local_level(), ys)
        >>> result = rd.fit_evidence(jax.random.key(0), model, ys, num_steps=10, progress=False)
        >>> sorted(rd.models.named_parameters(result.model)), result.history.shape
        (['level_scale', 'obs_scale'], (10,))

    Args:
        key: a typed key.
        model: the model to start from.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series; or
            `SharedSeries`, which contain mask, inputs and lengths.
        num_steps: the number of steps.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
        batch_size: the number of series per step; all of them by default.
        learning_rate: the largest rate of the default optimiser.
        optimiser: an optax transformation to use instead; or `"lbfgs"`, which uses all series at
            each step, searches from several starts, takes tens of steps for data in any units, and
            stops at convergence.
        log_prior: a log density of the parameters, for maximum a posteriori estimates; called with
            the unwrapped model.
        num_starts: the number of starts of `"lbfgs"`, the given model first; by default one or two
            more per learned array. Parameters that end at zero are restarted from the interior,
            unless this is 1.
        patience: the number of chunks without a better evidence after which it stops; not for
            `"lbfgs"`.
        chunk_size: the number of steps between two evaluations.
        progress: whether to show a progress line.
        mesh: the devices over which the series are sharded, as in `fit`.

    Returns:
        The best model, the history, and the status.

    Raises:
        ProcessLostError: if another process of the mesh has ended.
    """
    check_key(key, "fit_evidence")
    num_steps = check_count(num_steps, "num_steps")
    chunk_size = check_count(chunk_size, "chunk_size")
    check_linear_gaussian(unwrap(model), "fit_evidence")
    if isinstance(ys, AbstractSeriesStore):
        raise TypeError("fit_evidence expects series in memory, got a store. Use fit instead.")
    devices = as_mesh(mesh)
    options = {"mask": mask, "inputs": inputs, "length": length}
    dataset = open_dataset(unwrap(model), ys, **options, mesh=devices, owner="fit_evidence")
    axes = () if devices is None else devices.axis_names
    size = sys.maxsize if batch_size is None else check_count(batch_size, "batch_size")
    batches: Any = dataset.loader(key, size, chunk_size, axes)
    model = model.learnable()
    parameters, fixed = eqx.partition(model, is_learnable(model))
    loss = EvidenceLoss(fixed, log_prior, 1.0 / dataset.num_rows)

    line = ProgressLine("log-evidence {:.4f} nats per time step", num_steps) if progress else None
    if isinstance(optimiser, str):
        if optimiser != "lbfgs" or batches.batch_size != batches.everything.count:
            raise ValueError(
                'fit_evidence expects an optax transformation, or "lbfgs" without a batch_size, got'
                f" {optimiser!r} with batch_size={batch_size}."
            )
        minimum = minimise(
            loss.value,
            model,
            batches.everything,
            num_steps=num_steps,
            share=loss.share,
            num_starts=num_starts,
            show=line,
        )
        return EvidenceResult(
            eqx.combine(minimum.parameters, fixed),
            -minimum.losses,
            -minimum.value / loss.share,
            minimum.num_skipped,
            minimum.status,
        )
    optimiser = optimiser or default_optimiser(learning_rate, num_steps)
    trained = train(
        key,
        [LossStage(num_steps, loss)],
        loss.score,
        Trained(start(parameters, optimiser, None)),
        batches.load,
        batches.everything,
        optimiser=optimiser,
        chunk_size=chunk_size,
        patience=patience,
        show=line,
        placement=Placement(mesh=devices),
    )
    return EvidenceResult(
        eqx.combine(trained.state.kept, fixed),
        -trained.history.losses,
        -float(trained.state.kept_score) / loss.share,
        int(trained.state.skipped),
        trained.status,
    )


class EvidenceLoss(eqx.Module):
    """The negative log-evidence in nats per time step, with its share of the log prior.

    Attributes:
        fixed: the leaves of the model that are not learned.
        log_prior: the log density of the model's parameters, or `None`.
        share: the weight of the log prior, one over the number of rows of all data.
    """

    fixed: PyTree
    log_prior: Callable[[StateSpaceModel], Scalar] | None
    share: float = eqx.field(static=True)

    def __call__(
        self, parameters: PyTree, batches: InMemoryBatches, key: PRNGKey, step: Array
    ) -> Scalar:
        """Return the loss of a step."""
        return self.value(parameters, batches.minibatch(key, step))

    def score(self, parameters: PyTree, batch: Minibatch) -> tuple[Scalar, Scalar]:
        """Return the loss of some series and its standard error, which is zero."""
        return self.value(parameters, batch), jnp.zeros(())

    def value(self, parameters: PyTree, batch: Minibatch) -> Scalar:
        """Return the loss of some series."""

        def log_evidence(parameters: PyTree, series: Series) -> Scalar:
            return log_evidence_of(unwrap(eqx.combine(parameters, self.fixed)), series)

        value = -batch.total(batch.each(log_evidence, parameters)) / batch.num_rows()
        if self.log_prior is None:
            return value
        return value - self.share * self.log_prior(unwrap(eqx.combine(parameters, self.fixed)))
