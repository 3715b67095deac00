"""Program of `test_mesh`: one of several processes that fit together over loopback.

Arguments: coordinator, number of processes, index of this one, checkpoint, a file for the
parameters, and flags:

- `share`: each process holds its own series, in one array of all processes;
- `shared`: as `share`, as `SharedSeries` whose number is no multiple of the processes;
- `stored`: each process reads blocks of a store, and prints the blocks that it trained on;
- `dies`: the last process is killed after its second chunk; `dies first`: the first one is.
"""

import os
import signal
import sys
from typing import Any

import jax
import numpy as np
from compare_devices import fit_small_family, series
from in_memory_store import InMemoryStore

import retrodict as rd


def main(coordinator: str, count: str, which: str, checkpoint: str, out: str, *flags: str) -> None:
    number, index = int(count), int(which)
    if number > 1:
        rd.distributed.initialise(coordinator, number, index, heartbeat_seconds=10)
    ys, options, store = series(12), {}, None
    data: Any = ys
    if "uneven" in flags:
        data, options = ys[:9], {"length": np.arange(9) % 5 + 2}
    if "shared" in flags:
        mine = rd.distributed.process_slice(9)
        data = rd.data.SharedSeries(data[mine], length=options.pop("length")[mine])
    if "share" in flags:
        rows = jax.sharding.NamedSharding(
            jax.make_mesh((number,), ("batch",)), jax.sharding.PartitionSpec("batch")
        )
        share = len(ys) // number
        rows_of_process = ys[index * share : (index + 1) * share]
        data = jax.make_array_from_process_local_data(rows, rows_of_process)
    if "stored" in flags:
        data = store = InMemoryStore(ys, [2] * 6)
    doomed = {"dies": number - 1, "dies first": 0}

    def report_progress(step: int, _: float) -> None:
        print(f"process {index} at step {step}", flush=True)
        if step == 20 and index in [doomed.get(flag) for flag in flags]:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        options |= {"batch_size": 6, "checkpoint": checkpoint, "chunk_size": 10}
        result = fit_small_family(data, "all", progress=report_progress, **options)
    except rd.distributed.ProcessLostError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(3)  # without waiting for the lost one
    if store is not None:
        # All were read once for the units of the data, and the first once more for its shapes.
        often = [str(block) for block in range(6) if store.loads[block] > 1 + (block == 0)]
        print(f"process {index} has read: {' '.join(often)}", flush=True)
    if index == 0:
        leaves = [leaf for leaf in jax.tree.leaves(result.family) if isinstance(leaf, jax.Array)]
        np.savez(out, *leaves, history=result.history)


if __name__ == "__main__":
    main(*sys.argv[1:])
