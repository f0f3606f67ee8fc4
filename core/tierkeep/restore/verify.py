"""Verify: every byte of a checkpoint read once and compared with what was recorded of it, nothing handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import CorruptCheckpointError
from ..format.checksum import crc32c
from ..format.part import Whole, digest
from ..leaf import Box
from ..memory.buffers import Buffers
from ..memory.lanes import Turns, run_lanes
from ..options import MIB, PAGE
from .opened import read_checked
from .source import Stored, Unread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from ..format.part import ChunkRecord, Part
    from ..tiers.local_disk import LocalDisk
    from .opened import Opened
    from .source import Source

__all__ = ["VerifyReport", "verify_source"]

_CRC_NBYTES = 4
_PADDING_NBYTES = 1 * MIB  # looked at at once


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read and found whole."""

    path: str
    """The item directory, or the file."""
    nbytes: int
    """Bytes read."""
    leaves: int
    checksums: Literal["tierkeep", "foreign"]
    """`tierkeep`: every byte agrees with a checksum taken when it was saved, padding and the files for stock readers
    too. `foreign`: another program's checkpoint, every array of which could be read; what its own format does not
    check is not checked.
    """


class _Span(NamedTuple):
    """A run of an image that is compared with one recorded number."""

    offset: int
    nbytes: int
    leaf: int
    """-1: padding, which is zeros."""
    number: int
    block: int
    """-1: the chunk's checksum, which stands after it for stock readers."""


def verify_source(disk: LocalDisk, source: Source, buffers: Buffers, lanes: int, holds: str) -> VerifyReport:
    """Reads all of an opened checkpoint, in lanes. Raises CorruptCheckpointError listing everything that was found."""
    if isinstance(source, Stored) and isinstance(source.opened.whole, Whole):
        return _verify_own(disk, source.opened, source.opened.whole, buffers, lanes, holds)
    leaves = source.contents.leaves
    wants = [
        (number, Box.whole(leaf.spec.shape)) for number, leaf in enumerate(leaves) if leaf.tie is None and leaf.nbytes
    ]
    findings = [
        finding
        for value in source.contents.values
        if isinstance(value, Unread) and isinstance(value.error, CorruptCheckpointError)
        for finding in value.error.findings
    ]
    try:
        source.read(wants, [_nowhere] * len(wants), buffers, lanes, holds)
    except CorruptCheckpointError as error:
        findings += error.findings
    if findings:
        raise CorruptCheckpointError(str(source.path), findings, holds)
    nbytes = sum(leaves[number].nbytes for number, _ in wants)
    return VerifyReport(str(source.path), nbytes, len(leaves), "foreign")


def _nowhere(part: Box, data: np.ndarray[Any, Any]) -> None:
    """A sink that takes nothing."""


def _verify_own(
    disk: LocalDisk, opened: Opened, whole: Whole, buffers: Buffers, lanes: int, holds: str
) -> VerifyReport:
    findings: list[str] = []
    nbytes = 0
    files = list(whole.files)
    for (directory, size, _), part in zip(whole.parts, opened.parts, strict=True):
        files += [(f"{directory}/{name}", size, wanted) for name, size, wanted in part.files]
        nbytes += size
    for name, size, wanted in files:
        data = read_checked(disk, opened.path, opened.path / name, size, findings)
        if data is not None and (len(data) != size or digest(data) != wanted):
            findings.append(f"{opened.path / name}: it is not the file that was saved")
        nbytes += size
    for number in range(len(opened.parts)):
        nbytes += _verify_image(opened, whole, number, buffers, lanes, findings)
    if findings:
        raise CorruptCheckpointError(str(opened.path), sorted(findings), holds)
    return VerifyReport(str(opened.path), nbytes, len(whole.leaves), "tierkeep")


def _verify_image(opened: Opened, whole: Whole, number: int, buffers: Buffers, lanes: int, findings: list[str]) -> int:
    """Bytes read of a part's image."""
    part, image = opened.parts[number], opened.images[number]
    if image is None:
        return 0
    spans = list(_spans(whole, part, str(image.path), findings))
    least = max((span.nbytes for span in spans), default=0) + 2 * PAGE
    if least > buffers.nbytes:  # saved in blocks larger than a lane: fewer lanes, as large as they must be
        lanes = max(1, lanes * buffers.nbytes // least)
        buffers = Buffers(lanes, -(-least // PAGE) * PAGE)
    runs = list(_runs(spans, buffers.nbytes))
    turns = Turns()

    def job(lane: int, run: int) -> None:
        low, high, inside = runs[run]
        buffer = buffers.lane(lane)
        got = image.read(low, buffer.data[: high - low])
        with turns:
            for span in inside:
                at = span.offset - low
                if at + span.nbytes > got or not _agrees(part, span, buffer[at : at + span.nbytes]):
                    findings.append(
                        f"{_named(whole, span)}: {image.path} differs from what was saved at byte {span.offset}"
                    )

    run_lanes(min(lanes, buffers.count), range(len(runs)), job)
    return image.nbytes


def _named(whole: Whole, span: _Span) -> str:
    if span.leaf < 0:
        return "padding"
    what = f"leaf {whole.leaves[span.leaf].name!r}, chunk {span.number}"
    return what if span.block >= 0 else f"{what}, the checksum for stock readers"


def _agrees(part: Part, span: _Span, data: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    if span.leaf < 0:
        return not data.any()
    crcs = part.chunks[span.leaf, span.number].crcs
    if span.block < 0:
        return int.from_bytes(data.tobytes(), "little") == crcs[-1]
    return crc32c(data, crcs[span.block - 1] if span.block else 0) == crcs[span.block]


def _spans(whole: Whole, part: Part, image: str, findings: list[str]) -> Iterator[_Span]:
    """The whole image as spans, in order, none longer than a block."""
    cursor = 0
    last: tuple[int, ChunkRecord] | None = None
    for (leaf, number), chunk in sorted(part.chunks.items(), key=lambda item: item[1].offset):
        nbytes = whole.leaves[leaf].chunk_nbytes
        end = chunk.offset + nbytes
        if (nbytes, chunk) == last:  # a tie of one rank of several
            continue
        last = nbytes, chunk
        if chunk.offset < cursor or end + _CRC_NBYTES > part.image_nbytes:
            findings.append(f"leaf {whole.leaves[leaf].name!r}, chunk {number}: {image} has no room for it")
            continue
        yield from _padding(cursor, chunk.offset)
        for block, begin in enumerate(range(0, nbytes, part.block_nbytes)):
            yield _Span(chunk.offset + begin, min(part.block_nbytes, nbytes - begin), leaf, number, block)
        yield _Span(end, _CRC_NBYTES, leaf, number, -1)
        cursor = end + _CRC_NBYTES
    yield from _padding(cursor, part.image_nbytes)


def _padding(begin: int, end: int) -> Iterator[_Span]:
    for at in range(begin, end, _PADDING_NBYTES):
        yield _Span(at, min(_PADDING_NBYTES, end - at), -1, -1, -1)


def _runs(spans: Sequence[_Span], lane_nbytes: int) -> Iterator[tuple[int, int, list[_Span]]]:
    """Page-aligned ranges of at most `lane_nbytes`, and the spans that lie in each."""
    group: list[_Span] = []
    low = high = 0
    for span in spans:
        end = -(-(span.offset + span.nbytes) // PAGE) * PAGE
        if group and end - low > lane_nbytes:
            yield low, high, group
            group = []
        if not group:
            low = span.offset - span.offset % PAGE
        group.append(span)
        high = end
    if group:
        yield low, high, group
