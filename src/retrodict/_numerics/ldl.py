"""Gaussian laws whose covariance is held as L diag(D) Lᵀ, and the three steps of exact inference.

A unit-lower L and a diagonal D (Bierman's and Thornton's factors) take no square root, keep small
eigenvalues beside large ones, pass through D = 0 (noise without a density) and lose nothing under a
prior scale of 1e10: conditioning multiplies the entries of D by ratios, and never subtracts from
them. That is what makes float32 safe here.

L and the mean m travel as one array `[L | m]`. Conditioning on y_i = h x + noise then is one
formula for all columns, and a step of a scan compiles to few loops, each of which costs more to
start than to run when the state has a handful of coordinates.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._numerics import linalg
from retrodict._types import Scalar


class Factored(eqx.Module):
    """The law N(m, L diag(D) Lᵀ).

    Attributes:
        columns: `[L | m]`, of shape `(d, d + 1)`.
        diagonal: D and one entry without meaning, of shape `(d + 1,)`.
    """

    columns: Float[Array, "d d_plus_1"]
    diagonal: Float[Array, "d_plus_1"]

    @classmethod
    def from_scale(cls, mean: Float[Array, "d"], scale: Float[Array, "d k"]) -> "Factored":
        """The law N(m, s sᵀ), for any s with d rows, singular ones included."""
        one = jnp.ones((), mean.dtype)
        lower, diagonal = linalg.weighted_gram_schmidt(scale, [one] * scale.shape[1])
        return cls(
            jnp.concatenate([lower, mean[:, None]], axis=1),
            jnp.concatenate([diagonal, jnp.zeros(1, mean.dtype)]),
        )

    @property
    def dim(self) -> int:
        """The dimension d."""
        return self.columns.shape[-2]

    @property
    def mean(self) -> Float[Array, "*batch d"]:
        """The mean m."""
        return self.columns[..., -1]

    @property
    def scale_tril(self) -> Float[Array, "*batch d d"]:
        """The lower Cholesky factor L diag(√D)."""
        return self.columns[..., :-1] * linalg.safe_sqrt(self.diagonal[..., None, :-1])


class Innovations(eqx.Module):
    """What conditioning learned of each scalar observation, in the order they were processed.

    Attributes:
        gains: v_i / α_i, the innovation over its variance, of shape `(p,)`.
        variances: α_i, of shape `(p,)`.
    """

    gains: Float[Array, "*batch p"]
    variances: Float[Array, "*batch p"]

    def log_prob(self) -> Scalar:
        """The log density of the observations, up to −½ log 2π for each."""
        return -0.5 * jnp.sum(jnp.log(self.variances) + self.gains**2 * self.variances)


def propagate(
    law: Factored,
    weight: Float[Array, "e d"],
    bias: Float[Array, "e"],
    scale: Float[Array, "e k"],
) -> Factored:
    """The law of w x + b + s ε for x of law N(m, L D Lᵀ) and standard normal ε.

    The covariance w L D Lᵀ wᵀ + s sᵀ is the Gram matrix of the rows of [w L, s] in the weights
    [D, 1], so that orthogonalising those rows factors it without forming it.
    """
    d = law.dim
    moved = linalg.fence(jnp.concatenate([linalg.matmul(weight, law.columns), scale], axis=1))
    one = jnp.ones((), moved.dtype)
    weights = [*(law.diagonal[k] for k in range(d)), None, *([one] * scale.shape[1])]
    lower, diagonal = linalg.weighted_gram_schmidt(moved, weights)
    mean = moved[:, d] + bias
    return Factored(
        linalg.fence(jnp.concatenate([lower, mean[:, None]], axis=1)),
        linalg.fence(jnp.concatenate([diagonal, jnp.zeros(1, moved.dtype)])),
    )


def condition(
    law: Factored, design: Float[Array, "p d"], value: Float[Array, "p"]
) -> tuple[Factored, Innovations]:
    """The law of x given value = design x + ε with standard normal ε, and the innovations.

    Observations are processed one scalar at a time (Bierman's update), so that no p × p matrix is
    factored. A row of zeros with value zero changes nothing: that is a missing entry.
    """
    offsets = value[:, None]
    columns, diagonal, rows, variances = condition_columns(
        law.columns, law.diagonal, design, offsets
    )
    return Factored(columns, diagonal), Innovations(-rows[:, law.dim], variances)


def condition_columns(
    columns: Float[Array, "d c"],
    diagonal: Float[Array, "d_plus_1"],
    design: Float[Array, "p d"],
    offsets: Float[Array, "p q"],
) -> tuple[Float[Array, "d c"], Float[Array, "d_plus_1"], Float[Array, "p c"], Float[Array, "p"]]:
    """Conditions on scalar observations, and carries any number of columns along.

    `columns` is [L | X] with d columns of L and q columns X, each of which moves as a mean does:
    X ← X − k (h X − o) with the gain k of observation h and its row o of `offsets`. With
    X = [m | I] and offsets [y | 0] the result holds the conditional mean and I − K H.

    For one observation with f = h L and α_j = 1 + Σ_{l>j} f_l² D_l, column j of L becomes
    L_j − (f_j/α_j) Σ_{l>j} L_l D_l f_l, D_j becomes D_j α_j / (α_j + f_j² D_j), and a column of X
    follows the same formula with the sum over all l. The rows h L, h X − o are kept below [L | X]
    in one array, so that they are up to date when their turn comes.

    Returns:
        The columns and diagonal after conditioning; for each observation its row [h L | h X − o] at
        its turn, divided by its innovation variance; and those variances.
    """
    d, width = columns.shape
    if d > linalg.UNROLLED:
        return _condition_columns_by_qr(columns, diagonal, design, offsets)
    p, dtype = design.shape[0], columns.dtype
    padding = jnp.zeros((p, d), dtype)
    seen = linalg.matmul(design, columns) - jnp.concatenate([padding, offsets], axis=1)
    stack = linalg.fence(jnp.concatenate([columns, seen], axis=0))
    # later[l, j]: whether column l of L enters the sums of column j.
    later = np.concatenate([np.tril(np.ones((d, d)), -1), np.ones((d, width - d))], axis=1)
    later = later.astype(dtype)
    is_diagonal = np.arange(width) < d
    spread = (
        diagonal if width == d + 1 else jnp.concatenate([diagonal[:d], jnp.zeros(width - d, dtype)])
    )
    rows, variances = [], []
    for i in range(p):
        f = stack[d]
        alpha = 1.0 + linalg.sum_of([later[k] * (f[k] * f[k] * spread[k]) for k in range(d)])
        # One array for both makes one loop of them; its last entry is the innovation variance.
        after = jnp.where(is_diagonal, spread * (alpha / (alpha + f * f * spread)), alpha)
        step = linalg.fence(jnp.stack([f / alpha, after]))
        sums = linalg.sum_of(
            [stack[:, k, None] * (later[k] * (f[k] * spread[k]))[None, :] for k in range(d)]
        )
        moved = stack - sums * step[0][None, :]
        rest = jnp.concatenate([moved[:d], moved[d + 1 :]]) if i < p - 1 else moved[:d]
        stack = linalg.fence(rest)
        spread = step[1]
        rows.append(step[0])
        variances.append(step[1, -1:])
    return stack, spread[: d + 1], jnp.stack(rows), jnp.concatenate(variances)


def _condition_columns_by_qr(
    columns: Float[Array, "d c"],
    diagonal: Float[Array, "d_plus_1"],
    design: Float[Array, "p d"],
    offsets: Float[Array, "p q"],
) -> tuple[Float[Array, "d c"], Float[Array, "d_plus_1"], Float[Array, "p c"], Float[Array, "p"]]:
    """All observations at once, by triangularising [[I, H S], [0, S]]; for larger states."""
    d, p, dtype = columns.shape[0], design.shape[0], columns.dtype
    scale = columns[:, :d] * linalg.safe_sqrt(diagonal[:d])[None, :]
    top = jnp.concatenate([jnp.eye(p, dtype=dtype), linalg.matmul(design, scale)], axis=1)
    bottom = jnp.concatenate([jnp.zeros((d, p), dtype), scale], axis=1)
    factor = linalg.tria_by_qr(jnp.concatenate([top, bottom]))
    root, gain = factor[:p, :p], factor[p:, :p]
    carried = columns[:, d:]
    whitened = linalg.solve_triangular(root, linalg.matmul(design, carried) - offsets)
    lower, spread = linalg.unit_lower_and_diagonal(factor[p:, p:])
    moved = carried - linalg.matmul(gain, whitened)
    deviations = jnp.diagonal(root)
    rows = jnp.concatenate([jnp.zeros((p, d), dtype), whitened / deviations[:, None]], axis=1)
    return (
        jnp.concatenate([lower, moved], axis=1),
        jnp.concatenate([spread, jnp.zeros(1, dtype)]),
        rows,
        deviations**2,
    )


def reverse(
    law: Factored,
    weight: Float[Array, "d d"],
    bias: Float[Array, "d"],
    scale: Float[Array, "d k"],
) -> tuple[Float[Array, "d d"], Float[Array, "d"], Float[Array, "d d"]]:
    """Return the backward kernel of x given z = w x + b + s ε, for x of law N(m, L D Lᵀ).

    The rows of [w L, s], orthogonalised in the weights [D, 1], give the unit-lower factor L_z of
    the covariance of z. The rows of [L, 0] have coefficients C = G L_z in terms of them, and what
    is left of these rows is the factor of the conditional law: gain and conditional covariance come
    out of one factorisation, without a subtraction of covariances.

    Where the law of z is singular, the gain is not unique. Directions in which z does not move are
    left out of it, and so are those in which it moves by less than rounding allows to resolve, be
    it the rounding of the factor or that of the mean.

    Returns:
        The gain G, the offset m − G (w m + b) and the lower Cholesky factor of the conditional law.
    """
    d = law.dim
    lower, mean = law.columns[:, :d], law.mean
    future = jnp.concatenate([linalg.matmul(weight, lower), scale], axis=1)
    past = jnp.concatenate([lower, jnp.zeros((d, scale.shape[1]), lower.dtype)], axis=1)
    weights = jnp.concatenate([law.diagonal[:d], jnp.ones(scale.shape[1], lower.dtype)])
    terms = linalg.matmul(jnp.abs(weight), jnp.abs(lower))
    magnitude = jnp.concatenate([terms, jnp.abs(scale)], axis=1)
    # The sizes of the terms of w m + b and of L⁻¹ m, whose rounding errors the means carry.
    sizes = jnp.abs(mean)
    after = linalg.matvec(jnp.abs(weight), sizes) + jnp.abs(bias)
    inverse = linalg.solve_triangular(lower, jnp.eye(d, dtype=lower.dtype))
    before = linalg.matvec(jnp.abs(inverse), sizes)
    rows = jnp.concatenate([future, past])
    factor, left = linalg.project_out(rows, weights, magnitude, after, before)
    gain = linalg.solve_triangular(factor[:d], factor[d:].T, transpose=True).T
    predicted = linalg.matvec(weight, mean) + bias
    offset = mean - linalg.matvec(gain, predicted)
    return gain, offset, linalg.tria(left[d:] * linalg.safe_sqrt(weights)[None, :])
