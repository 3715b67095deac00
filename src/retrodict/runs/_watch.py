"""What is seen of a stream that learns: a moving average, a history in a file, a picture of it."""

import csv
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import retrodict as rd
from retrodict import data, models
from retrodict._workspace import as_csv
from retrodict.runs._learning import Learned, Learning
from retrodict.runs._lines import as_texts
from retrodict.runs._plot import literal, write_picture

MEMORY = 500
"""Rows over which the ELBO is averaged. Older ones are forgotten, outliers with them."""

SECONDS_BETWEEN_FIGURES = 30.0
SECONDS_BETWEEN_TELLING = 0.5

MOVED = "family_moved"
"""The column of how far the parameters of a family have come."""

FIRST_COLUMNS = ("row", "time", "elbo_a_row", "skipped")

HISTORY_STARTS = ",".join(FIRST_COLUMNS).encode()
"""How a file of a history begins."""

MOST_PANELS = 12


class Watched(NamedTuple):
    """What a `Watch` needs to go on.

    Attributes:
        recent: what the last rows added to the ELBO, in a circle.
        counted: how many rows have entered it.
        noted: how many bytes were written to the history.
    """

    recent: np.ndarray
    counted: np.ndarray
    noted: np.ndarray

    @staticmethod
    def nothing() -> "Watched":
        """Before the first row."""
        return Watched(np.zeros(MEMORY), np.zeros((), int), np.zeros((), int))


class Watch:
    """Follows a stream that learns.

    Args:
        live: the learner.
        learning: what is to be written.
        start: the state before the first row.
        watched: what was seen before.
        history: the file of the history, at its end; `None` if there is to be none.
    """

    def __init__(
        self,
        live: rd.online.LaggedLearner,
        learning: Learning,
        start: Any,
        watched: Watched,
        history: Any,
    ):
        self.live, self.learning, self.history = live, learning, history
        self.recent, self.counted = np.array(watched.recent), int(watched.counted)
        self.noted = int(watched.noted)
        self.names, self._read = _reader(live, learning, start)
        self.start = self.values(start)
        self.told = self.drawn = time.monotonic()

    @property
    def elbo(self) -> float:
        """What a row adds to the ELBO, on average over the last in which something was seen."""
        known = self.recent[: min(self.counted, MEMORY)]
        with np.errstate(over="ignore"):  # of an outlier beyond measure
            return float(np.mean(known)) if known.size else math.nan

    def values(self, state: Any) -> dict[str, float]:
        """What is learned, by name."""
        return dict(zip(self.names, np.asarray(self._read(state)).tolist(), strict=True))

    def saw(self, state: Any, rows: data.Rows, increments: Any, skipped: Any) -> None:
        """Takes note of some rows, the last of which is where a line may be due.

        Args:
            state: the state after them.
            rows: the rows.
            increments: what each added to the ELBO; more may follow.
            skipped: which of them were skipped.
        """
        count = len(rows.times)
        told = ~np.asarray(skipped)[:count] & ~np.isnan(rows.ys).all(axis=1)
        for increment in np.asarray(increments)[:count][told]:
            self.recent[self.counted % MEMORY] = increment
            self.counted += 1
        read = int(state.learner.num_read)
        if self.history is not None and read % self.learning.history_every == 0:
            self._begin()
            skipped = int(state.learner.num_skipped)
            first = [read, as_texts(rows.times[-1:])[0], self.elbo, skipped]
            self.history.write(as_csv([*first, *self.values(state).values()], []))

    def keep(self) -> Watched:
        """What is to be kept, after the history that it stands for."""
        if self.history is not None:
            self._begin()
            self.history.flush()
            os.fsync(self.history.fileno())
            self.noted = self.history.tell()
        return Watched(self.recent.copy(), np.asarray(self.counted), np.asarray(self.noted))

    def _begin(self) -> None:
        """Writes the names of the columns; not before there are rows, lest a file is in the way."""
        if not self.history.tell():
            self.history.write(as_csv([*FIRST_COLUMNS, *self.names], []))

    def show(self, state: Any, *, last: bool = False) -> None:
        """Tells how far it is and draws, if it is time to."""
        now = time.monotonic()
        told, figure, history = self.learning.told, self.learning.figure, self.learning.history
        if told is not None and (last or now - self.told > SECONDS_BETWEEN_TELLING):
            self.told = now
            told(self.learned(state))
        if figure is not None and history is not None and self.noted:
            if last or now - self.drawn > SECONDS_BETWEEN_FIGURES:
                self.history.flush()
                draw_history(history, figure)
                self.drawn = time.monotonic()

    def learned(self, state: Any) -> Learned:
        """How far it is."""
        read, skipped = int(state.learner.num_read), int(state.learner.num_skipped)
        return Learned(read, skipped, self.elbo, self.start, self.values(state))


def _reader(live: rd.online.LaggedLearner, learning: Learning, start: Any) -> tuple[list[str], Any]:
    """The names of what is learned, and a compiled function from a state to their values."""
    model_moves = learning.what != "family" or live.family(start) is None
    family_moves = live.family(start) is not None and learning.what != "model"
    first = ravel_pytree(start.learner.parameters[0])[0]

    def named(state: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if model_moves:
            found |= models.named_parameters(live.model(state), entries=True)
        if family_moves:
            way = ravel_pytree(state.learner.parameters[0])[0] - first
            found[MOVED] = jnp.linalg.norm(way) / jnp.linalg.norm(first)
        return found

    names = list(named(start))
    return names, eqx.filter_jit(lambda state: jnp.stack(list(named(state).values())))


def draw_history(history: Path, figure: Path) -> None:
    """Draws the history of a stream that learned: its ELBO and its parameters, row by row.

    Nothing is drawn before there is a line of it.

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

    def draw(picture: Any, axes: list[Any]) -> None:
        for place, ax in zip(places, axes, strict=True):
            values = [float(line[place] or "nan") for line in lines]
            ax.plot(rows, values, color="#1f65b0", linewidth=1.2)
            title = f"nats per observed row, average of {MEMORY}: {names[place]}"
            ax.set_title(literal(names[place]) if names[place] != "elbo_a_row" else title)
            ax.margins(x=0.01)
        axes[-1].set_xlabel("row")

    write_picture(figure, len(places), draw)
