"""Options of `rd.fit` by name, grouped into its records."""

import dataclasses
from typing import Any

import retrodict as rd

RECORDS = {"objective": rd.Objective, "optimisation": rd.Optimisation}


def fit_options(**options: Any) -> dict[str, Any]:
    """Return keyword arguments of `rd.fit`, with `batch_size`, `window` and the like in records."""
    for argument, record in RECORDS.items():
        names = {field.name for field in dataclasses.fields(record)} & set(options)
        if names:
            options[argument] = record(**{name: options.pop(name) for name in names})
    return options
