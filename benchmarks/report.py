"""Tables of text, on the terminal and in Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """Titled table of text, with notes."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        """Print the table; its first column is aligned left, the others right."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        print(f"\n{self.title}\n")
        for line in lines:
            cells = [
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            print("  " + "  ".join(cells))
        for note in self.notes:
            print(f"  {note}")
        print(flush=True)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def milliseconds(seconds: float | None) -> str:
    """Format three significant figures, or a dash."""
    if seconds is None:
        return "–"
    value = 1e3 * seconds
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Format a time in seconds from one second on, else in milliseconds; a dash if unknown."""
    if seconds is None or seconds < 1:
        return "–" if seconds is None else f"{milliseconds(seconds)} ms"
    return f"{seconds:.1f} s"


def times(ratio: float | None) -> str:
    """Format a ratio such as 12x or 4.5x, or a dash."""
    if ratio is None:
        return "–"
    decimals = 0 if ratio >= 10 else 1 if ratio >= 1 else 2
    return f"{ratio:.{decimals}f}x"
