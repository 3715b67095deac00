"""A posterior with two modes whose quantiles are known: a state near ±3, observed by its square."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd

ROWS, NUM_DRAWS = 12, 4000
GRID = rd.Grid(jnp.array([-7.0]), jnp.array([7.0]), 1500)


def model() -> rd.StateSpaceModel:
    """Return a slow random walk observed by its square, with a prior mean above zero."""
    prior = rd.Gaussian(jnp.array([0.3]), jnp.array([[2.5]]))
    transition = rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.array([[0.1]]))
    emission = rd.NonlinearGaussianKernel(jnp.square, jnp.array([[1.0]]))
    return rd.StateSpaceModel(prior, transition, emission)


def observations() -> np.ndarray:
    """Return observations near 9, of shape `(time, obs)`."""
    return 9.0 + np.sin(np.arange(ROWS))[:, None]


class GridChain(rd.AbstractBackwardChain):
    """Paths of a grid smoother as a chain: draws from the exact posterior, up to the grid."""

    posterior: rd.GridPosterior

    @property
    def num_times(self) -> int:
        return self.posterior.mean.shape[-2]

    @property
    def state_dim(self) -> int:
        return 1

    def sample(self, key: Any, num_samples: int) -> jax.Array:
        return self.posterior.sample(key, num_samples)

    def log_prob(self, xs: Any) -> Any:
        raise NotImplementedError

    def prefix(self, num_times: int) -> Any:
        raise NotImplementedError


@cache
def posterior(num_missing: int = 0) -> rd.GridPosterior:
    """Smooth the observations and this many missing rows after them on a grid."""
    ys = np.concatenate([observations(), np.full((num_missing, 1), np.nan)])
    return rd.grid_smoother(model(), ys, GRID).check()


@cache
def smoothed() -> rd.Smoothed:
    """Return the posterior in the form of `rd.smooth` for sampled posteriors."""
    exact = posterior()
    zeros = jnp.zeros_like(exact.mean), jnp.zeros_like(exact.covariance)
    return rd.Smoothed(
        exact.mean,
        exact.covariance,
        *zeros,
        GridChain(exact),
        "amortised",
        "",
        None,
        model(),
        False,
    )


def tolerance(exact: rd.GridPosterior, level: float, num_draws: int) -> np.ndarray:
    """Return six standard errors of a quantile of draws, of shape `(time,)`.

    The quantile at level p of N draws lies between the exact ones at p ± 6 sqrt(p (1 − p) / N) but
    for a probability of 2e-9 per row.
    """
    error = 6 * np.sqrt(level * (1 - level) / num_draws)
    ends = exact.quantile(np.array([level - error, level, level + error]))[:, :, 0]
    below, at, above = np.asarray(ends)
    return np.maximum(above - at, at - below) + float(GRID.spacing[0])
