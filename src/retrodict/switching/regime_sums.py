"""The ELBO of a switching chain, with every regime summed and its gradient unbiased.

The chain has one component per regime j, with laws q_k(j, x) = w_j N(x; m_j, P_j) and moves of
probability t_ij and density m̄_ij. Its backward kernels reverse these moves, so that

    log p(z, x, y) − log q(z, x) = Σ_k r_k(z_k, x_k) + Σ_{k≥1} d_k(z_{k-1}, x_{k-1}, z_k, x_k),

    r_0 = log [p(j) χ_j(x) g_j(x, y_0) / q_0(j, x)],
    r_k = log [g_j(x, y_k) q̄_k(j, x) / q_k(j, x)],
    d_k = log [p(j | i, x') m_j(x', x) / (t_ij m̄_ij(x', x))],

where q̄_k(j, x) = Σ_i w_i t_ij N(x; F_ij m_i + b_ij, S_ij) is the prediction of the chain. (If the
chain has laws of the state given the next regime, d_k has their ratio to q_{k-1} as well.) If its
moves are those of the model, d_k is zero; if its laws are exact too, r_k is constant.

One sample keeps one state x^j per regime, with a weight ω_j, at every time:

1. At the last time ω_j = w_j and x^j ~ N(m_j, P_j).
2. The earlier law given the nodes (j, x^j) is a mixture over pairs (j, i) with weights
   ω_j π_i(j, x^j) and Gaussians N_ji. The terms r and d are summed over all pairs, each with a draw
   from N_ji.
3. The earlier weight ω'_i = Σ_j ω_j π_i(j, x^j) is exact. For x'^i one later regime j is drawn
   with probability β_ji = ω_j π_i(j, x^j) / ω'_i, and x'^i from N_ji.

The weighted nodes are an unbiased sample of q(z_k, x_k), and all but the draw of j in step 3 is
differentiable. That draw contributes Σ_j τ_ji ∇log β_ji · ω'_i (W(i, x'^i) − baseline_i) to the
gradient, where W is the expected sum of the earlier terms, and τ_ji ∝ β_ji N_ji(x'^i) is the
probability of j given the drawn state: the expectation over j given x'^i (Rao–Blackwell). Where
the Gaussians N_ji of different j overlap, τ equals β and the contribution vanishes; without a
state, and for one regime, there is none. The derivative of x'^i is averaged over j with the same
weights.

W is estimated from the sample itself, with the values of the other samples as the baseline, by

    ω_j W_j = ω_j [r(j) + Σ_i π_i (d_ji + baseline_i)] + Σ_i τ_ji ω'_i (W_i − baseline_i).

Densities of the chain are evaluated with its parameters fixed: their score has expectation zero,
and without it the gradient of an exact chain is zero for every sample.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey
from retrodict._expectations import Estimate
from retrodict._model import Frozen, Series, fill_padding
from retrodict._numerics import linalg
from retrodict.switching.chain import SwitchingChain
from retrodict.switching.mixture import Mixture, Moves, log_normal
from retrodict.switching.model import (
    SwitchingModel,
    emission_table,
    over_regimes,
    prior_log_probs,
)
from retrodict.switching.reversal import Reversed, reverse_moves


class Nodes(NamedTuple):
    """One state per regime.

    Attributes:
        log_weights: log ω.
        states: x^j.
    """

    log_weights: Float[Array, "*sample regime"]
    states: Float[Array, "*sample regime state"]


class Step(NamedTuple):
    """The sums of one step backward, and what the gradient needs of its draws.

    Attributes:
        terms: ω_j r(j) + Σ_i ω_j π_i d_ji of each later regime.
        joint: ω_j π_i(j, x^j).
        log_origin: log β, or zero where there is no step.
        origin: τ.
        earlier: ω'.
    """

    terms: Float[Array, "*step later"]
    joint: Float[Array, "*step later earlier"]
    log_origin: Float[Array, "*step later earlier"]
    origin: Float[Array, "*step later earlier"]
    earlier: Float[Array, "*step earlier"]


class Rows(NamedTuple):
    """What one step backward reads: the move from time k to k+1 and the data of time k+1.

    Attributes:
        reversal: the moves, reversed.
        density: the same with fixed parameters.
        moves: the moves with fixed parameters.
        before: the filtering law of time k with fixed parameters.
        law: that of time k+1.
        row: the data of time k+1.
        table: log g of a model without a state.
        real: whether time k+1 exists; `None` if all do.
    """

    reversal: Reversed
    density: Reversed
    moves: Moves
    before: Mixture
    law: Mixture
    row: Series
    table: Float[Array, "*time regime"]
    real: Bool[Array, "*time"] | None


def elbo_by_regime_sums(
    model: SwitchingModel,
    chain: SwitchingChain,
    series: Series,
    key: PRNGKey,
    num_samples: int,
    from_start: bool | Bool[Array, ""] = True,
) -> Estimate:
    """Estimate E_q[log p(z, x, y) − log q(z, x)], differentiably, inside `jax.jit`.

    Args:
        model: an unwrapped model.
        chain: a chain with one component per regime, in their order.
        series: the prepared series, of as many rows as the chain and of its length.
        key: a typed key.
        num_samples: the number of samples; gradients of two or more have less variance.
        from_start: whether the first row counts; else its law is taken as given.

    Returns:
        The mean over the samples, and its standard error.
    """
    exists = None if chain.length is None else jnp.arange(chain.num_times) < chain.length
    series = fill_padding(series.rows, exists)
    fixed = Frozen(chain).value
    if model.is_finite:
        table = emission_table(model, series)
    else:
        table = jnp.zeros((chain.num_times, chain.num_regimes), chain.laws.log_weights.dtype)
    head = jax.tree.map(lambda leaf: leaf[:-1], (chain.laws, fixed.laws))
    rows = Rows(
        jax.vmap(reverse_moves)(head[0], chain.moves),
        jax.vmap(reverse_moves)(head[1], fixed.moves),
        fixed.moves,
        head[1],
        *jax.tree.map(lambda leaf: leaf[1:], (fixed.laws, series, table, exists)),
    )
    first_law, first = jax.tree.map(lambda leaf: leaf[0], (fixed.laws, series))

    def sample(key: PRNGKey) -> tuple[Array, Step]:
        draw_key, path_key = jax.random.split(key)
        start = _terminal_nodes(chain.terminal, draw_key)

        def back(nodes: Nodes, at: tuple[Rows, PRNGKey]) -> tuple[Nodes, Step]:
            return _step_back(model, nodes, *at)

        keys = jax.random.split(path_key, chain.num_times - 1)
        nodes, steps = lax.scan(jax.checkpoint(back), start, (rows, keys), reverse=True)
        ratio = _first_ratio(model, nodes.states, first_law, first, table[0])
        return jnp.exp(nodes.log_weights) * jnp.where(from_start, ratio, 0.0), steps

    firsts, steps = jax.vmap(sample)(jax.random.split(key, num_samples))
    values = jnp.sum(firsts, axis=1) + jnp.sum(steps.terms, axis=(1, 2))
    error = jnp.std(values) / jnp.sqrt(max(num_samples - 1, 1)) if num_samples > 1 else jnp.nan
    score = _score(lax.stop_gradient(firsts), steps)
    value = jnp.mean(values) + score - lax.stop_gradient(score)
    return Estimate(value, jnp.asarray(error, value.dtype))


def _terminal_nodes(law: Mixture, key: PRNGKey) -> Nodes:
    noise = jax.random.normal(key, law.means.shape, law.means.dtype)
    return Nodes(law.log_weights, law.means + jax.vmap(linalg.matvec)(law.scale_trils, noise))


def _step_back(model: SwitchingModel, nodes: Nodes, at: Rows, key: PRNGKey) -> tuple[Nodes, Step]:
    """Move the nodes of one sample from time k+1 to time k."""
    noise_key, choice_key = jax.random.split(key)
    regimes = jnp.arange(nodes.log_weights.shape[0])
    # The laws of the earlier regime and state; the axes are (later regime, earlier regime).
    laws = jax.vmap(lambda one, x: one.law(x, regimes), in_axes=(1, 0))(at.reversal, nodes.states)
    noise = jax.random.normal(noise_key, laws.means.shape, laws.means.dtype)
    drawn = laws.means + _matvec(laws.scale_trils, noise)
    log_joint = nodes.log_weights[:, None] + laws.log_weights
    joint = jnp.exp(log_joint)
    ratio = _row_ratio(model, nodes.states, at)
    moved = _move_ratio(model, nodes.states, drawn, at)
    terms = jnp.exp(nodes.log_weights) * ratio + jnp.sum(joint * moved, axis=1)

    log_earlier = jax.nn.logsumexp(log_joint, axis=0)
    log_origin = log_joint - log_earlier[None]
    choice = jax.random.categorical(choice_key, lax.stop_gradient(log_origin), axis=0)
    states = lax.stop_gradient(drawn[choice, regimes])
    origin, states = _given_states(log_origin, laws, states)
    step = Step(terms, joint, log_origin, origin, jnp.exp(log_earlier))
    new = Nodes(log_earlier, states)
    if at.real is None:
        return new, step
    same = jnp.eye(regimes.shape[0], dtype=joint.dtype)
    weights = jnp.exp(nodes.log_weights)
    nothing = Step(jnp.zeros_like(terms), jnp.diag(weights), jnp.zeros_like(same), same, weights)
    real = at.real
    return jax.tree.map(
        lambda leaf, other: jnp.where(real, leaf, other), (new, step), (nodes, nothing)
    )


def _given_states(
    log_origin: Float[Array, "later earlier"], laws: Mixture, states: Float[Array, "earlier state"]
) -> tuple[Float[Array, "later earlier"], Float[Array, "earlier state"]]:
    """Return τ, and the drawn states with the derivative averaged over their origin."""
    fixed = lax.stop_gradient(laws)
    over_pairs = jax.vmap(jax.vmap(log_normal), in_axes=(None, 0, 0))
    densities = over_pairs(states, fixed.means, fixed.scale_trils)
    origin = jax.nn.softmax(lax.stop_gradient(log_origin) + densities, axis=0)
    if not states.shape[-1]:
        return origin, states
    solve = jax.vmap(jax.vmap(linalg.solve_triangular))
    noise = solve(fixed.scale_trils, states[None] - fixed.means)
    # Every origin gives the same states, with derivatives of its own.
    each = laws.means + _matvec(laws.scale_trils, noise)
    mean = jnp.sum(origin[..., None] * (each - lax.stop_gradient(each)), axis=0)
    return origin, states + mean


def _matvec(matrices: Float[Array, "j i d d"], vectors: Float[Array, "j i d"]) -> Array:
    return jax.vmap(jax.vmap(linalg.matvec))(matrices, vectors)


def _row_ratio(
    model: SwitchingModel, states: Float[Array, "regime state"], at: Rows
) -> Float[Array, "regime"]:
    """Return r of time k+1."""
    predicted = jax.vmap(lambda one, x: jax.nn.logsumexp(one.log_joint(x)), in_axes=(1, 0))(
        at.density, states
    )
    return _emitted(model, states, at.row, at.table) + predicted - _law(at.law, states)


def _first_ratio(
    model: SwitchingModel,
    states: Float[Array, "regime state"],
    law: Mixture,
    row: Series,
    table: Float[Array, "regime"],
) -> Float[Array, "regime"]:
    """Return r of time 0."""
    prior = model.regimes.log_initial()
    if not model.is_finite:
        prior = prior + jnp.diagonal(jax.vmap(lambda x: prior_log_probs(model, x))(states))
    return prior + _emitted(model, states, row, table) - _law(law, states)


def _law(law: Mixture, states: Float[Array, "regime state"]) -> Float[Array, "regime"]:
    """Return log q(j, x^j)."""
    return law.log_weights + jax.vmap(log_normal)(states, law.means, law.scale_trils)


def _emitted(
    model: SwitchingModel,
    states: Float[Array, "regime state"],
    row: Series,
    table: Float[Array, "regime"],
) -> Float[Array, "regime"]:
    """Return log g_j(x^j, y)."""
    if model.is_finite:
        return table
    return over_regimes(
        model.emission,
        model.num_regimes,
        lambda kernel, x: kernel.log_prob(x, row.ys, row.inputs, row.mask),
        states,
    )


def _move_ratio(
    model: SwitchingModel,
    states: Float[Array, "later state"],
    before: Float[Array, "later earlier state"],
    at: Rows,
) -> Float[Array, "later earlier"]:
    """Return d of the pairs of regimes."""
    u, count = at.row.inputs, model.num_regimes
    if model.regimes.takes_state:
        rows = jax.vmap(jax.vmap(lambda x: model.regimes.log_transition(x, u)))(before)
        switched = jnp.einsum("jiij->ji", rows)
    else:
        switched = model.regimes.log_transition(u=u).T
    switched = switched - at.moves.log_probabilities.T
    if model.is_finite:
        return switched

    def by_model(kernel: Any, x: Array, before: Array) -> Array:
        return jax.vmap(lambda one: kernel.log_prob(one, x, u))(before)

    def by_chain(x: Array, before: Array, weight: Array, bias: Array, scale: Array) -> Array:
        return log_normal(x, linalg.matvec(weight, before) + bias, scale)

    source = None if at.moves.weights.shape[0] == 1 else 0
    kernels = (at.moves.weights, at.moves.biases, at.moves.scale_trils)
    if source is None:
        kernels = tuple(leaf[0] for leaf in kernels)
        over_later = (0, 0, 0, 0, 0)
    else:
        over_later = (0, 0, 1, 1, 1)
    over_earlier = jax.vmap(by_chain, in_axes=(None, 0, source, source, source))
    own = jax.vmap(over_earlier, in_axes=over_later)(states, before, *kernels)
    if at.moves.origins is not None:
        # The backward kernels reverse the laws of the states that move to each regime.
        origins = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), at.moves.origins)
        laws = (at.before.means, at.before.scale_trils)
        over_pairs = jax.vmap(jax.vmap(log_normal))
        own = own + over_pairs(before, *origins)
        own = own - jax.vmap(jax.vmap(log_normal), in_axes=(0, None, None))(before, *laws)
    return switched + over_regimes(model.transition, count, by_model, states, before) - own


def _score(firsts: Float[Array, "sample regime"], steps: Step) -> Array:
    """Return a function of log β whose derivative is that of the draws of origins."""
    fixed = lax.stop_gradient(steps)
    samples = firsts.shape[0]

    def forward(values: Array, at: tuple[Step, Array]) -> tuple[Array, Array]:
        step, log_origin = at
        baseline = _leave_one_out(values, step.earlier) if samples > 1 else jnp.zeros_like(values)
        surplus = values - step.earlier * baseline
        score = jnp.einsum("sji,sji,si->", step.origin, log_origin, surplus)
        values = step.terms + jnp.einsum("sji,si->sj", step.joint, baseline)
        return values + jnp.einsum("sji,si->sj", step.origin, surplus), score

    over_time = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (fixed, steps.log_origin))
    _, scores = lax.scan(forward, firsts, over_time)
    return jnp.sum(scores) / samples


def _leave_one_out(
    values: Float[Array, "sample regime"], weights: Float[Array, "sample regime"]
) -> Float[Array, "sample regime"]:
    """Return Σ values / Σ weights over the other samples."""
    others = jnp.sum(weights, axis=0)[None] - weights
    total = jnp.sum(values, axis=0)[None] - values
    return total / jnp.maximum(others, jnp.finfo(weights.dtype).tiny)
