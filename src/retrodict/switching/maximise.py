"""The M-step of switching models: regressions per regime, and the law of the regimes."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._learning import (
    beside_inputs,
    is_frozen,
    refuse_partly_missing_rows,
    regression,
    scale_like,
)
from retrodict._model import (
    AbstractParameter,
    Diagonal,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Series,
    dense_scale,
    unwrap,
)
from retrodict._numerics import linalg
from retrodict.switching.logistic import LogisticRows, multinomial_regression
from retrodict.switching.model import SwitchingModel
from retrodict.switching.moments import RegimeMoments
from retrodict.switching.regimes import FORBIDDEN, Regimes

LEAST_NOISE = 1e-4
"""Noise is kept above this fraction of the standard deviation of its variable, in any direction."""


class Rows(NamedTuple):
    """Moments of regressors and responses, with the weight of each regime.

    Attributes:
        means: of regressors and responses, given the regime.
        covariances: of regressors and responses, given the regime.
        weights: the probability of the regime, zero where the row is not used.
    """

    means: Float[Array, "batch row regime size"]
    covariances: Float[Array, "batch row regime size size"]
    weights: Float[Array, "batch row regime"]

    def of(self, regime: int | None) -> tuple[Array, Array, Array]:
        """Return the rows of a regime, or of all of them, as a batch."""
        if regime is not None:
            return tuple(leaf[:, :, regime] for leaf in self)  # pyright: ignore
        return tuple(
            jnp.moveaxis(leaf, 2, 1).reshape(-1, leaf.shape[1], *leaf.shape[3:]) for leaf in self
        )  # pyright: ignore


def maximise(model: SwitchingModel, moments: RegimeMoments, batch: Series) -> SwitchingModel:
    """Return the model that maximises E[log p(z, x, y)] over the parts with a closed form.

    A part that all regimes share is learned from all rows, a list of parts from the rows of each
    regime. Parts in `Frozen`, kernels that are not `LinearGaussianKernel`, and parts with fewer
    rows than regressors are unchanged.

    Args:
        model: the current model, with its parameters wrapped.
        moments: the expected moments, with a leading axis `batch`.
        batch: the series.
    """
    spread = _spread(moments)
    prior = _per_regime(model.prior, "prior", lambda law, j: _new_prior(law, moments, j, spread))
    transition, emission = model.transition, model.emission
    if batch.ys.shape[1] > 1:
        transition = _per_regime(
            transition,
            "transition",
            lambda kernel, j: _new_kernel(
                kernel, transition_rows(kernel, moments, batch), j, spread
            ),
        )
    data_spread = _data_spread(batch)
    emission = _per_regime(
        emission,
        "emission",
        lambda kernel, j: _new_emission(kernel, moments, batch, j, data_spread),
    )
    regimes = _new_regimes(model.regimes, moments, batch)
    return SwitchingModel(regimes, emission, prior, transition)


def least_rows(model: SwitchingModel) -> int:
    """Return the number of rows below which a regime's own kernels cannot be learned."""
    parts = [
        part
        for name in ("transition", "emission")
        if isinstance(getattr(model, name), tuple)
        for part in getattr(model, name)
        if isinstance(part, LinearGaussianKernel) and not is_frozen(part, name)
    ]
    return max((_num_regressors(part) + 1 for part in parts), default=1)


def _num_regressors(kernel: LinearGaussianKernel) -> int:
    """Return the number of coefficients per response, the intercept included."""
    fixed = unwrap(kernel)
    inputs = 0 if fixed.input_weight is None else fixed.input_weight.shape[1]
    return fixed.weight.shape[1] + inputs + 1


def _per_regime(part: Any, name: str, learn: Any) -> Any:
    """Apply `learn` to the parts that have a closed form and are not frozen."""

    def one(value: Any, regime: int | None) -> Any:
        if isinstance(value, AbstractParameter) and not isinstance(value, Frozen):
            raise ValueError(
                f"The {name} is a {type(value).__name__}, for which the M-step has no closed form."
                " Learn the model with switching.fit_evidence."
            )
        closed = isinstance(value, (Gaussian, LinearGaussianKernel))
        return learn(value, regime) if closed and not is_frozen(value, name) else value

    if isinstance(part, tuple):
        return tuple(one(value, regime) for regime, value in enumerate(part))
    return one(part, None)


@eqx.filter_jit
def transition_rows(kernel: LinearGaussianKernel, moments: RegimeMoments, batch: Series) -> Rows:
    """Return the regression of x_k on (x_{k-1}, u_k, 1)."""
    inputs = None if batch.inputs is None else batch.inputs[:, 1:]
    means, covariances = _with_inputs(kernel, moments.pair_means, moments.pair_covariances, inputs)
    return Rows(means, covariances, moments.probabilities[:, 1:])


