"""Theorem 4: errors of Lipschitz functionals of linear-Gaussian chains, by Wasserstein distances.

The law of a path changes from q to the exact posterior φ one factor at a time. Two neighbouring
laws differ by one distance, times a Lipschitz constant that decays through the gains of the kernels
around it. Every function returns the contribution of each time to

    |E_q h − E_φ h|,   h = h_0(x_0) + Σ_{k≥1} h_k(x_{k-1}, x_k).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict._chains import LinearGaussianChain
from retrodict._model import Gaussian, LinearGaussianKernel
from retrodict._numerics import GaussianLaw, linalg, predict, reverse
from retrodict.bounds.distances import gaussian_distance, root_distance
from retrodict.bounds.lipschitz import (
    Sensitivity,
    forward_lipschitz_sums,
    lipschitz_sums,
    transport_terms,
)

distances = jax.vmap(gaussian_distance)


class ExactPosterior(NamedTuple):
    """The exact posterior of a linear-Gaussian model, as the bounds read it.

    Attributes:
        chain: the posterior.
        marginals: φ_{k|n}, its marginal laws.
        forward: F_k, the laws of x_{k+1} given x_k and the whole series.
    """

    chain: LinearGaussianChain
    marginals: Gaussian
    forward: LinearGaussianKernel


@eqx.filter_jit
def exact_posterior(chain: LinearGaussianChain) -> ExactPosterior:
    """Compute the marginals and the forward kernels of an exact posterior."""
    marginals = chain.marginals()

    def forward(law: Gaussian, kernel: LinearGaussianKernel) -> LinearGaussianKernel:
        before = GaussianLaw(law.mean, law.scale_tril)
        return LinearGaussianKernel(*reverse(before, kernel.weight, kernel.bias, kernel.scale_tril))

    return ExactPosterior(chain, marginals, jax.vmap(forward)(_later(marginals), chain.kernels))


@jax.vmap
def _predict(law: Gaussian, kernel: LinearGaussianKernel) -> Gaussian:
    """Return the laws of G x + c + s ε for x of Gaussian laws."""
    before = GaussianLaw(law.mean, law.scale_tril)
    return Gaussian(*predict(before, kernel.weight, kernel.bias, kernel.scale_tril))


def _row(laws: Gaussian, index: int) -> Gaussian:
    return jax.tree.map(lambda leaf: leaf[index], laws)


def _earlier(laws: Gaussian) -> Gaussian:
    return jax.tree.map(lambda leaf: leaf[:-1], laws)


def _later(laws: Gaussian) -> Gaussian:
    return jax.tree.map(lambda leaf: leaf[1:], laws)


@eqx.filter_jit
def phi(
    chain: LinearGaussianChain, exact: ExactPosterior, sensitivity: Sensitivity, window: int
) -> Float[Array, "time"]:
    """Return the terms of Wφ: the variational kernels under the exact marginals.

        W(q_{n-1}, φ_{n-1}) u_{n-1} + Σ_{j<n-1} W(φ_{j+1|n} q_{j|j+1}, φ_{j|n}) u_j

    with u of the variational gains. For a functional of pairs the sum is of
    E_{φ_{j+1|n}} W(q_{j|j+1}(X, ·), b_j(X, ·)) (u_j + Lip₁ h_{j+1}), with the exact kernels b.
    """
    later = _later(exact.marginals)
    by_marginals = distances(_predict(later, chain.kernels), _earlier(exact.marginals))
    by_kernels = jax.vmap(_kernel_distance)(later, chain.kernels, exact.chain.kernels)
    steps = jnp.where(sensitivity.before[1:] > 0, by_kernels, by_marginals)
    steps = jnp.append(steps, gaussian_distance(chain.terminal, exact.chain.terminal))
    return transport_terms(steps, chain.kernels.weight, sensitivity, window)


def _kernel_distance(law: Gaussian, q: LinearGaussianKernel, b: LinearGaussianKernel) -> Array:
    """Return (E W₂²(q(X, ·), b(X, ·)))^½ for X of the law, at least the mean distance."""
    difference = q.weight - b.weight
    shift = linalg.matvec(difference, law.mean) + q.bias - b.bias
    spread = linalg.matmul(difference, law.scale_tril)
    noise = root_distance(q.scale_tril, b.scale_tril)
    return jnp.sqrt(jnp.sum(shift**2) + jnp.sum(spread**2) + noise**2)


@eqx.filter_jit
def divergence(chain: LinearGaussianChain, exact: ExactPosterior) -> Scalar:
    """Return KL(q ‖ φ), the evidence minus the ELBO, as a sum of nonnegative terms.

        KL(q_{n-1} ‖ φ_{n-1}) + Σ_j E_{q_{j+1|n}} KL(q_{j|j+1}(X, ·) ‖ b_j(X, ·))

    For a chain close to the posterior, the difference of evidence and ELBO would be rounding error.
    """

    def step(law: Gaussian, q: LinearGaussianKernel, b: LinearGaussianKernel) -> Array:
        gain = linalg.solve_triangular(b.scale_tril, q.weight - b.weight)
        shift = linalg.matvec(gain, law.mean)
        shift = shift + linalg.solve_triangular(b.scale_tril, q.bias - b.bias)
        spread = linalg.matmul(gain, law.scale_tril)
        squares = jnp.sum(shift**2) + jnp.sum(spread**2)
        return 0.5 * squares + _divergence_of_scales(q.scale_tril, b.scale_tril)

    q, p = chain.terminal, exact.chain.terminal
    shift = linalg.solve_triangular(p.scale_tril, q.mean - p.mean)
    last = 0.5 * jnp.sum(shift**2) + _divergence_of_scales(q.scale_tril, p.scale_tril)
    return last + jnp.sum(
        jax.vmap(step)(_later(chain.marginals()), chain.kernels, exact.chain.kernels)
    )


def _divergence_of_scales(s: Float[Array, "d d"], t: Float[Array, "d d"]) -> Array:
    """Return KL of two centred Gaussian laws: squares, and terms e − log(1 + e)."""
    ratio = linalg.solve_triangular(t, s)
    pivots = jnp.diagonal(ratio)
    excess = (jnp.abs(pivots) - 1.0) * (jnp.abs(pivots) + 1.0)
    below = jnp.sum(ratio**2) - jnp.sum(pivots**2)
    return 0.5 * (jnp.maximum(below, 0.0) + jnp.sum(excess - jnp.log1p(excess)))


@eqx.filter_jit
def backward(
    chain: LinearGaussianChain, exact: ExactPosterior, lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Return the terms of Wb: the exact kernels under the variational marginals.

        W(q_{n-1}, φ_{n-1}) u_{n-1} + Σ_{j<n-1} W(q_{j+1|n} b_j, q_{j|n}) u_j

    with u of the exact backward gains.
    """
    kernels, marginals = exact.chain.kernels, chain.marginals()
    u = lipschitz_sums(kernels.weight, lipschitz, window)
    steps = distances(_predict(_later(marginals), kernels), _earlier(marginals))
    return jnp.append(steps, gaussian_distance(chain.terminal, exact.chain.terminal)) * u


