"""The recurrent family: a gated recurrent unit, from which every factor is read."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._family._base import AbstractLinearGaussianFamily, Factor, Row, refuse_parallel
from retrodict._family._network import (
    Embedded,
    RecurrentState,
    Transition,
    at_rest,
    check_dimensions,
    embed,
    mlp,
    prepared,
    transition_into,
    tril_from,
    tril_size,
)
from retrodict._family._recursions import contraction, expansion, reverse, shared_product
from retrodict._family._start import Coordinates
from retrodict._model import StateSpaceModel
from retrodict._parameters import Frozen, unwrap
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key


class BackwardStart(NamedTuple):
    """The backward kernel of an untrained family, in standard coordinates.

    Attributes:
        raw_gain: w, of which the gain is `contraction(w)`.
        offset: the offset.
        scale: the lower factor.
    """

    raw_gain: Any
    offset: Any
    scale: Any


class RecurrentFamily(AbstractLinearGaussianFamily):
    """The general form: a recurrent state a_k = f(a_{k-1}, y_k), and factors g(a_k) read from it.

    The filtering law comes from a_k, the backward kernel q_{k-1|k} from a_{k-1} and the input of
    time k. Free gains are contractions in standard coordinates by construction, so that no product
    of them grows however long the series is; tied ones are those of the reversed transition.

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
        self.backward_start = _reversed(self.coordinates, self.transition)

    @property
    def tied(self) -> bool:
        """Whether the backward kernels are the variational transition reversed."""
        return self.backward is None

    def prepare(
        self,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> "RecurrentFamily":
        """The family in the units of these data, started near the model's prior chain."""
        family = prepared(self, model, ys, mask, inputs, length)
        first = _reversed(family.coordinates, family.transition)
        return eqx.tree_at(lambda f: f.backward_start, family, first)

    def redraw(self, key: PRNGKey) -> "RecurrentFamily":
        """The same family with a freshly drawn cell and readouts."""
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
        """Hidden units at rest."""
        return at_rest(self.cell)

    def embed(self, row: Row) -> Embedded:
        """The row in standard coordinates."""
        return embed(self.coordinates, self.transition, row)

    def advance(self, state: RecurrentState, embedded: Embedded) -> RecurrentState:
        """One update of the cell."""
        return RecurrentState(self.cell(embedded.features, state.hidden))

    def advance_in_parallel(
        self, embedded: Embedded, exists: Bool[Array, "time"] | None
    ) -> RecurrentState:
        """Refused: the cell is not associative."""
        refuse_parallel(self)

    def read(self, before: RecurrentState, after: RecurrentState, embedded: Embedded) -> Factor:
        """The law from the state after the row, the backward kernel from the one before it."""
        if self.backward is None:
            kernel = transition_into(self.transition, embedded)
            back = reverse(*self._law(before.hidden), kernel.weight, kernel.bias, kernel.scale_tril)
        else:
            back = self._backward(before.hidden, embedded.u)
        return self.coordinates.factor(*self._law(after.hidden), *back)

    def _law(self, hidden: Float[Array, "hidden"]) -> tuple[Array, Array]:
        out, d = self.law(hidden), self.state_dim
        return out[:d], tril_from(out[d:], d)

    def _backward(
        self, hidden: Float[Array, "hidden"], u: Float[Array, "input"] | None
    ) -> tuple[Array, Array, Array]:
        known = hidden if u is None else jnp.concatenate([hidden, u])
        out, d, first = self.backward(known), self.state_dim, self.backward_start  # pyright: ignore
        gain = contraction(first.raw_gain + out[: d * d].reshape(d, d))
        offset = first.offset + out[d * d : d * d + d]
        return gain, offset, shared_product(first.scale, tril_from(out[d * d + d :], d))


def _draw(
    key: PRNGKey,
    state_dim: int,
    features: int,
    input_dim: int,
    hidden: int,
    width: int,
    tied: bool,
) -> tuple[eqx.nn.GRUCell, eqx.nn.MLP, eqx.nn.MLP | None]:
    """The cell and the two readouts."""
    check_key(key, "RecurrentFamily")
    cell_key, law_key, backward_key = jax.random.split(key, 3)
    size = state_dim + tril_size(state_dim)
    cell = eqx.nn.GRUCell(features, hidden, key=cell_key)
    law = mlp(law_key, hidden, size, width, 1)
    if tied:
        return cell, law, None
    return cell, law, mlp(backward_key, hidden + input_dim, state_dim**2 + size, width, 1)


def _reversed(coordinates: Coordinates, transition: Transition) -> BackwardStart:
    """The backward kernel of the prior chain where it is stationary, at the mean input."""
    coordinates, transition = unwrap(coordinates), unwrap(transition)
    u = coordinates.input_location if coordinates.input_location.size else None
    row = Row(coordinates.obs_location, None, u)
    kernel = transition.moving(coordinates, row)
    kernel = transition.fixed() if kernel is None else kernel
    d = kernel.bias.shape[0]
    gain, offset, scale = reverse(
        jnp.zeros(d), jnp.eye(d), kernel.weight, kernel.bias, kernel.scale_tril
    )
    norm = jnp.linalg.norm(gain, ord=2)
    gain = gain * jnp.minimum(1.0, MAX_GAIN / jnp.where(norm > 0, norm, 1.0))
    return BackwardStart(Frozen(expansion(gain)), Frozen(offset), Frozen(scale))


MAX_GAIN = 0.99
"""The largest gain that an untrained family starts with; a random walk's would be one."""
