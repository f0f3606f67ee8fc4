"""Orbax's own files, as far as it needs them to restore: `_METADATA`, `_strings.json`, `_CHECKPOINT_METADATA`.

They carry the poorer view that Orbax knows: string keys, lists for tuples, dicts for named tuples and objects.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import msgspec

from ..tree import Node, Tree, Value, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..leaf import Leaf

__all__ = [
    "ARRAY_METADATAS",
    "CHECKPOINT_METADATA",
    "METADATA",
    "PRNG",
    "SHARDING",
    "STRINGS",
    "array_metadatas",
    "as_json",
    "checkpoint_metadata",
    "metadata",
    "read_begun",
    "read_metrics",
    "shardings",
    "strings",
    "with_custom",
]

METADATA = "_METADATA"
STRINGS = "_strings.json"
SHARDING = "_sharding"
ARRAY_METADATAS = "array_metadatas"
PRNG = "prng:"  # mark of a leaf that is the data of a random key
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
_STANDARD_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_EMPTY = {"list": "List", "tuple": "Tuple", "deque": "List", "namedtuple": "NamedTuple"}
_SCALARS = frozenset({"bool", "int", "float"})  # Orbax refuses a Python complex, but takes a 0-d array


def metadata(tree: Tree, leaves: Sequence[Leaf]) -> bytes:
    """`_METADATA`: every leaf's path and Orbax value type."""
    entries = {}
    for path, types, node in walk(tree):
        entries[str(path)] = {
            "key_metadata": [{"key": k, "key_type": t} for k, t in zip(path, types, strict=True)],
            "value_metadata": _value_metadata(node, leaves),
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


def with_custom(document: bytes, value: Any) -> bytes:
    """A `_METADATA` with a user's own metadata in it. Raises TypeError or ValueError for what JSON does not hold."""
    fields: dict[str, msgspec.Raw] = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"custom_metadata": msgspec.Raw(as_json(value))})


def as_json(value: Any) -> bytes:
    """Raises TypeError or ValueError for what JSON does not hold: objects, NaN."""
    return json.dumps(value, allow_nan=False).encode()


def _value_metadata(node: Tree, leaves: Sequence[Leaf]) -> dict[str, Any]:
    if node is None:
        return {"value_type": "None", "skip_deserialize": True}
    if isinstance(node, Node):
        return {"value_type": _EMPTY.get(node.kind, "Dict"), "skip_deserialize": True}
    if isinstance(node, Value):
        return {"value_type": "string", "skip_deserialize": False}
    leaf = leaves[node]
    value_type = "scalar" if leaf.kind in _SCALARS else "np.ndarray" if leaf.sharding is None else "jax.Array"
    return {"value_type": value_type, "skip_deserialize": False}


def shardings(names: Mapping[int, str], leaves: Sequence[Leaf]) -> bytes | None:
    """`_sharding`: the sharding of every jax.Array by name; None if there is no such leaf."""
    found = {
        base64.urlsafe_b64encode(names[number].encode()).decode(): leaf.sharding
        for number, leaf in enumerate(leaves)
        if leaf.sharding is not None
    }
    return msgspec.json.encode(found) if found else None


def array_metadatas(names: Mapping[int, str], leaves: Sequence[Leaf], chunks: Sequence[Sequence[int]]) -> bytes | None:
    """`array_metadatas/process_0`: what makes a leaf's data a random key to Orbax; None if there is no such leaf."""
    found = [
        {
            "array_metadata": {
                "param_name": names[number],
                "write_shape": list(chunks[number]),
                "chunk_shape": list(chunks[number]),
                "ext_metadata": {"random_key_impl": leaf.ext.removeprefix(PRNG)},
            }
        }
        for number, leaf in enumerate(leaves)
        if leaf.ext is not None and leaf.ext.startswith(PRNG)
    ]
    return msgspec.json.encode({"array_metadatas": found}) if found else None


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


def read_metrics(data: bytes) -> Mapping[str, Any]:
    """The metrics of a step's `_CHECKPOINT_METADATA`. Raises ValueError if there are none to be found in it."""
    raw = msgspec.json.decode(data)
    metrics = raw.get("metrics") if isinstance(raw, dict) else None
    if not isinstance(metrics, dict):
        raise ValueError("no metrics")
    return metrics


def read_begun(data: bytes) -> int:
    """When the save of a step began (ns), of its `_CHECKPOINT_METADATA`. Raises ValueError if it does not say."""
    raw = msgspec.json.decode(data)
    begun = raw.get("init_timestamp_nsecs") if isinstance(raw, dict) else None
    if not isinstance(begun, int):
        raise ValueError("no time")
    return begun
