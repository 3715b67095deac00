"""Shared parts of families with networks: units, a variational transition, readouts."""

from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, check_count
from retrodict._families import perceptron, recursions
from retrodict._families.base import (
    Abstract,
    AbstractLinearGaussianFamily,
    AbstractPreparedFamily,
    Factor,
)
from retrodict._families.start import (
    Coordinates,
    PriorChain,
    data_units,
    prior_chain,
)
from retrodict._model import (
    AbstractLinearGaussianKernel,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    PositiveTril,
    Series,
    StateSpaceModel,
    dense_scale,
    unwrap,
)
from retrodict._numerics import gated_recurrence, inputs_of_existing, linalg

F = TypeVar("F", bound="AbstractNetworkFamily")
L = TypeVar("L", bound="AbstractLawFamily")


class RecurrentState(NamedTuple):
    """The hidden units of a recurrent cell."""

    hidden: Float[Array, "*time hidden"]


class Embedded(NamedTuple):
    """The features of one row.

    Attributes:
        features: the observation in standard coordinates, its indicators, and the input.
        transition: the variational transition into this row, if it depends on inputs.
        u: the input in standard coordinates, or `None`.
    """

    features: Float[Array, "*time features"]
    transition: LinearGaussianKernel | None
    u: Float[Array, "*time input"] | None


class Transition(eqx.Module):
    """The variational transition m̄ and prior, in standard coordinates.

    Attributes:
        prior: the law of z_0.
        kernel: a learned linear-Gaussian kernel in standard coordinates; or the model's
            kernel in original units, if its parameters are functions of the input.
        in_original_units: which of the two.
    """

    prior: Gaussian
    kernel: AbstractLinearGaussianKernel
    in_original_units: bool = eqx.field(static=True)

    @classmethod
    def default(cls, state_dim: int, input_dim: int) -> "Transition":
        """Return a stationary autoregression, used until `prepare` is called."""
        eye, zeros = jnp.eye(state_dim), jnp.zeros(state_dim)
        return cls(
            Gaussian(zeros, PositiveTril(eye)),
            LinearGaussianKernel(
                0.9 * eye,
                zeros,
                PositiveTril(np.sqrt(1 - 0.9**2) * eye),
                jnp.zeros((state_dim, input_dim)) if input_dim else None,
            ),
            False,
        )

    def moving(self, coordinates: Coordinates, row: Series) -> LinearGaussianKernel | None:
        """Return the kernel into this row if it depends on inputs, else `None`."""
        if not self.kernel.takes_input:
            return None
        if self.in_original_units:
            return coordinates.standard_kernel(self.kernel.at(row.inputs))
        u = None if row.inputs is None else coordinates.standard_input(row.inputs)
        kernel = self.kernel.at(u)
        return LinearGaussianKernel(kernel.weight, kernel.bias, dense_scale(kernel.scale_tril))

    def fixed(self) -> LinearGaussianKernel:
        """Return the kernel if it does not depend on inputs."""
        kernel = self.kernel.at(None)
        return LinearGaussianKernel(kernel.weight, kernel.bias, dense_scale(kernel.scale_tril))


class AbstractNetworkFamily(AbstractPreparedFamily):
    """A family with units of its data and a variational transition, which `prepare` sets.

    Attributes:
        transition: the variational transition.
        coordinates: the units of states and data.
    """

    transition: Abstract[Transition]
    coordinates: Abstract[Coordinates]
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore

    def __init__(self, state_dim: int, obs_dim: int, input_dim: int):
        self.state_dim = check_count(state_dim, "state_dim")
        self.obs_dim = check_count(obs_dim, "obs_dim")
        self.input_dim = check_count(input_dim, "input_dim") if input_dim != 0 else 0
        self.transition = Transition.default(state_dim, input_dim)
        self.coordinates = Coordinates.identity(state_dim, obs_dim, input_dim)

    @property
    def num_features(self) -> int:
        """The number of features of a row."""
        return 2 * self.obs_dim + self.input_dim

    def in_units(self: F, model: StateSpaceModel, batch: Series) -> F:
        """Return the family with the units of the data, and the model's prior chain in them."""
        data = data_units(batch)
        chain = prior_chain(model, data.num_times, data.inputs)
        units = Coordinates(*data.scales, chain.location, chain.spread)
        fresh = (jax.tree.map(Frozen, units), _standard_transition(units, chain))
        return eqx.tree_at(lambda family: (family.coordinates, family.transition), self, fresh)

    def standard(self, row: Series) -> Embedded:
        """Return a row in standard coordinates, with the transition at its input."""
        u = None if row.inputs is None else self.coordinates.standard_input(row.inputs)
        return Embedded(
            self.coordinates.features(row), self.transition.moving(self.coordinates, row), u
        )

    def transition_into(self, embedded: Any) -> LinearGaussianKernel:
        """Return the variational transition into a row."""
        moving = embedded.transition
        return self.transition.fixed() if moving is None else moving


