"""What the coordinates of a state are called in tables and pictures."""

from retrodict import models
from retrodict.runs._record import Run


def state_names(run: Run) -> list[str]:
    """Return a name for each coordinate of the state; see `retrodict.models.state_names`.

    Args:
        run: the run.
    """
    return models.state_names(run.model, run.layout["columns"])


def shown_states(run: Run, *, every: bool = False) -> list[int]:
    """Return the places of the states that tables and pictures show.

    States that hold earlier values of others, such as the seasons of the last rows, repeat what
    earlier rows show, and are left out; see `retrodict.models.is_memory`.

    Args:
        run: the run.
        every: whether to show these too.
    """
    memory = models.is_memory(run.model)
    return [place for place, copied in enumerate(memory) if every or not copied]
