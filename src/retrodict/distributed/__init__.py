"""Several devices and processes: meshes, collective calls, sharding over series and time."""

from retrodict.distributed.mesh import MeshLike as MeshLike
from retrodict.distributed.mesh import as_mesh as as_mesh
from retrodict.distributed.mesh import automatic as automatic
from retrodict.distributed.mesh import device_slice as device_slice
from retrodict.distributed.mesh import gather_from_devices as gather_from_devices
from retrodict.distributed.mesh import is_multi_process as is_multi_process
from retrodict.distributed.mesh import map_shards as map_shards
from retrodict.distributed.mesh import num_devices as num_devices
from retrodict.distributed.mesh import on_accelerator as on_accelerator
from retrodict.distributed.mesh import pad_to_multiple as pad_to_multiple
from retrodict.distributed.mesh import process_slice as process_slice
from retrodict.distributed.mesh import shard_over as shard_over
from retrodict.distributed.mesh import sharded_vmap as sharded_vmap
from retrodict.distributed.mesh import to_hosts as to_hosts
from retrodict.distributed.mesh import writes_for as writes_for
from retrodict.distributed.processes import ProcessLostError as ProcessLostError
from retrodict.distributed.processes import all_gather_object as all_gather_object
from retrodict.distributed.processes import broadcast_from_main as broadcast_from_main
from retrodict.distributed.processes import by_all as by_all
from retrodict.distributed.processes import initialise as initialise
from retrodict.distributed.processes import is_main_process as is_main_process
from retrodict.distributed.processes import sum_over_processes as sum_over_processes
from retrodict.distributed.processes import together as together
from retrodict.distributed.processes import wait_for_processes as wait_for_processes
from retrodict.distributed.time_sharding import Parallel as Parallel
from retrodict.distributed.time_sharding import appended as appended
from retrodict.distributed.time_sharding import laid_out as laid_out
from retrodict.distributed.time_sharding import mesh_of as mesh_of
from retrodict.distributed.time_sharding import prepended as prepended
from retrodict.distributed.time_sharding import scan_over_devices as scan_over_devices
from retrodict.distributed.time_sharding import time_mesh as time_mesh

__all__ = [
    "ProcessLostError",
    "initialise",
    "process_slice",
    "sharded_vmap",
    "time_mesh",
]


def __dir__() -> list[str]:
    """List the public names."""
    return __all__.copy()
