"""Check a posterior against an independent reference, where there is no bound."""

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import check_chain, check_model, series_of_chain
from retrodict._model import Gaussian, Series, StateSpaceModel, scale_solve, unwrap
from retrodict.bounds.distances import sample_moments
from retrodict.bounds.findings import (
    MANY_MISSED,
    MANY_NATS,
    MANY_NATS_PER_ROW,
    MAX_DISTANCE,
    Kind,
    PosteriorCheck,
)
from retrodict.bounds.reference import (
    Reference,
    distances,
    find_reference,
    from_grid,
    from_particles,
    log_mean_exp,
    root_mean_square,
)
from retrodict.particles import K_HAT_GOOD, ParticlePosterior, log_weights_of, pareto_shape

TAIL = 1e-3
"""A state is outside of the chain if less than this fraction of the chain lies further out."""

MIN_PATHS = 200
"""With fewer paths, shares of 5% occur at some time by chance."""

MAX_DISTANCE_AT_ONCE = 0.3
"""The largest Kolmogorov distance at any one time."""

MAX_SHIFT = 0.3
"""The largest error of the means in standard deviations, as a root mean square over time. An
interval with a nominal coverage of 90% then covers 88%."""

MAX_STRETCH = 0.26
"""The largest error of the logarithm of standard deviations, as a root mean square over time. With
standard deviations too small by this factor of 1.3, a 90% interval covers 79%."""

MIN_SHARE = 0.05
"""The least share of the evidence of another solution that counts as a lost mode."""


Findings: TypeAlias = Iterator[tuple[Kind, str]]
"""Kinds of findings with their messages."""


