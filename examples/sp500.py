"""The S&P 500 as a stream: volatility row by row, with a restart.

    python examples/sp500.py --out sp500

Daily returns from 1999 to 2018, from the package arch. The model is fitted to the first years. Then
all rows are streamed: the rows of the fit are skipped, the others get one answer per row. The
stream is interrupted once and continued.
"""

import io
from pathlib import Path

import numpy as np
import pandas as pd
from _command import command

from retrodict import data, models, runs


def main(out: Path, quick: bool) -> None:
    import arch.data.sp500

    prices = arch.data.sp500.load()["Adj Close"]
    returns = pd.DataFrame({"return": 100 * np.log(prices).diff().dropna()})
    returns = returns.rename_axis("date").reset_index()
    returns = returns.iloc[: 400 if quick else None]
    num_fitted = 200 if quick else 1500
    table = data.read(returns.iloc[:num_fitted], freq="irregular")
    steps = 30 if quick else 2000
    run = runs.fit(table, models.load("stochastic_volatility"), out / "run", num_steps=steps)

    text = returns.to_csv(index=False).splitlines(keepends=True)
    half = (num_fitted + len(text)) // 2
    place = out / "answers.csv"
    first = runs.stream(run, io.BytesIO("".join(text[:half]).encode()), place, lag=20)
    print(f"{first} rows answered before the interruption")
    rest = runs.stream(run, io.BytesIO("".join(text).encode()), place, lag=20, flush=True)
    print(f"{rest} rows answered after the restart")
    answers = pd.read_csv(place)
    worst = answers.loc[answers["log_variance_smoothed_mean"].idxmax()]
    daily = np.exp(worst["log_variance_smoothed_mean"] / 2)
    print(f"most volatile: {worst['smoothed_time'][:10]}, {daily:.1f}% per day")


if __name__ == "__main__":
    command(main, __doc__)
