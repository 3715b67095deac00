"""The nonlinear family: backward kernels whose mean and scale are networks of the later state."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from retrodict import _linalg as linalg
from retrodict._chain import AbstractBackwardKernel
from retrodict._family._base import AbstractSampledFamily, Factor, Row
from retrodict._family._network import Embedded, RecurrentState, mlp, tril_from, tril_size
from retrodict._family._recursions import product
from retrodict._family.recurrent import RecurrentFamily
from retrodict._gaussian import Gaussian
from retrodict._kernel import LinearGaussianKernel
from retrodict._model import StateSpaceModel
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key


class NonlinearStep(NamedTuple):
    """The parameters of one backward kernel.

    Attributes:
        base: the linear-Gaussian kernel that is corrected.
        context: what the first layer of the correction adds for the recurrent state.
    """

    base: LinearGaussianKernel
    context: Float[Array, "*time width"]


class NonlinearKernel(AbstractBackwardKernel):
    """The kernel q_{k-1|k}(x, ·) = N(G x + c + S δ(a, z), (s T(a, z)) (s T(a, z))ᵀ).

    G, c and s are those of a linear-Gaussian kernel read from the recurrent state a; δ and the
    lower factor T are a network of a and of z, the later state in standard coordinates
    x = x̄ + S z. Since the network is bounded and G is a contraction, no path runs away.

    Attributes:
        entry: the weights by which the first layer reads z.
        layers: the rest of the network: arrays alone, so that `jax.vmap` may return a chain.
        location: x̄.
        scale: S.
    """

    entry: Float[Array, "width state"]
    layers: tuple[eqx.nn.Linear, ...]
    location: Float[Array, "state"]
    scale: Float[Array, "state state"]

    def law(self, step: NonlinearStep, x: Float[Array, "state"]) -> Gaussian:
        """The Gaussian law of the earlier state."""
        d = x.shape[0]
        z = linalg.solve_triangular(self.scale, x - self.location)
        hidden = jnp.tanh(step.context + linalg.matvec(self.entry, z))
        for layer in self.layers[:-1]:
            hidden = jnp.tanh(layer(hidden))
        out = self.layers[-1](hidden)
        linear = linalg.matvec(step.base.weight, x) + step.base.bias
        return Gaussian(
            linear + linalg.matvec(self.scale, out[:d]),
            product(step.base.scale_tril, tril_from(out[d:], d)),
        )


class NonlinearFamily(AbstractSampledFamily):
    """A recurrent state, and backward kernels that are nonlinear in the later state.

    The kernels of a `RecurrentFamily` are corrected by a network of the recurrent state and of x_k
    (see `NonlinearKernel`), which starts near zero: an untrained family is the recurrent one. Paths
    are drawn, so that `fit` averages over them and marginals come with standard errors.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.NonlinearFamily(jax.random.key(0), state_dim=2, obs_dim=1)
        >>> family.infer(jnp.ones((5, 1))).sample(jax.random.key(1), 3).shape
        (3, 5, 2)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        input_dim: the dimension of an input; 0 if the model takes none.
        hidden: units of the recurrent state.
        width: units in each hidden layer of the readouts and of the correction.
        depth: hidden layers of the correction.
    """

    base: RecurrentFamily
    context: eqx.nn.Linear
    entry: Float[Array, "width state"]
    correction: eqx.nn.MLP
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore
    depth: int = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        *,
        input_dim: int = 0,
        hidden: int = 16,
        width: int = 32,
        depth: int = 2,
    ):
        check_key(key, "NonlinearFamily")
        self.depth = check_count(depth, "depth")
        base_key, key = jax.random.split(key)
        self.base = RecurrentFamily(
            base_key, state_dim, obs_dim, input_dim=input_dim, hidden=hidden, width=width
        )
        self.state_dim, self.obs_dim, self.input_dim = state_dim, obs_dim, input_dim
        self.context, self.entry, self.correction = _draw(key, self.base, self.depth)

    def prepare(
        self,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> "NonlinearFamily":
        """The family in the units of these data, started near the model's prior chain."""
        base = self.base.prepare(model, ys, mask=mask, inputs=inputs, length=length)
        return eqx.tree_at(lambda f: f.base, self, base)

    def redraw(self, key: PRNGKey) -> "NonlinearFamily":
        """The same family with a freshly drawn cell, readouts and correction."""
        check_key(key, "NonlinearFamily")
        base_key, key = jax.random.split(key)
        return eqx.tree_at(
            lambda f: (f.base, f.context, f.entry, f.correction),
            self,
            (self.base.redraw(base_key), *_draw(key, self.base, self.depth)),
        )

    def init(self) -> RecurrentState:
        """Hidden units at rest."""
        return self.base.init()

    def embed(self, row: Row) -> Embedded:
        """The row in standard coordinates."""
        return self.base.embed(row)

    def advance(self, state: RecurrentState, embedded: Embedded) -> RecurrentState:
        """One update of the cell."""
        return self.base.advance(state, embedded)

    def advance_in_parallel(
        self, embedded: Embedded, exists: Bool[Array, "time"] | None
    ) -> RecurrentState:
        """Refused: the cell is not associative."""
        return self.base.advance_in_parallel(embedded, exists)

    def read(self, before: RecurrentState, after: RecurrentState, embedded: Embedded) -> Factor:
        """The law and the kernel of the recurrent family, and the context of the correction."""
        factor = self.base.read(before, after, embedded)
        known = before.hidden
        if embedded.u is not None:
            known = jnp.concatenate([known, embedded.u])
        return Factor(factor.law, NonlinearStep(factor.kernel, self.context(known)))

    def shared(self) -> NonlinearKernel:
        """The network of the later state."""
        coordinates = self.base.coordinates
        return NonlinearKernel(
            self.entry, self.correction.layers, coordinates.state_location, coordinates.state_scale
        )


def _draw(
    key: PRNGKey, base: RecurrentFamily, depth: int
) -> tuple[eqx.nn.Linear, Float[Array, "width state"], eqx.nn.MLP]:
    """The first layer of the correction, in its two parts, and the rest."""
    context_key, entry_key, rest_key = jax.random.split(key, 3)
    d, known = base.state_dim, base.cell.hidden_size + base.input_dim
    context = eqx.nn.Linear(known, base.width, key=context_key)
    bound = 1.0 / jnp.sqrt(known + d)
    entry = jax.random.uniform(entry_key, (base.width, d), minval=-bound, maxval=bound)
    return context, entry, mlp(rest_key, base.width, d + tril_size(d), base.width, depth - 1)
