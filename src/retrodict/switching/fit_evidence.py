"""Learn a switching model by maximising its log-evidence, from several starts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._learning import ProgressLine, minimise
from retrodict._model import Series, unwrap
from retrodict.switching.evidence import smooth_any
from retrodict.switching.fit_result import SwitchingFit, best_of, num_rows, with_issues
from retrodict.switching.model import (
    SwitchingModel,
    prepare_switching_batch,
    require_switching,
)
from retrodict.switching.starts import random_starts


def fit_evidence(
    key: PRNGKey,
    model: SwitchingModel,
    ys: Any,
    *,
    num_starts: int = 10,
    num_steps: int = 200,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
    progress: bool = True,
) -> SwitchingFit:
    """Maximise the log-evidence log p_θ(y) of a switching model by L-BFGS, from several starts.

    The evidence is exact for a hidden Markov model. With a continuous state it is GPB2's, which is
    approximate, and so are the estimates. Scales are kept positive; wrap known parameters in
    `Frozen`. The order of the regimes in the result is arbitrary: see `canonical_order`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (-2.0, 2.0)],
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=60)
        >>> result = rd.switching.fit_evidence(
        ...     jax.random.key(1), model, ys, num_starts=2, num_steps=20, progress=False
        ... )
        >>> result.start_values.shape
        (2,)
        >>> bool(result.log_evidence > rd.switching.log_evidence(model, ys))
        True

    Args:
        key: a typed key.
        model: the model to start from.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        num_starts: the number of starts: the model, and others that are moved from it at random.
        num_steps: the largest number of steps per start.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
        progress: whether to show a progress line.

    Returns:
        The best model, its history and status, and the evidence that each start reached.
    """
    require_switching(model, "switching.fit_evidence")
    check_key(key, "switching.fit_evidence")
    num_starts = check_count(num_starts, "num_starts")
    num_steps = check_count(num_steps, "num_steps")
    batch = prepare_switching_batch(unwrap(model), ys, mask=mask, inputs=inputs, length=length)
    if batch.mask is not None and not bool(jnp.any(batch.mask)):
        raise ValueError(
            "switching.fit_evidence expects observed entries in ys, got none: all are missing."
        )
    starts = [model, *random_starts(key, model, batch, num_starts - 1)]
    results = []
    for number, start in enumerate(starts):
        line = _progress_line(progress, number, num_starts, num_steps)
        results.append(_descend(start, batch, num_steps, line))
    return best_of([with_issues(result, batch) for result in results])


def _progress_line(show: bool, number: int, num_starts: int, num_steps: int) -> Any:
    if not show:
        return None
    unit = f"start {number + 1} of {num_starts}, log-evidence {{:.4f}} nats per time step"
    return ProgressLine(unit, num_steps)


class _Loss(eqx.Module):
    """The negative log-evidence per row.

    Attributes:
        fixed: the leaves of the model that are not floating arrays.
        share: one over the number of rows.
    """

    fixed: PyTree
    share: float = eqx.field(static=True)

    def __call__(self, parameters: PyTree, batch: Series) -> Scalar:
        model = unwrap(eqx.combine(parameters, self.fixed))
        evidences = jax.vmap(lambda series: smooth_any(model, series).log_evidence)(batch)
        return -self.share * jnp.sum(evidences)


def _descend(model: SwitchingModel, batch: Series, num_steps: int, line: Any) -> SwitchingFit:
    model = model.learnable()
    fixed = eqx.filter(model, eqx.is_inexact_array, inverse=True)
    loss = _Loss(fixed, 1.0 / num_rows(batch))
    minimum = minimise(
        loss, model, batch, num_steps=num_steps, share=loss.share, num_starts=1, show=line
    )
    value = -minimum.value / loss.share
    best = eqx.combine(minimum.parameters, fixed)
    return SwitchingFit(best, -minimum.losses, minimum.status, np.array([value]), value)
