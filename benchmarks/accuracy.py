"""Fit the families to the paper's models and to larger ones, and measure their accuracy.

    python benchmarks/accuracy.py linear nonlinear seeds five ten emissions --out results.json

Every part prints the model, lengths, seeds, and standard errors over series. The evidence is exact
for the linear model, computed on a grid for one state dimension, and estimated by a bootstrap
particle filter with its standard error for more.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from retrodict.experiments import published

jax.config.update("jax_enable_x64", True)

LENGTH = 64
NUM_SERIES = 2048
GRID = rd.Grid(jnp.array([-2.5]), jnp.array([2.5]), 1100)


LINEAR = published.linear_theta()
"""The model of the paper's section 5.1."""
NONLINEAR = published.nonlinear_theta()
"""The model of the paper's section 5.2."""

FAMILIES: dict[str, Callable[..., Any]] = {
    "conjugate": rd.ConjugateFamily,
    "gated": rd.GatedFamily,
    "gated, scale": lambda *a, **k: rd.GatedFamily(*a, gate="scale", **k),
    "recurrent": rd.RecurrentFamily,
    "scan": rd.ScanFamily,
    "recurrent, tied": lambda *a, **k: rd.RecurrentFamily(*a, tied=True, **k),
}


CHOSEN = ["conjugate", "gated", "recurrent"]
"""The families that are graded by default; `--families` names others."""


def simulate(model: rd.StateSpaceModel, seed: int, num_series: int, num_times: int):
    """Simulate the states and observations of a batch."""
    keys = jax.random.split(jax.random.key(seed), num_series)
    return jax.jit(jax.vmap(lambda key: model.simulate(key, num_times)))(keys)


def spread(values: Any) -> tuple[float, float]:
    """Return the mean and its standard error."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size))


def linear() -> dict[str, Any]:
    """Measure section 5.1, where the family contains the posterior."""
    ys = simulate(LINEAR, 0, 4096, LENGTH)[1]
    theta = rd.unwrap(LINEAR)
    evidence = jax.jit(jax.vmap(lambda y: rd.kalman_smoother(theta, y, mask=True).log_evidence))(ys)
    bound = eqx.filter_jit(
        lambda family: jax.vmap(lambda y: rd.elbo(theta, family.infer(y, mask=True), y, mask=True))(
            ys
        )
    )
    _, long = published.linear_sequences()

    @eqx.filter_jit
    def sums(family: Any) -> jax.Array:
        return jax.vmap(lambda y: jnp.sum(family.infer(y, mask=True).marginals().mean))(long)

    exact = sums(rd.KalmanFamily(LINEAR))
    fits = []
    for seed in range(5):
        keys = jax.random.split(jax.random.key(100 + seed), 3)
        weight = jax.random.uniform(keys[0], minval=-1.0)
        bias, slope = jax.random.uniform(keys[1]), jax.random.uniform(keys[2])
        first = published.linear_model(
            0.5, 0.05, float(weight), float(bias), 0.05, float(slope), 0.02
        )
        began = time.perf_counter()
        result = rd.fit(
            jax.random.key(seed), rd.KalmanFamily(first), LINEAR, ys, num_steps=6400, progress=False
        )
        seconds = time.perf_counter() - began
        family = result.family
        errors = jnp.abs(sums(family) - exact)
        gap = float(jnp.mean(evidence - bound(family)))
        fits.append(
            {
                "seed": seed,
                "gap_nats_a_series": gap,
                "worst_additive_error": float(errors.max()),
                "kept_step": result.kept_step,
                "seconds": seconds,
            }
        )
        print(
            f"  fit {seed}: evidence - ELBO {gap:.1e} nats a series of {LENGTH}, worst additive"
            f" error {errors.max():.1e} at n=2000 on 20 sequences, {seconds:.0f} s"
        )
    return {"evidence_nats_a_series": float(jnp.mean(evidence)), "fits": fits}


def grade(
    family: rd.AbstractFamily, xs: jax.Array, ys: jax.Array, oracles: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Compute gap, additive error, marginal error and coverage against the exact posterior."""
    keys = jax.random.split(jax.random.key(7), ys.shape[0])

    @eqx.filter_jit
    def one(family: Any, y: jax.Array, key: jax.Array):
        chain = family.infer(y, mask=True)
        bound = rd.elbo(
            NONLINEAR, chain, y, estimator=rd.BackwardSampling(1000), key=key, mask=True
        )
        laws = chain.marginals()
        return bound, laws.mean[:, 0], laws.std[:, 0]

    results = [one(family, y, key) for y, key in zip(ys, keys, strict=True)]
    bounds, means, stds = (np.stack([np.asarray(f[i]) for f in results]) for i in range(3))
    n = ys.shape[1]
    covered = np.abs(np.asarray(xs)[..., 0] - means) < 1.6448536269514722 * stds
    figures = {
        "gap_nats_a_step": spread((oracles["evidence"] - bounds) / n),
        "additive_error": spread(np.abs((means - oracles["mean"]).sum(axis=1))),
        "marginal_mse": spread(((means - oracles["mean"]) ** 2).mean(axis=1)),
        "coverage_of_90": spread(covered.mean(axis=1)),
    }
    return figures


