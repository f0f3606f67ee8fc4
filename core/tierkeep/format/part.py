"""Our own records: `part.json`, what one rank wrote, and `tierkeep.json`, what the whole is. docs/format.md is the law.

Both are JSON objects sealed with a crc32c. Readers trust nothing in them: every number is checked against the others
and against the file's size before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..leaf import LeafSpec
from ..tree import Tree, decode_tree, decode_value
from . import dtypes
from .checksum import crc32c, seal, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PART",
    "WHOLE",
    "ChunkRecord",
    "LeafRecord",
    "Part",
    "Whole",
    "digest",
    "digests",
    "encode_part",
    "encode_whole",
    "parse_part",
    "parse_whole",
]

WHOLE = "tierkeep.json"
PART = "part.json"
VERSION = 1
_T = TypeVar("_T")
_MOST_AXES = 64  # numpy's limit
_SCALARS = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128", "npscalar": None}
_KINDS = frozenset({"array", "ndarray", *_SCALARS})
_HEX = re.compile(r"[0-9a-f]{32}\Z")
_FILE = re.compile(r"(\w[\w.]*/)?\w[\w.]*\Z", re.ASCII)  # one directory deep at most, and never upwards


@dataclass(frozen=True, slots=True)
class LeafRecord:
    """One leaf of a checkpoint."""

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    grid: tuple[int, ...]
    tie: int | None
    """The leaf whose bytes these are."""

    itemsize: int
    """Bytes of one element."""
    chunk_nbytes: int
    """Bytes of one chunk; those at the far edges are padded to it."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.spec.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Where one chunk lies in a part's image."""

    offset: int
    crcs: tuple[int, ...]
    """Running crc32c at every block boundary and at the end; empty where none was recorded (others' files)."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote."""

    image: str
    """The image's name below the part's `d/`; empty if the part holds no bytes."""
    image_nbytes: int
    block_nbytes: int
    chunks: dict[tuple[int, int], ChunkRecord]
    """By leaf and grid number."""
    files: tuple[tuple[str, int, str], ...] = ()
    """Name below the part, size and digest of its other files, which only stock readers need."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What a checkpoint holds."""

    save_id: str
    digest: str
    tree: Tree
    leaves: tuple[LeafRecord, ...]
    values: tuple[Any, ...]
    parts: tuple[tuple[str, int, int], ...]
    """Directory, size and crc32c of each part's record."""
    text_keys: bool = False
    """Keys are kept with their types."""
    empty_kept: bool = True
    """Empty containers are kept."""
    files: tuple[tuple[str, int, str], ...] = ()
    """Name, size and digest of the item's other files, which only stock readers need."""


def digests(files: Mapping[str, bytes]) -> list[tuple[str, int, str]]:
    """What a record keeps of other files, by name: size and digest."""
    return [(name, len(data), digest(data)) for name, data in files.items()]


def digest(data: bytes) -> str:
    """BLAKE2b, 16 bytes, in hex. No crc32c: it is one and the same for all that end with theirs, as an index does."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_part(
    *,
    save_id: str,
    digest: str,
    rank: int,
    world: int,
    image: str,
    image_nbytes: int,
    layout: msgspec.Raw,
    crcs: list[list[int]],
    files: list[tuple[str, int, str]],
) -> bytes:
    return seal(
        msgspec.json.encode(
            {
                "format": "tierkeep.part",
                "version": VERSION,
                "save_id": save_id,
                "digest": digest,
                "rank": rank,
                "world": world,
                "image": image,
                "image_nbytes": image_nbytes,
                "layout": layout,
                "crcs": crcs,
                "files": files,
            }
        )
    )


def encode_whole(
    *,
    writer: str,
    save_id: str,
    digest: str,
    structure: msgspec.Raw,
    values: list[Any],
    parts: list[tuple[str, bytes]],
    files: list[tuple[str, int, str]],
) -> bytes:
    """`parts`: each part's directory and the bytes of its record."""
    return seal(
        msgspec.json.encode(
            {
                "format": "tierkeep",
                "version": VERSION,
                "writer": writer,
                "save_id": save_id,
                "digest": digest,
                "structure": structure,
                "values": values,
                "parts": [(name, len(record), crc32c(record)) for name, record in parts],
                "files": files,
            }
        )
    )


def parse_whole(data: bytes) -> Whole:
    """Raises ValueError saying what is wrong; UnsupportedVersion (a ValueError) for a version that is not read."""
    raw = _open(data, "tierkeep")
    structure = _get(raw, "structure", dict)
    leaves_raw = _get(structure, "leaves", list)
    values = _get(raw, "values", list)
    leaves = tuple(_leaf(number, row) for number, row in enumerate(leaves_raw))
    for value in values:
        decode_value(value)
    for leaf in leaves:
        if leaf.tie is not None:
            owner = leaves[leaf.tie]
            if owner.tie is not None or owner.spec.shape != leaf.spec.shape or owner.spec.dtype != leaf.spec.dtype:
                raise ValueError(f"leaf {leaf.name!r} is tied to one that is not like it")
    parts = []
    for row in _get(raw, "parts", list):
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str)):
            raise ValueError("a part that is not [directory, size, crc32c]")
        if not re.fullmatch(r"ocdbt\.process_\d{1,9}", row[0]):
            raise ValueError(f"a part in {row[0]!r}")
        parts.append((row[0], _number(row[1]), _number(row[2])))
    if len({name for name, _, _ in parts}) != len(parts):
        raise ValueError("a part that stands twice")
    return Whole(
        _get(raw, "save_id", str),
        _get(raw, "digest", str),
        decode_tree(structure.get("tree"), len(leaves), len(values)),
        leaves,
        tuple(values),
        tuple(parts),
        files=_files(raw),
    )


