"""Handle: a save that is under way, stage by stage."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Literal

from .errors import SaveCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

__all__ = ["SaveHandle", "SaveReport", "Stage"]


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
    """Time of each stage, and `total`. Synchronous: `plan`, `write` (copy, checksum, write and sync, overlapped),
    `commit`. In the background: `plan`, `wait` (for an image), `stage`, `keep`, `write`, `commit`."""
    outcome: Literal["saved", "in memory", "skipped"] = "saved"
    """`saved`: durable at `path`. `in memory`: as it was asked for, not on the disk. `skipped`: too many were under way."""


class Stage:
    """One stage of a save: can be polled (`done`), waited for, and awaited."""

    def __init__(self, handle: SaveHandle, name: str) -> None:
        self._handle = handle
        self.name = name
        self.seconds: float | None = None
        """What it took; None before it is reached."""
        self.nbytes = 0
        """Bytes that it moved."""

    @property
    def done(self) -> bool:
        return self.seconds is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the stage is reached; False if the save ends without it: skipped, or meant for memory alone.

        Raises what the save failed of, and TimeoutError.
        """
        return self._handle._wait(lambda: self.done, self.name, timeout_s)

    def __await__(self) -> Generator[object, object, bool]:
        return asyncio.to_thread(self.wait).__await__()

    def __repr__(self) -> str:
        return f"<{self.name}: {f'{self.seconds:.3f} s' if self.done else 'not yet'}>"


class SaveHandle:
    """A save that `Checkpointer.save` began.

    `staged`: the state was copied, and may be changed. `kept`: it is whole in this host's memory, checksummed.
    `written`: its bytes are on the disk. `committed`: it is a step, visible and durable. All methods may be called from
    any thread.
    """

    def __init__(self, step: int, path: str, cancel: Callable[[SaveHandle], bool] | None = None) -> None:
        self.step = step
        self.path = path
        self.staged = Stage(self, "staged")
        self.kept = Stage(self, "kept")
        self.written = Stage(self, "written")
        self.committed = Stage(self, "committed")
        self.waited_s = 0.0
        """How long `save` waited for another one to end before it could begin."""
        self.error: Exception | None = None
        """What it failed of."""
        self.report: SaveReport | None = None
        """What it did, once it has ended well."""
        self._told = False
        self._cancel = cancel
        # Taken by itself: an interrupt in a condition's own `__enter__` would leave it held.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._began = time.perf_counter()

    def __repr__(self) -> str:
        stages = [stage.name for stage in (self.staged, self.kept, self.written, self.committed) if stage.done]
        ended = (
            "under way"
            if not self.done
            else self.report.outcome
            if self.report is not None
            else f"failed: {self.error}"
        )
        return f"<save of step {self.step}: {', '.join(stages) or 'begun'}; {ended}>"

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.report is not None or self.error is not None

    @property
    def skipped(self) -> bool:
        """Whether nothing was saved because too many saves were under way."""
        return self.report is not None and self.report.outcome == "skipped"

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Waits until the save has ended, old steps retired included, and returns what it did.

        Raises what it failed of, which is not raised again by the checkpointer, and TimeoutError.
        """
        self._wait(lambda: False, "ended", timeout_s)
        assert self.report is not None
        return self.report

    def wait_staged(self, timeout_s: float | None = None) -> bool:
        """Returns when the state may be changed. See `Stage.wait`."""
        return self.staged.wait(timeout_s)

    def wait_written(self, timeout_s: float | None = None) -> bool:
        return self.written.wait(timeout_s)

    def wait_committed(self, timeout_s: float | None = None) -> bool:
        return self.committed.wait(timeout_s)

    def cancel(self) -> bool:
        """Stops the save, if it is not too late. True if nothing of it is left; False if it had ended, or now has.

        Returns when that is known. After True, `result` raises SaveCancelledError.
        """
        if self.done or self._cancel is None or not self._cancel(self):
            return isinstance(self.error, SaveCancelledError)
        with self._guard:
            self._changed.wait_for(lambda: self.done)
        if isinstance(self.error, SaveCancelledError):
            self._told = True
            return True
        return False

    def _wait(self, reached: Callable[[], bool], what: str, timeout_s: float | None) -> bool:
        with self._guard:
            if not self._changed.wait_for(lambda: reached() or self.done, timeout_s):
                raise TimeoutError(f"step {self.step} is not {what} after {timeout_s} s; the save goes on")
            if reached():
                return True
            if self.error is not None:
                self._told = True
                raise self.error
            return False

    # By whoever carries it out

    def reach(self, stage: Stage, seconds: float, nbytes: int) -> None:
        with self._guard:
            if stage.seconds is None:
                stage.nbytes = nbytes
                stage.seconds = seconds
            self._changed.notify_all()

    def end(self, report: SaveReport | None = None, error: Exception | None = None) -> None:
        """The save has ended; what comes later changes nothing."""
        with self._guard:
            if not self.done:
                self.report, self.error = report, error
            self._changed.notify_all()

    @property
    def seconds_since_begun(self) -> float:
        return time.perf_counter() - self._began
