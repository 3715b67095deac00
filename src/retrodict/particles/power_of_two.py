"""Powers of two in a form that XLA vectorises inside a fused loop.

Backward sampling evaluates one exponential per pair of a path and a particle, hundreds of millions
in a short series. XLA's `exp2` is accurate to the last bit but is not vectorised inside a large
fusion on CPU. A polynomial on [-1/2, 1/2] and an addition to the exponent bits take two
thirds of the time (`docs/decisions/0005-particle-smoothing.md`). Its relative error, below 1e-13 in
float64 and 3e-7 in float32, is that of a weight: many orders below the Monte Carlo error.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

LOG2_E = float(np.log2(np.e))


def _polynomial(degree: int) -> tuple[float, ...]:
    """Return coefficients of 2^f on [-1/2, 1/2], interpolated at Chebyshev points."""
    nodes = 0.5 * np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    fit = np.polynomial.polynomial.polyfit(nodes, 2.0**nodes, degree)
    return tuple(float(c) for c in fit)


_IN_DOUBLE = _polynomial(9)
_IN_SINGLE = _polynomial(6)


def power_of_two(t: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return 2^t for t below the largest exponent; zero if t is −∞ or underflows, NaN if t is NaN.

    With t = k + f for an integer k, 2^f is a polynomial, and k is added to its exponent bits. For
    that 1.5·2^p is added to k, for a mantissa of p bits, so that the lowest bits of the sum hold k:
    a conversion to integers would not be vectorised. The integer must come from a rounding: XLA
    simplifies `(t + c) - c`, which rounds too, to t.
    """
    if t.dtype == jnp.float64:
        integers, bits, lowest, coefficients = jnp.int64, 52, -1021.0, _IN_DOUBLE
    else:
        integers, bits, lowest, coefficients = jnp.int32, 23, -125.0, _IN_SINGLE
    t = t.astype(jnp.float64 if integers == jnp.int64 else jnp.float32)
    shift = 1.5 * 2.0**bits
    clipped = jnp.maximum(t, lowest)
    integer_part = lax.round(clipped, lax.RoundingMethod.TO_NEAREST_EVEN)
    fraction = clipped - integer_part
    value = jnp.full_like(fraction, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * fraction + coefficient
    exponent = lax.bitcast_convert_type(integer_part + shift, integers) << bits
    power = lax.bitcast_convert_type(
        lax.bitcast_convert_type(value, integers) + exponent, value.dtype
    )
    return jnp.where(t < lowest, 0.0, power)
