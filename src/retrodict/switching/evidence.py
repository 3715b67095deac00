"""The log-evidence of a switching model."""

from typing import Any

from retrodict._arrays import Scalar
from retrodict._model import Series, unwrap
from retrodict.switching.forward_backward import smooth_regimes
from retrodict.switching.gaussian_sum import (
    SwitchingPosterior,
    default_rule,
    smooth_by_merging,
)
from retrodict.switching.model import SwitchingModel, prepare_switching, require_switching


def log_evidence(
    model: SwitchingModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Scalar:
    """Compute log p(y_{0:n-1}): exactly for a hidden Markov model, by GPB2 otherwise.

    GPB2 merges K² Gaussians into K at every step, so that its evidence is approximate.
    `rao_blackwellised_smoother` estimates it without bias.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 1.0)],
        ... )
        >>> print(f"{rd.switching.log_evidence(model, jnp.zeros((1, 1))):.4f}")
        -1.1380

    Args:
        model: the model.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.
    """
    require_switching(model, "switching.log_evidence")
    model = unwrap(model)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    return smooth_any(model, series).log_evidence


def smooth_any(model: SwitchingModel, series: Series) -> SwitchingPosterior:
    """Smooth by forward–backward without a continuous state, and by GPB2 with one."""
    if model.is_finite:
        return smooth_regimes(model, series)
    return smooth_by_merging(model, series, "after", default_rule(model))
