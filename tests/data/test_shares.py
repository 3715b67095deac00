"""Tables that processes share are, put together, the tables that one process reads."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

import retrodict as rd
from retrodict.data import _chunked, _shares, _stored, _table
from retrodict.distributed import processes

SECONDS = 60


class Job:
    """Processes that are threads: what they say is exchanged at a barrier."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.barrier = count, threading.Barrier(count, timeout=SECONDS)
        self.said: list[Any] = [None] * count
        self.local = threading.local()
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: self.local.index)
        for module in (processes, _shares, _stored):
            monkeypatch.setattr(module, "all_gather_object", self.say)
        monkeypatch.setattr(_shares, "process_slice", self.share)

    def say(self, value: Any) -> list[Any]:
        self.barrier.wait()
        self.said[self.local.index] = json.loads(json.dumps(value))
        self.barrier.wait()
        return list(self.said)

    def share(self, num_series: int) -> slice:
        each = -(-num_series // self.count)
        begin = min(self.local.index * each, num_series)
        return slice(begin, min(begin + each, num_series))

    def run(self, task: Callable[[], Any]) -> list[Any]:
        """What each process finds, or the error with which it ends."""
        results: list[Any] = [None] * self.count

        def one(index: int) -> None:
            self.local.index = index
            try:
                results[index] = task()
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        return results


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Job]]:
    for module in (_shares, _table):
        monkeypatch.setattr(module, "MAX_LEADING_ROWS", 25)
    yield lambda count: Job(count, monkeypatch)


def frame(identifiers: Any = range(1, 8), *, seed: int = 0) -> pd.DataFrame:
    """Seven series of 4 to 12 rows, some of which are missing, of dates and two columns."""
    rng = np.random.default_rng(seed)
    parts = []
    for identifier in identifiers:
        rows = int(rng.integers(6, 13))
        days = pd.date_range("2020-02-27", periods=rows)
        values = rng.normal(size=(rows, 2))
        values[rng.random((rows, 2)) < 0.1] = np.nan
        part = pd.DataFrame({"id": identifier, "day": days, "y": values[:, 0], "z": values[:, 1]})
        row_indices = np.r_[0, 1 + np.flatnonzero(rng.random(rows - 2) < 0.9), rows - 1]
        parts.append(part.iloc[row_indices])
    return pd.concat(parts, ignore_index=True)


