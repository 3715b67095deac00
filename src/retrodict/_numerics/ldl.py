"""Gaussian laws with covariance L diag(D) Lᵀ, and the three steps of exact inference.

The steps are prediction, conditioning and reversal. The unit-lower L and the diagonal D (the
factors of Bierman and Thornton) need no square root. They preserve small eigenvalues beside large
ones, allow D = 0 (noise without a density) and lose no accuracy under a prior scale of 1e10.
Conditioning multiplies the entries of D by ratios and never subtracts from them. This makes
float32 safe here.

L and the mean m are stored as one array `[L | m]`. Conditioning on y_i = h x + noise is then one
formula for all columns, and a step of a scan compiles to few loops. This matters because, for a
state with few coordinates, a loop costs more to start than to run.
"""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._numerics import linalg


class Factored(eqx.Module):
    """The law N(m, L diag(D) Lᵀ).

    Attributes:
        columns: `[L | m]`, of shape `(d, d + 1)`.
        diagonal: D and one unused entry, of shape `(d + 1,)`.
    """

    columns: Float[Array, "d d_plus_1"]
    diagonal: Float[Array, "d_plus_1"]

    @classmethod
    def from_scale(cls, mean: Float[Array, "d"], scale: Float[Array, "d k"]) -> "Factored":
        """Return the law N(m, s sᵀ), for any s with d rows; s may be singular."""
        one = jnp.ones((), mean.dtype)
        lower, diagonal, _ = linalg.weighted_gram_schmidt(scale, [one] * scale.shape[1])
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
    """Scaled innovations and innovation variances of scalar observations, in processing order.

    Attributes:
        gains: v_i / α_i, the innovation divided by its variance, of shape `(p,)`.
        variances: α_i, the innovation variance, of shape `(p,)`.
    """

    gains: Float[Array, "*batch p"]
    variances: Float[Array, "*batch p"]

    def log_prob(self) -> Scalar:
        """Return the log density of the observations, without −½ log 2π per observation."""
        return -0.5 * jnp.sum(jnp.log(self.variances) + self.gains**2 * self.variances)


def propagate(
    law: Factored,
    weight: Float[Array, "e d"],
    bias: Float[Array, "e"],
    scale: Float[Array, "e k"],
) -> Factored:
    """Return the law of w x + b + s ε for x of law N(m, L D Lᵀ) and standard normal ε.

    The covariance w L D Lᵀ wᵀ + s sᵀ is the Gram matrix of the rows of [w L, s] with the weights
    [D, 1]. Orthogonalising those rows factors the covariance without forming it.
    """
    return predict(law, weight, bias, scale)[0]


def predict(
    law: Factored,
    weight: Float[Array, "e d"],
    bias: Float[Array, "e"],
    scale: Float[Array, "e k"],
) -> tuple[Factored, Float[Array, "e d_plus_k"]]:
    """Return the law of `propagate` and the rows q of [w S, s] = B q.

    Here S and B are the Cholesky factors before and after the step. With x = m + S z and
    w x + b + s ε = a + B e, for standard normal z and ε, e is q (z, ε): see `linalg.rotation`.

    Args:
        law: the law of x.
        weight: w.
        bias: b.
        scale: s.
    """
    d = law.dim
    moved = linalg.fence(jnp.concatenate([linalg.matmul(weight, law.columns), scale], axis=1))
    one = jnp.ones((), moved.dtype)
    weights = [*(law.diagonal[k] for k in range(d)), None, *([one] * scale.shape[1])]
    lower, diagonal, rows = linalg.weighted_gram_schmidt(moved, weights)
    mean = moved[:, d] + bias
    predicted = Factored(
        linalg.fence(jnp.concatenate([lower, mean[:, None]], axis=1)),
        linalg.fence(jnp.concatenate([diagonal, jnp.zeros(1, moved.dtype)])),
    )
    return predicted, rows


