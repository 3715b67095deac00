"""How a stream is learned from: what moves, by which gradient, and in which steps."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import retrodict as rd
from retrodict._errors import Argument
from retrodict.runs._folder import RunError
from retrodict.runs._plot import check_picture
from retrodict.runs._record import Run

PARTS = ("family", "model", "both")
"""What can be learned."""

RATES = {"constant": 1e-3, "robbins-monro": 0.05}
"""The schedules of step sizes, and the largest step of each unless another is asked for."""

WINDOW = 8
"""Rows that a gradient goes back, unless asked otherwise."""

WARMUP = 100
"""Rows during which steps that shrink grow first: Adam does not know the noise yet."""

LARGEST_GRADIENT = 10.0
"""Where gradients are clipped, in nats by a relative change: an outlier moves little."""


class Learned(NamedTuple):
    """How far a stream has come.

    Attributes:
        rows: how many rows were read, in all sessions of the stream.
        skipped: how many of them were skipped.
        elbo: what a row adds to the ELBO, in nats, on average over the last rows.
        start: the learned parameters of the model, by name, as they are in the run.
        now: the same now; with `family_moved`, the way of a family's parameters over their size.
    """

    rows: int
    skipped: int
    elbo: float
    start: Mapping[str, float]
    now: Mapping[str, float]


@dataclass(frozen=True)
class Learning:
    """That a stream is learned from, how, and what is written of it.

    Attributes:
        what: `"family"`, `"model"` or `"both"`. A run whose smoothing is exact has no family, and
            `"both"` is its model.
        rate: the largest step, relative to the size of a parameter; 0.001 for constant steps and
            0.05 for those that shrink unless it is given.
        schedule: `"constant"`, which follows parameters that drift, or `"robbins-monro"`, by which
            they converge.
        window: how many rows a gradient goes back, 8 unless it is given; for runs with a family.
        history: a .csv file to which the parameters are appended now and then.
        history_every: how many rows lie between two lines of it.
        figure: a picture of the history, drawn now and then and at the end.
        save_run: the folder of a new run with what was learned, written when the rows end.
        told: who is told how far it is, about twice a second.

    Raises:
        RunError: if an option has no such value.
    """

    what: str
    rate: float | None = None
    schedule: str = "constant"
    window: int | None = None
    history: Path | None = None
    history_every: int = 100
    figure: Path | None = None
    save_run: Path | None = None
    told: Callable[[Learned], None] | None = None

    def __post_init__(self) -> None:
        """Refuses what makes no sense, before anything is read."""
        if self.what not in PARTS:
            raise RunError(f"A stream learns {', '.join(PARTS)}, not {self.what!r}.")
        if self.schedule not in RATES:
            raise RunError(f"The schedules are {', '.join(RATES)}, not {self.schedule!r}.")
        if self.rate is not None and not 0.0 <= self.rate < 1.0:
            raise RunError(f"The rate must be at least 0 and less than 1, got {self.rate}.")
        if self.rate == 0.0 and self.schedule != "constant":
            raise RunError("A rate of 0 never shrinks; use the constant schedule with it.")
        for name, value in (("window", self.window), ("history_every", self.history_every)):
            if value is not None and value < 1:
                raise RunError(Argument(name, value), " must be at least 1 row.")
        if self.figure is not None:
            if self.history is None:
                raise RunError("The figure is drawn from the history: name a file for it too.")
            check_picture(self.figure)

    @property
    def settings(self) -> list[Any]:
        """What the state of a stream depends on."""
        return [self.what, self.largest_step, self.schedule, self.window or WINDOW]

    @property
    def largest_step(self) -> float:
        """The rate that was asked for, or that of the schedule."""
        return RATES[self.schedule] if self.rate is None else self.rate

    def learner(self, run: Run, lag: int) -> rd.online.LaggedLearner:
        """What learns from the rows of a stream, and answers them.

        Args:
            run: the run to start from.
            lag: how many rows a smoothed row waits for.

        Raises:
            RunError: if the run has nothing of what is to be learned.
        """
        gradient, steps = self._gradient(run), _steps(self.schedule, self.largest_step)
        part: Any = "model" if run.is_exact else self.what
        family: Any = run.family
        try:
            learner = rd.online.OnlineLearner(family, run.model, gradient, steps, learn=part)
        except (TypeError, ValueError) as error:
            raise RunError(f"{run.path} cannot be learned from a stream: {error}") from error
        width = len(run.layout["inputs"] or ()) + bool(run.layout["step_input"])
        return rd.online.LaggedLearner(learner, lag, input_dim=width or None)

    def _gradient(self, run: Run) -> rd.online.AbstractRecursiveGradient:
        if not run.is_exact:
            return rd.online.TruncatedBackprop(self.window or WINDOW)
        if self.what == "family":
            raise RunError(
                f"{run.path} has no family to learn: its smoothing is exact. Learn the model."
            )
        if self.window is not None:
            raise RunError(
                f"{run.path} needs no window: its smoothing is exact, and so are its gradients."
            )
        return rd.online.KalmanScore()


@functools.cache  # the same object again, so that a program that knows it is not compiled again
def _steps(schedule: str, largest: float) -> optax.GradientTransformation:
    """Adam, for the parameters of the model in units of their own size."""
    rate: Any = largest
    if schedule == "robbins-monro":
        rate = rd.online.robbins_monro(largest, warmup=WARMUP)
    adam = optax.chain(optax.clip_by_global_norm(LARGEST_GRADIENT), optax.adam(rate))
    in_units = optax.stateless(_in_units)
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.chain(in_units, optax.flatten(adam), in_units)


def _in_units(updates: Any, parameters: Any) -> Any:
    """Gradients by relative changes, or steps from relative ones: both are times the size.

    A scale of a thousand would take a hundred thousand steps of 0.01.
    """
    family, model = updates
    scaled = jax.tree.map(
        lambda update, at: update * jnp.maximum(1.0, jnp.abs(at)), model, parameters[1]
    )
    return family, scaled