@eqx.filter_jit
def forward(
    chain: LinearGaussianChain, exact: ExactPosterior, lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Return the terms of Wq: the exact forward kernels under the variational marginals.

        W(q_{0|n}, φ_{0|n}) v_0 + Σ_{j<n-1} W(q_{j|n} F_j, q_{j+1|n}) v_{j+1}

    with v of the forward gains.
    """
    v = forward_lipschitz_sums(exact.forward.weight, lipschitz, window)
    marginals = chain.marginals()
    steps = distances(_predict(_earlier(marginals), exact.forward), _later(marginals))
    first = gaussian_distance(_row(marginals, 0), _row(exact.marginals, 0))
    return jnp.concatenate([first[None], steps]) * v


@eqx.filter_jit
def auxiliary(
    chain: LinearGaussianChain, exact: ExactPosterior, lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Return the terms of WA: the proof of the paper, through the filtering laws q_k of the chain.

        W(t_0, φ_{0|n}) v_0
            + Σ_{m≥1} W(t_m q_{m-1|m}, t_{m-1}) u_{m-1} + W(t_m, t_{m-1} F_{m-1}) v_m

    where t_m ∝ q_m β_m, with β_m(x) the likelihood of the observations after time m given x_m = x.
    """
    u = lipschitz_sums(chain.kernels.weight, lipschitz, window)
    v = forward_lipschitz_sums(exact.forward.weight, lipschitz, window)
    tilted = jax.vmap(_tilt)(chain.laws, exact.chain.laws, exact.marginals)
    # The bound holds for any laws t whose last one is q_{n-1}, so rounding in the others is safe.
    tilted = jax.tree.map(lambda ts, last: ts.at[-1].set(last), tilted, chain.terminal)
    back = distances(_predict(_later(tilted), chain.kernels), _earlier(tilted))
    on = distances(_later(tilted), _predict(_earlier(tilted), exact.forward))
    first = gaussian_distance(_row(tilted, 0), _row(exact.marginals, 0))
    return jnp.concatenate([(first * v[0])[None], back * u[:-1] + on * v[1:]])


def _tilt(law: Gaussian, filtered: Gaussian, smoothed: Gaussian) -> Gaussian:
    """Return the law ∝ q_m β_m, where β_m ∝ φ_{m|n} / φ_m is Gaussian in x."""
    q, ahead, before = law.to_natural(), smoothed.to_natural(), filtered.to_natural()
    precision = q.precision + (ahead.precision - before.precision)
    shift = q.precision_mean + (ahead.precision_mean - before.precision_mean)
    return type(q)(shift, 0.5 * (precision + precision.T)).to_moments()
