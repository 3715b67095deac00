"""The result of `smooth`."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, as_probabilities, check_count
from retrodict._chains import AbstractBackwardChain, LinearGaussianChain
from retrodict._families import AbstractFamily
from retrodict._model import StateSpaceModel
from retrodict._smooth.check import pick

Method = Literal["exact", "linearised", "amortised"]

MAX_DRAWN = 2**25
"""The largest number of values drawn at once for quantiles, which bounds the paths per series."""


class Smoothed(eqx.Module):
    """A posterior, with the method that computed it and the reason for that method.

    For a batch, all arrays have a leading axis `batch`. In rows that do not exist, moments are
    those of the last row that does.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> smoothed = rd.smooth(model, ys)
        >>> smoothed.method, smoothed.trustworthy
        ('exact', True)
        >>> print(np.array(smoothed.mean[:, 0]).round(3), smoothed.quantile([0.05, 0.95]).shape)
        [1. 2. 3.] (2, 3, 1)

    Attributes:
        mean: means of the states given the whole series.
        covariance: their covariances at each time.
        mean_standard_error: the Monte Carlo error of `mean` where it is a mean over drawn paths;
            zero in closed form. It does not measure the distance of the chain to the posterior.
        covariance_standard_error: the same for `covariance`.
        chain: the law of whole paths, to draw from or to take other expectations under; for a batch
            use `jax.tree.map` or `equinox.filter_vmap`.
        method: `"exact"`, `"linearised"` or `"amortised"`.
        trustworthy: whether the answer is exact, or agrees with a reference that was computed
            independently of it: a grid, or tempered particles (see `check_posterior`). False if it
            disagrees, if the reference failed, and if nothing was checked. Of a batch, eight series
            at most are checked, and the others are not: see `reason`.
        reason: why this method was chosen, with the figures that decided, and how many series of
            a large batch were checked. If no method passed, it names the findings.
        family: the family that was trained or given, to be saved, and to be passed as `family` with
            new series of the same model; `None` if there is none.
        model: the model, as passed by the caller.
        draw_key: the key of the draws of `quantile`; `None` for `jax.random.key(0)`.
    """

    mean: Float[Array, "... time state"]
    covariance: Float[Array, "... time state state"]
    mean_standard_error: Float[Array, "... time state"]
    covariance_standard_error: Float[Array, "... time state state"]
    chain: AbstractBackwardChain
    method: Method = eqx.field(static=True)
    reason: str = eqx.field(static=True)
    family: AbstractFamily | None
    model: StateSpaceModel
    trustworthy: bool = eqx.field(static=True)
    draw_key: PRNGKey | None = None

    def quantile(
        self, probabilities: Any, *, num_samples: int | None = None
    ) -> Float[Array, "... time state"]:
        """Return quantiles of the smoothed law of each coordinate at each time.

        They are exact if the chain is linear Gaussian, else quantiles of paths drawn from the
        chain: mean and covariance do not describe a law with two modes. The quantile of N draws at
        level p is the exact one at some level within p ± 2 sqrt(p (1 − p) / N), with probability
        0.95. The same call gives the same answer.

        Args:
            probabilities: one probability or an array of them, strictly between 0 and 1.
            num_samples: the number of paths to draw; by default 1,000, and fewer for long series,
                but at least 200.

        Returns:
            Quantiles, with the axes of `probabilities` first.
        """
        levels = as_probabilities(probabilities, "probabilities").astype(self.mean.dtype)
        flat = levels.reshape(-1)
        if isinstance(self.chain, LinearGaussianChain):
            quantiles = _gaussian_quantiles(self.mean, self.covariance, flat)
        else:
            if num_samples is None:
                size = self.mean.shape[-2] * self.mean.shape[-1]
                num_samples = max(200, min(1000, MAX_DRAWN // size))
            quantiles = self._path_quantiles(flat, check_count(num_samples, "num_samples"))
        return quantiles.reshape(*levels.shape, *self.mean.shape)

    def _path_quantiles(self, levels: Array, num_samples: int) -> Array:
        key = jax.random.key(0) if self.draw_key is None else self.draw_key
        if self.mean.ndim == 2:
            return _quantiles(self.chain, key, levels, num_samples)
        # One chain at a time: the paths of all of them may not fit into memory.
        by_series = [
            _quantiles(pick(self.chain, i), jax.random.fold_in(key, i), levels, num_samples)
            for i in range(self.mean.shape[0])
        ]
        return jnp.stack(by_series, axis=1)

    def __repr__(self) -> str:
        trust = "" if self.trustworthy else ", not trustworthy"
        return f"Smoothed(mean of shape {self.mean.shape}, {self.method}{trust}: {self.reason})"


@jax.jit
def _gaussian_quantiles(mean: Array, covariance: Array, levels: Array) -> Array:
    std = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
    return mean[None] + ndtri(levels).reshape(-1, *[1] * mean.ndim) * std[None]


@eqx.filter_jit
def _quantiles(
    chain: AbstractBackwardChain, key: PRNGKey, levels: Array, num_samples: int
) -> Array:
    return jnp.quantile(chain.sample(key, num_samples), levels, axis=0)
