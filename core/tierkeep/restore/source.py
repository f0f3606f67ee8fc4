"""A source: something a restore can take leaves from, whoever wrote it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..memory.buffers import Buffers
from .plan import least_lane, plan_reads
from .read import execute_reads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..adapter import Sink
    from ..errors import TierkeepError
    from ..format.part import LeafRecord
    from ..leaf import Box
    from ..tree import Tree
    from .opened import Opened

__all__ = ["Contents", "Source", "Stored", "Unread"]


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands among a source's values for one that it cannot give: whoever asks for it gets the error, the rest is read."""

    error: TierkeepError


class Contents(Protocol):
    """What a source holds, without its bytes."""

    @property
    def tree(self) -> Tree: ...

    @property
    def leaves(self) -> tuple[LeafRecord, ...]: ...

    @property
    def values(self) -> tuple[Any, ...]:
        """Plain values as JSON, or `Unread`."""

    @property
    def text_keys(self) -> bool:
        """Whether keys are only known as text, so that a target's key 0 and "0" are the same."""

    @property
    def empty_kept(self) -> bool:
        """Whether empty containers are kept; if not, one that the checkpoint lacks is taken for empty."""


class Source(Protocol):
    """An opened checkpoint. Whoever opened it closes it; nothing is read of its arrays until `read`."""

    @property
    def path(self) -> Path: ...

    @property
    def contents(self) -> Contents: ...

    def reads(self, wants: Sequence[tuple[int, Box]], lane_nbytes: int) -> list[tuple[str, int, int]]:
        """(file, offset, bytes) of what `read` would read; offset 0 where the source's own library decides."""

    def read(
        self, wants: Sequence[tuple[int, Box]], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
    ) -> None:
        """Fills every sink with its wanted `(leaf, box)`. Raises CorruptCheckpointError naming the damaged leaves."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A source whose bytes lie in files at known places: tierkeep's own images, and safetensors."""

    opened: Opened

    @property
    def path(self) -> Path:
        return self.opened.path

    @property
    def contents(self) -> Contents:
        return self.opened.whole

    def reads(self, wants: Sequence[tuple[int, Box]], lane_nbytes: int) -> list[tuple[str, int, int]]:
        opened = self.opened
        lane_nbytes = max(lane_nbytes, least_lane(opened.whole, opened.parts, opened.held_by, wants))
        planned = plan_reads(opened.whole, opened.parts, opened.held_by, wants, lane_nbytes)
        paths = [str(image.path) if image is not None else "" for image in opened.images]
        return [(paths[read.part], read.offset, read.nbytes) for read in planned]

    def read(
        self, wants: Sequence[tuple[int, Box]], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
    ) -> None:
        opened = self.opened
        least = least_lane(opened.whole, opened.parts, opened.held_by, wants)
        with contextlib.ExitStack() as stack:
            if least > buffers.nbytes:  # saved in blocks larger than a lane: fewer lanes, as large as they must be
                buffers = Buffers(max(1, lanes * buffers.nbytes // least), least)
                stack.callback(buffers.close)
            planned = plan_reads(opened.whole, opened.parts, opened.held_by, wants, buffers.nbytes)
            execute_reads(opened, planned, sinks, buffers, lanes, holds)
