"""Tables that are broken, each in its own way: one line that says where and what to do."""

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import retrodict as rd
from retrodict.data._files import read_binary

GOOD = "time,y,u\n2020-01-01,1.5,0\n2020-01-02,2.5,1\n2020-01-03,3.5,0\n"

# Text of a CSV file, arguments of `read`, and words of the message.
TEXTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "missing column": (GOOD, {"columns": ["flow"]}, ["bad.csv", "no column 'flow'", "time, y, u"]),
    "misspelt column": (GOOD.replace("y", "flow"), {"columns": "flwo"}, ["Did you mean 'flow'?"]),
    "missing time column": (GOOD, {"time": "when"}, ["no column 'when'", "time"]),
    "missing series column": (GOOD, {"series": "site"}, ["no column 'site'", "series"]),
    "missing input column": (GOOD, {"inputs": "rain"}, ["no column 'rain'", "inputs"]),
    "text in numbers": (GOOD.replace("2.5", "high"), {}, ["line 3", "'y'", "'high'", "number"]),
    "a dash is no missing value": (GOOD.replace("2.5", "-"), {}, ["line 3", "'-'"]),
    "text after a blank line": (
        GOOD.replace("\n2020-01-02,2.5", "\n\n2020-01-02,x"),
        {},
        ["line 4"],
    ),
    "decimal comma": (
        GOOD.replace(",", ";").replace("2.5", "2,5"),
        {},
        ["line 3", "'2,5'", "decimal point"],
    ),
    "decimal commas everywhere": (
        "t;y\n1;1,5\n2;2,5\n3;1,7\n",
        {},
        ["line 2", "'1,5'", "decimal point"],
    ),
    "thousands": (GOOD.replace("2.5", '"1,234.5"'), {}, ["line 3", "1,234.5"]),
    "underscore": (GOOD.replace("2.5", "1_000"), {}, ["line 3", "1_000"]),
    "duplicated time": (
        GOOD.replace("01-03", "01-01"),
        {},
        ["line 4", "2020-01-01", "line 2", "series="],
    ),
    "duplicated time in a series": (
        "site,time,y\na,1,1\nb,1,2\na,2,3\nb,1,4\n",
        {"series": "site"},
        ["line 5", "line 3", "time 1 "],
    ),
    "missing time": (GOOD.replace("2020-01-02", ""), {}, ["line 3", "'time'", "missing"]),
    "a time that is none": (GOOD.replace("01-02", "13-02"), {}, ["line 3", "2020-13-02", "ISO"]),
    "day or month": (
        GOOD.replace("2020-01-0", "01/02/200"),
        {},
        ["line 2", "01/02/2001", "time_format"],
    ),
    "a wrong time format": (GOOD, {"time_format": "%d/%m/%Y"}, ["line 2", "'%d/%m/%Y'"]),
    "quarters as numbers": (
        "t,y\n20003,1\n20004,2\n20011,3\n20012,4\n",
        {},
        ["line 2", "20003", "2000Q3", "freq=1"],
    ),
    "weeks as numbers": (
        "t,y\n200051,1\n200052,2\n200101,3\n200102,4\n",
        {},
        ["line 2", "200051", "2000-W51", "freq=1"],
    ),
    "infinite time": ("t,y\n1,1\ninf,2\n3,3\n", {}, ["line 3", "infinite"]),
    "some offsets": (
        "time,y\n2020-01-01T00:00Z,1\n2020-01-01T01:00,2\n",
        {},
        ["line 3", "offset"],
    ),
    "two time columns": (GOOD.replace("u", "date"), {}, ["time, date", "time=..."]),
    "irregular": (GOOD.replace("01-03", "01-03T07:11"), {}, ["irregular", "step_input=True"]),
    "far apart": ("t,y\n0,1\n1,2\n2,3\n1000000,4\n", {}, ["1000001 rows", "freq='irregular'"]),
    "not on the grid": (GOOD, {"freq": "2D"}, ["grid", "2D", "2020-01-01"]),
    "unknown freq": (GOOD, {"freq": "fortnight"}, ["'fortnight'", "'D'"]),
    "freq of numbers": (GOOD, {"freq": 1}, ["freq=1", "dates"]),
    "freq of dates": ("t,y\n0,1\n1,2\n", {"freq": "D"}, ["'D'", "numbers"]),
    "far too fine a freq": (GOOD, {"freq": "1s"}, ["172801 rows", "larger step with freq="]),
    "all missing": (
        "time,y,z\n1,,1\n2,,2\n3,NA,3\n",
        {"columns": ["y", "z"]},
        ["'y'", "every value is missing"],
    ),
    "nothing but a header": ("time,y\n", {}, ["no rows", "header"]),
    "one row": ("time,y\n1,2\n", {}, ["line 2", "one row", "add rows"]),
    "no header": ("1,2\n2,3\n3,4\n", {}, ["line 1", "column names"]),
    "nameless column": ("time,,y\n1,2,3\n2,3,4\n", {}, ["line 1", "column 2", "no name"]),
    "two columns of one name": ("time,y,y\n1,2,3\n2,3,4\n", {}, ["'y'", "rename"]),
    "a row too long": (GOOD.replace("2.5,1", "2.5,1,7"), {}, ["line 3", "4 values", "3 column"]),
    "a row too short": (GOOD.replace("2.5,1", "2.5"), {}, ["line 3", "2 values"]),
    "cut short": (GOOD[:-12], {}, ["line 4", "1 values"]),
    "open quote": (GOOD.replace("2.5", '"2.5'), {}, ["line 3", "quote"]),
    "infinite": (GOOD.replace("2.5", "inf"), {}, ["line 3", "'y'", "infinite"]),
    "huge": (GOOD.replace("2.5", "-1e300"), {}, ["line 3", "-1e+300", "1e+150"]),
    "missing input": (GOOD.replace("2.5,1", "2.5,"), {"inputs": "u"}, ["line 3", "'u'", "fill"]),
    "input in a gap": (
        GOOD + "2020-01-06,1,1\n",
        {"inputs": "u"},
        ["line 4", "2020-01-04", "u", "add the row"],
    ),
    "missing identifier": ("site,t,y\na,1,1\n,2,2\n", {"series": "site"}, ["line 3", "identifier"]),
    "no numbers": ("time,name\n1,a\n2,b\n", {}, ["no column of numbers", "columns=..."]),
    "two roles": (GOOD, {"time": "time", "columns": ["time"]}, ["'time'", "choose"]),
    "named twice": (GOOD, {"columns": ["y", "y"]}, ["'y'", "twice"]),
    "far too much padding": (GOOD, {"pad_to": 10**12}, ["pad_to=1000000000000", "at most"]),
    "too little padding": (GOOD, {"pad_to": 2}, ["pad_to=2", "at least 3"]),
    "empty": ("", {}, ["empty"]),
    "empty lines": ("\n\n\n", {}, ["empty lines"]),
}


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(rd.data.DataError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and text.endswith((".", "?", "..."))
    # What a package said is in the message, and its traceback is not shown.
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return text


@pytest.mark.parametrize("name", TEXTS)
def test_broken_text_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text, options, words = TEXTS[name]
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(text, encoding="utf-8")
    error = message(lambda: rd.data.read("bad.csv", **options))
    assert error.startswith("bad.csv")
    assert [word for word in words if word not in error] == [], error


def good_parquet() -> bytes:
    return pd.DataFrame({"time": [1, 2, 3], "y": [1.0, 2.0, 3.0]}).to_parquet()


def good_netcdf(folder: Path) -> bytes:
    dataset = xr.Dataset({"y": ("time", [1.0, 2.0, 3.0])}, coords={"time": [1, 2, 3]})
    dataset.to_netcdf(folder / "good.nc", engine="h5netcdf")
    return (folder / "good.nc").read_bytes()


BYTES: dict[str, tuple[str, Callable[[Path], bytes], list[str]]] = {
    "latin 1": ("bad.csv", lambda _: "time,flöw\n1,2\n".encode("latin-1"), ["byte 7", "UTF-8"]),
    "latin 1 below": ("bad.csv", lambda _: GOOD.encode() + b"\xe9,1,2\n", ["line 5", "UTF-8"]),
    "utf 16": ("bad.csv", lambda _: GOOD.encode("utf-16"), ["byte", "UTF-8"]),
    "zero bytes": ("bad.csv", lambda _: GOOD.encode() + b"\0\0\0", ["zero", "plain text"]),
    "a table of a spreadsheet": ("bad.xlsx", lambda _: b"PK\3\4", ["'.xlsx'", ".csv, .tsv"]),
    "no suffix": ("bad", lambda _: GOOD.encode(), ["''", ".parquet"]),
    "truncated Parquet": ("bad.parquet", lambda _: good_parquet()[:-20], ["Parquet", "again"]),
    "beginning of Parquet": ("bad.parquet", lambda _: good_parquet()[:60], ["Parquet", "again"]),
    "text as Parquet": ("bad.parquet", lambda _: GOOD.encode(), ["Parquet", "again"]),
    "empty Parquet": ("bad.parquet", lambda _: b"", ["empty"]),
    "truncated NetCDF": ("bad.nc", lambda p: good_netcdf(p)[:-2000], ["NetCDF", "again"]),
    "text as NetCDF": ("bad.nc", lambda _: GOOD.encode(), ["NetCDF", "again"]),
    "truncated classic NetCDF": ("bad.nc", lambda _: b"CDF\1\0\0", ["NetCDF", "again"]),
}


@pytest.mark.parametrize("name", BYTES)
def test_broken_bytes_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, content, words = BYTES[name]
    monkeypatch.chdir(tmp_path)
    Path(file).write_bytes(content(tmp_path))
    text = message(lambda: rd.data.read(file))
    assert text.startswith(file)
    assert [word for word in words if word not in text] == [], text


def test_damaged_bytes_of_parquet_are_refused(tmp_path: Path):
    content = bytearray(good_parquet())
    content[-30:-8] = b"\xff" * 22
    path = tmp_path / "bad.parquet"
    path.write_bytes(bytes(content))
    assert "Parquet" in message(lambda: rd.data.read(path))


@pytest.mark.parametrize("read", [rd.data.read, rd.data.read_shared])
def test_text_of_parquet_that_is_not_utf_8_is_refused(read: Callable, tmp_path: Path):
    table = pd.DataFrame({"id": ["first", "second"], "time": [1, 1], "y": [1.0, 2.0]})
    content = table.to_parquet(compression=None)
    path = tmp_path / "bad.parquet"
    path.write_bytes(content.replace(b"second", b"\xffecond"))
    text = message(lambda: read(path, series="id", time="time"))
    assert "Parquet" in text and "\n" not in text


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path):
    assert "folder" in message(lambda: rd.data.read(tmp_path))
    assert "no such file" in message(lambda: rd.data.read(tmp_path / "none.csv"))


