"""The conjugate family: natural parameters from each row alone, added to the predicted ones."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, check_count
from retrodict._families import perceptron, recursions
from retrodict._families.network import AbstractLawFamily, Embedded, Transition
from retrodict._families.recursions import GaussianState
from retrodict._families.start import Coordinates
from retrodict._model import LinearGaussianKernel, Series
from retrodict._numerics import linalg, nonsingular_law
from retrodict.distributed import Parallel


class Potential(NamedTuple):
    """A row and its potential exp(−½‖rᵀz − v‖²), computed by the encoder.

    Attributes:
        row: the row in standard coordinates.
        design: rᵀ.
        value: v = r⁻¹η, for the natural parameters η and r rᵀ.
    """

    row: Embedded
    design: Float[Array, "*time state state"]
    value: Float[Array, "*time state"]

    @property
    def transition(self) -> LinearGaussianKernel | None:
        """The variational transition into the row, if it depends on inputs."""
        return self.row.transition


class ConjugateFamily(AbstractLawFamily):
    """The conjugate family of Johnson et al. (2016) and Hälvä et al. (2021).

    An encoder of y_k alone gives natural parameters (η, Λ), which are added to those of the
    prediction Ā q_{k-1}: conditioning on a Gaussian potential. Backward kernels follow from the
    variational transition. Since the encoder reads each row alone, `infer(..., parallel=True)` runs
    in O(log n) depth.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.ConjugateFamily(jax.random.key(0), state_dim=2, obs_dim=1)
        >>> family.infer(jnp.ones((5, 1))).marginals().mean.shape
        (5, 2)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        input_dim: the dimension of an input; 0 if the model takes none.
        width: units in a hidden layer of the encoder.
        depth: hidden layers.
    """

    network: eqx.nn.MLP
    transition: Transition
    coordinates: Coordinates

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        width: int = 32,
        depth: int = 2,
    ):
        super().__init__(state_dim, obs_dim, input_dim)  # pyright: ignore
        size = state_dim + perceptron.tril_size(state_dim)
        self.network = perceptron.mlp(
            key, self.num_features, size, width, check_count(depth, "depth")
        )

    def embed(self, row: Series) -> Potential:
        """Compute the potential of the row."""
        embedded, d = self.standard(row), self.state_dim
        out = self.network(embedded.features)
        root = START * perceptron.tril_from(out[d:], d)
        if row.mask is not None:
            # A missing row carries no information.
            root = jnp.where(jnp.any(row.mask), root, NOTHING * jnp.eye(d, dtype=root.dtype))
            out = jnp.where(jnp.any(row.mask), out, 0.0)
        return Potential(embedded, root.T, linalg.solve_triangular(root, out[:d]))

    def advance(self, state: GaussianState, embedded: Potential) -> GaussianState:
        """Predict, and add the natural parameters of the row."""
        law = recursions.predicted(state, self.transition_into(embedded))
        law = nonsingular_law.condition(*law, embedded.design, embedded.value)
        return GaussianState(*law, state.num_read + 1)

    def advance_in_parallel(
        self, embedded: Potential, exists: Bool[Array, "time"] | None, parallel: Parallel = True
    ) -> GaussianState:
        """Compute all filtering laws by an associative scan."""
        kernel = self.transition_into(embedded)
        return recursions.filtered_in_parallel(
            self.init(), kernel, embedded.design, embedded.value, exists, parallel
        )


START = 0.1
"""The root precision of an untrained potential, in units of the prior's spread."""

NOTHING = 1e-6
"""The root precision of a missing row."""