@eqx.filter_jit
def emission_rows(kernel: LinearGaussianKernel, moments: RegimeMoments, batch: Series) -> Rows:
    """Return the regression of y_k on (x_k, u_k, 1), over the observed rows."""
    count, columns = moments.means.shape[2], batch.ys.shape[2]
    shape = (*batch.ys.shape[:2], count, columns)
    means = jnp.concatenate([moments.means, jnp.broadcast_to(batch.ys[:, :, None], shape)], axis=-1)
    padding = ((0, 0), (0, 0), (0, 0), (0, columns), (0, columns))
    covariances = jnp.pad(moments.covariances, padding)
    means, covariances = _with_inputs(kernel, means, covariances, batch.inputs)
    weights = moments.probabilities
    if batch.mask is not None:
        weights = jnp.where(jnp.all(batch.mask, axis=-1, keepdims=True), weights, 0.0)
    return Rows(means, covariances, weights)


def _with_inputs(
    kernel: LinearGaussianKernel, means: Array, covariances: Array, inputs: Array | None
) -> tuple[Array, Array]:
    """Insert the inputs as regressors, for each series and regime."""
    each_regime = jax.vmap(
        lambda mean, spread, u: beside_inputs(kernel, mean, spread, u),
        in_axes=(1, 1, None),
        out_axes=(1, 1),
    )
    return jax.vmap(each_regime)(means, covariances, inputs)


def _new_kernel(
    kernel: LinearGaussianKernel, rows: Rows, regime: int | None, spread: Float[Array, "out"]
) -> LinearGaussianKernel:
    means, covariances, weights = rows.of(regime)
    if float(jnp.sum(weights)) < _num_regressors(kernel) + 1:
        return kernel
    return _regression(kernel, means, covariances, weights, spread)


@eqx.filter_jit
def _regression(
    kernel: LinearGaussianKernel, means: Array, covariances: Array, weights: Array, spread: Array
) -> LinearGaussianKernel:
    new = regression(kernel, means, covariances, weights)
    scale = _noise_above(new.scale_tril, spread)
    return LinearGaussianKernel(new.weight, new.bias, scale, new.input_weight)


def _new_emission(
    kernel: LinearGaussianKernel,
    moments: RegimeMoments,
    batch: Series,
    regime: int | None,
    spread: Float[Array, "obs"],
) -> LinearGaussianKernel:
    """Learn an emission; columns with gaps of their own one by one, if their noise is diagonal."""
    if not partly_missing(batch):
        return _new_kernel(kernel, emission_rows(kernel, moments, batch), regime, spread)
    fixed = unwrap(kernel)
    if not isinstance(fixed.scale_tril, Diagonal):
        refuse_partly_missing_rows(batch)

    def column(leaf: Any, i: int) -> Any:
        return None if leaf is None else leaf[..., i : i + 1]

    def output(i: int) -> LinearGaussianKernel:
        rows = slice(i, i + 1)
        inputs = None if fixed.input_weight is None else fixed.input_weight[rows]
        scale = Diagonal(fixed.scale_tril.std[rows])
        one = LinearGaussianKernel(fixed.weight[rows], fixed.bias[rows], scale, inputs)
        series = Series(column(batch.ys, i), column(batch.mask, i), batch.inputs, batch.length)
        return _new_kernel(one, emission_rows(one, moments, series), regime, spread[rows])

    learned = [output(i) for i in range(batch.ys.shape[-1])]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *learned)


def partly_missing(batch: Series) -> bool:
    """Return whether some entries of a row are observed and others are not."""
    if batch.mask is None:
        return False
    return bool(jnp.any(jnp.any(batch.mask, axis=-1) & ~jnp.all(batch.mask, axis=-1)))


def _new_prior(
    law: Gaussian, moments: RegimeMoments, regime: int | None, spread: Float[Array, "state"]
) -> Gaussian:
    first = (moments.means, moments.covariances, moments.probabilities)
    means, covariances, weights = Rows(*(leaf[:, :1] for leaf in first)).of(regime)
    if float(jnp.sum(weights)) <= 0:
        return law
    return _prior_of(law, means[:, 0], covariances[:, 0], weights[:, 0], spread)


@eqx.filter_jit
def _prior_of(
    law: Gaussian, means: Array, covariances: Array, weights: Array, spread: Array
) -> Gaussian:
    weights = weights / jnp.sum(weights)
    mean = jnp.sum(weights[:, None] * means, axis=0)
    shifts = means - mean[None]
    covariance = jnp.sum(weights[:, None, None] * covariances, axis=0)
    covariance = covariance + linalg.matmul((weights[:, None] * shifts).T, shifts)
    return Gaussian(mean, _noise_above(scale_like(law.scale_tril, covariance), spread))


def _noise_above(scale: Any, spread: Float[Array, "out"]) -> Any:
    """Raise a scale to `LEAST_NOISE` times the spread of its variable, where it is below that."""
    least = LEAST_NOISE * jnp.where(spread > 0, spread, 1.0)
    if isinstance(scale, Diagonal):
        return Diagonal(jnp.maximum(scale.std, least))
    scaled = linalg.matmul((1.0 / least)[:, None] * scale, ((1.0 / least)[:, None] * scale).T)
    values, vectors = jnp.linalg.eigh(scaled)
    raised = linalg.matmul(vectors * jnp.maximum(values, 1.0)[None, :], vectors.T)
    factor = least[:, None] * linalg.cholesky(0.5 * (raised + raised.T))
    return jnp.where(values[0] >= 1.0, dense_scale(scale), factor)


