"""Time one long series, on one device or several, and training on many series.

    python benchmarks/scale.py start training inference --float32 --out scale-gpu.json

Models have three states and four observed entries. Every figure has the seconds of compilation, the
memory, and the ratio of the least possible time to the measured one, at peaks that are measured in
the same run unless they are given. A part is a generator of figures: write one, and add it to
`PARTS`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import retrodict as rd
from kalman import problem, retrodict_model, tanh_model
from measure import Task
from retrodict._learning.dataset import Minibatch
from retrodict._learning.elbo_loss import ElboLoss
from retrodict._model import Series
from roofline import Peaks, measure, measured_peaks, memory_of

STATE, OBS = 3, 4

FAMILIES: dict[str, tuple[Callable[..., Any], bool]] = {
    "scan": (rd.ScanFamily, True),
    "recurrent": (rd.RecurrentFamily, False),
}
"""Each family, and whether it runs in parallel over time."""

STARTED: dict[str, tuple[Callable[..., Any], bool]] = {
    "gated": (rd.GatedFamily, False),
    "conjugate": (rd.ConjugateFamily, False),
    **FAMILIES,
}
"""The families whose first step is timed."""


class Setting(NamedTuple):
    """Settings of all parts.

    Attributes:
        options: the command line.
        dtype: the precision.
        peaks: rates of the device.
    """

    options: argparse.Namespace
    dtype: Any
    peaks: Peaks

    def measure(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Return the figures of one program."""
        return measure(function, arguments, self.peaks, self.options.repetitions)


