"""Tables in and results out: files, pandas, xarray and arrays."""

from retrodict._interface import DataError as DataError
from retrodict._learning import AbstractSeriesStore as AbstractSeriesStore
from retrodict._learning import SharedSeries as SharedSeries
from retrodict.data._arviz import to_arviz as to_arviz
from retrodict.data._live import LiveReader as LiveReader
from retrodict.data._reader import read as read
from retrodict.data._reader import read_times as read_times
from retrodict.data._results import gaussian_ends as gaussian_ends
from retrodict.data._results import like as like
from retrodict.data._results import to_frame as to_frame
from retrodict.data._results import to_xarray as to_xarray
from retrodict.data._shares import SharedTable as SharedTable
from retrodict.data._shares import read_shared as read_shared
from retrodict.data._stored import StoredSeries as StoredSeries
from retrodict.data._stored import open_series as open_series
from retrodict.data._table import Rows as Rows
from retrodict.data._table import Table as Table
from retrodict.data._write import check_target as check_target
from retrodict.data._write import write as write

__all__ = [
    "AbstractSeriesStore",
    "DataError",
    "SharedSeries",
    "Table",
    "like",
    "open_series",
    "read",
    "read_shared",
    "read_times",
    "to_arviz",
    "to_frame",
    "to_xarray",
    "write",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
