"""Store: from a plan and something that writes its image to a checkpoint that is visible and durable, whole.

The one way in which a checkpoint comes to stand in a directory: a synchronous save's, the worker's, and the memory's.
"""

from __future__ import annotations

import contextlib
import errno
import time
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointExistsError, StorageError
from ..format.orbax_metadata import CHECKPOINT_METADATA, read_metrics
from ..format.part import PART, WHOLE
from ..step import ITEM, list_steps, step_path
from ..tiers.retain import Keep, surplus
from .commit import DATA, Draft, commit_part, commit_whole, publish, retire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ..tiers.local_disk import LocalDisk
    from .plan import SavePlan
    from .recycle import Recycler

__all__ = ["Identity", "retain", "store", "store_part", "store_whole"]

_METRICS_LIMIT = 1 << 24  # bytes
_RECORD_LIMIT = 1 << 31  # bytes; no record of a real state comes near
# What syncing the directory above a root may say: it is another user's, or of a file system that does not sync.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS})

Identity = tuple[str, str, int]
"""`save_id`, the image's name, and when the save began (ns): known before by a save that another process finishes."""


def store(
    disk: LocalDisk,
    path: Path,
    plan: SavePlan,
    values: list[Any],
    write: Callable[[Draft], list[list[int]]],
    *,
    step: bool,
    overwrite: bool,
    metrics: Mapping[str, Any] | None,
    durable: set[Path],
    recycler: Recycler | None = None,
    identity: Identity | None = None,
) -> float:
    """Makes the checkpoint of `plan` at `path`: as a step of one item if `step`, as the item itself if not.

    `write` makes the image of the draft it is given, durable, and returns the running checksums of every extent; it is
    not called for a plan without bytes. `durable` are the directories known to be. Returns when the image was written
    (`time.perf_counter`). After the call the checkpoint is visible and durable; on any error nothing is visible, what
    was written is removed, and what stood at `path` is as it was.
    """
    if disk.exists(path) and not overwrite:
        raise CheckpointExistsError(str(path))
    _make_parents(disk, path.parent, durable)
    with _draft(disk, path, ITEM if step else None, identity) as draft:
        crcs = write(draft) if plan.image_nbytes else []
        written = time.perf_counter()
        part = commit_part(disk, draft, plan, crcs, rank=0, world=1)
        commit_whole(disk, draft, plan, values, [part])
        if step:
            metrics = metrics or {}
        publish(disk, draft, path, metrics=metrics, overwrite=overwrite, recycler=recycler)
    return written


def store_part(
    disk: LocalDisk,
    item: Path,
    plan: SavePlan,
    write: Callable[[Draft], list[list[int]]],
    *,
    identity: Identity,
    rank: int,
    world: int,
) -> float:
    """One rank's part of an item, in a directory that stands already and that somebody else makes visible.

    All ranks of a save have one `save_id`. After the call the part is durable; `store_whole` makes an item of the parts.
    """
    draft = Draft.within(item, identity)
    part = draft.part_path(rank)
    disk.make_dir(part)
    disk.make_dir(part / DATA)
    crcs = write(draft) if plan.image_nbytes else []
    written = time.perf_counter()
    commit_part(disk, draft, plan, crcs, rank=rank, world=world)
    disk.sync_dir(item)
    return written


def store_whole(
    disk: LocalDisk, item: Path, plan: SavePlan, values: list[Any], *, identity: Identity, world: int
) -> None:
    """Makes an item of the parts of all ranks, which stand; `plan`, `values` and `identity` are rank 0's.

    After the call the item is whole and durable, but for its own name. Raises InvalidStateError if the parts are not of
    one save or of one structure, or leave a chunk out.
    """
    draft = Draft.within(item, identity)
    with contextlib.suppress(FileExistsError):
        disk.make_dir(item / DATA)
    parts = [disk.read_file(draft.part_path(rank) / PART, _RECORD_LIMIT) for rank in range(world)]
    commit_whole(disk, draft, plan, values, parts)


def retain(disk: LocalDisk, root: Path, keep: Keep | None, newest: int, recycler: Recycler | None = None) -> None:
    """Retires what `keep` no longer names, now that `newest` is durable; only steps that tierkeep wrote.

    A step that is gone already is. Raises StorageError for one that cannot be removed; `newest` is whole all the same.
    """
    if keep is None:
        return
    try:
        steps = list_steps(disk, root)
        own = [step for step in steps if disk.exists(step_path(root, step) / ITEM / WHOLE)]
    except OSError as error:
        raise StorageError(f"retaining steps of {root}", error, f"step {newest} is saved and whole") from error
    metrics = {step: _metrics(disk, root, step) if keep.best else {} for step in own}
    # What cannot be read now may be the best of all: it stays, and is not counted.
    known = {step: found for step, found in metrics.items() if found is not None}
    for step in surplus(known, keep, newest):
        path = step_path(root, step)
        try:
            retire(disk, path, recycler)
        except FileNotFoundError:
            continue  # another process retired it
        except OSError as error:
            raise StorageError(f"removing {path}", error, f"step {newest} is saved and whole") from error


def _metrics(disk: LocalDisk, root: Path, step: int) -> Mapping[str, Any] | None:
    """The metrics of a step; empty, so that it ranks last, if it has none; None if the disk does not say."""
    path = step_path(root, step) / CHECKPOINT_METADATA
    try:
        return read_metrics(disk.read_file(path, _METRICS_LIMIT))
    except (FileNotFoundError, ValueError):
        return {}
    except OSError:
        return None


@contextlib.contextmanager
def _draft(disk: LocalDisk, final: Path, item: str | None, identity: Identity | None) -> Iterator[Draft]:
    """A draft of `final`, beside it; removed if it is not published."""
    draft = Draft.start(disk, final, item, rank=0, identity=identity)
    try:
        yield draft
    finally:
        draft.end(disk)


def _make_parents(disk: LocalDisk, path: Path, durable: set[Path]) -> None:
    """Makes the missing directories of `path`, each durable in its parent, and adds it to those known to be `durable`.

    One that is there already is made durable too: whoever made it may have died before that.
    """
    missing = []
    known = path
    while not disk.exists(known):
        missing.append(known)
        known = known.parent
    if known not in durable:
        try:
            disk.sync_dir(known.parent)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            disk.make_dir(each)
        disk.sync_dir(each.parent)
    durable.add(path)
