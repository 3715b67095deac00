"""The recurrent family: a gated recurrent unit, from which every factor is read."""

import equinox as eqx
import jax

from retrodict._families.network import (
    Embedded,
    RecurrentState,
    Transition,
    at_rest,
    check_dimensions,
)
from retrodict._families.readout import (
    AbstractReadoutFamily,
    BackwardStart,
    draw_readouts,
    reversed_start,
)
from retrodict._families.start import Coordinates
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key


class RecurrentFamily(AbstractReadoutFamily):
    """A family with a recurrent state a_k = f(a_{k-1}, y_k), and factors g(a_k) read from it.

    The filtering law comes from a_k, the backward kernel q_{k-1|k} from a_{k-1} and the input of
    time k. Free gains are contractions in standard coordinates by construction, so that products of
    them do not grow with the length of the series; tied ones are those of the reversed transition.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.RecurrentFamily(jax.random.key(0), state_dim=2, obs_dim=1)
        >>> family.infer(jnp.ones((5, 1))).kernels.weight.shape
        (4, 2, 2)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        input_dim: the dimension of an input; 0 if the model takes none.
        hidden: units of the recurrent state.
        width: units in the hidden layer of the readouts.
        tied: whether the backward kernels are the variational transition reversed, instead of being
            read out freely.
    """

    cell: eqx.nn.GRUCell
    law: eqx.nn.MLP
    backward: eqx.nn.MLP | None
    backward_start: BackwardStart
    transition: Transition
    coordinates: Coordinates
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore
    width: int = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        hidden: int = 16,
        width: int = 16,
        tied: bool = False,
    ):
        check_dimensions(state_dim, obs_dim, input_dim)
        hidden = check_count(hidden, "hidden")
        self.state_dim, self.obs_dim, self.input_dim = state_dim, obs_dim, input_dim
        self.width = check_count(width, "width")
        self.cell, self.law, self.backward = _draw(
            key, state_dim, 2 * obs_dim + input_dim, input_dim, hidden, self.width, tied
        )
        self.transition = Transition.default(state_dim, input_dim)
        self.coordinates = Coordinates.identity(state_dim, obs_dim, input_dim)
        self.backward_start = reversed_start(self.coordinates, self.transition)

    def redraw(self, key: PRNGKey) -> "RecurrentFamily":
        """Return the same family with a new random cell and readouts."""
        fresh = _draw(
            key,
            self.state_dim,
            self.cell.input_size,
            self.input_dim,
            self.cell.hidden_size,
            self.width,
            self.tied,
        )
        return eqx.tree_at(
            lambda f: (f.cell, f.law, f.backward), self, fresh, is_leaf=lambda leaf: leaf is None
        )

    def init(self) -> RecurrentState:
        """Return zero hidden units."""
        return at_rest(self.cell)

    def advance(self, state: RecurrentState, embedded: Embedded) -> RecurrentState:
        """Update the cell."""
        return RecurrentState(self.cell(embedded.features, state.hidden))


def _draw(
    key: PRNGKey,
    state_dim: int,
    features: int,
    input_dim: int,
    hidden: int,
    width: int,
    tied: bool,
) -> tuple[eqx.nn.GRUCell, eqx.nn.MLP, eqx.nn.MLP | None]:
    """Return a random cell and two readouts."""
    check_key(key, "RecurrentFamily")
    cell_key, law_key, backward_key = jax.random.split(key, 3)
    cell = eqx.nn.GRUCell(features, hidden, key=cell_key)
    return cell, *draw_readouts(law_key, backward_key, state_dim, input_dim, hidden, width, tied)
