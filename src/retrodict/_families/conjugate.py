"""The conjugate family: natural parameters from each row alone, added to the predicted ones."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._families.base import AbstractLinearGaussianFamily, Factor, Row
from retrodict._families.network import (
    AbstractNetworkFamily,
    Embedded,
    Transition,
    check_dimensions,
    embed,
    mlp,
    redrawn,
    transition_into,
    tril_from,
    tril_size,
)
from retrodict._families.recursions import (
    GaussianState,
    condition,
    filtered_in_parallel,
    predicted,
    prior_state,
    reverse,
)
from retrodict._families.start import Coordinates
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._types import PRNGKey
from retrodict._validate import check_count
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


class ConjugateFamily(AbstractNetworkFamily, AbstractLinearGaussianFamily):
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
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore

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
        check_dimensions(state_dim, obs_dim, input_dim)
        self.state_dim, self.obs_dim, self.input_dim = state_dim, obs_dim, input_dim
        size = state_dim + tril_size(state_dim)
        depth = check_count(depth, "depth")
        self.network = mlp(key, 2 * obs_dim + input_dim, size, width, depth)
        self.transition = Transition.default(state_dim, input_dim)
        self.coordinates = Coordinates.identity(state_dim, obs_dim, input_dim)

    def redraw(self, key: PRNGKey) -> "ConjugateFamily":
        """Return the same family with a new random encoder."""
        return eqx.tree_at(lambda f: f.network, self, redrawn(key, self.network))

    def init(self) -> GaussianState:
        """Return the variational prior."""
        return prior_state(unwrap(self.transition.prior))

    def embed(self, row: Row) -> Potential:
        """Compute the potential of the row."""
        embedded, d = embed(self.coordinates, self.transition, row), self.state_dim
        out = self.network(embedded.features)
        root = START * tril_from(out[d:], d)
        if row.seen is not None:
            # A missing row carries no information.
            root = jnp.where(jnp.any(row.seen), root, NOTHING * jnp.eye(d, dtype=root.dtype))
            out = jnp.where(jnp.any(row.seen), out, 0.0)
        return Potential(embedded, root.T, linalg.solve_triangular(root, out[:d]))

    def advance(self, state: GaussianState, embedded: Potential) -> GaussianState:
        """Predict, and add the natural parameters of the row."""
        law = predicted(state, transition_into(self.transition, embedded.row))
        return GaussianState(*condition(*law, embedded.design, embedded.value), state.num_read + 1)

    def advance_in_parallel(
        self, embedded: Potential, exists: Bool[Array, "time"] | None, parallel: Parallel = True
    ) -> GaussianState:
        """Compute all filtering laws by an associative scan."""
        kernel = transition_into(self.transition, embedded.row)
        return filtered_in_parallel(
            self.init(), kernel, embedded.design, embedded.value, exists, parallel
        )

    def read(self, before: GaussianState, after: GaussianState, embedded: Potential) -> Factor:
        """Return the law, and the variational transition reversed under the previous law."""
        kernel = transition_into(self.transition, embedded.row)
        back = reverse(before.mean, before.scale, kernel.weight, kernel.bias, kernel.scale_tril)
        return self.coordinates.factor(after.mean, after.scale, *back)


START = 0.1
"""The root precision of an untrained potential, in units of the prior's spread."""

NOTHING = 1e-6
"""The root precision of a missing row."""
