"""Learning from a stream: its options, its progress, and the run that it makes."""

import csv
import functools
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import retrodict as rd
from retrodict import data
from retrodict._files import as_csv
from retrodict.runs._plot import check_picture, literal, write_picture
from retrodict.runs._record import TRAINING, RunError
from retrodict.runs._run import Run, parameter_entries, with_structure_of, write
from retrodict.runs._stream_files import MEMORY, MonitorState, OutputFile
from retrodict.runs._stream_lines import as_texts
from retrodict.runs._training import relative_to_size

PARTS = ("family", "model", "both")
"""The parts that can be learned."""

RATES = {"constant": 1e-3, "robbins-monro": 0.05}
"""The schedules of step sizes with their default largest steps."""

WINDOW = 8
"""The default number of rows of truncated backpropagation."""

WARMUP = 100
"""Rows over which shrinking steps first grow, while Adam estimates the gradient noise."""

MAX_GRADIENT = 10.0
"""The norm at which gradients are clipped, in nats per relative change."""

SECONDS_BETWEEN_FIGURES = 30.0
SECONDS_BETWEEN_REPORTS = 0.5

MOVED = "family_moved"
"""The column of the relative distance that the parameters of a family have moved."""

ELBO = "elbo_per_row"
OLD_ELBO = "elbo_a_row"
"""The column of the average ELBO, and its name in histories of earlier versions."""

FIRST_COLUMNS = ("row", "time", ELBO, "skipped")

HISTORY_STARTS = tuple(f"row,time,{name},skipped".encode() for name in (ELBO, OLD_ELBO))
"""The first bytes of history files."""

MAX_PANELS = 12

RESULTS_OF_FIT = ("total", "rows", "rows_observed", "status", "distance", "search")
"""Results that hold for the fitted parameters only."""


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

    Example:
        >>> import io, tempfile, pandas as pd, retrodict as rd
        >>> flow = [1120, 1160, 963, None, 1160, 1160, 813, 1230, 1370, 1140]
        >>> table = rd.data.read({"year": range(1871, 1881), "flow": flow})
        >>> later = pd.DataFrame({"year": [1881, 1882], "flow": [1100, 1150]})
        >>> learning = rd.runs.Learning("model", schedule="robbins-monro")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = rd.runs.fit(table, "local_level", f"{folder}/run")
        ...     later.to_csv(f"{folder}/new.csv", index=False)
        ...     with open(f"{folder}/new.csv", "rb") as source:
        ...         rd.runs.stream(run, source, io.BytesIO(), learning=learning)
        2

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
                raise RunError(f"{{{name}}} must be at least 1 row.", **{name: value})
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
    adam = optax.chain(optax.clip_by_global_norm(MAX_GRADIENT), optax.adam(rate))
    # On one long vector: many small arrays take longer to compile and to update.
    return optax.chain(relative_to_size(), optax.flatten(adam), relative_to_size())


