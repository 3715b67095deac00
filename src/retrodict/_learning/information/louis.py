"""Louis' identity: the observed information from paths given the series.

−∇² log p_θ(y) = E[−∇² log p_θ(x, y) | y] − Cov(∇ log p_θ(x, y) | y)
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from retrodict._chains import AbstractBackwardChain
from retrodict._learning.coordinates import Coordinates
from retrodict._model import StateSpaceModel
from retrodict._numerics import in_parts
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey, Scalar
from retrodict.particles import AbstractBackwardSampler, ffbsi, log_weights_of

PATHS_AT_ONCE = 50
"""The number of paths that are differentiated at once."""

DIRECTIONS = 16
"""The number of directions in which their gradient is differentiated at once."""


class Replicates(NamedTuple):
    """Estimates of independent replicates for each series.

    Attributes:
        log_weight: the log weight of a replicate among those of its series.
        score: the mean of ∇ log p(x, y) over its paths.
        spread: their covariance about it.
        complete: the mean of −∇² log p(x, y).
    """

    log_weight: Float[Any, "series replicate"]
    score: Float[Any, "series replicate parameter"]
    spread: Float[Any, "series replicate parameter parameter"]
    complete: Float[Any, "series replicate parameter parameter"]


class Louis(NamedTuple):
    """Estimates from all replicates, and from all but one of them.

    Attributes:
        score: the estimate of ∇ log p(y).
        information: the estimate of −∇² log p(y).
        scores: those without replicate r.
        informations: those without replicate r.
    """

    score: Float[np.ndarray, "parameter"]
    information: Float[np.ndarray, "parameter parameter"]
    scores: Float[np.ndarray, "replicate parameter"]
    informations: Float[np.ndarray, "replicate parameter parameter"]


@eqx.filter_jit
def particle_replicates(
    coordinates: Coordinates,
    batch: Series,
    keys: Key[Array, "series replicate"],
    num_particles: int,
    num_samples: int,
    backward: AbstractBackwardSampler,
) -> tuple[Replicates, Int[Array, "series replicate"], Int[Array, "series replicate"]]:
    """Return replicates from backward samples of a particle filter, with status and its time."""
    model = unwrap(coordinates.model)

    def one(series: Series, key: PRNGKey) -> tuple[Replicates, Array, Array]:
        posterior = ffbsi(
            key,
            model,
            series.ys,
            num_particles,
            num_samples,
            backward=backward,
            strict=False,
            **_rest(series),
        )
        weights = jnp.full(num_samples, 1.0 / num_samples, posterior.samples.dtype)
        sums = _along(coordinates, posterior.samples, weights, series)
        return (
            Replicates(jnp.zeros((), weights.dtype), *sums),
            posterior.status,
            posterior.status_time,
        )

    return jax.lax.map(lambda at: jax.lax.map(lambda key: one(at[0], key), at[1]), (batch, keys))


@eqx.filter_jit
def weighted_replicates(
    coordinates: Coordinates,
    chain: AbstractBackwardChain,
    series: Series,
    keys: Key[Array, "replicate"],
    num_samples: int,
) -> tuple[Replicates, Float[Array, "replicate sample"]]:
    """Return replicates from weighted paths of a chain, and the log weights of the paths."""
    model = unwrap(coordinates.model)

    def one(key: PRNGKey) -> tuple[Replicates, Array]:
        paths = chain.sample(key, num_samples)
        raw = log_weights_of(model, chain, paths, series)
        total = jax.nn.logsumexp(raw)
        weights = jnp.exp(raw - total)
        # A path without weight may be impossible, with non-finite derivatives.
        best = paths[jnp.argmax(weights)]
        paths = jnp.where((weights > 0)[:, None, None], paths, best[None])
        return Replicates(total, *_along(coordinates, paths, weights, series)), raw

    replicates, raw = jax.lax.map(one, keys)
    return Replicates(*(leaf[None] for leaf in replicates)), raw


def _along(
    coordinates: Coordinates,
    paths: Float[Array, "sample time state"],
    weights: Float[Array, "sample"],
    series: Series,
) -> tuple[Array, Array, Array]:
    """Return weighted mean and covariance of path gradients, and the mean of minus the Hessian."""
    theta, count = coordinates.theta(), paths.shape[0]
    basis = jnp.eye(theta.shape[0], dtype=theta.dtype)
    size = min(PATHS_AT_ONCE, count)
    short = -count % size
    # The last chunk is padded with copies of a path without weight.
    padded = jnp.concatenate([paths, jnp.broadcast_to(paths[:1], (short, *paths.shape[1:]))])
    shares = jnp.concatenate([weights, jnp.zeros(short, weights.dtype)])

    def log_joint(theta: Array, path: Array) -> Scalar:
        model: StateSpaceModel = unwrap(coordinates.model_at(theta))
        return model.log_joint(path, series.ys, **_rest(series))

    def chunk(complete: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        paths, shares = at

        def mean(theta: Array) -> Scalar:
            return jnp.sum(shares * jax.vmap(lambda path: log_joint(theta, path))(paths))

        def along(direction: Array) -> Array:
            return jax.jvp(jax.grad(mean), (theta,), (direction,))[1]

        gradients = jax.vmap(lambda path: jax.grad(log_joint)(theta, path))(paths)
        return complete - in_parts(along, basis, DIRECTIONS), gradients

    chunks = (padded.reshape(-1, size, *paths.shape[1:]), shares.reshape(-1, size))
    complete, gradients = jax.lax.scan(chunk, jnp.zeros_like(basis), chunks)
    gradients = gradients.reshape(-1, theta.shape[0])[:count]
    score = jnp.tensordot(weights, gradients, axes=1, precision="highest")
    centred = gradients - score[None]
    spread = jnp.einsum("s,sa,sb->ab", weights, centred, centred, precision="highest")
    return score, spread, complete


def combine(replicates: Replicates) -> Louis:
    """Sum the estimates over the series, from all replicates and with each left out in turn."""
    fields = (np.asarray(leaf, np.float64) for leaf in replicates)
    log_weight, score, spread, complete = fields
    count = log_weight.shape[1]
    weight = np.exp(log_weight - log_weight.max(axis=1, keepdims=True))
    weight = np.repeat(weight[None], count + 1, axis=0)
    # Row r + 1 leaves replicate r out.
    weight[np.arange(1, count + 1), :, np.arange(count)] = 0.0
    weight /= weight.sum(axis=2, keepdims=True)

    mean = np.einsum("jsr,sra->jsa", weight, score)
    square = score[..., :, None] * score[..., None, :]
    second = np.einsum("jsr,srab->jsab", weight, spread + square)
    # The square of the posterior mean of the score, from products of different replicates. The
    # square of their average would count its noise as spread between paths.
    same = (weight**2).sum(axis=2)[:, :, None, None]
    products = mean[..., :, None] * mean[..., None, :]
    products = (products - np.einsum("jsr,srab->jsab", weight**2, square)) / (1.0 - same)
    information = np.einsum("jsr,srab->jsab", weight, complete) - second + products
    information = information.sum(axis=1)
    information = (information + np.swapaxes(information, 1, 2)) / 2
    scores = mean.sum(axis=1)
    return Louis(scores[0], information[0], scores[1:], information[1:])


def jackknife(values: Float[np.ndarray, "replicate ..."]) -> np.ndarray:
    """Return the standard error of a statistic from its values with one replicate left out."""
    count = values.shape[0]
    return np.sqrt((count - 1) * np.var(values, axis=0))


def _rest(series: Series) -> dict[str, Any]:
    return {
        "mask": True if series.mask is None else series.mask,
        "inputs": series.inputs,
        "length": series.length,
    }
