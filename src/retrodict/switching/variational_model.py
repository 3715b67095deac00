"""The variational model of a family: linear and Gaussian given the regimes, near a given model."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._families import (
    Coordinates,
    DataUnits,
    regress,
    sample_scale,
    standard_with_input,
    with_density,
    within_reach,
)
from retrodict._model import Gaussian, LinearGaussianKernel, PositiveTril, dense_scale
from retrodict._numerics import linalg
from retrodict.switching.model import SwitchingModel, over_regimes
from retrodict.switching.regimes import Regimes

NUM_PATHS = 512
"""The number of paths that are simulated from the model."""

NUM_TIMES = 256
"""The largest number of rows of a simulated path."""

MAX_ROWS = 20_000
"""The largest number of simulated rows of a regression."""

OTHERS = 0.01
"""The weight of the states of other regimes in a regression, for regimes that are rare."""

STAY = 0.9
"""The probability to stay in a regime before `prepare` is called."""


def default_model(num_regimes: int, state_dim: int, obs_dim: int, input_dim: int) -> SwitchingModel:
    """Return stationary autoregressions with regimes that last, and emissions of noise."""
    eye, zeros = jnp.eye(state_dim), jnp.zeros(state_dim)
    share = (1 - STAY) / max(num_regimes - 1, 1)
    stay = np.where(np.eye(num_regimes, dtype=bool), STAY, share)
    stay = stay / stay.sum(axis=1, keepdims=True)

    def inputs(rows: int) -> Array | None:
        return jnp.zeros((rows, input_dim)) if input_dim else None

    scale = PositiveTril(np.sqrt(1 - 0.9**2) * eye)
    return SwitchingModel(
        Regimes.from_probabilities(np.ones(num_regimes) / num_regimes, stay),
        LinearGaussianKernel(
            jnp.zeros((obs_dim, state_dim)),
            jnp.zeros(obs_dim),
            PositiveTril(jnp.eye(obs_dim)),
            inputs(obs_dim),
        ),
        [Gaussian(zeros, PositiveTril(eye))] * num_regimes,
        [LinearGaussianKernel(0.9 * eye, zeros, scale, inputs(state_dim))] * num_regimes,
    )


def model_near(
    model: SwitchingModel, units: DataUnits, input_dim: int
) -> tuple[Coordinates, SwitchingModel]:
    """Return the units of states and data, and a linear-Gaussian version of a model in them.

    Linear-Gaussian parts are those of the model. Others are replaced by one regression per regime,
    on draws from the model in that regime.

    Args:
        model: an unwrapped model.
        units: the units of the data.
        input_dim: the dimension of an input; 0 if the model takes none.
    """
    coordinates, emitting, moving = _simulated(model, units)
    priors, transitions, emissions = _standard_parts(model, coordinates, emitting, moving)
    count = model.num_regimes

    def kernel(arrays: tuple[Array, ...], j: int) -> LinearGaussianKernel:
        weight, bias, noise, input_weight = (leaf[j] for leaf in arrays)
        moved = input_weight if input_dim else None
        return LinearGaussianKernel(weight, bias, PositiveTril(noise), moved)

    shared = isinstance(model.emission, LinearGaussianKernel)
    emission = [kernel(emissions, j) for j in range(1 if shared else count)]
    prior = [Gaussian(priors[0][j], PositiveTril(priors[1][j])) for j in range(count)]
    transition = [kernel(transitions, j) for j in range(count)]
    regimes = _standard_regimes(model, coordinates)
    standard = SwitchingModel(regimes, emission[0] if shared else emission, prior, transition)
    return coordinates, standard


class Simulated(NamedTuple):
    """Simulated rows: states, the regime of the kernel that reads them, and its input."""

    states: Float[Array, "rows state"]
    regimes: Int[Array, "rows"]
    us: Float[Array, "rows input"] | None


@eqx.filter_jit
def _simulated(model: SwitchingModel, units: DataUnits) -> tuple[Coordinates, Simulated, Simulated]:
    """Return coordinates, and the simulated rows of emissions and of moves."""
    num_times = min(units.num_times, NUM_TIMES)
    us = None if units.inputs is None else units.inputs[:num_times]
    keys = jax.random.split(jax.random.key(0), NUM_PATHS)
    zs, paths, _ = jax.vmap(lambda key: model.simulate(key, num_times, inputs=us))(keys)
    paths = within_reach(paths)
    count = min(NUM_PATHS, max(1, MAX_ROWS // num_times))

    def rows(lag: int) -> Simulated:
        chosen = None if us is None else jnp.tile(us[lag:], (count, 1))
        before = paths[:count, : num_times - lag].reshape(-1, model.state_dim)
        return Simulated(before, zs[:count, lag:].reshape(-1), chosen)

    states = paths.reshape(-1, model.state_dim)
    location = jnp.mean(states, axis=0)
    spread = sample_scale(states - location[None])
    coordinates = Coordinates(*units.scales, location, spread)
    return coordinates, rows(0), rows(1)


@eqx.filter_jit
def _standard_parts(
    model: SwitchingModel,
    coordinates: Coordinates,
    emitting: Simulated,
    moving: Simulated,
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...]]:
    """Return mean and scale of the priors, and weight, bias, scale and input weight of kernels.

    All arrays have a leading axis `regime`.
    """
    spread, location = coordinates.state_scale, coordinates.state_location
    keys = jax.random.split(jax.random.key(1), NUM_PATHS)

    def standard(xs: Float[Array, "rows state"]) -> Float[Array, "rows state"]:
        return linalg.solve_triangular(spread, (xs - location[None]).T).T

    def standard_obs(ys: Float[Array, "rows obs"]) -> Float[Array, "rows obs"]:
        return (ys - coordinates.obs_location[None]) / coordinates.obs_scale[None]

    def by_regression(kernel: Any, regime: Array, rows: Simulated, units: Any) -> tuple:
        several = jax.random.split(jax.random.key(2), rows.states.shape[0])
        drawn = jax.vmap(kernel.sample)(several, rows.states, rows.us).astype(rows.states.dtype)
        columns = [standard(rows.states)]
        if rows.us is not None:
            columns.append(jax.vmap(coordinates.standard_input)(rows.us))
        weights = (rows.regimes == regime) + OTHERS
        design = jnp.concatenate(columns, axis=1)
        weight, bias, noise = regress(design, units(drawn), weights.astype(design.dtype))
        d = rows.states.shape[1]
        return weight[:, :d], bias, noise, weight[:, d:]

    def prior(law: Any, _: Array) -> tuple[Array, Array]:
        if isinstance(law, Gaussian):
            scale = linalg.solve_triangular(spread, dense_scale(law.scale_tril))
            return linalg.solve_triangular(spread, law.mean - location), with_density(scale)
        draws = standard(jax.vmap(lambda key: jnp.asarray(law.sample(key)))(keys))
        mean = jnp.mean(draws, axis=0)
        return mean, sample_scale(draws - mean[None])

    def move(kernel: Any, regime: Array) -> tuple[Array, ...]:
        if isinstance(kernel, LinearGaussianKernel):
            return _arrays(standard_with_input(coordinates, kernel), moving.us)
        return by_regression(kernel, regime, moving, standard)

    def emit(kernel: Any, regime: Array) -> tuple[Array, ...]:
        if isinstance(kernel, LinearGaussianKernel):
            return _arrays(_standard_emission(coordinates, kernel), emitting.us)
        return by_regression(kernel, regime, emitting, standard_obs)

    def of(part: Any, fn: Any) -> Any:
        return over_regimes(part, model.num_regimes, fn, jnp.arange(model.num_regimes))

    return of(model.prior, prior), of(model.transition, move), of(model.emission, emit)


def _arrays(kernel: LinearGaussianKernel, us: Array | None) -> tuple[Array, ...]:
    """Return the arrays of a kernel, with an input weight of zero where it has none."""
    width = 0 if us is None else us.shape[1]
    moved = kernel.input_weight
    if moved is None:
        moved = jnp.zeros((kernel.bias.shape[0], width), kernel.bias.dtype)
    return kernel.weight, kernel.bias, with_density(dense_scale(kernel.scale_tril)), moved


def _standard_emission(
    coordinates: Coordinates, kernel: LinearGaussianKernel
) -> LinearGaussianKernel:
    """Return the kernel from z to the observation in standard coordinates."""
    scale = coordinates.obs_scale
    bias = kernel.bias + linalg.matvec(kernel.weight, coordinates.state_location)
    moved = kernel.input_weight
    if moved is not None:
        bias = bias + linalg.matvec(moved, coordinates.input_location)
        moved = moved * coordinates.input_scale[None] / scale[:, None]
    return LinearGaussianKernel(
        linalg.matmul(kernel.weight, coordinates.state_scale) / scale[:, None],
        (bias - coordinates.obs_location) / scale,
        dense_scale(kernel.scale_tril) / scale[:, None],
        moved,
    )


def _standard_regimes(model: SwitchingModel, coordinates: Coordinates) -> Regimes:
    """Return the law of the regimes, as a function of states and inputs in standard coordinates.

    Of other laws than `Regimes` it has the probabilities at average states and inputs.
    """
    regimes, location = model.regimes, coordinates.state_location
    count, u = model.num_regimes, coordinates.input_location
    if not isinstance(regimes, Regimes):
        logits = regimes.log_transition(location, u if model.takes_input else None)
        state = jnp.zeros((count, model.state_dim)) if regimes.takes_state else None
        moved = jnp.zeros((count, u.shape[0])) if regimes.takes_input else None
        return Regimes(regimes.log_initial(), logits, state, moved)
    logits, state, moved = regimes.transition_logits, regimes.state_weight, regimes.input_weight
    if state is not None:
        logits = logits + linalg.matvec(state, location)[None]
        state = linalg.matmul(state, coordinates.state_scale)
    if moved is not None:
        logits = logits + linalg.matvec(moved, u)[None]
        moved = moved * coordinates.input_scale[None]
    return Regimes(regimes.initial_logits, logits, state, moved)