def condition(
    law: Factored, design: Float[Array, "p d"], value: Float[Array, "p"]
) -> tuple[Factored, Innovations]:
    """Return the law of x given value = design x + ε with standard normal ε, and the innovations.

    Observations are processed one scalar at a time (Bierman's update), so that no p × p matrix is
    factored. A row of zeros with value zero is a no-op and represents a missing entry.
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
    """Condition on scalar observations, and update any number of additional columns.

    `columns` is [L | X] with d columns of L and q columns X. Each column of X is updated like a
    mean: X ← X − k (h X − o) with the gain k of observation h and its row o of `offsets`. With
    X = [m | I] and offsets [y | 0] the result holds the conditional mean and I − K H.

    For one observation with f = h L and α_j = 1 + Σ_{l>j} f_l² D_l, column j of L becomes
    L_j − (f_j/α_j) Σ_{l>j} L_l D_l f_l, D_j becomes D_j α_j / (α_j + f_j² D_j), and a column of X
    follows the same formula with the sum over all l. The rows h L, h X − o are stored below [L | X]
    in one array and updated with it, so that each row is current when it is processed.

    Returns:
        The columns and the diagonal after conditioning; for each observation its row
        [h L | h X − o] when it is processed, divided by its innovation variance; and the innovation
        variances.
    """
    d, width = columns.shape
    if d > linalg.UNROLLED:
        return _condition_columns_by_qr(columns, diagonal, design, offsets)
    p, dtype = design.shape[0], columns.dtype
    padding = jnp.zeros((p, d), dtype)
    projected = linalg.matmul(design, columns) - jnp.concatenate([padding, offsets], axis=1)
    stack = linalg.fence(jnp.concatenate([columns, projected], axis=0))
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
        # Storing both in one array gives one loop; its last entry is the innovation variance.
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
    """Condition on all observations at once by triangularising [[I, H S], [0, S]].

    This form is used for larger states.
    """
    d, p, dtype = columns.shape[0], design.shape[0], columns.dtype
    scale = columns[:, :d] * linalg.safe_sqrt(diagonal[:d])[None, :]
    top = jnp.concatenate([jnp.eye(p, dtype=dtype), linalg.matmul(design, scale)], axis=1)
    bottom = jnp.concatenate([jnp.zeros((d, p), dtype), scale], axis=1)
    factor = linalg.tria_by_qr(jnp.concatenate([top, bottom]))
    root, gain = factor[:p, :p], factor[p:, :p]
    additional = columns[:, d:]
    whitened = linalg.solve_triangular(root, linalg.matmul(design, additional) - offsets)
    lower, spread = linalg.unit_lower_and_diagonal(factor[p:, p:])
    updated = additional - linalg.matmul(gain, whitened)
    deviations = jnp.diagonal(root)
    rows = jnp.concatenate([jnp.zeros((p, d), dtype), whitened / deviations[:, None]], axis=1)
    return (
        jnp.concatenate([lower, updated], axis=1),
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
    """Return the backward kernel of x given z = w x + b + s ε, for x of law N(m, S Sᵀ).

    With [w S, s] = B q as in `predict`, the gain is S q₁ᵀ B⁻¹. Directions of z that are narrower
    than ε^(1/3) times its coordinates are omitted. Their gains g would amplify a rounding error ε
    of one time step to ε g, and to ε g² relative to the narrowest direction of the next step.
    Omitting a direction causes an error of 1/g. Kernels between standard coordinates have no such
    limit: see `standard.py`.

    Returns:
        The gain G, the offset m − G (w m + b) and the lower Cholesky factor of the conditional law.
    """
    gain, conditional = reverse_states(law.scale_tril, weight, scale)
    moved = linalg.matvec(weight, law.mean) + bias
    return gain, law.mean - linalg.matvec(gain, moved), conditional


def reverse_states(
    scale: Float[Array, "d d"], weight: Float[Array, "e d"], noise: Float[Array, "e k"]
) -> tuple[Float[Array, "d e"], Float[Array, "d d"]]:
    """Return the gain and the scale of `reverse`, which do not depend on means."""
    rows = linalg.fence(jnp.concatenate([linalg.matmul(weight, scale), noise], axis=1))
    ones = [jnp.ones((), rows.dtype)] * rows.shape[1]
    tolerance = linalg.narrowest(rows.dtype)
    lower, diagonal, q = linalg.weighted_gram_schmidt(rows, ones, tolerance=tolerance)
    rotation = linalg.rotation(q)
    coefficients = linalg.matmul(rotation[:, : scale.shape[0]], scale.T)
    inverse = linalg.safe_reciprocal(linalg.safe_sqrt(diagonal))
    gain = linalg.solve_triangular(lower, inverse[:, None] * coefficients, transpose=True).T
    return gain, linalg.tria(linalg.matmul(scale, project_out_of_identity(rotation)))


def project_out_of_identity(rotation: Float[Array, "d c"]) -> Float[Array, "d c"]:
    """Return the rows of [I, 0] minus their projection on the orthonormal rows q.

    Projecting twice preserves the relative precision of rows with a small remainder.
    """
    d = rotation.shape[0]
    remainder = jnp.eye(*rotation.shape, dtype=rotation.dtype) - linalg.matmul(
        rotation[:, :d].T, rotation
    )
    return remainder - linalg.matmul(linalg.matmul(remainder, rotation.T), rotation)
