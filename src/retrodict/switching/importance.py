"""Importance sampling of paths of regimes and states, which corrects and grades a chain."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._model import Series, unwrap
from retrodict.particles import AT_ONCE, AbstractImportance, correction
from retrodict.switching.chain import SwitchingChain, SwitchingMarginals
from retrodict.switching.model import (
    SwitchingModel,
    path_log_joint,
    prepare_switching,
    require_switching,
)


class SwitchingImportance(AbstractImportance):
    """Weighted paths that approximate the law of regimes and states given the whole series.

    Attributes:
        zs: paths of regimes, of shape `(sample, time)`.
        xs: paths of states, of shape `(sample, time, state)`.
        log_weights: their normalised log weights, smoothed if `smooth` was set.
        raw_log_weights: log p(z, x, y) − log q(z, x).
        k_hat: the Pareto shape of the raw weights. Up to 0.7 the weights correct the chain
            reliably. With fewer than 21 paths it cannot be fitted: it is ∞, and there is a message.
        marginals: smoothed moments of regimes and states.
        messages: warnings; empty if there are none.
    """

    zs: Int[Array, "sample time"]
    xs: Float[Array, "sample time state"]
    log_weights: Float[Array, "sample"]  # pyright: ignore
    raw_log_weights: Float[Array, "sample"]  # pyright: ignore
    k_hat: Scalar
    marginals: SwitchingMarginals
    messages: tuple[str, ...] = eqx.field(static=True)


def importance_smoother(
    key: PRNGKey,
    model: SwitchingModel,
    chain: SwitchingChain,
    ys: Any,
    num_samples: int = 1000,
    *,
    smooth: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> SwitchingImportance:
    """Draw paths of a chain with weights p(z, x, y) / q(z, x), which correct its errors.

    The difference between `log_evidence` and `elbo` is the divergence of the chain from the
    posterior, in nats, and `k_hat` shows whether the weights can be trusted. A Pareto law is fitted
    to the weights outside of JAX: do not call it inside `jax.jit` or `jax.vmap`.

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
        >>> chain = rd.switching.gpb2_smoother(model, ys).chain
        >>> corrected = rd.switching.importance_smoother(jax.random.key(1), model, chain, ys)
        >>> bool(corrected.ess > 900), bool(corrected.log_evidence - corrected.elbo < 0.01)
        (True, True)

    Args:
        key: a typed key.
        model: the model; all of its parts must have densities.
        chain: the law q of paths to draw from.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_samples: the number of paths; the Pareto shape of their weights needs at least 21, and
            is accurate from a few hundred on.
        smooth: whether the largest weights are replaced by quantiles of the Pareto law fitted to
            them, which lowers the variance for a small bias.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; the rest is padding.

    Raises:
        ValueError: if model, chain and series do not match.
        TypeError: if it is called inside a JAX transformation.
        FloatingPointError: if a weight is undefined, or the model excludes every path.
    """
    owner = "importance_smoother"
    check_key(key, owner)
    require_switching(model, owner)
    num_samples = check_count(num_samples, "num_samples")
    model = unwrap(model)
    series = prepare_switching(model, ys, mask=mask, inputs=inputs, length=length)
    check_chain(model, chain, series, owner)
    zs, xs, raw = log_weights_of_paths(key, model, chain, series, num_samples)
    log_weights, k_hat, messages = correction(
        owner, raw, smooth, "gpb2_smoother or rao_blackwellised_smoother"
    )
    marginals = _weighted_marginals(zs, xs, log_weights, chain.num_regimes)
    return SwitchingImportance(zs, xs, log_weights, raw, k_hat, marginals, messages)


def check_chain(model: SwitchingModel, chain: Any, series: Series, owner: str) -> None:
    """Refuse a chain that does not fit the model and the series."""
    if not isinstance(chain, SwitchingChain):
        raise TypeError(f"{owner} expects a SwitchingChain, got {type(chain).__name__}.")
    found = (chain.num_times, chain.num_regimes, chain.state_dim)
    expected = (series.num_times, model.num_regimes, model.state_dim)
    if found != expected:
        raise ValueError(
            f"{owner}: a chain of (rows, regimes, coordinates) = {found} does not fit a model and"
            f" series of {expected}."
        )


@eqx.filter_jit
def log_weights_of_paths(
    key: PRNGKey, model: SwitchingModel, chain: SwitchingChain, series: Series, num_samples: int
) -> tuple[Int[Array, "sample time"], Float[Array, "sample time state"], Float[Array, "sample"]]:
    """Draw paths, and return them with log p(z, x, y) − log q(z, x)."""
    zs, xs = chain.sample(key, num_samples)

    def one(path: tuple[Array, Array]) -> Scalar:
        return path_log_joint(model, *path, series) - chain.log_prob(*path)

    return zs, xs, jax.lax.map(one, (zs, xs), batch_size=AT_ONCE)


@eqx.filter_jit
def _weighted_marginals(
    zs: Int[Array, "sample time"],
    xs: Float[Array, "sample time state"],
    log_weights: Float[Array, "sample"],
    num_regimes: int,
) -> SwitchingMarginals:
    """Return weighted averages over paths; standard errors are by the delta method."""
    weights = jnp.exp(log_weights)
    members = jax.nn.one_hot(zs, num_regimes, dtype=weights.dtype)

    def mean_and_error(values: Float[Array, "sample time column"]) -> tuple[Array, Array]:
        mean = jnp.einsum("s,stj->tj", weights, values)
        squares = (values - mean[None]) ** 2
        return mean, jnp.sqrt(jnp.einsum("s,stj->tj", weights**2, squares))

    probabilities, probabilities_error = mean_and_error(members)
    mean, mean_error = mean_and_error(xs)
    shifts = xs - mean[None]
    return SwitchingMarginals(
        probabilities,
        mean,
        jnp.einsum("s,sti,stj->tij", weights, shifts, shifts),
        jnp.einsum("s,sti,stj->tij", weights, members[:, :-1], members[:, 1:]),
        probabilities_error,
        mean_error,
    )
