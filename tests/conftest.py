"""Settings and fixtures of all tests: precision, strict promotion, keys, the hypothesis profile.

The shape annotations of `retrodict` are executed while the tests run: see `--jaxtyping-packages` in
pyproject.toml.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version

# Compilation takes most of the suite's time, and these programs run for milliseconds: LLVM need not
# try hard. To be set before JAX is imported.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):
    # A third less to compile. Later versions do not know the flag, and refuse to start.
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FLAGS)
# With as many threads as a small machine has cores, jaxlib 0.10 can deadlock: see docs/scale.md.
os.environ.setdefault("PJRT_NPROC", "16")

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run, and no deadline: the first example of a test pays for compilation.
hypothesis.settings.register_profile(
    "retrodict", deadline=None, derandomize=True, max_examples=20, print_blob=True
)
hypothesis.settings.load_profile("retrodict")


# Files that take long, roughly in order: a worker that starts one last leaves the other idle.
LONGEST = (
    "runs/test_runs",
    "exact/test_kalman_smoother",
    "learning/test_fit",
    "learning/test_segments",
    "families/test_base",
    "runs/test_stream_learning",
    "test_doctests",
    "online/test_running",
    "models/test_models",
    "model/test_series_accepted",
    "test_readme",
    "learning/test_on_disk",
    "distributed/test_mesh",
    "smooth/test_smooth",
    "bounds/test_error_bound",
    "particles/test_ffbsi",
    "learning/test_information",
    "data/test_reader",
    "linearised/test_smoother",
)


def pytest_configure(config: pytest.Config) -> None:
    """Cache compiled programs in the cache of pytest; `-p no:cacheprovider` disables it."""
    cache = getattr(config, "cache", None)
    if cache is not None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the others keep their order."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    names = {item.path: "/".join(item.path.with_suffix("").parts[-2:]) for item in items}
    short = {path: name.removeprefix("tests/") for path, name in names.items()}
    items.sort(key=lambda item: rank.get(short[item.path], len(rank)))


@pytest.fixture(autouse=True, scope="module")
def clear_compiled_programs() -> Iterator[None]:
    """Drop compiled programs after each file: a process may map a limited number of pages.

    Each program takes several memory mappings. Linux allows 65,530 per process, and the compiler
    crashes beyond that.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture
def x32() -> Iterator[None]:
    """Run a test as most users run JAX: 64-bit types off, every array float32."""
    with jax.enable_x64(False):
        yield


@pytest.fixture(params=["float64", "float32"])
def dtype(request: pytest.FixtureRequest) -> Iterator[jnp.dtype]:
    """Run a test once in each precision, with `jax_enable_x64` on for the first alone.

    Arrays made before the test (by a fixture of wider scope) keep the precision that they have.
    """
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.fixture
def untyped() -> Iterator[None]:
    """Call the library as its users do, without checks of annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
