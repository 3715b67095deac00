"""Starting values of switching models: states from observations, regimes by clustering."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._exact import smooth_series
from retrodict._learning import em as exact_em
from retrodict._learning import is_frozen
from retrodict._model import (
    Diagonal,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    unwrap,
)
from retrodict.switching.clustering import Problem, cluster
from retrodict.switching.maximise import (
    Rows,
    emission_rows,
    maximise,
    partly_missing,
    transition_rows,
)
from retrodict.switching.model import (
    SwitchingModel,
    each,
    prepare_switching_batch,
    require_state,
)
from retrodict.switching.moments import RegimeMoments

NUM_SMOOTHING = 10
"""The number of iterations of EM of the model without regimes that smooths the states."""

RESIDUAL = 0.05
"""The least fraction of the variance of a column that the emission starts with as noise."""


def initialise(
    key: PRNGKey,
    model: SwitchingModel,
    ys: Any,
    *,
    num_restarts: int = 10,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingModel:
    """Compute starting values of a switching model from data.

    1. States: principal components of the observations, or the inverse of the emission if that is
       frozen. A linear-Gaussian model without regimes, learned from them by EM, smooths them over
       gaps and noise.
    2. Regimes: a hidden Markov model of K local regressions, of x_k on x_{k-1} and of y_k on x_k
       for the parts that differ by regime, by EM from several random seeds.
    3. Parameters: the M-step of `switching.em` at these states and regimes.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(0.9 * eye, zero, eye) for _ in range(2)],
        ...     emission=rd.Frozen(rd.LinearGaussianKernel(eye, zero, 0.1 * eye)),
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=40)
        >>> start = rd.switching.initialise(jax.random.key(1), model, ys)
        >>> start.num_regimes
        2

    Args:
        key: a typed key.
        model: the model whose structure and frozen parts are used.
        ys: observations, of shape `(batch, time, obs)`, or `(time, obs)` for one series.
        num_restarts: the number of random seeds of the clustering.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)`.
        length: the number of existing rows, one integer per series or one for all.

    Returns:
        A model of the same structure.

    Raises:
        TypeError: if a transition or an emission is not a `LinearGaussianKernel`.
    """
    require_state(model, "switching.initialise")
    check_key(key, "switching.initialise")
    num_restarts = check_count(num_restarts, "num_restarts")
    _check_kernels(model)
    fixed = unwrap(model)
    batch = prepare_switching_batch(fixed, ys, mask=mask, inputs=inputs, length=length)
    if batch.mask is not None and not bool(jnp.any(batch.mask)):
        raise ValueError(
            "switching.initialise expects observed entries in ys, got none: all are missing."
        )
    if batch.ys.shape[1] < 2:
        return model
    single = _without_regimes(model, batch)
    moments = _smoothed(single, batch, model.num_regimes)
    regimes, pairs = _clustered(key, model, moments, batch, num_restarts)
    moments = eqx.tree_at(
        lambda m: (m.probabilities, m.pairs, m.moves),
        moments,
        (regimes, pairs, pairs[:, None]),
    )
    return maximise(model, moments, batch)


def _check_kernels(model: SwitchingModel) -> None:
    fixed = unwrap(model)
    for name in ("transition", "emission"):
        for part in each(getattr(fixed, name)):
            if not isinstance(part, LinearGaussianKernel):
                raise TypeError(
                    f"switching.initialise expects a LinearGaussianKernel as each {name}, got"
                    f" {type(part).__name__}. Choose the starting values of other models yourself."
                )


def _without_regimes(model: SwitchingModel, batch: Series) -> StateSpaceModel:
    """Return a linear-Gaussian model without regimes, learned from the data."""
    dim = model.state_dim
    emission, xs = _start_of_emission(model, batch)
    steps = np.diff(xs, axis=1)
    spread = np.maximum(np.nanstd(xs, axis=(0, 1)), 1e-6)
    noise = np.maximum(np.nanstd(steps, axis=(0, 1)), 1e-3 * spread)
    dtype = batch.ys.dtype
    prior = Gaussian(
        jnp.asarray(np.nanmean(xs, axis=(0, 1)), dtype), Diagonal(jnp.asarray(spread, dtype))
    )
    prior = Gaussian(prior.mean, dense_scale(prior.scale_tril))
    walk = LinearGaussianKernel(
        jnp.eye(dim, dtype=dtype), jnp.zeros(dim, dtype), jnp.diag(jnp.asarray(noise, dtype))
    )
    single = StateSpaceModel(Frozen(prior), walk, emission)
    inputs = batch.inputs if single.takes_input else None
    mask = True if batch.mask is None else batch.mask
    data = {"mask": mask, "inputs": inputs, "length": batch.length}
    learned = exact_em(
        jax.random.key(0), single, batch.ys, num_iterations=NUM_SMOOTHING, **data
    ).model
    return unwrap(learned)


def _start_of_emission(
    model: SwitchingModel, batch: Series
) -> tuple[Any, Float[np.ndarray, "batch time state"]]:
    """Return an emission without regimes, and rough states; NaN where a row does not exist."""
    filled = _filled(batch)
    if all(
        isinstance(part, Frozen) or is_frozen(part, "emission") for part in each(model.emission)
    ):
        parts = each(unwrap(model).emission)
        mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *parts)
        return Frozen(mean), _inverted(mean, filled, batch)
    return _components(model, filled, batch)


def _inverted(
    kernel: LinearGaussianKernel, ys: Float[np.ndarray, "batch time obs"], batch: Series
) -> Float[np.ndarray, "batch time state"]:
    """Return the least-squares states of a known emission."""
    offset = np.asarray(kernel.bias)
    if kernel.input_weight is not None:
        offset = offset + np.asarray(batch.inputs) @ np.asarray(kernel.input_weight).T
    scale = np.asarray(dense_scale(kernel.scale_tril))
    design = np.linalg.solve(scale, np.asarray(kernel.weight))
    white = np.linalg.solve(scale, np.swapaxes(ys - offset, -1, -2))
    return np.swapaxes(np.linalg.pinv(design) @ white, -1, -2)


def _components(
    model: SwitchingModel, ys: Float[np.ndarray, "batch time obs"], batch: Series
) -> tuple[LinearGaussianKernel | Frozen, Float[np.ndarray, "batch time state"]]:
    """Return principal components, and the emission that regresses the observations on them.

    With fewer columns than states the components are those of the last few rows together.
    """
    dim, columns = model.state_dim, ys.shape[-1]
    lags = -(-dim // columns)
    late = [
        np.concatenate([ys[:, :1]] * lag + [ys[:, : ys.shape[1] - lag]], 1) for lag in range(lags)
    ]
    wide = np.concatenate(late, axis=-1)
    rows = wide[np.isfinite(wide).all(axis=-1)]
    mean = rows.mean(axis=0)
    _, _, directions = np.linalg.svd(rows - mean, full_matrices=False)
    missing = dim - directions.shape[0]
    if missing > 0:  # fewer rows than states
        directions = np.concatenate([directions, np.zeros((missing, directions.shape[1]))])
    xs = (wide - mean) @ directions[:dim].T
    design = np.concatenate([xs, np.ones((*xs.shape[:-1], 1))], axis=-1)
    real = np.isfinite(ys).all(axis=-1)
    weights = np.linalg.lstsq(design[real], ys[real], rcond=None)[0].T
    residual = ys[real] - design[real] @ weights.T
    variance = np.maximum(residual.var(axis=0), RESIDUAL * ys[real].var(axis=0))
    variance = np.where(variance > 0, variance, 1.0)
    dtype = batch.ys.dtype
    std = jnp.asarray(np.sqrt(variance), dtype)
    diagonal = isinstance(each(unwrap(model).emission)[0].scale_tril, Diagonal)
    emission = LinearGaussianKernel(
        jnp.asarray(weights[:, :dim], dtype),
        jnp.asarray(weights[:, dim], dtype),
        Diagonal(std) if diagonal else jnp.diag(std),
    )
    # Exact EM learns emissions from rows that are observed as a whole.
    return (Frozen(emission) if partly_missing(batch) else emission), xs


def _filled(batch: Series) -> Float[np.ndarray, "batch time obs"]:
    """Return the observations, interpolated over gaps; NaN where a row does not exist."""
    ys = np.array(batch.ys, float)
    known = np.ones(ys.shape, bool) if batch.mask is None else np.array(batch.mask)
    times = np.arange(ys.shape[1])
    ends = np.full(ys.shape[0], ys.shape[1])
    if batch.length is not None:
        ends = np.asarray(batch.length)
    known &= (times[None, :] < ends[:, None])[..., None]
    level = np.where(known, ys, 0.0).sum(axis=(0, 1)) / np.maximum(known.sum(axis=(0, 1)), 1)
    for series, column in np.ndindex(ys.shape[0], ys.shape[2]):
        seen = known[series, :, column]
        ys[series, :, column] = (
            np.interp(times, times[seen], ys[series, seen, column]) if seen.any() else level[column]
        )
    ys[times[None, :] >= ends[:, None]] = np.nan
    return ys


def _smoothed(single: StateSpaceModel, batch: Series, count: int) -> RegimeMoments:
    """Return the moments of the model without regimes, the same in each regime."""
    inputs = batch.inputs if single.takes_input else None
    return _smooth(single, Series(batch.ys, batch.mask, inputs, batch.length), count)


@eqx.filter_jit
def _smooth(single: StateSpaceModel, batch: Series, count: int) -> RegimeMoments:
    def one(series: Series) -> RegimeMoments:
        chain = smooth_series(single, series, False).chain
        laws, pairs = chain.marginals(), chain.pairwise()
        n, dtype = series.num_times, series.ys.dtype

        def repeat(leaf: Array) -> Array:
            return jnp.repeat(leaf[:, None], count, axis=1)

        exists = series.exists()
        share = jnp.full((n, count), 1.0 / count, dtype)
        share = share if exists is None else jnp.where(exists[:, None], share, 0.0)
        moves = share[:-1, :, None] * share[1:, None, :]
        return RegimeMoments(
            share,
            moves,
            repeat(laws.mean),
            repeat(laws.covariance),
            repeat(pairs.mean),
            repeat(pairs.covariance),
            laws.mean[None, :-1],
            moves[None],
        )

    return jax.vmap(one)(batch)


def _clustered(
    key: PRNGKey, model: SwitchingModel, moments: RegimeMoments, batch: Series, num_restarts: int
) -> tuple[Array, Array]:
    """Return the probabilities of regimes and of their moves."""
    exists = jnp.any(moments.probabilities > 0, axis=-1)
    problems = []
    fixed = unwrap(model)
    if isinstance(fixed.transition, tuple):
        rows = transition_rows(fixed.transition[0], moments, batch)
        problems.append(_problem(rows, model.state_dim, lead=1))
    if isinstance(fixed.emission, tuple):
        rows = emission_rows(fixed.emission[0], moments, batch)
        problems.append(_problem(rows, batch.ys.shape[-1], lead=0))
    if not problems or model.num_regimes == 1:
        return moments.probabilities, moments.pairs
    return cluster(key, tuple(problems), exists, model.num_regimes, num_restarts)


def _problem(rows: Rows, num_responses: int, lead: int) -> Problem:
    """Return the regression of the last columns on the others, with one row per time."""
    values = jnp.pad(rows.means[:, :, 0], ((0, 0), (lead, 0), (0, 0)))
    weights = jnp.pad(jnp.sum(rows.weights, axis=-1), ((0, 0), (lead, 0)))
    split = values.shape[-1] - num_responses
    return Problem(values[..., :split], values[..., split:], weights > 0)
