"""The OCDBT index: from keys and where their values lie to a database that stock TensorStore opens.

An index is a B+tree over sorted keys and a manifest that names its root. Encoding it has two steps. `index_template`
does what depends only on the keys and the layout of the image: it sorts, splits into nodes, compresses keys, and
encodes every column. `IndexTemplate.render` puts in what changes from save to save: the names of the files, and so
the sizes and places of the nodes, the checksums, the uuid and the time. With one data file, a render copies the index
once and takes its checksum once.

Byte format: TensorStore's page "OCDBT storage format"; our reading of it: ``docs/format.md``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tierkeep.format.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    _Ints: TypeAlias = npt.NDArray[np.int64]

__all__ = ["DataFile", "Index", "IndexTemplate", "Value", "index_template"]

Value: TypeAlias = bytes | tuple[int, int, int]
"""Bytes are kept in the index itself; ``(file number, offset, length)`` says where in a data file they lie."""

_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_FRAME_NBYTES = 4 + 8 + 2 + 4  # magic, length, version and compression, checksum

# What stock readers accept.
_MAX_KEY_NBYTES = 65_535
_MAX_PATH_NBYTES = 65_535
_MAX_INLINE_NBYTES = 1 << 20
_MAX_END = (1 << 63) - 1
_MAX_NODE_ENTRIES = 1 << 20

# Guides writers that go on from our index, never readers. The value is the one Orbax sets.
_INLINE_BELOW_NBYTES = 1024
_MISSING = (1 << 64) - 1  # offset and length of the root of an empty database

# At least what an entry takes beside its key and inline value, so that a node never outgrows `max_node_nbytes`.
_LEAF_ENTRY_NBYTES = 32
_INTERIOR_ENTRY_NBYTES = 64


@dataclass(frozen=True, slots=True, order=True)
class DataFile:
    """A file as the index names it: ``base + path``, relative to the directory of the manifest.

    TensorStore's file driver refuses ``..``, a leading ``/``, empty parts and a ``.__lock`` suffix; so do we.
    """

    base: str
    """What the files named inside a node of this file are relative to, too. Empty, or a directory with its ``/``."""
    path: str
    """The rest of the name, such as ``d/`` and 32 hex digits."""

    def __post_init__(self) -> None:
        full = self.base + self.path
        if (
            any(part in ("", ".", "..") for part in full.split("/"))
            or full.endswith(".__lock")
            or "\0" in full
            or (self.base and not self.base.endswith("/"))
        ):
            raise ValueError(f"not a file name that OCDBT readers accept: base {self.base!r}, path {self.path!r}")
        if len(full.encode()) > _MAX_PATH_NBYTES:
            raise ValueError(f"file name of {len(full.encode())} bytes, more than {_MAX_PATH_NBYTES}: {full[:80]!r}...")


@dataclass(frozen=True, slots=True)
class Index:
    """A whole OCDBT database, but for the data files it names."""

    nodes: bytes
    """Content of the node file: all B+tree nodes, children first, the root last. Empty if there are no keys."""
    manifest: bytes
    """Content of ``manifest.ocdbt``: one version, generation 1."""


@dataclass(frozen=True, slots=True)
class IndexTemplate:
    """An index of which only the names are still open. Made by `index_template`; immutable, so threads may share it."""

    num_keys: int
    num_files: int
    """How many data files `render` needs: one more than the largest file number used."""
    max_node_nbytes: int
    arity_log2: int
    leaves: tuple[_Leaf, ...]
    interiors: tuple[tuple[_Interior, ...], ...]
    """The levels above the leaves, lowest first. The last level, of leaves if there is no other, has one node."""

    def render(self, files: Sequence[DataFile], node_file: DataFile | str, *, uuid: bytes, commit_ns: int) -> Index:
        """The index with its names filled in, the same bytes as if it were encoded afresh.

        ``files[i]`` is what values call file number ``i``. They are relative to ``node_file.base``, which is empty if
        ``node_file`` is a string. ``uuid`` (16 bytes) names the database and must be new for every content, because
        readers cache by it; ``commit_ns`` is the time of the commit in ns since the epoch.
        """
        node = DataFile("", node_file) if isinstance(node_file, str) else node_file
        if len(files) < self.num_files:
            raise ValueError(f"the index refers to {self.num_files} data files, but only {len(files)} were named")
        if len(uuid) != 16:
            raise ValueError(f"uuid has {len(uuid)} bytes, not 16")
        if not 0 <= commit_ns < 1 << 64:
            raise ValueError(f"commit_ns is not an unsigned 64-bit number: {commit_ns}")
        pieces: list[bytes] = []
        end = 0
        level: list[_Node] = []
        tables: dict[tuple[int, ...], tuple[bytes, _Ints]] = {}
        for leaf in self.leaves:
            if leaf.file_numbers not in tables:
                tables[leaf.file_numbers] = _file_table([files[number] for number in leaf.file_numbers])
            framed = _frame(_NODE_MAGIC, _leaf_body(leaf, *tables[leaf.file_numbers]))
            nbytes = sum(map(len, framed))
            level.append(_Node(end, nbytes, leaf.num_keys, nbytes, leaf.indirect_nbytes))
            pieces += framed
            end += nbytes
        own_table, _ = _file_table([DataFile("", node.path)])
        for height, interiors in enumerate(self.interiors, start=1):
            below, level = level, []
            for interior in interiors:
                children = below[interior.first_child : interior.first_child + interior.num_children]
                framed = _frame(_NODE_MAGIC, _interior_body(height, interior, children, own_table))
                nbytes = sum(map(len, framed))
                level.append(
                    _Node(
                        end,
                        nbytes,
                        sum(child.num_keys for child in children),
                        sum(child.tree_nbytes for child in children) + nbytes,
                        sum(child.indirect_nbytes for child in children),
                    )
                )
                pieces += framed
                end += nbytes
        config = [uuid, b"\0", _varint(_INLINE_BELOW_NBYTES, self.max_node_nbytes), bytes([self.arity_log2]), b"\0"]
        if level:
            root, root_table = level[0], _file_table([node])[0]
        else:
            root, root_table = _Node(_MISSING, _MISSING, 0, 0, 0), b"\1\0\0"
        version = [
            root_table,
            _varint(1, 1),  # one version, of generation 1
            bytes([len(self.interiors)]),
            _varint(0, root.offset, root.nbytes, root.num_keys, root.tree_nbytes, root.indirect_nbytes),
            struct.pack("<Q", commit_ns),
            b"\0",  # no version nodes
        ]
        return Index(b"".join(pieces), b"".join(_frame(_MANIFEST_MAGIC, config + version)))


def index_template(
    keys: Sequence[bytes], values: Sequence[Value], *, max_node_nbytes: int = 100_000_000, arity_log2: int = 4
) -> IndexTemplate:
    """A template in which ``keys[i]``, in any order, has the value ``values[i]``.

    ``max_node_nbytes`` bounds the entries of a node; a node that would hold more is split, but keeps at least one key
    or two children. It is also recorded, as ``arity_log2`` is, for TensorStore to go by when it writes on top.

    Raises `ValueError`, naming the key, for a key given twice and for what readers refuse: keys over 65,535 bytes,
    inline values over 1 MiB, and values that end past 2^63 - 1.
    """
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys, but {len(values)} values")
    if not 1 <= max_node_nbytes < 1 << 32:
        raise ValueError(f"max_node_nbytes is not in 1..2^32 - 1: {max_node_nbytes}")
    if not 1 <= arity_log2 <= 16:
        raise ValueError(f"arity_log2 is not in 1..16: {arity_log2}")
    order = sorted(range(len(keys)), key=keys.__getitem__)
    keys = [keys[i] for i in order]
    values = [values[i] for i in order]
    key_nbytes = np.fromiter(map(len, keys), np.int64, len(keys))
    if key_nbytes.max(initial=0) > _MAX_KEY_NBYTES:
        key = keys[int(np.argmax(key_nbytes > _MAX_KEY_NBYTES))]
        raise ValueError(f"key longer than {_MAX_KEY_NBYTES} bytes: {_shown(key)}")
    shared = _shared_prefixes(keys, key_nbytes)
    again = shared[1:] == key_nbytes[1:]  # in sorted order, only its own copy before it can begin with all of a key
    if again.any():
        raise ValueError(f"key given twice: {_shown(keys[int(np.argmax(again)) + 1])}")

    columns = _value_columns(keys, values)
    starts = _split(key_nbytes + columns.inline_nbytes + _LEAF_ENTRY_NBYTES, max_node_nbytes, 1)
    excluded = _excluded(starts, shared, key_nbytes)
    leaves = tuple(
        _leaf(keys[start:stop], key_nbytes[start:stop], shared[start:stop], skip, columns, start, stop)
        for start, stop, skip in _groups(starts, excluded, len(keys))
    )
    interiors: list[tuple[_Interior, ...]] = []
    while len(starts) > 1:
        # From here on an entry is a node of the level below. Its key is the first one under that node.
        keys = [keys[start] for start in starts.tolist()]
        key_nbytes = key_nbytes[starts]
        shared = np.concatenate(([0], np.minimum.reduceat(shared[: starts[-1] + 1], starts[:-1] + 1)))
        children_excluded = excluded
        starts = _split(key_nbytes + _INTERIOR_ENTRY_NBYTES, max_node_nbytes, 2)
        excluded = _excluded(starts, shared, children_excluded)
        interiors.append(
            tuple(
                _interior(keys[start:stop], key_nbytes[start:stop], shared[start:stop], skip, children_excluded, start)
                for start, stop, skip in _groups(starts, excluded, len(keys))
            )
        )
    return IndexTemplate(len(order), columns.num_files, max_node_nbytes, arity_log2, leaves, tuple(interiors))


def _shared_prefixes(keys: Sequence[bytes], key_nbytes: _Ints) -> _Ints:
    """How many bytes each key shares with the key before it; 0 for the first.

    Eight bytes at a time, each time only for the pairs that have been equal so far.
    """
    shared = np.zeros(len(keys), np.int64)
    if len(keys) < 2:
        return shared
    joined = np.frombuffer(b"".join(keys) + bytes(8), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(joined, 8)
    at = np.cumsum(key_nbytes) - key_nbytes
    shorter = np.minimum(key_nbytes[:-1], key_nbytes[1:])
    pairs = np.arange(len(keys) - 1)
    done = 0
    shared[1:] = shorter
    while len(pairs):
        left = windows[at[pairs] + done].view(np.uint64)
        right = windows[at[pairs + 1] + done].view(np.uint64)
        different = left ^ right
        differ = different[:, 0] != 0
        first = np.argmax(different[differ].view(np.uint8) != 0, axis=1)
        decided = pairs[differ]
        shared[decided + 1] = np.minimum(done + first, shorter[decided])
        done += 8
        pairs = pairs[~differ]
        pairs = pairs[shorter[pairs] > done]
    return shared


@dataclass(frozen=True, slots=True, eq=False)
class _ValueColumns:
    """The values in key order."""

    nbytes: _Ints
    inline_nbytes: _Ints
    """The same, but 0 where the value is not inline."""
    indirect: npt.NDArray[np.bool_]
    indirect_before: _Ints
    """How many of the first i values are indirect, for i in 0..n."""
    inline: Sequence[bytes]
    file_numbers: _Ints
    offsets: _Ints
    num_files: int


def _value_columns(keys: Sequence[bytes], values: Sequence[Value]) -> _ValueColumns:
    inline = [value for value in values if not isinstance(value, tuple)]
    ranges = [value for value in values if isinstance(value, tuple)]
    indirect = np.fromiter((isinstance(value, tuple) for value in values), np.bool_, len(values))
    try:
        numbers = np.fromiter(chain.from_iterable(ranges), np.int64, 3 * len(ranges)).reshape(-1, 3)
    except OverflowError:
        raise _out_of_range(keys, values) from None
    file_numbers, offsets, lengths = np.ascontiguousarray(numbers.T)
    if (numbers < 0).any() or (offsets > _MAX_END - lengths).any():
        raise _out_of_range(keys, values)
    nbytes = np.zeros(len(values), np.int64)
    nbytes[~indirect] = np.fromiter(map(len, inline), np.int64, len(inline))
    inline_nbytes = nbytes.copy()
    nbytes[indirect] = lengths
    if inline_nbytes.max(initial=0) > _MAX_INLINE_NBYTES:
        raise ValueError(
            f"inline value longer than {_MAX_INLINE_NBYTES} bytes: key {_shown(keys[int(np.argmax(inline_nbytes))])}"
        )
    before = np.concatenate(([0], np.cumsum(indirect, dtype=np.int64)))
    num_files = int(file_numbers.max(initial=-1)) + 1
    return _ValueColumns(nbytes, inline_nbytes, indirect, before, inline, file_numbers, offsets, num_files)


def _out_of_range(keys: Sequence[bytes], values: Sequence[Value]) -> ValueError:
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, tuple) and (min(value) < 0 or value[0] > _MAX_END or value[1] + value[2] > _MAX_END):
            return ValueError(f"no such place in a file: {value} of key {_shown(key)}")
    raise AssertionError("all values are in range")


def _shown(key: bytes) -> str:
    return repr(key) if len(key) <= 200 else f"{key[:100]!r}... ({len(key)} bytes)"


def _split(entry_nbytes: _Ints, max_nbytes: int, min_entries: int) -> _Ints:
    """Where each node begins if every node takes as many entries as fit, and at least ``min_entries`` of them."""
    ends = np.cumsum(entry_nbytes)
    starts: list[int] = []
    start, before = 0, 0
    while start < len(ends):
        starts.append(start)
        stop = max(int(np.searchsorted(ends, before + max_nbytes, side="right")), start + min_entries)
        start = min(stop, start + _MAX_NODE_ENTRIES, len(ends))
        before = int(ends[start - 1])
    return np.array(starts, np.int64)


def _excluded(starts: _Ints, shared: _Ints, limits: _Ints) -> _Ints:
    """The length of the prefix that each node leaves out of all its keys: none in the root.

    Elsewhere it is what its first and last key share, but no more than an entry's limit: its own length in a leaf, what
    the child leaves out in an interior node.
    """
    if len(starts) < 2:
        return np.zeros(len(starts), np.int64)
    bounds = np.minimum(shared, limits)
    bounds[starts] = limits[starts]
    excluded: _Ints = np.minimum.reduceat(bounds, starts)
    return excluded


def _groups(starts: _Ints, excluded: _Ints, num_entries: int) -> Iterator[tuple[int, int, int]]:
    """The first entry of each node, the one past its last, and what it leaves out."""
    for (start, stop), skip in zip(pairwise([*starts.tolist(), num_entries]), excluded.tolist(), strict=True):
        yield start, stop, skip


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """A leaf but for its file table and the column of indices into it."""

    num_keys: int
    indirect_nbytes: int
    head: bytes
    file_numbers: tuple[int, ...]
    """The data files it refers to, each once."""
    files: _Ints
    """For each indirect value, which one of ``file_numbers``. Empty if all are in one file."""
    num_indirect: int
    tail: bytes


def _leaf(
    keys: Sequence[bytes],
    key_nbytes: _Ints,
    shared: _Ints,
    excluded: int,
    columns: _ValueColumns,
    start: int,
    stop: int,
) -> _Leaf:
    prefixes, suffixes = _key_columns(keys, key_nbytes, shared, excluded)
    first, last = columns.indirect_before[[start, stop]].tolist()
    indirect = columns.indirect[start:stop]
    nbytes = columns.nbytes[start:stop]
    file_numbers, files = np.unique(columns.file_numbers[first:last], return_inverse=True)
    if len(file_numbers) < 2:
        files = np.empty(0, np.int64)
    return _Leaf(
        num_keys=len(keys),
        indirect_nbytes=sum(nbytes[indirect].tolist()),  # exact: 64 bits may not hold it
        head=b"".join((_varint(len(keys)), prefixes, suffixes, _varints(nbytes), indirect.tobytes())),
        file_numbers=tuple(file_numbers.tolist()),
        files=files,
        num_indirect=last - first,
        tail=_varints(columns.offsets[first:last]) + b"".join(columns.inline[start - first : stop - last]),
    )


def _leaf_body(leaf: _Leaf, table: bytes, ranks: _Ints) -> list[bytes]:
    files = _varints(ranks[leaf.files]) if len(leaf.files) else bytes(leaf.num_indirect)
    return [b"\0", table, leaf.head, files, leaf.tail]


@dataclass(frozen=True, slots=True)
class _Interior:
    """An interior node but for its file table and where its children are."""

    first_child: int
    num_children: int
    head: bytes


def _interior(
    keys: Sequence[bytes],
    key_nbytes: _Ints,
    shared: _Ints,
    excluded: int,
    children_excluded: _Ints,
    start: int,
) -> _Interior:
    lengths, suffixes = _key_columns(keys, key_nbytes, shared, excluded)
    subtree = _varints(children_excluded[start : start + len(keys)] - excluded)
    return _Interior(start, len(keys), b"".join((_varint(len(keys)), lengths, subtree, suffixes)))


@dataclass(frozen=True, slots=True)
class _Node:
    """Where a node lies in the node file, and the statistics that its parent keeps of it."""

    offset: int
    nbytes: int
    num_keys: int
    tree_nbytes: int
    indirect_nbytes: int


def _interior_body(height: int, interior: _Interior, children: Sequence[_Node], table: bytes) -> list[bytes]:
    return [
        bytes([height]),
        table,
        interior.head,
        bytes(len(children)),  # all in the only file of the table
        _varint(*(child.offset for child in children)),
        _varint(*(child.nbytes for child in children)),
        _varint(*(child.num_keys for child in children)),
        _varint(*(child.tree_nbytes for child in children)),
        _varint(*(child.indirect_nbytes for child in children)),
    ]


def _key_columns(keys: Sequence[bytes], key_nbytes: _Ints, shared: _Ints, excluded: int) -> tuple[bytes, bytes]:
    """The columns of prefix and suffix lengths, and the suffixes."""
    cuts = shared.copy()
    cuts[0] = excluded
    suffixes = b"".join([key[cut:] for key, cut in zip(keys, cuts.tolist(), strict=True)])
    return _varints(cuts[1:] - excluded) + _varints(key_nbytes - cuts), suffixes


def _file_table(files: Sequence[DataFile]) -> tuple[bytes, _Ints]:
    """The table, sorted and each file once, and where in it each of ``files`` is."""
    table = sorted(set(files))  # code points sort as their UTF-8 bytes do
    places = {file: place for place, file in enumerate(table)}
    ranks = np.array([places[file] for file in files], np.int64)
    bases = [file.base.encode() for file in table]
    names = [base + file.path.encode() for base, file in zip(bases, table, strict=True)]
    prefixes = [0] * len(table)
    for i in range(1, len(table)):
        shorter = min(len(names[i]), len(names[i - 1]))
        if bases[i] != bases[i - 1]:
            shorter = min(len(bases[i]), len(bases[i - 1]))  # it may run past the base only if the bases are equal
        prefixes[i] = next((at for at in range(shorter) if names[i][at] != names[i - 1][at]), shorter)
    suffixes = [name[prefix:] for name, prefix in zip(names, prefixes, strict=True)]
    lengths = _varint(len(table), *prefixes[1:], *map(len, suffixes), *map(len, bases))
    return lengths + b"".join(suffixes), ranks


def _frame(magic: int, body: Sequence[bytes]) -> list[bytes]:
    """The pieces of a framed object: raw, as its header says."""
    nbytes = sum(map(len, body)) + _FRAME_NBYTES
    pieces = [struct.pack(">I", magic), struct.pack("<Q", nbytes), b"\0\0", *body]
    checksum = 0
    for piece in pieces:
        checksum = crc32c(piece, checksum)
    return [*pieces, struct.pack("<I", checksum)]


def _varint(*values: int) -> bytes:
    out = bytearray()
    for value in values:
        rest = value
        while rest > 0x7F:
            out.append(rest & 0x7F | 0x80)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def _varints(values: _Ints) -> bytes:
    """The same for a whole column, none of it negative."""
    largest = int(values.max(initial=0))
    if largest < 0x80:
        return values.astype(np.uint8).tobytes()
    groups = np.arange(0, largest.bit_length(), 7)
    rest = values[:, np.newaxis] >> groups  # row: a value; column j: what is left of it from its group j on
    octets = (rest & 0x7F | (rest > 0x7F) << 7).astype(np.uint8)
    kept = rest > 0
    kept[:, 0] = True
    return octets[kept].tobytes()
