"""One series over several devices: the results of one, and a share of its memory on each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from time_sharding_process import LONG

import retrodict as rd
from retrodict._numerics.associative_scan import prefix_scan
from retrodict.distributed.time_sharding import appended, prepended

WORKER = Path(__file__).parents[1] / "helpers" / "time_sharding_process.py"


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_over_mesh_equals_scan(reverse: bool):
    """Of products of matrices, which do not commute, over the one device of this process."""
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(20, 2, 2)))

    @jax.jit
    def both(weights: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            prefix_scan(lambda a, b: b @ a, weights, jnp.eye(2), reverse=reverse, parallel=p)
            for p in (True, rd.distributed.time_mesh())
        )

    one, other = both(weights)
    np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_joining_rows_is_the_same_with_a_mesh():
    rows, one = jnp.arange(6.0).reshape(3, 2), jnp.array([7.0, 8.0])
    for join in (lambda p: prepended(one, rows, p), lambda p: appended(rows, one, p)):
        np.testing.assert_array_equal(join(True), join(rd.distributed.time_mesh()))


@pytest.mark.usefixtures("untyped")
def test_mesh_that_is_not_over_time_is_refused():
    devices = np.array(jax.devices()[:1])
    for mesh in (
        Mesh(devices, ("batch",), axis_types=(AxisType.Auto,)),
        Mesh(devices, ("time",), axis_types=(AxisType.Explicit,)),
    ):
        with pytest.raises(ValueError, match=r"automatic axis 'time'.* Use retrodict\S*time_mesh"):
            rd.ScanFamily(jax.random.key(0), 1, 1).infer(np.zeros((4, 1)), parallel=mesh)


@pytest.fixture(scope="module")
def on_eight_devices() -> dict[str, Any]:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(WORKER)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["even", "uneven"])
def test_eight_devices_equal_sequential_results(on_eight_devices: dict[str, Any], rows: str):
    """Marginals, evidence, bound, paths and gradients, with a gap and padding."""
    assert on_eight_devices[rows] < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("smoother", ["exact", "amortised"])
def test_each_of_eight_devices_holds_an_eighth_of_memory(
    on_eight_devices: dict[str, Any], smoother: str
):
    memory = on_eight_devices["memory"]
    assert memory[smoother] < 1.25 / 8
    assert memory[f"{smoother}, rows of a block"] == LONG // 8
