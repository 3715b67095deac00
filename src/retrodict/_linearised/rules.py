"""Linearisation rules for kernels: Taylor expansion, and regression on sigma points."""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import check_count
from retrodict._expectations import cubature, gauss_hermite
from retrodict._numerics import GaussianLaw, linalg

MAX_NODES = 10_000
"""The largest number of points per time step at which a kernel is evaluated."""


class Affine(NamedTuple):
    """The kernel x ↦ N(w x + b, s sᵀ), with a lower-triangular s."""

    weight: Float[Array, "*time out state"]
    bias: Float[Array, "*time out"]
    scale: Float[Array, "*time out out"]


class AbstractRule(eqx.Module):
    """A rule that replaces a kernel by a linear-Gaussian one near a law of the state."""

    @abstractmethod
    def linearise(
        self, moments: Callable[[Array], GaussianLaw], law: GaussianLaw, *, constant_scale: bool
    ) -> Affine:
        """Return a linear-Gaussian approximation of the kernel with these conditional moments.

        Args:
            moments: x ↦ E[z | x] and a factor of Cov[z | x].
            law: the law of x near which the kernel is used.
            constant_scale: whether Cov[z | x] is the same for all x.
        """


class Taylor(AbstractRule):
    """First-order expansion of the conditional mean at the mean of the state's law.

    E[z | x] ≈ f(m) + f'(m) (x − m) and Cov[z | x] ≈ Cov[z | m]: the extended Kalman filter's rule
    and, iterated, the Gauss–Newton method for the most probable path. The rule ignores the width of
    the law of x. If the slope vanishes at m, the linearised mean is constant.

    Example:
        >>> import retrodict as rd
        >>> rd.Taylor()
        Taylor()
    """

    def linearise(
        self, moments: Callable[[Array], GaussianLaw], law: GaussianLaw, *, constant_scale: bool
    ) -> Affine:
        """Return the expansion at the mean of `law`."""

        def mean_and_moments(x: Array) -> tuple[Array, GaussianLaw]:
            at_x = moments(x)
            return at_x.mean, at_x

        weight, (mean, scale) = jax.jacfwd(mean_and_moments, has_aux=True)(law.mean)
        return Affine(weight, mean - linalg.matvec(weight, law.mean), jnp.tril(scale))


class SigmaPoints(NamedTuple):
    """Points ξ_j for the standard normal law: E f(ξ) ≈ Σ_j w_j f(ξ_j).

    They have mean 0 and covariance I. Covariances of values are approximated by Gram matrices:

        Cov f(ξ) ≈ Σ_j v_j (f(ξ_j) − o)(f(ξ_j) − o)ᵀ + e (f̄ − o)(f̄ − o)ᵀ,    o = Σ_j r_j f(ξ_j).

    Attributes:
        nodes: ξ_j, of shape `(node, state)`.
        weights: w_j, which sum to 1.
        reference: r_j, the weights of the origin o from which values are measured.
        spreads: v_j ≥ 0, equal to w_j wherever ξ_j is not 0.
        excess: e ≥ 0.
    """

    nodes: np.ndarray
    weights: np.ndarray
    reference: np.ndarray
    spreads: np.ndarray
    excess: float


class AbstractSigmaPoints(AbstractRule):
    """Statistical linear regression of a kernel on sigma points.

    With points x_j = m + S ξ_j of a law N(m, S Sᵀ) and values z_j = E[z | x_j], the regression
    z ≈ A x + b minimises the mean square of its residual. The residual is added to the noise:

        A S = Σ_j w_j (z_j − z̄) ξ_jᵀ,   b = z̄ − A m,
        Ω = Σ_j w_j (z_j − A x_j − b)(z_j − A x_j − b)ᵀ + Σ_j w_j Cov[z | x_j].

    Ω is a Gram matrix of residuals, so it is positive semidefinite regardless of rounding.
    """

    @abstractmethod
    def points(self, dim: int) -> SigmaPoints:
        """Return the points for a state of dimension `dim`."""

    def linearise(
        self, moments: Callable[[Array], GaussianLaw], law: GaussianLaw, *, constant_scale: bool
    ) -> Affine:
        """Return the regression on points of `law`."""
        dtype, d = law.mean.dtype, law.mean.shape[0]
        points = self.points(d)
        nodes, weights, reference = (jnp.asarray(a, dtype) for a in points[:3])
        xs = law.mean[None, :] + linalg.matmul(nodes, law.scale.T)
        values, scales = jax.vmap(moments)(xs)
        origin = jnp.sum(reference[:, None] * values, axis=0)
        centred = values - origin[None, :]
        shift = jnp.sum(weights[:, None] * centred, axis=0)
        # Points come in pairs ±ξ. Differences within a pair are exactly zero for an even function.
        # Without them, products that are rounded separately would leave a spurious slope.
        odd = 0.5 * (values - values[_mirror(points.nodes)])
        slope = linalg.matmul((weights[:, None] * odd).T, nodes)
        residuals = centred - linalg.matmul(nodes, slope.T)
        columns = [(jnp.asarray(np.sqrt(points.spreads), dtype)[:, None] * residuals).T]
        if points.excess > 0:
            columns.append(float(np.sqrt(points.excess)) * shift[:, None])
        if constant_scale:
            columns.append(scales[0])
        else:
            self._check_positive(points.weights)
            weighted = jnp.sqrt(weights)[:, None, None] * scales
            columns.append(jnp.swapaxes(weighted, 0, 1).reshape(scales.shape[1], -1))
        # A L D^½ = slope. Where D is zero the points coincide, and the slope there is set to zero.
        lower, diagonal = linalg.unit_lower_and_diagonal(law.scale)
        whitened = (slope * linalg.safe_reciprocal(linalg.safe_sqrt(diagonal))[None, :]).T
        weight = linalg.solve_triangular(lower, whitened, transpose=True).T
        bias = origin + shift - linalg.matvec(weight, law.mean)
        return Affine(weight, bias, linalg.tria(jnp.concatenate(columns, axis=1)))

    def _check_positive(self, weights: np.ndarray) -> None:
        if np.any(weights < 0):
            raise ValueError(
                f"{self} has a point of weight {weights.min():.3g}, so the averaged covariance of a"
                " noise that depends on the state could lose definiteness. Use Unscented(),"
                " Cubature() or GaussHermite(order), whose weights are positive."
            )


