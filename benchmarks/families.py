"""Time training steps and inference of the amortised families on two CPU cores, in float64.

    python benchmarks/families.py [--quick] [--out FILE]

A training step is the ELBO of 64 series and its gradient in the family. Its floor is the time of
the same network and emission terms, evaluated and differentiated at all n x 64 points at once,
without the recurrence. Each case runs in a separate process with a timeout.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results") / "families-cpu.json"
TIMEOUT = 400
AUTHORS = {"gated": 302.0, "recurrent": 187.0}
"""Milliseconds of the authors' code for a step at d = m = 10, n = 100, 64 series, two cores."""


def best(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return the smallest milliseconds of several runs, and the seconds of the first one."""
    import jax

    began = time.perf_counter()
    jax.block_until_ready(run())
    first = time.perf_counter() - began
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return 1e3 * min(times), first


def training_step(name: str, model: Any, ys: Any, estimator: Any) -> Callable[[], Any]:
    """Return the ELBO of a batch and its gradient in the family."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import retrodict as rd
    from accuracy import FAMILIES

    d, m = model.state_dim, ys.shape[-1]
    family = FAMILIES[name](jax.random.key(0), d, m).prepare(model, ys)
    parameters, fixed = eqx.partition(family, eqx.is_inexact_array)

    @jax.jit
    def step(parameters: Any, ys: Any, key: Any) -> Any:
        def loss(parameters: Any) -> Any:
            family = eqx.combine(parameters, fixed)

            def one(y: Any, key: Any) -> Any:
                chain = family.infer(y, mask=True)
                return rd.elbo(model, chain, y, estimator=estimator, key=key, mask=True)

            return -jnp.mean(jax.vmap(one)(ys, jax.random.split(key, ys.shape[0])))

        return jax.value_and_grad(loss)(parameters)

    return lambda: step(parameters, ys, jax.random.key(0))


def floor_step(name: str, model: Any, ys: Any, nodes: int) -> Callable[[], Any]:
    """Return the networks and the emission terms at all points at once, with their gradient."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from accuracy import FAMILIES

    d, m = model.state_dim, ys.shape[-1]
    family = FAMILIES[name](jax.random.key(0), d, m)
    if name in ("gated", "conjugate"):
        networks, sizes = [family.network], [family.network.in_size]
    else:
        networks = [family.law, family.backward]
        sizes = [network.in_size for network in networks]
    cell = getattr(family, "cell", None)
    parameters, fixed = eqx.partition((networks, cell), eqx.is_inexact_array)
    points = ys.reshape(-1, m)
    features = [
        jax.random.normal(jax.random.key(i), (points.shape[0], size))
        for i, size in enumerate(sizes)
    ]
    noise = jax.random.normal(jax.random.key(9), (nodes, d))

    @jax.jit
    def step(parameters: Any, points: Any, features: Any) -> Any:
        def loss(parameters: Any) -> Any:
            networks, cell = eqx.combine(parameters, fixed)
            outs = [jax.vmap(net)(x) for net, x in zip(networks, features, strict=True)]
            total = sum(jnp.sum(jnp.sin(out)) for out in outs[1:])
            if cell is not None:
                row = jnp.zeros((points.shape[0], cell.input_size)).at[:, :m].set(points)
                total = total + jnp.sum(jax.vmap(cell)(row, features[0][:, : cell.hidden_size]))
            mean, scale = outs[0][:, :d], jax.nn.softplus(outs[0][:, d : 2 * d])

            def emission(mean: Any, scale: Any, y: Any) -> Any:
                xs = mean + scale * noise
                return jnp.mean(jax.vmap(lambda x: model.emission.log_prob(x, y))(xs))

            return total + jnp.sum(jax.vmap(emission)(mean, scale, points))

        return jax.value_and_grad(loss)(parameters)

    return lambda: step(parameters, points, features)


def small(name: str, quick: bool) -> dict[str, Any]:
    """Time a training step at d = 1, n = 64, with 20-point quadrature."""
    import retrodict as rd
    from accuracy import NONLINEAR, simulate

    ys = simulate(NONLINEAR, 0, 64, 64)[1]
    repeats = 10 if quick else 60
    step, first = best(training_step(name, NONLINEAR, ys, rd.Quadrature(20)), repeats)
    figures = {"step_ms": step, "first_call_s": first}
    if name in ("gated", "recurrent"):
        figures["floor_ms"], _ = best(floor_step(name, NONLINEAR, ys, 20), repeats)
    return figures


def large(name: str, quick: bool) -> dict[str, Any]:
    """Time a training step at d = m = 10, n = 100, with one draw of the emission term."""
    import retrodict as rd
    from accuracy import network_model, simulate

    model = network_model(10)
    ys = simulate(model, 0, 64, 100)[1]
    repeats = 3 if quick else 10
    step, first = best(training_step(name, model, ys, rd.RaoBlackwellised(1)), repeats)
    figures = {"step_ms": step, "first_call_s": first}
    if name != "gated, scale":
        figures["floor_ms"], _ = best(floor_step(name, model, ys, 1), repeats)
    if name in AUTHORS:
        figures["authors_ms"] = AUTHORS[name]
    return figures


def lengths(name: str, quick: bool) -> dict[str, Any]:
    """Time a training step of 8 series at d = 1, by length."""
    import retrodict as rd
    from accuracy import NONLINEAR, simulate

    figures = {}
    for n in (100, 800) if quick else (100, 400, 1600, 3200):
        ys = simulate(NONLINEAR, 0, 8, n)[1]
        figures[str(n)], _ = best(training_step(name, NONLINEAR, ys, rd.Quadrature(20)), 5)
    return figures


def inference(name: str, quick: bool) -> dict[str, Any]:
    """Time one series of 500 rows at d = 1, and cuthbert's exact FFBSi with 1,000 particles."""
    import jax

    from accuracy import FAMILIES, NONLINEAR, simulate
    from smoothers import with_cuthbert

    ys = simulate(NONLINEAR, 0, 1, 500)[1][0]
    family = FAMILIES[name](jax.random.key(0), 1, 1).prepare(NONLINEAR, ys)
    # A trained family is a constant of the program that smooths with it.
    infer = jax.jit(lambda y: family.infer(y, mask=True).marginals())
    least, first = best(lambda: infer(ys), 300)
    figures = {"infer_ms": least, "first_call_s": first}
    if name == "gated":
        figures["cuthbert_ms"] = best(with_cuthbert("exact", 1), 1)[0]
    return figures


CASES: dict[str, tuple[Callable[[str, bool], dict[str, Any]], tuple[str, ...]]] = {
    "small": (small, ("gated", "gated, scale", "conjugate", "recurrent")),
    "large": (large, ("gated", "gated, scale", "conjugate", "recurrent")),
    "lengths": (lengths, ("gated", "recurrent")),
    "inference": (inference, ("gated", "recurrent", "scan", "conjugate")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times families.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", nargs="*", choices=[*CASES], help="some of the cases")
    parser.add_argument("--out", type=Path, help="where to write; a whole run has a place")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        import jax

        jax.config.update("jax_enable_x64", True)
        case, family = arguments.case
        print(json.dumps(CASES[case][0](family, arguments.quick)))
        return
    results: dict[str, Any] = {}
    for case, (function, names) in CASES.items():
        if arguments.only and case not in arguments.only:
            continue
        print(f"\n== {case}: {function.__doc__} (load {os.getloadavg()[0]:.1f})", flush=True)
        for name in names:
            figures = _in_a_process(case, name, arguments.quick)
            results.setdefault(case, {})[name] = figures
            print(f"  {name}: " + _line(figures), flush=True)
    complete = not arguments.quick and not arguments.only
    out = arguments.out or (RESULTS if complete else None)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def _in_a_process(case: str, name: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", case, name, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer after {TIMEOUT} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _line(figures: dict[str, Any]) -> str:
    if "failed" in figures:
        return figures["failed"]
    parts = [f"{key} {value:.4g}" for key, value in figures.items()]
    if "floor_ms" in figures:
        parts.append(f"{figures['step_ms'] / figures['floor_ms']:.2f} times the floor")
    if "authors_ms" in figures:
        parts.append(f"{figures['authors_ms'] / figures['step_ms']:.1f} times the authors' speed")
    if "cuthbert_ms" in figures:
        parts.append(f"{figures['cuthbert_ms'] / figures['infer_ms']:.0f} times faster")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
