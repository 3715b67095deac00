"""The initial values of a family: the units of its data, and the model's prior chain.

A family works in standard coordinates: an observation is centred and divided by its standard
deviation, a state is x = x̄ + S z with the location and the spread of the model's prior paths, so
that learned parameters are of order one in any units.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from retrodict._families.base import Factor
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    unwrap,
)
from retrodict._numerics import (
    linalg,
    shared_product,
)

NUM_PATHS = 512
"""The number of paths simulated from a model whose prior chain is not linear Gaussian."""

NUM_TIMES = 256
"""The largest number of rows of a simulated path."""

REACH = 1e6
"""The largest value of a path, relative to its first two rows."""


class Coordinates(eqx.Module):
    """The map between original units and standard coordinates.

    Attributes:
        obs_location: subtracted from an observation.
        obs_scale: divides it.
        input_location: subtracted from an input.
        input_scale: divides it.
        state_location: x̄.
        state_scale: S, a lower factor.
    """

    obs_location: Any
    obs_scale: Any
    input_location: Any
    input_scale: Any
    state_location: Any
    state_scale: Any

    @classmethod
    def identity(cls, state_dim: int, obs_dim: int, input_dim: int) -> "Coordinates":
        """Return coordinates that equal the original units."""
        return cls(
            Frozen(jnp.zeros(obs_dim)),
            Frozen(jnp.ones(obs_dim)),
            Frozen(jnp.zeros(input_dim)),
            Frozen(jnp.ones(input_dim)),
            Frozen(jnp.zeros(state_dim)),
            Frozen(jnp.eye(state_dim)),
        )

    def features(self, row: Series) -> Float[Array, "features"]:
        """Return the features of a row; a missing entry is a zero and an indicator."""
        y = (row.ys - self.obs_location) / self.obs_scale
        observed = jnp.ones_like(y) if row.mask is None else row.mask.astype(y.dtype)
        parts = [observed * y, observed]
        if row.inputs is not None:
            parts.append(self.standard_input(row.inputs))
        return jnp.concatenate(parts)

    def standard_input(self, u: Float[Array, "input"]) -> Float[Array, "input"]:
        """Return the input in standard coordinates."""
        return (u - self.input_location) / self.input_scale

    def standard_kernel(self, kernel: LinearGaussianKernel) -> LinearGaussianKernel:
        """Return a kernel on z: weight S⁻¹w S, bias S⁻¹(w x̄ + b − x̄), scale S⁻¹q."""
        solve, scale = linalg.solve_triangular, self.state_scale
        moved = linalg.matvec(kernel.weight, self.state_location) + kernel.bias
        return LinearGaussianKernel(
            solve(scale, linalg.matmul(kernel.weight, scale)),
            solve(scale, moved - self.state_location),
            solve(scale, dense_scale(kernel.scale_tril)),
        )

    def factor(
        self,
        mean: Float[Array, "d"],
        scale: Float[Array, "d d"],
        gain: Float[Array, "d d"],
        offset: Float[Array, "d"],
        kernel_scale: Float[Array, "d d"],
    ) -> Factor:
        """Return the law and the backward kernel of x, from those of z."""
        return Factor(
            Gaussian(*self.original_law(mean, scale)),
            LinearGaussianKernel(*self.original_kernel(gain, offset, kernel_scale)),
        )

    def original_law(
        self, mean: Float[Array, "d"], scale: Float[Array, "d d"]
    ) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
        """Return mean and scale of x, from those of z."""
        spread = self.state_scale
        return self.state_location + linalg.matvec(spread, mean), shared_product(spread, scale)

    def original_kernel(
        self, weight: Float[Array, "d d"], bias: Float[Array, "d"], scale: Float[Array, "d d"]
    ) -> tuple[Float[Array, "d d"], Float[Array, "d"], Float[Array, "d d"]]:
        """Return weight, bias and scale of a kernel on x, from those of a kernel on z."""
        spread, location = self.state_scale, self.state_location
        whitened = linalg.solve_triangular(spread, jnp.eye(bias.shape[0], dtype=bias.dtype))
        weight = shared_product(spread, linalg.matmul(weight, whitened))
        bias = location + linalg.matvec(spread, bias) - linalg.matvec(weight, location)
        return weight, bias, shared_product(spread, scale)


class PriorChain(NamedTuple):
    """A linear-Gaussian approximation of a model's law of paths, in original units.

    Attributes:
        mean: the mean of x_0.
        scale: the lower factor of x_0.
        transition: the transition, exact if the model's is linear Gaussian, else by regression.
        location: the mean of the states over time.
        spread: the lower factor of their covariance over time.
    """

    mean: Array
    scale: Array
    transition: AbstractLinearGaussianKernel
    location: Array
    spread: Array


def prior_chain(
    model: StateSpaceModel, num_times: int, inputs: Float[Array, "time input"] | None
) -> PriorChain:
    """Return a linear-Gaussian approximation of the model's law of paths before any observation."""
    model = unwrap(model)
    num_times = min(num_times, NUM_TIMES)
    us = None if inputs is None else inputs[:num_times]
    if isinstance(model.transition, AbstractLinearGaussianKernel) and isinstance(
        model.prior, Gaussian
    ):
        return _linear_chain(model.prior, model.transition, num_times, us)
    return _by_regression(model, num_times, us)


