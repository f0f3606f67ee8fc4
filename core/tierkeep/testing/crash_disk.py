"""A disk that loses power at any operation: the system calls of a tier recorded on a real directory, and stopped.

`tierkeep.testing.aftermath` says what the disk may hold then.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any, Self

from ..tiers import local_disk
from .aftermath import ROOT, Operation, Tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

__all__ = ["CrashDisk", "PowerLoss"]

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2


class PowerLoss(BaseException):
    """The power went. No handler of errors may take it, and nothing reaches the disk after it."""


class CrashDisk:
    """Records what this process does below `path` while it is entered, whoever does it.

    Guarantees: every operation of `os` that the core uses is seen, from any thread; leaving raises AssertionError if
    the directory changed in a way that was not. With `stop_at=n`, operation n and every later one raises PowerLoss
    instead of being done, so that no clean-up runs; opening raises it too from then on. One disk at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        stop_at: int | None = None,
        renameat2: bool = True,
        left_out: Callable[[Operation], bool] | None = None,
    ) -> None:
        """Without `renameat2`, as on a file system that lacks it. Syncs for which `left_out` says so are not done."""
        self.path = path.absolute()
        self.stop_at = stop_at
        self.journal: list[Operation] = []
        self.start = Tree.read(self.path)
        """What stood there at first, all of it durable."""
        self.stopped = False
        self._renameat2_works = renameat2
        self._left_out = left_out
        self._now = self.start.copy()
        self._next = 1 + max([*self.start.dirs, *self.start.files], default=ROOT)
        self._fds: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._lock = threading.RLock()
        self._real: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for name in ("open", "close", "write", "pwrite", "fsync", "ftruncate", "mkdir", "unlink", "rmdir", "rename"):
            self._replace(os, name, getattr(self, f"_{name}"))
        for other, name in (("fdatasync", "fsync"), ("remove", "unlink"), ("replace", "rename")):
            self._replace(os, other, getattr(self, f"_{name}"))
        self._replace(local_disk, "_renameat2", self._renameat2)
        self._replace(local_disk, "_fallocate", self._fallocate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        for owner, name, real in reversed(self._real):
            setattr(owner, name, real)
        self._real.clear()
        seen, there = self._now.contents(), Tree.read(self.path).contents()
        differ = sorted(path for path in {*seen, *there} if seen.get(path, "") != there.get(path, ""))
        assert not differ, f"changed by operations that are not recorded: {', '.join(differ)}"

    def restart(self, *, stop_at: int | None) -> None:
        """Another process goes on where the last one was killed: nothing is lost, nothing more is durable."""
        self._end()
        self.stopped = False
        self.stop_at = stop_at

    def _end(self) -> None:
        """What the end of a process does: it closes what was open, locks among it."""
        if self.stopped:
            for fd in list(self._fds):
                self._close(fd)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._real.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _call(self, name: str) -> Any:
        return next(real for owner, each, real in self._real if each == name)

    # What is recorded

    def _check(self) -> None:
        if self.stopped or len(self.journal) == self.stop_at:
            self.stopped = True
            raise PowerLoss(f"after {len(self.journal)} operations")

    def _record(self, operation: Operation) -> None:
        self._now.apply(operation)
        self.journal.append(operation)

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str, str] | None:
        """(directory, name, path below the recorded one) of a path in it; None for any other."""
        text = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(text):
            directory = self._fds.get(dir_fd)
            return None if directory is None else (directory, text, f"…/{text}")
        text = os.path.abspath(text)
        if text == str(self.path):
            return ROOT, "", "."
        if not text.startswith(f"{self.path}/"):
            return None
        below = text[len(str(self.path)) + 1 :]
        *parents, name = below.split("/")
        directory = ROOT
        for parent in parents:
            directory = self._now.dirs[directory].get(parent, -1)
            if directory not in self._now.dirs:
                return None  # then the call itself says what is missing
        return directory, name, below

    def _inode(self, place: tuple[int, str, str]) -> int | None:
        directory, name, _ = place
        return directory if not name else self._now.dirs[directory].get(name)

    # What the system is asked for

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with self._lock:
            place = None if isinstance(path, int) else self._place(path, dir_fd)
            real = self._call("open")
            if place is None:
                return int(real(path, flags, mode, dir_fd=dir_fd))
            new = flags & os.O_CREAT and self._inode(place) is None
            if new or self.stopped:
                self._check()
            try:
                fd = int(real(path, flags, mode, dir_fd=dir_fd))
            except OSError as error:
                if error.errno == errno.EINVAL and new and os.path.lexists(path):  # refused after it was made
                    self._made("create", place)
                raise
            if new:
                self._made("create", place)
            inode = self._inode(place)
            assert inode is not None, f"{place[2]} was not made by a recorded operation"
            if flags & (os.O_WRONLY | os.O_RDWR) or inode in self._now.dirs:  # others are closed unseen, by io
                self._fds[fd] = inode
                self._positions[fd] = 0
            if flags & os.O_TRUNC and self._now.files.get(inode):
                self._record(Operation("truncate", place[2], inode))
            return fd

    def _made(self, kind: str, place: tuple[int, str, str]) -> None:
        directory, name, below = place
        inode, self._next = self._next, self._next + 1
        self._record(Operation(kind, below, inode, ((directory, name),)))

    def _close(self, fd: int) -> None:
        with self._lock:
            self._fds.pop(fd, None)
            self._call("close")(fd)

    def _write(self, fd: int, data: Any) -> int:
        with self._lock:
            if fd not in self._fds:
                return int(self._call("write")(fd, data))
            self._check()
            n = int(self._call("write")(fd, data))
            self._wrote(fd, self._positions[fd], bytes(data)[:n])
            self._positions[fd] += n
            return n

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        with self._lock:
            if fd not in self._fds:
                return int(self._call("pwrite")(fd, data, offset))
            self._check()
            n = int(self._call("pwrite")(fd, data, offset))
            self._wrote(fd, offset, bytes(data)[:n])
            return n

    def _wrote(self, fd: int, offset: int, data: bytes) -> None:
        inode = self._fds[fd]
        self._record(Operation("write", self._name(inode), inode, offset=offset, data=data))

    def _fsync(self, fd: int) -> None:
        with self._lock:
            if fd not in self._fds:
                self._call("fsync")(fd)
                return
            inode = self._fds[fd]
            operation = Operation("sync", self._name(inode), inode)
            if self._left_out is not None and self._left_out(operation):
                return
            self._check()
            self._record(operation)  # not done: a scratch directory outlives no crash, and syncs cost

    def _ftruncate(self, fd: int, nbytes: int) -> None:
        with self._lock:
            if fd in self._fds:
                self._check()
            self._call("ftruncate")(fd, nbytes)
            if fd in self._fds:
                self._resized(fd, nbytes)

    def _fallocate(self, fd: int, nbytes: int) -> bool:
        with self._lock:
            if fd in self._fds:
                self._check()
            done = bool(self._call("_fallocate")(fd, nbytes))
            if done and fd in self._fds:
                self._resized(fd, max(nbytes, len(self._now.files[self._fds[fd]])))
            return done

    def _resized(self, fd: int, nbytes: int) -> None:
        inode = self._fds[fd]
        self._record(Operation("truncate", self._name(inode), inode, offset=nbytes))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        with self._lock:
            place = self._place(path, dir_fd)
            if place is not None:
                self._check()
            self._call("mkdir")(path, mode, dir_fd=dir_fd)
            if place is not None:
                self._made("mkdir", place)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._removed("rmdir", path, dir_fd)

    def _removed(self, kind: str, path: Any, dir_fd: int | None) -> None:
        with self._lock:
            place = self._place(path, dir_fd)
            if place is not None:
                self._check()
            self._call(kind)(path, dir_fd=dir_fd)
            if place is not None:
                inode = self._inode(place)
                assert inode is not None, f"{place[2]} was not made by a recorded operation"
                self._record(Operation(kind, place[2], inode, (place[:2],)))

    def _rename(self, old: Any, new: Any) -> None:
        with self._lock:
            places = self._place(old, None), self._place(new, None)
            if any(places):
                self._check()
            self._call("rename")(old, new)
            self._moved("rename", *places)

    def _renameat2(self, old: Any, new: Any, flags: int) -> int:
        with self._lock:
            places = self._place(old, None), self._place(new, None)
            if any(places):
                if not self._renameat2_works:
                    return errno.EINVAL
                self._check()
            code = int(self._call("_renameat2")(old, new, flags))
            if not code:
                self._moved("exchange" if flags & _EXCHANGE else "rename", *places)
            return code

    def _moved(self, kind: str, old: tuple[int, str, str] | None, new: tuple[int, str, str] | None) -> None:
        if old is None and new is None:
            return
        assert old is not None, "moved in from outside of the recorded directory"
        assert new is not None, "moved out of the recorded directory"
        inode = self._inode(old)
        assert inode is not None, f"{old[2]} was not made by a recorded operation"
        self._record(Operation(kind, f"{old[2]} → {new[2]}", inode, (old[:2], new[:2])))

    def _name(self, inode: int) -> str:
        """Where an inode stands now."""
        waiting = [(ROOT, "")]
        for number, path in waiting:
            if number == inode:
                return path or "."
            waiting += [(child, f"{path}/{name}".lstrip("/")) for name, child in self._now.dirs.get(number, {}).items()]
        return f"removed inode {inode}"
