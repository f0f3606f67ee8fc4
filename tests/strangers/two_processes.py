"""One of the processes that save a checkpoint together with stock Orbax: run by test_orbax_processes.

python -m tests.strangers.two_processes ADDRESS COUNT RANK ROOT
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

__all__ = ["ITEMS", "whole"]

ITEMS = ("standard", "zarr3", "files")


def whole(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """What all processes together hold."""
    first = 1 + ITEMS.index(name)
    return {
        "rows": np.arange(first, first + 8 * 6, dtype="f4").reshape(8, 6),
        "both": np.arange(first, first + 4 * 10, dtype="i4").reshape(4, 10),
        "copies": np.arange(first, first + 7).astype("f2"),
    }


def spread(data: np.ndarray[Any, Any], grid: jax.sharding.Mesh, spec: tuple[Any, ...]) -> jax.Array:
    """The array on the devices of all processes."""
    partition: Any = jax.sharding.PartitionSpec
    sharding = jax.sharding.NamedSharding(grid, partition(*spec))
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def main(address: str, count: int, rank: int, root: str) -> None:
    distributed: Any = jax.distributed
    distributed.initialize(address, count, rank, heartbeat_timeout_seconds=20)
    devices = np.array(jax.devices()).reshape(count, -1)
    grid = jax.sharding.Mesh(devices, ("x", "y"))
    specs: dict[str, tuple[Any, ...]] = {"rows": (("x", "y"),), "both": ("y", "x"), "copies": ()}
    states = {name: {key: spread(data, grid, specs[key]) for key, data in whole(name).items()} for name in ITEMS}
    handlers: dict[str, Any] = {
        "standard": ocp.StandardCheckpointHandler(),
        "zarr3": ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False),
        "files": ocp.PyTreeCheckpointHandler(use_ocdbt=False),
    }
    with ocp.CheckpointManager(root, item_names=ITEMS, item_handlers=handlers) as manager:
        args = ocp.args.Composite(
            standard=ocp.args.StandardSave(states["standard"]),
            zarr3=ocp.args.PyTreeSave(states["zarr3"]),
            files=ocp.args.PyTreeSave(states["files"]),
        )
        manager.save(3, args=args)
        manager.wait_until_finished()
    distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
