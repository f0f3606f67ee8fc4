"""Single checkpoints: one save, one restore, one verification, for any framework."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from .adapter import Adapter, flatten
from .errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, TierkeepError
from .handle import SaveReport
from .memory.buffers import Buffers
from .memory.collector import collector_paused
from .options import RestoreOptions, SaveOptions
from .restore.locate import open_source
from .restore.place import NOTHING, Placement, place
from .restore.verify import VerifyReport, verify_source
from .save.background import Captured
from .save.commit import bring_back, sweep
from .save.plan import PlanCache
from .save.store import store
from .save.write import write_image
from .step import resolve
from .tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from .format.part import LeafRecord
    from .restore.source import Source
    from .save.commit import Draft
    from .save.recycle import Recycler

__all__ = [
    "Engine",
    "Metadata",
    "RestorePlan",
    "SaveReport",
    "VerifyReport",
    "load_checkpoint",
    "restore_options",
    "save_checkpoint",
    "verify_checkpoint",
]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore would do, and how checkpoint and target differ."""

    path: str
    """The source: the item directory."""
    nbytes: int
    """Bytes that would be read."""
    reads: tuple[tuple[str, int, int], ...]
    """(file, offset, bytes) of every request."""
    names: tuple[str, ...]
    """Leaves that would be restored."""
    casts: tuple[str, ...]
    """Leaves whose dtype differs from the target's; with `dtype="cast"` they are converted."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shape: tuple[str, ...]
    structure: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    """(leaf, the leaf whose bytes it shares)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint holds, from its records alone: no array is read."""

    path: str
    leaves: Mapping[str, LeafRecord]
    nbytes: int
    """Bytes of the leaves, tied ones once."""


class Engine:
    """Saves and restores single checkpoints; keeps plans and warm buffers from one call to the next.

    Guarantees: calls from several threads run one after another; no thread, file or reference to a state outlives a
    call; memory held between calls is `lanes * lane_nbytes`. Closing twice is fine.
    """

    def __init__(self, adapter: Adapter, options: SaveOptions | None = None, disk: LocalDisk | None = None) -> None:
        self.adapter = adapter
        self.options = options or SaveOptions()
        self.disk = disk or LocalDisk()
        self.plans = PlanCache()
        self.buffers = Buffers(self.options.lanes, self.options.lane_nbytes)
        self._durable: set[Path] = set()

    def save(
        self,
        path: Path,
        state: Any,
        *,
        step: int | None = None,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        recycler: Recycler | None = None,
    ) -> SaveReport:
        """Saves `state` at `path` (as the item itself, or with `step` as a step of one item).

        After the call the checkpoint is visible and durable, whole. On any error nothing is visible, what was written
        is removed, and what stood at `path` is as it was.
        """
        began = time.perf_counter()
        captured = self.capture(state)
        snapshot, plan = captured.snapshot, captured.plan
        planned = time.perf_counter()
        with self._storage(f"saving {path}", f"{path} is as it was before; earlier checkpoints are untouched"):
            if step is None and self.disk.exists(path.parent):  # a root's are swept by its Checkpointer
                sweep(self.disk, path.parent, mine=lambda name: name == path.name)

            def write(draft: Draft) -> list[list[int]]:
                image = draft.image_path(0)
                recycled = recycler is not None and recycler.reuse(image)
                with self.buffers.lock:
                    return write_image(
                        self.disk, image, plan, snapshot.leaves, self.buffers, self.options, recycled=recycled
                    )

            written = store(
                self.disk,
                path,
                plan,
                snapshot.values,
                write,
                step=step is not None,
                overwrite=overwrite,
                metrics=metrics,
                durable=self._durable,
                recycler=recycler,
            )
        done = time.perf_counter()
        seconds = {"plan": planned - began, "write": written - planned, "commit": done - written, "total": done - began}
        return SaveReport(str(path), step, plan.nbytes, plan.image_nbytes, seconds)

    def capture(self, state: Any, *, rank: int = 0, world: int = 1) -> Captured:
        """What `state` is, and where its bytes are, without copying any.

        As one rank of several: leaves that are no rank's in particular (they have no `boxes`) are rank 0's to store.
        """
        began = time.perf_counter()
        with collector_paused():
            snapshot = flatten(state, self.adapter, pickle_rest=self.options.pickle)
            if rank:
                snapshot.leaves = [
                    leaf if leaf.boxes is not None else structs.replace(leaf, shards=()) for leaf in snapshot.leaves
                ]
            plan = self.plans.plan(snapshot, self.options, partial=world > 1)
        return Captured(snapshot, plan, time.perf_counter() - began)

    def restore(
        self,
        path: Path,
        target: Any = NOTHING,
        *,
        options: RestoreOptions,
        keys: Sequence[str] | None = None,
        device: Any = None,
        dry_run: bool = False,
        holds: str = "no other checkpoint was touched",
        disk: LocalDisk | None = None,
    ) -> Any:
        """The state at `path`, verified; into `target` if there is one. With `dry_run`, the RestorePlan instead.

        `disk` if it stands on another one than the engine's.
        """
        disk = disk or self.disk

        def once() -> Any:
            with collector_paused(), open_source(disk, path, direct=options.direct, holds=holds) as source:
                contents = source.contents
                placement = place(contents, target, self.adapter, options, keys=keys, device=device, dry_run=dry_run)
                try:
                    if dry_run:
                        return _restore_plan(source, placement, options)
                    placement.check(str(source.path), options)
                    with self._lanes(options) as buffers:
                        source.read(placement.wants, placement.sinks, buffers, options.lanes, holds)
                    return placement.finish()
                except CorruptCheckpointError as error:
                    error.partly_filled = target is not NOTHING
                    raise
                finally:
                    placement.forget()

        with self._storage(f"restoring {path}", f"the checkpoint is untouched; {holds}"):
            if not disk.exists(path):
                bring_back(disk, path.parent, mine=lambda name: name == path.name)
            return self._steadily(path, once, holds)

    def metadata(self, path: Path) -> Metadata:
        """What the checkpoint at `path` holds; its records are verified, its arrays are not read."""

        def once() -> Metadata:
            with open_source(self.disk, path, direct=False, holds="nothing was changed") as source:
                leaves = source.contents.leaves
                nbytes = sum(leaf.nbytes for leaf in leaves if leaf.tie is None)
                return Metadata(str(source.path), {leaf.name: leaf for leaf in leaves}, nbytes)

        with self._storage(f"reading {path}", "nothing was changed"):
            return self._steadily(path, once, "nothing was changed")

    def verify(
        self, path: Path, *, options: RestoreOptions, holds: str = "no other checkpoint was touched"
    ) -> VerifyReport:
        """Reads all of the checkpoint at `path` once and compares it with its checksums; nothing is changed.

        Raises CorruptCheckpointError listing everything that was found: also in the padding and in the files that only
        stock readers need, which a restore does not look at.
        """

        def once() -> VerifyReport:
            with (
                collector_paused(),
                open_source(self.disk, path, direct=options.direct, holds=holds) as source,
                self._lanes(options) as buffers,
            ):
                return verify_source(self.disk, source, buffers, options.lanes, holds)

        with self._storage(f"verifying {path}", f"the checkpoint is untouched; {holds}"):
            return self._steadily(path, once, holds)

    def _steadily(self, path: Path, once: Callable[[], T], holds: str) -> T:
        """What `once` gives; again if what stood at `path` was replaced meanwhile, for then it may have seen some of each.

        Raises CheckpointNotFoundError if it was removed meanwhile, whatever `once` made of that.
        """
        while True:
            before = self.disk.identity(path)
            try:
                return once()
            except (CorruptCheckpointError, FileNotFoundError) as error:
                after = self.disk.identity(path)
                if after == before or getattr(error, "partly_filled", False):
                    raise
                if after is None:
                    raise CheckpointNotFoundError(str(path), "what was removed while it was read", holds) from error

    def close(self) -> None:
        self.buffers.close()

    @contextlib.contextmanager
    def _lanes(self, options: RestoreOptions) -> Iterator[Buffers]:
        """The engine's own warm buffers if they are what `options` asks for, others for this call if not."""
        if (options.lanes, options.lane_nbytes) == (self.buffers.count, self.buffers.nbytes):
            with self.buffers.lock:
                yield self.buffers
        else:
            buffers = Buffers(options.lanes, options.lane_nbytes)
            try:
                yield buffers
            finally:
                buffers.close()

    @contextlib.contextmanager
    def _storage(self, action: str, holds: str) -> Iterator[None]:
        try:
            yield
        except TierkeepError:
            raise
        except OSError as error:
            raise StorageError(action, error, holds) from error


