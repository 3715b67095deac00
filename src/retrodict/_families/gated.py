"""The gated family: a network of the prediction and the row, with a forget gate."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey
from retrodict._families import perceptron, recursions
from retrodict._families.network import AbstractLawFamily, Embedded, Transition
from retrodict._families.recursions import GaussianState
from retrodict._families.start import Coordinates
from retrodict._model import LinearGaussianKernel, Series
from retrodict._numerics import linalg, transposed


class GatedFamily(AbstractLawFamily):
    """The gated family of the paper: (μ_k, Σ_k) = r(u_k, y_k) with predictive parameters u_k.

    With the variational transition u_k = (Ā μ_{k-1} + ā, Ā Σ_{k-1} Āᵀ + Q̄), a network reads u_k
    and y_k and proposes a law and a gate s in (0, 1); the filtering law is (1 − s) times the
    proposal plus s times the prediction, coordinate by coordinate. Backward kernels are the
    variational transition reversed: q_{k-1|k}(x_k, ·) ∝ m̄(·, x_k) q_{k-1}.

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
        gate: the coordinates in which the gate acts: `"natural"` for the natural parameters,
            `"scale"` for the mean and the rows of the lower Cholesky factor.
    """

    network: eqx.nn.MLP
    transition: Transition
    coordinates: Coordinates
    gate: Literal["natural", "scale"] = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        width: int = 32,
        depth: int = 2,
        gate: Literal["natural", "scale"] = "natural",
    ):
        super().__init__(state_dim, obs_dim, input_dim)  # pyright: ignore
        if gate not in ("natural", "scale"):
            raise ValueError(f"GatedFamily expects gate 'natural' or 'scale', got {gate!r}.")
        self.gate = gate
        law_size = state_dim + perceptron.tril_size(state_dim)
        in_size = self.num_features + law_size
        self.network = perceptron.mlp(key, in_size, law_size + 2 * state_dim, width, depth)

    def embed(self, row: Series) -> Embedded:
        """Return the row in standard coordinates."""
        return self.standard(row)

    def advance(self, state: GaussianState, embedded: Embedded) -> GaussianState:
        """Predict, and mix the prediction with the network's proposal."""
        kernel = self.transition_into(embedded)
        step = self._in_natural_parameters if self.gate == "natural" else self._in_scales
        mean, scale = step(state, kernel, embedded.features)
        return GaussianState(mean, scale, state.num_read + 1)

    def _in_natural_parameters(
        self, state: GaussianState, kernel: LinearGaussianKernel, features: Float[Array, "features"]
    ) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
        """Mix η and Λ; precisions are weighted from both sides and stay positive definite."""
        mean, whitener = recursions.predicted_whitener(state, kernel)
        proposed, root, mean_gate, gate = self._propose(features, mean, whitener)
        old, new = jnp.sqrt(gate)[:, None], jnp.sqrt(1 - gate)[:, None]
        one, other = old * transposed(whitener), new * root
        precision_mean = mean_gate * linalg.matvec(whitener.T, linalg.matvec(whitener, mean))
        pull = linalg.matvec(root, linalg.matvec(root.T, proposed))
        precision_mean = precision_mean + (1 - mean_gate) * pull
        return recursions.from_natural(precision_mean, one, other)

    def _in_scales(
        self, state: GaussianState, kernel: LinearGaussianKernel, features: Float[Array, "features"]
    ) -> tuple[Float[Array, "d"], Float[Array, "d d"]]:
        """Mix means and the rows of the lower factors, which stay lower factors."""
        mean, scale = recursions.predicted(state, kernel)
        proposed, root, mean_gate, gate = self._propose(features, mean, scale)
        rows = gate[:, None]
        return mean_gate * mean + (1 - mean_gate) * proposed, rows * scale + (1 - rows) * root

    def _propose(
        self,
        features: Float[Array, "features"],
        mean: Float[Array, "d"],
        factor: Float[Array, "d d"],
    ) -> tuple[Float[Array, "d"], Float[Array, "d d"], Float[Array, "d"], Float[Array, "d"]]:
        """Return the mean, lower factor and two gates that the network proposes."""
        d = self.state_dim
        out = self.network(jnp.concatenate([features, mean, perceptron.tril_features(factor)]))
        gates = jax.nn.sigmoid(out[-2 * d :])
        return (
            out[:d],
            perceptron.tril_from(out[d : d + perceptron.tril_size(d)], d),
            gates[:d],
            gates[d:],
        )
