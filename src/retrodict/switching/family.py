"""The amortised family of switching models: a Gaussian per regime, updated by looks at the rows."""

from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._families import (
    AbstractFactorFamily,
    AbstractPreparedFamily,
    Coordinates,
    Factor,
    data_units,
    perceptron,
)
from retrodict._linearised import Affine, whiten_emission
from retrodict._model import (
    AbstractLinearGaussianKernel,
    AbstractModel,
    Frozen,
    LinearGaussianKernel,
    Series,
    dense_scale,
    unwrap,
)
from retrodict._numerics import GaussianLaw, condition, linalg
from retrodict.switching.chain import SwitchingChain
from retrodict.switching.gaussian_sum import (
    Update,
    default_rule,
    emission_update,
    moves_of,
    predict_pairs,
    prior_laws,
    updated,
)
from retrodict.switching.mixture import Mixture, Moves
from retrodict.switching.model import (
    SwitchingModel,
    each,
    obs_dim_of,
    over_regimes,
    require_state,
)
from retrodict.switching.variational_model import default_model, model_near

START = 0.1
"""The root precision of an untrained factor of the network, in units of the prior's spread."""


class Look(NamedTuple):
    """The information of a row: a Gaussian factor of the state and a potential per regime.

    Attributes:
        design: h of value = h x + ε with standard normal ε, for each regime.
        value: the value.
        log_potential: the log potential of each regime.
    """

    design: Float[Array, "*time regime look state"]
    value: Float[Array, "*time regime look"]
    log_potential: Float[Array, "*time regime"]

    def update(self, laws: GaussianLaw) -> tuple[GaussianLaw, Float[Array, "source regime"]]:
        """Return predicted laws with axes (source, regime) after the row, and their evidence."""
        to_regimes = jax.vmap(jax.vmap(condition), in_axes=(0, None, None))
        after, innovation = to_regimes(laws, self.design, self.value)
        return after, innovation.log_prob + self.log_potential[None]


class SwitchingRow(NamedTuple):
    """One row as the recurrence reads it.

    Attributes:
        u: the input, or `None`.
        look: the look, or the row itself if the look depends on the prediction.
    """

    u: Float[Array, "*time input"] | None
    look: Any


class SwitchingState(NamedTuple):
    """The state of the family.

    Attributes:
        laws: the filtering laws, one component per regime; the prior before the first row.
        num_read: the number of rows that were read.
    """

    laws: Mixture
    num_read: Int[Array, "*time"]


