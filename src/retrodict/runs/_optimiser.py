"""Optimiser steps relative to the size of a parameter."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def relative_to_size() -> optax.GradientTransformation:
    """Return a transformation that multiplies updates of the model by max(1, |parameter|).

    Without it a scale of a thousand would take a hundred thousand steps of 0.01. Updates are pairs
    of family and model; those of the family are not changed.
    """

    def scale(updates: Any, parameters: Any) -> Any:
        family, model = updates
        scaled = jax.tree.map(
            lambda update, at: update * jnp.maximum(1.0, jnp.abs(at)), model, parameters[1]
        )
        return family, scaled

    return optax.stateless(scale)
