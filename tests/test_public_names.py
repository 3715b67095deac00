"""Every public name has one home, an example that runs, and an entry in docs/api.md."""

import doctest
import functools
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import retrodict as rd

API = Path(__file__).resolve().parent.parent / "docs/api.md"
DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:data):: retrodict\.([\w.]+)$", re.MULTILINE)
NAMESPACES = {name: value for name in dir(rd) if inspect.ismodule(value := getattr(rd, name))}


def public_objects() -> dict[str, Any]:
    """The public names below `rd`, with their namespace, and their values."""
    top = {name: getattr(rd, name) for name in dir(rd) if name not in NAMESPACES}
    nested = {
        f"{space}.{name}": getattr(module, name)
        for space, module in NAMESPACES.items()
        for name in dir(module)
    }
    return top | nested


OBJECTS = public_objects()


@functools.cache
def examples(module: str) -> set[str]:
    """The names in a module whose examples `test_doctests.py` finds and runs."""
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    return {test.name for test in found if test.examples}


def has_example(value: Any) -> bool:
    return f"{value.__module__}.{value.__qualname__}" in examples(value.__module__)


def test_number_of_public_names_is_limited():
    assert sorted(NAMESPACES) == [
        "bounds", "data", "distributed", "models", "online", "particles", "runs", "switching"
    ]  # fmt: skip
    assert len(set(dir(rd)) - set(NAMESPACES)) <= 93


@pytest.mark.parametrize("module", [rd, *NAMESPACES.values()], ids=lambda module: module.__name__)
def test_a_namespace_lists_its_public_names_in_order(module: ModuleType):
    assert dir(module) == vars(module)["__all__"] == sorted(set(dir(module)))
    assert not [name for name in dir(module) if name.startswith("_")]


def test_every_public_name_has_an_example():
    assert [name for name, value in OBJECTS.items() if not has_example(value)] == []


def test_a_missing_example_is_noticed():
    assert has_example(rd.Gaussian)
    assert not has_example(rd.Gaussian.sample)
    assert not has_example(has_example)


def test_a_class_has_one_public_name():
    # Functions of a namespace may be on `rd` as well, such as `rd.ffbsi`.
    names: dict[int, list[str]] = {}
    for name, value in OBJECTS.items():
        if inspect.isclass(value):
            names.setdefault(id(value), []).append(name)
    assert [twice for twice in names.values() if len(twice) > 1] == []


def test_a_moved_name_is_named_by_the_error():
    with pytest.raises(AttributeError, match="; use retrodict.online.FixedLag$"):
        getattr(rd, "FixedLag")  # noqa: B009
    # A module of `retrodict.bounds` has this name, and it is a function of another namespace.
    with pytest.raises(AttributeError, match="; use retrodict.runs.check$"):
        getattr(rd, "check")  # noqa: B009


def test_the_api_page_lists_every_public_name_once():
    listed = DIRECTIVE.findall(API.read_text(encoding="utf-8"))
    # Records that a function returns are documented there, under their private names.
    public = [name for name in listed if not name.startswith("_")]
    assert len(public) == len(set(public))
    again = {n for n, value in OBJECTS.items() if OBJECTS.get(n.partition(".")[2]) is value}
    assert set(OBJECTS) - again - set(public) == set()


def test_members_that_the_api_page_lists_exist():
    pattern = re.compile(DIRECTIVE.pattern + r"\n +:members: (.+)$", re.MULTILINE)
    missing = []
    for name, members in pattern.findall(API.read_text(encoding="utf-8")):
        value = functools.reduce(getattr, name.split("."), rd)
        fields = set(dir(value)) | set(getattr(value, "__annotations__", {}))
        missing += [f"{name}.{member}" for member in members.split(", ") if member not in fields]
    assert missing == []
