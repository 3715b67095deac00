"""The monitor of a stream that learns: average ELBO, history, picture, and the learned run."""

import csv
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import retrodict as rd
from retrodict import data
from retrodict._workspace import as_csv
from retrodict.runs._folder import TRAINING, RunError
from retrodict.runs._learning import Learned, Learning
from retrodict.runs._plot import literal, write_picture
from retrodict.runs._record import Run, parameter_entries, with_structure_of, write
from retrodict.runs._stream_output import OutputFile, as_texts

MEMORY = 500
"""The number of rows over which the ELBO is averaged."""

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

MOST_PANELS = 12

RESULTS_OF_FIT = ("total", "rows", "rows_observed", "status", "distance", "search")
"""Results that hold for the fitted parameters only."""


class MonitorState(NamedTuple):
    """The state of a `Monitor`, which is part of the state of a stream.

    Attributes:
        recent: the ELBO increments of the last rows, as a ring buffer.
        counted: the number of rows that have entered it.
        noted: the number of bytes written to the history.
    """

    recent: np.ndarray
    counted: np.ndarray
    noted: np.ndarray

    @staticmethod
    def initial() -> "MonitorState":
        """Return the state before the first row."""
        return MonitorState(np.zeros(MEMORY), np.zeros((), int), np.zeros((), int))


class Monitor:
    """The monitor of a stream that learns.

    Args:
        run: the run that learning starts from.
        live: the learner.
        learning: the options of learning.
        start: the state of the learner before the first row.
        state: the state of the monitor.
        unread: whether there is a state that has read no row.
        files: closes the history.
    """

    def __init__(
        self,
        run: Run,
        live: rd.online.LaggedLearner,
        learning: Learning,
        start: Any,
        state: MonitorState,
        unread: bool,
        files: ExitStack,
    ):
        self.run, self.live, self.learning = run, live, learning
        self.recent, self.counted = np.array(state.recent), int(state.counted)
        self.noted = int(state.noted)
        self.names, self._read = _reader(live, learning, run.layout["columns"], start)
        self.start = self.values(start)
        self.last_report = self.last_figure = time.monotonic()
        figure = learning.figure
        if figure is not None and figure.exists() and not (self.noted or unread):
            raise RunError(f"{figure} exists, and is not of this stream; name another.")
        self.history = None
        if learning.history is not None:
            header = as_csv([*FIRST_COLUMNS, *self.names], [])
            self.history = OutputFile(learning.history, header, self.noted, unread, files)

    @property
    def elbo(self) -> float:
        """The ELBO per row, averaged over the last rows with an observed entry."""
        increments = self.recent[: min(self.counted, MEMORY)]
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
            self.recent[self.counted % MEMORY] = increment
            self.counted += 1
        learner, last = state.learner, as_texts(rows.times[-1:])[0]
        if self.history is not None and int(learner.num_read) % self.learning.history_every == 0:
            line = [int(learner.num_read), last, self.elbo, int(learner.num_skipped)]
            self.history.write(as_csv([*line, *self.values(state).values()], []))
        self.show(state)

    def save(self) -> MonitorState:
        """Write the history to the disk and return the state that belongs to it."""
        if self.history is not None:
            self.history.write(b"")
            self.noted = self.history.save()
        return MonitorState(self.recent.copy(), np.asarray(self.counted), np.asarray(self.noted))

    def show(self, state: Any, *, last: bool = False) -> None:
        """Call the progress callback and draw the history, if either is due."""
        now, learning, learner = time.monotonic(), self.learning, state.learner
        if learning.progress and (last or now - self.last_report > SECONDS_BETWEEN_REPORTS):
            self.last_report = now
            rows, skipped = int(learner.num_read), int(learner.num_skipped)
            learning.progress(Learned(rows, skipped, self.elbo, self.start, self.values(state)))
        is_due = last or now - self.last_figure > SECONDS_BETWEEN_FIGURES
        if learning.figure is not None and self.history is not None and self.noted and is_due:
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
        model, num_rows = self.live.model(state), int(state.learner.num_read)
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
        partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True)
        try:
            shutil.copyfile(run.path / TRAINING, partial / TRAINING)
            model = with_structure_of(run.model, model)
            write(partial, run.spec, model, self.live.family(state), record)
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
    live: rd.online.LaggedLearner, learning: Learning, columns: Sequence[str], start: Any
) -> tuple[list[str], Any]:
    """Return the names of what is learned, and a compiled function from a state to the values."""
    has_family = live.family(start) is not None
    first = ravel_pytree(start.learner.parameters[0])[0]

    def named(state: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if learning.what != "family" or not has_family:
            entries = parameter_entries(live.model(state), columns)
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
    titled = titled[:MOST_PANELS]

    def draw(_: Any, axes: list[Any]) -> None:
        for (title, texts), ax in zip(titled, axes, strict=True):
            values = [float(text or "nan") for text in texts]
            ax.plot(steps, values, color="#1f65b0", linewidth=1.2)
            ax.set_title(title)
            ax.margins(x=0.01)
        axes[-1].set_xlabel("row")

    write_picture(figure, len(titled), draw)
