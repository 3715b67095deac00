"""Files give back what was saved, bit by bit, or say why they cannot."""

import ast
import functools
import hashlib
import importlib.util
import inspect
import io
import json
import os
import pkgutil
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from linear_models import linear_model

import retrodict as rd
from retrodict._checkpoint import allowed, read_checkpoint, write_checkpoint
from retrodict._checkpoint.file import FORMAT
from retrodict._checkpoint.names import is_record_class, name_of, resolve
from retrodict._model import Series

RNG = np.random.default_rng(0)


def make_model(fn: Any = jnp.tanh) -> rd.StateSpaceModel:
    return rd.StateSpaceModel(
        prior=rd.Frozen(rd.Gaussian(jnp.zeros(2), rd.PositiveTril(jnp.eye(2)))),
        transition=rd.LinearGaussianKernel(
            0.5 * jnp.eye(2), rd.Frozen(jnp.ones(2)), rd.PositiveTril(0.3 * jnp.eye(2))
        ),
        emission=rd.NonlinearGaussianKernel(fn, rd.Diagonal(rd.Positive(jnp.array([0.7, 2.0])))),
    )


def make_network(activation: Callable[..., Any] = jax.nn.relu) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 2, 3, 2, activation=activation, key=jax.random.key(1))


@functools.cache
def make_chain() -> rd.LinearGaussianChain:
    model = linear_model(design=0.9)
    return rd.kalman_smoother(model, RNG.normal(size=(4, 1)), length=3).chain


class Point(NamedTuple):
    x: Any
    y: Any


class UserKernel(eqx.Module):
    weight: Any
    name: str = eqx.field(static=True, default="mine")  # pyright: ignore


def reload(tmp_path: Path, obj: Any, like: Any = None) -> Any:
    rd.save(tmp_path / "object.rd", obj)
    return rd.load(tmp_path / "object.rd", like=like)


def sorted_fields(module: eqx.Module) -> dict[str, Any]:
    return dict(sorted(vars(module).items()))


