"""Checkpoints of `fit`: resume from one, and refuse one that belongs to another fit."""

import hashlib
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from retrodict._arrays import PRNGKey
from retrodict._checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from retrodict._expectations import AbstractEstimator
from retrodict._learning.dataset import AbstractDataset
from retrodict._learning.options import Objective, Optimisation
from retrodict._learning.train import Trained, TrainHistory, TrainState, one_start
from retrodict.distributed import gather_from_devices, writes_for


def fingerprint(
    key: PRNGKey,
    dataset: AbstractDataset,
    estimator: AbstractEstimator,
    num_steps: int,
    objective: Objective,
    options: Optimisation,
    segment: int | None,
) -> dict[str, Any]:
    """Return the settings that must agree for a fit to resume, with a fingerprint of the data."""
    digest = hashlib.sha256(np.asarray(jax.random.key_data(key)).tobytes())
    digest.update(dataset.fingerprint())
    return {
        "data": digest.hexdigest(),
        "estimator": str(estimator),
        "tournament": options.tournament,
        "num_steps": num_steps,
        "restarts": options.restarts,
        "chunk_size": options.chunk_size,
        "batch_size": options.batch_size,
        "window": objective.window,
        "growing": objective.growing,
        "remat": segment,
    }


class FitCheckpoint(NamedTuple):
    """The checkpoint of a fit.

    Attributes:
        path: the file.
        settings: the settings that must agree for the fit to resume.
        mesh: the devices; `None` for one.
    """

    path: Path
    settings: dict[str, Any]
    mesh: Mesh | None

    def write(self, state: TrainState, history: TrainHistory) -> None:
        """Write the state, in one of the processes."""
        if writes_for(self.mesh):
            write_checkpoint(self.path, (state, history), self.settings)

    def resume(self, begun: Trained, num_starts: int | None) -> Trained:
        """Return the state and history of the file, or `begun` if there is no file.

        Raises:
            ValueError: if the file belongs to another fit, or the processes read different files.
        """
        try:
            stored = read_checkpoint(self.path, known=_classes(begun.state))
        except FileNotFoundError:
            stored = None
        if self.mesh is not None and self.mesh.is_multi_process:
            step = 0 if stored is None else int(stored.tree[0].step)
            _refuse_disagreement(self.path, step, self.mesh)
        if stored is None:
            return begun
        self._refuse_other_settings(stored.metadata)
        restored, history = stored.tree
        state = begun.state
        if num_starts is not None and restored.kept_score.ndim == 0:
            state = one_start(state, 0)  # it was written after the tournament
        _refuse_other_parameters(self.path, restored, state)
        return Trained(restored, history)

    def _refuse_other_settings(self, stored: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if stored.get(name) != value:
                difference = (
                    "other data or another key"
                    if name == "data"
                    else f"{name}={stored.get(name)}, and this fit has {name}={value}"
                )
                raise ValueError(
                    f"{self.path} is the checkpoint of a fit with {difference}. Pass another file,"
                    " or remove it."
                )


def _classes(tree: Any) -> set[type]:
    """Return the classes of all nodes: of a family, model or optimiser of the caller."""
    classes: set[type] = set()
    jax.tree.leaves(tree, is_leaf=lambda node: bool(classes.add(type(node))))
    return classes


def _refuse_disagreement(path: Path, step: int, mesh: Mesh) -> None:
    """Raise if the processes read checkpoints of different steps."""
    steps = sorted(set(gather_from_devices(step, mesh)))
    if len(steps) > 1:
        raise ValueError(
            f"The processes found checkpoints of steps {steps} at {path}. Use a folder that all"
            " processes can read."
        )


def _refuse_other_parameters(path: Path, restored: TrainState, state: TrainState) -> None:
    """Raise if the arrays are not those of this family, model and optimiser."""

    def arrays(tree: TrainState) -> list[str]:
        return [
            f"{jax.tree_util.keystr(at)} of shape {leaf.shape} and type {leaf.dtype}"
            for at, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    pairs = zip_longest(arrays(restored), arrays(state), fillvalue="no further array")
    for stored, expected in pairs:
        if stored != expected:
            raise CheckpointError(
                f"{path} is the checkpoint of another family, model or optimiser: it has {stored},"
                f" and this fit has {expected}."
            )
