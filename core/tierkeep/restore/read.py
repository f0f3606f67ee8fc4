"""Read: lanes that read, verify and hand out byte ranges side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptCheckpointError
from ..format import dtypes
from ..format.checksum import crc32c
from ..leaf import Box, c_order_pieces
from ..memory.lanes import Turns, run_lanes
from ..options import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..adapter import Sink
    from ..memory.buffers import Buffers
    from .opened import Opened
    from .plan import Read, Segment

__all__ = ["execute_reads"]

_PIECE_NBYTES = 1 * MIB


def execute_reads(
    opened: Opened, reads: Sequence[Read], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
) -> None:
    """Fills every sink. Each block is verified before any byte of it is handed out.

    Raises CorruptCheckpointError listing every damaged chunk by leaf and file; what was handed out then is verified,
    and only what is damaged, and follows it in its chunk, is not. Also if an image that is read where it lies was taken
    away meanwhile: then what was handed out may be anything.
    """
    findings: list[str] = []
    turns = Turns()

    def job(lane: int, number: int) -> None:
        _read(opened, reads[number], sinks, buffers.lane(lane), turns, findings)

    run_lanes(min(lanes, buffers.count), range(len(reads)), job)
    for image in opened.images:
        if image is None:
            continue
        try:
            image.check()
        except FileNotFoundError as error:
            findings = [f"{image.path} was taken away while it was read"]
            raise CorruptCheckpointError(str(opened.path), findings, holds) from error
    if findings:
        raise CorruptCheckpointError(str(opened.path), sorted(findings), holds)


def _read(
    opened: Opened,
    read: Read,
    sinks: Sequence[Sink],
    buffer: np.ndarray[Any, np.dtype[np.uint8]],
    turns: Turns,
    findings: list[str],
) -> None:
    image = opened.images[read.part]
    assert image is not None  # a part without an image holds no chunk, so none is planned from it
    if image.mapped is not None:
        buffer, base, end = image.mapped, 0, image.nbytes
    else:
        base, end = read.offset, read.offset + image.read(read.offset, buffer.data[: read.nbytes])
    for segment in read.segments:
        start = segment.offset - base
        if segment.offset + segment.nbytes > end:
            name = opened.whole.leaves[segment.leaf].name
            findings.append(f"leaf {name!r}: {image.path} ends at byte {end}")
            continue
        with turns:
            damaged = _verify_and_place(opened, read.part, segment, buffer, start, sinks)
        if damaged is not None:
            findings.append(
                f"leaf {opened.whole.leaves[segment.leaf].name!r}, chunk {segment.number}: {image.path} does not match "
                f"its checksum in the block at byte {segment.offset + damaged}"
            )


def _verify_and_place(
    opened: Opened, part: int, segment: Segment, buffer: np.ndarray[Any, Any], start: int, sinks: Sequence[Sink]
) -> int | None:
    """Hands a segment, which begins at `start` of the buffer, to its sinks, every block verified before a byte of it.

    Returns where in the segment the first block that does not verify begins, None if all do.
    """
    block = opened.parts[part].block_nbytes
    record = opened.whole.leaves[segment.leaf]
    crcs = opened.parts[part].chunks[segment.leaf, segment.number].crcs
    itemsize = record.itemsize
    dtype = dtypes.bits(itemsize)
    strides = tuple(math.prod(record.chunk[axis + 1 :]) * itemsize for axis in range(len(record.chunk)))
    origin = start - segment.first * block  # of the chunk, in the buffer
    end = start + segment.nbytes
    view = buffer.data
    number = segment.first
    value = crcs[number - 1] if crcs and number else 0
    verified = start if crcs else end  # how far in the buffer
    for copy in segment.copies:
        # By pieces, so that a copy finds what the checksum read still in the processor's cache.
        for piece in c_order_pieces(copy.inside.shape, _PIECE_NBYTES // itemsize):
            first = last = origin
            for begin, offset, length, stride in zip(copy.inside.start, piece.start, piece.shape, strides, strict=True):
                first += (begin + offset) * stride
                last += (begin + offset + length - 1) * stride
            while verified < last + itemsize:
                value = crc32c(view[verified : min(verified + block, end)], value)
                if value != crcs[number]:
                    return verified - start
                number += 1
                verified += block
            data = np.ndarray(piece.shape, dtype, buffer, first, strides)
            at = copy.at
            if piece.shape != at.shape:
                at = Box(tuple(a + b for a, b in zip(at.start, piece.start, strict=True)), piece.shape)
            sinks[copy.want](at, data)
    return None
