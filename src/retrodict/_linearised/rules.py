"""How a kernel is replaced by a linear-Gaussian one: Taylor expansion, or regression on points."""

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._linearised.moments import Moments
from retrodict._numerics import Factored, linalg
from retrodict._validate import check_count

MAX_NODES = 10_000
"""The most points at which a kernel is evaluated in one time step."""


class Affine(NamedTuple):
    """The kernel x ↦ N(w x + b, s sᵀ), with a lower-triangular s."""

    weight: Float[Array, "*time out state"]
    bias: Float[Array, "*time out"]
    scale: Float[Array, "*time out out"]


class AbstractRule(eqx.Module):
    """A way to replace a kernel by a linear-Gaussian one near a law of the state."""

    @abstractmethod
    def linearise(
        self, moments: Callable[[Array], Moments], law: Factored, *, constant_scale: bool
    ) -> Affine:
        """The linear-Gaussian kernel nearest to one with these conditional moments.

        Args:
            moments: x ↦ E[z | x] and a factor of Cov[z | x].
            law: the law of x near which the kernel is used.
            constant_scale: whether Cov[z | x] is the same for all x.
        """


class Taylor(AbstractRule):
    """First-order expansion of the conditional mean at the mean of the state's law.

    E[z | x] ≈ f(m) + f'(m) (x − m) and Cov[z | x] ≈ Cov[z | m]: the extended Kalman filter's rule
    and, iterated, the Gauss–Newton method for the most probable path. How wide the law of x is does
    not enter, so that a slope which vanishes at m hides all of f.

    Example:
        >>> import retrodict as rd
        >>> rd.Taylor()
        Taylor()
    """

    def linearise(
        self, moments: Callable[[Array], Moments], law: Factored, *, constant_scale: bool
    ) -> Affine:
        """The expansion at the mean of `law`."""

        def mean_and_all(x: Array) -> tuple[Array, Moments]:
            found = moments(x)
            return found.mean, found

        weight, (mean, scale) = jax.jacfwd(mean_and_all, has_aux=True)(law.mean)
        return Affine(weight, mean - linalg.matvec(weight, law.mean), jnp.tril(scale))


class SigmaPoints(NamedTuple):
    """Points ξ_j for the standard normal law: E f(ξ) ≈ Σ_j w_j f(ξ_j).

    They have mean 0 and covariance I, and a Gram matrix of values in place of a covariance:

        Cov f(ξ) ≈ Σ_j v_j (f(ξ_j) − o)(f(ξ_j) − o)ᵀ + e (f̄ − o)(f̄ − o)ᵀ,    o = Σ_j r_j f(ξ_j).

    Attributes:
        nodes: ξ_j, of shape `(node, state)`.
        weights: w_j, which sum to 1.
        reference: r_j, which say from where values are measured.
        spreads: v_j ≥ 0, equal to w_j wherever ξ_j is not 0.
        excess: e ≥ 0.
    """

    nodes: np.ndarray
    weights: np.ndarray
    reference: np.ndarray
    spreads: np.ndarray
    excess: float


