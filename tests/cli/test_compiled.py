"""The cache of compiled programs of the command line."""

import os
import subprocess
import sys

import numpy as np
import pytest

from retrodict.cli import _compiled

NAMES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache folder, in an environment without settings of JAX."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(_compiled, "_user_cache", lambda: tmp_path)
    return tmp_path


def chosen_folder() -> str | None:
    _compiled.keep_compiled_programs()
    return os.environ.get("JAX_COMPILATION_CACHE_DIR")


def test_programs_are_cached_in_the_users_cache_folder(cache):
    folder = chosen_folder()
    assert folder is not None and folder.startswith(f"{cache}/retrodict/compiled-")
    assert os.stat(folder).st_mode & 0o077 == 0
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"


def test_settings_of_jax_have_precedence(cache, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    assert chosen_folder() == "elsewhere" and not list(cache.iterdir())


def test_a_folder_that_others_can_write_is_not_used(cache):
    folder = chosen_folder()
    assert folder is not None
    os.chmod(folder, 0o777)
    del os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert chosen_folder() is None


def test_a_cache_that_cannot_be_made_is_not_used(cache):
    (cache / "retrodict").write_text("a file")
    assert chosen_folder() is None


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    if sys.platform == "linux":
        assert _compiled._user_cache() == tmp_path / ".cache"


def test_the_oldest_programs_are_removed(cache, monkeypatch):
    folder = chosen_folder()
    assert folder is not None
    for age, name in enumerate("dcba"):
        path = os.path.join(folder, name)
        with open(path, "wb") as file:
            file.write(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(_compiled, "MAX_BYTES", 400)
    _compiled.keep_compiled_programs()
    assert len(os.listdir(folder)) == 4
    monkeypatch.setattr(_compiled, "MAX_BYTES", 399)
    del os.environ["JAX_COMPILATION_CACHE_DIR"]
    _compiled.keep_compiled_programs()
    assert sorted(os.listdir(folder)) == ["c", "d"]


@pytest.mark.slow
def test_a_damaged_cache_changes_no_result(tmp_path):
    table = tmp_path / "table.csv"
    rows = np.cumsum(np.random.default_rng(0).normal(size=30))
    table.write_text("year,x\n" + "".join(f"{1990 + i},{row}\n" for i, row in enumerate(rows)))
    without = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment = {**without, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def retrodict(*arguments: str) -> str:
        words = [sys.executable, "-c", "from retrodict.cli import main; main()", *arguments]
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(words, check=True, timeout=600, **options).stdout

    retrodict("fit", "table.csv", "--model", "local_level", "--out", "run")
    first = retrodict("smooth", "run", "table.csv")
    (folder,) = (tmp_path / "cache" / "retrodict").iterdir()
    programs = [path for path in folder.iterdir() if path.name.endswith("-cache")]
    assert programs
    for i, path in enumerate(programs):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(bytes(data) if i % 2 else bytes(data[: len(data) // 2]))
    assert retrodict("smooth", "run", "table.csv") == first
    for path in programs:
        path.unlink()
        path.mkdir()
    assert retrodict("smooth", "run", "table.csv") == first
