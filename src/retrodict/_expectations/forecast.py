"""Predictive laws of observations: forecasts, replicates of a series, and imputation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, as_probabilities, check_count, check_key
from retrodict._chains import AbstractBackwardChain, AbstractKernelChain
from retrodict._expectations.elbo import check_model, series_of_chain
from retrodict._expectations.expectation import Marginals, check_chain, moments_over_paths
from retrodict._expectations.moments import existing_rows
from retrodict._model import (
    AbstractGaussianKernel,
    AbstractKernel,
    AbstractLinearGaussianKernel,
    Diagonal,
    Gaussian,
    Series,
    StateSpaceModel,
    dense_scale,
    masked_scale,
    prepare_inputs,
    unwrap,
)
from retrodict._numerics import linalg


class Forecast(eqx.Module):
    """The states and observations of the rows after a series.

    Moments are exact, with standard errors of zero, where the kernels involved are linear
    Gaussian. Elsewhere they average conditional moments over the draws, which has a smaller
    variance than averaging the draws themselves (Rao-Blackwell).

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> ahead = rd.forecast(jax.random.key(0), model, chain, num_times=2)
        >>> print(np.array(ahead.mean[:, 0]).round(3), np.array(ahead.covariance[:, 0, 0]).round(3))
        [3. 3.] [2.615 3.615]
        >>> print(np.array(ahead.quantile([0.05, 0.95])[:, 0, 0]).round(2))
        [0.34 5.66]

    Attributes:
        states: draws of shape `(sample, time, state)`.
        observations: draws of shape `(sample, time, obs)`, given the states of the same path.
        mean: of the observations, of shape `(time, obs)`.
        covariance: of the observations of each row, of shape `(time, obs, obs)`.
        mean_standard_error: of the shape of `mean`.
        covariance_standard_error: of the shape of `covariance`.
        state_mean: of the states, of shape `(time, state)`.
        state_covariance: of the states of each row, of shape `(time, state, state)`.
        state_mean_standard_error: of the shape of `state_mean`.
        state_covariance_standard_error: of the shape of `state_covariance`.
        gaussian: whether the observations are exactly Gaussian, so that quantiles are exact too.
        gaussian_states: whether the states are exactly Gaussian.
    """

    states: Float[Array, "sample time state"]
    observations: Float[Array, "sample time obs"]
    mean: Float[Array, "time obs"]
    covariance: Float[Array, "time obs obs"]
    mean_standard_error: Float[Array, "time obs"]
    covariance_standard_error: Float[Array, "time obs obs"]
    state_mean: Float[Array, "time state"]
    state_covariance: Float[Array, "time state state"]
    state_mean_standard_error: Float[Array, "time state"]
    state_covariance_standard_error: Float[Array, "time state state"]
    gaussian: bool = eqx.field(static=True)
    gaussian_states: bool = eqx.field(static=True)

    def quantile(self, levels: Any) -> Float[Array, "level time obs"]:
        """Return the quantiles of each observation: exact if `gaussian`, else those of the draws.

        Args:
            levels: one level or a vector of them, each above zero and below one.
        """
        return self._quantile(levels, self.mean, self.covariance, self.observations, self.gaussian)

    def state_quantile(self, levels: Any) -> Float[Array, "level time state"]:
        """Return the quantiles of each state: exact if `gaussian_states`, else those of the draws.

        Args:
            levels: one level or a vector of them, each above zero and below one.
        """
        return self._quantile(
            levels, self.state_mean, self.state_covariance, self.states, self.gaussian_states
        )

    def _quantile(
        self, levels: Any, mean: Array, covariance: Array, draws: Array, exact: bool
    ) -> Array:
        if jnp.ndim(self.mean) != 2:
            raise ValueError(
                f"This forecast holds a batch of series: its mean has shape {self.mean.shape}. Take"
                " quantiles under jax.vmap: jax.vmap(lambda f: f.quantile(levels))(forecasts)."
            )
        ps = jnp.atleast_1d(as_probabilities(levels, "levels")).astype(self.mean.dtype)
        if ps.ndim != 1:
            raise ValueError(f"levels must be a number or a vector, got shape {ps.shape}.")
        if not exact:
            return jnp.quantile(draws, ps, axis=0)
        std = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
        return mean[None] + ndtri(ps)[:, None, None] * std[None]


def forecast(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    num_times: int,
    *,
    inputs: Any = None,
    num_samples: int = 1000,
) -> Forecast:
    """Forecast the states and observations of the rows after the last of a chain.

    The last state, of law q_{n-1}, is propagated by the model's transition, and each state is
    observed through its emission. Use `jax.vmap` for a batch of series.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> ahead = rd.forecast(jax.random.key(0), model, chain, num_times=2)
        >>> ahead.observations.shape, ahead.mean.shape
        ((1000, 2, 1), (2, 1))

    Args:
        key: a typed key.
        model: the model; its transition need not have a density.
        chain: the posterior of the observed series.
        num_times: the number of rows to forecast.
        inputs: inputs of the *coming* rows, of shape `(num_times, input)`, if a kernel takes them.
        num_samples: the number of paths.

    Raises:
        TypeError: if `model` is not a model, or `chain` not a chain.
        ValueError: if shapes do not fit, or inputs are missing.
    """
    check_key(key, "forecast")
    num_times = check_count(num_times, "num_times")
    num_samples = check_count(num_samples, "num_samples")
    plain = _check(model, chain, "forecast")
    us = prepare_inputs(inputs, num_times, plain.takes_input)
    start_key, path_key = jax.random.split(key)
    length = getattr(chain, "length", None)
    end = chain.num_times - 1 if length is None else length - 1
    if isinstance(chain, AbstractKernelChain):
        law = jax.tree.map(lambda leaf: leaf[end], chain.laws)
        noise = jax.random.normal(start_key, (num_samples, law.noise_dim), law.mean.dtype)
        return _forecast(plain, law, jax.vmap(law.from_noise)(noise), path_key, us, num_times)
    last = chain.sample(start_key, num_samples)[:, end]
    return _forecast(plain, None, last, path_key, us, num_times)


def predictive(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    num_samples: int,
    *,
    inputs: Any = None,
) -> Float[Array, "sample time obs"]:
    """Draw replicates of the whole series: new observations along smoothed paths.

    If the model is right, the observed series resembles them. Rows from the length of the chain on
    do not exist and hold NaN.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> replicates = rd.predictive(jax.random.key(0), model, chain, num_samples=100)
        >>> p_value = jnp.mean(jnp.max(replicates, axis=1) > jnp.max(ys))
        >>> replicates.shape, bool(0 < p_value < 1)
        ((100, 3, 1), True)

    Args:
        key: a typed key.
        model: the model.
        chain: the posterior.
        num_samples: the number of replicates.
        inputs: the inputs of the chain's rows, of shape `(time, input)`, if a kernel takes them.
    """
    check_key(key, "predictive")
    num_samples = check_count(num_samples, "num_samples")
    plain = _check(model, chain, "predictive")
    us = prepare_inputs(inputs, chain.num_times, plain.takes_input, getattr(chain, "length", None))
    path_key, emission_key = jax.random.split(key)
    ys = _observe(plain.emission, chain.sample(path_key, num_samples), emission_key, us)
    return _without_padding(chain, ys)


def impute(
    key: PRNGKey,
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    ys: Any,
    num_samples: int,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Float[Array, "sample time obs"]:
    """Draw completed series: observed entries unchanged, missing ones from their posterior.

    Paths are drawn from the chain, and missing entries given their state. If the emission is
    Gaussian they are also drawn given the observed entries of their row, since noise may be
    correlated. A `DistributionKernel` with a joint density is drawn by row: neither the chain nor
    the draw uses the observed entries of an incomplete row. Rows from `length` on do not exist and
    hold NaN.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(), jnp.array([[1.0], [jnp.nan], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> completed = rd.impute(jax.random.key(0), model, chain, ys, num_samples=100)
        >>> completed.shape, completed[0, 0].tolist(), bool(jnp.isnan(completed).any())
        ((100, 3, 1), [1.0], False)

    Args:
        key: a typed key.
        model: the model.
        chain: the posterior given these `ys`.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_samples: the number of completed series.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.
        length: the number of rows that exist; by default that of the chain.
    """
    check_key(key, "impute")
    num_samples = check_count(num_samples, "num_samples")
    plain = _check(model, chain, "impute")
    series = series_of_chain(plain, chain, ys, mask=mask, inputs=inputs, length=length)
    if series.mask is None:
        return jnp.broadcast_to(series.ys, (num_samples, *series.ys.shape))
    path_key, emission_key = jax.random.split(key)
    completed = _complete(plain.emission, chain.sample(path_key, num_samples), emission_key, series)
    return _without_padding(chain, completed)


def _without_padding(chain: AbstractBackwardChain, ys: Float[Array, "sample time obs"]) -> Array:
    """Put NaN into rows that do not exist."""
    exists = existing_rows(chain)
    return ys if exists is None else jnp.where(exists[None, :, None], ys, jnp.nan)


@eqx.filter_jit
def _forecast(
    model: StateSpaceModel,
    law: Any,
    last: Float[Array, "sample state"],
    key: PRNGKey,
    us: Float[Array, "time input"] | None,
    num_times: int,
) -> Forecast:
    transition, emission = model.transition, model.emission
    states_key, observations_key = jax.random.split(key)

    def move(xs: Array, at: tuple[Array, Array | None]) -> tuple[Array, tuple]:
        step_key, u = at
        keys = jax.random.split(step_key, xs.shape[0])
        after = jax.vmap(lambda k, x: transition.sample(k, x, u))(keys, xs).astype(xs.dtype)
        moments = jax.vmap(lambda x, draw: conditional_moments(transition, x, u, draw))(xs, after)
        return after, (after, *moments)

    _, rows = jax.lax.scan(move, last, (jax.random.split(states_key, num_times), us))
    states, *given_before = (jnp.swapaxes(leaf, 0, 1) for leaf in rows)
    observations = _observe(emission, states, observations_key, us)

    moves = isinstance(transition, AbstractLinearGaussianKernel)
    observes = isinstance(emission, AbstractLinearGaussianKernel)
    if law is not None and moves:
        of_states = _moved(transition, law, us, num_times)
    else:
        of_states = _averaged(*given_before)
    if law is not None and moves and observes:
        observe = jax.vmap(emission.propagate)
        of_rows = Marginals.exact(*observe(of_states.mean, of_states.covariance, us))
    else:
        over_time = jax.vmap(lambda x, u, y: conditional_moments(emission, x, u, y))
        of_rows = _averaged(*jax.vmap(over_time, in_axes=(0, None, 0))(states, us, observations))
    gaussian = moves and isinstance(law, Gaussian)
    # The moments have the order of the fields of `Marginals`.
    moments: list[Any] = [*jax.tree.leaves(of_rows), *jax.tree.leaves(of_states)]
    moments += [observes and gaussian, gaussian]
    return Forecast(states, observations, *moments)


def _moved(
    transition: AbstractLinearGaussianKernel,
    law: Any,
    us: Float[Array, "time input"] | None,
    num_times: int,
) -> Marginals:
    """Return the moments m ← w m + b, P ← w P wᵀ + s sᵀ of future states, for any first law."""

    def move(moments: tuple[Array, Array], u: Array | None) -> tuple[tuple, tuple]:
        after = transition.propagate(*moments, u)
        mean, covariance = (new.astype(old.dtype) for new, old in zip(after, moments, strict=True))
        return (mean, covariance), (mean, covariance)

    first = (law.mean, law.covariance)
    return Marginals.exact(*jax.lax.scan(move, first, us, length=num_times)[1])


def _averaged(
    means: Float[Array, "sample time out"], covariances: Float[Array, "sample time out out"]
) -> Marginals:
    """Return the moments of a mixture with one law per draw."""
    weights = jnp.ones((means.shape[0], 1), means.dtype)
    return moments_over_paths(means[:, None], covariances[:, None], weights)


def conditional_moments(
    kernel: AbstractKernel, x: Array, u: Array | None, draw: Array
) -> tuple[Float[Array, "out"], Float[Array, "out out"]]:
    """Return the conditional mean and covariance if the law has them, else a draw and zero."""
    law: Any = kernel.law(x, u)
    if isinstance(kernel, AbstractGaussianKernel):
        return law.mean.astype(x.dtype), law.covariance.astype(x.dtype)
    spread = jnp.zeros((*draw.shape, draw.shape[0]), draw.dtype)
    try:
        mean, variance = jnp.asarray(law.mean), jnp.asarray(law.variance)
        shapes = {mean.shape, variance.shape, jnp.shape(law.log_prob(draw))}
    except (AttributeError, NotImplementedError):
        # Not every distribution has moments.
        return draw, spread
    if shapes != {draw.shape}:
        return draw, spread
    return mean.astype(x.dtype), jnp.diag(variance.astype(x.dtype))


@eqx.filter_jit
def _observe(
    emission: AbstractKernel,
    paths: Float[Array, "sample time state"],
    key: PRNGKey,
    us: Float[Array, "time input"] | None,
) -> Float[Array, "sample time obs"]:
    """Draw one observation of every state of every path."""
    keys = jax.random.split(key, paths.shape[:2])
    return jax.vmap(jax.vmap(emission.sample), in_axes=(0, 0, None))(keys, paths, us)


@eqx.filter_jit
def _complete(
    emission: AbstractKernel,
    paths: Float[Array, "sample time state"],
    key: PRNGKey,
    series: Series,
) -> Float[Array, "sample time obs"]:
    """Return observed entries, and draws of the others."""
    keys = jax.random.split(key, paths.shape[:2])

    def complete(k: Array, x: Array, y: Array, observed: Any, u: Array | None) -> Array:
        return complete_row(emission, k, x, y, observed, u)

    over_paths = jax.vmap(jax.vmap(complete), in_axes=(0, 0, None, None, None))
    return over_paths(keys, paths, series.ys, series.mask, series.inputs)


def complete_row(
    emission: AbstractKernel, key: PRNGKey, x: Array, y: Array, observed: Any, u: Array | None
) -> Float[Array, "obs"]:
    """Return the observed entries of a row, and draws of the others given them and the state."""
    draw = emission.sample(key, x, u)
    if isinstance(emission, AbstractGaussianKernel):
        draw = _condition_draw(emission.law(x, u).scale_tril, draw, y, observed)
    return jnp.where(observed, y, draw.astype(y.dtype))


def _condition_draw(scale: Any, draw: Array, y: Array, observed: Array) -> Array:
    """Turn a draw of a whole row into one given the observed entries o of y.

    With C = s sᵀ and z a draw of the row, z + C_{·o} C_oo⁻¹ (y_o − z_o) has the conditional law.
    """
    if isinstance(scale, Diagonal):
        return draw
    lower, weights = dense_scale(scale), observed.astype(draw.dtype)
    # Missing entries have a residual of zero and unit scale, and so have no effect.
    factor = dense_scale(masked_scale(lower, weights))
    residual = linalg.solve_triangular(factor, jnp.where(observed, y - draw, 0.0))
    solved = linalg.solve_triangular(factor, residual, transpose=True)
    return draw + linalg.matvec(lower, linalg.matvec(lower.T, weights * solved))


def _check(model: Any, chain: Any, owner: str) -> StateSpaceModel:
    """Return the unwrapped model, refused unless it fits the chain."""
    check_chain(chain, owner)
    plain = unwrap(model)
    check_model(plain, chain, owner, with_densities=False)
    return plain
