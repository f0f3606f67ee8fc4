"""Arena: the directory in a tmpfs in which one root's images live, and what each of them is at present.

    <directory>/tierkeep-<uid>/<id>/
        owner.lock  worker.lock     held by the training process, and by the process that works for it
        root                        the path of the root that this is the memory of
        plans/<key>                 what jobs refer to
        free/<name>                 images that hold nothing
        filling/<save>/image        being filled by the training process
        sealed/<number>-<save>/     job, plan and image of a save that is not on the disk yet
        steps/<step>/               a checkpoint as on a disk, its image a second name of the same memory

An image goes from free to filling to sealed by renaming, each atomic, so a process that dies leaves no doubt about any.
It is free again when neither a job nor a step needs it, under a new name. The root says in `.tierkeep-memory` which
arena is its own: a root that was removed and made anew has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["MARKER", "NEW", "Arena", "FileLock", "Settings", "make_arena", "own_arena", "remove_arena", "sweep_arenas"]

MARKER = ".tierkeep-memory"
NEW = ".new"  # the ending, among what is being filled, of an image that is being made
_ROOT = "root"
_REMOVED = ".removed"  # the ending of an arena that is being removed
_HEX = frozenset("0123456789abcdef")
_held: set[Path] = set()  # what this process has locked: to the kernel it excludes itself from nothing
os.register_at_fork(after_in_child=_held.clear)  # a fork does not share it


@dataclass(frozen=True, slots=True)
class Arena:
    """The names in an arena. Holds nothing open."""

    path: Path

    @property
    def root(self) -> Path | None:
        """What it is the memory of; None if of no root, or if it was not said yet."""
        with contextlib.suppress(FileNotFoundError):
            if name := (self.path / _ROOT).read_bytes():
                return Path(os.fsdecode(name))
        return None

    @property
    def free(self) -> Path:
        return self.path / "free"

    @property
    def filling(self) -> Path:
        return self.path / "filling"

    @property
    def sealed(self) -> Path:
        return self.path / "sealed"

    @property
    def steps(self) -> Path:
        return self.path / "steps"

    @property
    def plans(self) -> Path:
        return self.path / "plans"

    def new_free(self) -> Path:
        """A name for an image that holds nothing, never used before."""
        return self.free / secrets.token_hex(16)

    def lock_owner(self) -> FileLock | None:
        """Makes this process the one that saves into the arena; None if another one is."""
        return FileLock.take(self.path / "owner.lock", wait=False)

    def lock_worker(self) -> FileLock:
        """Waits until the worker of the last owner, which finishes what was sealed, has ended."""
        lock = FileLock.take(self.path / "worker.lock", wait=True)
        assert lock is not None
        return lock

    def has_jobs(self) -> bool:
        """Whether saves were left that somebody has to finish."""
        with contextlib.suppress(FileNotFoundError):
            return any(self.sealed.iterdir())
        return False


class Settings(NamedTuple):
    """What a training process tells its worker about an arena."""

    arena: str
    fresh: bool
    """Whether the training process is a new owner: what another one was filling is free, and what it sealed is known."""
    pending: tuple[str, ...]
    """Saves that the training process waits for, when it has to start another worker."""
    write_bytes_per_s: float | None


class FileLock:
    """A lock of this process on a file until it is closed, or the process ends in any way; a fork does not share it."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        _held.add(path)

    @classmethod
    def take(cls, path: Path, *, wait: bool) -> FileLock | None:
        """None if somebody has it: with `wait`, only if this process has."""
        if path in _held:
            return None
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _held.discard(self._path)
            os.close(fd)

    def __del__(self) -> None:
        self.close()  # an interrupt came before anybody had it


def own_arena(root: Path, directory: str) -> Arena | None:
    """The arena that `root` names as its own and that names it; None if there is none.

    Raises OSError if that cannot be told: the newest step may be in it.
    """
    try:
        name = (root / MARKER).read_bytes().decode("ascii").strip()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if len(name) != 32 or not _HEX.issuperset(name):
        return None
    path = _home(directory) / name
    try:
        if path.parent.stat().st_uid != os.geteuid():
            return None
        if (path / _ROOT).read_bytes() != os.fsencode(root):  # a copy of the root, or one that was moved
            return None
    except FileNotFoundError:
        return None
    return Arena(path)


def make_arena(root: Path | None, directory: str) -> tuple[Arena, FileLock]:
    """A new, empty arena, and this process as its owner.

    That of a root, which is there, is named by it from now on; one of None dies with its owner. Raises OSError.
    """
    home = _home(directory)
    while True:
        home.mkdir(mode=0o700, exist_ok=True)
        if home.stat().st_uid != os.geteuid() or home.is_symlink():
            raise PermissionError(f"{home} is another user's")
        arena = Arena(home / secrets.token_hex(16))
        with contextlib.suppress(FileNotFoundError):  # the last arena was removed just now, and its home with it
            arena.path.mkdir(mode=0o700)
            owner = arena.lock_owner()  # before anything else: until then it is taken for a dead process's
            if owner is not None and arena.path.exists():
                break
            if owner is not None:
                owner.close()
    try:
        for each in (arena.free, arena.filling, arena.sealed, arena.steps, arena.plans):
            each.mkdir()
        (arena.path / _ROOT).write_bytes(b"" if root is None else os.fsencode(root))
        if root is not None:
            temporary = root / f"{MARKER}.new"
            temporary.write_text(arena.path.name, encoding="ascii")
            temporary.rename(root / MARKER)
    except BaseException:
        owner.close()
        raise
    return arena, owner


def remove_arena(arena: Arena) -> None:
    """Removes an arena and what it holds, or what is left of that; its root names none from then on."""
    with contextlib.suppress(OSError):
        marker = Path(os.fsdecode((arena.path / _ROOT).read_bytes())) / MARKER
        if marker.read_text(encoding="ascii") == arena.path.name:
            marker.unlink()
    removed = arena.path.with_name(f"{arena.path.name}{_REMOVED}")
    with contextlib.suppress(FileNotFoundError):  # a process that died was at it
        arena.path.rename(removed)  # at once: nobody is to find half of it
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(removed)
    with contextlib.suppress(OSError):  # others are left in it
        arena.path.parent.rmdir()


def sweep_arenas(directory: str) -> None:
    """Removes this user's arenas that no root names any more and no process owns."""
    home = _home(directory)
    try:
        if home.stat().st_uid != os.geteuid():
            return
        names = [entry.name for entry in os.scandir(home)]
    except OSError:
        return
    for name in names:
        arena = Arena(home / name.removesuffix(_REMOVED))
        with contextlib.suppress(OSError):
            if name.endswith(_REMOVED):
                remove_arena(arena)
                continue
            root = arena.root  # None too if a process died while it made the arena
            if root is not None and own_arena(root, directory) == arena:
                continue
            owner = arena.lock_owner()
            worker = FileLock.take(arena.path / "worker.lock", wait=False)
            try:
                # The jobs of no root would go to a directory that nobody makes visible any more.
                if owner is not None and worker is not None and not (root is not None and arena.has_jobs()):
                    remove_arena(arena)
            finally:
                for lock in (owner, worker):
                    if lock is not None:
                        lock.close()


def _home(directory: str) -> Path:
    return Path(directory) / f"tierkeep-{os.geteuid()}"
