"""The layout of the library: what may stand where, and who may import whom.

Imports are read from the source, not executed, so that one inside a function or under
`TYPE_CHECKING` counts as much as any other. The rules hold for a tree in which only some of the
modules exist.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "retrodict"
ROOT = "retrodict"

# The rooms of the library, lowest first. A room may import from rooms of lower layers and from
# itself; rooms that share a layer do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_lazy",),
    ("_types",),
    ("_validate",),
    ("_devices",),
    ("_mask",),
    ("_parameters",),
    ("_linalg",),
    ("_parts", "_sharded"),
    ("_prefix",),
    ("_gaussian",),
    ("_factored", "_mixture"),
    ("_kernel",),
    ("_model",),
    ("_chain",),
    ("_functional",),
    ("_kalman", "_linearised", "_grid", "_particle", "_family"),
    ("_estimator",),
    ("_expectation",),
    ("_elbo",),
    ("_forecast", "_lag"),
    ("_importance",),
    ("_bounds",),
    ("_checkpoint",),
    ("_train",),
    ("_fit",),
    ("_online",),
    ("_information",),
    ("_smooth",),
    ("_workspace",),
    ("models",),
    ("data",),
    ("runs",),
    ("experiments",),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# The one edge between rooms of a layer: families and linearised smoothers reuse the Kalman
# operations on plain arrays.
EXCEPTIONS = [
    ("_family", "_kalman._operations"),
    ("_family", "_kalman._parallel"),
    ("_linearised", "_kalman._operations"),
]

# Rooms that stand on the public API, with what else of the library each may name.
OUTSIDE = {
    "runs": {"models", "data", "_workspace", "_lazy"},
    "experiments": {"models", "data", "_workspace"},
    "cli": {"models", "data", "runs", "experiments"},
}

# Checkpoints and the training loop are agnostic of state-space models: they know the vocabulary,
# and the loop knows checkpoints and devices.
VOCABULARY = {"_types", "_validate", "_parameters"}
KNOWS_ONLY = {"_checkpoint": VOCABULARY, "_train": VOCABULARY | {"_checkpoint", "_devices"}}

UNWANTED_PACKAGES = {
    "beartype": "annotations are executed by the tests alone",
    "distrax": "it needs TensorFlow Probability",
    "tensorflow_probability": "it breaks with each release of JAX",
}
PICKLERS = {"cloudpickle", "dill", "joblib", "pickle", "shelve"}


def module_name(path: Path, source: Path) -> str:
    """The dotted name below the package: "" for its `__init__`, "_kernel.linear" for a file."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    return module.partition(".")[0]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The full dotted name of what follows `from`, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = [ROOT, *module.split(".")] if module else [ROOT]
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, str]]:
    """Pairs of a module and the name taken from it ("" for a plain `import`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, module, is_package)
            yield from ((origin, alias.name) for alias in node.names)


def import_graph(source: Path) -> dict[str, set[str]]:
    """Which modules of the package each one imports, all named below the package."""
    paths = {module_name(path, source): path for path in sorted(source.rglob("*.py"))}
    graph: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        for origin, name in imported_names(parse(path), module, path.name == "__init__.py"):
            if room(origin) != ROOT:
                continue
            target = origin.removeprefix(ROOT).lstrip(".")
            longer = f"{target}.{name}".lstrip(".")
            graph[module].add(longer if name and is_module(longer, paths) else target)
    return graph


def is_module(name: str, known: Iterable[str]) -> bool:
    # A room that is not written yet is told by its name.
    return name in known or name in LEVEL


def complaint(importer: str, imported: str) -> str | None:
    """Why one module may not import the other, or None where it may."""
    above, below = room(importer), room(imported)
    edge = f"{importer} imports {imported or ROOT}"
    if above == below or not importer:
        return None
    if above in OUTSIDE:
        if below and below not in OUTSIDE[above]:
            return f"{edge}: {above} uses the public API alone, `import {ROOT}`"
        return None
    if not imported:
        return f"{edge}: the library does not import itself; name the module"
    if above not in LEVEL or below not in LEVEL:
        return None  # not in the layout, which is its own complaint
    if above in KNOWS_ONLY and below not in KNOWS_ONLY[above]:
        return f"{edge}: {above} knows only {', '.join(sorted(KNOWS_ONLY[above]))}"
    if LEVEL[above] == LEVEL[below]:
        if (above, imported) in EXCEPTIONS:
            return None
        return f"{edge}: {above} and {below} do not know each other"
    if LEVEL[above] < LEVEL[below]:
        return f"{edge}: {above} stands below {below}"
    return None


def complaints(graph: Mapping[str, set[str]]) -> list[str]:
    found = (complaint(a, b) for a, targets in graph.items() for b in sorted(targets))
    return [line for line in found if line]


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One cycle of modules, first and last the same; empty where there is none."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if cycle := visit(target, [*trail, module]):
                return cycle
        done.add(module)
        return []

    for module in graph:
        if cycle := visit(module, []):
            return cycle
    return []


def strangers(source: Path) -> list[str]:
    """Top-level files and folders that the layout does not name."""
    allowed = {"__init__", "py.typed", "__pycache__", *LEVEL}
    return sorted(
        path.name for path in source.iterdir() if path.name.removesuffix(".py") not in allowed
    )


LAZILY = """\
from retrodict._lazy import lazily
__getattr__, __dir__, __all__ = lazily(__name__)"""


def not_reexports(tree: ast.Module) -> list[str]:
    """What is in the package's `__init__` beside its docstring and `X as X`, all of it lazy."""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    last = body[-1] if body else None
    if isinstance(last, ast.If) and ast.unparse(last.test) == "TYPE_CHECKING":
        if "\n".join(map(ast.unparse, last.orelse)) == LAZILY:
            body = [*body[:-1], *last.body]
    if body and ast.unparse(body[0]) == "from typing import TYPE_CHECKING":
        body = body[1:]
    return [
        ast.unparse(node)
        for node in body
        if not (
            isinstance(node, ast.ImportFrom)
            and room(absolute(node, "", is_package=True)) == ROOT
            and all(alias.asname == alias.name for alias in node.names)
            and not any(alias.name.startswith("_") for alias in node.names)
        )
    ]


