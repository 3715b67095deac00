"""Rows of `make bench`: which tasks are compared, with which targets, and the cost curves."""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from measure import Record, Task

KALMAN_PEERS = ("statsmodels", "dynamax", "cuthbert")
LIBRARIES = (*KALMAN_PEERS, "particles", "floor")

Measure: TypeAlias = Literal["peers", "floor", "seconds", "first", "beyond floor"]
TARGETS: dict[Measure, str] = {
    "peers": "≥ {:g}x",
    "floor": "≤ {:g}x",
    "seconds": "≤ {:g} s",
    "first": "≤ {:g} s",
    "beyond floor": "≤ {:g} s more",
}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        suite: the part of the benchmark.
        work: what is measured.
        task: the task of retrodict.
        peers: the libraries to compare with, or `"floor"`.
        measure: what is judged: the time of the fastest peer divided by that of retrodict, that of
            retrodict divided by the floor, a time in seconds, that of the first call, or a time
            beyond that of the floor.
        target: the limit, if there is one.
        peer_changes: how the tasks of peers differ in more than the library.
        why: the reason, in one line, for a target that is known to be missed.
    """

    suite: str
    work: str
    task: Task
    peers: tuple[str, ...] = ()
    measure: Measure = "peers"
    target: float | None = None
    peer_changes: tuple[tuple[str, Any], ...] = ()
    why: str = ""

    def tasks(self) -> list[Task]:
        """Return the tasks, that of retrodict first."""
        changes = dict(self.peer_changes)
        return [self.task, *(replace(self.task, library=peer, **changes) for peer in self.peers)]

    def seconds(self, record: Record | None) -> float | None:
        """Return the time that the row shows of a record."""
        if record is None or record.failure:
            return None
        return record.first_s if self.measure == "first" else record.best_s

    def value(self, records: dict[Task, Record]) -> float | None:
        """Return what is judged, `None` if a measurement failed."""
        own, *others = (self.seconds(records.get(task)) for task in self.tasks())
        if own is None:
            return None
        if self.measure in ("seconds", "first"):
            return own
        known = [other for other in others if other is not None]
        if not known:
            return None
        fastest = min(known)
        ratios = {"peers": fastest / own, "floor": own / fastest, "beyond floor": own - fastest}
        return ratios[self.measure]

    def met(self, records: dict[Task, Record]) -> bool | None:
        """Return whether the target is met; `None` without a target or a value."""
        value = self.value(records)
        if self.target is None or value is None:
            return None
        return value >= self.target if self.measure == "peers" else value <= self.target


@dataclass(frozen=True)
class Curve:
    """Cost of exact smoothing by one size."""

    axis: str
    title: str
    sizes: tuple[int, ...]
    base: Task
    fields: tuple[str, ...]  # of the task, which the size is
    libraries: tuple[str, ...] = ("retrodict", "dynamax")

    def tasks(self, size: int) -> list[Task]:
        """Return the tasks of one size."""
        task = replace(self.base, **dict.fromkeys(self.fields, size))
        return [replace(task, library=library) for library in self.libraries]


def _smoother(d: int, m: int, n: int = 2000, series: int = 1, **others: Any) -> Task:
    return Task("retrodict", "smoother", d, m, n, series, **others)


def _size(task: Task) -> str:
    series = f", {task.num_series} series" if task.num_series > 1 else ""
    return f"d={task.state_dim}, m={task.obs_dim}, n={task.num_times}{series}"


def _smoothers() -> list[Row]:
    rows = []
    for d, m in ((1, 1), (3, 4), (10, 10)):
        task = _smoother(d, m)
        why = "almost half of the time goes into the first gains, until they settle."
        work = f"smoother, {_size(task)}"
        rows.append(Row("smoother", work, task, KALMAN_PEERS, target=10, why=why))
    for d, m, target, peers in ((3, 4, 10, KALMAN_PEERS), (10, 10, 2.5, ("dynamax", "cuthbert"))):
        task = _smoother(d, m, 500, 64)
        why = "means, and copies of the covariances for every series, are limited by memory."
        work = f"smoother, {_size(task)}"
        rows.append(Row("smoother", work, task, peers, target=target, why=why))
    for d, m in ((3, 4), (10, 10)):
        task = _smoother(d, m, 500, 64, missing=0.1)
        work = f"the same with 10% missing at random, peer without, {_size(task)}"
        changes = (("missing", 0.0),)
        why = "covariances are computed for every series, and by the peer once for all."
        rows.append(Row("smoother", work, task, ("dynamax",), "peers", 1, changes, why))
    task = _smoother(10, 10, varying=True)
    why = "factors of filtering laws and backward kernels are computed for every row as well."
    work = f"time-varying, {_size(task)}"
    rows.append(Row("smoother", work, task, ("dynamax",), target=1, why=why))
    return rows


def _gradients() -> list[Row]:
    tasks = [Task("retrodict", "gradient", d, m, 2000) for d, m in ((1, 1), (3, 4), (10, 10))]
    return [
        Row("gradient", f"gradient of the evidence, {_size(task)}", task, ("dynamax",), target=3)
        for task in tasks
    ]


def _first_calls() -> list[Row]:
    """Judge first calls of programs that other rows time, and of `fit`."""
    rows = []
    for what in ("smoother", "gradient"):
        for d, m, limit in ((3, 4, 1.5), (10, 10, 2.5)):
            task = Task("retrodict", what, d, m, 2000)
            work = f"first call of the {what}, d={d}, m={m}"
            why = "the forms for gaps, singular noise and batches are compiled as well."
            rows.append(Row("first", work, task, ("dynamax",), "first", limit, why=why))
    for name in ("kalman", "conjugate", "gated", "recurrent", "scan", "nonlinear", "mixture"):
        task = Task("retrodict", "fit", 3, 4, 100, 64, option=name)
        work = f"fit of one step, {name}, d=3, m=4"
        why = "almost all of it is compilation of the training step and of the evaluation."
        rows.append(Row("first", work, task, (), "first", 5, why=why))
    return rows


def _families() -> list[Row]:
    rows = []
    for name in ("gated", "conjugate", "recurrent"):
        for d, n, target in ((1, 64, None), (10, 100, 10)):
            task = Task("retrodict", "training", d, d, n, 64, option=name)
            work = f"training step, {name}, {_size(task)}"
            why = "factorisations row after row, with their derivatives, are not in the floor."
            rows.append(Row("families", work, task, ("floor",), "floor", target, why=why))
    for name in ("gated", "recurrent", "scan", "conjugate"):
        task = Task("retrodict", "inference", num_times=500, option=name)
        peers = ("cuthbert",) if name == "gated" else ()
        about = ", peer with exact FFBSi" if peers else ""
        rows.append(Row("families", f"inference, {name}, d=1, n=500{about}", task, peers))
    return rows


def _particles() -> list[Row]:
    both = ("cuthbert", "particles")
    sizes = (
        ("mcmc", 1, 500, both, 5),
        ("mcmc", 10, 500, both, None),
        ("exact", 1, 500, both, 8),
        ("exact", 10, 50, both, None),
        ("filter", 1, 500, ("particles",), None),
    )
    names = {"mcmc": "Metropolis backward sampling", "exact": "exact backward sampling"}
    return [
        Row(
            "particles",
            f"{names.get(sampler, 'particle filter')}, d={d}, n={n}, 1,000 particles",
            Task("retrodict", "paths", d, 1, n, option=sampler),
            peers,
            target=target,
            why="the filter alone takes more than half of the time that the target allows.",
        )
        for sampler, d, n, peers, target in sizes
    ]


def _linearised() -> list[Row]:
    return [
        Row(
            "linearised",
            f"{name} smoother, pendulum, n=500",
            Task("retrodict", "linearised", 2, 1, 500, option=name),
            ("dynamax",),
        )
        for name in ("extended", "unscented")
    ]


def _commands() -> list[Row]:
    rows = []
    for name in ("smooth", "forecast", "plot", "check"):
        task, work = Task("retrodict", "command", option=name), f"`retrodict {name}`, 150 rows"
        rows.append(Row("commands", work + ", repeated", task, (), "seconds", 2))
        rows.append(Row("commands", work + ", first", task, (), "first", 4))
    task = Task("retrodict", "import")
    work = "all names of `retrodict`, beyond JAX"
    rows.append(Row("commands", work, task, ("floor",), "beyond floor", 0.7))
    return rows


ROWS = [
    *_smoothers(),
    *_gradients(),
    *_first_calls(),
    *_families(),
    *_particles(),
    *_linearised(),
    *_commands(),
]
SUITES = tuple(dict.fromkeys(row.suite for row in ROWS))

CURVES = [
    Curve(
        "n",
        "one series of d=3, m=4, by its length",
        (100, 1000, 10_000, 100_000, 1_000_000),
        _smoother(3, 4),
        ("num_times",),
    ),
    Curve(
        "batch",
        "series of 500 rows of d=3, m=4, by their number",
        (1, 4, 16, 64, 256, 1024),
        _smoother(3, 4, 500),
        ("num_series",),
    ),
    Curve(
        "d",
        "one series of 2,000 rows, by d = m",
        (1, 2, 3, 5, 7, 10, 14, 20),
        _smoother(1, 1),
        ("state_dim", "obs_dim"),
    ),
]
