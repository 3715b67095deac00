"""The assimilation family: the model predicts, and a learned update takes each row in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._families import perceptron, recursions
from retrodict._families.base import (
    AbstractLinearGaussianFamily,
    AbstractPreparedFamily,
    Factor,
)
from retrodict._families.kalman import input_dim_of
from retrodict._model import (
    AbstractGaussianKernel,
    AbstractLinearGaussianKernel,
    DistributionKernel,
    Frozen,
    Gaussian,
    LinearGaussianKernel,
    NonlinearGaussianKernel,
    Positive,
    Series,
    StateSpaceModel,
    check_densities,
    dense_scale,
    masked_scale,
    scale_solve,
    unwrap,
)
from retrodict._numerics import (
    inverse_of_upper_factor,
    linalg,
    product,
    transposed,
)

REACH = 2.0
"""The largest output of a network."""


class Sites(NamedTuple):
    """The information of a row on the state: one Gaussian factor of z = a x per entry.

    Attributes:
        design: a, how each entry's predictor moves with the state.
        slope: the expected derivative of the log density in z.
        curvature: minus its expected second derivative.
    """

    design: Float[Array, "obs state"]
    slope: Float[Array, "obs"]
    curvature: Float[Array, "obs"]


class AssimilationFamily(AbstractPreparedFamily, AbstractLinearGaussianFamily):
    """A family in which a known model predicts, and a small learned network corrects the update.

    With the model's transition linearised at the mean of q_{k-1} the prediction is N(m, P). The
    law q_k ∝ g_k N(m, P) is then approximated by a Gaussian in a few *looks* at the row. A look at
    the law N(μ, Σ), initially the prediction, takes for each entry y_j the line through μ along
    which the predictor z_j = a_j x of that entry moves most, and by quadrature on it

        e_j = E[∂ log g(y_j | z_j)],    h_j = −E[∂² log g(y_j | z_j)],

    in units of the deviation of z_j. A network that all entries share reads (e_j, h_j), emits three
    numbers between −2 and 2 and replaces the two by e_j exp(α) and max(0, h_j + γ) exp(β). The next
    law is

        Σ⁻¹ ← P⁻¹ + Σ_j h_j a_jᵀ a_j,    μ ← m + Σ Σ_j a_jᵀ (e_j + h_j a_j (μ − m)).

    With α = β = γ = 0 this is a step of natural-gradient ascent on the evidence lower bound of the
    row. So the family starts near a robust filter for its model (for a
    linear-Gaussian model near its exact posterior), and has few weights to learn whatever the
    dimension. Backward kernels are the linearised transition reversed under q_{k-1}, with a learned
    `spread` of its noise.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(2), jnp.eye(2)),
        ...     transition=rd.NonlinearGaussianKernel(jnp.tanh, rd.Diagonal(0.5 * jnp.ones(2))),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), jnp.eye(2)),
        ... )
        >>> family = rd.AssimilationFamily(jax.random.key(0), model)
        >>> family.infer(jnp.ones((5, 2))).marginals().mean.shape
        (5, 2)

    Args:
        key: a typed key, for the random weights.
        model: the model, with a Gaussian prior and a transition with Gaussian noise. The family
            holds a frozen copy, which `prepare` replaces by its model.
        num_looks: the number of looks at a row, each with its own network.
        width: units in the hidden layer of a network.
        order: nodes of the quadrature on a line.
        predictor: a function of the state (and of the input, if the emission takes one) that gives
            per entry of the observation the number through which its law depends on the state;
            by default the `loc` or else the `mean` of that law. Needed where neither moves, as for
            a stochastic volatility.
        input_dim: the dimension of the inputs, needed only if it cannot be read off an
            `input_weight`.
    """

    networks: tuple[eqx.nn.MLP, ...]
    spread: Any
    model: Any
    predictor: Callable[..., Any] | None
    order: int = eqx.field(static=True)
    state_dim: int = eqx.field(static=True)  # pyright: ignore
    obs_dim: int = eqx.field(static=True)  # pyright: ignore
    input_dim: int = eqx.field(static=True)  # pyright: ignore

    def __init__(
        self,
        key: PRNGKey,
        model: StateSpaceModel,
        *,
        num_looks: int = 2,
        width: int = 16,
        order: int = 5,
        predictor: Callable[..., Any] | None = None,
        input_dim: int | None = None,
    ):
        check_key(key, "AssimilationFamily")
        plain = _check_model(model)
        self.order = check_count(order, "order")
        self.state_dim = plain.state_dim
        self.input_dim = input_dim_of("AssimilationFamily", plain, input_dim)
        self.predictor = predictor
        self.obs_dim = _obs_dim(plain, self.input_dim)
        keys = jax.random.split(key, check_count(num_looks, "num_looks"))
        self.networks = tuple(perceptron.mlp(one, 2, 3, width, 1) for one in keys)
        self.spread = Positive(jnp.ones(self.state_dim))
        self.model = Frozen(_copy(model))

    def started(self, model: StateSpaceModel, batch: Series) -> "AssimilationFamily":
        """Return the family for this model, in the units of the model."""
        _check_model(model)
        return eqx.tree_at(
            lambda f: f.model, self, Frozen(_copy(model)), is_leaf=lambda n: isinstance(n, Frozen)
        )

    def redraw(self, key: PRNGKey) -> "AssimilationFamily":
        """Return the same family with new random networks."""
        check_key(key, "AssimilationFamily")
        keys = jax.random.split(key, len(self.networks))
        fresh = tuple(
            perceptron.redrawn(one, net) for one, net in zip(keys, self.networks, strict=True)
        )
        return eqx.tree_at(lambda f: f.networks, self, fresh)

    def init(self) -> recursions.GaussianState:
        """Return the model's prior."""
        prior = unwrap(self.model).prior
        return recursions.prior_state(Gaussian(prior.mean, dense_scale(prior.scale_tril)))

    def embed(self, row: Series) -> Series:
        """Return the row unchanged: its information depends on the prediction."""
        return row

    def advance(
        self, state: recursions.GaussianState, embedded: Series
    ) -> recursions.GaussianState:
        """Predict, and update the prediction by a few looks at the row."""
        mean, scale = recursions.predicted(state, self._transition(state.mean, embedded))
        at, factor = mean, scale
        for network in self.networks:
            sites = _corrected(network, *self._look(at, factor, embedded), embedded.mask)
            at, factor = _condition_on_sites(mean, scale, at, sites)
        return recursions.GaussianState(at, factor, state.num_read + 1)

    def read(
        self, before: recursions.GaussianState, after: recursions.GaussianState, embedded: Series
    ) -> Factor:
        """Return the law, and the linearised transition reversed under the previous law."""
        kernel = self._transition(before.mean, embedded)
        back = recursions.reverse(before.mean, before.scale, kernel)
        return Factor(Gaussian(after.mean, after.scale), LinearGaussianKernel(*back))

    def _transition(self, mean: Float[Array, "state"], row: Series) -> LinearGaussianKernel:
        """Linearise the transition into a row at the previous mean, with the learned spread."""
        transition = self.model.transition
        u = row.inputs
        if isinstance(transition, AbstractLinearGaussianKernel):
            kernel = transition.at(u)
            weight, bias, noise = kernel.weight, kernel.bias, kernel.scale_tril
        else:
            moved, noise = transition.law(mean, u).mean, transition.scale_tril
            weight = jax.jacfwd(lambda x: transition.law(x, u).mean)(mean)
            bias = moved - linalg.matvec(weight, mean)
        return LinearGaussianKernel(weight, bias, self.spread[:, None] * dense_scale(noise))

    def _look(
        self, mean: Float[Array, "state"], scale: Float[Array, "state state"], row: Series
    ) -> tuple[Sites, Float[Array, "obs"]]:
        """Compute slopes, curvatures and deviations of predictors under N(mean, scale scaleᵀ)."""
        predict, derivative = self._entries(row)
        design = jax.jacfwd(predict)(mean)
        scaled_design = product(design, scale)
        squares = jnp.sum(scaled_design**2, axis=1)
        # A predictor that does not move has no line; its slope and curvature then are zero.
        safe = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        lines = product(scaled_design / safe[:, None], transposed(scale))
        nodes, weights = _nodes(self.order, mean.dtype)

        def at(node: Array) -> Array:
            return derivative(mean[None] + node * lines, lines)

        slopes = jax.vmap(at)(nodes)
        # Nodes come in pairs ±t: what is constant along a line cancels before it is multiplied.
        odd = 0.5 * (slopes - slopes[::-1])
        slope = jnp.sum(weights[:, None] * slopes, axis=0) / safe
        curvature = -jnp.sum((weights * nodes)[:, None] * odd, axis=0) / safe**2
        return Sites(design, slope, curvature), safe

    def _entries(
        self, row: Series
    ) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
        """Return functions for the predictors and for the slopes of log densities along lines."""
        emission, u = self.model.emission, row.inputs
        y = row.ys
        observed = jnp.ones(y.shape, bool) if row.mask is None else row.mask
        if isinstance(emission, AbstractGaussianKernel):

            def residual(x: Array) -> Array:
                law = emission.law(x, u)
                scale = law.scale_tril
                if row.mask is not None:
                    scale = masked_scale(scale, observed.astype(y.dtype))
                return scale_solve(scale, jnp.where(observed, y - law.mean, 0.0))

            def along(j: Array, x: Array, line: Array) -> Array:
                value, moved = jax.jvp(residual, (x,), (line,))
                return -value[j] * moved[j]

            return lambda x: -residual(x), _each(along)

        def density(j: Array, x: Array) -> Array:
            only = observed & (jnp.arange(y.shape[0]) == j)
            return emission.log_prob(x, y, u, only)

        def slope(j: Array, x: Array, line: Array) -> Array:
            return jax.jvp(lambda at: density(j, at), (x,), (line,))[1]

        if self.predictor is not None:
            predictor = self.predictor
            return (lambda x: predictor(x, u) if u is not None else predictor(x)), _each(slope)
        return (lambda x: _location(emission.law(x, u))), _each(slope)