def exact_by_grid(ys: jax.Array) -> dict[str, np.ndarray]:
    """Return the evidence and the marginal means of each series."""
    answers = [rd.grid_smoother(NONLINEAR, y, GRID) for y in ys]
    return {
        "evidence": np.array([float(a.log_evidence) for a in answers]),
        "mean": np.stack([np.asarray(a.mean)[:, 0] for a in answers]),
    }


def show(name: str, figures: dict[str, Any]) -> None:
    """Print one line of figures, each with its standard error."""
    parts = [
        f"{key.replace('_', ' ')} {value[0]:.3g} ± {value[1]:.1g}"
        for key, value in figures.items()
        if isinstance(value, tuple)
    ]
    print(f"  {name}: " + ", ".join(parts), flush=True)


def trained(name: str, seed: int = 0) -> tuple[rd.FitResult, float]:
    """Fit a family to the model of section 5.2 with all defaults; return it and the seconds."""
    ys = simulate(NONLINEAR, 0, NUM_SERIES, LENGTH)[1]
    family = FAMILIES[name](jax.random.key(seed), 1, 1)
    began = time.perf_counter()
    result = rd.fit(jax.random.key(1000 + seed), family, NONLINEAR, ys, progress=False)
    return result, time.perf_counter() - began


def nonlinear() -> dict[str, Any]:
    """Measure section 5.2 against the grid, on 64 new series of 500 rows and on long ones."""
    xs, ys = simulate(NONLINEAR, 999, 64, 500)
    oracles = exact_by_grid(ys)
    long_xs, long_ys = simulate(NONLINEAR, 998, 4, 6400)
    long_oracles = exact_by_grid(long_ys)
    figures = {}
    for name in CHOSEN:
        result, seconds = trained(name)
        figures[name] = grade(result.family, xs, ys, oracles)
        figures[name]["seconds"], figures[name]["status"] = seconds, result.status
        show(f"{name} ({seconds:.0f} s)", figures[name])
        long = grade(result.family, long_xs, long_ys, long_oracles)
        figures[name]["at_6400"] = long
        show(f"{name}, at n=6400", long)
    return figures


def seeds() -> dict[str, Any]:
    """Train sixty starts per family side by side, and print the spread of their final ELBO."""
    ys = simulate(NONLINEAR, 0, NUM_SERIES, LENGTH)[1]
    figures = {}
    for name in ("conjugate", "gated", "gated, scale", "recurrent"):
        result = rd.fit(
            jax.random.key(5),
            FAMILIES[name](jax.random.key(11), 1, 1),
            NONLINEAR,
            ys,
            optimisation=rd.Optimisation(restarts=60, tournament=1.0),
            progress=False,
        )
        scores = np.sort(result.restart_scores)
        figures[name] = scores.tolist()
        close = int((scores > scores.max() - 0.01).sum())
        print(
            f"  {name}: ELBO {scores.min():.4f} to {scores.max():.4f} nats a step, {close} of"
            f" {scores.size} fits within 0.01 of the best",
            flush=True,
        )
    return figures


