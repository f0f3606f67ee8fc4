"""Image: memory that two processes share, mapped, in which one checkpoint is laid out as it will lie on the disk."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..options import PAGE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Image"]

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SPAN_NBYTES = 64 << 20  # of one request to map pages, so that an interrupt is not held up
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Image:
    """A file in a tmpfs, or memory without a name, open and mapped in this process.

    Guarantees: all of its pages are allocated before they are mapped, so that no access can fail for want of memory;
    what is written through one process's mapping is what another one reads. Closing twice is fine.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over an open file of at least `nbytes`."""
        self._fd = fd
        self._map: mmap.mmap | None = None
        self.nbytes = nbytes
        found = os.fstat(fd)
        self.identity = found.st_dev, found.st_ino
        """Tells an image from every other one, whatever it is called."""
        self.named = True
        """Whether it is a file that another process can find."""
        self.pinned: Any = None
        """What an adapter keeps to undo what it did to the memory; None if it did nothing."""

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Image:
        """A new file at `path`, its pages allocated. Raises OSError (ENOSPC) if there is no room, leaving nothing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return cls(fd, nbytes)

    @classmethod
    def open(cls, path: Path) -> Image:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return cls(fd, os.fstat(fd).st_size)

    @classmethod
    def anonymous(cls, nbytes: int) -> Image:
        """Memory without a name: for a host whose tmpfs is too small. It ends with the last process that has it open."""
        fd = os.memfd_create("tierkeep-image", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
        image = cls(fd, nbytes)
        image.named = False
        return image

    @property
    def array(self) -> Bytes:
        """Its bytes, `nbytes` of them."""
        if self._map is None:
            self._map = mmap.mmap(self._fd, self.nbytes)
        return np.frombuffer(self._map, np.uint8, self.nbytes)

    def populate(self) -> None:
        """Maps every page now, so that no copy waits for that. Lets other threads run meanwhile."""
        array = self.array
        if not len(array):
            return
        address = array.__array_interface__["data"][0]
        for start in range(0, self.nbytes, _SPAN_NBYTES):
            span = min(_SPAN_NBYTES, self.nbytes - start)
            if _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(span), _MADV_POPULATE_WRITE):
                pages = array[start : start + span : PAGE]  # an older kernel: touch each page
                pages[...] = pages.copy()

    def resize(self, nbytes: int) -> None:
        """Makes it `nbytes` long; what it held is lost.

        Raises OSError with nothing changed: ENOSPC, and BlockingIOError if it would become shorter while a restore has it
        mapped (`MappedReader`), which the kernel would kill.
        """
        if nbytes < self.nbytes:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._unmap()
        try:
            if nbytes > self.nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
            os.ftruncate(self._fd, nbytes)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.nbytes = os.fstat(self._fd).st_size

    def fileno(self) -> int:
        return self._fd

    def _unmap(self) -> None:
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # an array of it still lives: it goes with that
                mapped.close()

    def close(self) -> None:
        self._unmap()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