@eqx.filter_jit
def _spread(moments: RegimeMoments) -> Float[Array, "state"]:
    """Return the standard deviation of each coordinate of the state, over all rows."""
    weights = moments.probabilities / jnp.sum(moments.probabilities)
    mean = jnp.einsum("btj,btjd->d", weights, moments.means)
    shifts = moments.means - mean[None, None, None]
    variances = shifts**2 + jnp.diagonal(moments.covariances, axis1=-2, axis2=-1)
    return jnp.sqrt(jnp.einsum("btj,btjd->d", weights, variances))


@eqx.filter_jit
def _data_spread(batch: Series) -> Float[Array, "obs"]:
    """Return the standard deviation of each column of the observed entries."""
    mask = jnp.ones(batch.ys.shape, bool) if batch.mask is None else batch.mask
    return jnp.nan_to_num(jnp.std(batch.ys, axis=(0, 1), where=mask))


def _new_regimes(regimes: Any, moments: RegimeMoments, batch: Series) -> Any:
    """Return the most probable law of the regimes; laws without a closed form are unchanged."""
    if not isinstance(regimes, Regimes):
        return regimes
    initial, names = regimes.initial_logits, ("transition_logits", "state_weight", "input_weight")
    if not isinstance(initial, Frozen):
        initial = _log(jnp.mean(moments.probabilities[:, 0], axis=0))
    parts = {name: getattr(regimes, name) for name in names}
    frozen = [isinstance(part, Frozen) for part in parts.values() if part is not None]
    if any(frozen) and not all(frozen):
        raise ValueError(
            "The transition of the regimes is frozen in part, for which the M-step has no closed"
            " form. Freeze all of its parameters or none, or learn them with"
            " switching.fit_evidence."
        )
    if not any(frozen) and batch.ys.shape[1] > 1:
        parts = _new_moves(unwrap(regimes), moments, batch)
    return Regimes(initial, **parts)


def _log(probabilities: Array) -> Array:
    """Return logits of probabilities that may be zero."""
    positive = probabilities > 0
    return jnp.where(positive, jnp.log(jnp.where(positive, probabilities, 1.0)), FORBIDDEN)


@eqx.filter_jit
def _new_moves(regimes: Regimes, moments: RegimeMoments, batch: Series) -> dict[str, Any]:
    """Return the transition parameters: frequencies, or a multinomial logistic regression."""
    if regimes.takes_state or regimes.takes_input:
        return _regression_of_moves(regimes, moments, batch)
    counts = jnp.sum(moments.pairs, axis=(0, 1))
    if regimes.transition_logits.shape[0] == 1:
        counts = jnp.sum(counts, axis=0, keepdims=True)
    total = jnp.sum(counts, axis=1, keepdims=True)
    logits = _log(counts / jnp.where(total > 0, total, 1.0))
    return {"transition_logits": jnp.where(total > 0, logits, regimes.transition_logits)}


def _regression_of_moves(regimes: Regimes, moments: RegimeMoments, batch: Series) -> dict[str, Any]:
    """Regress z_k on z_{k-1}, x_{k-1} and u_k along the sampled paths."""
    count, dtype = regimes.num_regimes, moments.paths.dtype
    sources = regimes.transition_logits.shape[0]
    moves = moments.moves if sources > 1 else jnp.sum(moments.moves, axis=-2, keepdims=True)
    grid = moves.shape[:-1]
    columns = [jnp.broadcast_to(jnp.eye(sources, dtype=dtype)[None, None, None], (*grid, sources))]
    start = [regimes.transition_logits.T]
    if regimes.state_weight is not None:
        dim = regimes.state_weight.shape[1]
        columns.append(jnp.broadcast_to(moments.paths[:, :, :, None], (*grid, dim)))
        start.append(regimes.state_weight)
    if regimes.input_weight is not None:
        dim = regimes.input_weight.shape[1]
        inputs = batch.inputs[:, None, 1:, None]  # pyright: ignore
        columns.append(jnp.broadcast_to(inputs, (*grid, dim)))
        start.append(regimes.input_weight)
    features = jnp.concatenate(columns, axis=-1)
    rows = LogisticRows(features.reshape(-1, features.shape[-1]), moves.reshape(-1, count))
    theta = multinomial_regression(rows, jnp.concatenate(start, axis=1))
    ends = np.cumsum([part.shape[1] for part in start])
    new = dict(
        zip(
            ("transition_logits", *_names(regimes)),
            jnp.split(theta, ends[:-1], axis=1),
            strict=True,
        )
    )
    return {**new, "transition_logits": new["transition_logits"].T}


def _names(regimes: Regimes) -> list[str]:
    names = ("state_weight", "input_weight")
    return [name for name in names if getattr(regimes, name) is not None]
