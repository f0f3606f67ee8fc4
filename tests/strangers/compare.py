"""States of any framework as names and bits, so that what one library wrote is compared with what another read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch

from tests.torch.compare import as_bytes

__all__ = ["Bits", "bits", "flat", "mesh", "on", "shape", "spread"]

Bits = tuple[Any, ...]


def flat(state: Any) -> dict[str, Bits]:
    """Every array, number and string by its storage name; None and empty containers are left out."""
    return {".".join(path): bits(leaf) for path, leaf in _leaves(state, ())}


def _leaves(state: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(state, "_fields"):
        state = state._asdict()
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _leaves(value, (*path, str(number)))
    elif state is not None:
        yield path, state


def bits(leaf: Any) -> Bits:
    """(dtype, shape, bytes) of an array; a random key as the data of one; anything else as itself."""
    if isinstance(leaf, torch.Tensor):
        return str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), as_bytes(leaf)
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        return array.dtype.name, array.shape, array.tobytes()
    return type(leaf).__name__, leaf


def mesh(*shape: int) -> jax.sharding.Mesh:
    """The eight CPU devices, or the first of them, in a grid with axes x, y, …"""
    count = int(np.prod(shape))
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:count]).reshape(shape), ("x", "y", "z")[: len(shape)])


def spread(array: Any, grid: jax.sharding.Mesh, *spec: Any) -> jax.Array:
    """The array on a grid of devices."""
    placed: jax.Array = jax.device_put(array, on(grid, *spec))
    return placed


def on(grid: jax.sharding.Mesh, *spec: Any) -> jax.sharding.NamedSharding:
    """A sharding whose spec names an axis of the grid, or None, for each axis of the array."""
    partition: Any = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(grid, partition(*spec))


def shape(like: Any, dtype: Any = None, sharding: Any = None) -> Any:
    """What stands for an array as a target: of the shape `like` (or of its shape), `dtype` and `sharding`."""
    struct: Any = jax.ShapeDtypeStruct
    if isinstance(like, tuple):
        return struct(like, dtype, sharding=sharding)
    return struct(like.shape, like.dtype if dtype is None else dtype, sharding=sharding)
