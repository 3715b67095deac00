"""Simulated series, central intervals, and timings of calls."""

import time
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

import retrodict as rd

LEVEL = 0.9
"""The level of the intervals whose coverage is counted."""

MARGIN = NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""Half the width of the interval of a Gaussian law in standard deviations."""


def simulate(
    model: rd.StateSpaceModel, keys: Array, num_times: int
) -> tuple[Float[Array, "series time state"], Float[Array, "series time obs"]]:
    """Simulate states and observations of one series per key."""
    return rd.distributed.sharded_vmap(lambda key: model.simulate(key, num_times))(keys)


def exact_band(posterior: rd.GridPosterior) -> Float[np.ndarray, "3 time"]:
    """Return the marginal means of the first state, and the ends of central intervals."""
    ends = np.asarray(posterior.quantile(np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])))
    return np.concatenate([np.asarray(posterior.mean)[None], ends])[..., 0]


def shortest(call: Callable[[], Any], repeats: int) -> float:
    """Return the shortest of several timings in seconds, after one call that compiles."""
    jax.block_until_ready(call())
    timings = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        timings.append(time.perf_counter() - start)
    return min(timings)
