"""Commit: the only place that makes anything visible.

Order within a part: image synced, nodes, `part.json`, manifest (temporary, renamed), directories synced. Order of the
whole: merged index, Orbax's files, `tierkeep.json`, directories synced, then one rename of the temporary directory to
its final name, then a sync of the directory that holds it. A crash before that rename leaves only a temporary name,
a crash after it a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import CheckpointExistsError
from ..format import orbax_metadata
from ..format.ocdbt import DataFile, Index
from ..format.part import PART, WHOLE, encode_part, encode_whole
from ..step import doomed, leftover, replaced, temporary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ..tiers.local_disk import DirLock, LocalDisk
    from .plan import SavePlan

__all__ = ["DATA", "MANIFEST", "Draft", "commit_part", "commit_whole", "is_checkpoint", "publish", "retire", "sweep"]

MANIFEST = "manifest.ocdbt"
DATA = "d"


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint being made under a temporary name."""

    path: Path
    """The temporary directory that is renamed at the end."""
    item: Path
    """The item directory: `path` itself, or one level below for a step."""
    save_id: str
    image: str
    """The image's name, 32 hex digits, never used before."""
    begun_ns: int
    lock: DirLock | None
    """Held as long as the draft is being made, so that nobody takes it for a leftover; None without locks here."""

    @classmethod
    def start(cls, disk: LocalDisk, final: Path, item: str | None, rank: int) -> Draft:
        """Makes the directories of a draft of `final`, beside it."""
        path, lock = _own_directory(disk, final)
        draft = cls(
            path,
            path if item is None else path / item,
            secrets.token_hex(16),
            secrets.token_hex(16),
            time.time_ns(),
            lock,
        )
        try:
            if item is not None:
                disk.make_dir(draft.item)
            disk.make_dir(draft.item / DATA)
            disk.make_dir(draft.part_path(rank))
            disk.make_dir(draft.part_path(rank) / DATA)
        except BaseException:
            draft.end(disk)
            raise
        return draft

    def end(self, disk: LocalDisk) -> None:
        """Lets go of the draft, published or not; what was not is removed, now or by a later `sweep`."""
        try:
            if disk.exists(self.path):
                _remove_old(disk, self.path)
        finally:
            if self.lock is not None:
                self.lock.close()

    def part_path(self, rank: int) -> Path:
        return self.item / part_name(rank)

    def image_path(self, rank: int) -> Path:
        return self.part_path(rank) / DATA / self.image


def _own_directory(disk: LocalDisk, final: Path) -> tuple[Path, DirLock | None]:
    """A new directory under a temporary name, locked before anybody can have taken it for a leftover."""
    while True:
        path = temporary(final)
        disk.make_dir(path)
        try:
            lock = disk.lock(path)
        except OSError:  # a file system without locks: there, nobody sweeps drafts
            return path, None
        if lock is not None:
            return path, lock  # else it was swept up at once, and another name is tried


def part_name(rank: int) -> str:
    return f"ocdbt.process_{rank}"


def commit_part(
    disk: LocalDisk, draft: Draft, plan: SavePlan, crcs: list[list[int]], *, rank: int, world: int
) -> bytes:
    """Makes a rank's part a valid database of its own; its image is already written and synced.

    Returns the part's record. After the call everything below the part's directory is durable.
    """
    path = draft.part_path(rank)
    _write_index(disk, path, plan, [DataFile("", f"{DATA}/{draft.image}")], draft.begun_ns)
    record = encode_part(
        save_id=draft.save_id,
        digest=plan.digest,
        rank=rank,
        world=world,
        image=draft.image if plan.image_nbytes else "",
        image_nbytes=plan.image_nbytes,
        layout=plan.layout,
        crcs=crcs,
    )
    disk.write_file(path / PART, record)
    disk.sync_dir(path / DATA)
    disk.sync_dir(path)
    _commit_manifest(disk, path)
    return record


def commit_whole(disk: LocalDisk, draft: Draft, plan: SavePlan, values: list[Any], parts: Sequence[bytes]) -> None:
    """Writes the merged index, Orbax's files and our record. After the call all of the item is durable, not visible."""
    item = draft.item
    files = [DataFile(f"{part_name(0)}/", f"{DATA}/{draft.image}")]
    _write_index(disk, item, plan, files, draft.begun_ns)
    for name, data in plan.orbax:
        path = item / name
        if path.parent != item:
            disk.make_dir(path.parent)
        disk.write_file(path, data)
        if path.parent != item:
            disk.sync_dir(path.parent)
    if plan.strings:
        disk.write_file(item / orbax_metadata.STRINGS, orbax_metadata.strings(plan.strings, values))
    record = encode_whole(
        writer=f"tierkeep {__version__}",
        save_id=draft.save_id,
        digest=plan.digest,
        structure=plan.structure,
        values=values,
        parts=[(part_name(rank), part) for rank, part in enumerate(parts)],
    )
    disk.write_file(item / WHOLE, record)
    disk.sync_dir(item / DATA)
    disk.sync_dir(item)
    _commit_manifest(disk, item)


