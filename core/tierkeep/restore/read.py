"""Read: lanes that read, verify and hand out byte ranges side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptCheckpointError
from ..format import dtypes
from ..format.checksum import crc32c
from ..save.write import run_lanes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..adapter import Sink
    from ..memory.buffers import Buffers
    from .opened import Opened
    from .plan import Read, Segment

__all__ = ["execute_reads"]


def execute_reads(
    opened: Opened, reads: Sequence[Read], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
) -> None:
    """Fills every sink. Each block is verified before any byte of it is handed out.

    Raises CorruptCheckpointError listing every damaged chunk by leaf and file; sinks of whole chunks are filled then,
    those of damaged ones are not.
    """
    findings: list[str] = []

    def job(lane: int, number: int) -> None:
        _read(opened, reads[number], sinks, buffers.lane(lane), findings)

    run_lanes(min(lanes, buffers.count), range(len(reads)), job)
    if findings:
        raise CorruptCheckpointError(str(opened.path), sorted(findings), holds)


def _read(
    opened: Opened, read: Read, sinks: Sequence[Sink], buffer: np.ndarray[Any, np.dtype[np.uint8]], findings: list[str]
) -> None:
    image = opened.images[read.part]
    assert image is not None  # a part without an image holds no chunk, so none is planned from it
    view = buffer.data[: read.nbytes]
    got = image.read(read.offset, view)
    for segment in read.segments:
        start = segment.offset - read.offset
        record = opened.whole.leaves[segment.leaf]
        if start + segment.nbytes > got:
            findings.append(f"leaf {record.name!r}: {image.path} ends at byte {read.offset + got}")
            continue
        damaged = _first_damaged(opened, read.part, segment, view[start : start + segment.nbytes])
        if damaged is not None:
            findings.append(
                f"leaf {record.name!r}, chunk {segment.number}: {image.path} does not match its checksum in the block "
                f"at byte {damaged}"
            )
            continue
        _hand_out(opened, read.part, segment, buffer, start, sinks)


def _first_damaged(opened: Opened, part: int, segment: Segment, data: memoryview) -> int | None:
    """Where in the image the first block that does not verify begins; None if all do."""
    block = opened.parts[part].block_nbytes
    crcs = opened.parts[part].chunks[segment.leaf, segment.number].crcs
    if not crcs:
        return None
    value = crcs[segment.first - 1] if segment.first else 0
    for number in range(segment.blocks):
        at = number * block
        value = crc32c(data[at : at + block], value)
        if value != crcs[segment.first + number]:
            return segment.offset + at
    return None


def _hand_out(
    opened: Opened, part: int, segment: Segment, buffer: np.ndarray[Any, Any], start: int, sinks: Sequence[Sink]
) -> None:
    record = opened.whole.leaves[segment.leaf]
    strides = tuple(math.prod(record.chunk[axis + 1 :]) * record.itemsize for axis in range(len(record.chunk)))
    origin = start - segment.first * opened.parts[part].block_nbytes  # of the chunk, in the buffer
    dtype = dtypes.bits(record.itemsize)
    for copy in segment.copies:
        at = origin + sum(a * s for a, s in zip(copy.inside.start, strides, strict=True))
        data = np.ndarray(copy.inside.shape, dtype, buffer, at, strides)
        sinks[copy.want](copy.at, data)
