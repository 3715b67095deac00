"""Louis' identity: the observed information from paths given the series.

−∇² log p_θ(y) = E[−∇² log p_θ(x, y) | y] − Cov(∇ log p_θ(x, y) | y)
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from retrodict._arrays import PRNGKey, Scalar
from retrodict._chains import AbstractBackwardChain
from retrodict._expectations import check_model, series_of_chain
from retrodict._learning.coordinates import ModelCoordinates
from retrodict._learning.information.result import NOISE, Information, Inverse, inverse
from retrodict._model import Series, StateSpaceModel, unwrap
from retrodict._numerics import in_parts
from retrodict.particles import (
    DEGENERATE,
    FINE,
    K_HAT_GOOD,
    AbstractBackwardSampler,
    ffbsi,
    log_weights_of,
    pareto_shape,
    refuse_failure,
)

PATHS_AT_ONCE = 50
"""The number of paths that are differentiated at once."""

DIRECTIONS = 16
"""The number of directions in which their gradient is differentiated at once."""

MIN_REPLICATES = 4
"""The smallest number of replicates for an estimate of their spread."""

DECISIVE_ERRORS = 4.0
"""The number of Monte Carlo standard errors by which the information must exceed zero before no
more replicates are drawn. The relative error of standard errors is then about an eighth."""

OPTIMISTIC_ERRORS = 2.0
"""The number of Monte Carlo standard errors added to the estimate of an eigenvalue that may
still be decided with more replicates."""


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


def louis_information(
    key: PRNGKey,
    coordinates: ModelCoordinates,
    batch: Series,
    posterior: AbstractBackwardChain | AbstractBackwardSampler,
    num_particles: int,
    num_samples: int,
    num_replicates: int,
    most_replicates: int,
) -> Information:
    """Return the information by Louis' identity.

    Args:
        key: a typed key.
        coordinates: the parameters.
        batch: the series.
        posterior: a chain whose weighted paths are used, or how `ffbsi` samples paths.
        num_particles: the number of particles of each filter.
        num_samples: the number of paths per replicate.
        num_replicates: the number of replicates at first.
        most_replicates: the largest number of replicates.
    """
    if num_replicates < MIN_REPLICATES:
        raise ValueError(
            f"parameter_errors expects at least {MIN_REPLICATES} replicates, from whose spread"
            f" the Monte Carlo error is estimated, got num_replicates={num_replicates}."
        )

    def draw(key: PRNGKey) -> tuple[Replicates, list[str]]:
        if isinstance(posterior, AbstractBackwardChain):
            keys = jax.random.split(key, num_replicates)
            return _from_chain(coordinates, batch, keys, posterior, num_samples)
        keys = jax.random.split(key, (batch.num_series, num_replicates))
        return _from_particles(coordinates, batch, keys, posterior, num_particles, num_samples)

    replicates, warnings = draw(key)
    rounds, estimate = 1, combine(replicates)
    # Double the replicates until the sign of every direction is clear from noise.
    while not warnings and 2 * rounds * num_replicates <= most_replicates:
        if not np.all(np.isfinite(estimate.information)):
            break
        inverted = inverse(estimate, coordinates.theta(), DECISIVE_ERRORS)
        unclear = np.abs(inverted.eigenvalues) <= DECISIVE_ERRORS * inverted.noise
        if not np.any(unclear) or cannot_be_resolved(
            inverted, rounds * num_replicates, most_replicates
        ):
            break
        for turn in range(rounds, 2 * rounds):
            more, warned = draw(jax.random.fold_in(key, turn))
            warnings = warnings or warned
            replicates = jax.tree.map(lambda *pair: np.concatenate(pair, axis=1), replicates, more)
        rounds, estimate = 2 * rounds, combine(replicates)
    return estimate._replace(warnings=warnings)


def cannot_be_resolved(inverted: Inverse, count: int, most: int) -> bool:
    """Return whether some direction would probably remain unclear with all replicates.

    Noise decreases with the square root of the number of replicates. The eigenvalue of a direction
    is taken two standard errors above its estimate.
    """
    at_best = np.maximum(inverted.eigenvalues + OPTIMISTIC_ERRORS * inverted.noise, 0.0)
    return bool(np.any(at_best < NOISE * inverted.noise * np.sqrt(count / most)))


def _from_particles(
    coordinates: ModelCoordinates,
    batch: Series,
    keys: Key[Array, "series replicate"],
    backward: AbstractBackwardSampler,
    num_particles: int,
    num_samples: int,
) -> tuple[Replicates, list[str]]:
    """Return replicates from backward samples of a particle filter, and why they are unreliable."""
    replicates, *statuses = _particle_replicates(
        coordinates, batch, keys, backward, num_particles, num_samples
    )
    status, time = map(np.asarray, statuses)
    for code, at in zip(status.ravel(), time.ravel(), strict=True):
        if code not in (FINE, DEGENERATE):
            refuse_failure("parameter_errors", code, at, True)
    if not np.any(status == DEGENERATE):
        return replicates, []
    return replicates, [
        "unreliable: at some time the paths go through fewer than 10 particles, in"
        f" {np.sum(status == DEGENERATE)} of {status.size} replicates. Use more particles"
    ]


@eqx.filter_jit
def _particle_replicates(
    coordinates: ModelCoordinates,
    batch: Series,
    keys: Key[Array, "series replicate"],
    backward: AbstractBackwardSampler,
    num_particles: int,
    num_samples: int,
) -> tuple[Replicates, Int[Array, "series replicate"], Int[Array, "series replicate"]]:
    """Return replicates, and the status of each filter with its time."""
    model = unwrap(coordinates.model)

    def one(series: Series, key: PRNGKey) -> tuple[Replicates, Array, Array]:
        options = {"backward": backward, "strict": False, **series.options()}
        posterior = ffbsi(key, model, series.ys, num_particles, num_samples, **options)
        weights = jnp.full(num_samples, 1.0 / num_samples, posterior.samples.dtype)
        sums = _along(coordinates, posterior.samples, weights, series)
        replicate = Replicates(jnp.zeros((), weights.dtype), *sums)
        return replicate, posterior.status, posterior.status_time

    return jax.lax.map(lambda at: jax.lax.map(lambda key: one(at[0], key), at[1]), (batch, keys))


def _from_chain(
    coordinates: ModelCoordinates,
    batch: Series,
    keys: Key[Array, "replicate"],
    chain: AbstractBackwardChain,
    num_samples: int,
) -> tuple[Replicates, list[str]]:
    """Return replicates from weighted paths of a chain, and why they are unreliable."""
    if batch.num_series != 1:
        raise ValueError(
            f"parameter_errors with a chain expects one series, got {batch.num_series}. Call it"
            " for each series with its chain and sum the information, or leave out `chain`."
        )
    model, one = unwrap(coordinates.model), batch.at(0)
    check_model(model, chain, "parameter_errors")
    series = series_of_chain(model, chain, one.ys, **one.options())
    replicates, log_weights = _weighted_replicates(coordinates, chain, series, keys, num_samples)
    shape = pareto_shape(np.asarray(log_weights).ravel())
    if shape <= K_HAT_GOOD:
        return replicates, []
    return replicates, [
        f"unreliable: the Pareto shape of the weights is {shape:.2f}, above {K_HAT_GOOD}: a few"
        " paths carry most of the weight. Use a chain that is closer to the posterior, or none"
    ]


@eqx.filter_jit
def _weighted_replicates(
    coordinates: ModelCoordinates,
    chain: AbstractBackwardChain,
    series: Series,
    keys: Key[Array, "replicate"],
    num_samples: int,
) -> tuple[Replicates, Float[Array, "replicate sample"]]:
    """Return replicates, and the log weights of their paths."""
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
    coordinates: ModelCoordinates,
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
        return model.log_joint(path, series.ys, **series.options())

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


def combine(replicates: Replicates) -> Information:
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
    return Information(scores[0], information[0], scores[1:], information[1:])
