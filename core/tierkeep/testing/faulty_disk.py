"""System calls that fail on purpose: every one that touches files below a directory is counted, and can be refused.

Calls are caught where Python hands them to the kernel (`os`, `fcntl`, `io.open` and the two that `tiers.local_disk` makes
through ctypes), not at `LocalDisk`: its own retries, fallbacks and cleaning are then under test too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..tiers import local_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["CAN_FAIL", "SHORT", "Call", "Decide", "FaultyCalls", "from_then_on", "never", "once"]

SHORT = -1
"""Instead of an errno: the call moves only about half of the bytes it was asked to move."""

_MAKE = frozenset({"create", "fallocate", "fsync", "ftruncate", "mkdir", "pwrite", "rename", "renameat2", "write"})
_NAMED = frozenset(
    {"create", "lstat", "mkdir", "open", "rename", "renameat2", "rmdir", "scandir", "stat", "unlink"},
)
CAN_FAIL: dict[int, frozenset[str] | None] = {
    errno.ENOSPC: _MAKE,
    errno.EDQUOT: _MAKE,
    errno.EIO: None,
    errno.EACCES: _NAMED,
    errno.EMFILE: frozenset({"create", "open", "scandir"}),
    errno.EINTR: frozenset({"fallocate"}),  # Python itself repeats the others that the kernel interrupts
    SHORT: frozenset({"preadv", "pwrite", "read", "write"}),
}
"""Which calls can fail with what; None for any."""


class Call(NamedTuple):
    """A system call that is about to be made."""

    number: int
    """From 0, in the order in which the calls began."""
    name: str
    """The system call's, but `create` for an open that makes a file."""
    path: str
    """The file; of a rename the old name."""


Decide = "Callable[[Call], int]"
"""From a call to 0 (let it through), an errno, or SHORT."""


def never(call: Call) -> int:
    """No call fails: they are only recorded."""
    return 0


def once(number: int, code: int) -> Callable[[Call], int]:
    """The call of this number fails with `code`, if it can."""
    return lambda call: code if call.number == number and _can(call, code) else 0


def from_then_on(number: int, code: int) -> Callable[[Call], int]:
    """This call and every later one fails with `code`, if it can: a disk that is full, gone, or no longer ours."""
    return lambda call: code if call.number >= number and _can(call, code) else 0


def _can(call: Call, code: int) -> bool:
    names = CAN_FAIL[code]
    return names is None or call.name in names


