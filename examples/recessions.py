"""Growth of US GNP, 1951 to 1984: recessions as a regime (Hamilton 1989).

    python examples/recessions.py --out recessions

Quarterly growth in percent has two means, four lags that both regimes share, and one scale. The
parameters are those of maximum likelihood, of the exact evidence.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import statsmodels.api as sm
from _command import command, print_parameters
from statsmodels.tsa.regime_switching.tests.test_markov_autoregression import rgnp

from retrodict import data, models, runs

MODEL = models.load("markov_switching").with_options(["regimes=2", "order=4", "switching=mean"])


def main(out: Path, quick: bool) -> None:
    quarters = pd.date_range("1951-04-01", periods=len(rgnp), freq="QS")
    frame = pd.DataFrame({"quarter": quarters, "growth": rgnp})
    frame = frame[:60] if quick else frame
    out.mkdir()
    frame.to_csv(out / "gnp.csv", index=False)
    table = data.read(frame)
    run = runs.fit(table, MODEL, out / "run")
    print_parameters(run, 3)
    print(f"log-likelihood: {run.record['results']['total']:.4f}")
    peer = sm.tsa.MarkovAutoregression(
        frame["growth"].to_numpy(), k_regimes=2, order=4, switching_ar=False
    )
    fitted = peer.fit(disp=False) if quick else peer.fit(search_reps=20, disp=False)
    print("statsmodels, log-likelihood:", np.round(fitted.llf, 4))
    smoothed = data.to_frame(table, runs.smooth(run, table))
    smoothed.to_csv(out / "regimes.csv", index=False)
    recession = smoothed["regime_1"].to_numpy()
    theirs = fitted.smoothed_marginal_probabilities
    theirs = theirs[:, np.argmin(fitted.params[2:4])]
    print(f"largest difference of a probability: {np.abs(recession[4:] - theirs).max():.4f}")
    print(f"{int(np.sum(recession > 0.5))} of {len(recession)} quarters are in a recession")
    runs.draw(run, table, out / "recessions.png", steps=0 if quick else 8)
    print("wrote", out / "recessions.png")


if __name__ == "__main__":
    command(main, __doc__)
