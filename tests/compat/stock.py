"""Stock Orbax and TensorStore of whatever version is installed: run by run.py in each of its environments.

    python stock.py read CASE     reads every way there is what tierkeep wrote in CASE, compared with CASE/expected.json
    python stock.py write FOLDER  writes checkpoints in every way there is, and FOLDER/expected.json

Imports nothing of tierkeep. Prints one JSON object: what was done, and "ok" or what went wrong.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["flat"]

_PACKAGES = ("orbax-checkpoint", "tensorstore", "jax", "numpy", "ml_dtypes")


def flat(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[Any]]]:
    """(name, [dtype, shape, bytes in hex]) of every array, (name, [value]) of everything else but None and empties."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from flat(value, (*path, str(number)))
    elif tree is not None:
        yield ".".join(path), _bits(tree)


def _bits(leaf: Any) -> list[Any]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        return [array.dtype.name, list(array.shape), array.tobytes().hex()]
    return [leaf]


def _compare(found: dict[str, list[Any]], expected: dict[str, list[Any]]) -> str:
    wrong = sorted(name for name in expected.keys() | found.keys() if not _same(found.get(name), expected.get(name)))
    return "ok" if not wrong else f"{len(wrong)} of {len(expected)} differ: {', '.join(wrong[:8])}"


def _same(found: list[Any] | None, expected: list[Any] | None) -> bool:
    if found is None or expected is None or len(found) == len(expected):
        return found == expected
    # A Python number comes back as a 0-d array of some of these versions.
    array, value = (found, expected) if len(found) == 3 else (expected, found)
    data = np.frombuffer(bytes.fromhex(array[2]), array[0])
    return bool(data.shape == (1,) and data[0].item() == value[0])


def read(case: Path) -> dict[str, str]:
    """Every way to read the step 3 of the root `case / "root"`."""
    expected = json.loads((case / "expected.json").read_text())
    structure = json.loads((case / "structure.json").read_text())
    arrays = {name: value for name, value in expected.items() if len(value) == 3}
    item = case / "root" / "3" / "default"

    def standard() -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(item)

    def onto_devices() -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(item, _target(structure, expected, ()))

    def pytree() -> Any:
        with ocp.PyTreeCheckpointer() as checkpointer:
            return checkpointer.restore(item)

    def manager() -> Any:
        with ocp.CheckpointManager(case / "root") as checkpoints:
            assert checkpoints.all_steps() == [3]
            return checkpoints.restore(3)

    def plain() -> Any:
        base = {"driver": "ocdbt", "base": f"file://{item}/"}
        spec = {"driver": "zarr3", "fill_missing_data_reads": False}
        opened = {name: ts.open({**spec, "kvstore": {**base, "path": name}}).result() for name in arrays}
        return {name: array.read().result() for name, array in opened.items()}

    ways: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "StandardCheckpointer": (standard, expected),
        "StandardCheckpointer with a target": (onto_devices, expected),
        "PyTreeCheckpointer": (pytree, expected),
        "CheckpointManager.restore(step)": (manager, expected),
        "TensorStore, zarr3 in OCDBT": (plain, arrays),
    }
    results = {}
    for name, (way, wanted) in ways.items():
        try:
            results[name] = _compare(dict(flat(way())), wanted)
        except Exception as error:  # noqa: BLE001 (whatever these versions raise is the result)
            results[name] = f"{type(error).__name__}: {error}"[:300]
    return results


def _target(structure: Any, expected: dict[str, list[Any]], path: tuple[str, ...]) -> Any:
    """What stands for the tree: arrays as shapes on a mesh of all devices. A leaf of `structure` says its kind."""
    if isinstance(structure, dict):
        return {key: _target(value, expected, (*path, key)) for key, value in structure.items()}
    if isinstance(structure, list):
        return [_target(value, expected, (*path, str(number))) for number, value in enumerate(structure)]
    if structure is None:
        return None
    found = expected[".".join(path)]
    if structure == "value":
        return found[0]
    if structure == "random key":
        return jax.random.key(0)
    dtype, shape, _ = found
    if structure == "numpy":
        return np.zeros(shape, dtype)
    struct: Any = jax.ShapeDtypeStruct
    partition: Any = jax.sharding.PartitionSpec
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    spec = [name if n % grid.shape[name] == 0 else None for n, name in zip(shape, ("y", "x"), strict=False)]
    return struct(shape, dtype, sharding=jax.sharding.NamedSharding(grid, partition(*spec)))


def write(folder: Path) -> dict[str, str]:
    """One checkpoint for each way to write it; `expected.json` holds what is in all of them."""
    rng = np.random.default_rng(5)
    grid = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    partition: Any = jax.sharding.PartitionSpec
    sharding = jax.sharding.NamedSharding(grid, partition("x", "y"))
    tree: dict[str, Any] = {
        "params": {
            "w": jax.device_put(rng.normal(size=(16, 24)).astype("f4"), sharding),
            "b": jnp.ones(5, jnp.bfloat16),
        },
        "opt": [{"mu": jnp.asarray(rng.normal(size=7).astype("f2"))}, (jnp.zeros((3, 4)), None), {}],
        "small": {name: jnp.ones(3, name) for name in ("int4", "float8_e4m3fn", "float8_e5m2", "uint8", "bool")},
        "host": {"f8": rng.normal(size=(3, 2)), "i8": np.arange(4)},
        "step": 12,
        "rate": 0.5,
        "key": jax.random.key(3),
    }
    (folder / "expected.json").write_text(json.dumps(dict(flat(tree))))

    def standard(path: Path) -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree)

    def pytree(options: dict[str, bool], path: Path) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(tree))

    def manager(path: Path) -> None:
        with ocp.CheckpointManager(path) as checkpoints:
            checkpoints.save(3, args=ocp.args.StandardSave(tree))
            checkpoints.wait_until_finished()

    ways: dict[str, Callable[[Path], None]] = {"StandardSave": standard, "CheckpointManager": manager}
    for zarr3 in (False, True):
        for ocdbt in (True, False):
            for compressed in (True, False):
                name = ", ".join(
                    ("zarr3" if zarr3 else "zarr2", "OCDBT" if ocdbt else "files", "zstd" if compressed else "raw")
                )
                options = {"use_zarr3": zarr3, "use_ocdbt": ocdbt, "use_compression": compressed}
                ways[f"PyTreeSave, {name}"] = functools.partial(pytree, options)
    results = {}
    for name, way in ways.items():
        try:
            way(folder / name)
            results[name] = "ok"
        except Exception as error:  # noqa: BLE001 (whatever these versions raise is the result)
            results[name] = f"not written: {type(error).__name__}: {error}"[:300]
    return results


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    assert hasattr(ml_dtypes, "bfloat16")  # imported for its dtypes' names
    done = {"read": read, "write": write}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({"versions": {name: version(name) for name in _PACKAGES}, "done": done}))
