"""Apply a run with regimes to a table: smoothed regimes and states, forecasts, imputations."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import retrodict as rd
from retrodict import data, models
from retrodict.runs._record import RunError

REASONS = {
    "exact": "The regimes are the only hidden state: the forward–backward algorithm is exact.",
    "gpb2": "Regimes and states are smoothed by GPB2, which merges the Gaussians of each regime.",
}

NUM_PATHS = 1000
"""Paths per series for quantiles of states."""


class SmoothedRegimes(eqx.Module):
    """Smoothed probabilities of regimes and moments of states; arrays have a leading axis `batch`.

    Attributes:
        probabilities: P(z_k = j) given the whole series.
        mean: means of the states; without a continuous state there are no coordinates.
        covariance: their covariances at each time.
        mean_standard_error: the Monte Carlo error of `mean`; zero if it is exact.
        probabilities_standard_error: the same for `probabilities`.
        pairs: P(z_{k-1} = i, z_k = j), of the states of the chain.
        chain: the law of whole paths.
        key: the keys of drawn paths, one per series.
        method: `"exact"` or `"gpb2"`.
    """

    probabilities: Float[Array, "batch time regime"]
    mean: Float[Array, "batch time state"]
    covariance: Float[Array, "batch time state state"]
    mean_standard_error: Float[Array, "batch time state"]
    probabilities_standard_error: Float[Array, "batch time regime"]
    pairs: Float[Array, "batch moves earlier later"]
    chain: rd.switching.SwitchingChain
    draw_key: Any
    method: Literal["exact", "gpb2"] = eqx.field(static=True)

    @property
    def trustworthy(self) -> bool:
        """Whether the answer is exact."""
        return self.method == "exact"

    @property
    def reason(self) -> str:
        """How the answer was computed."""
        return REASONS[self.method]

    def quantile(self, probability: float) -> Float[Array, "batch time state"]:
        """Return a quantile of each coordinate of the state, over drawn paths."""
        return _quantile(self.chain, self.draw_key, probability)


@eqx.filter_jit
def _quantile(chain: Any, keys: Any, probability: float) -> Array:
    def one(key: Any, chain: Any) -> Array:
        _, xs = chain.sample(key, NUM_PATHS)
        return jnp.quantile(xs, probability, axis=0) if xs.shape[-1] else xs[0]

    return eqx.filter_vmap(one)(keys, chain)


@eqx.filter_jit
def posterior_of(
    model: rd.switching.SwitchingModel, ys: Any, mask: Any, us: Any, length: Any
) -> rd.switching.SwitchingPosterior:
    """Return the posterior of each series of a batch, by the smoother that runs use."""
    smoother: Any = rd.switching.forward_backward if model.is_finite else rd.switching.gpb2_smoother

    def one(ys: Any, mask: Any, us: Any, length: Any) -> Any:
        return smoother(model, ys, mask=mask, inputs=us, length=length)

    return eqx.filter_vmap(one)(ys, mask, us, length)


def smooth(
    model: rd.switching.SwitchingModel, table: data.Table, num_samples: int, seed: int
) -> SmoothedRegimes:
    """Smooth the regimes and states of each series given all its rows.

    Args:
        model: the model of a run.
        table: the data.
        num_samples: the number of paths for moments without a closed form.
        seed: the random seed.
    """
    refuse_series(model, table)
    plain = rd.unwrap(model)
    keys = jax.random.split(jax.random.key(seed), table.num_series)
    ys = np.where(table.mask, table.ys, 0.0)
    chain = posterior_of(plain, ys, table.mask, table.inputs, table.length).chain
    moments = eqx.filter_jit(
        eqx.filter_vmap(lambda key, chain: chain.marginals(key, num_samples=num_samples))
    )(keys, chain)
    return SmoothedRegimes(
        rd.switching.base_probabilities(plain, moments.probabilities),
        moments.mean,
        moments.covariance,
        moments.mean_standard_error,
        rd.switching.base_probabilities(plain, moments.probabilities_standard_error),
        moments.pairs,
        chain,
        jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys),
        "exact" if plain.is_finite else "gpb2",
    )


def by_regressions(model: rd.switching.SwitchingModel) -> bool:
    """Return whether the parameters are learned by regressions (EM), not by the gradient.

    The parameters of ready models with names are tied across regimes and follow the gradient of the
    evidence, as those of finite models do.
    """
    return not model.is_finite and models.canonical_order(model) is None


def refuse_series(model: rd.switching.SwitchingModel, table: data.Table) -> None:
    """Refuse series that the model does not fit, such as gaps where it needs every row.

    Raises:
        RunError: with the reason.
    """
    if not model.num_lags:
        return
    for i in range(table.num_series):
        try:
            model.series(**table.one(i))
        except ValueError as error:
            name = "" if table.series is None else f", series {table.series[i]!r}"
            raise RunError(f"{table.source}{name}: {error}") from error


@eqx.filter_jit
def forecast_rows(
    model: rd.switching.SwitchingModel,
    keys: Any,
    chain: Any,
    ys: Any,
    num_times: int,
    inputs: Any,
    num_samples: int,
) -> rd.switching.SwitchingForecast:
    """Forecast the rows after each series; arrays have a leading axis for the series."""

    def one(key: Any, chain: Any, ys: Any, us: Any) -> Any:
        ahead = rd.switching.forecast(
            key, model, chain, num_times, observed=ys, inputs=us, num_samples=num_samples
        )
        of_regimes = rd.switching.base_probabilities(model, ahead.probabilities)
        return eqx.tree_at(lambda result: result.probabilities, ahead, of_regimes)

    return eqx.filter_vmap(one)(keys, chain, ys, inputs)


@eqx.filter_jit
def replicates(
    model: rd.switching.SwitchingModel, keys: Any, chain: Any, ys: Any, us: Any, num_samples: int
) -> Float[Array, "batch sample time obs"]:
    """Draw replicates of each series along its smoothed regimes and states."""

    def one(key: Any, chain: Any, ys: Any, us: Any) -> Array:
        return rd.switching.predictive(key, model, chain, num_samples, observed=ys, inputs=us)

    return eqx.filter_vmap(one)(keys, chain, ys, us)


@eqx.filter_jit
def drawn_states(
    keys: Any, chain: Any, num_samples: int
) -> Float[Array, "batch sample time state"]:
    """Draw paths of the states of each series."""
    return eqx.filter_vmap(lambda key, chain: chain.sample(key, num_samples)[1])(keys, chain)


@eqx.filter_jit
def completed(
    model: rd.switching.SwitchingModel,
    keys: Any,
    chain: Any,
    ys: Any,
    mask: Any,
    us: Any,
    length: Any,
    num_samples: int,
) -> Float[Array, "batch sample time obs"]:
    """Draw each series with its missing entries filled in."""

    def one(key: Any, chain: Any, ys: Any, mask: Any, us: Any, length: Any) -> Array:
        return rd.switching.impute(
            key, model, chain, ys, num_samples, mask=mask, inputs=us, length=length
        )

    return eqx.filter_vmap(one)(keys, chain, ys, mask, us, length)


@eqx.filter_jit
def drawn_ahead(
    model: rd.switching.SwitchingModel, key: Any, chain: Any, ys: Any, us: Any, num_samples: int
) -> Float[Array, "later sample obs"]:
    """Draw each row of one series, but the first, given the rows before it."""
    count = ys.shape[0] - 1
    later = None if us is None else us[1:]

    def one(key: Any, length: Any, u: Any) -> Array:
        before = rd.switching.SwitchingChain(chain.laws, chain.moves, length)
        inputs = None if u is None else u[None]
        ahead = rd.switching.forecast(
            key, model, before, 1, observed=ys, inputs=inputs, num_samples=num_samples
        )
        return ahead.observations[:, 0]

    lengths = jnp.arange(1, count + 1)
    return eqx.filter_vmap(one)(jax.random.split(key, count), lengths, later)
