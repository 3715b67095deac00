"""Importance sampling of whole paths of a chain."""

import math
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key, is_concrete
from retrodict._chains import AbstractBackwardChain
from retrodict._expectations import (
    AbstractFunctional,
    Estimate,
    check_chain,
    check_model,
    series_of_chain,
)
from retrodict._model import Series, StateSpaceModel, prepare_rows, unwrap
from retrodict.particles.ffbsi import existing_rows, path_values
from retrodict.particles.moments import AbstractWeightedStates, check_functional, weighted_quantile
from retrodict.particles.pareto import K_HAT_GOOD, MIN_WEIGHTS, pareto_smoothed

AT_ONCE = 100
"""The number of paths that are weighed at once."""


class AbstractImportance(eqx.Module):
    """Log weights of paths and what they show of the chain that the paths were drawn from."""

    if TYPE_CHECKING:
        # A type checker would treat abstract variables as arguments of the constructor.

        @property
        def log_weights(self) -> Float[Array, "sample"]:
            """The normalised log weights."""
            ...

        @property
        def raw_log_weights(self) -> Float[Array, "sample"]:
            """The log weights log p(x, y) − log q(x)."""
            ...
    else:
        log_weights: eqx.AbstractVar[Float[Array, "sample"]]
        raw_log_weights: eqx.AbstractVar[Float[Array, "sample"]]

    @property
    def ess(self) -> Scalar:
        """The effective sample size 1/Σ w²."""
        return 1.0 / jnp.sum(jnp.exp(2.0 * self.log_weights))

    @property
    def log_evidence(self) -> Scalar:
        """The logarithm of the mean of the raw weights, whose exponential is unbiased."""
        return jax.nn.logsumexp(self.raw_log_weights) - math.log(self.raw_log_weights.shape[0])

    @property
    def log_evidence_standard_error(self) -> Scalar:
        """The standard error of `log_evidence`, by the delta method; NaN for a single path."""
        ratios = jnp.exp(self.raw_log_weights - self.log_evidence)
        return _standard_error(ratios)

    @property
    def elbo(self) -> Scalar:
        """The mean of the raw log weights, an unbiased estimate of the chain's ELBO."""
        return jnp.mean(self.raw_log_weights)

    @property
    def elbo_standard_error(self) -> Scalar:
        """The standard error of `elbo`; NaN for a single path."""
        return _standard_error(self.raw_log_weights)


