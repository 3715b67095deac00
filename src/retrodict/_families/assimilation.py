"""The assimilation family: the model predicts, and a learned update takes each row in."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from retrodict._families.base import (
    AbstractLinearGaussianFamily,
    Factor,
    Row,
    check_fits,
    refuse_parallel,
)
from retrodict._families.kalman import input_dim_of
from retrodict._families.network import mlp, redrawn
from retrodict._families.recursions import (
    GaussianState,
    before_anything,
    inverse_of_upper_factor,
    predicted,
    product,
    reverse,
    transposed,
)
from retrodict._kernels import (
    AbstractGaussianKernel,
    AbstractLinearGaussianKernel,
    DistributionKernel,
    LinearGaussianKernel,
    NonlinearGaussianKernel,
)
from retrodict._laws import Gaussian, dense_scale, masked_scale, scale_solve
from retrodict._model import StateSpaceModel, check_densities
from retrodict._numerics import linalg
from retrodict._parameters import Frozen, Positive, unwrap
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key
from retrodict.distributed import Parallel

REACH = 2.0
"""The largest number that a network emits."""


class Sites(NamedTuple):
    """What a row says of the state, as Gaussian factors of z = a x, one an entry.

    Attributes:
        design: a, how each entry's predictor moves with the state.
        slope: the expected derivative of the log density in z.
        curvature: minus its expected second derivative.
    """

    design: Float[Array, "obs state"]
    slope: Float[Array, "obs"]
    curvature: Float[Array, "obs"]


class AssimilationFamily(AbstractLinearGaussianFamily):
    """A known model predicts, and a small learned network corrects how a row is taken in.

    With the model's transition linearised at the mean of q_{k-1} the prediction is N(m, P). The
    law q_k ∝ g_k N(m, P) is then sought among Gaussian ones by a few *looks* at the row. A look at
    the law N(μ, Σ), the prediction at first, takes for each entry y_j the line through μ along
    which the predictor z_j = a_j x of that entry moves most, and by quadrature on it

        e_j = E[∂ log g(y_j | z_j)],    h_j = −E[∂² log g(y_j | z_j)],

    in units of the deviation of z_j. A network that all entries share reads (e_j, h_j), emits three
    numbers between −2 and 2 and replaces the two by e_j exp(α) and max(0, h_j + γ) exp(β). The next
    law is

        Σ⁻¹ ← P⁻¹ + Σ_j h_j a_jᵀ a_j,    μ ← m + Σ Σ_j a_jᵀ (e_j + h_j a_j (μ − m)).

    With α = β = γ = 0 this is a step of natural-gradient ascent on the evidence lower bound of the
    row. So the family starts near a robust filter for the model that it is given (for a
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
            keeps a frozen copy, which `prepare` replaces by the model that it is given.
        num_looks: how often a row is looked at, each time with a network of its own.
        width: units in the hidden layer of a network.
        order: nodes of the quadrature on a line.
        predictor: a function of the state (and of the input, if the emission takes one) that gives
            for each entry of the observation the number through which its law depends on the state;
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
        self.networks = tuple(mlp(one, 2, 3, width, 1) for one in keys)
        self.spread = Positive(jnp.ones(self.state_dim))
        self.model = Frozen(_copy(model))

    def prepare(
        self,
        model: StateSpaceModel,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> "AssimilationFamily":
        """The family of this model, in whose units it is."""
        check_fits(self, model)
        _check_model(model)
        return eqx.tree_at(
            lambda f: f.model, self, Frozen(_copy(model)), is_leaf=lambda n: isinstance(n, Frozen)
        )

    def redraw(self, key: PRNGKey) -> "AssimilationFamily":
        """The same family with freshly drawn networks."""
        check_key(key, "AssimilationFamily")
        keys = jax.random.split(key, len(self.networks))
        fresh = tuple(redrawn(one, net) for one, net in zip(keys, self.networks, strict=True))
        return eqx.tree_at(lambda f: f.networks, self, fresh)

    def init(self) -> GaussianState:
        """The model's prior."""
        prior = unwrap(self.model).prior
        return before_anything(Gaussian(prior.mean, dense_scale(prior.scale_tril)))

    def embed(self, row: Row) -> Row:
        """The row itself: what it says depends on the prediction."""
        return row

    def advance(self, state: GaussianState, embedded: Row) -> GaussianState:
        """Predicts, and looks at the row."""
        mean, scale = predicted(state, self._transition(state.mean, embedded))
        at, factor = mean, scale
        for network in self.networks:
            sites = _corrected(network, *self._look(at, factor, embedded), embedded.seen)
            at, factor = _take_in(mean, scale, at, sites)
        return GaussianState(at, factor, state.num_read + 1)

    def advance_in_parallel(
        self, embedded: Row, exists: Bool[Array, "time"] | None, parallel: Parallel = True
    ) -> GaussianState:
        """Refused: a row is looked at from the prediction."""
        refuse_parallel(self)

    def read(self, before: GaussianState, after: GaussianState, embedded: Row) -> Factor:
        """The law, and the linearised transition reversed under the law before it."""
        kernel = self._transition(before.mean, embedded)
        back = reverse(before.mean, before.scale, kernel.weight, kernel.bias, kernel.scale_tril)
        return Factor(Gaussian(after.mean, after.scale), LinearGaussianKernel(*back))

    def _transition(self, mean: Float[Array, "state"], row: Row) -> LinearGaussianKernel:
        """The transition into a row, linearised at the mean before it, with the learned spread."""
        transition = self.model.transition
        u = row.u
        if isinstance(transition, AbstractLinearGaussianKernel):
            kernel = transition.at(u)
            weight, bias, noise = kernel.weight, kernel.bias, kernel.scale_tril
        else:
            moved, noise = transition.law(mean, u).mean, transition.scale_tril
            weight = jax.jacfwd(lambda x: transition.law(x, u).mean)(mean)
            bias = moved - linalg.matvec(weight, mean)
        return LinearGaussianKernel(weight, bias, self.spread[:, None] * dense_scale(noise))

    def _look(
        self, mean: Float[Array, "state"], scale: Float[Array, "state state"], row: Row
    ) -> tuple[Sites, Float[Array, "obs"]]:
        """Slopes and curvatures under N(mean, scale scaleᵀ), and the deviations of predictors."""
        predict, derivative = self._entries(row)
        design = jax.jacfwd(predict)(mean)
        seen = product(design, scale)
        squares = jnp.sum(seen**2, axis=1)
        # A predictor that does not move has no line; its slope and curvature then are zero.
        safe = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        lines = product(seen / safe[:, None], transposed(scale))
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
        self, row: Row
    ) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
        """The predictors of all entries, and the slope of each one's log density along its line."""
        emission, u = self.model.emission, row.u
        y = row.y
        seen = jnp.ones(y.shape, bool) if row.seen is None else row.seen
        if isinstance(emission, AbstractGaussianKernel):

            def residual(x: Array) -> Array:
                law = emission.law(x, u)
                scale = law.scale_tril
                if row.seen is not None:
                    scale = masked_scale(scale, seen.astype(y.dtype))
                return scale_solve(scale, jnp.where(seen, y - law.mean, 0.0))

            def along(j: Array, x: Array, line: Array) -> Array:
                value, moved = jax.jvp(residual, (x,), (line,))
                return -value[j] * moved[j]

            return lambda x: -residual(x), _each(along)

        def density(j: Array, x: Array) -> Array:
            only = seen & (jnp.arange(y.shape[0]) == j)
            return emission.log_prob(x, y, u, only)

        def slope(j: Array, x: Array, line: Array) -> Array:
            return jax.jvp(lambda at: density(j, at), (x,), (line,))[1]

        if self.predictor is not None:
            predictor = self.predictor
            return (lambda x: predictor(x, u) if u is not None else predictor(x)), _each(slope)
        return (lambda x: _location(emission.law(x, u))), _each(slope)


def _each(along: Callable[[Array, Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """One point and one line for each entry."""

    def all_entries(xs: Array, lines: Array) -> Array:
        return jax.vmap(along)(jnp.arange(xs.shape[0]), xs, lines)

    return all_entries


def _corrected(
    network: eqx.nn.MLP,
    sites: Sites,
    deviation: Float[Array, "obs"],
    seen: Bool[Array, "obs"] | None,
) -> Sites:
    """The sites as the network moves them, in units of the deviation; none for what is missing."""
    slope, curvature = sites.slope * deviation, sites.curvature * deviation**2
    read = jnp.stack([jnp.arcsinh(slope), jnp.arcsinh(curvature)], axis=1)
    moved = REACH * jnp.tanh(jax.vmap(network)(read) / REACH)
    curvature = jnp.maximum(curvature + moved[:, 2], 0.0) * jnp.exp(moved[:, 1])
    curvature, slope = curvature / deviation**2, sites.slope * jnp.exp(moved[:, 0])
    if seen is not None:
        curvature, slope = jnp.where(seen, curvature, 0.0), jnp.where(seen, slope, 0.0)
    return Sites(sites.design, slope, curvature)


def _take_in(
    mean: Float[Array, "state"],
    scale: Float[Array, "state state"],
    at: Float[Array, "state"],
    sites: Sites,
) -> tuple[Float[Array, "state"], Float[Array, "state state"]]:
    """N(mean, s sᵀ) times Gaussian factors that were found at `at`: mean and lower factor.

    With b = a s the covariance is s (I + bᵀ h b)⁻¹ sᵀ, as in `_recursions.condition`.
    """
    seen = product(sites.design, scale)
    gained = product(transposed(seen), sites.curvature[:, None] * seen)
    eye = jnp.eye(seen.shape[1], dtype=seen.dtype)
    after = product(scale, inverse_of_upper_factor(eye + gained))
    pull = sites.slope + sites.curvature * linalg.matvec(sites.design, at - mean)
    whitened = linalg.matvec(after.T, linalg.matvec(sites.design.T, pull))
    return mean + linalg.matvec(after, whitened), after


def _nodes(order: int, dtype: Any) -> tuple[Array, Array]:
    """Gauss–Hermite nodes and weights of the standard normal law."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)


def _location(law: Any) -> Array:
    """Through what an entry's law depends on the state: its location or else its mean."""
    while hasattr(law, "reinterpreted_batch_ndims"):
        law = law.base_dist
    return jnp.asarray(law.loc if hasattr(law, "loc") else law.mean)


def _copy(model: StateSpaceModel) -> StateSpaceModel:
    return jax.tree.map(lambda leaf: jnp.array(leaf) if eqx.is_array(leaf) else leaf, model)


def _obs_dim(model: StateSpaceModel, input_dim: int) -> int:
    """The dimension of a draw of the emission; refused if its entries are not independent."""
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
    """Refuses a model that cannot be linearised, and unwraps it."""
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
