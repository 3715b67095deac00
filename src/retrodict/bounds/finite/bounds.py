"""The bounds on a finite space: Theorems 1, 2 and 3, and Proposition 3.1 as printed."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._arrays import Scalar
from retrodict.bounds.finite.coefficients import (
    IncrementSizes,
    future_oscillations,
    future_sums,
    oscillation,
    past_oscillations,
    past_sums,
    sizes_of,
    total_variation,
)
from retrodict.bounds.finite.problem import FiniteProblem
from retrodict.bounds.finite.quantities import (
    Exact,
    FiniteQuantities,
    chain_marginals,
    check_measure,
    exact_posterior,
    pairs_ahead,
    pairs_back,
    quantities_of,
)
from retrodict.bounds.lipschitz import decayed_sums

RIGOROUS = (
    "s1",
    "s2",
    "s2_phi",
    "s2_q",
    "s3",
    "classical",
    "classical_birkhoff",
    "final_display",
    "elbo_gap",
    "elbo_gap_birkhoff",
)
"""The fields of `FiniteBounds` that are proved to be bounds; `printed_proposition` is not."""


class FiniteContributions(NamedTuple):
    """Terms whose sums are the error and its bounds.

    Attributes:
        error: the error of each increment, q h_k - φ h_k.
        identity: the terms of Theorem 1, one for each change of kernel, m = 0, ..., n-1.
        s1: the terms of S1, for m = 0, ..., n-1.
        s2: those of S2.
        s2_phi: those of S2φ, for j = 0, ..., n-2, and last the one of the terminal law.
        s2_q: first the term of S2q of the law of x_0, then those for j = 0, ..., n-2.
        s3: the terms of S3, for m = 0, ..., n-1.
        classical: the terms of Theorem 2 with ρ, one for each increment.
        classical_birkhoff: those with ρ̄.
        printed_proposition: the printed terms, one for each increment.
    """

    error: Float[Array, "pair"]
    identity: Float[Array, "time"]
    s1: Float[Array, "time"]
    s2: Float[Array, "time"]
    s2_phi: Float[Array, "time"]
    s2_q: Float[Array, "time"]
    s3: Float[Array, "time"]
    classical: Float[Array, "pair"]
    classical_birkhoff: Float[Array, "pair"]
    printed_proposition: Float[Array, "pair"]


class FiniteBounds(NamedTuple):
    """An error, and every bound on its absolute value.

    All are rigorous, up to rounding, but for `printed_proposition`. Those of `s1` to `s2_q` need
    the exact posterior, `elbo_gap` as well for v, `elbo_gap_birkhoff` needs log p(y) alone, and
    `s3` and the classical ones need neither.

    Example:
        >>> import retrodict as rd
        >>> bounds = rd.bounds.finite_bounds(rd.bounds.two_state_counterexample())
        >>> f"error {float(bounds.error):.3f}, sharpest bound {float(bounds.s1):.3f}"
        'error 0.100, sharpest bound 0.100'

    Attributes:
        error: q h - φ h, exact and signed.
        identity: the same number as the sum of Theorem 1, Σ_m (Π_m - Π'_m) H_m.
        s1: S1 of Theorem 1, Σ_m τ_m osc(H_m).
        s2: S2, τ_0 v_0 + Σ_{m≥1} τ_m (u_{m-1} + osc h_{m-1} + v_m).
        s2_phi: S2φ, TV(q_{n-1}, φ_{n-1}) u_{n-1}
            + Σ_j E_{φ_{j+1|n}} TV(q_{j|j+1}, b_j) (u_j + sup_y osc h_j(·, y)).
        s2_q: S2q, TV(q_{0|n}, φ_{0|n}) v_0
            + Σ_j TV(q_{j:j+1}, q_{j|n} ⊗ F_j) (v_{j+1} + sup_x osc h_j(x, ·)).
        s3: S3, which is S2 with I(B_m, c_m / 2) for τ_m and ϑ_j for δ(F_j).
        classical: Theorem 2 with ρ = 1 - σ₋/σ₊; with its improved exponents where an
            increment depends on one state only. Infinite where H2 fails.
        classical_birkhoff: Theorem 2 with ρ̄ = (σ₊ - σ₋) / (σ₊ + σ₋).
        printed_proposition: Proposition 3.1 of the paper as printed, for comparison. It is false
            for some model at every ρ < ½, and so is not a bound.
        final_display: 4 (σ₊/σ₋)² max_m c_m max_k ‖h_k‖ (n - 1), the display after it, which holds.
        elbo_gap: Theorem 3, [½ (log p(y) - ELBO) Σ_j D_j²]^½ with D_0 = v_0 and
            D_j = sup_x osc h_{j-1}(x, ·) + v_j.
        elbo_gap_birkhoff: Theorem 3 with ϑ_j for δ(F_j) in v.
        contributions: the terms of the sums.
        quantities: the constants and coefficients of the bounds.
    """

    error: Scalar
    identity: Scalar
    s1: Scalar
    s2: Scalar
    s2_phi: Scalar
    s2_q: Scalar
    s3: Scalar
    classical: Scalar
    classical_birkhoff: Scalar
    printed_proposition: Scalar
    final_display: Scalar
    elbo_gap: Scalar
    elbo_gap_birkhoff: Scalar
    contributions: FiniteContributions
    quantities: FiniteQuantities


def finite_bounds(
    problem: FiniteProblem, *, measure: Float[Array, "state"] | None = None
) -> FiniteBounds:
    """Compute the exact error of a backward chain on an additive functional, and its bounds.

    Costs O(n S³) operations and O(n S²) memory; for many problems of one shape, `jax.vmap`. Where
    the observations are impossible under the model there is no posterior, and the error is NaN.

    Example:
        >>> import retrodict as rd
        >>> bounds = rd.bounds.finite_bounds(rd.bounds.two_state_counterexample())
        >>> [f"{float(bound):.3f}" for bound in (bounds.error, bounds.s2, bounds.classical)]
        ['0.100', '0.100', '0.122']

    Args:
        problem: the model, the chain and the functional.
        measure: the measure that the densities of H2 refer to; `None` counts states. Only the
            classical bounds depend on it.
    """
    if measure is not None:
        check_measure(problem, measure)
    return _finite_bounds(problem, measure)


@jax.jit
def _finite_bounds(problem: FiniteProblem, measure: Array | None) -> FiniteBounds:
    dtype = jnp.result_type(*jax.tree.leaves(problem))
    problem = jax.tree.map(lambda array: array.astype(dtype), problem)
    exact, marginals = exact_posterior(problem), chain_marginals(problem)
    quantities, tilts = quantities_of(problem, exact, marginals, measure)
    sizes = sizes_of(problem.functional)
    u = past_oscillations(quantities.kernel_dobrushin, sizes)
    both = jnp.stack([quantities.forward_dobrushin, quantities.birkhoff])
    v, v_birkhoff = jax.vmap(future_oscillations, (0, None))(both, sizes)
    change, size = _identity_terms(problem, exact, tilts)
    h1, ratio = quantities.h1, sigma_ratio(quantities)
    rhos = jnp.stack([1.0 - 1.0 / ratio, (1.0 - 1.0 / ratio) / (1.0 + 1.0 / ratio)])
    sums = jax.vmap(discounted_sums, (None, 0))(h1, rhos)
    classical, sharper = jax.vmap(theorem2_terms, (None, None, 0, 0, None))(
        h1, ratio, rhos, sums, sizes
    )
    terms = FiniteContributions(
        error=_error_terms(problem, exact, marginals),
        identity=change,
        s1=quantities.tilted * size,
        s2=_s2_terms(quantities.tilted, u, v, sizes),
        s2_phi=_s2_phi_terms(problem, exact, u, sizes),
        s2_q=_s2_q_terms(problem, exact, marginals, v, sizes),
        s3=_s2_terms(quantities.tilted_bound, u, v_birkhoff, sizes),
        classical=classical,
        classical_birkhoff=sharper,
        printed_proposition=printed_proposition_terms(
            h1, ratio, rhos[0], sums[0], problem.functional
        ),
    )
    gap = quantities.evidence_gap
    return FiniteBounds(
        **{name: jnp.sum(value) for name, value in terms._asdict().items()},
        final_display=final_display(h1, ratio, problem.functional),
        elbo_gap=_elbo_gap_bound(gap, v, sizes),
        elbo_gap_birkhoff=_elbo_gap_bound(gap, v_birkhoff, sizes),
        contributions=terms,
        quantities=quantities,
    )


def _error_terms(problem: FiniteProblem, exact: Exact, marginals: Array) -> Array:
    """Return the errors (q_{k:k+1} - φ_{k:k+1|n}) h_k of the increments."""
    ours = pairs_back(marginals, problem.kernels)
    truth = pairs_ahead(exact.smoothed, exact.forward)
    return jnp.sum((ours - truth) * problem.functional, axis=(1, 2))


def _identity_terms(problem: FiniteProblem, exact: Exact, tilts: Array) -> tuple[Array, Array]:
    """Return the terms (Π_m - Π'_m) H_m of Theorem 1, and osc(H_m).

    H_0 = V_0 and H_m(x, y) = U_{m-1}(x) + h_{m-1}(x, y) + V_m(y); Π_0 = t_0, Π'_0 = φ_{0|n} and
    Π_m = t_m ⊗ q_{m-1|m}, Π'_m = t_{m-1} ⊗ F_{m-1}.
    """
    past = past_sums(problem.kernels, problem.functional)
    future = future_sums(exact.forward, problem.functional)
    integrands = past[:-1, :, None] + problem.functional + future[1:, None, :]
    change = pairs_back(tilts, problem.kernels) - pairs_ahead(tilts, exact.forward)
    start = jnp.sum((tilts[0] - exact.smoothed[0]) * future[0])
    terms = jnp.concatenate([start[None], jnp.sum(change * integrands, axis=(1, 2))])
    size = jnp.concatenate([oscillation(future[0])[None], jax.vmap(oscillation)(integrands)])
    return terms, size


def _s2_terms(distances: Array, u: Array, v: Array, sizes: IncrementSizes) -> Array:
    """Return τ_0 v_0, then τ_m (u_{m-1} + osc h_{m-1} + v_m): S2, or S3 with its τ and v."""
    return distances * jnp.concatenate([v[:1], u[:-1] + sizes.both + v[1:]])


def _s2_phi_terms(problem: FiniteProblem, exact: Exact, u: Array, sizes: IncrementSizes) -> Array:
    """Return the terms of S2φ, that of the terminal law last.

        E_{φ_{j+1|n}} TV(q_{j|j+1}(x, ·), b_j(x, ·)) (u_j + o1_j),   TV(q, φ) u at the last time

    Theorem 1 with t = φ_{·|n}: both pair laws have the same law of x_m, so that V_m drops out.
    """
    local = jax.vmap(jax.vmap(total_variation))(problem.kernels, exact.backward)
    mean = jnp.sum(exact.smoothed[1:] * local, axis=1)
    last = total_variation(problem.terminal, exact.filtered[-1]) * u[-1]
    return jnp.concatenate([mean * (u[:-1] + sizes.first), last[None]])


def _s2_q_terms(
    problem: FiniteProblem, exact: Exact, marginals: Array, v: Array, sizes: IncrementSizes
) -> Array:
    """Return the terms of S2q, that of the law of x_0 first.

        TV(q_{0|n}, φ_{0|n}) v_0,   TV(q_{j:j+1}, q_{j|n} ⊗ F_j) (v_{j+1} + o2_j)

    Theorem 1 with t = q_{·|n}: both pair laws have the same law of x_{m-1}, and U drops out.
    """
    ours = pairs_back(marginals, problem.kernels)
    local = jax.vmap(total_variation)(ours, pairs_ahead(marginals, exact.forward))
    start = total_variation(marginals[0], exact.smoothed[0]) * v[0]
    return jnp.concatenate([start[None], local * (v[1:] + sizes.second)])


def _elbo_gap_bound(gap: Scalar, v: Array, sizes: IncrementSizes) -> Scalar:
    """Evaluate Theorem 3, [½ gap Σ_j D_j²]^½ with D_0 = v_0 and D_j = o2_{j-1} + v_j."""
    ranges = jnp.concatenate([v[:1], sizes.second + v[1:]])
    total = jnp.sum(ranges**2)
    # A constant functional has no error, however large the gap.
    return jnp.where(total > 0, jnp.sqrt(0.5 * gap * jnp.where(total > 0, total, 1.0)), 0.0)


def sigma_ratio(quantities: FiniteQuantities) -> Scalar:
    """Return r = σ₊ / σ₋, infinite where H2 fails."""
    low = quantities.sigma_minus
    return jnp.where(low > 0, quantities.sigma_plus / jnp.where(low > 0, low, 1.0), jnp.inf)


def _scaled(values: Array, ratio: Scalar) -> Array:
    """Return the values times the ratio; infinite if it is, where 0 · ∞ would be NaN."""
    infinite = jnp.isinf(ratio)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 1.0, ratio) * values)


def discounted_sums(h1: Float[Array, "time"], rho: Scalar) -> Float[Array, "2 pair"]:
    """Return discounted sums of the c_m of H1 before and after each increment k.

    Σ_{m≤k} ρ^{k-m} c_m,   Σ_{m≥k+2} ρ^{m-k-2} c_m
    """
    # With time reversed the last constant enters the second sum first; nothing is after the last
    # increment but one.
    reversed_later = jnp.concatenate([jnp.zeros_like(h1[:1]), h1[:1:-1]])
    rows = jnp.stack([h1[:-1], reversed_later])
    before, after = jax.vmap(decayed_sums, (None, 0))(jnp.full_like(h1[2:], rho), rows)
    return jnp.stack([before, after[::-1]])


def theorem2_terms(
    h1: Array, ratio: Scalar, rho: Scalar, sums: Float[Array, "2 pair"], sizes: IncrementSizes
) -> Array:
    """Return the terms of Theorem 2, under H1 and H2, one per increment.

        (r / 2) osc(h_k) [Σ_{m≤k} ρ^{k-m} c_m + c_{k+1} + Σ_{m≥k+2} ρ^{m-k-2} c_m],   r = σ₊/σ₋

    An increment that depends on x_k only gains a factor ρ in the last sum, one that depends on
    x_{k+1} only gains one in the first. ρ is 1 - 1/r, or the smaller (r - 1) / (r + 1).
    """
    before = sums[0] * jnp.where(sizes.first > 0, 1.0, rho)
    after = sums[1] * jnp.where(sizes.second > 0, 1.0, rho)
    return _scaled(0.5 * sizes.both * (before + h1[1:] + after), ratio)


def printed_proposition_terms(
    h1: Array, ratio: Scalar, rho: Scalar, sums: Float[Array, "2 pair"], functional: Array
) -> Array:
    """Return the terms of Proposition 3.1 as printed, which do not sum to a bound if ρ < ½.

    2 r ‖h_k‖ [c_0 + Σ_{1≤m≤k} ρ^{k-m+1} c_m + c_{k+1} + Σ_{m≥k+2} ρ^{m-k-1} c_m], ρ = 1 - 1/r.
    """
    norms = jnp.max(jnp.abs(functional), axis=(1, 2))
    start = h1[0] * rho ** jnp.arange(len(norms))
    before = h1[0] + rho * (sums[0] - start)
    return _scaled(2.0 * norms * (before + h1[1:] + rho * sums[1]), ratio)


def final_display(h1: Array, ratio: Scalar, functional: Array) -> Scalar:
    """Return 4 r (1 + ρ / (1 - ρ)) c₊ h_∞ (n - 1), ρ = 1 - 1/r, so that the constant is 4 r²."""
    total = jnp.max(h1) * jnp.max(jnp.abs(functional)) * functional.shape[0]
    return _scaled(4.0 * total, ratio**2)
