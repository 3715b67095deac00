"""Checks of a posterior by independent means, where no bound can be had."""

import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float

from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._exact import GridPosterior
from retrodict._expectations import check_chain, common_length
from retrodict._laws import Gaussian, scale_solve
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._parameters import unwrap
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key
from retrodict.bounds.distances import sample_moments
from retrodict.bounds.reference import (
    Reference,
    distances,
    find_reference,
    from_grid,
    from_particles,
    root_mean_square,
)
from retrodict.particles import K_HAT_GOOD, ParticlePosterior, log_weights_of, pareto_shape

TAIL = 1e-3
"""States with less than this mass of the chain further out are where it has none to speak of."""

MANY_MISSED = 0.05
"""A share of states where the chain has no mass, above which it has lost part of the posterior."""

FEWEST_PATHS = 200
"""With fewer paths, single states make shares of 5% at some time by chance."""

MANY_NATS = 3.0
"""A gap in nats beyond which the ELBO and the evidence say that the chain is far from the
posterior, if it is also more than `MANY_NATS_PER_ROW` for each row."""

MANY_NATS_PER_ROW = 0.05
"""A Gaussian law that is off by 0.3 standard deviations, or by a third in its scale, is as far."""

MOST_DISTANCE = 0.15
"""The largest Kolmogorov distance to the reference, as the square root of the mean square over
time: a share of the mass that is elsewhere, or a mean that is off by 0.4 standard deviations."""

MOST_DISTANCE_AT_ONCE = 0.3
"""The largest Kolmogorov distance at any one time."""

MOST_SHIFT = 0.4
"""The largest error of the means in standard deviations, as a root mean square over time."""

MOST_STRETCH = 0.4
"""The largest error of the logarithm of standard deviations, as a root mean square over time."""

SMALLEST_SHARE = 0.05
"""The share of the evidence from which on another solution is a mode that was lost."""


Kind = Literal["particles", "evidence below", "mode loss", "wrong law", "loose ELBO", "thin tails"]
"""What a check may find. The first two speak against the reference, not the chain."""

AGAINST_REFERENCE: tuple[Kind, ...] = ("particles", "evidence below")

AGAINST_CHAIN: tuple[Kind, ...] = ("mode loss", "wrong law", "loose ELBO")
"""What makes a check fail. Thin tails do not: weights of whole paths say little of long series."""

Verdict = Literal["passed", "failed", "not checked"]


