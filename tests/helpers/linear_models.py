"""Linear-Gaussian models, given by numbers or drawn at random, and random masks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd


def linear_model(
    dim: int = 1,
    *,
    design: Any = 1.0,
    offset: Any = 0.0,
    error: Any = 1.0,
    design_input: Any = None,
    **dynamics: Any,
) -> rd.StateSpaceModel:
    """Return the model y = design x + offset + error v, with the dynamics below.

    A number stands for that multiple of the identity, or for a vector of that number.
    """
    emission = linear_kernel(design, offset, error, design_input, dim=dim)
    return linear_transition_model(emission, dim, **dynamics)


def linear_transition_model(
    emission: rd.AbstractKernel,
    dim: int = 1,
    *,
    mean: Any = 0.0,
    prior: Any = 1.0,
    weight: Any = 0.9,
    bias: Any = 0.0,
    noise: Any = 1.0,
    input_weight: Any = None,
) -> rd.StateSpaceModel:
    """Return the model x' = weight x + bias + noise w, with x_0 around `mean` and any emission."""
    law = rd.Gaussian(_vector(mean, dim), _matrix(prior, dim))
    transition = linear_kernel(weight, bias, noise, input_weight, dim=dim)
    return rd.StateSpaceModel(law, transition, emission)


def linear_kernel(
    weight: Any = 1.0, bias: Any = 0.0, scale: Any = 1.0, input_weight: Any = None, *, dim: int = 1
) -> rd.LinearGaussianKernel:
    """Return a linear-Gaussian kernel on `dim` states; numbers stand for matrices as above."""
    rows = dim if _is_number(weight) else getattr(weight, "shape", (dim,))[0]
    return rd.LinearGaussianKernel(
        _matrix(weight, dim),
        _vector(bias, rows),
        _matrix(scale, rows),
        None if input_weight is None else _matrix(input_weight, rows),
    )


def _matrix(value: Any, dim: int) -> Any:
    return value * jnp.eye(dim) if _is_number(value) else value


def _vector(value: Any, dim: int) -> Any:
    return value * jnp.ones(dim) if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0


def planar_model(**options: Any) -> rd.StateSpaceModel:
    """Return a model of two states with dense parameters, apart from the given ones."""
    dynamics = {
        "mean": jnp.array([0.5, -0.5]),
        "prior": jnp.array([[1.0, 0.0], [0.3, 0.8]]),
        "weight": jnp.array([[0.8, 0.3], [-0.2, 0.7]]),
        "bias": jnp.array([0.1, -0.2]),
        "noise": jnp.array([[0.6, 0.0], [0.2, 0.5]]),
    }
    return linear_model(2, **(dynamics | options))


def random_model(
    rng: np.random.Generator,
    state: int,
    obs: int,
    num_inputs: int = 0,
    *,
    singular: bool = False,
    prior_scale: float = 1.0,
) -> rd.StateSpaceModel:
    """Draw a stable model with dense scales; `singular` gives transition noise of rank 1."""
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
    """Draw a well-conditioned lower Cholesky factor."""
    return np.tril(0.3 * rng.normal(size=(dim, dim)), -1) + np.diag(rng.uniform(0.4, 1.2, dim))


def random_mask(
    rng: np.random.Generator, num_times: int, obs: int, probability: float
) -> np.ndarray:
    """Draw a mask of entries observed with this probability, with some rows entirely missing."""
    mask = rng.random((num_times, obs)) < probability
    mask[rng.random(num_times) < 0.15] = False
    return mask


class IncompleteSeries(NamedTuple):
    """A series with missing entries and rows, and its inputs."""

    ys: np.ndarray
    mask: np.ndarray
    inputs: np.ndarray


def incomplete_series(
    model: rd.StateSpaceModel, num_times: int, missing_row: int
) -> IncompleteSeries:
    """Draw a series of a model with one input; missing entries hold 1000."""
    rng = np.random.default_rng(2)
    inputs = rng.normal(size=(num_times, 1))
    ys = np.array(model.simulate(jax.random.key(3), num_times, inputs=inputs)[1])
    mask = random_mask(rng, num_times, ys.shape[1], 0.8)
    mask[missing_row] = False
    return IncompleteSeries(np.where(mask, ys, 1e3), mask, inputs)


def singular_models() -> dict[str, rd.StateSpaceModel]:
    """Return models whose states stay (nearly) on a line or plane that no coordinate axis spans."""
    factor = np.array([[1.0, 0.0], [0.3, 0.0]])
    rank_one = 0.9 * np.outer([1.0, 0.3], [0.6, 0.8])
    shares = np.array([[2.0, 0.0, 0.0], [-1.0, 3.0**0.5, 0.0], [-1.0, -(3.0**0.5), 0.0]])
    turn = np.array([[np.cos(0.7), -np.sin(0.7)], [np.sin(0.7), np.cos(0.7)]])
    cycle = np.block([[np.ones((1, 1)), np.zeros((1, 2))], [np.zeros((2, 1)), turn]])

    def thin(width: float) -> np.ndarray:
        return factor + np.diag([0.0, width])

    def model(prior, weight, noise, design, mean=None) -> rd.StateSpaceModel:
        d, m = len(weight), len(design)
        mean = np.zeros(d) if mean is None else mean
        return rd.StateSpaceModel(
            prior=rd.Gaussian(jnp.asarray(mean), jnp.asarray(prior)),
            transition=rd.LinearGaussianKernel(
                jnp.asarray(weight), jnp.zeros(d), jnp.asarray(noise)
            ),
            emission=rd.LinearGaussianKernel(jnp.asarray(design), jnp.zeros(m), 0.7 * jnp.eye(m)),
        )

    eye, design_row = np.eye(2), np.array([[1.0, 0.5]])
    return {
        "common factor": model(factor, 0.9 * eye, 0.5 * factor, design_row),
        "weight of rank one": model(eye, rank_one, 0 * eye, design_row),
        "weight and noise of rank one": model(eye, rank_one, 0.5 * factor, design_row),
        "shares": model(shares, np.eye(3), 0.1 * shares, np.eye(3), np.full(3, 1 / 3)),
        "thin factor, 1e-10": model(thin(1e-10), 0.9 * eye, 0.5 * thin(1e-10), design_row),
        "thin factor, 1e-13": model(thin(1e-13), 0.9 * eye, 0.5 * thin(1e-13), design_row),
        "level and cycle": model(np.eye(3), cycle, 1e-10 * np.eye(3), np.array([[1.0, 1.0, 0.0]])),
    }
