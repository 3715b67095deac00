"""Test the bounds for finite state spaces on thousands of random problems.

    python benchmarks/bounds_finite.py --instances 10000 --targeted 3000 --out results.json

Problems have 2 to 50 states and 2 to 60 times, five kinds of approximation and six kinds of
functionals. A bound is violated if it is below the absolute error by more than rounding. The
targeted problems mix strongly and have one defect: there Proposition 3.1 fails as printed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from retrodict.bounds.finite import RIGOROUS, FiniteProblem, finite_bounds

jax.config.update("jax_enable_x64", True)

PERTURBATIONS = ("misspecified", "random", "one defect", "noisy", "nearly exact")
FUNCTIONALS = ("random", "adversarial", "state", "one time", "indicator", "constant sign")
CHECKED = (*RIGOROUS, "printed_proposition")
COLUMNS = (
    ("S1", "s1"),
    ("S2", "s2"),
    ("S2 phi", "s2_phi"),
    ("S2 q", "s2_q"),
    ("S3", "s3"),
    ("Thm 2 (birkhoff)", "classical_birkhoff"),
    ("Thm 2 (rho)", "classical"),
    ("Thm 3 exact", "elbo_gap"),
    ("Thm 3 theta", "elbo_gap_birkhoff"),
)
RATIOS = ((1.0, 2.0), (2.0, 10.0), (10.0, 100.0), (100.0, np.inf))
ENTRIES = 1_000_000
"""How many numbers one array of a batch of problems may hold."""


class Model(NamedTuple):
    """Priors, transitions and likelihoods of a batch of models."""

    prior: np.ndarray
    transitions: np.ndarray
    likelihoods: np.ndarray


def normalise(array: np.ndarray) -> np.ndarray:
    return array / array.sum(axis=-1, keepdims=True)


def logarithmic(rng: np.random.Generator, low: float, high: float, size: int) -> np.ndarray:
    return np.exp(rng.uniform(np.log(low), np.log(high), size))


def noise(rng: np.random.Generator, scale: np.ndarray, *shape: int) -> np.ndarray:
    """Draw positive factors whose logarithms have these standard deviations, one per problem."""
    widths = scale.reshape(-1, *(1 for _ in shape))
    return np.exp(widths * rng.standard_normal((len(scale), *shape)))


def random_model(rng: np.random.Generator, scale: np.ndarray, n: int, size: int) -> Model:
    return Model(
        normalise(noise(rng, scale, size)),
        normalise(noise(rng, scale, n - 1, size, size)),
        noise(rng, scale, n, size),
    )


def filter_and_reverse(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return filtering laws (batch, n, S), and backward kernels [batch, k, y, x]."""
    law = normalise(model.prior * model.likelihoods[:, 0])
    laws, kernels = [law], []
    for k in range(model.transitions.shape[1]):
        joint = law[:, :, None] * model.transitions[:, k] * model.likelihoods[:, k + 1, None, :]
        kernels.append(normalise(joint.swapaxes(1, 2)))
        law = normalise(joint.sum(axis=1))
        laws.append(law)
    return np.stack(laws, axis=1), np.stack(kernels, axis=1)


def pairs(terminal: np.ndarray, kernels: np.ndarray) -> np.ndarray:
    """Return laws of neighbours [batch, k, x, y] under backward chains."""
    law, joints = terminal, []
    for k in reversed(range(kernels.shape[1])):
        joint = law[:, None, :] * kernels[:, k].swapaxes(1, 2)
        joints.append(joint)
        law = joint.sum(axis=2)
    return np.stack(joints[::-1], axis=1)