class AbstractSigmaPoints(AbstractRule):
    """Statistical linear regression of a kernel on points, in place of an expansion.

    With points x_j = m + S ξ_j of a law N(m, S Sᵀ) and values z_j = E[z | x_j], the regression
    z ≈ A x + b minimises the mean square of its residual, and what it leaves becomes noise:

        A S = Σ_j w_j (z_j − z̄) ξ_jᵀ,   b = z̄ − A m,
        Ω = Σ_j w_j (z_j − A x_j − b)(z_j − A x_j − b)ᵀ + Σ_j w_j Cov[z | x_j].

    Ω is a Gram matrix of residuals, so that it is positive semidefinite however it is rounded.
    """

    @abstractmethod
    def points(self, dim: int) -> SigmaPoints:
        """The points for a state of dimension `dim`."""

    def linearise(
        self, moments: Callable[[Array], Moments], law: Factored, *, constant_scale: bool
    ) -> Affine:
        """The regression on points of `law`."""
        dtype, d = law.columns.dtype, law.dim
        points = self.points(d)
        nodes, weights, reference = (jnp.asarray(a, dtype) for a in points[:3])
        xs = law.mean[None, :] + linalg.matmul(nodes, law.scale_tril.T)
        values, scales = jax.vmap(moments)(xs)
        origin = jnp.sum(reference[:, None] * values, axis=0)
        moved = values - origin[None, :]
        shift = jnp.sum(weights[:, None] * moved, axis=0)
        # Points come in pairs ±ξ. Differences within a pair are exactly zero for an even function,
        # where products that are rounded on their own would leave a slope of rounding errors.
        odd = 0.5 * (values - values[_mirror(points.nodes)])
        slope = linalg.matmul((weights[:, None] * odd).T, nodes)
        residuals = moved - linalg.matmul(nodes, slope.T)
        columns = [(jnp.asarray(np.sqrt(points.spreads), dtype)[:, None] * residuals).T]
        if points.excess > 0:
            columns.append(float(np.sqrt(points.excess)) * shift[:, None])
        if constant_scale:
            columns.append(scales[0])
        else:
            self._refuse_negative(points.weights)
            weighted = jnp.sqrt(weights)[:, None, None] * scales
            columns.append(jnp.swapaxes(weighted, 0, 1).reshape(scales.shape[1], -1))
        # A L D^½ = slope, where D may have zeros: there the points coincide and say nothing.
        roots = linalg.safe_reciprocal(linalg.safe_sqrt(law.diagonal[:d]))
        whitened = (slope * roots[None, :]).T
        weight = linalg.solve_triangular(law.columns[:, :d], whitened, transpose=True).T
        bias = origin + shift - linalg.matvec(weight, law.mean)
        return Affine(weight, bias, lower_factor(jnp.concatenate(columns, axis=1)))

    def _refuse_negative(self, weights: np.ndarray) -> None:
        if np.any(weights < 0):
            raise ValueError(
                f"{self} has a point of weight {weights.min():.3g}, so that the average of a noise"
                " that depends on the state could lose definiteness. Take Unscented(), Cubature()"
                " or GaussHermite(order), whose weights are positive."
            )


class Unscented(AbstractSigmaPoints):
    """The unscented transform: the mean, and two points on each axis at distance √(α²(d + κ)).

    With λ = α²(d + κ) − d the points have weights 1/(2(d + λ)) and the mean has λ/(d + λ), to which
    covariances add 1 − α² + β (Julier and Uhlmann 2004). By default all weights are positive and
    points lie at distance √3, which gives fourth moments in each coordinate, for d = 1 and 2.

    A negative weight of the mean is fine with β ≥ α², which makes covariances semidefinite; but
    small α divides differences by α², of which float32 leaves little below α = 0.1.

    Example:
        >>> import retrodict as rd
        >>> rd.Unscented(alpha=0.5, beta=2.0, kappa=0.0)
        Unscented(alpha=0.5, beta=2.0, kappa=0.0)

    Args:
        alpha: α, how far the points spread.
        beta: β, what is known of fourth moments; 2 suits a Gaussian.
        kappa: κ > −d; by default max(3 − d, 1).
    """

    alpha: float = eqx.field(static=True)
    beta: float = eqx.field(static=True)
    kappa: float | None = eqx.field(static=True)

    def __init__(self, alpha: float = 1.0, beta: float = 0.0, kappa: float | None = None):
        if not alpha > 0:
            raise ValueError(f"Unscented expects a positive alpha, got {alpha}.")
        self.alpha, self.beta = float(alpha), float(beta)
        self.kappa = None if kappa is None else float(kappa)

    def points(self, dim: int) -> SigmaPoints:
        """The 2d + 1 points."""
        kappa = max(3.0 - dim, 1.0) if self.kappa is None else self.kappa
        total = self.alpha**2 * (dim + kappa)
        if total <= 0:
            raise ValueError(
                f"Unscented expects kappa above -{dim} for a state of dimension {dim}, got {kappa}."
            )
        axes = np.sqrt(total) * np.eye(dim)
        weights = np.full(2 * dim + 1, 0.5 / total)
        weights[0] = (total - dim) / total
        spread_of_mean = weights[0] + 1.0 - self.alpha**2 + self.beta
        reference, spreads, excess = weights, weights.copy(), 0.0
        spreads[0] = spread_of_mean
        if spread_of_mean < 0:
            # Measured from the value at the mean instead of from the average of values, the same
            # covariance has the weight β − α² for the square of their difference.
            excess = self.beta - self.alpha**2
            if excess < 0:
                raise ValueError(
                    f"{self} gives the mean a weight of {spread_of_mean:.3g} in covariances of"
                    f" dimension {dim}, which can then lose definiteness. Take beta of at least"
                    " alpha ** 2, a larger kappa, or Cubature()."
                )
            reference = np.eye(2 * dim + 1)[0]
            spreads[0] = 0.0
        nodes = np.concatenate([np.zeros((1, dim)), axes, -axes])
        return SigmaPoints(nodes, weights, reference, spreads, excess)


