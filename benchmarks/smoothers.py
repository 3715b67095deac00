"""Time the particle smoothers and their peers on two CPU cores, in float64.

    python benchmarks/smoothers.py [--quick] [--only d1 d10 memory] [--out FILE]

The task is the same for all: the model of section 5.2 (d = 1) or a linear transition observed
through a network (d = 10), a bootstrap filter with systematic resampling below half of the
particles, and as many paths as particles; n = 500 and 1,000 particles. Each library runs in a
separate process with a timeout. A time is the smallest of several runs without compilation.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("results") / "smoothers-cpu.json"
TIMEOUT = 600
NUM_TIMES, NUM_PARTICLES = 500, 1000
REPEATS = {"retrodict": 5, "cuthbert": 2, "particles": 1}

RUNS = (
    ("retrodict", "filter"),
    ("retrodict", "exact"),
    ("retrodict", "rejection"),
    ("retrodict", "mcmc"),
    ("cuthbert", "exact"),
    ("cuthbert", "mcmc"),
    ("particles", "filter"),
    ("particles", "mcmc"),
    ("particles", "exact"),
)
TARGETS = (
    ("exact", "cuthbert", "exact", 8.0),
    ("exact", "particles", "exact", 30.0),
    ("mcmc", "cuthbert", "mcmc", 5.0),
    ("mcmc", "particles", "mcmc", 3.0),
)
"""How many times slower a peer's sampler should be than ours, filters included on both sides."""


def task(dim: int) -> tuple[Any, Any]:
    """Return the model and one series."""
    from accuracy import NONLINEAR, network_model, simulate

    model = NONLINEAR if dim == 1 else network_model(dim)
    return model, simulate(model, 0, 1, NUM_TIMES)[1][0]


def with_retrodict(sampler: str, dim: int) -> Callable[[], Any]:
    import equinox as eqx
    import jax

    import retrodict as rd

    model, ys = task(dim)
    samplers = {
        "exact": rd.particles.ExactBackward(),
        "rejection": rd.particles.RejectionBackward(),
        "mcmc": rd.particles.MCMCBackward(),
    }

    def run(key: Any, ys: Any) -> Any:
        if sampler == "filter":
            return rd.particle_filter(key, model, ys, NUM_PARTICLES, mask=True).mean
        posterior = rd.ffbsi(key, model, ys, NUM_PARTICLES, backward=samplers[sampler], mask=True)
        return posterior.samples

    compiled = eqx.filter_jit(run)
    return lambda: jax.block_until_ready(compiled(jax.random.key(0), ys))


def with_cuthbert(sampler: str, dim: int) -> Callable[[], Any]:
    """Return cuthbert's smoother; its first state precedes the first row, one more step."""
    from functools import partial

    import jax
    from cuthbert import filter as run_filter
    from cuthbert import smoother as run_smoother
    from cuthbert.smc import backward_sampler, particle_filter
    from cuthbertlib.resampling import adaptive, systematic
    from cuthbertlib.smc.smoothing import exact_sampling, mcmc

    model, ys = task(dim)
    resampling = adaptive.ess_decorator(systematic.resampling, 0.5)
    draw = exact_sampling.simulate if sampler == "exact" else partial(mcmc.simulate, n_steps=5)
    particles = particle_filter.build_filter(
        model.prior.sample,
        lambda key, x, y: model.transition.sample(key, x),
        lambda before, x, y: model.emission.log_prob(x, y),
        NUM_PARTICLES,
        resampling,
    )
    paths = backward_sampler.build_smoother(
        lambda before, x, y: model.transition.log_prob(before, x),
        draw,
        systematic.resampling,
        NUM_PARTICLES,
    )

    @jax.jit
    def run(key: Any, ys: Any) -> Any:
        keys = jax.random.split(key, 3)
        start = particles.init_prepare(key=keys[0])
        states = run_filter(particles, ys, start, key=keys[1])
        return run_smoother(paths, states, key=keys[2]).particles

    return lambda: jax.block_until_ready(run(jax.random.key(0), ys))


def with_particles(sampler: str, dim: int) -> Callable[[], Any]:
    """Return the smoother of particles, with distributions and networks in NumPy."""
    import particles
    from particles import distributions as laws
    from particles import state_space_models as ssm

    model, ys = task(dim)
    weight = np.asarray(model.transition.weight)
    bias = np.asarray(model.transition.bias)
    move_std = np.diag(np.asarray(model.transition.scale_tril))
    first_std = np.diag(np.asarray(model.prior.scale_tril))
    error = np.asarray(model.emission.scale_tril.std)
    if dim == 1:
        from retrodict.experiments import published

        slope = published.archive()["nonlinear"]["slope"]

        def emission(x: Any) -> Any:
            return np.cos(np.tanh(slope * x))
    else:
        layers = [(np.asarray(la.weight), np.asarray(la.bias)) for la in model.emission.fn.layers]

        def emission(x: Any) -> Any:
            for matrix, shift in layers:
                x = np.maximum(x @ matrix.T + shift, 0.0)
            return x

    def normal(mean: Any, std: Any) -> Any:
        if dim == 1:
            return laws.Normal(loc=mean, scale=std[0])
        return laws.IndepProd(
            *(laws.Normal(loc=mean[..., i], scale=std[i]) for i in range(std.size))
        )

    class Model(ssm.StateSpaceModel):
        def PX0(self) -> Any:
            return normal(np.zeros(dim) if dim > 1 else 0.0, first_std)

        def PX(self, t: Any, xp: Any) -> Any:
            if dim == 1:
                return normal(weight[0, 0] * xp + bias[0], move_std)
            return normal(xp @ weight.T + bias, move_std)

        def PY(self, t: Any, xp: Any, x: Any) -> Any:
            return normal(emission(x), error)

    data = np.asarray(ys)
    data = data[:, 0] if dim == 1 else data[:, None, :]
    fk = ssm.Bootstrap(ssm=Model(), data=data)

    def run() -> Any:
        machine: Any = particles.SMC(fk=fk, N=NUM_PARTICLES, store_history=sampler != "filter")
        machine.run()
        if sampler == "exact":
            return machine.hist.backward_sampling_ON2(NUM_PARTICLES)
        if sampler == "mcmc":
            return machine.hist.backward_sampling_mcmc(NUM_PARTICLES)
        return machine.logLt

    return run


