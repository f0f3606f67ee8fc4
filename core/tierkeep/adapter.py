"""What a framework adapter is to the core, and how the core flattens a state with its help."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import UnsupportedLeafError
from .format import dtypes
from .leaf import ArrayShard, Box, Leaf, LeafSpec
from .tree import Node, Tree, Value, container, decode_key, encode_value, join

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Adapter", "Branch", "Destination", "Region", "Sink", "Snapshot", "Stateful", "children_of", "flatten"]

_DEPTH_LIMIT = 300


class Sink(Protocol):
    """Where a restore puts one region of a leaf."""

    def __call__(self, part: Box, data: np.ndarray[Any, Any]) -> None:
        """Takes `data` (the leaf's `bits` dtype, shape `part.shape`), which belongs at `part` of the region.

        Called from several threads, each with its own part; `data` is only valid during the call.
        """


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the stored array that is wanted, and where it goes."""

    box: Box
    sink: Sink


@dataclass(frozen=True, slots=True)
class Destination:
    """What one leaf is restored into."""

    spec: LeafSpec
    """Shape and dtype of the destination, to be compared with the checkpoint's."""
    regions: tuple[Region, ...]
    finish: Callable[[], Any]
    """Called once all regions are filled: the framework's value."""
    again: Callable[[str | None], Any] | None = None
    """The same memory as another value, for a leaf that is tied to this one but bears another mark (`ext`)."""
    memory: Any = None
    """Destinations of equal, non-None `memory` are the same memory: filled once."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A container that the adapter knows: one level of it."""

    node: Node
    """Kind, name and encoded keys; its `children` are not looked at."""
    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any] | None = None
    """As a target: the same container around restored children. None: the core rebuilds the plain kind."""
    load: Callable[[Any], object] | None = None
    """As a target: takes the restored container whole, whatever its children's shapes."""


@dataclass(frozen=True, slots=True)
class Stateful:
    """An object that gives its state as another value and takes it back."""

    state: Any
    load: Callable[[Any], object] | None
    """Takes the restored state; None when filling `state` in place is all there is to do."""
    in_place: bool
    """The arrays of `state` are the object's own memory: restored in place, then handed to `load` if there is one."""
    check: Callable[[Tree], str | None] | None = None
    """As a target: why a saved state of this structure cannot be taken, asked before anything is read or changed."""


class Adapter(Protocol):
    """A framework, as the core sees it."""

    @property
    def name(self) -> str:
        """`torch`, `jax` or `numpy`, for people."""

    @property
    def in_place(self) -> bool:
        """Targets are filled where they are, dicts and lists included; otherwise a new tree is returned."""

    def expand(self, value: Any) -> Leaf | Branch | Stateful | Value | None:
        """One value of a state; None if it is not the framework's. Raises TypeError with the reason if it cannot be kept."""

    def encode_value(self, value: Any) -> Any:
        """The framework's own plain values (a dtype, say) as tagged JSON; None for anything else."""

    def decode_value(self, tag: str, payload: Any) -> Any:
        """The value of a tag of this adapter's; None for any other tag."""

    def rebuild(self, node: Node, children: Sequence[Any]) -> Any:
        """A container of the adapter's own kinds; None for any other."""

    def allocate(self, spec: LeafSpec, device: Any) -> Destination:
        """New memory for a leaf of the framework's own (`array`) kind. Raises TypeError with the reason."""

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        """`target` as something to restore into; None if it is not an array. Casts if its dtype is not the stored one's."""

    def copies(self) -> Callable[[], AbstractContextManager[object]]:
        """What is entered around a run of `Shard.copy`s by the thread that makes them, perhaps after this call's return.

        Called where the state is as it is to be saved. When the context is left, the copies are complete.
        """

    def pin(self, memory: np.ndarray[Any, Any]) -> Callable[[], object] | None:
        """Makes memory that is copied into again and again fast for the framework's devices; returns what undoes it."""


@dataclass(slots=True)
class Snapshot:
    """A flattened state. `tree`, and the `spec`s and boxes of `leaves`, are structure; the rest is content."""

    tree: Tree = None
    leaves: list[Leaf] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """Plain values as JSON."""

    def without_leaves(self) -> Snapshot:
        """The same without a reference to the state's memory."""
        return Snapshot(self.tree, [], self.values)


