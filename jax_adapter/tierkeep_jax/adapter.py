"""JAX as the core sees it: arrays and random keys as leaves, registered nodes as containers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import jax

from tierkeep.adapter import Branch, Destination, Stateful
from tierkeep.restore.arrays import allocate_numpy
from tierkeep.tree import Node, Value, encode_key, is_own_container

from . import place, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from tierkeep.leaf import Leaf, LeafSpec

__all__ = ["JaxAdapter"]


class JaxAdapter:
    """The adapter of `tierkeep_jax`, of one process or as one rank of several that save together."""

    name = "jax"
    in_place = False

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self._rank = rank
        self._world = world

    def expand(self, value: Any) -> Leaf | Branch | Stateful | Value | None:
        if isinstance(value, jax.Array):
            return stage.leaf(value, rank=self._rank, world=self._world)
        if is_own_container(value):
            return None
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError("a ShapeDtypeStruct has no data: it can only be a target")
        return _registered(value)

    def encode_value(self, value: Any) -> Any:
        return None

    def decode_value(self, tag: str, payload: Any) -> Any:
        return None

    def rebuild(self, node: Node, children: Sequence[Any]) -> Any:
        return None

    def allocate(self, spec: LeafSpec, device: Any) -> Destination:
        if not place.holds(spec.dtype):
            # What jax has no dtype for (or only with jax_enable_x64) comes back in numpy, where no bit is lost.
            return allocate_numpy(spec._replace(kind="ndarray"))
        return place.allocate(spec, device)

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        if isinstance(target, jax.Array | jax.ShapeDtypeStruct):
            return place.destination(target, stored)
        return None

    def copies(self) -> Callable[[], AbstractContextManager[object]]:
        return contextlib.nullcontext

    def pin(self, memory: np.ndarray[Any, Any]) -> Callable[[], object] | None:
        return None


def _registered(value: Any) -> Branch | None:
    """One level of a node of jax's registry (flax.struct, nnx.State, equinox modules, …); None for a leaf of it."""
    structure: Any
    found, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if value is None or (
        found and not found[0][0]
    ):  # not by treedef_is_leaf: that also holds for a node without children
        return None
    cls = type(value)
    keys = tuple(encode_key(_step(path[0])) for path, _ in found)
    node = Node("pytree", f"{cls.__module__}.{cls.__qualname__}", keys, ())
    return Branch(node, tuple(child for _, child in found), rebuild=structure.unflatten)


def _step(key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    if isinstance(key, jax.tree_util.DictKey | jax.tree_util.FlattenedIndexKey):
        return key.key
    return str(key)
