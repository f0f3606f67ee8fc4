"""The memory of this host as a tier: the steps in an arena, read where they lie."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from .local_disk import ImageReader, LocalDisk

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["HostMemory", "MappedReader"]


class MappedReader(ImageReader):
    """An image in a tmpfs, mapped: a restore copies from it once, straight to where the bytes go.

    The worker frees an image as soon as its step is replaced, and training fills it anew. So whoever takes bytes from
    `mapped` asks `check` before they are used. It does not become shorter meanwhile (`Image.resize`): the kernel would
    kill whoever reads where nothing is.
    """

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError also if the image was taken away just now."""
        super().__init__(path, direct=False)
        self._map: mmap.mmap | None = None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            self.check()
            self.nbytes = os.fstat(self._fd).st_size
            if self.nbytes:
                # Private, so that it can be handed out as writable, which torch asks for, and written by nobody.
                self._map = mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_COPY)
                self.mapped = np.frombuffer(self._map, np.uint8)
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises FileNotFoundError if the step was taken away meanwhile, for its image may have been filled anew.

        No two saves name their images alike: as long as the name is there, it is this save's.
        """
        self.path.stat()

    def close(self) -> None:
        super().close()
        self.mapped = None
        if self._map is not None:
            with contextlib.suppress(BufferError):  # an array of it still lives: it goes with that
                self._map.close()


class HostMemory(LocalDisk):
    """A directory tree in a tmpfs. What it does not do in memory, it does as on a disk."""

    def open_image(self, path: Path, *, direct: bool) -> ImageReader:
        return MappedReader(path)
