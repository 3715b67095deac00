"""Predictive laws of switching models: forecasts, replicates of a series, and imputation."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, as_probabilities, check_count, check_key
from retrodict._expectations import Marginals, complete_row, conditional_moments, moments_over_paths
from retrodict._model import (
    AbstractKernel,
    AbstractLinearGaussianKernel,
    DistributionKernel,
    Gaussian,
    LinearGaussianKernel,
    Series,
    prepare_inputs,
    unwrap,
)
from retrodict._numerics import linalg
from retrodict.switching.chain import SwitchingChain
from retrodict.switching.mixture import Mixture
from retrodict.switching.model import (
    SwitchingModel,
    each,
    lagged,
    obs_dim_of,
    over_regimes,
    prepare_switching,
    require_switching,
)


class SwitchingForecast(eqx.Module):
    """The regimes, states and observations of the rows after a series.

    Moments average conditional moments over the drawn paths. They are exact, with standard errors
    of zero, for observations of a hidden Markov model without lags; so are the probabilities if
    regimes do not depend on the state.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.models.switching_level()
        >>> chain = rd.switching.gpb2_smoother(model, jnp.zeros((5, 1))).chain
        >>> ahead = rd.switching.forecast(jax.random.key(0), model, chain, num_times=3)
        >>> ahead.states.shape, ahead.probabilities.shape, ahead.quantile([0.05, 0.95]).shape
        ((1000, 3, 1), (3, 2), (2, 3, 1))

    Attributes:
        probabilities: P(z = j) of each coming row, of shape `(time, regime)`.
        regimes: draws of shape `(sample, time)`.
        states: draws of shape `(sample, time, state)`.
        observations: draws of shape `(sample, time, obs)`.
        mean: of the observations, over all regimes, of shape `(time, obs)`.
        covariance: of the observations of each row, of shape `(time, obs, obs)`.
        mean_standard_error: of the shape of `mean`.
        covariance_standard_error: of the shape of `covariance`.
        state_mean: of the states, of shape `(time, state)`.
        state_covariance: of the states of each row, of shape `(time, state, state)`.
        state_mean_standard_error: of the shape of `state_mean`.
        state_covariance_standard_error: of the shape of `state_covariance`.
    """

    probabilities: Float[Array, "time regime"]
    regimes: Int[Array, "sample time"]
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

    def quantile(self, levels: Any) -> Float[Array, "level time obs"]:
        """Return quantiles of the drawn observations, which may have several modes.

        Args:
            levels: one level or a vector of them, each above zero and below one.
        """
        ps = jnp.atleast_1d(as_probabilities(levels, "levels"))
        return jnp.quantile(self.observations, ps.astype(self.mean.dtype), axis=0)


def forecast(
    key: PRNGKey,
    model: SwitchingModel,
    chain: SwitchingChain,
    num_times: int,
    *,
    observed: Any = None,
    inputs: Any = None,
    num_samples: int = 1000,
) -> SwitchingForecast:
    """Forecast the regimes, states and observations of the rows after the last of a chain.

    The last filtering law is propagated by the model: the forecast mixes the regimes.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model = rd.switching.SwitchingModel(
        ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.2, 0.8]]),
        ...     emission=[rd.Gaussian(jnp.full(1, m), jnp.eye(1)) for m in (0.0, 10.0)],
        ... )
        >>> chain = rd.switching.forward_backward(model, jnp.array([[0.0], [10.0]])).chain
        >>> ahead = rd.switching.forecast(jax.random.key(0), model, chain, num_times=2)
        >>> print(np.array(ahead.probabilities).round(3).tolist())
        [[0.2, 0.8], [0.34, 0.66]]
        >>> print(np.array(ahead.mean[:, 0]).round(2).tolist())
        [8.0, 6.6]

    Args:
        key: a typed key.
        model: the model.
        chain: the posterior of the observed series.
        num_times: the number of rows to forecast.
        observed: the observed series, of shape `(time, obs)`, for a model of lagged observations.
        inputs: inputs of the *coming* rows, of shape `(num_times, input)`, if the model takes them.
        num_samples: the number of paths.
    """
    check_key(key, "forecast")
    num_times = check_count(num_times, "num_times")
    num_samples = check_count(num_samples, "num_samples")
    plain = _check(model, chain, "forecast")
    us = prepare_inputs(inputs, num_times, plain.takes_input)
    lags = _last_rows(plain, chain, observed, us)
    return _forecast(plain, chain.terminal, key, us, lags, num_times, num_samples)


def predictive(
    key: PRNGKey,
    model: SwitchingModel,
    chain: SwitchingChain,
    num_samples: int,
    *,
    observed: Any = None,
    inputs: Any = None,
) -> Float[Array, "sample time obs"]:
    """Draw replicates of the whole series: new observations along smoothed paths.

    Rows of a model of lagged observations are drawn given the observed lags; the first rows, which
    it conditions on, are the observed ones. Rows that do not exist hold NaN.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.models.hmm()
        >>> chain = rd.switching.forward_backward(model, jnp.zeros((5, 1))).chain
        >>> rd.switching.predictive(jax.random.key(0), model, chain, num_samples=10).shape
        (10, 5, 1)

    Args:
        key: a typed key.
        model: the model.
        chain: the posterior.
        num_samples: the number of replicates.
        observed: the observed series, of shape `(time, obs)`, for a model of lagged observations.
        inputs: the inputs of the rows, of shape `(time, input)`, if the model takes them.
    """
    check_key(key, "predictive")
    num_samples = check_count(num_samples, "num_samples")
    plain = _check(model, chain, "predictive")
    us = prepare_inputs(inputs, chain.num_times, plain.takes_input, chain.length)
    if plain.num_lags and observed is None:
        raise ValueError("Replicates of a model of lagged observations need them: pass `observed`.")
    rows = jnp.zeros((chain.num_times, obs_dim_of(plain, us)))
    if observed is not None:
        rows = prepare_switching(plain, observed, inputs=us, length=chain.length).ys
    series = Series(rows, jnp.zeros(rows.shape, bool), us, chain.length)
    return _complete(plain, chain, key, series, num_samples)


def impute(
    key: PRNGKey,
    model: SwitchingModel,
    chain: SwitchingChain,
    ys: Any,
    num_samples: int,
    *,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Float[Array, "sample time obs"]:
    """Draw completed series: observed entries unchanged, missing ones from their posterior.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.hmm(), jnp.array([[1.0], [jnp.nan], [0.5]])
        >>> chain = rd.switching.forward_backward(model, ys).chain
        >>> completed = rd.switching.impute(jax.random.key(0), model, chain, ys, num_samples=10)
        >>> completed.shape, completed[0, 0].tolist()
        ((10, 3, 1), [1.0])

    Args:
        key: a typed key.
        model: the model.
        chain: the posterior given these `ys`.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        num_samples: the number of completed series.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist.
    """
    check_key(key, "impute")
    num_samples = check_count(num_samples, "num_samples")
    plain = _check(model, chain, "impute")
    series = prepare_switching(plain, ys, mask=mask, inputs=inputs, length=length)
    if series.mask is None:
        return jnp.broadcast_to(series.ys, (num_samples, *series.ys.shape))
    return _complete(plain, chain, key, series, num_samples)


def _check(model: Any, chain: Any, owner: str) -> SwitchingModel:
    """Return the unwrapped model; refuse a chain of another model."""
    require_switching(model, owner)
    if not isinstance(chain, SwitchingChain):
        raise TypeError(f"{owner} expects a SwitchingChain, got {type(chain).__name__}.")
    plain = unwrap(model)
    sizes = {
        "model": (plain.num_regimes, plain.state_dim),
        "chain": (chain.num_regimes, chain.state_dim),
    }
    if sizes["model"] != sizes["chain"]:
        raise ValueError(
            f"The model has {sizes['model'][0]} regimes and {sizes['model'][1]} states, the chain"
            f" {sizes['chain'][0]} and {sizes['chain'][1]}: pass the chain of this model."
        )
    return plain


def _last_rows(
    model: SwitchingModel, chain: SwitchingChain, observed: Any, us: Any
) -> Float[Array, "lags"]:
    """Return the lags of the first coming row, latest first."""
    if not model.num_lags:
        return jnp.zeros(0)
    if observed is None:
        raise ValueError(
            "A forecast of a model of lagged observations needs them: pass `observed`."
        )
    rows = jnp.asarray(observed, jnp.result_type(float))
    expected = (chain.num_times, obs_dim_of(model, us))
    if rows.shape != expected:
        raise ValueError(f"`observed` must have shape (time, obs) = {expected}, got {rows.shape}.")
    end = rows.shape[0] if chain.length is None else chain.length
    padded = jnp.concatenate([rows, jnp.zeros_like(rows[:1])])
    return lagged(padded, model.num_lags)[end]


def kernel_of_part(part: Any) -> AbstractKernel:
    """Return an emission as a kernel: a law is a kernel that ignores its state."""
    if isinstance(part, AbstractKernel):
        return part
    if isinstance(part, Gaussian):
        weight = jnp.zeros((part.mean.shape[0], 0), part.mean.dtype)
        return LinearGaussianKernel(weight, part.mean, part.scale_tril)
    return DistributionKernel(lambda _: part)


def _mixed(
    weights: Float[Array, "regime"],
    means: Float[Array, "regime out"],
    covariances: Float[Array, "regime out out"],
) -> tuple[Float[Array, "out"], Float[Array, "out out"]]:
    """Return the mean and the covariance of a mixture."""
    mean = weights @ means
    shifts = means - mean[None]
    within = jnp.einsum("k,kij->ij", weights, covariances)
    return mean, within + jnp.einsum("k,ki,kj->ij", weights, shifts, shifts)


def _averaged(means: Array, covariances: Array) -> Marginals:
    """Return the moments of a mixture with one law per draw."""
    return moments_over_paths(
        means[:, None], covariances[:, None], jnp.ones((means.shape[0], 1), means.dtype)
    )


@eqx.filter_jit
def _forecast(
    model: SwitchingModel,
    terminal: Mixture,
    key: PRNGKey,
    us: Float[Array, "time input"] | None,
    lags: Float[Array, "lags"],
    num_times: int,
    num_samples: int,
) -> SwitchingForecast:
    count, exact = model.num_regimes, model.is_finite and not model.num_lags
    start_key, path_key = jax.random.split(key)
    zs, xs = _draw_last(terminal, start_key, num_samples)
    first = (zs, xs, jnp.broadcast_to(lags, (num_samples, *lags.shape)))

    def one(key: PRNGKey, z: Array, x: Array, lags: Array, law: Array, u: Any) -> tuple:
        regime_key, state_key, emission_key = jax.random.split(key, 3)
        log_row = model.regimes.log_transition(x, u)[z]
        row, z = jnp.exp(log_row), jax.random.categorical(regime_key, log_row)
        moments = (x, jnp.zeros((x.shape[0], x.shape[0]), x.dtype))
        if model.is_finite:
            y, laws = _step(model.emission, count, emission_key, lags, u, z)
            of_row = _mixed(law if exact else row, *laws)
        else:
            x, laws = _step(model.transition, count, state_key, x, u, z)
            moments = _mixed(row, *laws)
            y, of_row = _observed(model, emission_key, x, z, row, laws, u)
        lags = jnp.concatenate([y.astype(lags.dtype), lags])[: lags.shape[0]]
        return (z, x, lags), (z, x, y, row, *of_row, *moments)

    def move(state: tuple, at: tuple) -> tuple[tuple, tuple]:
        (paths, law), (key, u) = state, at
        if not model.regimes.takes_state:
            law = law @ jnp.exp(model.regimes.log_transition(u=u))
        keys = jax.random.split(key, num_samples)
        step = jax.vmap(lambda key, z, x, lags: one(key, z, x, lags, law, u))
        paths, drawn = step(keys, *paths)
        if model.regimes.takes_state:
            law = jnp.mean(drawn[3], axis=0)
        return (paths, law), (law, *drawn)

    law = terminal.probabilities(count)
    keys = jax.random.split(path_key, num_times)
    _, (laws, *drawn) = lax.scan(move, (first, law), (keys, us))
    zs, xs, ys, _, *moments = (jnp.swapaxes(leaf, 0, 1) for leaf in drawn)
    of_rows, of_states = _averaged(*moments[:2]), _averaged(*moments[2:])
    if exact:
        # All draws have the moments of the whole mixture: only rounding remains.
        of_rows = Marginals.exact(moments[0][0], moments[1][0])
    parts = [*jax.tree.leaves(of_rows), *jax.tree.leaves(of_states)]
    return SwitchingForecast(laws, zs, xs, ys, *parts)


def _observed(
    model: SwitchingModel,
    key: PRNGKey,
    x: Array,
    z: Int[Array, ""],
    row: Float[Array, "regime"],
    laws: tuple[Array, Array],
    u: Array | None,
) -> tuple[Array, tuple[Array, Array]]:
    """Draw an observation of a state; return its moments given the state before if they exist.

    Args:
        model: a model with a continuous state.
        key: a typed key.
        x: the drawn state.
        z: the drawn regime.
        row: the probabilities of the regimes given the path before.
        laws: the moments of the state in each regime, given the path before.
        u: the input.
    """
    count = model.num_regimes
    y, given_state = _step(model.emission, count, key, x, u, z)
    if all(isinstance(part, AbstractLinearGaussianKernel) for part in each(model.emission)):
        moments = over_regimes(
            model.emission,
            count,
            lambda part, mean, covariance: part.propagate(mean, covariance, u),
            *laws,
        )
        return y, _mixed(row, *moments)
    return y, jax.tree.map(lambda leaf: leaf[z], given_state)


def _step(
    part: Any, count: int, key: PRNGKey, x: Array, u: Array | None, z: Int[Array, ""]
) -> tuple[Array, tuple[Array, Array]]:
    """Draw from the kernel of regime z; return the moments in each regime as well."""

    def of_regime(part: Any) -> tuple[Array, Array, Array]:
        kernel = kernel_of_part(part)
        draw = kernel.sample(key, x, u).astype(x.dtype)
        return draw, *conditional_moments(kernel, x, u, draw)

    draws, means, covariances = over_regimes(part, count, of_regime)
    return draws[z], (means, covariances)


def _draw_last(terminal: Mixture, key: PRNGKey, num_samples: int) -> tuple[Array, Array]:
    """Draw regimes and states of the last row."""
    component_key, noise_key = jax.random.split(key)
    chosen = jax.random.categorical(component_key, terminal.log_weights, shape=(num_samples,))
    means, scales = terminal.means[chosen], terminal.scale_trils[chosen]
    noise = jax.random.normal(noise_key, means.shape, means.dtype)
    return terminal.regimes[chosen], means + jax.vmap(linalg.matvec)(scales, noise)


@eqx.filter_jit
def _complete(
    model: SwitchingModel, chain: SwitchingChain, key: PRNGKey, series: Series, num_samples: int
) -> Float[Array, "sample time obs"]:
    """Return observed entries, and draws of the others; NaN in rows that do not exist."""
    path_key, emission_key = jax.random.split(key)
    zs, xs = chain.sample(path_key, num_samples)
    if model.is_finite:
        lags = lagged(series.ys, model.num_lags)
        xs = jnp.broadcast_to(lags, (num_samples, *lags.shape))
    keys = jax.random.split(emission_key, zs.shape)

    def one(key: PRNGKey, z: Array, x: Array, row: Series) -> Array:
        def of_regime(part: Any) -> Array:
            return complete_row(kernel_of_part(part), key, x, row.ys, row.mask, row.inputs)

        return over_regimes(model.emission, model.num_regimes, of_regime)[z]

    ys = jax.vmap(jax.vmap(one), in_axes=(0, 0, 0, None))(keys, zs, xs, series.rows)
    if model.num_lags:
        given = jnp.arange(series.num_times) < model.num_lags
        ys = jnp.where(given[None, :, None], series.ys, ys)
    exists = series.exists()
    return ys if exists is None else jnp.where(exists[None, :, None], ys, jnp.nan)
