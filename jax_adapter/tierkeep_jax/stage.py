"""Arrays as leaves: the shards this process holds, bit for bit, whatever the sharding."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from tierkeep.format import dtypes
from tierkeep.format.orbax_metadata import PRNG
from tierkeep.leaf import ArrayShard, Box, Leaf

__all__ = ["box_of", "is_key", "leaf"]


def leaf(array: jax.Array) -> Leaf:
    """An array, or the data of a random key, as a leaf. Raises TypeError with the reason if its bits cannot be kept.

    On a CPU backend nothing is copied: the shards are views that keep the (immutable) buffers alive. Elsewhere each
    shard is copied to the host here.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError("a traced array has no data: save outside of jit, grad and the like")
    if array.is_deleted():
        raise TypeError("the array was deleted or donated: save it before it is given away")
    if not array.is_fully_addressable:
        raise TypeError("the array spans devices of other processes: this release saves from one process")
    ext = None
    if is_key(array):
        ext = PRNG + str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    dtype = dtypes.dtype_of_numpy(array.dtype)
    if dtype is None:
        raise TypeError(f"an array of dtype {array.dtype} cannot be kept exactly")
    sharding = array.sharding
    if len(sharding.device_set) == 1:
        data = np.asarray(array)
        bits = data.view(dtypes.bits(dtype.itemsize))
        tie = (data.__array_interface__["data"][0], dtype.name, data.shape) if data.size else None
        whole = ArrayShard(Box.whole(data.shape), bits)
        return Leaf("array", dtype.name, data.shape, (whole,), tie, ext, _orbax(sharding))
    shards = tuple(
        ArrayShard(
            box_of(shard.index, array.shape), np.asarray(shard.data).view(dtypes.bits(dtype.itemsize)), shard.replica_id
        )
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
    # Not by id(array): a node may make its arrays as it is flattened, and the id of one that is gone is given again.
    buffers = tuple((s.array.__array_interface__["data"][0], s.box) for s in shards)
    tied = (dtype.name, array.shape, buffers) if array.size else None
    return Leaf("array", dtype.name, array.shape, shards, tied, ext, _orbax(sharding))


def is_key(array: Any) -> bool:
    """Whether it is an array of typed random keys."""
    return bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """A shard's place, from jax's slices."""
    edges = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


def _orbax(sharding: jax.sharding.Sharding) -> str | None:
    """The sharding as Orbax writes it, which lets it restore without a target; None for kinds that it does not know."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _named(sharding)
    return None


_known: dict[jax.sharding.NamedSharding, str] = {}


def _named(sharding: jax.sharding.NamedSharding) -> str:
    found = _known.get(sharding)
    if found is None:
        mesh = sharding.mesh
        if len(_known) > 256:
            _known.clear()
        found = _known[sharding] = json.dumps(
            {
                "sharding_type": "NamedSharding",
                "shape": list(mesh.shape.values()),
                "axis_names": list(mesh.axis_names),
                "axis_types": [str(kind) for kind in mesh.axis_types],
                "partition_spec": list(sharding.spec),
                "device_mesh": {"mesh": _ids(mesh.devices.tolist())},
            }
        )
    return found


def _ids(devices: Any) -> Any:
    return [_ids(each) for each in devices] if isinstance(devices, list) else {"id": devices.id}
