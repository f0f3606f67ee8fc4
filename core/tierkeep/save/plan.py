"""Plan: from the structure of a state to where every byte will lie. Pure, and cached while the structure stays.

A plan holds no content and no memory address. Its key is the whole structure (every name, kind, dtype, shape, box,
replica, tie and option), compared for equality, so a changed leaf can never meet a stale plan. A plan is plain data: it
can be handed to another process, which makes the index of it for itself.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import InvalidStateError, NameCollisionError
from ..format import dtypes, orbax_metadata, zarr
from ..format.ocdbt import IndexTemplate, index_template
from ..leaf import Box, LeafSpec
from ..options import PAGE, SaveOptions
from ..tree import Tree, Value, join, walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..adapter import Snapshot
    from ..leaf import Leaf

__all__ = [
    "Batch",
    "Extent",
    "LeafPlan",
    "PlanCache",
    "SavePlan",
    "chunk_shape",
    "decode_plan",
    "encode_plan",
    "leaf_names",
    "plan_save",
    "ties",
]

_CRC_NBYTES = 4
_MAX_RANK = 32  # TensorStore's
_SMALL_STEP = 64  # bytes; chunks below a page are packed at this step


class Extent(NamedTuple):
    """One chunk's place in the image."""

    leaf: int
    """Number of the leaf that owns the bytes (never a tied one)."""
    number: int
    """Place of the chunk in the leaf's grid, in C order."""
    offset: int
    """Where the chunk begins in the image, bytes."""
    nbytes: int
    """Bytes of the chunk without the 4 of its checksum that follow."""
    shard: int
    """Which of the leaf's shards holds it."""
    part: Box
    """What of the shard it holds; smaller than the chunk at the array's far edges."""


class Batch(NamedTuple):
    """A page-aligned run of the image, written as one."""

    offset: int
    nbytes: int
    first: int
    """Extents `first` to `last` (exclusive) lie in it."""
    last: int


class LeafPlan(NamedTuple):
    """How one leaf is stored."""

    name: str
    spec: LeafSpec
    chunk: tuple[int, ...]
    """Shape of a chunk."""
    grid: tuple[int, ...]
    """Chunks on each axis."""
    tie: int | None
    """The leaf whose bytes these are."""