# Compiled as one program each: on an accelerator dozens of small ones take seconds.


@eqx.filter_jit
def _linear_chain(
    prior: Gaussian, transition: AbstractLinearGaussianKernel, num_times: int, us: Array | None
) -> PriorChain:
    """Return the chain of a linear-Gaussian model."""
    mean, scale = prior.mean, dense_scale(prior.scale_tril)
    location, covariance = _spread_of_linear(transition, mean, scale, num_times, us)
    return _with_units(PriorChain(mean, scale, transition, location, covariance))


def _with_units(chain: PriorChain) -> PriorChain:
    """Replace the covariance of the states by a lower factor with a positive diagonal."""
    fallback = linalg.outer_gram(chain.scale)
    covariance = jnp.where(jnp.all(jnp.isfinite(chain.spread)), chain.spread, fallback)
    location = jnp.where(jnp.isfinite(chain.location), chain.location, chain.mean)
    # A constant state, or a known combination of states, still needs a unit.
    covariance = covariance + jnp.diag(_floor(jnp.diagonal(covariance)))
    return chain._replace(location=location, spread=linalg.cholesky(covariance))


def _floor(variances: Float[Array, "d"]) -> Float[Array, "d"]:
    largest = jnp.max(variances)
    relative = jnp.sqrt(jnp.finfo(variances.dtype).eps) * variances
    return jnp.where(variances > 0, relative, jnp.where(largest > 0, largest, 1.0))


def _spread_of_linear(
    transition: AbstractLinearGaussianKernel,
    mean: Array,
    scale: Array,
    num_times: int,
    us: Array | None,
) -> tuple[Array, Array]:
    """Return the mean and covariance of the states, averaged over time."""

    def move(law: tuple[Array, Array], u: Array | None) -> tuple[tuple, tuple]:
        moved = transition.propagate(*law, u)
        return moved, moved

    first = (mean, linalg.outer_gram(scale))
    later = None if us is None else us[1:]
    _, rest = lax.scan(move, first, later, length=num_times - 1)
    means, covariances = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)
    location = jnp.mean(means, axis=0)
    shifts = means - location[None]
    return location, jnp.mean(covariances, axis=0) + linalg.matmul(shifts.T, shifts) / num_times


@eqx.filter_jit
def _by_regression(model: StateSpaceModel, num_times: int, us: Array | None) -> PriorChain:
    """Regress x_k on x_{k-1} over simulated paths by least squares."""
    keys = jax.random.split(jax.random.key(0), NUM_PATHS)
    paths = jax.vmap(lambda key: model.simulate(key, num_times, inputs=us)[0])(keys)
    paths = within_reach(paths)
    d = paths.shape[-1]
    initial, states = paths[:, 0], paths.reshape(-1, d)
    before, after = paths[:, :-1].reshape(-1, d), paths[:, 1:].reshape(-1, d)
    weight, bias, noise = regress(before, after)
    centred = states - jnp.mean(states, axis=0)[None]
    return _with_units(
        PriorChain(
            jnp.mean(initial, axis=0),
            sample_scale(initial - jnp.mean(initial, axis=0)[None]),
            LinearGaussianKernel(weight, bias, noise),
            jnp.mean(states, axis=0),
            linalg.matmul(centred.T, centred) / states.shape[0],
        )
    )


