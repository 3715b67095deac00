"""One process of several that fit together over loopback: run by `test_devices`.

Arguments: coordinator, number of processes, which of them, steps, checkpoint, and a file for the
parameters. With `share`, each process holds its own series alone; with `dies`, process 1 is killed
after its second chunk; with `alone` there is one process, and nothing is distributed.
"""

import os
import signal
import sys

import jax
import numpy as np
from on_devices import fitted, series

import retrodict as rd


def main(coordinator: str, count: str, which: str, checkpoint: str, out: str, *flags: str) -> None:
    number, index = int(count), int(which)
    if number > 1:
        rd.initialise_distributed(coordinator, number, index, heartbeat_seconds=10)
    ys = series(12)
    if "share" in flags:
        mesh = jax.make_mesh((number,), ("batch",))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        share = len(ys) // number
        own = ys[index * share : (index + 1) * share]
        ys = jax.make_array_from_process_local_data(rows, own)

    def tell(step: int, _: float) -> None:
        print(f"process {index} at step {step}", flush=True)
        if "dies" in flags and index == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        found = fitted(ys, "all", batch_size=6, checkpoint=checkpoint, progress=tell, chunk_size=10)
    except rd.ProcessLostError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(3)  # without waiting for the lost one
    if index == 0:
        leaves = [leaf for leaf in jax.tree.leaves(found.family) if isinstance(leaf, jax.Array)]
        np.savez(out, *leaves, history=found.history)


if __name__ == "__main__":
    main(*sys.argv[1:])
