"""Compute reference figures for models of real data.

    python benchmarks/own_data.py volatility [--timeout SECONDS] [--out FILE]
    python benchmarks/own_data.py volatility-fit [--run FOLDER] [--timeout SECONDS] [--out FILE]

`volatility`: the stochastic-volatility model of Taylor (1982) for daily returns of the pound
against the dollar from 1997 on, as distributed with the package particles,

    x_0 ~ N(μ, σ² / (1 − φ²)),    x_t = μ + φ (x_{t-1} − μ) + σ ε_t,    y_t = exp(x_t / 2) η_t,

with y_t the difference of the logarithms in percent. The likelihood is maximised on a grid of
states, by a separate filter with derivatives by JAX. `grid_smoother` and particle filters must
agree with its value, and Louis' identity with its curvature.

`volatility-fit`: compare the estimates of `retrodict.runs.fit` on the same returns with that
maximum, and its smoothed volatility with the grid and FFBSi. `--run` names an existing run, such as
that of examples/volatility.py.
"""

import argparse
import importlib.util
import json
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import retrodict as rd
from retrodict import data, models, runs

jax.config.update("jax_enable_x64", True)

GRID = rd.Grid([-8.0], [5.0], 600)
NUM_PARTICLES, NUM_RUNS = 10_000, 20
BOUNDS = [(-5.0, 2.0), (-1.0, 4.0), (-3.0, 1.5)]
STARTS = ([-1.5, 2.0, -1.5], [-1.7, 1.2, -0.7], [-1.7, 2.6, -2.5], [-1.7, 3.2, -2.8])
NAMES = ("mean", "persistence", "scale")


def returns() -> np.ndarray:
    """Return the daily differences of the log price in percent, of shape `(time, 1)`."""
    spec = importlib.util.find_spec("particles")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The returns are distributed with the package particles: install it.")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "GBP_vs_USD_9798.txt"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    # Two lines of heading, rows that begin with a Julian day, and who the service thanks.
    prices = np.array([float(line.split()[3]) for line in lines if line[:7].isdigit()])
    return 100.0 * np.diff(np.log(prices))[:, None]


def natural(theta: jax.Array) -> jax.Array:
    """Return (μ, φ, σ) from unconstrained numbers."""
    return jnp.stack([theta[0], jnp.tanh(theta[1]), jnp.exp(theta[2])])


def log_likelihood(theta: jax.Array, start: jax.Array, ys: jax.Array) -> jax.Array:
    """Return the log-likelihood on a grid, with the stationary law evaluated at `start`."""
    mean, persistence, scale = natural(theta)
    first_mean, first_persistence, first_scale = natural(start)
    points, step = GRID.axes[0], GRID.spacing[0]
    moved = mean + persistence * (points - mean)
    move = step * jax.scipy.stats.norm.pdf(points[None, :], moved[:, None], scale)
    spread = first_scale / jnp.sqrt(1 - first_persistence**2)
    law = step * jax.scipy.stats.norm.pdf(points, first_mean, spread)
    logs = jax.scipy.stats.norm.logpdf(ys, 0.0, jnp.exp(points / 2)[None])

    def observe(predicted: jax.Array, log: jax.Array) -> tuple[jax.Array, jax.Array]:
        top = jnp.max(log)
        joint = predicted * jnp.exp(log - top)
        total = jnp.sum(joint)
        return joint / total, top + jnp.log(total)

    def forward(law: jax.Array, log: jax.Array) -> tuple[jax.Array, jax.Array]:
        law, increment = observe(law @ move, log)
        return law, increment

    law, increment = observe(law, logs[0])
    return increment + jnp.sum(jax.lax.scan(forward, law, logs[1:])[1])


def model_at(mean: float, persistence: float, scale: float) -> rd.StateSpaceModel:
    """Return the model, with the law of the first state held fixed."""
    spread = scale / np.sqrt(1 - persistence**2)
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.array([mean]), rd.Diagonal(jnp.array([spread])))),
        transition=rd.LinearGaussianKernel(
            jnp.array([[persistence]]),
            jnp.array([mean * (1 - persistence)]),
            rd.Diagonal(rd.Positive(jnp.array([scale]))),
        ),
        emission=rd.DistributionKernel(
            lambda x: rd.Gaussian(jnp.zeros(1), rd.Diagonal(jnp.exp(x / 2)))
        ),
    )


