"""Progress of a command: bars on a terminal, lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
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
        """Start to draw."""
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self.bars.stop()

    def begin(self, stage: str) -> None:
        """Begin a stage."""
        self.began = time.monotonic()
        self.bars.reset(self.one, description=f"  {stage}", total=None, visible=True)

    def step(self, done: int, total: int) -> None:
        """Show how much of the present stage is done."""
        self.bars.update(self.one, completed=done, total=total)

    def end(self, stage: str, *, kept: bool) -> None:
        """End a stage that was computed, or whose result was stored before."""
        self.num_done += 1
        self.bars.update(self.all, completed=self.num_done)
        how = "done before" if kept else f"{time.monotonic() - self.began:.1f} s"
        self.say(f"{self.title} {self.num_done}/{self.num_stages}  {stage}  ({how})")

    def say(self, message: str) -> None:
        """Print a message."""
        self.bars.console.print(message, markup=False, highlight=False, soft_wrap=True)
