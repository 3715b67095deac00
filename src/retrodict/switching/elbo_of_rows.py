"""The loss of `fit` for switching models."""

from typing import Any

from retrodict._arrays import PRNGKey
from retrodict._expectations import BackwardSampling, Estimate
from retrodict._families import infer_series
from retrodict._learning import elbo_of_rows
from retrodict._model import Series
from retrodict.distributed import Parallel
from retrodict.switching.family import SwitchingFamily
from retrodict.switching.model import SwitchingModel
from retrodict.switching.regime_sums import elbo_by_regime_sums


@elbo_of_rows.register
def switching_elbo_of_rows(
    model: SwitchingModel,
    family: Any,
    rows: Series,
    estimator: Any,
    key: PRNGKey,
    *,
    state: Any = None,
    from_start: Any = None,
    segment: int | None = None,
    parallel: Parallel = False,
) -> Estimate:
    """Compute the ELBO of rows of a series, or its increment, as `elbo_of_rows` does.

    Args:
        model: an unwrapped model.
        family: an unwrapped `SwitchingFamily`.
        rows: rows 0..b-1; for the increment, rows a-1..b-1.
        estimator: `BackwardSampling`, for its number of samples.
        key: a typed key.
        state: the state of the family before the first of the rows; by default that of `init`.
        from_start: whether the rows are 0..b-1, possibly traced; by default if there is no `state`.
        segment: `None`.
        parallel: `False`.
    """
    if not isinstance(family, SwitchingFamily):
        raise TypeError(
            "fit learns a SwitchingModel with a retrodict.switching.SwitchingFamily, got"
            f" {type(family).__name__}."
        )
    if not isinstance(estimator, BackwardSampling) or estimator.noise != "independent":
        raise TypeError(
            "The ELBO of a SwitchingModel is estimated by BackwardSampling(num_samples) with"
            f" independent noise, got {estimator}. Leave out `estimator`."
        )
    if segment is not None:
        raise ValueError("`remat` is not available for a SwitchingModel. Use `window`.")
    from_start = state is None if from_start is None else from_start
    chain = infer_series(family, rows, state, parallel=parallel)
    return elbo_by_regime_sums(model, chain, rows, key, estimator.num_samples, from_start)
