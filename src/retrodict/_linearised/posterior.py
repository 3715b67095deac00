"""What a linearised smoother returns: a chain, and what is known of how far to trust it."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from retrodict._chains import LinearGaussianChain
from retrodict._linearised.diagnosis import (
    MOST_CHANGE,
    MOST_MISREAD,
    MOST_SURPRISE,
    WINDOW,
    WORDS,
    Diagnostics,
    Status,
)
from retrodict._types import Scalar
from retrodict._validate import is_concrete


class LinearisedPosterior(eqx.Module):
    """An approximate posterior: the exact one of a linear-Gaussian model near the given one.

    `status` says whether it can be trusted:

    - `"ok"`: nothing speaks against it.
    - `"lost"`: over some twenty rows with an observation (or over all, if there are fewer), squared
      innovations were more than 4 times as large as predicted on average, each counted as at most
      10 times; or the linearised updates got wrong more than two thirds of what the observations
      say, as `diagnostics` measures it. A smoother that ignores its observations, as any of these
      on y = x² around 0, gets all of it wrong. Of 1,300 series of 100 rows from thirteen models
      that suit these smoothers, none was called lost by any of five of them.
    - `"not converged"`: the last iteration still moved a mean by more than a tenth of its standard
      deviation.
    - `"not finite"`: the laws or the evidence overflowed, or a moment does not exist.

    It is not an oracle. A smoother that follows one of several explanations of the data is not
    lost, nor is one lost that is wrong by a little at each of many steps. Innovations also speak
    against a model that does not fit its data. If nothing had to be linearised the posterior is
    exact, and never called lost.

    Attributes:
        chain: the law of the whole path, a backward chain.
        log_evidence: log density of the series under the linearised model. An approximation of the
            log-evidence, which may lie on either side of it, and no bound.
        log_evidence_increments: its terms, one a row, zero where there is no row.
        diagnostics: what was made of each observation.
        changes: how far each iteration moved the smoothed means, in standard deviations, where that
            was farthest; of shape `(0,)` if there were none.
        code: 0 if nothing speaks against the posterior; 1 if it is not finite, 2 if it is lost by
            its updates or 3 by its innovations, 4 if it has not converged.
        status_time: the first time at which the code came about; the last row if it is 4.
    """

    chain: LinearGaussianChain
    log_evidence: Scalar
    log_evidence_increments: Float[Array, "time"]
    diagnostics: Diagnostics
    changes: Float[Array, "iteration"]
    code: Int[Array, ""]
    status_time: Int[Array, ""]

    @property
    def lost(self) -> Bool[Array, "*batch"]:
        """Whether the smoother is lost; an array, for use inside of `jax.jit` and `jax.vmap`."""
        return (self.code == Status.SURPRISED) | (self.code == Status.MISREAD)

    @property
    def status(self) -> str:
        """The status in words: `"ok"`, `"lost"`, `"not converged"` or `"not finite"`."""
        return WORDS[self._known_status()]

    def check(self) -> "LinearisedPosterior":
        """Raises a `ValueError` with the remedy unless the status is "ok"; returns itself."""
        status = self._known_status()
        if status != Status.OK:
            raise ValueError(_explain(status, self))
        return self

    def _known_status(self) -> Status:
        if not is_concrete(self.code):
            raise ValueError(
                "The status is not known inside of jax.jit and jax.vmap. Read `code` and `lost`,"
                " which are arrays, or ask outside."
            )
        if jnp.ndim(self.code) > 0:
            refused = np.flatnonzero(np.asarray(self.code)).tolist()
            raise ValueError(
                f"This is a batch of posteriors, of which {refused} are not ok. Read `code` and"
                " `lost`, or look at one: jax.tree.map(lambda leaf: leaf[i], posterior).status."
            )
        return Status(int(self.code))


def _explain(status: Status, posterior: LinearisedPosterior) -> str:
    """What is wrong, as it was measured, and what to do."""
    time, found = int(posterior.status_time), posterior.diagnostics
    rows = f"in the rows with an observation up to time {time}, of which at most {WINDOW} count,"
    others = "Use ffbsi or grid_smoother (state dimension 1 or 2), which do not linearise."
    if status == Status.NOT_FINITE:
        return (
            f"The posterior is not finite from time {time} on: the state grew without bound under"
            " the linearised model, or a mean or covariance does not exist there. Check the"
            " kernels at the states of that time, or use float64."
        )
    if status == Status.NOT_CONVERGED:
        return (
            f"The last of {posterior.changes.shape[0]} iterations still moved a smoothed mean by"
            f" {float(posterior.changes[-1]):.2g} standard deviations, more than {MOST_CHANGE}."
            " Raise num_iterations or, if `changes` does not fall, damping."
        )
    if status == Status.SURPRISED:
        return (
            f"The smoother is lost: {rows} squared innovations were"
            f" {float(found.surprise[time]):.2g} times as large as predicted, more than"
            f" {MOST_SURPRISE:.0f}. It follows a wrong state, or the model does not fit the data."
            f" {others}"
        )
    return (
        f"The smoother is lost: {rows} the linearised updates got"
        f" {float(found.misread[time]):.0%} of what the observations say wrong, more than"
        f" {MOST_MISREAD:.0%}. Near 100% they are ignored, as where an emission is flat or"
        f" symmetric around the predicted mean. {others} Where the emission is neither,"
        " iterated_smoother with damping may find its way."
    )
