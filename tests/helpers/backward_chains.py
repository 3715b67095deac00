"""Backward chains that are wrong on purpose, or offer draws alone."""

from typing import Any

import equinox as eqx
import jax

import retrodict as rd


def shifted_chain(
    chain: rd.LinearGaussianChain, shift: float = 0.2, factor: float = 1.5
) -> rd.LinearGaussianChain:
    """Return the chain with all of its laws moved and widened."""
    return eqx.tree_at(
        lambda q: (q.laws.mean, q.laws.scale_tril, q.kernels.bias, q.kernels.scale_tril),
        chain,
        (
            chain.laws.mean + shift,
            factor * chain.laws.scale_tril,
            chain.kernels.bias + shift,
            factor * chain.kernels.scale_tril,
        ),
    )


class OpaqueChain(rd.AbstractBackwardChain):
    """A chain that offers draws and a density, and nothing else."""

    inner: Any

    @property
    def num_times(self) -> int:
        return self.inner.num_times

    @property
    def state_dim(self) -> int:
        return self.inner.state_dim

    def sample(self, key: Any, num_samples: int) -> jax.Array:
        return self.inner.sample(key, num_samples)

    def log_prob(self, xs: Any) -> Any:
        return self.inner.log_prob(xs)

    def prefix(self, num_times: int) -> Any:
        return OpaqueChain(self.inner.prefix(num_times))
