"""The peak of this process's resident memory over a stretch of code, by Linux's own high-water mark."""

from __future__ import annotations

import gc
from pathlib import Path

__all__ = ["MemoryPeak"]

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_HIGH_WATER_MARK = "5"


class MemoryPeak:
    """Counts from construction. `extra_nbytes` is None where the kernel does not say (no /proc, or read-only)."""

    def __init__(self) -> None:
        gc.collect()
        self._before: int | None = None
        try:
            CLEAR_REFS.write_text(RESET_HIGH_WATER_MARK)
            self._before = _status_nbytes("VmRSS")
        except (OSError, KeyError):
            pass

    def extra_nbytes(self) -> int | None:
        """Bytes by which resident memory at its highest exceeded what was resident at construction."""
        return None if self._before is None else max(0, _status_nbytes("VmHWM") - self._before)


def _status_nbytes(field: str) -> int:
    lines = STATUS.read_text(encoding="ascii").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values[field].split()[0]) << 10
