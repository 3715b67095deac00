"""The FFBSi weights: the backward kernel of a particle filter.

Given a state x of time k, particle i of time k-1 has the probability

    w_{k-1}^i m(x_{k-1}^i, x) / Σ_j w_{k-1}^j m(x_{k-1}^j, x).

`BackwardWeights` holds the transition densities m between all particles and states; its method
`log2_weights` returns the unnormalised weights. Logarithms have base 2, which is cheaper to
exponentiate.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._arrays import Scalar
from retrodict._model import AbstractLinearGaussianKernel, NonlinearGaussianKernel, scale_solve
from retrodict.particles.power_of_two import LOG2_E


class BackwardWeights(eqx.Module):
    """The function (i, x) ↦ log₂ m(x_{k-1}^i, x), up to a constant.

    Reversed, the particles are those of time k and x is a state of time k-1: log₂ m(x, x_k^i). For
    a Gaussian transition with a constant scale, particles and states are whitened once, and the
    value for a pair is minus a squared distance.

    Attributes:
        kernel: the transition; only its `log_prob` is called.
        u: its input, or `None`.
        particles: the particles; whitened, their means or, reversed, themselves.
        whitened: whether densities are computed from distances.
        reverse: whether the particles are those of the later time.
    """

    kernel: Any
    u: Float[Array, "input"] | None
    particles: Float[Array, "particle state"]
    whitened: bool = eqx.field(static=True)
    reverse: bool = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        kernel: Any,
        u: Float[Array, "input"] | None,
        particles: Float[Array, "particle state"],
        *,
        reverse: bool = False,
    ) -> "BackwardWeights":
        """Build the pairs of a kernel, with whitened particles if the kernel allows it."""
        # Gaussian, with a scale that does not depend on the state.
        if not isinstance(kernel, (AbstractLinearGaussianKernel, NonlinearGaussianKernel)):
            return cls(kernel, u, particles, False, reverse)
        whitened = jax.vmap(lambda x: _whiten(kernel, x, u, mean=not reverse))(particles)
        return cls(kernel, u, whitened, True, reverse)

    def prepare(self, xs: Float[Array, "sample state"]) -> Float[Array, "sample state"]:
        """Return states of the other time in the form that the other methods read."""
        if not self.whitened:
            return xs
        return jax.vmap(lambda x: _whiten(self.kernel, x, self.u, mean=self.reverse))(xs)

    def each(
        self, indices: Int[Array, "sample"], prepared: Float[Array, "sample state"]
    ) -> Float[Array, "sample"]:
        """Return log₂ m of one particle per state."""
        particles = self.particles[indices]
        if self.whitened:
            return -jnp.sum((particles - prepared) ** 2, axis=-1)
        return LOG2_E * jax.vmap(self._log_density)(particles, prepared)

    def matrix(self, prepared: Float[Array, "sample state"]) -> Float[Array, "particle sample"]:
        """Return log₂ m of all pairs."""
        if self.whitened:
            return -squared_distance(self.particles, prepared)
        one = jax.vmap(self._log_density, in_axes=(None, 0))
        return LOG2_E * jax.vmap(one, in_axes=(0, None))(self.particles, prepared)

    def log2_weights(
        self,
        log2_w: Float[Array, "particle"],
        prepared: Float[Array, "sample state"],
    ) -> Float[Array, "particle sample"]:
        """Return the unnormalised log₂ FFBSi weights log₂ w^i + log₂ m(x^i, x) of all pairs."""
        return log2_w[:, None] + self.matrix(prepared)

    def _log_density(self, particle: Float[Array, "state"], x: Float[Array, "state"]) -> Scalar:
        before, after = (x, particle) if self.reverse else (particle, x)
        return self.kernel.log_prob(before, after, self.u)


def squared_distance(
    a: Float[Array, "*rows state"], b: Float[Array, "sample state"]
) -> Float[Array, "*rows sample"]:
    """Return ‖a − b‖² of all pairs."""
    across = (1,) * (a.ndim - 1) + (b.shape[0],)
    if not by_products(a):
        total = jnp.zeros((), a.dtype)
        for i in range(a.shape[-1]):
            total = total + (a[..., i, None] - b[:, i].reshape(across)) ** 2
        return total
    centre = jnp.mean(a.reshape(-1, a.shape[-1]), axis=0)
    a, b = a - centre.reshape(*across[:-1], -1), b - centre[None]
    products = jnp.einsum("...d,sd->...s", a, b, precision="highest")
    squares = jnp.sum(a**2, axis=-1, keepdims=True) + jnp.sum(b**2, axis=-1).reshape(across)
    return jnp.maximum(squares - 2.0 * products, 0.0)


def by_products(a: Float[Array, "*rows state"]) -> bool:
    """Return whether distances are computed as ‖a‖² − 2 a·b + ‖b‖², around the mean of a.

    A sum over coordinates fuses into the loop that reads it, and does not cancel. For more than a
    few coordinates one matrix product is several times faster on CPU. Its rounding error, about
    ‖a‖² units, is negligible in double precision and too large in single.
    """
    d = a.shape[-1]
    return d > (FEW if a.dtype == jnp.float64 else MANY)


FEW, MANY = 3, 32
"""The largest numbers of coordinates that are summed one by one, in double and single precision."""


def _whiten(kernel: Any, x: Array, u: Array | None, *, mean: bool) -> Array:
    """Return s⁻¹ times the mean at x or times x, scaled for log₂ densities.

    The scale s does not depend on x. Minus the squared norm of a difference is a log₂ density.
    """
    law = kernel.law(x, u)
    return math.sqrt(0.5 * LOG2_E) * scale_solve(law.scale_tril, law.mean if mean else x)
