"""The public calls, for any framework: an adapter's own `save`, `load` and `Checkpointer` are these with it filled in."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
import warnings
from typing import TYPE_CHECKING, Any, Self, TypeVar

from .adapter import Adapter, flatten
from .errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    SkippedStepWarning,
    StorageError,
    TierkeepError,
    UnsupportedFormatError,
)
from .format.orbax_metadata import CHECKPOINT_METADATA, read_metrics
from .format.part import WHOLE
from .memory.buffers import Buffers
from .memory.collector import collector_paused
from .options import RestoreOptions, SaveOptions
from .restore.locate import open_source
from .restore.place import NOTHING, Placement, place
from .restore.verify import VerifyReport, verify_source
from .save.commit import Draft, bring_back, commit_part, commit_whole, publish, retire, sweep
from .save.plan import PlanCache
from .save.write import write_image
from .step import ITEM, is_step_name, list_steps, resolve, step_path
from .tiers.local_disk import LocalDisk
from .tiers.retain import Keep, surplus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from .format.part import LeafRecord
    from .restore.source import Source

__all__ = [
    "Checkpointer",
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

_METRICS_LIMIT = 1 << 24  # bytes
T = TypeVar("T")
# What syncing the directory above a root may say: it is another user's, or of a file system that does not sync.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS})


@dataclasses.dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did."""

    path: str
    step: int | None
    nbytes: int
    """Bytes of the leaves, tied ones once."""
    image_nbytes: int
    """Bytes of the image: the leaves, their checksums and padding."""
    seconds: Mapping[str, float]
    """Time of each stage: `plan`, `write` (copy, checksum, write and sync, overlapped), `commit`; and `total`."""


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
        self._buffers = Buffers(self.options.lanes, self.options.lane_nbytes)
        self._durable: set[Path] = set()

    def save(
        self,
        path: Path,
        state: Any,
        *,
        step: int | None = None,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> SaveReport:
        """Saves `state` at `path` (as the item itself, or with `step` as a step of one item).

        After the call the checkpoint is visible and durable, whole. On any error nothing is visible, what was written
        is removed, and what stood at `path` is as it was.
        """
        began = time.perf_counter()
        with collector_paused():
            snapshot = flatten(state, self.adapter, pickle_rest=self.options.pickle)
            plan = self.plans.plan(snapshot, self.options)
        planned = time.perf_counter()
        with self._storage(f"saving {path}", f"{path} is as it was before; earlier checkpoints are untouched"):
            if self.disk.exists(path.parent):
                sweep(self.disk, path.parent, mine=lambda name: name == path.name)
            if self.disk.exists(path) and not overwrite:
                raise CheckpointExistsError(str(path))
            _make_parents(self.disk, path.parent, self._durable)
            with _draft(self.disk, path, None if step is None else ITEM) as draft:
                crcs: list[list[int]] = []
                if plan.image_nbytes:
                    with self._buffers.lock:
                        image = draft.image_path(0)
                        crcs = write_image(self.disk, image, plan, snapshot.leaves, self._buffers, self.options)
                written = time.perf_counter()
                part = commit_part(self.disk, draft, plan, crcs, rank=0, world=1)
                commit_whole(self.disk, draft, plan, snapshot.values, [part])
                if step is not None:
                    metrics = metrics or {}
                publish(self.disk, draft, path, metrics=metrics, overwrite=overwrite)
        done = time.perf_counter()
        seconds = {"plan": planned - began, "write": written - planned, "commit": done - written, "total": done - began}
        return SaveReport(str(path), step, plan.nbytes, plan.image_nbytes, seconds)

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
    ) -> Any:
        """The state at `path`, verified; into `target` if there is one. With `dry_run`, the RestorePlan instead."""

        def once() -> Any:
            with collector_paused(), open_source(self.disk, path, direct=options.direct, holds=holds) as source:
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

        if not self.disk.exists(path):
            bring_back(self.disk, path.parent, mine=lambda name: name == path.name)
        with self._storage(f"restoring {path}", f"the checkpoint is untouched; {holds}"):
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
        self._buffers.close()

    @contextlib.contextmanager
    def _lanes(self, options: RestoreOptions) -> Iterator[Buffers]:
        """The engine's own warm buffers if they are what `options` asks for, others for this call if not."""
        if (options.lanes, options.lane_nbytes) == (self._buffers.count, self._buffers.nbytes):
            with self._buffers.lock:
                yield self._buffers
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


