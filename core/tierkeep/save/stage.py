"""Stage: copy the chunks of one batch, into a lane's buffer with their checksums, or into an image as they are.

The first is for a save that writes at once, the second for one that another process checksums and writes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from ..format import dtypes
from ..format.checksum import crc32c
from ..leaf import ArrayShard, Box, Leaf, c_order_pieces
from ..memory.stream import stream_pairs
from ..options import MIB, PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .plan import Batch, SavePlan

__all__ = ["checksum_batch", "stage_batch", "stage_image"]

# Copied and checksummed at once, so that the checksum finds the copy in the processor's cache. Shares of the raw limit,
# medians of 8 rounds (`python -m bench save --only limit,ours`): whole chunks at once 0.81; pieces of 512 KiB or 1 MiB
# 0.86; with 12 lanes in place of 8, which keeps enough writes under way while two lanes copy, 0.92.
_PIECE_NBYTES = MIB
_CRC = struct.Struct("<I")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def stage_batch(
    plan: SavePlan,
    batch: Batch,
    leaves: Sequence[Leaf],
    block_nbytes: int,
    buffer: Bytes,
    crcs: list[list[int]],
) -> Iterator[tuple[int, memoryview]]:
    """Copies and checksums the extents of `batch`; yields page-aligned runs of the image as (offset, data).

    A run's data is in `buffer`, and valid until the next one is asked for.

    `crcs[i]` gets the running crc32c of extent `i` at every `block_nbytes` and at its end: the last one is the
    chunk's own, which follows the chunk in the image. The bytes between chunks are zeros. A batch fits the buffer and
    is written at once, unless it is one chunk larger than that, which passes through in pieces.
    """
    view = buffer.data
    base, fill = batch.offset, 0
    for number in range(batch.first, batch.last):
        extent = plan.extents[number]
        start = extent.offset - base
        if start > fill:
            buffer[fill:start] = 0
        fill = start
        spec = plan.leaves[extent.leaf].spec
        itemsize = dtypes.lookup(spec.dtype).itemsize
        chunk = plan.leaves[extent.leaf].chunk
        shard = leaves[extent.leaf].shards[extent.shard]
        running: list[int] = []
        done = value = 0
        for piece in c_order_pieces(chunk, min(_PIECE_NBYTES, len(buffer) - 2 * PAGE) // itemsize):
            nbytes = piece.size * itemsize
            if fill + nbytes + PAGE > len(buffer):  # only ever within a chunk larger than the buffer
                whole = fill - fill % PAGE
                yield base, view[:whole]
                buffer[: fill - whole] = buffer[whole:fill]
                base, fill = base + whole, fill - whole
            data = buffer[fill : fill + nbytes]
            _copy(shard, extent.part, piece, data.view(dtypes.bits(itemsize)).reshape(piece.shape))
            done, value = _checksum(view[fill : fill + nbytes], done, value, block_nbytes, running)
            fill += nbytes
        if done % block_nbytes:
            running.append(value)
        crcs[number] = running
        _CRC.pack_into(view, fill, value)
        fill += _CRC.size
    end = batch.offset + batch.nbytes - base
    buffer[fill:end] = 0
    yield base, view[:end]


def stage_image(plan: SavePlan, batch: Batch, leaves: Sequence[Leaf], image: Bytes) -> None:
    """Copies the extents of `batch` to their places in `image`. The bytes between chunks are zeros.

    The four bytes of each checksum are zeros too, for `checksum_batch` to fill in.
    """
    fill, end = batch.offset, batch.offset + batch.nbytes
    zeros = False
    pairs = []
    views: dict[str, tuple[int, np.ndarray[Any, Any]]] = {}  # by dtype: its width, and the image as elements of it
    for extent in plan.extents[batch.first : batch.last]:
        leaf = plan.leaves[extent.leaf]
        view = views.get(leaf.spec.dtype)
        if view is None:
            itemsize = dtypes.lookup(leaf.spec.dtype).itemsize
            view = views[leaf.spec.dtype] = itemsize, image.view(dtypes.bits(itemsize))
        if not zeros:
            # The small ones come last: their gaps are one by one more work than all of their bytes at once.
            zeros = extent.nbytes < PAGE
            image[fill : end if zeros else extent.offset] = 0
        fill = extent.offset + extent.nbytes
        itemsize, elements = view
        data = elements[extent.offset // itemsize : fill // itemsize].reshape(leaf.chunk)
        shard = leaves[extent.leaf].shards[extent.shard]
        if extent.part.shape != leaf.chunk:
            _copy(shard, extent.part, Box.whole(leaf.chunk), data)
        elif type(shard) is ArrayShard:
            pairs.append((data, shard.part(extent.part)))
        else:
            shard.copy(extent.part, data)
    if not zeros:
        image[fill:end] = 0
    stream_pairs(pairs)  # nobody reads it here: what the worker reads later would be out of the cache by then


def checksum_batch(plan: SavePlan, batch: Batch, image: Bytes, crcs: list[list[int]]) -> None:
    """Checksums the extents of `batch` where they lie in `image`, each chunk's own behind it, as `stage_batch` does.

    Doing it again changes nothing.
    """
    view = image.data
    for number in range(batch.first, batch.last):
        extent = plan.extents[number]
        running: list[int] = []
        end = extent.offset + extent.nbytes
        done, value = _checksum(view[extent.offset : end], 0, 0, plan.block_nbytes, running)
        if done % plan.block_nbytes:
            running.append(value)
        crcs[number] = running
        _CRC.pack_into(view, end, value)


def _copy(shard: Any, part: Box, piece: Box, out: np.ndarray[Any, Any]) -> None:
    """Fills `out`, which is `piece` of the chunk, from `part` of the shard; zeros where the chunk overhangs the array."""
    if piece.shape == part.shape and not any(piece.start):
        shard.copy(part, out)
        return
    held = Box((0,) * len(part.shape), part.shape).intersect(piece)
    if held is None:
        out[...] = 0
        return
    if held.shape != piece.shape:
        out[...] = 0
    inside = held.shifted(piece.start)
    shard.copy(Box(tuple(map(sum, zip(held.start, part.start, strict=True))), held.shape), out[inside.slices()])


def _checksum(data: memoryview, done: int, value: int, block: int, running: list[int]) -> tuple[int, int]:
    at = 0
    while at < len(data):
        n = min(block - done % block, len(data) - at)
        value = crc32c(data[at : at + n], value)
        at += n
        done += n
        if done % block == 0:
            running.append(value)
    return done, value
