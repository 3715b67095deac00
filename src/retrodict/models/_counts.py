"""Counts: Poisson, negative-binomial and binomial laws around a latent log rate or log odds."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import check_count
from retrodict._model import DistributionKernel, StateSpaceModel
from retrodict.models._equations import (
    AbstractNamed,
    Structural,
    diffuse,
    kernel_of,
    mean_reverting,
    numpyro_distributions,
    positive,
    stationary_unless,
)
from retrodict.models._registry import ready
from retrodict.models._start import Sample, centre, reverting, variance


class PoissonLaw(AbstractNamed):
    """The law Poisson(e exp(x)), with exposure e the last input or 1."""

    def __call__(self, x: Float[Array, "obs"], u: Float[Array, "input"] | None = None) -> Any:
        """Return the law of independent counts, one per coordinate of the state."""
        return numpyro_distributions().Poisson(_exposed(x, u))


class NegativeBinomialLaw(AbstractNamed):
    """Counts of mean m = e exp(x) and variance m + m² / concentration.

    Attributes:
        concentration: the concentration, of shape `(obs,)`.
    """

    concentration: Any

    def __call__(self, x: Float[Array, "obs"], u: Float[Array, "input"] | None = None) -> Any:
        """Return the law of independent counts, one per coordinate of the state."""
        return numpyro_distributions().NegativeBinomial2(_exposed(x, u), self.concentration)


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
        return numpyro_distributions().Binomial(total, logits=x)


def start_counts(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values from the mean and the overdispersion of the counts."""
    law: Any = model.emission.fn
    ys = sample.ys
    wrong = np.isfinite(ys) & ((ys < 0) | (ys != np.rint(ys)))
    remedy = "Choose another model, or another column."
    _refuse(wrong, ys, "Counts must be non-negative integers", None, remedy)
    # The exposure of each row, or its number of trials.
    exposed = np.ones_like(ys)
    if model.emission.takes_input and sample.inputs is not None:
        exposed *= np.maximum(sample.inputs[:, :, -1:], 1e-12)
    starts: dict[str, Any] = {}
    if isinstance(law, BinomialLaw):
        total = exposed if law.total_count is None else np.full_like(ys, law.total_count)
        remedy = "Correct it, or the number of trials."
        _refuse(ys > total, ys, "Successes cannot outnumber trials", total, remedy)
        values = np.log((ys + 0.5) / (np.maximum(total - ys, 0) + 0.5))
        means, spreads = centre(values), np.sqrt(np.clip(variance(values), 0.05, 4))
    else:
        rates = ys / exposed
        typical = np.maximum(centre(rates), 1e-2)
        excess = (variance(rates) - centre(rates / exposed)) / typical**2
        # A log-normal rate has squared relative spread exp(s²) − 1, and mean exp(m + s²/2).
        share = 0.5 if isinstance(law, NegativeBinomialLaw) else 1.0
        spreads = np.sqrt(np.clip(np.log1p(np.maximum(share * excess, 0)), 0.05, 4))
        means = np.log(typical) - 0.5 * spreads**2
        if isinstance(law, NegativeBinomialLaw):
            starts["concentration"] = 1 / np.clip(0.5 * excess, 0.02, 10.0)
    transition: Any = model.transition
    if not isinstance(transition.fn, Structural):
        return starts | reverting(means, spreads, 0.9, sample.step)
    return starts | {
        "level_scale": 0.2 * spreads / np.sqrt(sample.step),
        "prior.mean": means,
        "prior.scale_tril.std": 3 * spreads,
    }


def _refuse(wrong: np.ndarray, ys: np.ndarray, rule: str, total: Any, remedy: str) -> None:
    """Refuse the first wrong count, with the number of trials if there are any."""
    if wrong.any():
        index = tuple(np.argwhere(wrong)[0])
        series, row, column = (int(i) + 1 for i in index)
        trials = f" of {total[index]:g}" if isinstance(total, np.ndarray) else ""
        raise ValueError(
            f"{rule}, and row {row} of series {series}, column {column}, holds"
            f" {ys[index]:g}{trials}. {remedy}"
        )


@ready("Poisson counts with a latent log rate", start_counts)
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

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.poisson_counts(mean=1.0)
        >>> sorted(rd.models.named_parameters(model))
        ['mean', 'persistence', 'scale']

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


@ready("overdispersed counts with a latent log rate", start_counts)
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

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.negative_binomial_counts(concentration=5.0)
        >>> sorted(rd.models.named_parameters(model))
        ['concentration', 'mean', 'persistence', 'scale']

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


@ready("successes among trials, with latent log odds", start_counts)
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

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.binomial_counts(total_count=10, walk=True)
        >>> sorted(rd.models.named_parameters(model))
        ['level_scale']

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
    kind: str, walk: bool, obs_dim: int, irregular: bool, starts: Any, emission: DistributionKernel
) -> StateSpaceModel:
    """Build the model of counts; `starts` are the last five arguments of a constructor."""
    obs_dim = check_count(obs_dim, "obs_dim")
    numpyro_distributions()
    mean, persistence, scale, prior_mean, prior_scale = starts
    if walk:
        equation = Structural(positive(scale, obs_dim), kind=kind, continuous=irregular)
        prior_mean = mean if prior_mean is None else prior_mean
        prior = diffuse(prior_mean, 3.0 if prior_scale is None else prior_scale, obs_dim)
    else:
        equation = mean_reverting(kind, (mean, persistence, scale), obs_dim, irregular)
        prior = stationary_unless(prior_mean, prior_scale, equation, obs_dim)
    return StateSpaceModel(prior, kernel_of(equation, irregular), emission)


def _exposed(x: Array, u: Array | None) -> Array:
    rate = jnp.exp(x)
    return rate if u is None else u[-1] * rate