def parse_part(data: bytes, whole: Whole) -> Part:
    """Raises ValueError saying what is wrong, also where the part is not of this checkpoint."""
    raw = _open(data, "tierkeep.part")
    if raw.get("save_id") != whole.save_id or raw.get("digest") != whole.digest:
        raise ValueError("it belongs to another checkpoint")
    image, image_nbytes = _get(raw, "image", str), _number(raw.get("image_nbytes"))
    if image and not _HEX.match(image):
        raise ValueError(f"an image named {image!r}")
    layout = _get(raw, "layout", dict)
    block = _number(layout.get("block_nbytes"))
    columns = [_get(layout, name, list) for name in ("leaf", "number", "offset")] + [_get(raw, "crcs", list)]
    if block < 1 or len(set(map(len, columns))) != 1:
        raise ValueError("columns of different lengths")
    chunks: dict[tuple[int, int], ChunkRecord] = {}
    for leaf, number, offset, crcs in zip(*columns, strict=True):
        if _number(leaf) >= len(whole.leaves):
            raise ValueError(f"leaf {leaf} of {len(whole.leaves)}")
        record = whole.leaves[leaf]
        nbytes = record.chunk_nbytes
        if record.tie is not None or _number(number) >= math.prod(record.grid) or (leaf, number) in chunks:
            raise ValueError(f"chunk {number} of leaf {record.name!r}, which has {record.grid}")
        if _number(offset) + nbytes > image_nbytes:
            raise ValueError(f"chunk {number} of leaf {record.name!r} ends past the image")
        if not isinstance(crcs, list) or len(crcs) != -(-nbytes // block) or max(map(_number, crcs)) >> 32:
            raise ValueError(f"chunk {number} of leaf {record.name!r} has other checksums than a chunk has")
        chunks[leaf, number] = ChunkRecord(offset, tuple(crcs))
    return Part(image, image_nbytes, block, chunks, _files(raw))


class UnsupportedVersion(ValueError):
    """The record is whole, but of a version that is not read."""


def _open(data: bytes, kind: str) -> dict[str, Any]:
    raw = unseal(data)
    if raw.get("format") != kind:
        raise ValueError(f"its format is {raw.get('format')!r}, not {kind!r}")
    if raw.get("version") != VERSION:
        raise UnsupportedVersion(f"of format version {raw.get('version')!r}")
    return raw


def _leaf(number: int, row: Any) -> LeafRecord:
    if not (isinstance(row, list) and len(row) == 7):
        raise ValueError(f"leaf {number} is not a row of seven")
    name, kind, dtype, shape, ext, chunk, tie = row
    if not (isinstance(name, str) and isinstance(kind, str) and isinstance(dtype, str) and isinstance(ext, str | None)):
        raise ValueError(f"leaf {number} has no name, kind or dtype")
    if kind not in _KINDS:
        raise UnsupportedVersion(f"with leaf {name!r} of kind {kind!r}")
    try:
        itemsize = dtypes.lookup(dtype).itemsize
    except KeyError as error:
        raise UnsupportedVersion(f"with {error.args[0]} in leaf {name!r}") from error
    if not (isinstance(shape, list) and isinstance(chunk, list) and len(shape) == len(chunk)):
        raise ValueError(f"leaf {name!r} has no shape")
    if tie is not None and not 0 <= _number(tie) < number:
        raise ValueError(f"leaf {name!r} is tied to leaf {tie}")
    lengths, edges = tuple(map(_number, shape)), tuple(map(_number, chunk))
    if len(lengths) > _MOST_AXES or math.prod(n or 1 for n in lengths) * dtypes.lookup(dtype).itemsize >= 2**63:
        raise ValueError(f"leaf {name!r} of a shape that no array has")
    if kind in _SCALARS and (lengths or dtype != (_SCALARS[kind] or dtype)):
        raise ValueError(f"leaf {name!r} is a {kind} of dtype {dtype} and shape {lengths}")
    if 0 in edges:
        raise ValueError(f"leaf {name!r} has chunks of no length")
    grid = tuple(-(-n // c) for n, c in zip(lengths, edges, strict=True))
    nbytes = math.prod(edges) * itemsize
    return LeafRecord(name, LeafSpec(kind, dtype, lengths, ext), edges, grid, tie, itemsize, nbytes)


def _files(raw: dict[str, Any]) -> tuple[tuple[str, int, str], ...]:
    files = []
    for row in raw.get("files", []) if isinstance(raw.get("files", []), list) else [None]:
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and _FILE.match(row[0])):
            raise ValueError("a file that is not [name, size, digest]")
        files.append((row[0], _number(row[1]), str(row[2])))
    return tuple(files)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} where a size or place must stand")
    return value


def _get(raw: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = raw.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"no {name!r} of type {kind.__name__}")
    return value
