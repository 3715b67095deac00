"""Learning a linear-Gaussian model by ascent of its exact log-evidence."""

from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from retrodict._exact import check_linear_gaussian, log_evidence_of
from retrodict._learning.quasi_newton import minimise
from retrodict._learning.shared import counted_for
from retrodict._learning.source import Batch, InMemory, in_memory
from retrodict._learning.train import (
    Placement,
    ProgressLine,
    Stage,
    Status,
    default_optimiser,
    start,
    train,
)
from retrodict._model import StateSpaceModel, learnable
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key
from retrodict.distributed import MeshLike, as_mesh, together


class EvidenceResult(eqx.Module):
    """What `fit_evidence` found.

    Attributes:
        model: the model with the greatest log-evidence that was seen.
        history: the log-evidence of each step's series, in nats per time step; of several
            starts, that of the best one.
        log_evidence: the log-evidence of all series under `model` (plus its log prior, if there is
            one), in nats.
        num_skipped: how many steps were skipped since their gradient was not finite.
        status: `"converged"` if no step of `"lbfgs"` makes the evidence larger, `"finished"` if all
            steps were taken, `"stopped early"` if patience ran out or a search along a line failed
            before that, and `"diverged"` if too many steps were not finite.
    """

    model: StateSpaceModel
    history: Float[np.ndarray, "step"]
    log_evidence: float = eqx.field(static=True)
    num_skipped: int = eqx.field(static=True)
    status: Status = eqx.field(static=True)


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
    """Ascends the exact log-evidence log p_θ(y) of a linear-Gaussian model in its parameters θ.

    Scales are held positive; wrap what is known in `Frozen`.

    Args:
        key: a typed key.
        model: the model to start from.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series; or
            `SharedSeries`, which come with mask, inputs and lengths.
        num_steps: how many steps to take.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: how many rows exist, one integer a series or one for all.
        batch_size: how many series a step sees; all of them if it is left out.
        learning_rate: the largest rate of the default optimiser.
        optimiser: an optax transformation instead; or `"lbfgs"`, which sees all series at each
            step, searches from several starts, takes tens of steps whatever the units of the data,
            and ends by itself.
        log_prior: a log density of the parameters, for maximum a posteriori estimates; called with
            the unwrapped model.
        num_starts: from how many starts `"lbfgs"` searches, the given model first; by default from
            one or two more for each array that is learned. Parameters that end at the edge of zero
            are started again from the interior, unless this is 1.
        patience: how many chunks may pass without a better evidence before it stops; not for
            `"lbfgs"`.
        chunk_size: steps between two visits of Python.
        progress: whether to show a progress line.
        mesh: the devices, over which the series are laid, as in `fit`.

    Returns:
        The best model, the history, and how it ended.

    Raises:
        ProcessLostError: if another process of the mesh has ended.
    """
    check_key(key, "fit_evidence")
    num_steps, chunk_size = check_count(num_steps, "num_steps"), check_count(chunk_size, "chunk")
    plain = unwrap(model)
    check_linear_gaussian(plain)
    devices = as_mesh(mesh)
    options = {"mask": mask, "inputs": inputs, "length": length}
    batch, count = counted_for(plain, ys, **options, mesh=devices, owner="fit_evidence")
    model = learnable(model)
    parameters, fixed = eqx.partition(model, eqx.is_inexact_array)
    size = count if batch_size is None else min(batch_size, count)
    share = 1.0 / float(Batch(batch, count).num_rows())
    axes = () if devices is None else devices.axis_names
    source = in_memory(batch, size, devices, axes, count)

    def log_evidence(parameters: PyTree, series: Series) -> Scalar:
        return log_evidence_of(unwrap(eqx.combine(parameters, fixed)), series)

    def objective(parameters: PyTree, batch: Batch) -> Scalar:
        value = -batch.total(batch.each(log_evidence, parameters)) / batch.num_rows()
        if log_prior is None:
            return value
        return value - share * log_prior(unwrap(eqx.combine(parameters, fixed)))

    line = ProgressLine("log-evidence {:.4f} nats a time step", num_steps) if progress else None
    if isinstance(optimiser, str):
        if optimiser != "lbfgs" or size != count:
            raise ValueError(
                'fit_evidence expects an optax transformation, or "lbfgs" without a batch_size, got'
                f" {optimiser!r} with batch_size={batch_size}."
            )
        found = minimise(
            objective,
            model,
            source.all(),
            num_steps=num_steps,
            share=share,
            num_starts=num_starts,
            show=line,
        )
        return EvidenceResult(
            eqx.combine(found.parameters, fixed),
            -found.losses,
            -found.value / share,
            found.num_skipped,
            found.status,
        )

    def loss(parameters: PyTree, data: InMemory, key: PRNGKey, step: Array) -> Scalar:
        drawn = data.all() if size == count else data.draw(key, step)
        return objective(parameters, drawn)

    optimiser = default_optimiser(learning_rate, num_steps) if optimiser is None else optimiser
    trained = train(
        key,
        [Stage(num_steps, loss)],
        lambda parameters, data: (objective(parameters, data.all()), jnp.zeros(())),
        start(parameters, optimiser, None),
        source,
        optimiser=optimiser,
        num_starts=None,
        chunk_size=chunk_size,
        patience=patience,
        show=line,
        placement=None if devices is None else Placement(devices),
    )
    return EvidenceResult(
        eqx.combine(trained.state.kept, fixed),
        -trained.history.losses,
        -float(trained.state.kept_score) / share,
        int(trained.state.skipped),
        trained.status,
    )
