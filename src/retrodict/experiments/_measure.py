"""Simulated series, and timings of calls."""

import time
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

import retrodict as rd


def simulate(
    model: rd.StateSpaceModel, key: Array, num_series: int, num_times: int
) -> tuple[Float[Array, "series time state"], Float[Array, "series time obs"]]:
    """Simulate states and observations of several series."""
    keys = jax.random.split(key, num_series)
    return rd.distributed.sharded_vmap(lambda key: model.simulate(key, num_times))(keys)


def shortest(call: Callable[[], Any], repeats: int) -> float:
    """Return the shortest of several timings in seconds, after one call that compiles."""
    jax.block_until_ready(call())
    timings = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        timings.append(time.perf_counter() - start)
    return min(timings)
