"""The monitor of a stream that learns: average ELBO, history file and picture."""

import csv
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import retrodict as rd
from retrodict import data
from retrodict._workspace import as_csv
from retrodict.runs._lines import as_texts
from retrodict.runs._names import parameter_entries
from retrodict.runs._online_options import Learned, Learning
from retrodict.runs._plot import literal, write_picture

MEMORY = 500
"""The number of rows over which the ELBO is averaged."""

SECONDS_BETWEEN_FIGURES = 30.0
SECONDS_BETWEEN_REPORTS = 0.5

MOVED = "family_moved"
"""The column of the relative distance that the parameters of a family have moved."""

FIRST_COLUMNS = ("row", "time", "elbo_a_row", "skipped")

HISTORY_STARTS = ",".join(FIRST_COLUMNS).encode()
"""The first bytes of a history file."""

MOST_PANELS = 12


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
        live: the learner.
        learning: the options of learning.
        columns: the names of the observed columns.
        start: the state of the learner before the first row.
        state: the state of the monitor.
        history: the open history file at its end; `None` for no history.
    """

    def __init__(
        self,
        live: rd.online.LaggedLearner,
        learning: Learning,
        columns: Sequence[str],
        start: Any,
        state: MonitorState,
        history: Any,
    ):
        self.live, self.learning, self.history = live, learning, history
        self.recent, self.counted = np.array(state.recent), int(state.counted)
        self.noted = int(state.noted)
        self.names, self._read = _reader(live, learning, columns, start)
        self.start = self.values(start)
        self.last_report = self.last_figure = time.monotonic()

    @property
    def elbo(self) -> float:
        """The ELBO per row, averaged over the last rows with an observed entry."""
        increments = self.recent[: min(self.counted, MEMORY)]
        with np.errstate(over="ignore"):  # an extreme outlier
            return float(np.mean(increments)) if increments.size else math.nan

    def values(self, state: Any) -> dict[str, float]:
        """Return the learned parameters by name."""
        return dict(zip(self.names, np.asarray(self._read(state)).tolist(), strict=True))

    def record(self, state: Any, rows: data.Rows, increments: Any, skipped: Any) -> None:
        """Record some rows; write a line of the history if one is due after the last of them.

        Args:
            state: the state of the learner after them.
            rows: the rows.
            increments: the ELBO increment of each row, possibly padded.
            skipped: whether each row was skipped, likewise.
        """
        count = len(rows.times)
        used = ~np.asarray(skipped)[:count] & ~np.isnan(rows.ys).all(axis=1)
        for increment in np.asarray(increments)[:count][used]:
            self.recent[self.counted % MEMORY] = increment
            self.counted += 1
        read = int(state.learner.num_read)
        if self.history is not None and read % self.learning.history_every == 0:
            self._write_header()
            num_skipped = int(state.learner.num_skipped)
            first = [read, as_texts(rows.times[-1:])[0], self.elbo, num_skipped]
            self.history.write(as_csv([*first, *self.values(state).values()], []))

    def save(self) -> MonitorState:
        """Write the history to disk and return the state that belongs to it."""
        if self.history is not None:
            self._write_header()
            self.history.flush()
            os.fsync(self.history.fileno())
            self.noted = self.history.tell()
        return MonitorState(self.recent.copy(), np.asarray(self.counted), np.asarray(self.noted))

    def _write_header(self) -> None:
        """Write the names of the columns, once there are rows: an empty file is removed."""
        if not self.history.tell():
            self.history.write(as_csv([*FIRST_COLUMNS, *self.names], []))

    def show(self, state: Any, *, last: bool = False) -> None:
        """Call the progress callback and draw the history, if either is due."""
        now = time.monotonic()
        report, figure, history = self.learning.told, self.learning.figure, self.learning.history
        if report is not None and (last or now - self.last_report > SECONDS_BETWEEN_REPORTS):
            self.last_report = now
            learner = state.learner
            rows, skipped = int(learner.num_read), int(learner.num_skipped)
            report(Learned(rows, skipped, self.elbo, self.start, self.values(state)))
        if figure is not None and history is not None and self.noted:
            if last or now - self.last_figure > SECONDS_BETWEEN_FIGURES:
                self.history.flush()
                draw_history(history, figure)
                self.last_figure = time.monotonic()


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
    rows = [int(line[0]) for line in lines]
    places = [names.index("elbo_a_row"), *range(len(FIRST_COLUMNS), len(names))][:MOST_PANELS]

    def draw(_: Any, axes: list[Any]) -> None:
        for place, ax in zip(places, axes, strict=True):
            values = [float(line[place] or "nan") for line in lines]
            ax.plot(rows, values, color="#1f65b0", linewidth=1.2)
            title = f"nats per observed row, average of {MEMORY}: {names[place]}"
            ax.set_title(literal(names[place]) if names[place] != "elbo_a_row" else title)
            ax.margins(x=0.01)
        axes[-1].set_xlabel("row")

    write_picture(figure, len(places), draw)
