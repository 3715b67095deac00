"""The scan family: linear recurrences, from which every factor is read in O(log n) depth."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._families.network import Embedded, Transition
from retrodict._families.recurrent import AbstractReadoutFamily, BackwardStart, reversed_start
from retrodict._families.start import Coordinates
from retrodict._model import repeat_last_row
from retrodict._numerics import linear_recurrence
from retrodict.distributed import Parallel

MAX_MEMORY = 64.0
"""The number of rows that the slowest unit of an untrained layer averages over."""


class ScanState(NamedTuple):
    """The state of a stack of linear recurrences.

    Attributes:
        memory: the units of each layer.
        hidden: the output of the last layer; factors are read from it.
    """

    memory: Float[Array, "*time layer hidden"]
    hidden: Float[Array, "*time hidden"]


class ScanLayer(eqx.Module):
    """One layer: a linear recurrence of its input, and a nonlinear mix of both.

    With the input v_k, the units are h_k = (1 − z_k) h_{k-1} + z_k c_k with the gate z_k = σ(W_z
    v_k) and the candidate c_k = tanh(W_c v_k), neither of which depends on h (the minimal gated
    unit of Feng et al., 2024). The output is tanh(U [h_k, v_k]).

    Attributes:
        gate: W_z.
        candidate: W_c.
        mix: U.
    """

    gate: eqx.nn.Linear
    candidate: eqx.nn.Linear
    mix: eqx.nn.Linear

    @classmethod
    def draw(cls, key: PRNGKey, below: int, hidden: int) -> "ScanLayer":
        """Return a random layer whose units forget over one to `MAX_MEMORY` rows."""
        gate_key, candidate_key, mix_key = jax.random.split(key, 3)
        gate = eqx.nn.Linear(below, hidden, key=gate_key)
        rows = MAX_MEMORY ** ((np.arange(hidden) + 0.5) / hidden)
        start = jnp.asarray(-np.log(rows - 1.0), gate.weight.dtype)
        return cls(
            eqx.tree_at(lambda layer: layer.bias, gate, start),
            eqx.nn.Linear(below, hidden, key=candidate_key),
            eqx.nn.Linear(hidden + below, hidden, key=mix_key),
        )

    def recurrence(
        self, below: Float[Array, "below"]
    ) -> tuple[Float[Array, "hidden"], Float[Array, "hidden"]]:
        """Return the decay 1 − z_k and the drive z_k c_k of one row."""
        opened = self.gate(below)
        return jax.nn.sigmoid(-opened), jax.nn.sigmoid(opened) * jnp.tanh(self.candidate(below))

    def above(
        self, memory: Float[Array, "hidden"], below: Float[Array, "below"]
    ) -> Float[Array, "hidden"]:
        """Return the input of the next layer."""
        return jnp.tanh(self.mix(jnp.concatenate([memory, below])))


class ScanFamily(AbstractReadoutFamily):
    """A family with a stack of linear recurrences, whose factors are read from the last layer.

    As in `RecurrentFamily` the filtering law comes from the state after row k and the backward
    kernel q_{k-1|k} from the one before it. The state consists of layers (`ScanLayer`), each of
    which is linear in its past, so that `infer(..., parallel=True)` runs in O(log n) depth;
    the update by an observation can depend on the state from the second layer on. Pass the same
    option to `marginals`, `elbo` and `fit`.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.ScanFamily(jax.random.key(0), state_dim=2, obs_dim=1)
        >>> chain = family.infer(jnp.ones((5, 1)), parallel=True)
        >>> chain.marginals(parallel=True).mean.shape
        (5, 2)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        input_dim: the dimension of an input; 0 if the model takes none.
        hidden: units of each layer.
        depth: layers.
        width: units in the hidden layer of the readouts.
        tied: whether the backward kernels are the variational transition reversed, instead of being
            read out freely.
    """

    layers: tuple[ScanLayer, ...]
    law: eqx.nn.MLP
    backward: eqx.nn.MLP | None
    backward_start: BackwardStart
    transition: Transition
    coordinates: Coordinates
    hidden: int = eqx.field(static=True)
    width: int = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        hidden: int = 16,
        depth: int = 3,
        width: int = 16,
        tied: bool = False,
    ):
        super().__init__(state_dim, obs_dim, input_dim)  # pyright: ignore
        self.hidden, self.width = check_count(hidden, "hidden"), check_count(width, "width")
        self.layers, self.law, self.backward = self._draw(key, check_count(depth, "depth"), tied)
        self.backward_start = reversed_start(self.coordinates, self.transition)

    def redraw(self, key: PRNGKey) -> "ScanFamily":
        """Return the same family with new random layers and readouts."""
        fresh = self._draw(key, len(self.layers), self.tied)
        return eqx.tree_at(
            lambda f: (f.layers, f.law, f.backward), self, fresh, is_leaf=lambda leaf: leaf is None
        )

    def init(self) -> ScanState:
        """Return zero units."""
        dtype = self.layers[0].gate.weight.dtype
        return ScanState(
            jnp.zeros((len(self.layers), self.hidden), dtype), jnp.zeros(self.hidden, dtype)
        )

    def advance(self, state: ScanState, embedded: Embedded) -> ScanState:
        """Advance every recurrence by one row."""
        below, memory = embedded.features, []
        for layer, before in zip(self.layers, state.memory, strict=True):
            decay, drive = layer.recurrence(below)
            memory.append(decay * before + drive)
            below = layer.above(memory[-1], below)
        return ScanState(jnp.stack(memory), below)

    def advance_in_parallel(
        self, embedded: Embedded, exists: Bool[Array, "time"] | None, parallel: Parallel = True
    ) -> ScanState:
        """Compute all rows of each recurrence, layer after layer."""
        below, memory = embedded.features, []
        for layer in self.layers:
            memory.append(linear_recurrence(*jax.vmap(layer.recurrence)(below), parallel))
            below = jax.vmap(layer.above)(memory[-1], below)
        states = ScanState(jnp.stack(memory, axis=1), below)
        return states if exists is None else repeat_last_row(states, exists)

    def _draw(
        self, key: PRNGKey, depth: int, tied: bool
    ) -> tuple[tuple[ScanLayer, ...], eqx.nn.MLP, eqx.nn.MLP | None]:
        """Return random layers and two readouts."""
        check_key(key, "ScanFamily")
        law_key, backward_key, *layer_keys = jax.random.split(key, 2 + depth)
        sizes = [self.num_features] + [self.hidden] * (depth - 1)
        layers = tuple(
            ScanLayer.draw(layer_key, below, self.hidden)
            for layer_key, below in zip(layer_keys, sizes, strict=True)
        )
        return layers, *self.draw_readouts(law_key, backward_key, self.hidden, tied)
