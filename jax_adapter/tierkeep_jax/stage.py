"""Arrays as leaves: the shards this process holds, bit for bit, whatever the sharding."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tierkeep.format import dtypes
from tierkeep.format.orbax_metadata import PRNG
from tierkeep.leaf import ArrayShard, Box, Leaf

from . import shardings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierkeep.leaf import Shard

__all__ = ["DeviceShard", "box_of", "is_key", "leaf"]


@dataclass(frozen=True, slots=True)
class DeviceShard:
    """A shard in an accelerator's memory, fetched when it is copied."""

    box: Box
    data: jax.Array
    replica: int = 0

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        held = np.asarray(self.data)
        np.copyto(out, held.view(out.dtype).reshape(self.box.shape)[part.slices()])


def leaf(array: jax.Array, *, rank: int = 0, world: int = 1) -> Leaf:
    """An array, or the data of a random key, as a leaf. Raises TypeError with the reason if its bits cannot be kept.

    As one rank of several: of an array that spans processes this one's shards, each of them one rank's to store; an array
    of this process alone is rank 0's to store.

    On a CPU backend nothing is copied: the shards are views that keep the (immutable) buffers alive, so that jax copies
    an array that is donated meanwhile. Elsewhere the copies to the host are begun here, and the leaf tells if its array
    was donated before they were made.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError("a traced array has no data: save outside of jit, grad and the like")
    if array.is_deleted():
        raise TypeError("the array was deleted or donated: save it before it is given away")
    kind = _kind(array.sharding)
    if kind.spans and world == 1:
        raise TypeError("the array spans devices of other processes: save it from all of them at once")
    ext = None
    if is_key(array):
        ext = PRNG + str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    dtype = dtypes.dtype_of_numpy(array.dtype)
    if dtype is None:
        raise TypeError(f"an array of dtype {array.dtype} cannot be kept exactly")
    if kind.whole_on_host:
        data = np.asarray(array)
        bits = data.view(dtypes.bits(dtype.itemsize))
        tie = (array.unsafe_buffer_pointer(), dtype.name, data.shape) if data.size else None
        return Leaf("array", dtype.name, data.shape, (ArrayShard(_whole(data.shape), bits),), tie, ext, kind.encoded)
    if ext is not None:
        kind = _kind(array.sharding)  # of the data, which has an axis more
    boxes = None if world == 1 else _boxes(array.sharding, array.shape)
    mine = kind.spans or rank == 0
    held = [shard for shard in array.addressable_shards if shard.replica_id == 0 and mine]
    shards: tuple[Shard, ...]
    if not kind.on_host:
        for shard in held:
            shard.data.copy_to_host_async()
        shards = tuple(DeviceShard(box_of(shard.index, array.shape), shard.data) for shard in held)
        changed = functools.partial(_given_away, (array, *(shard.data for shard in held)))
        places = tuple((shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in held)
        tied = (dtype.name, array.shape, places) if array.size else None
        return Leaf("array", dtype.name, array.shape, shards, tied, ext, kind.encoded, boxes, changed)
    views = tuple(
        ArrayShard(
            box_of(shard.index, array.shape), np.asarray(shard.data).view(dtypes.bits(dtype.itemsize)), shard.replica_id
        )
        for shard in held
    )
    # Not by id(array): a node may make its arrays as it is flattened, and the id of one that is gone is given again.
    buffers = tuple((s.array.__array_interface__["data"][0], s.box) for s in views)
    tied = (dtype.name, array.shape, buffers) if array.size else None
    return Leaf("array", dtype.name, array.shape, views, tied, ext, kind.encoded, boxes)


def _boxes(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """The boxes of all processes' shards, in the order of the devices, which is the same in every process."""
    places = sharding.devices_indices_map(shape)
    return tuple(dict.fromkeys(box_of(index, shape) for index in places.values() if index is not None))


class _Kind(NamedTuple):
    """What a leaf needs to know of a sharding, found out once: of 10,000 leaves most have the same one."""

    spans: bool
    """Over devices of other processes."""
    on_host: bool
    whole_on_host: bool
    """On one device, and that is the host."""
    encoded: str | None
    """As Orbax writes it."""


@functools.lru_cache(512)
def _kind(sharding: jax.sharding.Sharding) -> _Kind:
    devices: Iterable[Any] = sharding.device_set
    on_host = all(device.platform == "cpu" for device in devices)
    whole = on_host and len(sharding.device_set) == 1
    return _Kind(not sharding.is_fully_addressable, on_host, whole, shardings.encode(sharding))


_whole = functools.lru_cache(512)(Box.whole)


def _given_away(arrays: Sequence[jax.Array]) -> str | None:
    return "was deleted or donated" if any(array.is_deleted() for array in arrays) else None


def is_key(array: Any) -> bool:
    """Whether it is an array of typed random keys."""
    dtype = array.dtype
    return not isinstance(dtype, np.dtype) and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """A shard's place, from jax's slices."""
    edges = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
