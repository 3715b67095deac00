"""Standard errors of the parameters of a switching model."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from retrodict._arrays import Scalar
from retrodict._learning import ParameterErrors, errors_of_evidence
from retrodict._model import Series, unwrap
from retrodict.switching.evidence import smooth_any
from retrodict.switching.model import SwitchingModel, prepare_switching_batch, require_switching


def parameter_errors(
    model: SwitchingModel,
    ys: Any,
    *,
    read: Callable[[SwitchingModel], PyTree] | None = None,
    level: float = 0.95,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> ParameterErrors:
    """Compute standard errors of learned parameters from the curvature of the log-evidence.

    The evidence is exact for a hidden Markov model, and that of `gpb2_smoother` for models with a
    continuous state. Parameters should be at its maximum. Relabelled regimes have the same
    evidence: errors are those of the maximum at the given labels.

    Example:
        >>> import jax, retrodict as rd
        >>> model = rd.models.hmm()
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=100)
        >>> errors = rd.switching.parameter_errors(
        ...     model, ys, read=lambda model: rd.models.named_parameters(model)["mean"]
        ... )
        >>> errors.standard_error.shape
        (2, 1)

    Args:
        model: the model; parts in `Frozen` are taken as known.
        ys: observations, of shape `(time, obs)` or `(batch, time, obs)`; NaN where missing.
        read: the quantities of interest as a function of the model; all parameters by default.
        level: the probability of the intervals.
        mask: true where an entry was observed.
        inputs: inputs, of shape `(time, input)` or `(batch, time, input)`.
        length: the number of rows that exist, one integer per series or one for all.
    """
    require_switching(model, "parameter_errors")
    plain = unwrap(model)
    batch = prepare_switching_batch(plain, ys, mask=mask, inputs=inputs, length=length)
    return errors_of_evidence(model, batch, _evidence, read=read, level=level)


def _evidence(model: SwitchingModel, series: Series) -> Scalar:
    """Return the log-evidence of an unwrapped model and a series."""
    return smooth_any(model, series).log_evidence
