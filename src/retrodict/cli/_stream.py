"""What `stream --learn` takes, and how what is learned is told: a table on a terminal, or lines."""

import time
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from retrodict.cli._errors import UserError
from retrodict.cli._options import LONGEST_MEMORY, MOST

if TYPE_CHECKING:
    from retrodict.runs import Learned, Learning

SECONDS_BETWEEN_LINES = 60.0
"""How often it is told how far a stream is where there is no terminal."""

MOST_PARAMETERS = 16
"""Lines of the table; the history has all of them."""


class Part(StrEnum):
    """What a stream can learn."""

    family = "family"
    model = "model"
    both = "both"


class Schedule(StrEnum):
    """How the steps of learning go on."""

    constant = "constant"
    robbins_monro = "robbins-monro"


Learn = Annotated[
    Part | None, typer.Option(help="Learn from the rows: the family, the model or both.")
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="The largest relative step of learning.",
        show_default="0.001, or 0.05 if steps shrink",
    ),
]
Steps = Annotated[
    Schedule | None,
    typer.Option(
        help="Steps that stay, and follow what drifts; or that shrink, and converge.",
        show_default="constant",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=LONGEST_MEMORY,
        help="Rows that a gradient goes back, in runs with a family.",
        show_default="8",
    ),
]
History = Annotated[
    Path | None, typer.Option(help="Append what is learned to this .csv file now and then.")
]
HistoryEvery = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Rows between lines of the history.", show_default="100"),
]
Figure = Annotated[
    Path | None, typer.Option(help="Draw the history into this .png, .svg or .pdf file.")
]
SaveRun = Annotated[
    Path | None,
    typer.Option(help="When the input ends, write a new run with what was learned."),
]


def learning_of(learn: Part | None, told: "Telling", **given: Any) -> "Learning | None":
    """The options of learning, where something is to be learned.

    Args:
        learn: what is to be learned.
        told: who is told how far it is.
        **given: the other options, `None` where they were not given.

    Raises:
        UserError: if there are such options, and nothing is to be learned.
    """
    from retrodict import runs

    given = {name: value for name, value in given.items() if value is not None}
    if learn is not None:
        return runs.Learning(str(learn), told=told, **given)
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"{names}: nothing is learned without --learn family, model or both")
    return None


class Telling:
    """Tells on standard error what a stream has learned.

    Args:
        console: where to tell.
        quiet: whether to tell at the end alone, since answers go to the same terminal.
    """

    def __init__(self, console: Console, *, quiet: bool = False):
        self.console, self.quiet = console, quiet
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.began = self.told = time.monotonic()
        self.first: int | None = None
        self.last: Learned | None = None

    def __enter__(self) -> "Telling":
        """Starts; nothing is drawn before there is something to tell."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops drawing, and leaves what was seen last."""
        self.live.stop()
        if self.last is not None:
            if self.console.is_terminal:
                self.console.print(self._table(self.last))
            else:
                self._line(self.last)

    def __call__(self, learned: "Learned") -> None:
        """Tells how far it is; called as often as is convenient."""
        now = time.monotonic()
        if self.first is None:
            self.began, self.first = now, learned.rows
        self.last = learned
        if self.quiet:
            return
        if self.console.is_terminal:
            self.live.start()
            self.live.update(self._table(learned), refresh=True)
        elif now - self.told > SECONDS_BETWEEN_LINES:
            self.told = now
            self._line(learned)

    def _line(self, learned: "Learned") -> None:
        shown = [f"{name} {value:.5g}" for name, value in learned.now.items()][:MOST_PARAMETERS]
        text = f"{_head(learned)}; {', '.join(shown)}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self, learned: "Learned") -> Group:
        grid = Table(box=SIMPLE, pad_edge=False)
        grid.add_column("learned")
        for heading in ("in the run", "now", "moved"):
            grid.add_column(heading, justify="right")
        names = list(learned.now)
        for name in names[:MOST_PARAMETERS]:
            start, now = learned.start[name], learned.now[name]
            grid.add_row(name, f"{start:.5g}", f"{now:.5g}", _moved(start, now))
        if len(names) > MOST_PARAMETERS:
            grid.add_row(f"and {len(names) - MOST_PARAMETERS} more", "", "", "")
        seconds = time.monotonic() - self.began
        rate = (learned.rows - (self.first or 0)) / seconds if seconds > 1e-3 else 0.0
        speed = f"; {rate:,.0f} rows a second" if rate else ""
        return Group(Text(f"{_head(learned)}{speed}"), grid)


def _head(learned: "Learned") -> str:
    skipped = f" ({learned.skipped:,} skipped)" if learned.skipped else ""
    return f"{learned.rows:,} rows{skipped}; ELBO {learned.elbo:.4f} nats per observed row"


def _moved(start: float, now: float) -> str:
    """How far a parameter has come: in parts of where it was, where that is not zero."""
    return f"{100 * (now - start) / abs(start):+.1f}%" if start else f"{now - start:+.3g}"