def by_time(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(["day", "id"], kind="stable").reset_index(drop=True)


def as_csv(table: pd.DataFrame, folder: Path) -> Path:
    table.to_csv(folder / "table.csv", index=False)
    return folder / "table.csv"


def as_tsv_with_index(table: pd.DataFrame, folder: Path) -> Path:
    table.to_csv(folder / "table.tsv", sep="\t")
    return folder / "table.tsv"


def as_parquet(table: pd.DataFrame, folder: Path) -> Path:
    table.to_parquet(folder / "table.parquet", row_group_size=7)
    return folder / "table.parquet"


def as_indexed_parquet(table: pd.DataFrame, folder: Path) -> Path:
    table.set_index(["id", "day"]).to_parquet(folder / "table.parquet", row_group_size=7)
    return folder / "table.parquet"


def as_netcdf(table: pd.DataFrame, folder: Path) -> Path:
    table.set_index(["id", "day"]).to_xarray().to_netcdf(folder / "table.nc", engine="h5netcdf")
    return folder / "table.nc"


WRITERS = (as_csv, as_tsv_with_index, as_parquet, as_indexed_parquet, as_netcdf)
TABLES = {
    "sorted": frame(),
    "by time": by_time(frame()),
    "from last to first": frame(range(7, 0, -1)),
    "text": frame(["b", "a", "10", "9", "c", "d", "2"]),
    "large numbers": frame([10, 9, 100, 1, 11, 2, 20]),
}


MANY = [pytest.param(count, marks=pytest.mark.slow) for count in (3, 5)]


@pytest.mark.parametrize("count", [2, *MANY])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("write", WRITERS)
def test_shares_concatenate_to_the_table(
    job: Callable[[int], Job], tmp_path: Path, write: Any, name: str, count: int
) -> None:
    path = write(TABLES[name], tmp_path)
    table = rd.data.read(path, series="id")
    shared = job(count).run(lambda: rd.data.read_shared(path, series="id"))
    for each in shared:
        assert isinstance(each, rd.data.SharedTable), each
        assert each.described() == table.described()
        assert each.summary == table.summary
        assert each.layout == table.layout
        leading = table.leading_series()
        assert each.leading.series == leading.series
        for what, expected in leading.batch().items():
            np.testing.assert_array_equal(each.leading.batch()[what], expected)
    local_tables = [each.local for each in shared if each.local is not None]
    assert sum((share.series for share in local_tables), ()) == table.series
    padded = [share.padded(table.summary.longest) for share in local_tables]
    for what in ("ys", "mask", "length"):
        together = np.concatenate([getattr(share, what) for share in padded])
        np.testing.assert_array_equal(together, getattr(table, what))
    times = [times for share in local_tables for times in share.times]
    for share, expected in zip(times, table.times, strict=True):
        np.testing.assert_array_equal(share, expected)


def test_shares_support_several_series_columns_and_step_inputs(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    table = by_time(frame()).assign(half=lambda t: np.where(t["id"] % 2, "odd", "even"))
    layout = {"series": ["half", "id"], "columns": ["z"], "freq": "D", "step_input": True}
    for write in (as_csv, as_parquet):
        path = write(table, tmp_path)
        full_table = rd.data.read(path, **layout)
        shared = job(2).run(lambda path=path: rd.data.read_shared(path, **layout))
        assert [each.summary for each in shared] == [full_table.summary] * 2
        assert sum((each.local.series for each in shared), ()) == full_table.series
        assert shared[1].local.input_names == ("step",)


def test_each_process_reads_only_its_row_groups(
    job: Callable[[int], Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_parquet(frame(), tmp_path)
    read: dict[int, set[int]] = {0: set(), 1: set()}
    now = job(2)
    original = _chunked.ParquetRows._table

    def recorded(self: Any, groups: list[int], columns: list[str] | None) -> Any:
        if columns is not None and columns != ["id"]:  # not the identifiers or the first series
            for group in groups:
                read[now.local.index] |= set(range(*self._begins[group : group + 2]))
        return original(self, groups, columns)

    monkeypatch.setattr(_chunked.ParquetRows, "_table", recorded)
    shared = now.run(lambda: rd.data.read_shared(path, series="id"))
    rows = len(frame())
    assert read[0] | read[1] == set(range(rows))
    assert len(read[0] & read[1]) <= 7  # one row group has the last of one and the first of others
    assert all(isinstance(each, rd.data.SharedTable) for each in shared)


def test_row_counter_column_is_ignored_in_shares(job: Callable[[int], Job], tmp_path: Path) -> None:
    table = by_time(frame())
    table.insert(0, "rownames", np.arange(1, len(table) + 1))
    for write in (as_csv, as_parquet):
        path = write(table, tmp_path)
        for each in job(2).run(lambda path=path: rd.data.read_shared(path, series="id")):
            assert each.names == ("y", "z")
            assert "ignored: rownames" in each.described()


def counted_from_1000(table: pd.DataFrame) -> Any:
    return np.arange(1000, 1000 + len(table))


def counted_anew(table: pd.DataFrame) -> Any:
    return table.groupby("id").cumcount() + 1


@pytest.mark.parametrize("count", [counted_from_1000, counted_anew])
def test_other_counters_are_observed_in_shares(
    job: Callable[[int], Job], tmp_path: Path, count: Any
) -> None:
    table = frame().assign(row=count)
    for write in (as_csv, as_parquet):
        path = write(table, tmp_path)
        full_table = rd.data.read(path, series="id")
        assert full_table.names == ("y", "z", "row")
        for each in job(2).run(lambda path=path: rd.data.read_shared(path, series="id")):
            assert each.names == full_table.names


def test_multiline_cells_are_not_counted_as_rows(job: Callable[[int], Job], tmp_path: Path) -> None:
    table = by_time(frame())
    table.insert(0, "rownames", np.arange(1, len(table) + 1))
    path = as_csv(table.assign(note="two\nlines"), tmp_path)
    for each in job(2).run(lambda: rd.data.read_shared(path, series="id")):
        assert each.names == rd.data.read(path, series="id").names == ("y", "z")


@pytest.mark.parametrize("start", [0, 8])
@pytest.mark.parametrize("name", [None, "row"])
def test_parquet_range_index_is_read_in_shares(
    job: Callable[[int], Job], tmp_path: Path, start: int, name: str | None
) -> None:
    table = frame().drop(columns="day")
    table.index = pd.RangeIndex(start, start + len(table), name=name)
    path = as_parquet(table, tmp_path)
    full_table = rd.data.read(path, series="id", freq="irregular")
    for each in job(2).run(lambda: rd.data.read_shared(path, series="id", freq="irregular")):
        assert each.layout == full_table.layout
        assert each.summary == full_table.summary


def test_unnamed_index_identifies_series(job: Callable[[int], Job], tmp_path: Path) -> None:
    table = frame().set_index("id").rename_axis(None)
    path = as_parquet(table, tmp_path)
    full_table = rd.data.read(path, series="index")
    for each in job(2).run(lambda: rd.data.read_shared(path, series="index")):
        assert each.summary == full_table.summary


def test_unsigned_64_bit_identifiers_are_read_in_shares(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    names = np.array([2**64 - 1, 3, 2**63 + 5, 1, 2**63, 9, 2], np.uint64)
    path = as_parquet(frame(names), tmp_path)
    full_table = rd.data.read(path, series="id")
    assert full_table.series == tuple(sorted(int(name) for name in names))
    shared = job(2).run(lambda: rd.data.read_shared(path, series="id"))
    assert sum((each.local.series for each in shared), ()) == full_table.series


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda day: f"{day}T00:00:00+03:00", "dates, and those of others dates with an offset"),
        (lambda day: str(day.day), "dates, and those of others numbers"),
    ],
)
def test_mixed_kinds_of_times_are_refused(
    job: Callable[[int], Job], tmp_path: Path, other: Any, words: str
) -> None:
    table = frame()
    in_second_share = table["id"] > 4  # those of the second of two processes
    days = [
        other(d.date()) if o else str(d.date())
        for d, o in zip(table["day"], in_second_share, strict=True)
    ]
    path = as_csv(table.assign(day=days), tmp_path)
    options: dict[str, Any] = {"series": "id", "time": "day", "freq": "irregular"}
    with pytest.raises(rd.data.DataError):
        rd.data.read(path, **options)
    for error in job(2).run(lambda: rd.data.read_shared(path, **options)):
        assert isinstance(error, rd.data.DataError) and words in str(error), error


def test_non_dimension_coordinate_can_be_the_series(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    dataset = frame().set_index(["id", "day"]).to_xarray().set_coords("z")
    dataset.to_netcdf(tmp_path / "table.nc", engine="h5netcdf")
    full_table = rd.data.read(tmp_path / "table.nc", series="id", columns="z")
    read = job(2).run(lambda: rd.data.read_shared(tmp_path / "table.nc", series="id", columns="z"))
    for each in read:
        assert isinstance(each, rd.data.SharedTable), each
        assert each.summary == full_table.summary


def test_gap_length_is_judged_over_all_series(job: Callable[[int], Job], tmp_path: Path) -> None:
    table = frame()
    table.loc[len(table) - 1, "day"] += pd.Timedelta(days=300)
    path = as_csv(table, tmp_path)
    full_table = rd.data.read(path, series="id", freq="D")
    for each in job(2).run(lambda: rd.data.read_shared(path, series="id", freq="D")):
        assert isinstance(each, rd.data.SharedTable), each
        assert each.summary == full_table.summary


def test_leading_series_are_read_until_all_columns_have_values(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    table = frame()
    table.loc[table["id"] <= 3, "z"] = np.nan
    path = as_parquet(table, tmp_path)
    leading = rd.data.read(path, series="id").leading_series()
    assert 4 <= leading.num_series < 7
    for each in job(2).run(lambda: rd.data.read_shared(path, series="id")):
        assert each.leading_series().series == leading.series


def test_error_explains_that_leading_series_set_the_layout(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    rows = frame(range(40, 80)).groupby("id").head(1)
    path = as_csv(pd.concat([rows, frame(range(80, 90))]), tmp_path)
    for error in job(2).run(lambda: rd.data.read_shared(path, series="id")):
        assert isinstance(error, ValueError)
        assert "one row is not a series" in str(error) and "series determine how all" in str(error)


def test_read_shared_refuses_frames(job: Callable[[int], Job], untyped: None) -> None:
    table: Any = frame()
    for error in job(2).run(lambda: rd.data.read_shared(table, series="id")):
        assert isinstance(error, TypeError) and "got DataFrame; use read" in str(error)


def test_small_tables_and_single_series_are_read_by_each_process(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    small = frame().query("id <= 2")
    alone = small.query("id == 1").drop(columns="id")
    for table, series in ((small, "id"), (alone, None)):
        path = as_csv(table, tmp_path)
        full_table = rd.data.read(path, series=series)
        shared = job(2).run(lambda path=path, id=series: rd.data.read_shared(path, series=id))
        for each in shared:
            assert isinstance(each, rd.data.Table)
            assert each.summary == full_table.summary


def test_irregular_step_unit_is_set_by_all_series(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    table = frame()
    sizes = table.groupby("id").size().tolist()
    table["day"] = np.concatenate(
        [np.cumsum(np.linspace(1, 1.7, size) + i) for i, size in enumerate(sizes)]
    )
    path = as_csv(table, tmp_path)
    layout = {"series": "id", "step_input": True, "freq": "irregular", "time": "day"}
    for each in job(2).run(lambda: rd.data.read_shared(path, **layout)):
        assert each.step_unit == rd.data.read(path, **layout).step_unit
    for each in job(2).run(lambda: rd.data.read_shared(path, **layout, step_unit=2.0)):
        assert isinstance(each, rd.data.SharedTable)
        assert each.summary == rd.data.read(path, **layout, step_unit=2.0).summary


def test_unreadable_row_is_reported_by_all_processes(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    table = frame().astype({"y": object})
    table.loc[len(table) - 1, "y"] = "wrong"
    path = as_csv(table, tmp_path)
    first, second = job(2).run(lambda: rd.data.read_shared(path, series="id"))
    wrong = f"{path}, line {len(table) + 1}, column 'y': 'wrong' is not a number"
    assert isinstance(second, rd.data.DataError) and str(second).startswith(wrong)
    assert isinstance(first, ValueError) and str(first).startswith(f"Process 1: {wrong}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.assign(id=t["id"].where(t["id"] != 3)), "the identifier is missing"),
        (lambda t: t.assign(z=np.nan), "column 'z': every value is missing"),
        (lambda t: t.rename(columns={"id": "who"}), "there is no column 'id' (series)"),
        (lambda t: pd.concat([t, t.tail(1)]), "is in"),
    ],
)
@pytest.mark.parametrize("write", [as_csv, as_parquet])
def test_wrong_tables_are_refused_in_all_processes(
    job: Callable[[int], Job], tmp_path: Path, change: Any, words: str, write: Any
) -> None:
    path = write(change(frame()), tmp_path)
    for error in job(2).run(lambda: rd.data.read_shared(path, series="id", columns=["y", "z"])):
        assert isinstance(error, ValueError) and words in str(error), error


def test_header_without_rows_is_refused_as_in_one_process(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    path = as_csv(frame().head(0), tmp_path)
    for error in job(2).run(lambda: rd.data.read_shared(path, series="id")):
        assert isinstance(error, rd.data.DataError) and "no rows below the header" in str(error)


def test_small_fractions_are_not_dates(job: Callable[[int], Job], tmp_path: Path) -> None:
    table = frame()
    steps = np.where(table["id"] > 4, 1.2345678e-05, 0.1)
    table["day"] = steps * (1 + table.groupby("id").cumcount())
    path = as_csv(table, tmp_path)
    options: dict[str, Any] = {"series": "id", "time": "day", "freq": "irregular"}
    full_table = rd.data.read(path, **options)
    for each in job(2).run(lambda: rd.data.read_shared(path, **options)):
        assert isinstance(each, rd.data.SharedTable), each
        assert each.summary == full_table.summary


def test_missing_or_differing_files_are_refused(job: Callable[[int], Job], tmp_path: Path) -> None:
    for error in job(2).run(lambda: rd.data.read_shared(tmp_path / "no.csv", series="id")):
        assert isinstance(error, rd.data.DataError) and "there is no such file" in str(error)
    path, now = as_csv(frame(), tmp_path), job(2)

    def elsewhere() -> Any:
        place = path if now.local.index else tmp_path / "no.csv"
        return rd.data.read_shared(place, series="id")

    for error in now.run(elsewhere):
        assert isinstance(error, rd.data.DataError) and "read different files" in str(error)


def test_series_without_a_value_are_refused_where_files_are_shared(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    dataset = frame().set_index(["id", "day"]).to_xarray()
    dataset["y"][6], dataset["z"][6] = np.nan, np.nan
    dataset.to_netcdf(tmp_path / "table.nc", engine="h5netcdf")
    for error in job(2).run(lambda: rd.data.read_shared(tmp_path / "table.nc", series="id")):
        assert isinstance(error, ValueError) and "1 of its series hold no value" in str(error)


def test_small_rectangular_arrays_are_read_by_each_process(
    job: Callable[[int], Job], tmp_path: Path
) -> None:
    table = frame().groupby("id").head(3).query("id <= 5")
    table.loc[table["id"] == 5, "day"] += pd.Timedelta(days=20)
    path = as_netcdf(table, tmp_path)
    for each in job(2).run(lambda: rd.data.read_shared(path, series="id", freq="D")):
        assert isinstance(each, rd.data.Table)
        assert each.summary == rd.data.read(path, series="id", freq="D").summary


@pytest.mark.parametrize("write", [as_parquet, as_netcdf])
def test_shared_store_is_scanned_in_shares(
    job: Callable[[int], Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    monkeypatch.setattr(_stored, "BLOCK_ROWS", 10)
    path = write(frame(), tmp_path)
    alone = rd.data.open_series(path, series="id", progress=False)
    blocks: dict[int, list[int]] = {0: [], 1: []}
    original = _stored._Block.read

    def recorded(self: Any, layout: Any, *, known: bool) -> Any:
        blocks[now.local.index].append(self.number)
        return original(self, layout, known=known)

    monkeypatch.setattr(_stored._Block, "read", recorded)
    now = job(2)
    options = {"series": "id", "progress": False, "together": True}
    for each in now.run(lambda: rd.data.open_series(path, **options)):
        assert isinstance(each, rd.data.StoredSeries), each
        assert each.digest() == alone.digest()
        assert each.block_sizes == alone.block_sizes
        assert each.described() == alone.described()
    every = list(range(len(alone.block_sizes)))
    half = len(every) // 2
    assert blocks == {0: every[:half], 1: [0, *every[half:]]}


def test_error_in_a_shared_store_ends_all_processes(
    job: Callable[[int], Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stored, "BLOCK_ROWS", 10)
    table = frame()
    table.loc[len(table) - 1, "y"] = np.inf
    path = as_parquet(table, tmp_path)
    options = {"series": "id", "progress": False, "together": True}
    first, second = job(2).run(lambda: rd.data.open_series(path, **options))
    wrong = f"{path}, row {len(table)}, column 'y': the value inf is infinite"
    assert isinstance(second, rd.data.DataError) and str(second).startswith(wrong)
    assert isinstance(first, ValueError) and str(first).startswith(f"Process 1: {wrong}")


def test_single_process_reads_the_full_table(tmp_path: Path) -> None:
    path = as_csv(frame(), tmp_path)
    table = rd.data.read_shared(path, series="id")
    assert isinstance(table, rd.data.Table) and table.num_series == 7
