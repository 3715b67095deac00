"""The layout of the library: what may stand where, and who may import whom.

Imports are read from the source, not executed, so that one inside a function or under
`TYPE_CHECKING` counts as much as any other.
"""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCE = REPOSITORY / "src" / "retrodict"
ROOT = "retrodict"

# The top-level entries of the library, lowest first. A module may import from entries of lower
# layers and from its own package; entries that share a layer do not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_interface", "_files"),
    ("_arrays",),
    ("distributed",),
    ("_numerics",),
    ("_model",),
    ("_chains",),
    ("_expectations",),
    ("_exact",),
    ("_linearised", "particles", "_families"),
    ("_checkpoint",),
    ("_learning",),
    ("bounds", "online", "switching"),
    ("_smooth",),
    ("_workspace", "_pages"),
    ("models",),
    ("data",),
    ("runs",),
    ("experiments",),
    ("cli",),
)
LEVEL = {entry: level for level, entries in enumerate(LAYERS) for entry in entries}

# Packages that use the public API, with the other entries that each may import.
ON_PUBLIC_API = {
    "runs": {"models", "data", "distributed", "_workspace", "_pages", "_files", "_interface"},
    "experiments": {"models", "data", "_workspace", "_pages", "_files", "_interface"},
    "cli": {"models", "data", "runs", "experiments", "_pages", "_interface"},
}

# Modules that do not depend on state-space models, with the entries that each may import.
BASICS = {"_arrays", "_files", "_interface"}
MAY_IMPORT = {"_checkpoint": BASICS, "_learning.train": BASICS | {"_checkpoint", "distributed"}}

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


def entry(module: str) -> str:
    """The top-level file or folder that a module belongs to."""
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


def modules(source: Path) -> dict[str, Path]:
    return {module_name(path, source): path for path in sorted(source.rglob("*.py"))}


def own_imports(source: Path) -> Iterator[tuple[str, str, str]]:
    """Triples (importer, module, name) of imports within the library, named below the package."""
    for module, path in modules(source).items():
        for origin, name in imported_names(parse(path), module, path.name == "__init__.py"):
            if entry(origin) == ROOT:
                yield module, origin.removeprefix(ROOT).lstrip("."), name


def import_graph(source: Path) -> dict[str, set[str]]:
    """Which modules of the library each module imports; the root imports lazily, so nothing."""
    known = modules(source)
    graph: dict[str, set[str]] = {module: set() for module in known}
    for importer, module, name in own_imports(source):
        submodule = f"{module}.{name}".lstrip(".")
        if importer:
            graph[importer].add(submodule if name and submodule in known else module)
    return graph


def wrong_edge(importer: str, module: str, name: str) -> str | None:
    """Why a module may not import from another, or None where it may."""
    if not importer:
        return None
    if not module and name in LEVEL:
        module, name = name, ""
    above, below = entry(importer), entry(module)
    edge = f"{importer} imports {module or ROOT}"
    if above == below:
        return None
    if "." in module:
        return f"{edge}: import from the package {below}, which exports what others use"
    if above in ON_PUBLIC_API:
        if below and below not in ON_PUBLIC_API[above]:
            return f"{edge}: {above} uses the public API, `import {ROOT}`"
        return None
    if not module:
        return f"{edge}: the library does not import itself; name the module"
    for limited, allowed in MAY_IMPORT.items():
        if f"{importer}.".startswith(f"{limited}.") and below not in allowed:
            return f"{edge}: {limited} imports only {', '.join(sorted(allowed))}"
    if LEVEL[above] == LEVEL[below]:
        return f"{edge}: {above} and {below} share a layer"
    if LEVEL[above] < LEVEL[below]:
        return f"{edge}: {above} stands below {below}"
    return None


def wrong_edges(source: Path) -> list[str]:
    return [line for triple in own_imports(source) if (line := wrong_edge(*triple))]


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


