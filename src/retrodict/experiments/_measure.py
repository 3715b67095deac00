"""Simulated series, and what smoothers make of them: bands, sums of states, ELBOs and timings."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import retrodict as rd
from retrodict._workspace import Folder

LEVEL = 0.9
"""The level of the intervals whose coverage is counted."""

MARGIN = NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""Half the width of the interval of a Gaussian law in standard deviations."""

NUM_PATHS = 1000
"""The number of sampled paths of a reported ELBO."""

Infer = Callable[[Float[Array, "time obs"]], rd.LinearGaussianChain]
"""A map from a series to a chain: `infer` of a family, a linearised smoother, or a network."""


def simulate(
    model: rd.StateSpaceModel, keys: Array, num_times: int
) -> tuple[Float[Array, "series time state"], Float[Array, "series time obs"]]:
    """Simulate states and observations of one series per key."""
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


def power_of_n(lengths: Sequence[int] | np.ndarray, errors: np.ndarray, last: int) -> float:
    """Return the exponent of n with which an error grows over the last lengths."""
    n, values = np.log(np.asarray(lengths, float)[-last:]), np.log(errors[-last:])
    return float(np.polyfit(n, values, 1)[0])


def grid_bands(
    folder: Folder, model: rd.StateSpaceModel, ys: Array, grid: rd.Grid
) -> dict[str, Any]:
    """Compute exact evidence, marginal means and central intervals of every series."""
    evidence, bands = [], []
    for y in folder.track(list(ys)):
        posterior = rd.grid_smoother(model, y, grid)
        ends = np.asarray(posterior.quantile(np.array([(1 - LEVEL) / 2, (1 + LEVEL) / 2])))
        evidence.append(posterior.log_evidence)
        bands.append(np.concatenate([np.asarray(posterior.mean)[None], ends])[..., 0])
    means, *intervals = np.stack(bands, axis=1)
    return {"evidence": evidence, "means": means, "intervals": intervals}


def exact_sums(
    folder: Folder, model: rd.StateSpaceModel, ys: Array, lengths: Sequence[int], grid: rd.Grid
) -> dict[str, Any]:
    """Compute exact marginal means, and expected sums of states given the first n observations."""
    sums, means = [], []
    for y in folder.track(list(ys)):
        by_length = [rd.grid_smoother(model, y, grid, length=n).mean[:n, 0] for n in lengths]
        sums.append([float(mean.sum()) for mean in by_length])
        means.append(by_length[-1])
    return {"sums": sums, "means": jnp.stack(means)}


def particle_bands(
    folder: Folder, model: rd.StateSpaceModel, ys: Array, key: Array, num_particles: int
) -> dict[str, Any]:
    """Compute marginal means and central intervals by FFBSi, and the seconds per series."""

    @jax.jit
    def smooth(key: Array, y: Array) -> tuple[Array, Array]:
        posterior = rd.ffbsi(key, model, y, num_particles)
        return posterior.mean[:, 0], posterior.samples[..., 0]

    keys, bands = jax.random.split(key, len(ys)), []
    for k, y in folder.track(list(zip(keys, ys, strict=True))):
        mean, paths = smooth(k, y)
        bands.append((mean, *np.quantile(paths, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)))
    means, *intervals = (np.stack(part) for part in zip(*bands, strict=True))
    seconds = shortest(lambda: smooth(keys[0], ys[0]), 3)
    return {"means": means, "intervals": intervals, "seconds": seconds}


def gaussian_bands(
    folder: Folder, model: rd.StateSpaceModel, infer: Infer, ys: Array, key: Array
) -> dict[str, Any]:
    """Compute the ELBO by sampled paths, marginal means and scales, and the seconds per series."""
    parts = []
    for y, k in folder.track(list(zip(ys, jax.random.split(key, len(ys)), strict=True))):
        chain = infer(y)
        # The chain is an argument, not a closure: one compiled program serves all smoothers.
        bound = rd.elbo(model, chain, y, estimator=rd.BackwardSampling(NUM_PATHS), key=k)
        laws = chain.marginals()
        parts.append((bound, laws.mean[:, 0], laws.std[:, 0]))
    bounds, means, stds = (jnp.stack(part) for part in zip(*parts, strict=True))
    whole = jax.jit(lambda y: infer(y).marginals().mean)
    return {
        "elbo": bounds,
        "means": means,
        "stds": stds,
        "seconds": shortest(lambda: whole(ys[0]), 50),
    }


def sums_of(
    folder: Folder, smoothers: Mapping[str, Infer], ys: Array, lengths: Sequence[int]
) -> dict[str, Any]:
    """Compute E_q[Σ x_k] of every smoother given the first n observations, by sequence and n."""

    @jax.jit
    def by_length(chain: rd.LinearGaussianChain) -> Array:
        return jnp.stack([jnp.sum(chain.prefix(n).marginals().mean) for n in lengths])

    sums = {}
    for name in folder.track(list(smoothers)):
        sums[name] = jnp.stack([by_length(smoothers[name](y)) for y in ys])
    return sums
