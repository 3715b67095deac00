"""Gradients of the ELBO that are carried along a stream: what each row adds, in fixed memory."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._families import AbstractFactorFamily, Factor, Row, rows_of
from retrodict._model import StateSpaceModel, prepare_data
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict._validate import check_key
from retrodict.online.parts import Learn, Parts, dtype_of, parts_of
from retrodict.online.stream import cast, zeros_like_shapes


class RowGradient(eqx.Module):
    """What one row says of the parameters; along a leading axis `time` for many rows.

    Gradients have the structure of the parameters: `(family, model)` with `None` for all that is
    not learned.

    Attributes:
        elbo_increment: what the row added to the ELBO, in nats.
        gradient: the gradient of the ELBO of the rows so far, or of those in a window.
        increment: what the row added to the gradient, or the window's mean: what a learner ascends.
        due: whether the row has a gradient; methods may look at some of the rows only.
        factor: the law q_k and the kernel q_{k-1|k} at these parameters.
    """

    elbo_increment: Float[Array, "..."]
    gradient: PyTree
    increment: PyTree
    due: Bool[Array, "..."]
    factor: Factor


class AbstractRecursiveGradient(eqx.Module):
    """A way to follow the gradient of the ELBO along a stream: `init`, and `update` by one row.

    The state holds arrays of a size that does not grow. Both are pure and run inside `lax.scan`;
    parameters may differ from row to row, as they do while they are learned.
    """

    @abstractmethod
    def init(self, parts: Parts) -> PyTree:
        """The state before anything was read."""

    @abstractmethod
    def update(
        self, parts: Parts, state: PyTree, row: Row, key: PRNGKey
    ) -> tuple[PyTree, RowGradient]:
        """Reads one row.

        Args:
            parts: the family and the model, at the parameters to differentiate at.
            state: what `init` or the previous call returned.
            row: the row, with a boolean `seen`.
            key: a typed key for what is drawn at this row.
        """

    def unseen(self, state: PyTree) -> PyTree:
        """The state as if nothing had been seen in the rows that later gradients go over again.

        A learner goes on from it where no finite step follows from these rows, since each later
        step would meet them too. Methods that keep no rows have nothing to do.
        """
        return state

    @abstractmethod
    def check(self, parts: Parts) -> None:
        """Refuses a family or a model that the method does not take."""


def recursive_gradient(
    gradient: AbstractRecursiveGradient,
    family: AbstractFactorFamily | None,
    model: StateSpaceModel,
    ys: Any,
    *,
    key: PRNGKey,
    learn: Learn | PyTree = "both",
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> RowGradient:
    """The recursive gradient after each row of a series, at parameters that stay where they are.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> rows = rd.online.recursive_gradient(
        ...     rd.online.KalmanScore(), None, model, jnp.ones((5, 1)), key=jax.random.key(0)
        ... )
        >>> rows.gradient[1].transition.weight.shape
        (5, 1, 1)

    Args:
        gradient: the method.
        family: the family λ; `None` for methods that do without.
        model: the model θ.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        key: a typed key.
        learn: what to differentiate in: `"family"`, `"model"`, `"both"`, or a pytree of booleans
            over `(family, model)`. Scales of a model that is learned by name are held positive, and
            gradients are in their unconstrained arrays.
        mask: true where an entry was seen.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: how many rows exist; what comes after repeats the last of them.

    Returns:
        The gradients after each row.
    """
    check_key(key, "recursive_gradient")
    check_gradient(gradient, "recursive_gradient")
    parts = parts_of(family, model, learn, "recursive_gradient")
    gradient.check(parts)
    series = prepare_data(unwrap(model), ys, mask=mask, inputs=inputs, length=length)
    series = cast(series, dtype_of(parts.parameters))
    if series.mask is None:
        series = Series(series.ys, jnp.ones(series.ys.shape, bool), series.inputs, series.length)
    return _at_each_row(gradient, parts, series, key)


@eqx.filter_jit
def _at_each_row(
    gradient: AbstractRecursiveGradient, parts: Parts, series: Series, key: PRNGKey
) -> RowGradient:
    state, rows = gradient.init(parts), rows_of(series)
    first = jax.tree.map(lambda leaf: leaf[0], rows)
    count = series.num_times if series.length is None else series.length
    zeros = zeros_like_shapes(jax.eval_shape(lambda: gradient.update(parts, state, first, key)[1]))

    def move(carry: tuple, at: tuple) -> tuple[tuple, RowGradient]:
        row, k = at

        def read() -> tuple:
            return gradient.update(parts, carry[0], row, jax.random.fold_in(key, k))

        carry = lax.cond(k < count, read, lambda: carry)
        return carry, carry[1]

    return lax.scan(move, (state, zeros), (rows, jnp.arange(series.num_times)))[1]


def check_gradient(gradient: Any, owner: str) -> None:
    """Refuses what is not a recursive gradient."""
    if not isinstance(gradient, AbstractRecursiveGradient):
        raise TypeError(
            f"{owner} expects a recursive gradient, such as TruncatedBackprop(window=8), got"
            f" {type(gradient).__name__}."
        )


def check_has_family(parts: Parts, owner: str) -> None:
    """Refuses a missing family."""
    if eqx.combine(*parts)[0] is None:
        raise ValueError(f"{owner} needs a family, got None. KalmanScore() does without.")