def unknown_entries(source: Path) -> list[str]:
    """Top-level files and folders that the layout does not name."""
    allowed = {"__init__", "py.typed", "__pycache__", *LEVEL}
    return sorted(
        path.name for path in source.iterdir() if path.name.removesuffix(".py") not in allowed
    )


LAZILY = """\
from retrodict._interface import lazily
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
            and entry(absolute(node, "", is_package=True)) == ROOT
            and all(alias.asname == alias.name for alias in node.names)
            and not any(alias.name.startswith("_") for alias in node.names)
        )
    ]


def test_dependencies_point_one_way():
    assert wrong_edges(SOURCE) == []


def test_imports_have_no_cycle():
    cycle = find_cycle(import_graph(SOURCE))
    assert not cycle, " -> ".join(module or ROOT for module in cycle)


def test_layers_list_every_entry():
    assert unknown_entries(SOURCE) == []
    assert {entry(module) for module in modules(SOURCE) if module} == set(LEVEL)


def test_the_package_only_reexports():
    assert not_reexports(parse(SOURCE / "__init__.py")) == []


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
    problems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            problems.append(f"{module}:{node.lineno}: raise an error that explains, never assert")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.config.update":
            if entry(module) != "cli":
                problems.append(f"{module}:{node.lineno}: JAX's configuration is the user's")
    for origin, _ in imported_names(tree, module, is_package):
        if reason := UNWANTED_PACKAGES.get(entry(origin)):
            problems.append(f"{module}: no {origin}: {reason}")
    return problems


def test_public_names_have_docstrings():
    assert undocumented(SOURCE) == []


def test_source_follows_house_rules():
    problems = []
    for path in sorted(SOURCE.rglob("*.py")):
        is_package = path.name == "__init__.py"
        problems += habits_broken(parse(path), module_name(path, SOURCE), is_package)
    assert problems == []


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
        ("_numerics/linalg.py", "from retrodict._model import K", "_numerics stands below _model"),
        ("_numerics/linalg.py", "from .._model import K", "_numerics stands below _model"),
        ("_arrays.py", "def f():\n    import retrodict._learning", "_arrays stands below"),
        ("_model/model.py", "from retrodict import _chains", "_model stands below _chains"),
        ("_arrays.py", "import retrodict as rd", "does not import itself"),
        ("_arrays.py", "from . import Gaussian", "does not import itself"),
        ("_families/kalman.py", "from retrodict._linearised import k", "share a layer"),
        ("_families/kalman.py", "from retrodict._exact.grid import k", "from the package _exact"),
        ("runs/page.py", "from retrodict.data.read import read", "from the package data"),
        ("_learning/train.py", "from retrodict._model import M", "_learning.train imports only"),
        ("_checkpoint/file.py", "from retrodict._model import M", "_checkpoint imports only"),
        ("cli/__init__.py", "from retrodict._chains import C", "uses the public API"),
        ("experiments/linear.py", "import retrodict._exact", "uses the public API"),
        ("experiments/linear.py", "from retrodict import cli", "uses the public API"),
    ],
)
def test_wrong_edges_are_refused(tmp_path: Path, path: str, text: str, expected: str):
    (line,) = wrong_edges(write_tree(tmp_path, {path: text}))
    assert expected in line


@pytest.mark.parametrize(
    "path, text",
    [
        ("__init__.py", "from retrodict._learning import fit as fit"),
        ("_learning/train.py", "from retrodict._checkpoint import save"),
        ("_model/linear.py", "from retrodict._model.base import AbstractKernel"),
        ("_model/linear.py", "from .base import AbstractKernel\nfrom .._numerics import linalg"),
        ("cli/demo.py", "import retrodict as rd\nfrom retrodict import experiments"),
        ("experiments/linear.py", "import retrodict as rd\nfrom retrodict.models import Nile"),
        ("_arrays.py", "import jax\nfrom retrodictive import x"),
    ],
)
def test_right_edges_are_allowed(tmp_path: Path, path: str, text: str):
    assert wrong_edges(write_tree(tmp_path, {path: text})) == []


def test_cycle_is_detected(tmp_path: Path):
    tree = {
        "_model/__init__.py": "from retrodict._model.linear import L as L",
        "_model/linear.py": "from retrodict._model import base",
        "_model/base.py": "",
    }
    assert find_cycle(import_graph(write_tree(tmp_path, tree))) == []
    write_tree(tmp_path, {"_model/base.py": "from . import L"})
    cycle = find_cycle(import_graph(tmp_path))
    assert cycle[0] == cycle[-1] and set(cycle) == {"_model", "_model.linear", "_model.base"}


def test_unknown_entry_is_detected(tmp_path: Path):
    write_tree(tmp_path, {"_arrays.py": "", "_model/any.py": "", "utils.py": "", "_misc/a.py": ""})
    assert unknown_entries(tmp_path) == ["_misc", "utils.py"]


@pytest.mark.parametrize(
    "text",
    [
        "from retrodict._learning import fit",
        "from retrodict._learning import fit as train",
        "from retrodict._learning import _fit as _fit",
        "from jax import jit as jit",
        "import retrodict._learning",
        "__all__ = ['fit']",
    ],
)
def test_code_in_package_init_is_detected(text: str):
    allowed = (
        '"""A docstring."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n'
        "    from retrodict._learning import fit as fit\n    from . import data as data\n"
    )
    rest = "else:\n" + "".join(f"    {line}\n" for line in LAZILY.splitlines())
    assert not_reexports(ast.parse(allowed + rest)) == []
    assert not_reexports(ast.parse(f"{allowed}    {text}\n{rest}")) == [text]
    assert len(not_reexports(ast.parse(allowed + rest + text))) == 2


