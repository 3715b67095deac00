"""The mixture family: filtering laws with several modes, and the backward kernels they imply."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._chains import AbstractBackwardKernel
from retrodict._families import perceptron, recursions
from retrodict._families.base import AbstractSampledFamily, Factor
from retrodict._families.network import AbstractCellFamily, Embedded, RecurrentState, Transition
from retrodict._families.start import Coordinates
from retrodict._model import (
    Frozen,
    Gaussian,
    GaussianMixture,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
)
from retrodict._numerics import (
    linalg,
    product,
    shared_product,
    transposed,
)


class MixtureStep(NamedTuple):
    """The parameters of one backward kernel, with one row per component of q_{k-1}.

    Attributes:
        log_weights: log π_j of q_{k-1}.
        predicted: the law of x_k if x_{k-1} is drawn from the component.
        kernels: the law of x_{k-1} given x_k, if it is drawn from the component.
    """

    log_weights: Float[Array, "*time component"]
    predicted: Gaussian
    kernels: LinearGaussianKernel


class MixtureKernel(AbstractBackwardKernel):
    """The kernel q_{k-1|k}(x, ·) ∝ m̄(·, x) q_{k-1}(·) of a mixture under a linear-Gaussian m̄.

    It is a mixture again: component j is N(G_j x + c_j, s_j s_jᵀ), and its weight is in proportion
    to π_j N(x; F m_j + b, F S_j Fᵀ + Q), the predictive density of the later state.
    """

    def law(self, step: MixtureStep, x: Float[Array, "state"]) -> GaussianMixture:
        """Return the mixture, with weights that depend on x."""
        explained = jax.vmap(lambda law: law.log_prob(x))(step.predicted)
        means = jax.vmap(lambda kernel: linalg.matvec(kernel.weight, x) + kernel.bias)(step.kernels)
        return GaussianMixture(
            jax.nn.log_softmax(step.log_weights + explained), means, step.kernels.scale_tril
        )


class MixtureFamily(AbstractCellFamily, AbstractSampledFamily):
    """A recurrent family with Gaussian-mixture filtering laws and the backward kernels they imply.

    The construction of the linear-Gaussian families, made multimodal: q_k is a mixture whose
    parameters are read from the recurrent state, the variational transition m̄ is linear Gaussian,
    and q_{k-1|k}(x_k, ·) ∝ m̄(·, x_k) q_{k-1} follows in closed form (see `MixtureKernel`). If the
    model's transition is linear Gaussian and the mixtures are the exact filtering laws, so is the
    chain. Components start apart, so that each mode can attract one.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.MixtureFamily(jax.random.key(0), state_dim=1, obs_dim=1)
        >>> family.infer(jnp.ones((5, 1))).laws.means.shape
        (5, 4, 1)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        input_dim: the dimension of an input; 0 if the model takes none.
        num_components: components of each filtering law.
        hidden: units of the recurrent state.
        width: units in the hidden layer of the readout.
    """

    cell: eqx.nn.GRUCell
    readout: eqx.nn.MLP
    centres: Any
    transition: Transition
    coordinates: Coordinates
    num_components: int = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        num_components: int = 4,
        hidden: int = 16,
        width: int = 32,
    ):
        super().__init__(state_dim, obs_dim, input_dim)  # pyright: ignore
        self.num_components = check_count(num_components, "num_components")
        hidden, width = check_count(hidden, "hidden"), check_count(width, "width")
        self.cell, self.readout = self._draw(key, hidden, width)
        self.centres = Frozen(perceptron.centres(num_components, state_dim))

    def started(self, model: StateSpaceModel, batch: Series) -> "MixtureFamily":
        """Return the family in the units of the data."""
        return self.in_units(model, batch)

    def redraw(self, key: PRNGKey) -> "MixtureFamily":
        """Return the same family with a new random cell and readout."""
        fresh = self._draw(key, self.cell.hidden_size, self.readout.width_size)
        return eqx.tree_at(lambda f: (f.cell, f.readout), self, fresh)

    def _draw(self, key: PRNGKey, hidden: int, width: int) -> tuple[eqx.nn.GRUCell, eqx.nn.MLP]:
        """Return a random cell and readout."""
        check_key(key, "MixtureFamily")
        cell_key, readout_key = jax.random.split(key)
        size = self.num_components * (1 + self.state_dim + perceptron.tril_size(self.state_dim))
        cell = eqx.nn.GRUCell(self.num_features, hidden, key=cell_key)
        return cell, perceptron.mlp(readout_key, hidden, size, width, 1)

    def embed(self, row: Series) -> Embedded:
        """Return the row in standard coordinates."""
        return self.standard(row)

    def read(self, before: RecurrentState, after: RecurrentState, embedded: Embedded) -> Factor:
        """Return the mixture, and the transition reversed under the previous mixture."""
        log_weights, means, scales = self._mixture(before.hidden)
        move = self.transition_into(embedded)

        def turn(mean: Array, scale: Array) -> tuple[Gaussian, LinearGaussianKernel]:
            moved = shared_product(move.weight, scale)
            spread = product(moved, transposed(moved)) + linalg.outer_gram(move.scale_tril)
            centre = linalg.matvec(move.weight, mean) + move.bias
            back = recursions.reverse(mean, scale, move)
            factor = self.coordinates.factor(centre, linalg.cholesky(spread), *back)
            return factor.law, factor.kernel

        predicted, kernels = jax.vmap(turn)(means, scales)
        return Factor(self._law(after.hidden), MixtureStep(log_weights, predicted, kernels))

    def shared(self) -> MixtureKernel:
        """Return the kernel without parameters: all parameters differ from row to row."""
        return MixtureKernel()

    def _mixture(self, hidden: Float[Array, "hidden"]) -> tuple[Array, Array, Array]:
        """Return log weights, means and lower factors in standard coordinates."""
        count, d = self.num_components, self.state_dim
        out = self.readout(hidden).reshape(count, -1)
        scales = jax.vmap(lambda raw: perceptron.tril_from(raw, d))(out[:, 1 + d :])
        return jax.nn.log_softmax(out[:, 0]), self.centres + out[:, 1 : 1 + d], SPREAD * scales

    def _law(self, hidden: Float[Array, "hidden"]) -> GaussianMixture:
        log_weights, means, scales = self._mixture(hidden)
        spread, location = self.coordinates.state_scale, self.coordinates.state_location
        return GaussianMixture(
            log_weights,
            location[None] + jax.vmap(lambda mean: linalg.matvec(spread, mean))(means),
            jax.vmap(lambda scale: shared_product(spread, scale))(scales),
        )


SPREAD = 0.5
"""The standard deviation of an untrained component, in units of the prior's spread."""
