"""The last resort: the error against a particle smoother, which is an estimate and not a bound."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from retrodict._chains import LinearGaussianChain
from retrodict._expectations import AbstractFunctional
from retrodict.bounds.by_time import along_paths, closed_form_by_time
from retrodict.bounds.distances import empirical_distance, gaussian_distance, sample_moments
from retrodict.bounds.gains import reach
from retrodict.bounds.methods import Found, largest
from retrodict.bounds.problem import Declined, Problem
from retrodict.particles import ParticlePosterior, ffbsi


def by_particles(problem: Problem) -> Found:
    """The error against a particle smoother: an estimate, not a bound."""
    particles = problem.particles
    if particles is None:
        if problem.key is None:
            raise Declined("it runs a particle smoother: pass key=jax.random.key(0), or paths")
        particles = ffbsi(
            jax.random.fold_in(problem.key, 2),
            problem.model,
            problem.series.ys,
            problem.num_samples,
            **problem.options,
        )
    words = f"estimated by FFBSi with {particles.samples.shape[0]} paths, so not a bound"
    if int(np.asarray(particles.status)) != 0:
        words = f"{words}; and the particle smoother itself reports status {int(particles.status)}"
    if isinstance(problem.functional, AbstractFunctional):
        return _estimated_error(problem, particles, words)
    chain = problem.linear_chain()
    lipschitz = problem.lipschitz_in_single_states()
    if problem.key is None:
        raise Declined("it draws from the backward kernels: pass key=jax.random.key(0)")
    per_step = _estimated_phi(
        chain, particles.samples[:, : problem.num_times], lipschitz, problem.key, problem.window
    )
    if problem.chain.state_dim > 1:
        words = f"{words}; distances are those of Gaussian laws with the same moments"
    return Found(jnp.sum(per_step), per_step, words, "particles")


def _estimated_error(problem: Problem, particles: ParticlePosterior, words: str) -> Found:
    functional, data, n = problem.functional, problem.data, problem.num_times
    exact = jnp.mean(along_paths(functional, particles.samples[:, :n], data), axis=0)
    quadratic = all(term.quadratic for term in functional.terms())
    # A reference with padding wants a row of data for it, which counts for nothing.
    extra = particles.samples.shape[1] - n
    padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[-1:].repeat(extra, 0)]), data)
    _, errors = particles.expectation(functional, padded)
    errors = ravel_pytree(errors)[0]
    if quadratic and isinstance(problem.chain, LinearGaussianChain):
        ours = closed_form_by_time(problem.chain, functional, data)
    else:
        _, paths = problem.draw()
        along = along_paths(functional, paths, data)
        ours = jnp.mean(along, axis=0)
        own = jnp.std(jnp.sum(along, axis=1), axis=0, ddof=1) / math.sqrt(along.shape[0])
        errors = jnp.sqrt(errors**2 + own**2)
    row = jax.tree.map(lambda leaf: leaf[0], data)
    x = particles.samples[0, 0]
    like = jax.tree.map(lambda v: jnp.asarray(v, x.dtype), functional.initial(x, row))
    by_time = ours - exact
    value, per_step, error = largest(by_time, like)
    entry = jnp.argmax(jnp.abs(jnp.sum(by_time, axis=0)))
    return Found(value, per_step, words, "particles", error, errors[entry])


@eqx.filter_jit
def _estimated_phi(
    chain: LinearGaussianChain,
    paths: Float[Array, "sample time state"],
    lipschitz: Float[Array, "time"],
    key: Any,
    window: int,
) -> Float[Array, "time"]:
    """Wφ with paths in place of the exact marginals; sampling noise makes distances larger."""
    u = reach(chain.kernels.weight, lipschitz, window)
    noise = jax.random.normal(jax.random.fold_in(key, 3), paths.shape, paths.dtype)

    def distance(xs: Array, zs: Array) -> Array:
        if xs.shape[1] == 1:
            return empirical_distance(xs[:, 0], zs[:, 0])
        return gaussian_distance(sample_moments(xs), sample_moments(zs))

    def step(at: tuple) -> Array:
        kernel, later, earlier, e = at
        moved = later @ kernel.weight.T + kernel.bias[None] + e @ kernel.scale_tril.T
        return distance(moved, earlier)

    by_time = jnp.swapaxes(paths, 0, 1)
    rows = (chain.kernels, by_time[1:], by_time[:-1], jnp.swapaxes(noise[:, :-1], 0, 1))
    steps = jax.lax.map(step, rows)
    last = chain.terminal
    ends = last.mean[None] + noise[:, -1] @ last.scale_tril.T
    return jnp.append(steps, distance(ends, by_time[-1])) * u
