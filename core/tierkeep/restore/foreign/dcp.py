"""Checkpoints of torch.distributed.checkpoint: a pickled `.metadata`, and `.distcp` files with the pieces of tensors.

The pickle has no checksum, so all it says is compared with what else there is: names with paths, pieces with the whole
tensor, places with files and with each other, and later every piece with the archive that holds it. What only it says,
the name of a key of the top level, is what it is taken for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import CorruptCheckpointError, TierkeepError, UnsupportedFormatError
from ...format import dtypes
from ...leaf import Box, LeafSpec
from ...tree import Node, Tree, Value, container, decode_value, encode_value, join
from ..opened import read_checked
from ..source import Unread
from .contents import ForeignContents, record_of
from .pickles import PLAIN, Maker, Named, NotRead, NumpyArray, Record, Table, read_pickle
from .torch_chunks import Chunk, TorchChunks, fetch_from, layout_of, not_read
from .torch_zip import DATA, DTYPES, TORCH, Size, Storage, TensorRef, TorchZip, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ...format.part import LeafRecord
    from ...tiers.local_disk import ImageReader, LocalDisk

__all__ = ["METADATA", "is_metadata", "open_dcp"]

METADATA = ".metadata"
_OF_RANK = re.compile(r"__\d+\.metadata\Z")
_LIMIT = 1 << 31  # bytes of the metadata
_DEPTH_LIMIT = 300
_SHARED = 4  # values for each byte of a pickle, which can hold one object many times; without that it is less than one
_EXPANDED_NBYTES = 1 << 20  # of a tensor larger than what is stored of it; distributed tensors never are
_GAPS = 1024  # places of a list that may be missing, because torch leaves out empty dicts
_SCALARS = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}

# The packages that these classes have been in since torch 1.12.
_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed._shard.checkpoint.metadata",
    "torch.distributed._shard.sharded_tensor.metadata",
)
_FILE_MODULES = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.checkpoint.filesystem",
)
_RECORDS = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta",
)  # fmt: skip


def _record(kind: str) -> Maker:
    return Maker(lambda: Record(kind))


_TABLE: Table = {
    **PLAIN,
    **DTYPES,
    **{(module, kind): _record(kind) for module in _METADATA_MODULES for kind in _RECORDS},
    **{
        (module, name): Maker(lambda number: Named("torch.memory_format", str(number)[:8]))
        for module in _METADATA_MODULES
        for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
    },
    **{(module, "_StorageInfo"): _record("_StorageInfo") for module in _FILE_MODULES},
    **{key: TORCH[key] for key in (("torch", "Size"), ("torch", "device"), ("torch.serialization", "_get_layout"))},
}


class _Tensor(NamedTuple):
    """What the metadata say of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