def check_posterior(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    *,
    reference: ParticlePosterior | GridPosterior | Reference | None = None,
    num_samples: int = 1000,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> PosteriorCheck:
    """Check a chain against a posterior that is computed independently of it.

    The reference is a grid smoother for one or two state dimensions, over all states that some
    thousand paths of the prior reach, if a grid of affordable size is fine enough. Otherwise it is
    a particle smoother with tempered observations, which does not degenerate under a sharp sensor.
    Three independent runs with 1,000 particles must agree, or else six with 4,000. In that case
    linearised smoothers are also started from paths of the prior and from reflections of the first
    solution, in search of modes that the chain has lost. A mode that neither the grid nor any run
    contains is not found.

    The check passes if, with the reference, the Kolmogorov distance of marginals is at most 0.15 in
    the root mean square over time and 0.3 at any time, means differ by at most 0.3 standard
    deviations and standard deviations by a factor of at most 1.3 in the root mean square over time,
    at no time more than 5% of the states are outside of the chain, and the ELBO is below the
    evidence by at most 3 nats, or 0.05 nats per row. None of these is a bound.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=10)
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> check = rd.check_posterior(jax.random.key(1), model, chain, ys)
        >>> check.verdict, check.messages
        ('passed', ())

    Args:
        key: a typed key.
        model: the model of the data.
        chain: the law of paths to check.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        reference: a posterior of `ffbsi` or `grid_smoother` to compare with instead of the default.
        num_samples: the number of paths of the chain to draw.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist.
    """
    check_key(key, "check_posterior")
    check_chain(chain, "check_posterior")
    count = check_count(num_samples, "num_samples")
    if count < MIN_PATHS:
        raise ValueError(
            f"check_posterior expects num_samples of {MIN_PATHS} or more, got {count}: with"
            " fewer, it would raise false alarms."
        )
    model = unwrap(model)
    path_key, reference_key = jax.random.split(key)
    check_model(model, chain, "check_posterior")
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    reference = _as_reference(reference_key, model, chain, series, reference)
    paths = chain.sample(path_key, count)
    log_weights = log_weights_of(model, chain, paths, series)
    rows = chain.num_times if series.length is None else int(series.length)
    exists = jnp.arange(chain.num_times) < rows
    missed = jnp.where(exists, _missed(chain, paths, reference.states), 0.0)
    distance = jnp.where(exists, distances(paths, reference.states), 0.0)
    elbo = jnp.mean(log_weights)
    error = jnp.std(log_weights, ddof=1) / math.sqrt(count)
    k_hat = pareto_shape(log_weights)
    findings: dict[Kind, str] = {}
    if reference.problem is not None:
        findings["particles"] = f"not checked: {reference.problem}"
    else:
        findings.update(_compare_laws(chain, paths, reference, np.asarray(missed), distance, rows))
    findings.update(_find_other_mode(chain, paths, reference, np.asarray(log_weights), rows))
    if not k_hat <= K_HAT_GOOD:
        findings["thin tails"] = (
            f"thin tails: the Pareto shape of the path weights is {k_hat:.2f}, above"
            f" {K_HAT_GOOD}: the chain leaves out part of the posterior, or the series is long"
        )
    findings.update(_compare_elbo(float(elbo), float(error), reference, rows))
    return PosteriorCheck(
        jnp.asarray(k_hat),
        elbo,
        error,
        reference.log_evidence,
        reference.log_evidence_standard_error,
        missed,
        distance,
        tuple(findings),
        tuple(findings.values()),
        reference.method,
    )


def _as_reference(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    series: Series,
    reference_or_posterior: Any,
) -> Reference:
    """Return the given reference, converted and checked, or compute one."""
    if reference_or_posterior is None:
        reference = find_reference(key, model, series)
    elif isinstance(reference_or_posterior, ParticlePosterior):
        reference = from_particles(reference_or_posterior)
    elif isinstance(reference_or_posterior, GridPosterior):
        reference = from_grid(reference_or_posterior)
    elif isinstance(reference_or_posterior, Reference):
        reference = reference_or_posterior
    else:
        raise TypeError(
            "check_posterior expects the result of ffbsi or grid_smoother as its reference, got"
            f" {type(reference_or_posterior).__name__}."
        )
    if reference.states.shape[1:] != (chain.num_times, chain.state_dim):
        raise ValueError(
            f"The reference must have paths of shape {(chain.num_times, chain.state_dim)} as the"
            f" chain, got {reference.states.shape[1:]}."
        )
    return reference


def _compare_laws(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    reference: Reference,
    missed: np.ndarray,
    distance: Float[Array, "time"],
    rows: int,
) -> Findings:
    """Compare the marginals of the chain with those of the reference."""
    worst = int(np.argmax(missed))
    if missed[worst] > MANY_MISSED:
        yield (
            "mode loss",
            f"mode loss: at time {worst}, {missed[worst]:.0%} of the states of the reference"
            f" ({reference.method}) are where the chain has {TAIL:.1%} of its mass, and at"
            f" {int(np.sum(missed > MANY_MISSED))} times more than {MANY_MISSED:.0%} do",
        )
    apart = np.asarray(distance)[:rows]
    average, largest = root_mean_square(apart), float(np.max(apart))
    shift, stretch = _moment_errors(chain, paths, reference.states, rows)
    close = average <= MAX_DISTANCE and largest <= MAX_DISTANCE_AT_ONCE
    if not (close and shift <= MAX_SHIFT and stretch <= MAX_STRETCH):
        yield (
            "wrong law",
            f"wrong law: marginals of the chain and of the reference ({reference.method}) have a"
            f" Kolmogorov distance of {average:.2f} on average over time and of {largest:.2f} at"
            f" time {int(np.argmax(apart))}; means differ by {shift:.2f} standard deviations, and"
            f" those by a factor of {math.exp(min(stretch, 700.0)):.3g}, on average",
        )


def _moment_errors(
    chain: AbstractBackwardChain, paths: Array, states: Array, rows: int
) -> tuple[float, float]:
    """Return errors of means, in standard deviations, and of logarithms of standard deviations.

    Each is the root mean square over time of the worst coordinate; infinite if it is NaN.
    """
    law = _laws(chain, paths)
    mean, std = np.asarray(states.mean(axis=0)), np.asarray(states.std(axis=0))
    with np.errstate(all="ignore"):
        errors = (np.abs(law.mean - mean) / std, np.abs(np.log(law.std / std)))
    shift, stretch = (root_mean_square(np.max(each[:rows], axis=1)) for each in errors)
    return shift if shift < math.inf else math.inf, stretch if stretch < math.inf else math.inf


def _find_other_mode(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    reference: Reference,
    log_weights: np.ndarray,
    rows: int,
) -> Findings:
    """Find a solution with a share of the evidence that is outside of the chain."""
    finite = log_weights[np.isfinite(log_weights)]
    if not reference.modes or not finite.size:
        return
    evidences = [mode.log_evidence for mode in reference.modes]
    evidences.append(log_mean_exp(finite))
    if reference.problem is None:
        evidences.append(float(reference.log_evidence))
    for mode in reference.modes:
        share = math.exp(mode.log_evidence - max(evidences))
        if share < MIN_SHARE:
            continue
        missed = np.asarray(_missed(chain, paths, mode.paths))[:rows]
        worst = int(np.argmax(missed))
        if missed[worst] > 0.5:
            yield (
                "mode loss",
                "mode loss: a linearised smoother with another start has a solution with about"
                f" {share:.0%} of the evidence, of which {missed[worst]:.0%} at time {worst} are"
                f" where the chain has {TAIL:.1%} of its mass",
            )
            return


def _compare_elbo(elbo: float, error: float, reference: Reference, rows: int) -> Findings:
    """Compare the ELBO of the chain with the evidence of the reference."""
    evidence = float(reference.log_evidence)
    gap, noise = evidence - elbo, math.hypot(error, float(reference.log_evidence_standard_error))
    if elbo == -math.inf:
        yield (
            "loose ELBO",
            "loose ELBO: it is minus infinity, since the model excludes paths that the chain draws",
        )
    elif math.isnan(elbo):
        yield "loose ELBO", "loose ELBO: it is not a number"
    elif gap > max(MANY_NATS, MANY_NATS_PER_ROW * rows) + 3 * noise:
        yield (
            "loose ELBO",
            f"loose ELBO: it is {gap:.1f} nats below the estimate of the log-evidence"
            f" ({reference.method}), of which sampling explains about {noise:.1f}",
        )
    elif gap < -3 * noise - 1e-6 * abs(evidence):
        yield (
            "evidence below",
            f"not checked: the evidence of the reference ({reference.method}) is {-gap:.1f} nats"
            f" below the ELBO, where sampling explains {noise:.1f}, so that the reference has lost"
            " states that explain the data",
        )


def _laws(chain: AbstractBackwardChain, paths: Float[Array, "sample time state"]) -> Gaussian:
    """Return Gaussian laws with the moments of the chain at each time."""
    if isinstance(chain, LinearGaussianChain):
        return chain.marginals()
    return jax.vmap(sample_moments, in_axes=1)(paths)


@eqx.filter_jit
def _missed(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    states: Float[Array, "particle time state"],
) -> Float[Array, "time"]:
    """Return the share of states in the outermost tail of a Gaussian law with chain moments."""
    laws = _laws(chain, paths)

    def at_time(law: Gaussian, xs: Array) -> Array:
        residuals = jax.vmap(lambda x: scale_solve(law.scale_tril, x - law.mean))(xs)
        beyond = gammaincc(0.5 * xs.shape[1], 0.5 * jnp.sum(residuals**2, axis=1))
        return jnp.mean(beyond < TAIL)

    return jax.vmap(at_time, in_axes=(0, 1))(laws, states)