def test_dependencies_point_one_way():
    assert complaints(import_graph(SOURCE)) == []


def test_there_is_no_cycle():
    cycle = find_cycle(import_graph(SOURCE))
    assert not cycle, " -> ".join(module or ROOT for module in cycle)


def test_the_layout_names_every_file():
    assert strangers(SOURCE) == []


def test_the_package_only_reexports():
    path = SOURCE / "__init__.py"
    if not path.exists():
        pytest.skip("the package has no __init__ yet")
    assert not_reexports(parse(path)) == []


def undocumented(source: Path) -> list[str]:
    """Public classes and functions without a docstring: ruff skips them in private modules."""
    trees = {path: parse(path) for path in sorted(source.rglob("*.py"))}
    exports = trees.get(source / "__init__.py", ast.Module(body=[], type_ignores=[]))
    public = {name for _, name in imported_names(exports, "", is_package=True)}
    return [
        f"{module_name(path, source)}.{node.name}"
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        and node.name in public
        and ast.get_docstring(node) is None
    ]


def habits_broken(tree: ast.Module, module: str, is_package: bool) -> list[str]:
    """Asserts, changes of JAX's configuration, and packages that the library stays clear of."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"{module}:{node.lineno}: raise an error that explains, never assert")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.config.update":
            if room(module) != "cli":
                found.append(f"{module}:{node.lineno}: JAX's configuration is the user's")
    for origin, _ in imported_names(tree, module, is_package):
        if reason := UNWANTED_PACKAGES.get(room(origin)):
            found.append(f"{module}: no {origin}: {reason}")
    return found


def test_what_is_public_is_documented():
    assert undocumented(SOURCE) == []


def test_the_library_keeps_its_habits():
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        is_package = path.name == "__init__.py"
        found += habits_broken(parse(path), module_name(path, SOURCE), is_package)
    assert found == []


# The checks above pass on any tree that they fail to see, so each is shown one that it refuses.


def write_tree(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "path, text, expected",
    [
        ("_linalg.py", "from retrodict._kernel import K", "_linalg stands below _kernel"),
        ("_linalg.py", "from ._kernel import K", "_linalg stands below _kernel"),
        ("_kernel/linear.py", "from .._model import M", "_kernel stands below _model"),
        ("_types.py", "def f():\n    import retrodict._fit", "_types stands below _fit"),
        ("_gaussian.py", "from retrodict import _chain", "_gaussian stands below _chain"),
        ("_gaussian.py", "import retrodict as rd", "does not import itself"),
        ("_gaussian.py", "from . import Gaussian", "does not import itself"),
        ("_grid.py", "from retrodict._kalman import k", "do not know each other"),
        ("_family/kalman.py", "from retrodict._kalman import k", "do not know each other"),
        ("_train.py", "from retrodict._model import M", "_train knows only"),
        ("_checkpoint/file.py", "from retrodict._model import M", "_checkpoint knows only"),
        ("cli/__init__.py", "from retrodict._chain import C", "uses the public API alone"),
        ("experiments/linear.py", "import retrodict._elbo", "uses the public API alone"),
        ("experiments/linear.py", "from retrodict import cli", "uses the public API alone"),
    ],
)
def test_wrong_edges_are_refused(tmp_path: Path, path: str, text: str, expected: str):
    (line,) = complaints(import_graph(write_tree(tmp_path, {path: text})))
    assert expected in line


@pytest.mark.parametrize(
    "path, text",
    [
        ("__init__.py", "from retrodict._fit import fit as fit"),
        ("_fit.py", "from retrodict._train import train\nfrom retrodict._elbo import elbo"),
        ("_kernel/linear.py", "from retrodict._kernel.base import AbstractKernel"),
        ("_kernel/linear.py", "from .base import AbstractKernel\nfrom .._linalg import solve"),
        ("cli/demo.py", "import retrodict as rd\nfrom retrodict import experiments"),
        ("experiments/linear.py", "import retrodict as rd\nfrom retrodict.models import Nile"),
        ("_linalg.py", "import jax\nfrom retrodictive import x"),
    ],
)
def test_right_edges_are_allowed(tmp_path: Path, path: str, text: str):
    assert complaints(import_graph(write_tree(tmp_path, {path: text}))) == []


@pytest.mark.parametrize("importer, imported", EXCEPTIONS)
def test_some_may_use_the_array_level_operations(importer: str, imported: str):
    assert complaint(f"{importer}.any", imported) is None
    assert complaint("_particle.ffbsi", imported) is not None


def test_a_cycle_is_found(tmp_path: Path):
    tree = {
        "_kernel/__init__.py": "from retrodict._kernel.linear import L as L",
        "_kernel/linear.py": "from retrodict._kernel import base",
        "_kernel/base.py": "",
    }
    assert find_cycle(import_graph(write_tree(tmp_path, tree))) == []
    write_tree(tmp_path, {"_kernel/base.py": "from . import L"})
    cycle = find_cycle(import_graph(tmp_path))
    assert cycle[0] == cycle[-1] and set(cycle) == {"_kernel", "_kernel.linear", "_kernel.base"}


def test_a_stranger_is_found(tmp_path: Path):
    write_tree(tmp_path, {"_chain.py": "", "_kernel/any.py": "", "utils.py": "", "_misc/a.py": ""})
    assert strangers(tmp_path) == ["_misc", "utils.py"]


@pytest.mark.parametrize(
    "text",
    [
        "from retrodict._fit import fit",
        "from retrodict._fit import fit as train",
        "from retrodict._fit import _fit as _fit",
        "from jax import jit as jit",
        "import retrodict._fit",
        "__all__ = ['fit']",
    ],
)
def test_more_than_a_reexport_is_found(text: str):
    allowed = (
        '"""A docstring."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n'
        "    from retrodict._fit import fit as fit\n    from . import data as data\n"
    )
    rest = "else:\n" + "".join(f"    {line}\n" for line in LAZILY.splitlines())
    assert not_reexports(ast.parse(allowed + rest)) == []
    assert not_reexports(ast.parse(f"{allowed}    {text}\n{rest}")) == [text]
    assert len(not_reexports(ast.parse(allowed + rest + text))) == 2


