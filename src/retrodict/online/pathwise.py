"""The pathwise recursion of the ELBO's gradient, with regressions that summarise the past."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, Scalar, check_count, check_key
from retrodict._families import Factor
from retrodict._model import Series, StateSpaceModel
from retrodict._numerics import linalg
from retrodict.online.gradient import (
    AbstractRecursiveGradient,
    Parts,
    RowGradient,
    check_has_family,
)
from retrodict.online.samples import backward_law
from retrodict.online.sensitivity import (
    DifferentiableRow,
    StateDerivative,
    StateWithJacobian,
    check_sensitivity,
    initial_state,
)

SAMPLES_PER_FEATURE = 3
"""The least number of samples per feature. With two, noise is amplified from row to row."""


class AbstractFeatures(eqx.Module):
    """Functions of a state in standard coordinates, the first of them the constant one.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> class Cubic(rd.online.AbstractFeatures):
        ...     def __call__(self, z):
        ...         return jnp.concatenate([jnp.ones(1), z, z**2, z**3])
        >>> Cubic()(jnp.array([2.0])).tolist()
        [1.0, 2.0, 4.0, 8.0]
        >>> gradient = rd.online.RecursivePathwise(num_samples=64, features=Cubic())
    """

    @abstractmethod
    def __call__(self, z: Float[Array, "state"]) -> Float[Array, "feature"]:
        """Return the features of one state."""


class QuadraticFeatures(AbstractFeatures):
    """Polynomials of degree two, which are exact for linear-Gaussian models and kernels.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> rd.online.QuadraticFeatures()(jnp.array([2.0, 3.0])).tolist()
        [1.0, 2.0, 3.0, 4.0, 6.0, 9.0]
        >>> independent = rd.online.QuadraticFeatures(products=False)
        >>> gradient = rd.online.RecursivePathwise(num_samples=64, features=independent)

    Args:
        products: whether products of two coordinates are among them, (d + 1)(d + 2)/2 features in
            all. Without them there are 2 d + 1, which is enough where coordinates are independent.
    """

    products: bool = eqx.field(static=True, default=True)

    def __call__(self, z: Float[Array, "state"]) -> Float[Array, "feature"]:
        """Return 1, the coordinates, and their squares or products."""
        rows, columns = np.triu_indices(z.shape[0]) if self.products else 2 * (np.arange(len(z)),)
        return jnp.concatenate([jnp.ones(1, z.dtype), z, z[rows] * z[columns]])


class RandomFeatures(AbstractFeatures):
    """Polynomials of degree two, and cosines of random frequencies.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> features = rd.online.RandomFeatures(jax.random.key(0), state_dim=2, num_features=10)
        >>> features(jnp.array([2.0, 3.0])).shape
        (16,)
        >>> gradient = rd.online.RecursivePathwise(num_samples=64, features=features)

    Args:
        key: a typed key.
        state_dim: the dimension of the state.
        num_features: the number of cosines.
        scale: the standard deviation of the frequencies, in standard deviations of the laws.
    """

    frequencies: Float[Array, "cosine state"]
    phases: Float[Array, "cosine"]

    def __init__(self, key: PRNGKey, state_dim: int, num_features: int, *, scale: float = 1.0):
        check_key(key, "RandomFeatures")
        state_dim = check_count(state_dim, "state_dim")
        num_features = check_count(num_features, "num_features")
        frequency_key, phase_key = jax.random.split(key)
        self.frequencies = scale * jax.random.normal(frequency_key, (num_features, state_dim))
        self.phases = jax.random.uniform(phase_key, (num_features,), maxval=2 * np.pi)

    def __call__(self, z: Float[Array, "state"]) -> Float[Array, "feature"]:
        """Return the polynomials and the cosines."""
        frequencies, phases = (
            lax.stop_gradient(leaf.astype(z.dtype)) for leaf in (self.frequencies, self.phases)
        )
        waves = jnp.cos(linalg.matvec(frequencies, z) + phases)
        return jnp.concatenate([QuadraticFeatures()(z), waves])


class StandardCoordinates(eqx.Module):
    """Standard coordinates z = s⁻¹(x − m)."""

    location: Float[Array, "state"]
    scale: Float[Array, "state state"]

    @classmethod
    def of(cls, law: Any) -> "StandardCoordinates":
        """Return the coordinates in which a law has mean zero and unit covariance."""
        return cls(law.mean, linalg.cholesky(law.covariance))

    def __call__(self, x: Float[Array, "state"]) -> Float[Array, "state"]:
        """Return the standard coordinates of a state."""
        return linalg.solve_triangular(self.scale, x - self.location)


class PathwiseState(eqx.Module):
    """The state of `RecursivePathwise`.

    Attributes:
        family: the family's state and its derivative.
        coordinates: the coordinates of the features.
        value: the coefficients of T_k + log q_k in the features, less the ELBO.
        slope: those of its derivative in each parameter, less the part shared by all states.
        mean_slope: that part, summed over the rows.
        terminal: the part of the gradient that comes from moving q_k.
        started: whether a row was read.
    """

    family: StateWithJacobian
    coordinates: StandardCoordinates
    value: Float[Array, "feature"]
    slope: Float[Array, "feature parameter"]
    mean_slope: Float[Array, "parameter"]
    terminal: Float[Array, "parameter"]
    started: Bool[Array, ""]


class RecursivePathwise(AbstractRecursiveGradient):
    """The gradient of the ELBO along reparameterised draws, with a regression for the past.

    With x_{k-1} = r_λ(x_k, ε) a draw of q_{k-1|k}, the function V_k = T_k + log q_k follows

        V_k(x_k) = E_ε[V_{k-1}(r) + log m(r, x_k) + log g_k(x_k) − log q_{k-1|k}(x_k, r)],
        ∂V_k(x_k) = E_ε[∂V_{k-1}(r) + (d/dr)(V_{k-1} + log m − log q_{k-1|k}) · ∂r + ∂_θ log m g_k],

    and ∂ELBO_k = E[∂V_k(x_k) + ∇(V_k − log q_k)(x_k) · ∂x_k]. Both functions are fitted by least
    squares at draws of q_k, as sums of features. Scores ∂ log q at fixed states have mean zero and
    are left out, so that the gradient in λ has no noise where the chain is exact. The gradient is
    unbiased if V_k and ∂V_k are sums of the features.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> gradient = rd.online.RecursivePathwise(num_samples=16)
        >>> rows = rd.online.recursive_gradient(
        ...     gradient, rd.KalmanFamily(model), model, ys, key=jax.random.key(0)
        ... )
        >>> rows.elbo_increment.shape
        (3,)

    Args:
        num_samples: the number of draws per filtering law; several times the number of features.
        features: the features by which the functions of x_k are fitted.
        sensitivity: `"exact"`, or `"none"` to treat the family's state as a constant.
    """

    num_samples: int = eqx.field(static=True)
    features: AbstractFeatures = eqx.field(default_factory=QuadraticFeatures, kw_only=True)
    sensitivity: StateDerivative = eqx.field(static=True, default="exact", kw_only=True)

    def __check_init__(self) -> None:
        if check_count(self.num_samples, "num_samples") % 2:
            raise ValueError(
                "RecursivePathwise draws pairs of opposite noise: num_samples must be even, got"
                f" {self.num_samples}."
            )
        check_sensitivity(self.sensitivity, "RecursivePathwise")

    def check(self, parts: Parts) -> None:
        """Raise if there is no family, or too few samples for the features."""
        check_has_family(parts, "RecursivePathwise")
        count = self._num_features(parts)
        if self.num_samples < SAMPLES_PER_FEATURE * count:
            raise ValueError(
                f"RecursivePathwise fits {count} features by {self.num_samples} samples, and"
                f" their noise would grow from row to row. Draw {4 * count} samples, or use fewer"
                " features, such as QuadraticFeatures(products=False)."
            )

    def _num_features(self, parts: Parts) -> int:
        family, _ = parts.whole
        z = jax.ShapeDtypeStruct((family.state_dim,), parts.dtype)
        return jax.eval_shape(self.features, z).shape[0]

    def init(self, parts: Parts) -> PathwiseState:
        """Return the state before the first row."""
        family, _ = parts.whole
        none, d = jnp.zeros_like(parts.vector), family.state_dim
        count = self._num_features(parts)
        return PathwiseState(
            family=initial_state(parts),
            coordinates=StandardCoordinates(jnp.zeros(d, none.dtype), jnp.eye(d, dtype=none.dtype)),
            value=jnp.zeros(count, none.dtype),
            slope=jnp.zeros((count, none.shape[0]), none.dtype),
            mean_slope=none,
            terminal=none,
            started=jnp.zeros((), bool),
        )

    def update(
        self, parts: Parts, state: PathwiseState, row: Series, key: PRNGKey
    ) -> tuple[PathwiseState, RowGradient]:
        """Draw pairs of states, and fit the functions of the later state."""
        current = DifferentiableRow(parts, state.family, row, self.sensitivity)
        law = current.factor.law
        coordinates = StandardCoordinates.of(law)
        here_key, back_key = jax.random.split(key)
        noise = self._opposite(here_key, law.noise_dim, law.mean.dtype)
        xs = jax.vmap(law.from_noise)(noise)
        targets, slopes = lax.cond(
            state.started,
            lambda: self._later(current, state, xs, back_key),
            lambda: current.first_terms(xs),
        )
        features = jax.vmap(lambda x: self.features(coordinates(x)))(xs)
        fitted = _least_squares(features, jnp.concatenate([targets[:, None], slopes], axis=1))
        value, slope = fitted[:, 0], fitted[:, 1:]
        densities = jax.vmap(law.log_prob)(xs)
        level = jnp.mean(linalg.matvec(features, value) - densities)
        mean = jnp.mean(linalg.matmul(features, slope), axis=0)

        def moved(family: Any, model: StateSpaceModel, read: Factor) -> Scalar:
            def gain(e: Array) -> Scalar:
                x = read.law.from_noise(e)
                return jnp.sum(self.features(coordinates(x)) * value) - law.log_prob(x)

            return jnp.mean(jax.vmap(gain)(noise))

        terminal = current.gradient(moved)
        value, slope = value.at[0].add(-level), slope.at[0].add(-mean)
        total, started = state.mean_slope + mean, jnp.ones((), bool)
        return (
            PathwiseState(current.after, coordinates, value, slope, total, terminal, started),
            current.row_gradient(level, total, mean, terminal, state.terminal),
        )

    def _opposite(self, key: PRNGKey, width: int, dtype: Any) -> Float[Array, "sample noise"]:
        half = jax.random.normal(key, (self.num_samples // 2, width), dtype)
        return jnp.concatenate([half, -half])

    def _later(
        self,
        current: DifferentiableRow,
        state: PathwiseState,
        xs: Float[Array, "sample state"],
        key: PRNGKey,
    ) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
        """Return draws whose conditional means are V_k and its derivative."""
        family, model = current.parts.whole
        factor, u = current.factor, current.row.inputs
        width = backward_law(family)(factor.kernel, xs[0]).noise_dim
        noise = self._opposite(key, width, xs.dtype)

        def one(x: Array, e: Array) -> tuple[Scalar, Float[Array, "parameter"]]:
            kernel = backward_law(family)(factor.kernel, x)

            def target(family: Any, model: StateSpaceModel, read: Factor) -> Scalar:
                before = backward_law(family)(read.kernel, x).from_noise(e)
                past = jnp.sum(self.features(state.coordinates(before)) * state.value)
                move = model.transition.log_prob(before, x, u) + current.log_emission(model, x)
                return past + move - kernel.log_prob(before)

            before = kernel.from_noise(e)
            carried = linalg.matvec(state.slope.T, self.features(state.coordinates(before)))
            return target(family, model, factor), current.gradient(target) + carried

        return jax.vmap(one)(xs, noise)


def _least_squares(
    features: Float[Array, "sample feature"], targets: Float[Array, "sample target"]
) -> Float[Array, "feature target"]:
    """Return the coefficients with the least squared error."""
    q, r = jnp.linalg.qr(features)
    return solve_triangular(r, jnp.matmul(q.T, targets, precision=lax.Precision.HIGHEST))
