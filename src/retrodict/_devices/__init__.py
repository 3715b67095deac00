"""Several devices and several processes, on JAX's own runtime."""

from retrodict._devices.mesh import MeshLike as MeshLike
from retrodict._devices.mesh import as_mesh as as_mesh
from retrodict._devices.mesh import automatic as automatic
from retrodict._devices.mesh import fill_up as fill_up
from retrodict._devices.mesh import is_spread as is_spread
from retrodict._devices.mesh import lay as lay
from retrodict._devices.mesh import num_devices as num_devices
from retrodict._devices.mesh import rows_where_they_lie as rows_where_they_lie
from retrodict._devices.mesh import said_by_all as said_by_all
from retrodict._devices.mesh import sharded_vmap as sharded_vmap
from retrodict._devices.mesh import to_hosts as to_hosts
from retrodict._devices.mesh import writes_for as writes_for
from retrodict._devices.processes import ProcessLostError as ProcessLostError
from retrodict._devices.processes import by_all as by_all
from retrodict._devices.processes import initialise_distributed as initialise_distributed
from retrodict._devices.processes import is_main_process as is_main_process
from retrodict._devices.processes import said_by_processes as said_by_processes
from retrodict._devices.processes import sum_over_processes as sum_over_processes
from retrodict._devices.processes import together as together
from retrodict._devices.processes import wait_for_processes as wait_for_processes
from retrodict._devices.processes import word_of_main as word_of_main
