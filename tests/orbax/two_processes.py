"""One of the processes that save and restore together with our handler: run by test_processes.

python -m tests.orbax.two_processes ADDRESS COUNT RANK ROOT TASK
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tierkeep.item import StagedItem
from tierkeep.memory.client import client
from tierkeep_jax.orbax import Handler, Restore, Save

__all__ = ["whole"]


def whole() -> dict[str, Any]:
    """What all processes together hold."""
    return {
        "rows": np.arange(8 * 6, dtype="f4").reshape(8, 6),
        "columns": np.arange(4 * 12, dtype="i4").reshape(4, 12),
        "copies": np.arange(7).astype("f2"),
        "scalar": np.float32(2.5),
        "host": np.arange(5) * 3,
        "local": np.arange(12, dtype="f4").reshape(4, 3),
        "step": 7,
        "name": "seven",
    }


SPECS: dict[str, tuple[Any, ...]] = {"rows": (("x", "y"),), "columns": (None, "x"), "copies": (), "scalar": ()}
OTHERS: dict[str, tuple[Any, ...]] = {"rows": ("y", None), "columns": (("x", "y"), None), "copies": (), "scalar": ()}


def state(grid: jax.sharding.Mesh) -> dict[str, Any]:
    """Of one process: arrays over the devices of all, the same array twice, values of each process and of its own devices."""
    found = whole()
    made: dict[str, Any] = {name: spread(found[name], grid, SPECS[name]) for name in SPECS}
    made["again"] = made["rows"]
    own = jax.sharding.Mesh(np.array(jax.local_devices()), ("z",))
    return {**found, **made, "local": jax.device_put(found["local"], sharding(own, "z"))}


def sharding(grid: jax.sharding.Mesh, *spec: Any) -> jax.sharding.NamedSharding:
    partition: Any = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(grid, partition(*spec))


def spread(data: Any, grid: jax.sharding.Mesh, spec: tuple[Any, ...]) -> jax.Array:
    """The array on the devices of all processes."""
    array = np.asarray(data)
    return jax.make_array_from_callback(array.shape, sharding(grid, *spec), lambda index: array[index])


def check(found: dict[str, Any], specs: dict[str, tuple[Any, ...]], grid: jax.sharding.Mesh) -> None:
    expected = whole()
    for name, spec in specs.items():
        assert found[name].sharding == sharding(grid, *spec), (name, found[name].sharding)
        for shard in found[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected[name])[shard.index], name)
    np.testing.assert_array_equal(found["host"], expected["host"])
    np.testing.assert_array_equal(np.asarray(found["local"]), expected["local"])
    assert (found["step"], found["name"]) == (7, "seven")


def target(grid: jax.sharding.Mesh, specs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    struct: Any = jax.ShapeDtypeStruct
    arrays = {
        name: struct(data.shape, data.dtype, sharding=sharding(grid, *specs.get(name, ())))
        for name, data in whole().items()
        if name in specs
    }
    rows = whole()["rows"]
    own = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    local = struct((4, 3), np.float32, sharding=own)
    again = struct(rows.shape, rows.dtype, sharding=sharding(grid, *specs["rows"]))
    return {**whole(), **arrays, "local": local, "again": again}


def save(root: Path, grid: jax.sharding.Mesh) -> None:
    with ocp.CheckpointManager(root, handler_registry=_registry()) as manager:
        for step in (2, 3):
            args = ocp.args.Composite(state=Save(state(grid)), note=ocp.args.JsonSave({"step": step}))
            manager.save(step, args=args)
        manager.wait_until_finished()
        check(manager.restore(3, args=ocp.args.Composite(state=Restore())).state, SPECS, grid)
        check(manager.restore(2, args=ocp.args.Composite(state=Restore(target(grid, OTHERS)))).state, OTHERS, grid)
    assert client().worker_pid is None


def restore(root: Path, grid: jax.sharding.Mesh) -> None:
    with ocp.CheckpointManager(root, handler_registry=_registry()) as manager:
        check(manager.restore(3, args=ocp.args.Composite(state=Restore(target(grid, OTHERS)))).state, OTHERS, grid)
    with ocp.CheckpointManager(root) as manager:
        wanted = target(grid, OTHERS)
        arrays = {name: wanted[name] for name in OTHERS}
        args = ocp.args.PyTreeRestore(
            arrays, restore_args=ocp.checkpoint_utils.construct_restore_args(arrays), partial_restore=True
        )
        found = manager.restore(3, args=ocp.args.Composite(state=args)).state
        for name, spec in OTHERS.items():
            assert found[name].sharding == sharding(grid, *spec)
            for shard in found[name].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(whole()[name])[shard.index], name)


def fail(root: Path, grid: jax.sharding.Mesh, failing: int, where: str) -> None:
    """One of them fails: all of them are told, none waits, the next save is well."""
    rank = jax.process_index()
    real = StagedItem.write

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with ocp.CheckpointManager(root, handler_registry=_registry()) as manager:
        if where == "write" and rank == failing:
            StagedItem.write = refuse  # type: ignore[method-assign, assignment]
        odd = {"odd": len} if where == "state" and rank == failing else {}
        manager.save(5, args=ocp.args.Composite(state=Save({**state(grid), **odd})))
        try:
            manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001  which one it is depends on the rank
            print(f"told: {type(error).__name__}: {error}", flush=True)
        else:
            raise AssertionError("nothing was told")
        StagedItem.write = real  # type: ignore[method-assign]
        manager.save(6, args=ocp.args.Composite(state=Save(state(grid))))
        manager.wait_until_finished()
        assert manager.all_steps() == [6]
        check(manager.restore(6, args=ocp.args.Composite(state=Restore())).state, SPECS, grid)


def next_api(root: Path, grid: jax.sharding.Mesh) -> None:
    """The same through Orbax's next API; then one of them fails."""
    from orbax.checkpoint.experimental import v1

    from tierkeep_jax import orbax_v1

    context = v1.Context()
    context.checkpointables.registry = orbax_v1.registry()
    real = StagedItem.write

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with context:
        v1.save(root / "one", state(grid))
        check(v1.load(root / "one"), SPECS, grid)
        check(v1.load(root / "one", target(grid, OTHERS)), OTHERS, grid)
        if jax.process_index() == 1:
            StagedItem.write = refuse  # type: ignore[method-assign, assignment]
        try:
            v1.save(root / "two", state(grid))
        except Exception as error:  # noqa: BLE001  which one it is depends on the rank
            print(f"told: {type(error).__name__}: {error}", flush=True)
        else:
            raise AssertionError("nothing was told")
        StagedItem.write = real  # type: ignore[method-assign]
        v1.save(root / "two", state(grid))
        check(v1.load(root / "two"), SPECS, grid)
    orbax_v1.close()
    assert client().worker_pid is None


def _registry() -> Any:
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handler = Handler(timeout_s=60)
    found.add("state", Save, handler)
    found.add("state", Restore, handler)
    return found


def main(address: str, count: int, rank: int, root: Path, task: str, *more: str) -> None:
    distributed: Any = jax.distributed
    distributed.initialize(address, count, rank, heartbeat_timeout_seconds=20)
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(count, -1), ("x", "y"))
    if task == "fail":
        fail(root, grid, int(more[0]), more[1])
    else:
        {"save": save, "restore": restore, "v1": next_api}[task](root, grid)
    print("well", flush=True)
    distributed.shutdown()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
