"""Families whose factors are read from hidden units, and the one of a gated recurrent unit."""

from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._families import perceptron, recursions
from retrodict._families.base import Abstract, AbstractLinearGaussianFamily, Factor
from retrodict._families.network import (
    AbstractCellFamily,
    AbstractNetworkFamily,
    Embedded,
    Transition,
)
from retrodict._families.start import Coordinates
from retrodict._model import Frozen, Series, StateSpaceModel, unwrap
from retrodict._numerics import (
    nonsingular_law,
    shared_product,
)

F = TypeVar("F", bound="AbstractReadoutFamily")

MAX_GAIN = 0.99
"""The largest gain of an untrained family; that of a random walk would be one."""


class BackwardStart(NamedTuple):
    """The backward kernel of an untrained family, in standard coordinates.

    Attributes:
        raw_gain: w; the gain is `contraction(w)`.
        offset: the offset.
        scale: the lower factor.
    """

    raw_gain: Any
    offset: Any
    scale: Any


class AbstractReadoutFamily(AbstractNetworkFamily, AbstractLinearGaussianFamily):
    """A family that reads its factors from the `hidden` units of its state.

    The filtering law comes from the units after row k, the backward kernel q_{k-1|k} from those
    before it and the input of time k. Free gains are contractions in standard coordinates by
    construction, so that products of them do not grow with the length of the series; tied ones are
    those of the reversed transition.

    Attributes:
        law: the network of the filtering law.
        backward: the network of the backward kernel; `None` if it is the transition reversed.
        backward_start: the backward kernel if that network returns zeros.
        width: units in the hidden layer of both networks.
    """

    law: Abstract[eqx.nn.MLP]
    backward: Abstract[eqx.nn.MLP | None]
    backward_start: Abstract[BackwardStart]
    width: Abstract[int]

    @property
    def tied(self) -> bool:
        """Whether the backward kernels are the variational transition reversed."""
        return self.backward is None

    def started(self: F, model: StateSpaceModel, batch: Series) -> F:
        """Return the family in the units of the data, with the kernel of the prior chain."""
        family = self.in_units(model, batch)
        first = reversed_start(family.coordinates, family.transition)
        return eqx.tree_at(lambda f: f.backward_start, family, first)

    def embed(self, row: Series) -> Embedded:
        """Return the row in standard coordinates."""
        return self.standard(row)

    def read(self, before: Any, after: Any, embedded: Embedded) -> Factor:
        """Return the law from the state after the row, and the kernel from the state before it."""
        if self.backward is None:
            law = self._law(before.hidden)
            back = recursions.reverse(*law, self.transition_into(embedded))
        else:
            back = self._backward(before.hidden, embedded.u)
        return self.coordinates.factor(*self._law(after.hidden), *back)

    def _law(self, hidden: Float[Array, "hidden"]) -> tuple[Array, Array]:
        out, d = self.law(hidden), self.state_dim
        return out[:d], perceptron.tril_from(out[d:], d)

    def _backward(
        self, hidden: Float[Array, "hidden"], u: Float[Array, "input"] | None
    ) -> tuple[Array, Array, Array]:
        known = hidden if u is None else jnp.concatenate([hidden, u])
        out, d, first = self.backward(known), self.state_dim, self.backward_start  # pyright: ignore
        gain = nonsingular_law.contraction(first.raw_gain + out[: d * d].reshape(d, d))
        offset = first.offset + out[d * d : d * d + d]
        return (
            gain,
            offset,
            shared_product(first.scale, perceptron.tril_from(out[d * d + d :], d)),
        )

    def draw_readouts(
        self, law_key: PRNGKey, backward_key: PRNGKey, hidden: int, tied: bool
    ) -> tuple[eqx.nn.MLP, eqx.nn.MLP | None]:
        """Return random networks for the filtering law and the backward kernel."""
        d, size = self.state_dim, self.state_dim + perceptron.tril_size(self.state_dim)
        law = perceptron.mlp(law_key, hidden, size, self.width, 1)
        if tied:
            return law, None
        return law, perceptron.mlp(
            backward_key, hidden + self.input_dim, d**2 + size, self.width, 1
        )


@eqx.filter_jit
def reversed_start(coordinates: Coordinates, transition: Transition) -> BackwardStart:
    """Return the backward kernel of the stationary prior chain at the mean input."""
    coordinates, transition = unwrap(coordinates), unwrap(transition)
    u = coordinates.input_location if coordinates.input_location.size else None
    row = Series(coordinates.obs_location, None, u)
    kernel = transition.moving(coordinates, row)
    kernel = transition.fixed() if kernel is None else kernel
    d = kernel.bias.shape[0]
    gain, offset, scale = recursions.reverse(jnp.zeros(d), jnp.eye(d), kernel)
    norm = jnp.linalg.norm(gain, ord=2)
    gain = gain * jnp.minimum(1.0, MAX_GAIN / jnp.where(norm > 0, norm, 1.0))
    return BackwardStart(Frozen(nonsingular_law.expansion(gain)), Frozen(offset), Frozen(scale))


class RecurrentFamily(AbstractCellFamily, AbstractReadoutFamily):
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
        super().__init__(state_dim, obs_dim, input_dim)  # pyright: ignore
        hidden, self.width = check_count(hidden, "hidden"), check_count(width, "width")
        self.cell, self.law, self.backward = self._draw(key, hidden, tied)
        self.backward_start = reversed_start(self.coordinates, self.transition)

    def redraw(self, key: PRNGKey) -> "RecurrentFamily":
        """Return the same family with a new random cell and readouts."""
        fresh = self._draw(key, self.cell.hidden_size, self.tied)
        return eqx.tree_at(
            lambda f: (f.cell, f.law, f.backward), self, fresh, is_leaf=lambda leaf: leaf is None
        )

    def _draw(
        self, key: PRNGKey, hidden: int, tied: bool
    ) -> tuple[eqx.nn.GRUCell, eqx.nn.MLP, eqx.nn.MLP | None]:
        """Return a random cell and two readouts."""
        check_key(key, "RecurrentFamily")
        cell_key, law_key, backward_key = jax.random.split(key, 3)
        cell = eqx.nn.GRUCell(self.num_features, hidden, key=cell_key)
        return cell, *self.draw_readouts(law_key, backward_key, hidden, tied)
