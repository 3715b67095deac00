"""The result of `fit`, and whether it overfits or underfits."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from retrodict._families import AbstractFamily
from retrodict._learning.dataset import Minibatch
from retrodict._learning.elbo_loss import ElboLoss
from retrodict._learning.train import Trained, TrainingStatus
from retrodict._model import Series, unwrap
from retrodict.particles import particle_filter

FitStatus = TrainingStatus | Literal["overfitted", "underfitted"]
"""How a fit ended; the last two override "finished" and "stopped early"."""

FAR_BELOW = 0.5
"""The gap in nats per row that makes an ELBO far below another one, or below the evidence: the loss
of a Gaussian law whose mean is off by one standard deviation in each row."""

NUM_COMPARED = 2
"""The number of series whose ELBO is compared with a particle estimate of the evidence."""

MAX_COMPARED_ROWS = 200
"""The number of their first rows that are compared."""

NUM_AVERAGED = 100
"""The number of steps before the kept one over which the training ELBO is averaged."""

NUM_PARTICLES = 1000
"""The number of particles that estimate the evidence."""


class FitResult(eqx.Module):
    """The result of `fit`.

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
        >>> result.status, result.history.shape
        ('finished', (20,))
        >>> result.family.infer(ys[0]).marginals().mean.shape
        (10, 1)

    Attributes:
        family: the family with the best parameters. If the ELBO is sampled, these are the last
            parameters whose evaluation is within the noise of the best one.
        model: the model with the parameters that were learned together with it.
        history: the ELBO of each step's minibatch, in nats per time step.
        held_out: the ELBO at the chunk boundaries, in nats per time step: of the held-out series,
            or of a fixed part of the training series if nothing was held out.
        held_out_steps: the steps of `held_out`.
        kept_step: the step whose parameters were kept.
        restart_scores: the best of `held_out` for each start, as long as it was trained; the first
            is that of `family`.
        num_skipped: the number of steps that were skipped because of a non-finite gradient.
        status: `"finished"` if all steps were taken, `"stopped early"` if patience ran out, or
            `"diverged"` if too many steps in a row were skipped, or the last ones were and left no
            finite ELBO. Instead of the first two:
            `"overfitted"` if the ELBO of `held_out` series is more than 0.5 nats per row below that
            of the training series; `"underfitted"` if the ELBO of the first two validation series
            is more than 0.5 nats per row below a particle estimate of their evidence, which is
            computed after 1,000 steps or more. `"finished"` does not imply an accurate posterior:
            see `check_posterior`.
        reason: the figures behind `"overfitted"` and `"underfitted"`; empty otherwise.
    """

    family: AbstractFamily
    model: Any
    history: Float[np.ndarray, "step"]
    held_out: Float[np.ndarray, "chunk"]
    held_out_steps: Int[np.ndarray, "chunk"]
    kept_step: int = eqx.field(static=True)
    restart_scores: Float[np.ndarray, "restart"]
    num_skipped: int = eqx.field(static=True)
    status: FitStatus = eqx.field(static=True)
    reason: str = eqx.field(static=True, default="")


def result_of(trained: Trained, fixed: PyTree) -> FitResult:
    """Return the result of training with the parameters that were kept."""
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


def compare_with_training(result: FitResult) -> FitResult:
    """Set the status if the ELBO of held-out series is far below that of training series."""
    if result.status == "diverged":
        return result
    steps = result.history[max(0, result.kept_step - NUM_AVERAGED) : result.kept_step]
    steps = steps[np.isfinite(steps)]
    evaluated = result.held_out[result.held_out_steps == result.kept_step]
    if not steps.size or not evaluated.size:
        return result
    noise = float(np.std(steps)) / np.sqrt(steps.size)
    training, value = float(np.mean(steps)), float(evaluated[-1])
    if training - value <= FAR_BELOW + 3 * noise:
        return result
    reason = (
        f"The ELBO of the held-out series is {value:.3f} nats per row, and that of the training"
        f" series {training:.3f}. Use more series, a smaller family or fewer steps."
    )
    return dataclasses.replace(result, status="overfitted", reason=reason)


def compare_with_particles(
    result: FitResult, loss: ElboLoss, parameters: PyTree, series: Series
) -> FitResult:
    """Set the status if the ELBO is far below a particle estimate of the evidence.

    A bootstrap filter underestimates the log-evidence on average, so that an estimate far above the
    ELBO is a gap of the family. A failed filter is ignored.

    Args:
        result: the fit.
        loss: the loss of the evaluations.
        parameters: the parameters that were kept.
        series: the validation series, of which the first rows of the first few are compared.
    """
    if result.status in ("diverged", "overfitted"):
        return result
    batch = Minibatch.on_devices(series.at(slice(0, NUM_COMPARED))).first_rows(MAX_COMPARED_ROWS)
    model, rows = unwrap(result.model), float(batch.num_rows())
    several = [batch.series.at(i) for i in range(batch.count)]
    try:
        filters = [
            particle_filter(
                jax.random.key(i),
                model,
                series.ys,
                NUM_PARTICLES,
                strict=False,
                **series.options(),
            )
            for i, series in enumerate(several)
        ]
    except (TypeError, ValueError):
        return result  # a part of the model has no density
    evidence = sum(float(each.log_evidence) for each in filters) / rows
    error = np.sqrt(sum(float(each.log_evidence_standard_error()) ** 2 for each in filters)) / rows
    if any(int(each.status) for each in filters) or not np.isfinite(evidence):
        return result
    value, noise = map(float, eqx.filter_jit(loss.score)(parameters, batch))
    if evidence + value <= FAR_BELOW + 3 * np.hypot(error, noise):
        return result
    reason = (
        f"The ELBO of {batch.count} series is {-value:.3f} nats per row, and a particle estimate of"
        f" their log-evidence {evidence:.3f} ± {error:.3f}: the posterior of the family is far off."
        " Use more steps, more series, restarts or another family."
    )
    return dataclasses.replace(result, status="underfitted", reason=reason)
