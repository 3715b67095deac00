"""Learn the NASCAR model, recurrent switching linear dynamics, from observations alone.

    python benchmarks/switching_nascar.py [--rows N] [--starts N] [--picture FILE] [--out FILE]
        [--ssm ANSWER.npz]
    python benchmarks/switching_nascar.py --data DATA.npz
    PYTHON_WITH_SSM benchmarks/switching_nascar_ssm.py DATA.npz ANSWER.npz

Four regimes drive a state of two dimensions around a track (Linderman et al. 2017; notebook 4 of
the package ssm): rotations by π/24 and π/48 about (2, 0) and (-2, 0) on its two ends, drifts by 0.1
and -0.25 on its straights,

    p(z_k = j | x_{k-1}) ∝ exp(R_j x_{k-1} + r_j),   x_k = A_z x_{k-1} + b_z + ε,   y_k = C x_k + η,

with state noise of variance 1e-4, weights R of 100 and 10, and ten columns with noise of standard
deviation 0.1 and an orthonormal C. The rotations are clockwise: in the other direction the states
do not follow the track.

The model is learned by `switching.initialise` and `switching.em`. Regimes are compared up to a
permutation, smoothed states up to an affine map. The second and the third command let the package
ssm learn from the same series in its own environment; the first then compares its answer.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import retrodict as rd

jax.config.update("jax_enable_x64", True)

SEED, NUM_ROWS, NUM_COLUMNS, NUM_REGIMES = 12345, 10_000, 10, 4
NUM_ITERATIONS, NUM_PATHS = 60, 10
ACCURACY, R_SQUARED = 0.95, 0.98
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


class Answer(NamedTuple):
    """Regimes with the labels of the truth, and states with its coordinates.

    Attributes:
        accuracy: the fraction of rows with the true regime.
        r_squared: the coefficient of determination of the states, over both coordinates.
        regimes: the regimes, relabelled.
        states: the states, mapped to the true ones.
        order: the true label of each regime.
        weight, offset: the affine map of the states.
    """

    accuracy: float
    r_squared: float
    regimes: np.ndarray
    states: np.ndarray
    order: np.ndarray
    weight: np.ndarray
    offset: np.ndarray


def rotation(angle: float) -> np.ndarray:
    """Return the matrix of a rotation."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin], [sin, cos]])


def truth() -> rd.switching.SwitchingModel:
    """Return the model that the series is drawn from."""
    ends = [(rotation(-np.pi / 24), [2.0, 0.0]), (rotation(-np.pi / 48), [-2.0, 0.0])]
    moves = [(turn, np.array(centre) - turn @ centre) for turn, centre in ends]
    moves += [(np.eye(2), np.array([drift, 0.0])) for drift in (0.1, -0.25)]
    weight = np.array([[100.0, 0.0], [-100.0, 0.0], [0.0, 10.0], [0.0, -10.0]])
    columns = np.random.default_rng(SEED).normal(size=(NUM_COLUMNS, 2))
    scale = 0.01 * jnp.eye(2)
    return rd.switching.SwitchingModel(
        rd.switching.Regimes(jnp.zeros(4), [[-200.0, -200.0, 0.0, 0.0]], weight),
        prior=rd.Gaussian(jnp.array([0.0, 1.0]), scale),
        transition=[rd.LinearGaussianKernel(turn, shift, scale) for turn, shift in moves],
        emission=rd.LinearGaussianKernel(
            np.linalg.qr(columns)[0],
            jnp.zeros(NUM_COLUMNS),
            rd.Diagonal(0.1 * jnp.ones(NUM_COLUMNS)),
        ),
    )


def blank() -> rd.switching.SwitchingModel:
    """Return a model of the same structure that holds nothing of the truth."""
    move = rd.LinearGaussianKernel(jnp.eye(2), jnp.zeros(2), jnp.eye(2))
    return rd.switching.SwitchingModel(
        rd.switching.Regimes(jnp.zeros(4), jnp.zeros((1, 4)), jnp.zeros((4, 2))),
        prior=rd.Gaussian(jnp.zeros(2), jnp.eye(2)),
        transition=[move] * NUM_REGIMES,
        emission=rd.LinearGaussianKernel(
            jnp.ones((NUM_COLUMNS, 2)), jnp.zeros(NUM_COLUMNS), rd.Diagonal(jnp.ones(NUM_COLUMNS))
        ),
    )


def aligned(regimes: Any, states: Any, zs: np.ndarray, xs: np.ndarray) -> Answer:
    """Compare with the truth, up to a permutation of regimes and an affine map of states."""
    orders = [np.array(order) for order in itertools.permutations(range(NUM_REGIMES))]
    regimes = np.asarray(regimes)
    order = max(orders, key=lambda order: np.mean(order[regimes] == zs))
    design = np.column_stack([states, np.ones(len(xs))])
    weights = np.linalg.lstsq(design, xs, rcond=None)[0]
    mapped = design @ weights
    r_squared = 1 - np.sum((xs - mapped) ** 2) / np.sum((xs - xs.mean(axis=0)) ** 2)
    accuracy = float(np.mean(order[regimes] == zs))
    return Answer(
        accuracy, float(r_squared), order[regimes], mapped, order, weights[:2], weights[2]
    )


