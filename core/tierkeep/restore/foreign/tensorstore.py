"""Arrays that TensorStore reads: zarr of either version, plain or in an OCDBT database, with any codec."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorstore as ts

from ...errors import CorruptCheckpointError
from ...format import dtypes
from ...leaf import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ...adapter import Sink
    from ...memory.buffers import Buffers
    from .contents import ForeignContents

__all__ = ["TensorStoreSource", "array_spec", "kvstore_spec", "open_arrays"]

_OPENING = 64  # arrays being opened at once
_READING = 16  # pieces being read at once


@dataclass(frozen=True, slots=True)
class TensorStoreSource:
    """Arrays by leaf number."""

    path: Path
    contents: ForeignContents
    arrays: tuple[Any, ...]

    def reads(self, wants: Sequence[tuple[int, Box]], lane_nbytes: int) -> list[tuple[str, int, int]]:
        leaves = self.contents.leaves
        return [(leaves[leaf].name, 0, box.size * leaves[leaf].itemsize) for leaf, box in wants]

    def read(
        self, wants: Sequence[tuple[int, Box]], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
    ) -> None:
        findings: list[str] = []
        waiting: collections.deque[tuple[int, Box, Box, Any]] = collections.deque()

        def take() -> None:
            want, box, piece, future = waiting.popleft()
            leaf = self.contents.leaves[wants[want][0]]
            try:
                data = future.result()
            except (ValueError, OSError) as error:
                findings.append(f"leaf {leaf.name!r}: {error}")
                return
            array = np_bits(data, leaf.itemsize)
            sinks[want](piece.shifted(box.start), array)

        for want, (number, box) in enumerate(wants):
            for piece in _pieces(box, self.arrays[number], self.contents.leaves[number].itemsize, buffers.nbytes):
                if len(waiting) >= _READING:
                    take()
                waiting.append((want, box, piece, self.arrays[number][piece.slices()].read()))
        while waiting:
            take()
        if findings:
            raise CorruptCheckpointError(str(self.path), findings, holds)


def np_bits(data: Any, itemsize: int) -> Any:
    """An array as TensorStore returned it, as `bits` of the same shape."""
    return data.view(dtypes.bits(itemsize))


def _pieces(box: Box, array: Any, itemsize: int, most: int) -> Iterator[Box]:
    """Runs of rows of about `most` bytes that end at chunk boundaries, so that no chunk is decoded twice."""
    if not box.shape or not box.size:
        yield box
        return
    step = array.chunk_layout.read_chunk.shape[0] or 1
    row = math.prod(box.shape[1:]) * itemsize
    rows = max(1, most // max(1, row * step)) * step
    at, end = box.start[0], box.start[0] + box.shape[0]
    while at < end:
        stop = min(end, (at // step) * step + rows)
        yield Box((at, *box.start[1:]), (stop - at, *box.shape[1:]))
        at = stop


def kvstore_spec(path: Path, *, ocdbt: bool) -> dict[str, Any]:
    """The key-value store of a directory."""
    base = {"driver": "file", "path": f"{path}/"}
    return {"driver": "ocdbt", "base": base} if ocdbt else base


def array_spec(kvstore: dict[str, Any], name: str, *, zarr3: bool, elided: bool) -> dict[str, Any]:
    """One array of a store. Unless chunks of zeros may have been `elided`, a chunk that is missing is an error."""
    spec: dict[str, Any] = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": {**kvstore, "path": kvstore.get("path", "") + name},
    }
    if not elided:
        spec["fill_missing_data_reads"] = False
    return spec


def open_arrays(specs: Sequence[dict[str, Any]], names: Sequence[str]) -> tuple[list[Any], list[str]]:
    """The arrays, in order, and what was found wrong with those that cannot be opened."""
    context = ts.Context()  # one for each source: a shared one keeps every source's pages and handles alive
    arrays: list[Any] = []
    findings: list[str] = []
    waiting: collections.deque[tuple[str, Any]] = collections.deque()

    def take() -> None:
        name, future = waiting.popleft()
        try:
            arrays.append(future.result())
        except (ValueError, OSError) as error:
            findings.append(f"leaf {name!r}: {error}")

    for name, spec in zip(names, specs, strict=True):
        if len(waiting) >= _OPENING:
            take()
        try:
            waiting.append((name, ts.open(spec, open=True, read=True, context=context)))
        except ValueError as error:  # refused at once, such as a name that would leave the directory
            findings.append(f"leaf {name!r}: {error}")
    while waiting:
        take()
    return arrays, findings
