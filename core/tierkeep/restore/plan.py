"""Plan: from boxes that are wanted to the byte ranges that hold them, each read once. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from ..leaf import Box
from ..options import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..format.part import LeafRecord, Part
    from .source import Contents

__all__ = ["Copy", "Read", "Segment", "least_lane", "plan_reads"]

_GAP_NBYTES = 64 * 1024  # two ranges this close are read as one: the gap costs less than another request


class Copy(NamedTuple):
    """One box that goes from a chunk to where it is wanted."""

    want: int
    """Number of the wanted box."""
    inside: Box
    """The box within the chunk."""
    at: Box
    """The same box within the wanted one."""


class Segment(NamedTuple):
    """A run of whole blocks of one chunk."""

    leaf: int
    number: int
    """The chunk's place in the leaf's grid."""
    offset: int
    """Where the run begins in the image."""
    nbytes: int
    first: int
    """Its first block."""
    blocks: int
    copies: tuple[Copy, ...]


class Read(NamedTuple):
    """One request: a page-aligned range of a part's image."""

    part: int
    offset: int
    nbytes: int
    segments: tuple[Segment, ...]


def least_lane(
    whole: Contents, parts: Sequence[Part], held_by: Sequence[dict[int, int]], wants: Sequence[tuple[int, Box]]
) -> int:
    """The least lane that holds what must be verified at once: two blocks, or the chunk if that is smaller."""
    block = max((part.block_nbytes for part in parts), default=0)
    largest = max((whole.leaves[leaf].chunk_nbytes for leaf, _ in wants), default=0)
    return -(-min(2 * block, largest) // PAGE) * PAGE + 2 * PAGE


def plan_reads(
    whole: Contents,
    parts: Sequence[Part],
    held_by: Sequence[dict[int, int]],
    wants: Sequence[tuple[int, Box]],
    lane_nbytes: int,
) -> list[Read]:
    """Covers every wanted `(leaf, box)` with reads of at most `lane_nbytes`, in file order.

    A byte wanted several times is read once, unless its chunk is larger than a lane. Leaves are owners, not ties.
    `lane_nbytes` is at least `least_lane`.
    """
    copies: dict[tuple[int, int], list[tuple[int, int, Copy]]] = {}
    for want, (leaf, box) in enumerate(wants):
        record = whole.leaves[leaf]
        if box.shape == record.chunk and not any(box.start) and record.chunk_nbytes <= lane_nbytes - 2 * PAGE:
            # The first chunk whole, the usual case of small leaves: the general way below comes to the same.
            blocks = -(-record.chunk_nbytes // parts[held_by[leaf][0]].block_nbytes)
            copies.setdefault((leaf, 0), []).append((0, blocks, Copy(want, box, box)))
            continue
        for number, origin in _chunks(record, box):
            found = Box(origin, record.chunk).intersect(box)
            if found is None:
                continue
            inside = found.shifted(origin)
            block = parts[held_by[leaf][number]].block_nbytes
            # A piece of `most` bytes touches at most two blocks more than it fills. A chunk that fits is not cut.
            most = max(lane_nbytes - 2 * block - 2 * PAGE, block)
            if record.chunk_nbytes <= lane_nbytes - 2 * PAGE:
                most = record.chunk_nbytes
            for piece in _bisect(inside, record, most):
                at = Box(tuple(o + s - b for o, s, b in zip(origin, piece.start, box.start, strict=True)), piece.shape)
                low, high = _span(piece, record)
                copies.setdefault((leaf, number), []).append((low // block, -(-high // block), Copy(want, piece, at)))
    segments: list[tuple[int, Segment]] = []
    for (leaf, number), found_copies in copies.items():
        part = held_by[leaf][number]
        segments += [
            (part, s) for s in _segments(leaf, number, whole.leaves[leaf], parts[part], found_copies, lane_nbytes)
        ]
    segments.sort(key=lambda item: (item[0], item[1].offset))
    return list(_merge(segments, lane_nbytes))


def _chunks(record: LeafRecord, box: Box) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(grid number, origin) of every chunk that meets `box`."""
    if 0 in box.shape:
        return
    ranges = [range(a // c, -(-(a + n) // c)) for a, n, c in zip(box.start, box.shape, record.chunk, strict=True)]
    for index in itertools.product(*ranges):
        number = 0
        for place, n in zip(index, record.grid, strict=True):
            number = number * n + place
        yield number, tuple(i * c for i, c in zip(index, record.chunk, strict=True))


def _span(inside: Box, record: LeafRecord) -> tuple[int, int]:
    """First and last byte (exclusive) of a box within its chunk."""
    low = high = 0
    for start, length, n in zip(inside.start, inside.shape, record.chunk, strict=True):
        low = low * n + start
        high = high * n + start + length - 1
    return low * record.itemsize, (high + 1) * record.itemsize


def _bisect(box: Box, record: LeafRecord, most: int) -> Iterator[Box]:
    """Halves a box along its first axes until each part spans at most `most` bytes of the chunk."""
    low, high = _span(box, record)
    axis = next((a for a, n in enumerate(box.shape) if n > 1), None)
    if high - low <= most or axis is None:
        yield box
        return
    half = box.shape[axis] // 2
    for start, length in ((0, half), (half, box.shape[axis] - half)):
        yield from _bisect(
            Box(
                (*box.start[:axis], box.start[axis] + start, *box.start[axis + 1 :]),
                (*box.shape[:axis], length, *box.shape[axis + 1 :]),
            ),
            record,
            most,
        )


def _segments(
    leaf: int, number: int, record: LeafRecord, part: Part, copies: list[tuple[int, int, Copy]], lane_nbytes: int
) -> Iterator[Segment]:
    """Joins the block ranges of one chunk that overlap or touch, as far as a lane can hold them."""
    offset, block = part.chunks[leaf, number].offset, part.block_nbytes
    most = lane_nbytes - 2 * PAGE
    copies.sort(key=lambda item: item[:2])
    group: list[Copy] = []
    first = last = -1
    for low, high, copy in copies:
        if group and (low > last or min(max(high, last) * block, record.chunk_nbytes) - first * block > most):
            yield _segment(leaf, number, record, offset, block, first, last, group)
            group = []
        if not group:
            first = last = low
        group.append(copy)
        last = max(last, high)
    yield _segment(leaf, number, record, offset, block, first, last, group)


def _segment(
    leaf: int, number: int, record: LeafRecord, offset: int, block: int, first: int, last: int, copies: list[Copy]
) -> Segment:
    begin, end = first * block, min(last * block, record.chunk_nbytes)
    return Segment(leaf, number, offset + begin, end - begin, first, last - first, tuple(copies))


def _merge(segments: list[tuple[int, Segment]], lane_nbytes: int) -> Iterator[Read]:
    group: list[Segment] = []
    part = begin = end = -1
    for of, segment in segments:
        low = segment.offset - segment.offset % PAGE
        high = -(-(segment.offset + segment.nbytes) // PAGE) * PAGE
        if group and (of != part or low > end + _GAP_NBYTES or high - begin > lane_nbytes):
            yield Read(part, begin, end - begin, tuple(group))
            group = []
        if not group:
            part, begin, end = of, low, high
        group.append(segment)
        end = max(end, high)
    if group:
        yield Read(part, begin, end - begin, tuple(group))
