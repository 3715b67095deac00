"""What the coordinates of a state are called in tables and pictures."""

from retrodict import models
from retrodict.runs._record import Run


def state_names(run: Run) -> list[str]:
    """A name for each coordinate of the state; see `retrodict.models.state_names`.

    Args:
        run: the run.
    """
    return models.state_names(run.model, run.layout["columns"])
