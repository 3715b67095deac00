"""Train, measure, time and correct families whose kernels are not linear Gaussian.

    python benchmarks/beyond.py headline speed two_sided picture guided k_hat high

Parts can be split: `--seeds` for the starts of `headline`, `--problems` for the models of
`two_sided` and `high`. Trained families are stored in the folder and not trained again. Each part
writes its figures there, one JSON file per run; `--collect` joins them into one.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from accuracy import FAMILIES as LINEAR_FAMILIES
from accuracy import NONLINEAR, exact_by_grid, network_model, particle_evidence, simulate, spread

jax.config.update("jax_enable_x64", True)

FAMILIES: dict[str, Callable[..., Any]] = {
    "conjugate": LINEAR_FAMILIES["conjugate"],
    "gated": LINEAR_FAMILIES["gated"],
    "recurrent": LINEAR_FAMILIES["recurrent"],
    "nonlinear": partial(rd.NonlinearFamily, num_components=1),
    "nonlinear2": partial(rd.NonlinearFamily, num_components=2, width=16),
    "mixture": rd.MixtureFamily,
}
STEPS = {"nonlinear": 20_000, "nonlinear2": 6_000, "mixture": 4_000}
"""Steps of `fit` on section 5.2's model."""
SHARES = rd.BackwardSampling(64, noise="stratified", by_component=True)
"""The paths with which a new series is smoothed."""


def trained(
    name: str, model: rd.StateSpaceModel, seed: int, num_steps: int, folder: Path, label: str
) -> tuple[Any, float]:
    """Fit a family to 2048 series of 64 rows, or load it; return it and the seconds of training."""
    place = folder / f"{label}-{name}-{seed}-{num_steps}"
    note = place.with_name(place.name + ".seconds")
    if place.exists() and note.exists():
        return rd.load(place), float(note.read_text())
    ys = simulate(model, 0, 2048, 64)[1]
    family = FAMILIES[name](jax.random.key(seed), model.state_dim, ys.shape[-1])
    began = time.perf_counter()
    result = rd.fit(
        jax.random.key(1000 + seed), family, model, ys, num_steps=num_steps, progress=False
    )
    seconds = time.perf_counter() - began
    folder.mkdir(parents=True, exist_ok=True)
    rd.save(place, result.family)
    note.write_text(str(seconds))
    return result.family, seconds


