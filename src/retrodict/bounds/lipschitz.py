"""Lipschitz constants, and their sums through products of gains.

    u_j = Σ_{i≤j} ℓ_i ‖G_i G_{i+1} ⋯ G_{j-1}‖

Norms of products are needed: products of norms may exceed 1 where the products decay. All products
cost O(n²). With the products of the last w gains only, the remaining sum is bounded by one more
step of the same recursion,

    Σ_{i≤j-w} ℓ_i ‖G_i ⋯ G_{j-1}‖ ≤ u_{j-w} ‖G_{j-w} ⋯ G_{j-1}‖,

so that O(n w) products give an upper bound, and the sum itself if d = 1 or w ≥ n.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from retrodict._expectations import Variation
from retrodict.bounds.distances import norms


class Sensitivity(NamedTuple):
    """Lipschitz constants of an additive functional at each time.

    Attributes:
        before: of h_k in x_{k-1}; zero at time 0.
        now: of h_k in x_k.
    """

    before: Float[Array, "time"]
    now: Float[Array, "time"]

    @classmethod
    def of(cls, first: Variation, later: Variation, num_times: int, dtype: Any) -> "Sensitivity":
        """Return the constants of a functional that is the same at all times but the first."""
        before = jnp.full(num_times, later.before, dtype).at[0].set(0.0)
        return cls(before, jnp.full(num_times, later.now, dtype).at[0].set(first.now))

    def whole(self) -> Float[Array, "time"]:
        """Return the constants of the whole functional: x_k occurs in h_k and in h_{k+1}."""
        return self.now + jnp.append(self.before[1:], 0.0)

    def through(self, gains: Float[Array, "pair d d"]) -> Float[Array, "time"]:
        """Return the constants of E[h_k | x_k], with x_{k-1} of a kernel with these gains."""
        return self.now + jnp.append(0.0, norms(gains)) * self.before


def lipschitz_sums(
    gains: Float[Array, "pair d d"], lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Return the sums u_j, or an upper bound of them.

    Args:
        gains: G_j, from the state at j + 1 to that at j.
        lipschitz: ℓ_i.
        window: the number of gains in a product.
    """
    if gains.shape[-1] > 1:
        return windowed_lipschitz_sums(gains, lipschitz, None, window)
    return decayed_sums(jnp.abs(gains[:, 0, 0]), lipschitz)


def transport_terms(
    distances: Float[Array, "time"],
    gains: Float[Array, "pair d d"],
    sensitivity: Sensitivity,
    window: int,
) -> Float[Array, "time"]:
    """Return the terms W_j (u_j + Lip₁ h_{j+1}) of Wφ from the distances W_j."""
    u = lipschitz_sums(gains, sensitivity.through(gains), window)
    return distances * (u + jnp.append(sensitivity.before[1:], 0.0))


def forward_lipschitz_sums(
    gains: Float[Array, "pair d d"], lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Return the sums v_j = Σ_{i≥j} ℓ_i ‖G_{i-1} ⋯ G_j‖ of gains from j to j + 1."""
    return lipschitz_sums(gains[::-1], lipschitz[::-1], window)[::-1]


def decayed_sums(rates: Float[Array, "pair"], terms: Float[Array, "time"]) -> Float[Array, "time"]:
    """Return u with u_0 = terms_0 and u_{j+1} = rates_j u_j + terms_{j+1}."""

    def step(u: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        rate, term = row
        u = rate * u + term
        return u, u

    _, later = lax.scan(step, terms[0], (rates, terms[1:]))
    return jnp.concatenate([terms[:1], later])


def windowed_lipschitz_sums(
    gains: Float[Array, "pair d d"],
    lipschitz: Float[Array, "time"],
    ends: Float[Array, "time d d"] | None,
    window: int,
) -> Float[Array, "time"]:
    """Return Σ_{i≤j} ℓ_i ‖G_i ⋯ G_{j-1} E_j‖ for every j, or an upper bound of it.

    Args:
        gains: G_j, from the state at j + 1 to that at j.
        lipschitz: ℓ_i.
        ends: E_j, or `None` for the identity.
        window: the number of gains in a product.
    """
    n, d = lipschitz.shape[0], gains.shape[-1]
    width = max(1, min(window, n))
    eye = jnp.eye(d, dtype=gains.dtype)
    all_gains = jnp.concatenate([jnp.zeros((1, d, d), gains.dtype), gains])
    all_ends = jnp.broadcast_to(eye, (n, d, d)) if ends is None else ends

    # Slot 0 of `products` is the identity, slot a the product of the last a gains; `constants` and
    # `sums` hold ℓ and u at the same lags. Slots from before time 0 hold zeros.
    def step(carry: tuple, row: tuple) -> tuple[tuple, Array]:
        products, constants, sums = carry
        gain, constant, end = row
        moved = jnp.einsum("aij,jk->aik", products, gain, precision="highest")
        products = jnp.concatenate([eye[None], moved])
        constants = jnp.concatenate([constant[None], constants[:-1]])

        def total(matrices: Array) -> Array:
            sizes = norms(matrices)
            return jnp.sum(constants * sizes[:-1]) + sums[-1] * sizes[-1]

        plain = total(products)
        value = plain
        if ends is not None:
            value = total(jnp.einsum("aij,jk->aik", products, end, precision="highest"))
        return (products[:-1], constants, jnp.concatenate([plain[None], sums[:-1]])), value

    zeros = jnp.zeros(width, gains.dtype)
    start = (jnp.zeros((width, d, d), gains.dtype), zeros, zeros)
    return lax.scan(step, start, (all_gains, lipschitz, all_ends))[1]
