"""Monthly counts of nutria: Poisson counts with an autoregressive log rate.

    python examples/nutria.py --out nutria

The package particles has 120 monthly counts in thousands, rounded to fifty. The script converts
them to counts.
"""

import importlib.util
from pathlib import Path

import numpy as np
from _command import command, print_parameters

from retrodict import data, models, runs


def counts() -> np.ndarray:
    """Return the counts as whole numbers."""
    spec = importlib.util.find_spec("particles")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The counts come with the package particles: pip install it.")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "nutria.txt"
    return np.round(1000 * np.loadtxt(path))


def main(out: Path, quick: bool) -> None:
    table = data.read({"nutria": counts()})
    steps = 30 if quick else 2000
    run = runs.fit(table, models.load("poisson_counts"), out / "run", num_steps=steps)
    print_parameters(run, 3)
    checked = runs.check(run, table, num_particles=200 if quick else 2000)
    for finding in checked.findings:
        print(f"{finding.name}: {finding.value} ({finding.verdict})")
    print(checked.verdict)
    runs.draw(run, table, out / "nutria.png", steps=12)
    print("wrote", out / "nutria.png")


if __name__ == "__main__":
    command(main, __doc__)
