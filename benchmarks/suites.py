"""Suites of `make bench`: the compared tasks, and the table of each suite."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from commands import ROWS, time_commands
from measure import Record, Task
from race import AGREEMENT, Effort, Entrant, race
from report import Table, milliseconds, times

# Lets XLA compile a small loop as one kernel instead of a sequence of them. It is a compiler option
# that a user may set, not what the library does by itself, so that it has rows of its own.
LOOP_FLAG = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000"
FLAGGED = "retrodict, with the XLA flag"
ONE_CORE = "--xla_cpu_multi_thread_eigen=false"
SIZES = ((1, 1), (3, 4), (10, 10))
"""Numbers of states and of observed entries."""
PEERS = ("statsmodels", "dynamax", "cuthbert")
COLUMNS = ["", "best ms", "median ms", "of retrodict", "target", "compile s", "difference"]
AGREE = (
    f"Answers agree to {AGREEMENT:g} before anything is timed; 'difference' is from retrodict's."
)


@dataclass(frozen=True)
class Outcome:
    """Result of a suite: raw records for JSON, and tables to print."""

    records: list[Record]
    tables: list[Table]


def smoother(quick: bool) -> Outcome:
    """Compare filter and smoother with three peers."""
    outcome = Outcome([], [])
    for d, m in SIZES[:2] if quick else SIZES:
        base = Task("retrodict", "smoother", d, m, num_times=2000)
        entrants = [
            Entrant("retrodict", base),
            *(Entrant(name, replace(base, library=name), 10.0) for name in PEERS),
            Entrant(FLAGGED, replace(base, xla_flags=LOOP_FLAG)),
        ]
        _add_race(outcome, f"filter and smoother, d={d}, m={m}, n=2000", entrants, quick)
    return outcome


def gradient(quick: bool) -> Outcome:
    """Compare the gradient of the log-evidence in all parameters."""
    outcome = Outcome([], [])
    for d, m in ((1, 1), (3, 4)):
        base = Task("retrodict", "gradient", d, m, num_times=2000)
        entrants = [
            Entrant("retrodict", base),
            Entrant("dynamax", replace(base, library="dynamax"), 3.0),
            Entrant(FLAGGED, replace(base, xla_flags=LOOP_FLAG)),
        ]
        title = f"gradient of the log-evidence, d={d}, m={m}, n=2000"
        _add_race(outcome, title, entrants, quick)
    return outcome


def variants(quick: bool) -> Outcome:
    """Measure gaps at random, where covariances never settle, and the parallel form on a CPU."""
    outcome = Outcome([], [])
    for d, m in SIZES[1:2] if quick else SIZES[1:]:
        base = Task("retrodict", "smoother", d, m, num_times=2000)
        entrants = [
            Entrant("retrodict, 10% missing", replace(base, missing=0.1)),
            Entrant("retrodict, nothing missing", base, compared=False),
            Entrant("dynamax, nothing missing", replace(base, library="dynamax"), 1.0, False),
            Entrant("retrodict, parallel=True", replace(base, parallel=True), compared=False),
        ]
        _add_race(outcome, f"gaps and the parallel form, d={d}, m={m}, n=2000", entrants, quick)
    return outcome


def batch(quick: bool) -> Outcome:
    """Compare many series by vmap: with the same covariances, and with gaps of their own."""
    count, outcome = 64, Outcome([], [])
    for (d, m), target in (((3, 4), 10.0), ((10, 10), 2.5))[: 1 if quick else 2]:
        base = Task("retrodict", "smoother", d, m, num_times=500, num_series=count)
        peers = [name for name in PEERS if name != "statsmodels"]
        entrants = [
            Entrant("retrodict", base),
            *(Entrant(name, replace(base, library=name), target) for name in peers),
            Entrant("retrodict, 10% missing", replace(base, missing=0.1), compared=False),
        ]
        title = f"{count} series by vmap, d={d}, m={m}, n=500"
        records = race(title, entrants, Effort(2, 5) if quick else Effort(3, 10))
        table = _race_table(title, records)
        table.columns.insert(1, "ms per series")
        for row, record in zip(table.rows, records, strict=True):
            row.insert(1, milliseconds(record.best_s and record.best_s / count))
        outcome.records.extend(records)
        outcome.tables.append(table)
    return outcome


def compilation(quick: bool) -> Outcome:
    """Measure compile time and run time by dimension."""
    effort = Effort(1, 5 if quick else 10)
    dims = (1, 3, 8) if quick else (1, 2, 3, 5, 8, 10, 16)
    records, rows = [], []
    for d in dims:
        row = [str(d)]
        for what in ("smoother", "gradient"):
            task = Task("retrodict", what, d, d, num_times=2000)
            (record,) = race(f"{what}, d=m={d}", [Entrant("retrodict", task)], effort)
            records.append(record)
            row += [_seconds(record.compile_s), record.failure or milliseconds(record.best_s)]
        rows.append(row)
    columns = ["d=m", "smoother compile s", "run ms", "gradient compile s", "run ms"]
    return Outcome(records, [Table("tracing and compiling, n=2000", columns, rows)])


def scaling(quick: bool) -> Outcome:
    """Measure time and memory by length, on one core."""
    lengths = (10**3, 10**4, 10**5) if quick else (10**3, 10**4, 10**5, 10**6)
    records, rows = [], []
    for n in lengths:
        task = Task("retrodict", "smoother", 3, 4, n, cores=1, xla_flags=ONE_CORE, memory=True)
        effort = Effort(1, 3 if n >= 10**6 else 10)
        (record,) = race(f"one core, n={n:,}", [Entrant("retrodict", task)], effort)
        records.append(record)
        rows.append(_scaling_row(record))
    table = Table(
        "length of the series on one core, d=3, m=4",
        ["n", "best ms", "ns a step", "resident MB", "bytes a step", "XLA's bytes a step"],
        rows,
        [
            "Resident: the peak above that of a run at n=16, data and results included;"
            " below n=100,000 it is mostly the second compilation.",
            "XLA's: arguments, results and temporaries, as its buffer assignment counts them.",
            *_exponents(records),
        ],
    )
    return Outcome(records, [table])


def commands(quick: bool) -> Outcome:
    """Measure commands of the command line, with an empty and with a filled cache."""
    records = time_commands(1 if quick else 5)
    rows = [
        [
            record.label,
            record.failure or _seconds(record.facts["first_s"]),
            _seconds(record.best_s),
            _seconds(record.median_s),
        ]
        for record in records
    ]
    title = f"commands on a run of a local level with {ROWS} rows"
    return Outcome(records, [Table(title, ["", "first s", "best s", "median s"], rows)])


SUITES: dict[str, Callable[[bool], Outcome]] = {
    "smoother": smoother,
    "gradient": gradient,
    "variants": variants,
    "batch": batch,
    "compilation": compilation,
    "scaling": scaling,
    "commands": commands,
}


def _add_race(outcome: Outcome, title: str, entrants: list[Entrant], quick: bool) -> None:
    records = race(title, entrants, Effort(2, 10) if quick else Effort(3, 30))
    outcome.records.extend(records)
    outcome.tables.append(_race_table(title, records))


def _race_table(title: str, records: list[Record]) -> Table:
    rows = []
    for record in records:
        if record.failure:
            rows.append([record.label, record.failure, *[""] * 5])
            continue
        rows.append(
            [
                record.label,
                milliseconds(record.best_s),
                milliseconds(record.median_s),
                times(record.ratio),
                times(record.target, "≥ "),
                _seconds(record.compile_s),
                "–" if record.difference is None else f"{record.difference:.0e}",
            ]
        )
    return Table(title, list(COLUMNS), rows, [AGREE])


def _scaling_row(record: Record) -> list[str]:
    n, best, facts = record.task.num_times, record.best_s, record.facts
    if best is None:
        return [f"{n:,}", record.failure or "–", *[""] * 4]
    return [
        f"{n:,}",
        milliseconds(best),
        f"{1e9 * best / n:.0f}",
        f"{facts['resident_bytes'] / 1e6:.0f}",
        f"{facts['resident_bytes'] / n:.0f}",
        f"{facts['xla_bytes'] / n:.0f}",
    ]


def _exponents(records: list[Record]) -> list[str]:
    """Return the slopes of time and memory over the last factor of ten; 1 is linear."""
    last = [record for record in records if record.best_s is not None][-2:]
    if len(last) < 2:
        return []
    short, long = last
    decades = math.log(long.task.num_times / short.task.num_times)
    assert short.best_s is not None and long.best_s is not None
    time = math.log(long.best_s / short.best_s) / decades
    memory = math.log(long.facts["resident_bytes"] / short.facts["resident_bytes"]) / decades
    return [
        f"From n={short.task.num_times:,} to {long.task.num_times:,}, time grows as n^{time:.2f}"
        f" and resident memory as n^{memory:.2f}."
    ]


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
