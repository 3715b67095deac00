"""A chain that is wrong on purpose, for tests of what corrects it."""

import equinox as eqx

import retrodict as rd


def shaken(
    chain: rd.LinearGaussianChain, shift: float = 0.2, factor: float = 1.5
) -> rd.LinearGaussianChain:
    """The chain with all of its laws moved and widened."""
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
