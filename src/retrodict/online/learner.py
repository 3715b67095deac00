"""Learning a family and a model from one stream, row by row, in memory that does not grow."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from retrodict._families import AbstractFactorFamily, AbstractSampledFamily, Factor, Row
from retrodict._kernels import LinearGaussianKernel
from retrodict._laws import dense_scale
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._numerics import linalg
from retrodict._parameters import unwrap
from retrodict._series import convert_row
from retrodict._types import PRNGKey, Scalar
from retrodict._validate import check_count, check_key
from retrodict.online.fixed_lag import LagMoments, exact_moments
from retrodict.online.gradient import (
    AbstractRecursiveGradient,
    check_gradient,
    one_row,
    rows_and_count,
)
from retrodict.online.parts import Learn, Parts, dtype_of, parts_of

S = TypeVar("S")
T = TypeVar("T")

NUM_DRAWS = 64
"""How many states are drawn for the smoothed moments of families that draw."""


class LearnerState(eqx.Module):
    """What an `OnlineLearner` carries from one row to the next: arrays of a size that stays.

    Attributes:
        parameters: what is learned: `(family, model)` with `None` for all that does not move.
        optimiser: the state of the optimiser.
        gradient: the state of the recursive gradient.
        num_read: how many rows were read.
        num_skipped: how many of them were skipped, since what followed from them was not finite.
        key: the key that the noise of each row is made from.
    """

    parameters: PyTree
    optimiser: PyTree
    gradient: PyTree
    num_read: Int[Array, ""]
    num_skipped: Int[Array, ""]
    key: PRNGKey


class LearnerOutput(eqx.Module):
    """What is known after row k of a stream; along a leading axis `time` after many of them.

    Attributes:
        filtered: the moments of q_k, the law of x_k given y_{0:k}, before the step of this row;
            before the last of them if there are several.
        smoothed: the moments of x_{k-1} given y_{0:k}; NaN at the first row.
        elbo_increment: what the row added to the ELBO, in nats.
        gradient_norm: the norm of what was ascended, zero at rows without a gradient.
        skipped: whether the row was skipped, since what followed from it was not finite.
    """

    filtered: LagMoments
    smoothed: LagMoments
    elbo_increment: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]
    skipped: Bool[Array, "..."]


class OnlineLearner(eqx.Module):
    """Learns a family λ, a model θ or both from one stream, and follows its posterior meanwhile.

    Each row adds to the gradient of the ELBO, at the parameters where the learner stands, and a
    step of the optimiser ascends what it added. For θ that is recursive maximum likelihood, by the
    difference of successive expectations of Fisher's identity. What a gradient carries of earlier
    rows was computed at the parameters of their time: a bias of the order of a step, which vanishes
    as steps shrink. Where a step or the state that follows from a row is not finite, the row is
    left out and counted; if it is the step, the rows that a window still holds count as missing.
    The noise of a row is made from the key and its number alone: however a stream is cut into
    chunks, stored with `save` and gone on with, it learns the same to the last bit.

    Example:
        >>> import jax, jax.numpy as jnp, optax, retrodict as rd
        >>> def model(weight):
        ...     return rd.StateSpaceModel(
        ...         prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...         transition=rd.LinearGaussianKernel(
        ...             weight * jnp.eye(1), rd.Frozen(jnp.zeros(1)), rd.Frozen(jnp.eye(1))
        ...         ),
        ...         emission=rd.Frozen(
        ...             rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), 0.5 * jnp.eye(1))
        ...         ),
        ...     )
        >>> _, ys = model(0.9).simulate(jax.random.key(0), num_times=500)
        >>> gradient, optimiser = rd.online.KalmanScore(), optax.sgd(rd.online.robbins_monro(0.1))
        >>> learner = rd.online.OnlineLearner(
        ...     None, model(0.1), gradient, optimiser, learn="model"
        ... )
        >>> state, rows = learner.scan(learner.init(jax.random.key(1)), ys)
        >>> abs(float(learner.model(state).transition.weight[0, 0]) - 0.9) < 0.1
        True

    Args:
        family: the family to start from, in the units of the data (`family.prepare`); `None` for
            gradients that do without.
        model: the model to start from.
        gradient: the recursive gradient, such as `TruncatedBackprop(window=8)`.
        optimiser: an optax transformation; by default Adam with a constant rate of 1e-3 and
            gradients clipped at 10, which follows parameters that drift.
        learn: what moves: `"family"`, `"model"`, `"both"`, or a pytree of booleans over `(family,
            model)`. Scales of a model that is learned by name are held positive; what is `Frozen`
            stays.
        steps_per_row: how many steps to take at each row, each with a gradient and noise of its
            own.
    """

    parts: Parts
    gradient: AbstractRecursiveGradient
    optimiser: optax.GradientTransformation
    steps_per_row: int = eqx.field(static=True)

    def __init__(
        self,
        family: AbstractFactorFamily | None,
        model: StateSpaceModel,
        gradient: AbstractRecursiveGradient,
        optimiser: optax.GradientTransformation | None = None,
        *,
        learn: Learn | PyTree = "both",
        steps_per_row: int = 1,
    ):
        check_gradient(gradient, "OnlineLearner")
        if family is None and isinstance(learn, str) and learn == "both":
            learn = "model"
        self.parts = parts_of(family, model, learn, "OnlineLearner")
        gradient.check(self.parts)
        self.gradient = gradient
        self.optimiser = default_optimiser() if optimiser is None else optimiser
        self.steps_per_row = check_count(steps_per_row, "steps_per_row")

    def init(self, key: PRNGKey) -> LearnerState:
        """The state before anything was read.

        Args:
            key: a typed key.
        """
        check_key(key, "OnlineLearner.init")
        parameters = self.parts.parameters
        none = jnp.zeros((), jnp.result_type(int))
        return LearnerState(
            parameters,
            self.optimiser.init(parameters),
            self.gradient.init(self.parts),
            none,
            none,
            key,
        )

    def family(self, state: LearnerState) -> Any:
        """The family as it is learned so far; `None` if there is none."""
        return eqx.combine(state.parameters, self.parts.fixed)[0]

    def model(self, state: LearnerState) -> StateSpaceModel:
        """The model as it is learned so far."""
        return eqx.combine(state.parameters, self.parts.fixed)[1]

    def update(
        self, state: LearnerState, y: Any, *, mask: Any = None, u: Any = None
    ) -> tuple[LearnerState, LearnerOutput]:
        """Reads one row, and takes a step.

        Args:
            state: what `init` or the previous call returned.
            y: the observation, of shape `(obs,)`; NaN where an entry is missing.
            mask: true where an entry was seen.
            u: the input, of shape `(input,)`, if the model takes one.

        Returns:
            The next state, and what is known now.
        """
        y, u = convert_row(y, mask, u)
        return _update(self, state, y, u)

    def scan(
        self,
        state: LearnerState,
        ys: Any,
        *,
        mask: Any = None,
        inputs: Any = None,
        length: Any = None,
    ) -> tuple[LearnerState, LearnerOutput]:
        """Reads many rows in one compiled program, with a step at each.

        Args:
            state: what `init` or the previous call returned.
            ys: observations, of shape `(time, obs)`; NaN where missing.
            mask: true where an entry was seen.
            inputs: inputs of shape `(time, input)`, if the model takes them.
            length: how many of the rows exist. A last chunk that is padded to the size of the
                others is not compiled anew.

        Returns:
            The next state, and what was known after each row; NaN from `length` on.
        """
        model = unwrap(eqx.combine(*self.parts)[1])
        series = prepare_data(model, ys, mask=mask, inputs=inputs, length=length)
        rows, count = rows_and_count(series, dtype_of(state.parameters))
        if count.ndim == 0 and rows.y.shape[0] == 1:
            rows = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), rows)
            state, out = _scan(self, state, rows, count)
            return state, jax.tree.map(lambda leaf: leaf[:1], out)
        return _scan(self, state, rows, count)


def default_optimiser() -> optax.GradientTransformation:
    """Adam with a constant rate, and gradients clipped: one outlier moves it by little."""
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.flatten(optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-3)))


@eqx.filter_jit
def _update(
    learner: OnlineLearner, state: LearnerState, y: Array, u: Array | None
) -> tuple[LearnerState, LearnerOutput]:
    model = unwrap(eqx.combine(*learner.parts)[1])
    rows, count = one_row(model, y, u, dtype_of(state.parameters))
    state, out = along(partial(learn_row, learner), state, rows, count)
    return state, jax.tree.map(lambda leaf: leaf[0], out)


@eqx.filter_jit
def _scan(
    learner: OnlineLearner, state: LearnerState, rows: Row, count: Int[Array, ""]
) -> tuple[LearnerState, LearnerOutput]:
    return along(partial(learn_row, learner), state, rows, count)


def along(
    read: Callable[[S, Row], tuple[S, T]], state: S, rows: Row, count: Int[Array, ""]
) -> tuple[S, T]:
    """Reads the first `count` rows, one after another: what comes after puts out NaN.

    The program of a row is the same wherever it stands, and so are its last bits.
    """
    first = jax.tree.map(lambda leaf: leaf[0], rows)
    shapes = jax.eval_shape(lambda: read(state, first)[1])
    nothing = jax.tree.map(_unknown, shapes)

    def move(state: S, at: tuple) -> tuple[S, T]:
        row, k = at
        return lax.cond(k < count, lambda: read(state, row), lambda: (state, nothing))

    return lax.scan(move, state, (rows, jnp.arange(rows.y.shape[0])))


def _unknown(shape: jax.ShapeDtypeStruct) -> Array:
    inexact = jnp.issubdtype(shape.dtype, jnp.inexact)
    return jnp.full(shape.shape, jnp.nan if inexact else 0, shape.dtype)


class Seen(NamedTuple):
    """What a step made of a row: the gradient's next state, and what is put out.

    `read` says whether what follows from the row is finite, and `ok` whether the step is as well.
    """

    after: PyTree
    factor: Factor
    elbo_increment: Scalar
    norm: Scalar
    read: Bool[Array, ""]
    ok: Bool[Array, ""]


# Compiled by itself, it is traced once, for its shapes and for its loop.
@eqx.filter_jit
def learn_row(
    learner: OnlineLearner, state: LearnerState, row: Row
) -> tuple[LearnerState, LearnerOutput]:
    """Reads one row."""
    key = jax.random.fold_in(state.key, state.num_read.astype(jnp.uint32))
    fixed = learner.parts.fixed

    def step(carry: tuple, number: Array) -> tuple[tuple, Seen]:
        parameters, optimiser = carry
        after, found = learner.gradient.update(
            Parts(parameters, fixed), state.gradient, row, jax.random.fold_in(key, number)
        )
        read = _all_finite((after, found.elbo_increment))
        ok = read & _all_finite(found.increment)
        # Zeros in place of what is not finite: the optimiser's own arithmetic stays finite too.
        ascended = jax.tree.map(lambda leaf: jnp.where(ok, leaf, 0.0), found.increment)
        descended = jax.tree.map(jnp.negative, ascended)
        update, moved = learner.optimiser.update(descended, optimiser, parameters)
        applied = optax.apply_updates(parameters, update)
        ok = ok & _all_finite((applied, moved))
        taken = ok & found.due
        parameters = _choose(taken, applied, parameters)
        optimiser = _choose(taken, moved, optimiser)
        norm = jnp.where(found.due, _norm(ascended), 0.0)
        kept = Seen(after, found.factor, found.elbo_increment, norm, read, ok)
        return (parameters, optimiser), kept

    carry = (state.parameters, state.optimiser)
    if learner.steps_per_row == 1:
        carry, seen = step(carry, jnp.zeros((), jnp.uint32))
    else:
        # Every step reads the same row from the state before it; the last one is kept.
        steps = jnp.arange(learner.steps_per_row, dtype=jnp.uint32)
        carry, several = lax.scan(step, carry, steps)
        seen = jax.tree.map(lambda leaf: leaf[-1], several)
    parameters, optimiser = carry
    # A row of which only the step is not finite may not be the one at fault.
    left = _choose(seen.read, learner.gradient.unseen(state.gradient), state.gradient)
    state = LearnerState(
        parameters,
        optimiser,
        _choose(seen.ok, seen.after, left),
        state.num_read + 1,
        state.num_skipped + jnp.where(seen.ok, 0, 1),
        state.key,
    )
    family, _ = Parts(parameters, fixed).whole
    filtered = exact_moments(seen.factor.law.mean, seen.factor.law.covariance)
    smoothed = _one_back(family, seen.factor, jax.random.fold_in(key, learner.steps_per_row))
    smoothed = jax.tree.map(lambda leaf: jnp.where(state.num_read > 1, leaf, jnp.nan), smoothed)
    return state, LearnerOutput(filtered, smoothed, seen.elbo_increment, seen.norm, ~seen.ok)


def _one_back(family: Any, factor: Factor, key: PRNGKey) -> LagMoments:
    """The moments of x_{k-1} given y_{0:k}: q_k through the last kernel."""
    law, kernel = factor.law, factor.kernel
    if isinstance(kernel, LinearGaussianKernel):
        weight, spread = kernel.weight, linalg.outer_gram(dense_scale(kernel.scale_tril))
        moved = linalg.matmul(linalg.matmul(weight, law.covariance), weight.T)
        return exact_moments(linalg.matvec(weight, law.mean) + kernel.bias, moved + spread)
    if not isinstance(family, AbstractSampledFamily):
        raise TypeError(f"{type(family).__name__} does not say what its backward kernels share.")
    shared = family.shared()
    noise = jax.random.normal(key, (NUM_DRAWS, law.noise_dim), law.mean.dtype)
    xs = jax.vmap(law.from_noise)(noise)
    given = jax.vmap(lambda x: shared.law(kernel, x))(xs)
    means, covariances = jax.vmap(lambda one: (one.mean, one.covariance))(given)
    mean = jnp.mean(means, axis=0)
    off = means - mean[None]
    terms = covariances + off[:, :, None] * off[:, None, :]
    return LagMoments(mean, jnp.mean(terms, axis=0), _error(means), _error(terms))


def _error(draws: Float[Array, "sample *shape"]) -> Float[Array, "*shape"]:
    """The standard error of the mean of draws."""
    return jnp.std(draws, axis=0, ddof=1) / jnp.sqrt(jnp.asarray(draws.shape[0], draws.dtype))


def _norm(tree: PyTree) -> Scalar:
    return jnp.linalg.norm(ravel_pytree(tree)[0])


def _all_finite(tree: PyTree) -> Bool[Array, ""]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if eqx.is_inexact_array(leaf)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def _choose(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)