def same(a: Any, b: Any) -> bool:
    """Equal in every type, static field and bit; NaN equals NaN, and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
    if isinstance(a, (jax.Array, np.ndarray, np.generic)):
        x, y = np.asarray(a), np.asarray(b)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    if isinstance(a, eqx.Module):
        return same(sorted_fields(a), sorted_fields(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, functools.partial):
        return a.func is b.func and same((a.args, a.keywords), (b.args, b.keywords))
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return a is b or bool(a == b)


# --- round trips ----------------------------------------------------------------------------------

OBJECTS: dict[str, Callable[[], Any]] = {
    "model with parameters": make_model,
    "model with a network": lambda: make_model(make_network()),
    "network, tanh": lambda: make_network(jnp.tanh),
    "network, learned activations": lambda: make_network(eqx.nn.PReLU(0.1)),
    "recurrent cell": lambda: eqx.nn.GRUCell(2, 3, key=jax.random.key(0)),
    "layers": lambda: eqx.nn.Sequential(
        [eqx.nn.LayerNorm(2), eqx.nn.Lambda(jax.nn.softplus), eqx.nn.Dropout(0.3)]
    ),
    "chain": make_chain,
    "chain of mixtures": lambda: rd.MixtureFamily(
        jax.random.key(0), 1, 1, num_components=2, hidden=2, width=2
    ).infer(np.ones((3, 1))),
    "chain with a network": lambda: rd.NonlinearFamily(
        jax.random.key(0), 1, 1, num_components=1, hidden=2, width=2
    ).infer(np.ones((3, 1))),
    "chain with a network of mixtures": lambda: rd.NonlinearFamily(
        jax.random.key(0), 1, 1, num_components=2, hidden=2, width=2
    ).infer(np.ones((3, 1))),
    "numpyro prior": lambda: replace(
        make_model(), prior=dist.MultivariateNormal(jnp.zeros(2), scale_tril=jnp.eye(2))
    ),
    "optimiser": lambda: optax.adam(1e-3).init(eqx.filter(make_model(), eqx.is_inexact_array)),
    "chained optimiser": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_schedule(optax.cosine_decay_schedule(0.1, 10)),
        optax.masked(optax.sgd(0.1, momentum=0.9), {"a": True, "b": False}),
    ).init({"a": jnp.ones(2), "b": jnp.ones(3)}),
    "keys": lambda: (
        jax.random.key(7),
        jax.random.split(jax.random.key(0, impl="rbg"), 3),
        jax.random.PRNGKey(0),
    ),
    "scalars": lambda: [
        *(None, True, 0, -(2**70), "é\ud800\n", 0.1, -0.0, 5e-324, 1e22, 1.0),
        *(float("inf"), float("-inf"), float("nan"), 1 - 2j, complex("-inf+nanj")),
    ],
    "containers": lambda: {
        "list": [(1, [2, ()]), []],
        "dict": {3: "a", ("b", 1): {}, None: {"class": 1, "array": 0}},
    },
    "arrays": lambda: [
        *(jnp.arange(6).reshape(2, 3), jnp.zeros((0, 2)), jnp.array(True), jnp.array(1 + 2j)),
        *(jnp.array([1, 2], jnp.bfloat16), jnp.array(0.5, jnp.float8_e4m3fn), jnp.float16(3)),
        *(np.arange(3, dtype=">i4"), np.array(["a", "bc"]), np.array(1.0), np.float32(2)),
        *(np.array([np.nan, -0.0]), np.datetime64("2020-01-01"), np.asfortranarray(np.eye(2))),
    ],
    "dtypes": lambda: [np.dtype("float32"), jnp.dtype("bfloat16"), np.dtype(">f8"), jnp.float32],
    "functions": lambda: [
        *(jnp.tanh, jax.nn.relu, jax.nn.gelu, jnp.add, jnp.linalg.norm, jax.lax.tanh),
        *(jax.scipy.special.gammaln, jax.nn.sigmoid, np.float64),
    ],
    "partials": lambda: (
        functools.partial(jnp.add, jnp.ones(2)),
        functools.partial(jax.nn.leaky_relu, negative_slope=0.2),
        jax.tree_util.Partial(jnp.multiply, 2.0),
    ),
    "distributions": lambda: [
        *(dist.LogNormal(0.0, 1.0), dist.Normal(jnp.zeros(2), 1.0).to_event(1)),
        dist.MixtureSameFamily(dist.Categorical(probs=jnp.ones(2) / 2), dist.Poisson(jnp.ones(2))),
    ],
    "enum": lambda: jax.lax.Precision.HIGHEST,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("name", OBJECTS)
def test_saved_objects_load_bit_for_bit(name: str, tmp_path: Path):
    obj = OBJECTS[name]()
    loaded = reload(tmp_path, obj)
    if name in ("numpyro prior", "distributions"):
        # These have no equality of their own; what they hold has.
        assert jax.tree.structure(loaded) == jax.tree.structure(obj)
        assert same(jax.tree.leaves(loaded), jax.tree.leaves(obj))
    else:
        assert same(loaded, obj)
    rd.save(tmp_path / "again.rd", loaded)
    assert (tmp_path / "again.rd").read_bytes() == (tmp_path / "object.rd").read_bytes()
    assert type(reload(tmp_path, obj, like=obj)) is type(obj)


def test_loaded_objects_can_be_used(tmp_path: Path, key: jax.Array):
    model = make_model(make_network())
    loaded = reload(tmp_path, model)
    xs, ys = np.ones((3, 2)), np.zeros((3, 2))
    assert same(loaded.log_joint(xs, ys), model.log_joint(xs, ys))
    chain = make_chain()
    assert same(reload(tmp_path, chain).sample(key, 2), chain.sample(key, 2))
    array = reload(tmp_path, np.zeros(2))
    array[0] = 1.0  # numpy arrays are writable


def test_file_written_by_another_process_is_identical(tmp_path: Path):
    code = "import sys, jax.numpy as jnp, retrodict as rd; rd.save(sys.argv[1], [jnp.tanh, 1.5])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "theirs.rd"], check=True)
    rd.save(tmp_path / "ours.rd", [jnp.tanh, 1.5])
    assert (tmp_path / "ours.rd").read_bytes() == (tmp_path / "theirs.rd").read_bytes()


def manifest_of(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("manifest.json"))


def test_the_manifest_can_be_read_without_the_library(tmp_path: Path):
    path = tmp_path / "model.rd"
    rd.save(path, make_model(), metadata={"note": "é", "steps": {10: 1, 2: [1.5, None]}})
    manifest = manifest_of(path)
    assert manifest["metadata"] == {"note": "é", "steps": {"10": 1, "2": [1.5, None]}}
    assert manifest["versions"]["jax"] == jax.__version__
    assert manifest["tree"]["class"] == "retrodict:StateSpaceModel"
    emission = manifest["tree"]["fields"]["emission"]["fields"]
    assert emission["fn"] == {"name": "jax.numpy:tanh"}
    entry = manifest["arrays"][emission["scale_tril"]["fields"]["std"]["fields"]["raw"]["array"]]
    assert entry["path"] == "model.emission.scale_tril.std.raw"
    assert (entry["shape"], entry["dtype"]) == ([2], "float64")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        first = np.load(io.BytesIO(archive.read("arrays/0.npy")), allow_pickle=False)
    np.testing.assert_array_equal(first, [0.0, 0.0])
    rd.load(path)


@pytest.mark.parametrize("bad", [{1, 2}, float("nan"), np.ones(2)])
def test_metadata_not_representable_in_json_is_refused(bad: Any, tmp_path: Path):
    with pytest.raises(TypeError, match="`metadata` must be a JSON value"):
        rd.save(tmp_path / "a.rd", 1, metadata=bad)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "bad, path",
    [
        ({"a": [object()]}, r"tree\['a'\]\[0\] is of type builtins.object"),
        (np.array([None]), r"has dtype object"),
        (np.ma.masked_array([1.0]), r"MaskedArray"),
        (UserKernel({1}), r"kernel.weight is of type builtins.set"),
    ],
)
def test_unsavable_objects_are_named(bad: Any, path: str, tmp_path: Path):
    with pytest.raises(TypeError, match=path):
        rd.save(tmp_path / "a.rd", bad)


def test_saving_inside_a_transformation_is_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="save outside of jax.jit"):
        jax.jit(lambda x: rd.save(tmp_path / "a.rd", x))(1.0)


# --- functions without a name, and `like` ---------------------------------------------------------


def test_a_lambda_is_taken_from_like(tmp_path: Path):
    def build(scale: float) -> rd.StateSpaceModel:
        emission = rd.DistributionKernel(lambda x: dist.Poisson(jnp.exp(scale * x)))
        return replace(make_model(), emission=emission)

    path = tmp_path / "model.rd"
    rd.save(path, build(1.0))
    with pytest.raises(rd.CheckpointError, match=r"model\.emission\.fn.*load\(path, like=model\)"):
        rd.load(path)
    like = build(2.0)
    like = eqx.tree_at(lambda m: m.transition.weight, like, jnp.zeros((2, 2)))
    loaded = rd.load(path, like=like)
    assert loaded.emission.fn is like.emission.fn
    np.testing.assert_array_equal(loaded.transition.weight, 0.5 * np.eye(2))


def test_like_may_hold_shapes_only(tmp_path: Path):
    like = eqx.filter_eval_shape(make_model, lambda x: x)
    assert same(reload(tmp_path, make_model(), like=like), make_model())


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        make_model,
        eqx.filter_jit(lambda x: x),
        functools.partial(lambda a, x: a * x, 2.0),
        jax.jit(lambda x: x),
        eqx.nn.Lambda(lambda x: x),
        *(jax.jit, jax.tree.map, optax.adam, eqx.is_array, rd.unwrap, rd.Gaussian.sample, np.exp),
        dist.Normal,
        functools.partial(dist.Normal, scale=1.0),
        rd.Gaussian(jnp.zeros(1), jnp.eye(1)).sample,
        eqx.filter_vmap(jnp.tanh),
    ],
)
def test_functions_of_users_are_taken_from_like(fn: Any, tmp_path: Path):
    with pytest.raises(rd.CheckpointError, match=r"tree\['f'\].*like=tree"):
        reload(tmp_path, {"f": fn})
    loaded = rd.load(tmp_path / "object.rd", like={"f": fn})
    assert same(jax.tree.leaves(loaded), jax.tree.leaves({"f": fn}))
    with pytest.raises(rd.CheckpointError, match=r"tree\['f'\].* differs"):
        rd.load(tmp_path / "object.rd", like={"f": 1.0})


def test_classes_of_users_are_taken_from_like(tmp_path: Path):
    kernel = UserKernel(jnp.ones(2), name="other")
    with pytest.raises(rd.CheckpointError, match=r"unknown class .*test_file:UserKernel"):
        reload(tmp_path, kernel)
    loaded = rd.load(tmp_path / "object.rd", like=UserKernel(jnp.zeros(2)))
    assert same(loaded, kernel)
    point = Point(1, [jnp.ones(1)])
    assert same(reload(tmp_path, point, like=Point(2, [jnp.zeros(1)])), point)


def family_of(width: int) -> Any:
    params = eqx.filter(eqx.nn.MLP(2, 1, width, 1, key=jax.random.key(0)), eqx.is_array)
    return optax.adam(1e-2).init(params)


@pytest.mark.parametrize(
    "pair, message",
    [
        (
            lambda: (family_of(4), family_of(5)),
            r"\[0\]\.mu\.layers\[0\]\.weight.*\(4, 2\).*\(5, 2\)",
        ),
        (lambda: (family_of(4), optax.sgd(0.1).init(jnp.ones(1))), r"\[0\].*ScaleByAdamState"),
        (lambda: (make_model(), make_model(make_network())), r"model\.emission\.fn.*numpy:tanh"),
        (lambda: (make_network(), make_model()), r"mlp differs.*equinox.nn:MLP.*StateSpaceModel"),
        (lambda: (jnp.ones(2), jnp.ones(2, jnp.float32)), r"dtype float64.*dtype float32"),
        (lambda: (jax.random.key(0), jax.random.key(0, impl="rbg")), r"key<fry>.*key<rbg>"),
        (lambda: ([1, 2], [1]), r"length 2.*length 1"),
        (lambda: ((1,), [1]), r"a tuple of length 1.*a list"),
        (lambda: ({"a": 1}, {"b": 1}), r"keys \['a'\].*keys \['b'\]"),
        (lambda: ([None], [jnp.ones(1)]), r"tree\[0\] differs.*None.*\(1,\)"),
        (lambda: ([True], [1]), r"True.* 1"),
        (lambda: (Point(1, 2), UserKernel(1)), r"Point.*UserKernel"),
        (lambda: ([functools.partial(jnp.add, 1)], [jnp.add]), r"partial"),
        (lambda: ([np.dtype("int8")], [2]), r"int8"),
    ],
)
def test_differences_from_like_are_named(
    pair: Callable[[], tuple[Any, Any]], message: str, tmp_path: Path
):
    obj, like = pair()
    with pytest.raises(rd.CheckpointError, match=message):
        reload(tmp_path, obj, like=like)
    assert same(reload(tmp_path, obj, like=obj), obj)


# --- precision ------------------------------------------------------------------------------------


def test_float64_arrays_are_not_silently_rounded(tmp_path: Path):
    doubles, singles = jnp.ones(2), jnp.ones(2, jnp.float32)
    rd.save(tmp_path / "doubles.rd", {"x": doubles})
    rd.save(tmp_path / "rest.rd", [singles, np.ones(2), 0.1, jax.random.key(0)])
    with jax.enable_x64(False):
        with pytest.raises(rd.CheckpointError, match=r"tree\['x'\].*float64.*jax_enable_x64"):
            rd.load(tmp_path / "doubles.rd")
        loaded = rd.load(tmp_path / "rest.rd")
    assert same(loaded, [singles, np.ones(2), 0.1, jax.random.key(0)])


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("write", [rd.save, write_checkpoint])
def test_failed_save_leaves_the_old_file(
    write: Callable[..., None], call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.rd"
    write(path, "old")

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(OSError, match="the disk is full"):
            write(path, "new")
    assert os.listdir(tmp_path) == ["a.rd"]
    assert rd.load(path) == "old"


def test_save_and_load_accept_any_path(tmp_path: Path):
    rd.save(str(tmp_path / "any.suffix"), 1)
    assert rd.load(str(tmp_path / "any.suffix")) == 1
    with pytest.raises(FileNotFoundError, match="nowhere"):
        rd.save(tmp_path / "nowhere" / "a.rd", 1)
    with pytest.raises(FileNotFoundError):
        rd.load(tmp_path / "missing.rd")
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "any.suffix")]
    assert modes[0] == modes[1]


def test_valid_file_exists_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process may be killed between any two operations on files."""
    path, replace, moments = tmp_path / "a.rd", os.replace, []
    write_checkpoint(path, 0)
    assert read_checkpoint(path) == (0, None, False)

    def watched(*args: Any) -> None:
        moments.append(read_checkpoint(path).tree)
        replace(*args)
        moments.append(read_checkpoint(path).tree)

    monkeypatch.setattr(os, "replace", watched)
    write_checkpoint(path, 1, {"step": 1})
    write_checkpoint(path, 2, {"step": 2})
    assert moments == [0, 0, 0, 1, 1, 1, 1, 2]
    assert read_checkpoint(path) == (2, {"step": 2}, False)
    assert sorted(os.listdir(tmp_path)) == ["a.rd", "a.rd.previous"]