class SavePlan(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """Everything about a save that does not depend on content."""

    leaves: tuple[LeafPlan, ...]
    extents: tuple[Extent, ...]
    """In image order."""
    aliases: tuple[tuple[int, int, int], ...]
    """(leaf, grid number, extent): chunks that are the same memory as an extent of another leaf."""
    batches: tuple[Batch, ...]
    image_nbytes: int
    """A multiple of PAGE; 0 if there is nothing to store."""
    nbytes: int
    """Bytes of the leaves themselves, ties counted once."""
    block_nbytes: int
    """Bytes between two recorded running checksums."""
    declare_crc: bool
    """Whether the zarr metadata names the checksum's codec."""
    orbax: tuple[tuple[str, bytes], ...]
    """Orbax's own files that say nothing of content: path below the item, and bytes."""
    strings: tuple[tuple[str, int], ...]
    """Names and numbers of the plain values that Orbax sees as strings."""
    layout: bytes
    """The part record's static columns, as JSON."""
    structure: bytes
    """The whole record's tree and leaves, as JSON."""
    digest: str
    """Of `structure`: the parts of one checkpoint agree on it."""

    @cached_property
    def index(self) -> IndexTemplate:
        """The OCDBT index but for its names; kept once it is made."""
        aliases = [(leaf, number, self.extents[extent].offset) for leaf, number, extent in self.aliases]
        return _index(self.leaves, [[*(extent[:3] for extent in self.extents), *aliases]], self.declare_crc)

    def with_custom_metadata(self, value: Any) -> SavePlan:
        """The same with what Orbax shows as an item's custom metadata."""
        orbax = dict(self.orbax)
        orbax[orbax_metadata.METADATA] = orbax_metadata.with_custom(orbax[orbax_metadata.METADATA], value)
        plan = msgspec.structs.replace(self, orbax=tuple(orbax.items()))
        plan.__dict__["index"] = self.index
        return plan

    def merged_index(self, layouts: Sequence[Mapping[str, Sequence[int]]]) -> IndexTemplate:
        """The index over all parts of a checkpoint, whose layouts these are; part n's image is data file n."""
        parts = [list(zip(raw["leaf"], raw["number"], raw["offset"], strict=True)) for raw in layouts]
        return _index(self.leaves, parts, self.declare_crc)


def encode_plan(plan: SavePlan) -> bytes:
    return msgspec.msgpack.encode(plan)


def decode_plan(data: bytes) -> SavePlan:
    """Raises ValueError for what is no plan."""
    return msgspec.msgpack.decode(data, type=SavePlan)


class PlanCache:
    """The plans of the last few structures one checkpointer saved."""

    def __init__(self, most: int = 4) -> None:
        self._plans: OrderedDict[Any, SavePlan] = OrderedDict()
        self._most = most
        self.misses = 0

    def plan(self, snapshot: Snapshot, options: SaveOptions, *, partial: bool = False) -> SavePlan:
        """The plan for a snapshot of this structure, made if there is none yet. `partial` as in `plan_save`."""
        key = (_structure_key(snapshot), options, partial)
        found = self._plans.get(key)
        if found is None:
            self.misses += 1
            found = plan_save(snapshot, options, partial=partial)
            self._plans[key] = found
            if len(self._plans) > self._most:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found


def _structure_key(snapshot: Snapshot) -> bytes:
    """The whole structure, encoded: two structures have the same bytes only if nothing differs.

    Bytes, because 10,000 leaves compare in 0.2 ms so, and in 10 ms as tuples of tuples.
    """
    leaves = [
        (
            leaf.kind,
            leaf.dtype,
            leaf.shape,
            leaf.ext,
            leaf.sharding,
            [(s.box, s.replica) for s in leaf.shards],
            leaf.boxes,
        )
        for leaf in snapshot.leaves
    ]
    return msgspec.msgpack.encode((snapshot.tree, leaves, ties(snapshot)))


def ties(snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
    """(later leaf, first leaf) for every leaf that is the same memory as an earlier one."""
    first: dict[Any, int] = {}
    ties = []
    for number, leaf in enumerate(snapshot.leaves):
        if leaf.tie is not None:
            owner = first.setdefault(leaf.tie, number)
            if owner != number:
                ties.append((number, owner))
    return tuple(ties)


def plan_save(snapshot: Snapshot, options: SaveOptions, *, partial: bool = False) -> SavePlan:
    """Lays out every leaf. Raises InvalidStateError for names that collide and shards that do not tile their array.

    With `partial` this process is one of several, which hold the rest: then it lays out what it holds, on the grid that
    follows from the boxes of all. What is tied here may not be so for the others, so ties are aliases then.
    """
    names, value_names = leaf_names(snapshot.tree)
    tied = dict(ties(snapshot))
    leaves: list[LeafPlan] = []
    chunks: list[tuple[int, int, int, int, Box]] = []  # leaf, number, nbytes, shard, part
    shared: list[tuple[int, int, int]] = []  # leaf, number, the leaf whose memory it is
    nbytes = 0
    for number, leaf in enumerate(snapshot.leaves):
        itemsize = dtypes.lookup(leaf.dtype).itemsize
        owner = None if partial else tied.get(number)
        if len(leaf.shape) > _MAX_RANK:
            raise InvalidStateError(
                f"leaf {names[number]!r} has {len(leaf.shape)} axes; stock readers take {_MAX_RANK}: reshape it. "
                "Nothing was written."
            )
        if owner is not None:
            if leaves[owner].spec[1:3] != leaf.spec[1:3]:
                raise InvalidStateError(
                    f"leaf {names[number]!r} is tied to {names[owner]!r}, but of another dtype or shape. Nothing was written."
                )
            chunk, grid = leaves[owner].chunk, leaves[owner].grid
        else:
            boxes = [*(shard.box for shard in leaf.shards), *(leaf.boxes or ())]
            _check_within(names[number], leaf.shape, boxes)
            chunk = chunk_shape(leaf.shape, boxes, itemsize, options.chunk_nbytes)
            grid = tuple(-(-n // c) for n, c in zip(leaf.shape, chunk, strict=True))
            size = math.prod(chunk) * itemsize
            nbytes += (
                sum(shard.box.size for shard in leaf.shards) * itemsize if partial else math.prod(leaf.shape) * itemsize
            )
            first = tied.get(number) if partial else None
            if first is not None and _alike(snapshot.leaves[first], leaf) and leaves[first].chunk == chunk:
                covered = _cover(names[number], leaf.shape, chunk, grid, leaf.shards, partial)
                shared += [(number, place, first) for place, _, _ in covered]
                leaves.append(LeafPlan(names[number], leaf.spec, chunk, grid, None))
                continue
            for place, shard, part in _cover(names[number], leaf.shape, chunk, grid, leaf.shards, partial):
                chunks.append((number, place, size, shard, part))
        leaves.append(LeafPlan(names[number], leaf.spec, chunk, grid, owner))

    extents, batches, image_nbytes = _lay_out(chunks, options.lane_nbytes)
    at = {(extent.leaf, extent.number): n for n, extent in enumerate(extents)}
    aliases = tuple((number, place, at[owner, place]) for number, place, owner in shared)
    structure = _json({
        "tree": snapshot.tree,
        "leaves": [
            (leaf.name, *leaf.spec, leaf.chunk, leaf.tie)
            for leaf in leaves
        ],
    })  # fmt: skip
    layout = _json({
        "block_nbytes": options.block_nbytes,
        "leaf": [*(extent.leaf for extent in extents), *(leaf for leaf, _, _ in aliases)],
        "number": [*(extent.number for extent in extents), *(number for _, number, _ in aliases)],
        "offset": [*(extent.offset for extent in extents), *(extents[n].offset for _, _, n in aliases)],
    })  # fmt: skip
    digest = hashlib.blake2b(structure, digest_size=16).hexdigest()
    plan = SavePlan(
        leaves=tuple(leaves),
        extents=tuple(extents),
        aliases=aliases,
        batches=tuple(batches),
        image_nbytes=image_nbytes,
        nbytes=nbytes,
        block_nbytes=options.block_nbytes,
        declare_crc=options.declare_crc,
        orbax=_orbax_files(snapshot, names, [leaf.chunk for leaf in leaves]),
        strings=tuple((name, number) for number, name in sorted(value_names.items())),
        layout=layout,
        structure=structure,
        digest=digest,
    )
    try:
        plan.index  # noqa: B018  made now, so that what it refuses is told before anything is written
    except ValueError as error:
        raise InvalidStateError(f"the leaves' names cannot be indexed: {error}. Nothing was written.") from error
    return plan


def _alike(one: Leaf, other: Leaf) -> bool:
    return one.spec[1:3] == other.spec[1:3] and [s.box for s in one.shards] == [s.box for s in other.shards]


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def leaf_names(tree: Tree) -> tuple[dict[int, str], dict[int, str]]:
    """Storage names of array leaves and of plain values, by number. No two leaves share one."""
    seen: dict[str, tuple[str, ...]] = {}
    leaves: dict[int, str] = {}
    values: dict[int, str] = {}
    for path, _, node in walk(tree):
        name = join(path)
        stored = name.removesuffix("/")  # TensorStore takes 'a' and 'a/' for one path
        if stored in seen:
            raise NameCollisionError(name, str(seen[stored]), str(path))
        seen[stored] = path
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise InvalidStateError(f"key {name!r} has no UTF-8 form: {error}") from error
        if type(node) is int:
            leaves[node] = name
        elif isinstance(node, Value):
            values[node.number] = name
    return leaves, values


def chunk_shape(shape: Sequence[int], boxes: Iterable[Box], itemsize: int, target: int) -> tuple[int, ...]:
    """The chunk of a regular grid whose every shard boundary is a chunk boundary, of about `target` bytes.

    Leading axes are split first, so that a chunk is one run of the shard's C order where possible. An axis that no
    shard splits takes any length, evened out so that the padding of the last chunk is small. An axis that shards split
    takes a divisor of every boundary, the nearest in ratio to what is wanted: a chunk can be larger than `target`.
    """
    units = _units(shape, boxes)
    chunk = [max(1, unit or n) for unit, n in zip(units, shape, strict=True)]
    for axis in range(len(chunk)):
        inner = math.prod(chunk[axis + 1 :]) * itemsize
        if inner * chunk[axis] <= target:
            break
        wanted = max(1, target // inner)
        if units[axis] is None:
            n = chunk[axis]
            chunk[axis] = -(-n // -(-n // wanted))
        else:
            chunk[axis] = _nearest_divisor(chunk[axis], wanted)
    return tuple(chunk)


def _units(shape: Sequence[int], boxes: Iterable[Box]) -> list[int | None]:
    """For each axis the greatest length that divides every inner shard boundary; None if there is no inner boundary."""
    units: list[int | None] = [None] * len(shape)
    for box in boxes:
        for axis, (start, length, n) in enumerate(zip(box.start, box.shape, shape, strict=True)):
            for edge in (start, start + length):
                if 0 < edge < n:
                    units[axis] = math.gcd(units[axis] or 0, edge)
    return units


def _check_within(name: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    for box in boxes:
        if len(box.start) != len(shape) or any(
            a < 0 or m < 0 or a + m > n for a, m, n in zip(box.start, box.shape, shape, strict=True)
        ):
            raise InvalidStateError(f"leaf {name!r}: shard {box} is not within {tuple(shape)}. Nothing was written.")


def _nearest_divisor(n: int, wanted: int) -> int:
    best = n
    for low in range(1, math.isqrt(n) + 1):
        if n % low == 0:
            for divisor in (low, n // low):
                ratio = max(divisor, wanted) / min(divisor, wanted)
                if ratio < max(best, wanted) / min(best, wanted):
                    best = divisor
    return best


def _cover(
    name: str,
    shape: Sequence[int],
    chunk: Sequence[int],
    grid: Sequence[int],
    shards: Sequence[Any],
    partial: bool,
) -> list[tuple[int, int, Box]]:
    """(grid number, shard, part of the shard) of every chunk, each exactly once. Raises InvalidStateError."""
    if 0 in shape:
        return []
    chosen: dict[Box, int] = {}
    for number, shard in enumerate(shards):
        known = chosen.get(shard.box)
        if known is None or shard.replica < shards[known].replica:
            chosen[shard.box] = number
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    found: dict[int, tuple[int, Box]] = {}
    for box, number in chosen.items():
        for place, part in _chunks_of(box, chunk, strides):
            if place in found:
                raise InvalidStateError(
                    f"leaf {name!r}: shards {shards[found[place][0]].box} and {box} overlap. Nothing was written."
                )
            found[place] = (number, part)
    if not partial and len(found) != math.prod(grid):
        missing = next(place for place in range(math.prod(grid)) if place not in found)
        start = tuple(missing // s % g * c for s, g, c in zip(strides, grid, chunk, strict=True))
        raise InvalidStateError(
            f"leaf {name!r}: no shard holds the part from {start} of {tuple(shape)}. Nothing was written."
        )
    return [(place, *found[place]) for place in sorted(found)]


def _chunks_of(box: Box, chunk: Sequence[int], strides: Sequence[int]) -> list[tuple[int, Box]]:
    places: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(0, (), ())]
    for start, length, step, stride in zip(box.start, box.shape, chunk, strides, strict=True):
        places = [
            (place + (start + at) // step * stride, (*begin, at), (*size, min(step, length - at)))
            for place, begin, size in places
            for at in range(0, length, step)
        ]
    return [(place, Box(begin, size)) for place, begin, size in places]


def _lay_out(
    chunks: Sequence[tuple[int, int, int, int, Box]], lane_nbytes: int
) -> tuple[list[Extent], list[Batch], int]:
    """Places chunks of a page or more at pages, in order, then packs the small ones; cuts the image into batches."""
    extents: list[Extent] = []
    batches: list[Batch] = []
    begin, first, cursor = 0, 0, 0
    ordered = [c for c in chunks if c[2] >= PAGE] + [c for c in chunks if c[2] < PAGE]
    for leaf, number, nbytes, shard, part in ordered:
        step = PAGE if nbytes >= PAGE else _SMALL_STEP
        offset = _round_up(cursor, step)
        end = offset + nbytes + _CRC_NBYTES
        if _round_up(end, PAGE) - begin > lane_nbytes and len(extents) > first:
            offset = _round_up(cursor, PAGE)
            end = offset + nbytes + _CRC_NBYTES
            batches.append(Batch(begin, offset - begin, first, len(extents)))
            begin, first = offset, len(extents)
        extents.append(Extent(leaf, number, offset, nbytes, shard, part))
        cursor = end
    image_nbytes = _round_up(cursor, PAGE)
    if len(extents) > first:
        batches.append(Batch(begin, image_nbytes - begin, first, len(extents)))
    return extents, batches, image_nbytes


def _orbax_files(
    snapshot: Snapshot, names: dict[int, str], chunks: Sequence[Sequence[int]]
) -> tuple[tuple[str, bytes], ...]:
    files = {
        orbax_metadata.METADATA: orbax_metadata.metadata(snapshot.tree, snapshot.leaves),
        orbax_metadata.SHARDING: orbax_metadata.shardings(names, snapshot.leaves),
        f"{orbax_metadata.ARRAY_METADATAS}/process_0": orbax_metadata.array_metadatas(names, snapshot.leaves, chunks),
    }
    return tuple((name, data) for name, data in files.items() if data is not None)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _index(
    leaves: Sequence[LeafPlan], parts: Sequence[Sequence[tuple[int, int, int]]], declare_crc: bool
) -> IndexTemplate:
    """The index over every leaf: its zarr metadata inline, its chunks, `(leaf, number, offset)`, in their part's file."""
    keys: list[bytes] = []
    values: list[bytes | tuple[int, int, int]] = []
    tail = _CRC_NBYTES if declare_crc else 0
    of_leaf: dict[int, list[tuple[int, int, int]]] = {}
    for file, part in enumerate(parts):
        for leaf_number, number, offset in part:
            of_leaf.setdefault(leaf_number, []).append((file, number, offset))
    documents: dict[Any, bytes] = {}
    for number, leaf in enumerate(leaves):
        what = (leaf.spec.dtype, leaf.spec.shape, leaf.chunk)
        document = documents.get(what)
        if document is None:
            document = documents[what] = zarr.metadata(leaf.spec.dtype, leaf.spec.shape, leaf.chunk, declare_crc)
        prefix = zarr.key_prefix(leaf.name)
        keys.append(prefix + zarr.METADATA_KEY)
        values.append(document)
        nbytes = math.prod(leaf.chunk) * dtypes.lookup(leaf.spec.dtype).itemsize + tail
        for file, place, offset in of_leaf.get(number if leaf.tie is None else leaf.tie, ()):
            keys.append(prefix + zarr.chunk_key(place, leaf.grid))
            values.append((file, offset, nbytes))
    return index_template(keys, values)
