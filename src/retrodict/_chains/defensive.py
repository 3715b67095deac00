"""Defensive mixtures: a chain mixed with a wide law that covers the state space."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, PyTree

from retrodict._arrays import PRNGKey, Scalar
from retrodict._chains.base import AbstractKernelChain
from retrodict._chains.sampled import AbstractBackwardKernel, SampledChain
from retrodict._model import Gaussian


class DefensiveLaw(eqx.Module):
    """The mixture (1 − ε) q + ε w of a law q and a wide law w.

    Attributes:
        law: q.
        wide: w.
        share: ε.
    """

    law: Any
    wide: Any
    share: Float[Array, "*batch"]

    @property
    def noise_dim(self) -> int:
        """The number of standard normal variates per draw; the first selects the component."""
        return 1 + max(self.law.noise_dim, self.wide.noise_dim)

    @property
    def mean(self) -> Float[Array, "*batch state"]:
        """The mean of the mixture."""
        share = self.share[..., None]
        return (1 - share) * self.law.mean + share * self.wide.mean

    @property
    def covariance(self) -> Float[Array, "*batch state state"]:
        """The covariance of the mixture."""
        share = self.share[..., None, None]
        shift = self.law.mean - self.wide.mean
        between = share * (1 - share) * shift[..., :, None] * shift[..., None, :]
        return (1 - share) * self.law.covariance + share * self.wide.covariance + between

    def log_prob(self, x: Float[Array, "state"]) -> Scalar:
        """Compute the log density of the mixture."""
        return jnp.logaddexp(
            jnp.log1p(-self.share) + self.law.log_prob(x),
            jnp.log(self.share) + self.wide.log_prob(x),
        )

    def from_noise(self, noise: Float[Array, "noise"]) -> Float[Array, "state"]:
        """Map standard normal noise to a draw; not meant to be differentiated in the share."""
        rest = noise[1:]
        return jnp.where(
            ndtr(noise[0]) < self.share,
            self.wide.from_noise(rest[: self.wide.noise_dim]),
            self.law.from_noise(rest[: self.law.noise_dim]),
        )

    def sample(self, key: PRNGKey) -> Float[Array, "state"]:
        """Draw one state."""
        return self.from_noise(jax.random.normal(key, (self.noise_dim,), self.wide.mean.dtype))


class DefensiveStep(NamedTuple):
    """The parameters of one backward kernel.

    Attributes:
        inner: the parameters of the original kernel.
        wide: w, the wide law of the state at the earlier time.
    """

    inner: PyTree
    wide: Any


class DefensiveKernel(AbstractBackwardKernel):
    """The backward kernels (1 − ε) q_{k-1|k}(x, ·) + ε w of a defensive mixture.

    Attributes:
        chain: the original chain, with kernels q_{k-1|k}.
        share: ε.
    """

    chain: AbstractKernelChain
    share: Float[Array, ""]

    def law(self, step: DefensiveStep, x: Float[Array, "state"]) -> DefensiveLaw:
        """Return the mixture law at state x."""
        return DefensiveLaw(self.chain.kernel_law(step.inner, x), step.wide, self.share)


def defensive_mixture(
    chain: AbstractKernelChain, wide: Gaussian | None, share: float = 0.1
) -> SampledChain:
    """Mix the filtering laws and backward kernels of a chain with a wide law.

    A badly trained chain may miss part of the posterior, and importance weights cannot recover a
    region that is never sampled. With a share ε of a law w that covers the states, every density is
    at least ε w. A `guided_smoother` then converges to the posterior for any chain, at the cost of
    that share of its particles.

    If the filtering laws q_k cover the posterior and only the kernels are too narrow, pass `None`
    to use the filtering laws as w. The kernels become (1 − ε) q_{k-1|k}(x, ·) + ε q_{k-1}, and the
    filtering laws do not change. The factor q_{k-1} / kernel in the weights of a `guided_smoother`
    is then at most 1/ε.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.RecurrentFamily(jax.random.key(0), state_dim=1, obs_dim=1)
        >>> wide = rd.Gaussian(jnp.zeros(1), 3.0 * jnp.eye(1))
        >>> rd.defensive_mixture(family.infer(jnp.ones((5, 1))), wide, 0.2).num_times
        5

    Args:
        chain: the chain.
        wide: w, such as the prior law of the states; `None` to use the filtering laws of the chain.
        share: ε, between zero and one.

    Returns:
        The chain with mixed laws and kernels.

    Raises:
        TypeError: if the chain has no filtering laws and kernels.
        ValueError: if the share is not between zero and one, or w has another dimension.
    """
    if not isinstance(chain, AbstractKernelChain):
        raise TypeError(
            "defensive_mixture expects a chain with filtering laws and backward kernels, got"
            f" {type(chain).__name__}."
        )
    if not 0 < share < 1:
        raise ValueError(f"defensive_mixture expects a share between zero and one, got {share}.")
    n, d = chain.num_times, chain.state_dim
    if wide is not None and wide.mean.shape != (d,):
        raise ValueError(
            "defensive_mixture expects `wide` to be None or one Gaussian with a mean of shape"
            f" {(d,)}, the state dimension of the chain, got a mean of shape {wide.mean.shape}."
        )
    shares = jnp.full(n, share, chain.laws.mean.dtype)
    if wide is None:
        laws = wides = chain.laws
    else:
        wides = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), wide)
        laws = DefensiveLaw(chain.laws, wides, shares)
    steps = DefensiveStep(chain.steps, jax.tree.map(lambda leaf: leaf[:-1], wides))
    return SampledChain(laws, DefensiveKernel(chain, shares[0]), steps, chain.length)
