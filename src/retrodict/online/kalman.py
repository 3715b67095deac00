"""The exact score of a linear-Gaussian model along a stream, by derivatives of its filter."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from retrodict._arrays import PRNGKey, Scalar
from retrodict._exact import reduce_rows, whiten
from retrodict._families import Factor
from retrodict._model import (
    Gaussian,
    LinearGaussianKernel,
    Series,
    StateSpaceModel,
    dense_scale,
    is_linear_gaussian,
)
from retrodict._numerics import GaussianLaw, condition, law_of, predict, reverse
from retrodict.online.gradient import AbstractRecursiveGradient, Parts, RowGradient
from retrodict.online.stream import choose


class KalmanScoreState(eqx.Module):
    """The state of `KalmanScore`.

    Attributes:
        law: the last filtering law.
        sensitivity: the derivatives of its arrays in each parameter.
        gradient: the gradient of the log-evidence so far.
        started: whether a row was read.
    """

    law: GaussianLaw
    sensitivity: Float[Array, "parameter entries"]
    gradient: Float[Array, "parameter"]
    started: Bool[Array, ""]


class KalmanScore(AbstractRecursiveGradient):
    """The exact gradient of log p(y_{0:k}) of a linear-Gaussian model, for recursive likelihood.

    The derivatives of the filtering law in every parameter are updated with it, and each row adds
    the derivative of log p(y_k | y_{0:k-1}). No family is needed, and none is learned. A row
    costs one filtering step per learned number.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> ys, key = jnp.ones((5, 1)), jax.random.key(0)
        >>> rows = rd.online.recursive_gradient(rd.online.KalmanScore(), None, model, ys, key=key)
        >>> score = rows.gradient[1]  # after each row
        >>> score.prior.mean.shape
        (5, 1)
    """

    def check(self, parts: Parts) -> None:
        """Raise unless the model is linear Gaussian and no family is learned."""
        _, model = parts.whole
        if not is_linear_gaussian(model):
            raise TypeError(
                "KalmanScore expects a linear-Gaussian model with a Gaussian prior. For others use"
                " TruncatedBackprop(window) with a family."
            )
        if jax.tree.leaves(parts.parameters[0]):
            raise ValueError("KalmanScore learns no family: pass None for it, or learn='model'.")

    def init(self, parts: Parts) -> KalmanScoreState:
        """Return the state before the first row."""
        _, model = parts.whole
        law = _prior(model)
        none, entries = jnp.zeros_like(parts.vector), ravel_pytree(law)[0].shape[0]
        sensitivity = jnp.zeros((none.shape[0], entries), none.dtype)
        return KalmanScoreState(law, sensitivity, none, jnp.zeros((), bool))

    def update(
        self, parts: Parts, state: KalmanScoreState, row: Series, key: PRNGKey
    ) -> tuple[KalmanScoreState, RowGradient]:
        """Filter one row, and update the derivatives."""
        vector, true = parts.vector, jnp.ones((), bool)
        entries, unravel = ravel_pytree(state.law)

        def step(vector: Array, before: Array) -> tuple[Array, Scalar]:
            _, model = parts.at(vector)
            law, increment = _filter(model, unravel(before), state.started, row)
            return ravel_pytree(law)[0], increment

        after, increment = step(vector, entries)

        def along(parameter: Array, entry: Array) -> tuple[Array, Scalar]:
            return jax.jvp(step, (vector, entries), (parameter, entry))[1]

        each = jnp.eye(vector.shape[0], dtype=vector.dtype)
        sensitivity, slope = jax.vmap(along)(each, state.sensitivity)
        total, law = state.gradient + slope, unravel(after)
        _, model = parts.whole
        factor = _factor(model, state.law, law, row)
        gradient, added = parts.unravel(total), parts.unravel(slope)
        return (
            KalmanScoreState(law, sensitivity, total, true),
            RowGradient(increment, gradient, added, true, factor),
        )


def _prior(model: StateSpaceModel) -> GaussianLaw:
    return law_of(model.prior.mean, dense_scale(model.prior.scale_tril))


def _filter(
    model: Any, before: GaussianLaw, started: Array, row: Series
) -> tuple[GaussianLaw, Scalar]:
    """Return the filtering law after a row, and log p(y_k | y_{0:k-1}) of its observed entries."""
    transition, emission = model.transition.at(row.inputs), model.emission.at(row.inputs)
    moved = predict(before, transition.weight, transition.bias, dense_scale(transition.scale_tril))
    predicted = choose(started, moved, _prior(model))
    design, value, constant = whiten(
        emission.weight, emission.scale_tril, row.ys - emission.bias, row.mask
    )
    law, innovation = condition(predicted, *reduce_rows(design, value))
    return law, innovation.log_prob + constant


def _factor(model: Any, before: GaussianLaw, law: GaussianLaw, row: Series) -> Factor:
    """Return the filtering law, and the transition reversed under the previous law."""
    transition = model.transition.at(row.inputs)
    back = reverse(before, transition.weight, transition.bias, dense_scale(transition.scale_tril))
    return Factor(Gaussian(*law), LinearGaussianKernel(*back))
