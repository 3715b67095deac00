"""Recover independent components with switching linear dynamics from a nonlinear mixture.

    python benchmarks/switching_ica.py [--seeds N ...] [--series N] [--rows N] [--steps N]
                                       [--out FILE]
    python benchmarks/switching_ica.py --collect FILE ... [--out FILE]

Structured nonlinear independent component analysis (Hälvä et al. 2021): three components, each an
autoregression that switches between two regimes, are mixed into 12 observations,

    x_k^i = a_z x_{k-1}^i + b_z + s_z ε,    y_k = V tanh(W x_k + v) + 0.1 η,

by a network of two layers. Model and posterior are learned together from observations alone, by
`fit(learn="both")`: an emission with a linear path and a network of two layers, components of two
regimes, and `SwitchingFamily`. The linear path starts at the independent components of the leading
principal components (a fixed point of the kurtosis, in NumPy), as is usual. Beside it, a model with
independent linear dynamics of one regime and `GatedFamily`, from the same start.

The figure is the mean absolute correlation of smoothed with true components, over the rows of all
series, after the best assignment; by ranks as well, which no monotone map of a component changes.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd

NUM_COMPONENTS, NUM_COLUMNS, WIDTH, NOISE = 3, 12, 32, 0.1
TARGET = 0.9
GAIN = 3.0
"""The scale of the inner layer: how far the mixture is from a linear one."""


class DiagonalWeight(rd.AbstractParameter):
    """A diagonal matrix."""

    diagonal: Any

    @property
    def value(self) -> jax.Array:
        """The matrix."""
        return jnp.diag(self.diagonal)


class Mixing(eqx.Module):
    """x ↦ A x + network(x)."""

    weight: jax.Array
    bias: jax.Array
    network: eqx.nn.MLP

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the mean of the observations."""
        return self.weight @ x + self.bias + self.network(x)


def component(stay: float, moves: list[tuple[float, float, float]]) -> rd.switching.SwitchingModel:
    """Return a component of two regimes with these weights, biases and scales."""
    eye = jnp.eye(1)
    rows = [[stay, 1 - stay], [1 - stay, stay]]
    return rd.switching.SwitchingModel(
        rd.switching.Regimes.from_probabilities([0.5, 0.5], rows),
        prior=rd.Gaussian(jnp.zeros(1), eye),
        transition=[
            rd.LinearGaussianKernel(a * eye, b * jnp.ones(1), s * eye) for a, b, s in moves
        ],
        emission=rd.LinearGaussianKernel(eye, jnp.zeros(1), eye),
    )


def truth(seed: int) -> rd.switching.SwitchingModel:
    """Return the model that the series are drawn from."""
    rng = np.random.default_rng(seed)
    inner = np.linalg.qr(rng.normal(size=(NUM_COLUMNS, NUM_COMPONENTS)))[0]
    outer = np.linalg.qr(rng.normal(size=(NUM_COLUMNS, NUM_COLUMNS)))[0]
    inner, outer = jnp.asarray(GAIN * inner), jnp.asarray(outer)
    shift = jnp.asarray(rng.normal(size=NUM_COLUMNS))
    components = [
        component(0.97, [(0.9, 0.2, 0.2), (0.9, -0.2, 0.2)]),
        component(0.95, [(0.5, 0.8, 0.3), (0.8, -0.3, 0.4)]),
        component(0.9, [(0.7, 0.5, 0.2), (0.3, -1.0, 0.4)]),
    ]
    noise = rd.Diagonal(NOISE * jnp.ones(NUM_COLUMNS))
    emission = rd.NonlinearGaussianKernel(lambda x: outer @ jnp.tanh(inner @ x + shift), noise)
    return rd.switching.product_model(components, emission)


