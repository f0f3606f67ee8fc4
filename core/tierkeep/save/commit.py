"""Commit: the only place that makes anything visible.

Order within a part: image synced, nodes, `part.json`, manifest (temporary, renamed), directories synced. Order of the
whole: merged index, Orbax's files, `tierkeep.json`, directories synced, then one rename of the temporary directory to
its final name, then a sync of the directory that holds it. A crash before that rename leaves only a temporary name,
a crash after it a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .. import __version__
from ..errors import CheckpointExistsError, InvalidStateError, StorageError
from ..format import orbax_metadata
from ..format.checksum import unseal
from ..format.ocdbt import DataFile, Index
from ..format.part import PART, WHOLE, digests, encode_part, encode_whole
from ..step import ITEM, doomed, leftover, replaced, temporary
from .recycle import remove_quietly

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ..format.ocdbt import IndexTemplate
    from ..tiers.local_disk import DirLock, LocalDisk
    from .plan import SavePlan
    from .recycle import Recycler

__all__ = [
    "DATA",
    "MANIFEST",
    "Draft",
    "bring_back",
    "commit_part",
    "commit_whole",
    "is_checkpoint",
    "part_name",
    "publish",
    "retire",
    "sweep",
]

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_NO_IMAGE = "0" * 32  # for a part without bytes, of which no index names anything
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
    def start(
        cls, disk: LocalDisk, final: Path, item: str | None, rank: int, identity: tuple[str, str, int] | None = None
    ) -> Draft:
        """Makes the directories of a draft of `final`, beside it; `identity` is its `save_id`, `image` and `begun_ns`."""
        path, lock = _own_directory(disk, final)
        identity = identity or (secrets.token_hex(16), secrets.token_hex(16), time.time_ns())
        draft = cls(path, path if item is None else path / item, *identity, lock)
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

    @classmethod
    def within(cls, item: Path, identity: tuple[str, str, int]) -> Draft:
        """A draft of an item in a directory that somebody else makes visible, and removes if it fails."""
        return cls(item, item, *identity, None)

    def end(self, disk: LocalDisk) -> None:
        """Lets go of the draft, published or not; what was not is removed, now or by a later `sweep`."""
        try:
            with contextlib.suppress(OSError):  # the error that led here is the one to raise
                if disk.exists(self.path):
                    disk.remove_tree(self.path)
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
        except OSError as error:
            if error.errno in _NO_LOCKS:  # there, nobody sweeps drafts
                return path, None
            with contextlib.suppress(OSError):
                disk.remove_tree(path)
            raise
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
    index = _write_index(disk, path, plan.index, [DataFile("", f"{DATA}/{draft.image}")], draft.begun_ns)
    record = encode_part(
        save_id=draft.save_id,
        digest=plan.digest,
        rank=rank,
        world=world,
        image=draft.image if plan.image_nbytes else "",
        image_nbytes=plan.image_nbytes,
        layout=msgspec.Raw(plan.layout),
        crcs=[*crcs, *(crcs[extent] for _, _, extent in plan.aliases)],
        files=digests(index),
    )
    disk.write_file(path / PART, record)
    disk.sync_dir(path / DATA)
    disk.sync_dir(path)
    _commit_manifest(disk, path)
    return record


def commit_whole(disk: LocalDisk, draft: Draft, plan: SavePlan, values: list[Any], parts: Sequence[bytes]) -> None:
    """Writes the merged index, Orbax's files and our record. After the call all of the item is durable, not visible.

    `parts` are the parts' records, by rank. Raises InvalidStateError if they are not of one save.
    """
    item = draft.item
    if len(parts) == 1:
        index, images = plan.index, [draft.image or unseal(parts[0])["image"] or _NO_IMAGE]
    else:
        index, images = _merge(draft, plan, parts)
    files = [DataFile(f"{part_name(rank)}/", f"{DATA}/{image}") for rank, image in enumerate(images)]
    others = _write_index(disk, item, index, files, draft.begun_ns) | dict(plan.orbax)
    for name, data in plan.orbax:
        path = item / name
        if path.parent != item:
            disk.make_dir(path.parent)
        disk.write_file(path, data)
        if path.parent != item:
            disk.sync_dir(path.parent)
    if plan.strings:
        others[orbax_metadata.STRINGS] = orbax_metadata.strings(plan.strings, values)
        disk.write_file(item / orbax_metadata.STRINGS, others[orbax_metadata.STRINGS])
    record = encode_whole(
        writer=f"tierkeep {__version__}",
        save_id=draft.save_id,
        digest=plan.digest,
        structure=msgspec.Raw(plan.structure),
        values=values,
        parts=[(part_name(rank), part) for rank, part in enumerate(parts)],
        files=digests(others),
    )
    disk.write_file(item / WHOLE, record)
    disk.sync_dir(item / DATA)
    disk.sync_dir(item)
    _commit_manifest(disk, item)


def _merge(draft: Draft, plan: SavePlan, parts: Sequence[bytes]) -> tuple[IndexTemplate, list[str]]:
    """The index over all parts, and the names of their images."""
    found = [unseal(part) for part in parts]
    for rank, part in enumerate(found):
        if part["save_id"] != draft.save_id:
            raise InvalidStateError(
                f"rank {rank}'s part of {draft.item} is of another save; the checkpoint is not committed"
            )
        if part["digest"] != plan.digest:
            raise InvalidStateError(
                f"rank {rank} saved a state of another structure than rank 0 did (other keys, kinds, shapes, dtypes or "
                f"ties) in {draft.item}; the checkpoint is not committed"
            )
    held = [len(part["layout"]["leaf"]) for part in found]
    chunks = {pair for part in found for pair in zip(part["layout"]["leaf"], part["layout"]["number"], strict=True)}
    wanted = sum(math.prod(leaf.grid) for leaf in plan.leaves if leaf.tie is None)
    if len(chunks) != wanted or sum(held) != wanted:
        raise InvalidStateError(
            f"the ranks saved {sum(held)} chunks, {len(chunks)} of them different, where {wanted} make up the state; "
            f"{draft.item} is not committed"
        )
    return plan.merged_index([part["layout"] for part in found]), [part["image"] or _NO_IMAGE for part in found]


def publish(
    disk: LocalDisk,
    draft: Draft,
    final: Path,
    *,
    metrics: Mapping[str, Any] | None,
    overwrite: bool,
    recycler: Recycler | None = None,
) -> None:
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
        _swap(disk, draft.path, final, recycler)
        return
    if not disk.rename_new(draft.path, final):
        raise CheckpointExistsError(str(final))
    _sync_visible(disk, final)


def is_checkpoint(disk: LocalDisk, path: Path) -> bool:
    """Whether an item or a step stands at `path`: nothing else is ever overwritten or removed."""
    names = (WHOLE, orbax_metadata.METADATA, orbax_metadata.CHECKPOINT_METADATA)
    return any(disk.exists(path / name) for name in names)


def retire(disk: LocalDisk, path: Path, recycler: Recycler | None = None) -> None:
    """Makes a checkpoint invisible by one rename, durably, then removes it, or leaves it to a recycler."""
    trash = doomed(path)
    disk.rename(path, trash)
    disk.sync_dir(path.parent)
    _discard(disk, trash, recycler)


def _discard(disk: LocalDisk, trash: Path, recycler: Recycler | None) -> None:
    """Removes what was made invisible durably, or leaves it to a recycler."""
    if recycler is None:
        remove_quietly(disk, trash)
        return
    images: list[Path] = []
    with contextlib.suppress(OSError):
        for item in (trash, trash / ITEM):
            directory = item / part_name(0) / DATA
            # Where a link leads to is another's, and not overwritten.
            if disk.exists(directory) and disk.is_below(directory, trash.parent):
                # The nodes of the index lie beside the image, and are small.
                images = sorted((directory / entry.name for entry in disk.list_dir(directory)), key=disk.size)[-1:]
    recycler.discard(trash, images)


def _swap(disk: LocalDisk, new: Path, final: Path, recycler: Recycler | None) -> None:
    trash = doomed(final)
    if disk.exchange(new, final):
        old = new
        with contextlib.suppress(OSError):  # no draft any more: if the sync fails, a power loss may go back to it
            disk.rename(new, trash)
            old = trash
        _sync_visible(disk, final)
        _discard(disk, old, recycler if old is trash else None)
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
    _sync_visible(disk, final)
    with contextlib.suppress(OSError):  # half removed, it must not have the name of what is to come back
        disk.rename(old, trash)
        remove_quietly(disk, trash)


def _sync_visible(disk: LocalDisk, final: Path) -> None:
    try:
        disk.sync_dir(final.parent)
    except OSError as error:
        holds = f"the new checkpoint stands at {final}, whole, but a power loss may undo that; others are untouched"
        raise StorageError(f"making {final} durable", error, holds) from error


def sweep(disk: LocalDisk, directory: Path, *, mine: Callable[[str], bool], but: Path | None = None) -> None:
    """Removes what dead writers left in `directory`; `mine` says which names' leftovers are to be looked at.

    `but` is the one that a recycler of this process keeps.

    A draft that a living process works on is left alone. A checkpoint that was being replaced, without anything having
    come to its place, comes back. Whatever cannot be removed stays for the next time; nothing visible is touched.
    """
    found = _leftovers(disk, directory, mine)
    _bring_back(disk, directory, found)
    trash: list[Path] = []
    for name, final, state in found:
        path = directory / name
        if path == but:
            continue
        with contextlib.suppress(OSError):
            if state == "old" and not (disk.exists(path) and disk.exists(directory / final)):
                continue  # it was brought back, or could not be
            lock = None if state == "trash" else disk.lock(path)
            if lock is None and state == "tmp":
                continue
            try:
                if state != "trash":  # from here on it is trash to every process
                    path = doomed(directory / final)
                    disk.rename(directory / name, path)
            finally:
                if lock is not None:
                    lock.close()
            trash.append(path)
    if not trash:
        return
    with contextlib.suppress(OSError):
        # The rename that made it trash may be a dead writer's, and not durable: a power loss must not bring it back
        # under its own name with half of its files.
        disk.sync_dir(directory)
        for path in trash:
            remove_quietly(disk, path)


def bring_back(disk: LocalDisk, directory: Path, *, mine: Callable[[str], bool]) -> None:
    """Makes a checkpoint visible again that a writer, dead by now, had moved aside without putting another in its place.

    That is only ever so where a file system cannot exchange two names. Where it fails nothing is changed.
    """
    _bring_back(disk, directory, _leftovers(disk, directory, mine))


def _bring_back(disk: LocalDisk, directory: Path, found: Sequence[tuple[str, str, str]]) -> None:
    for name, final, state in found:
        if state != "old" or disk.exists(directory / final):
            continue
        with contextlib.suppress(OSError):
            drafts = [directory / other for other, of, kind in found if (of, kind) == (final, "tmp")]
            locks = [disk.lock(draft) for draft in drafts]
            for lock in filter(None, locks):
                lock.close()
            if all(locks):  # else a living writer is about to put the new one there
                disk.rename_new(directory / name, directory / final)
                disk.sync_dir(directory)


def _leftovers(disk: LocalDisk, directory: Path, mine: Callable[[str], bool]) -> list[tuple[str, str, str]]:
    """(name, what it was made for, its state) of every leftover in a directory; none if it cannot be listed."""
    try:
        names = [entry.name for entry in disk.list_dir(directory)]
    except OSError:
        return []
    found = [(name, *parsed) for name in names if (parsed := leftover(name)) is not None]
    return [each for each in found if mine(each[1])]


def _write_index(
    disk: LocalDisk, path: Path, template: IndexTemplate, files: Sequence[DataFile], now_ns: int
) -> dict[str, bytes]:
    """Its files by name, the manifest as it is called once it is committed."""
    nodes = f"{DATA}/{secrets.token_hex(16)}"
    index: Index = template.render(files, nodes, uuid=secrets.token_bytes(16), commit_ns=now_ns)
    if index.nodes:
        disk.write_file(path / nodes, index.nodes)
    disk.write_file(path / f"{MANIFEST}.tmp", index.manifest)
    return {MANIFEST: index.manifest} | ({nodes: index.nodes} if index.nodes else {})


def _commit_manifest(disk: LocalDisk, path: Path) -> None:
    disk.rename(path / f"{MANIFEST}.tmp", path / MANIFEST)
    disk.sync_dir(path)
