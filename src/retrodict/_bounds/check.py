"""Checks of a posterior by independent means, where no bound can be had."""

import math
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc
from jaxtyping import Array, Float

from retrodict._bounds.distances import sample_moments
from retrodict._chain import AbstractBackwardChain, LinearGaussianChain
from retrodict._elbo import common_length
from retrodict._expectation import check_chain
from retrodict._gaussian import Gaussian, scale_solve
from retrodict._importance.pareto import K_HAT_GOOD, pareto_shape
from retrodict._importance.weights import log_weights_of
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._parameters import unwrap
from retrodict._particle import ParticlePosterior, ffbsi
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key

TAIL = 1e-3
"""States with less than this mass of the chain further out are where it has none to speak of."""

MANY_MISSED = 0.05
"""A share of states where the chain has no mass, above which it has lost part of the posterior."""

FEWEST_PATHS = 200
"""With fewer paths, single states make shares of 5% at some time by chance."""

MANY_NATS = 3.0
"""A gap beyond which the ELBO and the evidence say that the chain is far from the posterior."""


Kind = Literal["particles", "mode loss", "thin tails", "loose ELBO", "evidence below"]
"""What a check may find. The first and the last speak against the particles, not the chain."""


class PosteriorCheck(eqx.Module):
    """What independent means say of a chain.

    Attributes:
        k_hat: the Pareto shape of the weights p(x, y) / q(x) of its paths. Below 0.7 the weights
            could correct the chain, so that it covers the posterior; above, its tails are too thin
            or it is elsewhere. It grows with the length of the series.
        elbo: the ELBO of the chain by sampled paths.
        elbo_standard_error: its standard error.
        log_evidence: the particle estimate of the log-evidence.
        log_evidence_standard_error: its standard error, from one run.
        missed: at each time, the share of the particle smoother's states where the chain has no
            mass: further out, in Mahalanobis distance, than all but 0.1% of a Gaussian law with the
            chain's moments.
        kinds: what is wrong: `"particles"` or `"evidence below"`, by which the particle smoother is
            not to be trusted, or `"mode loss"`, `"thin tails"` or `"loose ELBO"`, by which the
            chain is not; empty if nothing is.
        messages: the same in words, one for each kind.
    """

    k_hat: Scalar
    elbo: Scalar
    elbo_standard_error: Scalar
    log_evidence: Scalar
    log_evidence_standard_error: Scalar
    missed: Float[Array, "time"]
    kinds: tuple[Kind, ...] = eqx.field(static=True)
    messages: tuple[str, ...] = eqx.field(static=True)

    @property
    def gap(self) -> Scalar:
        """The estimated gap: log-evidence minus ELBO, in nats; an estimate of KL(q ‖ posterior)."""
        return self.log_evidence - self.elbo


def check_posterior(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    *,
    reference: ParticlePosterior | None = None,
    num_samples: int = 1000,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> PosteriorCheck:
    """Checks a chain against importance weights, a particle evidence and a particle smoother.

    None of it is a bound. It finds what usually goes wrong: tails that are too thin, a chain that
    is elsewhere, a mode that was lost.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=10)
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> rd.check_posterior(jax.random.key(1), model, chain, ys).messages
        ()

    Args:
        key: a typed key.
        model: the model that the data come from.
        chain: the law of paths to check.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        reference: paths of a particle smoother; by default `ffbsi` is run with as many particles
            as `num_samples`.
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
    path_key, particle_key = jax.random.split(key)
    if reference is None:
        reference = ffbsi(particle_key, model, ys, count, **options)
    elif not isinstance(reference, ParticlePosterior):
        raise TypeError(
            "check_posterior expects a ParticlePosterior as its reference, got"
            f" {type(reference).__name__}."
        )
    if reference.samples.shape[1:] != (chain.num_times, chain.state_dim):
        raise ValueError(
            f"The reference must have paths of shape {(chain.num_times, chain.state_dim)} as the"
            f" chain, got {reference.samples.shape[1:]}."
        )
    paths = chain.sample(path_key, count)
    log_weights = log_weights_of(model, chain, paths, prepare_data(model, ys, **options))
    value = jnp.mean(log_weights)
    error = jnp.std(log_weights, ddof=1) / math.sqrt(count)
    missed = _missed(chain, paths, reference.samples)
    n = missed.shape[0] if options["length"] is None else int(options["length"])
    missed = jnp.where(jnp.arange(missed.shape[0]) < n, missed, 0.0)
    evidence = reference.log_evidence, reference.filtered.log_evidence_standard_error()
    k_hat = pareto_shape(log_weights)
    found = _findings(k_hat, value, error, *evidence, np.asarray(missed), int(reference.status))
    return PosteriorCheck(
        jnp.asarray(k_hat), value, error, *evidence, missed, tuple(found), tuple(found.values())
    )


def _findings(
    k_hat: float,
    value: Any,
    error: Any,
    evidence: Any,
    evidence_error: Any,
    missed: np.ndarray,
    status: int,
) -> dict[Kind, str]:
    """What is wrong, with a message for each kind."""
    found: dict[Kind, str] = {}
    worst = int(np.argmax(missed))
    if status != 0:
        found["particles"] = (
            f"particles: the particle smoother itself reports status {status}, so that it says"
            " nothing of modes; run it with more particles"
        )
    elif missed[worst] > MANY_MISSED:
        found["mode loss"] = (
            f"mode loss: at time {worst}, {missed[worst]:.0%} of the states of the particle"
            f" smoother lie where the chain has {TAIL:.1%} of its mass, and at"
            f" {int(np.sum(missed > MANY_MISSED))} times more than {MANY_MISSED:.0%} do"
        )
    if not k_hat <= K_HAT_GOOD:
        found["thin tails"] = (
            f"thin tails: the Pareto shape of the path weights is {k_hat:.2f}, above"
            f" {K_HAT_GOOD}: the chain leaves out part of the posterior, or the series is long"
        )
    gap, noise = float(evidence - value), math.hypot(float(error), float(evidence_error))
    if gap == math.inf:
        found["loose ELBO"] = (
            "loose ELBO: it is minus infinity, since the model excludes paths that the chain draws"
        )
    elif gap > MANY_NATS + 3 * noise:
        found["loose ELBO"] = (
            f"loose ELBO: it is {gap:.1f} nats below the particle estimate of the log-evidence, of"
            f" which sampling explains about {noise:.1f}"
        )
    if gap < -3 * noise - 1e-6 * abs(float(evidence)):
        found["evidence below"] = (
            f"evidence below the ELBO by {-gap:.1f} nats, where sampling explains {noise:.1f}: the"
            " particle filter has too few particles"
        )
    return found


@eqx.filter_jit
def _missed(
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    states: Float[Array, "particle time state"],
) -> Float[Array, "time"]:
    """The share of states in the outermost tail of a Gaussian law with the chain's moments."""
    laws = (
        chain.marginals()
        if isinstance(chain, LinearGaussianChain)
        else jax.vmap(sample_moments, in_axes=1)(paths)
    )

    def at_time(law: Gaussian, xs: Array) -> Array:
        residuals = jax.vmap(lambda x: scale_solve(law.scale_tril, x - law.mean))(xs)
        beyond = gammaincc(0.5 * xs.shape[1], 0.5 * jnp.sum(residuals**2, axis=1))
        return jnp.mean(beyond < TAIL)

    return jax.vmap(at_time, in_axes=(0, 1))(laws, states)
