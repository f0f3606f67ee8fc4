"""Dropping files from the page cache, and checking that they are gone: a reader is measured from a cold cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["drop"]

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
COLD_SHARE = 0.01
"""Up to this share of the pages may still be resident in a cache that is called cold."""


def drop(directory: Path) -> str:
    """Drop every file under `directory` from the cache. Empty when they are gone, else what could not be done.

    `posix_fadvise` needs no privilege but may be ignored (tmpfs, pages in use); then, with the privilege to write
    `drop_caches`, everything is dropped. Only then: it also marks the pages of every tmpfs for reclaim, and such pages the
    kernel maps one by one, which made a restore from memory take 2.5 times as long. Only clean pages can be dropped: sync
    first.
    """
    for path in _files(directory):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    share = _resident_share(directory)
    if (share is None or share > COLD_SHARE) and os.access(DROP_CACHES, os.W_OK):
        # A container may show the file as writable and refuse: what counts is checked below.
        with contextlib.suppress(OSError):
            DROP_CACHES.write_text("3")
        share = _resident_share(directory)
    if share is None:
        return "whether the cache was cold could not be checked"
    return f"cache not cold: {share:.0%} of the pages resident" if share > COLD_SHARE else ""


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _resident_share(directory: Path) -> float | None:
    """The share of the pages in memory by `mincore`, which, unlike a trial read, starts no readahead."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    n_pages = n_resident = 0
    for path in _files(directory):
        nbytes = path.stat().st_size
        if not nbytes:
            continue
        n_file_pages = -(-nbytes // mmap.PAGESIZE)
        answers = bytearray(n_file_pages)
        fd = os.open(path, os.O_RDONLY)
        try:
            mapped = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        with mapped:
            start = ctypes.c_char.from_buffer(mapped)
            out = (ctypes.c_char * n_file_pages).from_buffer(answers)
            failed = mincore(ctypes.addressof(start), nbytes, ctypes.addressof(out))
            del start, out
        if failed:
            return None
        n_pages += n_file_pages
        n_resident += int(np.count_nonzero(np.frombuffer(answers, np.uint8) & 1))
    return n_resident / n_pages if n_pages else 0.0