def graded(
    model: rd.StateSpaceModel, family: Any, ys: jax.Array, oracles: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Compute gap, additive error and marginal error of each series."""
    keys = jax.random.split(jax.random.key(7), ys.shape[0])
    many = rd.BackwardSampling(1024, noise="stratified", by_component=True)

    @eqx.filter_jit
    def one(family: Any, y: jax.Array, key: jax.Array) -> Any:
        chain = family.infer(y, mask=True)
        paths = rd.BackwardSampling(1000)
        bound = rd.elbo(model, chain, y, estimator=paths, key=key, mask=True)
        if isinstance(chain, rd.LinearGaussianChain):
            means = (chain.marginals().mean,) * 2
        else:
            means = tuple(
                rd.marginals(chain, estimator=estimator, key=key).mean
                for estimator in (many, SHARES)
            )
        return bound, *means

    results = [one(family, y, key) for y, key in zip(ys, keys, strict=True)]
    bounds, means, quick = (np.stack([np.asarray(f[i]) for f in results]) for i in range(3))
    errors, quick_errors = means[..., 0] - oracles["mean"], quick[..., 0] - oracles["mean"]
    return {
        "gap_nats_a_step": (oracles["evidence"] - bounds) / ys.shape[1],
        "additive_error": np.abs(errors.sum(axis=1)),
        "bias_of_the_sum": errors.sum(axis=1),
        "of_it_the_middle_fifth": np.where(_middle_fifth(oracles["mean"]), errors, 0).sum(axis=1),
        "marginal_mse": (errors**2).mean(axis=1),
        "additive_error_of_64_paths": np.abs(quick_errors.sum(axis=1)),
        "marginal_mse_of_64_paths": (quick_errors**2).mean(axis=1),
    }


def _middle_fifth(means: np.ndarray) -> np.ndarray:
    """Return the rows whose exact mean is in the middle fifth, where two modes are possible."""
    low, high = np.quantile(means, [0.4, 0.6])
    return (means >= low) & (means <= high)


def by_particles(
    model: rd.StateSpaceModel, ys: jax.Array, oracles: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the errors of bootstrap FFBSi with 1,000 particles and paths, for each series."""
    run = jax.jit(lambda key, y: rd.ffbsi(key, model, y, 1000, mask=True).mean[:, 0])
    keys = jax.random.split(jax.random.key(7), ys.shape[0])
    means = np.stack([np.asarray(run(key, y)) for key, y in zip(keys, ys, strict=True)])
    errors = means - oracles["mean"]
    return {
        "additive_error": np.abs(errors.sum(axis=1)),
        "marginal_mse": (errors**2).mean(axis=1),
    }


def quickest(call: Callable[[], Any], repeats: int = 15) -> float:
    """Return the smallest wall-clock time of a compiled call, in seconds."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return min(times)


def chosen(arguments: Any, problems: Any) -> list[str]:
    """Return the requested problems of a part, or all of them."""
    return [name for name in problems if name in (arguments.problems or problems)]


def line(name: str, figures: dict[str, Any]) -> None:
    """Print one line of figures, each mean with its standard error."""
    parts = [
        f"{key.replace('_', ' ')} {value[0]:.3g} ± {value[1]:.1g}"
        if isinstance(value, (tuple, list))
        else f"{key.replace('_', ' ')} {value:.3g}"
        for key, value in figures.items()
    ]
    print(f"  {name}: " + ", ".join(parts), flush=True)


def headline(arguments: Any) -> dict[str, Any]:
    """Measure section 5.2 on 64 new series of 500 rows (seed 999), on a grid of 1100 points."""
    ys = simulate(NONLINEAR, 999, 64, 500)[1]
    oracles = exact_by_grid(ys)
    particles = by_particles(NONLINEAR, ys, oracles)
    figures: dict[str, Any] = {"FFBSi": {k: spread(v) for k, v in particles.items()}}
    line("FFBSi, 1000 particles and paths", figures["FFBSi"])
    for name in arguments.families or STEPS:
        for seed in arguments.seeds:
            family, seconds = trained(
                name, NONLINEAR, seed, STEPS[name], arguments.folder, "section-5.2"
            )
            scores = graded(NONLINEAR, family, ys, oracles)
            one: dict[str, Any] = {key: spread(value) for key, value in scores.items()}
            for key in ("additive_error", "marginal_mse"):
                for paths in ("", "_of_64_paths"):
                    one[f"{key}{paths}_less_FFBSi's"] = spread(scores[key + paths] - particles[key])
            one["seconds"] = seconds
            figures[f"{name}, seed {seed}"] = one
            line(f"{name}, seed {seed}", one)
    return figures


def speed(arguments: Any) -> dict[str, Any]:
    """Time a new series by 64 paths and by FFBSi in turn, for section 5.2 and more states."""
    figures: dict[str, Any] = {}
    for problem in chosen(arguments, ["section-5.2", *HIGH]):
        if problem in HIGH:
            make, _, num_steps = HIGH[problem]
            model, num_times = make(), 64
            names, steps = list(FAMILIES), dict.fromkeys(FAMILIES, num_steps)
            run = particle_means(model)
        else:
            model, num_times, names, steps = NONLINEAR, 500, list(STEPS), STEPS
            run = jax.jit(lambda key, y: rd.ffbsi(key, NONLINEAR, y, 1000, mask=True).mean)
        given = (jax.random.key(0), simulate(model, 999, 1, num_times)[1][0])
        for name in arguments.families or names:
            family, _ = trained(name, model, 0, steps[name], arguments.folder, problem)
            smooth = jax.jit(lambda key, y, family=family: smoothed_means(family, key, y))
            rounds = [
                (
                    quickest(partial(smooth, *given), 10),
                    quickest(partial(run, *given), 3),
                )
                for _ in range(3)
            ]
            ours, theirs = (min(times) for times in zip(*rounds, strict=True))
            timing = {"seconds": ours, "FFBSi_seconds": theirs, "ratio": theirs / ours}
            figures[f"{problem}, {name}"] = timing
            line(f"{problem}, {name}", timing)
    return figures


def smoothed_means(family: Any, key: Any, y: jax.Array) -> jax.Array:
    """Return means in closed form if the chain has them, otherwise over 64 paths."""
    chain = family.infer(y, mask=True)
    if isinstance(chain, rd.LinearGaussianChain):
        return chain.marginals().mean
    return rd.marginals(chain, estimator=SHARES, key=key).mean


def particle_means(model: rd.StateSpaceModel) -> Callable[..., Any]:
    """Return means of FFBSi with 20,000 particles and 1,000 paths by Metropolis moves."""
    return jax.jit(
        lambda key, y: (
            rd.ffbsi(
                key, model, y, 20_000, 1000, backward=rd.particles.MCMCBackward(5), mask=True
            ).mean
        )
    )


def turning(
    emission: Callable[[Any], Any], dim: int, move: float, noise: float
) -> rd.StateSpaceModel:
    """Return a symmetric autoregression of one or two states with an even observation map."""
    angle = 0.3 if dim == 2 else 0.0
    turn = jnp.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])[:dim, :dim]
    spread_of_states = move / np.sqrt(1 - 0.95**2)
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(dim), spread_of_states * jnp.eye(dim)),
        rd.LinearGaussianKernel(0.95 * turn, jnp.zeros(dim), move * jnp.eye(dim)),
        rd.NonlinearGaussianKernel(emission, rd.Diagonal(noise * jnp.ones(1))),
    )


TWO_SIDED = {
    "square": (turning(lambda x: x**2, 1, 0.2, 0.1), 100, 3.5, 400),
    "cosine": (turning(lambda x: jnp.cos(jnp.tanh(2.0 * x)), 1, 0.2, 0.05), 100, 3.5, 400),
    "square, d=2": (turning(lambda x: x[:1] ** 2, 2, 0.3, 0.4), 30, 4.5, 120),
}
"""Models whose whole path can flip its sign: rows of a series, reach and points of the grid."""


def energy_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Compute 2 E|X − Y| − E|X − X'| − E|Y − Y'| of two sets of paths."""

    def mean_distance(p: np.ndarray, q: np.ndarray) -> float:
        p, q = p.reshape(len(p), -1), q.reshape(len(q), -1)
        squares = (p**2).sum(1)[:, None] + (q**2).sum(1)[None] - 2 * p @ q.T
        return float(np.sqrt(np.maximum(squares, 0.0)).mean())

    return 2 * mean_distance(a, b) - mean_distance(a, a) - mean_distance(b, b)


def two_sided(arguments: Any) -> dict[str, Any]:
    """Measure posteriors with two modes on 20 series: mass of one sign, and whole paths."""
    figures: dict[str, Any] = {}
    for problem in chosen(arguments, TWO_SIDED):
        model, n, reach, num_points = TWO_SIDED[problem]
        d = model.state_dim
        ys = simulate(model, 999, 20, n)[1]
        grid = rd.Grid(-reach * jnp.ones(d), reach * jnp.ones(d), num_points)
        exact = [rd.grid_smoother(model, y, grid) for y in ys]
        evidence = np.array([float(posterior.log_evidence) for posterior in exact])
        keys = jax.random.split(jax.random.key(3), 20)
        paths = [np.asarray(e.sample(key, 1000)) for e, key in zip(exact, keys, strict=True)]
        sides = np.stack(
            [np.ravel(e.expectation(lambda x: (x[0] > 0).astype(x.dtype))) for e in exact]
        )
        run = jax.jit(lambda key, y, model=model: rd.ffbsi(key, model, y, 1000, mask=True).samples)
        samples = [np.asarray(run(key, y)) for key, y in zip(keys, ys, strict=True)]
        floor = np.array([energy_distance(a, b) for a, b in zip(samples, paths, strict=True)])
        figures[problem] = {"FFBSi": _sides(samples, sides) | {"energy_distance": spread(floor)}}
        line(f"{problem}, FFBSi", figures[problem]["FFBSi"])
        for name in arguments.families or ("gated", "recurrent", "nonlinear", "mixture"):
            family, seconds = trained(name, model, 0, 4000, arguments.folder, problem)

            @eqx.filter_jit
            def one(family: Any, key: Any, y: Any, model: Any = model) -> Any:
                chain, estimator = family.infer(y, mask=True), rd.BackwardSampling(1000)
                bound = rd.elbo(model, chain, y, estimator=estimator, key=key, mask=True)
                return chain.sample(key, 1000), bound

            results = [one(family, key, y) for key, y in zip(keys, ys, strict=True)]
            samples = [np.asarray(f[0]) for f in results]
            gaps = (evidence - np.array([float(f[1]) for f in results])) / n
            far = np.array([energy_distance(a, b) for a, b in zip(samples, paths, strict=True)])
            figures[problem][name] = _sides(samples, sides) | {
                "gap_nats_a_step": spread(gaps),
                "energy_distance": spread(far),
                "energy_distance_over_FFBSi's": float(far.mean() / floor.mean()),
                "seconds": seconds,
            }
            line(f"{problem}, {name}", figures[problem][name])
    return figures


def picture(arguments: Any) -> dict[str, Any]:
    """Draw one series of each model with two modes: exact marginals, and forty paths each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for problem in chosen(arguments, TWO_SIDED):
        model, n, reach, num_points = TWO_SIDED[problem]
        d = model.state_dim
        y = simulate(model, 999, 1, n)[1][0]
        grid = rd.Grid(-reach * jnp.ones(d), reach * jnp.ones(d), num_points)
        exact = rd.grid_smoother(model, y, grid)
        key = jax.random.key(0)
        panels = {"FFBSi, 1,000 particles": rd.ffbsi(key, model, y, 1000, 40).samples}
        for name in ("gated", "nonlinear", "mixture"):
            family, _ = trained(name, model, 0, 4000, arguments.folder, problem)
            panels[f"{name} family"] = family.infer(y).sample(key, 40)
        figure, axes = plt.subplots(4, 1, figsize=(8, 9), sharex=True, sharey=True, dpi=110)
        edges = (-0.5, n - 0.5, -reach, reach)
        # The law of the first coordinate, which is the one that is seen.
        weights = np.asarray(exact.weights).reshape(n, num_points, -1).sum(axis=2)
        shades = np.sqrt(weights / weights.max(axis=1, keepdims=True)).T
        for axis, (name, paths) in zip(axes, panels.items(), strict=True):
            axis.imshow(shades, origin="lower", aspect="auto", extent=edges, cmap="Greys", vmax=1.5)
            axis.plot(np.asarray(paths)[..., 0].T, color="#c44e52", linewidth=0.6, alpha=0.5)
            axis.set_title(name, loc="left", fontsize=10)
            axis.set_ylabel("state" if d == 1 else "first coordinate")
            axis.set_ylim(-0.7 * reach, 0.7 * reach)
        axes[-1].set_xlabel("time (grey: the exact marginals, by a grid)")
        figure.tight_layout()
        figure.savefig(arguments.figures / PICTURES[problem])
        plt.close(figure)
    return {}


PICTURES = {
    "square": "two-sided.png",
    "cosine": "two-sided-cosine.png",
    "square, d=2": "two-sided-plane.png",
}


def _sides(samples: list[np.ndarray], exact: np.ndarray) -> dict[str, float]:
    """Return the error of P(x > 0) against the grid for the worst series, in two ways."""
    shares = np.stack([(paths[..., 0] > 0).mean(axis=0) for paths in samples])
    off = np.abs(shares - exact)
    return {
        "mass_off_mean_over_times_worst_series": float(off.mean(axis=1).max()),
        "mass_off_worst_time_and_series": float(off.max()),
    }


def chaotic(dim: int) -> rd.StateSpaceModel:
    """Return the chaotic recurrent network of Campbell et al. (2021), with Student-t noise."""
    import numpyro.distributions as dist

    weight = jax.random.normal(jax.random.key(11), (dim, dim)) / np.sqrt(dim)

    def move(x: jax.Array) -> jax.Array:
        return x + 0.04 * (-x + 2.5 * jnp.matmul(weight, jnp.tanh(x), precision="highest"))

    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(dim), 0.1 * jnp.eye(dim)),
        rd.NonlinearGaussianKernel(move, rd.Diagonal(0.1 * jnp.ones(dim))),
        rd.DistributionKernel(lambda x: dist.StudentT(2.0, x, 0.1)),
    )


HIGH: dict[str, tuple[Callable[[], rd.StateSpaceModel], int, int]] = {
    "network, d=5": (lambda: network_model(5), 20_000, 1500),
    "network, d=10": (lambda: network_model(10), 100_000, 1500),
    "chaotic, d=5": (lambda: chaotic(5), 100_000, 1500),
}
"""Models with more states: particles of the reference filter, and steps of `fit`."""


def high(arguments: Any) -> dict[str, Any]:
    """Measure more states on 16 new series of 64 rows, against a bootstrap filter and FFBSi."""
    figures: dict[str, Any] = {}
    for problem in chosen(arguments, HIGH):
        make, num_particles, num_steps = HIGH[problem]
        model = make()
        xs, ys = simulate(model, 999, 16, 64)
        evidence, error = particle_evidence(model, ys, num_particles, 5)
        keys = jax.random.split(jax.random.key(3), ys.shape[0])
        run = particle_means(model)
        reference = np.stack([np.asarray(run(key, y)) for key, y in zip(keys, ys, strict=True)])

        def rmse(means: np.ndarray, xs: Any = xs) -> tuple[float, float]:
            return spread(np.sqrt(((means - np.asarray(xs)) ** 2).mean(axis=(1, 2))))

        figures[problem] = {
            "particles": {
                "evidence_nats_a_step": (
                    float(evidence.mean()) / 64,
                    float(np.sqrt((error**2).mean())) / 64,
                ),
                "rmse_to_states": rmse(reference),
            }
        }
        line(f"{problem}, particles", figures[problem]["particles"])
        gaps: dict[str, np.ndarray] = {}
        for name in arguments.families or FAMILIES:
            family, seconds = trained(name, model, 0, num_steps, arguments.folder, problem)

            @eqx.filter_jit
            def one(family: Any, key: Any, y: Any, model: Any = model) -> Any:
                chain = family.infer(y, mask=True)
                estimator = rd.BackwardSampling(1000)
                return rd.elbo(model, chain, y, estimator=estimator, key=key, mask=True)

            smooth = eqx.filter_jit(smoothed_means)
            pairs = list(zip(keys, ys, strict=True))
            bounds = np.array([float(one(family, key, y)) for key, y in pairs])
            gaps[name] = (evidence - bounds) / 64
            means = np.stack([np.asarray(smooth(family, key, y)) for key, y in pairs])
            figures[problem][name] = {
                "gap_nats_a_step": spread(gaps[name]),
                "rmse_to_states": rmse(means),
                "rmse_to_FFBSi": float(np.sqrt(((means - reference) ** 2).mean())),
                "seconds": seconds,
            }
            if name not in ("conjugate", "recurrent") and "recurrent" in gaps:
                figures[problem][name]["gap_less_recurrent's"] = spread(
                    gaps[name] - gaps["recurrent"]
                )
            line(f"{problem}, {name}", figures[problem][name])
    return figures


def guided(arguments: Any) -> dict[str, Any]:
    """Compare guided particles with bootstrap FFBSi on 16 series of section 5.2."""
    ys = simulate(NONLINEAR, 999, 16, 500)[1]
    oracles = exact_by_grid(ys)
    keys = jax.random.split(jax.random.key(7), ys.shape[0])
    figures: dict[str, Any] = {}

    def measured(name: str, run: Callable[..., Any]) -> None:
        results = [run(key, y) for key, y in zip(keys, ys, strict=True)]
        means = np.stack([np.asarray(f[0]) for f in results])
        off = np.array([float(f[1]) for f in results]) - oracles["mean"].sum(axis=1)
        z = off / np.array([float(f[2]) for f in results])
        figures[name] = {
            "seconds": quickest(lambda: run(keys[0], ys[0]), 5),
            "marginal_mse": spread(((means - oracles["mean"]) ** 2).mean(axis=1)),
            "additive_error": spread(np.abs(off)),
            "z_of_the_sum": (float(z.mean()), float(z.std(ddof=1))),
            "evidence_error": spread([float(f[3]) for f in results] - oracles["evidence"]),
        }
        line(name, figures[name])

    def read(posterior: Any) -> tuple[Any, ...]:
        total, error = posterior.expectation(rd.StateSum())
        return posterior.mean[:, 0], total[0], error[0], posterior.log_evidence

    for sampler, counts in (
        (rd.particles.ExactBackward(), (1000,)),
        (rd.particles.MCMCBackward(), (1000, 4000)),
    ):
        for count in counts:
            measured(
                f"bootstrap, {type(sampler).__name__}, {count}",
                jax.jit(
                    lambda key, y, sampler=sampler, count=count: read(
                        rd.ffbsi(key, NONLINEAR, y, count, backward=sampler, mask=True)
                    )
                ),
            )
    families: dict[str, Any] = {
        name: trained(name, NONLINEAR, 0, STEPS[name], arguments.folder, "section-5.2")[0]
        for name in ("nonlinear", "mixture")
    }
    # Hardly trained: it knows the prior chain and little of the data.
    families["recurrent, 30 steps"] = trained(
        "recurrent", NONLINEAR, 0, 30, arguments.folder, "hardly"
    )[0]
    # The stationary law of the states, somewhat widened: what covers them whatever is seen.
    states = simulate(NONLINEAR, 997, 256, 500)[0][:, 250:, 0]
    wide = rd.Gaussian(jnp.mean(states)[None], 1.2 * jnp.std(states)[None, None])
    for name, family in families.items():
        for share, counts in ((0.0, (1000, 4000)), (0.1, (1000, 4000)), (0.3, (1000, 4000, 16000))):
            if share > 0.2 and name != "recurrent, 30 steps":
                continue
            for count in counts:

                @jax.jit
                def run(
                    key: Any, y: Any, family: Any = family, share: float = share, count: int = count
                ) -> Any:
                    chain = family.infer(y, mask=True)
                    chain = rd.defensive_mixture(chain, wide, share) if share else chain
                    return read(rd.guided_smoother(key, NONLINEAR, chain, y, count, mask=True))

                measured(f"guided by {name}, covered {share}, {count}", run)
    return figures


def spoiled(family: Any, key: Any, amount: float) -> Any:
    """Add noise to the weights of a family, in units of the spread of each array."""
    arrays, rest = eqx.partition(family, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        leaf + amount * jnp.std(leaf) * jax.random.normal(k, leaf.shape)
        for leaf, k in zip(leaves, keys, strict=True)
    ]
    return eqx.combine(jax.tree.unflatten(structure, noisy), rest)


def k_hat(arguments: Any) -> dict[str, Any]:
    """Print the Pareto shapes of ten trained families, with and without noise on weights."""
    ys = simulate(NONLINEAR, 998, 10, 100)[1]
    figures: dict[str, Any] = {"trained": {}, "spoiled": {}}
    for index in range(10):
        name, seed = ("nonlinear", "mixture")[index % 2], index // 2
        family, _ = trained(name, NONLINEAR, seed, STEPS[name], arguments.folder, "section-5.2")
        for kind, chosen in (
            ("trained", family),
            ("spoiled", spoiled(family, jax.random.key(index), 0.2)),
        ):
            posterior = rd.importance_smoother(
                jax.random.key(index), NONLINEAR, chosen.infer(ys[index]), ys[index], 1000
            )
            figures[kind][f"{name}, seed {seed}"] = float(posterior.k_hat)
    for kind, k_hats in figures.items():
        print(f"  {kind}: " + ", ".join(f"{value:.2f}" for value in k_hats.values()), flush=True)
    return figures


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "headline": headline,
    "speed": speed,
    "two_sided": two_sided,
    "picture": picture,
    "guided": guided,
    "k_hat": k_hat,
    "high": high,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--folder", type=Path, default=Path("beyond"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES])
    parser.add_argument("--problems", nargs="+", choices=["section-5.2", *TWO_SIDED, *HIGH])
    parser.add_argument("--figures", type=Path, default=Path("docs/images"))
    parser.add_argument("--collect", type=Path, help="a JSON file that joins all runs")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.collect else arguments.parts or PARTS:
        print(f"== {name}: {PARTS[name].__doc__}", flush=True)
        record = {
            "part": name,
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "figures": PARTS[name](arguments),
        }
        place = arguments.folder / f"{name}-{os.getpid()}.json"
        place.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.collect:
        records = [json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*.json"))]
        arguments.collect.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