def read(model: rd.StateSpaceModel) -> dict[str, Any]:
    """Return (μ, φ, σ) of a model."""
    weight, bias = model.transition.weight[0, 0], model.transition.bias[0]
    scale = model.transition.scale_tril.std[0]
    return dict(zip(NAMES, (bias / (1 - weight), weight, scale), strict=True))


def errors(hessian: Any, theta: Any) -> list[float]:
    """Return standard errors of (μ, φ, σ) from a Hessian in unconstrained numbers."""
    slopes = np.asarray(jax.jacfwd(natural)(theta))
    covariance = slopes @ np.linalg.inv(-np.asarray(hessian)) @ slopes.T
    return np.sqrt(np.diagonal(covariance)).tolist()


def maximum(say: Callable[[str], None], ys: jax.Array) -> tuple[float, jax.Array]:
    """Return the largest log-likelihood and its argument."""
    tied = jax.jit(jax.value_and_grad(lambda theta: -log_likelihood(theta, theta, ys)))

    def target(theta: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = tied(jnp.asarray(theta))
        return float(value), np.asarray(slope)

    optima = []
    for start in STARTS:
        best: Any = minimize(
            target,
            np.array(start),
            jac=True,
            method="L-BFGS-B",
            bounds=BOUNDS,
            options={"ftol": 1e-14, "gtol": 1e-6},
        )
        optima.append(best)
        reached = np.round(natural(jnp.asarray(best.x)), 4)
        say(f"from {start}: {-best.fun:.6f} at {reached} after {best.nfev} evaluations")
    best = min(optima, key=lambda each: each.fun)
    return -float(best.fun), jnp.asarray(best.x)


def by_filters(model: rd.StateSpaceModel, ys: jax.Array, number: int) -> tuple[float, float]:
    """Return the log-likelihood by particle filters, and its standard error."""
    log_evidences = jax.lax.map(
        lambda key: rd.particle_filter(key, model, ys, number, mask=True).log_evidence,
        jax.random.split(jax.random.key(0), NUM_RUNS),
    )
    return float(jnp.mean(log_evidences)), float(jnp.std(log_evidences, ddof=1) / NUM_RUNS**0.5)


def volatility(say: Callable[[str], None], quick: bool, _: Path | None) -> dict[str, Any]:
    """Compute the maximum of the likelihood, its value and its curvature."""
    ys = jnp.asarray(returns()[:100] if quick else returns())
    say(f"{ys.shape[0]} returns, standard deviation {float(jnp.std(ys)):.4f}")
    top, theta = maximum(say, ys)
    values = natural(theta).tolist()
    say("maximum: " + ", ".join(f"{n} {v:.5f}" for n, v in zip(NAMES, values, strict=True)))
    hessian = jax.jit(jax.hessian(lambda theta: log_likelihood(theta, theta, ys)))(theta)
    hessian = jax.jit(jax.hessian(lambda moved: log_likelihood(moved, theta, ys)))(theta)
    say(f"standard errors by the Hessian on the grid: {np.round(errors(hessian, theta), 5)}")
    say(f"... with the first state's law held fixed: {np.round(errors(hessian, theta), 5)}")

    model = model_at(*values)
    on_grid = float(rd.grid_smoother(model, ys, GRID).log_evidence)
    say(f"log-likelihood {top:.6f}, by grid_smoother {on_grid:.6f}")
    number = 1000 if quick else NUM_PARTICLES
    average, error = by_filters(model, ys, number)
    say(f"by {NUM_RUNS} filters with {number} particles {average:.4f} ± {error:.4f}")

    began = time.perf_counter()
    # The data hold some 3% of what the states would tell of the persistence: many paths.
    louis = rd.parameter_errors(
        jax.random.key(1),
        model,
        ys,
        read=read,
        num_particles=1000,
        num_samples=100 if quick else 5000,
        num_replicates=40,
        backward=rd.particles.RejectionBackward(),
    )
    seconds = time.perf_counter() - began
    shown = {name: round(float(louis.standard_error[name]), 5) for name in NAMES}
    noise = {name: round(float(louis.monte_carlo_error[name]), 5) for name in NAMES}
    say(f"standard errors by Louis' identity in {seconds:.0f} s: {shown} (± {noise})")
    say(f"status: {louis.status}; {louis.distance:.3f} standard errors from the maximum")
    for message in louis.messages:
        say(message)
    return {
        "num_returns": ys.shape[0],
        "maximum": dict(zip(NAMES, values, strict=True)),
        "log_likelihood": top,
        "log_likelihood_grid_smoother": on_grid,
        "log_likelihood_particles": [average, error],
        "standard_errors_grid": errors(hessian, theta),
        "standard_errors_grid_first_state_fixed": errors(hessian, theta),
        "standard_errors_louis": shown,
        "standard_errors_louis_noise": noise,
        "intervals": {n: [float(louis.lower[n]), float(louis.upper[n])] for n in NAMES},
        "status": louis.status,
    }


def volatility_fit(say: Callable[[str], None], quick: bool, folder: Path | None) -> dict[str, Any]:
    """Measure the estimates of a run, and the error of its smoothed volatility."""
    values = returns()[:100] if quick else returns()
    table, ys = data.read({"return": values[:, 0]}), jnp.asarray(values)
    if folder is None:
        with tempfile.TemporaryDirectory() as place:
            spec = models.load("stochastic_volatility")
            run = runs.fit(table, spec, Path(place) / "run", num_steps=30 if quick else 3000)
    else:
        run = runs.open_run(folder)
    estimates = run.record["results"]["parameters"]
    learned = {name: float(estimates[f"{name}[return]"]["value"]) for name in NAMES}
    say("learned: " + ", ".join(f"{name} {value:.4f}" for name, value in learned.items()))
    say(run.record["results"]["uncertainty"])
    top, theta = maximum(say, ys)
    hessian = jax.jit(jax.hessian(lambda moved: log_likelihood(moved, theta, ys)))(theta)
    for name, exact in zip(NAMES, errors(hessian, theta), strict=True):
        shown = estimates[f"{name}[return]"].get("error", float("nan"))
        say(f"standard error of {name}: {shown:.3f}; on the grid, at the maximum, {exact:.3f}")

    model, number = rd.unwrap(run.model), 1000 if quick else NUM_PARTICLES
    exact = rd.grid_smoother(model, ys, GRID)
    on_grid = float(exact.log_evidence)
    average, error = by_filters(model, ys, number)
    say(
        f"log-likelihood of the run on the grid {on_grid:.3f}, {top - on_grid:.3f} from the maximum"
    )
    say(f"by {NUM_RUNS} filters with {number} particles {average:.3f} ± {error:.3f}")

    smoothed = np.asarray(runs.smooth(run, table, num_samples=number).mean)[0, :, 0]
    particles = rd.ffbsi(
        jax.random.key(1),
        model,
        ys,
        number,
        number,
        backward=rd.particles.RejectionBackward(),
        mask=True,
    )
    std = np.sqrt(np.asarray(exact.covariance)[:, 0, 0])
    means = {"FFBSi": np.asarray(particles.mean)[:, 0], "the grid": np.asarray(exact.mean)[:, 0]}
    off = {name: float(np.mean(np.abs(smoothed - mean) / std)) for name, mean in means.items()}
    for name, value in off.items():
        say(f"smoothed means differ from those of {name} by {value:.4f} deviations on average")
    between = float(np.mean(np.abs(means["FFBSi"] - means["the grid"]) / std))
    say(f"... those two from each other by {between:.4f}")
    return {
        "learned": learned,
        "log_likelihood": on_grid,
        "log_likelihood_particles": [average, error],
        "below_the_maximum": top - on_grid,
        "smoothed_means_off": off,
    }


PARTS = {"volatility": volatility, "volatility-fit": volatility_fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--timeout", type=int, default=1200, help="seconds after which to give up")
    parser.add_argument("--run", type=Path, help="a run to look at, instead of fitting one")
    parser.add_argument("--quick", action="store_true", help="the first 100 returns, for a look")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    signal.alarm(arguments.timeout)
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {line}", flush=True)

    figures = PARTS[arguments.part](say, arguments.quick, arguments.run)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
