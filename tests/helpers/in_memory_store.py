"""A store of series that holds arrays in memory and counts reads of its blocks."""

import hashlib
from collections import Counter

import numpy as np

import retrodict as rd


class InMemoryStore(rd.data.AbstractSeriesStore):
    """A store whose blocks are slices of arrays.

    Attributes:
        loads: number of reads of each block.
    """

    def __init__(self, ys: np.ndarray, sizes: list[int], length: np.ndarray | None = None) -> None:
        self._ys, self._length = ys, length
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.block_sizes, self.num_times = sizes, ys.shape[1]
        self.num_rows = ys.shape[0] * ys.shape[1] if length is None else int(length.sum())
        self.loads: Counter[int] = Counter()

    def load(self, block: int) -> dict[str, np.ndarray | None]:
        self.loads[block] += 1
        rows = slice(*self._starts[block : block + 2])
        length = None if self._length is None else self._length[rows]
        mask = None
        if length is not None:
            observed = np.arange(self.num_times)[None, :, None] < length[:, None, None]
            mask = np.broadcast_to(observed, self._ys[rows].shape)
        return {"ys": self._ys[rows], "mask": mask, "inputs": None, "length": length}

    def digest(self) -> str:
        return hashlib.sha256(self._ys.tobytes()).hexdigest()
