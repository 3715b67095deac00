"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import retrodict as rd


def modules() -> list[str]:
    packages = pkgutil.walk_packages(rd.__path__, prefix="retrodict.")
    return ["retrodict", *(module.name for module in packages)]


def examples(module: ModuleType) -> list[doctest.DocTest]:
    docstrings = doctest.DocTestFinder(exclude_empty=True).find(module)
    return [test for test in docstrings if test.examples]


SLOW = {
    "bounds.check",
    "bounds.error_bound",
    "bounds.functional_classes",
    "_learning.fit",
    "_learning.fit_result",
    "_linearised.smoother",
    "online.pathwise",
    "online.score",
    "online.truncated",
    "particles.backward_samplers",
    "particles.proposal",
    "runs._apply",
    "runs._check",
    "runs._fit",
    "runs._record",
    "runs._report",
    "runs._run",
    "runs._stream",
    "runs._stream_learning",
}
"""Modules whose examples take long to compile, or fit a run."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name.removeprefix("retrodict.") in SLOW
        else name
        for name in modules()
    ],
)
def test_docstring_examples_run(name: str):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    for test in examples(module):
        runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


def test_docstring_examples_are_collected():
    # Decorated classes and functions hide from doctest, and a test that sees nothing passes.
    names = {test.name for test in examples(importlib.import_module("retrodict._model.model"))}
    assert names == {"retrodict._model.model.StateSpaceModel"}
    names = {test.name for test in examples(importlib.import_module("retrodict._model.gaussian"))}
    assert "retrodict._model.gaussian.kl_divergence" in names
