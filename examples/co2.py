"""Carbon dioxide at Mauna Loa, weekly from 1958 to 2001: trend, season and 59 missing weeks.

    python examples/co2.py --out co2

A level with a slope and three harmonics per year, fitted to the weekly averages in statsmodels.
"""

from pathlib import Path

import statsmodels.api as sm
from _command import command, print_parameters

from retrodict import data, models, runs

SPEC = models.ModelSpec(
    "seasonal",
    "seasonal",
    options={"period": 52, "harmonics": 3, "slope": True},
)


def main(out: Path, quick: bool) -> None:
    frame = sm.datasets.co2.load_pandas().data
    table = data.read(frame.iloc[-260:] if quick else frame)
    print(*table.described(), sep="\n")
    run = runs.fit(table, SPEC, out / "run")
    print_parameters(run, 4)
    smoothed = runs.smooth(run, table)
    frame = data.to_frame(table, smoothed, state_names=runs.state_names(run))
    print(frame[["index", "level_mean", "level_std", "slope_mean"]].tail(3).to_string(index=False))
    runs.draw(run, table, out / "co2.png", steps=104)
    print("wrote", out / "co2.png")


if __name__ == "__main__":
    command(main, __doc__)
