"""States as Orbax's users give and want them: what Orbax's own arguments mean to the core."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from msgspec import structs

from tierkeep.adapter import Destination
from tierkeep.errors import MismatchError
from tierkeep.format.orbax_metadata import SHARDING, as_json
from tierkeep.leaf import ArrayShard
from tierkeep.options import MIB
from tierkeep.restore.place import NOTHING
from tierkeep.tree import join

from . import place, shardings
from .adapter import JaxAdapter
from .stage import is_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tierkeep.engine import Engine
    from tierkeep.leaf import LeafSpec
    from tierkeep.options import RestoreOptions
    from tierkeep.save.background import Captured

__all__ = ["OrbaxAdapter", "can_wait", "restore", "to_save"]

_KNOWN = (jax.Array, np.ndarray, np.generic)
_SMALL_NBYTES = 32 * MIB
"""Copied in a few ms, and longer by a thread that shares the interpreter with the rest of the call."""
_FEW = 16
"""Arrays of numpy are few if all is so many times as large: new memory is filled at 1 GB/s, an image at 8."""
_DOCUMENT_LIMIT = 1 << 31  # bytes


class OrbaxAdapter(JaxAdapter):
    """Knows targets of Orbax's: leaves that are left out, and keys as the arrays that Orbax's metadata has for them."""

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        if isinstance(target, Placeholder):
            return Destination(stored, (), lambda: target.value)
        if isinstance(target, jax.Array | jax.ShapeDtypeStruct):
            return place.destination(target, stored, keys_as_saved=True)
        return super().destination(target, stored)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """In a target: a leaf that is not to be read, and what stands there instead."""

    value: Any


# To save


def to_save(item: Any, save_args: Any, custom_metadata: Any = None) -> Any:
    """The state with the dtypes that `save_args` asks for, and as arrays what only numpy makes arrays of.

    Raises ValueError or TypeError for what cannot be given. What else `SaveArgs` says is how Orbax lays out its chunks, which is not
    asked here.
    """
    as_json(custom_metadata)
    if _is_metadata(item):
        raise ValueError("TreeMetadata says what was saved; it is nothing to save")
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten(item)
    if not leaves and not item:
        raise ValueError("Found empty item: there is nothing to save")
    odd = {cls for cls in set(map(type, leaves)) if not issubclass(cls, _KNOWN) and hasattr(cls, "__array__")}
    wanted = [None] * len(leaves) if save_args is None else structure.flatten_up_to(save_args)
    asked = any(isinstance(each, ocp.SaveArgs) and (each.dtype is not None or each.aggregate) for each in wanted)
    if not odd and not asked:
        return item
    arrays = [np.asarray(leaf) if type(leaf) in odd else leaf for leaf in leaves]
    return structure.unflatten([_cast(leaf, each) for leaf, each in zip(arrays, wanted, strict=True)])


def _cast(leaf: Any, wanted: Any) -> Any:
    if not isinstance(wanted, ocp.SaveArgs):
        return leaf
    if wanted.aggregate:
        raise ValueError("SaveArgs(aggregate=True) is not supported: every leaf is an array of its own")
    if wanted.dtype is None:
        return leaf
    dtype = np.dtype(wanted.dtype)
    if isinstance(leaf, jax.Array) and not is_key(leaf):
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(f"SaveArgs(dtype={dtype}) needs jax_enable_x64, or a numpy array to be cast")
        return leaf.astype(dtype)
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        array = np.asarray(leaf).astype(dtype)
        return array if isinstance(leaf, np.ndarray) else array[()]
    raise ValueError(f"SaveArgs(dtype={dtype}) for a {type(leaf).__name__}, which has none")


def can_wait(captured: Captured) -> bool:
    """Whether the copy can be made after the call: nothing that is left to be copied can change.

    An array of jax in host memory cannot: what it is copied from is held, so that jax itself copies it before it gives
    the memory to a donation. Arrays of numpy are copied here if they are few; with many, it is all copied at the call,
    as is what is small.
    """
    leaves = captured.snapshot.leaves
    if captured.plan.nbytes < _SMALL_NBYTES:
        return False
    if any(leaf.changed is not None for leaf in leaves):  # in an accelerator's memory
        return False
    numpys = [number for number, leaf in enumerate(leaves) if leaf.kind == "ndarray"]
    held = [[shard for shard in leaves[number].shards if isinstance(shard, ArrayShard)] for number in numpys]
    if sum(shard.array.nbytes for shards in held for shard in shards) * _FEW > captured.plan.nbytes:
        return False
    for number, shards in zip(numpys, held, strict=True):
        copies = tuple(ArrayShard(shard.box, shard.array.copy()) for shard in shards)
        leaves[number] = structs.replace(leaves[number], shards=copies)
    return True


# To restore


def restore(
    engine: Engine, path: Path, item: Any, *, options: RestoreOptions, fallback: jax.sharding.Sharding | None
) -> Any:
    """The state at `path`: as `item` says, or as it was saved. On its own shardings, where the target names none."""
    saved = _Saved(engine, path, fallback)
    if item is None:
        return engine.restore(path, NOTHING, options=options, device=saved.sharding)
    if _is_metadata(item):
        item = item.tree
    try:
        return engine.restore(path, _target(item, (), saved), options=options)
    except MismatchError as error:
        error.add_note('With Orbax, unexpected="ignore" is called partial_restore or partial_load.')
        raise


def _is_metadata(item: Any) -> bool:
    """Whether it is Orbax's TreeMetadata, which has no public name."""
    return hasattr(item, "tree") and hasattr(item, "custom_metadata")


