"""Leaves in pieces, each an archive of torch.save or an entry of a safetensors blob somewhere in a file.

Guarantees: of an archive whose writer took checksums every byte is verified before any of it is handed out, also where
only part is wanted, because there is one checksum for all of it. Each piece that is wanted is read once; one larger
than a lane is read twice, to verify it and then, from the page cache, to hand it out. Where no checksum was taken only
the wanted bytes are read. No more than `_OPEN` files are open at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...errors import CorruptCheckpointError, UnsupportedFormatError
from ...format import dtypes
from ...format.checksum import crc32
from ...leaf import Box
from ...memory.lanes import Turns, run_lanes
from ...options import PAGE
from ..plan import Copy
from .pickles import NotRead
from .safetensors import parse_header
from .torch_zip import TorchZip, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ...adapter import Sink
    from ...format.part import LeafRecord
    from ...memory.buffers import Buffers
    from ...tiers.local_disk import ImageReader, LocalDisk
    from .contents import ForeignContents
    from .torch_zip import Entry, Fetch, TensorRef

__all__ = ["Chunk", "Layout", "TorchChunks", "fetch_from", "layout_of", "not_read"]

_OPEN = 64  # files open at once; a checkpoint of many ranks has thousands
_GAP_NBYTES = 64 * 1024  # two archives this close are read as one
_ZIP = b"PK\x03\x04"
_HEADER_LIMIT = 100_000_000  # bytes, safetensors' own


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a piece lie in a file."""

    offset: int
    """Of the storage that holds them."""
    nbytes: int
    crc: int
    """CRC-32 of the storage, 0 where none was recorded."""
    first: int
    """Of the first element, in the storage."""
    strides: tuple[int, ...]
    """In bytes."""
    flips: tuple[int, bool, bool] | None = None
    """Bytes of one real number, and whether the sign of every one, or of every second one (imaginary parts), is another
    than stored."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a leaf."""

    box: Box
    file: int
    offset: int
    nbytes: int
    """Of the archive; in a safetensors blob, which begins at `offset`, of the tensor."""
    shared: bool = False
    """Others begin at the same place: it can only be a safetensors blob."""
    layout: Layout | None = None
    """Known beforehand for a tensor among plain values."""


