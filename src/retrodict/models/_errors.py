"""What goes wrong with models that are named, and how a near miss is answered."""

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """A model, its file, an option or a parameter is not what it should be; one line says why."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the nearest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f" Did you mean {close[0]}?"
    return f" Known: {', '.join(known)}." if known else ""
