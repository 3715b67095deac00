"""Mixtures whose components carry a regime, and their moves to the regimes of the next time."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from retrodict._arrays import Scalar
from retrodict._model import LOG_2PI
from retrodict._numerics import GaussianLaw, linalg


class Mixture(eqx.Module):
    """The filtering laws q_k: mixtures whose components carry a regime.

    Example:
        >>> import jax.numpy as jnp, retrodict as rd
        >>> law = rd.switching.Mixture(
        ...     jnp.log(jnp.array([0.25, 0.75])), jnp.zeros((2, 1)), jnp.ones((2, 1, 1)),
        ...     jnp.array([0, 1]),
        ... )
        >>> law.probabilities(2).round(2).tolist(), law.covariance.tolist()
        ([0.25, 0.75], [[1.0]])

    Attributes:
        log_weights: log w, of shape `(time, component)`, normalised at each time.
        means: m, of shape `(time, component, state)`.
        scale_trils: lower Cholesky factors of P, of shape `(time, component, state, state)`.
        regimes: the regime of each component, of shape `(time, component)`.
    """

    log_weights: Float[Array, "*time component"]
    means: Float[Array, "*time component state"]
    scale_trils: Float[Array, "*time component state state"]
    regimes: Int[Array, "*time component"]

    def probabilities(self, num_regimes: int) -> Float[Array, "*time regime"]:
        """Return the probability of each regime."""
        members = jax.nn.one_hot(self.regimes, num_regimes, dtype=self.log_weights.dtype)
        return jnp.einsum("...c,...cj->...j", jnp.exp(self.log_weights), members)

    def log_prob(self, z: Int[Array, ""], x: Float[Array, "state"]) -> Scalar:
        """Return log q(z, x) of one time."""
        terms = jax.vmap(log_normal, in_axes=(None, 0, 0))(x, self.means, self.scale_trils)
        return jax.nn.logsumexp(self.log_weights + terms, where=self.regimes == z)

    @property
    def mean(self) -> Float[Array, "*time state"]:
        """The mean of the state, over all regimes."""
        return jnp.einsum("...c,...cd->...d", jnp.exp(self.log_weights), self.means)

    @property
    def covariance(self) -> Float[Array, "*time state state"]:
        """The covariance of the state, over all regimes."""
        shifts = self.means - self.mean[..., None, :]
        weights, scales = jnp.exp(self.log_weights), self.scale_trils
        within = jnp.einsum("...c,...cij,...ckj->...ik", weights, scales, scales)
        return within + jnp.einsum("...c,...ci,...cj->...ij", weights, shifts, shifts)


class Moves(eqx.Module):
    """How the components of one time move to the regimes of the next.

    The axis `source` has one entry per component, or a single one if all components of a time move
    alike.

    Example:
        A chain of two rows and one regime, which is a random walk:

        >>> import jax.numpy as jnp, retrodict as rd
        >>> laws = rd.switching.Mixture(
        ...     jnp.zeros((2, 1)), jnp.zeros((2, 1, 1)), jnp.ones((2, 1, 1, 1)),
        ...     jnp.zeros((2, 1), int),
        ... )
        >>> one = jnp.ones((1, 1, 1, 1, 1))
        >>> moves = rd.switching.Moves(jnp.zeros((1, 1, 1)), one, 0 * one[..., 0], one)
        >>> chain = rd.switching.SwitchingChain(laws, moves)
        >>> print(round(float(chain.log_prob(jnp.array([0, 0]), jnp.zeros((2, 1)))), 3))
        -1.491

    Attributes:
        log_probabilities: log t, of shape `(time-1, component, regime)`.
        weights: F, of shape `(time-1, source, regime, state, state)`.
        biases: b, of shape `(time-1, source, regime, state)`.
        scale_trils: lower factors of Q, of shape `(time-1, source, regime, state, state)`.
        origins: the law of the state of a component that moves to each regime, with axes
            `(time-1, component, regime)`; `None` if it is the law of the component, as where the
            regimes do not depend on the state.
    """

    log_probabilities: Float[Array, "*time component regime"]
    weights: Float[Array, "*time source regime state state"]
    biases: Float[Array, "*time source regime state"]
    scale_trils: Float[Array, "*time source regime state state"]
    origins: GaussianLaw | None = None

    def sources(self, laws: Mixture) -> tuple[GaussianLaw, int | None]:
        """Return the laws of the states that move, and their axis `regime`; `None` without one.

        Args:
            laws: the filtering laws of one time.
        """
        if self.origins is None:
            return GaussianLaw(laws.means, laws.scale_trils), None
        return self.origins, 0


def log_normal(x: Float[Array, "d"], mean: Float[Array, "d"], scale: Float[Array, "d d"]) -> Scalar:
    """Return log N(x; m, s sᵀ); zero without coordinates."""
    if not x.shape[0]:
        return jnp.zeros((), mean.dtype)
    white = linalg.solve_triangular(scale, x - mean)
    return jnp.sum(-0.5 * (white**2 + LOG_2PI) - jnp.log(jnp.diagonal(scale)))
