"""The raw limit: what the disk does with the same number of bytes when nobody thinks about tensors.

A plain aligned O_DIRECT write from warm buffers into a fresh preallocated file, with fsync; and O_DIRECT reads into
warm buffers. Huge pages matter most, because a request to the disk is bounded in segments, not in bytes: on a virtio
disk, 16 MiB blocks and 8 threads, 2 GB, they made 4.0 GB/s of 2.8-3.2 written and 3.2 GB/s of 2.0-2.4 read. With them
4 to 32 MiB and 2 to 8 threads all came within 8 %.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.contender import Contender

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.state import State, Tree

__all__ = ["BLOCK_NBYTES", "N_THREADS", "Limit", "LimitNew"]

BLOCK_NBYTES = 16 << 20
N_THREADS = 8
ALIGNMENT_NBYTES = 4096
FILE_NAME = "limit.bin"


class Limit(Contender):
    """Guarantees: `close` joins the threads; one buffer a thread, filled once, serves every read and write."""

    name = "limit"

    def __init__(self) -> None:
        self.note = f"O_DIRECT, {N_THREADS} threads, {BLOCK_NBYTES >> 20} MiB blocks"
        self._buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def open(self) -> None:
        for _ in range(N_THREADS):
            # Page-aligned, as O_DIRECT wants; private, because huge pages of shared memory are often switched off.
            buffer = mmap.mmap(-1, BLOCK_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer.write(os.urandom(BLOCK_NBYTES))
            self._buffers.put(buffer)
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="bench-limit")

    def save(self, state: State, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        nbytes = -(-state.nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
        fd = self._open(directory / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            self._each_block(nbytes, lambda block, offset: os.pwrite(fd, block, offset))
            os.fsync(fd)
        finally:
            os.close(fd)

    def load(self, directory: Path, into: Tree) -> Any:
        fd = self._open(directory / FILE_NAME, os.O_RDONLY)
        try:
            self._each_block(os.fstat(fd).st_size, lambda block, offset: os.preadv(fd, [block], offset))
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def _each_block(self, nbytes: int, transfer: Callable[[memoryview, int], int]) -> None:
        def run(offset: int) -> None:
            buffer = self._buffers.get()
            try:
                with memoryview(buffer) as whole, whole[: min(BLOCK_NBYTES, nbytes - offset)] as block:
                    done_nbytes = transfer(block, offset)
                    if done_nbytes != len(block):
                        raise OSError(errno.EIO, f"{done_nbytes} of {len(block)} bytes transferred at {offset}")
            finally:
                self._buffers.put(buffer)

        assert self._threads is not None, "open first"
        for _ in self._threads.map(run, range(0, nbytes, BLOCK_NBYTES)):
            pass

    def _open(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        # tmpfs and some network file systems refuse O_DIRECT; some leave behind the file they refused to open.
        self.note = "buffered, for want of O_DIRECT here"
        return os.open(path, flags & ~os.O_EXCL, 0o600)


class LimitNew(Limit):
    """The same reads into memory that nobody has touched, which the kernel has to find, clear and map on the way.

    With 4 KiB pages: huge ones took 0.7 to 2.8 s for 2 GB on a virtual machine that hands free memory back to its host,
    4 KiB ones 1.1 to 1.3 s.
    """

    name = "limit-new"

    def __init__(self) -> None:
        super().__init__()
        self.note += ", into new memory"

    def load(self, directory: Path, into: Tree) -> Any:
        fd = self._open(directory / FILE_NAME, os.O_RDONLY)
        try:
            nbytes = os.fstat(fd).st_size
            with (
                mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
                memoryview(memory) as whole,
            ):

                def read(block: memoryview, offset: int) -> int:
                    with whole[offset : offset + len(block)] as place:
                        return os.preadv(fd, [place], offset)

                self._each_block(nbytes, read)
        finally:
            os.close(fd)
