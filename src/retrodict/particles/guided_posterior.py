"""The result of the guided smoother: paths, the particles they go through, and diagnostics."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._series import Series
from retrodict._types import Scalar
from retrodict._validate import check_count
from retrodict.particles.moments import log_evidence_variance
from retrodict.particles.path_posterior import AbstractPathPosterior
from retrodict.particles.resampling import Scheme
from retrodict.particles.status import check_single


class GuidedPosterior(AbstractPathPosterior):
    """Paths given the whole series, drawn through particles that a chain proposed.

    Attributes:
        samples: paths, of shape `(sample, time, state)`; all have the same weight.
        indices: the particle through which each path goes, of shape `(time, sample)`.
        particles: of shape `(time, particle, state)`.
        log_weights: normalised log weights W_k of each time; those of time 0 are for the smoothed
            law, those of a later time for a law in which the chain replaces the past.
        ancestors: the index at the time after that each particle descends from.
        log_evidence: an estimate of log p(y_{0:n-1}); its exponential is unbiased.
        ess: effective sample sizes 1/Σ w² of the particles, before resampling; large if the chain
            fits.
        data: the observations, for functionals that read them.
        num_distinct: the number of particles through which the paths go, at each time.
        status: 0 if fine; 1 if no particle explains an observation, 2 if a weight is undefined, 3
            if at some time the paths go through fewer than 10 particles.
        status_time: the time of the status, the first that the run visited; −1 if it is fine.
        length: the number of rows that exist, or `None` if all of them do.
        resampling: the resampling scheme.
    """

    samples: Float[Array, "sample time state"]
    indices: Int[Array, "time sample"]
    particles: Float[Array, "time particle state"]
    log_weights: Float[Array, "time particle"]
    ancestors: Int[Array, "time particle"]
    log_evidence: Scalar
    ess: Float[Array, "time"]
    data: Series
    num_distinct: Int[Array, "time"]
    status: Int[Array, ""]
    status_time: Int[Array, ""]
    length: Int[Array, ""] | None
    resampling: Scheme = eqx.field(static=True)

    @property
    def cloud(self) -> Float[Array, "time particle state"]:
        """The particles."""
        return self.particles

    def log_evidence_standard_error(self, lag: int = 20) -> Scalar:
        """Return the standard error of `log_evidence`, estimated from this run.

        See `ParticleFilterPosterior.log_evidence_standard_error`.

        Args:
            lag: the number of steps, backward in time, after which weights are compared.
        """
        lag = check_count(lag, "lag")
        check_single(self.particles)
        independent = self.resampling == "multinomial"
        order = self.ancestors[::-1], self.log_weights[::-1]
        return jnp.sqrt(log_evidence_variance(*order, lag, independent))
