"""The directory that a measurement works in: on the disk asked for, with room enough, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NotEnoughSpaceError", "settle", "sync_tree", "workplace"]

REMOVAL_DEADLINE_S = 30.0
"""A writer's threads may outlive an interrupt and go on making files; past this the removal is given up."""


class NotEnoughSpaceError(OSError):
    """The file system has no room for what the measurement would write."""


@contextlib.contextmanager
def workplace(parent: Path | None, needed_nbytes: int) -> Iterator[Path]:
    """A fresh directory in `parent` (the current directory if None), removed however the block is left."""
    parent = Path.cwd() if parent is None else parent
    free_nbytes = shutil.disk_usage(parent).free
    if free_nbytes < needed_nbytes:
        message = f"{parent} has {free_nbytes / 1e9:.1f} GB free; this measurement needs {needed_nbytes / 1e9:.1f} GB"
        raise NotEnoughSpaceError(message)
    directory = Path(tempfile.mkdtemp(prefix=".tierkeep-bench-", dir=parent))
    try:
        yield directory
    finally:
        _remove(directory)


def sync_tree(directory: Path) -> None:
    """Every file and directory under `directory`, and its name in its parent, is on the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync(folder)
    _sync(directory.parent)


def settle() -> None:
    """Let the file system finish what deletions left to it (freed extents, discards), so that no clock runs over it."""
    os.sync()


def _sync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(directory: Path) -> None:
    with _interrupts_held_back():
        deadline_s = time.monotonic() + REMOVAL_DEADLINE_S
        while directory.exists() and time.monotonic() < deadline_s:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A second Ctrl-C does not leave half of the files behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