class SwitchingFamily(AbstractPreparedFamily, AbstractFactorFamily[SwitchingChain]):
    """An amortised family over regimes and states, with one Gaussian per regime.

    The family has a variational model, which is linear and Gaussian given its regimes. `prepare`
    sets it to the model's parts, or to regressions of those that are not linear. A network corrects
    its emission: it reads each row into a further Gaussian factor of the state, per regime or the
    same for all, and a log potential of each regime. All K² pairs of an earlier and a later regime
    are predicted and updated, and merged by moments into one Gaussian per later regime, as in
    `gpb2_smoother`. The backward kernels are the moves reversed, and keep all regimes: mixtures
    over the earlier regime, with weights that depend on the later regime and state. A row without
    observed entries has no factor.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.switching.SwitchingFamily(jax.random.key(0), 2, 1, num_regimes=3)
        >>> chain = family.infer(jnp.ones((5, 1)))
        >>> chain.marginals(jax.random.key(1)).probabilities.shape
        (5, 3)

    Args:
        key: a typed key, for the random weights.
        state_dim: the dimension of the state.
        obs_dim: the dimension of an observation.
        num_regimes: the number K of regimes.
        input_dim: the dimension of an input; 0 if the model takes none.
        width: units in a hidden layer of the network.
        depth: hidden layers.
        per_regime: whether the network emits a factor for each regime; `False` suits models
            whose emission is the same in all regimes.
    """

    num_paths: ClassVar[int] = 2
    model_class: ClassVar[type[AbstractModel]] = SwitchingModel

    network: eqx.nn.MLP | None
    model: SwitchingModel
    coordinates: Coordinates
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore
    num_regimes: int = eqx.field(static=True)
    per_regime: bool = eqx.field(static=True)

    def __init__(
        self,
        key: PRNGKey,
        state_dim: int,
        obs_dim: int,
        num_regimes: int,
        *,
        input_dim: int = 0,
        width: int = 32,
        depth: int = 2,
        per_regime: bool = True,
    ):
        check_key(key, "SwitchingFamily")
        self.state_dim = check_count(state_dim, "state_dim")
        self.obs_dim = check_count(obs_dim, "obs_dim")
        self.num_regimes = check_count(num_regimes, "num_regimes")
        self.input_dim = check_count(input_dim, "input_dim") if input_dim != 0 else 0
        self.per_regime = per_regime
        looks = num_regimes if per_regime else 1
        size = looks * (state_dim + perceptron.tril_size(state_dim)) + num_regimes
        features = 2 * self.obs_dim + self.input_dim
        self.network = perceptron.mlp(key, features, size, width, check_count(depth, "depth"))
        self.model = default_model(num_regimes, state_dim, obs_dim, self.input_dim)
        self.coordinates = Coordinates.identity(state_dim, obs_dim, self.input_dim)

    @classmethod
    def of_model(cls, model: SwitchingModel, *, input_dim: int | None = None) -> "SwitchingFamily":
        """Return the family of the smoothers of a model, the analogue of `KalmanFamily`.

        The emissions of the model take the place of the network, and the family holds a copy of
        the model, never tied to another one. Before training its chain is that of
        `gpb2_smoother(model, ys)`: nonlinear kernels are linearised.

        Example:
            >>> import jax, jax.numpy as jnp, retrodict as rd
            >>> eye, zero = jnp.eye(1), jnp.zeros(1)
            >>> model = rd.switching.SwitchingModel(
            ...     rd.switching.Regimes.from_probabilities([0.5, 0.5], [[0.9, 0.1], [0.1, 0.9]]),
            ...     prior=rd.Gaussian(zero, eye),
            ...     transition=[rd.LinearGaussianKernel(eye, zero, s * eye) for s in (0.1, 1.0)],
            ...     emission=rd.LinearGaussianKernel(eye, zero, 0.1 * eye),
            ... )
            >>> family = rd.switching.SwitchingFamily.of_model(model)
            >>> family.infer(jnp.ones((5, 1))).filtered.shape
            (5, 2)

        Args:
            model: the model, with a continuous state.
            input_dim: the dimension of an input, needed only if no part of the model shows it.
        """
        require_state(model, "SwitchingFamily.of_model")
        copy = jax.tree.map(
            lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf, model.learnable()
        )
        plain = unwrap(model)
        input_dim = _input_dim(plain, input_dim)
        inputs = jnp.zeros((1, input_dim)) if input_dim else None
        family = cls(
            jax.random.key(0),
            plain.state_dim,
            obs_dim_of(plain, inputs),
            plain.num_regimes,
            input_dim=input_dim,
        )
        return eqx.tree_at(lambda f: (f.network, f.model), family, (None, copy))

    def started(self, model: SwitchingModel, batch: Series) -> "SwitchingFamily":
        """Return the family in the units of the data, with the model's law of regimes and states.

        A family `of_model` is returned unchanged: it is in original units.
        """
        require_state(model, "SwitchingFamily.prepare")
        if model.num_regimes != self.num_regimes:
            raise ValueError(
                f"This SwitchingFamily has num_regimes={self.num_regimes}, and the model has"
                f" {model.num_regimes}. Build the family with the num_regimes of the model."
            )
        if self.network is None:
            return self
        units = data_units(batch)
        coordinates, near = model_near(unwrap(model), units, self.input_dim)
        fresh = (jax.tree.map(Frozen, coordinates), near)
        return eqx.tree_at(lambda family: (family.coordinates, family.model), self, fresh)

    def redraw(self, key: PRNGKey) -> "SwitchingFamily":
        """Return the same family with a new random network."""
        if self.network is None:
            return self
        network = perceptron.redrawn(key, self.network)
        return eqx.tree_at(lambda family: family.network, self, network)

    def init(self) -> SwitchingState:
        """Return the variational prior."""
        model = unwrap(self.model)
        leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        laws = prior_laws(model, jnp.result_type(*leaves))
        return SwitchingState(laws, jnp.zeros((), jnp.int32))

    def embed(self, row: Series) -> SwitchingRow:
        """Compute the look at the row, and its input in the units of the variational model."""
        if self.network is None:
            is_linear = self._emission_is_linear
            return SwitchingRow(row.inputs, self._emitted(row) if is_linear else row)
        units = self.coordinates
        u = None if row.inputs is None else units.standard_input(row.inputs)
        ys = (row.ys - units.obs_location) / units.obs_scale
        emitted = self._emitted(Series(ys, row.mask, u, None))
        seen = self._seen(self.network, row)
        design = jnp.concatenate([emitted.design, seen.design], axis=1)
        value = jnp.concatenate([emitted.value, seen.value], axis=1)
        return SwitchingRow(u, Look(design, value, emitted.log_potential + seen.log_potential))

    @property
    def _emission_is_linear(self) -> bool:
        kernels = each(self.model.emission)
        return all(isinstance(kernel, AbstractLinearGaussianKernel) for kernel in kernels)

    def _emitted(self, row: Series) -> Look:
        """Return the look of the emission of the variational model."""

        def of_regime(kernel: Any) -> Look:
            fixed = kernel.at(row.inputs)
            affine = Affine(fixed.weight, fixed.bias, dense_scale(fixed.scale_tril))
            return Look(*whiten_emission(affine, row.ys, row.mask))

        return over_regimes(self.model.emission, self.num_regimes, of_regime)

    def _seen(self, network: eqx.nn.MLP, row: Series) -> Look:
        """Return the look of the network."""
        d, count = self.state_dim, self.num_regimes
        out = network(self.coordinates.features(row))
        factors = out[:-count].reshape(count if self.per_regime else 1, -1)
        roots = START * jax.vmap(lambda raw: perceptron.tril_from(raw, d))(factors[:, d:])
        design = jnp.broadcast_to(jnp.swapaxes(roots, -1, -2), (count, d, d))
        values = jax.vmap(linalg.solve_triangular)(roots, factors[:, :d])
        look = Look(design, jnp.broadcast_to(values, (count, d)), out[-count:])
        if row.mask is None:
            return look
        is_observed = jnp.any(row.mask)
        return jax.tree.map(lambda leaf: jnp.where(is_observed, leaf, 0.0), look)

    def _update(self, embedded: SwitchingRow) -> Update:
        if isinstance(embedded.look, Look):
            return embedded.look.update
        return emission_update(self.model, default_rule(self.model), embedded.look)

    def _moves(self, laws: Mixture, embedded: SwitchingRow) -> Moves:
        return moves_of(self.model, default_rule(self.model), laws, embedded.u)

    def advance(self, state: SwitchingState, embedded: SwitchingRow) -> SwitchingState:
        """Predict all pairs of regimes, update them by the row, and merge them."""
        laws, first = state.laws, state.num_read == 0
        weights, predicted = predict_pairs(laws, self._moves(laws, embedded))
        # At the first row each source is the prior of the later regime, with an equal share.
        start = GaussianLaw(laws.means[None], laws.scale_trils[None])
        predicted = jax.tree.map(lambda old, new: jnp.where(first, old, new), start, predicted)
        share = laws.log_weights[None] - jnp.log(self.num_regimes)
        weights = jnp.where(first, share, weights)
        laws, _ = updated(weights, predicted, self._update(embedded))
        return SwitchingState(laws, state.num_read + 1)

    def read(self, before: SwitchingState, after: SwitchingState, embedded: SwitchingRow) -> Factor:
        """Return the filtering law, and the moves into the row, in original units."""
        laws, moves = after.laws, self._moves(before.laws, embedded)
        if self.network is None:
            return Factor(laws, moves)
        law = jax.vmap(self.coordinates.original_law)(laws.means, laws.scale_trils)
        to_original = jax.vmap(jax.vmap(self.coordinates.original_kernel))
        kernels = to_original(moves.weights, moves.biases, moves.scale_trils)
        origins = moves.origins
        if origins is not None:
            origins = GaussianLaw(*jax.vmap(jax.vmap(self.coordinates.original_law))(*origins))
        return Factor(
            Mixture(laws.log_weights, *law, laws.regimes),
            Moves(moves.log_probabilities, *kernels, origins),
        )

    def assemble(self, read: Factor, length: Any) -> SwitchingChain:
        """Return the chain; the first moves are left out."""
        return SwitchingChain(read.law, jax.tree.map(lambda leaf: leaf[1:], read.kernel), length)


def _input_dim(model: SwitchingModel, given: int | None) -> int:
    """Return the dimension of the inputs, from the weights of the model if there are any."""
    if not model.takes_input:
        if given:
            raise ValueError(f"`input_dim` must be 0 for a model without inputs, got {given}.")
        return 0
    weights = [getattr(model.regimes, "input_weight", None)]
    for kernel in (*each(model.transition), *each(model.emission)):
        if isinstance(kernel, LinearGaussianKernel):
            weights.append(kernel.input_weight)
    known = {weight.shape[1] for weight in weights if weight is not None}
    known |= set() if given is None else {check_count(given, "input_dim")}
    if len(known) != 1:
        raise ValueError(
            "SwitchingFamily.of_model cannot infer the dimension of the inputs of this model: pass"
            f" the one `input_dim`, got {given} beside the dimensions {sorted(known)} of weights."
        )
    return known.pop()
