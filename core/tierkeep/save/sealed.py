"""Sealed images: what is done with one in the background, batch by batch, side by side. First checksums, then the disk.

After the decoupled writing of FastPersist (Wang et al., 2024), with the image itself as the buffer that is written from.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory.lanes import run_lanes
from .stage import checksum_batch, stage_image

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ..leaf import Leaf
    from ..tiers.local_disk import LocalDisk
    from .plan import SavePlan

__all__ = ["checksum_image", "fill_image", "write_sealed"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def fill_image(
    plan: SavePlan,
    leaves: Sequence[Leaf],
    image: Bytes,
    *,
    lanes: int,
    copies: Callable[[], AbstractContextManager[object]],
    step: Callable[[int], None],
) -> None:
    """Copies all leaves into `image`; `copies` is entered around each batch's copies, in the thread that makes them.

    `step` is told of the bytes of each batch that was copied, and may raise to stop.
    """

    def job(_lane: int, number: int) -> None:
        with copies():
            stage_image(plan, plan.batches[number], leaves, image)
        step(plan.batches[number].nbytes)

    run_lanes(lanes, range(len(plan.batches)), job)


def checksum_image(plan: SavePlan, image: Bytes, step: Callable[[int], None]) -> list[list[int]]:
    """The running checksums of every extent; each chunk's own is put behind it. `step` as in `fill_image`."""
    crcs: list[list[int]] = [[] for _ in plan.extents]

    def job(_lane: int, number: int) -> None:
        checksum_batch(plan, plan.batches[number], image, crcs)
        step(plan.batches[number].nbytes)

    run_lanes(os.cpu_count() or 1, range(len(plan.batches)), job)
    return crcs


def write_sealed(
    disk: LocalDisk,
    path: Path,
    plan: SavePlan,
    image: Bytes,
    *,
    direct: bool,
    lanes: int,
    recycled: bool,
    step: Callable[[int], None],
) -> None:
    """Writes and syncs an image that is checksummed. `step` is told of the bytes of each batch before they are written."""
    writer = disk.create_image(path, plan.image_nbytes, direct=direct, recycled=recycled)
    view = image.data
    try:

        def job(_lane: int, number: int) -> None:
            batch = plan.batches[number]
            step(batch.nbytes)
            writer.write(batch.offset, view[batch.offset : batch.offset + batch.nbytes])

        run_lanes(lanes, range(len(plan.batches)), job)
        writer.sync()
    finally:
        writer.close()
