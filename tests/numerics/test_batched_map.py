"""Many rows, a part of them at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._numerics.batched_map import in_parts


@pytest.mark.parametrize(("count", "size"), [(1, 4), (4, 4), (5, 4), (7, 3), (9, 1), (13, 5)])
def test_batched_map_returns_rows_in_order(count: int, size: int):
    xs = (jnp.arange(count, dtype=float), jnp.ones((count, 2)) * jnp.arange(count)[:, None])
    first, second = in_parts(lambda x: (x[0] ** 2, x[1] + 1), xs, size)
    np.testing.assert_array_equal(first, np.arange(count) ** 2)
    np.testing.assert_array_equal(second, np.arange(count)[:, None] + np.ones(2))


def test_batched_map_traces_once_with_bounded_batches():
    shapes = []

    def square(x: jax.Array) -> jax.Array:
        shapes.append(x)
        return x**2

    program = jax.make_jaxpr(lambda xs: in_parts(square, xs, 32))(jnp.zeros(127))
    assert len(shapes) == 1
    sizes = [size for eqn in program.eqns for var in eqn.outvars for size in var.aval.shape[1:]]
    assert max(sizes) == 32
