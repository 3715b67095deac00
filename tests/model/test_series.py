"""The record of a series: its rows, its options, and the series of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from retrodict._model import Series, prepare_batch, prepare_series


def assert_equal(one: Series, other: Series) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("length", [None, 2])
@pytest.mark.parametrize("missing", [False, True])
def test_ys_and_options_give_the_same_series(length: int | None, missing: bool):
    ys = jnp.arange(6.0).reshape(3, 2).at[0, 1].set(jnp.nan if missing else 0.0)
    options: dict[str, Any] = {"inputs": jnp.ones((3, 1)), "length": length}
    series = prepare_series(ys, **options, takes_input=True)
    assert_equal(prepare_series(series.ys, **series.options(), takes_input=True), series)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32])
def test_lengths_of_narrow_types_mask_the_right_rows(dtype: Any):
    """In 8 bits, row 256 would count as row 0."""
    ys, length = np.ones((300, 1)), dtype(100)
    one = prepare_series(ys, length=length)
    both = prepare_batch(np.stack([ys, ys]), length=np.array([length, length + dtype(20)]))
    traced = jax.jit(lambda length: prepare_series(jnp.asarray(ys), length=length))(length)
    for mask in (one.mask, both.at(0).mask, traced.mask):
        np.testing.assert_array_equal(np.asarray(mask)[:, 0], np.arange(300) < 100)
    assert np.asarray(both.at(1).mask).sum() == 120


def test_series_of_a_batch_and_rows_of_a_series_are_taken_by_index():
    ys = np.arange(12.0).reshape(2, 3, 2)
    batch = prepare_batch(ys, length=[3, 2])
    assert batch.num_series == 2
    one = batch.at(1)
    np.testing.assert_array_equal(one.ys[:2], ys[1, :2])
    assert one.length is not None and int(one.length) == 2 and one.num_times == 3
    row = one.rows.at(0)
    np.testing.assert_array_equal(row.ys, ys[1, 0])
    assert row.length is None and row.mask is not None and row.mask.shape == (2,)


def test_preparing_arrays_of_numpy_compiles_no_program(caplog: pytest.LogCaptureFixture):
    """A small program for each operation and shape took most of the time of a command."""
    ys = np.zeros((3, 17, 2))
    ys[1, 4] = np.nan
    mask, length = np.ones(ys.shape, bool), np.array([17, 9, 11])
    mask[0, 3] = False
    with jax.log_compiles():
        batch = prepare_batch(ys, mask=mask, length=length)
        prepare_batch(ys[:, :13])
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]
    assert batch.mask is not None
    seen = mask & ~np.isnan(ys) & (np.arange(17)[:, None] < length[:, None, None])
    np.testing.assert_array_equal(batch.mask, seen)


@pytest.mark.parametrize("missing", [False, True])
def test_traced_and_known_arrays_are_prepared_alike(missing: bool):
    ys = np.arange(12.0).reshape(2, 3, 2)
    ys[0, 1, 0] = np.nan if missing else 5.0
    mask, length = np.ones(ys.shape, bool), np.array([2, 3])
    mask[1, 0] = False

    def prepare(ys: Any) -> Series:
        return prepare_batch(ys, mask=mask, length=length)

    for known, traced in zip(
        jax.tree.leaves(prepare(ys)), jax.tree.leaves(jax.jit(prepare)(ys)), strict=True
    ):
        assert known.dtype == traced.dtype
        np.testing.assert_array_equal(known, traced)
