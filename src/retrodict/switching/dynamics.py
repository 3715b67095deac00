"""The variational law of regimes and states of a family, and its start at the model's."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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

STAY = 0.9
"""The probability to stay in a regime before `prepare` is called."""


class Dynamics(eqx.Module):
    """A law of regimes and states in standard coordinates, linear and Gaussian given the regimes.

    Attributes:
        regimes: the law of the regimes.
        prior: the law of the first state, one per regime.
        transition: the move into each regime.
    """

    regimes: Regimes
    prior: tuple[Gaussian, ...]
    transition: tuple[LinearGaussianKernel, ...]

    @classmethod
    def default(cls, num_regimes: int, state_dim: int, input_dim: int) -> "Dynamics":
        """Return stationary autoregressions with regimes that last."""
        eye, zeros = jnp.eye(state_dim), jnp.zeros(state_dim)
        share = (1 - STAY) / max(num_regimes - 1, 1)
        stay = np.where(np.eye(num_regimes, dtype=bool), STAY, share)
        stay = stay / stay.sum(axis=1, keepdims=True)
        kernel = LinearGaussianKernel(
            0.9 * eye,
            zeros,
            PositiveTril(np.sqrt(1 - 0.9**2) * eye),
            jnp.zeros((state_dim, input_dim)) if input_dim else None,
        )
        return cls(
            Regimes.from_probabilities(np.ones(num_regimes) / num_regimes, stay),
            (Gaussian(zeros, PositiveTril(eye)),) * num_regimes,
            (kernel,) * num_regimes,
        )


def start_near(
    model: SwitchingModel, units: DataUnits, input_dim: int
) -> tuple[Coordinates, Dynamics]:
    """Return the units of states and data, and the model's law of regimes and states in them.

    Linear-Gaussian parts are those of the model. Others are replaced by regressions on draws from
    the model.

    Args:
        model: an unwrapped model.
        units: the units of the data.
        input_dim: the dimension of an input; 0 if the model takes none.
    """
    coordinates, before, us = _simulated(model, units)
    priors, kernels = _standard_parts(model, coordinates, before, us)
    count = model.num_regimes

    def of_regime(j: int) -> tuple[Gaussian, LinearGaussianKernel]:
        mean, scale = priors[0][j], PositiveTril(priors[1][j])
        weight, bias, noise, input_weight = (leaf[j] for leaf in kernels)
        moved = input_weight if input_dim else None
        kernel = LinearGaussianKernel(weight, bias, PositiveTril(noise), moved)
        return Gaussian(mean, scale), kernel

    prior, transition = zip(*map(of_regime, range(count)), strict=True)
    return coordinates, Dynamics(_standard_regimes(model, coordinates), prior, transition)


@eqx.filter_jit
def _simulated(
    model: SwitchingModel, units: DataUnits
) -> tuple[Coordinates, Float[Array, "rows state"], Float[Array, "rows input"] | None]:
    """Return the coordinates of simulated states, the states before a move, and its inputs."""
    num_times = min(units.num_times, NUM_TIMES)
    us = None if units.inputs is None else units.inputs[:num_times]
    keys = jax.random.split(jax.random.key(0), NUM_PATHS)
    paths = jax.vmap(lambda key: model.simulate(key, num_times, inputs=us)[1])(keys)
    states = within_reach(paths).reshape(-1, model.state_dim)
    location = jnp.mean(states, axis=0)
    spread = sample_scale(states - location[None])
    later = None if us is None else jnp.tile(us[1:], (NUM_PATHS, 1))
    before = within_reach(paths)[:, :-1].reshape(-1, model.state_dim)
    return Coordinates(*units.scales, location, spread), before, later


@eqx.filter_jit
def _standard_parts(
    model: SwitchingModel,
    coordinates: Coordinates,
    before: Float[Array, "rows state"],
    us: Float[Array, "rows input"] | None,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return mean and scale of the priors, and weight, bias, scale and input weight of the moves.

    All arrays have a leading axis `regime`.
    """
    solve, spread = linalg.solve_triangular, coordinates.state_scale
    count, d = model.num_regimes, model.state_dim
    keys = jax.random.split(jax.random.key(1), NUM_PATHS)

    def standard(xs: Float[Array, "rows state"]) -> Float[Array, "rows state"]:
        return solve(spread, (xs - coordinates.state_location[None]).T).T

    def prior(law: Any) -> tuple[Array, Array]:
        if isinstance(law, Gaussian):
            scale = solve(spread, dense_scale(law.scale_tril))
            return solve(spread, law.mean - coordinates.state_location), with_density(scale)
        draws = standard(jax.vmap(lambda key: jnp.asarray(law.sample(key)))(keys))
        mean = jnp.mean(draws, axis=0)
        return mean, sample_scale(draws - mean[None])

    def move(kernel: Any) -> tuple[Array, ...]:
        width = 0 if us is None else us.shape[1]
        if isinstance(kernel, LinearGaussianKernel):
            moved = standard_with_input(coordinates, kernel)
            weight = jnp.zeros((d, width)) if moved.input_weight is None else moved.input_weight
            return moved.weight, moved.bias, with_density(dense_scale(moved.scale_tril)), weight
        several = jax.random.split(jax.random.key(2), before.shape[0])
        after = jax.vmap(kernel.sample)(several, before, us)
        columns = [standard(before)]
        if us is not None:
            columns.append(jax.vmap(coordinates.standard_input)(us))
        weight, bias, noise = regress(jnp.concatenate(columns, axis=1), standard(after))
        return weight[:, :d], bias, noise, weight[:, d:]

    return over_regimes(model.prior, count, prior), over_regimes(model.transition, count, move)


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
