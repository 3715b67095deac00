"""Shared parts of families with networks: units, a variational transition, readouts."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtri
from jaxtyping import Array, Float

from retrodict._families.base import AbstractFamily, Row, check_fits
from retrodict._families.start import Coordinates, PriorChain, prior_chain, sample_of, units
from retrodict._kernels import AbstractLinearGaussianKernel, LinearGaussianKernel
from retrodict._laws import Gaussian, dense_scale
from retrodict._model import StateSpaceModel
from retrodict._numerics import linalg
from retrodict._parameters import Frozen, PositiveTril
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key

F = TypeVar("F", bound=AbstractFamily)


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

    def moving(self, coordinates: Coordinates, row: Row) -> LinearGaussianKernel | None:
        """Return the kernel into this row if it depends on inputs, else `None`."""
        if not self.kernel.takes_input:
            return None
        if self.in_original_units:
            return coordinates.standard_kernel(self.kernel.at(row.u))
        u = None if row.u is None else coordinates.standard_input(row.u)
        kernel = self.kernel.at(u)
        return LinearGaussianKernel(kernel.weight, kernel.bias, dense_scale(kernel.scale_tril))

    def fixed(self) -> LinearGaussianKernel:
        """Return the kernel if it does not depend on inputs."""
        kernel = self.kernel.at(None)
        return LinearGaussianKernel(kernel.weight, kernel.bias, dense_scale(kernel.scale_tril))


class AbstractNetworkFamily(AbstractFamily):
    """A family with units of its data and a variational transition, which `prepare` sets.

    Attributes:
        transition: the variational transition.
        coordinates: the units of states and data.
    """

    if TYPE_CHECKING:
        # A type checker would take abstract variables for properties.
        transition: Transition
        coordinates: Coordinates
    else:
        transition: eqx.AbstractVar[Transition]
        coordinates: eqx.AbstractVar[Coordinates]

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
        return prepared(self, model, ys, mask, inputs, length)


def check_dimensions(state_dim: int, obs_dim: int, input_dim: int) -> None:
    """Raise unless the dimensions are counts."""
    check_count(state_dim, "state_dim")
    check_count(obs_dim, "obs_dim")
    if input_dim != 0:
        check_count(input_dim, "input_dim")


def embed(coordinates: Coordinates, transition: Transition, row: Row) -> Embedded:
    """Return a row in standard coordinates, with the transition at its input."""
    u = None if row.u is None else coordinates.standard_input(row.u)
    return Embedded(coordinates.features(row), transition.moving(coordinates, row), u)


def transition_into(transition: Transition, embedded: Embedded) -> LinearGaussianKernel:
    """Return the variational transition into a row."""
    return transition.fixed() if embedded.transition is None else embedded.transition


def at_rest(cell: eqx.nn.GRUCell) -> RecurrentState:
    """Return the state of a cell before the first row."""
    return RecurrentState(jnp.zeros(cell.hidden_size, cell.weight_hh.dtype))


def prepared(family: F, model: StateSpaceModel, ys: Any, mask: Any, inputs: Any, length: Any) -> F:
    """Return the family with the units of the data, and the model's prior chain in them."""
    check_fits(family, model)
    sample = sample_of(family, ys, mask, inputs, length)
    chain = prior_chain(model, sample.num_times, sample.first_inputs)
    obs = units(sample.ys)
    us = units(np.zeros((0, 0)) if sample.inputs is None else sample.inputs)
    plain = Coordinates(
        obs.location, obs.scale, us.location, us.scale, chain.location, chain.spread
    )
    fresh = (jax.tree.map(Frozen, plain), _standard_transition(plain, chain))
    return eqx.tree_at(attrgetter("coordinates", "transition"), family, fresh)


def _standard_transition(coordinates: Coordinates, chain: PriorChain) -> Transition:
    solve, scale = linalg.solve_triangular, coordinates.state_scale
    prior = Gaussian(
        solve(scale, chain.mean - coordinates.state_location),
        PositiveTril(_with_density(solve(scale, chain.scale))),
    )
    kernel = chain.transition
    if not isinstance(kernel, LinearGaussianKernel):
        return Transition(prior, kernel, True)
    standard = coordinates.standard_kernel(
        LinearGaussianKernel(kernel.weight, kernel.bias, kernel.scale_tril)
    )
    bias, input_weight = standard.bias, None
    if kernel.input_weight is not None:
        moved = solve(scale, kernel.input_weight)
        bias = bias + linalg.matvec(moved, coordinates.input_location)
        input_weight = moved * coordinates.input_scale[None, :]
    noise = PositiveTril(_with_density(standard.scale_tril))
    return Transition(
        prior, LinearGaussianKernel(standard.weight, bias, noise, input_weight), False
    )


