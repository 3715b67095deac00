"""Models by reference: names, files and objects; good ones and those that are refused."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

import retrodict as rd
from retrodict.models import ModelError

PAGE = Path(__file__).resolve().parents[2] / "docs/model-files.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "model.toml"
    path.write_text(text, encoding="utf-8")
    return path


def full_example() -> str:
    match = re.search(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_documented_example_is_read(tmp_path: Path):
    spec = rd.models.load(str(write(tmp_path, full_example())))
    assert spec.name == "stochastic_volatility" and spec.options == {"leverage": True}
    assert spec.data["columns"] == ["return"] and spec.fit == {"family": "gated", "num_steps": 2000}
    model = spec.build(obs_dim=1)
    values = rd.models.named_parameters(model, fixed=True)
    np.testing.assert_allclose(values["mean"], -9.2)
    np.testing.assert_allclose(values["leverage"], -0.3)
    assert set(rd.models.named_parameters(model)) == {"persistence", "scale", "leverage"}
    # A run keeps the record, from which the same model is built without the file.
    again = rd.models.ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec


def test_docs_page_lists_every_toml_key():
    from retrodict.models._toml import TABLES

    rows = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    keys = {f"{table}.{key}" for table, known in TABLES.items() for key in known}
    assert set(rows) == keys | {"retrodict"}


def test_given_values_override_values_from_data(tmp_path: Path):
    text = 'retrodict = 1\n[model]\nname = "local_level"\nfixed = ["obs_scale"]\n'
    spec = rd.models.read_toml(write(tmp_path, text + "[model.start]\nobs_scale = [1.0, 2.0]\n"))
    ys = 100 + 10 * np.random.default_rng(0).normal(size=(30, 2))
    model = spec.build_from(ys)
    values = rd.models.named_parameters(model, fixed=True)
    np.testing.assert_allclose(values["obs_scale"], [1.0, 2.0])
    assert np.all(values["level_scale"] > 2) and np.all(values["prior.mean"] > 50)
    assert set(rd.models.named_parameters(model)) == {"level_scale"}


def test_toml_sets_all_reader_options(tmp_path: Path):
    head = 'retrodict = 1\n[model]\nname = "local_level"\n[data]\n'
    days = head + 'freq = "2D"\nseries = ["a", "b"]\ntime_format = "%d/%m/%Y"\n'
    frame = pd.DataFrame({"a": 1, "b": "x", "date": ["01/02/2020", "05/02/2020"], "y": [1.0, 2.0]})
    table = rd.data.read(frame, **rd.models.read_toml(write(tmp_path, days)).data)
    assert table.series == ("1-x",) and table.ys.shape == (1, 3, 1)
    spec = rd.models.read_toml(write(tmp_path, head + "freq = 0.5\n"))
    assert rd.data.read({"t": [1.0, 2.0], "y": [1.0, 2.0]}, **spec.data).ys.shape == (1, 3, 1)


HEAD = 'retrodict = 1\n[model]\nname = "seasonal"\n'


@pytest.mark.parametrize(
    "text, reason",
    [
        ("retrodict = [", r"is not TOML"),
        ("", r"retrodict is missing: write retrodict = 1"),
        ('retrodict = 2\n[model]\nname = "seasonal"', r"must be 1, got 2"),
        ('retrodict = "1"\n[model]\nname = "seasonal"', r"must be 1, got '1'"),
        ("retrodict = 1", r'model.name is missing: write e.g. name = "local_level"'),
        ('retrodict = 1\nmodel = "seasonal"', r"model must be a table, got 'seasonal'"),
        ('retrodict = 1\n[model]\nname = "seasonl"', r"model.name: .* Did you mean seasonal\?"),
        ("retrodict = 1\n[model]\nname = 3", r"model.name must be a text, got 3 of type int"),
        (HEAD + "[modle]", r"no key modle. Did you mean model\?"),
        (HEAD + "[data]\ncolums = []", r"no key data.colums. Did you mean columns\?"),
        (HEAD + '[data]\ncolumns = "a"', r"data.columns must be a list of texts"),
        (HEAD + "[data]\nfreq = true", r"data.freq must be a text or number"),
        (HEAD + "[data]\nseries = [1]", r"data.series must be a text or list of texts"),
        (HEAD + "[fit]\nnum_steps = 1.5", r"fit.num_steps must be a whole number"),
        (HEAD + "[fit]\nnum_steps = true", r"fit.num_steps must be a whole number"),
        (
            HEAD + "[model.options]\nperiods = 4",
            r"model.options.periods is not .* mean period\?",
        ),
        (HEAD + '[model.options]\nperiod = "4"', r"model.options.period must be a whole number"),
        (HEAD + "[model.options]\nperiod = 1", r"model.options: `period` must be at least 2"),
        (HEAD + "[model.start]\nlevl_scale = 1", r"model.start.levl_scale: .*mean level_scale\?"),
        (HEAD + '[model.start]\nlevel_scale = "open(1)"', r"must be a number or list of numbers"),
        (HEAD + "[model.start]\nlevel_scale = -1", r"model.start.level_scale: .*positive"),
        (HEAD.replace("[model]", '[model]\nfixed = ["levels"]'), r"model.fixed: .*level_scale\?"),
        (HEAD.replace("[model]", '[model]\nobject = "os:system"'), r"no key model.object"),
        # A key of so many parts takes gigabytes to parse, and such a network takes them to draw.
        ("a." * 20_000 + "b = 1\n" + HEAD, "more than 5000 dots"),
        ("1." * 20_000 + "1 = 1\n" + HEAD, "more than 5000 dots"),
        ('"," .' * 20_000 + "b = 1\n" + HEAD, "more than 5000 dots"),
        (
            'retrodict = 1\n[model]\nname = "neural_decoder"\noptions = {depth = 64, width = 4096}',
            "at most 50000000 are supported",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, text: str, reason: str):
    path = write(tmp_path, text)
    with pytest.raises(ModelError, match=reason) as caught:
        rd.models.read_toml(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message


OWN = """
import retrodict as rd
ready = rd.models.local_level()
def make():
    return rd.models.local_trend()
