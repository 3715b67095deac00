"""What goes wrong with models that are named, and how a near miss is answered."""

import difflib
from collections.abc import Iterable


class ModelError(ValueError):
    """A model, its file, an option or a parameter is not what it should be; one line says why."""


def guess(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the nearest known one, if one is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the nearest known one, or all of them."""
    known = list(known)
    return guess(name, known) or (f" Known: {', '.join(known)}." if known else "")