@pytest.mark.parametrize(
    "text",
    ["assert x > 0", "jax.config.update('jax_enable_x64', True)", "from distrax import Normal"],
)
def test_a_broken_habit_is_found(text: str):
    assert len(habits_broken(ast.parse(text), "_fit", is_package=False)) == 1


def test_a_missing_docstring_is_found(tmp_path: Path):
    fit = "def fit():\n    ...\n\ndef helper():\n    ...\n"
    write_tree(tmp_path, {"__init__.py": "from ._fit import fit as fit", "_fit.py": fit})
    assert undocumented(tmp_path) == ["_fit.fit"]


# The repository as a whole.

# Written in two parts, so that this file does not name them.
HOSTS = re.compile(
    "|".join(
        re.escape(first + second)
        for first, second in [
            ("python", "hosted.org"),
            ("pypi.org", "/simple"),
            ("registry.npm", "js.org"),
            ("conda.ana", "conda.org"),
            ("deb.deb", "ian.org"),
        ]
    )
)
MACHINE_PATHS = re.compile(r"(?<![\w./-])/(?:home|Users|root|work)/")


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    """The files that are, or are about to be, under version control."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = listing.stdout.decode().split("\0")
    return [path for name in names if name and (path := REPOSITORY / name).is_file()]


def pickling(tree: ast.Module) -> list[str]:
    """What a file does with pickle: imports of a pickler, and `allow_pickle=True`."""
    imports = [o for o, _ in imported_names(tree, "", is_package=False) if room(o) in PICKLERS]
    keywords = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    return imports + keywords


def test_no_file_names_a_registry_or_a_machine(tracked: list[Path]):
    found = []
    for path in tracked:
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if match := HOSTS.search(text) or MACHINE_PATHS.search(text):
            found.append(f"{path.relative_to(REPOSITORY)}: {match.group()}")
    assert found == []


def test_nothing_is_pickled(tracked: list[Path]):
    found = []
    for path in tracked:
        if path.suffix in {".joblib", ".pickle", ".pkl"}:
            found.append(f"{path.relative_to(REPOSITORY)}: a pickle")
        elif path.suffix == ".py":
            found += [f"{path.relative_to(REPOSITORY)}: {use}" for use in pickling(parse(path))]
    assert found == []


@pytest.mark.parametrize(
    "text", ["import pickle", "from joblib import dump", "load(f, allow_pickle=True)"]
)
def test_pickling_is_found(text: str):
    assert len(pickling(ast.parse(text))) == 1
    assert pickling(ast.parse("import json\nload(f, allow_pickle=False)")) == []