DATE = pd.date_range("2020-01-01", periods=3)

OBJECTS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "text in a frame": (pd.DataFrame({"y": [1, "x", 3]}), {}, ["the DataFrame", "row 2", "'x'"]),
    "dates as data": (pd.DataFrame({"y": DATE}, index=DATE), {"columns": "y"}, ["row 1", "'y'"]),
    "complex": (pd.DataFrame({"y": [1j, 2j]}), {"columns": "y"}, ["row 1", "number"]),
    "NaT": (
        pd.Series([1.0, 2.0], index=pd.DatetimeIndex(["2020", None])),
        {},
        ["row 2", "missing"],
    ),
    "no rows": (pd.DataFrame({"y": []}), {"columns": "y"}, ["no rows"]),
    "levels": (pd.DataFrame(np.ones((3, 2)), columns=[["a", "a"], ["b", "c"]]), {}, ["levels"]),
    "twice a name": (pd.DataFrame(np.ones((3, 2)), columns=["a", "a"]), {}, ["'a'"]),
    "ragged": ([[1.0], [1.0, 2.0]], {}, ["unequal length"]),
    "four axes": (np.ones((2, 2, 2, 2)), {}, ["(2, 2, 2, 2)", "(batch, time, obs)"]),
    "no entries": (np.ones((0, 2)), {}, ["(0, 2)"]),
    "objects": (np.array([object()]), {}, ["dtype object"]),
    "unequal columns": ({"a": [1, 2], "b": [1, 2, 3]}, {}, ["a (2,), b (3,)"]),
    "all NaN": (np.full((4, 1), np.nan), {}, ["'y0'", "every value is missing"]),
    "an integer beyond floats": ({"y": [1, 10**400, 2]}, {}, ["row 2", "infinite"]),
    "no columns": ({"y": [1.0, 2.0]}, {"columns": []}, ["columns=[] is empty"]),
    "a negative freq": ({"y": [1.0, 2.0]}, {"freq": -1}, ["freq=-1", "above 0"]),
    "infinite entry": (np.array([1.0, -np.inf, 2.0]), {}, ["row 2", "infinite"]),
    "scalar dataset": (xr.Dataset({"a": 1.0}), {}, ["dimension"]),
    "which dimension": (xr.DataArray(np.ones((2, 3)), dims=("a", "b")), {}, ["a, b", "time=..."]),
    "too many dimensions": (
        xr.DataArray(np.ones((2, 3, 4)), dims=("time", "b", "c"), name="z"),
        {},
        ["'z'", "b, c", "series=..."],
    ),
    "nanoseconds": (
        pd.Series([1.0, 2.0], index=pd.to_datetime([1, 2], unit="ns")),
        {},
        ["row 1", "microsecond"],
    ),
    "two columns of dates": (
        pd.DataFrame({"a": DATE, "b": DATE, "y": [1.0, 2.0, 3.0]}),
        {},
        ["a, b", "time=..."],
    ),
    "a freq that is none": (np.ones(3), {"freq": True}, ["bool"]),
    "a pad_to that is none": (np.ones(3), {"pad_to": "all"}, ["'all'", "'bucket'"]),
    "a name that is taken": (
        {"step": [1.0, 2.0], "y": [1.0, 2.0]},
        {"inputs": "step", "step_input": True},
        ["'step'", "rename"],
    ),
    "nested identifiers": (
        pd.DataFrame({"id": [["a"], ["b"], ["a"]], "y": [1.0, 2.0, 3.0]}),
        {"series": "id"},
        ["'id'", "list", "flatten"],
    ),
    "a unit without a length": (
        pd.DataFrame({"y": [1.0, 2.0, 3.0]}, index=DATE),
        {"freq": "irregular", "step_input": True, "step_unit": "MS"},
        ["'MS'", "fixed length"],
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_broken_objects_are_refused(name: str):
    source, options, words = OBJECTS[name]
    text = message(lambda: rd.data.read(source, **options))
    assert [word for word in words if word not in text] == [], text


def test_every_truncation_is_refused_or_read(tmp_path: Path):
    # A file that was cut at any byte never ends in another kind of error.
    path = tmp_path / "cut.csv"
    content = GOOD.encode()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        try:
            rd.data.read(path)
        except rd.data.DataError as error:
            assert "\n" not in str(error)


def test_broken_table_leaves_no_output_file(tmp_path: Path):
    target = tmp_path / "out.parquet"
    broken = pd.DataFrame({"a": [1, "x", object()]})
    with pytest.raises(Exception, match=r"."):
        rd.data.write(broken, target)
    assert list(tmp_path.iterdir()) == []


def test_threads_that_read_restore_hooks_and_warnings():
    """The thread that began first may be the first to end."""
    before = sys.unraisablehook, list(warnings.filters)
    began, ended = threading.Event(), threading.Event()

    def first() -> None:
        began.wait(20)

    def second() -> None:
        began.set()
        assert ended.wait(20)

    threads = [
        threading.Thread(target=read_binary, args=(read, "name", "Parquet"))
        for read in (first, second)
    ]
    threads[0].start()
    threads[1].start()
    threads[0].join()
    ended.set()
    threads[1].join()
    assert (sys.unraisablehook, list(warnings.filters)) == before
