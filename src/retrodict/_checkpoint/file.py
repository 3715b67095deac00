"""Checkpoint files: arrays, and a manifest in JSON from which the object is rebuilt.

A file is an uncompressed zip archive of `manifest.json` and one `.npy` per array. The manifest
contains the tree of the object: classes and functions by name, static values, and references to the
arrays. The comment of the archive is the SHA-256 of all bytes before it, so that every change is
detected.
"""

import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from retrodict._checkpoint.allowed import NAMES_VERSION
from retrodict._checkpoint.names import CheckpointError, described, last_name, root_name
from retrodict._checkpoint.reader import ABSENT, Reader
from retrodict._checkpoint.writer import Writer
from retrodict._files import replacing, version_of

FORMAT = "retrodict checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
DIGEST_LENGTH = 64  # hexadecimal digits of SHA-256

PathLike: TypeAlias = str | os.PathLike[str]


class DamagedError(CheckpointError):
    """A file whose content was altered after writing, so that an older file may be better."""


class Checkpoint(NamedTuple):
    """The result of `read_checkpoint`.

    Attributes:
        tree: the object.
        metadata: the metadata of the file.
        from_previous: whether the newest file was missing or damaged and the previous one is used.
    """

    tree: Any
    metadata: Any
    from_previous: bool


def save(path: PathLike, obj: Any, *, metadata: Any = None) -> None:
    """Save a model, a family, a chain, or any pytree, to one file.

    The file is written atomically: if the call is interrupted, an existing file is unchanged. Equal
    objects give equal files. Classes of this library, layers of equinox, distributions of numpyro,
    states of optax and the usual functions of `jax.numpy` and `jax.nn` are stored by name. Of
    others, such as a lambda, the file contains the place only, and `load` needs them in `like`.

    Example:
        >>> import tempfile, jax.numpy as jnp, retrodict as rd
        >>> law = rd.Gaussian(jnp.array([0.5]), jnp.eye(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rd.save(f"{folder}/law.rd", law)
        ...     rd.load(f"{folder}/law.rd").mean.tolist()
        [0.5]

    Args:
        path: the file, usually with the suffix `.rd`; its folder must exist.
        obj: equinox modules, dicts, lists, tuples, named tuples, arrays, keys, numbers, strings and
            functions, nested in any way, such as states of optax.
        metadata: a JSON value, stored as `metadata` in `manifest.json`.

    Raises:
        TypeError: if a part of `obj` cannot be stored; the message contains its path.
    """
    _write(Path(path), _pack(obj, metadata), keep_previous=False)


def load(path: PathLike, *, like: Any = None) -> Any:
    """Load a file of `save`, with bitwise equal arrays.

    Loading a file, and using the object, does not run code from the file. No constructor is called,
    and a file can name only classes and functions on a fixed list, which compute with arrays and do
    nothing else. The values are those of the author of the file: they may be wrong, and using them
    may take long. Functions and classes of `like` are called with these values.

    Example:
        >>> import tempfile, jax.numpy as jnp, retrodict as rd
        >>> def build():
        ...     return rd.NonlinearGaussianKernel(lambda x: 2.0 * x, rd.Diagonal(jnp.ones(1)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rd.save(f"{folder}/emission.rd", build())
        ...     emission = rd.load(f"{folder}/emission.rd", like=build())  # supplies the lambda
        >>> emission.law(jnp.ones(1)).mean.tolist()
        [2.0]

    Args:
        path: the file.
        like: an object of the same structure, which supplies functions and classes that a file may
            not name, such as a lambda. Its classes, shapes and dtypes must be those of the file;
            its values do not matter.

    Returns:
        The object. Arrays of JAX and of NumPy are restored as such; weak types are lost.

    Raises:
        CheckpointError: if the file is truncated, edited or not a checkpoint, if it was written by
            a later version, if it needs `like` or does not fit it, or if it contains 64-bit arrays
            and JAX has them disabled.
        FileNotFoundError: if the file does not exist.
    """
    path = Path(path)
    return _rebuild(path, *_open(path), like)


def write_checkpoint(path: PathLike, tree: Any, metadata: Any = None) -> None:
    """Save as `save` does, and keep an existing file as `<path>.previous`.

    A damaged file does not replace the previous one. Once an intact file exists, one exists at any
    later time.
    """
    _write(Path(path), _pack(tree, metadata), keep_previous=True)


def read_checkpoint(path: PathLike, like: Any = None, *, known: Iterable[type] = ()) -> Checkpoint:
    """Load the last file of `write_checkpoint`, or the previous one if the last is damaged.

    A file that does not fit `like`, or was written by a later version, raises an error: the
    previous file is not used then.

    Args:
        path: the file.
        like: an object of the same structure, as in `load`.
        known: further classes that the file may name.
    """
    path = Path(path)
    previous = _previous(path)
    try:
        used, (manifest, archive) = path, _open(path)
    except (DamagedError, FileNotFoundError):
        if not previous.exists():
            raise
        used, (manifest, archive) = previous, _open(previous)
    tree = _rebuild(used, manifest, archive, like, known)
    return Checkpoint(tree, manifest["metadata"], used is previous)


