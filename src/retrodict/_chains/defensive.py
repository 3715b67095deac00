"""A chain mixed with a wide law, so that nothing is left out that might be true."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, PyTree

from retrodict._chains.base import AbstractKernelChain
from retrodict._chains.sampled import AbstractBackwardKernel, SampledChain
from retrodict._laws import Gaussian
from retrodict._types import PRNGKey, Scalar


class DefensiveLaw(eqx.Module):
    """The law (1 − ε) q + ε w of a law q and a wide one w.

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
        """One number chooses between the two, the rest makes the draw."""
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
        """The log density of the mixture."""
        return jnp.logaddexp(
            jnp.log1p(-self.share) + self.law.log_prob(x),
            jnp.log(self.share) + self.wide.log_prob(x),
        )

    def from_noise(self, noise: Float[Array, "noise"]) -> Float[Array, "state"]:
        """A draw of one of the two; not meant to be differentiated in the share."""
        chosen = noise[1:]
        return jnp.where(
            ndtr(noise[0]) < self.share,
            self.wide.from_noise(chosen[: self.wide.noise_dim]),
            self.law.from_noise(chosen[: self.law.noise_dim]),
        )

    def sample(self, key: PRNGKey) -> Float[Array, "state"]:
        """One draw."""
        return self.from_noise(jax.random.normal(key, (self.noise_dim,), self.wide.mean.dtype))


class DefensiveStep(NamedTuple):
    """The parameters of one backward kernel.

    Attributes:
        inner: those of the kernel that is mixed.
        wide: w, for the state of the earlier time.
    """

    inner: PyTree
    wide: Any


class DefensiveKernel(AbstractBackwardKernel):
    """The backward kernels (1 − ε) q_{k-1|k}(x, ·) + ε w of a chain.

    Attributes:
        chain: the chain of q.
        share: ε.
    """

    chain: AbstractKernelChain
    share: Float[Array, ""]

    def law(self, step: DefensiveStep, x: Float[Array, "state"]) -> DefensiveLaw:
        """The mixed law."""
        return DefensiveLaw(self.chain.kernel_law(step.inner, x), step.wide, self.share)


def defensive_mixture(
    chain: AbstractKernelChain, wide: Gaussian | None, share: float = 0.1
) -> SampledChain:
    """A chain whose filtering laws and backward kernels are mixed with a wide law.

    A chain that is badly trained may leave out part of the posterior, and weights do not find what
    is never drawn. With a share ε of a law w that covers the states, every density is at least ε w,
    so that a `guided_smoother` finds the posterior whatever the chain, at the price of that share
    of its particles.

    If the filtering laws q_k cover the posterior, and only the kernels are too sure of themselves,
    the former may stand for w: the kernels become (1 − ε) q_{k-1|k}(x, ·) + ε q_{k-1}, the laws
    stay as they are, and the factor q_{k-1} / kernel in the weights of a `guided_smoother` is at
    most 1/ε.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> family = rd.RecurrentFamily(jax.random.key(0), state_dim=1, obs_dim=1)
        >>> wide = rd.Gaussian(jnp.zeros(1), 3.0 * jnp.eye(1))
        >>> rd.defensive_mixture(family.infer(jnp.ones((5, 1))), wide, 0.2).num_times
        5

    Args:
        chain: the chain.
        wide: w, such as the law of the states before anything was seen; `None` for the filtering
            laws of the chain.
        share: ε, between zero and one.

    Raises:
        TypeError: if the chain has no filtering laws and kernels.
        ValueError: if the share is not between zero and one, or w is of another dimension.
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
            f"defensive_mixture expects one wide law of {d} states as the chain has, or None, got"
            f" a mean of shape {wide.mean.shape}."
        )
    shares = jnp.full(n, share, chain.laws.mean.dtype)
    if wide is None:
        laws = wides = chain.laws
    else:
        wides = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), wide)
        laws = DefensiveLaw(chain.laws, wides, shares)
    steps = DefensiveStep(chain.steps, jax.tree.map(lambda leaf: leaf[:-1], wides))
    return SampledChain(laws, DefensiveKernel(chain, shares[0]), steps, chain.length)