def particles() -> dict[str, Any]:
    """Compare FFBSi (1,000 particles and paths, 32 series of 500 rows) with the grid."""
    ys = simulate(NONLINEAR, 999, 32, 500)[1]
    oracles = exact_by_grid(ys)
    exact = np.asarray(oracles["mean"])
    samplers = {
        "exact": rd.particles.ExactBackward(),
        "rejection": rd.particles.RejectionBackward(),
        "Metropolis": rd.particles.MCMCBackward(),
        "genealogy": rd.particles.Genealogy(),
    }
    figures: dict[str, Any] = {}
    for name, sampler in samplers.items():

        @jax.jit
        def run(key: Any, y: Any, sampler: Any = sampler) -> Any:
            posterior = rd.ffbsi(key, NONLINEAR, y, 1000, backward=sampler, mask=True)
            total, error = posterior.expectation(rd.StateSum())
            evidence_error = posterior.filtered.log_evidence_standard_error()
            return posterior.mean[:, 0], total[0], error[0], posterior.log_evidence, evidence_error

        # The same keys, and so the same filters, for all samplers.
        keys = jax.random.split(jax.random.key(7), ys.shape[0])
        results = [run(key, y) for key, y in zip(keys, ys, strict=True)]
        means, totals, errors, evidence, evidence_errors = (
            np.stack([np.asarray(f[i]) for f in results]) for i in range(5)
        )
        off = totals - exact.sum(axis=1)
        figures[name] = {
            "additive_error": spread(np.abs(off)),
            "marginal_mse": spread(((means - exact) ** 2).mean(axis=1)),
            "z_of_the_functional": [float((off / errors).mean()), float((off / errors).std())],
            "evidence_error": spread(evidence - oracles["evidence"]),
            "its_standard_error_from_one_run": spread(evidence_errors),
        }
        show(name, figures[name])
        z = figures[name]["z_of_the_functional"]
        print(f"    z of the functional by its own standard error: mean {z[0]:.2f}, sd {z[1]:.2f}")
    for name in ("rejection", "Metropolis"):
        for what in ("additive_error", "marginal_mse"):
            ratio = figures[name][what][0] / figures["exact"][what][0]
            figures[name][f"{what}_over_exact"] = ratio
            print(f"  {name}: {what.replace('_', ' ')} {ratio:.2f} times that of exact draws")
    return figures


def windows() -> dict[str, Any]:
    """Compare the gradient over windows with that over whole series of 256 rows."""
    from retrodict._learning.dataset import Minibatch
    from retrodict._learning.elbo_loss import ElboLoss
    from retrodict._model import prepare_batch

    n, short = 256, simulate(NONLINEAR, 0, NUM_SERIES, LENGTH)[1]
    ys = simulate(NONLINEAR, 5, 64, n)[1]
    series = prepare_batch(ys, mask=True, inputs=None, length=None, takes_input=False)
    batch = Minibatch.on_devices(series)
    figures: dict[str, Any] = {}
    key = jax.random.key(0)
    for num_steps in (200, 1000):
        family = rd.GatedFamily(jax.random.key(0), 1, 1)
        family = rd.fit(
            jax.random.key(1), family, NONLINEAR, short, num_steps=num_steps, progress=False
        ).family
        moving, fixed = eqx.partition(family, eqx.is_inexact_array)
        objective = ElboLoss((fixed, NONLINEAR), rd.Quadrature(20), None, 0.0)

        @jax.jit
        def whole(moving: Any, objective: Any = objective) -> Any:
            return jax.grad(lambda p: objective((p, None), batch, key))(moving)

        full = flat(whole(moving))
        for count in (16, 64, 128):

            @jax.jit
            def over(
                moving: Any, begin: Any, objective: Any = objective, count: int = count
            ) -> Any:
                return jax.grad(
                    lambda p: objective.over_window((p, None), batch, key, begin, count)
                )(moving)

            parts = [flat(over(moving, jnp.asarray(b))) for b in range(0, n, count)]
            mean = np.mean(parts, axis=0)
            bias = float(np.linalg.norm(mean - full) / np.linalg.norm(full))
            cosine = float(mean @ full / np.linalg.norm(mean) / np.linalg.norm(full))
            figures[f"{num_steps} steps, window {count}"] = {"bias": bias, "cosine": cosine}
            print(
                f"  gated after {num_steps} steps, windows of {count} rows of {n}: bias"
                f" {bias:.3f} of the gradient's norm, cosine {cosine:.4f}",
                flush=True,
            )
    return figures


def flat(tree: Any) -> np.ndarray:
    """Return all numbers of a pytree in one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def network_model(dim: int, seed: int = 3) -> rd.StateSpaceModel:
    """Return a model with a diagonal transition in (0.9, 0.99) and a network as emission."""
    keys = jax.random.split(jax.random.key(seed))
    network = eqx.nn.MLP(
        dim, dim, 8, 1, activation=jax.nn.relu, final_activation=jax.nn.relu, key=keys[0]
    )
    diagonal = jax.random.uniform(keys[1], (dim,), minval=0.9, maxval=0.99)
    noise = 0.1 * jnp.eye(dim)
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(dim), noise),
        rd.LinearGaussianKernel(jnp.diag(diagonal), jnp.zeros(dim), noise),
        rd.NonlinearGaussianKernel(network, rd.Diagonal(0.1 * jnp.ones(dim))),
    )


def emission_model(name: str) -> rd.StateSpaceModel:
    """Return a model of two rotating states observed through counts or with heavy tails."""
    import numpyro.distributions as dist

    weight = 0.95 * jnp.array([[0.98, 0.2], [-0.2, 0.98]])
    laws = {
        "Poisson": lambda x: dist.Poisson(jnp.exp(1.0 + x)),
        "Student-t": lambda x: dist.StudentT(3.0, x, 0.2),
    }
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(2), 0.5 * jnp.eye(2)),
        rd.LinearGaussianKernel(weight, jnp.zeros(2), 0.2 * jnp.eye(2)),
        rd.DistributionKernel(laws[name]),
    )


def particle_evidence(
    model: rd.StateSpaceModel, ys: jax.Array, num_particles: int, repeats: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-evidence by bootstrap filters, and its standard error over repeats."""
    keys = jax.random.split(jax.random.key(5), repeats)

    @jax.jit
    def once(key: jax.Array, y: jax.Array) -> jax.Array:
        return rd.particle_filter(key, model, y, num_particles, mask=True).log_evidence

    values = np.array([[float(once(key, y)) for key in keys] for y in ys])
    return values.mean(axis=1), values.std(axis=1, ddof=1) / np.sqrt(repeats)


