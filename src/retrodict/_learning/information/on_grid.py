"""The observed information of a model with one or two states, from its evidence on a grid."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from retrodict._exact import Grid, Kind, grid_smoother, increments, kind_of
from retrodict._learning.coordinates import Coordinates
from retrodict._learning.information.exact import by_differences
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import Scalar


class GridEvidence(eqx.Module):
    """The log-evidence log p(y) by a differentiable forward pass on a grid."""

    grid: Grid
    kind: Kind = eqx.field(static=True)

    def __call__(self, model: StateSpaceModel, series: Series) -> Scalar:
        """Return the log-evidence of one series under an unwrapped model."""
        return jnp.sum(increments(model, series, self.grid, self.kind))


def grid_information(
    coordinates: Coordinates, batch: Series, grid: Grid
) -> tuple[Float[Array, "parameter"], Float[Array, "parameter parameter"]]:
    """Return the gradient of log p_θ(y), summed over the series, and minus its Hessian.

    Raises:
        ValueError: if the grid does not cover the states of a series, or is too coarse.
    """
    plain = unwrap(coordinates.model)
    statuses = np.asarray(_statuses(plain, batch, grid))
    if np.any(statuses):
        wrong = np.flatnonzero(statuses).tolist()
        raise ValueError(
            f"The grid does not cover the states of the series {wrong[:5]}, or is too coarse. Use a"
            " wider or a finer grid; `grid_smoother` of one of these series reports which."
        )
    u = None if batch.inputs is None else batch.inputs[0, 0]
    evidence = GridEvidence(grid, kind_of(plain.transition, grid, u))
    return by_differences(coordinates, batch, evidence)


@eqx.filter_jit
def _statuses(model: StateSpaceModel, batch: Series, grid: Grid) -> Int[Array, "batch"]:
    """Return the status of the grid for each series, zero if it is accurate."""

    def status(series: Series) -> Array:
        posterior = grid_smoother(
            model,
            series.ys,
            grid,
            mask=series.mask,
            inputs=series.inputs,
            length=series.length,
        )
        return posterior.status

    return jax.lax.map(status, batch)
