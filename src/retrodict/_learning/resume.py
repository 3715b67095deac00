"""Going on from a checkpoint, and refusing one that belongs to another fit."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from retrodict._checkpoint import CheckpointError, read_checkpoint
from retrodict._expectations import AbstractEstimator
from retrodict._learning.train import TrainHistory, TrainState, one_start
from retrodict._series import Series
from retrodict._types import PRNGKey
from retrodict.distributed import is_spread, rows_where_they_lie, said_by_all


def fingerprint(
    key: PRNGKey,
    data: bytes,
    estimator: AbstractEstimator,
    tournament: float,
    numbers: tuple[int | None, ...],
) -> dict[str, Any]:
    """What must be the same for a checkpoint to be gone on from."""
    digest = hashlib.sha256(np.asarray(jax.random.key_data(key)).tobytes())
    digest.update(data)
    names = ("num_steps", "restarts", "chunk_size", "batch_size", "window", "growing", "remat")
    return {
        "data": digest.hexdigest(),
        "estimator": str(estimator),
        "tournament": tournament,
        **dict(zip(names, numbers, strict=True)),
    }


def digests(batch: Series, count: int) -> bytes:
    """The SHA-256 of each series; where each process holds some of them, each reads its own.

    Args:
        batch: the series.
        count: how many of them count.
    """

    def of(batch: Series) -> np.ndarray:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
        rows = [b"".join(leaf[i].tobytes() for leaf in leaves) for i in range(len(leaves[0]))]
        return np.stack([np.frombuffer(hashlib.sha256(row).digest(), np.uint8) for row in rows])

    if not is_spread(batch):
        return of(batch)[:count].tobytes()
    return rows_where_they_lie(of, batch, hashlib.sha256().digest_size)[:count].tobytes()


def resume(
    path: Path,
    state: TrainState,
    num_starts: int | None,
    metadata: dict[str, Any],
    mesh: Mesh | None,
) -> tuple[TrainState, TrainHistory | None]:
    """The state of a checkpoint if there is one, refused if it belongs to another fit."""
    try:
        found = read_checkpoint(path, known=_classes(state))
    except FileNotFoundError:
        found = None
    if mesh is not None and mesh.is_multi_process:
        _refuse_disagreement(path, 0 if found is None else int(found.tree[0].step), mesh)
    if found is None:
        return state, None
    restored, history = found.tree
    for name, expected in metadata.items():
        if found.metadata.get(name) != expected:
            what = (
                "other data or another key"
                if name == "data"
                else f"{name}={found.metadata.get(name)}, and this fit has {name}={expected}"
            )
            raise ValueError(
                f"{path} is the checkpoint of a fit with {what}. Give another file, or remove it."
            )
    if num_starts is not None and restored.kept_score.ndim == 0:
        state = one_start(state, 0)  # the tournament was over when it was written
    _refuse_other_parameters(path, restored, state)
    return restored, history


def _classes(tree: Any) -> set[type]:
    """Return the classes of all nodes: of a family, model or optimiser of the caller."""
    classes: set[type] = set()
    jax.tree.leaves(tree, is_leaf=lambda node: bool(classes.add(type(node))))
    return classes


def _refuse_disagreement(path: Path, step: int, mesh: Mesh) -> None:
    """Refuses to go on if another process has found another checkpoint."""
    steps = sorted(set(said_by_all(step, mesh)))
    if len(steps) > 1:
        raise ValueError(
            f"The processes found checkpoints of steps {steps} at {path}. It must lie in a folder"
            " that all processes see."
        )


def _refuse_other_parameters(path: Path, restored: TrainState, state: TrainState) -> None:
    """Refuses a checkpoint whose arrays are not those of this family, model and optimiser."""

    def shapes(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [(jax.tree_util.keystr(at), leaf.shape, str(leaf.dtype)) for at, leaf in leaves]

    for found, expected in zip(shapes(restored), shapes(state), strict=False):
        if found != expected:
            raise CheckpointError(
                f"{path} is the checkpoint of another family, model or optimiser: it has"
                f" {found[0]} of shape {found[1]} and type {found[2]}, where this fit has"
                f" {expected[0]} of shape {expected[1]} and type {expected[2]}."
            )
    if len(shapes(restored)) != len(shapes(state)):
        raise CheckpointError(
            f"{path} is the checkpoint of another family, model or optimiser: it has"
            f" {len(shapes(restored))} arrays, and this fit {len(shapes(state))}."
        )
