"""Compare the smoother in float32 with float64, over sixteen orders of magnitude of R/Q.

Both use the same numbers: parameters and series are rounded to float32 first. Prints, for each
model and ratio, the largest error of a smoothed mean in posterior standard deviations, the float32
rounding of a mean of that size, and the largest relative error of a standard deviation.

    python benchmarks/float32.py [--num-times 100000] [--parallel]
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd
from report import Table

jax.config.update("jax_enable_x64", True)


def models() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return transition weight, transition noise and design by name, for three states."""
    angle = 0.1
    turn = np.eye(3)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    stable = 0.95 * basis @ turn @ basis.T
    rng = np.random.default_rng(2)
    trend = np.array([[1.0, 1.0, 0.0], [0.0, 0.98, 0.1], [0.0, 0.0, 0.9]])
    companion = np.array([[0.5, 0.2, 0.1], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    first = np.array([[1.0, 0.0, 0.0]])
    return {
        "stable, m=4": (stable, np.eye(3), rng.normal(size=(4, 3))),
        "stable, m=1": (stable, np.eye(3), rng.normal(size=(1, 3))),
        "random walks, m=2": (np.eye(3), np.tril(rng.normal(size=(3, 3))), rng.normal(size=(2, 3))),
        "damped trend, m=1": (trend, np.diag([0.1, 0.1, 1.0]), first),
        "autoregression, singular noise": (companion, np.diag([1.0, 0.0, 0.0]), first),
    }


def simulate(weight, noise, design, error, num_times: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    x, xs = np.zeros(3), np.empty((num_times, 3))
    for k, shock in enumerate(rng.normal(size=(num_times, 3)) @ noise.T):
        xs[k] = x = weight @ x + shock
    return xs @ design.T + error * rng.normal(size=(num_times, len(design)))


@eqx.filter_jit
def smooth(weight, noise, design, error, prior, ys, parallel):
    zeros = jnp.zeros(3, ys.dtype)
    model = rd.StateSpaceModel(
        rd.Gaussian(zeros, prior),
        rd.LinearGaussianKernel(weight, zeros, noise),
        rd.LinearGaussianKernel(design, jnp.zeros(len(design), ys.dtype), error),
    )
    exact = rd.kalman_smoother(model, ys, mask=True, parallel=parallel)
    marginals = exact.chain.marginals(parallel=parallel)
    return marginals.mean, marginals.scale_tril


def main() -> None:
    parser = argparse.ArgumentParser(description="The smoother in float32 against float64.")
    parser.add_argument("--num-times", type=int, default=100_000)
    parser.add_argument("--parallel", action="store_true")
    options = parser.parse_args()
    rows = []
    for ratio in (1e-8, 1e-4, 1.0, 1e4, 1e8):
        error, q = min(1.0, ratio**0.5), min(1.0, ratio**-0.5)
        for name, (weight, noise, design) in models().items():
            ys = simulate(weight, q * noise, design, error, options.num_times)
            spread, prior_scale = error * np.eye(len(design)), max(q, error) * np.eye(3)
            arrays = (weight, q * noise, design, spread, prior_scale, ys)
            answers = []
            for dtype in (jnp.float32, jnp.float64):
                w, q_scale, h, r_scale, prior, y = (
                    jnp.asarray(np.float32(array), dtype) for array in arrays
                )
                result = smooth(w, q_scale, h, r_scale, prior, y, options.parallel)
                answers.append([np.float64(a) for a in result])
            (mean, scale), (exact, exact_scale) = answers
            std, exact_std = np.linalg.norm(scale, axis=-1), np.linalg.norm(exact_scale, axis=-1)
            rounding = np.finfo(np.float32).eps / 2 * np.abs(exact).max() / exact_std.min()
            pivots = np.diagonal(scale, axis1=1, axis2=2).min()
            rows.append(
                [
                    f"{ratio:.0e}  {name}",
                    f"{np.max(np.abs(mean - exact) / exact_std):.1e}",
                    f"{rounding:.1e}",
                    f"{np.max(np.abs(std / exact_std - 1)):.1e}",
                    f"{pivots:.1e}",
                ]
            )
            print(".", end="", flush=True)
    form = "parallel" if options.parallel else "sequential"
    Table(
        f"float32 against float64, {form}, n={options.num_times:,}, d=3",
        ["R/Q, model", "mean, in sd", "rounding, in sd", "sd, relative", "least pivot"],
        rows,
    ).show()


if __name__ == "__main__":
    main()
