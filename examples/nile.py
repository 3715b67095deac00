"""Flow of the Nile at Aswan, 1871 to 1970: a local level model with missing rows.

    python examples/nile.py --out nile

The local level model of Durbin and Koopman (2012, chapter 2), with their gaps: rows 21 to 40 and 61
to 80 are removed, and drawn from their law given the others.
"""

from pathlib import Path

import numpy as np
import statsmodels.api as sm
from _command import command, print_parameters

from retrodict import data, models, runs


def main(out: Path, quick: bool) -> None:
    frame = sm.datasets.nile.load_pandas().data.astype({"year": int})
    table = data.read(frame)
    run = runs.fit(table, models.load("local_level"), out / "whole")
    print_parameters(run, 2)
    peer = sm.tsa.UnobservedComponents(frame["volume"].to_numpy(), "llevel").fit(disp=False)
    print("statsmodels, observation and level scale:", np.round(np.sqrt(peer.params), 2))

    removed = np.zeros(len(frame), bool)
    removed[20:40] = removed[60:80] = True
    gaps = data.read(frame[~removed], **table.layout)
    run = runs.fit(gaps, models.load("local_level"), out / "gaps")
    draws = runs.impute(run, gaps, 200 if quick else 2000)[0, :, removed, 0]
    truth = frame["volume"].to_numpy()[removed]
    lower, upper = np.quantile(draws, [0.05, 0.95], axis=1)
    inside = np.mean((truth > lower) & (truth < upper))
    print(f"{100 * inside:.0f}% of {removed.sum()} removed rows are in their 90% intervals")
    runs.draw(run, gaps, out / "nile.png", steps=10)
    print("wrote", out / "nile.png")


if __name__ == "__main__":
    command(main, __doc__)
