"""Measure online learning: gradients, recursive likelihood, a chaotic network, throughput.

    python benchmarks/online.py gradients linear chaotic throughput memory shocks [--folder online]

`--dims`, `--methods`, `--first-set`, `--num-sets`, `--num-rows` and `--num-seeds` make parts
smaller, so that several processes can share the work. Each writes its figures into the folder, one
JSON file per run, with the machine. `--collect FILE` joins them with the content of the file, and
`benchmarks/online_figures.py FILE` draws them.
"""

import argparse
import functools
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import retrodict as rd

BURN_IN = 50
"""Rows before the errors of the chaotic network count, as in the published figures."""


# --- bias and variance of recursive gradients -----------------------------------------------------


def plane(weight: float, noise: float = 0.5) -> rd.StateSpaceModel:
    """Return a model of two coupled states with observation noise."""
    turn = jnp.array([[weight, 0.2], [-0.2, weight]])
    eye, zeros = jnp.eye(2), jnp.zeros(2)
    return rd.StateSpaceModel(
        rd.Gaussian(zeros, eye),
        rd.LinearGaussianKernel(turn, zeros, 0.5 * eye),
        rd.LinearGaussianKernel(eye, zeros, noise * eye),
    )


def gradients(arguments: Any) -> dict[str, Any]:
    """Measure bias and variance of recursive gradients, against autodiff through all 50 rows."""
    num_rows, model, family = 50, plane(0.8), rd.KalmanFamily(plane(0.6, 0.7))
    ys = model.simulate(jax.random.key(1), num_rows)[1]
    exact = rd.online.recursive_gradient(
        rd.online.TruncatedBackprop(num_rows), family, model, ys, key=jax.random.key(0)
    )
    truth = np.asarray(_flat(exact.gradient)[-1])
    methods: dict[str, Any] = {}
    for count in (32, 64, 128, 256):
        methods[f"score, N={count}"] = rd.online.RecursiveScore(count)
        methods[f"score, unbiased, N={count}"] = rd.online.RecursiveScore(count, normalised=False)
        methods[f"pathwise, N={count}"] = rd.online.RecursivePathwise(count)
    for window in (1, 2, 5, 10, 25):
        # Each row is gone over once, so that the gradients of the windows add up to that of all.
        methods[f"truncated, window={window}"] = rd.online.TruncatedBackprop(window, every=window)
    methods = {name: method for name, method in methods.items() if named(name, arguments)}
    figures: dict[str, Any] = {"n": num_rows, "d": 2, "num_seeds": arguments.num_seeds}
    keys = jax.random.split(jax.random.key(2), arguments.num_seeds)
    for name, method in methods.items():

        @jax.jit
        def one(key: jax.Array, method: Any = method) -> jax.Array:
            rows = rd.online.recursive_gradient(method, family, model, ys, key=key)
            return _flat(rows.gradient)[-1]

        if name.startswith("truncated"):
            # Nothing is drawn.
            rows = rd.online.recursive_gradient(method, family, model, ys, key=keys[0])
            gradients = np.asarray(jnp.sum(_flat(rows.gradient), axis=0))[None]
        else:
            # One after another: the weights of many runs at once would not fit into the cache.
            gradients = np.stack([np.asarray(one(key)) for key in keys])
        off, size = gradients.mean(axis=0) - truth, np.linalg.norm(truth)
        noise = gradients.var(axis=0, ddof=1) if len(gradients) > 1 else np.zeros_like(truth)
        figures[name] = {
            "relative_bias": float(np.linalg.norm(off) / size),
            "standard_error_of_bias": float(np.sqrt(noise.sum() / len(gradients)) / size),
            "relative_deviation": float(np.sqrt(noise.sum()) / size),
            "largest_bias_in_standard_errors": float(
                np.max(np.abs(off) / np.sqrt(np.maximum(noise / len(gradients), 1e-300)))
            )
            if len(gradients) > 1
            else None,
        }
        print(f"  {name}: {figures[name]}", flush=True)
    return figures


