"""Recursive gradients of the ELBO along a stream, in memory that does not grow."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from retrodict._arrays import PRNGKey, check_key
from retrodict._families import AbstractFactorFamily, Factor, check_fits
from retrodict._learning import Learn, Parts, partition
from retrodict._model import (
    Series,
    StateSpaceModel,
    check_densities,
    prepare_data,
    repeat_last_row,
    unwrap,
)
from retrodict.online.stream import cast, complete, read_in_loop


def parts_of(
    family: AbstractFactorFamily | None,
    model: StateSpaceModel,
    learn: Learn | PyTree,
    owner: str,
) -> Parts:
    """Return `partition` for a checked family and model, of which something is learned."""
    check_kinds(family, model, owner)
    parts = partition(family, model, learn, owner)
    if not jax.tree.leaves(parts.parameters):
        raise ValueError(
            f"{owner} has nothing to learn: learn={learn!r} selects no floating-point array."
        )
    return parts


def check_kinds(family: Any, model: Any, owner: str) -> None:
    """Raise unless the family, if there is one, and the model fit, and the model has densities."""
    if family is not None and not isinstance(family, AbstractFactorFamily):
        raise TypeError(
            f"{owner} expects a family, such as GatedFamily(...), got {type(family).__name__}."
        )
    if not isinstance(model, StateSpaceModel):
        raise TypeError(f"{owner} expects a StateSpaceModel, got {type(model).__name__}.")
    if family is not None:
        check_fits(family, model)
    check_densities(unwrap(model), owner)


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

    Example:
        A method with clipped gradients:

        >>> import equinox as eqx, jax, jax.numpy as jnp, retrodict as rd
        >>> class Clipped(rd.online.AbstractRecursiveGradient):
        ...     inner: rd.online.AbstractRecursiveGradient
        ...     def check(self, parts):
        ...         self.inner.check(parts)
        ...     def init(self, parts):
        ...         return self.inner.init(parts)
        ...     def update(self, parts, state, row, key):
        ...         state, read = self.inner.update(parts, state, row, key)
        ...         clip = lambda tree: jax.tree.map(lambda leaf: jnp.clip(leaf, -1.0, 1.0), tree)
        ...         return state, eqx.tree_at(lambda read: read.gradient, read, replace_fn=clip)
        >>> gradient, key = Clipped(rd.online.KalmanScore()), jax.random.key(0)
        >>> model, ys = rd.models.local_level(prior_scale=1.0), jnp.array([[1.0], [2.0], [9.0]])
        >>> rows = rd.online.recursive_gradient(gradient, None, model, ys, key=key)
        >>> rows.gradient[1].emission.fn.obs_scale.raw.shape
        (3, 1)
    """

    @abstractmethod
    def init(self, parts: Parts) -> PyTree:
        """Return the state before the first row."""

    @abstractmethod
    def update(
        self, parts: Parts, state: PyTree, row: Series, key: PRNGKey
    ) -> tuple[PyTree, RowGradient]:
        """Read one row.

        Args:
            parts: the family and the model, at the parameters to differentiate at.
            state: the state that `init` or the previous call returned.
            row: the row, with a `mask`.
            key: a typed key for the draws of this row.
        """

    def mark_rows_missing(self, state: PyTree) -> PyTree:
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
    return _at_each_row(gradient, parts, complete(cast(series, parts.dtype)), key)


@eqx.filter_jit
def _at_each_row(
    gradient: AbstractRecursiveGradient, parts: Parts, series: Series, key: PRNGKey
) -> RowGradient:
    def read(state: PyTree, at: tuple) -> tuple[PyTree, RowGradient]:
        row, k = at
        return gradient.update(parts, state, row, jax.random.fold_in(key, k))

    rows = (series.rows, jnp.arange(series.num_times))
    _, out = read_in_loop(read, gradient.init(parts), rows, series.length)
    exists: Any = series.exists()
    return repeat_last_row(out, exists)


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