class AbstractCellFamily(AbstractNetworkFamily):
    """A family whose state is that of a gated recurrent unit.

    Attributes:
        cell: the recurrent unit.
    """

    cell: Abstract[eqx.nn.GRUCell]

    def init(self) -> RecurrentState:
        """Return zero hidden units."""
        return RecurrentState(jnp.zeros(self.cell.hidden_size, self.cell.weight_hh.dtype))

    def advance(self, state: RecurrentState, embedded: Embedded) -> RecurrentState:
        """Update the cell."""
        return RecurrentState(self.cell(embedded.features, state.hidden))

    def advance_on_accelerator(
        self, state: RecurrentState, embedded: Embedded, exists: Bool[Array, "time"] | None
    ) -> RecurrentState:
        """Update the cell for all rows, with one product per row."""
        cell: Any = self.cell  # a cell of this library has a bias
        projected = jnp.matmul(embedded.features, cell.weight_ih.T, precision=lax.Precision.HIGHEST)
        inputs = projected + cell.bias[None]
        if exists is not None:
            inputs = inputs_of_existing(inputs, exists)
        return RecurrentState(gated_recurrence(inputs, state.hidden, cell.weight_hh, cell.bias_n))


class AbstractLawFamily(AbstractNetworkFamily, AbstractLinearGaussianFamily):
    """A family whose state is its filtering law, which a network updates.

    Backward kernels are the variational transition reversed: q_{k-1|k}(x_k, ·) ∝ m̄(·, x_k) q_{k-1}.

    Attributes:
        network: the network.
    """

    network: Abstract[eqx.nn.MLP]

    def started(self: L, model: StateSpaceModel, batch: Series) -> L:
        """Return the family in the units of the data."""
        return self.in_units(model, batch)

    def redraw(self: L, key: PRNGKey) -> L:
        """Return the same family with a new random network."""
        return eqx.tree_at(
            lambda family: family.network, self, perceptron.redrawn(key, self.network)
        )

    def init(self) -> recursions.GaussianState:
        """Return the variational prior."""
        return recursions.prior_state(unwrap(self.transition.prior))

    def read(
        self, before: recursions.GaussianState, after: recursions.GaussianState, embedded: Any
    ) -> Factor:
        """Return the law, and the variational transition reversed under the previous law."""
        back = recursions.reverse(before.mean, before.scale, self.transition_into(embedded))
        return self.coordinates.factor(after.mean, after.scale, *back)


@eqx.filter_jit
def _standard_transition(coordinates: Coordinates, chain: PriorChain) -> Transition:
    solve, scale = linalg.solve_triangular, coordinates.state_scale
    prior = Gaussian(
        solve(scale, chain.mean - coordinates.state_location),
        PositiveTril(with_density(solve(scale, chain.scale))),
    )
    kernel = chain.transition
    if not isinstance(kernel, LinearGaussianKernel):
        return Transition(prior, kernel, True)
    standard = standard_with_input(coordinates, kernel)
    noise = PositiveTril(with_density(standard.scale_tril))
    return Transition(prior, eqx.tree_at(lambda kernel: kernel.scale_tril, standard, noise), False)


def standard_with_input(
    coordinates: Coordinates, kernel: LinearGaussianKernel
) -> LinearGaussianKernel:
    """Return a kernel on z that also reads inputs in standard coordinates."""
    standard = coordinates.standard_kernel(
        LinearGaussianKernel(kernel.weight, kernel.bias, kernel.scale_tril)
    )
    if kernel.input_weight is None:
        return standard
    moved = linalg.solve_triangular(coordinates.state_scale, kernel.input_weight)
    bias = standard.bias + linalg.matvec(moved, coordinates.input_location)
    input_weight = moved * coordinates.input_scale[None, :]
    return LinearGaussianKernel(standard.weight, bias, standard.scale_tril, input_weight)


def with_density(scale: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Make the diagonal of a lower factor positive: flip signs, raise zeros to a thousandth."""
    turned = scale * jnp.where(jnp.diagonal(scale) < 0, -1.0, 1.0)[None, :]
    raised = jnp.maximum(jnp.diagonal(turned), 1e-3)
    return jnp.tril(turned, -1) + jnp.diag(raised)
