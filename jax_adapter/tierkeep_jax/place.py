"""Arrays as places to restore into: host memory for each distinct shard of this process, then onto its devices."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tierkeep.adapter import Destination, Region
from tierkeep.format import dtypes
from tierkeep.format.orbax_metadata import PRNG
from tierkeep.leaf import LeafSpec
from tierkeep.memory.buffers import aligned_array
from tierkeep.restore.arrays import numpy_sink

from .stage import box_of, is_key

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["allocate", "destination", "holds"]


def holds(name: str) -> bool:
    """Whether jax, as configured, has arrays of this dtype: not 64-bit ones without jax_enable_x64."""
    x64 = bool(jax.dtypes.canonicalize_dtype(np.int64) == np.int64)
    return _holds(name, x64, jax.default_backend())


@functools.cache
def _holds(name: str, x64: bool, backend: str) -> bool:
    dtype = dtypes.numpy_dtype(name)
    if dtype is None:
        return False
    try:
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            return False
        # Asked by doing it: jax lists dtypes (float6_e2m3fn is one) that its backend then refuses.
        return bool(np.asarray(jax.device_put(np.zeros(1, dtype))).dtype == dtype)
    except (TypeError, ValueError, RuntimeError):
        return False


def allocate(spec: LeafSpec, device: Any) -> Destination:
    """A new array on `device` (a jax device or sharding; the default device if None)."""
    if device is None:
        sharding = _default()
    else:
        sharding = device if isinstance(device, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(device)
    return _sharded(spec, spec, sharding, _wrapper(spec.ext))


def destination(
    target: jax.Array | jax.ShapeDtypeStruct, stored: LeafSpec, *, keys_as_saved: bool = False
) -> Destination:
    """An array of the target's shape, dtype and sharding. Raises TypeError for what the target cannot hold.

    With `keys_as_saved` a target for the data of a random key becomes the key, if one was saved.
    """
    wrap = _wrapper(stored.ext if keys_as_saved else None)
    shaped: Any = target
    if is_key(target):
        wanted = _impl_of(target)
        if stored.ext is not None and stored.ext != PRNG + wanted:
            raise TypeError(f"a random key of {stored.ext.removeprefix(PRNG)} for a target of {wanted}")
        shaped = jax.eval_shape(jax.random.key_data, target)
        wrap = _wrapper(PRNG + wanted)
    dtype = dtypes.dtype_of_numpy(shaped.dtype)
    if dtype is None or not holds(dtype.name):
        raise TypeError(f"jax has no arrays of dtype {shaped.dtype} as it is configured (64-bit needs jax_enable_x64)")
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        sharding = _default()
    return _sharded(LeafSpec("array", dtype.name, tuple(shaped.shape)), stored, sharding, wrap)


def _sharded(
    spec: LeafSpec, stored: LeafSpec, sharding: jax.sharding.Sharding, wrap: Callable[[jax.Array], jax.Array]
) -> Destination:
    dtype = dtypes.numpy_dtype(spec.dtype)
    assert dtype is not None
    places = sharding.addressable_devices_indices_map(spec.shape)
    boxes = {device: box_of(index, spec.shape) for device, index in places.items() if index is not None}
    memory = {box: aligned_array(box.shape, dtype) for box in dict.fromkeys(boxes.values())}
    regions = tuple(Region(box, numpy_sink(array, stored.dtype)) for box, array in memory.items())

    def finish() -> jax.Array:
        arrays = [jax.device_put(memory[box], device) for device, box in boxes.items()]
        memory.clear()
        # Without an array of its own, as on devices of other processes alone, jax has to be told the dtype.
        told = {} if arrays else {"dtype": dtype}
        return wrap(jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays, **told))

    return Destination(spec, regions, finish)


def _wrapper(ext: str | None) -> Callable[[jax.Array], jax.Array]:
    if ext is None or not ext.startswith(PRNG):
        return lambda array: array
    impl = ext.removeprefix(PRNG)
    return lambda array: jax.random.wrap_key_data(array, impl=impl)


def _default() -> jax.sharding.Sharding:
    """Where jax puts an array when it is not told."""
    sharding: jax.sharding.Sharding = jax.device_put(np.int32(0)).sharding
    return sharding


def _impl_of(keys: Any) -> str:
    """The implementation of an array of random keys, or of its shape."""
    found: list[str] = []

    def ask(traced: Any) -> Any:
        found.append(str(jax.random.key_impl(traced)))
        return traced

    jax.eval_shape(ask, keys)
    return found[0]