@dataclass(frozen=True, slots=True)
class TorchChunks:
    """The source."""

    path: Path
    contents: ForeignContents
    disk: LocalDisk
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    places: tuple[tuple[Chunk, ...] | np.ndarray[Any, Any], ...]
    """Of each leaf: its pieces, or, of a number or an array that stood among plain values, its `bits`."""
    direct: bool

    def reads(self, wants: Sequence[tuple[int, Box]], lane_nbytes: int) -> list[tuple[str, int, int]]:
        jobs = self._jobs(wants)
        return [(str(self.files[j.chunk.file]), j.chunk.offset, j.chunk.nbytes) for j in jobs]

    def read(
        self, wants: Sequence[tuple[int, Box]], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
    ) -> None:
        for (leaf, box), sink in zip(wants, sinks, strict=True):
            place = self.places[leaf]
            if isinstance(place, np.ndarray):
                sink(Box.whole(box.shape), place[box.slices()])
        findings: list[str] = []
        for _, group in itertools.groupby(_numbered_by_file(self._jobs(wants)), lambda item: item[0] // _OPEN):
            _Reading(self, sinks, buffers, lanes, findings).run([job for _, job in group])
        if findings:
            raise CorruptCheckpointError(str(self.path), sorted(findings), holds)

    def _jobs(self, wants: Sequence[tuple[int, Box]]) -> list[_Job]:
        """One for every piece that is wanted, in the order of files."""
        found: dict[tuple[int, int], _Job] = {}
        for want, (leaf, box) in enumerate(wants):
            place = self.places[leaf]
            for number, chunk in enumerate(() if isinstance(place, np.ndarray) else place):
                common = chunk.box.intersect(box)
                if common is not None:
                    job = found.setdefault((leaf, number), _Job(leaf, chunk, []))
                    job.copies.append(Copy(want, common.shifted(chunk.box.start), common.shifted(box.start)))
        return sorted(found.values(), key=lambda job: (job.chunk.file, job.chunk.offset))


@dataclass(frozen=True, slots=True)
class _Job:
    """A piece, and what is wanted of it."""

    leaf: int
    chunk: Chunk
    copies: list[Copy]


def _numbered_by_file(jobs: Sequence[_Job]) -> Iterator[tuple[int, _Job]]:
    """Every job with the number of its file among those that are read at all."""
    for number, (_, group) in enumerate(itertools.groupby(jobs, lambda job: job.chunk.file)):
        for job in group:
            yield number, job


def not_read(path: Path, key: str, error: NotRead) -> UnsupportedFormatError:
    """For a leaf that is none of ours."""
    return UnsupportedFormatError(
        str(path),
        f"a checkpoint with leaf {key!r} of more than tensors and plain values ({error})",
        'those alone; keys= or unexpected="ignore" leave this leaf out',
    )


def fetch_from(image: ImageReader, offset: int, nbytes: int) -> Fetch:
    """The bytes of a range of a file, in memory of their own."""

    def fetch(begin: int, end: int) -> memoryview:
        if not 0 <= begin <= end <= nbytes:
            raise ValueError("an archive that is cut short")
        low = (offset + begin) // PAGE * PAGE
        memory = memoryview(mmap.mmap(-1, _pages(offset + end - low) or PAGE))
        if low + image.read(low, memory[: _pages(offset + end - low)]) < offset + end:
            raise ValueError(f"{image.path.name} ends before byte {offset + end}")
        return memory[offset + begin - low : offset + end - low]

    return fetch


def layout_of(tensor: TensorRef, entry: Entry, offset: int) -> Layout:
    """Of a tensor in an archive that begins at `offset` of its file."""
    dtype = dtype_of(tensor.dtype)
    flips = None
    if tensor.conj or tensor.neg:
        is_complex = tensor.dtype.startswith("complex")
        flips = dtype.itemsize // (2 if is_complex else 1), tensor.neg, tensor.conj and is_complex
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    return Layout(offset + entry.offset, entry.nbytes, entry.crc, tensor.offset * dtype.itemsize, strides, flips)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class _Reading:
    """One restore's reads of files that can be open at once."""

    def __init__(
        self, source: TorchChunks, sinks: Sequence[Sink], buffers: Buffers, lanes: int, findings: list[str]
    ) -> None:
        self.source = source
        self.sinks = sinks
        self.buffers = buffers
        self.lanes = min(lanes, buffers.count)
        self.findings = findings
        self.most = buffers.nbytes - 2 * PAGE
        self.turns = Turns()
        self.images: dict[int, ImageReader] = {}
        self.known: dict[bytes, TensorRef] = {}
        # Known by now, and verified: the job, and where its elements lie.
        self.laid: list[tuple[_Job, Layout]] = []
        self.blobs: list[_Job] = []  # of safetensors

    def run(self, jobs: Sequence[_Job]) -> None:
        source = self.source
        with contextlib.ExitStack() as stack:
            for file, group in itertools.groupby(jobs, lambda job: job.chunk.file):
                # What is read twice comes from the page cache the second time.
                once = all(job.chunk.nbytes <= self.most for job in group)
                self.images[file] = source.disk.open_image(source.files[file], direct=source.direct and once)
                stack.callback(self.images[file].close)
            self.blobs += [job for job in jobs if job.chunk.shared]
            groups = list(self._groups([job for job in jobs if not job.chunk.shared]))
            run_lanes(self.lanes, range(len(groups)), lambda lane, n: self.archives(groups[n], lane))
            self.safetensors()
            pieces = [
                (job, layout, copy._replace(inside=piece, at=piece.shifted(_minus(copy.inside.start, copy.at.start))))
                for job, layout in self.laid
                for copy in job.copies
                for piece in _bisect(copy.inside, layout, self._itemsize(job), self.most)
            ]
            run_lanes(self.lanes, range(len(pieces)), lambda lane, n: self.piece(*pieces[n], lane))

    def _itemsize(self, job: _Job) -> int:
        return self._record(job).itemsize

    def _record(self, job: _Job) -> LeafRecord:
        return self.source.contents.leaves[job.leaf]

    def _groups(self, jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
        """Archives that one read brings, and those larger than a lane by themselves."""
        group: list[_Job] = []
        for job in jobs:
            chunk = job.chunk
            alone = chunk.layout is not None or chunk.nbytes > self.most
            if group and (
                alone
                or chunk.file != group[0].chunk.file
                or chunk.offset > group[-1].chunk.offset + group[-1].chunk.nbytes + _GAP_NBYTES
                or chunk.offset + chunk.nbytes - group[0].chunk.offset > self.most
            ):
                yield group
                group = []
            if alone:
                yield [job]
            else:
                group.append(job)
        if group:
            yield group

    def wrong(self, job: _Job, error: ValueError) -> None:
        """Notes what is damaged; raises what is not, but cannot be read."""
        record = self._record(job)
        if isinstance(error, NotRead):
            raise not_read(self.source.path, record.name, error) from error
        box = job.chunk.box
        part = f", part at {box.start}" if box.shape != record.spec.shape else ""
        self.findings.append(f"leaf {record.name!r}{part}: {self.source.files[job.chunk.file].name}: {error}")

    # Archives

    def archives(self, group: Sequence[_Job], lane: int) -> None:
        chunk = group[0].chunk
        if chunk.layout is not None or chunk.nbytes > self.most:
            self.large(group[0], lane)
            return
        image, buffer = self.images[chunk.file], self.buffers.lane(lane)
        low = chunk.offset // PAGE * PAGE
        end = group[-1].chunk.offset + group[-1].chunk.nbytes
        got = image.read(low, buffer.data[: _pages(end - low)])
        for job in group:
            start = job.chunk.offset - low
            try:
                if start + job.chunk.nbytes > got:
                    raise ValueError(f"it ends at byte {low + got}")
                archive = buffer.data[start : start + job.chunk.nbytes]
                if archive[:4] != _ZIP:
                    self.blobs.append(job)
                    continue
                layout, entry = self.archive(job, _fetch_in(archive))
                with self.turns:
                    entry.check(archive[entry.offset : entry.offset + entry.nbytes])
            except ValueError as error:
                self.wrong(job, error)
                continue
            with self.turns:
                for copy in job.copies:
                    self.hand_out(job, layout, copy, buffer, start + entry.offset)

    def large(self, job: _Job, lane: int) -> None:
        image, layout = self.images[job.chunk.file], job.chunk.layout
        try:
            if layout is None:
                fetch = fetch_from(image, job.chunk.offset, job.chunk.nbytes)
                if bytes(fetch(0, 4)) != _ZIP:
                    self.blobs.append(job)
                    return
                layout, _ = self.archive(job, fetch)
            if layout.crc:
                self.verify(image, layout, lane)
            self.laid.append((job, layout))
        except ValueError as error:
            self.wrong(job, error)

    def archive(self, job: _Job, fetch: Fetch) -> tuple[Layout, Entry]:
        """Where the one tensor of an archive lies. Raises ValueError if it is not what the metadata promise."""
        spec, chunk = self._record(job).spec, job.chunk
        archive = TorchZip(fetch, chunk.nbytes)
        tensor = archive.tensor(self.known)
        if (tensor.dtype, tensor.shape) != (spec.dtype, chunk.box.shape):
            raise ValueError(f"{tensor.dtype} {tensor.shape} where {spec.dtype} {chunk.box.shape} should be")
        entry = archive.storage(tensor)
        return layout_of(tensor, entry, chunk.offset), entry

    def verify(self, image: ImageReader, layout: Layout, lane: int) -> None:
        buffer = self.buffers.lane(lane)
        at, end, value = layout.offset, layout.offset + layout.nbytes, 0
        while at < end:
            low = at // PAGE * PAGE
            got = image.read(low, buffer.data[: min(_pages(end - low), self.most)])
            stop = min(low + got, end)
            if stop <= at:
                raise ValueError(f"it ends at byte {stop}")
            with self.turns:
                value = crc32(buffer[at - low : stop - low], value)
            at = stop
        if value != layout.crc:
            raise ValueError("its bytes do not match their checksum")

    # Safetensors

    def safetensors(self) -> None:
        """Lays out the tensors of blobs. Nothing of them has a checksum."""
        headers: dict[tuple[int, int], _Header | ValueError] = {}
        for job in self.blobs:
            place = job.chunk.file, job.chunk.offset
            try:
                if place not in headers:
                    headers[place] = self._header(*place)
                header = headers[place]
                if isinstance(header, ValueError):
                    raise header
                self.laid.append((job, header.layout(self._record(job), job.chunk)))
            except (ValueError, msgspec.DecodeError, RecursionError) as error:
                headers.setdefault(place, ValueError(str(error)))
                self.wrong(job, error if isinstance(error, ValueError) else ValueError(str(error)))

    def _header(self, file: int, offset: int) -> _Header:
        image, path = self.images[file], self.source.files[file]
        nbytes = self.source.sizes[file] - offset
        fetch = fetch_from(image, offset, nbytes)
        length = int.from_bytes(fetch(0, 8), "little") if nbytes >= 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, nbytes - 8):
            raise ValueError("neither an archive of torch.save nor a safetensors blob")
        text, data = bytes(fetch(8, 8 + length)), 8 + length
        tensors = {name: (spec, begin) for name, spec, begin in parse_header(text, nbytes - data, path)}
        notes = msgspec.json.decode(text).get("__metadata__")
        noted = notes.get("DCP_SHARDING_INFO") if isinstance(notes, dict) else None
        saved = msgspec.json.decode(noted) if isinstance(noted, str) else {}
        return _Header(offset + data, tensors, saved if isinstance(saved, dict) else {})

    # Both

    def piece(self, job: _Job, layout: Layout, copy: Copy, lane: int) -> None:
        image, buffer = self.images[job.chunk.file], self.buffers.lane(lane)
        begin, end = (layout.offset + n for n in _span(copy.inside, layout, self._itemsize(job)))
        low = begin // PAGE * PAGE
        got = image.read(low, buffer.data[: _pages(end - low)])
        if low + got < end:
            self.wrong(job, ValueError(f"it ends at byte {low + got}"))
            return
        with self.turns:
            self.hand_out(job, layout, copy, buffer, layout.offset - low)

    def hand_out(self, job: _Job, layout: Layout, copy: Copy, buffer: np.ndarray[Any, Any], start: int) -> None:
        """`start`: where the storage begins, or would begin, in the buffer."""
        first = start + layout.first
        first += sum(at * stride for at, stride in zip(copy.inside.start, layout.strides, strict=True))
        dtype = dtypes.bits(self._itemsize(job))
        data = np.ndarray(copy.inside.shape, dtype, buffer, first, layout.strides)
        if layout.flips is not None:
            data = _flipped(data, *layout.flips)
        self.sinks[copy.want](copy.at, data)


@dataclass(frozen=True, slots=True)
class _Header:
    """What a safetensors blob holds."""

    data: int
    """Where in the file its tensors begin."""
    tensors: dict[str, tuple[Any, int]]
    saved: dict[str, Any]
    """What torch notes of each tensor's place in the whole."""

    def layout(self, record: LeafRecord, chunk: Chunk) -> Layout:
        """Raises ValueError if it is not what the metadata promise."""
        if record.name not in self.tensors:
            raise ValueError("a safetensors blob without it")
        spec, begin = self.tensors[record.name]
        if (spec.dtype, spec.shape) != (record.spec.dtype, chunk.box.shape):
            raise ValueError(f"{spec.dtype} {spec.shape} where {record.spec.dtype} {chunk.box.shape} should be")
        noted = self.saved.get(record.name)
        if isinstance(noted, dict) and noted.get("saved_offsets") != list(chunk.box.start):
            raise ValueError(f"another part than that at {chunk.box.start}")
        strides = tuple(math.prod(spec.shape[axis + 1 :]) * record.itemsize for axis in range(len(spec.shape)))
        return Layout(self.data + begin, math.prod(spec.shape) * record.itemsize, 0, 0, strides)


def _fetch_in(archive: memoryview) -> Fetch:
    def fetch(begin: int, end: int) -> memoryview:
        if not 0 <= begin <= end <= len(archive):
            raise ValueError("an archive that is cut short")
        return archive[begin:end]

    return fetch


def _minus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))