def publish(disk: LocalDisk, draft: Draft, final: Path, *, metrics: Mapping[str, Any] | None, overwrite: bool) -> None:
    """Makes the draft visible as `final` by one rename, durably. `metrics` (not None for a step) go beside the item.

    With `overwrite`, what stood there stays whole and visible until the new checkpoint is, and is then removed. Raises
    CheckpointExistsError, with the draft unpublished, if something else stands there.
    """
    if metrics is not None:
        step = orbax_metadata.checkpoint_metadata(draft.item.name, draft.begun_ns, time.time_ns(), metrics)
        disk.write_file(draft.path / orbax_metadata.CHECKPOINT_METADATA, step)
        disk.sync_dir(draft.path)
    if disk.exists(final):
        if not overwrite:
            raise CheckpointExistsError(str(final))
        if not is_checkpoint(disk, final):
            raise CheckpointExistsError(str(final), "it is not a checkpoint, so it is not overwritten")
        _swap(disk, draft.path, final)
        return
    if not disk.rename_new(draft.path, final):
        raise CheckpointExistsError(str(final))
    disk.sync_dir(final.parent)


def is_checkpoint(disk: LocalDisk, path: Path) -> bool:
    """Whether an item or a step stands at `path`: nothing else is ever overwritten or removed."""
    names = (WHOLE, orbax_metadata.METADATA, orbax_metadata.CHECKPOINT_METADATA)
    return any(disk.exists(path / name) for name in names)


def retire(disk: LocalDisk, path: Path) -> None:
    """Makes a checkpoint invisible by one rename, durably, then removes it."""
    trash = doomed(path)
    disk.rename(path, trash)
    disk.sync_dir(path.parent)
    _remove_old(disk, trash)


def _swap(disk: LocalDisk, new: Path, final: Path) -> None:
    if disk.exchange(new, final):
        disk.sync_dir(final.parent)
        _remove_old(disk, new)
        return
    # No atomic exchange on this file system: for the moment between two renames nothing stands at `final`.
    # Its name says that it is to come back if the second does not happen: see `sweep`.
    old = replaced(final)
    disk.rename(final, old)
    try:
        disk.rename(new, final)
    except BaseException:
        disk.rename(old, final)
        raise
    disk.sync_dir(final.parent)
    _remove_old(disk, old)


def sweep(disk: LocalDisk, directory: Path, *, mine: Callable[[str], bool]) -> None:
    """Removes what dead writers left in `directory`; `mine` says which names' leftovers are to be looked at.

    A draft that a living process works on is left alone. A checkpoint that was being replaced, without anything having
    come to its place, comes back. Whatever cannot be removed stays for the next time; nothing visible is touched.
    """
    try:
        names = [entry.name for entry in disk.list_dir(directory)]
    except OSError:
        return
    for name in names:
        found = leftover(name)
        if found is None or not mine(found[0]):
            continue
        final, state = found
        path = directory / name
        with contextlib.suppress(OSError):
            if state == "old" and not disk.exists(directory / final):
                disk.rename_new(path, directory / final)
                disk.sync_dir(directory)
                continue
            lock = None if state == "trash" else disk.lock(path)
            if lock is None and state == "tmp":
                continue
            try:
                if state != "trash":  # from here on it is trash to every process
                    trash = doomed(directory / final)
                    disk.rename(path, trash)
                    path = trash
            finally:
                if lock is not None:
                    lock.close()
            disk.remove_tree(path)


def _remove_old(disk: LocalDisk, old: Path) -> None:
    """Removes what nobody sees any more. A failure here is no failure of the save: the name is ours to sweep later."""
    with contextlib.suppress(OSError):
        disk.remove_tree(old)


def _write_index(disk: LocalDisk, path: Path, plan: SavePlan, files: Sequence[DataFile], now_ns: int) -> None:
    nodes = f"{DATA}/{secrets.token_hex(16)}"
    index: Index = plan.index.render(files, nodes, uuid=secrets.token_bytes(16), commit_ns=now_ns)
    if index.nodes:
        disk.write_file(path / nodes, index.nodes)
    disk.write_file(path / f"{MANIFEST}.tmp", index.manifest)


def _commit_manifest(disk: LocalDisk, path: Path) -> None:
    disk.rename(path / f"{MANIFEST}.tmp", path / MANIFEST)
    disk.sync_dir(path)
