"""What keeps background work out of training's way: a low priority, and a limit to its bandwidth."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Throttle", "lower_priority"]

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_BEST_EFFORT_LOWEST = (2 << 13) | 7
_NAP_S = 0.1  # between two looks at whether there is still something to wait for


def lower_priority(nice: int) -> None:
    """Adds `nice` to the niceness of this thread and those it starts, and puts their disk requests behind others'.

    Both are asked for as favours: where the system refuses, the work is done all the same.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
    number = _IOPRIO_SET.get(platform.machine())
    if nice and number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT_LOWEST)


class Throttle:
    """Lets through so many bytes a second, on the average since it was last idle. Shared by threads."""

    def __init__(
        self,
        nbytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = nbytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int, check: Callable[[], object] = lambda: None) -> None:
        """Returns when `nbytes` more may pass; `check` is called now and then, and may raise."""
        if self._rate is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
        while begin > now:
            self._sleep(min(begin - now, _NAP_S))
            check()
            now = self._clock()