def flatten(state: Any, adapter: Adapter, *, pickle_rest: bool) -> Snapshot:
    """The structure of `state` and its leaves, in order, without copying an array.

    The leaves hold references to the state's memory: what they hold is the state only until it is next changed.
    Raises UnsupportedLeafError naming the key of what cannot be kept.
    """
    snapshot = Snapshot()
    snapshot.tree = _Flattener(snapshot, adapter, pickle_rest).tree(state)
    return snapshot


class _Flattener:
    def __init__(self, snapshot: Snapshot, adapter: Adapter, pickle_rest: bool) -> None:
        self.leaves = snapshot.leaves
        self.values = snapshot.values
        self.adapter = adapter
        self.pickle_rest = pickle_rest
        self.path: list[Any] = []

    def tree(self, value: Any) -> Tree:
        if value is None:
            return None
        try:
            found = self.adapter.expand(value)
            if found is None:
                found = _numpy_leaf(value)
            if found is None and (plain := container(value)) is not None:
                found = Branch(*plain)
            if found is None:
                return self.value(value)
        except UnsupportedLeafError:
            raise
        except (TypeError, ValueError) as error:
            raise UnsupportedLeafError(join(self.path), str(error)) from error
        if type(found) is Leaf:
            self.leaves.append(found)
            return len(self.leaves) - 1
        if len(self.path) > _DEPTH_LIMIT:
            raise UnsupportedLeafError(join(self.path[:8]) + "…", f"nested deeper than {_DEPTH_LIMIT}, or in itself")
        if isinstance(found, Stateful):
            return self.tree(found.state)
        assert isinstance(found, Branch)
        node = found.node
        names = [str(decode_key(k)) for k in node.keys] if node.keys else range(len(found.children))
        children = []
        for name, child in zip(names, found.children, strict=True):
            self.path.append(name)
            children.append(self.tree(child))
            self.path.pop()
        return Node(node.kind, node.name, node.keys, tuple(children))

    def value(self, value: Any) -> Value:
        encoded = encode_value(value)
        if encoded is None:
            encoded = self.adapter.encode_value(value)
        if encoded is None and self.pickle_rest:
            encoded = {"t": "pickle", "v": base64.b64encode(pickle.dumps(value)).decode()}
        if encoded is None:
            cls = type(value)
            raise TypeError(
                f"an object of type {cls.__module__}.{cls.__qualname__} has no exact plain form; convert it to arrays, "
                "numbers, strings or containers, or allow pickle=True here and at restore"
            )
        self.values.append(encoded)
        return Value(len(self.values) - 1)


def children_of(value: Any, adapter: Adapter) -> Branch | Stateful | None:
    """One level of a target; None if it is a leaf, a plain value or None."""
    found = adapter.expand(value)
    if found is None and _numpy_leaf(value) is None and (plain := container(value)) is not None:
        return Branch(*plain)
    return found if isinstance(found, Branch | Stateful) else None


_SCALARS: Mapping[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}


def _numpy_leaf(value: Any) -> Leaf | None:
    cls = type(value)
    if cls in _SCALARS:
        if cls is int and not -(2**63) <= value < 2**63:
            return None  # kept as a plain value
        array = np.array(value, _SCALARS[cls])
        return Leaf(
            cls.__name__, _SCALARS[cls], (), (ArrayShard(Box((), ()), array.view(dtypes.bits(array.itemsize))),)
        )
    if not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.str_ | np.bytes_):
        return None
    scalar = isinstance(value, np.generic)
    if not scalar and cls is not np.ndarray and cls is not np.memmap:
        raise TypeError(f"a numpy subclass {cls.__name__} would come back as a plain array; convert it with np.asarray")
    array = np.asarray(value)
    dtype = dtypes.dtype_of_numpy(array.dtype)
    if dtype is None:
        raise TypeError(f"a numpy array of dtype {array.dtype} cannot be kept exactly; convert it to a numeric dtype")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    tie = None
    if not scalar and array.size:
        tie = ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, dtype.name)
    shard = ArrayShard(Box.whole(array.shape), array.view(dtypes.bits(dtype.itemsize)))
    return Leaf("npscalar" if scalar else "ndarray", dtype.name, array.shape, (shard,), tie)