class _Place(NamedTuple):
    """What the metadata say of a piece."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...]


class _Metadata(NamedTuple):
    entries: dict[str, _Tensor | None]
    """None: a pickled object."""
    paths: dict[str, tuple[str | int, ...]]
    places: dict[tuple[str, tuple[int, ...] | None], _Place]


def is_metadata(name: str) -> bool:
    """Whether a file of this name tells a directory of torch.distributed.checkpoint."""
    return name == METADATA or _OF_RANK.match(name) is not None


def open_dcp(disk: LocalDisk, path: Path, names: Sequence[str], *, direct: bool, holds: str) -> TorchChunks:
    """The checkpoint in the directory `path`, whose files are `names`.

    Plain values are read, tensors are not. Raises CorruptCheckpointError for metadata that contradict themselves or the
    files. A value that cannot be read, or is damaged, becomes `Unread`.
    """
    name = _metadata_name(path, names)
    findings: list[str] = []
    data = read_checked(disk, path, path / name, _LIMIT, findings)
    if data is None:
        raise CorruptCheckpointError(str(path), findings, holds)
    try:
        metadata = _metadata(read_pickle(data, _TABLE))
        files, sizes = _files(disk, path, metadata, findings)
        if findings:
            raise CorruptCheckpointError(str(path), findings, holds)
        shared = _shared(metadata, dict(zip(files, sizes, strict=True)))
        with contextlib.closing(_Builder(disk, path, files, shared, holds)) as builder:
            leaves = [
                (metadata.paths[key], builder.entry(key, found, metadata.places))
                for key, found in metadata.entries.items()
            ]
        tree = _nest(leaves, 0)
    except NotRead as error:
        raise UnsupportedFormatError(
            str(path),
            f"a torch.distributed.checkpoint directory with {error} in its {name}",
            "what torch itself writes",
        ) from error
    except TierkeepError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(str(path), [f"{name}: {error}"], holds) from error
    if builder.findings:
        raise CorruptCheckpointError(str(path), builder.findings, holds)
    contents = ForeignContents(tree, tuple(builder.leaves), tuple(builder.values), text_keys=True, empty_kept=False)
    return TorchChunks(path, contents, disk, tuple(path / file for file in files), sizes, tuple(builder.places), direct)


def _metadata_name(path: Path, names: Sequence[str]) -> str:
    if METADATA in names:
        return METADATA
    of_ranks = [name for name in names if _OF_RANK.match(name)]
    if len(of_ranks) != 1:
        raise UnsupportedFormatError(
            str(path),
            f"a torch.distributed.checkpoint directory in which each of {len(of_ranks)} ranks wrote metadata of its own "
            "(use_collectives=False)",
            f"those with one {METADATA} for all ranks",
        )
    return of_ranks[0]


# The metadata


def _metadata(raw: Any) -> _Metadata:
    entries_raw, places_raw = _of(raw, "Metadata", "state_dict_metadata"), _of(raw, "Metadata", "storage_data")
    if type(entries_raw) is not dict or type(places_raw) is not dict:
        raise ValueError("no state_dict_metadata and storage_data")
    entries: dict[str, _Tensor | None] = {}
    for key, found in entries_raw.items():
        if type(key) is not str:
            raise ValueError("a key that is no text")
        try:
            entries[key] = _entry(found)
        except ValueError as error:
            kind = NotRead if isinstance(error, NotRead) else ValueError
            raise kind(f"leaf {key!r}: {error}") from error
    places = {}
    for index, info in places_raw.items():
        key, offset = _of(index, "MetadataIndex", "fqn"), _of(index, "MetadataIndex", "offset")
        if type(key) is not str or type(offset) not in (Size, type(None)):
            raise ValueError("an index without a key")
        place = key, None if offset is None else offset.lengths
        if place in places:
            raise ValueError(f"leaf {key!r} stands twice in storage_data")
        places[place] = _place(key, info)
    return _Metadata(entries, _paths(entries, _of(raw, "Metadata", "planner_data")), places)


def _of(value: Any, kind: str, name: str) -> Any:
    if type(value) is not Record or value.kind != kind:
        raise ValueError(f"something else where a {kind} should be")
    return value.field(name)


def _entry(raw: Any) -> _Tensor | None:
    if type(raw) is Record and raw.kind == "BytesStorageMetadata":
        return None
    size = _of(raw, "TensorStorageMetadata", "size")
    chunks = _of(raw, "TensorStorageMetadata", "chunks")
    properties = _of(raw, "TensorStorageMetadata", "properties")
    if type(size) is not Size or type(chunks) is not list or type(properties) is not Record:
        raise ValueError("a tensor without size, chunks and properties")
    state = properties.state
    dtype = state[0] if type(state) is tuple and state else properties.field("dtype")
    if type(dtype) is not Named or dtype.tag != "torch.dtype":
        raise ValueError("a tensor without a dtype")
    boxes = []
    for chunk in chunks:
        offsets, sizes = _of(chunk, "ChunkStorageMetadata", "offsets"), _of(chunk, "ChunkStorageMetadata", "sizes")
        if type(offsets) is not Size or type(sizes) is not Size:
            raise ValueError("a part without offsets and sizes")
        if not len(offsets.lengths) == len(sizes.lengths) == len(size.lengths):
            raise ValueError("a part with other axes than the whole")
        boxes.append(Box(offsets.lengths, sizes.lengths))
    found = tuple(dict.fromkeys(boxes))  # replicas are one
    _check_cover(size.lengths, found)
    return _Tensor(dtype.text, size.lengths, found)


def _check_cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises ValueError unless the boxes are a partition of the whole."""
    for axis, length in enumerate(shape):
        ends = [box.start[axis] + box.shape[axis] for box in boxes]
        if max(ends, default=0) != length:  # also where nothing is stored, because there are no elements
            raise ValueError(f"its parts reach to {max(ends, default=0)} of {length} on axis {axis}")
    if sum(box.size for box in boxes) != math.prod(shape):
        raise ValueError(f"its parts hold {sum(box.size for box in boxes)} of {math.prod(shape)} elements")
    full = [box for box in boxes if box.size]
    if len(full) < 2:
        return
    # Along the axis that is cut most often, so that few parts are neighbours at a time.
    axis = max(range(len(shape)), key=lambda n: len({box.start[n] for box in full}))
    active: list[Box] = []
    for box in sorted(full, key=lambda box: box.start[axis]):
        active = [other for other in active if other.start[axis] + other.shape[axis] > box.start[axis]]
        if any(box.intersect(other) is not None for other in active):
            raise ValueError(f"parts overlap at {box.start}")
        active.append(box)