def named(name: str, arguments: Any) -> bool:
    """Return whether a method was requested, by the beginning of its name."""
    return not arguments.methods or name.startswith(tuple(arguments.methods))


def _flat(tree: Any) -> jax.Array:
    leaves = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves, axis=1)


# --- recursive likelihood -------------------------------------------------------------------------


class DiagonalWeight(rd.AbstractParameter):
    """Diagonal matrix whose diagonal is learned."""

    raw: jax.Array

    @property
    def value(self) -> jax.Array:
        """Return the matrix."""
        return jnp.diag(self.raw)


def diagonal_model(transition: jax.Array, emission: jax.Array) -> rd.StateSpaceModel:
    """Return a model with diagonal F and G to be learned."""
    d = transition.shape[0]
    zeros, frozen = jnp.zeros(d), rd.Frozen
    return rd.StateSpaceModel(
        frozen(rd.Gaussian(zeros, 0.1 * jnp.eye(d))),
        rd.LinearGaussianKernel(
            DiagonalWeight(transition), frozen(zeros), frozen(0.1 * jnp.eye(d))
        ),
        rd.LinearGaussianKernel(DiagonalWeight(emission), frozen(zeros), frozen(0.25 * jnp.eye(d))),
    )


def methods_of_likelihood(start: rd.StateSpaceModel) -> dict[str, tuple[Any, Any]]:
    """Return the families and gradients that learn F and G.

    The coordinates of this model are independent, so that squares are sufficient features.
    """
    family, squares = rd.KalmanFamily(start), rd.online.QuadraticFeatures(products=False)
    return {
        "exact": (None, rd.online.KalmanScore()),
        "truncated": (family, rd.online.TruncatedBackprop(10)),
        "pathwise": (family, rd.online.RecursivePathwise(84, features=squares)),
    }


