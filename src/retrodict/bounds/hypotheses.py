"""The hypotheses of Theorem 2: the local errors c_k of H1, the mixing constants of H2."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._arrays import Scalar, as_real_array, check_count, check_key
from retrodict._chains import LinearGaussianChain
from retrodict._exact import Grid, densities, kalman_smoother, log_prior
from retrodict._expectations import check_model, series_of_chain
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Gaussian,
    NonlinearGaussianKernel,
    Series,
    StateSpaceModel,
    check_densities,
    is_linear_gaussian,
    unwrap,
)
from retrodict.bounds.comparison import MISFIT
from retrodict.bounds.distances import twice_total_variation
from retrodict.bounds.grid_bounds import check_unpadded, law_on, likelihood_on, normalised


class Mixing(NamedTuple):
    """The mixing constants of H2 on a compact domain, and the rates that follow from them.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> mixing = rd.bounds.h2_constants(model, chain, rd.Grid([0.0], [2.0], 50))
        >>> bool(mixing.rho_bar < mixing.rho < 1)
        True

    Attributes:
        sigma_minus: σ₋, the least density of the transition and of the backward kernels.
        sigma_plus: σ₊, the largest; for Gaussian kernels of one scale the largest anywhere.
        rho: 1 − σ₋/σ₊, the rate of the paper.
        rho_bar: (σ₊ − σ₋) / (σ₊ + σ₋), the sharper one.
    """

    sigma_minus: Scalar
    sigma_plus: Scalar
    rho: Scalar
    rho_bar: Scalar


def h1_constants(
    model: StateSpaceModel,
    chain: LinearGaussianChain,
    ys: Any,
    *,
    grid: Grid | None = None,
    key: Any = None,
    num_samples: int = 1000,
    mask: Any = None,
    inputs: Any = None,
) -> Float[Array, "time"]:
    """Compute the c_k of H1, the distance of each step of a chain to a step of the exact filter.

    With the filtering laws q_k of the chain, c_0 = 2 TV(q_0, φ_0) and

        c_k = 2 TV(q_k ⊗ q_{k-1|k}, law of (x_{k-1}, x_k) given y_k, from x_{k-1} ~ q_{k-1}).

    For a linear-Gaussian model both laws are Gaussian and c_k is at most (2 KL)^½, by Pinsker. For
    others the laws are summed over a `grid` in one dimension, up to its error, or c_k is estimated
    by paths of the chain, which is not a bound.

    Example:
        >>> import jax.numpy as jnp, numpy as np, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> other = rd.models.local_level(level_scale=2.0, prior_scale=1.0)
        >>> chain = rd.kalman_smoother(other, ys).chain
        >>> print(np.array(rd.bounds.h1_constants(model, chain, ys)).round(2))
        [0.   0.79 1.08]

    Args:
        model: the model.
        chain: a linear-Gaussian chain.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        grid: points to sum over, for a model that is not linear Gaussian.
        key: a typed key, to estimate by sampling.
        num_samples: the number of pairs to draw at each time.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if a kernel takes them.

    Returns:
        c_0, …, c_{n-1}, none above 2.
    """
    check_unpadded(chain, "h1_constants")
    model = unwrap(model)
    check_model(model, chain, "h1_constants")
    series = series_of_chain(model, chain, ys, mask=mask, inputs=inputs)
    if is_linear_gaussian(model):
        return _in_closed_form(model, chain, series)
    if grid is not None:
        if grid.dim != 1 or model.state_dim != 1:
            raise ValueError("h1_constants sums over pairs of points in one dimension only.")
        constants, misfit = _over_grid(model, chain, series, grid)
        if not float(misfit) <= MISFIT:
            raise ValueError(
                f"The grid misses {float(misfit):.1g} of a law of the chain: widen or refine it."
            )
        return constants
    if key is None:
        raise ValueError(
            "h1_constants has no closed form for this model: pass a grid, or a key to estimate."
        )
    check_key(key, "h1_constants")
    return _by_sampling(model, chain, series, key, check_count(num_samples, "num_samples"))


def _rows_of(series: Series) -> tuple:
    return series.ys, series.mask, series.inputs


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _steps_of(chain: LinearGaussianChain, series: Series) -> tuple:
    """Return q_{k-1}, q_k, q_{k-1|k} and the row of time k, for each k ≥ 1."""
    later = jax.tree.map(lambda leaf: leaf[1:], (chain.laws, _rows_of(series)))
    earlier = jax.tree.map(lambda leaf: leaf[:-1], chain.laws)
    return earlier, later[0], chain.kernels, later[1]


@eqx.filter_jit
def _in_closed_form(
    model: StateSpaceModel, chain: LinearGaussianChain, series: Series
) -> Float[Array, "time"]:
    def posterior(prior: Gaussian, row: tuple, missing: int) -> LinearGaussianChain:
        """Condition on one row, after as many missing rows."""
        y, mask, u = row
        observed = jnp.ones(y.shape, bool) if mask is None else mask
        masks = jnp.stack([jnp.zeros_like(observed)] * missing + [observed])
        ys, us = jax.tree.map(lambda leaf: jnp.stack([leaf] * (missing + 1)), (y, u))
        started = StateSpaceModel(prior, model.transition, model.emission)
        return kalman_smoother(started, ys, mask=masks, inputs=us).chain

    def pair(before: Gaussian, after: Gaussian, kernel: Any, row: tuple) -> Array:
        exact = posterior(before, row, 1).pairwise()
        laws = jax.tree.map(lambda a, b: jnp.stack([a, b]), before, after)
        ours = LinearGaussianChain(laws, jax.tree.map(lambda leaf: leaf[None], kernel)).pairwise()
        return twice_total_variation(_first(ours), _first(exact))

    rest = jax.vmap(pair)(*_steps_of(chain, series))
    filtered = posterior(model.prior, _first(_rows_of(series)), 0).terminal  # pyright: ignore
    return jnp.append(twice_total_variation(_first(chain.laws), filtered), rest)


@eqx.filter_jit
def _over_grid(
    model: StateSpaceModel, chain: LinearGaussianChain, series: Series, grid: Grid
) -> tuple[Float[Array, "time"], Scalar]:
    """Return the constants, and the largest misfit of a filtering law or mean backward kernel."""
    points, quadrature = grid.points, jnp.exp(grid.log_quadrature)

    def twice_distance(p: Array, q: Array) -> Array:
        return jnp.sum(jnp.abs(p - q))

    def step(at: tuple) -> tuple[Array, Array]:
        before, after, kernel, row = at
        (earlier, _), (law, law_misfit) = law_on(grid, before), law_on(grid, after)
        ours = law[:, None] * densities(kernel, points, points, None) * quadrature[None, :]
        exact = densities(model.transition, points, points, row[2]) * quadrature[None, :]
        exact = (earlier[:, None] * exact * likelihood_on(grid, model, row)[None, :]).T
        ours, misfit = normalised(ours)
        return twice_distance(ours, normalised(exact)[0]), jnp.maximum(misfit, law_misfit)

    rest, misfits = lax.map(step, _steps_of(chain, series))
    prior = jnp.exp(log_prior(model, points)) * quadrature
    exact, _ = normalised(prior * likelihood_on(grid, model, _first(_rows_of(series))))
    law, misfit = law_on(grid, _first(chain.laws))
    first = twice_distance(law, exact)
    return jnp.append(first, rest), jnp.maximum(misfit, jnp.max(misfits, initial=0.0))


@eqx.filter_jit
def _by_sampling(
    model: StateSpaceModel, chain: LinearGaussianChain, series: Series, key: Any, num_samples: int
) -> Float[Array, "time"]:
    """Estimate 2 TV = E_q|1 − p/q|, with the ratios scaled to a mean of one."""

    def distance(log_ratio: Callable[[Any], Array], key: Any) -> Array:
        log_ratios = jax.vmap(log_ratio)(jax.random.split(key, num_samples))
        ratios = jnp.exp(log_ratios - jnp.max(log_ratios))
        return jnp.mean(jnp.abs(1.0 - ratios / jnp.mean(ratios)))

    def log_emission(x: Array, row: tuple) -> Scalar:
        y, mask, u = row
        return model.emission.log_prob(x, y, u, mask)

    def pairs(key: Any, before: Gaussian, after: Gaussian, kernel: Any, row: tuple) -> Array:
        def log_ratio(key: Any) -> Array:
            now_key, past_key = jax.random.split(key)
            x = after.sample(now_key)
            past = kernel.sample(past_key, x)
            exact = before.log_prob(past) + model.transition.log_prob(past, x, row[2])
            return exact + log_emission(x, row) - after.log_prob(x) - kernel.log_prob(x, past)

        return distance(log_ratio, key)

    def initial(key: Any, law: Gaussian, row: tuple) -> Array:
        def log_ratio(key: Any) -> Array:
            x = law.sample(key)
            prior = jnp.sum(jnp.asarray(model.prior.log_prob(x)))
            return prior + log_emission(x, row) - law.log_prob(x)

        return distance(log_ratio, key)

    keys = jax.random.split(key, chain.num_times)
    rest = jax.vmap(pairs)(keys[1:], *_steps_of(chain, series))
    return jnp.append(initial(keys[0], *_first((chain.laws, _rows_of(series)))), rest)


def h2_constants(
    model: StateSpaceModel,
    chain: LinearGaussianChain,
    domain: Grid,
    *,
    inputs: Any = None,
) -> Mixing:
    """Compute σ₋ and σ₊ of H2: the least and the largest density over the points of a domain.

    The densities are those of the transition and of every backward kernel, with respect to Lebesgue
    measure on the box. Likelihoods may be scaled freely and do not count. On the whole space σ₋
    would be zero and the hypothesis would fail.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> chain = rd.kalman_smoother(model, ys).chain
        >>> mixing = rd.bounds.h2_constants(model, chain, rd.Grid([0.0], [2.0], 50))
        >>> f"{float(mixing.sigma_minus):.3f}, {float(mixing.sigma_plus):.3f}"
        '0.011, 0.691'

    Args:
        model: the model.
        chain: a linear-Gaussian chain.
        domain: a grid over the compact domain.
        inputs: inputs of shape `(time, input)`, if the transition takes them.
    """
    if not isinstance(domain, Grid):
        raise TypeError(f"h2_constants expects a Grid as its domain, got {type(domain).__name__}.")
    check_unpadded(chain, "h2_constants")
    model = unwrap(model)
    check_densities(model, "h2_constants", ("transition",))
    if domain.dim != model.state_dim:
        raise ValueError(
            f"The domain has {domain.dim} dimensions, and the state {model.state_dim}."
        )
    if model.transition.takes_input and inputs is None:
        raise ValueError("The transition takes inputs: pass inputs of shape (time, input).")
    us = None if inputs is None else as_real_array(inputs, "inputs")
    return _extremes(model, chain, domain, us)


@eqx.filter_jit
def _extremes(
    model: StateSpaceModel, chain: LinearGaussianChain, domain: Grid, inputs: Array | None
) -> Mixing:
    points = domain.points

    def of(kernel: Any, u: Array | None) -> tuple[Array, Array]:
        table = densities(kernel, points, points, u)
        largest = jnp.max(table)
        if isinstance(kernel, (AbstractLinearGaussianKernel, NonlinearGaussianKernel)):
            # The density at the mean, which may be between the points.
            law: Any = kernel.law(points[0], u)
            largest = jnp.exp(law.log_prob(law.mean))
        return jnp.min(table), largest

    low, high = lax.map(lambda kernel: of(kernel, None), chain.kernels)
    if inputs is not None and model.transition.takes_input:
        lows, highs = lax.map(lambda u: of(model.transition, u), inputs[1:])
    else:
        lows, highs = of(model.transition, None)
    minus = jnp.minimum(jnp.min(low), jnp.min(lows))
    plus = jnp.maximum(jnp.max(high), jnp.max(highs))
    return Mixing(minus, plus, 1.0 - minus / plus, (plus - minus) / (plus + minus))
