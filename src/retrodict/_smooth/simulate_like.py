"""Simulate series that match given ones in length, gaps and inputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._arrays import PRNGKey, check_count, check_key
from retrodict._learning import batch_for
from retrodict._model import Series, StateSpaceModel, unwrap

MAX_ROWS = 64
"""The longest series to train on. Families trained on 64 rows were accurate on 500. A step takes
time in proportion to the rows."""


class Simulated(NamedTuple):
    """Simulated series, with the gaps, inputs and lengths of given ones.

    Attributes:
        ys: the observations, also where `options["mask"]` is false.
        options: `mask`, `inputs` and `length`, the keyword arguments of `fit` and other verbs.
    """

    ys: Float[Array, "batch time obs"]
    options: dict[str, Any]


class NonFiniteSimulation(ValueError):
    """A model whose simulated paths mostly leave the range of floating-point numbers."""


def simulate_like(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    num_series: int,
    *,
    num_times: int = MAX_ROWS,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Simulated:
    """Simulate series from a model with the inputs, gaps and lengths of given series.

    Each simulated series copies the inputs, the mask and the length of a random window of one of
    the given series, which are taken in turn. Paths that are not finite, as those of an unstable
    transition may be, are replaced by others. Use it to train a family, and for parametric
    bootstraps.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> ys = jnp.zeros((100, 1)).at[3].set(jnp.nan)
        >>> simulated = rd.simulate_like(jax.random.key(0), model, ys, 8, num_times=100)
        >>> simulated.ys.shape, bool(simulated.options["mask"][0, 3, 0])
        ((8, 100, 1), False)

    Args:
        key: a typed key.
        model: the model.
        ys: the series to match, of shape `(batch, time, obs)` or `(time, obs)`.
        num_series: the number of series to simulate.
        num_times: the longest window, in rows.
        mask: true where an entry was observed, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)` or `(time, input)`.
        length: the number of rows that exist, one integer per series or one for all.

    Raises:
        ValueError: if more than half of the paths are not finite.
    """
    check_key(key, "simulate_like")
    count, rows = check_count(num_series, "num_series"), check_count(num_times, "num_times")
    plain = unwrap(model)
    batch = batch_for(plain, ys, mask=mask, inputs=inputs, length=length)
    return simulate_batch(key, plain, batch, count, rows)


def simulate_batch(
    key: PRNGKey, model: StateSpaceModel, batch: Series, count: int, most_rows: int
) -> Simulated:
    """Simulate series as `simulate_like` does, from an unwrapped model and a prepared batch."""
    path_key, place_key = jax.random.split(key)
    source = jnp.arange(count) % batch.num_series
    lengths = jnp.full(count, batch.ys.shape[1]) if batch.length is None else batch.length[source]
    num_rows = min(int(jnp.max(lengths)), most_rows)
    new_lengths = jnp.minimum(lengths, num_rows)
    places = jax.random.uniform(place_key, (count,))
    begin = jnp.floor(places * (lengths - new_lengths + 1)).astype(int)
    # Windows of short series extend into padding, which stays padding.
    rows = jnp.minimum(begin[:, None] + jnp.arange(num_rows)[None], batch.ys.shape[1] - 1)

    def window(array: Array | None) -> Array | None:
        return None if array is None else array[source[:, None], rows]

    inputs = window(batch.inputs)
    ys = jax.vmap(lambda key, us: model.simulate(key, num_rows, inputs=us)[1])(
        jax.random.split(path_key, count), inputs
    )
    options = {
        "mask": window(batch.mask),
        "inputs": inputs,
        "length": None if batch.length is None else new_lengths,
    }
    finite = np.asarray(jnp.all(jnp.isfinite(ys), axis=(1, 2)))
    if finite.all():
        return Simulated(ys, options)
    if finite.mean() < 0.5:
        raise NonFiniteSimulation(
            f"The model simulates series that are not finite ({np.sum(~finite)} of {count}), and no"
            " family can be trained on them. Use a smoother that needs no training, such as"
            " iterated_smoother or ffbsi, or a transition that stays bounded."
        )
    chosen = np.where(finite, np.arange(count), np.resize(np.flatnonzero(finite), count))
    return jax.tree.map(lambda leaf: leaf[chosen], Simulated(ys, options))
