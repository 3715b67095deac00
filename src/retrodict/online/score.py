"""The score-function recursion of the ELBO's gradient, on weighted samples."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._families import Factor, Row
from retrodict._model import StateSpaceModel
from retrodict._numerics import linalg
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count
from retrodict.online.fixed_lag import factor_shapes
from retrodict.online.gradient import AbstractRecursiveGradient, RowGradient, check_has_family
from retrodict.online.parts import Parts, as_vector, dtype_of
from retrodict.online.rows import first_terms, log_emission, log_transition
from retrodict.online.sensitivity import (
    Followed,
    Reading,
    Sensitivity,
    advanced,
    check_sensitivity,
    follow,
)
from retrodict.online.stream import zeros_like_shapes
from retrodict.online.weights import backward_law, log_weights


class ScoreState(eqx.Module):
    """The state of `RecursiveScore`.

    Attributes:
        family: the family's state and its derivative.
        law: the filtering law q_k.
        xs: draws of it.
        values: T_k at the draws, less their mean.
        scores: S_k at the draws, less their mean.
        mean_score: the mean of S_k, summed over the rows.
        terminal: the part of the gradient that comes from moving q_k.
        started: whether a row was read.
    """

    family: Followed
    law: PyTree
    xs: Float[Array, "sample state"]
    values: Float[Array, "sample"]
    scores: Float[Array, "sample parameter"]
    mean_score: Float[Array, "parameter"]
    terminal: Float[Array, "parameter"]
    started: Bool[Array, ""]


class RecursiveScore(AbstractRecursiveGradient):
    """The score-function gradient of the ELBO, computed forward on samples of the filtering laws.

    With ℓ_k the increment of log p − log q and T_k(x_k) = E_{q_{k-1|k}}[T_{k-1} + ℓ_k], the
    function S_k = ∂(T_k + log q_k) follows

        S_k(x_k) = E_{q_{k-1|k}}[S_{k-1} + ∂ log q_{k-1|k} · (T_{k-1} + ℓ_k − b) + ∂_θ log m g_k],

    and ∂ELBO_k = E_{q_k}[S_k + ∂ log q_k · (T_k − b')]. Expectations under q_{k-1|k} are taken over
    draws of q_{k-1} with weights. The baselines b and b' are conditional means over the *other*
    draws, so that they do not change expectations; where the chain is exact T_{k-1} + ℓ_k is a
    constant, and the gradient in λ has no noise. Derivatives through the family's state use its
    sensitivity. A row costs num_samples² evaluations of the transition.

    Args:
        num_samples: the number of draws per filtering law.
        normalised: whether weights are normalised to sum to one, which lowers the variance and
            leaves a bias of order 1 / num_samples; without it the gradient is unbiased.
        sensitivity: `"exact"`, or `"none"` to treat the family's state as a constant.
    """

    num_samples: int = eqx.field(static=True)
    normalised: bool = eqx.field(static=True)
    sensitivity: Sensitivity = eqx.field(static=True)

    def __init__(
        self, num_samples: int, *, normalised: bool = True, sensitivity: Sensitivity = "exact"
    ):
        self.num_samples = check_count(num_samples, "num_samples")
        if num_samples < 2:
            raise ValueError(f"RecursiveScore needs 2 samples or more, got {num_samples}.")
        check_sensitivity(sensitivity, "RecursiveScore")
        self.normalised, self.sensitivity = normalised, sensitivity

    def check(self, parts: Parts) -> None:
        """Raise if there is no family."""
        check_has_family(parts, "RecursiveScore")

    def init(self, parts: Parts) -> ScoreState:
        """Return the state before the first row."""
        family, _ = parts.whole
        dtype, count = dtype_of(parts.parameters), self.num_samples
        none = jnp.zeros_like(as_vector(parts.parameters).values)
        return ScoreState(
            follow(parts),
            zeros_like_shapes(factor_shapes(family, dtype)[0].law),
            jnp.zeros((count, family.state_dim), dtype),
            jnp.zeros(count, dtype),
            jnp.zeros((count, none.shape[0]), dtype),
            none,
            none,
            jnp.zeros((), bool),
        )

    def update(
        self, parts: Parts, state: ScoreState, row: Row, key: PRNGKey
    ) -> tuple[ScoreState, RowGradient]:
        """Draw from the new filtering law, and compute T and S at the draws."""
        vector = as_vector(parts.parameters)
        after = advanced(parts, state.family, row, self.sensitivity)
        reading = Reading(parts, state.family, after, row)
        factor = reading.factor()
        law = factor.law
        noise = jax.random.normal(key, (self.num_samples, law.noise_dim), law.mean.dtype)
        xs = jax.vmap(law.from_noise)(noise)
        values, scores = lax.cond(
            state.started,
            lambda: _later(self, reading, factor, state, xs),
            lambda: _first(reading, factor, xs),
        )
        level, slope = jnp.mean(values), jnp.mean(scores, axis=0)
        off = values - level
        # N/(N-1) times the distance from the mean is that from the mean of the others.
        shares = lax.stop_gradient(off / (self.num_samples - 1))
        terminal = reading.gradient(
            lambda family, model, read: jnp.sum(shares * jax.vmap(read.law.log_prob)(xs))
        )
        next_state = ScoreState(
            after,
            law,
            xs,
            off,
            scores - slope[None],
            state.mean_score + slope,
            terminal,
            jnp.ones((), bool),
        )
        return next_state, RowGradient(
            level,
            vector.unravel(next_state.mean_score + terminal),
            vector.unravel(slope + terminal - state.terminal),
            jnp.ones((), bool),
            factor,
        )


def _first(
    reading: Reading, factor: Factor, xs: Float[Array, "sample state"]
) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
    """Return T_0 = log χ g_0 − log q_0 and S_0 = ∂_θ log χ g_0."""
    joint, scores = first_terms(reading, xs)
    return joint - jax.vmap(factor.law.log_prob)(xs), scores


def _later(
    method: RecursiveScore,
    reading: Reading,
    factor: Factor,
    state: ScoreState,
    xs: Float[Array, "sample state"],
) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
    """Return T_k and S_k at the draws x_k^i, from those at x_{k-1}^j."""
    family, model = reading.parts.whole
    row, befores = reading.row, state.xs
    log_w = log_weights(backward_law(family), state.law, factor.kernel, xs, befores)
    moves = jax.vmap(
        lambda x: jax.vmap(lambda before: log_transition(model, before, x, row))(befores)
    )(xs)
    here = jax.vmap(lambda x: log_emission(model, x, row) - factor.law.log_prob(x))(xs)
    # The density of the kernel and that of q_{k-1} enter the increment as they do the weights.
    sums = state.values[None] + moves + here[:, None] - log_w
    weigh = _self_normalised if method.normalised else _unbiased
    averaging, signed = weigh(log_w, sums)

    def one(x: Array, averaging: Array, signed: Array) -> Float[Array, "parameter"]:
        def terms(family: PyTree, model: StateSpaceModel, read: Factor) -> Scalar:
            kernel = backward_law(family)(read.kernel, x)
            backward = jnp.sum(signed * jax.vmap(kernel.log_prob)(befores))
            move = jax.vmap(lambda before: log_transition(model, before, x, row))(befores)
            return backward + jnp.sum(averaging * move) + log_emission(model, x, row)

        return reading.gradient(terms)

    fresh = jax.vmap(one)(xs, averaging, signed)
    return jnp.sum(averaging * sums, axis=1), linalg.matmul(averaging, state.scores) + fresh


def _self_normalised(
    log_w: Float[Array, "now before"], sums: Float[Array, "now before"]
) -> tuple[Float[Array, "now before"], Float[Array, "now before"]]:
    """Return weights that sum to one, and the weights times the centred sums."""
    weights = jax.nn.softmax(log_w, axis=1)
    mean = jnp.sum(weights * sums, axis=1, keepdims=True)
    return weights, weights * (sums - mean)


def _unbiased(
    log_w: Float[Array, "now before"], sums: Float[Array, "now before"]
) -> tuple[Float[Array, "now before"], Float[Array, "now before"]]:
    """Return weights whose averages are unbiased and exact for constants, and times centred sums.

    For any c_j that does not depend on the j-th draw, w_j (f_j − c_j) + c_j has the expectation of
    w_j f_j, since that of w_j is one. With c_j the mean of f over the other draws in the weights
    v = w + 1, which are never all small, the average is Σ_j B_j f_j with Σ_j B_j = 1.
    """
    w = jnp.exp(log_w)
    count = w.shape[1]
    v = w + 1.0
    total = jnp.sum(v, axis=1, keepdims=True)
    others = total - v
    short = (1.0 - w) / (count * others)
    averaging = w / count + v * (jnp.sum(short, axis=1, keepdims=True) - short)
    baseline = (jnp.sum(v * sums, axis=1, keepdims=True) - v * sums) / others
    return averaging, w / count * (sums - baseline)