def test_a_damaged_file_falls_back_and_never_becomes_the_previous_one(tmp_path: Path):
    path = tmp_path / "a.rd"
    write_checkpoint(path, 1)
    write_checkpoint(path, 2)
    for damaged in (b"", b"\0" * 1000, path.read_bytes()[:-1]):
        path.write_bytes(damaged)
        assert read_checkpoint(path) == (1, None, True)
    write_checkpoint(path, 3)
    assert read_checkpoint(path) == (3, None, False)
    path.unlink()
    assert read_checkpoint(path) == (1, None, True)
    with pytest.raises(rd.CheckpointError, match="differs"):
        read_checkpoint(path, like="text")
    (tmp_path / "a.rd.previous").unlink()
    with pytest.raises(FileNotFoundError):
        read_checkpoint(path)


# --- damaged files --------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.rd"
    rd.save(path, make_model(), metadata={"a": 1})
    return path


def test_a_file_that_was_cut_short_is_refused(saved: Path):
    data = saved.read_bytes()
    points = [*np.linspace(0, len(data) - 1, 30).astype(int), 1, 4, len(data) - 64, len(data) - 22]
    for point in points:
        saved.write_bytes(data[:point])
        with pytest.raises(rd.CheckpointError, match=r"truncated|empty|not a checkpoint"):
            rd.load(saved)
    saved.write_bytes(data + b"\0")
    with pytest.raises(rd.CheckpointError):
        rd.load(saved)