class Monitor:
    """The monitor of a stream that learns.

    Args:
        run: the run that learning starts from.
        smoother: the learner.
        learning: the options of learning.
        start: the state of the learner before the first row.
        state: the state of the monitor.
        is_empty: whether there is a state that has read no row.
        files: closes the history.
    """

    def __init__(
        self,
        run: Run,
        smoother: rd.online.LaggedLearner,
        learning: Learning,
        start: Any,
        state: MonitorState,
        is_empty: bool,
        files: ExitStack,
    ):
        self.run, self.smoother, self.learning = run, smoother, learning
        self.elbo_increments, self.num_increments = (
            np.array(state.elbo_increments),
            int(state.num_increments),
        )
        self.history_bytes = int(state.history_bytes)
        self.names, self._read = _reader(smoother, learning, run.layout["columns"], start)
        self.start = self.values(start)
        self.last_report = self.last_figure = time.monotonic()
        figure = learning.figure
        if figure is not None and figure.exists() and not (self.history_bytes or is_empty):
            raise RunError(f"{figure} exists, and is not of this stream; name another.")
        self.history = None
        if learning.history is not None:
            header = as_csv([*FIRST_COLUMNS, *self.names], [])
            self.history = OutputFile(learning.history, header, self.history_bytes, is_empty, files)

    @property
    def elbo(self) -> float:
        """The ELBO per row, averaged over the last rows with an observed entry."""
        increments = self.elbo_increments[: min(self.num_increments, MEMORY)]
        with np.errstate(over="ignore"):  # an extreme outlier
            return float(np.mean(increments)) if increments.size else math.nan

    def values(self, state: Any) -> dict[str, float]:
        """Return the learned parameters by name."""
        return dict(zip(self.names, np.asarray(self._read(state)).tolist(), strict=True))

    def rows_to_line(self, state: Any, most: int) -> int:
        """Return the number of rows until a line of the history is due, at most `most`."""
        every = self.learning.history_every
        due = most if self.history is None else every - int(state.learner.num_read) % every
        return min(due, most)

    def record(self, state: Any, rows: data.Rows, output: Any) -> None:
        """Record some rows; write a line of the history if one is due after the last of them.

        Args:
            state: the state of the learner after them.
            rows: the rows.
            output: the output of the learner, possibly padded.
        """
        count = len(rows.times)
        used = ~np.asarray(output.skipped)[:count] & ~np.isnan(rows.ys).all(axis=1)
        for increment in np.asarray(output.elbo_increment)[:count][used]:
            self.elbo_increments[self.num_increments % MEMORY] = increment
            self.num_increments += 1
        learner, last = state.learner, as_texts(rows.times[-1:])[0]
        if self.history is not None and int(learner.num_read) % self.learning.history_every == 0:
            line = [int(learner.num_read), last, self.elbo, int(learner.num_skipped)]
            self.history.write(as_csv([*line, *self.values(state).values()], []))
        self.show(state)

    def save(self) -> MonitorState:
        """Write the history to the disk and return the state that belongs to it."""
        if self.history is not None:
            self.history.write(b"")
            self.history_bytes = self.history.save()
        return MonitorState(
            self.elbo_increments.copy(),
            np.asarray(self.num_increments),
            np.asarray(self.history_bytes),
        )

    def show(self, state: Any, *, last: bool = False) -> None:
        """Call the progress callback and draw the history, if either is due."""
        now, learning, learner = time.monotonic(), self.learning, state.learner
        if learning.progress and (last or now - self.last_report > SECONDS_BETWEEN_REPORTS):
            self.last_report = now
            rows, skipped = int(learner.num_read), int(learner.num_skipped)
            learning.progress(Learned(rows, skipped, self.elbo, self.start, self.values(state)))
        is_due = last or now - self.last_figure > SECONDS_BETWEEN_FIGURES
        if (
            learning.figure is not None
            and self.history is not None
            and self.history_bytes
            and is_due
        ):
            self.history.flush()
            draw_history(self.history.path, learning.figure)
            self.last_figure = time.monotonic()

    def save_run(self, out: Path, state: Any, last: str) -> None:
        """Write a run with the learned model and family, atomically.

        Args:
            out: the folder of the new run, which must not exist.
            state: the state of the learner.
            last: the time of the last row, as text.

        Raises:
            RunError: if the folder exists.
        """
        refuse_existing(out)
        run, learning, old = self.run, self.learning, self.run.record
        model, num_rows = self.smoother.model(state), int(state.learner.num_read)
        words = f"learned from a stream: {num_rows} rows, up to {last}"
        options = f"{learning.what}, {learning.schedule} steps of {learning.largest_step:g}"
        described = [*old["data"]["described"], f"{words} ({options})"]
        results = {k: value for k, value in old["results"].items() if k not in RESULTS_OF_FIT}
        entries = parameter_entries(model, run.layout["columns"])
        record = {
            "layout": old["layout"],
            "options": old["options"],
            "data": {**old["data"], "described": described},
            "results": {
                **results,
                "nats_per_row": self.elbo,
                "parameters": {
                    name: {"value": float(entry.value), "learned": entry.learned}
                    for name, entry in entries.items()
                },
                "uncertainty": f"No standard errors: the parameters were {words}.",
            },
            "learned": {"from": old["files"], "settings": learning.settings, "rows": num_rows},
        }
        partial = out.with_name(f".{out.name}.{secrets.token_hex(8)}.partial")
        partial.mkdir(parents=True)
        try:
            shutil.copyfile(run.path / TRAINING, partial / TRAINING)
            model = with_structure_of(run.model, model)
            write(partial, run.spec, model, self.smoother.family(state), record)
            os.rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Refuse a path that exists, or whose parent is not a writable folder.

    Raises:
        RunError: if the path exists, or its parent does not exist or is read-only.
    """
    if out.exists():
        raise RunError(f"{out} exists, and runs are not overwritten; name another folder.")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise RunError(f"{parent} does not exist; make it, or name another folder.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunError(f"{parent} is read-only; name another folder.")


def _reader(
    smoother: rd.online.LaggedLearner, learning: Learning, columns: Sequence[str], start: Any
) -> tuple[list[str], Any]:
    """Return the names of what is learned, and a compiled function from a state to the values."""
    has_family = smoother.family(start) is not None
    first = ravel_pytree(start.learner.parameters[0])[0]

    def named(state: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if learning.what != "family" or not has_family:
            entries = parameter_entries(smoother.model(state), columns)
            values = {name: entry.value for name, entry in entries.items() if entry.learned}
        if has_family and learning.what != "model":
            change = ravel_pytree(state.learner.parameters[0])[0] - first
            values[MOVED] = jnp.linalg.norm(change) / jnp.linalg.norm(first)
        return values

    names = list(named(start))
    return names, eqx.filter_jit(lambda state: jnp.stack(list(named(state).values())))


def draw_history(history: Path, figure: Path) -> None:
    """Draw the history of a stream that learned: its ELBO and its parameters by row.

    Does nothing before the history has a line.

    Args:
        history: the file that `stream` wrote.
        figure: a .png, .svg or .pdf file, which is replaced.
    """
    with open(history, newline="", encoding="utf-8") as file:
        names, *lines = csv.reader(file)
    if not lines:
        return
    rows, *columns = zip(*lines, strict=True)
    steps = [int(row) for row in rows]
    titled = [(f"nats per observed row, average of {MEMORY}: {ELBO}", columns[1])]
    first = len(FIRST_COLUMNS)
    titled += zip(map(literal, names[first:]), columns[first - 1 :], strict=True)
    titled = titled[:MAX_PANELS]

    def draw(_: Any, axes: list[Any]) -> None:
        for (title, texts), ax in zip(titled, axes, strict=True):
            values = [float(text or "nan") for text in texts]
            ax.plot(steps, values, color="#1f65b0", linewidth=1.2)
            ax.set_title(title)
            ax.margins(x=0.01)
        axes[-1].set_xlabel("row")

    write_picture(figure, len(titled), draw)
