"""Tables on the terminal, with rich if it is installed."""

from dataclasses import dataclass, field
from importlib.util import find_spec


@dataclass
class Table:
    """Titled table of text, with notes."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print the table; its first column is aligned left, the others right."""
        if find_spec("rich"):
            self._show_rich()
        else:
            self._show_plain()
        for note in self.notes:
            print(f"  {note}")
        print(flush=True)

    def _show_rich(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        # Wide enough for every column: what is piped into a file must not be cut at 80.
        Console(width=max(100, self._width()), highlight=False, markup=False).print(table)

    def _show_plain(self) -> None:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        print(f"\n{self.title}\n")
        for line in lines:
            cells = [
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            print("  " + "  ".join(cells))

    def _width(self) -> int:
        lines = [self.columns, *self.rows]
        columns = range(len(self.columns))
        return sum(max(len(line[index]) for line in lines) + 3 for index in columns) + 4


def milliseconds(seconds: float | None) -> str:
    """Format three significant figures, or a dash."""
    if seconds is None:
        return "–"
    value = 1e3 * seconds
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def times(ratio: float | None, prefix: str = "") -> str:
    """Format a ratio such as 12.3x, or a dash."""
    if ratio is None:
        return "–"
    decimals = 0 if ratio >= 100 or ratio == int(ratio) else 1 if ratio >= 1 else 2
    return f"{prefix}{ratio:.{decimals}f}x"
