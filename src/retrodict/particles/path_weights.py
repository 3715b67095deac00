"""Importance weights of paths of a chain."""

import equinox as eqx
import jax
from jaxtyping import Array, Float

from retrodict._chains import AbstractBackwardChain
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._types import Scalar

AT_ONCE = 100
"""The number of paths that are weighed at once."""


@eqx.filter_jit
def log_weights_of(
    model: StateSpaceModel,
    chain: AbstractBackwardChain,
    paths: Float[Array, "sample time state"],
    series: Series,
) -> Float[Array, "sample"]:
    """Return log p(x, y) − log q(x) of each path."""
    options = {
        "mask": True if series.mask is None else series.mask,
        "inputs": series.inputs,
        "length": series.length,
    }

    def one(path: Float[Array, "time state"]) -> Scalar:
        return model.log_joint(path, series.ys, **options) - chain.log_prob(path)

    return jax.lax.map(one, paths, batch_size=AT_ONCE)