class PosteriorCheck(eqx.Module):
    """What independent means say of a chain.

    Attributes:
        k_hat: the Pareto shape of the weights p(x, y) / q(x) of its paths. Below 0.7 the weights
            could correct the chain, so that it covers the posterior; above, its tails are too thin
            or it is elsewhere. It grows with the length of the series.
        elbo: the ELBO of the chain by sampled paths.
        elbo_standard_error: its standard error.
        log_evidence: the reference's estimate of the log-evidence.
        log_evidence_standard_error: its standard error.
        missed: at each time, the share of the reference's states where the chain has no mass:
            further out, in Mahalanobis distance, than all but 0.1% of a Gaussian law with the
            chain's moments.
        distance: at each time, the largest Kolmogorov distance between the chain and the reference
            over coordinates, and in several dimensions over some other directions.
        kinds: what is wrong. `"particles"` or `"evidence below"` speak against the reference,
            `"mode loss"`, `"wrong law"` and `"loose ELBO"` against the chain. `"thin tails"` warn
            that weights would not correct whole paths. Empty if nothing is wrong.
        messages: the same in words, one for each kind.
        reference: what the chain was compared with: `"grid"` or `"particles"`.
    """

    k_hat: Scalar
    elbo: Scalar
    elbo_standard_error: Scalar
    log_evidence: Scalar
    log_evidence_standard_error: Scalar
    missed: Float[Array, "time"]
    distance: Float[Array, "time"]
    kinds: tuple[Kind, ...] = eqx.field(static=True)
    messages: tuple[str, ...] = eqx.field(static=True)
    reference: Literal["grid", "particles"] = eqx.field(static=True)

    @property
    def gap(self) -> Scalar:
        """The estimated gap: log-evidence minus ELBO, in nats; an estimate of KL(q ‖ posterior)."""
        return self.log_evidence - self.elbo

    @property
    def verdict(self) -> Verdict:
        """`"failed"` if something speaks against the chain, `"passed"` if nothing does.

        `"not checked"` if nothing does but the reference itself cannot be trusted: a check whose
        reference fails has not passed.
        """
        if any(kind in AGAINST_CHAIN for kind in self.kinds):
            return "failed"
        return "not checked" if any(kind in AGAINST_REFERENCE for kind in self.kinds) else "passed"


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

    The reference is a grid smoother for one or two states, over all states that the prior reaches,
    if a grid of affordable size is fine enough. Otherwise it is a particle smoother whose particles
    take in each observation by degrees, so that a sharp sensor does not kill all but a few of them;
    three independent runs must agree, with 1,000 particles each or else with 4,000. In that case
    linearised smoothers are also started from paths of the prior and from reflections of the first
    solution, in search of modes that the chain has lost.

    The check passes if, with the reference, the Kolmogorov distance of marginals is at most 0.15 in
    the root mean square over time and 0.3 at any time, means differ by at most 0.4 standard
    deviations and standard deviations by a factor of at most 1.5 in the root mean square over time,
    no time has more than 5% of the states where the chain has no mass, and the ELBO is below the
    evidence by at most 3 nats, or 0.05 nats per row. None of it is a bound.

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
        model: the model that the data come from.
        chain: the law of paths to check.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        reference: a posterior of `ffbsi` or `grid_smoother` to compare with instead of the default.
        num_samples: how many paths of the chain to draw.
        mask: true where an entry was seen.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: how many rows exist.
    """
    check_key(key, "check_posterior")
    check_chain(chain, "check_posterior")
    count = check_count(num_samples, "num_samples")
    if count < FEWEST_PATHS:
        raise ValueError(
            f"check_posterior expects num_samples of {FEWEST_PATHS} or more, got {count}: with"
            " fewer, it would raise false alarms."
        )
    model = unwrap(model)
    options = {"mask": mask, "inputs": inputs, "length": common_length(chain, length)}
    path_key, reference_key = jax.random.split(key)
    series = prepare_data(model, ys, **options)
    if reference is None:
        reference = find_reference(reference_key, model, series)
    elif isinstance(reference, ParticlePosterior):
        reference = from_particles(reference)
    elif isinstance(reference, GridPosterior):
        reference = from_grid(reference)
    elif not isinstance(reference, Reference):
        raise TypeError(
            "check_posterior expects the result of ffbsi or grid_smoother as its reference, got"
            f" {type(reference).__name__}."
        )
    if reference.states.shape[1:] != (chain.num_times, chain.state_dim):
        raise ValueError(
            f"The reference must have paths of shape {(chain.num_times, chain.state_dim)} as the"
            f" chain, got {reference.states.shape[1:]}."
        )
    paths = chain.sample(path_key, count)
    log_weights = log_weights_of(model, chain, paths, series)
    value = jnp.mean(log_weights)
    error = jnp.std(log_weights, ddof=1) / math.sqrt(count)
    rows = chain.num_times if options["length"] is None else int(options["length"])
    exists = jnp.arange(chain.num_times) < rows
    missed = jnp.where(exists, _missed(chain, paths, reference.states), 0.0)
    distance = jnp.where(exists, distances(paths, reference.states), 0.0)
    k_hat = pareto_shape(log_weights)
    found: dict[Kind, str] = {}
    if reference.problem is not None:
        found["particles"] = f"not checked: {reference.problem}"
    else:
        found |= _against_law(chain, paths, reference, np.asarray(missed), distance, rows)
    found |= _other_mode(chain, paths, reference, np.asarray(log_weights), rows)
    if not k_hat <= K_HAT_GOOD:
        found["thin tails"] = (
            f"thin tails: the Pareto shape of the path weights is {k_hat:.2f}, above"
            f" {K_HAT_GOOD}: the chain leaves out part of the posterior, or the series is long"
        )
    found |= _against_elbo(value, error, reference, rows)
    return PosteriorCheck(
        jnp.asarray(k_hat),
        value,
        error,
        reference.log_evidence,
        reference.log_evidence_standard_error,
        missed,
        distance,
        tuple(found),
        tuple(found.values()),
        reference.method,
    )


def _against_law(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    reference: Reference,
    missed: np.ndarray,
    distance: Float[Array, "time"],
    rows: int,
) -> dict[Kind, str]:
    """What the marginals of the reference say against those of the chain."""
    found: dict[Kind, str] = {}
    worst = int(np.argmax(missed))
    if missed[worst] > MANY_MISSED:
        found["mode loss"] = (
            f"mode loss: at time {worst}, {missed[worst]:.0%} of the states of the reference"
            f" ({reference.method}) lie where the chain has {TAIL:.1%} of its mass, and at"
            f" {int(np.sum(missed > MANY_MISSED))} times more than {MANY_MISSED:.0%} do"
        )
    apart = np.asarray(distance)[:rows]
    average, largest = root_mean_square(apart), float(np.max(apart))
    shift, stretch = _moment_errors(chain, paths, reference.states, rows)
    if (
        average > MOST_DISTANCE
        or largest > MOST_DISTANCE_AT_ONCE
        or not shift <= MOST_SHIFT
        or not stretch <= MOST_STRETCH
    ):
        found["wrong law"] = (
            f"wrong law: marginals of the chain and of the reference ({reference.method}) have a"
            f" Kolmogorov distance of {average:.2f} on average over time and of {largest:.2f} at"
            f" time {int(np.argmax(apart))}; means differ by {shift:.2f} standard deviations, and"
            f" those by a factor of {math.exp(min(stretch, 700.0)):.3g}, on average"
        )
    return found


def _moment_errors(
    chain: AbstractBackwardChain, paths: Array, states: Array, rows: int
) -> tuple[float, float]:
    """Errors of means, in standard deviations, and of logarithms of standard deviations.

    Each is the root mean square over time of the worst coordinate; infinite if not a number.
    """
    laws = _laws(chain, paths)
    mean, std = np.asarray(states.mean(axis=0))[:rows], np.asarray(states.std(axis=0))[:rows]
    own_mean, own_std = np.asarray(laws.mean)[:rows], np.asarray(laws.std)[:rows]
    with np.errstate(all="ignore"):
        shift = np.max(np.abs(own_mean - mean) / std, axis=1)
        stretch = np.max(np.abs(np.log(own_std / std)), axis=1)
    worst = root_mean_square(shift), root_mean_square(stretch)
    return tuple(each if math.isfinite(each) else math.inf for each in worst)  # pyright: ignore


def _other_mode(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    reference: Reference,
    log_weights: np.ndarray,
    rows: int,
) -> dict[Kind, str]:
    """A solution that has a share of the evidence, and lies where the chain has no mass."""
    finite = log_weights[np.isfinite(log_weights)]
    evidences = [mode.log_evidence for mode in reference.modes]
    if not evidences or not finite.size:
        return {}
    own = float(np.max(finite) + np.log(np.mean(np.exp(finite - np.max(finite)))))
    if reference.problem is None:
        own = max(own, float(reference.log_evidence))
    for mode in reference.modes:
        share = math.exp(min(mode.log_evidence - max(own, *evidences), 0.0))
        if share < SMALLEST_SHARE:
            continue
        missed = np.asarray(_missed(chain, paths, mode.paths))[:rows]
        worst = int(np.argmax(missed))
        if missed[worst] > 0.5:
            return {
                "mode loss": (
                    "mode loss: a linearised smoother with another start has a solution with"
                    f" about {share:.0%} of the evidence, of which {missed[worst]:.0%} at time"
                    f" {worst} lie where the chain has {TAIL:.1%} of its mass"
                )
            }
    return {}


def _against_elbo(value: Any, error: Any, reference: Reference, rows: int) -> dict[Kind, str]:
    """What the evidence of the reference says of the ELBO, and the other way round."""
    evidence, evidence_error = reference.log_evidence, reference.log_evidence_standard_error
    gap, noise = float(evidence - value), math.hypot(float(error), float(evidence_error))
    if float(value) == -math.inf:
        return {
            "loose ELBO": (
                "loose ELBO: it is minus infinity, since the model excludes paths that the chain"
                " draws"
            )
        }
    if math.isnan(float(value)):
        return {"loose ELBO": "loose ELBO: it is not a number"}
    if gap > max(MANY_NATS, MANY_NATS_PER_ROW * rows) + 3 * noise:
        return {
            "loose ELBO": (
                f"loose ELBO: it is {gap:.1f} nats below the estimate of the log-evidence"
                f" ({reference.method}), of which sampling explains about {noise:.1f}"
            )
        }
    if gap < -3 * noise - 1e-6 * abs(float(evidence)):
        return {
            "evidence below": (
                f"evidence below the ELBO by {-gap:.1f} nats, where sampling explains {noise:.1f}:"
                " the reference has lost what explains the data, so that nothing was checked"
            )
        }
    return {}


def _laws(chain: AbstractBackwardChain, paths: Float[Array, "sample time state"]) -> Gaussian:
    """Gaussian laws with the moments of the chain at each time."""
    if isinstance(chain, LinearGaussianChain):
        return chain.marginals()
    return jax.vmap(sample_moments, in_axes=1)(paths)


@eqx.filter_jit
def _missed(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    states: Float[Array, "particle time state"],
) -> Float[Array, "time"]:
    """The share of states in the outermost tail of a Gaussian law with the chain's moments."""
    laws = _laws(chain, paths)

    def at_time(law: Gaussian, xs: Array) -> Array:
        residuals = jax.vmap(lambda x: scale_solve(law.scale_tril, x - law.mean))(xs)
        beyond = gammaincc(0.5 * xs.shape[1], 0.5 * jnp.sum(residuals**2, axis=1))
        return jnp.mean(beyond < TAIL)

    return jax.vmap(at_time, in_axes=(0, 1))(laws, states)
