"""Program of `test_time_sharding.py`: compare eight simulated devices with one, and print JSON.

Differences are from the sequential form. Memory is that of one of eight devices, as a share of the
memory of the same program on one device.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from linear_models import random_model

import retrodict as rd
from retrodict.distributed.time_sharding import Parallel

LONG = 8192


def problem(n: int, length: int) -> tuple[rd.StateSpaceModel, rd.ScanFamily, Any]:
    """Return a model, a family, and a series with a gap and padding."""
    model = random_model(np.random.default_rng(0), 2, 2)
    ys = np.array(model.simulate(jax.random.key(1), n)[1])
    family = rd.ScanFamily(jax.random.key(0), 2, 2, hidden=4, depth=2, width=4)
    ys[3], ys[7, 0], ys[length:] = np.nan, np.nan, np.nan
    return model, family.prepare(model, ys), jnp.asarray(ys)


def results_of(model: rd.StateSpaceModel, family: rd.ScanFamily, length: int) -> Callable[..., Any]:
    """Return a function of exact and amortised marginals, their bounds, and gradients of both."""

    def run(bias: Any, gate: Any, ys: Any, parallel: Parallel) -> dict[str, Any]:
        def exact(bias: Any) -> Any:
            moved = eqx.tree_at(lambda m: m.transition.bias, model, bias)
            posterior = rd.kalman_smoother(moved, ys, length=length, parallel=parallel)
            return posterior.log_evidence, posterior.chain.marginals(parallel=parallel)

        def amortised(gate: Any) -> Any:
            moved = eqx.tree_at(lambda f: f.layers[0].gate.weight, family, gate)
            chain = moved.infer(ys, length=length, parallel=parallel)
            bound = rd.elbo(model, chain, ys, parallel=parallel)
            path = chain.sample(jax.random.key(2), 2, parallel=parallel)
            return bound, (chain.marginals(parallel=parallel), path)

        return {
            "exact": jax.value_and_grad(exact, has_aux=True)(bias),
            "amortised": jax.value_and_grad(amortised, has_aux=True)(gate),
        }

    return run


def difference(n: int, length: int) -> float:
    """Return the largest difference between one device and eight, for n rows."""
    model, family, ys = problem(n, length)
    run = jax.jit(results_of(model, family, length), static_argnums=3)
    arguments = (model.transition.bias, family.layers[0].gate.weight, ys)
    leaves = [
        jax.tree.leaves(run(*arguments, parallel))
        for parallel in (False, rd.distributed.time_mesh())
    ]
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*leaves, strict=True))


def memory() -> dict[str, float]:
    """Return the share of memory of one of eight devices, and the rows of its block."""
    model, family, ys = problem(LONG, LONG)
    mesh = rd.distributed.time_mesh()

    def exact(ys: Any, parallel: Parallel) -> Any:
        result = rd.kalman_smoother(model, ys, mask=True, parallel=parallel)
        return result.chain.marginals(parallel=parallel).mean

    def amortised(ys: Any, parallel: Parallel) -> Any:
        return family.infer(ys, mask=True, parallel=parallel).marginals(parallel=parallel).mean

    result = {}
    for name, smooth in {"exact": exact, "amortised": amortised}.items():
        programs = [jax.jit(smooth, static_argnums=1).lower(ys, p).compile() for p in (True, mesh)]
        one, eight = (_temporary_bytes(program) for program in programs)
        means = programs[1](jax.device_put(ys, programs[1].input_shardings[0][0]))
        result[name] = eight / one
        result[f"{name}, rows of a block"] = means.addressable_shards[0].data.shape[0]
    return result


def _temporary_bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def main() -> None:
    assert jax.device_count() == 8
    jax.config.update("jax_enable_x64", True)
    print(
        json.dumps(
            {
                "even": difference(40, 33),
                "uneven": difference(37, 37),
                "memory": memory(),
            }
        )
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
