"""A state that another library loaded, as a source: torch.save files, through torch's own safe loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...adapter import Adapter, Sink, Snapshot, flatten
from ...format import dtypes
from ...leaf import Box, c_order_pieces
from ...save.plan import leaf_names, ties
from .contents import ForeignContents, record_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any

    from ...memory.buffers import Buffers

__all__ = ["SnapshotSource", "snapshot_source"]


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Leaves that are in memory, or mapped from a file."""

    path: Path
    contents: ForeignContents
    snapshot: Snapshot

    def reads(self, wants: Sequence[tuple[int, Box]], lane_nbytes: int) -> list[tuple[str, int, int]]:
        leaves = self.contents.leaves
        return [(str(self.path), 0, box.size * leaves[leaf].itemsize) for leaf, box in wants]

    def read(
        self, wants: Sequence[tuple[int, Box]], sinks: Sequence[Sink], buffers: Buffers, lanes: int, holds: str
    ) -> None:
        for (number, box), sink in zip(wants, sinks, strict=True):
            itemsize = self.contents.leaves[number].itemsize
            (shard,) = self.snapshot.leaves[number].shards
            for piece in c_order_pieces(box.shape, buffers.nbytes // itemsize):
                out = np.empty(piece.shape, dtypes.bits(itemsize))
                start = tuple(a + b for a, b in zip(box.start, piece.start, strict=True))
                shard.copy(Box(start, piece.shape), out)
                sink(piece, out)


def snapshot_source(path: Path, state: Any, adapter: Adapter) -> SnapshotSource:
    """A source of the leaves of `state`, which stays referenced by it."""
    snapshot = flatten(state, adapter, pickle_rest=False)
    names, _ = leaf_names(snapshot.tree)
    tied = dict(ties(snapshot))
    leaves = tuple(record_of(names[n], leaf.spec, tied.get(n)) for n, leaf in enumerate(snapshot.leaves))
    return SnapshotSource(path, ForeignContents(snapshot.tree, leaves, tuple(snapshot.values)), snapshot)
