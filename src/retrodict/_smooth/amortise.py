"""Training a family on series that the model itself makes up, as like the given ones as can be."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from retrodict._families import AbstractFamily, MixtureFamily, NonlinearFamily
from retrodict._learning import FitResult, fit
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._smooth.simulate_like import MOST_ROWS, like_batch
from retrodict._types import PRNGKey

NUM_HELD_OUT = 128
"""How many simulated series grade the families and are not trained on."""


class Training(NamedTuple):
    """A trained family, and how it came to be chosen."""

    family: AbstractFamily
    story: str


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
    train = like_batch(data_key, model, batch, num_series, MOST_ROWS)
    held_out = tuple(like_batch(held_key, model, batch, NUM_HELD_OUT, MOST_ROWS))
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
