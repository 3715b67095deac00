"""Progress of a command: bars and tables on a terminal, lines elsewhere."""

import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from retrodict.cli._output import grid

if TYPE_CHECKING:
    from retrodict.runs import Learned

SECONDS_BETWEEN_LINES = 60.0
"""The interval of progress lines without a terminal."""

MAX_PARAMETERS = 16
"""Lines of the table; the history has all parameters."""


class Stages(AbstractContextManager):
    """Progress callback that shows the stages of a command on standard error.

    Args:
        title: the command or experiment.
        num_stages: the number of stages.
        console: where to print.
    """

    def __init__(self, title: str, num_stages: int, console: Console):
        self.title, self.num_stages, self.console = title, num_stages, console
        self.num_done, self.began = 0, time.monotonic()
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.all = self.bars.add_task(title, total=num_stages)
        self.one = self.bars.add_task("", total=None, visible=False)

    def __enter__(self) -> "Stages":
        """Start drawing."""
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop drawing."""
        self.bars.stop()

    def begin(self, stage: str) -> None:
        """Begin a stage."""
        self.began = time.monotonic()
        self.bars.reset(self.one, description=f"  {stage}", total=None, visible=True)

    def step(self, done: int, total: int) -> None:
        """Show how much of the present stage is done."""
        self.bars.update(self.one, completed=done, total=total)

    def end(self, stage: str, *, cached: bool) -> None:
        """End a stage; `cached` if its result was read from a file."""
        self.num_done += 1
        self.bars.update(self.all, completed=self.num_done)
        how = "done before" if cached else f"{time.monotonic() - self.began:.1f} s"
        self.say(f"{self.title} {self.num_done}/{self.num_stages}  {stage}  ({how})")

    def say(self, message: str) -> None:
        """Print a message."""
        self.bars.console.print(message, markup=False, highlight=False, soft_wrap=True)


class LearningDisplay(AbstractContextManager):
    """Progress callback that prints what a stream has learned.

    Args:
        console: where to print.
        quiet: whether to print at the end only, since answers go to the same terminal.
    """

    def __init__(self, console: Console, *, quiet: bool = False):
        self.console, self.quiet = console, quiet
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.began = self.printed = time.monotonic()
        self.first: int | None = None
        self.last: Learned | None = None

    def __exit__(self, *error: object) -> None:
        """Stop drawing, and print the last values."""
        self.live.stop()
        if self.last is not None:
            if self.console.is_terminal:
                self.console.print(self._table(self.last))
            else:
                self._line(self.last)

    def __call__(self, learned: "Learned") -> None:
        """Display the present values; may be called at any rate."""
        now = time.monotonic()
        if self.first is None:
            self.began, self.first = now, learned.rows
        self.last = learned
        if self.quiet:
            return
        if self.console.is_terminal:
            self.live.start()
            self.live.update(self._table(learned), refresh=True)
        elif now - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = now
            self._line(learned)

    def _line(self, learned: "Learned") -> None:
        values = [f"{name} {value:.5g}" for name, value in learned.now.items()][:MAX_PARAMETERS]
        text = f"{_head(learned)}; {', '.join(values)}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self, learned: "Learned") -> Group:
        table = grid("parameter", "in the run", "now", "change")
        names = list(learned.now)
        for name in names[:MAX_PARAMETERS]:
            start, now = learned.start[name], learned.now[name]
            change = f"{100 * (now - start) / abs(start):+.1f}%" if start else f"{now - start:+.3g}"
            table.add_row(name, f"{start:.5g}", f"{now:.5g}", change)
        if len(names) > MAX_PARAMETERS:
            table.add_row(f"and {len(names) - MAX_PARAMETERS} more", "", "", "")
        seconds = time.monotonic() - self.began
        rate = (learned.rows - (self.first or 0)) / seconds if seconds > 1e-3 else 0.0
        speed = f"; {rate:,.0f} rows per second" if rate else ""
        return Group(Text(f"{_head(learned)}{speed}"), table)


def _head(learned: "Learned") -> str:
    skipped = f" ({learned.skipped:,} skipped)" if learned.skipped else ""
    return f"{learned.rows:,} rows{skipped}; ELBO {learned.elbo:.4f} nats per observed row"
