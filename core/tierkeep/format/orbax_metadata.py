"""Orbax's own files, as far as it needs them to restore: `_METADATA`, `_strings.json`, `_CHECKPOINT_METADATA`.

They carry the poorer view that Orbax knows: string keys, lists for tuples, dicts for named tuples and objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..tree import Node, Tree, Value, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..leaf import Leaf

__all__ = ["CHECKPOINT_METADATA", "METADATA", "STRINGS", "checkpoint_metadata", "metadata", "strings"]

METADATA = "_METADATA"
STRINGS = "_strings.json"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_STANDARD_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_EMPTY = {"list": "List", "tuple": "Tuple", "deque": "List", "namedtuple": "NamedTuple"}
_SCALARS = frozenset({"bool", "int", "float", "complex"})


def metadata(tree: Tree, leaves: Sequence[Leaf], orbax_type: str) -> bytes:
    """`_METADATA`: every leaf's path and Orbax value type."""
    entries = {}
    for path, types, node in walk(tree):
        entries[str(path)] = {
            "key_metadata": [{"key": k, "key_type": t} for k, t in zip(path, types, strict=True)],
            "value_metadata": _value_metadata(node, leaves, orbax_type),
        }
    return msgspec.json.encode(
        {
            "tree_metadata": entries,
            "use_ocdbt": True,
            "use_zarr3": True,
            # With False, Orbax takes a chunk that is missing for zeros.
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def _value_metadata(node: Tree, leaves: Sequence[Leaf], orbax_type: str) -> dict[str, Any]:
    if node is None:
        return {"value_type": "None", "skip_deserialize": True}
    if isinstance(node, Node):
        return {"value_type": _EMPTY.get(node.kind, "Dict"), "skip_deserialize": True}
    if isinstance(node, Value):
        return {"value_type": "string", "skip_deserialize": False}
    kind = leaves[node].kind
    value_type = "scalar" if kind in _SCALARS else orbax_type if kind == "array" else "np.ndarray"
    return {"value_type": value_type, "skip_deserialize": False}


def strings(names: Sequence[tuple[str, int]], values: Sequence[Any]) -> bytes:
    """`_strings.json`: the plain values, those that are no strings as their JSON text."""
    return msgspec.json.encode(
        {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in ((name, values[number]) for name, number in names)
        }
    )


def checkpoint_metadata(item: str, begun_ns: int, committed_ns: int, metrics: Mapping[str, Any]) -> bytes:
    """`_CHECKPOINT_METADATA` of a step: what lets a fresh Orbax manager restore it without arguments."""
    return msgspec.json.encode(
        {
            "item_handlers": {item: _STANDARD_HANDLER},
            "metrics": dict(metrics),
            "performance_metrics": {},
            "init_timestamp_nsecs": begun_ns,
            "commit_timestamp_nsecs": committed_ns,
            "custom_metadata": {},
        }
    )