def inference(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time one series: filtering laws, backward kernels and marginals, amortised and exact."""
    rows = sorted(setting.options.rows)
    given = problem(Task("retrodict", "smoother", STATE, OBS, rows[-1]))
    model = retrodict_model(given, setting.dtype)
    head = given.ys[:1000]
    for n in rows:
        ys = jnp.asarray(given.ys[:n], setting.dtype)

        def exact(model: rd.StateSpaceModel, ys: Any) -> Any:
            chain = rd.kalman_smoother(model, ys, mask=True, parallel=True).chain
            return chain, chain.marginals(parallel=True)

        yield {"what": "kalman", "num_times": n, **setting.measure(exact, model, ys)}
        for name, (kind, parallel) in FAMILIES.items():
            if not parallel and n > setting.options.sequential_rows:
                continue
            family = kind(jax.random.key(0), STATE, OBS).prepare(model, head)
            arrays, rest = eqx.partition(family, eqx.is_array)

            def smooth(arrays: Any, ys: Any, rest: Any = rest, parallel: bool = parallel) -> Any:
                family = eqx.combine(arrays, rest)
                chain = family.infer(ys, mask=True, parallel=parallel)
                return chain, chain.marginals(parallel=parallel)

            timing = setting.measure(smooth, arrays, ys)
            yield {"what": name, "num_times": n, **timing, "rows_per_s": n / timing["best_s"]}
        chain = jax.jit(exact)(model, ys)[0]
        timing = setting.measure(lambda chain: chain.marginals(parallel=True), chain)
        yield {"what": "marginals alone", "num_times": n, **timing}


def training(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time a step of Adam on a batch, with one draw of a nonlinear emission term."""
    for name in FAMILIES:
        yield training_step(setting, name, setting.options.batch, STATE, OBS)


def batches(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time a step of Adam by the number of series."""
    for batch in setting.options.batches:
        for name in FAMILIES:
            yield training_step(setting, name, batch, STATE, OBS)


def dimensions(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time a step of Adam by the number of states, each of which is observed."""
    for dim in setting.options.dims:
        for name in FAMILIES:
            yield training_step(setting, name, setting.options.batch, dim, dim)


def training_step(setting: Setting, name: str, batch: int, d: int, m: int) -> dict[str, Any]:
    """Return the figures of one step of Adam."""
    n, (kind, parallel) = setting.options.length, FAMILIES[name]
    model = tanh_model(d, m, setting.dtype)
    keys = jax.random.split(jax.random.key(1), batch)
    ys = jax.jit(jax.vmap(lambda key: model.simulate(key, n)[1]))(keys)
    optimiser = optax.adam(1e-3)
    family = kind(jax.random.key(0), d, m).prepare(model, ys)
    parameters, fixed = eqx.partition(family, eqx.is_inexact_array)

    def step(parameters: Any, state: Any, ys: Any, key: Any) -> Any:
        def loss(parameters: Any) -> Any:
            family = eqx.combine(parameters, fixed)

            def one(y: Any, key: Any) -> Any:
                chain = family.infer(y, mask=True, parallel=parallel)
                estimator = rd.RaoBlackwellised(1)
                return rd.elbo(
                    model, chain, y, estimator=estimator, key=key, mask=True, parallel=parallel
                )

            return -jnp.mean(jax.vmap(one)(ys, jax.random.split(key, batch))) / n

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = optimiser.update(gradient, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    timing = setting.measure(step, parameters, optimiser.init(parameters), ys, jax.random.key(2))
    timing["rows_per_s"] = batch * n / timing["best_s"]
    return {"what": name, "state_dim": d, "obs_dim": m, "batch": batch, "num_times": n, **timing}


def start(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time from the call of `fit` to its first step, in a new process for each family."""
    options = setting.options
    for name in STARTED:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            call = pool.submit(first_step, name, options.batch, options.length, options.float32)
            figures = call.result()
        yield {"what": name, "batch": options.batch, "num_times": options.length, **figures}


def first_step(name: str, batch: int, n: int, float32: bool) -> dict[str, Any]:
    """Return the seconds to the first step, those spent in the compiler, and its programs.

    Programs that are compiled at the same time count with their full times.
    """
    jax.config.update("jax_enable_x64", not float32)
    kind, parallel = STARTED[name]
    model = tanh_model(STATE, OBS, jnp.float32 if float32 else jnp.float64)
    keys = jax.random.split(jax.random.key(1), batch)
    ys = jax.block_until_ready(jax.jit(jax.vmap(lambda key: model.simulate(key, n)[1]))(keys))
    family, compiled, steps = kind(jax.random.key(0), STATE, OBS), [], []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    began = time.perf_counter()
    rd.fit(
        jax.random.key(2),
        family,
        model,
        ys,
        num_steps=1,
        objective=rd.Objective(parallel=parallel),
        optimisation=rd.Optimisation(batch_size=batch, chunk_size=1),
        progress=lambda step, _: steps.append(time.perf_counter() - began),
    )
    return {"start_s": steps[0], "compile_s": sum(compiled), "num_programs": len(compiled)}


def sharded(setting: Setting) -> Iterator[dict[str, Any]]:
    """Time one series over all devices, with the memory per device and that of a single device."""
    mesh = rd.distributed.time_mesh()
    count, rows = mesh.size, max(setting.options.rows)
    n = rows - rows % count
    given = problem(Task("retrodict", "smoother", STATE, OBS, n))
    model = retrodict_model(given, setting.dtype)
    family = rd.ScanFamily(jax.random.key(0), STATE, OBS).prepare(model, given.ys[:1000])
    arrays, rest = eqx.partition(family, eqx.is_array)

    def exact(model: rd.StateSpaceModel, ys: Any, parallel: Any) -> rd.Gaussian:
        chain = rd.kalman_smoother(model, ys, mask=True, parallel=parallel).chain
        return chain.marginals(parallel=parallel)

    def amortised(arrays: Any, ys: Any, parallel: Any) -> rd.Gaussian:
        chain = eqx.combine(arrays, rest).infer(ys, mask=True, parallel=parallel)
        return chain.marginals(parallel=parallel)

    ys = jax.device_put(
        np.asarray(given.ys, setting.dtype), NamedSharding(mesh, PartitionSpec("time"))
    )
    alone = jax.ShapeDtypeStruct(ys.shape, ys.dtype)
    for name, smooth, parameters in (("kalman", exact, model), ("scan", amortised, arrays)):
        timing = setting.measure(partial(smooth, parallel=mesh), parameters, ys)
        whole = jax.jit(partial(smooth, parallel=True)).lower(parameters, alone).compile()
        over_devices = jax.jit(partial(smooth, parallel=mesh))(parameters, ys)
        by_row = jax.jit(partial(smooth, parallel=False))(parameters, jnp.asarray(np.asarray(ys)))
        errors = np.abs(np.asarray(over_devices.mean) - np.asarray(by_row.mean))
        yield {
            "what": name,
            "num_times": n,
            "devices": count,
            **timing,
            "one_device_alone": memory_of(whole)["program_bytes"],
            "rows_of_a_block": over_devices.mean.addressable_shards[0].data.shape[0],
            "worst_mean_in_sds": float(np.max(errors / np.asarray(by_row.std))),
        }


def remat(setting: Setting) -> Iterator[dict[str, Any]]:
    """Measure the gradient of the ELBO of one series, with and without rematerialisation."""
    for n in sorted(setting.options.rows):
        model = tanh_model(STATE, OBS, setting.dtype)
        ys = jax.jit(lambda key, n=n, model=model: model.simulate(key, n)[1])(jax.random.key(1))
        family = rd.RecurrentFamily(jax.random.key(0), STATE, OBS).prepare(model, ys)
        parameters, fixed = eqx.partition((family, model), eqx.is_inexact_array)
        for what, segment in (("kept", None), ("read again", rd.Objective(remat=True).segment(n))):
            objective = ElboLoss(fixed, rd.RaoBlackwellised(1), None, 0.0, segment=segment)

            def loss(parameters: Any, ys: Any, key: Any, objective: Any = objective) -> Any:
                batch = Minibatch(jax.vmap(Series)(ys[None], None, None, None), 1)
                return objective(parameters, batch, key)

            timing = setting.measure(jax.value_and_grad(loss), parameters, ys, jax.random.key(2))
            yield {"what": what, "num_times": n, "segment": segment, **timing}


PARTS: dict[str, Callable[[Setting], Iterator[dict[str, Any]]]] = {
    "inference": inference,
    "training": training,
    "start": start,
    "batches": batches,
    "dimensions": dimensions,
    "sharded": sharded,
    "remat": remat,
}


def main() -> None:
    options = _parse()
    # Processes of the part `start` share the device with this one.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    dtype = jnp.float32 if options.float32 else jnp.float64
    jax.config.update("jax_enable_x64", not options.float32)
    if options.devices is not None:
        jax.config.update("jax_num_cpu_devices", options.devices)
    peaks = measured_peaks(dtype)
    peaks = Peaks(options.peak_flops or peaks.flops_per_s, options.peak_bytes or peaks.bytes_per_s)
    report: dict[str, Any] = {
        "machine": {
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "num_devices": jax.device_count(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "jax": jax.__version__,
            "precision": jnp.dtype(dtype).name,
            **peaks._asdict(),
        },
        "runs": [],
    }
    print(json.dumps(report["machine"]), flush=True)
    for name in options.parts or ("inference", "training"):
        print(f"== {name}: {PARTS[name].__doc__}", flush=True)
        for figures in PARTS[name](Setting(options, dtype, peaks)):
            run = {"part": name, "state_dim": STATE, "obs_dim": OBS, **figures}
            report["runs"].append(run)
            print(json.dumps(run), flush=True)
            if options.out is not None:
                _write(options.out, report)


def _write(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(temporary, path)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time long series and large batches.")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[10**k for k in range(3, 7)], help="of one series"
    )
    parser.add_argument(
        "--sequential-rows", type=int, default=10_000, help="the longest series read row by row"
    )
    parser.add_argument("--batch", type=int, default=1024, help="series of a training step")
    parser.add_argument("--batches", nargs="+", type=int, default=[16, 64, 256, 1024])
    parser.add_argument("--dims", nargs="+", type=int, default=[1, 3, 10], help="of the state")
    parser.add_argument("--length", type=int, default=256, help="rows of each of them")
    parser.add_argument("--devices", type=int, help="how many a CPU simulates")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--peak-flops", type=float, help="operations a second, instead of measured")
    parser.add_argument("--peak-bytes", type=float, help="bytes a second, instead of measured")
    parser.add_argument("--out", type=Path, help="a JSON file, written after every figure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
