"""Theorem 4: errors of Lipschitz functionals of linear-Gaussian chains, by Wasserstein distances.

The law of a path is turned from q into the exact posterior φ one factor at a time. What stands
between two neighbouring laws is one distance, times a Lipschitz constant that decays through the
gains of the kernels around it. Every function returns what each time contributes to

    |E_q h − E_φ h|,   h = h_0(x_0) + Σ_{k≥1} h_k(x_{k-1}, x_k).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._chains import LinearGaussianChain
from retrodict._expectations import Variation
from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import Gaussian
from retrodict._numerics import linalg
from retrodict._types import Scalar
from retrodict.bounds.distances import gaussian_distance, norms, root_distance
from retrodict.bounds.gains import reach, reach_forward


class Sensitivity(NamedTuple):
    """Lipschitz constants of an additive functional, time by time.

    Attributes:
        before: of h_k in x_{k-1}; zero at time 0.
        now: of h_k in x_k.
    """

    before: Float[Array, "time"]
    now: Float[Array, "time"]

    @classmethod
    def of(cls, first: Variation, later: Variation, num_times: int) -> "Sensitivity":
        """The constants of a functional that is the same at all times but the first."""
        before = jnp.full(num_times, later.before).at[0].set(0.0)
        return cls(before, jnp.full(num_times, later.now).at[0].set(first.now))

    def whole(self) -> Float[Array, "time"]:
        """Of the whole functional in each state: x_k stands in h_k and in h_{k+1}."""
        return self.now + jnp.append(self.before[1:], 0.0)


class Reference(NamedTuple):
    """The exact posterior of a linear-Gaussian model, with what bounds need of it.

    Attributes:
        chain: the posterior.
        marginals: φ_{k|n}, its marginal laws.
        forward: F_k, the laws of x_{k+1} given x_k and the whole series.
    """

    chain: LinearGaussianChain
    marginals: Gaussian
    forward: LinearGaussianKernel


@eqx.filter_jit
def reference_of(chain: LinearGaussianChain) -> Reference:
    """What bounds need of an exact posterior."""
    marginals = chain.marginals()
    later = jax.tree.map(lambda leaf: leaf[1:], marginals)
    return Reference(chain, marginals, jax.vmap(reverse)(later, chain.kernels))


def push(law: Gaussian, kernel: LinearGaussianKernel) -> Gaussian:
    """The law of G x + c + s ε for x of a Gaussian law."""
    moved = linalg.matmul(kernel.weight, law.scale_tril)
    scale = linalg.tria(jnp.concatenate([moved, kernel.scale_tril], axis=1))
    return Gaussian(linalg.matvec(kernel.weight, law.mean) + kernel.bias, scale)


def reverse(law: Gaussian, kernel: LinearGaussianKernel) -> LinearGaussianKernel:
    """The kernel of x given z = G x + c + s ε, for x of a Gaussian law N(m, S Sᵀ).

    The rows of [G S, s; S, 0] are z and x in independent standard normal variables. Made lower
    triangular, [l, 0; r, t], they give the gain r l⁻¹ and the scale t.
    """
    d = law.dim
    moved = linalg.matmul(kernel.weight, law.scale_tril)
    joint = jnp.concatenate(
        [
            jnp.concatenate([moved, kernel.scale_tril], axis=1),
            jnp.concatenate([law.scale_tril, jnp.zeros_like(law.scale_tril)], axis=1),
        ]
    )
    factor = linalg.tria(joint)
    gain = linalg.solve_triangular(factor[:d, :d], factor[d:, :d].T, transpose=True).T
    seen = linalg.matvec(kernel.weight, law.mean) + kernel.bias
    return LinearGaussianKernel(gain, law.mean - linalg.matvec(gain, seen), factor[d:, d:])


@eqx.filter_jit
def phi(
    chain: LinearGaussianChain, reference: Reference, sensitivity: Sensitivity, window: int
) -> Float[Array, "time"]:
    """Wφ: the variational kernels, put to the test under the exact marginals.

        W(q_{n-1}, φ_{n-1}) u_{n-1} + Σ_{j<n-1} W(φ_{j+1|n} q_{j|j+1}, φ_{j|n}) u_j

    with u of the variational gains. For a functional of pairs the sum is of
    E_{φ_{j+1|n}} W(q_{j|j+1}(X, ·), b_j(X, ·)) (u_j + Lip₁ h_{j+1}), with the exact kernels b.
    """
    gains = chain.kernels.weight
    own = sensitivity.now + jnp.append(0.0, norms(gains)) * sensitivity.before
    u = reach(gains, own, window)
    later = jax.tree.map(lambda leaf: leaf[1:], reference.marginals)
    earlier = jax.tree.map(lambda leaf: leaf[:-1], reference.marginals)
    by_marginals = jax.vmap(gaussian_distance)(jax.vmap(push)(later, chain.kernels), earlier)
    by_kernels = jax.vmap(_kernel_distance)(later, chain.kernels, reference.chain.kernels)
    before = sensitivity.before[1:]
    steps = jnp.where(before > 0, by_kernels * (u[:-1] + before), by_marginals * u[:-1])
    terminal = gaussian_distance(chain.terminal, reference.chain.terminal)
    return jnp.append(steps, terminal * u[-1])


def _kernel_distance(law: Gaussian, q: LinearGaussianKernel, b: LinearGaussianKernel) -> Array:
    """(E W₂²(q(X, ·), b(X, ·)))^½ for X of the law: at least the mean of the distances."""
    difference = q.weight - b.weight
    shift = linalg.matvec(difference, law.mean) + q.bias - b.bias
    spread = linalg.matmul(difference, law.scale_tril)
    noise = root_distance(q.scale_tril, b.scale_tril)
    return jnp.sqrt(jnp.sum(shift**2) + jnp.sum(spread**2) + noise**2)


@eqx.filter_jit
def divergence(chain: LinearGaussianChain, reference: Reference) -> Scalar:
    """KL(q ‖ φ) = KL(q_{n-1} ‖ φ_{n-1}) + Σ_j E_{q_{j+1|n}} KL(q_{j|j+1}(X, ·) ‖ b_j(X, ·)).

    It is the evidence minus the ELBO, but as a sum of terms that are not negative: the difference
    of the two would be rounding where the chain is close.
    """
    later = jax.tree.map(lambda leaf: leaf[1:], chain.marginals())

    def step(law: Gaussian, q: LinearGaussianKernel, b: LinearGaussianKernel) -> Array:
        gain = linalg.solve_triangular(b.scale_tril, q.weight - b.weight)
        shift = linalg.matvec(gain, law.mean)
        shift = shift + linalg.solve_triangular(b.scale_tril, q.bias - b.bias)
        spread = linalg.matmul(gain, law.scale_tril)
        squares = jnp.sum(shift**2) + jnp.sum(spread**2)
        return 0.5 * squares + _divergence_of_scales(q.scale_tril, b.scale_tril)

    q, p = chain.terminal, reference.chain.terminal
    shift = linalg.solve_triangular(p.scale_tril, q.mean - p.mean)
    last = 0.5 * jnp.sum(shift**2) + _divergence_of_scales(q.scale_tril, p.scale_tril)
    return last + jnp.sum(jax.vmap(step)(later, chain.kernels, reference.chain.kernels))


def _divergence_of_scales(s: Float[Array, "d d"], t: Float[Array, "d d"]) -> Array:
    """KL of two centred Gaussian laws with these factors: squares, and terms e − log(1 + e)."""
    ratio = linalg.solve_triangular(t, s)
    pivots = jnp.diagonal(ratio)
    excess = (jnp.abs(pivots) - 1.0) * (jnp.abs(pivots) + 1.0)
    below = jnp.sum(ratio**2) - jnp.sum(pivots**2)
    return 0.5 * (jnp.maximum(below, 0.0) + jnp.sum(excess - jnp.log1p(excess)))


@eqx.filter_jit
def backward(
    chain: LinearGaussianChain, reference: Reference, lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Wb: the exact kernels, put to the test under the variational marginals.

        W(q_{n-1}, φ_{n-1}) u_{n-1} + Σ_{j<n-1} W(q_{j+1|n} b_j, q_{j|n}) u_j

    with u of the exact backward gains.
    """
    exact = reference.chain
    u = reach(exact.kernels.weight, lipschitz, window)
    marginals = chain.marginals()
    later = jax.tree.map(lambda leaf: leaf[1:], marginals)
    earlier = jax.tree.map(lambda leaf: leaf[:-1], marginals)
    steps = jax.vmap(gaussian_distance)(jax.vmap(push)(later, exact.kernels), earlier)
    terminal = gaussian_distance(chain.terminal, exact.terminal)
    return jnp.append(steps, terminal) * u


