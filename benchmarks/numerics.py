"""Measure variants of small-matrix code: optimisation barriers, and unrolled loops or LAPACK.

Prints, for the filter and smoother at n = 2000 in float64, run and compile times by dimension with
unrolled loops and with LAPACK, and without barriers. The threshold
`retrodict._numerics.linalg.UNROLLED` follows from it.

    python benchmarks/numerics.py [--dims 2 3 4 5 6 8]
"""

import argparse
import multiprocessing
import time

from report import Table

TIMEOUT = 180.0
SPELLINGS = ("unrolled", "unrolled, no fences", "LAPACK")


def measure(spelling: str, dim: int, answers: multiprocessing.Queue) -> None:
    """Time one variant in a separate process, so that nothing is cached."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import numpy as np

    import retrodict as rd
    from retrodict._numerics import linalg as _linalg

    jax.config.update("jax_enable_x64", True)
    _linalg.UNROLLED = 0 if spelling == "LAPACK" else 64
    if spelling == "unrolled, no fences":
        _linalg.fence = lambda tree: tree
    rng = np.random.default_rng(0)
    weight = 0.9 * np.linalg.qr(rng.normal(size=(dim, dim)))[0]
    eye, zeros = jnp.eye(dim), jnp.zeros(dim)
    model = rd.StateSpaceModel(
        rd.Gaussian(zeros, eye),
        rd.LinearGaussianKernel(jnp.asarray(weight), zeros, 0.3 * eye),
        rd.LinearGaussianKernel(jnp.asarray(rng.normal(size=(dim, dim))), zeros, 0.5 * eye),
    )
    ys = jnp.asarray(rng.normal(size=(2000, dim)))

    @eqx.filter_jit
    def smooth(model, ys):
        exact = rd.kalman_smoother(model, ys, mask=True)
        return exact.log_evidence, exact.chain.marginals().mean

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(smooth(model, ys))
        return time.perf_counter() - start

    compile_s = timed()
    answers.put((compile_s, min(timed() for _ in range(20))))


def run(spelling: str, dim: int) -> tuple[str, str]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    worker = context.Process(target=measure, args=(spelling, dim, answers))
    worker.start()
    worker.join(TIMEOUT)
    if worker.is_alive():
        worker.kill()
        return f"> {TIMEOUT:.0f} s", "–"
    if worker.exitcode != 0:
        return "failed", "–"
    compile_s, run_s = answers.get()
    return f"{compile_s:.1f} s", f"{1e3 * run_s:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="What the spelling of code costs.")
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--spellings", nargs="+", default=SPELLINGS, choices=SPELLINGS)
    options = parser.parse_args()
    spellings = options.spellings
    rows = []
    for dim in options.dims:
        cells = [f"{dim}"]
        for spelling in spellings:
            cells += run(spelling, dim)
            print(".", end="", flush=True)
        rows.append(cells)
    columns = ["d = m", *(f"{s}: {w}" for s in spellings for w in ("first call", "run"))]
    Table("filter and smoother, n=2000, float64", columns, rows).show()


if __name__ == "__main__":
    main()
