"""Counts: Poisson, negative-binomial and binomial laws around a latent log rate or log odds."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._kernels import DistributionKernel
from retrodict._model import StateSpaceModel
from retrodict._validate import check_count
from retrodict.models._equations import (
    AbstractNamed,
    MeanReverting,
    Structural,
    diffuse,
    kernel_of,
    persistent,
    positive,
    real,
    stationary_unless,
)
from retrodict.models._start import Sample


class PoissonLaw(AbstractNamed):
    """The law Poisson(e exp(x)), with exposure e the last input or 1."""

    def __call__(self, x: Float[Array, "obs"], u: Float[Array, "input"] | None = None) -> Any:
        """Return the law of independent counts, one per coordinate of the state."""
        return _numpyro().Poisson(_exposed(x, u))


class NegativeBinomialLaw(AbstractNamed):
    """Counts of mean m = e exp(x) and variance m + m² / concentration.

    Attributes:
        concentration: the concentration, of shape `(obs,)`.
    """

    concentration: Any

    def __call__(self, x: Float[Array, "obs"], u: Float[Array, "input"] | None = None) -> Any:
        """Return the law of independent counts, one per coordinate of the state."""
        return _numpyro().NegativeBinomial2(_exposed(x, u), self.concentration)


class BinomialLaw(AbstractNamed):
    """The law Binomial(n, 1 / (1 + exp(−x))), with n fixed or the last input.

    Attributes:
        total_count: n, or `None` if it is an input.
    """

    total_count: int | None = eqx.field(static=True)

    def __call__(self, x: Float[Array, "obs"], u: Float[Array, "input"] | None = None) -> Any:
        """Return the law of independent counts, one per coordinate of the state."""
        total = self.total_count if u is None else u[-1]
        # numpyro samples with integers only.
        total = jnp.broadcast_to(jnp.rint(jnp.asarray(total)).astype(int), x.shape)
        return _numpyro().Binomial(total, logits=x)


def poisson_counts(
    *,
    walk: bool = False,
    exposure: bool = False,
    obs_dim: int = 1,
    irregular: bool = False,
    mean: Any = 0.0,
    persistence: Any = 0.9,
    scale: Any = 0.3,
    prior_mean: Any = None,
    prior_scale: Any = None,
) -> StateSpaceModel:
    """Build Poisson counts whose log rate is an AR(1) process or a random walk.

        x_t = mean + persistence (x_{t-1} − mean) + scale η_t,    y_t ~ Poisson(e_t exp(x_t))

    Args:
        walk: whether the log rate is a random walk, x_t = x_{t-1} + level_scale η_t.
        exposure: whether exposures e_t > 0 are the last input; otherwise they are 1.
        obs_dim: the number of columns, each with its own log rate.
        irregular: whether times are irregular; the step is then the first input.
        mean: the starting value of the mean of the log rate.
        persistence: the starting value of its persistence, between −1 and 1, or 0 and 1 if
            irregular.
        scale: the starting value of the scale of its innovations or, for a walk, of its steps.
        prior_mean: the mean of a Gaussian law of the first log rate; not learned. Without
            it and prior_scale an AR(1) process starts from its stationary law, which follows its
            parameters during learning.
        prior_scale: the scale of that law, by default 3 for a walk; not learned.
    """
    emission = DistributionKernel(PoissonLaw(), takes_input=exposure)
    starts = (mean, persistence, scale, prior_mean, prior_scale)
    return _counts("poisson_counts", walk, obs_dim, irregular, starts, emission)


def negative_binomial_counts(
    *,
    walk: bool = False,
    exposure: bool = False,
    obs_dim: int = 1,
    irregular: bool = False,
    mean: Any = 0.0,
    persistence: Any = 0.9,
    scale: Any = 0.3,
    concentration: Any = 10.0,
    prior_mean: Any = None,
    prior_scale: Any = None,
) -> StateSpaceModel:
    """Build overdispersed counts: mean m_t = e_t exp(x_t), variance m_t + m_t² / k.

        x_t = mean + persistence (x_{t-1} − mean) + scale η_t,    y_t ~ NB(m_t, k)

    Args:
        walk: whether the log rate is a random walk, x_t = x_{t-1} + level_scale η_t.
        exposure: whether exposures e_t > 0 are the last input; otherwise they are 1.
        obs_dim: the number of columns, each with its own log rate.
        irregular: whether times are irregular; the step is then the first input.
        mean: the starting value of the mean of the log rate.
        persistence: the starting value of its persistence, between −1 and 1, or 0 and 1 if
            irregular.
        scale: the starting value of the scale of its innovations or, for a walk, of its steps.
        concentration: the starting value of k; the counts are Poisson in the limit k → ∞.
        prior_mean: the mean of a Gaussian law of the first log rate; not learned. Without
            it and prior_scale an AR(1) process starts from its stationary law, which follows its
            parameters during learning.
        prior_scale: the scale of that law, by default 3 for a walk; not learned.
    """
    law = NegativeBinomialLaw(positive(concentration, check_count(obs_dim, "obs_dim")))
    emission = DistributionKernel(law, takes_input=exposure)
    starts = (mean, persistence, scale, prior_mean, prior_scale)
    return _counts("negative_binomial_counts", walk, obs_dim, irregular, starts, emission)


def binomial_counts(
    *,
    total_count: int = 0,
    walk: bool = False,
    obs_dim: int = 1,
    irregular: bool = False,
    mean: Any = 0.0,
    persistence: Any = 0.9,
    scale: Any = 0.3,
    prior_mean: Any = None,
    prior_scale: Any = None,
) -> StateSpaceModel:
    """Build the number of successes of n_t trials; log odds are an AR(1) process or a random walk.

        x_t = mean + persistence (x_{t-1} − mean) + scale η_t
        y_t ~ Binomial(n_t, 1 / (1 + exp(−x_t)))

    Args:
        total_count: n, the same at all times; 0 if n_t is the last input.
        walk: whether the log odds are a random walk, x_t = x_{t-1} + level_scale η_t.
        obs_dim: the number of columns, each with its own log odds.
        irregular: whether times are irregular; the step is then the first input.
        mean: the starting value of the mean of the log odds.
        persistence: the starting value of their persistence, between −1 and 1, or 0 and 1 if
            irregular.
        scale: the starting value of the scale of their innovations or, for a walk, of its steps.
        prior_mean: the mean of a Gaussian law of the first log odds; not learned. Without
            it and prior_scale an AR(1) process starts from its stationary law, which follows its
            parameters during learning.
        prior_scale: the scale of that law, by default 3 for a walk; not learned.
    """
    if total_count < 0:
        raise ValueError(f"`total_count` must be at least 0, got {total_count}.")
    law = BinomialLaw(total_count if total_count else None)
    emission = DistributionKernel(law, takes_input=not total_count)
    starts = (mean, persistence, scale, prior_mean, prior_scale)
    return _counts("binomial_counts", walk, obs_dim, irregular, starts, emission)


def _counts(
    kind: str,
    walk: bool,
    obs_dim: int,
    irregular: bool,
    starts: tuple[Any, ...],
    emission: DistributionKernel,
) -> StateSpaceModel:
    obs_dim = check_count(obs_dim, "obs_dim")
    _numpyro()
    mean, persistence, scale, prior_mean, prior_scale = starts
    if walk:
        equation = Structural(positive(scale, obs_dim), kind=kind, continuous=irregular)
        prior = diffuse(
            mean if prior_mean is None else prior_mean,
            3.0 if prior_scale is None else prior_scale,
            obs_dim,
        )
    else:
        equation = MeanReverting(
            real(mean, obs_dim),
            persistent(persistence, obs_dim, irregular),
            positive(scale, obs_dim),
            kind=kind,
            continuous=irregular,
        )
        prior = stationary_unless(prior_mean, prior_scale, equation, obs_dim)
    return StateSpaceModel(prior, kernel_of(equation, irregular), emission)


def start_counts(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values from the mean and the overdispersion of the counts."""
    equation: Any = model.transition.fn
    law: Any = model.emission.fn
    ys = sample.ys
    _refuse_unless_counts(ys)
    # The exposure of each row, an array that broadcasts over columns.
    exposed = np.ones((1, 1, 1))
    if model.emission.takes_input and sample.inputs is not None:
        exposed = np.maximum(sample.inputs[:, :, -1:], 1e-12)
    starts: dict[str, Any] = {}
    if isinstance(law, BinomialLaw):
        total = exposed if law.total_count is None else np.full((1, 1, 1), float(law.total_count))
        _refuse_more_than(total, ys)
        values = np.log((ys + 0.5) / (np.maximum(total - ys, 0) + 0.5))
        means = np.asarray([_mean(column) for column in sample.columns(values)])
        spreads = np.sqrt(
            np.clip([_variance(column) for column in sample.columns(values)], 0.05, 4)
        )
    else:
        rates = sample.columns(ys / exposed)
        typical = np.asarray([max(_mean(column), 1e-2) for column in rates])
        noise = np.asarray([_mean(c) for c in sample.columns(ys / exposed**2)])
        excess = (np.asarray([_variance(column) for column in rates]) - noise) / typical**2
        # A log-normal rate has squared relative spread exp(s²) − 1, and mean exp(m + s²/2).
        share = 0.5 if isinstance(law, NegativeBinomialLaw) else 1.0
        spreads = np.sqrt(np.clip(np.log1p(np.maximum(share * excess, 0)), 0.05, 4))
        means = np.log(typical) - 0.5 * spreads**2
        if isinstance(law, NegativeBinomialLaw):
            starts["concentration"] = 1 / np.clip(0.5 * excess, 0.02, 10.0)
    step = sample.step(equation.continuous)
    if isinstance(equation, Structural):
        return starts | {
            "level_scale": 0.2 * spreads / np.sqrt(step),
            "prior.mean": means,
            "prior.scale_tril.std": 3 * spreads,
        }
    phi = np.full(sample.obs_dim, 0.9) ** (1 / step)
    return starts | {
        "mean": means,
        "persistence": phi,
        "scale": spreads * np.sqrt(1 - phi**2),
    }


