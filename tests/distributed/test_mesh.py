"""Several devices and several processes find what one device finds."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import retrodict as rd

TESTS = Path(__file__).parents[1] / "helpers"
ROUNDING = 1e-10


def environment(num_devices: int = 1) -> dict[str, str]:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices}"
    path = os.pathsep.join([str(TESTS.parents[1] / "src"), str(TESTS)])
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}


def on_eight_devices(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(TESTS / "compare_devices.py"), *arguments],
        env=environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def few() -> dict[str, Any]:
    return on_eight_devices()


@pytest.mark.slow
def test_eight_device_fit_equals_single_device_fit(few: dict[str, Any]) -> None:
    assert few["devices"] == 8
    assert max(few["fit"].values()) < ROUNDING


def test_minibatches_do_not_depend_on_devices(few: dict[str, Any]) -> None:
    assert few["draws"] == [0.0, 0.0, 0.0, 0.0]


def test_gradients_are_reduced_once_per_step(few: dict[str, Any]) -> None:
    assert few["reductions"] == 1


def test_uneven_batch_is_inferred_on_all_devices(few: dict[str, Any]) -> None:
    assert few["infer"] < ROUNDING
    assert few["shares"] == [8, False]


@pytest.mark.slow
def test_eight_devices_equal_one_for_other_verbs_and_options() -> None:
    differences = on_eight_devices("all")
    for name in ("starts", "shared", "lengths", "windows", "stored"):
        assert max(differences[name].values()) < ROUNDING, name
    for name in ("evidence by steps", "ffbsi"):
        assert differences[name] < ROUNDING, name
    # L-BFGS stops where the evidence is flat to rounding, and its argument only to the root of it.
    assert differences["evidence"] < 1e-7


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def together(
    folder: Path, num_processes: int, *flags: str, checkpoint: str = "fit.rd"
) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """Runs processes that fit together, and waits for all of them."""
    port = free_port()
    out = folder / "parameters.npz"
    out.unlink(missing_ok=True)
    command = [sys.executable, str(TESTS / "fit_process.py"), f"localhost:{port}"]
    rest = [str(folder / checkpoint), str(out), *flags]
    return out, all_of(
        [[*command, str(num_processes), str(i), *rest] for i in range(num_processes)],
        [environment()] * num_processes,
    )


def all_of(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Runs commands at the same time, and waits for all of them; none outlives the test.

    A process that hangs is killed at the time limit of pytest.
    """
    processes = [
        subprocess.Popen(
            command, env=each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command, each in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *text)
        for process, text in zip(processes, said, strict=True)
    ]


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], rtol=0, atol=ROUNDING)


