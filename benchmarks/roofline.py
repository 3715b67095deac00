"""Compute the least possible cost of a program: its arithmetic and its memory traffic.

The cost analysis of XLA counts the body of a loop once. Operations are therefore counted in the
traced program, with the length of each loop. Bytes are those of arguments and results, each moved
once.
"""

import math
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from measure import time_calls

FREE = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "iota",
    "optimization_barrier",
    "pad",
    "reshape",
    "rev",
    "select_n",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
}
"""What moves numbers and computes none."""


class Peaks(NamedTuple):
    """Measured rates of the device.

    Attributes:
        flops_per_s: of a product of large matrices, in full precision.
        bytes_per_s: read and written by a plain copy.
    """

    flops_per_s: float
    bytes_per_s: float


def measured_peaks(dtype: Any) -> Peaks:
    """Measure both rates."""
    on_cpu = jax.default_backend() == "cpu"
    size = 1024 if on_cpu else 8192
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision="highest"))
    x = jnp.zeros(2**24 if on_cpu else 2**28, dtype)
    add = jax.jit(lambda x: x + 1)
    return Peaks(2 * size**3 / _quickest(product, a), 2 * x.nbytes / _quickest(add, x))


def _quickest(function: Callable[[Any], Any], argument: Any, queued: int = 4) -> float:
    """Return the seconds of one call, of several in a row so that launching does not count."""

    def calls() -> None:
        for _ in range(queued - 1):
            function(argument)
        function(argument).block_until_ready()

    return min(time_calls(calls, 5)) / queued


def flops_of(function: Callable[..., Any], *arguments: Any) -> float:
    """Count the operations of a program, including loops; an elementary function counts as one."""
    return _flops(jax.make_jaxpr(function)(*arguments).jaxpr)


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(jaxprs_in_params(equation.params))
        if name == "cond":
            total += max(map(_flops, inner))
        elif inner:
            total += _repetitions(name, equation.params) * sum(map(_flops, inner))
        elif name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            each = 2 * math.prod(shape[axis] for axis in contracted)
            total += each * math.prod(equation.outvars[0].aval.shape)
        elif name.startswith("reduce") or name.startswith("cum"):
            total += math.prod(equation.invars[0].aval.shape)
        elif name not in FREE:
            total += sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
    return total


def _repetitions(name: str, params: dict[str, Any]) -> int:
    """Return the number of runs of the body of an operation, on all devices together."""
    if name == "scan":
        return params["length"]
    return params["mesh"].size if name == "shard_map" else 1


def measure(
    function: Callable[..., Any], arguments: tuple[Any, ...], peaks: Peaks, repetitions: int = 10
) -> dict[str, Any]:
    """Return compile time, run time, memory, and the ratio of the least possible time.

    Args:
        function: function to compile.
        arguments: pytrees of arrays, passed and not closed over.
        peaks: rates of the device.
        repetitions: number of timed runs, of which the smallest counts.
    """
    began = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - began

    def call() -> Any:
        return jax.block_until_ready(compiled(*arguments))

    moved = sum(leaf.nbytes for leaf in jax.tree.leaves((arguments, call())))
    times = time_calls(call, repetitions)
    best, flops = min(times), flops_of(function, *arguments)
    at_least = max(flops / peaks.flops_per_s, moved / peaks.bytes_per_s)
    return {
        "compile_s": compile_s,
        "best_s": best,
        "median_s": statistics.median(times),
        "flops": flops,
        "bytes": moved,
        "arithmetic_alone_s": flops / peaks.flops_per_s,
        "bytes_alone_s": moved / peaks.bytes_per_s,
        "share_of_time_needed": at_least / best,
        **memory_of(compiled),
    }


def memory_of(compiled: Any) -> dict[str, int]:
    """Return the memory of the program in bytes, and the peak of the process so far."""
    memory = compiled.memory_analysis()
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        peak = stats["peak_bytes_in_use"]
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": (
            memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        ),
        "peak_bytes_of_process": peak,
    }
