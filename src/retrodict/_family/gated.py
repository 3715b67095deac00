"""The gated family: a network of the prediction and the row, with a forget gate."""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._family._base import AbstractLinearGaussianFamily, Factor, Row, refuse_parallel
from retrodict._family._network import (
    Embedded,
    Transition,
    check_dimensions,
    embed,
    mlp,
    start,
    transition_into,
    tril_features,
    tril_from,
    tril_size,
)
from retrodict._family._recursions import GaussianState, before_anything, predicted, reverse
from retrodict._family._start import Coordinates
from retrodict._gaussian import Gaussian, NaturalGaussian
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._types import PRNGKey


class GatedFamily(AbstractLinearGaussianFamily):
    """The paper's family: (μ_k, Σ_k) = r(u_k, y_k) with predictive parameters u_k.

    With the variational transition u_k = (Ā μ_{k-1} + ā, Ā Σ_{k-1} Āᵀ + Q̄), a network reads u_k and
    y_k and proposes a law and a gate s in (0, 1); the filtering law is (1 − s) times the proposal
    plus s times the prediction, coordinate by coordinate. Backward kernels are the variational
    transition reversed: q_{k-1|k}(x_k, ·) ∝ m̄(·, x_k) q_{k-1}.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.GatedFamily(jax.random.key(0), state_dim=2, obs_dim=1)
        >>> state, factor = family.step(family.init(), jnp.ones(1))
        >>> factor.law.mean.shape
        (2,)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        input_dim: the dimension of an input; 0 if the model takes none.
        width: units in a hidden layer.
        depth: hidden layers.
        gate: the coordinates in which the gate acts: `"scale"` for the mean and the rows of the
            lower Cholesky factor, `"natural"` for the natural parameters.
    """

    network: eqx.nn.MLP
    transition: Transition
    coordinates: Coordinates
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore
    gate: Literal["scale", "natural"] = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        width: int = 32,
        depth: int = 2,
        gate: Literal["scale", "natural"] = "scale",
    ):
        check_dimensions(state_dim, obs_dim, input_dim)
        if gate not in ("scale", "natural"):
            raise ValueError(f"GatedFamily expects gate 'scale' or 'natural', got {gate!r}.")
        self.state_dim, self.obs_dim, self.input_dim = state_dim, obs_dim, input_dim
        self.gate = gate
        law_size = state_dim + tril_size(state_dim)
        in_size = 2 * obs_dim + input_dim + law_size
        self.network = mlp(key, in_size, law_size + 2 * state_dim, width, depth)
        self.transition = Transition.default(state_dim, input_dim)
        self.coordinates = Coordinates.identity(state_dim, obs_dim, input_dim)

    def prepare(
        self,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> "GatedFamily":
        """The family in the units of these data, started near the model's prior chain."""
        coordinates, transition = start(self, model, ys, mask, inputs, length)
        return eqx.tree_at(lambda f: (f.coordinates, f.transition), self, (coordinates, transition))

    def redraw(self, key: PRNGKey) -> "GatedFamily":
        """The same family with a freshly drawn network."""
        width, depth = self.network.width_size, self.network.depth
        fresh = mlp(key, self.network.in_size, self.network.out_size, width, depth)
        return eqx.tree_at(lambda f: f.network, self, fresh)

    def init(self) -> GaussianState:
        """The variational prior."""
        return before_anything(unwrap(self.transition.prior))

    def embed(self, row: Row) -> Embedded:
        """The row in standard coordinates."""
        return embed(self.coordinates, self.transition, row)

    def advance(self, state: GaussianState, embedded: Embedded) -> GaussianState:
        """Predicts, and mixes the prediction with the network's proposal."""
        mean, scale = predicted(state, transition_into(self.transition, embedded))
        d = self.state_dim
        out = self.network(jnp.concatenate([embedded.features, mean, tril_features(scale)]))
        proposal = Gaussian(out[:d], tril_from(out[d : d + tril_size(d)], d))
        gates = jax.nn.sigmoid(out[-2 * d :])
        mix = _mix_scales if self.gate == "scale" else _mix_natural
        law = mix(Gaussian(mean, scale), proposal, gates[:d], gates[d:])
        return GaussianState(law.mean, law.scale_tril, state.num_read + 1)

    def advance_in_parallel(
        self, embedded: Embedded, exists: Bool[Array, "time"] | None
    ) -> GaussianState:
        """Refused: the network reads the prediction."""
        refuse_parallel(self)

    def read(self, before: GaussianState, after: GaussianState, embedded: Embedded) -> Factor:
        """The law, and the variational transition reversed under the law before it."""
        kernel = transition_into(self.transition, embedded)
        back = reverse(before.mean, before.scale, kernel.weight, kernel.bias, kernel.scale_tril)
        return self.coordinates.factor(after.mean, after.scale, *back)


def _mix_scales(
    prediction: Gaussian,
    proposal: Gaussian,
    mean_gate: Float[Array, "d"],
    scale_gate: Float[Array, "d"],
) -> Gaussian:
    """Means and rows of the lower factors, which stay lower with a positive diagonal."""
    rows = scale_gate[:, None]
    return Gaussian(
        mean_gate * prediction.mean + (1 - mean_gate) * proposal.mean,
        rows * prediction.scale_tril + (1 - rows) * proposal.scale_tril,
    )


def _mix_natural(
    prediction: Gaussian,
    proposal: Gaussian,
    mean_gate: Float[Array, "d"],
    scale_gate: Float[Array, "d"],
) -> Gaussian:
    """Natural parameters; precisions are weighted from both sides and stay positive definite."""
    one, other = prediction.to_natural(), proposal.to_natural()
    kept, new = jnp.sqrt(scale_gate), jnp.sqrt(1 - scale_gate)
    mixed = NaturalGaussian(
        mean_gate * one.precision_mean + (1 - mean_gate) * other.precision_mean,
        kept[:, None] * one.precision * kept[None, :] + new[:, None] * other.precision * new[None],
    )
    return mixed.to_moments()
