"""Small switching models that the tests share."""

import jax.numpy as jnp
import numpy as np

import retrodict as rd

switching = rd.switching


def probabilities(num_regimes: int, stay: float = 0.8) -> switching.Regimes:
    """Return regimes that stay with a probability, or move to any of the others alike."""
    moves = np.full((num_regimes, num_regimes), (1 - stay) / max(num_regimes - 1, 1))
    np.fill_diagonal(moves, stay if num_regimes > 1 else 1.0)
    first = np.arange(1.0, num_regimes + 1)
    return switching.Regimes.from_probabilities(first / first.sum(), moves)


def linear(
    num_regimes: int = 2, state_dim: int = 1, obs_dim: int = 1, seed: int = 0
) -> switching.SwitchingModel:
    """Return a model that is linear and Gaussian given its regimes, all of which differ."""
    draw = np.random.default_rng(seed)
    eye = np.eye(state_dim)

    def transition(j: int) -> rd.LinearGaussianKernel:
        rotation = np.linalg.qr(draw.normal(size=(state_dim, state_dim)))[0]
        scale = np.tril(0.1 * draw.normal(size=(state_dim, state_dim)), -1) + (0.3 + 0.3 * j) * eye
        return rd.LinearGaussianKernel(0.9 * rotation, draw.normal(size=state_dim), scale)

    def emission(j: int) -> rd.LinearGaussianKernel:
        weight, bias = draw.normal(size=(obs_dim, state_dim)), draw.normal(size=obs_dim)
        return rd.LinearGaussianKernel(weight, bias, rd.Diagonal(np.full(obs_dim, 0.4 + 0.2 * j)))

    return switching.SwitchingModel(
        probabilities(num_regimes),
        prior=[rd.Gaussian(draw.normal(size=state_dim), eye) for _ in range(num_regimes)],
        transition=[transition(j) for j in range(num_regimes)],
        emission=[emission(j) for j in range(num_regimes)],
    )


def hidden_markov(num_regimes: int = 2, obs_dim: int = 1) -> switching.SwitchingModel:
    """Return a hidden Markov model with Gaussian emissions."""
    laws = [
        rd.Gaussian(jnp.full(obs_dim, 1.5 * j), (0.5 + 0.3 * j) * jnp.eye(obs_dim))
        for j in range(num_regimes)
    ]
    return switching.SwitchingModel(probabilities(num_regimes), emission=laws)


def recurrent(num_regimes: int = 2, state_dim: int = 1) -> switching.SwitchingModel:
    """Return a linear model whose regimes depend on the previous state."""
    model = linear(num_regimes, state_dim, obs_dim=state_dim)
    logits = model.regimes.transition_logits
    weight = np.linspace(-1.5, 1.5, num_regimes)[:, None] * np.ones((1, state_dim))
    regimes = switching.Regimes(model.regimes.initial_logits, logits, state_weight=weight)
    return switching.SwitchingModel(regimes, model.emission, model.prior, model.transition)