def _pack(obj: Any, metadata: Any) -> bytes | memoryview:
    """Return the bytes of the file."""
    writer = Writer()
    tree = writer.encode(obj, root_name(type(obj).__name__))
    try:
        # Convert as reading will do: the keys of dicts, for instance, become strings.
        metadata = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"`metadata` must be a JSON value: {error}.") from error
    content = {"tree": tree, "arrays": writer.arrays, "metadata": metadata}
    versions = {name: version_of(name) for name in ("jax", "numpy", "retrodict")}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "names_version": NAMES_VERSION,
        "versions": versions,
        "content_sha256": _content_digest(content),
        **content,
    }
    text = json.dumps(manifest, indent=1, allow_nan=False)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, MANIFEST, text.encode())
        for index, data in enumerate(writer.members):
            _add(archive, _member_name(index), data)
        archive.comment = b"0" * DIGEST_LENGTH
    view = buffer.getbuffer()
    view[-DIGEST_LENGTH:] = _sha256(view[:-DIGEST_LENGTH]).encode()
    return view


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    # Constant time, system and mode: equal objects give equal files.
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.create_system, info.external_attr = 3, 0o644 << 16
    archive.writestr(info, data)


def _write(path: Path, data: bytes | memoryview, *, keep_previous: bool) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} of {path.name} does not exist.")
    is_kept = keep_previous and path.exists() and _is_intact(_read(path))
    with replacing(path, previous=_previous(path) if is_kept else None) as file:
        file.write(data)


def _open(path: Path) -> tuple[dict[str, Any], zipfile.ZipFile]:
    """Return the manifest and the archive, after a check of all bytes."""
    data = _read(path)
    if not data.startswith(b"PK\3\4"):
        problem = "is not a checkpoint of retrodict" if data else "is empty"
        raise DamagedError(f"{path} {problem}.")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        if sum(info.compress_size for info in archive.infolist()) > len(data):
            # Members that overlap could be a hundred times as long as the file.
            raise zipfile.BadZipFile("its members overlap")
        manifest = json.loads(_read_member(archive, MANIFEST))
        ours, version = manifest["format"] == FORMAT, int(manifest["version"])
    except Exception as error:  # zipfile alone raises a dozen types on damaged files
        raise DamagedError(
            f"{path} is truncated, damaged, or not a checkpoint of retrodict ({error})."
        ) from error
    if not ours:
        raise DamagedError(f"{path} is not a checkpoint of retrodict.")
    if version > VERSION:
        versions = manifest.get("versions")
        writer = versions.get("retrodict") if isinstance(versions, dict) else "a later version"
        raise CheckpointError(
            f"{path} has format {version}, written by retrodict {writer}; this version reads"
            f" formats up to {VERSION}. Upgrade retrodict to load it."
        )
    _check_hashes(path, data, manifest, archive)
    return manifest, archive


def _read(path: Path) -> bytes:
    # Check first: opening a pipe waits for its writer, and reading a device may never end.
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise CheckpointError(f"{path} is not a regular file.")
    return path.read_bytes()


def _check_hashes(
    path: Path, data: bytes, manifest: dict[str, Any], archive: zipfile.ZipFile
) -> None:
    """Raise if a file was altered, with the part that changed if possible."""
    try:
        if manifest["content_sha256"] != _content_digest(manifest):
            raise DamagedError(f"The manifest of {path} was edited or is damaged.")
        for index, entry in enumerate(manifest["arrays"]):
            name = _member_name(index)
            if entry["sha256"] != _member_digest(archive, name):
                raise DamagedError(
                    f"The array {entry['path']} of {path} ({name}) was edited or is damaged."
                )
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{path} is truncated or damaged ({error}).") from error
    if not _is_intact(data):
        raise DamagedError(f"{path} is truncated, edited or damaged.")


def _rebuild(
    path: Path,
    manifest: dict[str, Any],
    archive: zipfile.ZipFile,
    like: Any,
    known: Iterable[type] = (),
) -> Any:
    tree, entries = manifest["tree"], manifest["arrays"]
    name = tree.get("class", "") if isinstance(tree, dict) else ""
    root = root_name(last_name(str(name)))

    def read(index: int) -> bytes:
        return _read_member(archive, _member_name(index))

    classes = {described(cls): cls for cls in known}
    reader = Reader(path, root, entries, read, classes, manifest.get("names_version", 0))
    try:
        return reader.decode(tree, ABSENT if like is None else like, root)
    except CheckpointError:
        raise
    except Exception as error:  # the hashes are right, but `save` did not write this
        raise CheckpointError(f"The manifest of {path} is invalid: {repr(error)[:200]}.") from error


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def _member_name(index: int) -> str:
    return f"arrays/{index}.npy"


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        # `save` does not compress, and compressed data may expand to any size.
        raise zipfile.BadZipFile(f"{name} is compressed")
    return archive.read(info)


def _member_digest(archive: zipfile.ZipFile, name: str) -> str | None:
    try:
        return _sha256(_read_member(archive, name))
    except Exception:  # zipfile raises many types
        return None


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _content_digest(content: dict[str, Any]) -> str:
    parts = {key: content[key] for key in ("tree", "arrays", "metadata")}
    return _sha256(json.dumps(parts, sort_keys=True, allow_nan=False).encode())


def _is_intact(data: bytes) -> bool:
    view = memoryview(data)
    return bytes(view[-DIGEST_LENGTH:]) == _sha256(view[:-DIGEST_LENGTH]).encode()