def approximate(
    rng: np.random.Generator, kind: str, model: Model, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return auxiliary laws and backward kernels with one of five kinds of errors."""
    batch, n, size = model.likelihoods.shape
    width = logarithmic(rng, 0.01, 0.5, batch)
    laws, kernels = filter_and_reverse(model)
    if kind == "misspecified":
        wrong = Model(
            normalise(model.prior * noise(rng, width, size)),
            normalise(model.transitions * noise(rng, width, n - 1, size, size)),
            model.likelihoods * noise(rng, width, n, size),
        )
        return filter_and_reverse(wrong)
    if kind == "random":
        laws = normalise(noise(rng, scale, n, size))
        return laws, normalise(noise(rng, scale, n - 1, size, size))
    if kind == "one defect":
        where = (np.arange(batch), rng.integers(n - 1, size=batch))
        kernels[where] = normalise(kernels[where] * noise(rng, width, size, size))
        return laws, kernels
    width = width if kind == "noisy" else logarithmic(rng, 1e-7, 1e-4, batch)
    return (
        normalise(laws * noise(rng, width, n, size)),
        normalise(kernels * noise(rng, width, n - 1, size, size)),
    )


def functional(rng: np.random.Generator, kind: str, difference: np.ndarray) -> np.ndarray:
    """Return increments h_k(x, y) of one of six kinds; for the adversarial one, errors add up."""
    shape = difference.shape
    if kind == "adversarial":
        return np.sign(difference)
    if kind == "state":
        return np.broadcast_to(rng.standard_normal((*shape[:3], 1)), shape)
    if kind == "indicator":
        chosen = rng.integers(shape[2], size=shape[:2])
        return np.broadcast_to(np.eye(shape[2])[chosen][..., None], shape)
    values = rng.standard_normal(shape)
    if kind == "one time":
        chosen = rng.integers(shape[1], size=shape[0])
        return values * np.eye(shape[1])[chosen][:, :, None, None]
    return np.abs(values) if kind == "constant sign" else values


def generic(
    rng: np.random.Generator, kinds: tuple[str, str], batch: int, n: int, size: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draw problems with one kind of approximation and functional, and their exact errors."""
    scale = logarithmic(rng, 0.01, 3.0, batch)
    model = random_model(rng, scale, n, size)
    laws, kernels = approximate(rng, kinds[0], model, scale)
    exact_laws, exact_kernels = filter_and_reverse(model)
    difference = pairs(laws[:, -1], kernels) - pairs(exact_laws[:, -1], exact_kernels)
    h = functional(rng, kinds[1], difference)
    return problem(model, laws, kernels, h), (difference * h).sum(axis=(1, 2, 3))


def targeted(
    rng: np.random.Generator, batch: int, n: int, size: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draw problems with strong mixing and one tilted backward kernel, into x_j."""
    scale = logarithmic(rng, 0.003, 0.03, batch)
    model = random_model(rng, scale, n, size)
    laws, kernels = filter_and_reverse(model)
    truth = pairs(laws[:, -1], kernels)
    where = (np.arange(batch), rng.integers(1, n - 1, size=batch))
    tilt = noise(rng, logarithmic(rng, 0.01, 0.2, batch), size)
    kernels = kernels.copy()
    kernels[where] = normalise(kernels[where] * tilt[:, None, :])
    difference = pairs(laws[:, -1], kernels) - truth
    sign = np.sign(difference[where].sum(axis=2))
    h = np.zeros_like(difference)
    h[where[0], where[1] - 1] = sign[:, None, :]
    return problem(model, laws, kernels, h), (difference * h).sum(axis=(1, 2, 3))


def problem(
    model: Model, laws: np.ndarray, kernels: np.ndarray, h: np.ndarray
) -> dict[str, np.ndarray]:
    return {
        "prior": model.prior,
        "transitions": model.transitions,
        "likelihoods": model.likelihoods,
        "kernels": kernels,
        "filters": laws,
        "functional": h,
    }


@jax.jit
def evaluate(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def one(fields: dict[str, jax.Array]) -> dict[str, jax.Array]:
        bounds = finite_bounds(FiniteProblem.from_model(**fields))
        values = {name: getattr(bounds, name) for name in ("error", "identity", *CHECKED)}
        values["ratio"] = bounds.quantities.sigma_plus / bounds.quantities.sigma_minus
        return values

    return jax.vmap(one)(arrays)


def run_generic(seed: int, instances: int, num_shapes: int) -> dict[str, np.ndarray]:
    """Run all kinds of problems in turn, with few shapes, since each is compiled."""
    rng = np.random.default_rng(seed)
    # The corners first, so that the smallest and the largest are always among them.
    shapes = [(2, 2), (60, 50), (60, 2), (2, 50)][:num_shapes]
    while len(shapes) < num_shapes:
        shapes.append((int(rng.integers(2, 61)), int(rng.integers(2, 51))))
    shares = np.diff(np.linspace(0, instances, num_shapes + 1).astype(int))
    kinds = [(p, f) for p in PERTURBATIONS for f in FUNCTIONALS]
    rows: list[dict[str, np.ndarray]] = []
    turn, done, start = 0, 0, time.perf_counter()
    for (n, size), share in zip(shapes, shares, strict=True):
        batch = int(min(16, max(1, ENTRIES // (n * size**2))))
        left = int(share)
        while left > 0:
            kind = kinds[turn % len(kinds)]
            turn += 1
            arrays, error = generic(rng, kind, batch, n, size)
            values = {name: np.asarray(value) for name, value in evaluate(arrays).items()}
            values["oracle"] = error
            values["adversarial"] = np.full(batch, kind[1] == "adversarial")
            rows.append({name: value[:left] for name, value in values.items()})
            left -= batch
        done += int(share)
        elapsed = time.perf_counter() - start
        print(f"  n = {n:2d}, S = {size:2d}: {done} of {instances}, {elapsed:.0f} s", flush=True)
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def run_targeted(seed: int, instances: int, num_shapes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shares = np.diff(np.linspace(0, instances, num_shapes + 1).astype(int))
    rows: list[dict[str, np.ndarray]] = []
    for share in shares[shares > 0]:
        n, size = int(rng.integers(3, 21)), int(rng.integers(2, 11))
        arrays, error = targeted(rng, int(share), n, size)
        values = {name: np.asarray(value) for name, value in evaluate(arrays).items()}
        rows.append({**values, "oracle": error})
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def violated(values: dict[str, np.ndarray], name: str) -> np.ndarray:
    error = np.abs(values["error"])
    # Written so that a NaN is a violation.
    return ~(values[name] >= error * (1 - 1e-9) - 1e-12)


def summarise(values: dict[str, np.ndarray]) -> dict[str, Any]:
    error = np.abs(values["error"])
    printed, rho = violated(values, "printed_proposition"), 1 - 1 / values["ratio"]
    return {
        "instances": len(error),
        "errors above 1e-9": int((error > 1e-9).sum()),
        "greatest gap of the identity": float(np.abs(values["error"] - values["identity"]).max()),
        "greatest gap to the numpy error": float(np.abs(values["error"] - values["oracle"]).max()),
        "violations": {name: int(violated(values, name).sum()) for name in RIGOROUS},
        "printed proposition": {
            "violations": int(printed.sum()),
            "instances with rho < 1/2": int((rho < 0.5).sum()),
            "violations with rho >= 1/2": int((printed & (rho >= 0.5)).sum()),
            "median error / printed": float(np.median(error / values["printed_proposition"])),
            "greatest error / printed": float(np.max(error / values["printed_proposition"])),
        },
    }


def table(values: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return medians of bound / error for adversarial functionals, by r = σ₊ / σ₋."""
    error = np.abs(values["error"])
    use = values["adversarial"] & (error > 1e-9)
    rows = []
    for low, high in RATIOS:
        chosen = use & (values["ratio"] >= low) & (values["ratio"] < high)
        medians = {
            label: float(np.median(values[name][chosen] / error[chosen])) if chosen.any() else None
            for label, name in COLUMNS
        }
        rows.append({"ratio": f"[{low:g}, {high:g})", "count": int(chosen.sum()), **medians})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(" | ".join(["r", "N", *(label for label, _ in COLUMNS)]))
    for row in rows:
        cells = ["-" if row[label] is None else f"{row[label]:.3g}" for label, _ in COLUMNS]
        print(" | ".join([row["ratio"], str(row["count"]), *cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--targeted", type=int, default=3_000)
    parser.add_argument(
        "--shapes", type=int, default=40, help="how many (n, S), each compiled once"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"jax": jax.__version__, "seed": options.seed}
    if options.instances > 0:
        print(f"{options.instances} generic problems")
        values = run_generic(
            options.seed, options.instances, min(options.shapes, options.instances)
        )
        result["generic"], result["table"] = summarise(values), table(values)
        print(json.dumps(result["generic"], indent=1))
        print("median bound / error, adversarial functionals")
        show(result["table"])
    if options.targeted > 0:
        print(f"{options.targeted} targeted problems")
        values = run_targeted(options.seed + 1, options.targeted, min(12, options.targeted))
        result["targeted"] = summarise(values)
        print(json.dumps(result["targeted"], indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    total = [part["violations"] for key in ("generic", "targeted") if (part := result.get(key))]
    if any(count for counts in total for count in counts.values()):
        raise SystemExit("A bound that is called rigorous was violated.")


if __name__ == "__main__":
    main()