def test_no_byte_changes_unnoticed(saved: Path):
    data = saved.read_bytes()
    ends = [*range(40), *range(len(data) - 200, len(data))]
    for position in [*np.linspace(0, len(data) - 1, 150).astype(int), *ends]:
        flipped = bytearray(data)
        flipped[position] ^= 1 << int(RNG.integers(8))
        saved.write_bytes(flipped)
        with pytest.raises(rd.CheckpointError):
            rd.load(saved)
    saved.write_bytes(data)
    assert same(rd.load(saved), make_model())


def rewrite(path: Path, edit: Callable[[dict[str, Any], dict[str, bytes]], None], **hashes: bool):
    """Edit a file; with `content` and `file` recompute these hashes, as an attacker would."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members.pop("manifest.json"))
    edit(manifest, members)
    if hashes.get("content"):
        content = {key: manifest[key] for key in ("tree", "arrays", "metadata")}
        text = json.dumps(content, sort_keys=True).encode()
        manifest["content_sha256"] = hashlib.sha256(text).hexdigest()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", hashes.get("compress", False) * zipfile.ZIP_DEFLATED) as out:
        out.writestr("manifest.json", json.dumps(manifest))
        for name, member in members.items():
            out.writestr(name, member)
        out.comment = b"0" * 64
    data = buffer.getvalue()
    if hashes.get("file"):
        data = data[:-64] + hashlib.sha256(data[:-64]).hexdigest().encode()
    path.write_bytes(data)


def edit_array(_: dict[str, Any], members: dict[str, bytes]) -> None:
    members["arrays/2.npy"] = members["arrays/2.npy"][:-1] + b"\x01"


def edit_version(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["version"] = 99


def edit_static(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["tree"]["fields"]["emission"]["fields"]["takes_input"] = True


def edit_nothing(*_: Any) -> None:
    pass


def drop_array(_: dict[str, Any], members: dict[str, bytes]) -> None:
    del members["arrays/2.npy"]


def edit_shape(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["arrays"][2]["shape"] = [4, 1]


def edit_field(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["tree"]["fields"]["more"] = 1


def edit_tag(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
    manifest["tree"]["fields"]["prior"] = {"run": "os:system"}


@pytest.mark.parametrize("file", [True, False])
@pytest.mark.parametrize(
    "edit, content, message",
    [
        (edit_array, False, r"The array model\.transition\.weight .*arrays/2\.npy.* was edited"),
        (drop_array, False, r"The array model\.transition\.weight"),
        (edit_static, False, r"The manifest .* was edited"),
        (edit_version, False, r"format 99, written by retrodict .* Upgrade retrodict"),
    ],
)
def test_edited_files_are_detected(edit: Any, content: bool, message: str, file: bool, saved: Path):
    rewrite(saved, edit, content=content, file=file)
    with pytest.raises(rd.CheckpointError, match=message):
        rd.load(saved)


def test_edits_with_valid_hashes_are_validated(saved: Path):
    original = saved.read_bytes()
    cases = {
        edit_shape: r"model\.transition\.weight .*is not an array of shape \(4, 1\)",
        edit_field: r"fields \['emission', 'more', .*saved by another version",
        edit_tag: r"is invalid",
    }
    for edit, message in cases.items():
        saved.write_bytes(original)
        rewrite(saved, edit, content=True, file=True)
        with pytest.raises(rd.CheckpointError, match=message):
            rd.load(saved)
    saved.write_bytes(original)
    rewrite(saved, edit_nothing, content=True, file=True)
    assert same(rd.load(saved), make_model())  # the edits above are what was refused
    rewrite(saved, edit_nothing, content=True, file=True, compress=True)
    with pytest.raises(rd.CheckpointError, match="compressed"):
        rd.load(saved)


@pytest.mark.parametrize("data", [b"text", b"PK\3\4", b"PK\5\6" + b"\0" * 18])
def test_files_that_are_not_checkpoints_are_refused(data: bytes, tmp_path: Path):
    (tmp_path / "a.rd").write_bytes(data)
    with pytest.raises(rd.CheckpointError, match="not a checkpoint of retrodict"):
        rd.load(tmp_path / "a.rd")
    np.savez(tmp_path / "b.npz", a=np.ones(2))
    with pytest.raises(rd.CheckpointError, match="not a checkpoint of retrodict"):
        rd.load(tmp_path / "b.npz")


# --- what a file may name -------------------------------------------------------------------------


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    def load(tree: Any, like: Any = None) -> Any:
        path = tmp_path / "crafted.rd"
        rd.save(path, 1)
        rewrite(path, lambda m, _: m.update(tree=tree), content=True, file=True)
        return rd.load(path, like=like)

    yield load
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "subprocess:Popen",
        "retrodict.cli.__main__:main",
        "retrodict._checkpoint.file:os.system",
        "retrodict._checkpoint.file:os",
        "jax.numpy:__builtins__",
        "numpy:load",
        "numpy.testing:measure",
        "jax.numpy:tanh.__class__",
        "retrodict:Gaussian.__subclasses__",
        "retrodict:Gaussian.__init__.__globals__",
        "equinox:no_such_name",
        "numpyro.nowhere:f",
        "jax.",
        "",
    ],
)
def test_names_outside_the_allowlist_are_refused(name: str, loading: Callable[..., Any]):
    for node in (
        {"name": name},
        {"class": name, "fields": {}},
        {"enum": [name, "A"]},
        {"partial": ["functools", {"name": name}, {"tuple": ["true"]}, {"dict": []}]},
    ):
        with pytest.raises(rd.CheckpointError, match=r"refused|unknown class"):
            loading(node)


def evaluating(code: str) -> dict[str, Any]:
    """A function that evaluates Python text when it is called, made of names within JAX alone."""
    frame = {"class": "numpyro.distributions:Normal", "fields": {}}
    frame["fields"] = {"globals": {"dict": []}, "locals": {"dict": []}}
    debugger = {"class": "numpyro.distributions:Normal", "fields": {}}
    debugger["fields"] = {"frames": {"list": [frame]}, "frame_index": 0}
    evaluate = {"name": "jax._src.debugger.cli_debugger:CliDebugger.evaluate"}
    is_leaf = {"partial": ["functools", evaluate, {"tuple": [debugger]}, {"dict": []}]}
    arguments = {"tuple": [{"name": "jax.numpy:tanh"}, code]}
    keywords = {"dict": [["is_leaf", is_leaf]]}
    return {"partial": ["functools", {"name": "jax.tree_util:tree_map"}, arguments, keywords]}


def test_a_file_cannot_run_code(loading: Callable[..., Any], tmp_path: Path):
    marker = tmp_path / "ran"
    with pytest.raises(rd.CheckpointError, match="jax.tree_util:tree_map"):
        loading(evaluating(f"open({str(marker)!r}, 'w').close()"))(1.0)
    assert not marker.exists()


@pytest.mark.parametrize(
    "node",
    [
        {"class": "retrodict:unwrap", "fields": {}},
        {"class": "jax:Array", "fields": {}},
        {"class": "retrodict:AbstractKernel", "fields": {}},
        {"enum": ["jax.numpy:tanh", "A"]},
        {"enum": ["jax.lax:Precision", "NONE"]},
        {"array": 0},
        {"dict": [[{"list": []}, 1]]},
        {"tuple": [1], "list": [2]},
        [1],
    ],
)
def test_malformed_nodes_are_refused(node: Any, loading: Callable[..., Any]):
    with pytest.raises(rd.CheckpointError):
        loading(node)


PRIVATE = {
    "equinox.nn._mlp:_identity",  # the default of a public argument
    *(f"numpyro.distributions.constraints:_{name}" for name in ("Real", "Positive", "Interval")),
    "numpyro.distributions.constraints:_GreaterThan",
}
"""Names with an underscore in another package."""

# Calls that reach code, files, processes or a debugger.
SINKS = set(
    """
    __import__ breakpoint compile eval exec exec_module fromfile frompyfunc import_module input load
    loads memmap open Popen popen read_bytes read_text run_module save savez set_trace system tofile
    unlink urlopen write_bytes write_text
