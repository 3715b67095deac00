"""Importance-weighted bounds of the log-evidence."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from retrodict._chains import AbstractBackwardChain
from retrodict._expectations import Estimate, check_chain, check_model, series_of_chain
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key
from retrodict.particles.path_weights import log_weights_of


def importance_weighted_bound(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    num_paths: int = 100,
    *,
    num_replicates: int = 10,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Estimate:
    """Estimate the bound E log (1/K) Σ_{i≤K} p(x^i, y) / q(x^i) over K paths, in nats.

    With one path it is the ELBO; it grows with K, and tends to the log-evidence (Burda, Grosse and
    Salakhutdinov, 2016). It is differentiable in the model and in the chain, since paths are
    reparameterised.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> exact = rd.kalman_smoother(model, ys)
        >>> key = jax.random.key(1)
        >>> bound = rd.particles.importance_weighted_bound(key, model, exact.chain, ys)
        >>> bool(jnp.isclose(bound.value, exact.log_evidence, rtol=1e-4))
        True

    Args:
        key: a typed key.
        model: the model p; all of its parts must have densities.
        chain: the law q of paths.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_paths: the number K of paths inside the logarithm.
        num_replicates: the number of independent values to average; the standard error needs two
            or more.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; by default that of the chain.

    Returns:
        The pair (value, standard_error); the latter is NaN for a single replicate.

    Raises:
        ValueError: if model, chain and series do not match, or a scale of the model is singular.
    """
    owner = "importance_weighted_bound"
    check_key(key, owner)
    check_chain(chain, owner)
    num_paths = check_count(num_paths, "num_paths")
    num_replicates = check_count(num_replicates, "num_replicates")
    model = unwrap(model)
    check_model(model, chain, owner)
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs, length=length)
    return _bound(model, chain, key, series, num_paths, num_replicates)


@eqx.filter_jit
def _bound(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    key: PRNGKey,
    series: Series,
    num_paths: int,
    num_replicates: int,
) -> Estimate:
    paths = chain.sample(key, num_paths * num_replicates)
    log_weights = log_weights_of(model, chain, paths, series)
    by_replicate = log_weights.reshape(num_replicates, num_paths)
    values = jax.nn.logsumexp(by_replicate, axis=1) - math.log(num_paths)
    value = jnp.mean(values)
    if num_replicates == 1:
        return Estimate(value, jnp.full_like(value, jnp.nan))
    # Under an exact chain all values agree, and the standard deviation has no derivative.
    spread = jnp.std(jax.lax.stop_gradient(values), ddof=1)
    return Estimate(value, spread / math.sqrt(num_replicates))