def graded_by_particles(
    title: str, model: rd.StateSpaceModel, num_steps: int, num_particles: int
) -> dict[str, Any]:
    """Compare all families from five starts with the particle evidence."""
    d, m = model.state_dim, simulate(model, 0, 1, 2)[1].shape[-1]
    ys = simulate(model, 0, 512, LENGTH)[1]
    fresh = simulate(model, 1, 8, LENGTH)[1]
    evidence, error = particle_evidence(model, fresh, num_particles, 5)
    figures: dict[str, Any] = {
        "evidence_nats_a_step": [float(evidence.mean()) / LENGTH, float(error.max()) / LENGTH]
    }
    print(
        f"  {title}: evidence {evidence.mean() / LENGTH:.3f} nats a step, worst standard error of a"
        f" series {error.max() / LENGTH:.3f} ({num_particles} particles)",
        flush=True,
    )
    for name in CHOSEN:
        began = time.perf_counter()
        family = FAMILIES[name](jax.random.key(0), d, m)
        result = rd.fit(
            jax.random.key(1),
            family,
            model,
            ys,
            num_steps=num_steps,
            optimisation=rd.Optimisation(restarts=5, tournament=1.0),
            progress=False,
        )
        keys = jax.random.split(jax.random.key(2), fresh.shape[0])

        @eqx.filter_jit
        def one(family: rd.AbstractFamily, y: jax.Array, key: jax.Array) -> jax.Array:
            return rd.elbo(
                model,
                family.infer(y, mask=True),
                y,
                estimator=rd.BackwardSampling(1000),
                key=key,
                mask=True,
            )

        bounds = np.array(
            [float(one(result.family, y, k)) for y, k in zip(fresh, keys, strict=True)]
        )
        gap = spread((evidence - bounds) / LENGTH)
        scores = result.restart_scores
        figures[name] = {"gap_nats_a_step": gap, "starts": scores.tolist()}
        seconds = time.perf_counter() - began
        print(
            f"    {name}: gap {gap[0]:.3f} ± {gap[1]:.3f} nats a step; five starts between"
            f" {scores.min():.3f} and {scores.max():.3f}; {result.status}, {seconds:.0f} s",
            flush=True,
        )
    return figures


def five() -> dict[str, Any]:
    """Measure a linear transition with a network as emission, d = m = 5."""
    return graded_by_particles("d=m=5", network_model(5), 1500, 20_000)


def ten() -> dict[str, Any]:
    """Measure a linear transition with a network as emission, d = m = 10."""
    return graded_by_particles("d=m=10", network_model(10), 1500, 100_000)


def emissions() -> dict[str, Any]:
    """Measure counts and heavy tails, d = m = 2."""
    return {
        name: graded_by_particles(f"{name}, d=m=2", emission_model(name), 1500, 20_000)
        for name in ("Poisson", "Student-t")
    }


PARTS = {
    "linear": linear,
    "nonlinear": nonlinear,
    "seeds": seeds,
    "particles": particles,
    "windows": windows,
    "five": five,
    "ten": ten,
    "emissions": emissions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits families and grades them.")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--out", type=Path, help="a JSON file, to which parts are added")
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], help="which to grade")
    arguments = parser.parse_args()
    CHOSEN[:] = arguments.families or CHOSEN
    results = {}
    if arguments.out is not None and arguments.out.exists():
        results = json.loads(arguments.out.read_text())
    for name in arguments.parts or PARTS:
        print(f"== {name}: {PARTS[name].__doc__}", flush=True)
        device = jax.devices()[0]
        figures = PARTS[name]()
        if arguments.families and name in results:
            figures = results[name]["figures"] | figures
        results[name] = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "figures": figures,
        }
        if arguments.out is not None:
            temporary = arguments.out.with_suffix(".part")
            temporary.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(temporary, arguments.out)


if __name__ == "__main__":
    main()
