"""Error bounds on a finite state space, where every quantity of the theory is a sum.

The state takes values 0, ..., S-1 at times 0, ..., n-1. The model gives χ(x) g_0(x) and the kernels
L_k(x, y) = m_k(x, y) g_{k+1}(y); the approximation is a terminal law q_{n-1} and backward kernels
q_{k|k+1}. What is bounded is the error on an additive functional,

    q h - φ h,   h(x_{0:n-1}) = Σ_k h_k(x_k, x_{k+1}),

with φ the law of the states given the observations. The page on theory has statements and proofs.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._types import ArrayLike, Scalar
from retrodict._validate import as_real_array, check_finite, is_concrete

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


# -------------------------------------------------------------------------------------------------
# Distances between laws, and how much a kernel forgets.
# -------------------------------------------------------------------------------------------------


def total_variation(p: Float[Array, "*shape"], q: Float[Array, "*shape"]) -> Scalar:
    """The distance TV(p, q) = ½ Σ |p - q| of two laws, between 0 and 1; H1's c is twice as much.

    Args:
        p: probabilities, of any shape: a table is the law of a pair.
        q: probabilities, of the same shape.
    """
    return jnp.minimum(0.5 * jnp.sum(jnp.abs(p - q)), 1.0)


def oscillation(h: Float[Array, "*shape"]) -> Scalar:
    """The oscillation osc(h) = max h - min h of a function, given by its values."""
    return jnp.max(h) - jnp.min(h)


def dobrushin(kernel: Float[Array, "from to"]) -> Scalar:
    """The Dobrushin coefficient of a Markov kernel, its greatest contraction of oscillations.

        δ(K) = max_{x, x'} TV(K(x, ·), K(x', ·)),   osc(K f) ≤ δ(K) osc(f)

    Args:
        kernel: K(x, y), each row summing to 1.
    """

    # One row against all others at a time: a table of all pairs of rows would have S³ entries.
    def farthest(row: Array) -> Array:
        return jnp.max(jnp.sum(jnp.abs(kernel - row[None, :]), axis=1))

    return jnp.minimum(0.5 * jnp.max(jax.lax.map(farthest, kernel)), 1.0)


def birkhoff(transition: Float[Array, "from to"]) -> tuple[Scalar, Scalar]:
    """The contraction ϑ = tanh(Δ/4) of a transition, and the ratio B, of Lemma 3.

        Δ = log max m(x, y) m(x', y') / (m(x', y) m(x, y')),   B = max m(x, y) / m(x', y)

    ϑ bounds the Dobrushin coefficients of every forward and backward smoothing kernel that is made
    of this transition, and B the ratio β_k(x) / β_k(x'), whatever the observations. A state that is
    reached from some states and not from others makes Δ and B infinite, ϑ = 1; one that is reached
    from nowhere does not count.

    Args:
        transition: m(x, y), of any scale.

    Returns:
        ϑ and B.
    """
    reached = jnp.any(transition > 0, axis=0)
    forbidden = jnp.any(reached & jnp.any(transition <= 0, axis=0))
    log = jnp.log(jnp.where(transition > 0, transition, 1.0))

    def widest(row: Array) -> Array:
        ratio = log - row[None, :]
        high = jnp.max(jnp.where(reached[None, :], ratio, -jnp.inf), axis=1)
        low = jnp.min(jnp.where(reached[None, :], ratio, jnp.inf), axis=1)
        return jnp.max(high - low)

    diameter = jnp.max(jax.lax.map(widest, log))
    spread = jnp.max(jnp.where(reached, jnp.max(log, axis=0) - jnp.min(log, axis=0), 0.0))
    theta = jnp.where(forbidden, 1.0, jnp.tanh(0.25 * diameter))
    return theta, jnp.where(forbidden, jnp.inf, jnp.exp(spread))


def tilted_distance(ratio: Float[Array, "*m"], distance: Float[Array, "*m"]) -> Float[Array, "*m"]:
    """How far apart two laws at this distance may be once both are reweighted (Lemma 2).

        TV(βP / Pβ, βP' / P'β) ≤ I(B, ε) = B ε / (1 + (B - 1) ε),   B ≥ max β / min β, ε = TV(P, P')

    Args:
        ratio: B, which may be infinite.
        distance: ε.
    """
    # Divided by B, so that an infinite ratio gives 1 and not a NaN.
    denominator = (1.0 - distance) / ratio + distance
    return jnp.where(distance > 0, distance / jnp.where(distance > 0, denominator, 1.0), 0.0)


# -------------------------------------------------------------------------------------------------
# A model, an approximation and a functional.
# -------------------------------------------------------------------------------------------------


class FiniteProblem(eqx.Module):
    """A model on S states with its observations, a backward chain, and an additive functional.

    Args:
        initial: χ(x) g_0(x), unnormalised, of shape `(S,)`.
        potentials: L_k(x, y) = m_k(x, y) g_{k+1}(y), unnormalised, of shape `(n-1, S, S)`.
        transitions: m_k(x, y) alone, of shape `(n-1, S, S)`.
        kernels: `kernels[k, y, x]` is q_{k|k+1}(y, x), each row summing to 1, of shape
            `(n-1, S, S)`.
        filters: the auxiliary laws q̃_k of assumption H1, of shape `(n, S)`; the last one is the
            terminal law q_{n-1} of the chain.
        functional: h_k(x, y), of x_k = x and x_{k+1} = y, of shape `(n-1, S, S)`.
    """

    initial: Array
    potentials: Array
    transitions: Array
    kernels: Array
    filters: Array
    functional: Array

    def __init__(
        self,
        *,
        initial: ArrayLike,
        potentials: ArrayLike,
        transitions: ArrayLike,
        kernels: ArrayLike,
        filters: ArrayLike,
        functional: ArrayLike,
    ):
        given = {
            "initial": initial,
            "potentials": potentials,
            "transitions": transitions,
            "kernels": kernels,
            "filters": filters,
            "functional": functional,
        }
        arrays = {name: as_real_array(value, name) for name, value in given.items()}
        dtype = jnp.result_type(*arrays.values())
        _check_shapes(arrays)
        _check_values(arrays)
        for name, array in arrays.items():
            setattr(self, name, array.astype(dtype))

    @classmethod
    def from_model(
        cls,
        *,
        prior: ArrayLike,
        transitions: ArrayLike,
        likelihoods: ArrayLike,
        kernels: ArrayLike,
        filters: ArrayLike,
        functional: ArrayLike,
    ) -> "FiniteProblem":
        """Builds a problem from a prior, transitions and likelihoods of the observations.

        Args:
            prior: χ(x), of shape `(S,)`.
            transitions: m_k(x, y), of shape `(n-1, S, S)`.
            likelihoods: g_k(x), of shape `(n, S)`; the scale of each row is free.
            kernels: q_{k|k+1}(y, x), of shape `(n-1, S, S)`.
            filters: q̃_k, of shape `(n, S)`.
            functional: h_k(x, y), of shape `(n-1, S, S)`.
        """
        chi, m = as_real_array(prior, "prior"), as_real_array(transitions, "transitions")
        g = as_real_array(likelihoods, "likelihoods")
        if chi.ndim != 1 or g.ndim != 2 or g.shape[1:] != chi.shape:
            raise ValueError(
                "prior must have shape (S,) and likelihoods shape (n, S), got"
                f" {chi.shape} and {g.shape}."
            )
        if m.shape != (g.shape[0] - 1, *chi.shape, *chi.shape):
            expected = (g.shape[0] - 1, *chi.shape, *chi.shape)
            raise ValueError(
                f"transitions must have shape (n-1, S, S) = {expected}, got {m.shape}."
            )
        return cls(
            initial=chi * g[0],
            potentials=m * g[1:, None, :],
            transitions=m,
            kernels=kernels,
            filters=filters,
            functional=functional,
        )

    @property
    def terminal(self) -> Float[Array, "state"]:
        """The law q_{n-1} of the last state under the chain."""
        return self.filters[-1]


def _check_shapes(arrays: dict[str, Array]) -> None:
    filters = arrays["filters"]
    if filters.ndim != 2 or filters.shape[0] < 2 or filters.shape[1] < 1:
        batch = " For a batch of problems, build them under jax.vmap." if filters.ndim == 3 else ""
        raise ValueError(
            "filters must have shape (n, S), one law for each of n ≥ 2 times, got"
            f" {filters.shape}.{batch}"
        )
    n, size = filters.shape
    for name, array in arrays.items():
        expected = {"filters": (n, size), "initial": (size,)}.get(name, (n - 1, size, size))
        words = {"filters": "(n, S)", "initial": "(S,)"}.get(name, "(n-1, S, S)")
        if array.shape != expected:
            raise ValueError(
                f"{name} must have shape {words} = {expected}, as filters has shape"
                f" {filters.shape}, got {array.shape}."
            )


def _check_values(arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        check_finite(array, name)
        if name == "functional" or not is_concrete(array):
            continue
        values = np.asarray(array)
        if (values < 0).any():
            raise ValueError(f"{name} must not be negative, got {values.min()}.")
        if name in ("kernels", "filters"):
            totals = values.sum(axis=-1)
            worst = totals.flat[np.argmax(np.abs(totals - 1.0))]
            if abs(worst - 1.0) > np.sqrt(np.finfo(values.dtype).eps):
                raise ValueError(f"Rows of {name} must sum to 1, got a sum of {worst}.")
        elif not values.reshape(len(values) if values.ndim == 3 else 1, -1).any(axis=1).all():
            raise ValueError(f"{name} must not be zero everywhere at any time.")


def two_state_counterexample(e: float = 0.05, filed: int = 0) -> FiniteProblem:
    """The smallest case in which Proposition 3.1 of the paper, as printed, does not hold.

    Three independent fair coins that observations tell nothing about; the approximation is exact,
    but for P(x_1 = 0) = ½ + e. The error on f(x_1), f = ±1, is 2e, and the printed right-hand side
    is 16 e² / (1 - 2e): smaller for every e < 1/10.

    Example:
        >>> import retrodict as rd
        >>> bounds = rd.finite_bounds(rd.two_state_counterexample())
        >>> f"{float(bounds.error):.4f} > {float(bounds.printed_proposition):.4f}"
        '0.1000 > 0.0444'

    Args:
        e: by how much the middle coin is off, between 0 and ½.
        filed: where f(x_1) is filed: 0 for h_0(x_0, x_1), with the fair coin as q̃_1, or 1 for
            h_1(x_1, x_2), with the coin of the approximation as q̃_1.
    """
    if not 0 < e < 0.5:
        raise ValueError(f"e must lie between 0 and ½, got {e}.")
    if filed not in (0, 1):
        raise ValueError(
            f"filed must be 0, for h_0(x_0, x_1), or 1, for h_1(x_1, x_2), got {filed}."
        )
    fair, biased, sign = np.full(2, 0.5), np.array([0.5 + e, 0.5 - e]), np.array([1.0, -1.0])
    functional = np.zeros((2, 2, 2))
    functional[filed] = sign[None, :] if filed == 0 else sign[:, None]
    return FiniteProblem.from_model(
        prior=fair,
        transitions=np.full((2, 2, 2), 0.5),
        likelihoods=np.ones((3, 2)),
        kernels=np.stack([np.tile(fair, (2, 1)), np.tile(biased, (2, 1))]),
        filters=np.stack([fair, fair if filed == 0 else biased, fair]),
        functional=functional,
    )


# -------------------------------------------------------------------------------------------------
# The exact posterior, and what the bounds are made of.
# -------------------------------------------------------------------------------------------------


def _dot(equation: str, *arrays: Array) -> Array:
    return jnp.einsum(equation, *arrays, precision=jax.lax.Precision.HIGHEST)


def _normalise(array: Array) -> Array:
    """Makes rows sum to 1; a row of zeros, which no law under consideration visits, is uniform."""
    total = jnp.sum(array, axis=-1, keepdims=True)
    return jnp.where(total > 0, array / jnp.where(total > 0, total, 1.0), 1.0 / array.shape[-1])


class _Exact(NamedTuple):
    """The law of the states given the observations, in both directions of time.

    Attributes:
        filtered: φ_k, the law of x_k given y_{0:k}.
        betas: β_k(x), the likelihood of what follows x_k = x, scaled to a maximum of 1.
        smoothed: φ_{k|n}, the law of x_k given everything.
        forward: F_k(x, y), the transition from x_k to x_{k+1} given everything.
        backward: b_k(y, x), the transition from x_{k+1} back to x_k.
    """

    filtered: Float[Array, "time state"]
    betas: Float[Array, "time state"]
    smoothed: Float[Array, "time state"]
    forward: Float[Array, "pair state state"]
    backward: Float[Array, "pair state state"]


def _exact(problem: FiniteProblem) -> _Exact:
    # Only ratios matter: each step is scaled to a maximum of 1, so that products never underflow.
    peaks = jnp.max(problem.potentials, axis=(1, 2), keepdims=True)
    potentials = problem.potentials / peaks

    def ahead(law: Array, potential: Array) -> tuple[Array, tuple[Array, Array]]:
        joint = law[:, None] * potential
        after = _normalise(jnp.sum(joint, axis=0))
        return after, (after, _normalise(joint.T))

    def back(beta: Array, potential: Array) -> tuple[Array, tuple[Array, Array]]:
        joint = potential * beta[None, :]
        before = jnp.sum(joint, axis=1)
        before = before / jnp.max(before)
        return before, (before, _normalise(joint))

    first, last = _normalise(problem.initial), jnp.ones_like(problem.initial)
    _, (filtered, backward) = jax.lax.scan(ahead, first, potentials)
    _, (betas, forward) = jax.lax.scan(back, last, potentials, reverse=True)
    filtered = jnp.concatenate([first[None], filtered])
    betas = jnp.concatenate([betas, last[None]])
    return _Exact(filtered, betas, _normalise(filtered * betas), forward, backward)


def _marginals(problem: FiniteProblem) -> Float[Array, "time state"]:
    """The marginals q_{k|n} of the chain."""

    def back(law: Array, kernel: Array) -> tuple[Array, Array]:
        before = _dot("y,yx->x", law, kernel)
        return before, before

    last = problem.terminal
    _, laws = jax.lax.scan(back, last, problem.kernels, reverse=True)
    return jnp.concatenate([laws, last[None]])


def _pairs_back(laws: Array, kernels: Array) -> Float[Array, "pair state state"]:
    """The laws of (x_k, x_{k+1}) with x_{k+1} from row k+1 of `laws`, and x_k by a kernel."""
    return laws[1:, None, :] * jnp.swapaxes(kernels, 1, 2)


def _pairs_ahead(laws: Array, kernels: Array) -> Float[Array, "pair state state"]:
    """The laws of (x_k, x_{k+1}) with x_k from row k of `laws`, and x_{k+1} by a kernel."""
    return laws[:-1, :, None] * kernels


class FiniteQuantities(NamedTuple):
    """What the bounds are made of.

    Attributes:
        h1: H1's constants, c_0 = 2 TV(q̃_0, φ_0) and, for m ≥ 1,
            c_m = 2 TV(q̃_m ⊗ q_{m-1|m}, q̃_{m-1} L_{m-1} / q̃_{m-1} L_{m-1} 1).
        sigma_minus: H2's σ₋; zero if some density vanishes, and then H2 does not hold.
        sigma_plus: H2's σ₊.
        tilted: τ_0 = TV(t_0, φ_{0|n}) and τ_m = TV(t_m ⊗ q_{m-1|m}, t_{m-1} ⊗ F_{m-1}), with
            t_m ∝ q̃_m β_m.
        tilted_bound: I(B_m, c_m / 2) ≥ τ_m, which needs no posterior.
        kernel_dobrushin: δ(q_{k|k+1}).
        forward_dobrushin: δ(F_k).
        birkhoff: ϑ_k ≥ δ(F_k).
        ratios: B_k ≥ max β_k / min β_k; B_{n-1} = 1.
        evidence_gap: log p(y) - ELBO, the divergence KL(q ‖ φ) of the laws of whole paths.
    """

    h1: Float[Array, "time"]
    sigma_minus: Scalar
    sigma_plus: Scalar
    tilted: Float[Array, "time"]
    tilted_bound: Float[Array, "time"]
    kernel_dobrushin: Float[Array, "pair"]
    forward_dobrushin: Float[Array, "pair"]
    birkhoff: Float[Array, "pair"]
    ratios: Float[Array, "time"]
    evidence_gap: Scalar


def mixing_constants(
    problem: FiniteProblem, measure: Float[Array, "state"] | None = None
) -> tuple[Scalar, Scalar]:
    """The constants of H2: all densities of a problem lie between σ₋ and σ₊.

    These are the densities ℓ_k of L_k(x, ·) and those of the kernels q_{k|k+1}(y, ·). The scale of
    each likelihood is free, and is taken so as to make σ₊ / σ₋ least.

    Args:
        problem: the problem.
        measure: the measure that densities refer to, positive, of shape `(S,)`; `None` counts
            states.

    Returns:
        σ₋ and σ₊.
    """
    measure = jnp.ones_like(problem.initial) if measure is None else measure
    _check_measure(problem, measure)
    q = problem.kernels / measure[None, None, :]
    ell = problem.potentials / measure[None, None, :]
    low, high = jnp.min(ell, axis=(1, 2)), jnp.max(ell, axis=(1, 2))
    ratio = jnp.max(jnp.where(low > 0, high / jnp.where(low > 0, low, 1.0), jnp.inf))
    least, greatest = jnp.min(q), jnp.max(q)
    possible = (least > 0) & jnp.isfinite(ratio)
    stretched = jnp.maximum(greatest, least * jnp.where(possible, ratio, 1.0))
    return jnp.where(possible, least, 0.0), stretched


def _check_measure(problem: FiniteProblem, measure: Array) -> None:
    if measure.shape != problem.initial.shape:
        raise ValueError(
            f"measure must have shape (S,) = {problem.initial.shape}, got {measure.shape}."
        )
    if is_concrete(measure) and not bool(jnp.all(measure > 0)):
        raise ValueError(f"measure must be positive at every state, got {measure}.")


def _divergences(p: Array, q: Array) -> Array:
    """KL(p ‖ q) of laws in the last axis, accurate also where the two are close.

    Summed as Σ q [(1 + d) log(1 + d) - d] with d = p/q - 1: no term is negative, so that none
    cancels another.
    """
    safe = jnp.where(q > 0, q, 1.0)
    d = (p - q) / safe
    # Beyond its radius the series is not used; there the formula itself loses nothing.
    near = jnp.abs(d) < 1e-3
    series = d * d * (0.5 - d / 6 + d * d / 12)
    far = jnp.where(d > -1, (1.0 + d) * jnp.log1p(jnp.where(d > -1, d, 0.0)), 0.0) - d
    terms = q * jnp.where(near, series, far)
    return jnp.sum(jnp.where(q > 0, terms, jnp.where(p > 0, jnp.inf, 0.0)), axis=-1)


def _evidence_gap(problem: FiniteProblem, exact: _Exact, marginals: Array) -> Scalar:
    """KL(q ‖ φ) = KL(q_{n-1} ‖ φ_{n-1}) + Σ_k E_{q_{k+1|n}} KL(q_{k|k+1} ‖ b_k)."""
    local = _divergences(problem.kernels, exact.backward)
    visited = marginals[1:] > 0
    inner = jnp.where(visited, marginals[1:] * jnp.where(visited, local, 0.0), 0.0)
    return _divergences(problem.terminal, exact.filtered[-1]) + jnp.sum(inner)


def _quantities(
    problem: FiniteProblem, exact: _Exact, marginals: Array, measure: Array | None
) -> tuple[FiniteQuantities, Float[Array, "time state"]]:
    """All quantities, and the laws t_m."""
    distances = jax.vmap(total_variation)
    filters = problem.filters
    weighted = filters * exact.betas
    tilts = _normalise(weighted)
    tilted = distances(_pairs_back(tilts, problem.kernels), _pairs_ahead(tilts, exact.forward))
    start = total_variation(tilts[0], exact.smoothed[0])

    moved = _pairs_ahead(filters, problem.potentials)
    mass = jnp.sum(moved, axis=(1, 2))
    moved = moved / jnp.where(mass > 0, mass, 1.0)[:, None, None]
    far = distances(_pairs_back(filters, problem.kernels), moved)
    # A law that the model cannot continue is as far as can be.
    far = jnp.where(mass > 0, far, 1.0)
    epsilon = jnp.concatenate([total_variation(filters[0], exact.filtered[0])[None], far])

    # Both sets of kernels in one call, as one loop is compiled faster than two.
    both = jnp.stack([problem.kernels, exact.forward])
    kernel_dobrushin, forward_dobrushin = jax.vmap(jax.vmap(dobrushin))(both)
    theta, ratios = jax.vmap(birkhoff)(problem.transitions)
    ratios = jnp.concatenate([ratios, jnp.ones_like(ratios[:1])])
    # Lemma 2 speaks of laws that can be reweighted: those that the future excludes are replaced by
    # others, of which nothing is known.
    excluded = jnp.sum(weighted, axis=1) <= 0
    excluded = excluded | jnp.concatenate([jnp.zeros_like(excluded[:1]), excluded[:-1]])
    sigma_minus, sigma_plus = mixing_constants(problem, measure)
    quantities = FiniteQuantities(
        h1=2.0 * epsilon,
        sigma_minus=sigma_minus,
        sigma_plus=sigma_plus,
        tilted=jnp.concatenate([start[None], tilted]),
        tilted_bound=jnp.where(excluded, 1.0, tilted_distance(ratios, epsilon)),
        kernel_dobrushin=kernel_dobrushin,
        forward_dobrushin=forward_dobrushin,
        birkhoff=theta,
        ratios=ratios,
        evidence_gap=_evidence_gap(problem, exact, marginals),
    )
    return quantities, tilts


# -------------------------------------------------------------------------------------------------
# Oscillations of the functional, carried forward and back.
# -------------------------------------------------------------------------------------------------


class _Spread(NamedTuple):
    """Sizes of the increments h_k(x, y): osc h_k, sup_y osc h_k(·, y), sup_x osc h_k(x, ·)."""

    both: Float[Array, "pair"]
    first: Float[Array, "pair"]
    second: Float[Array, "pair"]


def _spread(functional: Array) -> _Spread:
    def along(axis: int) -> Array:
        width = jnp.max(functional, axis=axis) - jnp.min(functional, axis=axis)
        return jnp.max(width, axis=1)

    return _Spread(jax.vmap(oscillation)(functional), along(1), along(2))


def _past_oscillations(contraction: Array, spread: _Spread) -> Float[Array, "time"]:
    """The constants u_j ≥ osc E_q[Σ_{i<j} h_i | x_j = ·] of S2, by Lemma 1.

    u_0 = 0,   u_{j+1} = δ_j u_j + min(osc h_j, o2_j + δ_j o1_j)
    """

    def step(u: Array, row: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
        delta, both, first, second = row
        u = delta * u + jnp.minimum(both, second + delta * first)
        return u, u

    zero = jnp.zeros_like(contraction[0])
    _, us = jax.lax.scan(step, zero, (contraction, spread.both, spread.first, spread.second))
    return jnp.concatenate([zero[None], us])


def _future_oscillations(contraction: Array, spread: _Spread) -> Float[Array, "time"]:
    """The constants v_j ≥ osc E_φ[Σ_{i≥j} h_i | x_j = ·] of S2: u_j with time reversed.

    v_{n-1} = 0,   v_j = δ_j v_{j+1} + min(osc h_j, o1_j + δ_j o2_j)
    """
    swapped = _Spread(spread.both[::-1], spread.second[::-1], spread.first[::-1])
    return _past_oscillations(contraction[::-1], swapped)[::-1]


def _past_sums(problem: FiniteProblem) -> Float[Array, "time state"]:
    """U_0 = 0, U_{j+1}(y) = Σ_x q_{j|j+1}(y, x) [U_j(x) + h_j(x, y)]."""

    def step(value: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        kernel, h = row
        value = _dot("yx,xy->y", kernel, value[:, None] + h)
        return value, value

    zero = jnp.zeros_like(problem.initial)
    _, values = jax.lax.scan(step, zero, (problem.kernels, problem.functional))
    return jnp.concatenate([zero[None], values])


def _future_sums(problem: FiniteProblem, exact: _Exact) -> Float[Array, "time state"]:
    """V_{n-1} = 0, V_j(x) = Σ_y F_j(x, y) [h_j(x, y) + V_{j+1}(y)]."""

    def step(value: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        kernel, h = row
        value = _dot("xy,xy->x", kernel, h + value[None, :])
        return value, value

    zero = jnp.zeros_like(problem.initial)
    rows = (exact.forward, problem.functional)
    _, values = jax.lax.scan(step, zero, rows, reverse=True)
    return jnp.concatenate([values, zero[None]])


# -------------------------------------------------------------------------------------------------
# The bounds.
# -------------------------------------------------------------------------------------------------


class FiniteContributions(NamedTuple):
    """The terms whose sums are the error and its bounds.

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
        quantities: what they are made of.
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
    """The exact error of a backward chain on an additive functional, and every bound on it.

    Costs O(n S³) operations and O(n S²) memory; for many problems of one shape, `jax.vmap`. Where
    the observations are impossible under the model there is no posterior, and the error is NaN.

    Example:
        >>> import retrodict as rd
        >>> bounds = rd.finite_bounds(rd.two_state_counterexample())
        >>> [f"{float(bound):.3f}" for bound in (bounds.error, bounds.s2, bounds.classical)]
        ['0.100', '0.100', '0.122']

    Args:
        problem: the model, the chain and the functional.
        measure: the measure that the densities of H2 refer to; `None` counts states. Only the
            classical bounds depend on it.
    """
    if measure is not None:
        _check_measure(problem, measure)
    return _finite_bounds(problem, measure)


@jax.jit
def _finite_bounds(problem: FiniteProblem, measure: Array | None) -> FiniteBounds:
    exact, marginals = _exact(problem), _marginals(problem)
    quantities, tilts = _quantities(problem, exact, marginals, measure)
    spread = _spread(problem.functional)
    u = _past_oscillations(quantities.kernel_dobrushin, spread)
    both = jnp.stack([quantities.forward_dobrushin, quantities.birkhoff])
    v, v_birkhoff = jax.vmap(_future_oscillations, (0, None))(both, spread)
    change, size = _identity_terms(problem, exact, tilts)
    h1, ratio = quantities.h1, _ratio(quantities)
    rhos = jnp.stack([1.0 - 1.0 / ratio, (1.0 - 1.0 / ratio) / (1.0 + 1.0 / ratio)])
    sums = jax.vmap(_discounted, (None, 0))(h1, rhos)
    first = _Discounted(sums.before[0], sums.after[0])
    classical, sharper = jax.vmap(_classical_terms, (None, None, 0, 0, None))(
        h1, ratio, rhos, sums, spread
    )
    terms = FiniteContributions(
        error=_error_terms(problem, exact, marginals),
        identity=change,
        s1=quantities.tilted * size,
        s2=_s2_terms(quantities.tilted, u, v, spread),
        s2_phi=_s2_phi_terms(problem, exact, u, spread),
        s2_q=_s2_q_terms(problem, exact, marginals, v, spread),
        s3=_s2_terms(quantities.tilted_bound, u, v_birkhoff, spread),
        classical=classical,
        classical_birkhoff=sharper,
        printed_proposition=_printed_terms(h1, ratio, rhos[0], first, problem.functional),
    )
    gap = quantities.evidence_gap
    return FiniteBounds(
        **{name: jnp.sum(value) for name, value in terms._asdict().items()},
        final_display=_final_display(h1, ratio, problem.functional),
        elbo_gap=_elbo_gap_bound(gap, v, spread),
        elbo_gap_birkhoff=_elbo_gap_bound(gap, v_birkhoff, spread),
        contributions=terms,
        quantities=quantities,
    )


def _error_terms(problem: FiniteProblem, exact: _Exact, marginals: Array) -> Array:
    """The errors (q_{k:k+1} - φ_{k:k+1|n}) h_k of the increments."""
    ours = _pairs_back(marginals, problem.kernels)
    truth = _pairs_ahead(exact.smoothed, exact.forward)
    return jnp.sum((ours - truth) * problem.functional, axis=(1, 2))


def _identity_terms(problem: FiniteProblem, exact: _Exact, tilts: Array) -> tuple[Array, Array]:
    """The terms (Π_m - Π'_m) H_m of Theorem 1, and osc(H_m).

    H_0 = V_0 and H_m(x, y) = U_{m-1}(x) + h_{m-1}(x, y) + V_m(y); Π_0 = t_0, Π'_0 = φ_{0|n} and
    Π_m = t_m ⊗ q_{m-1|m}, Π'_m = t_{m-1} ⊗ F_{m-1}.
    """
    past, future = _past_sums(problem), _future_sums(problem, exact)
    whole = past[:-1, :, None] + problem.functional + future[1:, None, :]
    change = _pairs_back(tilts, problem.kernels) - _pairs_ahead(tilts, exact.forward)
    start = jnp.sum((tilts[0] - exact.smoothed[0]) * future[0])
    terms = jnp.concatenate([start[None], jnp.sum(change * whole, axis=(1, 2))])
    size = jnp.concatenate([oscillation(future[0])[None], jax.vmap(oscillation)(whole)])
    return terms, size


def _s2_terms(distances: Array, u: Array, v: Array, spread: _Spread) -> Array:
    """τ_0 v_0, then τ_m (u_{m-1} + osc h_{m-1} + v_m): S2, and S3 with its own τ and v."""
    return distances * jnp.concatenate([v[:1], u[:-1] + spread.both + v[1:]])


def _s2_phi_terms(problem: FiniteProblem, exact: _Exact, u: Array, spread: _Spread) -> Array:
    """E_{φ_{j+1|n}} TV(q_{j|j+1}(x, ·), b_j(x, ·)) (u_j + o1_j), then TV(q, φ) u at the last time.

    Theorem 1 with t = φ_{·|n}: both pair laws have the same law of x_m, so that V_m drops out.
    """
    local = jax.vmap(jax.vmap(total_variation))(problem.kernels, exact.backward)
    mean = jnp.sum(exact.smoothed[1:] * local, axis=1)
    last = total_variation(problem.terminal, exact.filtered[-1]) * u[-1]
    return jnp.concatenate([mean * (u[:-1] + spread.first), last[None]])


def _s2_q_terms(
    problem: FiniteProblem, exact: _Exact, marginals: Array, v: Array, spread: _Spread
) -> Array:
    """TV(q_{0|n}, φ_{0|n}) v_0, then TV(q_{j:j+1}, q_{j|n} ⊗ F_j) (v_{j+1} + o2_j).

    Theorem 1 with t = q_{·|n}: both pair laws have the same law of x_{m-1}, and U drops out.
    """
    ours = _pairs_back(marginals, problem.kernels)
    local = jax.vmap(total_variation)(ours, _pairs_ahead(marginals, exact.forward))
    start = total_variation(marginals[0], exact.smoothed[0]) * v[0]
    return jnp.concatenate([start[None], local * (v[1:] + spread.second)])


def _ratio(quantities: FiniteQuantities) -> Scalar:
    """The ratio r = σ₊ / σ₋, infinite where H2 fails."""
    low = quantities.sigma_minus
    return jnp.where(low > 0, quantities.sigma_plus / jnp.where(low > 0, low, 1.0), jnp.inf)


def _scaled(values: Array, ratio: Scalar) -> Array:
    """The values times the ratio; all infinite if it is, where 0 · ∞ would be a NaN."""
    infinite = jnp.isinf(ratio)
    return jnp.where(infinite, jnp.inf, jnp.where(infinite, 1.0, ratio) * values)


class _Discounted(NamedTuple):
    """Discounted sums of H1's constants, one for each increment k.

    Attributes:
        before: Σ_{m≤k} ρ^{k-m} c_m.
        after: Σ_{m≥k+2} ρ^{m-k-2} c_m.
    """

    before: Float[Array, "pair"]
    after: Float[Array, "pair"]


def _discounted(h1: Float[Array, "time"], rho: Scalar) -> _Discounted:
    def step(total: Array, value: Array) -> tuple[Array, Array]:
        total = rho * total + value
        return total, total

    # The last constant enters the second sum first, with time reversed; nothing is after the last
    # increment but one.
    rows = jnp.stack([h1[:-1], jnp.concatenate([jnp.zeros_like(h1[:1]), h1[:1:-1]])], axis=1)
    _, sums = jax.lax.scan(step, jnp.zeros_like(rows[0]), rows)
    return _Discounted(sums[:, 0], sums[::-1, 1])


def _classical_terms(
    h1: Array, ratio: Scalar, rho: Scalar, sums: _Discounted, spread: _Spread
) -> Array:
    """The terms of Theorem 2, under H1 and H2, one for each increment.

        (r / 2) osc(h_k) [Σ_{m≤k} ρ^{k-m} c_m + c_{k+1} + Σ_{m≥k+2} ρ^{m-k-2} c_m],   r = σ₊/σ₋

    An increment that depends on x_k only gains a factor ρ in the last sum, one that depends on
    x_{k+1} only gains one in the first. ρ is 1 - 1/r, or the smaller (r - 1) / (r + 1).
    """
    before = sums.before * jnp.where(spread.first > 0, 1.0, rho)
    after = sums.after * jnp.where(spread.second > 0, 1.0, rho)
    return _scaled(0.5 * spread.both * (before + h1[1:] + after), ratio)


def _printed_terms(
    h1: Array, ratio: Scalar, rho: Scalar, sums: _Discounted, functional: Array
) -> Array:
    """The terms of Proposition 3.1 as printed, which do not sum to a bound if ρ < ½.

    2 r ‖h_k‖ [c_0 + Σ_{1≤m≤k} ρ^{k-m+1} c_m + c_{k+1} + Σ_{m≥k+2} ρ^{m-k-1} c_m], ρ = 1 - 1/r.
    """
    norms = jnp.max(jnp.abs(functional), axis=(1, 2))
    start = h1[0] * rho ** jnp.arange(len(norms))
    before = h1[0] + rho * (sums.before - start)
    return _scaled(2.0 * norms * (before + h1[1:] + rho * sums.after), ratio)


def _final_display(h1: Array, ratio: Scalar, functional: Array) -> Scalar:
    """4 r (1 + ρ / (1 - ρ)) c₊ h_∞ (n - 1) with ρ = 1 - 1/r, so that the constant is 4 r²."""
    total = jnp.max(h1) * jnp.max(jnp.abs(functional)) * functional.shape[0]
    return _scaled(4.0 * total, ratio**2)


def _elbo_gap_bound(gap: Scalar, v: Array, spread: _Spread) -> Scalar:
    """Theorem 3: [½ gap Σ_j D_j²]^½ with D_0 = v_0 and D_j = o2_{j-1} + v_j."""
    ranges = jnp.concatenate([v[:1], spread.second + v[1:]])
    total = jnp.sum(ranges**2)
    # A constant functional has no error, however large the gap.
    return jnp.where(total > 0, jnp.sqrt(0.5 * gap * jnp.where(total > 0, total, 1.0)), 0.0)
