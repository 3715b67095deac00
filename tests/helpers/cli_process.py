"""Program of `test_mesh`: the command line with tables of more than 60 rows shared by processes.

It reports each read with its number of rows on standard error.
"""

import sys
from typing import Any

from retrodict.cli import main
from retrodict.data import Table, _shares, _table

read_table = _shares.read


def read_and_report(source: Any, **layout: Any) -> Table:
    table = read_table(source, **layout)
    print(f"read {int(table.length.sum())} rows of {table.series}", file=sys.stderr)
    return table


if __name__ == "__main__":
    _shares.MAX_LEADING_ROWS = _table.MAX_LEADING_ROWS = 60
    _shares.read = read_and_report
    main()
