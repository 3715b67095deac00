"""Stochastic volatility: returns with a latent log variance."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import check_count
from retrodict._model import (
    AbstractGaussianKernel,
    Bounded,
    Diagonal,
    Gaussian,
    StateSpaceModel,
    unwrap,
)
from retrodict.models._equations import (
    LEVERAGE_SHARE,
    AbstractNamed,
    kernel_of,
    mean_reverting,
    real,
    stationary_unless,
)
from retrodict.models._registry import ready
from retrodict.models._start import Sample, centre, reverting, variance

MAX_LEVERAGE = 0.9
"""The bound of the correlation of a return with the next step of its log variance."""


class VolatilityEmission(AbstractNamed, AbstractGaussianKernel):
    """Returns y_t = exp(x_t / 2) ε_t, with ε_t correlated with the next step of x.

    With leverage ρ the state of a column is (x_t, z_t), and ε_t = a z_t + √(1 − a²) ξ_t with
    a = ρ / c, where c is the correlation of z_t with the next innovation.

    Attributes:
        leverage: ρ, of shape `(obs,)`, or `None`.
    """

    leverage: Any = None

    @property
    def takes_input(self) -> bool:
        """False: the emission has no inputs."""
        return False

    def law(self, x: Float[Array, "state"], u: Float[Array, "input"] | None = None) -> Gaussian:
        """Return N(exp(x/2) a z, exp(x) (1 − a²)), with independent columns."""
        leverage = unwrap(self).leverage
        if leverage is None:
            return Gaussian(jnp.zeros_like(x), Diagonal(jnp.exp(0.5 * x)))
        share = leverage / LEVERAGE_SHARE
        size = jnp.exp(0.5 * x[::2])
        return Gaussian(size * share * x[1::2], Diagonal(size * jnp.sqrt(1 - share**2)))


def start_volatility(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values by moments.

    log y² is the log variance plus noise of mean −1.27 and variance π²/2.
    """
    equation: Any = model.transition.fn
    squares = sample.ys**2
    # Zero returns have no logarithm; a thousandth of the mean square replaces them.
    floors = 1e-3 * centre(squares)
    logs = np.log(np.maximum(squares, np.where(floors > 0, floors, 1.0)))
    spreads = np.sqrt(np.clip(variance(logs) - np.pi**2 / 2, 0.1, 4.0))
    values = reverting(centre(logs) + 1.27, spreads, 0.95, sample.step)
    return values | ({"leverage": -0.1} if equation.augmented else {})


@ready("returns whose log variance is an AR(1) process", start_volatility)
def stochastic_volatility(
    *,
    leverage: bool = False,
    obs_dim: int = 1,
    irregular: bool = False,
    mean: Any = 0.0,
    persistence: Any = 0.95,
    scale: Any = 0.2,
    correlation: Any = 0.0,
    prior_mean: Any = None,
    prior_scale: Any = None,
) -> StateSpaceModel:
    """Build returns whose log variance is an AR(1) process.

        x_t = mean + persistence (x_{t-1} − mean) + scale η_t,    y_t = exp(x_t / 2) ε_t

    With leverage, ε_t and η_{t+1} have correlation ρ, the parameter `leverage`: negative if
    losses precede high variance. The state is then (x_t, z_t), with z_t ~ N(0, 1) independent over
    time,

        η_{t+1} = c z_t + √(1 − c²) ζ_{t+1},    ε_t = (ρ/c) z_t + √(1 − ρ²/c²) ξ_t,    c² = 0.9,

    with independent standard normal ζ and ξ. This is exactly the same model, since ε and η are
    standard normal with correlation c ρ/c = ρ; both noises have a density, and ρ is a parameter of
    the emission only. It requires |ρ| < 0.9 < c.

    The first log variance has the stationary law of the process, which follows its parameters
    during learning.

    Example:
        >>> import retrodict as rd
        >>> model = rd.models.stochastic_volatility(persistence=0.9, leverage=True)
        >>> sorted(rd.models.named_parameters(model))
        ['leverage', 'mean', 'persistence', 'scale']

    Args:
        leverage: whether there is such a correlation.
        obs_dim: the number of columns, each with its own variance.
        irregular: whether times are irregular (without leverage): the log variance is then an
            Ornstein–Uhlenbeck process, and the step the first input.
        mean: the starting value of the mean of the log variance.
        persistence: the starting value of its persistence, between −1 and 1, or 0 and 1 if
            irregular.
        scale: the starting value of the scale of its innovations.
        correlation: the starting value of ρ.
        prior_mean: the mean of a fixed Gaussian law of the first log variance.
        prior_scale: the scale of that law. If only one of the two is passed, the other is that of
            the stationary law at the starting values.
    """
    obs_dim = check_count(obs_dim, "obs_dim")
    if leverage and irregular:
        raise ValueError(
            "`leverage` requires regular times: leave out one of `leverage` and `irregular`."
        )
    values = (mean, persistence, scale)
    equation = mean_reverting("stochastic_volatility", values, obs_dim, irregular, leverage)
    emission = VolatilityEmission()
    if leverage:
        prior_mean = None if prior_mean is None else _beside(prior_mean, 0.0, obs_dim)
        prior_scale = None if prior_scale is None else _beside(prior_scale, 1.0, obs_dim)
        rho = Bounded(real(correlation, obs_dim), -MAX_LEVERAGE, MAX_LEVERAGE)
        emission = VolatilityEmission(rho)
    prior = stationary_unless(prior_mean, prior_scale, equation, (1 + leverage) * obs_dim)
    return StateSpaceModel(prior, kernel_of(equation, irregular), emission)


def _beside(values: Any, other: float, obs_dim: int) -> np.ndarray:
    """Return the entries (value, other) of each column, one after another."""
    values = np.broadcast_to(np.asarray(values, float), (obs_dim,))
    return np.stack([values, np.full(obs_dim, other)], axis=1).ravel()
