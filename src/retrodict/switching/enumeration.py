"""The exact posterior of a short switching series, by a sum over all paths of regimes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._arrays import Scalar
from retrodict._exact import smooth_series
from retrodict._model import (
    Gaussian,
    Series,
    StateSpaceModel,
    VaryingLinearGaussianKernel,
    dense_scale,
    unwrap,
)
from retrodict.switching.chain import SwitchingMarginals
from retrodict.switching.model import (
    SwitchingModel,
    log_transitions,
    over_regimes,
    prepare_switching,
    require_state,
)

MAX_PATHS = 200_000
"""The largest number of paths of regimes that are enumerated."""


class Enumeration(eqx.Module):
    """The exact posterior of a short series.

    Attributes:
        paths: all paths of regimes.
        log_weights: their posterior log probabilities.
        log_evidence: log p(y).
        marginals: smoothed moments of regimes and states.
    """

    paths: Int[Array, "path time"]
    log_weights: Float[Array, "path"]
    log_evidence: Scalar
    marginals: SwitchingMarginals


def enumerate_regimes(
    model: SwitchingModel,
    ys: Any,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Enumeration:
    """Sum over all K^n paths of regimes, with a Kalman smoother for each.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
        ... )
        >>> exact = rd.switching.enumerate_regimes(model, jnp.array([[0.0], [2.0], [0.5]]))
        >>> exact.marginals.regimes.tolist()
        [1, 1, 1]

    Args:
        model: a model that is linear and Gaussian given its regimes.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.

    Raises:
        ValueError: if there are more than 200,000 paths.
        TypeError: if the model is not linear and Gaussian given its regimes.
    """
    require_state(model, "enumerate_regimes")
    model = unwrap(model)
    if not model.is_conditionally_linear_gaussian:
        raise TypeError(
            "enumerate_regimes expects a model that is linear and Gaussian given its regimes, with"
            " regimes that do not depend on the state. Use rao_blackwellised_smoother, or"
            " grid_smoother for one state."
        )
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    count, n = model.num_regimes, series.num_times
    if count**n > MAX_PATHS:
        raise ValueError(
            f"{count} regimes have {count}^{n} paths in {n} rows; enumerate_regimes allows"
            f" {MAX_PATHS}. Use gpb2_smoother or rao_blackwellised_smoother."
        )
    paths = np.indices((count,) * n).reshape(n, -1).T
    return _enumerate(model, series, jnp.asarray(paths))


@eqx.filter_jit
def _enumerate(
    model: SwitchingModel, series: Series, paths: Int[Array, "path time"]
) -> Enumeration:
    count, exists = model.num_regimes, series.exists()
    if exists is not None and series.length is not None:
        # Paths that differ in padding alone are copies of one path, which share its probability.
        # Padded rows repeat the last regime.
        last = jnp.take(paths, series.length - 1, axis=1)
        paths = jnp.where(exists[None], paths, last[:, None])

    matrices = log_transitions(model, series)
    steps = jnp.arange(series.num_times - 1)
    priors = jax.vmap(lambda zs: matrices[steps, zs[:-1], zs[1:]])(paths)
    if exists is not None:
        priors = jnp.where(exists[None, 1:], priors, -jnp.log(count))
    evidences, means, covariances = jax.lax.map(
        lambda zs: smooth_given_regimes(model, series, zs), paths, batch_size=256
    )
    initial = model.regimes.log_initial()[paths[:, 0]]
    joint = initial + jnp.sum(priors, axis=1) + evidences
    log_evidence = jax.nn.logsumexp(joint)
    log_weights = joint - log_evidence
    weights = jnp.exp(log_weights)
    members = jax.nn.one_hot(paths, count, dtype=weights.dtype)
    mean = jnp.einsum("p,pti->ti", weights, means)
    shifts = means - mean[None]
    covariance = jnp.einsum("p,ptij->tij", weights, covariances)
    covariance += jnp.einsum("p,pti,ptj->tij", weights, shifts, shifts)
    probabilities = jnp.einsum("p,ptk->tk", weights, members)
    pairs = jnp.einsum("p,pti,ptj->tij", weights, members[:, :-1], members[:, 1:])
    marginals = SwitchingMarginals(
        probabilities,
        mean,
        covariance,
        pairs,
        jnp.zeros_like(probabilities),
        jnp.zeros_like(mean),
    )
    return Enumeration(paths, log_weights, log_evidence, marginals)


def smooth_given_regimes(
    model: SwitchingModel, series: Series, zs: Int[Array, "time"]
) -> tuple[Scalar, Float[Array, "time state"], Float[Array, "time state state"]]:
    """Return log p(y | z), and the smoothed means and covariances of the states given z."""
    posterior = smooth_series(*given_regimes(model, series, zs), False)
    law = posterior.chain.marginals()
    return posterior.log_evidence, law.mean, law.covariance


def given_regimes(
    model: SwitchingModel, series: Series, zs: Int[Array, "time"]
) -> tuple[StateSpaceModel, Series]:
    """Return the linear-Gaussian model of a path of regimes, and the series with its inputs.

    The input of the model is the number of the row. Its kernels read their parameters from arrays.
    """
    count = model.num_regimes

    def parameters(part: Any, u: Array | None) -> tuple[Array, Array, Array]:
        def of(kernel: Any) -> tuple[Array, Array, Array]:
            fixed = kernel.at(u)
            return fixed.weight, fixed.bias, dense_scale(fixed.scale_tril)

        return over_regimes(part, count, of)

    def kernel(part: Any) -> VaryingLinearGaussianKernel:
        def of_row(z: Array, u: Array | None) -> tuple[Array, Array, Array]:
            return jax.tree.map(lambda leaf: leaf[z], parameters(part, u))

        rows = jax.vmap(of_row)(zs, series.inputs)
        return VaryingLinearGaussianKernel(
            lambda row: jax.tree.map(lambda leaf: leaf[row[0].astype(int)], rows)
        )

    means, scales = over_regimes(
        model.prior, count, lambda law: (law.mean, dense_scale(law.scale_tril))
    )
    fixed = StateSpaceModel(
        Gaussian(means[zs[0]], scales[zs[0]]), kernel(model.transition), kernel(model.emission)
    )
    rows = jnp.arange(series.num_times, dtype=series.ys.dtype)[:, None]
    return fixed, Series(series.ys, series.mask, rows, series.length)
