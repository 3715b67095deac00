"""The result of the guided smoother: paths, the particles they go through, and diagnostics."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

<<<<<<< HEAD
from retrodict._expectations import AbstractFunctional
from retrodict._series import Series, prepare_rows
||||||| 12276ef
from retrodict._expectations import AbstractFunctional, Observations
=======
from retrodict._expectations import Observations
>>>>>>> fix-smoothers
from retrodict._types import Scalar
from retrodict._validate import check_count
<<<<<<< HEAD
from retrodict.particles.diagnosis import check_functional, check_single
from retrodict.particles.moments import (
    log_evidence_variance,
    path_expectation,
    path_moments,
    path_quantile,
)
||||||| 12276ef
from retrodict.particles.diagnosis import check_data, check_functional, check_single
from retrodict.particles.moments import (
    log_evidence_variance,
    path_expectation,
    path_moments,
    path_quantile,
)
=======
from retrodict.particles.moments import log_evidence_variance
from retrodict.particles.path_posterior import AbstractPathPosterior
>>>>>>> fix-smoothers
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
<<<<<<< HEAD

    def expectation(
        self, functional: AbstractFunctional, data: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """The expectation of an additive functional, and its standard error from this one run.

        Seen from the end of the series this is forward filtering, backward sampling, and the
        standard error is that of `ParticlePosterior.expectation`: it counts the paths and the
        particles, leaves out the bias, of order 1/N, and takes particles to be resampled at every
        step. A chain that fits makes the run resample seldom: the standard error is then too large.

        Args:
            functional: what to take the expectation of.
            data: a pytree with one row a time step; `None` for the observations.

        Returns:
            The pair (value, standard error), pytrees as the functional has them.
        """
        check_functional(functional)
        check_single(self.particles)
        data = self.data if data is None else prepare_rows(data, self.samples.shape[1])
        num_particles = self.particles.shape[1]
        return path_expectation(
            functional, self.samples, self.indices, num_particles, data, self.length
        )
||||||| 12276ef

    def expectation(
        self, functional: AbstractFunctional, data: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """The expectation of an additive functional, and its standard error from this one run.

        Seen from the end of the series this is forward filtering, backward sampling, and the
        standard error is that of `ParticlePosterior.expectation`: it counts the paths and the
        particles, leaves out the bias, of order 1/N, and takes particles to be resampled at every
        step. A chain that fits makes the run resample seldom: the standard error is then too large.

        Args:
            functional: what to take the expectation of.
            data: a pytree with one row a time step; `None` for the observations.

        Returns:
            The pair (value, standard error), pytrees as the functional has them.
        """
        check_functional(functional)
        check_single(self.particles)
        if data is None:
            data = self.data
        else:
            check_data(data, self.samples.shape[1], "expectation")
        num_particles = self.particles.shape[1]
        return path_expectation(
            functional, self.samples, self.indices, num_particles, data, self.length
        )
=======
>>>>>>> fix-smoothers
