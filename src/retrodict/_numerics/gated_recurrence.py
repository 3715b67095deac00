"""The recurrence of a gated recurrent unit, with a derivative of few operations per row.

With the parts (r, z, n) of the inputs x_k and of the product a_k = w h_{k-1}, the units are

    r = σ(x_r + a_r),    z = σ(x_z + a_z),    n = tanh(x_n + r (a_n + b)),

    h_k = (1 − z) n + z h_{k-1}.

On an accelerator the time of a loop is the number of its operations, however small they are. JAX's
derivative of the loop stores a dozen arrays per row, one operation each, and adds up the derivative
in w row by row. Here the units alone are stored. Given all of them, the linearised recurrence

    dh_k = z dh_{k-1} + Σ_parts slope (w dh_{k-1}) + drive_k

has coefficients and drives that are computed for all rows at once. Both modes of differentiation
run it, so that a row costs one product, and the derivative in w is one product after the loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

UNROLL = 4
"""The number of rows per iteration of a loop; each iteration has a fixed cost."""

SHUT = 100.0
"""The input of the gate z that keeps the units as they are: σ(100) is one in every precision."""


def gated_step(
    inputs: Float[Array, "parts"],
    units: Float[Array, "hidden"],
    weight: Float[Array, "parts hidden"],
    bias: Float[Array, "hidden"],
) -> Float[Array, "hidden"]:
    """Return the units after one row.

    Args:
        inputs: x_k, the parts r, z and n one after another.
        units: h_{k-1}.
        weight: w.
        bias: b.
    """
    row = _row(inputs, units, weight, bias)
    return (1.0 - row.keep) * row.candidate + row.keep * units


def inputs_of_existing(
    inputs: Float[Array, "time parts"], exists: Bool[Array, "time"]
) -> Float[Array, "time parts"]:
    """Replace the inputs of rows that do not exist by those that leave the units unchanged."""
    size = inputs.shape[1] // 3
    shut = jnp.concatenate([jnp.zeros(size), jnp.full(size, SHUT), jnp.zeros(size)])
    return jnp.where(exists[:, None], inputs, shut.astype(inputs.dtype)[None])


@jax.custom_jvp
def gated_recurrence(
    inputs: Float[Array, "time parts"],
    units: Float[Array, "hidden"],
    weight: Float[Array, "parts hidden"],
    bias: Float[Array, "hidden"],
) -> Float[Array, "time hidden"]:
    """Return the units after every row; `units` are those before the first."""

    def move(units: Array, row: Array) -> tuple[Array, Array]:
        units = gated_step(row, units, weight, bias)
        return units, units

    return lax.scan(move, units, inputs, unroll=UNROLL)[1]


class _Row(NamedTuple):
    """The gates of one row: r, z, the sum a_n + b, and n."""

    reset: Array
    keep: Array
    recurrent: Array
    candidate: Array


def _row(inputs: Array, units: Array, weight: Array, bias: Array) -> _Row:
    of_reset, of_keep, of_candidate = jnp.split(inputs, 3)
    reset, keep, recurrent = jnp.split(_product(weight, units), 3)
    reset, keep = jax.nn.sigmoid(of_reset + reset), jax.nn.sigmoid(of_keep + keep)
    recurrent = recurrent + bias
    return _Row(reset, keep, recurrent, jnp.tanh(of_candidate + reset * recurrent))


def _product(weight: Array, units: Array) -> Array:
    return jnp.matmul(weight, units, precision=lax.Precision.HIGHEST)


class _Slopes(NamedTuple):
    """The derivatives of h_k.

    Attributes:
        keep: in h_{k-1}, directly.
        product: in each part of the product w h_{k-1}, of shape `(3, hidden)`.
        inputs: in each part of the inputs.
    """

    keep: Array
    product: Array
    inputs: Array


def _slopes(inputs: Array, units: Array, weight: Array, bias: Array) -> _Slopes:
    reset, keep, recurrent, candidate = _row(inputs, units, weight, bias)
    of_candidate = (1.0 - keep) * (1.0 - candidate**2)
    of_reset = of_candidate * recurrent * reset * (1.0 - reset)
    of_keep = (units - candidate) * keep * (1.0 - keep)
    return _Slopes(
        keep,
        jnp.stack([of_reset, of_keep, of_candidate * reset]),
        jnp.stack([of_reset, of_keep, of_candidate]),
    )


@gated_recurrence.defjvp
def _gated_recurrence_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    inputs, first, weight, bias = primals
    of_inputs, of_first, of_weight, of_bias = tangents
    units = gated_recurrence(*primals)
    before = jnp.concatenate([first[None], units[:-1]])
    slopes = jax.vmap(_slopes, in_axes=(0, 0, None, None))(inputs, before, weight, bias)
    shape = slopes.product.shape
    moved = jnp.matmul(before, of_weight.T, precision=lax.Precision.HIGHEST).reshape(shape)
    drives = (
        jnp.sum(slopes.inputs * of_inputs.reshape(shape) + slopes.product * moved, axis=1)
        + slopes.product[:, 2] * of_bias[None]
    )

    def move(change: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        keep, product, drive = row
        moved = _product(weight, change).reshape(product.shape)
        change = keep * change + jnp.sum(product * moved, axis=0) + drive
        return change, change

    rows = (slopes.keep, slopes.product, drives)
    return units, lax.scan(move, of_first, rows, unroll=UNROLL)[1]
