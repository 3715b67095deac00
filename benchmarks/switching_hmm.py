"""Forward–backward of a hidden Markov model, compared with dynamax in one process.

Both libraries compute the evidence, the filtering and the smoothing probabilities of the same
series under the same model, in turns, so that other load on the machine affects both. A ratio
below 1 means that retrodict is faster. Times are the best of all rounds.

    .venv-bench/bin/python benchmarks/switching_hmm.py --out benchmarks/results/switching-hmm.json
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from measure import time_calls

CASES = (
    # regimes, rows, series
    (3, 500, 1),
    (3, 500, 64),
    (3, 5_000, 16),
    (8, 500, 64),
    (20, 500, 64),
)
MOST_IN_PARALLEL = 3  # regimes: the associative scan multiplies matrices of K³ terms
ROUNDS, SECONDS = 8, 0.3

Call = Callable[[], Any]


def problem(count: int, num_times: int, num_series: int) -> tuple[rd.switching.SwitchingModel, Any]:
    """Return a model with sticky regimes and Gaussian emissions, and series drawn from it."""
    sticky = np.full((count, count), 0.1 / count) + 0.9 * np.eye(count)
    regimes = rd.switching.Regimes.from_probabilities(np.full(count, 1 / count), sticky)
    means = np.linspace(-2.0, 2.0, count)
    model = rd.switching.SwitchingModel(
        regimes, emission=[rd.Gaussian(jnp.full(1, mean), jnp.eye(1)) for mean in means]
    )
    keys = jax.random.split(jax.random.key(0), num_series)
    return model, jax.vmap(lambda key: model.simulate(key, num_times)[2])(keys)


def with_retrodict(model: rd.switching.SwitchingModel, batch: Any, parallel: bool) -> Call:
    """Return a call for a batch."""

    def in_turn(model: rd.switching.SwitchingModel, ys: Any) -> tuple[Any, ...]:
        # mask=True states that no entry is missing, as dynamax assumes.
        result = rd.switching.forward_backward_batch(model, ys, mask=True)
        return result.log_evidence, result.filtered, result.smoothed

    def one(model: rd.switching.SwitchingModel, ys: Any) -> tuple[Any, ...]:
        posterior = rd.switching.forward_backward(model, ys, parallel=True, mask=True)
        smoothed = posterior.chain.marginals(parallel=True).probabilities
        return posterior.log_evidence, posterior.chain.filtered, smoothed

    compiled = jax.jit(jax.vmap(one, in_axes=(None, 0)) if parallel else in_turn)
    return lambda: jax.block_until_ready(compiled(model, batch))


def with_dynamax(model: rd.switching.SwitchingModel, batch: Any, parallel: bool) -> Call:
    """Return a call of the smoother of dynamax for a batch."""
    from dynamax.hidden_markov_model import inference, parallel_inference

    smoother = (parallel_inference if parallel else inference).hmm_smoother
    means = jnp.concatenate([law.mean for law in model.emission])
    parameters = jnp.exp(model.regimes.log_initial()), jnp.exp(model.regimes.log_transition())

    def one(initial: Any, transition: Any, means: Any, ys: Any) -> tuple[Any, ...]:
        log_likes = -0.5 * ((ys - means[None]) ** 2 + np.log(2 * np.pi))
        result = smoother(initial, transition, log_likes)
        return result.marginal_loglik, result.filtered_probs, result.smoothed_probs

    compiled = jax.jit(jax.vmap(one, in_axes=(None, None, None, 0)))
    return lambda: jax.block_until_ready(compiled(*parameters, means, batch))


def compare(case: tuple[int, int, int], parallel: bool) -> dict[str, Any]:
    """Return the times of both libraries, and the largest difference of their answers."""
    model, batch = problem(*case)
    ours, peer = with_retrodict(model, batch, parallel), with_dynamax(model, batch, parallel)
    # Evidence is compared relative to its size, probabilities as they are.
    (evidence, *laws), (peer_evidence, *peer_laws) = ours(), peer()
    differences = [np.max(np.abs(evidence / peer_evidence - 1))]
    differences += [np.max(np.abs(a - b)) for a, b in zip(laws, peer_laws, strict=True)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, seconds in zip((ours, peer), times, strict=True):
            seconds += time_calls(call, 30, SECONDS)
    best = [1e3 * min(seconds) for seconds in times]
    return {
        "regimes": case[0],
        "rows": case[1],
        "series": case[2],
        "parallel": parallel,
        "retrodict_ms": round(best[0], 3),
        "dynamax_ms": round(best[1], 3),
        "ratio": round(best[0] / best[1], 2),
        "median_ratio": round(statistics.median(times[0]) / statistics.median(times[1]), 2),
        "difference": float(f"{max(differences):.1e}"),
    }


def main() -> None:
    """Print one line per case, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the number of cases to run")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for case in CASES[: arguments.cases]:
        for parallel in (False, True) if case[0] <= MOST_IN_PARALLEL else (False,):
            rows.append(compare(case, parallel))
            print(json.dumps(rows[-1]), flush=True)
    if max(row["difference"] for row in rows) > 1e-6:
        sys.exit("The libraries disagree.")
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"jax": jax.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
