"""Learning from a stream: its options, and the run with what was learned."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import optax

import retrodict as rd
from retrodict._errors import Argument
from retrodict.runs._folder import RunError
from retrodict.runs._plot import check_picture
from retrodict.runs._record import Run
from retrodict.runs._training import relative_to_size

PARTS = ("family", "model", "both")
"""The parts that can be learned."""

RATES = {"constant": 1e-3, "robbins-monro": 0.05}
"""The schedules of step sizes with their default largest steps."""

WINDOW = 8
"""The default number of rows of truncated backpropagation."""

WARMUP = 100
"""Rows over which shrinking steps first grow, while Adam estimates the gradient noise."""

LARGEST_GRADIENT = 10.0
"""The norm at which gradients are clipped, in nats per relative change."""


class Learned(NamedTuple):
    """The progress of a stream that learns.

    Attributes:
        rows: the number of rows read, in all sessions of the stream.
        skipped: the number of them that were skipped.
        elbo: the ELBO per row in nats, averaged over the last rows.
        start: the learned parameters of the model by name, with their values in the run.
        now: their present values; `family_moved` is the distance that the parameters of a family
            have moved, relative to their norm.
    """

    rows: int
    skipped: int
    elbo: float
    start: Mapping[str, float]
    now: Mapping[str, float]


@dataclass(frozen=True)
class Learning:
    """Options of learning from a stream.

    Attributes:
        what: `"family"`, `"model"` or `"both"`. A run with exact smoothing has no family, and
            `"both"` is its model.
        rate: the largest step, relative to the size of a parameter; by default 0.001 for constant
            and 0.05 for shrinking steps.
        schedule: `"constant"`, which follows drifting parameters, or `"robbins-monro"`, with which
            they converge.
        window: the number of rows of truncated backpropagation, by default 8; for runs with a
            family.
        history: a .csv file to which the parameters are appended regularly.
        history_every: the number of rows between two lines of it.
        figure: a picture of the history, drawn regularly and at the end.
        save_run: the folder of a new run with the learned parameters, written when the rows end.
        progress: progress callback, called about twice per second.

    Raises:
        RunError: if an option has an invalid value.
    """

    what: str
    rate: float | None = None
    schedule: str = "constant"
    window: int | None = None
    history: Path | None = None
    history_every: int = 100
    figure: Path | None = None
    save_run: Path | None = None
    progress: Callable[[Learned], None] | None = None

    def __post_init__(self) -> None:
        """Refuse invalid options before anything is read."""
        if self.what not in PARTS:
            raise RunError(f"A stream can learn one of {', '.join(PARTS)}, got {self.what!r}.")
        if self.schedule not in RATES:
            raise RunError(f"Choose a schedule from {', '.join(RATES)}, got {self.schedule!r}.")
        if self.rate is not None and not 0.0 <= self.rate < 1.0:
            raise RunError(f"The rate must be at least 0 and less than 1, got {self.rate}.")
        if self.rate == 0.0 and self.schedule != "constant":
            raise RunError("A rate of 0 never shrinks; use the constant schedule with it.")
        for name, value in (("window", self.window), ("history_every", self.history_every)):
            if value is not None and value < 1:
                raise RunError(Argument(name, value), " must be at least 1 row.")
        if self.figure is not None:
            if self.history is None:
                raise RunError("The figure is drawn from the history: name a history file too.")
            check_picture(self.figure)

    @property
    def settings(self) -> list[Any]:
        """The options that the state of a stream depends on."""
        return [self.what, self.largest_step, self.schedule, self.window or WINDOW]

    @property
    def largest_step(self) -> float:
        """The rate, or the default of the schedule."""
        return RATES[self.schedule] if self.rate is None else self.rate

    def learner(self, run: Run, lag: int) -> rd.online.LaggedLearner:
        """Return the learner that answers the rows of a stream and learns from them.

        Args:
            run: the run to start from.
            lag: the number of rows that a smoothed row waits for.

        Raises:
            RunError: if the run has no parameters to learn.
        """
        gradient, steps = self._gradient(run), _optimiser(self.schedule, self.largest_step)
        part: Any = "model" if run.is_exact else self.what
        family: Any = run.family
        try:
            learner = rd.online.OnlineLearner(family, run.model, gradient, steps, learn=part)
        except (TypeError, ValueError) as error:
            raise RunError(f"{run.path} cannot be learned from a stream: {error}") from error
        return rd.online.LaggedLearner(learner, lag, input_dim=run.input_dim or None)

    def _gradient(self, run: Run) -> rd.online.AbstractRecursiveGradient:
        if not run.is_exact:
            return rd.online.TruncatedBackprop(self.window or WINDOW)
        if self.what == "family":
            raise RunError(
                f"{run.path} has no family to learn: its smoothing is exact. Learn the model."
            )
        if self.window is not None:
            raise RunError(
                f"{run.path} needs no window: its gradients are exact. Leave the window out."
            )
        return rd.online.KalmanScore()


@functools.cache  # the same object again, so that compiled programs are found in JAX's cache
def _optimiser(schedule: str, largest: float) -> optax.GradientTransformation:
    """Return Adam with gradients and steps relative to the size of the model's parameters."""
    rate: Any = largest
    if schedule == "robbins-monro":
        rate = rd.online.robbins_monro(largest, warmup=WARMUP)
    adam = optax.chain(optax.clip_by_global_norm(LARGEST_GRADIENT), optax.adam(rate))
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.chain(relative_to_size(), optax.flatten(adam), relative_to_size())
