"""The contract of every stream: chunks do not matter, bad rows are reported, states resume."""

from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_close
from linear_models import linear_model
from registry import STREAMS

import retrodict as rd

N, MISSING, OVERFLOWING = 6, 1, 3
KEY = jax.random.key(1)
EVERY = pytest.mark.parametrize("name", STREAMS)


@cache
def stream(name: str) -> rd.online.AbstractStream:
    return STREAMS[name].make(linear_model(noise=0.5, error=0.5))


def rows(last: float = 1.7e308) -> np.ndarray:
    """Rows of which one is missing, and one overflows in units of the noise."""
    ys = np.random.default_rng(0).normal(size=(N, 1))
    ys[MISSING], ys[OVERFLOWING] = np.nan, last
    return ys


@cache
def scanned(name: str) -> tuple[Any, Any]:
    return stream(name).scan(stream(name).init(KEY), rows())


def read(name: str, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Read some rows in a chunk that is padded to the size of all."""
    padding = np.full((N - stop + start, 1), np.nan)
    ys = np.concatenate([rows()[start:stop], padding])
    return stream(name).scan(state, ys, length=stop - start)


@EVERY
def test_chunks_single_rows_and_saved_states_give_the_same_rows(name: str, tmp_path: Path):
    live, (end, out), tolerance = stream(name), scanned(name), STREAMS[name].tolerance
    state, first = read(name, live.init(KEY), 0, 2)
    rd.save(tmp_path / "state.rd", state)
    restored = rd.load(tmp_path / "state.rd")
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    last, second = read(name, restored, 2, N)
    assert_close(last, end, tolerance)
    chunks = jax.tree.map(lambda a, b: jnp.concatenate([a[:2], b[: N - 2]]), first, second)
    assert_close(chunks, out, tolerance)
    # Rows that do not exist give NaN.
    floats = jax.tree.leaves(eqx.filter(first, eqx.is_inexact_array))
    assert all(np.all(np.isnan(leaf[2:])) for leaf in floats)
    for k in (2, OVERFLOWING):
        restored, row = live.update(restored, rows()[k])
        assert_close(row, jax.tree.map(lambda leaf, k=k: leaf[k], out), 1e-12)


@EVERY
def test_overflowing_rows_are_treated_as_missing_and_reported(name: str):
    live, (end, out) = stream(name), scanned(name)
    assert np.flatnonzero(out.skipped).tolist() == [OVERFLOWING]
    floats = jax.tree.leaves(eqx.filter(end, eqx.is_inexact_array))
    assert not any(np.any(np.isnan(leaf)) for leaf in floats)
    _, missing = live.scan(live.init(KEY), rows(np.nan))
    assert not np.any(missing.skipped)


@EVERY
def test_streams_inherit_the_protocol_of_the_base_class(name: str):
    kind = type(stream(name))
    for verb in ("init", "update", "scan"):
        assert getattr(kind, verb) is getattr(rd.online.AbstractStream, verb)
    with pytest.raises(ValueError, match="data"):
        stream(name).scan(stream(name).init(KEY), rows(), data={"sum": np.zeros(N + 1)})
