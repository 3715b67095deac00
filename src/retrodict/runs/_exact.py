"""Moments in closed form under linear-Gaussian models: one step ahead, and of new observations."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd


class Moments(NamedTuple):
    """Means and standard deviations of the entries of each row, of shape `(time, obs)`."""

    mean: np.ndarray
    std: np.ndarray


def one_step_ahead(
    model: rd.StateSpaceModel, ys: Any, *, mask: Any = None, inputs: Any = None
) -> Moments:
    """Return the moments of each row given the rows before it.

    Args:
        model: a linear-Gaussian model without wrappers.
        ys: one series, of shape `(time, obs)`.
        mask: true where an entry was observed.
        inputs: inputs, of shape `(time, input)`, if the model takes them.
    """
    filtered = rd.kalman_smoother(model, ys, mask=mask, inputs=inputs).chain.laws
    return _numbers(_ahead(model, filtered.mean, filtered.covariance, _array(inputs)))


def replicate_moments(
    model: rd.StateSpaceModel, mean: Any, covariance: Any, inputs: Any
) -> Moments:
    """Return the moments of a new observation of each row.

    Args:
        model: a model with a linear-Gaussian emission, without wrappers.
        mean: of the states, of shape `(time, state)`.
        covariance: of the states, of shape `(time, state, state)`.
        inputs: of shape `(time, input)`, if the model takes them.
    """
    moments = _images(model.emission, jnp.asarray(mean), jnp.asarray(covariance), _array(inputs))
    return _numbers(moments)


def _array(inputs: Any) -> jax.Array | None:
    return None if inputs is None else jnp.asarray(inputs)


def _numbers(moments: tuple[jax.Array, jax.Array]) -> Moments:
    variance = np.diagonal(np.asarray(moments[1]), axis1=1, axis2=2)
    return Moments(np.asarray(moments[0]), np.sqrt(np.maximum(variance, 0.0)))


@eqx.filter_jit
def _ahead(
    model: rd.StateSpaceModel, mean: jax.Array, covariance: jax.Array, us: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    later = None if us is None else us[1:]
    moved = _images(model.transition, mean[:-1], covariance[:-1], later)
    means = jnp.concatenate([model.prior.mean[None], moved[0]])
    covariances = jnp.concatenate([model.prior.covariance[None], moved[1]])
    return _images(model.emission, means, covariances, us)


@eqx.filter_jit
def _images(
    kernel: Any, mean: jax.Array, covariance: jax.Array, us: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the moments of each row after a linear-Gaussian kernel: w m + b and w P wᵀ + s sᵀ."""

    def image(m: jax.Array, p: jax.Array, u: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        law = kernel.law(m, u)
        weight = jax.jacfwd(lambda x: kernel.law(x, u).mean)(m)
        return law.mean, weight @ p @ weight.T + law.covariance

    return jax.vmap(image, in_axes=(0, 0, None if us is None else 0))(mean, covariance, us)
