"""A law of bounded support: packages differ in what a uniform density is outside of its support."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


class Within(eqx.Module):
    """The uniform law of points less than `radius` from x, in every coordinate."""

    x: Any
    radius: float = eqx.field(static=True)

    def log_prob(self, value: Any) -> Any:
        inside = jnp.abs(value - self.x) < self.radius
        return jnp.where(inside, -jnp.log(2.0 * self.radius), -jnp.inf)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        shape = (*sample_shape, *jnp.shape(self.x))
        noise = jax.random.uniform(key, shape, minval=-self.radius, maxval=self.radius)
        return self.x + noise
