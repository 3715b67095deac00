"""Exact expectation-maximisation of hidden Markov models, from several starts."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._learning import coordinates_of
from retrodict._model import (
    AbstractParameter,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Positive,
    PositiveTril,
    Series,
    unwrap,
)
from retrodict.switching.finite_moments import regime_moments
from retrodict.switching.fit_result import SwitchingFit, best_of, num_rows, with_issues
from retrodict.switching.maximise import maximise
from retrodict.switching.model import (
    SwitchingModel,
    each,
    prepare_switching_batch,
    require_finite,
)
from retrodict.switching.moments import RegimeMoments
from retrodict.switching.newton import check_size, newton_steps
from retrodict.switching.regimes import Regimes
from retrodict.switching.starts import random_starts


def finite_em(
    key: PRNGKey,
    model: SwitchingModel,
    ys: Any,
    *,
    num_iterations: int = 50,
    num_starts: int = 1,
    tolerance: float = 1e-6,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingFit:
    """Learn a hidden Markov model by expectation-maximisation with an exact E-step.

    The M-step is in closed form for `Regimes` and for emissions that are `Gaussian` or
    `LinearGaussianKernel`. Other laws, and parameters that tie regimes to each other, take damped
    Newton steps. The evidence never decreases. Parts in `Frozen` do not change.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (-2.0, 2.0)],
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=60)
        >>> result = rd.switching.em(jax.random.key(1), model, ys, num_iterations=5)
        >>> bool(result.history[-1] > result.history[0])
        True

    Args:
        key: a typed key.
        model: a model without a continuous state.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        num_iterations: the largest number of M-steps per start.
        num_starts: the number of starts: the model, and others that are drawn from the data.
        tolerance: the gain of the evidence, in nats per time step, below which EM has converged.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.
    """
    require_finite(model, "finite_em")
    check_key(key, "finite_em")
    num_iterations = check_count(num_iterations, "num_iterations")
    num_starts = check_count(num_starts, "num_starts")
    batch = prepare_switching_batch(unwrap(model), ys, mask=mask, inputs=inputs, length=length)
    if batch.mask is not None and not bool(jnp.any(batch.mask)):
        raise ValueError("finite_em expects observed entries in ys, got none: all are missing.")
    starts = [model, *random_starts(key, model, batch, num_starts - 1)]
    runs = [_iterate(start, batch, num_iterations, tolerance) for start in starts]
    return best_of([with_issues(_result(run), batch) for run in runs])


class _Run(NamedTuple):
    """The iterations from one start."""

    model: SwitchingModel
    history: list[float]
    status: str
    rows: float


def _result(run: _Run) -> SwitchingFit:
    values = np.array([run.history[-1] * run.rows])
    return SwitchingFit(run.model, np.asarray(run.history), run.status, values, float(values[0]))


def _iterate(model: SwitchingModel, batch: Series, num_iterations: int, tolerance: float) -> _Run:
    """Alternate E-steps and M-steps; the history ends with the evidence of the returned model."""
    rows, history, before, status = num_rows(batch), [], model, "finished"
    for iteration in range(num_iterations + 1):
        moments, evidence = regime_moments(unwrap(model), batch)
        history.append(float(evidence) / rows)
        if not np.isfinite(history[-1]):
            status = "diverged"
        elif iteration and history[-1] < history[-2]:
            status = "converged" if history[-2] - history[-1] < tolerance else "stopped early"
        elif iteration and history[-1] - history[-2] < tolerance:
            status = "converged"
            break
        if status != "finished":
            # Rounding, or the floor of the noise, lowered the evidence: keep the model before.
            return _Run(before, history[:-1] or history, status, rows)
        if iteration < num_iterations:
            before, model = model, _maximised(model, moments, batch)
    return _Run(model, history, status, rows)


def _maximised(model: SwitchingModel, moments: RegimeMoments, batch: Series) -> SwitchingModel:
    """Return the model after the M-step: closed forms first, Newton steps for the rest."""
    parts = {"regimes": has_closed_regimes(model), "emission": has_closed_emission(model, batch)}
    if any(parts.values()):
        model = _closed_form(model, moments, batch, **parts)
    rest = model
    for name, closed in parts.items():
        if closed:
            rest = eqx.tree_at(lambda m, n=name: getattr(m, n), rest, Frozen(getattr(rest, name)))
    coordinates = coordinates_of(rest)
    if not coordinates.names:
        return model
    check_size(coordinates)
    new = newton_steps(coordinates, batch, moments.probabilities, moments.pairs).model
    for name, closed in parts.items():
        if closed:
            new = eqx.tree_at(lambda m, n=name: getattr(m, n), new, getattr(model, name))
    return new


def has_closed_regimes(model: SwitchingModel) -> bool:
    """Return whether the M-step of the regimes is in closed form, or a logistic regression."""
    regimes = model.regimes
    if not isinstance(regimes, Regimes) or len(_parameters(regimes)) > 0:
        return False
    return True


def has_closed_emission(model: SwitchingModel, batch: Series) -> bool:
    """Return whether the M-step of the emission is a regression per regime."""
    parts = each(model.emission)
    if isinstance(model.emission, AbstractParameter):
        return False
    plain = all(
        type(part) in (Gaussian, LinearGaussianKernel)
        and all(isinstance(p, (Positive, PositiveTril)) for p in _parameters(part))
        for part in parts
    )
    if not plain or batch.mask is None:
        return plain
    # Regressions use the rows that are observed in full.
    return bool(jnp.all(jnp.all(batch.mask, axis=-1) == jnp.any(batch.mask, axis=-1)))


def _parameters(part: Any) -> list[AbstractParameter]:
    nodes = jax.tree.leaves(part, is_leaf=lambda node: isinstance(node, AbstractParameter))
    return [node for node in nodes if isinstance(node, AbstractParameter)]


def _closed_form(
    model: SwitchingModel, moments: RegimeMoments, batch: Series, regimes: bool, emission: bool
) -> SwitchingModel:
    """Return the model with new regimes and emissions, as far as these have a closed form."""
    rows = jnp.arange(batch.ys.shape[1]) >= model.num_lags
    mask = jnp.ones(batch.ys.shape, bool) if batch.mask is None else batch.mask
    conditioned = Series(batch.ys, mask & rows[None, :, None], batch.inputs, batch.length)
    laws = model.emission
    kernels = jax.tree.map(_as_kernel, laws, is_leaf=lambda part: not isinstance(part, tuple))
    given = SwitchingModel(
        model.regimes if regimes else Frozen(model.regimes),
        kernels if emission else Frozen(laws),
        num_lags=model.num_lags,
    )
    new = maximise(given, moments, conditioned)
    new_laws = laws
    if emission:
        pairs = zip(each(new.emission), each(laws), strict=True)
        restored = tuple(_as_law(kernel, law) for kernel, law in pairs)
        new_laws = restored if isinstance(laws, tuple) else restored[0]
    return SwitchingModel(
        new.regimes if regimes else model.regimes, new_laws, num_lags=model.num_lags
    )


def _as_kernel(law: Any) -> LinearGaussianKernel:
    """Return a law as a kernel that ignores the lagged observations."""
    if isinstance(law, LinearGaussianKernel):
        return law
    plain = unwrap(law)
    return LinearGaussianKernel(jnp.zeros((plain.dim, 0)), plain.mean, law.scale_tril)


def _as_law(kernel: LinearGaussianKernel, law: Any) -> Any:
    return (
        kernel
        if isinstance(law, LinearGaussianKernel)
        else Gaussian(kernel.bias, kernel.scale_tril)
    )
