"""Options that several commands have."""

from contextvars import ContextVar
from typing import Annotated

import typer

Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Seed of all that is drawn at random.")
]
MOST = 2**31 - 1
"""The largest number of rows or steps that can be asked for: the largest size of an array."""

LONGEST_MEMORY = 10**6
"""The largest number of rows that a stream can be asked to hold in memory."""

AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON, for machines.")]

ASKED: ContextVar[str | None] = ContextVar("ASKED", default=None)
"""The command line as it was given, for a report that says how to make it again."""
