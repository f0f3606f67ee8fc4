"""Stock Orbax checkpoints and plain zarr directories: their structure from `_METADATA` or from the array's names."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import tensorstore as ts

from ...errors import CorruptCheckpointError, UnsupportedFormatError
from ...format import dtypes
from ...format.orbax_metadata import ARRAY_METADATAS, METADATA, PRNG, STRINGS
from ...leaf import LeafSpec
from ...save.commit import MANIFEST
from ...tree import Node, Tree, Value, join
from .contents import ForeignContents, record_of
from .tensorstore import TensorStoreSource, array_spec, kvstore_spec, open_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ...format.part import LeafRecord
    from ...tiers.local_disk import LocalDisk

__all__ = ["open_orbax", "open_zarr"]

_LIMIT = 1 << 31  # bytes of a metadata file
_DEPTH_LIMIT = 400
_EMPTY = {
    "Dict": Node("dict", None, (), ()),
    "List": Node("list", None, (), ()),
    "Tuple": Node("tuple", None, (), ()),
    "NamedTuple": Node("namedtuple", None, (), ()),
}
_SCALARS = {"bool": "bool", "int64": "int", "int32": "int", "float64": "float", "float32": "float"}


def open_orbax(disk: LocalDisk, path: Path, holds: str) -> TensorStoreSource:
    """The item directory at `path`. Raises CorruptCheckpointError naming the file or the leaf."""
    try:
        raw = msgspec.json.decode(disk.read_file(path / METADATA, _LIMIT))
        entries = _entries(raw)
        strings = _strings(disk, path) if any(kind == "string" for _, _, kind in entries) else {}
        keys = _random_keys(disk, path)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpointError(str(path), [f"{METADATA}: {error}"], holds) from error
    arrays = [
        (join(steps), kind) for steps, _, kind in entries if kind not in _EMPTY and kind not in ("None", "string")
    ]
    ocdbt = raw.get("use_ocdbt")
    ocdbt = disk.exists(path / MANIFEST) if ocdbt is None else bool(ocdbt)
    store = kvstore_spec(path, ocdbt=ocdbt)
    elided = not raw.get("store_array_data_equal_to_fill_value", False)
    specs = [array_spec(store, name, zarr3=bool(raw.get("use_zarr3")), elided=elided) for name, _ in arrays]
    opened, findings = open_arrays(specs, [name for name, _ in arrays])
    if findings:
        raise CorruptCheckpointError(str(path), findings, holds)
    records = []
    for (name, kind), array in zip(arrays, opened, strict=True):
        spec = _spec(path, name, array)
        if kind == "scalar":
            spec = spec._replace(kind=_SCALARS.get(spec.dtype, "npscalar"))
        else:
            spec = spec._replace(kind="ndarray" if kind == "np.ndarray" else "array", ext=keys.get(name))
        records.append(_record(path, name, spec))
    numbers = {name: number for number, (name, _) in enumerate(arrays)}
    values: list[Any] = []
    leaves: list[tuple[tuple[tuple[str, int], ...], Tree]] = []
    for steps, types, kind in entries:
        name = join(steps)
        leaf: Tree
        if kind == "None":
            leaf = None
        elif kind in _EMPTY:
            leaf = _EMPTY[kind]
        elif kind == "string":
            if name not in strings:
                raise CorruptCheckpointError(str(path), [f"{STRINGS} has no {name!r}"], holds)
            leaf = Value(len(values))
            values.append(strings[name])
        else:
            leaf = numbers[name]
        leaves.append((tuple(zip(steps, types, strict=True)), leaf))
    return TensorStoreSource(
        path, ForeignContents(_nest(leaves, 0), tuple(records), tuple(values), text_keys=True), tuple(opened)
    )


def open_zarr(disk: LocalDisk, path: Path, holds: str) -> TensorStoreSource | None:
    """Every array below `path`, as nested dicts by directory (a single array as itself); None if there is none.

    An OCDBT database without Orbax's metadata is read alike.
    """
    store = kvstore_spec(path, ocdbt=disk.exists(path / MANIFEST))
    try:
        keys = [key.decode() for key in ts.KvStore.open(store).result().list().result()]
    except (ValueError, OSError) as error:
        raise CorruptCheckpointError(str(path), [str(error)], holds) from error
    found = sorted(
        (key.rpartition("/")[0], key.endswith("zarr.json"))
        for key in keys
        if key.rpartition("/")[2] in ("zarr.json", ".zarray")
    )
    specs = [array_spec(store, name, zarr3=zarr3, elided=True) for name, zarr3 in found]
    names, arrays, findings = [], [], []
    for (name, zarr3), spec in zip(found, specs, strict=True):
        opened, wrong = open_arrays([spec], [name])
        if opened:
            names.append(name)
            arrays += opened
        elif not zarr3 or "array" in wrong[0]:  # a zarr3 group has a zarr.json too, and is no array
            findings += [] if zarr3 and "group" in wrong[0] else wrong
    if findings:
        raise CorruptCheckpointError(str(path), findings, holds)
    if not arrays:
        return None
    records = tuple(_record(path, name, _spec(path, name, array)) for name, array in zip(names, arrays, strict=True))
    tree = _nest([(tuple((step, 2) for step in name.split("/") if step), n) for n, name in enumerate(names)], 0)
    return TensorStoreSource(path, ForeignContents(tree, records, text_keys=True), tuple(arrays))


def _spec(path: Path, name: str, array: Any) -> LeafSpec:
    dtype = array.dtype.name
    try:
        dtypes.lookup(dtype)
    except KeyError:
        raise UnsupportedFormatError(
            str(path), f"a checkpoint with leaf {name!r} of dtype {dtype}", "numeric dtypes"
        ) from None
    return LeafSpec("array", dtype, tuple(array.shape))


def _record(path: Path, name: str, spec: LeafSpec) -> LeafRecord:
    try:
        return record_of(name, spec)
    except ValueError as error:
        raise CorruptCheckpointError(str(path), [str(error)]) from error


def _entries(raw: Any) -> list[tuple[tuple[str, ...], tuple[int, ...], str]]:
    """(path, Orbax key types, value type) of every entry of `_METADATA`."""
    tree = raw.get("tree_metadata") if isinstance(raw, dict) else None
    if not isinstance(tree, dict):
        raise ValueError("no tree_metadata")
    entries = []
    for entry in tree.values():
        try:
            keys = entry["key_metadata"]
            steps = tuple(str(key["key"]) for key in keys)
            types = tuple(int(key["key_type"]) for key in keys)
            kind = str(entry["value_metadata"]["value_type"])
        except (TypeError, KeyError, ValueError):
            raise ValueError("an entry without key_metadata and value_metadata") from None
        if len(steps) > _DEPTH_LIMIT:
            raise ValueError(f"nesting deeper than {_DEPTH_LIMIT}")
        entries.append((steps, types, kind))
    paths = sorted(steps for steps, _, _ in entries)
    for one, other in itertools.pairwise(paths):
        if other[: len(one)] == one:  # sorted, a path stands right before those below it
            raise ValueError(f"entries {join(one)!r} and {join(other)!r} are one below the other")
    stored: dict[str, tuple[str, ...]] = {}
    for steps, _, kind in entries:
        if kind not in _EMPTY and kind != "None" and stored.setdefault(join(steps), steps) != steps:
            # Orbax writes both under the one name, and says nothing: what is there is only one of them.
            raise ValueError(f"leaves {stored[join(steps)]} and {steps} are both stored as {join(steps)!r}")
    return entries


def _strings(disk: LocalDisk, path: Path) -> Mapping[str, str]:
    found = msgspec.json.decode(disk.read_file(path / STRINGS, _LIMIT))
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{STRINGS} is not an object of strings")
    return found


def _random_keys(disk: LocalDisk, path: Path) -> dict[str, str]:
    """The marks of leaves that are the data of random keys."""
    folder = path / ARRAY_METADATAS
    if not disk.exists(folder):
        return {}
    marks = {}
    for entry in disk.list_dir(folder):
        raw = msgspec.json.decode(disk.read_file(folder / entry.name, _LIMIT))
        try:
            for row in raw.get("array_metadatas", []):
                found = row["array_metadata"]
                impl = (found.get("ext_metadata") or {}).get("random_key_impl")
                if impl is not None:
                    marks[str(found["param_name"])] = f"{PRNG}{impl}"
        except (TypeError, LookupError, AttributeError):
            raise ValueError(f"{ARRAY_METADATAS}/{entry.name} has another form") from None
    return marks


def _nest(leaves: Sequence[tuple[tuple[tuple[str, int], ...], Tree]], depth: int) -> Tree:
    """The tree whose leaves have these paths of (step, Orbax key type)."""
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        return leaves[0][1]
    groups: dict[str, list[tuple[tuple[tuple[str, int], ...], Tree]]] = {}
    sequence = True
    for path, leaf in leaves:
        step, kind = path[depth]
        sequence = sequence and kind == 1 and step.isdecimal() and len(step) < 19
        groups.setdefault(step, []).append((path, leaf))
    if sequence and sorted(map(int, groups)) == list(range(len(groups))):
        ordered = sorted(groups, key=int)
        return Node("list", None, (), tuple(_nest(groups[step], depth + 1) for step in ordered))
    return Node("dict", None, tuple(groups), tuple(_nest(group, depth + 1) for group in groups.values()))
