"""The recurrence of a gated unit, against JAX's derivative of the plain loop."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from retrodict._numerics.gated_recurrence import UNROLL, gated_recurrence, inputs_of_existing

HIDDEN, FEATURES = 5, 3
TIMES = 2 * UNROLL + 1
"""Not a multiple of the rows per iteration."""


def arrays(seed: int = 0) -> dict[str, Any]:
    """Arguments of `gated_recurrence`, with gates that are far from half open."""
    rng = np.random.default_rng(seed)
    shapes = {
        "inputs": (TIMES, 3 * HIDDEN),
        "units": (HIDDEN,),
        "weight": (3 * HIDDEN, HIDDEN),
        "bias": (HIDDEN,),
    }
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


def plain(inputs: Any, units: Any, weight: Any, bias: Any) -> Any:
    """The same with `equinox.nn.GRUCell`, whose input weight is the identity."""
    cell = eqx.nn.GRUCell(3 * HIDDEN, HIDDEN, key=jax.random.key(0))
    parts = (jnp.eye(3 * HIDDEN), weight, jnp.zeros(3 * HIDDEN), bias)
    cell = eqx.tree_at(lambda c: (c.weight_ih, c.weight_hh, c.bias, c.bias_n), cell, parts)

    def move(units: Any, row: Any) -> tuple[Any, Any]:
        units = cell(row, units)
        return units, units

    return lax.scan(move, units, inputs)[1]


def scalar(recurrence: Any) -> Any:
    """A number that depends on all units, nonlinearly."""
    signs = jnp.cos(jnp.arange(TIMES * HIDDEN, dtype=float)).reshape(TIMES, HIDDEN)
    return lambda arguments: jnp.sum(signs * jnp.exp(recurrence(**arguments)))


def along_direction(function: Any) -> Any:
    """Its derivative along a fixed direction, by forward mode."""
    return lambda arguments: jax.jvp(function, (arguments,), (arrays(1),))[1]


def assert_close(one: Any, other: Any, tolerance: float) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
    )


def test_units_equal_those_of_the_cell(dtype):
    arguments = jax.tree.map(lambda leaf: leaf.astype(dtype), arrays())
    got = jax.jit(lambda a: gated_recurrence(**a))(arguments)
    assert got.dtype == dtype
    assert_close(got, plain(**arguments), 1e-12 if dtype == jnp.float64 else 1e-5)


@pytest.mark.parametrize(
    "derivative",
    [
        jax.grad,
        along_direction,
        lambda function: jax.grad(along_direction(function)),
        lambda function: along_direction(jax.grad(function)),
        lambda function: jax.grad(lambda a: scalar_of(jax.grad(function)(a))),
    ],
    ids=["reverse", "forward", "reverse of forward", "forward of reverse", "reverse of reverse"],
)
def test_derivatives_equal_those_of_the_plain_loop(derivative: Any):
    got, expected = (
        jax.jit(derivative(scalar(recurrence)))(arrays())
        for recurrence in (gated_recurrence, plain)
    )
    assert_close(got, expected, 1e-10)


def scalar_of(tree: Any) -> Any:
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(tree))


def test_series_of_a_batch_share_the_weights():
    many = jax.tree.map(lambda *leaves: jnp.stack(leaves), arrays(2), arrays(3))
    axes = {"inputs": 0, "units": 0, "weight": None, "bias": None}
    shared = {**arrays(), "inputs": many["inputs"], "units": many["units"]}

    def total(recurrence: Any) -> Any:
        return lambda a: jnp.sum(jax.vmap(scalar(recurrence), in_axes=(axes,))(a))

    got, expected = (jax.jit(jax.grad(total(r)))(shared) for r in (gated_recurrence, plain))
    assert_close(got, expected, 1e-10)


def test_rows_that_do_not_exist_leave_the_units_to_the_last_bit(dtype):
    arguments = jax.tree.map(lambda leaf: leaf.astype(dtype), arrays())
    exists = jnp.arange(TIMES) < 4
    junk = arguments["inputs"].at[4:].set(jnp.nan)

    def units(inputs: Any) -> Any:
        return gated_recurrence(**{**arguments, "inputs": inputs_of_existing(inputs, exists)})

    got = jax.jit(units)(junk)
    np.testing.assert_array_equal(got[4:], jnp.broadcast_to(got[3], got[4:].shape))
    gradient = jax.jit(jax.grad(lambda inputs: jnp.sum(units(inputs) ** 2)))(junk)
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[4:])