class Checkpointer:
    """The steps of one run, in a directory with Orbax's layout: `<root>/<step>/default`.

    Guarantees: a step is visible whole or not at all; a failed save leaves every older step as it was and the next
    save works; with `keep=n`, an older step is removed only after a newer one is durable. One process writes a root
    at a time. Closing twice is fine.
    """

    def __init__(
        self,
        adapter: Adapter,
        root: Any,
        *,
        keep: int | Keep | None = None,
        options: SaveOptions | None = None,
        disk: LocalDisk | None = None,
    ) -> None:
        self.root = resolve(root)
        if not isinstance(keep, Keep | None):
            if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
                raise ValueError(f"keep must be a whole number of at least 1, a Keep, or None for all, not {keep!r}")
            keep = Keep(last=keep)
        self.keep = keep
        self._engine: Engine | None = Engine(adapter, options, disk)
        self._disk = self._engine.disk
        try:
            if self._disk.exists(self.root) and not self._disk.is_dir(self.root):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))
        except OSError as error:
            raise StorageError(f"opening {self.root} as a root", error, "what stands there is untouched") from error

    def save(
        self, step: int, state: Any, *, overwrite: bool = False, metrics: Mapping[str, Any] | None = None
    ) -> SaveReport:
        """Saves `state` as `step`; after the call the step is visible and durable, whole.

        Raises CheckpointExistsError if the step exists and `overwrite` is not set, UnsupportedLeafError and
        NameCollisionError naming the key, StorageError with the system's reason. After an error the steps are those
        there were before.
        """
        path = step_path(self.root, step)
        step = int(path.name)  # an int, whatever whole number it was
        engine = self._open()
        metrics = _checked(metrics)
        sweep(self._disk, self.root, mine=is_step_name)
        report = engine.save(path, state, step=step, overwrite=overwrite, metrics=metrics)
        self._retain(step)
        return report

    def _restore(
        self,
        step: int | None,
        target: Any,
        *,
        keys: Sequence[str] | None,
        device: Any,
        dry_run: bool,
        options: RestoreOptions | None,
        relaxations: Mapping[str, Any],
    ) -> Any:
        """What an adapter's `restore` is: the state of `step` (the newest if None), in `target` or NOTHING."""
        engine = self._open()
        chosen = restore_options(options, relaxations)
        steps = self.steps()

        def restore(number: int) -> Any:
            return engine.restore(
                step_path(self.root, number),
                target,
                options=chosen,
                keys=keys,
                device=device,
                dry_run=dry_run,
                holds=_others(steps, number, self.root),
            )

        if step is None:
            return self._newest_whole(steps, restore, may_mix="keep" in (chosen.missing, chosen.shape) or bool(keys))
        step = int(step_path(self.root, step).name)
        if step not in steps:
            there = ", ".join(map(str, steps[-8:])) or "none"
            raise CheckpointNotFoundError(str(step_path(self.root, step)), "the step", f"the newest steps are: {there}")
        return restore(step)

    def _newest_whole(self, steps: Sequence[int], restore: Callable[[int], Any], *, may_mix: bool) -> Any:
        """The newest step that verifies; says loudly which ones it passed over, and why."""
        if not steps:
            raise CheckpointNotFoundError(str(self.root), "steps in it", "it holds none")
        skipped: dict[int, str] = {}
        left = list(steps)
        while left:
            step = left.pop()
            try:
                found = restore(step)
            except (CorruptCheckpointError, UnsupportedFormatError, CheckpointNotFoundError) as error:
                if may_mix and isinstance(error, CorruptCheckpointError) and error.partly_filled:
                    raise  # what the older step leaves as it is in the target would be of this one
                now = self.steps()
                if step in now:
                    skipped[step] = f"step {step}: {error}"
                else:  # another process retired it meanwhile, and so has saved newer ones
                    left = [other for other in now if other not in skipped]
                continue
            if skipped:
                warnings.warn(
                    f"restored step {step} of {self.root}, not the newest: {' '.join(skipped.values())}",
                    SkippedStepWarning,
                    stacklevel=4,
                )
            return found
        findings = list(skipped.values()) or ["its steps were removed while they were read"]
        raise CorruptCheckpointError(
            str(self.root), findings, "no step of it can be restored; all are left as they are"
        )

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        self._open()
        bring_back(self._disk, self.root, mine=is_step_name)
        try:
            return list_steps(self._disk, self.root)
        except OSError as error:
            raise StorageError(f"listing {self.root}", error, "nothing was changed") from error

    def latest_step(self) -> int | None:
        """The newest committed step, None if there is none."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> Metadata:
        """What `step` holds, without reading its arrays."""
        return self._open().metadata(step_path(self.root, step))

    def verify(self, step: int, *, options: RestoreOptions | None = None) -> VerifyReport:
        """Reads all of `step` once and compares it with its checksums, without a target and without memory for one.

        Raises CorruptCheckpointError listing everything that was found, and CheckpointNotFoundError.
        """
        path = step_path(self.root, step)
        holds = _others(self.steps(), int(path.name), self.root)
        return self._open().verify(path, options=options or RestoreOptions(), holds=holds)

    def close(self) -> None:
        """Lets go of all memory. What was saved stays."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise ClosedError(f"the checkpointer of {self.root}")
        return self._engine

    def _retain(self, newest: int) -> None:
        """Retires what `keep` no longer names, of the steps that tierkeep wrote; a step that is gone already is."""
        if self.keep is None:
            return
        try:
            steps = list_steps(self._disk, self.root)
            own = [step for step in steps if self._disk.exists(step_path(self.root, step) / ITEM / WHOLE)]
        except OSError as error:
            raise StorageError(f"retaining steps of {self.root}", error, f"step {newest} is saved and whole") from error
        metrics = {step: self._metrics(step) if self.keep.best else {} for step in own}
        # What cannot be read now may be the best of all: it stays, and is not counted.
        known = {step: found for step, found in metrics.items() if found is not None}
        for step in surplus(known, self.keep, newest):
            path = step_path(self.root, step)
            try:
                retire(self._disk, path)
            except FileNotFoundError:
                continue  # another process retired it
            except OSError as error:
                raise StorageError(f"removing {path}", error, f"step {newest} is saved and whole") from error

    def _metrics(self, step: int) -> Mapping[str, Any] | None:
        """The metrics of a step; empty, so that it ranks last, if it has none; None if the disk does not say."""
        path = step_path(self.root, step) / CHECKPOINT_METADATA
        try:
            return read_metrics(self._disk.read_file(path, _METRICS_LIMIT))
        except (FileNotFoundError, ValueError):
            return {}
        except OSError:
            return None


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


def _checked(metrics: Mapping[str, Any] | None) -> dict[str, float | int | None]:
    """Metrics as JSON keeps them. Raises TypeError naming one that is no number."""
    found: dict[str, float | int | None] = {}
    for name, value in (metrics or {}).items():
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(name, str) or not isinstance(plain, int | float | None):
            raise TypeError(f"metric {name!r} must be a number, not {type(value).__name__}. Nothing was written.")
        found[name] = plain
    return found


def _others(steps: Sequence[int], step: int, root: Path) -> str:
    others = [s for s in steps if s != step]
    if not others:
        return f"{root} holds no other step"
    return f"steps {', '.join(map(str, others[-8:]))} in {root} are untouched"


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


@contextlib.contextmanager
def _draft(disk: LocalDisk, final: Path, item: str | None) -> Iterator[Draft]:
    """A draft of `final`, beside it; removed if it is not published."""
    draft = Draft.start(disk, final, item, rank=0)
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