def _target(value: Any, path: tuple[Any, ...], saved: _Saved) -> Any:
    """What a target of Orbax's is to the core. Not by jax's own map, which puts the keys of dicts in order."""
    if type(value) is dict:
        return {key: _target(child, (*path, key), saved) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_target(child, (*path, place), saved) for place, child in enumerate(value))
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: _leaf_target(leaf, (*path, *map(_step, keys)), saved), value, is_leaf=lambda x: x is None
    )


def _leaf_target(leaf: Any, path: tuple[Any, ...], saved: _Saved) -> Any:
    if leaf is ... or (leaf is None and join(path) in saved.names):
        return Placeholder(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if leaf.sharding is not None else saved.target(join(path), leaf.shape, leaf.dtype)
    if isinstance(leaf, ocp.metadata.ArrayMetadata):
        with contextlib.suppress(ValueError):  # of devices that are not there
            if leaf.sharding is not None:
                return _struct(leaf.shape, leaf.dtype, leaf.sharding.to_jax_sharding())
        return saved.target(join(path), leaf.shape, leaf.dtype)
    if isinstance(leaf, ocp.metadata.ScalarMetadata):
        return np.dtype(leaf.dtype).type(0).item()
    if isinstance(leaf, ocp.metadata.StringMetadata):
        return ""
    return leaf


def _step(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


def _struct(shape: Any, dtype: Any, sharding: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(tuple(shape), dtype, sharding=sharding)


class _Saved:
    """The shardings of a checkpoint, as far as it knows them and the devices are there. Read when first asked for."""

    def __init__(self, engine: Engine, path: Path, fallback: jax.sharding.Sharding | None) -> None:
        self._engine = engine
        self._path = path
        self._fallback = fallback
        self._texts: Mapping[str, str] | None = None
        self._decoded: dict[str, jax.sharding.Sharding | None] = {}

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all leaves."""
        return frozenset(self._engine.metadata(self._path).leaves)

    def sharding(self, name: str) -> jax.sharding.Sharding | None:
        """That of a leaf; the fallback, or None for the default device, if nothing is known of it.

        Raises ValueError if there is none, and it was on several devices that are not there.
        """
        text = self._text(name)
        if text is None:
            return self._fallback
        if text not in self._decoded:
            self._decoded[text] = shardings.decode(text)
        found = self._decoded[text]
        if found is not None and found.addressable_devices:
            return found
        if found is None and self._fallback is None and not shardings.is_of_one_device(text):
            raise ValueError(
                f"Topology mismatch detected: leaf {name!r} was saved on devices that are not there. "
                "Name a sharding in the target, or a fallback_sharding. Nothing was read."
            )
        return self._fallback  # one device is as good as another; of another process's own each one gets a copy

    def target(self, name: str, shape: Any, dtype: Any) -> Any:
        """As a target without a sharding is meant: what was saved as numpy's comes back so."""
        if self._text(name) is None and self._fallback is None and not jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            return np.empty(shape, dtype)
        return _struct(shape, dtype, self.sharding(name))

    def _text(self, name: str) -> str | None:
        if self._texts is None:
            try:
                self._texts = shardings.saved(self._engine.disk.read_file(self._path / SHARDING, _DOCUMENT_LIMIT))
            except (FileNotFoundError, ValueError):
                self._texts = {}
        return self._texts.get(name)