def _with_density(scale: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Make the diagonal of a lower factor positive: flip signs, raise zeros to a thousandth."""
    turned = scale * jnp.where(jnp.diagonal(scale) < 0, -1.0, 1.0)[None, :]
    raised = jnp.maximum(jnp.diagonal(turned), 1e-3)
    return jnp.tril(turned, -1) + jnp.diag(raised)


def tril_size(d: int) -> int:
    """Return the number of entries of a lower triangle."""
    return d * (d + 1) // 2


def tril_from(raw: Float[Array, "size"], d: int) -> Float[Array, "d d"]:
    """Return a lower factor with a positive diagonal from free numbers; zeros give the identity."""
    diagonal = jax.nn.softplus(raw[:d] + _UNIT)
    diagonal = diagonal + jnp.sqrt(jnp.finfo(raw.dtype).tiny)
    if d == 1:
        return diagonal[:, None]
    packed = jnp.concatenate([diagonal, raw[d:]])
    return jnp.matmul(packed, _places(d, raw.dtype), precision=HIGHEST).reshape(d, d)


def tril_features(scale: Float[Array, "d d"]) -> Float[Array, "size"]:
    """Return the features of a lower factor: logarithms of its diagonal, and ratios."""
    diagonal, d = jnp.diagonal(scale), scale.shape[0]
    if d == 1:
        return jnp.log(diagonal)
    ratios = (scale / diagonal[None, :]).reshape(-1)
    below = _places(d, scale.dtype)[d:].T
    return jnp.concatenate([jnp.log(diagonal), jnp.matmul(ratios, below, precision=HIGHEST)])


def mlp(key: PRNGKey, in_size: Any, out_size: Any, width: int, depth: int) -> eqx.nn.MLP:
    """Return a tanh network whose last layer has no bias and a hundredth of its random weights.

    Its outputs start near zero, which represents the prior chain; with full weights some starts
    ended in poor optima.
    """
    check_key(key, "A family")
    width = check_count(width, "width")
    network = eqx.nn.MLP(in_size, out_size, width, depth, activation=jnp.tanh, key=key)
    last = network.layers[-1]
    start = (0.01 * last.weight, jnp.zeros(out_size, last.weight.dtype))
    last = eqx.tree_at(lambda layer: (layer.weight, layer.bias), last, start)
    return eqx.tree_at(lambda net: net.layers[-1], network, last)


def redrawn(key: PRNGKey, network: eqx.nn.MLP) -> eqx.nn.MLP:
    """Return a network of the same sizes with new random weights."""
    return mlp(key, network.in_size, network.out_size, network.width_size, network.depth)


def centres(count: int, d: int) -> Float[Array, "component d"]:
    """Return initial centres of components in standard coordinates, in pairs along the axes.

    Along each axis they are quantiles of the prior, symmetric around its mean, so that neither of
    two mirrored modes is nearer to the start.
    """
    axis = np.arange(count) // 2 % d
    on_axis = np.bincount(axis, minlength=d)[axis]
    rank = np.array([np.sum(axis[:j] == axis[j]) for j in range(count)])
    return jax.nn.one_hot(axis, d) * ndtri(jnp.asarray((rank + 0.5) / on_axis))[:, None]


_UNIT = float(np.log(np.expm1(1.0)))
"""The argument at which softplus is one."""

HIGHEST = lax.Precision.HIGHEST


def _places(d: int, dtype: Any) -> Float[np.ndarray, "size entries"]:
    """Return the 0/1 matrix that places a diagonal and the entries below it in a flat matrix.

    A product with it copies each number exactly. Indexing would do the same, but its derivative
    scatters one entry after another.
    """
    rows, columns = np.tril_indices(d, -1)
    entries = np.concatenate([np.arange(d) * (d + 1), rows * d + columns])
    places = np.zeros((tril_size(d), d * d), dtype)
    places[np.arange(tril_size(d)), entries] = 1.0
    return places