def _refuse_unless_counts(ys: np.ndarray) -> None:
    """Refuse values that are not counts, with the first of them."""
    wrong = np.argwhere(np.isfinite(ys) & ((ys < 0) | (ys != np.rint(ys))))
    if len(wrong):
        series, row, column = wrong[0]
        raise ValueError(
            f"Counts must be non-negative integers, and row {row + 1} of series"
            f" {series + 1}, column {column + 1}, holds {ys[series, row, column]:g}. Choose another"
            " model, or another column."
        )


def _refuse_more_than(total: np.ndarray, ys: np.ndarray) -> None:
    """Refuse successes that outnumber their trials, with the first of them."""
    wrong = np.argwhere(ys > total)
    if len(wrong):
        series, row, column = wrong[0]
        trials = np.broadcast_to(total, ys.shape)[series, row, column]
        raise ValueError(
            f"Successes cannot outnumber trials, and row {row + 1} of series {series + 1}, column"
            f" {column + 1}, holds {ys[series, row, column]:g} of {trials:g}. Correct it, or the"
            " number of trials."
        )


def _mean(column: np.ndarray) -> float:
    return float(column.mean()) if column.size else 1.0


def _variance(column: np.ndarray) -> float:
    return float(column.var()) if column.size else 1.0


def _exposed(x: Array, u: Array | None) -> Array:
    rate = jnp.exp(x)
    return rate if u is None else u[-1] * rate


def _numpyro() -> Any:
    """Import the distributions of numpyro, which only models of counts need."""
    try:
        import numpyro.distributions as distributions
    except ImportError as error:
        raise ImportError(
            "Models of counts use the distributions of numpyro: pip install 'retrodict[numpyro]'."
        ) from error
    return distributions
