"""Compare the extended and the unscented smoother with those of dynamax, on a pendulum.

    python benchmarks/linearised.py [--out FILE]

Both libraries linearise the same model at the same points, so that they must agree up to the
constant 1e-9 that dynamax adds to the diagonal of matrices. Then they are timed in turn.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dynamax.nonlinear_gaussian_ssm import (
    ParamsNLGSSM,
    UKFHyperParams,
    extended_kalman_smoother,
    unscented_kalman_smoother,
)

import retrodict as rd

jax.config.update("jax_enable_x64", True)

RESULTS = Path(__file__).with_name("results") / "linearised-cpu.json"
NUM_TIMES, STEP = 500, 0.05
ALPHA, BETA, KAPPA = 1.2, 2.0, 1.0


def swing(x: jax.Array) -> jax.Array:
    return jnp.stack([x[0] + STEP * x[1], x[1] - 9.81 * STEP * jnp.sin(x[0])])


def observe(x: jax.Array) -> jax.Array:
    return jnp.sin(x[:1])


NOISE = jnp.array([[0.02, 0.0], [0.01, 0.1]])
PENDULUM = rd.StateSpaceModel(
    rd.Gaussian(jnp.array([0.8, 0.0]), 0.3 * jnp.eye(2)),
    rd.NonlinearGaussianKernel(swing, NOISE),
    rd.NonlinearGaussianKernel(observe, 0.2 * jnp.eye(1)),
)
PARAMETERS = ParamsNLGSSM(
    initial_mean=jnp.array([0.8, 0.0]),
    initial_covariance=0.09 * jnp.eye(2),
    dynamics_function=swing,
    dynamics_covariance=NOISE @ NOISE.T,
    emission_function=observe,
    emission_covariance=0.04 * jnp.eye(1),
)


def milliseconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(30):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares linearised smoothers with dynamax's.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write")
    arguments = parser.parse_args()
    _, ys = PENDULUM.simulate(jax.random.key(0), NUM_TIMES)
    # The sigma points of d = 2 with these parameters, in either library's terms.
    rule = rd.Unscented(ALPHA, BETA, KAPPA)
    theirs = UKFHyperParams(ALPHA, BETA, KAPPA)
    pairs = {
        "extended": (
            jax.jit(lambda ys: rd.extended_smoother(PENDULUM, ys, mask=True)),
            jax.jit(lambda ys: extended_kalman_smoother(PARAMETERS, ys)),
        ),
        "unscented": (
            jax.jit(lambda ys: rd.unscented_smoother(PENDULUM, ys, rule=rule, mask=True)),
            jax.jit(lambda ys: unscented_kalman_smoother(PARAMETERS, ys, theirs)),
        ),
    }
    results = {}
    for name, (ours, peer) in pairs.items():
        posterior, expected = ours(ys), peer(ys)
        laws = posterior.chain.marginals()
        differences = {
            "mean": np.max(np.abs(laws.mean - expected.smoothed_means)),
            "covariance": np.max(np.abs(laws.covariance - expected.smoothed_covariances)),
            "log-evidence": np.abs(posterior.log_evidence - expected.marginal_loglik),
        }
        timed = {
            "ms": milliseconds(lambda run=ours: run(ys).chain.marginals().mean),
            "dynamax_ms": milliseconds(lambda run=peer: run(ys).smoothed_means),
        }
        if max(differences.values()) > 1e-5:
            raise AssertionError(f"{name} smoothers disagree: {differences}")
        results[name] = {k: float(v) for k, v in {**differences, **timed}.items()}
        print(
            f"{name}, pendulum, n={NUM_TIMES}, float64: "
            + ", ".join(f"{k} differs by {v:.1e}" for k, v in differences.items())
            + f"; {timed['ms']:.2f} ms, dynamax {timed['dynamax_ms']:.2f} ms"
        )
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