def _each(along: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Vectorise a function of one entry over all entries, with one point and one line per entry."""

    def all_entries(xs: Array, lines: Array) -> Array:
        return jax.vmap(along)(jnp.arange(xs.shape[0]), xs, lines)

    return all_entries


def _corrected(
    network: eqx.nn.MLP,
    sites: Sites,
    deviation: Float[Array, "obs"],
    observed: Bool[Array, "obs"] | None,
) -> Sites:
    """Correct the sites by the network, in units of the deviation; missing entries get none."""
    slope, curvature = sites.slope * deviation, sites.curvature * deviation**2
    read = jnp.stack([jnp.arcsinh(slope), jnp.arcsinh(curvature)], axis=1)
    moved = REACH * jnp.tanh(jax.vmap(network)(read) / REACH)
    curvature = jnp.maximum(curvature + moved[:, 2], 0.0) * jnp.exp(moved[:, 1])
    curvature, slope = curvature / deviation**2, sites.slope * jnp.exp(moved[:, 0])
    if observed is not None:
        curvature, slope = jnp.where(observed, curvature, 0.0), jnp.where(observed, slope, 0.0)
    return Sites(sites.design, slope, curvature)


def _condition_on_sites(
    mean: Float[Array, "state"],
    scale: Float[Array, "state state"],
    at: Float[Array, "state"],
    sites: Sites,
) -> tuple[Float[Array, "state"], Float[Array, "state state"]]:
    """Return mean and lower factor of N(mean, s sᵀ) times Gaussian factors expanded at `at`.

    With b = a s the covariance is s (I + bᵀ h b)⁻¹ sᵀ, as in `nonsingular_law.reverse`.
    """
    scaled_design = product(sites.design, scale)
    gained = product(transposed(scaled_design), sites.curvature[:, None] * scaled_design)
    eye = jnp.eye(scaled_design.shape[1], dtype=scaled_design.dtype)
    after = product(scale, inverse_of_upper_factor(eye + gained))
    pull = sites.slope + sites.curvature * linalg.matvec(sites.design, at - mean)
    whitened = linalg.matvec(after.T, linalg.matvec(sites.design.T, pull))
    return mean + linalg.matvec(after, whitened), after


def _nodes(order: int, dtype: Any) -> tuple[Array, Array]:
    """Return Gauss–Hermite nodes and weights of the standard normal law."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)


def _location(law: Any) -> Array:
    """Return the location of a law, or its mean if it has none."""
    while hasattr(law, "reinterpreted_batch_ndims"):
        law = law.base_dist
    return jnp.asarray(law.loc if hasattr(law, "loc") else law.mean)


def _copy(model: StateSpaceModel) -> StateSpaceModel:
    return jax.tree.map(lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf, model)


def _obs_dim(model: StateSpaceModel, input_dim: int) -> int:
    """Return the dimension of the emission; raise if its entries are not independent."""
    emission = model.emission
    x = jax.eval_shape(lambda: jnp.asarray(model.prior.mean))
    u = jax.ShapeDtypeStruct((input_dim,), x.dtype)
    y = jax.eval_shape(lambda x, u: emission.sample(jax.random.key(0), x, u), x, u)
    if isinstance(emission, DistributionKernel) and y.shape != (1,):
        law: Any = emission.law
        shape = jax.eval_shape(lambda x, u, y: jnp.asarray(law(x, u).log_prob(y)), x, u, y).shape
        if shape != y.shape:
            raise ValueError(
                "AssimilationFamily looks at the entries of a row one by one, and expects an"
                f" emission whose log_prob has shape {y.shape}, got {shape}. Use an emission with"
                " independent entries, or GatedFamily."
            )
    return y.shape[0]


def _check_model(model: Any) -> StateSpaceModel:
    """Unwrap a model; raise if it cannot be linearised."""
    if not isinstance(model, StateSpaceModel):
        raise TypeError(
            f"AssimilationFamily expects a StateSpaceModel, got {type(model).__name__}."
        )
    plain = unwrap(model)
    gaussian = (AbstractLinearGaussianKernel, NonlinearGaussianKernel)
    if not (isinstance(plain.prior, Gaussian) and isinstance(plain.transition, gaussian)):
        raise TypeError(
            "AssimilationFamily expects a Gaussian prior and a transition with Gaussian noise, got"
            f" {type(plain.prior).__name__} and {type(plain.transition).__name__}. For other models"
            " use GatedFamily or RecurrentFamily."
        )
    check_densities(plain, "AssimilationFamily")
    return plain
