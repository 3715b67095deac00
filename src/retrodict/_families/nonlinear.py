"""The nonlinear family: backward kernels whose parameters are networks of the later state."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._chains import AbstractBackwardKernel
from retrodict._families import perceptron
from retrodict._families.base import (
    AbstractPreparedFamily,
    AbstractSampledFamily,
    Factor,
)
from retrodict._families.network import Embedded, RecurrentState
from retrodict._families.recurrent import RecurrentFamily
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
)


class NonlinearStep(NamedTuple):
    """The parameters of one backward kernel.

    Attributes:
        base: the linear-Gaussian kernel that is corrected.
        context: the contribution of the recurrent state to the first layer of the correction.
    """

    base: LinearGaussianKernel
    context: Float[Array, "*time width"]


class AbstractCorrectedKernel(AbstractBackwardKernel):
    """A kernel that a network of the recurrent state a and of the later state x corrects.

    The network reads z, the later state in standard coordinates x = x̄ + S z.

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

    def corrections(self, step: NonlinearStep, x: Float[Array, "state"]) -> Float[Array, "out"]:
        """Return the output of the network at the recurrent state and the later state x."""
        z = linalg.solve_triangular(self.scale, x - self.location)
        hidden = jnp.tanh(step.context + linalg.matvec(self.entry, z))
        for layer in self.layers[:-1]:
            hidden = jnp.tanh(layer(hidden))
        return self.layers[-1](hidden)


class NonlinearKernel(AbstractCorrectedKernel):
    """The kernel q_{k-1|k}(x, ·) = N(G x + c + S δ(a, z), (s T(a, z)) (s T(a, z))ᵀ).

    G, c and s are those of a linear-Gaussian kernel read from the recurrent state a; δ and the
    lower factor T are a network of a and of z. Since the network is bounded and G is a contraction,
    paths do not diverge.
    """

    def law(self, step: NonlinearStep, x: Float[Array, "state"]) -> Gaussian:
        """Return the Gaussian law of the earlier state."""
        d, out = x.shape[0], self.corrections(step, x)
        linear = linalg.matvec(step.base.weight, x) + step.base.bias
        return Gaussian(
            linear + linalg.matvec(self.scale, out[:d]),
            product(step.base.scale_tril, perceptron.tril_from(out[d:], d)),
        )


class NonlinearMixtureKernel(AbstractCorrectedKernel):
    """The kernel q_{k-1|k}(x, ·) = Σ_j π_j N(G x + c + s e_j + S δ_j, (s B T_j) (s B T_j)ᵀ).

    As in `NonlinearKernel`, G, c and s are read from the recurrent state, and log π_j, δ_j and T_j
    are a network of it and of z. The offsets e_j separate the components, and the diagonal B
    narrows each component accordingly: where the network is zero, the mixture has the mean and the
    covariance of the linear-Gaussian kernel.

    Attributes:
        offsets: e, one row per component.
    """

    offsets: Float[Array, "component state"]

    def law(self, step: NonlinearStep, x: Float[Array, "state"]) -> GaussianMixture:
        """Return the mixture, whose weights, means and scales depend on x."""
        base = step.base
        linear = linalg.matvec(base.weight, x) + base.bias
        apart = jax.vmap(lambda offset: linalg.matvec(base.scale_tril, offset))(self.offsets)
        out = self.corrections(step, x)
        return _mixture(out, linear[None] + apart, base.scale_tril, self.scale, self.offsets)


class MixtureCorrection(eqx.Module):
    """The networks that correct the kernels and laws of a family with several components.

    Attributes:
        kernel: the network of the later state, after its first layer.
        law: the readout of the filtering laws.
        centres: where components start, in standard coordinates.
    """

    kernel: eqx.nn.MLP
    law: eqx.nn.MLP
    centres: Any


