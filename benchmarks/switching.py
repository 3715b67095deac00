"""Compare smoothers of a switching linear Gaussian model with true parameters.

    python benchmarks/switching.py --seeds 20 --out benchmarks/results/switching.json

The model has K = 3 regimes and d = 2 states that rotate slowly, rotate fast or decay, with an
observation of both coordinates in noise as wide as the states. One regime is left for another every
25 rows on average. Each seed simulates one series of 1,000 rows. Reported are the share of rows
whose most probable regime is the true one, the root mean square error of the smoothed states, and
the seconds per series after compilation, all in one run.

A method is a function of (key, ys) to `SwitchingMarginals`, and a line in `METHODS`.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd

jax.config.update("jax_enable_x64", True)

NUM_ROWS = 1000
NUM_PATHS, REFERENCE_PATHS = 25, 100
NUM_PARTICLES = 10_000
REFERENCE = "rao_blackwellised"


def rotation(angle: float, decay: float) -> np.ndarray:
    """Return a rotation of the plane, times a factor."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return decay * np.array([[cosine, -sine], [sine, cosine]])


def switching_model() -> rd.switching.SwitchingModel:
    """Return the model: slow rotation, fast rotation, and decay with larger noise."""
    eye = np.eye(2)
    stay, move = 0.96, 0.02
    regimes = rd.switching.Regimes.from_probabilities(
        np.full(3, 1 / 3), np.full((3, 3), move) + (stay - move) * np.eye(3)
    )
    dynamics = ((0.1, 0.99, 0.2), (0.8, 0.99, 0.2), (0.0, 0.5, 0.6))
    return rd.switching.SwitchingModel(
        regimes,
        prior=rd.Gaussian(np.zeros(2), eye),
        transition=[
            rd.LinearGaussianKernel(rotation(angle, decay), np.zeros(2), scale * eye)
            for angle, decay, scale in dynamics
        ],
        emission=rd.LinearGaussianKernel(eye, np.zeros(2), 0.5 * eye),
    )


MODEL = switching_model()


def gaussian_sum(smoother: Callable[..., Any], key: Any, ys: jax.Array) -> Any:
    """Return the marginals of a Gaussian-sum smoother, by sampled paths."""
    return smoother(MODEL, ys, mask=True).chain.marginals(key, num_samples=NUM_PATHS)


def by_particles(key: Any, ys: jax.Array) -> Any:
    """Return the marginals of the Rao-Blackwellised particle smoother."""
    return rd.switching.rao_blackwellised_smoother(
        key,
        MODEL,
        ys,
        num_particles=NUM_PARTICLES,
        num_samples=REFERENCE_PATHS,
        strict=False,
        mask=True,
    ).marginals


METHODS: dict[str, Callable[[Any, jax.Array], Any]] = {
    "gpb2": partial(gaussian_sum, rd.switching.gpb2_smoother),
    "imm": partial(gaussian_sum, rd.switching.imm_smoother),
    REFERENCE: by_particles,
}


def measured(method: Callable[..., Any], seeds: int) -> dict[str, list[float]]:
    """Return the accuracy, the error and the seconds of every seed, after one call to compile."""
    smooth = jax.jit(method)
    results: dict[str, list[float]] = {"accuracy": [], "rmse": [], "seconds": []}
    for seed in range(seeds):
        data_key, key = jax.random.split(jax.random.key(seed))
        zs, xs, ys = jax.block_until_ready(MODEL.simulate(data_key, NUM_ROWS))
        if seed == 0:
            jax.block_until_ready(smooth(key, ys))
        began = time.perf_counter()
        marginals = jax.block_until_ready(smooth(key, ys))
        results["seconds"].append(time.perf_counter() - began)
        results["accuracy"].append(float(np.mean(np.asarray(marginals.regimes == zs))))
        results["rmse"].append(float(jnp.sqrt(jnp.mean((marginals.mean - xs) ** 2))))
    return results


def spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def summary(results: dict[str, list[float]], reference: dict[str, list[float]]) -> dict[str, Any]:
    """Return means with standard errors, beside those of the reference on the same series."""
    accuracy, rmse = (np.array(results[name]) for name in ("accuracy", "rmse"))
    return {
        "accuracy": spread(results["accuracy"]),
        "rmse": spread(results["rmse"]),
        "median_seconds": float(np.median(results["seconds"])),
        "accuracy_over_reference": spread(list(accuracy / reference["accuracy"])),
        "rmse_over_reference": spread(list(rmse / reference["rmse"])),
        "reference_seconds_over_seconds": float(
            np.median(reference["seconds"]) / np.median(results["seconds"])
        ),
    }


def main() -> None:
    """Run all methods, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    results = {}
    for name, method in METHODS.items():
        results[name] = measured(method, options.seeds)
        print(
            name,
            {key: round(float(np.median(v)), 4) for key, v in results[name].items()},
            flush=True,
        )
    methods = {name: summary(one, results[REFERENCE]) for name, one in results.items()}
    for name, figures in methods.items():
        print(f"{name}: {json.dumps(figures)}", flush=True)
    record = {
        "device": jax.devices()[0].platform,
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dtype": "float64",
        "rows": NUM_ROWS,
        "paths": NUM_PATHS,
        "reference_paths": REFERENCE_PATHS,
        "particles": NUM_PARTICLES,
        "seeds": options.seeds,
        "methods": methods,
        "per_seed": results,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
