"""Training a family on series that the model itself makes up, as like the given ones as can be."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from retrodict._family import AbstractFamily, MixtureFamily, NonlinearFamily
from retrodict._fit import FitResult, fit
from retrodict._fit.batch import num_series as count_series
from retrodict._mask import Series
from retrodict._model import StateSpaceModel
from retrodict._types import PRNGKey

MOST_ROWS = 64
"""The longest series to train on. Families that were trained on 64 rows were seen to hold on 500;
the time of a step grows with the rows."""

NUM_HELD_OUT = 128
"""How many simulated series grade the families and are not trained on."""


class Training(NamedTuple):
    """A trained family, and how it came to be chosen."""

    family: AbstractFamily
    story: str


class Simulated(NamedTuple):
    """Simulated series, with the gaps, inputs and lengths of given ones."""

    ys: Float[Array, "batch time obs"]
    options: dict[str, Any]


def train_family(
    key: PRNGKey,
    model: StateSpaceModel,
    batch: Series,
    *,
    num_steps: int,
    num_series: int,
    progress: bool | Callable[[int, float], None],
) -> Training:
    """Trains a mixture and a nonlinear family, and keeps the better.

    Both are trained to the end: to stop one early would spare steps and cost another compilation,
    which takes as long. Of a posterior with two modes a family may keep one, at the price of log 2
    nats of ELBO for the whole series: hardly anything a time step. So the mixture, which can keep
    both, is kept unless the other is better by more than that.

    Args:
        key: a typed key.
        model: the model.
        batch: the series that will be smoothed.
        num_steps: steps of each family.
        num_series: how many series to simulate for training.
        progress: as in `fit`.
    """
    data_key, held_key, mixture_key, nonlinear_key, key = jax.random.split(key, 5)
    train = simulate_like(data_key, model, batch, num_series)
    held_out = tuple(simulate_like(held_key, model, batch, NUM_HELD_OUT))
    state_dim, obs_dim = model.state_dim, batch.ys.shape[-1]
    input_dim = 0 if batch.inputs is None else batch.inputs.shape[-1]
    families = [
        MixtureFamily(mixture_key, state_dim, obs_dim, input_dim=input_dim),
        NonlinearFamily(nonlinear_key, state_dim, obs_dim, input_dim=input_dim),
    ]
    tried = [
        fit(
            key,
            family,
            model,
            train.ys,
            num_steps=num_steps,
            held_out=held_out,
            progress=progress,
            **train.options,
        )
        for family in families
    ]
    mixture, nonlinear = (_grade(result) for result in tried)
    num_rows = train.ys.shape[1]
    kept = tried[int(nonlinear > mixture + math.log(2) / num_rows)]
    return Training(
        kept.family,
        f"A {type(kept.family).__name__} was trained on {num_series} simulated series of"
        f" {num_rows} rows (held-out ELBO, nats a time step: {mixture:.3f} for a mixture,"
        f" {nonlinear:.3f} for a nonlinear family)",
    )


def _grade(result: FitResult) -> float:
    """The held-out ELBO of what was kept, and −∞ if it never was a number."""
    kept = float(result.held_out[result.held_out_steps == result.kept_step][-1])
    return kept if math.isfinite(kept) else -math.inf


def simulate_like(key: PRNGKey, model: StateSpaceModel, batch: Series, count: int) -> Simulated:
    """Series from the model under the inputs, the gaps and the lengths of given ones.

    Each simulated series takes after one of the given, in turn: a window of at most 64 of its rows,
    placed at random, lends it its inputs, what is seen, and how many rows there are.

    Args:
        key: a typed key.
        model: an unwrapped model.
        batch: the series to take after.
        count: how many to simulate.
    """
    path_key, place_key = jax.random.split(key)
    given = jnp.arange(count) % count_series(batch)
    lengths = jnp.full(count, batch.ys.shape[1]) if batch.length is None else batch.length[given]
    num_rows = min(int(jnp.max(lengths)), MOST_ROWS)
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
    return Simulated(ys, options)