def linear(arguments: Any) -> dict[str, Any]:
    """Learn F and G of a linear model of ten states along 50,000 rows; compare the exact score.

    Robbins–Monro steps of rate 3e-2 and exponent 0.6, all entries started at 0.75; gradient steps
    or Adam.
    """
    d, num_rows, chunk = 10, arguments.num_rows or 50_000, 1000
    schedule = rd.online.robbins_monro(3e-2, 0.6)
    step = optax.adam(schedule) if arguments.optimiser == "adam" else optax.sgd(schedule)
    figures: dict[str, Any] = {"n": num_rows, "d": d, "every": chunk}
    for seed in sets(arguments, 1):
        one, two, key = jax.random.split(jax.random.key(seed), 3)
        truth = [jax.random.uniform(k, (d,), minval=0.5, maxval=1.0) for k in (one, two)]
        ys = rd.unwrap(diagonal_model(*truth)).simulate(key, num_rows)[1]
        start = diagonal_model(jnp.full(d, 0.75), jnp.full(d, 0.75))
        for name, (family, gradient) in methods_of_likelihood(start).items():
            if not named(name, arguments):
                continue
            learner = rd.online.OnlineLearner(family, start, gradient, step)
            state, curve, began = learner.init(jax.random.key(seed)), [], time.perf_counter()
            for first in range(0, num_rows, chunk):
                state, _ = learner.scan(state, ys[first : first + chunk])
                fitted = rd.unwrap(learner.model(state))
                weights = (fitted.transition.weight, fitted.emission.weight)
                errors = [np.abs(np.diag(w) - t) for w, t in zip(weights, truth, strict=True)]
                curve.append(float(np.mean(errors)))
                if (first // chunk) % 10 == 9:
                    print(f"  {name}, seed {seed}: {curve[-1]:.4f} at row {first + chunk}")
            seconds = time.perf_counter() - began
            figures[f"{name}, seed {seed}"] = {
                "mean_absolute_error": curve,
                "seconds": seconds,
                "skipped": int(state.num_skipped),
            }
            print(f"  {name}, seed {seed}: {curve[-1]:.4f} after {seconds:.0f} s", flush=True)
    return figures


def sets(arguments: Any, default: int) -> range:
    """Return the numbers of the data sets."""
    return range(arguments.first_set, arguments.first_set + (arguments.num_sets or default))


# --- the chaotic network --------------------------------------------------------------------------


class Drift(eqx.Module):
    """Map x + (Δ/τ)(−x + γ W tanh x), with Δ/τ = 0.04 and γ = 2.5."""

    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the mean of the next state."""
        pull = jnp.matmul(self.weight, jnp.tanh(x), precision="highest")
        return x + 0.04 * (-x + 2.5 * pull)


class Student(eqx.Module):
    """Law of loc + 0.1 t with t Student of two degrees of freedom, with infinite variance."""

    loc: jax.Array

    def log_prob(self, value: jax.Array) -> jax.Array:
        """Return the log density of each entry; that of t is (2 + t²)^(−3/2)."""
        return -1.5 * jnp.log(2.0 + ((value - self.loc) / 0.1) ** 2) - np.log(0.1)

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Draw from the law."""
        return self.loc + 0.1 * jax.random.t(key, 2.0, (*sample_shape, *self.loc.shape))


def chaotic_model(seed: int, dim: int) -> rd.StateSpaceModel:
    """Return the chaotic recurrent network of Campbell et al. (2021)."""
    weight = jax.random.normal(jax.random.key(seed), (dim, dim)) / np.sqrt(dim)
    return rd.StateSpaceModel(
        rd.Gaussian(jnp.zeros(dim), 0.1 * jnp.eye(dim)),
        rd.NonlinearGaussianKernel(Drift(weight), rd.Diagonal(0.1 * jnp.ones(dim))),
        rd.DistributionKernel(Student),
    )


@functools.cache
def proposal() -> Any:
    """Return the transition times a Gaussian tangent to the Student density, four times."""

    def initial(data: Any) -> rd.Gaussian:
        return toward(jnp.zeros_like(data.ys), data)

    def toward(mean: jax.Array, data: Any) -> rd.Gaussian:
        at, precision = mean, jnp.zeros_like(mean)
        for _ in range(4):
            precision = 3.0 / (2.0 + ((data.ys - at) / 0.1) ** 2)
            at = (mean + precision * data.ys) / (1.0 + precision)
        return rd.Gaussian(at, rd.Diagonal(0.11 / jnp.sqrt(1.0 + precision)))

    return initial, toward


def guide(model: rd.StateSpaceModel) -> rd.particles.Guided:
    """Return the proposal of a guided filter for this network."""
    initial, toward = proposal()
    return rd.particles.Guided(
        initial, lambda before, data: toward(model.transition.fn(before), data)
    )


def errors_of(means: Any, smoothed: Any, xs: Any) -> dict[str, float]:
    """Return errors of filtering and one step back, as published and pooled.

    Published figures average over time, from row 50 on, the root mean square of the entries of a
    row. This is smaller than the root mean square over all entries, by a fifteenth at d = 5.
    """
    squares = np.asarray((means - xs) ** 2)
    figures = {
        "filter": float(np.sqrt(squares.mean(axis=1))[BURN_IN:].mean()),
        "filter_pooled": float(np.sqrt(squares.mean())),
    }
    if smoothed is not None:
        back = np.asarray((smoothed[1:] - xs[:-1]) ** 2)
        figures["one_back"] = float(np.sqrt(back.mean(axis=1))[BURN_IN:].mean())
        figures["one_back_pooled"] = float(np.sqrt(back.mean()))
    return figures


@eqx.filter_jit
def frozen(family: Any, ys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return filtered and one-step smoothed means of a family without learning."""
    chain = family.infer(ys, mask=True)
    kernels, means = chain.kernels, chain.laws.mean
    back = jnp.einsum("tij,tj->ti", kernels.weight, means[1:], precision="highest") + kernels.bias
    return means, jnp.concatenate([jnp.zeros_like(means[:1]), back])


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""The time that passes, and that of the processor, which work of others lengthens less."""


def timed(call: Callable[[], Any], clock: str = "wall", num_calls: int = 1) -> tuple[Any, float]:
    """Return the result of a compiled call, and the smallest seconds of several calls.

    Other processes on the machine can only increase them.
    """
    result, spent = jax.block_until_ready(call()), []
    for _ in range(num_calls):
        began = CLOCKS[clock]()
        result = jax.block_until_ready(call())
        spent.append(CLOCKS[clock]() - began)
    return result, min(spent)


def clipped(optimiser: optax.GradientTransformation, norm: float) -> optax.GradientTransformation:
    """Return an optimiser with clipped gradients, on one long vector."""
    return optax.flatten(optax.chain(optax.clip_by_global_norm(norm), optimiser))


OPTIMISER = clipped(optax.adam(rd.online.robbins_monro(1e-2, 0.6, warmup=10)), 1.0)
"""One object for all data sets, so that the learner is compiled once a dimension."""


def chaotic(arguments: Any) -> dict[str, Any]:
    """Measure errors on the chaotic network during and after learning, and milliseconds per row.

    Particle filters get about the time of the learner. The initial family and the learned one also
    smooth a second series of the same network.
    """
    figures: dict[str, Any] = {}
    num_rows = arguments.num_rows or 500
    clocked = functools.partial(timed, clock=arguments.clock, num_calls=arguments.num_calls)
    # Pairs of opposite noise, and no score: with neither, early steps are worse than none.
    paths = rd.BackwardSampling(arguments.num_paths, noise="antithetic", stop_score=True)
    for dim in arguments.dims or (5, 20, 100):
        for looks in arguments.looks:
            errors_by_seed: dict[str, dict[str, dict[str, float]]] = {}
            counts: dict[str, int] = {}
            for seed in sets(arguments, 10):
                model = chaotic_model(seed, dim)
                (xs, ys), (fresh_xs, fresh) = (
                    model.simulate(jax.random.key(number), num_rows)
                    for number in (1000 + seed, 2000 + seed)
                )
                family = rd.AssimilationFamily(jax.random.key(seed), model, num_looks=looks)
                learner = rd.online.OnlineLearner(
                    family,
                    model,
                    rd.online.TruncatedBackprop(1, paths, every=arguments.every),
                    OPTIMISER,
                    learn="family",
                    steps_per_row=arguments.steps_per_row,
                )
                begin = learner.init(jax.random.key(seed))
                (state, out), seconds = clocked(lambda: learner.scan(begin, ys))  # noqa: B023
                learned = learner.family(state)
                errors = {"learning": errors_of(out.filtered.mean, out.smoothed.mean, xs)}
                errors["learning"]["skipped"] = int(state.num_skipped)
                for name, chosen in (("frozen", family), ("trained", learned)):
                    means, spent = clocked(lambda: frozen(chosen, ys))  # noqa: B023
                    errors[name] = errors_of(means[0], means[1], xs) | {
                        "ms_a_row": 1e3 * spent / num_rows
                    }
                    again = frozen(chosen, fresh)
                    errors[f"{name}, second series"] = errors_of(again[0], again[1], fresh_xs)
                errors["learning"]["ms_a_row"] = 1e3 * seconds / num_rows
                errors |= particle_errors(model, xs, ys, seconds, counts, clocked)
                errors_by_seed[str(seed)] = errors
                print(f"  d={dim}, {looks} looks, seed {seed}: {errors}", flush=True)
            figures[f"d={dim}, {looks} looks"] = {"n": num_rows, "sets": errors_by_seed}
    return figures


def summary(errors_by_seed: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return means and standard errors over data sets, and of paired differences."""
    rows = {
        name: [errors[name] for errors in errors_by_seed.values()]
        for name in next(iter(errors_by_seed.values()))
    }
    means: dict[str, Any] = {"num_sets": len(errors_by_seed)}
    for name, figures in rows.items():
        columns = {key: np.array([figure[key] for figure in figures]) for key in figures[0]}
        means[name] = {key: _mean(column) for key, column in columns.items()}
    for one, other in (
        ("learning", "frozen"),
        ("trained", "frozen"),
        ("trained, second series", "frozen, second series"),
        ("learning", "bootstrap"),
        ("learning", "guided"),
    ):
        for key in ("filter", "one_back"):
            if key not in rows[other][0]:
                continue
            gain = np.array([a[key] - b[key] for a, b in zip(rows[one], rows[other], strict=True)])
            means[f"{one} less {other}: {key}"] = _mean(gain)
    return means


def _mean(values: np.ndarray) -> dict[str, float]:
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
    return {"mean": float(values.mean()), "standard_error": error}


@eqx.filter_jit
def particle_means(model: rd.StateSpaceModel, ys: jax.Array, count: int, guided: bool) -> jax.Array:
    """Return filtered means of a particle filter, compiled once for all data sets."""
    return rd.particle_filter(
        jax.random.key(0),
        model,
        ys,
        count,
        proposal=guide(model) if guided else None,
        strict=False,
        mask=True,
    ).mean


def particle_errors(
    model: rd.StateSpaceModel,
    xs: jax.Array,
    ys: jax.Array,
    seconds: float,
    counts: dict[str, int],
    clocked: Callable[[Callable[[], Any]], tuple[Any, float]],
) -> dict[str, dict[str, float]]:
    """Return errors of bootstrap and guided filters with at least the learner's time.

    The number of particles, of 100, 120, 144, …, is determined once and stored in `counts`.
    """
    errors = {}
    # All particles of all rows are kept: two gigabytes of them at most.
    most = int(2**31 / (xs.size * xs.dtype.itemsize))
    for name in ("bootstrap", "guided"):

        def run(count: int, guided: bool = name == "guided") -> Any:
            return clocked(lambda: particle_means(model, ys, count, guided))

        if name not in counts:
            # From below what is to be expected, for time is not proportional to particles.
            power = max(int(np.log(10 * seconds / run(1000)[1]) / np.log(1.2)) - 3, 0)
            while (count := min(int(100 * 1.2**power), most)) < most and run(count)[1] < seconds:
                power += 1
            counts[name] = count
        means, spent = run(counts[name])
        errors[name] = errors_of(means, None, xs) | {
            "num_particles": counts[name],
            "ms_a_row": 1e3 * spent / len(ys),
        }
    return errors


# --- throughput and memory ------------------------------------------------------------------------


def rates(stream: Any, state: Any, ys: jax.Array) -> dict[str, float]:
    """Return rows per second of a running posterior or a learner, in one chunk and one by one."""
    _, seconds = timed(lambda: stream.scan(state, ys))
    jax.block_until_ready(stream.update(state, ys[0]))
    alone = np.asarray(ys[:200])
    began = time.perf_counter()
    for row in alone:
        state = jax.block_until_ready(stream.update(state, row)[0])
    return {
        "rows_a_second_in_chunks": len(ys) / seconds,
        "rows_a_second_one_by_one": len(alone) / (time.perf_counter() - began),
    }


def throughput(arguments: Any) -> dict[str, Any]:
    """Measure rows per second of inference and of learning."""
    figures: dict[str, Any] = {}
    for dim in arguments.dims or (1, 5, 20):
        model = chaotic_model(0, dim)
        family = rd.AssimilationFamily(jax.random.key(0), model)
        live = rd.online.FixedLag(family, lag=1)
        learner = rd.online.OnlineLearner(
            family, model, rd.online.TruncatedBackprop(1, rd.BackwardSampling(4)), learn="family"
        )
        ys = model.simulate(jax.random.key(1), 2000)[1]
        for name, rate in (
            ("inference", rates(live, live.init(), ys)),
            ("learning", rates(learner, learner.init(jax.random.key(2)), ys)),
        ):
            figures[f"{name}, d={dim}"] = rate
            print(f"  {name}, d={dim}: {rate}", flush=True)
    return figures


def memory(arguments: Any) -> dict[str, Any]:
    """Measure the memory of this process while it learns from a million rows."""
    num_rows, chunk = arguments.num_rows or 1_000_000, 1000
    model = chaotic_model(0, 1)
    learner = rd.online.OnlineLearner(
        rd.AssimilationFamily(jax.random.key(0), model),
        model,
        rd.online.TruncatedBackprop(1, rd.BackwardSampling(2)),
        learn="family",
    )
    state, megabytes, out = learner.init(jax.random.key(3)), [], None
    ys, began = model.simulate(jax.random.key(4), chunk)[1], time.perf_counter()
    for count in range(0, num_rows, chunk):
        state, out = learner.scan(state, ys)
        jax.block_until_ready(out)
        if count % max(num_rows // 10, chunk) == 0:
            megabytes.append(megabytes_held())
    figures = {
        "num_rows": num_rows,
        "d": 1,
        "megabytes_at_every_tenth": megabytes,
        "rows_a_second": num_rows / (time.perf_counter() - began),
        "finite": out is not None and bool(np.all(np.isfinite(np.asarray(out.filtered.mean)))),
    }
    print(f"  {figures}", flush=True)
    return figures


def megabytes_held() -> float:
    """Return the current memory of this process; the peak would hide growth."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# --- shocks ---------------------------------------------------------------------------------------


def autoregression(weight: float) -> rd.StateSpaceModel:
    """Return a model of one state with a weight to be learned."""
    eye, frozen = jnp.eye(1), rd.Frozen
    return rd.StateSpaceModel(
        frozen(rd.Gaussian(jnp.zeros(1), eye)),
        rd.LinearGaussianKernel(weight * eye, frozen(jnp.zeros(1)), frozen(0.5 * eye)),
        frozen(rd.LinearGaussianKernel(eye, jnp.zeros(1), 0.3 * eye)),
    )


def best_increments(weight: float, ys: np.ndarray) -> np.ndarray:
    """Return the increments of the log-evidence of a known model per row."""
    model = rd.unwrap(autoregression(weight))
    exact = rd.online.RunningPosterior(rd.KalmanFamily(model), model)
    return np.asarray(exact.scan(exact.init(), ys)[1].elbo_increment)


def shocks(arguments: Any) -> dict[str, Any]:
    """Measure a regime change, a burst of missing rows and a burst of outliers in a stream.

    Before the shock and at the end, over a third of each half: the mean of the learned weight, and
    the difference of the ELBO per row to the log-evidence of the true model.
    """
    half = (arguments.num_rows or 6000) // 2
    before = autoregression(0.9).simulate(jax.random.key(0), half)[1]
    rest = autoregression(0.9).simulate(jax.random.key(1), half)[1]
    other = autoregression(-0.5).simulate(jax.random.key(2), half)[1]
    burst = np.array(rest)
    burst[: half // 10] = np.nan
    wild = np.array(rest)
    wild[:20] *= 1e3
    figures: dict[str, Any] = {"n": 2 * half, "shock_at": half}
    third = half // 3
    for name, after, last in (
        ("regime", other, -0.5),
        ("missing", burst, 0.9),
        ("outliers", wild, 0.9),
    ):
        ys = np.concatenate([before, after])
        start = autoregression(0.5)
        learner = rd.online.OnlineLearner(
            rd.KalmanFamily(start),
            start,
            rd.online.TruncatedBackprop(8),
            clipped(optax.adam(3e-3), 1.0),
        )
        state, weights, increments = learner.init(jax.random.key(3)), [], []
        chunk = max(half // 100, 1)
        for first in range(0, 2 * half, chunk):
            state, out = learner.scan(state, ys[first : first + chunk])
            weights.append(float(rd.unwrap(learner.model(state)).transition.weight[0, 0]))
            increments.append(float(np.mean(out.elbo_increment)))
        phases = {}
        for when, end, weight in (("before", half, 0.9), ("at the end", 2 * half, last)):
            places = slice((end - third) // chunk, end // chunk)
            at_truth = best_increments(weight, ys[:end])[end - third :]
            phases[when] = {
                "weight": float(np.mean(weights[places])),
                "elbo_lost": float(np.mean(at_truth) - np.mean(increments[places])),
            }
        figures[name] = phases | {
            "every": chunk,
            "weight": weights,
            "elbo_increment": increments,
            "finite": bool(np.all(np.isfinite(weights)) and np.all(np.isfinite(increments))),
            "skipped": int(state.num_skipped),
        }
        print(f"  {name}: {phases}, finite: {figures[name]['finite']}", flush=True)
    return figures


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gradients": gradients,
    "linear": linear,
    "chaotic": chaotic,
    "throughput": throughput,
    "memory": memory,
    "shocks": shocks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--folder", type=Path, default=Path("online"))
    parser.add_argument("--dims", type=int, nargs="+")
    parser.add_argument("--looks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", help="of `gradients` and `linear`, as they begin")
    parser.add_argument("--optimiser", choices=["sgd", "adam"], default="sgd", help="of `linear`")
    parser.add_argument("--first-set", type=int, default=0, help="the first data set")
    parser.add_argument("--num-sets", type=int, help="data sets")
    parser.add_argument("--num-rows", type=int, help="rows of a stream")
    parser.add_argument("--num-seeds", type=int, default=200, help="seeds of `gradients`")
    parser.add_argument("--num-paths", type=int, default=16, help="paths of a step of `chaotic`")
    parser.add_argument("--steps-per-row", type=int, default=1, help="steps of `chaotic`")
    parser.add_argument("--every", type=int, default=1, help="rows from step to step of `chaotic`")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of `chaotic`")
    parser.add_argument("--num-calls", type=int, default=1, help="calls to time, of `chaotic`")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--collect", type=Path, help="a JSON file that joins all runs")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", not arguments.float32)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in [] if arguments.collect else arguments.parts or PARTS:
        print(f"== {name}: {PARTS[name].__doc__}", flush=True)
        record = {
            "part": name,
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "precision": "float32" if arguments.float32 else "float64",
            "options": {
                name: str(value)
                for name, value in vars(arguments).items()
                if name not in ("folder", "collect")
            },
            "figures": PARTS[name](arguments),
        }
        place = arguments.folder / f"{name}-{os.getpid()}.json"
        place.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.collect:
        stored = json.loads(arguments.collect.read_text()) if arguments.collect.exists() else []
        fresh = [json.loads(path.read_text()) for path in sorted(arguments.folder.glob("*.json"))]
        records = [*stored, *fresh]
        arguments.collect.write_text(json.dumps(joined(records), indent=1) + "\n")


SHARED = ("first_set", "num_sets", "methods", "dims", "looks", "parts")
"""Options that tell how work was shared, and nothing of what was done."""


def joined(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record per part with the same machine and options, and a summary of data sets."""
    merged: dict[str, dict[str, Any]] = {}
    for record in records:
        for option in SHARED:
            record["options"].pop(option, None)
        name = json.dumps({key: value for key, value in record.items() if key != "figures"})
        _merge(merged.setdefault(name, {**record, "figures": {}})["figures"], record["figures"])
    for record in merged.values():
        if record["part"] == "chaotic":
            for figure in record["figures"].values():
                figure["summary"] = summary(figure["sets"])
    return list(merged.values())


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


if __name__ == "__main__":
    main()