def smoothed(
    model: rd.switching.SwitchingModel, ys: jax.Array, zs: np.ndarray, xs: np.ndarray
) -> tuple[Answer, float]:
    """Smooth by GPB2; return the comparison and the log-evidence per row."""
    posterior = rd.switching.gpb2_smoother(model, ys)
    marginals = posterior.chain.marginals(jax.random.key(SEED), num_samples=100)
    answer = aligned(marginals.regimes, marginals.mean, zs, xs)
    return answer, float(posterior.log_evidence) / len(xs)


def by_ssm(path: Path, zs: np.ndarray, xs: np.ndarray) -> dict[str, Any]:
    """Return the figures of the package ssm."""
    found = np.load(path)
    answer = aligned(found["zs"], found["xs"], zs, xs)
    return {
        "accuracy": answer.accuracy,
        "r_squared": answer.r_squared,
        "seconds": float(found["seconds"]),
        "iterations": int(found["iterations"]),
    }


def draw(
    path: Path,
    model: rd.switching.SwitchingModel,
    answer: Answer,
    zs: np.ndarray,
    xs: np.ndarray,
) -> None:
    """Draw the track and the field of the most probable regime, true and learned."""
    from matplotlib import pyplot as plt

    identity = Answer(1.0, 1.0, zs, xs, np.arange(4), np.eye(2), np.zeros(2))
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.4), sharex=True, sharey=True)
    rows = slice(0, 4000)
    axes = [np.linspace(np.min(xs[:, i]) - 0.5, np.max(xs[:, i]) + 0.5, 22) for i in range(2)]
    points = np.stack([part.ravel() for part in np.meshgrid(*axes)], axis=1)
    for panel, title, law, way in [
        (panels[0], "true", truth(), identity),
        (panels[1], "learned from observations alone", model, answer),
    ]:
        regimes, steps = field(law, way, points)
        panel.quiver(*points.T, *steps.T, color=[COLORS[j] for j in regimes], width=0.003)
        for j in range(NUM_REGIMES):
            inside = way.regimes[rows] == j
            track = np.where(inside[:, None], way.states[rows], np.nan)
            panel.plot(*track.T, color=COLORS[j], linewidth=0.4, alpha=0.6)
        panel.set(title=title, xlabel="first coordinate", aspect="equal")
    panels[0].set_ylabel("second coordinate")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def field(
    model: rd.switching.SwitchingModel, answer: Answer, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable next regime and the expected step, in the true coordinates."""
    fixed = rd.unwrap(model)
    states = jnp.asarray((points - answer.offset) @ np.linalg.inv(answer.weight))
    logits = jax.vmap(lambda x: fixed.regimes.log_transition(x)[0])(states)
    regimes = np.asarray(jnp.argmax(logits, axis=1))
    means = np.stack([np.asarray(jax.vmap(k.law)(states).mean) for k in fixed.transition])
    steps = means[regimes, np.arange(len(points))] - np.asarray(states)
    return answer.order[regimes], steps @ answer.weight


def learn(
    ys: jax.Array, num_starts: int, say: Callable[[str], None]
) -> tuple[rd.switching.SwitchingModel, dict[str, Any]]:
    """Return the learned model, with the time and the history."""
    began = time.perf_counter()
    start = rd.switching.initialise(jax.random.key(SEED), blank(), ys)
    initialised = time.perf_counter()
    say(f"starting values after {initialised - began:.1f} s")
    result = rd.switching.em(
        jax.random.key(SEED),
        start,
        ys,
        num_iterations=NUM_ITERATIONS,
        num_starts=num_starts,
        num_samples=NUM_PATHS,
    )
    seconds = time.perf_counter() - began
    say(f"{result.status} after {seconds:.1f} s; issues: {result.issues or 'none'}")
    return result.model, {
        "seconds": seconds,
        "seconds_of_starting_values": initialised - began,
        "status": result.status,
        "history": np.round(result.history, 6).tolist(),
        "log_evidence_of_starts": result.start_values.tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--data", type=Path, help="write the series to this file, and stop")
    parser.add_argument("--ssm", type=Path, help="the answer of the package ssm")
    parser.add_argument("--picture", type=Path, help="a file for the picture")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    began = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {line}", flush=True)

    simulated = truth().simulate(jax.random.key(SEED), arguments.rows)
    zs, xs, ys = (np.asarray(part) for part in simulated)
    if arguments.data is not None:
        np.savez(arguments.data, ys=ys)
        return
    say(f"{arguments.rows} rows, of which {np.bincount(zs, minlength=4)} in each regime")
    model, figures = learn(simulated[2], arguments.starts, say)
    for name, law in [("true", truth()), ("learned", model)]:
        answer, evidence = smoothed(law, simulated[2], zs, xs)
        say(
            f"{name}: accuracy {answer.accuracy:.4f}, R² {answer.r_squared:.5f}, log-evidence"
            f" {evidence:.4f} nats per row"
        )
        figures[name] = {
            "accuracy": answer.accuracy,
            "r_squared": answer.r_squared,
            "log_evidence": evidence,
        }
    reached = answer.accuracy >= ACCURACY and answer.r_squared >= R_SQUARED
    say(f"targets {ACCURACY} and {R_SQUARED}: {'reached' if reached else 'missed'}")
    if arguments.picture is not None:
        draw(arguments.picture, model, answer, zs, xs)
    if arguments.ssm is not None:
        figures["ssm"] = by_ssm(arguments.ssm, zs, xs)
        say("ssm: " + json.dumps(figures["ssm"]))
    figures = {"rows": arguments.rows, "seed": SEED, "targets_reached": reached, **figures}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