class FaultyCalls:
    """While entered, all system calls of this process that touch files below `root` are recorded and may fail.

    Guarantees: calls on other files are neither counted nor changed. A refused call has no effect, except `close`,
    which closes, as the kernel's does. At the end everything is as it was; files opened meanwhile stay usable. Calls
    made inside C code (a library's, or a directory entry's own `stat`) are not seen.
    """

    def __init__(self, root: Path, decide: Callable[[Call], int] = never) -> None:
        self.calls: list[Call] = []
        self.failed: list[Call] = []
        """The calls that were refused or cut short."""
        self._root = os.path.realpath(root)
        self._decide = decide
        self._lock = threading.Lock()
        self._fds: dict[int, str] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        for name in ("lstat", "mkdir", "rmdir", "stat", "unlink"):
            self._replace(os, name, self._by_path(name, getattr(os, name)))
        self._replace(os, "remove", self._by_path("unlink", os.remove))
        for name in ("rename", "replace"):
            self._replace(os, name, self._by_path("rename", getattr(os, name)))
        for name in ("fdatasync", "fstat", "fsync", "ftruncate"):
            self._replace(os, name, self._by_fd(name, getattr(os, name)))
        self._replace(fcntl, "flock", self._by_fd("flock", fcntl.flock))
        self._replace(fcntl, "fcntl", self._by_fd("fcntl", fcntl.fcntl))
        self._replace(os, "open", self._opening(os.open))
        self._replace(os, "close", self._closing(os.close))
        self._replace(os, "pwrite", self._moving("pwrite", os.pwrite, _half_write))
        self._replace(os, "write", self._moving("write", os.write, _half_write))
        self._replace(os, "preadv", self._moving("preadv", os.preadv, _half_preadv))
        self._replace(os, "read", self._moving("read", os.read, _half_read))
        self._replace(os, "scandir", self._scanning(os.scandir))
        self._replace(io, "open", self._opening_file(io.open))
        self._replace(local_disk, "_libc", _Libc(self, local_disk._libc))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The absolute path of a file that is watched, None of one that is not."""
        if isinstance(path, int):
            return self._fds.get(path)
        text = os.fsdecode(os.fspath(path))
        if dir_fd is not None:
            above = self._fds.get(dir_fd)
            return None if above is None else os.path.join(above, text)
        text = os.path.abspath(text)
        return text if text == self._root or text.startswith(self._root + os.sep) else None

    def pass_through(self, name: str, path: str) -> bool:
        """Records a call and raises what it is to fail with; True if it is to be cut short."""
        with self._lock:
            call = Call(len(self.calls), name, path)
            self.calls.append(call)
            code = self._decide(call)
            if code:
                self.failed.append(call)
        if code and code != SHORT:
            raise OSError(code, os.strerror(code), path)
        return code == SHORT

    def _replace(self, module: Any, name: str, new: Any) -> None:
        self._undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, new)

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, dir_fd: int | None = None, **named: Any) -> Any:
            watched = self.below(path, dir_fd)
            if watched is not None:
                self.pass_through(name, watched)
            return real(path, *args, **named) if dir_fd is None else real(path, *args, dir_fd=dir_fd, **named)

        return call

    def _by_fd(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: Any, *args: Any) -> Any:
            watched = self._fds.get(fd if isinstance(fd, int) else fd.fileno())
            if watched is not None:
                self.pass_through(name, watched)
            return real(fd, *args)

        return call

    def _moving(self, name: str, real: Callable[..., Any], half: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        def call(fd: int, *args: Any) -> Any:
            watched = self._fds.get(fd)
            if watched is not None and self.pass_through(name, watched):
                args = half(*args)
            return real(fd, *args)

        return call

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            watched = self.below(path, dir_fd)
            if watched is not None:
                self.pass_through("create" if flags & os.O_CREAT else "open", watched)
            fd = real(path, flags, mode, dir_fd=dir_fd)
            if watched is not None:
                self._fds[fd] = watched
            return fd

        return call

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            watched = self._fds.pop(fd, None)
            real(fd)
            if watched is not None:
                self.pass_through("close", watched)

        return call

    def _scanning(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            watched = self.below(path)
            if watched is None:
                return real(path)
            self.pass_through("scandir", watched)
            return _Entries(self, watched, real(path))

        return call

    def _opening_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            watched = self.below(file)
            if watched is None or mode != "rb":
                return real(file, mode, *args, **named)
            if not isinstance(file, int):
                self.pass_through("open", watched)
            return io.BufferedReader(_File(self, file, watched))

        return call


def _half(nbytes: int) -> int:
    """About half, whole sectors if there are any: a direct write ends at none other."""
    return max(1, nbytes // 2 // 512 * 512 or nbytes // 2)


def _half_write(data: Any, *args: Any) -> tuple[Any, ...]:
    return (memoryview(data)[: _half(len(data))], *args)


def _half_preadv(buffers: Any, *args: Any) -> tuple[Any, ...]:
    return ([buffers[0][: _half(len(buffers[0]))]], *args)


def _half_read(nbytes: int) -> tuple[Any, ...]:
    return (_half(nbytes),)


class _File(io.FileIO):
    """A file opened for reading by `io.open`, `os.fdopen` included."""

    def __init__(self, calls: FaultyCalls, file: Any, path: str) -> None:
        super().__init__(file, "rb")
        self._calls = calls
        self._path = path
        calls._fds[self.fileno()] = path

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)
        if self._calls.pass_through("read", self._path):
            view = view[: _half(len(view))]
        return super().readinto(view)

    def readall(self) -> bytes:
        parts: list[bytes] = []
        while True:
            part = bytearray(1 << 16)
            got = self.readinto(part)
            if not got:
                return b"".join(parts)
            parts.append(bytes(part[:got]))

    def close(self) -> None:
        if self.closed:
            return
        self._calls._fds.pop(self.fileno(), None)
        super().close()
        self._calls.pass_through("close", self._path)


class _Entries:
    """What `os.scandir` gives: reading it, and closing it, are system calls too."""

    def __init__(self, calls: FaultyCalls, path: str, entries: Any) -> None:
        self._calls = calls
        self._path = path
        self._entries = entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        self._calls.pass_through("getdents", self._path)
        return iter(self._entries)

    def close(self) -> None:
        self._entries.close()


class _Libc:
    """What `tiers.local_disk` calls through ctypes."""

    def __init__(self, calls: FaultyCalls, real: Any) -> None:
        self._calls = calls
        self._real = real

    def renameat2(self, old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> int:
        if self._refused("renameat2", self._calls.below(old)):
            return -1
        return int(self._real.renameat2(old_dir, old, new_dir, new, flags))

    def fallocate(self, fd: int, *args: Any) -> int:
        if self._refused("fallocate", self._calls.below(fd)):
            return -1
        return int(self._real.fallocate(fd, *args))

    def _refused(self, name: str, path: str | None) -> bool:
        if path is None:
            return False
        try:
            self._calls.pass_through(name, path)
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return True
        return False
