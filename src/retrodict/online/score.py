"""The score-function recursion of the ELBO's gradient, on weighted samples."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._arrays import PRNGKey, Scalar, check_count
from retrodict._families import Factor
from retrodict._model import Series, StateSpaceModel
from retrodict._numerics import linalg
from retrodict.online.fixed_lag import factor_shapes
from retrodict.online.gradient import (
    AbstractRecursiveGradient,
    Parts,
    RowGradient,
    check_has_family,
)
from retrodict.online.samples import backward_law, draw, log_weights
from retrodict.online.sensitivity import (
    DifferentiableRow,
    StateDerivative,
    StateWithJacobian,
    check_sensitivity,
    initial_state,
)
from retrodict.online.stream import zeros_like_shapes


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

    family: StateWithJacobian
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

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [4.0]])
        >>> gradient = rd.online.RecursiveScore(num_samples=16)
        >>> rows = rd.online.recursive_gradient(
        ...     gradient, rd.KalmanFamily(model), model, ys, key=jax.random.key(0)
        ... )
        >>> rows.elbo_increment.shape
        (3,)

    Args:
        num_samples: the number of draws per filtering law.
        normalised: whether weights are normalised to sum to one, which lowers the variance and
            leaves a bias of order 1 / num_samples; without it the gradient is unbiased.
        sensitivity: `"exact"`, or `"none"` to treat the family's state as a constant.
    """

    num_samples: int = eqx.field(static=True)
    normalised: bool = eqx.field(static=True, default=True, kw_only=True)
    sensitivity: StateDerivative = eqx.field(static=True, default="exact", kw_only=True)

    def __check_init__(self) -> None:
        if check_count(self.num_samples, "num_samples") < 2:
            raise ValueError(f"RecursiveScore needs 2 samples or more, got {self.num_samples}.")
        check_sensitivity(self.sensitivity, "RecursiveScore")

    def check(self, parts: Parts) -> None:
        """Raise if there is no family."""
        check_has_family(parts, "RecursiveScore")

    def init(self, parts: Parts) -> ScoreState:
        """Return the state before the first row."""
        family, _ = parts.whole
        count, none = self.num_samples, jnp.zeros_like(parts.vector)
        return ScoreState(
            family=initial_state(parts),
            law=zeros_like_shapes(factor_shapes(family, parts.dtype)[0].law),
            xs=jnp.zeros((count, family.state_dim), none.dtype),
            values=jnp.zeros(count, none.dtype),
            scores=jnp.zeros((count, none.shape[0]), none.dtype),
            mean_score=none,
            terminal=none,
            started=jnp.zeros((), bool),
        )

    def update(
        self, parts: Parts, state: ScoreState, row: Series, key: PRNGKey
    ) -> tuple[ScoreState, RowGradient]:
        """Draw from the new filtering law, and compute T and S at the draws."""
        current = DifferentiableRow(parts, state.family, row, self.sensitivity)
        law = current.factor.law
        xs = draw(law, key, self.num_samples)
        values, scores = lax.cond(
            state.started, lambda: self._later(current, state, xs), lambda: _first(current, xs)
        )
        level, slope = jnp.mean(values), jnp.mean(scores, axis=0)
        off = values - level
        # N/(N-1) times the distance from the mean is that from the mean of the others.
        shares = lax.stop_gradient(off / (self.num_samples - 1))
        terminal = current.gradient(
            lambda family, model, read: jnp.sum(shares * jax.vmap(read.law.log_prob)(xs))
        )
        total, started = state.mean_score + slope, jnp.ones((), bool)
        return (
            ScoreState(current.after, law, xs, off, scores - slope[None], total, terminal, started),
            current.row_gradient(level, total, slope, terminal, state.terminal),
        )

    def _later(
        self, current: DifferentiableRow, state: ScoreState, xs: Float[Array, "sample state"]
    ) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
        """Return T_k and S_k at the draws x_k^i, from those at x_{k-1}^j."""
        family, model = current.parts.whole
        befores, u, factor = state.xs, current.row.inputs, current.factor
        weigh = _normalised_terms if self.normalised else _unbiased_terms

        def log_moves(model: StateSpaceModel, x: Array) -> Float[Array, "before"]:
            return jax.vmap(lambda before: model.transition.log_prob(before, x, u))(befores)

        def one(x: Array) -> tuple[Scalar, Float[Array, "parameter"]]:
            log_w = log_weights(backward_law(family), state.law, factor.kernel, x[None], befores)[0]
            # The densities of the kernel and of q_{k-1} enter the increment as they do the weights.
            here = current.log_emission(model, x) - factor.law.log_prob(x)
            sums = state.values + log_moves(model, x) + here - log_w
            averaging, signed = weigh(log_w, sums)

            def terms(family: PyTree, model: StateSpaceModel, read: Factor) -> Scalar:
                kernel = backward_law(family)(read.kernel, x)
                backward = jnp.sum(signed * jax.vmap(kernel.log_prob)(befores))
                move = jnp.sum(averaging * log_moves(model, x))
                return backward + move + current.log_emission(model, x)

            carried = linalg.matvec(state.scores.T, averaging)
            return jnp.sum(averaging * sums), carried + current.gradient(terms)

        return jax.vmap(one)(xs)


def _first(
    current: DifferentiableRow, xs: Float[Array, "sample state"]
) -> tuple[Float[Array, "sample"], Float[Array, "sample parameter"]]:
    """Return T_0 = log χ g_0 − log q_0 and S_0 = ∂_θ log χ g_0."""
    joint, scores = current.first_terms(xs)
    return joint - jax.vmap(current.factor.law.log_prob)(xs), scores


def _normalised_terms(
    log_w: Float[Array, "before"], sums: Float[Array, "before"]
) -> tuple[Float[Array, "before"], Float[Array, "before"]]:
    """Return weights that sum to one, and the weights times the centred sums."""
    weights = jax.nn.softmax(log_w)
    return weights, weights * (sums - jnp.sum(weights * sums))


def _unbiased_terms(
    log_w: Float[Array, "before"], sums: Float[Array, "before"]
) -> tuple[Float[Array, "before"], Float[Array, "before"]]:
    """Return weights whose averages are unbiased and exact for constants, and times centred sums.

    For any c_j that does not depend on the j-th draw, w_j (f_j − c_j) + c_j has the expectation of
    w_j f_j, since that of w_j is one. With c_j the mean of f over the other draws in the weights
    v = w + 1, which are never all small, the average is Σ_j B_j f_j with Σ_j B_j = 1.
    """
    w = jnp.exp(log_w)
    v, count = w + 1.0, w.shape[0]
    others = jnp.sum(v) - v
    short = (1.0 - w) / (count * others)
    averaging = w / count + v * (jnp.sum(short) - short)
    baseline = (jnp.sum(v * sums) - v * sums) / others
    return averaging, w / count * (sums - baseline)
