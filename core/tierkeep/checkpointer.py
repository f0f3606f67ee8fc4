"""The steps of one run, for any framework: an adapter's own `Checkpointer` is this one with it filled in."""

from __future__ import annotations

import errno
import logging
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, Literal, Self

from .engine import Engine, Metadata, RestorePlan, VerifyReport, restore_options
from .errors import (
    BusyError,
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    SkippedStepWarning,
    StorageError,
    TierkeepError,
    UnsupportedFormatError,
)
from .events import Events
from .format.orbax_metadata import CHECKPOINT_METADATA, read_begun
from .handle import SaveHandle, SaveReport
from .options import MemoryOptions, RestoreOptions, SaveOptions
from .save.background import BackgroundSaves
from .save.commit import bring_back, sweep
from .save.recycle import Recycler
from .save.store import retain
from .step import is_step_name, list_steps, resolve, step_path
from .tiers.host_memory import HostMemory
from .tiers.retain import Keep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from .adapter import Adapter
    from .tiers.local_disk import LocalDisk

__all__ = ["Checkpointer", "Engine", "Metadata", "RestorePlan", "SaveHandle", "SaveReport", "VerifyReport"]

_METADATA_LIMIT = 1 << 24  # bytes
_log = logging.getLogger("tierkeep")


class Checkpointer:
    """The steps of one run, in a directory with Orbax's layout: `<root>/<step>/default`.

    Guarantees: a step is visible whole or not at all; a failed save leaves every older step as it was and the next
    save works; with `keep=n`, an older step is removed only after a newer one is durable. A save in the background that
    fails is told of once, by the next `save`, `wait` or `close`, or by its handle. The newest step that was staged
    reaches the disk in the end, however training ends. One process writes a root at a time. Constructors start nothing;
    closing twice is fine.
    """

    def __init__(
        self,
        adapter: Adapter,
        root: Any,
        *,
        keep: int | Keep | None = None,
        options: SaveOptions | None = None,
        memory: MemoryOptions | None = None,
        asynchronous: bool = True,
        disk_every: int = 1,
        disk: LocalDisk | None = None,
    ) -> None:
        self.root = resolve(root)
        if not isinstance(keep, Keep | None):
            if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
                raise ValueError(f"keep must be a whole number of at least 1, a Keep, or None for all, not {keep!r}")
            keep = Keep(last=keep)
        if not isinstance(disk_every, int) or isinstance(disk_every, bool) or disk_every < 1:
            raise ValueError(f"disk_every must be a whole number of at least 1, not {disk_every!r}")
        for name, value, kind in (("options", options, SaveOptions), ("memory", memory, MemoryOptions)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
        self.keep = keep
        self.asynchronous = asynchronous and disk is None  # another process would not see a disk of the caller's own
        self.disk_every = disk_every
        self.events = Events()
        """What happens to saves in the background: `events.subscribe(function)`, `events.recent`."""
        self._engine = Engine(adapter, options, disk)
        self._disk = self._engine.disk
        self._recycler = Recycler(self._disk)
        self._background = BackgroundSaves(
            self.root, adapter, self._disk, self._engine.options, memory or MemoryOptions(), self.events
        )
        self._closed = False
        self._turn = threading.Lock()
        self._saving = 0  # the thread that is in `save`
        try:
            if self._disk.exists(self.root) and not self._disk.is_dir(self.root):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))
        except OSError as error:
            raise StorageError(f"opening {self.root} as a root", error, "what stands there is untouched") from error

    def save(
        self,
        step: int,
        state: Any,
        *,
        overwrite: bool = False,
        metrics: Mapping[str, Any] | None = None,
        asynchronous: bool | None = None,
        snapshot: Literal["copy", "deferred"] = "copy",
        to_disk: bool | None = None,
    ) -> SaveHandle:
        """Saves `state` as `step`, in the background unless `asynchronous` is False here or in the constructor.

        In the background, this returns when the state has been copied: it may be changed, and never shows in the step.
        With `snapshot="deferred"` it returns before that, and the state must not be changed until the handle's
        `wait_staged()`, or the checkpointer's, returns. The handle tells when the step is whole in memory and when it is
        durable. `to_disk=False` leaves it in memory (by default steps that `disk_every` does not divide).

        Otherwise, after the call the step is visible and durable, whole, and the handle has ended.

        Raises what an earlier save in the background failed of, with nothing done for this one: call again to go on.
        Raises CheckpointExistsError if the step exists and `overwrite` is not set, UnsupportedLeafError and
        NameCollisionError naming the key, StorageError with the system's reason, BusyError if another process saves into
        the root or the call is made inside another one, as by a signal handler. After an error the steps are those there
        were before.
        """
        if snapshot not in ("copy", "deferred"):
            raise ValueError(f'snapshot must be "copy" or "deferred", not {snapshot!r}')
        path = step_path(self.root, step)
        step = int(path.name)  # an int, whatever whole number it was
        self._check_outside(f"save({step})")
        self._open()
        with self._turn:
            try:
                self._saving = threading.get_ident()
                engine = self._open()
                metrics = _checked(metrics)
                self._background.raise_failure()
                in_background = self.asynchronous if asynchronous is None else asynchronous
                if not in_background:
                    return self._save_now(engine, path, step, state, overwrite=overwrite, metrics=metrics)
                return self._background.save(
                    path,
                    step,
                    engine.capture(state),
                    overwrite=overwrite,
                    metrics=metrics,
                    keep=self.keep,
                    to_disk=step % self.disk_every == 0 if to_disk is None else to_disk,
                    deferred=snapshot == "deferred",
                )
            finally:
                self._saving = 0

    def _save_now(
        self, engine: Engine, path: Path, step: int, state: Any, *, overwrite: bool, metrics: dict[str, Any]
    ) -> SaveHandle:
        self._background.wait()  # steps become visible in the order of their saves
        sweep(self._disk, self.root, mine=is_step_name, but=self._recycler.holds)
        report = engine.save(path, state, step=step, overwrite=overwrite, metrics=metrics, recycler=self._recycler)
        retain(self._disk, self.root, self.keep, step, self._recycler)
        handle = SaveHandle(step, str(path))
        for stage, seconds in ((handle.staged, "write"), (handle.written, "write"), (handle.committed, "commit")):
            handle.reach(stage, report.seconds[seconds], report.image_nbytes)
        handle.end(report)
        return handle

    def prepare(self, state: Any) -> None:
        """Makes ready for saves of states of this structure, in the background: the plan, the images, the worker.

        Without it the first save does that, and takes longer. Nothing of `state` is copied or kept. Raises as `save`.
        """
        self._background.prepare(self._open().capture(state).plan)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when no save is under way. Raises what one failed of, unless that was told already; TimeoutError."""
        self._open()
        self._check_outside("wait()")
        self._background.wait(timeout_s)

    def wait_staged(self) -> None:
        """Returns when the state of every deferred save has been copied. Raises nothing: the next `save` does."""
        self._background.wait_staged()

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
        self._check_outside("restore()")
        chosen = restore_options(options, relaxations)
        self._background.settle()
        steps = self.steps()

        def restore(number: int) -> Any:
            holds = _others(steps, number, self.root)
            copies = self._copies(number)
            for path in copies:
                disk = self._disk if path.parent == self.root else HostMemory()
                try:
                    return engine.restore(
                        path, target, options=chosen, keys=keys, device=device, dry_run=dry_run, holds=holds, disk=disk
                    )
                except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                    if path == copies[-1]:
                        raise
                    _log.warning("tierkeep: step %d is not restored from memory: %s", number, error)
            raise AssertionError("a step stands somewhere")

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
            newer = [reason for number, reason in skipped.items() if number > step]  # the others were retired meanwhile
            if newer:
                warnings.warn(
                    f"restored step {step} of {self.root}, not the newest: {' '.join(newer)}",
                    SkippedStepWarning,
                    stacklevel=4,
                )
            return found
        findings = list(skipped.values()) or ["its steps were removed while they were read"]
        raise CorruptCheckpointError(
            str(self.root), findings, "no step of it can be restored; all are left as they are"
        )

    def _copies(self, step: int) -> list[Path]:
        """Where a step stands, the nearest first: in this host's memory, on the disk."""
        on_disk = step_path(self.root, step)
        memory = self._background.memory_root()
        if memory is None or not self._in(memory, step):
            return [on_disk]
        in_memory = step_path(memory, step)
        if not self._in(self.root, step):
            return [in_memory]
        # A synchronous save, of this process or another, leaves in memory what it overwrites on the disk.
        return [on_disk] if self._begun(on_disk) > self._begun(in_memory) else [in_memory, on_disk]

    def _begun(self, path: Path) -> int:
        """When the save that made a step began, ns; 0 if that cannot be told."""
        try:
            return read_begun(self._disk.read_file(path / CHECKPOINT_METADATA, _METADATA_LIMIT))
        except (OSError, ValueError):
            return 0

    def _in(self, root: Path, step: int) -> bool:
        return self._disk.exists(step_path(root, step))

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first: those on the disk, and the newest in this host's memory.

        Saves under way are not among them.
        """
        self._open()
        bring_back(self._disk, self.root, mine=is_step_name)
        try:
            found = set(list_steps(self._disk, self.root))
            memory = self._background.memory_root()
            if memory is not None:
                found.update(list_steps(self._disk, memory))
            return sorted(found)
        except OSError as error:
            raise StorageError(f"listing {self.root}", error, "nothing was changed") from error

    def latest_step(self) -> int | None:
        """The newest of `steps()`, None if there is none."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> Metadata:
        """What `step` holds, without reading its arrays."""
        engine = self._open()
        self._check_outside(f"metadata({step})")
        self._background.settle()
        return engine.metadata(self._copies(step)[0])

    def verify(self, step: int, *, options: RestoreOptions | None = None) -> VerifyReport:
        """Reads all of `step` once and compares it with its checksums, without a target and without memory for one.

        The copy on the disk, if there is one; saves under way are waited for.
        Raises CorruptCheckpointError listing everything that was found, and CheckpointNotFoundError.
        """
        engine = self._open()
        self._check_outside(f"verify({step})")
        self._background.wait()
        path = self._copies(int(step_path(self.root, step).name))[-1]
        holds = _others(self.steps(), int(path.name), self.root)
        return engine.verify(path, options=options or RestoreOptions(), holds=holds)

    def close(self) -> None:
        """Ends all saves, and leaves no memory, process or thread. What was saved stays.

        A newest step that stands in memory alone is written to the disk. Raises what a save failed of, unless that was
        told already.
        """
        self._closed = True
        try:
            self._background.close()  # which goes on where an interrupt left it
        finally:
            self._recycler.close()
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TierkeepError:
            if error is None:
                raise
            _log.exception("tierkeep: a save in the background failed")  # the error that led here is the one to raise

    def _open(self) -> Engine:
        if self._closed:
            raise ClosedError(f"the checkpointer of {self.root}")
        self._background.check_process()
        return self._engine

    def _check_outside(self, call: str) -> None:
        """Raises BusyError inside a save of this thread: it cannot go on while it is waited for."""
        if self._turn.locked() and self._saving == threading.get_ident():
            raise BusyError(
                f"{call} was called inside a save of the same thread, as from a signal handler: set a flag there, and call "
                "it after the save. Nothing was done."
            )


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
