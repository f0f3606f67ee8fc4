"""Write: lanes that stage and write batches of the image side by side, then one sync.

After FastPersist (Wang et al., 2024): aligned direct writes of large blocks, several in flight, with the copy of the
next block overlapping the write of the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..memory.lanes import Turns, run_lanes
from .stage import stage_batch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..leaf import Leaf
    from ..memory.buffers import Buffers
    from ..options import SaveOptions
    from ..tiers.local_disk import LocalDisk
    from .plan import SavePlan

__all__ = ["write_image"]


def write_image(
    disk: LocalDisk,
    path: Path,
    plan: SavePlan,
    leaves: Sequence[Leaf],
    buffers: Buffers,
    options: SaveOptions,
    *,
    recycled: bool,
) -> list[list[int]]:
    """Writes and syncs the image of `leaves` at `path`, and returns the running checksums of every extent.

    After the call the file's content is durable; its name is once the directory is synced. On an error the file is
    left behind for whoever owns the directory. The leaves are not referred to afterwards.
    """
    crcs: list[list[int]] = [[] for _ in plan.extents]
    image = disk.create_image(path, plan.image_nbytes, direct=options.direct, recycled=recycled)
    turns = Turns()
    try:

        def job(lane: int, number: int) -> None:
            runs = stage_batch(plan, plan.batches[number], leaves, options.block_nbytes, buffers.lane(lane), crcs)
            while True:
                with turns:
                    run = next(runs, None)
                if run is None:
                    return
                image.write(*run)

        run_lanes(min(options.lanes, buffers.count), range(len(plan.batches)), job)
        image.sync()
    finally:
        image.close()
    return crcs