def steps(done: subprocess.CompletedProcess[str]) -> list[int]:
    return [int(line.split()[-1]) for line in done.stdout.splitlines() if "at step" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one process on one device finds."""
    out, done = together(tmp_path_factory.mktemp("alone"), 1)
    assert done[0].returncode == 0, done[0].stderr
    return arrays(out)


def assert_all_finished(done: Sequence[subprocess.CompletedProcess[str]]) -> None:
    for process in done:
        assert process.returncode == 0, process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("share",)], ids=["all series", "a share each"])
def test_two_process_fit_equals_single_process_fit(
    alone: dict[str, np.ndarray], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out, done = together(tmp_path, 2, *flags)
    assert_all_finished(done)
    assert_same(arrays(out), alone)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fit.rd",
        "fit.rd.previous",
        "parameters.npz",
    ]


@pytest.mark.slow
def test_unequal_shares_resume_with_any_number_of_processes(tmp_path: Path) -> None:
    """Nine series of unequal lengths over one, two and four processes, of which one has none."""
    (tmp_path / "whole").mkdir()
    out, done = together(tmp_path / "whole", 1, "uneven")
    assert_all_finished(done)
    uninterrupted = arrays(out)
    for count in (2, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        together(folder, count, "uneven", "shared", "dies")
        out, done = together(folder, 6 - count, "uneven", "shared")
        assert_all_finished(done)
        assert [steps(process)[0] for process in done] == [30] * (6 - count)
        assert_same(arrays(out), uninterrupted)


@pytest.mark.slow
def test_two_processes_read_their_share_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    out, done = together(tmp_path / "one", 1, "stored")
    assert_all_finished(done)
    (tmp_path / "two").mkdir()
    both, done = together(tmp_path / "two", 2, "stored")
    assert_all_finished(done)
    assert_same(arrays(both), arrays(out))
    # Six lanes of one block each, of which each process trains on three.
    for process, lanes in zip(done, ({"0", "1", "2"}, {"3", "4", "5"}), strict=True):
        (line,) = [line for line in process.stdout.splitlines() if "has read" in line]
        assert set(line.rpartition(": ")[2].split()) == lanes


@pytest.mark.slow
def test_lost_process_ends_the_others_and_any_number_resumes(
    alone: dict[str, np.ndarray], tmp_path: Path
) -> None:
    _, (first, killed) = together(tmp_path, 2, "dies")
    assert killed.returncode == -signal.SIGKILL
    assert first.returncode == 3
    assert "Process 0 of 2 could not continue with the others" in first.stderr
    assert "Start the job again" in first.stderr
    assert steps(first) == [10, 20]
    out, done = together(tmp_path, 1)  # what two processes wrote, by one
    assert_all_finished(done)
    assert steps(done[0])[0] == 30
    assert_same(arrays(out), alone)


@pytest.mark.slow
def test_two_processes_resume_from_checkpoint_of_one(
    alone: dict[str, np.ndarray], tmp_path: Path
) -> None:
    together(tmp_path, 1, "dies")
    out, done = together(tmp_path, 2, "share")
    assert_all_finished(done)
    assert [steps(process)[0] for process in done] == [30, 30]
    assert_same(arrays(out), alone)


@pytest.mark.slow
def test_lost_coordinator_ends_the_other_processes(tmp_path: Path) -> None:
    _, (killed, second) = together(tmp_path, 2, "dies first")
    assert killed.returncode == -signal.SIGKILL
    assert second.returncode != 0
    lost = "could not continue with the others", "another task died"
    assert any(words in second.stderr for words in lost)


@pytest.mark.slow
def test_command_line_runs_in_a_slurm_job(tmp_path: Path) -> None:
    """Two tasks as SLURM would start them, each of which reads its share, and one task alone."""
    rng = np.random.default_rng(0)
    ys = np.cumsum(rng.normal(size=(5, 40)), axis=1) + rng.normal(size=(5, 40))
    lines = [f"{t},{s},{ys[s, t]}" for s in range(5) for t in range(40)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["t,id,y", *lines]) + "\n")
    program = [sys.executable, str(TESTS / "cli_process.py"), "fit", str(table)]
    command = [*program, "--model", "local_level", "--time", "t", "--series", "id", "--json"]

    def job(task: int) -> dict[str, str]:
        return environment() | {
            # SLURM has a port for each number of a job: 4096 of them.
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
        }

    arguments = [*command, "--out", str(tmp_path / "run"), "--distributed"]
    first, second = all_of([arguments, arguments], [job(0), job(1)])
    assert_all_finished([first, second])
    assert second.stdout == ""
    assert "2 processes with 2 devices" in first.stderr
    assert "Each process reads its share of 5 series." in first.stderr
    assert rows_read(first) == ["80 rows of (0, 1)", "120 rows of (0, 1, 2)"]
    assert rows_read(second) == ["80 rows of (0, 1)", "80 rows of (3, 4)"]
    (alone,) = all_of([[*command, "--out", str(tmp_path / "alone")]], [environment()])
    records = [json.loads(each.stdout) for each in (first, alone)]
    assert records[0]["data"] == records[1]["data"]
    together, by_one = (record["results"]["parameters"] for record in records)
    for name, line in by_one.items():
        assert together[name].keys() == line.keys()
        for what in line.keys() & {"value", "error", "lower", "upper"}:
            assert together[name][what] == pytest.approx(line[what], rel=1e-6), name
    (again,) = all_of([arguments], [environment()])
    assert again.returncode == 2
    assert "no job of SLURM or Open MPI was found" in again.stderr


def rows_read(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = done.stderr.splitlines()
    return [line.removeprefix("read ") for line in lines if line.startswith("read ")]


@pytest.mark.slow
def test_unreadable_row_ends_all_processes(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    lines = [
        f"{t},{s},{'wrong' if (s, t) == (4, 7) else s + t}" for s in range(5) for t in range(40)
    ]
    table.write_text("\n".join(["t,id,y", *lines]) + "\n")
    program = [sys.executable, str(TESTS / "cli_process.py"), "fit", str(table)]
    command = [*program, "--model", "local_level", "--series", "id", "--out", str(tmp_path / "run")]
    job = [*command, "--distributed", "--coordinator", f"localhost:{free_port()}"]
    tasks = [[*job, "--num-processes", "2", "--process-id", str(i)] for i in range(2)]
    for done in all_of(tasks, [environment()] * 2):
        assert done.returncode == 2
        assert "line 169, column 'y': 'wrong' is not a number" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_unwritable_folder_ends_all_processes(tmp_path: Path) -> None:
    table, blocked = tmp_path / "table.csv", tmp_path / "file"
    table.write_text("t,y\n" + "".join(f"{t},{t % 3}\n" for t in range(40)))
    blocked.write_text("")
    program = [sys.executable, "-c", "from retrodict.cli import main; main()", "fit", str(table)]
    command = [*program, "--model", "local_level", "--out", str(blocked / "run")]
    job = [*command, "--distributed", "--coordinator", f"localhost:{free_port()}"]
    tasks = [[*job, "--num-processes", "2", "--process-id", str(i)] for i in range(2)]
    for done in all_of(tasks, [environment()] * 2):
        assert done.returncode == 2, done.stderr
        assert "is read-only or a file" in done.stderr


def test_wrong_meshes_and_axes_are_refused(untyped: None) -> None:
    ys = jnp.ones((4, 3, 1))
    with pytest.raises(ValueError, match='must be None, "all" or a jax.sharding.Mesh'):
        rd.distributed.sharded_vmap(jnp.sum, mesh="two")(ys)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expects `in_axes` of 0 or None"):
        rd.distributed.sharded_vmap(jnp.sum, in_axes=1)(ys)
    with pytest.raises(ValueError, match="expects `in_axes` of 0 or None"):
        rd.distributed.sharded_vmap(jnp.sum, in_axes=(None,))(ys)
    with pytest.raises(ValueError, match="leading axes have one size"):
        rd.distributed.sharded_vmap(jnp.add)(ys, ys[:2])


def test_sharded_vmap_on_one_device_equals_vmap() -> None:
    mesh = jax.make_mesh((1,), ("batch",))
    ys = jnp.arange(12.0).reshape(4, 3, 1)
    result = rd.distributed.sharded_vmap(lambda scale, y: scale * jnp.sum(y), (None, 0), mesh=mesh)(
        2.0, ys
    )
    np.testing.assert_allclose(result, 2.0 * jnp.sum(ys, axis=(1, 2)))


def test_initialise_needs_all_identifiers_or_a_job() -> None:
    with pytest.raises(ValueError, match="coordinator, num_processes and process_id together"):
        rd.distributed.initialise("localhost:1234", 2)
    with pytest.raises(ValueError, match="coordinator must be host:port"):
        rd.distributed.initialise("localhost", 2, 0)


def test_missing_coordinator_ends_in_one_line(tmp_path: Path) -> None:
    code = "from retrodict.cli import _job, main; _job.WAIT_SECONDS = 1; main()"
    where = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2"]
    command = [sys.executable, "-c", code, "fit", "table.csv", "--model", "local_level", "--out"]
    command += [str(tmp_path / "run"), "--distributed", *where, "--process-id", "1"]
    (done,) = all_of([command], [environment()])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "retrodict: error: the other processes did not join at localhost" in line
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        code = "from retrodict.cli import main; main()"
        where = ["--coordinator", f"localhost:{server.getsockname()[1]}", "--num-processes", "2"]
        command = [sys.executable, "-c", code, "fit", "table.csv", "--model", "local_level"]
        command += ["--out", str(tmp_path / "run"), "--distributed", *where, "--process-id", "0"]
        (done,) = all_of([command], [environment()])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "Choose another port" in done.stderr.splitlines()[-1]
