"""Series that statsmodels ships in its own test modules."""

import ast
from pathlib import Path

import numpy as np
import statsmodels.tsa.regime_switching


def statsmodels_series(module: str, name: str) -> np.ndarray:
    """Return a list of numbers of a test module, which is read and not imported.

    An import would register the markers of the other test suite.
    """
    folder = Path(statsmodels.tsa.regime_switching.__file__).parent / "tests"
    tree = ast.parse((folder / f"{module}.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name
    ]
    return np.array(ast.literal_eval(values[0]))