def broken():
    raise RuntimeError("no\\nluck")
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models_of_a_user.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "broken_models_of_a_user.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_models_of_a_user"


def test_decimal_points_do_not_separate_names(tmp_path: Path):
    starts = ", ".join(["0.5", "-1.5e-3"] * 5000)
    text = HEAD + f"[data]\ncolumns = ['a.b']\n[model.start]\nlevel_scale = [{starts}]"
    assert len(rd.models.read_toml(write(tmp_path, text)).start["level_scale"]) == 10_000


def test_objects_are_found_by_reference(own_module: str):
    for name, dim in (("ready", 1), ("make", 2)):
        spec = rd.models.load(f"{own_module}:{name}")
        assert spec.build().state_dim == dim and spec.name is None
        assert rd.models.ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    "reference, reason",
    [
        ("own_models_of_a_user:raedy", r"has no 'raedy'. Did you mean ready\?"),
        ("own_models_of_a_user:number", r"must be a StateSpaceModel or a function .* got int"),
        ("own_models_of_a_user:broken", r"calling it raised RuntimeError: no\."),
        ("no_such_module_anywhere:model", r"cannot be imported: ModuleNotFoundError"),
        ("broken_models_of_a_user:model", r"cannot be imported: ZeroDivisionError"),
        (
            "local_levle",
            r"Did you mean local_level\? There are auto.* A model is one of these names",
        ),
        ("no/such/file.toml", r"no/such/file.toml cannot be read"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_bad_references_are_refused_in_one_line(reference: str, reason: str):
    with pytest.raises(ModelError, match=reason) as caught:
        rd.models.load(reference)
    assert "\n" not in str(caught.value)


def test_model_name_imports_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "local_level.py").write_text("raise RuntimeError", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert rd.models.load("local_level").build(2).state_dim == 2
    assert "local_level" not in sys.modules


def test_a_decoder_needs_a_key(tmp_path: Path):
    spec = rd.models.load("neural_decoder")
    assert spec.build(3, jax.random.key(0)).state_dim == 2
    with pytest.raises(ModelError, match="pass key="):
        spec.build(3)
