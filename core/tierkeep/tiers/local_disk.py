"""A local file system: every system call of a save and a restore that touches a file goes through here.

That makes it the place where crashes and faults are forced in tests, and where what a file system lacks (O_DIRECT,
fallocate, an atomic exchange) is made up for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import stat
from typing import TYPE_CHECKING, Any

import numpy as np

from ..options import PAGE

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DirLock", "ImageReader", "ImageWriter", "LocalDisk"]

_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

Buffer = memoryview | np.ndarray[Any, Any]


class ImageWriter:
    """A file that is written in place by several threads. Made by `LocalDisk.create_image`."""

    def __init__(self, path: Path, nbytes: int, direct: bool, recycled: bool) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CLOEXEC | (0 if recycled else os.O_CREAT | os.O_EXCL)
        self.direct = direct
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o666)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self.direct = False  # the file system refuses O_DIRECT; it may have made the file before it did
            if not recycled:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
            self._fd = os.open(path, flags, 0o666)
        try:
            there = os.fstat(self._fd).st_size if recycled else 0
            # Into a fallocated file buffered writes are the slowest of all (0.5 GB/s), direct ones the fastest.
            if there > nbytes or (there < nbytes and not (self.direct and _fallocate(self._fd, nbytes))):
                os.ftruncate(self._fd, nbytes)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Writes all of `data`; its address, length and `offset` are multiples of PAGE."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)
            if done % PAGE and self.direct:
                # A short write left the alignment. Repeating the page it ended in could go on for ever.
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self.direct = False

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class ImageReader:
    """A file read at many places by several threads: from the page cache what is there, the rest past it."""

    def __init__(self, path: Path, direct: bool) -> None:
        self.path = path
        self.mapped: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        """All of it, where it can be read in place."""
        self._fd = _open_regular(path)
        self._direct_fd = -1
        try:
            self.nbytes = os.fstat(self._fd).st_size
            if direct:
                with contextlib.suppress(OSError):  # refused: everything goes through the page cache
                    self._direct_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, out: memoryview) -> int:
        """Fills `out` from `offset` on; its address, length and `offset` are multiples of PAGE.

        Returns the bytes read: fewer than asked only at the end of the file.
        """
        done = self._read_cached(offset, out)
        done -= done % PAGE
        fd = self._direct_fd if self._direct_fd >= 0 else self._fd
        while done < len(out) and offset + done < self.nbytes:
            n = os.preadv(fd, [out[done:]], offset + done)
            if n == 0:  # the file has become shorter
                break
            done += n
            if n % PAGE:  # a short read left the alignment that a direct one needs
                fd = self._fd
        return done

    def fileno(self) -> int:
        return self._fd

    def check(self) -> None:
        """Raises FileNotFoundError if what was taken from `mapped` may be other bytes than the file's."""

    def _read_cached(self, offset: int, out: memoryview) -> int:
        """What of `out` the page cache holds from `offset` on; asked of one page first, because a whole range that is
        not there costs about a tenth of the time to read it past it.
        """
        if self._direct_fd < 0:
            return 0
        try:
            if os.preadv(self._fd, [out[:PAGE]], offset, os.RWF_NOWAIT) < PAGE:
                return 0
            return os.preadv(self._fd, [out], offset, os.RWF_NOWAIT)
        except OSError:  # not resident, or no such question on this file system
            return 0

    def close(self) -> None:
        for name in ("_fd", "_direct_fd"):
            fd = getattr(self, name, -1)
            if fd >= 0:
                setattr(self, name, -1)
                with contextlib.suppress(OSError):  # it is closed all the same, and so is the other one after it
                    os.close(fd)


