"""A neural decoder: latent linear dynamics, observed through a network."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._model import (
    AbstractParameter,
    Diagonal,
    NonlinearGaussianKernel,
    StateSpaceModel,
    unwrap,
)
from retrodict.models._equations import AbstractNamed, LinearDynamics, Regular, diffuse, positive
from retrodict.models._registry import ready
from retrodict.models._start import Sample, centre, spread

MAX_WEIGHTS = 50_000_000
"""The largest number of weights of a network; a model file builds it when it is read."""


class ObservationStd(AbstractNamed, AbstractParameter):
    """Parameter whose value is the standard deviations of the noise.

    Attributes:
        obs_scale: scales, of shape `(obs,)`.
    """

    obs_scale: Any

    @property
    def value(self) -> Any:
        """The vector."""
        return unwrap(self.obs_scale)


def start_neural(model: StateSpaceModel, sample: Sample) -> dict[str, Any]:
    """Return starting values of the last layer and the noise, in the units of the data."""
    spreads = spread(sample.ys)
    emission: Any = model.emission
    last = len(emission.fn.layers) - 1
    weight = np.asarray(emission.fn.layers[last].weight)
    # A unit state then moves the output by about the spread of its column.
    size = np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), 1e-12)
    return {
        "obs_scale": 0.5 * spreads,
        f"emission.fn.layers[{last}].weight": weight / size * spreads[:, None],
        f"emission.fn.layers[{last}].bias": centre(sample.ys),
    }


@ready("latent linear dynamics, decoded by a network", start_neural)
def neural_decoder(
    key: PRNGKey,
    latent_dim: int = 2,
    obs_dim: int = 1,
    *,
    width: int = 32,
    depth: int = 1,
    persistence: float = 0.9,
    obs_scale: Any = 0.5,
) -> StateSpaceModel:
    """Build learned linear dynamics of a latent state, decoded by a network.

        x_t = dynamics x_{t-1} + state_scale η_t,    y_t = network(x_t) + obs_scale ε_t

    The starting value of the dynamics is persistence times the identity, with the noise of
    stationary variance 1. The first state is N(0, I) and not learned; all other parameters are.

    Example:
        >>> import jax, retrodict as rd
        >>> model = rd.models.neural_decoder(jax.random.key(0), latent_dim=3, obs_dim=2)
        >>> model.simulate(jax.random.key(1), 4)[1].shape
        (4, 2)

    Args:
        key: a typed key, for the weights of the network.
        latent_dim: the dimension of the state.
        obs_dim: the number of columns.
        width: the number of units per hidden layer.
        depth: the number of hidden layers.
        persistence: the starting value of the dynamics, between 0 and 1.
        obs_scale: the starting value of the scale of the noise.
    """
    check_key(key, "neural_decoder")
    latent_dim, obs_dim = check_count(latent_dim, "latent_dim"), check_count(obs_dim, "obs_dim")
    if not 0 < persistence < 1:
        raise ValueError(f"`persistence` must be between 0 and 1, got {persistence}.")
    width = check_count(width, "width")
    num_weights = width * (latent_dim + obs_dim + width * max(0, depth - 1))
    if num_weights > MAX_WEIGHTS:
        raise ValueError(
            f"The network would have {num_weights} weights, and at most {MAX_WEIGHTS} are"
            f" supported: choose a smaller `width` than {width}, or a smaller `depth` than {depth}."
        )
    network = eqx.nn.MLP(latent_dim, obs_dim, width, depth, activation=jax.nn.tanh, key=key)
    equation = LinearDynamics(
        persistence * jnp.eye(latent_dim),
        positive(np.sqrt(1 - persistence**2), latent_dim),
    )
    scale = Diagonal(ObservationStd(positive(obs_scale, obs_dim)))
    return StateSpaceModel(
        diffuse(0.0, 1.0, latent_dim), Regular(equation), NonlinearGaussianKernel(network, scale)
    )