def linear_start(ys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mixing matrix of a linear analysis, for components of unit variance, and a mean.

    The components are independent by the extremes of the kurtosis (Hyvärinen and Oja 1997), of the
    leading principal components.
    """
    rows = ys.reshape(-1, ys.shape[-1])
    mean = rows.mean(axis=0)
    _, values, axes = np.linalg.svd(rows - mean, full_matrices=False)
    spread = values[:NUM_COMPONENTS] / np.sqrt(len(rows))
    white = (rows - mean) @ axes[:NUM_COMPONENTS].T / spread
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(NUM_COMPONENTS,) * 2))[0]
    for _ in range(200):
        projected = white @ turn.T
        turn = (projected**3).T @ white / len(rows) - 3 * turn
        left, _, right = np.linalg.svd(turn)
        turn = left @ right
    return axes[:NUM_COMPONENTS].T * spread @ turn.T, mean


def emission_start(seed: int, ys: np.ndarray) -> rd.NonlinearGaussianKernel:
    """Return an emission to learn, with the linear analysis as its start."""
    weight, mean = linear_start(ys)
    network = eqx.nn.MLP(
        NUM_COMPONENTS, NUM_COLUMNS, WIDTH, 1, activation=jnp.tanh, key=jax.random.key(seed)
    )
    network = eqx.tree_at(lambda net: net.layers[-1].weight, network, replace_fn=lambda w: 0.1 * w)
    residual = jnp.asarray(0.5 * np.std(ys, axis=(0, 1)))
    return rd.NonlinearGaussianKernel(
        Mixing(jnp.asarray(weight), jnp.asarray(mean), network),
        rd.Diagonal(rd.Positive(residual)),
    )


def switching(seed: int, ys: np.ndarray) -> tuple[Any, Any]:
    """Return the switching model to learn, and its family."""
    start = component(0.9, [(0.7, 0.3, 0.5), (0.7, -0.3, 0.5)])
    model = rd.switching.product_model([start] * NUM_COMPONENTS, emission_start(seed, ys))
    family = rd.switching.SwitchingFamily(
        jax.random.key(seed),
        NUM_COMPONENTS,
        NUM_COLUMNS,
        2**NUM_COMPONENTS,
        width=64,
        per_regime=False,
    )
    return model, family


def linear(seed: int, ys: np.ndarray) -> tuple[Any, Any]:
    """Return the model with linear dynamics to learn, and its family."""
    d = NUM_COMPONENTS
    noise = rd.Diagonal(rd.Positive(0.5 * jnp.ones(d)))
    kernel = rd.LinearGaussianKernel(DiagonalWeight(0.8 * jnp.ones(d)), jnp.zeros(d), noise)
    prior = rd.Gaussian(jnp.zeros(d), rd.Diagonal(rd.Positive(jnp.ones(d))))
    model = rd.StateSpaceModel(prior, kernel, emission_start(seed, ys))
    return model, rd.GatedFamily(jax.random.key(seed), d, NUM_COLUMNS, width=64)


def correlation(means: np.ndarray, xs: np.ndarray) -> float:
    """Return the mean absolute correlation after the best assignment."""
    d = NUM_COMPONENTS
    means, xs = means.reshape(-1, d), xs.reshape(-1, d)
    table = np.abs(np.corrcoef(means.T, xs.T)[:d, d:])
    orders = itertools.permutations(range(d))
    return float(max(np.mean(table[np.arange(d), order]) for order in orders))


def ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks of the entries of each component."""
    rows = values.reshape(-1, NUM_COMPONENTS)
    return np.argsort(np.argsort(rows, axis=0), axis=0).astype(float)


def smoothed_means(result: Any, ys: np.ndarray) -> np.ndarray:
    """Return the smoothed means of all series."""

    def of_linear(y: jax.Array, key: jax.Array) -> jax.Array:
        return result.family.infer(y, mask=True).marginals().mean

    def of_switching(y: jax.Array, key: jax.Array) -> jax.Array:
        return result.family.infer(y, mask=True).marginals(key, num_samples=50).mean

    is_linear = isinstance(result.model, rd.StateSpaceModel)
    keys = jax.random.split(jax.random.key(0), len(ys))
    return np.array(jax.jit(jax.vmap(of_linear if is_linear else of_switching))(ys, keys))


def row(seed: int, name: str, xs: np.ndarray, ys: np.ndarray, steps: int) -> dict[str, Any]:
    """Learn a model from the series, and compare it with the truth."""
    model, family = {"switching": switching, "linear": linear}[name](seed, ys)
    begin = time.perf_counter()
    result = rd.fit(
        jax.random.key(seed),
        family,
        model,
        jnp.asarray(ys),
        learn="both",
        num_steps=steps,
        optimisation=rd.Optimisation(batch_size=16, learning_rate=5e-3),
        progress=False,
    )
    seconds = time.perf_counter() - begin
    means = smoothed_means(result, ys)
    return {
        "seed": seed,
        "model": name,
        "correlation": correlation(means, xs),
        "rank_correlation": correlation(ranks(means), ranks(xs)),
        "elbo_per_row": float(result.held_out[-1]),
        "status": result.status,
        "seconds": seconds,
    }


def started(seed: int, xs: np.ndarray, ys: np.ndarray) -> dict[str, Any]:
    """Return the figures of the linear analysis alone."""
    weight, mean = linear_start(ys)
    means = (ys - mean) @ np.linalg.pinv(weight).T
    values = {"correlation": correlation(means, xs)}
    values["rank_correlation"] = correlation(ranks(means), ranks(xs))
    return {"seed": seed, "model": "linear analysis", **values}


def report(rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, the mean correlation of each model, and the rows."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    means = {
        name: float(np.mean([row["correlation"] for row in rows if row["model"] == name]))
        for name in names
    }
    return {"target": TARGET, **settings, "mean_correlation": means, "results": rows}


def collect(paths: list[Path]) -> dict[str, Any]:
    """Join the results of several calls with the same settings."""
    parts = [json.loads(path.read_text()) for path in paths]
    kept = ("target", "mean_correlation", "results")
    settings = [{k: v for k, v in part.items() if k not in kept} for part in parts]
    if any(other != settings[0] for other in settings[1:]):
        raise SystemExit("The files have different settings.")
    return report([row for part in parts for row in part["results"]], settings[0])


def main() -> None:
    """Run all seeds, print the figures and write them after every fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--series", type=int, default=128)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--collect", type=Path, nargs="+", help="join results of other calls")
    default = Path(__file__).parent / "results" / "switching-ica.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if options.collect:
        content = collect(options.collect)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
        print(content["mean_correlation"])
        return
    settings = {"series": options.series, "rows": options.rows, "steps": options.steps}
    settings |= {"device": jax.devices()[0].device_kind, "dtype": "float64"}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        keys = jax.random.split(jax.random.key(100 + seed), options.series)
        model = truth(seed)
        _, xs, ys = jax.vmap(lambda key, model=model: model.simulate(key, options.rows))(keys)
        xs, ys = np.array(xs), np.array(ys)
        rows.append(started(seed, xs, ys))
        print(rows[-1], flush=True)
        for name in ("switching", "linear"):
            rows.append(row(seed, name, xs, ys, options.steps))
            print(rows[-1], flush=True)
            options.out.write_text(json.dumps(report(rows, settings), indent=1) + "\n")


if __name__ == "__main__":
    main()
