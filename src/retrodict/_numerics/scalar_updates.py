"""Conditioning on one scalar observation after another (Bierman), exact for any precision."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from retrodict._numerics import linalg


def process_entries(
    design: Float[Array, "p d"], values: Float[Array, "p q"]
) -> tuple[Float[Array, "d d"], Float[Array, "d q"], Float[Array, "p q"], Float[Array, "p"]]:
    """Condition standard normal e on one entry after another, for q columns of values.

    The law of e given the entries so far is L diag(D) Lᵀ, with a unit lower triangular L, and its
    means are X. For the entry v_i = f e + ε, with f L in place of f and α_j = 1 + Σ_{l>j} f_l² D_l,
    column j of L becomes L_j − (f_j/α_j) Σ_{l>j} L_l D_l f_l and D_j becomes
    D_j α_j / (α_j + f_j² D_j). The columns X follow the formula of a column of L, with f X − v_i in
    place of f_j and the sum over all l. D is multiplied by ratios, and nothing is subtracted from
    it. The rows [f L | f X − v] of later entries are stored below [L | X] and are updated with it.

    Returns:
        The factor L √D, the means X, the whitened values, and the diagonal of their whitener.
    """
    d, width, dtype = design.shape[1], design.shape[1] + values.shape[1], design.dtype
    # later[l, j]: whether column l of L enters the sums of column j.
    later = np.concatenate([np.tril(np.ones((d, d)), -1), np.ones((d, width - d))], axis=1)
    later, is_diagonal = later.astype(dtype), np.arange(width) < d
    identity = jnp.eye(d, width, dtype=dtype)
    stack = linalg.fence(jnp.concatenate([identity, jnp.concatenate([design, -values], axis=1)]))
    spread = jnp.asarray(is_diagonal, dtype)
    process = _unrolled_entries if d <= linalg.UNROLLED else _entries_in_a_loop
    stack, spread, rows, variances = process(stack, spread, later)
    deviations = jnp.sqrt(variances)
    return (
        stack[:d, :d] * linalg.safe_sqrt(spread[:d])[None, :],
        stack[:d, d:],
        -rows[:, d:] * deviations[:, None],
        1.0 / deviations,
    )


def _unrolled_entries(
    stack: Float[Array, "rows c"], spread: Float[Array, "c"], later: np.ndarray
) -> tuple[Float[Array, "d c"], Float[Array, "c"], Float[Array, "p c"], Float[Array, "p"]]:
    """Return the stack, D, the rows divided by their variances, and the variances."""
    d, width = later.shape
    is_diagonal, p = np.arange(width) < d, stack.shape[0] - d
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
    return stack, spread, jnp.stack(rows), jnp.concatenate(variances)


def _entries_in_a_loop(
    stack: Float[Array, "rows c"], spread: Float[Array, "c"], later: np.ndarray
) -> tuple[Float[Array, "rows c"], Float[Array, "c"], Float[Array, "p c"], Float[Array, "p"]]:
    """Compute `_unrolled_entries` for larger states; processed rows stay in the stack."""
    d, width = later.shape
    enters, is_diagonal = jnp.asarray(later), np.arange(width) < d

    def step(state: tuple[Array, Array], i: Array) -> tuple[tuple, tuple]:
        stack, spread = state
        f = stack[d + i]
        products = enters * (f[:d] * spread[:d])[:, None]
        alpha = 1.0 + linalg.matvec(products.T, f[:d])
        sums = linalg.matmul(stack[:, :d], products)
        after = jnp.where(is_diagonal, spread * (alpha / (alpha + f * f * spread)), alpha)
        return (stack - sums * (f / alpha)[None, :], after), (f / alpha, alpha[-1])

    (stack, spread), rows = lax.scan(step, (stack, spread), jnp.arange(stack.shape[0] - d))
    return stack, spread, *rows
