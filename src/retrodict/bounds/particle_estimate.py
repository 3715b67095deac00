"""The last resort of `error_bound`: an estimate of the error by particles, which is not a bound."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from retrodict._chains import LinearGaussianChain
from retrodict._expectations import AbstractFunctional
from retrodict.bounds.comparison import Comparison, Declined
from retrodict.bounds.contributions import along_paths, closed_form_contributions
from retrodict.bounds.distances import empirical_distance, gaussian_distance, sample_moments
from retrodict.bounds.lipschitz import lipschitz_sums
from retrodict.bounds.theorems import BoundValue, example_value, largest_error
from retrodict.particles import ParticlePosterior, ffbsi, status_words, tempered_smoother


def estimate_by_particles(comparison: Comparison) -> BoundValue:
    """Estimate the error against the paths of a particle smoother."""
    particles, name = _particles(comparison)
    words = f"estimated by {name} with {particles.samples.shape[0]} paths, so not a bound"
    if isinstance(comparison.functional, AbstractFunctional):
        return _estimated_error(comparison, particles, words)
    chain, lipschitz = comparison.linear_chain(), comparison.lipschitz_in_single_states()
    if comparison.key is None:
        raise Declined("it draws from the backward kernels: pass key=jax.random.key(0)")
    paths = particles.samples[:, : comparison.num_times]
    per_step = _estimated_phi(chain, paths, lipschitz, comparison.key, comparison.window)
    if comparison.chain.state_dim > 1:
        words = f"{words}; distances are those of Gaussian laws with the same moments"
    return BoundValue(jnp.sum(per_step), per_step, words, "particles")


def _particles(comparison: Comparison) -> tuple[ParticlePosterior, str]:
    """Return paths of a particle smoother that did not fail; decline if there are none.

    Where a bootstrap filter fails or degenerates, a tempered one replaces it.
    """
    particles, name = comparison.reference, "FFBSi"
    if not isinstance(particles, ParticlePosterior):
        if comparison.key is None:
            raise Declined("it runs a particle smoother: pass key=jax.random.key(0), or paths")
        key, count = jax.random.fold_in(comparison.key, 2), comparison.num_samples
        model, series = comparison.model, comparison.series
        particles = ffbsi(key, model, series.ys, count, strict=False, **comparison.options)
        if int(particles.status) != 0:
            particles = tempered_smoother(key, model, series, count)
            name = "FFBSi with tempered particles"
    if int(particles.status) != 0:
        reason = status_words(particles.status, particles.status_time)
        raise Declined(f"the particle smoother failed: {reason}")
    return particles, name


def _estimated_error(
    comparison: Comparison, particles: ParticlePosterior, words: str
) -> BoundValue:
    functional, data, n = comparison.functional, comparison.data, comparison.num_times
    truth = jnp.mean(along_paths(functional, particles.samples[:, :n], data), axis=0)
    # A reference with padding expects rows of data for it, which do not count.
    extra = particles.samples.shape[1] - n
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[-1:].repeat(extra, 0)]), data)
    errors = ravel_pytree(particles.expectation(functional, padded)[1])[0]
    quadratic = all(term.quadratic for term in functional.terms())
    if quadratic and isinstance(comparison.chain, LinearGaussianChain):
        approximate = closed_form_contributions(comparison.chain, functional, data)
    else:
        along = along_paths(functional, comparison.paths, data)
        approximate = jnp.mean(along, axis=0)
        chain_errors = jnp.std(jnp.sum(along, axis=1), axis=0, ddof=1) / math.sqrt(along.shape[0])
        errors = jnp.sqrt(errors**2 + chain_errors**2)
    by_time = approximate - truth
    entry = jnp.argmax(jnp.abs(jnp.sum(by_time, axis=0)))
    largest = largest_error(by_time, example_value(comparison))
    return BoundValue(rests_on=words, basis="particles", standard_error=errors[entry], **largest)


@eqx.filter_jit
def _estimated_phi(
    chain: LinearGaussianChain,
    paths: Float[Array, "sample time state"],
    lipschitz: Float[Array, "time"],
    key: Any,
    window: int,
) -> Float[Array, "time"]:
    """Return Wφ with paths for the exact marginals; sampling noise makes distances larger."""
    u = lipschitz_sums(chain.kernels.weight, lipschitz, window)
    noise = jax.random.normal(jax.random.fold_in(key, 3), paths.shape, paths.dtype)

    def distance(xs: Array, zs: Array) -> Array:
        if xs.shape[1] == 1:
            return empirical_distance(xs[:, 0], zs[:, 0])
        return gaussian_distance(sample_moments(xs), sample_moments(zs))

    def step(row: tuple) -> Array:
        kernel, later, earlier, e = row
        moved = later @ kernel.weight.T + kernel.bias[None] + e @ kernel.scale_tril.T
        return distance(moved, earlier)

    by_time = jnp.swapaxes(paths, 0, 1)
    rows = (chain.kernels, by_time[1:], by_time[:-1], jnp.swapaxes(noise[:, :-1], 0, 1))
    steps = jax.lax.map(step, rows)
    last = chain.terminal
    ends = last.mean[None] + noise[:, -1] @ last.scale_tril.T
    return jnp.append(steps, distance(ends, by_time[-1])) * u
