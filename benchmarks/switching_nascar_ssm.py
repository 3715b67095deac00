"""Fit the NASCAR series by the package ssm, in its own environment.

    PYTHON_WITH_SSM benchmarks/switching_nascar_ssm.py DATA.npz ANSWER.npz [--iterations 100]

The settings are those of the package's notebook on recurrent switching: Laplace EM with a
structured mean-field posterior. `switching_nascar.py` writes the data and compares the answer.
"""

import argparse
import time
from pathlib import Path

import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--iterations", type=int, default=100)
    arguments = parser.parse_args()
    import ssm  # in another environment  # pyright: ignore

    np.random.seed(12345)  # noqa: NPY002, ssm draws from the global generator
    ys = np.load(arguments.data)["ys"]
    model = ssm.SLDS(
        ys.shape[1],
        4,
        2,
        transitions="recurrent_only",
        dynamics="diagonal_gaussian",
        emissions="gaussian_orthog",
        single_subspace=True,
    )
    began = time.perf_counter()
    model.initialize(ys)
    elbos, posterior = model.fit(
        ys,
        method="laplace_em",
        variational_posterior="structured_meanfield",
        initialize=False,
        num_iters=arguments.iterations,
        alpha=0.0,
    )
    seconds = time.perf_counter() - began
    xs = posterior.mean_continuous_states[0]
    zs = model.most_likely_states(xs, ys)
    np.savez(
        arguments.out,
        xs=xs,
        zs=zs,
        seconds=seconds,
        iterations=arguments.iterations,
        elbos=np.asarray(elbos),
    )


if __name__ == "__main__":
    main()