class Unscented(AbstractSigmaPoints):
    """The unscented transform: the mean, and two points on each axis at distance √(α²(d + κ)).

    With λ = α²(d + κ) − d the points have weights 1/(2(d + λ)). The mean has the weight λ/(d + λ),
    plus 1 − α² + β in covariances (Julier and Uhlmann 2004). By default all weights are positive.
    For d = 1 and 2 the points are at distance √3, which matches fourth moments per coordinate.

    A negative weight of the mean is allowed if β ≥ α², which keeps covariances semidefinite. A
    small α divides differences by α²: below α = 0.1, float32 loses most of the precision.

    Example:
        >>> import retrodict as rd
        >>> rd.Unscented(alpha=0.5, beta=2.0, kappa=0.0)
        Unscented(alpha=0.5, beta=2.0, kappa=0.0)

    Args:
        alpha: α, the spread of the points.
        beta: β, prior information on fourth moments; 2 is suitable for a Gaussian.
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
        """Return the 2d + 1 points."""
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
            # Values are measured from the value at the mean instead of from their average. In the
            # same covariance, the square of the difference of the two then has weight β − α².
            excess = self.beta - self.alpha**2
            if excess < 0:
                raise ValueError(
                    f"{self} gives the mean a weight of {spread_of_mean:.3g} in covariances of"
                    f" dimension {dim}, which can then lose definiteness. Use beta of at least"
                    " alpha ** 2, a larger kappa, or Cubature()."
                )
            reference = np.eye(2 * dim + 1)[0]
            spreads[0] = 0.0
        nodes = np.concatenate([np.zeros((1, dim)), axes, -axes])
        return SigmaPoints(nodes, weights, reference, spreads, excess)


class Cubature(AbstractSigmaPoints):
    """The spherical-radial rule of third degree: 2d points at distance √d, with equal weights.

    See Arasaratnam and Haykin (2009). The mean is not a point of the rule, so a narrow feature of
    the kernel at the mean has no effect.

    Example:
        >>> import retrodict as rd
        >>> rd.Cubature()
        Cubature()
    """

    def points(self, dim: int) -> SigmaPoints:
        """Return the points ±√d e_j."""
        return _positive_points(*cubature(dim))


class GaussHermite(AbstractSigmaPoints):
    """A grid of Gauss–Hermite nodes: `order ** state` points, exact to degree 2 order − 1.

    Example:
        >>> import retrodict as rd
        >>> rd.GaussHermite(order=5)
        GaussHermite(order=5)

    Args:
        order: the number of points per axis, at least 2.
    """

    order: int = eqx.field(static=True)

    def __init__(self, order: int = 5):
        self.order = check_count(order, "order")
        if self.order < 2:
            raise ValueError(f"GaussHermite expects an order of at least 2, got {self.order}.")

    def points(self, dim: int) -> SigmaPoints:
        """Return the tensor product of the nodes."""
        if self.order**dim > MAX_NODES:
            raise ValueError(
                f"GaussHermite(order={self.order}) needs {self.order}^{dim} points per time step,"
                f" more than {MAX_NODES}. Use a lower order, Unscented() or Cubature()."
            )
        return _positive_points(*gauss_hermite(self.order, dim))


def _mirror(nodes: np.ndarray) -> np.ndarray:
    """Return the index of the opposite of each node."""
    order, opposite = np.lexsort(nodes.T), np.lexsort(-nodes.T)
    mirror = np.empty_like(order)
    mirror[order] = opposite
    return mirror


def _positive_points(nodes: np.ndarray, weights: np.ndarray) -> SigmaPoints:
    return SigmaPoints(nodes, weights, weights, weights, 0.0)
