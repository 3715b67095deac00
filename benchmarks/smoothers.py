"""Particle smoothers and their peers.

    python benchmarks/smoothers.py [--float32] [--rows 500] --out FILE

The task is the same for all: the model of section 5.2 (d = 1) or a linear transition observed
through a network (d = 10), a bootstrap filter with systematic resampling below half of the
particles, as many paths as particles, 1,000, and two Metropolis moves. By itself, this script
times 10,000 particles on the default device of JAX.
"""

import argparse
import json
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from accuracy import NONLINEAR, network_model, simulate
from measure import Prepared, Task, prepared
from retrodict.experiments import published

NUM_PARTICLES, NUM_MOVES = 1000, 2
SAMPLERS = {
    "exact": rd.particles.ExactBackward(),
    "rejection": rd.particles.RejectionBackward(),
    "mcmc": rd.particles.MCMCBackward(NUM_MOVES),
}


def prepare(task: Task) -> Prepared:
    """Return the call of a smoother; its option is the sampler, "filter" for none."""
    call = LIBRARIES[task.library](task.option, task.state_dim, task.num_times)
    return prepared(call, compiles=task.library != "particles")


def given(dim: int, num_times: int) -> tuple[Any, Any]:
    """Return the model and one series."""
    model = NONLINEAR if dim == 1 else network_model(dim)
    return model, simulate(model, 0, 1, num_times)[1][0]


def with_retrodict(sampler: str, dim: int, num_times: int) -> Callable[[], Any]:
    model, ys = given(dim, num_times)

    def run(key: Any, ys: Any) -> Any:
        if sampler == "filter":
            return rd.particle_filter(key, model, ys, NUM_PARTICLES, mask=True).mean
        return _paths(model, SAMPLERS[sampler], NUM_PARTICLES, key, ys)

    compiled = eqx.filter_jit(run)
    return lambda: jax.block_until_ready(compiled(jax.random.key(0), ys))


def _paths(model: Any, sampler: Any, num_particles: int, key: Any, ys: Any) -> Any:
    return rd.ffbsi(key, model, ys, num_particles, backward=sampler, mask=True).samples


def with_cuthbert(sampler: str, dim: int, num_times: int) -> Callable[[], Any]:
    """Return cuthbert's smoother; its first state precedes the first row, one more step."""
    from cuthbert import filter as run_filter
    from cuthbert import smoother as run_smoother
    from cuthbert.smc import backward_sampler, particle_filter
    from cuthbertlib.resampling import adaptive, systematic
    from cuthbertlib.smc.smoothing import exact_sampling, mcmc

    model, ys = given(dim, num_times)
    resampling = adaptive.ess_decorator(systematic.resampling, 0.5)
    draw = (
        exact_sampling.simulate if sampler == "exact" else partial(mcmc.simulate, n_steps=NUM_MOVES)
    )
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


def with_particles(sampler: str, dim: int, num_times: int) -> Callable[[], Any]:
    """Return the smoother of particles, with distributions and networks in NumPy."""
    import particles
    from particles import distributions as laws
    from particles import state_space_models as ssm

    model, ys = given(dim, num_times)
    weight = np.asarray(model.transition.weight)
    bias = np.asarray(model.transition.bias)
    move_std = np.diag(np.asarray(model.transition.scale_tril))
    first_std = np.diag(np.asarray(model.prior.scale_tril))
    error = np.asarray(model.emission.scale_tril.std)
    if dim == 1:
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
            return machine.hist.backward_sampling_mcmc(NUM_PARTICLES, nsteps=NUM_MOVES)
        return machine.logLt

    return run


LIBRARIES = {"retrodict": with_retrodict, "cuthbert": with_cuthbert, "particles": with_particles}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times FFBSi with 10,000 particles and paths.")
    parser.add_argument("--float32", action="store_true", help="instead of float64")
    parser.add_argument("--rows", type=int, default=500, help="length of the series")
    parser.add_argument("--out", type=Path, required=True, help="where to write the figures")
    arguments = parser.parse_args()
    dtype = jnp.float32 if arguments.float32 else jnp.float64
    model, ys = jax.tree.map(
        lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf,
        given(1, arguments.rows),
    )
    figures: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "dtype": str(ys.dtype),
        "rows": arguments.rows,
    }
    for name in ("exact", "mcmc"):
        run = eqx.filter_jit(partial(_paths, model, SAMPLERS[name], 10_000))
        ready = prepared(lambda run=run: jax.block_until_ready(run(jax.random.key(0), ys)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        figures[name] = {"s": ready.second_s, "first_s": ready.first_s, "peak_gib": peak}
        print(f"{name}: {figures[name]}", flush=True)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
