"""The conjugate family: natural parameters from each row alone, added to the predicted ones."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, check_count
from retrodict._families import perceptron, recursions
from retrodict._families.network import AbstractLawFamily, Embedded, Transition
from retrodict._families.recursions import GaussianState
from retrodict._families.start import Coordinates
from retrodict._model import LinearGaussianKernel, Series
from retrodict._numerics import linalg, transposed
from retrodict.distributed import Parallel


class Potential(NamedTuple):
    """A row and its potential exp(ηᵀz − ½‖rᵀz‖²), as numbers of the encoder.

    Attributes:
        row: the row in standard coordinates.
        precision_mean: η.
        raw_root: the numbers of r, `perceptron.tril_from` of which is ten times r. A matrix for
            each row takes more time to write than to compute.
        is_observed: whether an entry of the row was observed; `None` if one was in all rows.
    """

    row: Embedded
    precision_mean: Float[Array, "*time state"]
    raw_root: Float[Array, "*time size"]
    is_observed: Bool[Array, "*time"] | None

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
        mean, is_observed = out[:d], None
        if row.mask is not None:
            # A missing row carries no information.
            is_observed = jnp.any(row.mask)
            mean = jnp.where(is_observed, mean, 0.0)
        return Potential(embedded, mean, out[d:], is_observed)

    def advance(self, state: GaussianState, embedded: Potential) -> GaussianState:
        """Predict, and add the natural parameters of the row."""
        mean, whitener = recursions.predicted_whitener(state, self.transition_into(embedded))
        precision_mean = linalg.matvec(whitener.T, linalg.matvec(whitener, mean))
        law = recursions.from_natural(
            precision_mean + embedded.precision_mean, transposed(whitener), self._root(embedded)
        )
        return GaussianState(*law, state.num_read + 1)

    def _root(self, embedded: Potential) -> Float[Array, "d d"]:
        """Return the root r of the precision of a potential."""
        d = self.state_dim
        root = START * perceptron.tril_from(embedded.raw_root, d)
        if embedded.is_observed is None:
            return root
        return jnp.where(embedded.is_observed, root, NOTHING * jnp.eye(d, dtype=root.dtype))

    def advance_in_parallel(
        self, embedded: Potential, exists: Bool[Array, "time"] | None, parallel: Parallel = True
    ) -> GaussianState:
        """Compute all filtering laws by an associative scan."""
        kernel, roots = self.transition_into(embedded), jax.vmap(self._root)(embedded)
        values = jax.vmap(linalg.solve_triangular)(roots, embedded.precision_mean)
        designs = jnp.swapaxes(roots, -1, -2)
        return recursions.filtered_in_parallel(
            self.init(), kernel, designs, values, exists, parallel
        )


START = 0.1
"""The root precision of an untrained potential, in units of the prior's spread."""

NOTHING = 1e-6
"""The root precision of a missing row."""