@eqx.filter_jit
def forward(
    chain: LinearGaussianChain, reference: Reference, lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """Wq: the exact forward kernels, put to the test under the variational marginals.

        W(q_{0|n}, φ_{0|n}) v_0 + Σ_{j<n-1} W(q_{j|n} F_j, q_{j+1|n}) v_{j+1}

    with v of the forward gains.
    """
    v = reach_forward(reference.forward.weight, lipschitz, window)
    marginals = chain.marginals()
    later = jax.tree.map(lambda leaf: leaf[1:], marginals)
    earlier = jax.tree.map(lambda leaf: leaf[:-1], marginals)
    steps = jax.vmap(gaussian_distance)(jax.vmap(push)(earlier, reference.forward), later)
    first = gaussian_distance(
        *(jax.tree.map(lambda leaf: leaf[0], law) for law in (marginals, reference.marginals))
    )
    return jnp.concatenate([first[None], steps]) * v


@eqx.filter_jit
def auxiliary(
    chain: LinearGaussianChain, reference: Reference, lipschitz: Float[Array, "time"], window: int
) -> Float[Array, "time"]:
    """WA: the paper's own route, through the filtering laws q_k of the chain.

        W(t_0, φ_{0|n}) v_0
            + Σ_{m≥1} W(t_m q_{m-1|m}, t_{m-1}) u_{m-1} + W(t_m, t_{m-1} F_{m-1}) v_m

    where t_m ∝ q_m β_m, with β_m(x) the likelihood of what comes after time m given x_m = x.
    """
    u = reach(chain.kernels.weight, lipschitz, window)
    v = reach_forward(reference.forward.weight, lipschitz, window)
    tilted = jax.vmap(_tilt)(chain.laws, reference.chain.laws, reference.marginals)
    # t may be any laws if the last is q_{n-1}: so is what rounding makes of the others.
    tilted = jax.tree.map(lambda ts, last: ts.at[-1].set(last), tilted, chain.terminal)
    later = jax.tree.map(lambda leaf: leaf[1:], tilted)
    earlier = jax.tree.map(lambda leaf: leaf[:-1], tilted)
    back = jax.vmap(gaussian_distance)(jax.vmap(push)(later, chain.kernels), earlier)
    on = jax.vmap(gaussian_distance)(later, jax.vmap(push)(earlier, reference.forward))
    first = gaussian_distance(
        *(jax.tree.map(lambda leaf: leaf[0], law) for law in (tilted, reference.marginals))
    )
    return jnp.concatenate([(first * v[0])[None], back * u[:-1] + on * v[1:]])


def _tilt(law: Gaussian, filtered: Gaussian, smoothed: Gaussian) -> Gaussian:
    """The law ∝ q_m β_m, where β_m ∝ φ_{m|n} / φ_m is Gaussian in x."""
    own, ahead, before = law.to_natural(), smoothed.to_natural(), filtered.to_natural()
    precision = own.precision + (ahead.precision - before.precision)
    shift = own.precision_mean + (ahead.precision_mean - before.precision_mean)
    return type(own)(shift, 0.5 * (precision + precision.T)).to_moments()
