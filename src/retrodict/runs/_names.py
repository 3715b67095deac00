"""What the coordinates of a state are called in tables and pictures."""

from retrodict import models
from retrodict.runs._record import Run


def state_names(run: Run) -> list[str]:
    """A name for each coordinate of the state: those of a ready model, else `state0`, `state1`, …

    Args:
        run: the run.
    """
    return models.state_names(run.model, run.layout["columns"])
