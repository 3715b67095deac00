"""How far a command is: bars on a terminal, lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
    """The stages of one experiment, told on standard error.

    Args:
        title: the experiment.
        num_stages: how many stages it has.
        console: where to tell.
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
        """Starts to draw."""
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops drawing, whatever happened."""
        self.bars.stop()

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self.began = time.monotonic()
        self.bars.reset(self.one, description=f"  {stage}", total=None, visible=True)

    def step(self, done: int, total: int) -> None:
        """So much of the present stage is done."""
        self.bars.update(self.one, completed=done, total=total)

    def end(self, stage: str, *, kept: bool) -> None:
        """A stage is done, or was found done."""
        self.num_done += 1
        self.bars.update(self.all, completed=self.num_done)
        how = "done before" if kept else f"{time.monotonic() - self.began:.1f} s"
        self._line(f"{self.title} {self.num_done}/{self.num_stages}  {stage}  ({how})")

    def say(self, message: str) -> None:
        """Something that the user must know."""
        self._line(message)

    def _line(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
