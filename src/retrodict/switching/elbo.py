"""The evidence lower bound of a switching chain."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from retrodict._arrays import PRNGKey, check_count, check_key, known_values
from retrodict._expectations import Estimate, common_length
from retrodict._model import Frozen, Series, unwrap
from retrodict.switching.chain import SwitchingChain
from retrodict.switching.model import (
    SwitchingModel,
    path_log_joint,
    prepare_switching,
    require_switching,
)
from retrodict.switching.regime_sums import elbo_by_regime_sums


def elbo(
    model: SwitchingModel,
    chain: SwitchingChain,
    ys: Any,
    *,
    key: PRNGKey,
    num_samples: int = 16,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Estimate:
    """Estimate the evidence lower bound E_q[log p(z, x, y) − log q(z, x)] in nats per series.

    For a chain with one component per regime, as those of `gpb2_smoother` and `SwitchingFamily`,
    every sample sums over the regimes, and the estimate is differentiable in model and chain: its
    gradient is unbiased, with the noise of the few remaining draws reduced by Rao–Blackwellisation
    and leave-one-out baselines. Under the exact posterior every sample is the log-evidence. For
    other chains it averages over sampled paths, and is differentiable in the model only.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> eye, zero = jnp.eye(1), jnp.zeros(1)
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.95, 0.05], [0.1, 0.9]]),
        ...     prior=rd.Gaussian(zero, eye),
        ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
        ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
        ... )
        >>> zs, xs, ys = model.simulate(jax.random.key(0), num_times=20)
        >>> posterior = rd.switching.gpb2_smoother(model, ys)
        >>> value, error = rd.switching.elbo(model, posterior.chain, ys, key=jax.random.key(1))
        >>> bool(abs(value - posterior.log_evidence) < 0.5)
        True

    Args:
        model: the model p.
        chain: the law q of paths.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        key: a typed key.
        num_samples: the number of samples; the standard error needs two or more.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; by default that of the chain.

    Returns:
        The bound and its standard error.
    """
    require_switching(model, "elbo")
    if not isinstance(chain, SwitchingChain):
        hint = " Pass its .chain." if hasattr(chain, "chain") else ""
        raise TypeError(f"elbo expects a SwitchingChain, got {type(chain).__name__}.{hint}")
    check_key(key, "elbo")
    num_samples = check_count(num_samples, "num_samples")
    model = unwrap(model)
    _check_fit(model, chain)
    length = common_length(chain, length)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    if series.num_times != chain.num_times:
        raise ValueError(
            f"ys must have as many rows as the chain, {chain.num_times}, got {series.num_times}."
        )
    estimate = _by_regimes if _has_one_per_regime(chain) else _by_paths
    return estimate(model, chain, series, key, num_samples)


def _check_fit(model: SwitchingModel, chain: SwitchingChain) -> None:
    for name in ("num_regimes", "state_dim"):
        expected, given = getattr(model, name), getattr(chain, name)
        if expected != given:
            raise ValueError(
                f"The chain must have the {name} of the model, {expected}, got {given}."
            )


def _has_one_per_regime(chain: SwitchingChain) -> bool:
    """Return whether the components are the regimes; inside of `jax.jit` by their number."""
    regimes, count = chain.laws.regimes, chain.num_regimes
    if regimes.shape[-1] != count:
        return False
    known = known_values(regimes)
    return known is None or bool(np.all(known == np.arange(count)))


_by_regimes = eqx.filter_jit(elbo_by_regime_sums)


@eqx.filter_jit
def _by_paths(
    model: SwitchingModel, chain: SwitchingChain, series: Series, key: PRNGKey, num_samples: int
) -> Estimate:
    """Average the log ratio over sampled paths."""
    chain = Frozen(chain).value
    zs, xs = chain.sample(key, num_samples)
    values = jax.vmap(
        lambda zs, xs: path_log_joint(model, zs, xs, series) - chain.log_prob(zs, xs)
    )(zs, xs)
    error = jnp.std(values) / jnp.sqrt(max(num_samples - 1, 1)) if num_samples > 1 else jnp.nan
    return Estimate(jnp.mean(values), jnp.asarray(error, values.dtype))