class Cubature(AbstractSigmaPoints):
    """The spherical-radial rule of third degree: 2d points at distance √d, of equal weights.

    Arasaratnam and Haykin (2009). The centre is no point, so that a bump at the mean is not seen.

    Example:
        >>> import retrodict as rd
        >>> rd.Cubature()
        Cubature()
    """

    def points(self, dim: int) -> SigmaPoints:
        """The points ±√d e_j."""
        axes = np.sqrt(dim) * np.eye(dim)
        return _positive_points(np.concatenate([axes, -axes]), np.full(2 * dim, 0.5 / dim))


class GaussHermite(AbstractSigmaPoints):
    """A grid of Gauss–Hermite nodes: `order ** state` points, exact to degree 2 order − 1.

    Example:
        >>> import retrodict as rd
        >>> rd.GaussHermite(order=5)
        GaussHermite(order=5)

    Args:
        order: points along one axis, at least 2.
    """

    order: int = eqx.field(static=True)

    def __init__(self, order: int = 5):
        self.order = check_count(order, "order")
        if self.order < 2:
            raise ValueError("GaussHermite expects an order of at least 2, got 1.")

    def points(self, dim: int) -> SigmaPoints:
        """The tensor product of nodes."""
        if self.order**dim > MAX_NODES:
            raise ValueError(
                f"GaussHermite(order={self.order}) would take {self.order}^{dim} points a time"
                f" step, more than {MAX_NODES}. Take a lower order, Unscented() or Cubature()."
            )
        return _positive_points(*_gauss_hermite(self.order, dim))


def _mirror(nodes: np.ndarray) -> np.ndarray:
    """For each node the index of its opposite."""
    order, opposite = np.lexsort(nodes.T), np.lexsort(-nodes.T)
    mirror = np.empty_like(order)
    mirror[order] = opposite
    return mirror


def _positive_points(nodes: np.ndarray, weights: np.ndarray) -> SigmaPoints:
    return SigmaPoints(nodes, weights, weights, weights, 0.0)


@functools.lru_cache(maxsize=16)
def _gauss_hermite(order: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    axis, weight = np.polynomial.hermite_e.hermegauss(order)
    weight = weight / weight.sum()
    nodes = np.array(list(itertools.product(axis, repeat=dim)))
    weights = np.array(list(itertools.product(weight, repeat=dim))).prod(axis=1)
    return nodes, weights


def lower_factor(columns: Float[Array, "r c"]) -> Float[Array, "r r"]:
    """The lower-triangular s with s sᵀ = c cᵀ, for many columns.

    Gram–Schmidt over rows as in `linalg.tria`, which writes out a sum over columns: here there may
    be hundreds, so that it is one reduction.
    """
    count, dtype = columns.shape[0], columns.dtype
    if count > 2 * linalg.UNROLLED:
        return linalg.tria_by_qr(columns)
    factor, rows = [], columns
    for i in range(count):
        products = linalg.fence(jnp.sum(rows * rows[0][None, :], axis=1))
        root = linalg.safe_reciprocal(linalg.safe_sqrt(products[0]))
        factor.append(jnp.concatenate([jnp.zeros(i, dtype), products * root]))
        ratio = products[1:] * linalg.safe_reciprocal(products[0])
        rows = linalg.fence(rows[1:] - ratio[:, None] * rows[0][None, :])
    return jnp.stack(factor, axis=1)