def _span(box: Box, layout: Layout, itemsize: int) -> tuple[int, int]:
    """First and last byte (exclusive), in the storage, of the elements of a box."""
    low = high = layout.first
    for start, n, stride in zip(box.start, box.shape, layout.strides, strict=True):
        low += start * stride
        high += (start + n - 1) * stride
    return low, high + itemsize


def _bisect(box: Box, layout: Layout, itemsize: int, most: int) -> Iterator[Box]:
    """Halves a box along the axis that reaches furthest until each part spans at most `most` bytes."""
    low, high = _span(box, layout, itemsize)
    if high - low <= most:
        yield box
        return
    axis = max(range(len(box.shape)), key=lambda n: (box.shape[n] - 1) * layout.strides[n])
    half = box.shape[axis] // 2
    for start, length in ((0, half), (half, box.shape[axis] - half)):
        begins, shape = list(box.start), list(box.shape)
        begins[axis] += start
        shape[axis] = length
        yield from _bisect(Box(tuple(begins), tuple(shape)), layout, itemsize, most)


def _flipped(data: np.ndarray[Any, Any], width: int, every: bool, second: bool) -> np.ndarray[Any, Any]:
    """A copy with other signs, which are the first bits of numbers of `width` bytes."""
    made = np.array(data, order="C")
    numbers = made.reshape(-1).view(f"u{width}")
    sign = np.array(1 << (8 * width - 1), numbers.dtype)
    if every:
        numbers ^= sign
    if second:
        numbers[1::2] ^= sign
    return made