def save_checkpoint(
    adapter: Adapter, path: Any, state: Any, *, overwrite: bool, options: SaveOptions | None
) -> SaveReport:
    """What an adapter's `save` is: one checkpoint at `path`, with buffers that live as long as the call."""
    with contextlib.closing(Engine(adapter, options)) as engine:
        return engine.save(resolve(path), state, overwrite=overwrite)


def load_checkpoint(
    adapter: Adapter,
    path: Any,
    target: Any,
    *,
    keys: Sequence[str] | None,
    device: Any,
    dry_run: bool,
    options: RestoreOptions | None,
    relaxations: Mapping[str, Any],
) -> Any:
    """What an adapter's `load` is: the checkpoint at `path`, in `target` or NOTHING."""
    chosen = restore_options(options, relaxations)
    with contextlib.closing(Engine(adapter)) as engine:
        return engine.restore(resolve(path), target, options=chosen, keys=keys, device=device, dry_run=dry_run)


def verify_checkpoint(adapter: Adapter, path: Any, options: RestoreOptions | None) -> VerifyReport:
    """What an adapter's `verify` is."""
    with contextlib.closing(Engine(adapter)) as engine:
        return engine.verify(resolve(path), options=options or RestoreOptions())


def restore_options(options: RestoreOptions | None, relaxations: Mapping[str, Any]) -> RestoreOptions:
    """The options with the named relaxations in place. Raises TypeError for a name that is none."""
    return dataclasses.replace(options or RestoreOptions(), **relaxations)


def _restore_plan(source: Source, placement: Placement, options: RestoreOptions) -> RestorePlan:
    leaves = source.contents.leaves
    reads = source.reads(placement.wants, options.lane_nbytes)
    return RestorePlan(
        path=str(source.path),
        nbytes=sum(nbytes for _, _, nbytes in reads),
        reads=tuple(reads),
        names=tuple(placement.names),
        casts=tuple(placement.dtype),
        missing=tuple(placement.missing),
        unexpected=tuple(placement.unexpected),
        shape=tuple(placement.shape),
        structure=tuple(placement.structure),
        tied=tuple((leaf.name, leaves[leaf.tie].name) for leaf in leaves if leaf.tie is not None),
    )