""".split()
)
HIGHER_ORDER = {"f", "fn", "fun", "func", "function", "callback", "is_leaf", "key_fn"}


def calls_in(module: str) -> set[str]:
    """The names of all that the source of a module calls."""
    calls = [n.func for n in ast.walk(ast.parse(module_source(module))) if isinstance(n, ast.Call)]
    named = {call.id for call in calls if isinstance(call, ast.Name)}
    return named | {call.attr for call in calls if isinstance(call, ast.Attribute)}


def module_source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def test_every_allowed_name_exists_and_is_public():
    for name in (*allowed.RECORD_NAMES, *allowed.VALUE_NAMES, *allowed.ENUM_NAMES):
        package = name.partition(".")[0].partition(":")[0]
        assert package in ("equinox", "jax", "numpy", "numpyro", "optax", "retrodict"), name
        if importlib.util.find_spec(package) is None:
            continue  # numpyro is optional
        module, _, attribute = name.partition(":")
        assert hasattr(importlib.import_module(module), attribute), name
        private = any(part.startswith("_") for part in (*module.split("."), attribute))
        assert not private or package == "retrodict" or name in PRIVATE, name


# Records of computations that end before anything is saved.
NOT_STORED = {
    "retrodict._exact.grid.smoother": "Passes",
    "retrodict._exact.kalman_batch": "KalmanBatch",
    "retrodict._expectations.functionals": "_Gradient",
    "retrodict._expectations.moments": "StateRow PairRow Moments",
    "retrodict._learning.coordinates": "ModelCoordinates",
    "retrodict._learning.dataset": "Minibatch InMemoryBatches",
    "retrodict._learning.elbo_loss": "ElboLoss StepLoss",
    "retrodict._learning.elbo_of_rows": "_SelectedLaw",
    "retrodict._learning.fit_evidence": "EvidenceLoss",
    "retrodict._learning.information.exact": "GridEvidence",
    "retrodict._learning.on_disk": "StoredBatches",
    "retrodict._learning.segments": "_Segment _ByMoments _BySampling _LinearKernel",
    "retrodict._linearised.recursion": "Pass",
    "retrodict.bounds.reference": "Reference",
    "retrodict.experiments.multivariate": "DiagonalMatrix",
    "retrodict.online.learner": "OnlineLearner LaggedLearner",
    "retrodict.online.sensitivity": "DifferentiableRow",
    "retrodict.particles.backward_weights": "BackwardWeights",
    "retrodict.particles.guided_smoother": "_Guide",
    "retrodict.particles.tempered": "TemperedFilter",
    "retrodict.runs._switching": "SmoothedRegimes",
    "retrodict.switching.fit_evidence": "_Loss",
    "retrodict.switching.moments": "Paths RegimeMoments",
}


def test_module_classes_are_allowed_or_listed_as_not_stored():
    """A contributor who adds a class reads here what to add."""
    not_stored = {
        f"{module}:{name}" for module, names in NOT_STORED.items() for name in names.split()
    }
    stored = {resolve(name, allowed.RECORD_NAMES) for name in allowed.RECORD_NAMES}
    modules = [m.name for m in pkgutil.walk_packages(rd.__path__, "retrodict.")]
    unknown = {
        f"{name}:{cls.__name__}"
        for name in modules
        for cls in vars(importlib.import_module(name)).values()
        if inspect.isclass(cls) and cls.__module__ == name and issubclass(cls, eqx.Module)
        if not (cls.__name__.startswith("Abstract") or inspect.isabstract(cls) or cls in stored)
    }
    assert not unknown - not_stored, (
        "If users can save an instance, add the class to CLASSES of _checkpoint/allowed.py and"
        " increase NAMES_VERSION; otherwise add it to NOT_STORED of this file."
    )
    assert not not_stored - unknown, "Remove these classes from NOT_STORED."


def test_allowed_classes_are_records_with_stable_names():
    for name in allowed.RECORD_NAMES:
        cls = resolve(name, allowed.RECORD_NAMES)
        assert is_record_class(cls) and not inspect.isabstract(cls), name
        assert name_of(cls, allowed.RECORD_NAMES) == name  # it is saved by this name


def test_allowed_names_give_no_access_to_code_or_files():
    modules = set()
    for name in (*allowed.RECORD_NAMES, *allowed.FUNCTION_NAMES):
        value = resolve(name, allowed.RECORD_NAMES | allowed.FUNCTION_NAMES)
        modules.add(inspect.unwrap(value).__module__)
        assert value.__name__ not in SINKS
        if name in allowed.FUNCTION_NAMES and not isinstance(value, jnp.ufunc):
            assert not HIGHER_ORDER & set(inspect.signature(value).parameters), name
    # jnp.load stands beside jnp.where, and is not on the list.
    forbidden = {module: calls_in(module) & SINKS for module in modules}
    assert {module: calls for module, calls in forbidden.items() if calls} == {
        "jax._src.numpy.lax_numpy": {"load"}
    }


def test_records_use_allowed_names_only(tmp_path: Path):
    """What the library makes is loaded without `like`."""
    rd.save(tmp_path / "old.rd", make_model())
    rewrite(tmp_path / "old.rd", lambda m, _: m.pop("names_version"), content=True, file=True)
    assert same(rd.load(tmp_path / "old.rd"), make_model())  # as version 0.1 wrote it


def test_files_with_the_module_names_of_version_0_1_are_read(tmp_path: Path):
    path = tmp_path / "series.rd"
    series = Series(jnp.ones((3, 1)), None, None, None)
    rd.save(path, series)

    def edit(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
        text = json.dumps(manifest["tree"])
        assert "retrodict:Series" in text
        old = text.replace("retrodict:Series", "retrodict._mask:Series")
        manifest["tree"] = json.loads(old)

    rewrite(path, edit, content=True, file=True)
    assert same(rd.load(path), series)
    for name in allowed.RENAMED.values():
        assert name in (allowed.RECORD_NAMES if ":" in name else allowed.CLASSES)
    for old, new in (
        ("retrodict:KalmanPosterior", "retrodict._exact.kalman_smoother:KalmanPosterior"),
        ("retrodict:FixedLag", "retrodict.online:FixedLag"),
        ("retrodict._train:TrainState", "retrodict._learning.train:TrainState"),
        ("retrodict._family._base:Factor", "retrodict._families.base:Factor"),
        ("retrodict._family._base:Row", "retrodict:Series"),
        ("retrodict._grid.posterior:Held", "retrodict._exact.grid.posterior:Held"),
    ):
        assert allowed.current_name(old) == new and new in allowed.RECORD_NAMES


def test_name_from_later_version_asks_for_upgrade(tmp_path: Path):
    path = tmp_path / "a.rd"
    rd.save(path, 1)

    def edit(manifest: dict[str, Any], _: dict[str, bytes]) -> None:
        manifest["tree"] = {"name": "jax.numpy:new"}
        manifest["names_version"] = allowed.NAMES_VERSION + 1

    rewrite(path, edit, content=True, file=True)
    with pytest.raises(rd.CheckpointError, match="later version of retrodict: upgrade"):
        rd.load(path)


def test_a_function_of_another_name_is_not_taken_from_like(loading: Callable[..., Any]):
    with pytest.raises(rd.CheckpointError, match="differs"):
        loading({"name": "jax.numpy:load"}, like=jnp.tanh)


@pytest.mark.parametrize("field", ["log_prob", "__class__", "sample", "support", "mean", "a b"])
def test_a_file_cannot_replace_methods(field: str, loading: Callable[..., Any]):
    node = {"class": "numpyro.distributions:Normal", "fields": {field: {"name": "jax.numpy:tanh"}}}
    with pytest.raises(rd.CheckpointError, match="a file may not set"):
        loading(node)


def npy(header: str) -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 16


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-2,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -2)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (2L,)}",
        "{'descr': '<f8'}",
    ],
)
def test_arrays_of_another_size_than_declared_are_refused(header: str, tmp_path: Path):
    path = tmp_path / "a.rd"
    rd.save(path, np.zeros(2))

    def edit(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        members["arrays/0.npy"] = npy(header)
        manifest["arrays"][0]["sha256"] = hashlib.sha256(npy(header)).hexdigest()

    rewrite(path, edit, content=True, file=True)
    with pytest.raises(rd.CheckpointError):
        rd.load(path)


def test_repeated_references_to_one_array_are_refused(tmp_path: Path):
    path = tmp_path / "a.rd"
    rd.save(path, [np.zeros(2)])
    twice = {"list": [{"array": 0}, {"array": 0}]}
    rewrite(path, lambda m, _: m.update(tree=twice), content=True, file=True)
    with pytest.raises(rd.CheckpointError, match="refers to the array . again"):
        rd.load(path)


def overlapping(count: int, size: int) -> bytes:
    """A file in which each array contains all later ones, in about `size` bytes."""
    names = [f"arrays/{i}.npy" for i in range(count)]
    arrays, rest = [], bytes(size)
    places = [0]
    for name in reversed(names):
        buffer = io.BytesIO()
        np.save(buffer, np.frombuffer(rest, np.uint8))
        arrays.insert(0, buffer.getvalue())
        member = io.BytesIO()
        with zipfile.ZipFile(member, "w") as archive:
            archive.writestr(name, arrays[0])
        rest = member.getvalue()[: 30 + len(name) + len(arrays[0])]
    for name in names[:-1]:
        places.append(places[-1] + 30 + len(name) + 128)
    entries = [
        {"path": name, "shape": [len(array) - 128], "dtype": "uint8", "kind": "numpy"}
        | {"sha256": hashlib.sha256(array).hexdigest()}
        for name, array in zip(names, arrays, strict=True)
    ]
    content: dict[str, Any] = {"arrays": entries, "metadata": None}
    content["tree"] = {"list": [{"array": index} for index in range(count)]}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest = {"format": FORMAT, "version": 1, "content_sha256": digest, **content}
    whole = io.BytesIO(rest)
    with zipfile.ZipFile(whole, "a") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, array, place in zip(names, arrays, places, strict=True):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.header_offset, info.CRC = place, zlib.crc32(array)
            info.file_size = info.compress_size = len(array)
            archive.filelist.append(info)
        archive.comment = b"0" * 64
    data = whole.getvalue()[:-64]
    return data + hashlib.sha256(data).hexdigest().encode()


def test_members_that_overlap_are_refused(tmp_path: Path):
    """They would take many times the memory of the file."""
    path = tmp_path / "a.rd"
    path.write_bytes(overlapping(1, 10))
    assert rd.load(path)[0].shape == (10,)
    path.write_bytes(overlapping(20, 100_000))
    with pytest.raises(rd.CheckpointError, match="verlap"):
        rd.load(path)


@pytest.mark.parametrize("dtype", ["|S0", "<U0", "|V0"])
def test_arrays_of_many_empty_texts_are_refused(dtype: str, tmp_path: Path):
    """NumPy would take minutes and gigabytes to copy one."""
    path = tmp_path / "a.rd"
    rd.save(path, np.zeros(2))
    data = npy(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (200000000,)}}")[:-16]

    def edit(manifest: dict[str, Any], members: dict[str, bytes]) -> None:
        members["arrays/0.npy"] = data
        manifest["arrays"][0] |= {
            "sha256": hashlib.sha256(data).hexdigest(),
            "shape": [200_000_000],
            "dtype": dtype,
        }

    rewrite(path, edit, content=True, file=True)
    with pytest.raises(rd.CheckpointError, match="in 128 bytes"):
        rd.load(path)


def test_keys_with_colliding_hashes_are_refused(loading: Callable[..., Any]):
    """Twenty thousand would take seconds, and ten times as many a hundred times as long."""
    with pytest.raises(rd.CheckpointError, match="keys of one hash"):
        loading({"dict": [[i * (2**61 - 1), 0] for i in range(1000)]})
    assert len(loading({"dict": [[i, 0] for i in range(1000)]})) == 1000


@pytest.mark.parametrize(
    "node",
    [
        {"name": "a\nb\x1b[2J\ud800" * 1000},
        {"class": "a\nb\x1b[2J\ud800" * 1000, "fields": {}},
        {"dict": [["key\n\ud800" * 1000, {"callable": "f"}]]},
        {"class": "numpyro.distributions:Normal", "fields": {"a\n" * 1000: 1}},
    ],
)
def test_messages_are_one_short_line(node: Any, loading: Callable[..., Any]):
    with pytest.raises(rd.CheckpointError) as error:
        loading(node)
    assert str(error.value).isprintable() and len(str(error.value)) < 1100


@pytest.mark.parametrize("versions", [[], {"retrodict": []}, {"retrodict": "a\nb" * 9999}, None])
def test_a_later_format_with_a_strange_writer_is_refused(versions: Any, tmp_path: Path):
    path = tmp_path / "a.rd"
    rd.save(path, 1)
    edit = {"version": 2, "versions": versions}
    rewrite(path, lambda manifest, _: manifest.update(edit), content=True, file=True)
    with pytest.raises(rd.CheckpointError, match="has format 2") as error:
        rd.load(path)
    assert str(error.value).isprintable() and len(str(error.value)) < 1100


def nested(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = {"list": [node]}
    return node


def test_deep_nesting_is_refused(loading: Callable[..., Any], tmp_path: Path):
    with pytest.raises(rd.CheckpointError):
        loading(nested(300))
    deep = "[" * 100_000 + "]" * 100_000
    with zipfile.ZipFile(tmp_path / "deep.rd", "w") as archive:
        archive.writestr("manifest.json", f'{{"format": "{FORMAT}", "version": 1, "tree": {deep}}}')
    with pytest.raises(rd.CheckpointError):
        rd.load(tmp_path / "deep.rd")


def test_files_that_are_not_regular_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.rd")
    (tmp_path / "zero.rd").symlink_to("/dev/zero")
    for name in ("pipe.rd", "zero.rd"):
        with pytest.raises(rd.CheckpointError, match="not a regular file"):
            rd.load(tmp_path / name)


def test_loading_runs_no_constructor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rd.save(tmp_path / "a.rd", make_model())

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a constructor was called")

    monkeypatch.setattr(rd.StateSpaceModel, "__check_init__", fail)
    monkeypatch.setattr(rd.Positive, "__init__", fail)
    loaded = rd.load(tmp_path / "a.rd")
    np.testing.assert_allclose(loaded.emission.scale_tril.std.value, [0.7, 2.0])