def within_reach(paths: Float[Array, "sample time d"]) -> Float[Array, "sample time d"]:
    """Clip the paths of an explosive transition, so that the regression stays finite."""
    centre = jnp.mean(paths[:, 0], axis=0)[None, None]
    beginning = jnp.abs(paths[:, :2] - centre)
    reach = REACH * jnp.max(jnp.where(jnp.isfinite(beginning), beginning, 0.0))
    return centre + jnp.clip(jnp.nan_to_num(paths - centre), -reach, reach)


def regress(
    before: Array, after: Array, weights: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return weight, bias and scale of a linear-Gaussian kernel by (weighted) least squares."""
    if before.shape[0] == 0:  # one row: there is no transition to learn from
        d = before.shape[1]
        return jnp.eye(d), jnp.zeros(d), jnp.eye(d)
    design = jnp.concatenate([before, jnp.ones((before.shape[0], 1), before.dtype)], axis=1)
    if weights is not None:
        roots = jnp.sqrt(weights / jnp.mean(weights))[:, None]
        design, after = roots * design, roots * after
    coefficients = jnp.linalg.lstsq(design, after)[0]
    residual = after - jnp.matmul(design, coefficients, precision=lax.Precision.HIGHEST)
    return coefficients[:-1].T, coefficients[-1], sample_scale(residual)


def sample_scale(centred: Float[Array, "rows d"]) -> Float[Array, "d d"]:
    """Return the lower factor of the covariance of centred rows."""
    covariance = linalg.matmul(centred.T, centred) / centred.shape[0]
    return linalg.cholesky(covariance + jnp.diag(_floor(jnp.diagonal(covariance))))


def location_and_scale(columns: Float[np.ndarray, "rows columns"]) -> tuple[Array, Array]:
    """Return mean and standard deviation of the entries that are not NaN, per column.

    A constant column is divided by its absolute value, or by one if it is zero.
    """
    locations, scales = [], []
    for column in np.asarray(columns, float).T:
        observed = column[~np.isnan(column)]
        # Dividing by the largest entry first keeps squares from overflowing.
        largest = np.max(np.abs(observed), initial=0.0)
        largest = largest if largest > 0 else 1.0
        location = largest * np.mean(observed / largest) if observed.size else 0.0
        spread = largest * np.std(observed / largest) if observed.size else 0.0
        locations.append(location)
        scales.append(largest if spread <= 1e-10 * largest else spread)
    return jnp.asarray(locations), jnp.asarray(scales)


class DataUnits(NamedTuple):
    """Locations and scales of the data, and the length and the inputs of the longest series."""

    scales: tuple[Array, Array, Array, Array]
    num_times: int
    inputs: Array | None


def data_units(batch: Series) -> DataUnits:
    """Return locations and scales of observations and inputs, from the rows that exist."""
    lengths = lengths_of(batch)
    longest = int(np.argmax(lengths))
    rows = np.arange(batch.ys.shape[1])[None] < lengths[:, None]
    inputs, first_inputs = np.zeros((0, 0)), None
    if batch.inputs is not None:
        inputs = np.asarray(batch.inputs)[rows]
        first_inputs = batch.inputs[longest, : lengths[longest]]
    scales = (*location_and_scale(observed_rows(batch)), *location_and_scale(inputs))
    return DataUnits(scales, int(lengths[longest]), first_inputs)


def lengths_of(batch: Series) -> Int[np.ndarray, "batch"]:
    """Return the number of rows of each series."""
    count, most = batch.ys.shape[:2]
    return np.full(count, most) if batch.length is None else np.asarray(batch.length)


def observed_rows(batch: Series) -> Float[np.ndarray, "rows obs"]:
    """Return the observations of all series, NaN where an entry is missing."""
    ys = np.array(batch.ys, float)
    if batch.mask is not None:
        ys[~np.asarray(batch.mask)] = np.nan
    return ys.reshape(-1, ys.shape[-1])