def _place(key: str, raw: Any) -> _Place:
    file, offset, nbytes = (_of(raw, "_StorageInfo", name) for name in ("relative_path", "offset", "length"))
    transforms = raw.field("transform_descriptors") or ()
    if type(file) is not str or not all(type(n) is int and 0 <= n < 2**63 for n in (offset, nbytes)):
        raise ValueError(f"leaf {key!r}: a place that is none")
    if "/" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"leaf {key!r}: a file {file[:100]!r} outside the directory")
    if type(transforms) not in (list, tuple) or not all(type(name) is str for name in transforms):
        raise ValueError(f"leaf {key!r}: transforms without names")
    return _Place(file, offset, nbytes, tuple(transforms))


def _paths(keys: Iterable[str], raw: Any) -> dict[str, tuple[str | int, ...]]:
    """The path of every key: itself where a planner kept none."""
    found: dict[str, tuple[str | int, ...]] = {}
    for key in keys:
        path = raw.get(key) if type(raw) is dict else None
        if path is None:
            found[key] = (key,)
            continue
        if type(path) is not tuple or not path or len(path) > _DEPTH_LIMIT:
            raise ValueError(f"leaf {key!r} has a path that is none")
        if not all(type(step) is str or (type(step) is int and step >= 0) for step in path) or join(path) != key:
            raise ValueError(f"leaf {key!r} has the path of another")
        found[key] = path
    return found


def _nest(leaves: Sequence[tuple[tuple[str | int, ...], Tree]], depth: int) -> Tree:
    """The tree whose leaves have these paths: text is a dict's key, a number a place in a list."""
    groups: dict[str | int, list[tuple[tuple[str | int, ...], Tree]]] = {}
    for path, leaf in leaves:
        if len(path) == depth:
            if len(leaves) > 1:
                raise ValueError(f"leaf {join(path)!r} is above another, or stands twice")
            return leaf
        groups.setdefault(path[depth], []).append((path, leaf))
    children: dict[str | int, Tree] = {step: _nest(group, depth + 1) for step, group in groups.items()}
    places = [step for step in children if isinstance(step, int)]
    if not places:
        return Node("dict", None, tuple(children), tuple(children.values()))
    if len(places) != len(children):
        raise ValueError(f"{join(leaves[0][0][:depth])!r} is both a list and a dict")
    if max(places) >= len(places) + _GAPS:
        raise ValueError(
            f"{join(leaves[0][0][:depth])!r} is a list with a place {max(places)} and {len(places)} in all"
        )
    return Node("list", None, (), tuple(children.get(n) for n in range(max(places) + 1)))


# The files


