"""The steps of one run, for any framework: an adapter's own `Checkpointer` is this one with it filled in."""

from __future__ import annotations

import errno
import os
import warnings
from typing import TYPE_CHECKING, Any, Self

from .engine import Engine, Metadata, RestorePlan, SaveReport, VerifyReport, restore_options
from .errors import (
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    SkippedStepWarning,
    StorageError,
    UnsupportedFormatError,
)
from .format.orbax_metadata import CHECKPOINT_METADATA, read_metrics
from .format.part import WHOLE
from .options import RestoreOptions, SaveOptions
from .save.commit import bring_back, retire, sweep
from .step import ITEM, is_step_name, list_steps, resolve, step_path
from .tiers.retain import Keep, surplus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from .adapter import Adapter
    from .tiers.local_disk import LocalDisk

__all__ = ["Checkpointer", "Engine", "Metadata", "RestorePlan", "SaveReport", "VerifyReport"]

_METRICS_LIMIT = 1 << 24  # bytes


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
