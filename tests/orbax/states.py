"""The states of these tests, and managers that leave nothing behind."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from tests.jax import trees
from tierkeep.memory.client import client
from tierkeep.save import background

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "OLD",
    "arenas",
    "assert_nothing_left",
    "assert_same_to_stock",
    "beyond_orbax",
    "environment",
    "manager",
    "spread",
    "training",
]


ROOT = Path(__file__).parents[2]
OLD = tuple(map(int, version("orbax-checkpoint").split(".")[:2])) < (0, 12)
"""Whether this Orbax is older than what `tierkeep_jax.orbax_v1` was tried with."""


def environment(**more: str) -> dict[str, str]:
    """For a process that runs a module of these tests."""
    roots = [ROOT, *(ROOT / name for name in ("core", "jax_adapter"))]
    path = os.pathsep.join([*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **more, "PYTHONPATH": path}


def spread(array: Any, mesh: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    partition: Any = PartitionSpec
    placed: jax.Array = jax.device_put(array, NamedSharding(mesh, partition(*spec)))
    return placed


def training(seed: int = 0) -> dict[str, Any]:
    """What stock Orbax restores as it was: its own containers, arrays under several shardings, numbers."""
    data = np.random.default_rng(seed)
    return {
        "params": {
            "w": spread(data.standard_normal((16, 8), np.float32), trees.mesh(4, 2), "x", "y"),
            "b": spread(data.standard_normal(8, np.float32).astype(ml_dtypes.bfloat16), trees.mesh(2, 4), "y"),
            "scale": jax.numpy.float32(seed + 0.5),
        },
        "layers": [jax.numpy.arange(6) + seed, {"mask": data.standard_normal((3, 5)) > 0}],
        "host": data.integers(0, 99, (7, 2)),
        "key": jax.random.key(seed),
        "step": 10 + seed,
        "rate": 0.25,
        "nothing": None,
    }


def beyond_orbax() -> dict[str, Any]:
    """What stock Orbax refuses to save."""
    return {
        "empty": jax.numpy.zeros((0, 3)),
        "none of it": np.zeros((4, 0), np.int16),
        "text": "grün",
        "bytes": b"\x00\xff",
        "flag": np.bool_(True),
        "complex": 1 - 2j,
        "pair": (jax.numpy.ones(2), ()),
    }


@contextlib.contextmanager
def manager(root: Path, *, asynchronous: bool = True, **options: Any) -> Iterator[Any]:
    """A CheckpointManager; options that are its own are passed on, others are of CheckpointManagerOptions."""
    own = {
        name: options.pop(name)
        for name in ("handler_registry", "item_handlers", "item_names", "metadata")
        if name in options
    }
    chosen = ocp.CheckpointManagerOptions(enable_async_checkpointing=asynchronous, **options)
    with ocp.CheckpointManager(root, options=chosen, **own) as made:
        yield made


def arenas() -> set[Path]:
    """The shared memory that this process holds for saves."""
    return {saves._arena.path for saves in background._open if saves._arena is not None}


def assert_nothing_left(arenas: set[Path]) -> None:
    """No shared memory, no process."""
    assert not any(path.exists() for path in arenas)
    assert client().worker_pid is None


def assert_same_to_stock(found: Any, expected: Any) -> None:
    """What stock Orbax gives back: dicts in the order of their keys, lists for tuples."""
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert trees.bits_of(one) == trees.bits_of(other)
        assert isinstance(one, jax.Array) == isinstance(other, jax.Array)