LIBRARIES = {"retrodict": with_retrodict, "cuthbert": with_cuthbert, "particles": with_particles}


def measure(library: str, sampler: str, dim: int, quick: bool) -> dict[str, float]:
    """Return the milliseconds of a run, and the seconds of the first one."""
    run = LIBRARIES[library](sampler, dim)
    began = time.perf_counter()
    run()
    first = time.perf_counter() - began
    if library == "particles" and sampler == "exact":
        return {"ms": 1e3 * first, "first_s": first}
    times = []
    for _ in range(1 if quick else REPEATS[library]):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return {"ms": 1e3 * min(times), "first_s": first}


def memory() -> dict[str, float]:
    """Measure the largest resident size of exact FFBSi, 10,000 particles and paths, n = 1,000."""
    import jax

    import retrodict as rd
    from accuracy import NONLINEAR, simulate

    ys = simulate(NONLINEAR, 0, 1, 1000)[1][0]
    began = time.perf_counter()
    posterior = rd.ffbsi(jax.random.key(0), NONLINEAR, ys, 10_000, mask=True)
    jax.block_until_ready(posterior.samples)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak_gib": peak / 2**20, "seconds": seconds}


def on_accelerator() -> dict[str, Any]:
    """Time float32, N = M = 10,000, n = 500, d = 1, on the default device of JAX."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import retrodict as rd

    def single(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf

    model, ys = jax.tree.map(single, task(1))
    device = jax.devices()[0].device_kind
    figures: dict[str, Any] = {"device": device, "jax": jax.__version__}
    for name, sampler in (
        ("exact", rd.particles.ExactBackward()),
        ("mcmc", rd.particles.MCMCBackward()),
    ):

        def run(key: Any, ys: Any, sampler: Any = sampler) -> Any:
            return rd.ffbsi(key, model, ys, 10_000, backward=sampler, mask=True).samples

        compiled, times = eqx.filter_jit(run), []
        for i in range(6):
            began = time.perf_counter()
            jax.block_until_ready(compiled(jax.random.key(i), ys))
            times.append(time.perf_counter() - began)
        figures[name] = {"s": min(times[1:]), "first_s": times[0], "dtype": str(ys.dtype)}
        print(f"  {name} on {device}: {figures[name]}", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Times particle smoothers.")
    parser.add_argument("--quick", action="store_true", help="one run of each")
    parser.add_argument("--only", nargs="*", choices=[*PARTS], help="some parts")
    parser.add_argument("--out", type=Path, help="where to write, if not in results")
    parser.add_argument("--accelerator", action="store_true", help="time 10,000 particles, float32")
    parser.add_argument("--case", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.accelerator:
        _write(on_accelerator(), arguments.out)
        return
    if arguments.case:
        import jax

        jax.config.update("jax_enable_x64", True)
        name, *rest = arguments.case
        figures = (
            memory() if name == "memory" else measure(name, rest[0], int(rest[1]), arguments.quick)
        )
        print(json.dumps(figures))
        return
    # Written after every part, beside what an earlier run left of the others.
    out = arguments.out or (None if arguments.quick else RESULTS)
    results = json.loads(out.read_text()) if out is not None and out.exists() else {}
    for part, run in PARTS.items():
        if not arguments.only or part in arguments.only:
            results[part] = run(arguments.quick)
            _write(results, out)


def _memory(quick: bool) -> dict[str, Any]:
    print("\n== memory: exact, N = M = 10,000, n = 1,000", flush=True)
    figures = _in_a_process(["memory"], False)
    print(f"  {figures}", flush=True)
    return figures


def _write(results: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def _race(dim: int, quick: bool) -> dict[str, Any]:
    title = f"d = {dim}, n = {NUM_TIMES}, {NUM_PARTICLES} particles and paths"
    print(f"\n== {title} (load {os.getloadavg()[0]:.1f})", flush=True)
    figures: dict[str, Any] = {}
    for library, sampler in RUNS:
        figure = _in_a_process([library, sampler, str(dim)], quick)
        figures[f"{library} {sampler}"] = figure
        print(f"  {library} {sampler}: {_line(figure)}", flush=True)
    for ours, library, theirs, target in TARGETS:
        mine, peer = figures[f"retrodict {ours}"], figures[f"{library} {theirs}"]
        if "ms" in mine and "ms" in peer:
            ratio = peer["ms"] / mine["ms"]
            print(f"  {library} {theirs} / retrodict {ours}: {ratio:.1f} (aim {target:g})")
            figures[f"{library} {theirs} / retrodict {ours}"] = ratio
    return figures


def _line(figures: dict[str, Any]) -> str:
    if "failed" in figures:
        return figures["failed"]
    return f"{figures['ms']:.0f} ms (first call {figures['first_s']:.1f} s)"


def _in_a_process(case: list[str], quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--case", *case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer after {TIMEOUT} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "d1": lambda quick: _race(1, quick),
    "d10": lambda quick: _race(10, quick),
    "memory": _memory,
}


if __name__ == "__main__":
    main()