class ImportancePosterior(AbstractImportance, AbstractWeightedStates):
    """Weighted paths that approximate the law of the states given the whole series.

    Attributes:
        samples: paths of the chain, of shape `(sample, time, state)`.
        log_weights: their normalised log weights, smoothed if `smooth` was set.
        raw_log_weights: log p(x, y) − log q(x), neither smoothed nor normalised.
        k_hat: the Pareto shape of the raw weights. Up to 0.7 the weights correct the chain
            reliably; above, its tails are too thin, its mass is elsewhere, or the series is long.
            With fewer than 21 paths it cannot be fitted: it is ∞, and there is a message.
        data: the observations, for functionals that read them.
        length: the number of rows that exist, or `None` if all of them do.
        messages: warnings; empty if there are none.
    """

    samples: Float[Array, "sample time state"]
    log_weights: Float[Array, "sample"]  # pyright: ignore
    raw_log_weights: Float[Array, "sample"]  # pyright: ignore
    k_hat: Scalar
    data: Series
    length: Int[Array, ""] | None
    messages: tuple[str, ...] = eqx.field(static=True)

    def quantile(self, probability: float) -> Float[Array, "time state"]:
        """Return the quantile of each coordinate of the smoothed states.

        Args:
            probability: between 0 and 1.
        """
        return weighted_quantile(*self._weighted(), probability)

    def expectation(
        self, functional: AbstractFunctional, data: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """Return the expectation of an additive functional h, and its standard error.

        The value is Σ_i w_i h(x^i) with normalised weights w, and its variance Σ_i w_i² (h(x^i) −
        value)², by the delta method. Both exclude the bias, of order 1/sample, and neither is
        reliable if k̂ is above 0.7.

        Args:
            functional: the functional.
            data: a pytree with one row per time step; `None` for the observations.

        Returns:
            The pair (value, standard error), pytrees with the structure of the functional.
        """
        check_functional(functional)
        data = prepare_rows(data, self.samples.shape[1])
        return self._expectation(functional, self.data if data is None else data)

    @eqx.filter_jit
    def _expectation(self, functional: AbstractFunctional, data: PyTree) -> tuple[PyTree, PyTree]:
        weights, exists = jnp.exp(self.log_weights), existing_rows(self.samples, self.length)
        values = path_values(functional, self.samples, data, exists)

        def mean(leaf: Array) -> Array:
            return jnp.tensordot(weights, leaf, axes=1, precision="highest")

        def error(leaf: Array) -> Array:
            squares = (leaf - mean(leaf)[None]) ** 2
            return jnp.sqrt(jnp.tensordot(weights**2, squares, axes=1, precision="highest"))

        return jax.tree.map(mean, values), jax.tree.map(error, values)

    def _weighted(self) -> tuple[Float[Array, "time sample state"], Float[Array, "time sample"]]:
        states = jnp.swapaxes(self.samples, 0, 1)
        return states, jnp.broadcast_to(self.log_weights, states.shape[:2])


def importance_smoother(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    num_samples: int = 1000,
    *,
    smooth: bool = True,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> ImportancePosterior:
    """Draw paths of a chain with weights p(x, y) / q(x), which correct its errors.

    The result converges to the posterior as paths are added, if the chain has mass wherever the
    posterior does. Weights of whole paths degenerate as the series grows; those of
    `guided_smoother`, which resamples, do not. A Pareto law is fitted to the weights outside of
    JAX: do not call it inside `jax.jit` or `jax.vmap`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.5 * jnp.ones(1))),
        ... )
        >>> xs, ys = model.simulate(jax.random.key(0), num_times=5)
        >>> chain = rd.extended_smoother(model, ys).chain
        >>> rd.importance_smoother(jax.random.key(1), model, chain, ys).mean.shape
        (5, 1)

    Args:
        key: a typed key.
        model: the model; all of its parts must have densities.
        chain: the law q of paths to draw from.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_samples: the number of paths; the Pareto shape of their weights needs at least 21, and
            is accurate from a few hundred on.
        smooth: whether the largest weights are replaced by quantiles of the Pareto law fitted to
            them (Vehtari et al. 2024), which lowers the variance for a small bias.
        mask: true where an entry was observed; `True` if all entries were.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; by default that of the chain.

    Returns:
        Paths, weights, moments and diagnostics.

    Raises:
        ValueError: if model, chain and series do not match.
        TypeError: if it is called inside a JAX transformation.
        FloatingPointError: if a weight is undefined, or the model excludes every path.
    """
    num_samples = check_count(num_samples, "num_samples")
    model, series = _checked(
        "importance_smoother", key, model, chain, ys, mask=mask, inputs=inputs, length=length
    )
    paths = chain.sample(key, num_samples)
    raw = log_weights_of(model, chain, paths, series)
    log_weights, k_hat, messages = correction(
        "importance_smoother", raw, smooth, "guided_smoother or importance_weighted_bound"
    )
    return ImportancePosterior(paths, log_weights, raw, k_hat, series.rows, series.length, messages)


def correction(
    owner: str, raw: Float[Array, "sample"], smooth: bool, instead: str
) -> tuple[Float[Array, "sample"], Scalar, tuple[str, ...]]:
    """Return normalised log weights of paths, their Pareto shape, and warnings.

    Args:
        owner: the name of the function, for messages.
        raw: log p(x, y) − log q(x) of each path.
        smooth: whether the largest weights are smoothed.
        instead: the functions that run inside of JAX, for the message about traced weights.

    Raises:
        TypeError: if the weights are traced.
        FloatingPointError: if a weight is undefined, or all are zero.
    """
    if not is_concrete(raw):
        raise TypeError(
            f"{owner} expects concrete arrays, got traced ones: it fits a Pareto law outside of"
            f" JAX. Call it outside of jax.jit and jax.vmap, or use {instead}, which run inside."
        )
    _check_weights(owner, np.asarray(raw))
    smoothed, k_hat = pareto_smoothed(raw)
    log_weights = jnp.asarray(smoothed, raw.dtype) if smooth else raw - jax.nn.logsumexp(raw)
    return log_weights, jnp.asarray(k_hat, raw.dtype), _messages(k_hat, raw.shape[0])


def _check_weights(owner: str, raw: np.ndarray) -> None:
    """Refuse weights that are undefined or all zero."""
    undefined = np.isnan(raw) | (raw == np.inf)
    if np.any(undefined):
        raise FloatingPointError(
            f"{owner}: the log weights of {np.sum(undefined)} of {raw.size} paths are"
            " NaN or +inf. Check that the densities of the model and of the chain are finite."
        )
    if np.all(raw == -np.inf):
        raise FloatingPointError(
            f"{owner}: all {raw.size} paths are impossible under the model. Check that"
            " the chain was made for this model and these observations."
        )


def _messages(k_hat: float, num_samples: int) -> tuple[str, ...]:
    if k_hat <= K_HAT_GOOD:
        return ()
    if num_samples < MIN_WEIGHTS:
        return (
            f"unknown: {num_samples} paths are too few to fit the Pareto shape of their weights,"
            f" which counts as infinite. Draw at least {MIN_WEIGHTS} paths",
        )
    return (
        f"unreliable: the Pareto shape of the weights is {k_hat:.2f}, above {K_HAT_GOOD}: a few"
        " paths have most of the weight, and standard errors are too small. Use a chain with wider"
        " tails, or guided_smoother, which resamples",
    )


def _standard_error(values: Float[Array, "sample"]) -> Scalar:
    """Return the standard error of the mean; NaN for a single value."""
    if values.shape[0] == 1:
        return jnp.full_like(values[0], jnp.nan)
    return jnp.std(values, ddof=1) / math.sqrt(values.shape[0])


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
    num_paths = check_count(num_paths, "num_paths")
    num_replicates = check_count(num_replicates, "num_replicates")
    model, series = _checked(
        "importance_weighted_bound", key, model, chain, ys, mask=mask, inputs=inputs, length=length
    )
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
    # Under an exact chain all values agree, and the standard deviation has no derivative.
    return Estimate(jnp.mean(values), _standard_error(jax.lax.stop_gradient(values)))


def _checked(
    owner: str, key: Any, model: Any, chain: Any, ys: Any, **options: Any
) -> tuple[StateSpaceModel, Series]:
    """Return the unwrapped model and the series; refuse them unless they fit the chain."""
    check_key(key, owner)
    check_chain(chain, owner)
    model = unwrap(model)
    check_model(model, chain, owner)
    return model, series_of_chain(model, chain, ys, **options)


@eqx.filter_jit
def log_weights_of(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    series: Series,
) -> Float[Array, "sample"]:
    """Return log p(x, y) − log q(x) of each path."""

    def one(path: Float[Array, "time state"]) -> Scalar:
        return model.log_joint(path, series.ys, **series.options()) - chain.log_prob(path)

    return jax.lax.map(one, paths, batch_size=AT_ONCE)
