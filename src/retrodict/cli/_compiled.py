"""The cache of compiled programs: a repeated command does not compile again."""

import hashlib
import os
import platform
import sys
from pathlib import Path

MAX_BYTES = 500_000_000
"""The size above which the oldest half of the cache is removed."""


def keep_compiled_programs() -> None:
    """Let JAX, which is imported later, cache compiled programs in the user's cache folder.

    A folder or a setting in JAX's own environment variables has precedence. If the folder cannot be
    used, programs are compiled each time.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        folder = _user_cache() / "retrodict" / f"compiled-{_processor()}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(folder):
            return
        _prune(folder)
    except (OSError, RuntimeError):  # no home, no permission, a file in its place
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return named if named.is_absolute() else Path.home() / ".cache"


def _processor() -> str:
    """Return a hash of the instructions of the processor: homes are shared by unequal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        words = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {words}".encode()).hexdigest()[:8]


def _is_private(folder: Path) -> bool:
    """Return whether nobody else can write to a folder: compiled programs are executed."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    if sys.platform == "win32":
        return True
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _prune(folder: Path) -> None:
    """Remove the oldest half of the programs if they take too much space."""
    with os.scandir(folder) as entries:
        files = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in entries]
    if sum(size for _, size, _ in files) > MAX_BYTES:
        for _, _, path in sorted(files)[: (len(files) + 1) // 2]:
            Path(path).unlink(missing_ok=True)