def _files(
    disk: LocalDisk, path: Path, metadata: _Metadata, findings: list[str]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of all files that hold anything; what is wrong with one is told with the leaves it holds."""
    held: dict[str, list[tuple[str, _Place]]] = {}
    for (key, _), place in metadata.places.items():
        held.setdefault(place.file, []).append((key, place))
    files, sizes = sorted(held), []
    for file in files:
        keys = list(dict.fromkeys(key for key, _ in held[file]))
        holding = (
            f"which holds {len(keys)} leaves, {keys[0]!r} among them" if len(keys) > 1 else f"with leaf {keys[0]!r}"
        )
        try:
            if not disk.is_inside(path / file, path):
                findings.append(f"a link leads {file}, {holding}, out of the checkpoint")
                continue
            if disk.is_dir(path / file):
                findings.append(f"{path / file}, {holding}, is a directory")
                continue
            sizes.append(disk.size(path / file))
        except FileNotFoundError:
            findings.append(f"missing: {path / file}, {holding}")
            continue
        short = [key for key, place in held[file] if place.offset + place.nbytes > sizes[-1]]
        if short:
            more = f" and {len(short) - 1} more" if len(short) > 1 else ""
            findings.append(f"leaf {short[0]!r}{more}: {file} ends at byte {sizes[-1]}")
    return tuple(files), tuple(sizes)


def _shared(metadata: _Metadata, sizes: Mapping[str, int]) -> frozenset[tuple[str, int]]:
    """The places at which several tensors begin, as those of one safetensors blob do.

    Raises ValueError if pieces overlap otherwise: the metadata are those of other files.
    """
    ranges = sorted(
        (place.file, place.offset, place.nbytes, key) for (key, _), place in metadata.places.items() if place.nbytes
    )
    shared = set()
    for (file, begin, nbytes, one), (other_file, other_begin, _, other) in itertools.pairwise(ranges):
        if file != other_file or begin + nbytes <= other_begin:
            continue
        if begin != other_begin or None in (metadata.entries.get(one), metadata.entries.get(other)):
            raise ValueError(f"leaves {one!r} and {other!r} overlap in {file}")
        shared.add((file, begin))
    return frozenset(shared)


# The leaves


class _Builder:
    """Leaves, places and values as they are met."""

    def __init__(
        self, disk: LocalDisk, path: Path, files: Sequence[str], shared: frozenset[tuple[str, int]], holds: str
    ) -> None:
        self.disk = disk
        self.path = path
        self.numbers = {file: number for number, file in enumerate(files)}
        self.shared = shared
        self.holds = holds
        self.leaves: list[LeafRecord] = []
        self.places: list[tuple[Chunk, ...] | np.ndarray[Any, Any]] = []
        self.values: list[Any] = []
        self.findings: list[str] = []
        self.left = 0  # values that this pickle may still have
        self.image: ImageReader | None = None  # the file that the last value was read from

    def close(self) -> None:
        if self.image is not None:
            self.image.close()

    def entry(
        self, key: str, found: _Tensor | None, places: Mapping[tuple[str, tuple[int, ...] | None], _Place]
    ) -> Tree:
        """The tree of one entry. What is wrong with a tensor is a finding; with a value, it is `Unread`."""
        leaves, values = len(self.leaves), len(self.values)
        try:
            if found is not None:
                return self.tensor(key, found, places)
            place = places.get((key, None))
            if place is None:
                raise ValueError("no file holds it")
            return self.pickled(key, place)
        except NotRead as error:
            unread: TierkeepError = not_read(self.path, key, error)
        except (ValueError, RecursionError) as error:
            finding = f"leaf {key!r}: {error}"
            if found is not None:
                self.findings.append(finding)
            unread = CorruptCheckpointError(str(self.path), [finding], self.holds)
        del self.leaves[leaves:], self.places[leaves:], self.values[values:]
        return self.value(Unread(unread))

    def value(self, value: Any) -> Value:
        self.values.append(value)
        return Value(len(self.values) - 1)

    def leaf(self, record: LeafRecord, place: tuple[Chunk, ...] | np.ndarray[Any, Any]) -> int:
        self.leaves.append(record)
        self.places.append(place)
        return len(self.leaves) - 1

    def tensor(self, key: str, found: _Tensor, places: Mapping[tuple[str, tuple[int, ...] | None], _Place]) -> int:
        itemsize = dtype_of(found.dtype).itemsize
        chunks = []
        for box in found.boxes:
            if not box.size:
                continue
            place = places.get((key, box.start))
            if place is None:
                raise ValueError(f"no file holds its part at {box.start}")
            _check_plain(place)
            if place.nbytes < box.size * itemsize:
                raise ValueError(f"{place.nbytes} bytes hold its part at {box.start} of shape {box.shape}")
            shared = (place.file, place.offset) in self.shared
            chunks.append(Chunk(box, self.numbers[place.file], place.offset, place.nbytes, shared))
        return self.leaf(record_of(key, LeafSpec("array", found.dtype, found.shape)), tuple(chunks))

    def pickled(self, key: str, place: _Place) -> Tree:
        """What torch.save wrote of any object."""
        _check_plain(place)
        if self.image is None or self.image.path.name != place.file:
            self.close()
            self.image = self.disk.open_image(self.path / place.file, direct=False)
        try:
            archive = TorchZip(fetch_from(self.image, place.offset, place.nbytes), place.nbytes)
            self.left = 1000 + _SHARED * archive.entry(DATA).nbytes
            return self.plain(archive.load(), [key], archive, place)
        except NotRead:
            raise
        except ValueError as error:
            raise ValueError(f"{place.file}: {error}") from error

    def plain(self, value: Any, path: list[str], archive: TorchZip, place: _Place) -> Tree:
        self.left -= 1
        if self.left < 0:
            raise NotRead("plain values that are the same ones over and over")
        if len(path) > _DEPTH_LIMIT:
            raise NotRead("containers nested deeply, or in themselves")
        if value is None:
            return None
        cls = type(value)
        if cls is TensorRef:
            return self.tensor_among(value, join(path), archive, place)
        if cls is NumpyArray:
            array = value.array()
            kind = "npscalar" if value.scalar else "ndarray"
            dtype = dtypes.dtype_of_numpy(array.dtype)
            assert dtype is not None  # or it would not be read
            return self.held(join(path), LeafSpec(kind, dtype.name, array.shape), array)
        if cls in _SCALARS and (cls is not int or -(2**63) <= value < 2**63):
            array = np.array(value, _SCALARS[cls])
            return self.held(join(path), LeafSpec(cls.__name__, _SCALARS[cls], ()), array)
        if cls is Named and value.tag.startswith("torch."):
            return self.value({"t": value.tag, "v": value.text})
        if cls in (Named, Maker, Storage):
            raise NotRead("a class, or a storage, by itself")
        if cls is Size:
            node, children = Node("tuple", "torch.Size", (), ()), value.lengths
        else:
            try:
                found = container(value)
            except (TypeError, ValueError) as error:  # keys or a default of other kinds
                raise NotRead(str(error)) from error
            if found is None:
                return self.encoded(value)
            node, children = found
        steps = [str(step) for step in value] if node.keys else [str(n) for n in range(len(children))]
        if len(set(steps)) != len(steps):
            raise NotRead("a dict with keys of the same text")
        made = [self.plain(child, [*path, step], archive, place) for step, child in zip(steps, children, strict=True)]
        return node._replace(children=tuple(made))

    def encoded(self, value: Any) -> Value:
        try:
            encoded = encode_value(value)
        except (ValueError, TypeError) as error:
            raise NotRead(str(error)) from error
        if encoded is None:
            raise NotRead(f"an object of type {type(value).__name__}")
        decode_value(encoded)  # a date that no calendar has is damage, and found before anything is read
        return self.value(encoded)

    def held(self, name: str, spec: LeafSpec, array: np.ndarray[Any, Any]) -> int:
        record = record_of(name, spec)
        return self.leaf(record, array.view(dtypes.bits(record.itemsize)))

    def tensor_among(self, tensor: TensorRef, name: str, archive: TorchZip, place: _Place) -> int:
        """A tensor among plain values, such as one in a tuple."""
        entry = archive.storage(tensor)
        record = record_of(name, LeafSpec("array", tensor.dtype, tensor.shape, tensor.mark))
        if record.nbytes > max(entry.nbytes, _EXPANDED_NBYTES):
            raise NotRead(f"a tensor of {record.nbytes} bytes, expanded from {entry.nbytes}")
        chunks: tuple[Chunk, ...] = ()
        if math.prod(tensor.shape):
            layout = layout_of(tensor, entry, place.offset)
            number = self.numbers[place.file]
            chunks = (Chunk(Box.whole(tensor.shape), number, place.offset, place.nbytes, layout=layout),)
        return self.leaf(record, chunks)


def _check_plain(place: _Place) -> None:
    if place.transforms:
        raise NotRead(f"bytes that went through {', '.join(place.transforms)[:100]}")
