"""Daily returns of the pound against the dollar: stochastic volatility.

    python examples/volatility.py --out volatility

The stochastic-volatility model of Taylor (1982), fitted to the returns in the package particles. A
particle smoother checks the learned posterior.
"""

import importlib.util
from pathlib import Path

import jax
import numpy as np
from _command import command, print_parameters

import retrodict as rd
from retrodict import data, models, runs


def returns() -> np.ndarray:
    """Return the daily differences of the log price, in percent."""
    spec = importlib.util.find_spec("particles")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The returns come with the package particles: pip install it.")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "GBP_vs_USD_9798.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    prices = np.array([float(line.split()[3]) for line in lines if line[:7].isdigit()])
    return 100.0 * np.diff(np.log(prices))


def main(out: Path, quick: bool) -> None:
    values = returns()[:150] if quick else returns()
    table = data.read({"return": values})
    steps = 30 if quick else 3000
    run = runs.fit(table, models.load("stochastic_volatility"), out / "run", num_steps=steps)
    print_parameters(run, 3)

    smoothed = runs.smooth(run, table)
    one = table.one()
    count = 200 if quick else 10_000
    filters = [
        float(rd.particle_filter(key, run.model, one["ys"], count).log_evidence)
        for key in jax.random.split(jax.random.key(0), 20)
    ]
    error = np.std(filters, ddof=1) / np.sqrt(20)
    print(
        f"log-likelihood by 20 filters of {count} particles: {np.mean(filters):.2f} ± {error:.2f}"
    )
    particles = rd.ffbsi(jax.random.key(1), run.model, one["ys"], min(count, 4000))
    std = np.sqrt(np.asarray(particles.covariance)[:, 0, 0])
    difference = np.abs(np.asarray(smoothed.mean)[0, :, 0] - np.asarray(particles.mean)[:, 0])
    print(
        "mean difference to the particle smoother:"
        f" {np.mean(difference / std):.3f} posterior standard deviations"
    )
    runs.draw(run, table, out / "volatility.png", steps=20)
    print("wrote", out / "volatility.png")


if __name__ == "__main__":
    command(main, __doc__)
