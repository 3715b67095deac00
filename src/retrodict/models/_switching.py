"""Switching models: Markov switching, hidden Markov models, and levels with regimes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from retrodict._arrays import PRNGKey, check_count
from retrodict._model import (
    Diagonal,
    Gaussian,
    LinearGaussianKernel,
    Positive,
    StationaryCoefficients,
    unwrap,
)
from retrodict.models._by_regime import (
    ByRegime,
    StationaryRegimes,
    SwitchingNoise,
    SwitchingNormal,
    SwitchingPoisson,
    SwitchingWalk,
    TransitionProbabilities,
    num_base_regimes,
)
from retrodict.models._equations import diffuse, real
from retrodict.models._registry import ready
from retrodict.models._start import (
    PRIOR_WIDTH,
    Sample,
    autocorrelation,
    centre,
    differences,
    first,
    spread,
)
from retrodict.switching import Regimes, SwitchingModel

STAY = 0.9
"""The starting probability of staying in a regime."""

MAX_STATES = 1024
"""The largest number of states of the chain, whose pairs are enumerated for each row."""

WIDEST = 2.0
"""Scales of regimes start between the spread of the data over this factor, and times it."""


def _regimes(count: int, order: int = 0) -> StationaryRegimes:
    """Return regimes that start with `STAY` on the diagonal."""
    matrix = np.ones((1, 1))
    if count > 1:
        matrix = np.full((count, count), (1.0 - STAY) / (count - 1))
        np.fill_diagonal(matrix, STAY)
    return StationaryRegimes(TransitionProbabilities(matrix), order)


def _what_switches(switching: str, allowed: tuple[str, ...], regimes: int) -> set[str]:
    """Return the names in `switching`, a text with commas; refuse others."""
    names = {name.strip() for name in switching.split(",")} - {""}
    if not names or not names <= set(allowed):
        raise ValueError(
            f"`switching` must name one or more of {', '.join(allowed)}, separated by commas, got"
            f" {switching!r}."
        )
    check_count(regimes, "regimes")
    return names


def _refuse_lags(names: set[str], order: int, regimes: int) -> None:
    """Refuse orders that the parts that switch do not allow."""
    if order < 0:
        raise ValueError(f"`order` must be at least 0, got {order}.")
    if "autoregression" in names and not order:
        raise ValueError(
            "An autoregression that switches needs lags: set `order` to 1 or more, or leave"
            " autoregression out of `switching`."
        )
    if {"mean", "intercept"} <= names:
        raise ValueError("`switching` may name mean or intercept, not both.")
    if "mean" in names and regimes ** (order + 1) > MAX_STATES:
        raise ValueError(
            f"{regimes} regimes with `order` {order} are {regimes}^{order + 1} states, more than"
            f" {MAX_STATES}: use a smaller order, or switching=intercept, which needs {regimes}."
        )


def _per_regime(value: Any, switches: bool, count: int, *shape: int) -> Array:
    """Return a parameter with an axis `regime` if it switches."""
    return real(value, *((count, *shape) if switches else shape))


def levels_of(count: int) -> np.ndarray:
    """Return `count` numbers from −1 to 1; zero for one regime."""
    return np.linspace(-1.0, 1.0, count) if count > 1 else np.zeros(1)


def start_normal(model: SwitchingModel, sample: Sample) -> dict[str, Any]:
    """Return starting values: levels between quantiles, and scales around the spread."""
    equation: Any = model.emission.fn
    name = "intercept" if equation.mean is None else "mean"
    level, scales = getattr(equation, name), spread(sample.ys)
    values: dict[str, Any] = {name: centre(sample.ys)}
    if unwrap(level).ndim == 2:
        values[name] = _group_means(sample.ys, equation.num_regimes)
        scales = 0.7 * scales
    switches = unwrap(equation.scale).ndim == 2
    factors = WIDEST ** levels_of(equation.num_regimes)[:, None]
    values["scale"] = factors * scales if switches else scales
    if equation.coefficients is not None:
        order = unwrap(equation.coefficients).shape[-1]
        half = 0.5 * autocorrelation(sample.ys)
        values["coefficients"] = np.pad(half[:, None], ((0, 0), (0, order - 1)))
        if name == "intercept":
            values[name] = values[name] * (1 - half)
    return values


def _group_means(ys: np.ndarray, count: int) -> np.ndarray:
    """Return the mean of each of `count` groups of equal size of each column, by their order."""
    columns = []
    for column in ys.reshape(-1, ys.shape[-1]).T:
        values = np.sort(column[np.isfinite(column)])
        groups = np.array_split(values, count)
        # More regimes than values: quantiles are defined where groups are empty.
        levels = np.quantile(values, (np.arange(count) + 0.5) / count) if values.size else None
        columns.append(
            np.zeros(count)
            if levels is None
            else [g.mean() if g.size else q for g, q in zip(groups, levels, strict=True)]
        )
    return np.stack(columns, axis=1)


def start_hmm(model: SwitchingModel, sample: Sample) -> dict[str, Any]:
    """Return starting values of means and scales, or of rates."""
    if isinstance(model.emission.fn, SwitchingNormal):
        return start_normal(model, sample)
    rates = _group_means(sample.ys, num_base_regimes(model))
    least = 0.1 * np.maximum(centre(sample.ys), 0.1)
    return {"rate": np.maximum(rates, least)}


def start_level(model: SwitchingModel, sample: Sample) -> dict[str, Any]:
    """Return starting values: scales from differences in time, and drifts around their mean."""
    walk: Any = model.transition.fn
    noise: Any = model.emission.fn
    steps = differences(sample.ys)
    moves, levels = spread(steps), levels_of(num_base_regimes(model))[:, None]
    values: dict[str, Any] = {
        "prior.mean": first(sample.ys),
        "prior.scale_tril.std": PRIOR_WIDTH * spread(sample.ys),
    }
    for name, node, share in (
        ("level_scale", walk.level_scale, math.sqrt(0.5)),
        ("obs_scale", noise.obs_scale, 0.5),
    ):
        switches = unwrap(node).ndim == 2
        values[name] = share * moves * (WIDEST ** (2 * levels) if switches else 1.0)
    if walk.drift is not None:
        values["drift"] = centre(steps) + levels * moves
    return values


def start_nothing(model: SwitchingModel, sample: Sample) -> dict[str, Any]:
    """Return no starting values: a fit computes them by `retrodict.switching.initialise`."""
    return {}


@ready("regimes with their own mean, variance or autoregression", start_normal)
def markov_switching(
    *,
    regimes: int = 2,
    order: int = 0,
    switching: str = "mean",
    obs_dim: int = 1,
) -> SwitchingModel:
    """Build an autoregression whose parameters switch with a Markov chain of regimes.

        y_t = mean_{z_t} + scale_{z_t} ε_t
              + Σ_{i=1}^p coefficients_{z_t,i} (y_{t-i} − mean_{z_{t-i}})

    A mean that switches depends on the regimes of the last p rows (Hamilton 1989), so that the
    chain has regimes^(p+1) states. With `intercept` in place of `mean`, lags are not centred, and
    the chain has as many states as regimes. The regimes start in their stationary law. With lags,
    the first `order` rows are conditioned on, and no row may be missing.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.markov_switching(regimes=2, switching="mean,variance")
        >>> {name: value.shape for name, value in rd.models.named_parameters(model).items()}
        {'transition': (2, 2), 'mean': (2, 1), 'scale': (2, 1)}

    Args:
        regimes: the number of regimes.
        order: the number p of lags.
        switching: what switches: one or more of `mean` or `intercept`, `variance` and
            `autoregression`, separated by commas; all regimes share the rest.
        obs_dim: the number of columns, which share the regime.
    """
    obs_dim = check_count(obs_dim, "obs_dim")
    allowed = ("mean", "intercept", "variance", "autoregression")
    names = _what_switches(switching, allowed, regimes)
    _refuse_lags(names, order, regimes)
    level = np.broadcast_to(levels_of(regimes)[:, None], (regimes, obs_dim))
    coefficients = None
    if order:
        shape = (regimes, obs_dim, order) if "autoregression" in names else (obs_dim, order)
        coefficients = StationaryCoefficients(np.zeros(shape))
    mean = None if "intercept" in names else real(0.0, obs_dim)
    memory = order if "mean" in names else 0
    law = _regimes(regimes, memory)
    equation = SwitchingNormal(
        real(level, regimes, obs_dim) if "mean" in names else mean,
        real(level, regimes, obs_dim) if "intercept" in names else None,
        Positive(_per_regime(1.0, "variance" in names, regimes, obs_dim)),
        coefficients,
        regimes,
        tuple(map(tuple, law.value.digits.tolist())),
        "markov_switching",
    )
    return SwitchingModel(regimes=law, emission=ByRegime(equation), num_lags=order)


@ready("a hidden Markov model with normal or Poisson rows", start_hmm)
def hmm(*, regimes: int = 2, emission: str = "gaussian", obs_dim: int = 1) -> SwitchingModel:
    """Build a hidden Markov model: rows are independent given the regimes.

        y_t ~ N(mean_z, scale_z²)  or  y_t ~ Poisson(rate_z),   z = z_t

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.hmm(regimes=3, emission="poisson")
        >>> rd.models.named_parameters(model)["rate"].shape
        (3, 1)

    Args:
        regimes: the number of regimes.
        emission: `gaussian` or `poisson`.
        obs_dim: the number of columns, which are independent given the regime.
    """
    obs_dim, regimes = check_count(obs_dim, "obs_dim"), check_count(regimes, "regimes")
    levels = np.broadcast_to(levels_of(regimes)[:, None], (regimes, obs_dim))
    if emission == "gaussian":
        scale = Positive(np.ones((regimes, obs_dim)))
        mean = real(levels, regimes, obs_dim)
        histories = tuple((regime,) for regime in range(regimes))
        equation = SwitchingNormal(mean, None, scale, None, regimes, histories, "hmm")
    elif emission == "poisson":
        equation = SwitchingPoisson(Positive(WIDEST**levels), regimes)
    else:
        raise ValueError(f"`emission` must be gaussian or poisson, got {emission!r}.")
    return SwitchingModel(regimes=_regimes(regimes), emission=ByRegime(equation))


@ready("a random walk whose noise or drift has regimes, observed with noise", start_level)
def switching_level(
    *,
    regimes: int = 2,
    switching: str = "level_scale",
    obs_dim: int = 1,
    prior_mean: Any = 0.0,
    prior_scale: Any = 1e3,
) -> SwitchingModel:
    """Build a random walk observed with noise, whose scales or drift switch with the regime.

        x_t = x_{t-1} + drift_z + level_scale_z η_t,    y_t = x_t + obs_scale_z ε_t,   z = z_t

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.switching_level(switching="drift")
        >>> sorted(rd.models.named_parameters(model))
        ['drift', 'level_scale', 'obs_scale', 'transition']

    Args:
        regimes: the number of regimes.
        switching: what switches: one or more of `level_scale`, `obs_scale` and `drift`, separated
            by commas. There is no drift unless it switches.
        obs_dim: the number of columns, each with its own level; they share the regime.
        prior_mean: the mean of the first level; not learned.
        prior_scale: its scale, wide but finite; not learned.
    """
    obs_dim = check_count(obs_dim, "obs_dim")
    names = _what_switches(switching, ("level_scale", "obs_scale", "drift"), regimes)
    factors = WIDEST ** (2 * levels_of(regimes)[:, None])

    def scale(name: str) -> Positive:
        switches = name in names
        return Positive(_per_regime(factors if switches else 1.0, switches, regimes, obs_dim))

    drift = None
    if "drift" in names:
        drift = real(levels_of(regimes)[:, None], regimes, obs_dim)
    return SwitchingModel(
        _regimes(regimes),
        ByRegime(SwitchingNoise(scale("obs_scale"), regimes)),
        diffuse(prior_mean, prior_scale, obs_dim),
        ByRegime(SwitchingWalk(scale("level_scale"), drift, regimes)),
    )


@ready("linear dynamics whose regime depends on the state", start_nothing)
def recurrent_switching(
    *, key: PRNGKey, regimes: int = 3, latent_dim: int = 2, obs_dim: int = 1
) -> SwitchingModel:
    """Build a recurrent switching model: the state selects the next linear dynamics.

        p(z_t = j | z_{t-1} = i, x_{t-1}) ∝ exp(A_ij + R_j x_{t-1})
        x_t = W_z x_{t-1} + b_z + s_z η_t,    y_t = C x_t + d + obs_scale ε_t,   z = z_t

    Example:
        >>> import jax, retrodict as rd
        >>> model = rd.models.recurrent_switching(key=jax.random.key(0), obs_dim=5)
        >>> model.num_regimes, model.state_dim
        (3, 2)

    Args:
        key: a typed key for the starting values.
        regimes: the number of regimes.
        latent_dim: the dimension of the state.
        obs_dim: the number of columns.
    """
    obs_dim, latent_dim = check_count(obs_dim, "obs_dim"), check_count(latent_dim, "latent_dim")
    regimes = check_count(regimes, "regimes")
    keys = jax.random.split(key, 4)
    eye, zeros = jnp.eye(latent_dim), jnp.zeros(latent_dim)
    turns = 0.1 * jax.random.normal(keys[0], (regimes, latent_dim, latent_dim))
    shifts = 0.1 * jax.random.normal(keys[1], (regimes, latent_dim))
    weights = jax.random.normal(keys[2], (regimes, latent_dim))
    loading = jax.random.normal(keys[3], (obs_dim, latent_dim)) / math.sqrt(latent_dim)

    def noise(scale: float, dim: int) -> Diagonal:
        return Diagonal(Positive(np.full(dim, scale)))

    return SwitchingModel(
        Regimes(jnp.zeros(regimes), jnp.log(STAY / (1 - STAY)) * jnp.eye(regimes), weights),
        LinearGaussianKernel(loading, jnp.zeros(obs_dim), noise(0.3, obs_dim)),
        Gaussian(zeros, noise(1.0, latent_dim)),
        [
            LinearGaussianKernel(0.95 * eye + turn, shift, noise(0.1, latent_dim))
            for turn, shift in zip(turns, shifts, strict=True)
        ],
    )
