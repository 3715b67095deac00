"""Train a family on series that are simulated from the model."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from retrodict._families import AbstractFamily, MixtureFamily, NonlinearFamily
from retrodict._learning import FitResult, fit
from retrodict._model import StateSpaceModel
from retrodict._series import Series
from retrodict._smooth.simulate_like import MOST_ROWS, simulate_batch
from retrodict._types import PRNGKey

NUM_HELD_OUT = 128
"""The number of simulated series that compare the families and are not trained on."""


class Training(NamedTuple):
    """A trained family, and a description of the training."""

    family: AbstractFamily
    description: str


def train_family(
    key: PRNGKey,
    model: StateSpaceModel,
    batch: Series,
    *,
    num_steps: int,
    num_series: int,
    progress: bool | Callable[[int, float], None],
) -> Training:
    """Train a mixture and a nonlinear family, and return the better one.

    Both are trained to the end: stopping one early would cost another compilation, which takes as
    long as the steps it saves. A family that loses one of two modes loses log 2 nats of ELBO for
    the whole series, which is little per time step. So the mixture, which can represent both modes,
    is preferred unless the other is better by more than that.

    Args:
        key: a typed key.
        model: the model.
        batch: the series that will be smoothed.
        num_steps: training steps per family.
        num_series: the number of series to simulate for training.
        progress: as in `fit`.

    Raises:
        NonFiniteSimulation: if most of the simulated series are not finite.
    """
    data_key, held_key, mixture_key, nonlinear_key, key = jax.random.split(key, 5)
    train = simulate_batch(data_key, model, batch, num_series, MOST_ROWS)
    held_out = tuple(simulate_batch(held_key, model, batch, NUM_HELD_OUT, MOST_ROWS))
    dims = (model.state_dim, batch.ys.shape[-1])
    input_dim = 0 if batch.inputs is None else batch.inputs.shape[-1]

    def trained(family: AbstractFamily) -> FitResult:
        options = {"num_steps": num_steps, "held_out": held_out, "progress": progress}
        return fit(key, family, model, train.ys, **options, **train.options)

    mixture = trained(MixtureFamily(mixture_key, *dims, input_dim=input_dim))
    nonlinear = trained(NonlinearFamily(nonlinear_key, *dims, input_dim=input_dim))
    elbos = _held_out_elbo(mixture), _held_out_elbo(nonlinear)
    num_rows = train.ys.shape[1]
    best = nonlinear if elbos[1] > elbos[0] + math.log(2) / num_rows else mixture
    return Training(
        best.family,
        f"A {type(best.family).__name__} was trained on {num_series} simulated series of"
        f" {num_rows} rows (held-out ELBO, nats per time step: {elbos[0]:.3f} for a mixture,"
        f" {elbos[1]:.3f} for a nonlinear family)",
    )


def _held_out_elbo(result: FitResult) -> float:
    """Return the held-out ELBO of the returned family, −∞ if it is not finite."""
    elbo = float(result.held_out[result.held_out_steps == result.kept_step][-1])
    return elbo if math.isfinite(elbo) else -math.inf
