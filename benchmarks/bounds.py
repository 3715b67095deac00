"""Compare error bounds with exact errors over many models, and as series grow.

    python benchmarks/bounds.py [gaussian paper models long] [--figures DIR] [--out FILE]

`benchmarks/bounds_finite.py` does the same on finite spaces.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# These programs take longer to compile than to run.
os.environ.setdefault("XLA_FLAGS", "--xla_llvm_disable_expensive_passes=true")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

import retrodict as rd
from accuracy import (
    GRID,
    LINEAR,
    NONLINEAR,
    simulate,
    trained,
)
from retrodict._model import Series
from retrodict.bounds import curvature, grid_bounds, theorems, wasserstein
from retrodict.bounds.distances import gaussian_distance
from retrodict.experiments import published

RESULTS = Path(__file__).with_name("results") / "bounds.json"
LENGTHS = (5, 15, 30, 60)
WINDOW = 64
BOUNDS = ("phi", "b", "q", "least of the three", "a", "ELBO gap", "score")
TABLE = {1: (1.28, 1.25, 2.13, 2.03, 2.6), 2: (1.73, 1.59, 2.9, 2.9, 3.5)}
"""Medians seen before, with other random models: phi, least, a, ELBO gap, score."""


def random_model(key: Any, d: int) -> tuple[Any, ...]:
    """Draw weight, bias, noise, design, error and prior scale; spectral radius 0.3 to 1.02."""
    keys = jax.random.split(key, 6)
    weight = jax.random.normal(keys[0], (d, d))
    radius = jnp.max(jnp.abs(jnp.linalg.eigvals(weight)))
    weight = weight * jax.random.uniform(keys[1], minval=0.3, maxval=1.02) / radius

    def scale(key: Any) -> jax.Array:
        size_key, way_key = jax.random.split(key)
        sizes = jnp.exp(jax.random.uniform(size_key, (d,), minval=np.log(0.1), maxval=0.0))
        ways, _ = jnp.linalg.qr(jax.random.normal(way_key, (d, d)))
        return jnp.linalg.cholesky(ways * sizes**2 @ ways.T)

    design = jax.random.normal(keys[2], (d, d))
    bias = 0.1 * jax.random.normal(keys[3], (d,))
    return weight, bias, scale(keys[4]), design, scale(keys[5]), jnp.eye(d)


def build(weight: Any, bias: Any, noise: Any, design: Any, error: Any, prior: Any) -> Any:
    d = weight.shape[0]
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(d), prior),
        rd.LinearGaussianKernel(weight, bias, noise),
        rd.LinearGaussianKernel(design, jnp.zeros(d), error),
    )


def shaken(key: Any, size: Any, arrays: Any) -> Any:
    """Multiply every entry by a random positive factor near 1."""
    leaves, tree = jax.tree.flatten(arrays)
    keys = jax.random.split(key, len(leaves))
    moved = [
        a * jnp.exp(size * jax.random.normal(k, a.shape)) for k, a in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def shaken_chain(key: Any, size: Any, chain: Any) -> rd.LinearGaussianChain:
    """Multiply the entries of laws and kernels; the chain derives the rest from them again."""
    return rd.LinearGaussianChain(*shaken(key, size, (chain.laws, chain.kernels)))


def instance(key: Any, free: Any, n: int, d: int) -> dict[str, Any]:
    """Compute all bounds of one random model, with a misspecified or perturbed exact chain."""
    keys = jax.random.split(key, 6)
    theta = random_model(keys[0], d)
    model = build(*theta)
    _, ys = model.simulate(keys[1], n)
    exact = rd.kalman_smoother(model, ys, mask=True)
    size = jnp.exp(jax.random.uniform(keys[2], minval=np.log(0.01), maxval=np.log(0.3)))
    other = rd.kalman_smoother(build(*shaken(keys[3], size, theta)), ys, mask=True).chain
    chain = jax.tree.map(
        lambda a, b: jnp.where(free, a, b),
        shaken_chain(keys[4], size, exact.chain),
        rd.LinearGaussianChain(other.laws, other.kernels),
    )
    reference = wasserstein.exact_posterior(exact.chain)
    ones, series = jnp.ones(n), Series(ys, None, None, None)
    curvatures = curvature.curvature(model, series)
    variance = jnp.sum(curvatures.largest_variance(ones, WINDOW))
    gap = exact.log_evidence - rd.elbo(model, chain, ys, mask=True)
    terms = theorems.score_terms(model, chain, series, curvatures, chain.sample(keys[5], 500))
    phi = wasserstein.phi(chain, reference, wasserstein.Sensitivity(0 * ones, ones), WINDOW)
    values = {
        "phi": jnp.sum(phi),
        "b": jnp.sum(wasserstein.backward(chain, reference, ones, WINDOW)),
        "q": jnp.sum(wasserstein.forward(chain, reference, ones, WINDOW)),
        "a": jnp.sum(wasserstein.auxiliary(chain, reference, ones, WINDOW)),
        "ELBO gap": jnp.sqrt(2 * variance * jnp.maximum(gap, 0.0)),
        "score": jnp.sqrt(variance * jnp.mean(jnp.sum(terms, axis=1))),
    }
    values["least of the three"] = jnp.min(jnp.stack([values[k] for k in ("phi", "b", "q")]))
    ours, theirs = chain.marginals(), reference.marginals
    values["worst"] = jnp.sum(jax.vmap(projected)(ours, theirs))
    values["sum"] = jnp.max(jnp.abs(jnp.sum(ours.mean - theirs.mean, axis=0)))
    return values


def projected(p: rd.Gaussian, q: rd.Gaussian) -> Any:
    """Compute W₁ in one dimension; in two, the largest W₁ of a projection, a lower bound."""
    if p.dim == 1:
        return gaussian_distance(p, q)
    angles = jnp.linspace(0, np.pi, 32, endpoint=False)

    def along(angle: Any) -> Any:
        way = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
        lines = (
            rd.Gaussian((law.mean @ way)[None], jnp.linalg.norm(way @ law.scale_tril)[None, None])
            for law in (p, q)
        )
        return gaussian_distance(*lines)

    return jnp.max(jax.vmap(along)(angles))


def gaussian() -> dict[str, Any]:
    """Measure random linear-Gaussian models, 2,000 with d = 1 and 1,000 with d = 2."""
    results: dict[str, Any] = {}
    for d, count in ((1, 2000), (2, 1000)):
        parts = []
        for n in LENGTHS:
            keys = jax.random.split(jax.random.key(1000 * d + n), count // len(LENGTHS))
            free = jnp.arange(keys.shape[0]) % 2 == 0
            run = jax.jit(
                lambda keys, free, n=n, d=d: jax.lax.map(
                    lambda at: instance(at[0], at[1], n, d), (keys, free), batch_size=50
                )
            )
            parts.append(jax.tree.map(np.asarray, run(keys, free)))
            print(f"  d={d}, n={n} done", flush=True)
        values = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        figures: dict[str, Any] = {}
        for name in BOUNDS:
            ratio = values[name] / values["worst"]
            # Anything that is not a number counts as a violation.
            holds = (ratio >= 1 - 1e-9) & (values[name] >= values["sum"] * (1 - 1e-9))
            violated = int(np.sum(~holds))
            low, middle, high = np.quantile(ratio, [0.1, 0.5, 0.9])
            figures[name] = {
                "violations": violated,
                "q10": float(low),
                "median": float(middle),
                "q90": float(high),
                "largest": float(ratio.max()),
            }
            print(
                f"  d={d}, {ratio.size} models, {name}: {violated} violations, bound / worst"
                f" case {low:.2f}, {middle:.2f}, {high:.2f}, at most {ratio.max():.1f}"
            )
        print(f"  medians seen elsewhere (phi, least, a, ELBO gap, score): {TABLE[d]}")
        results[f"d={d}"] = figures
    return results


def paper(figures: Path | None) -> dict[str, Any]:
    """Measure the published fits of section 5.1 on the evaluation sequences, as n grows to 2000."""
    (_, ys), theta = published.linear_sequences(), rd.unwrap(LINEAR)
    lengths = (25, 50, 100, 200, 500, 1000, 2000)
    results: dict[str, Any] = {"lengths": lengths}

    def both(epoch: int, y: Any) -> tuple[Any, Any, Any]:
        chain = rd.kalman_smoother(rd.unwrap(published.linear_lambda(epoch)), y, mask=True).chain
        reference = wasserstein.exact_posterior(rd.kalman_smoother(theta, y, mask=True).chain)
        ones = jnp.ones(y.shape[0])
        steps = wasserstein.phi(chain, reference, wasserstein.Sensitivity(0 * ones, ones), WINDOW)
        error = jnp.sum(chain.marginals().mean - reference.marginals.mean)
        worst = jnp.sum(jax.vmap(gaussian_distance)(chain.marginals(), reference.marginals))
        return jnp.abs(error), jnp.sum(steps), worst

    for epoch in published.EPOCHS:
        rows = []
        for n in lengths:
            parts = jax.jit(jax.vmap(lambda y, epoch=epoch: both(epoch, y)))(ys[:, :n])
            rows.append([np.asarray(part) for part in parts])
        errors, bounds, worst = (np.stack(column) for column in zip(*rows, strict=True))
        if (errors > bounds * (1 + 1e-9)).any():
            raise AssertionError(f"a bound of epoch {epoch} was violated")
        slope = np.polyfit(np.log(lengths[3:]), np.log(bounds[3:].mean(axis=1)), 1)[0]
        results[str(epoch)] = {
            "error": errors.tolist(),
            "bound": bounds.tolist(),
            "worst": worst.tolist(),
            "power of n": float(slope),
        }
        print(
            f"  epoch {epoch}, n=2000, 20 sequences: error {errors[-1].mean():.3g}, worst case"
            f" {worst[-1].mean():.3g}, bound {bounds[-1].mean():.3g}"
            f" ({np.mean(bounds[-1] / errors[-1]):.2f} times the error), bound ~ n^{slope:.3f}"
        )
    if figures is not None:
        _draw_growth(results, figures / "bound-growth")
    return results


def _style() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.dpi": 150,
            "svg.hashsalt": "retrodict",
        }
    )
    return plt


def _draw_growth(results: dict[str, Any], place: Path) -> None:
    plt = _style()
    lengths = results["lengths"]
    figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.5), sharex=True, layout="constrained")
    for axis, epoch in zip(axes, published.EPOCHS, strict=True):
        part = results[str(epoch)]
        for values, style, label in (
            (part["bound"], "k-", "bound (Wφ)"),
            (part["worst"], "k--", "worst Lipschitz functional"),
            (part["error"], "k:", "error of Σ x"),
        ):
            axis.loglog(lengths, np.mean(values, axis=1), style, label=label)
        band = np.array(part["error"])
        axis.fill_between(lengths, band.min(axis=1), band.max(axis=1), color="0.85", lw=0)
        axis.set_title(f"published fit, epoch {epoch}", fontsize=9)
        axis.set_xlabel("length n of the series")
    axes[0].set_ylabel("additive error")
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, place)


def _draw_steps(per_step: Any, distances: Any, title: str, place: Path) -> None:
    plt = _style()
    figure, axis = plt.subplots(figsize=(7.2, 2.2), layout="constrained")
    axis.fill_between(np.arange(len(per_step)), per_step, color="0.8", lw=0, label="the bound's")
    axis.plot(distances, "k-", lw=0.8, label="distance of the marginals")
    axis.set_xlabel("time")
    axis.set_ylabel("contribution")
    axis.set_title(title, fontsize=9)
    axis.legend(frameon=False, fontsize=8)
    axis.margins(x=0)
    _save(figure, place)


def _save(figure: Any, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".png", ".svg"):
        figure.savefig(
            place.with_suffix(suffix), metadata={"Date": None} if suffix == ".svg" else {}
        )
        print(f"  wrote {place.with_suffix(suffix)}")


def count_model(weight: float) -> rd.StateSpaceModel:
    """Return Poisson counts whose log rate is an autoregression around 1/2 with noise 0.3."""
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(1), 0.3 / np.sqrt(1 - weight**2) * jnp.eye(1)),
        rd.LinearGaussianKernel(weight * jnp.eye(1), jnp.zeros(1), 0.3 * jnp.eye(1)),
        rd.DistributionKernel(
            lambda x: dist.Poisson(jnp.exp(x + 0.5)), curvature=lambda y: jnp.zeros((1, 1))
        ),
    )


class CountAndGauge:
    """Kernel of a count of rate e^x and a direct observation of x with unit noise."""

    def __init__(self, x: jax.Array):
        self.count, self.gauge = dist.Poisson(jnp.exp(x[0])), dist.Normal(x[0], 1.0)

    @property
    def mean(self) -> jax.Array:
        return jnp.stack([self.count.mean, self.gauge.mean])

    @property
    def variance(self) -> jax.Array:
        return jnp.stack([self.count.variance, self.gauge.variance])

    def log_prob(self, y: jax.Array) -> jax.Array:
        return jnp.stack([self.count.log_prob(y[0]), self.gauge.log_prob(y[1])])

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        keys = jax.random.split(key)
        count = self.count.sample(keys[0], sample_shape).astype(float)
        return jnp.stack([count, self.gauge.sample(keys[1], sample_shape)], axis=-1)


GAUGED = rd.StateSpaceModel(
    rd.Gaussian(jnp.zeros(1), 0.3 / np.sqrt(1 - 0.9**2) * jnp.eye(1)),
    rd.LinearGaussianKernel(0.9 * jnp.eye(1), jnp.zeros(1), 0.3 * jnp.eye(1)),
    rd.DistributionKernel(CountAndGauge, curvature=lambda y: jnp.ones((1, 1))),
)
"""Counts with a gauge, which gives the emission a curvature of at least one."""

VOLATILITY = rd.StateSpaceModel(
    rd.Gaussian(jnp.zeros(1), jnp.eye(1)),
    rd.LinearGaussianKernel(0.97 * jnp.eye(1), jnp.zeros(1), 0.2 * jnp.eye(1)),
    rd.DistributionKernel(
        lambda x: dist.Normal(0.0, 0.6 * jnp.exp(0.5 * x)), curvature=lambda y: jnp.zeros((1, 1))
    ),
)
"""Stochastic volatility: −log g = x/2 + y² e^{-x} / 0.72 + constant, which is convex in x."""


def fitted(model: rd.StateSpaceModel, seed: int) -> Callable[[Any], Any]:
    """Train a gated family on series of the model with the defaults; return its chains."""
    ys = simulate(model, seed, 1024, 64)[1]
    family = rd.GatedFamily(jax.random.key(seed), 1, ys.shape[-1])
    key = jax.random.key(seed + 1)
    return rd.fit(key, family, model, ys, num_steps=3000, progress=False).family.infer


def graded(
    name: str,
    model: rd.StateSpaceModel,
    smoother: Callable[[Any], Any],
    grid: rd.Grid,
    n: int,
    figures: Path | None,
) -> dict[str, Any]:
    """Compute every bound that applies to a smoother, on five new series of n rows."""
    results: dict[str, Any] = {"n": n, "series": []}
    for seed in range(5):
        _, ys = model.simulate(jax.random.key(900 + seed), n)
        chain, key = smoother(ys), jax.random.key(seed)
        posterior = rd.grid_smoother(model, ys, grid)
        weights, _ = grid_bounds.marginals_on(grid, chain)
        cumulated = jnp.cumsum(weights - posterior.weights, axis=1)
        distances = grid.spacing[0] * jnp.sum(jnp.abs(cumulated), axis=1)
        bound = rd.error_bound(
            model, chain, ys, rd.bounds.AnyLipschitz(), reference=posterior, key=key
        )
        signed = rd.error_bound(model, chain, ys, rd.StateSum(), reference=posterior)
        above = rd.StateFunctional(lambda x, data: 1.0 * (x[0] > 0.5), oscillation=1.0)
        share = rd.error_bound(model, chain, ys, above, reference=posterior)
        alone = rd.error_bound(model, chain, ys, rd.bounds.AnyLipschitz(), key=key)
        checked = rd.check_posterior(key, model, chain, ys)
        row = {
            "worst case": float(jnp.sum(distances)),
            "error of the sum": float(signed.value),
            "error of the time above 1/2": float(share.value),
            **{method: float(value) for method, value in bound.considered.items()},
            "without a grid": {"method": alone.method, "rigorous": alone.rigorous},
            "k hat": float(checked.k_hat),
            "gap": float(checked.gap),
            "messages": list(checked.messages),
        }
        row["without a grid"]["value"] = float(alone.value)
        results["series"].append(row)
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(f"  {name}, n={n}, series {seed}: {rounded}", flush=True)
        for method in ("wasserstein_phi", "elbo_gap", "score"):
            if method in row and row[method] < row["worst case"] * (1 - 1e-6):
                raise AssertionError(f"{method} was violated")
        if seed == 0 and figures is not None:
            title = f"{name}: what each time contributes to the bound"
            _draw_steps(bound.per_step, distances, title, figures / f"bound-steps-{name}")
    return results


def models(figures: Path | None) -> dict[str, Any]:
    """Compare trained gated families on nonlinear models with a grid."""
    wide = rd.Grid([-6.0], [6.0], 600)
    cases: dict[str, tuple[Any, Callable[[], Callable], rd.Grid, int]] = {
        "nonlinear": (NONLINEAR, lambda: trained("gated")[0].family.infer, GRID, 500),
        "counts-0.7": (count_model(0.7), lambda: fitted(count_model(0.7), 3), wide, 200),
        "counts-0.9": (count_model(0.9), lambda: fitted(count_model(0.9), 3), wide, 200),
        "gauged": (GAUGED, lambda: fitted(GAUGED, 4), wide, 200),
        "gauged-linearised": (GAUGED, _linearised, wide, 200),
        "volatility": (VOLATILITY, lambda: fitted(VOLATILITY, 5), rd.Grid([-8.0], [8.0], 600), 200),
    }
    results = {}
    for name, (model, smoother, grid, n) in cases.items():
        folder = figures if name in ("nonlinear", "volatility") else None
        results[name] = graded(name, model, smoother(), grid, n, folder)
    return results


def _linearised() -> Callable[[Any], Any]:
    return lambda ys: rd.extended_smoother(GAUGED, ys).chain


def long() -> dict[str, Any]:
    """Time one call after the first, and print the effect of the window."""
    theta = rd.unwrap(LINEAR)
    ys = published.linear_sequences(1)[1][0]
    chain = rd.kalman_smoother(rd.unwrap(published.linear_lambda(60)), ys).chain
    results = {}
    for name, key in (("closed forms", None), ("with the score bound", jax.random.key(0))):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            bound = rd.error_bound(theta, chain, ys, rd.bounds.AnyLipschitz(), key=key)
            jax.block_until_ready(bound.value)
            times.append(time.perf_counter() - began)
        results[name] = {"first_s": times[0], "s": min(times[1:])}
        print(f"  n=2000, d=1, {name}: {min(times[1:]):.2f} s (first call {times[0]:.1f} s)")
    model = build(*random_model(jax.random.key(1), 3))
    _, ys = model.simulate(jax.random.key(2), 500)
    exact = rd.kalman_smoother(model, ys).chain
    chain = shaken_chain(jax.random.key(3), 0.05, exact)
    for window in (1, 4, 16, 64, 500):
        bound = rd.error_bound(
            model, chain, ys, rd.bounds.AnyLipschitz(), window=window, method="wasserstein_phi"
        )
        results[f"window {window}"] = float(bound.value)
        print(f"  n=500, d=3, window {window}: {float(bound.value):.6g}")
    return results


PARTS: dict[str, Callable[[Path | None], dict[str, Any]]] = {
    "gaussian": lambda figures: gaussian(),
    "paper": paper,
    "models": models,
    "long": lambda figures: long(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts error bounds to the test.")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--out", type=Path, default=RESULTS, help="a JSON file, added to")
    parser.add_argument("--figures", type=Path, help="a folder to draw pictures in")
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.parts or PARTS:
        print(f"== {name}", flush=True)
        results[name] = PARTS[name](arguments.figures)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
