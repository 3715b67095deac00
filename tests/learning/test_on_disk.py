"""Series that stay on disk: what is read of them, in which order, and what a fit makes of it."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
from assertions import arrays_equal
from fit_options import fit_options
from in_memory_store import InMemoryStore
from linear_models import linear_model

import retrodict as rd
from retrodict import data
from retrodict._learning import on_disk
from retrodict._learning.on_disk import StoredLoader

KEY = jax.random.key(1)
COUNT, N = 23, 5
SIZES = [4, 1, 7, 6, 5]
STILL = optax.sgd(0.0)
"""One object, so that fits share their compiled program."""
STORED_BYTES = N * 8 + N + 8
"""The size of one series: observations, mask and length."""


@pytest.fixture
def store() -> InMemoryStore:
    """Series that say which one they are."""
    ys = np.broadcast_to(np.arange(1.0, COUNT + 1)[:, None, None], (COUNT, N, 1))
    return InMemoryStore(np.array(ys), SIZES)


def series_read(loader: StoredLoader, first: int, count: int) -> np.ndarray:
    """The numbers of the series of some steps, from 0."""
    batches = loader.load(first, count, first + count)
    minibatches = [
        batches.minibatch(KEY, jnp.asarray(step)) for step in range(first, first + count)
    ]
    return np.stack([np.asarray(batch.series.ys[:, 0, 0]) for batch in minibatches]).astype(int) - 1


@pytest.mark.parametrize(("batch_size", "lanes"), [(4, 4), (6, 3), (7, 1), (23, 1)])
def test_epochs_visit_each_series_once_and_batches_are_balanced(
    store: InMemoryStore, batch_size: int, lanes: int
):
    stream = StoredLoader(store, KEY, batch_size, 100)
    assert stream.order.lanes == lanes
    steps = 2 * COUNT
    indices = series_read(stream, 0, steps).reshape(steps, lanes, -1)
    stream.close()
    bounds = [lane * COUNT // lanes for lane in range(lanes + 1)]
    epochs = []
    for lane, (first, last) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        in_lane = indices[:, lane].ravel()
        size = last - first
        epochs += [in_lane[i : i + size].tolist() for i in range(0, len(in_lane) - size + 1, size)]
        for epoch in epochs[-(len(in_lane) // size) :]:
            assert sorted(epoch) == list(range(first, last))
    assert any(one != other for one, other in zip(epochs[:-1], epochs[1:], strict=True))


def test_minibatch_depends_only_on_key_and_step(store: InMemoryStore):
    stream = StoredLoader(store, KEY, 6, 100)
    all_steps = series_read(stream, 0, 12)
    pieces = [
        series_read(stream, first, count) for first, count in ((0, 4), (4, 4), (8, 4), (5, 7))
    ]
    stream.close()
    np.testing.assert_array_equal(np.concatenate(pieces[:3]), all_steps)
    np.testing.assert_array_equal(pieces[3], all_steps[5:])
    other = StoredLoader(store, jax.random.key(2), 6, 100)
    assert not np.array_equal(series_read(other, 0, 12), all_steps)
    other.close()


def test_each_lane_reads_a_block_once_per_pass(store: InMemoryStore):
    """Twelve steps of one lane of 23 series, six at a time: three passes and a bit, ahead."""
    stream = StoredLoader(store, KEY, 7, 100)
    store.loads.clear()
    for first in range(0, 24, 6):
        stream.load(first, 6, first + 6)
    stream.close()
    passes = -(-7 * 30 // COUNT)
    assert max(store.loads.values()) <= passes


def test_uneven_chunk_is_prefetched_in_parts(
    monkeypatch: pytest.MonkeyPatch,
):
    """Chunks of ten steps, four at a time: each part is asked for once, and none beyond the end."""
    asked: list[tuple[int, int]] = []
    read = StoredLoader._read

    def note(self: StoredLoader, first: int, count: int) -> Any:
        asked.append((first, count))
        return read(self, first, count)

    monkeypatch.setattr(StoredLoader, "_read", note)
    monkeypatch.setattr(on_disk, "MAX_LOAD_BYTES", 6 * 4 * STORED_BYTES)
    store = InMemoryStore(walks(), SIZES, lengths())
    fit(store, num_steps=15, chunk_size=10, optimiser=STILL)
    assert asked == [(0, 4), (4, 4), (8, 4), (10, 4), (14, 4)]


def test_errors_of_prefetched_batches_are_raised_when_they_are_used(
    store: InMemoryStore,
):
    stream = StoredLoader(store, KEY, 7, 100)
    stream.load(0, 1, 1)

    def gone(block: int) -> Any:
        raise OSError("the disk is gone")

    store.load = gone  # pyright: ignore
    with pytest.raises(OSError, match="the disk is gone"):
        for step in range(1, 2 * COUNT):
            stream.load(step, 1, step + 1)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("retrodict-batches")]


def test_batches_use_the_caller_float_type(store: InMemoryStore):
    """Settings of JAX may hold for one thread, and another one reads."""
    for double in (False, True):
        with jax.enable_x64(double):
            stream = StoredLoader(store, KEY, 6, 100)
            batches = [stream.load(first, 2, first + 2) for first in (0, 2)]
            stream.close()
        kinds = {(str(b.series.ys.dtype), str(b.first.dtype)) for b in batches}
        assert kinds == {("float64", "int64") if double else ("float32", "int32")}


def test_large_chunks_are_read_in_parts(store: InMemoryStore, monkeypatch: pytest.MonkeyPatch):
    for most, steps in ((2**26, 100), (6 * N * 8 * 30, 25), (1, 1)):
        monkeypatch.setattr(on_disk, "MAX_LOAD_BYTES", most)
        with closing(StoredLoader(store, KEY, 6, 100)) as loader:
            assert loader.steps_per_load == steps


def model() -> rd.StateSpaceModel:
    return linear_model(weight=0.8, noise=0.5, error=0.4)


def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(2, N + 1, COUNT)


def fit(ys: Any, **options: Any) -> rd.FitResult:
    arguments = {"num_steps": 12, "chunk_size": 4, "batch_size": 6, "progress": False, **options}
    return rd.fit(KEY, rd.KalmanFamily(model()), model(), ys, **fit_options(**arguments))


def walks() -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), COUNT)
    return np.array(jax.vmap(lambda key: model().simulate(key, N)[1])(keys))


def test_fit_from_store_sees_series_in_order_without_padding(
    monkeypatch: pytest.MonkeyPatch,
):
    """With steps of zero the history is the ELBO of the batches, computed here one by one."""
    ys, rows = walks(), lengths()
    store = InMemoryStore(ys, SIZES, rows)
    monkeypatch.setattr(on_disk, "MAX_LOAD_BYTES", 6 * 4 * STORED_BYTES)  # several parts of a chunk
    result = fit(store, num_steps=15, chunk_size=10, optimiser=STILL)
    family = rd.KalmanFamily(model()).prepare(model(), ys, length=rows)
    each = jax.vmap(
        lambda y, n: rd.elbo(model(), family.infer(y, mask=True, length=n), y, length=n)
    )(ys, rows)
    numbers = InMemoryStore(np.arange(1.0, COUNT + 1)[:, None, None], SIZES)
    stream = StoredLoader(numbers, KEY, 6, 100)
    batches = series_read(stream, 0, 15)
    stream.close()
    expected = [float(each[b].sum() / rows[b].sum()) for b in batches]
    np.testing.assert_allclose(result.history, expected, rtol=1e-10)


@pytest.mark.slow
def test_killed_fit_from_store_resumes_bit_for_bit(tmp_path: Path):
    ys, path = walks(), tmp_path / "fit.rd"
    uninterrupted = fit(InMemoryStore(ys, SIZES), learn="both")

    def die(step: int, _: float) -> None:
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(InMemoryStore(ys, SIZES), learn="both", checkpoint=path, progress=die)
    resumed = fit(InMemoryStore(ys, SIZES), learn="both", checkpoint=path)
    assert arrays_equal(resumed.model, uninterrupted.model)
    assert np.array_equal(resumed.history, uninterrupted.history)
    for other in (InMemoryStore(ys + 1.0, SIZES), InMemoryStore(ys, SIZES[::-1])):
        with pytest.raises(ValueError, match="other data"):
            fit(other, learn="both", checkpoint=path)


def test_store_refuses_separate_mask_and_length(store: InMemoryStore):
    with pytest.raises(ValueError, match="leave out `length`"):
        fit(store, length=np.full(COUNT, N))


@pytest.fixture
def frame() -> pd.DataFrame:
    """Series of unequal length with gaps, and an index that says nothing."""
    rng = np.random.default_rng(3)
    parts = []
    for i, rows in enumerate(rng.integers(3, 30, 40)):
        known = np.sort(rng.choice(40, rows, replace=False))
        known[:2] = [0, 1]
        days = np.datetime64("2020-01-01") + np.unique(known)
        values = rng.normal(size=(len(days), 2))
        values[rng.random(values.shape) < 0.1] = np.nan
        parts.append(
            pd.DataFrame({"who": f"s{i:02d}", "day": days, "a": values[:, 0], "b": values[:, 1]})
        )
    return pd.concat(parts).set_index(np.arange(sum(map(len, parts))) * 3 + 7)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrodict.data._stored.BLOCK_ROWS", 60)


def assert_reads_as(store: data.StoredSeries, full_table: data.Table) -> None:
    tables = list(store.tables())
    assert len(tables) == len(store.block_sizes) > 3
    rows = full_table.ys.shape[1]
    assert store.num_times == rows and store.num_rows == int(full_table.length.sum())
    for name in ("ys", "mask", "length"):
        joined = np.concatenate([getattr(table, name) for table in tables])
        np.testing.assert_array_equal(joined, getattr(full_table, name))
    assert tuple(name for table in tables for name in table.series or ()) == full_table.series
    loaded = store.load(1)
    assert loaded["ys"] is not None and np.isfinite(loaded["ys"]).all()
    assert loaded["ys"].shape == (store.block_sizes[1], rows, 2)


@pytest.mark.parametrize("row_group_size", [1, 17, 100, 10_000])
def test_parquet_blocks_equal_whole_file(
    frame: pd.DataFrame, tmp_path: Path, small_blocks: None, row_group_size: int
):
    path = tmp_path / "series.parquet"
    frame.to_parquet(path, row_group_size=row_group_size)
    store = data.open_series(path, series="who", progress=False)
    table = data.read(frame, series="who")
    if row_group_size == 10_000:
        assert store.block_sizes == (40,)
    else:
        assert_reads_as(store, table)
    assert store.digest() != data.open_series(path, series="who", columns="a").digest()
    assert "40 series" in repr(store) and "step 1D" in "\n".join(store.described())


def test_netcdf_blocks_equal_whole_file(tmp_path: Path, small_blocks: None):
    rng = np.random.default_rng(4)
    values = rng.normal(size=(30, 12, 2))
    values[3, 8:] = values[7, :3] = values[9, 4] = np.nan
    dims = {"a": (("who", "day"), values[..., 0]), "b": (("who", "day"), values[..., 1])}
    dataset = xr.Dataset(dims, {"day": np.arange(12.0)})
    path = tmp_path / "series.nc"
    dataset.to_netcdf(path, engine="h5netcdf")
    store = data.open_series(path, series="who", time="day", progress=False)
    table = data.read(dataset.assign_coords(who=np.arange(30)), series="who", time="day")
    assert_reads_as(store, table)


@pytest.mark.parametrize("empty", [slice(0, 11), slice(14, 30)])
def test_unobserved_netcdf_blocks_are_skipped(tmp_path: Path, small_blocks: None, empty: slice):
    values = np.random.default_rng(5).normal(size=(30, 12))
    values[empty] = np.nan
    dataset = xr.Dataset({"a": (("who", "time"), values)}, {"who": np.arange(30)})
    dataset.to_netcdf(tmp_path / "series.nc", engine="h5netcdf")
    store = data.open_series(tmp_path / "series.nc", series="who", progress=False)
    full_table = data.read(dataset, series="who")
    tables = list(store.tables())
    assert store.num_series == full_table.num_series == 30 - len(range(*empty.indices(30)))
    np.testing.assert_array_equal(np.concatenate([table.ys for table in tables]), full_table.ys)


def test_parquet_parts_with_continued_index_equal_whole_file(
    frame: pd.DataFrame, tmp_path: Path, small_blocks: None
):
    """A part of a frame is written with the numbers that its rows had."""
    frame = frame.drop(columns="day").reset_index(drop=True)
    half = int(np.flatnonzero(frame["who"] == "s20")[0])
    paths = [tmp_path / f"{part}.parquet" for part in "ab"]
    frame.iloc[:half].to_parquet(paths[0], row_group_size=20)
    frame.iloc[half:].to_parquet(paths[1])
    store = data.open_series(paths, series="who", progress=False)
    assert_reads_as(store, data.read(frame, series="who"))


@pytest.mark.parametrize("how", ["category", "several", "index", "input too", "empty groups"])
def test_other_parquet_layouts_equal_whole_file(
    frame: pd.DataFrame, tmp_path: Path, small_blocks: None, how: str
):
    options: dict[str, Any] = {"series": "who"}
    if how == "category":
        frame = frame.astype({"who": "category"})
    elif how == "several":
        number = frame["who"].str[1:].astype(int)
        frame = frame.assign(who=number // 7, part=number % 7)
        options["series"] = ["who", "part"]
    elif how == "index":
        frame = frame.set_index(["who", "day"])
    elif how == "input too":
        frame["b"] = np.arange(1.0, len(frame) + 1)
        options |= {"time": "day", "columns": ["a", "b"], "inputs": "b", "freq": "irregular"}
    table, path = data.read(frame, **options), tmp_path / "series.parquet"
    if how == "empty groups":
        rows = pa.Table.from_pandas(frame)
        with pq.ParquetWriter(path, rows.schema) as writer:
            for first in range(0, len(frame), 17):
                writer.write_table(rows.slice(0, 0))
                writer.write_table(rows.slice(first, 17))
    else:
        frame.to_parquet(path, row_group_size=17)
    assert_reads_as(data.open_series(path, progress=False, **options), table)


def test_several_files_form_one_set_of_series(
    frame: pd.DataFrame, tmp_path: Path, small_blocks: None
):
    paths = [tmp_path / f"{part}.parquet" for part in "ab"]
    early = frame["who"] < "s20"
    for path, rows in zip(paths, (early, ~early), strict=True):
        frame[rows].to_parquet(path, row_group_size=20)
    store = data.open_series(paths, series="who", progress=False)
    assert_reads_as(store, data.read(frame, series="who"))


@pytest.mark.slow
def test_fit_from_file_equals_fit_from_arrays(frame: pd.DataFrame, tmp_path: Path):
    """One block, so that a store of the arrays has the same order."""
    path = tmp_path / "series.parquet"
    frame.to_parquet(path)
    store = data.open_series(path, series="who", columns="a", progress=False)
    table = data.read(frame, series="who", columns="a")

    class Arrays(InMemoryStore):
        def load(self, block: int) -> dict[str, np.ndarray | None]:
            return {**super().load(block), "mask": table.mask}

    arrays = Arrays(np.where(table.mask, table.ys, 0.0), [40], table.length)
    one, other = fit(store, learn="both"), fit(arrays, learn="both")
    assert arrays_equal(one.model, other.model)
    assert np.array_equal(one.history, other.history)


def broken(frame: pd.DataFrame, how: str, path: Path) -> dict[str, Any]:
    """Writes a file that is wrong in one way, and says how to open it."""
    options: dict[str, Any] = {"series": "who"}
    if how == "apart":
        frame = pd.concat([frame.iloc[:100], frame.iloc[200:], frame.iloc[100:200]])
        frame = pd.concat(
            [frame, frame.iloc[:2].assign(day=frame["day"].iloc[:2] + pd.Timedelta("900D"))]
        )
    elif how == "text":
        frame = frame.astype({"a": object}).reset_index(drop=True)
        frame["a"] = frame["a"].astype(str)
        frame.loc[200, "a"] = "none of these"
    elif how == "column":
        options["series"] = "whom"
    elif how == "off the grid":
        frame = frame.astype({"day": "datetime64[us]"}).reset_index(drop=True)
        frame.loc[300, "day"] += pd.Timedelta("1h")
    elif how == "empty":
        frame = frame.iloc[:0]
    frame.to_parquet(path, row_group_size=20)
    if how == "cut short":
        path.write_bytes(path.read_bytes()[:-200])
    return options


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("apart", "is in another block too; sort the rows by who"),
        ("text", "row 201, column 'a': 'none of these' is not a number"),
        ("column", "no column 'whom'"),
        ("off the grid", "are on a grid of step 1D"),
        ("empty", "no rows"),
        ("cut short", "damaged, truncated"),
    ],
)
def test_broken_files_are_refused_before_a_fit_begins(
    frame: pd.DataFrame, tmp_path: Path, small_blocks: None, how: str, words: str
):
    path = tmp_path / "series.parquet"
    options = broken(frame, how, path)
    with pytest.raises(data.DataError, match=words):
        data.open_series(path, progress=False, **options)


def test_non_series_files_are_refused(tmp_path: Path):
    with pytest.raises(data.DataError, match="no such file"):
        data.open_series(tmp_path / "gone.parquet", series="who")
    (tmp_path / "folder.nc").mkdir()
    with pytest.raises(data.DataError, match="name a file in it"):
        data.open_series(tmp_path / "folder.nc", series="who")
    (tmp_path / "table.csv").write_text("who,y\n1,2\n")
    with pytest.raises(data.DataError, match="use one of .parquet, .nc"):
        data.open_series(tmp_path / "table.csv", series="who")
    with pytest.raises(data.DataError, match="no file; name one"):
        data.open_series([], series="who")
    xr.Dataset({"y": ("day", np.ones(3))}).to_netcdf(tmp_path / "one.nc", engine="h5netcdf")
    with pytest.raises(data.DataError, match="is not a dimension of the file"):
        data.open_series(tmp_path / "one.nc", series="who")
