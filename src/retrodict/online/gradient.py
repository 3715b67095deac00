"""Recursive gradients of the ELBO along a stream, in memory that does not grow."""

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
    """The gradient at one row, with a leading axis `time` for several rows.

    Gradients have the structure of the parameters: `(family, model)` with `None` for all fixed
    leaves.

    Attributes:
        elbo_increment: what the row added to the ELBO, in nats.
        gradient: the gradient of the ELBO of the rows so far, or of those in a window.
        increment: what the row added to the gradient, or the mean over the window; a learner
            ascends it.
        due: whether the row has a gradient; methods may skip rows.
        factor: the law q_k and the kernel q_{k-1|k} at these parameters.
    """

    elbo_increment: Float[Array, "..."]
    gradient: PyTree
    increment: PyTree
    due: Bool[Array, "..."]
    factor: Factor


class AbstractRecursiveGradient(eqx.Module):
    """A method to compute the gradient of the ELBO along a stream: `init`, and `update` per row.

    The state holds arrays of a size that does not grow. Both are pure and run inside `lax.scan`;
    parameters may change from row to row, as they do during learning.
    """

    @abstractmethod
    def init(self, parts: Parts) -> PyTree:
        """Return the state before the first row."""

    @abstractmethod
    def update(
        self, parts: Parts, state: PyTree, row: Row, key: PRNGKey
    ) -> tuple[PyTree, RowGradient]:
        """Read one row.

        Args:
            parts: the family and the model, at the parameters to differentiate at.
            state: the state that `init` or the previous call returned.
            row: the row, with a boolean `seen`.
            key: a typed key for the draws of this row.
        """

    def unseen(self, state: PyTree) -> PyTree:
        """Return the state with the stored rows marked as missing.

        A learner continues from it if no finite step follows from these rows, since later steps
        would read them again. Methods that store no rows return the state unchanged.
        """
        return state

    @abstractmethod
    def check(self, parts: Parts) -> None:
        """Raise unless the method supports the family and the model."""


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
    """Return the recursive gradient after each row of a series, at fixed parameters.

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
        family: the family λ; `None` for methods that need none.
        model: the model θ.
        ys: observations, of shape `(time, obs)`; NaN where missing.
        key: a typed key.
        learn: the parameters to differentiate: `"family"`, `"model"`, `"both"`, or a pytree of
            booleans over `(family, model)`. Scales of a model that is learned by name stay
            positive, and gradients refer to their unconstrained arrays.
        mask: true where an entry was observed.
        inputs: inputs of shape `(time, input)`, if the model takes them.
        length: the number of rows that exist; later rows repeat the last of them.

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
    """Raise unless the argument is a recursive gradient."""
    if not isinstance(gradient, AbstractRecursiveGradient):
        raise TypeError(
            f"{owner} expects a recursive gradient, such as TruncatedBackprop(window=8), got"
            f" {type(gradient).__name__}."
        )


def check_has_family(parts: Parts, owner: str) -> None:
    """Raise if there is no family."""
    if eqx.combine(*parts)[0] is None:
        raise ValueError(f"{owner} needs a family, got None. Pass a family, or use KalmanScore().")