class DirLock:
    """Held on a directory until it is closed, or its process ends in any way. Made by `LocalDisk.lock`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # it is closed all the same, and nothing was written through it
                os.close(fd)


class LocalDisk:
    """The operations a save and a restore need of a directory tree. Holds nothing open."""

    def create_image(self, path: Path, nbytes: int, *, direct: bool, recycled: bool = False) -> ImageWriter:
        """A new file of `nbytes`; with `recycled`, the one that stands at `path`, to be overwritten whole."""
        return ImageWriter(path, nbytes, direct, recycled)

    def take_over(self, old: Path, new: Path) -> bool:
        """Moves a file that is to be overwritten; False, with the file as it was or gone, if a new one has to be made.

        It has if anybody may see the old bytes: who has the file open or mapped (the kernel grants a write lease only if
        nobody has), or by another hard link. Also if owner and mode are not those of a new file.
        """
        fd = os.open(old, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_nlink != 1 or _access(os.fstat(fd)) != _access(os.stat(new.parent)):
                return False
            try:
                # Whoever opens it now has a signal sent to this process: of itself SIGIO, which would end it.
                fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError:  # in use, or a file system without leases
                return False
            self.rename(old, new)
            with contextlib.suppress(OSError):
                if fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
                    return True
            new.unlink()  # somebody is about to have it open
            return False
        finally:
            with contextlib.suppress(OSError):  # it is closed all the same, and nothing was written through it
                os.close(fd)

    def open_image(self, path: Path, *, direct: bool) -> ImageReader:
        return ImageReader(path, direct)

    def write_file(self, path: Path, data: bytes) -> None:
        """A new file with these bytes, durable once its directory is synced too."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def read_file(self, path: Path, most: int) -> bytes:
        """The bytes of a regular file; OSError (EFBIG) if there are more than `most`."""
        with os.fdopen(_open_regular(path), "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes > most:
                raise OSError(errno.EFBIG, f"{nbytes} bytes, more than {most}", str(path))
            return file.read()

    def read_head(self, path: Path, most: int) -> bytes:
        """The first bytes of a regular file, up to `most`."""
        with os.fdopen(_open_regular(path), "rb") as file:
            return file.read(most)

    def make_dir(self, path: Path, *, parents: bool = False) -> None:
        path.mkdir(parents=parents, exist_ok=parents)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_file(self, path: Path) -> None:
        """Makes durable what somebody else wrote into a file."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; replaces a file or an empty directory."""
        old.rename(new)

    def rename_new(self, old: Path, new: Path) -> bool:
        """Atomic; False, with nothing done, if anything stands at `new`."""
        code = _renameat2(old, new, _RENAME_NOREPLACE)
        if code in _NOT_SUPPORTED:  # then a directory is only replaced if it is empty
            if os.path.lexists(new):
                return False
            old.rename(new)
        elif code == errno.EEXIST:
            return False
        elif code:
            raise OSError(code, os.strerror(code), str(old), None, str(new))
        return True

    def exchange(self, one: Path, other: Path) -> bool:
        """Swaps two names atomically; False, with nothing done, where the file system cannot."""
        code = _renameat2(one, other, _RENAME_EXCHANGE)
        if code and code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code), str(one), None, str(other))
        return not code

    def lock(self, path: Path) -> DirLock | None:
        """A lock on the directory that stands at `path`; None if another holds it, or nothing stands there any more.

        Raises OSError where the file system has no locks.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been renamed or removed between the two calls.
            if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                return DirLock(fd)
        except (BlockingIOError, FileNotFoundError):
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def exists(self, path: Path) -> bool:
        """Whether anything stands there. Raises OSError if that cannot be told: no step is ever taken for none."""
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def identity(self, path: Path) -> tuple[int, int, int] | None:
        """Tells what stands at a path from what stood there before; None if nothing does."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def is_inside(self, path: Path, directory: Path) -> bool:
        """Whether a name leads to a place in `directory` once every link in both is followed."""
        return os.path.realpath(path).startswith(os.path.join(os.path.realpath(directory), ""))

    def is_below(self, path: Path, directory: Path) -> bool:
        """Whether no link is followed on the way from a directory to a path in it. Raises OSError if it cannot be told."""
        real = os.path.realpath(directory, strict=True)
        return os.path.realpath(path, strict=True) == os.path.join(real, path.relative_to(directory))

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def list_dir(self, path: Path) -> list[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return list(entries)

    def remove_tree(self, path: Path) -> None:
        """Removes a directory and what is in it; never follows a link."""
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)


def _access(found: os.stat_result) -> tuple[int, int, int]:
    """Who may read and write it. Of a file just made it is that of its directory, if that was just made too."""
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode) & 0o666


def _open_regular(path: Path) -> int:
    """A regular file opened to be read; OSError (EINVAL) for anything else. Does not wait, as opening a pipe would."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _renameat2(old: Path, new: Path, flags: int) -> int:
    """0, or the error's number."""
    if not hasattr(_libc, "renameat2"):
        return errno.ENOSYS
    if _libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return 0
    return ctypes.get_errno()


def _fallocate(fd: int, nbytes: int) -> bool:
    # os.posix_fallocate writes zeros where the file system has no fallocate; the system call says so instead.
    if not nbytes or not hasattr(_libc, "fallocate"):
        return False
    code = errno.EINTR
    while code == errno.EINTR:  # a signal came: Python repeats its own calls, but not this one
        if _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(nbytes)) == 0:
            return True
        code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code))
