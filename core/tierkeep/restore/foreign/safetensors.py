"""safetensors files, single or sharded with an index: their bytes lie in plain runs, so our own reader reads them.

Format: an 8-byte little-endian length, a JSON header of that length, then the tensors. Nothing in it is executed; every
place is checked against the file's size before it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import TYPE_CHECKING, Any

import msgspec

from ...errors import CorruptCheckpointError, TierkeepError, UnsupportedFormatError
from ...format.part import ChunkRecord, Part
from ...leaf import LeafSpec
from ...tree import Node
from ..opened import Opened
from ..source import Stored
from .contents import ForeignContents, record_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ...format.part import LeafRecord
    from ...tiers.local_disk import LocalDisk

__all__ = ["INDEX_SUFFIX", "SUFFIX", "is_safetensors", "open_safetensors", "parse_header"]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes, the format's own
_BLOCK_NBYTES = 1 << 20
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def is_safetensors(head: bytes, nbytes: int) -> bool:
    """Whether a file that begins with `head` and has `nbytes` is one."""
    return (
        len(head) > 8
        and 2 <= int.from_bytes(head[:8], "little") <= min(_HEADER_LIMIT, nbytes - 8)
        and head[8:9] == b"{"
    )


@contextlib.contextmanager
def open_safetensors(disk: LocalDisk, path: Path, *, direct: bool, holds: str) -> Iterator[Stored]:
    """The tensors of a file, or of the files that an index (`path`) names, as a flat dict."""
    with contextlib.ExitStack() as stack:
        try:
            if path.name.endswith(INDEX_SUFFIX):
                files, wanted = _index(disk, path)
            else:
                files, wanted = [path], None
            images, parts = [], []
            records: list[LeafRecord] = []
            held: list[dict[int, int]] = []
            for number, file in enumerate(files):
                image = disk.open_image(file, direct=direct)
                stack.callback(image.close)
                chunks: dict[tuple[int, int], ChunkRecord] = {}
                for name, spec, offset in _tensors(disk, file, image.nbytes):
                    if wanted is not None and wanted.get(name) != file.name:
                        continue
                    record = record_of(name, spec)
                    if math.prod(record.grid):
                        chunks[len(records), 0] = ChunkRecord(offset, ())
                    records.append(record)
                    held.append({0: number} if math.prod(record.grid) else {})
                images.append(image)
                parts.append(Part(file.name, image.nbytes, _BLOCK_NBYTES, chunks))
            missing = set(wanted or ()) - {record.name for record in records}
            if missing:
                raise ValueError(f"the index names {sorted(missing)[:8]}, which its files do not hold")
        except FileNotFoundError as error:
            raise CorruptCheckpointError(str(path), [f"missing: {error.filename}"], holds) from error
        except TierkeepError:
            raise
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise CorruptCheckpointError(str(path), [str(error)], holds) from error
        tree = Node("dict", None, tuple(record.name for record in records), tuple(range(len(records))))
        contents = ForeignContents(tree, tuple(records))
        yield Stored(Opened(path, contents, tuple(parts), tuple(images), tuple(held)))


def _index(disk: LocalDisk, path: Path) -> tuple[list[Path], dict[str, str]]:
    raw = msgspec.json.decode(disk.read_file(path, _HEADER_LIMIT))
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ValueError("the index has no weight_map")
    for name in found.values():
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"the index names a file {name!r} outside its directory")
    return [path.with_name(name) for name in sorted(set(found.values()))], found


def _tensors(disk: LocalDisk, path: Path, nbytes: int) -> Iterator[tuple[str, LeafSpec, int]]:
    head = disk.read_head(path, 8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= min(_HEADER_LIMIT, nbytes - 8):
        raise ValueError(f"{path.name}: a header of {length} bytes in a file of {nbytes}")
    data = 8 + length
    for name, spec, begin in parse_header(disk.read_head(path, data)[8:], nbytes - data, path):
        yield name, spec, data + begin


def parse_header(text: bytes, nbytes: int, path: Path) -> Iterator[tuple[str, LeafSpec, int]]:
    """Name, dtype, shape and place of every tensor among the `nbytes` after a header. Raises ValueError."""
    header = msgspec.json.decode(text)
    if not isinstance(header, dict):
        raise ValueError(f"{path.name}: the header is not an object")
    places: list[tuple[int, int, str]] = []
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, name, raw)
        record = record_of(name, LeafSpec("array", dtype, shape))
        expected = math.prod(shape) * record.itemsize
        if not 0 <= begin <= end <= nbytes or end - begin != expected:
            raise ValueError(f"{path.name}: tensor {name!r} of {expected} bytes lies at {begin} to {end} of {nbytes}")
        places.append((begin, end, name))
        yield name, record.spec, begin
    places.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(places):
        if begin < end:
            raise ValueError(f"{path.name}: tensors {one!r} and {other!r} overlap")


def _entry(path: Path, name: str, raw: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, end) = raw["dtype"], raw["shape"], raw["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path.name}: tensor {name!r} has no dtype, shape and offsets") from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{path.name}: tensor {name!r} has an impossible shape or place")
    if not isinstance(dtype, str):
        raise ValueError(f"{path.name}: tensor {name!r} has a dtype that is no name")
    if dtype not in _DTYPES:
        raise UnsupportedFormatError(str(path), f"a file with tensor {name!r} of dtype {dtype!r}", ", ".join(_DTYPES))
    return _DTYPES[dtype], tuple(shape), begin, end
