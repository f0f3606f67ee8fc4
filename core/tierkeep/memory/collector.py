"""Keeps Python's cyclic collector out of the way while many small records are made."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["collector_paused"]

_lock = threading.Lock()
_depth = 0
_was_enabled = False


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collections wait until the block ends, if they were on at all; blocks in several threads may overlap.

    10,000 leaves make enough objects to set off full collections of the whole heap, which a framework fills with half
    a million objects: they took half of the time of a small-leaf save and restore.
    """
    global _depth, _was_enabled
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()
