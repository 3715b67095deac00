"""Series that a model makes up, as like the given ones as can be."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from retrodict._learning import batch_for
from retrodict._learning import num_series as count_series
from retrodict._model import StateSpaceModel
from retrodict._parameters import unwrap
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict._validate import check_count, check_key

MOST_ROWS = 64
"""The longest series to train on. Families that were trained on 64 rows were seen to hold on 500;
the time of a step grows with the rows."""


class Simulated(NamedTuple):
    """Simulated series, with the gaps, inputs and lengths of given ones.

    Attributes:
        ys: the observations, gaps included; `options` says which of them were seen.
        options: `mask`, `inputs` and `length`, to be passed on to `fit` and other verbs.
    """

    ys: Float[Array, "batch time obs"]
    options: dict[str, Any]


def simulate_like(
    key: PRNGKey,
    model: StateSpaceModel,
    ys: Any,
    num_series: int,
    *,
    num_times: int = MOST_ROWS,
    mask: Any = None,
    inputs: Any = None,
    length: Any = None,
) -> Simulated:
    """Series from a model under the inputs, the gaps and the lengths of given ones.

    Each takes after one of the given series, in turn: a window of its rows, placed at random, lends
    it its inputs, what is seen, and how many rows there are. For training a family, and for
    parametric bootstraps.

    Example:
        >>> import jax, jax.numpy as jnp, retrodict as rd
        >>> model = rd.StateSpaceModel(
        ...     prior=rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
        ...     transition=rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ...     emission=rd.LinearGaussianKernel(jnp.eye(1), jnp.zeros(1), jnp.eye(1)),
        ... )
        >>> ys = jnp.zeros((100, 1)).at[3].set(jnp.nan)
        >>> found = rd.simulate_like(jax.random.key(0), model, ys, 8, num_times=100)
        >>> found.ys.shape, bool(found.options["mask"][0, 3, 0])
        ((8, 100, 1), False)

    Args:
        key: a typed key.
        model: the model.
        ys: the series to take after, of shape `(batch, time, obs)` or `(time, obs)`.
        num_series: how many to simulate.
        num_times: the longest window, in rows.
        mask: true where an entry was seen, of the shape of `ys`.
        inputs: inputs, of shape `(batch, time, input)` or `(time, input)`.
        length: how many rows exist, one integer a series or one for all.
    """
    check_key(key, "simulate_like")
    count, rows = check_count(num_series, "num_series"), check_count(num_times, "num_times")
    plain = unwrap(model)
    batch = batch_for(plain, ys, mask=mask, inputs=inputs, length=length, owner="simulate_like")
    return like_batch(key, plain, batch, count, rows)


def like_batch(
    key: PRNGKey, model: StateSpaceModel, batch: Series, count: int, most_rows: int
) -> Simulated:
    """Series from the model under the inputs, the gaps and the lengths of given ones.

    Each simulated series takes after one of the given, in turn: a window of its rows, placed at
    random, lends it its inputs, what is seen, and how many rows there are. Paths that leave the
    range of floating-point numbers, as those of an unstable transition may, are replaced by others.

    Args:
        key: a typed key.
        model: an unwrapped model.
        batch: the series to take after.
        count: how many to simulate.
        most_rows: the longest window.

    Raises:
        ValueError: if more than half of the paths are not finite.
    """
    path_key, place_key = jax.random.split(key)
    given = jnp.arange(count) % count_series(batch)
    lengths = jnp.full(count, batch.ys.shape[1]) if batch.length is None else batch.length[given]
    num_rows = min(int(jnp.max(lengths)), most_rows)
    kept = jnp.minimum(lengths, num_rows)
    places = jax.random.uniform(place_key, (count,))
    begin = jnp.floor(places * (lengths - kept + 1)).astype(int)
    # Windows of short series run into padding, which is padding there as well.
    rows = jnp.minimum(begin[:, None] + jnp.arange(num_rows)[None], batch.ys.shape[1] - 1)

    def window(array: Array | None) -> Array | None:
        return None if array is None else array[given[:, None], rows]

    inputs = window(batch.inputs)
    ys = jax.vmap(lambda key, us: model.simulate(key, num_rows, inputs=us)[1])(
        jax.random.split(path_key, count), inputs
    )
    options = {
        "mask": window(batch.mask),
        "inputs": inputs,
        "length": None if batch.length is None else kept,
    }
    finite = np.asarray(jnp.all(jnp.isfinite(ys), axis=(1, 2)))
    if finite.all():
        return Simulated(ys, options)
    if finite.mean() < 0.5:
        raise ValueError(
            f"The model simulates series that are not finite ({np.sum(~finite)} of {count}), and no"
            " family can be trained on them. Use a smoother that needs no training, such as"
            " iterated_smoother or ffbsi, or a transition that stays bounded."
        )
    chosen = np.where(finite, np.arange(count), np.resize(np.flatnonzero(finite), count))
    return jax.tree.map(lambda leaf: leaf[chosen], Simulated(ys, options))