class NonlinearFamily(AbstractPreparedFamily, AbstractSampledFamily):
    """A recurrent family whose backward kernels are nonlinear in the later state.

    The kernels of a `RecurrentFamily` are corrected by a network of the recurrent state and of x_k,
    which starts near zero. Filtering laws and kernels are mixtures, for posteriors that are skewed
    or have several modes: their weights, means and scales are corrected (see
    `NonlinearMixtureKernel`). Components start slightly apart, around the moments of the
    recurrent family. Paths are sampled: `fit` averages over them, and marginals have
    standard errors.

    With one component laws and kernels are Gaussian (see `NonlinearKernel`), and an untrained
    family is the recurrent one. Training and inference take less than half of the time. On the
    paper's nonlinear model the gap to the evidence is then six times as large, and sums of states
    are biased.

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
        num_components: components of each filtering law and of each backward kernel; 1 for
            Gaussian ones.
        hidden: units of the recurrent state.
        width: units in each hidden layer of the readouts and of the correction.
        depth: hidden layers of the correction.
    """

    base: RecurrentFamily
    context: eqx.nn.Linear
    entry: Float[Array, "width state"]
    correction: eqx.nn.MLP | MixtureCorrection
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
        num_components: int = 2,
        hidden: int = 16,
        width: int = 32,
        depth: int = 2,
    ):
        check_key(key, "NonlinearFamily")
        self.depth = check_count(depth, "depth")
        num_components = check_count(num_components, "num_components")
        base_key, key = jax.random.split(key)
        self.base = RecurrentFamily(
            base_key, state_dim, obs_dim, input_dim=input_dim, hidden=hidden, width=width
        )
        self.state_dim, self.obs_dim, self.input_dim = state_dim, obs_dim, input_dim
        self.context, self.entry, self.correction = _draw(
            key, self.base, self.depth, num_components
        )

    @property
    def num_components(self) -> int:
        """The number of components of each filtering law and each backward kernel."""
        if isinstance(self.correction, eqx.nn.MLP):
            return 1
        return int(self.correction.law.out_size) // (
            1 + self.state_dim + perceptron.tril_size(self.state_dim)
        )

    def started(self, model: StateSpaceModel, batch: Series) -> "NonlinearFamily":
        """Return the family in the units of the data."""
        return eqx.tree_at(lambda f: f.base, self, self.base.started(model, batch))

    def redraw(self, key: PRNGKey) -> "NonlinearFamily":
        """Return the same family with a new random cell, readouts and correction."""
        check_key(key, "NonlinearFamily")
        base_key, key = jax.random.split(key)
        networks = _draw(key, self.base, self.depth, self.num_components)
        fresh = (self.base.redraw(base_key), *networks)
        return eqx.tree_at(lambda f: (f.base, f.context, f.entry, f.correction), self, fresh)

    def init(self) -> RecurrentState:
        """Return zero hidden units."""
        return self.base.init()

    def embed(self, row: Series) -> Embedded:
        """Return the row in standard coordinates."""
        return self.base.embed(row)

    def advance(self, state: RecurrentState, embedded: Embedded) -> RecurrentState:
        """Update the cell."""
        return self.base.advance(state, embedded)

    def read(self, before: RecurrentState, after: RecurrentState, embedded: Embedded) -> Factor:
        """Return the law and kernel of the recurrent family with the context of the correction."""
        factor = self.base.read(before, after, embedded)
        context = before.hidden
        if embedded.u is not None:
            context = jnp.concatenate([context, embedded.u])
        step = NonlinearStep(factor.kernel, self.context(context))
        if isinstance(self.correction, eqx.nn.MLP):
            return Factor(factor.law, step)
        base, spread = factor.law, self.base.coordinates.state_scale
        apart = jax.vmap(lambda centre: linalg.matvec(spread, centre))(self.correction.centres)
        out = self.correction.law(after.hidden)
        law = _mixture(
            out, base.mean[None] + apart, base.scale_tril, spread, self.correction.centres
        )
        return Factor(law, step)

    def shared(self) -> NonlinearKernel | NonlinearMixtureKernel:
        """Return the network of the later state."""
        units = self.base.coordinates
        location, scale = units.state_location, units.state_scale
        if isinstance(self.correction, eqx.nn.MLP):
            return NonlinearKernel(self.entry, self.correction.layers, location, scale)
        layers, offsets = self.correction.kernel.layers, APART * self.correction.centres
        return NonlinearMixtureKernel(self.entry, layers, location, scale, offsets)


APART = 0.5
"""The distance of the components of an untrained kernel, as a share of the distance of quantiles of
the linear-Gaussian kernel."""


def _mixture(
    out: Float[Array, "out"],
    means: Float[Array, "component d"],
    scale: Float[Array, "d d"],
    units: Float[Array, "d d"],
    offsets: Float[Array, "component d"],
) -> GaussianMixture:
    """Return a mixture around given means, corrected by free numbers.

    Args:
        out: log weights, shifts of the means in `units`, and lower factors, component by component.
        means: the means of the components if `out` is zero.
        scale: the lower factor of the covariance of the mixture if `out` is zero.
        units: S.
        offsets: their distances from the mean of the mixture, in units of `scale`.
    """
    count, d = means.shape
    out = out.reshape(count, -1)
    narrowed = jnp.sqrt(1.0 - jnp.mean(offsets**2, axis=0))[:, None]
    scales = jax.vmap(lambda raw: product(scale, narrowed * perceptron.tril_from(raw, d)))(
        out[:, 1 + d :]
    )
    shifts = jax.vmap(lambda shift: linalg.matvec(units, shift))(out[:, 1 : 1 + d])
    return GaussianMixture(jax.nn.log_softmax(out[:, 0]), means + shifts, scales)


def _draw(
    key: PRNGKey, base: RecurrentFamily, depth: int, num_components: int
) -> tuple[eqx.nn.Linear, Float[Array, "width state"], eqx.nn.MLP | MixtureCorrection]:
    """Return the random first layer of the correction, in two parts, and the rest."""
    context_key, entry_key, rest_key = jax.random.split(key, 3)
    d, hidden, width = base.state_dim, base.cell.hidden_size, base.width
    known, size = hidden + base.input_dim, d + perceptron.tril_size(d)
    context = eqx.nn.Linear(known, width, key=context_key)
    bound = 1.0 / jnp.sqrt(known + d)
    entry = jax.random.uniform(entry_key, (width, d), minval=-bound, maxval=bound)
    if num_components == 1:
        return context, entry, perceptron.mlp(rest_key, width, size, width, depth - 1)
    kernel_key, law_key = jax.random.split(rest_key)
    size = num_components * (1 + size)
    correction = MixtureCorrection(
        perceptron.mlp(kernel_key, width, size, width, depth - 1),
        perceptron.mlp(law_key, hidden, size, width, 1),
        Frozen(perceptron.centres(num_components, d)),
    )
    return context, entry, correction
