"""Families whose factors are read from hidden units, for any recurrence of these units."""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._families.base import AbstractLinearGaussianFamily, Factor, Row
from retrodict._families.network import (
    Embedded,
    Transition,
    embed,
    mlp,
    prepared,
    transition_into,
    tril_from,
    tril_size,
)
from retrodict._families.recursions import contraction, expansion, reverse, shared_product
from retrodict._families.start import Coordinates
from retrodict._model import StateSpaceModel
from retrodict._parameters import Frozen, unwrap
from retrodict._types import PRNGKey

F = TypeVar("F", bound="AbstractReadoutFamily")


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


class AbstractReadoutFamily(AbstractLinearGaussianFamily):
    """A family that reads its factors from the `hidden` units of its state.

    The filtering law comes from the units after row k, the backward kernel q_{k-1|k} from those
    before it and the input of time k. Free gains are contractions in standard coordinates by
    construction, so that products of them do not grow with the length of the series; tied ones are
    those of the reversed transition.

    Attributes:
        law: the network of the filtering law.
        backward: the network of the backward kernel; `None` if it is the transition reversed.
        backward_start: the backward kernel if that network returns zeros.
        transition: the variational transition.
        coordinates: the units of states and data.
    """

    if TYPE_CHECKING:
        # A type checker would take abstract variables for properties.
        law: eqx.nn.MLP
        backward: eqx.nn.MLP | None
        backward_start: BackwardStart
        transition: Transition
        coordinates: Coordinates
    else:
        law: eqx.AbstractVar[eqx.nn.MLP]
        backward: eqx.AbstractVar[eqx.nn.MLP | None]
        backward_start: eqx.AbstractVar[BackwardStart]
        transition: eqx.AbstractVar[Transition]
        coordinates: eqx.AbstractVar[Coordinates]

    @property
    def tied(self) -> bool:
        """Whether the backward kernels are the variational transition reversed."""
        return self.backward is None

    def prepare(
        self: F,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> F:
        """Return the family in the units of these data, started near the model's prior chain."""
        family = prepared(self, model, ys, mask, inputs, length)
        first = reversed_start(family.coordinates, family.transition)
        return eqx.tree_at(lambda f: f.backward_start, family, first)

    def embed(self, row: Row) -> Embedded:
        """Return the row in standard coordinates."""
        return embed(self.coordinates, self.transition, row)

    def read(self, before: Any, after: Any, embedded: Embedded) -> Factor:
        """Return the law from the state after the row, and the kernel from the state before it."""
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


def draw_readouts(
    law_key: PRNGKey,
    backward_key: PRNGKey,
    state_dim: int,
    input_dim: int,
    hidden: int,
    width: int,
    tied: bool,
) -> tuple[eqx.nn.MLP, eqx.nn.MLP | None]:
    """Return random networks for the filtering law and the backward kernel."""
    size = state_dim + tril_size(state_dim)
    law = mlp(law_key, hidden, size, width, 1)
    if tied:
        return law, None
    return law, mlp(backward_key, hidden + input_dim, state_dim**2 + size, width, 1)


def reversed_start(coordinates: Coordinates, transition: Transition) -> BackwardStart:
    """Return the backward kernel of the stationary prior chain at the mean input."""
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
"""The largest gain of an untrained family; that of a random walk would be one."""