@pytest.mark.parametrize(
    "text",
    ["assert x > 0", "jax.config.update('jax_enable_x64', True)", "from distrax import Normal"],
)
def test_broken_house_rule_is_detected(text: str):
    assert len(habits_broken(ast.parse(text), "_learning", is_package=False)) == 1


def test_missing_docstring_is_detected(tmp_path: Path):
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


def test_test_files_mirror_modules():
    """A file is `test_<module>.py` or `test_<module>_<aspect>.py` in the folder of its package."""
    unmatched = []
    for path in sorted((REPOSITORY / "tests").glob("*/test_*.py")):
        folder = path.parent.name
        packages = [SOURCE / f"_{folder}", SOURCE / folder]
        modules = {item.stem.lstrip("_") for package in packages for item in package.rglob("*")}
        stem = path.stem.removeprefix("test_")
        if not any(f"{stem}_".startswith(f"{module}_") for module in {folder, *modules} - {""}):
            unmatched.append(str(path.relative_to(REPOSITORY)))
    assert unmatched == []


def pickling(tree: ast.Module) -> list[str]:
    """What a file does with pickle: imports of a pickler, and `allow_pickle=True`."""
    imports = [o for o, _ in imported_names(tree, "", is_package=False) if entry(o) in PICKLERS]
    keywords = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    return imports + keywords


def test_no_file_names_a_registry_or_a_machine(tracked: list[Path]):
    problems = []
    for path in tracked:
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if match := HOSTS.search(text) or MACHINE_PATHS.search(text):
            problems.append(f"{path.relative_to(REPOSITORY)}: {match.group()}")
    assert problems == []


def test_nothing_is_pickled(tracked: list[Path]):
    problems = []
    for path in tracked:
        if path.suffix in {".joblib", ".pickle", ".pkl"}:
            problems.append(f"{path.relative_to(REPOSITORY)}: a pickle")
        elif path.suffix == ".py":
            problems += [f"{path.relative_to(REPOSITORY)}: {use}" for use in pickling(parse(path))]
    assert problems == []


@pytest.mark.parametrize(
    "text", ["import pickle", "from joblib import dump", "load(f, allow_pickle=True)"]
)
def test_pickling_is_detected(text: str):
    assert len(pickling(ast.parse(text))) == 1
    assert pickling(ast.parse("import json\nload(f, allow_pickle=False)")) == []
