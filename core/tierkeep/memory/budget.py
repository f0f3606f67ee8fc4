"""Budget: whether images fit, asked before any is allocated."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from ..errors import StorageError

__all__ = ["check_budget", "has_room"]

_CGROUP = Path("/sys/fs/cgroup")
_SPARE = 1 / 32  # of the memory, left to others


def has_room(directory: str, nbytes: int) -> bool:
    """Whether the file system at `directory` takes `nbytes` more."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= nbytes


def check_budget(nbytes: int, in_use_nbytes: int, count: int, budget_nbytes: int | None) -> None:
    """Raises StorageError (ENOMEM) if `nbytes` more, for `count` images, are beyond the budget or what the host has."""
    what = f"allocating {count} images, {nbytes / 1e9:.2f} GB"
    holds = "nothing was saved. Ways out: fewer in_flight, a larger budget_nbytes, or asynchronous=False, which needs no image"
    if budget_nbytes is not None and nbytes + in_use_nbytes > budget_nbytes:
        reason = f"the budget is {budget_nbytes / 1e9:.2f} GB, of which {in_use_nbytes / 1e9:.2f} are in use"
        raise StorageError(what, OSError(errno.ENOMEM, reason), holds)
    available, total = _memory()
    if available is not None and nbytes > available - total * _SPARE:
        reason = f"{available / 1e9:.2f} GB of memory are available here"
        raise StorageError(what, OSError(errno.ENOMEM, reason), holds)


def _memory() -> tuple[int | None, int]:
    """Bytes of memory available and in all, to this container too; None where the kernel does not say."""
    available, total = _host_memory()
    with contextlib.suppress(OSError, ValueError):  # no limit, or no cgroups of the second version
        most = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        free = most - used + int(cached.get("inactive_file", 0))  # the kernel drops these first
        return (free if available is None else min(available, free)), min(total or most, most)
    return available, total


def _host_memory() -> tuple[int | None, int]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = {name: int(rest.split()[0]) << 10 for name, rest in (line.split(":", 1) for line in lines)}
        return values["MemAvailable"], values["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return None, 0
