"""Random linear-Gaussian models and series for tests."""

import jax.numpy as jnp
import numpy as np

import retrodict as rd


def random_model(
    rng: np.random.Generator,
    state: int,
    obs: int,
    num_inputs: int = 0,
    *,
    singular: bool = False,
    prior_scale: float = 1.0,
) -> rd.StateSpaceModel:
    """A stable model with dense scales; `singular` gives transition noise of rank 1."""
    weight = rng.normal(size=(state, state))
    weight *= rng.uniform(0.3, 1.0) / max(abs(np.linalg.eigvals(weight)))
    noise = lower_factor(rng, state)
    if singular:
        noise = np.concatenate([noise[:, :1], np.zeros((state, state - 1))], axis=1)

    def inputs_to(dim: int) -> jnp.ndarray | None:
        return jnp.asarray(rng.normal(size=(dim, num_inputs))) if num_inputs else None

    return rd.StateSpaceModel(
        prior=rd.Gaussian(
            jnp.asarray(rng.normal(size=state)), jnp.asarray(prior_scale * lower_factor(rng, state))
        ),
        transition=rd.LinearGaussianKernel(
            jnp.asarray(weight),
            jnp.asarray(rng.normal(size=state)),
            jnp.asarray(noise),
            inputs_to(state),
        ),
        emission=rd.LinearGaussianKernel(
            jnp.asarray(rng.normal(size=(obs, state))),
            jnp.asarray(rng.normal(size=obs)),
            jnp.asarray(lower_factor(rng, obs)),
            inputs_to(obs),
        ),
    )


def lower_factor(rng: np.random.Generator, dim: int) -> np.ndarray:
    """A well-conditioned lower Cholesky factor."""
    return np.tril(0.3 * rng.normal(size=(dim, dim)), -1) + np.diag(rng.uniform(0.4, 1.2, dim))


def random_mask(rng: np.random.Generator, num_times: int, obs: int, seen: float) -> np.ndarray:
    """Entries seen with this probability, and now and then a row of which nothing was."""
    mask = rng.random((num_times, obs)) < seen
    mask[rng.random(num_times) < 0.15] = False
    return mask
