"""How far a Lipschitz constant reaches through products of gains, over a window.

    u_j = Σ_{i≤j} ℓ_i ‖G_i G_{i+1} ⋯ G_{j-1}‖

Norms of products are needed and not products of norms, which may exceed 1 where the products decay.
All of them cost O(n²). With the products of the last w gains alone, a sum over what came before is
bounded by one more step of the same recursion,

    Σ_{i≤j-w} ℓ_i ‖G_i ⋯ G_{j-1}‖ ≤ u_{j-w} ‖G_{j-w} ⋯ G_{j-1}‖,

so that O(n w) products give an upper bound, and the sum itself if d = 1 or w ≥ n.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict.bounds.distances import norms


def reach(
    gains: Float[Array, "pair d d"], lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """The sums u_j, or an upper bound of them.

    Args:
        gains: G_j, which leads from the state at j + 1 to that at j.
        lipschitz: ℓ_i.
        window: how many products are kept.
    """
    if gains.shape[-1] == 1:
        return _by_scalars(jnp.abs(gains[:, 0, 0]), lipschitz)
    return reach_into(gains, lipschitz, None, window)


def reach_forward(
    gains: Float[Array, "pair d d"], lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """The sums v_j = Σ_{i≥j} ℓ_i ‖G_{i-1} ⋯ G_j‖, of gains that lead from j to j + 1."""
    return reach(gains[::-1], lipschitz[::-1], window)[::-1]


def _by_scalars(sizes: Float[Array, "pair"], lipschitz: Float[Array, "time"]) -> Array:
    def step(u: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        size, own = at
        u = own + size * u
        return u, u

    _, later = lax.scan(step, lipschitz[0], (sizes, lipschitz[1:]))
    return jnp.concatenate([lipschitz[:1], later])


def reach_into(
    gains: Float[Array, "pair d d"],
    lipschitz: Float[Array, "time"],
    ends: Float[Array, "time d d"] | None,
    window: int,
) -> Float[Array, "time"]:
    """Σ_{i≤j} ℓ_i ‖G_i ⋯ G_{j-1} E_j‖ for every j, or an upper bound of it.

    Args:
        gains: G_j, which leads from the state at j + 1 to that at j.
        lipschitz: ℓ_i.
        ends: E_j, or `None` for the identity.
        window: how many products are kept.
    """
    n, d = lipschitz.shape[0], gains.shape[-1]
    width = max(1, min(window, n))
    eye = jnp.eye(d, dtype=gains.dtype)
    all_gains = jnp.concatenate([jnp.zeros((1, d, d), gains.dtype), gains])
    all_ends = jnp.broadcast_to(eye, (n, d, d)) if ends is None else ends

    # Slot 0 of `products` is the identity, slot a the product of the last a gains; `own` and
    # `before` hold ℓ and u at the same lags. Slots from before time 0 hold zeros.
    def step(carry: tuple, at: tuple) -> tuple[tuple, Array]:
        products, own, before = carry
        gain, lip, end = at
        moved = jnp.einsum("aij,jk->aik", products, gain, precision=lax.Precision.HIGHEST)
        products = jnp.concatenate([eye[None], moved])
        own = jnp.concatenate([lip[None], own[:-1]])
        sizes = norms(products)
        plain = jnp.sum(own * sizes[:-1]) + before[-1] * sizes[-1]
        if ends is None:
            value = plain
        else:
            reached = norms(jnp.einsum("aij,jk->aik", products, end, precision="highest"))
            value = jnp.sum(own * reached[:-1]) + before[-1] * reached[-1]
        return (products[:-1], own, jnp.concatenate([plain[None], before[:-1]])), value

    nothing = jnp.zeros(width, gains.dtype)
    start = (jnp.zeros((width, d, d), gains.dtype), nothing, nothing)
    return lax.scan(step, start, (all_gains, lipschitz, all_ends))[1]
