"""Bugs to be planted: each leaves out or turns round one thing that no power loss may be survived without."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkeep import checkpointer, engine, step
from tierkeep.format import orbax_metadata, part
from tierkeep.restore import read
from tierkeep.save import commit, store
from tierkeep.step import ITEM
from tierkeep.tiers.local_disk import ImageWriter, LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tierkeep.save.recycle import Recycler
    from tierkeep.testing.aftermath import Operation

__all__ = ["BUGS", "Bug"]


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    scenario: str
    """The scenario that has to show it."""
    plant: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    unsynced: str | None = None
    """The syncs of what this matches are left out."""

    def leaves_out(self) -> Callable[[Operation], bool] | None:
        if self.unsynced is None:
            return None
        pattern = re.compile(self.unsynced)
        return lambda operation: pattern.search(operation.path) is not None


def _image_unsynced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ImageWriter, "sync", lambda image: None)


def _part_nodes_unsynced(patch: pytest.MonkeyPatch) -> None:
    real = LocalDisk.write_file

    def write_file(disk: LocalDisk, path: Path, data: bytes) -> None:
        if path.parent.name != "d" or not path.parent.parent.name.startswith("ocdbt"):
            real(disk, path, data)
            return
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(fd, data)
        os.close(fd)

    patch.setattr(LocalDisk, "write_file", write_file)


def _synced_after_rename(patch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def write_file(disk: LocalDisk, path: Path, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        os.write(fd, data)
        os.close(fd)
        written.append(path)

    def rename_new(disk: LocalDisk, old: Path, new: Path) -> bool:
        done = real(disk, old, new)
        for path in written:
            if not path.is_relative_to(old):
                continue  # of a run that was stopped
            place = new / path.relative_to(old)
            fd = os.open(place.with_name(place.name.removesuffix(".tmp")), os.O_WRONLY)
            os.fsync(fd)
            os.close(fd)
        written.clear()
        return done

    real = LocalDisk.rename_new
    patch.setattr(LocalDisk, "write_file", write_file)
    patch.setattr(LocalDisk, "rename_new", rename_new)


def _published_before_the_record(patch: pytest.MonkeyPatch) -> None:
    later: list[Any] = []

    def commit_whole(disk: LocalDisk, draft: Any, *args: Any) -> None:
        later.append((draft, args))

    def publish(disk: LocalDisk, draft: Any, final: Path, **settings: Any) -> None:
        publish_really(disk, draft, final, **settings)
        _, args = later.pop()
        commit_really(disk, dataclasses.replace(draft, path=final, item=final / ITEM), *args)

    publish_really, commit_really = commit.publish, commit.commit_whole
    patch.setattr(store, "publish", publish)
    patch.setattr(store, "commit_whole", commit_whole)


def _made_in_place(patch: pytest.MonkeyPatch) -> None:
    def publish(disk: LocalDisk, draft: Any, final: Path, **settings: Any) -> None:
        record = orbax_metadata.checkpoint_metadata(ITEM, 0, 0, {})
        disk.write_file(draft.path / orbax_metadata.CHECKPOINT_METADATA, record)
        disk.sync_dir(draft.path)
        disk.sync_dir(final.parent)

    patch.setattr(commit, "temporary", lambda path: path)
    patch.setattr(store, "publish", publish)
    patch.setattr(commit.Draft, "end", lambda draft, disk: draft.lock and draft.lock.close())


def _retired_first(patch: pytest.MonkeyPatch) -> None:
    real = checkpointer.Checkpointer.save

    def save(steps: checkpointer.Checkpointer, number: int, state: Any, **settings: Any) -> Any:
        if steps.keep is not None:
            for old in steps.steps():
                commit.retire(LocalDisk(), step.step_path(steps.root, old))
        return real(steps, number, state, **settings)

    patch.setattr(checkpointer.Checkpointer, "save", save)


def _retired_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "retire", lambda disk, path, recycler: disk.remove_tree(path))


def _retired_unsynced(patch: pytest.MonkeyPatch) -> None:
    def retire(disk: LocalDisk, path: Path, recycler: Recycler | None) -> None:
        trash = step.doomed(path)
        disk.rename(path, trash)
        disk.remove_tree(trash)

    patch.setattr(store, "retire", retire)


def _recycled_unsynced(patch: pytest.MonkeyPatch) -> None:
    def retire(disk: LocalDisk, path: Path, recycler: Recycler | None) -> None:
        trash = step.doomed(path)
        disk.rename(path, trash)
        commit._discard(disk, trash, recycler)

    def close(steps: checkpointer.Checkpointer) -> None:
        LocalDisk().sync_dir(steps.root)  # in the end it is durable: what is wrong is wrong before
        real(steps)

    real = checkpointer.Checkpointer.close
    patch.setattr(store, "retire", retire)
    patch.setattr(checkpointer.Checkpointer, "close", close)


def _recycled_while_it_stands(patch: pytest.MonkeyPatch) -> None:
    real = checkpointer.Checkpointer.save

    def save(steps: checkpointer.Checkpointer, number: int, state: Any, **settings: Any) -> Any:
        for old in steps.steps()[-1:]:
            data = step.step_path(steps.root, old) / ITEM / "ocdbt.process_0" / "d"
            steps._recycler._trash = steps.root / "none"
            steps._recycler._image = max(data.iterdir(), key=LocalDisk().size)
        return real(steps, number, state, **settings)

    patch.setattr(checkpointer.Checkpointer, "save", save)


def _swap(patch: pytest.MonkeyPatch, swap: Callable[[LocalDisk, Path, Path], None]) -> None:
    patch.setattr(commit, "_swap", lambda disk, new, final, recycler: swap(disk, new, final))


def _old_removed_before_new_is_durable(patch: pytest.MonkeyPatch) -> None:
    def swap(disk: LocalDisk, new: Path, final: Path) -> None:
        disk.exchange(new, final)
        disk.remove_tree(new)
        disk.sync_dir(final.parent)

    _swap(patch, swap)


def _old_removed_first(patch: pytest.MonkeyPatch) -> None:
    def swap(disk: LocalDisk, new: Path, final: Path) -> None:
        disk.remove_tree(final)
        disk.rename(new, final)
        disk.sync_dir(final.parent)

    _swap(patch, swap)


def _old_removed_though_the_sync_failed(patch: pytest.MonkeyPatch) -> None:
    def swap(disk: LocalDisk, new: Path, final: Path) -> None:
        disk.exchange(new, final)
        try:
            disk.sync_dir(final.parent)
        finally:
            disk.remove_tree(new)

    _swap(patch, swap)


def _overwritten_in_place(patch: pytest.MonkeyPatch) -> None:
    def swap(disk: LocalDisk, new: Path, final: Path) -> None:
        for directory, _, names in os.walk(new):
            for name in names:
                file = os.path.join(directory, name)
                place = final / os.path.relpath(file, new)
                place.parent.mkdir(exist_ok=True)
                os.rename(file, place)
        disk.remove_tree(new)
        disk.sync_dir(final)

    _swap(patch, swap)


def _exchanged_by_three_renames(patch: pytest.MonkeyPatch) -> None:
    def exchange(disk: LocalDisk, one: Path, other: Path) -> bool:
        third = step.doomed(other)
        os.rename(one, third)
        os.rename(other, one)
        os.rename(third, other)
        return True

    patch.setattr(LocalDisk, "exchange", exchange)


def _replaced_is_trash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "replaced", step.doomed)


def _checksum_not_compared(patch: pytest.MonkeyPatch) -> None:
    class Same(int):
        """Equal to every number."""

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = int.__hash__

    patch.setattr(read, "crc32c", lambda data, value=0: Same())


def _seal_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(part, "unseal", json.loads)


def _nothing_is_swept(patch: pytest.MonkeyPatch) -> None:
    for module in (checkpointer, engine, commit):
        patch.setattr(module, "sweep", lambda disk, directory, *, mine, but=None: None)


def _swept_unsynced(patch: pytest.MonkeyPatch) -> None:
    real = commit.sweep

    def sweep(disk: LocalDisk, directory: Path, **settings: Any) -> None:
        class Unsynced(LocalDisk):
            def sync_dir(self, path: Path) -> None:
                pass

        real(Unsynced(), directory, **settings)

    patch.setattr(checkpointer, "sweep", sweep)


_DRAFT = r"\.tierkeep-tmp-[0-9a-f]{16}"
_HEX = "[0-9a-f]{32}"

BUGS = (
    Bug("the image is not synced", "second save", _image_unsynced),
    Bug("part.json is not synced", "second save", unsynced=r"/part\.json$"),
    Bug("tierkeep.json is not synced", "second save", unsynced=r"/tierkeep\.json$"),
    Bug("_METADATA is not synced", "second save", unsynced=r"/_METADATA$"),
    Bug("_CHECKPOINT_METADATA is not synced", "second save", unsynced=r"/_CHECKPOINT_METADATA$"),
    Bug("the nodes of the merged index are not synced", "second save", unsynced=rf"/{ITEM}/d/{_HEX}$"),
    Bug("the nodes of the part's index are not synced", "second save", _part_nodes_unsynced),
    Bug("the manifests are not synced", "second save", unsynced=r"/manifest\.ocdbt\.tmp$"),
    Bug("the part's directory is not synced", "second save", unsynced=r"/ocdbt\.process_0$"),
    Bug("the part's data directory is not synced", "second save", unsynced=r"/ocdbt\.process_0/d$"),
    Bug("the item's directory is not synced", "second save", unsynced=rf"/{ITEM}$"),
    Bug("the item's data directory is not synced", "second save", unsynced=rf"/{ITEM}/d$"),
    Bug("the step's directory is not synced", "second save", unsynced=rf"{_DRAFT}$"),
    Bug("the root is not synced after the rename", "second save", unsynced=r"^root$"),
    Bug("the root is not synced after the exchange", "overwrite", unsynced=r"^root$"),
    Bug(
        "the directories above a new root are not synced", "first save into a new root", unsynced=r"^(\.|new(/deep)?)$"
    ),
    Bug("the directory of a single checkpoint is not synced", "single checkpoint", unsynced=r"^models$"),
    Bug("files are synced after the rename", "second save", _synced_after_rename),
    Bug("the rename comes before the record of the whole", "second save", _published_before_the_record),
    Bug("a step is made under its final name", "second save", _made_in_place),
    Bug("the old step is retired before the new one is saved", "retirement", _retired_first),
    Bug("a step is removed under its own name", "retirement", _retired_in_place),
    Bug("a step is removed before its rename is durable", "retirement", _retired_unsynced),
    Bug("an image is recycled before its step's rename is durable", "recycling", _recycled_unsynced),
    Bug("an image is recycled while its step stands", "recycling", _recycled_while_it_stands),
    Bug("an image that is overwritten is not synced", "recycling", _image_unsynced),
    Bug("the new place of a recycled image is not synced", "recycling", unsynced=r"/ocdbt\.process_0/d$"),
    Bug("the old one is removed before the new one is durable", "overwrite", _old_removed_before_new_is_durable),
    Bug("the old one is removed before the new one is there", "overwrite", _old_removed_first),
    Bug(
        "the old one is removed though the sync failed",
        "overwrite whose last sync fails",
        _old_removed_though_the_sync_failed,
    ),
    Bug("a step is overwritten file by file", "overwrite", _overwritten_in_place),
    Bug("an exchange is three renames", "overwrite", _exchanged_by_three_renames),
    Bug("what was being replaced is taken for trash", "overwrite without renameat2", _replaced_is_trash),
    Bug("checksums of the image are not compared", "second save", _checksum_not_compared),
    Bug("the seal of a record is not compared", "second save", _seal_not_compared),
    Bug("leftovers are not swept", "second save", _nothing_is_swept),
    Bug("leftovers are removed before their rename is durable", "a retirement is killed", _swept_unsynced),
)
