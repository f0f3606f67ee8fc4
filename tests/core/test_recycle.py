"""Recycling: the next step is written over the file of a retired one, and nobody ever sees other bytes for that."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tierkeep.checkpointer import Checkpointer
from tierkeep.options import PAGE, SaveOptions
from tierkeep.restore.place import NOTHING
from tierkeep.step import ITEM
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SMALL = SaveOptions(chunk_nbytes=4 * PAGE, block_nbytes=PAGE, lanes=2, lane_nbytes=8 * PAGE)
MARK = "user.tierkeep-test"
IN_BACKGROUND = pytest.mark.parametrize("in_background", [False, True], ids=["synchronous", "in the background"])


def checkpointer(root: Path, *, keep: int | None = 1, in_background: bool = False, **settings: Any) -> Checkpointer:
    return Checkpointer(NumpyAdapter(), root, keep=keep, options=SMALL, asynchronous=in_background, **settings)


def state(number: int, pages: int = 20) -> dict[str, Any]:
    """No two numbers share a page."""
    return {"w": np.random.default_rng(number).integers(0, 1 << 32, pages * PAGE // 8, np.uint64), "number": number}


def save(steps: Checkpointer, number: int, **settings: Any) -> None:
    steps.save(number, state(number), **settings).result()


def assert_restores(steps: Checkpointer, number: int, expected: dict[str, Any] | None = None) -> None:
    found = steps._restore(number, NOTHING, keys=None, device=None, dry_run=False, options=None, relaxations={})
    expected = state(number) if expected is None else expected
    assert found["number"] == expected["number"]
    assert found["w"].tobytes() == expected["w"].tobytes()
    steps.verify(number)  # the padding too


def image(root: Path, step: int) -> Path:
    return max((root / str(step) / ITEM / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)


def spares(root: Path) -> list[str]:
    """The steps whose directories are kept for their images."""
    return [path.name.partition(".")[0] for path in root.iterdir() if ".tierkeep-trash-" in path.name]


def marked(path: Path) -> Path:
    """A file that can be told from every other one, whatever it is called and holds."""
    try:
        os.setxattr(path, MARK, b"1")
    except OSError:
        pytest.skip("files have no attributes here")
    return path


def is_marked(path: Path) -> bool:
    return MARK in os.listxattr(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A new root, on a file system that has leases."""
    with (tmp_path / "probe").open("w+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            pytest.skip("there are no leases here, so nothing is recycled")
    return tmp_path / "root"


# What is reused


@IN_BACKGROUND
def test_the_image_of_a_retired_step_becomes_the_next_one_s_under_another_name(in_background: bool, root: Path) -> None:
    with checkpointer(root, in_background=in_background) as steps:
        save(steps, 1)
        old = marked(image(root, 1)).name
        save(steps, 2)
        assert spares(root) == ["1"]
        save(steps, 3)
        assert is_marked(image(root, 3))
        assert image(root, 3).name != old
        assert spares(root) == ["2"]
        assert_restores(steps, 3)
    assert [path.name for path in root.iterdir()] == ["3"]


@IN_BACKGROUND
def test_the_image_of_an_overwritten_step_becomes_the_next_one_s(in_background: bool, root: Path) -> None:
    with checkpointer(root, keep=None, in_background=in_background) as steps:
        save(steps, 1)
        marked(image(root, 1))
        save(steps, 1, overwrite=True)
        assert not is_marked(image(root, 1))
        save(steps, 2)
        assert is_marked(image(root, 2))
        for step in (1, 2):
            assert_restores(steps, step)
    assert sorted(path.name for path in root.iterdir()) == ["1", "2"]


def test_an_image_name_is_never_used_for_other_bytes(root: Path) -> None:
    """TensorStore takes (file, offset, length) as immutable: a name that came back would be read from its cache."""
    bytes_of: dict[str, str] = {}
    reused = 0
    with checkpointer(root, keep=2) as steps:
        for number, pages in enumerate([20, 20, 3, 3, 40, 40, 1, 20, 7, 7, 20, 20, 2, 60, 5]):
            for turn in range(1 + number % 3 % 2):  # every third is overwritten
                value = state(1000 * turn + number, pages)
                steps.save(number, value, overwrite=turn > 0)
                assert_restores(steps, number, value)
                reused += is_marked(image(root, number))
                marked(image(root, number))
                for step in steps.steps():
                    digest = hashlib.sha256(image(root, step).read_bytes()).hexdigest()
                    assert bytes_of.setdefault(image(root, step).name, digest) == digest
    assert len(bytes_of) == 15 + 5
    assert reused > 10


@pytest.mark.parametrize("value", [{}, {"only": "values"}, {"w": np.zeros(0)}], ids=["empty", "values", "no bytes"])
def test_steps_without_an_image_are_retired_and_overwritten_too(value: dict[str, Any], root: Path) -> None:
    with checkpointer(root) as steps:
        for step in (1, 2, 3):
            steps.save(step, value)
            steps.save(step, value, overwrite=True)
        assert steps.steps() == [3]
        save(steps, 4)
        assert_restores(steps, 4)
    assert [path.name for path in root.iterdir()] == ["4"]


def test_a_step_of_another_size_is_written_whole_over_the_old_image(root: Path) -> None:
    with checkpointer(root) as steps, checkpointer(root.with_name("new files"), keep=None) as others:
        steps.save(1, state(1, pages=40))
        for step, pages in ((2, 40), (3, 3), (4, 3), (5, 40), (6, 40), (7, 41)):
            marked(image(root, step - 1))
            steps.save(step, state(step, pages))
            assert_restores(steps, step, state(step, pages))
            others.save(step, state(step, pages))
            assert image(root, step).stat().st_size == image(others.root, step).stat().st_size
        assert is_marked(image(root, 7))


# What is not overwritten


def opened(path: Path, stack: contextlib.ExitStack) -> Callable[[], bytes]:
    file = stack.enter_context(path.open("rb"))
    return file.read


def mapped(path: Path, stack: contextlib.ExitStack) -> Callable[[], bytes]:
    with path.open("rb") as file:
        memory = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return lambda: memory[:]


def linked(path: Path, stack: contextlib.ExitStack) -> Callable[[], bytes]:
    other = path.parents[5] / "linked"  # beside the root
    os.link(path, other)
    return other.read_bytes


def read_by_us(path: Path, stack: contextlib.ExitStack) -> Callable[[], bytes]:
    reader = stack.enter_context(contextlib.closing(LocalDisk().open_image(path, direct=True)))

    def read() -> bytes:
        out = mmap.mmap(-1, reader.nbytes)
        assert reader.read(0, memoryview(out)) == reader.nbytes
        return out[:]

    return read


@IN_BACKGROUND
@pytest.mark.parametrize("hold", [opened, mapped, linked, read_by_us], ids=lambda hold: hold.__name__)
def test_who_still_sees_the_old_step_goes_on_to_see_its_bytes(
    hold: Callable[[Path, contextlib.ExitStack], Callable[[], bytes]], in_background: bool, root: Path
) -> None:
    with contextlib.ExitStack() as stack, checkpointer(root, in_background=in_background) as steps:
        save(steps, 1)
        content = image(root, 1).read_bytes()
        read = hold(marked(image(root, 1)), stack)
        for step in (2, 3, 4):
            save(steps, step)
            assert not is_marked(image(root, step))
        assert read() == content
        assert spares(root) == ["3"]  # one that was in use is let go of


@pytest.mark.parametrize("link", ["step", "item", "part", "data", "image"])
def test_an_image_behind_a_link_is_another_s(link: str, root: Path, tmp_path: Path) -> None:
    """A step, or what is in it, may be a link to another run's."""
    with checkpointer(tmp_path / "other run") as other:
        save(other, 1)
    content = image(tmp_path / "other run", 1).read_bytes()
    with checkpointer(root) as steps:
        save(steps, 1)
        parts = image(root, 1).relative_to(root).parts
        depth = ["step", "item", "part", "data", "image"].index(link) + 1
        ours = root.joinpath(*parts[:depth])
        theirs = image(tmp_path / "other run", 1)
        for _ in parts[depth:]:
            theirs = theirs.parent
        shutil.rmtree(ours) if ours.is_dir() else ours.unlink()
        ours.symlink_to(theirs)
        for step in (2, 3, 4):
            save(steps, step)
            assert_restores(steps, step)
    assert image(tmp_path / "other run", 1).read_bytes() == content
    assert not image(tmp_path / "other run", 1).is_symlink()


def test_a_step_that_is_a_link_to_another_of_the_same_root_leaves_that_one_alone(root: Path) -> None:
    with checkpointer(root, keep=2) as steps:
        save(steps, 5)
        (root / "1").symlink_to("5")
        save(steps, 6)
        assert steps.steps() == [5, 6]
        steps.keep = None
        save(steps, 7)
        assert_restores(steps, 5)


def test_a_file_of_another_mode_is_not_taken_over(root: Path) -> None:
    """Who may read an old step may not thereby read the next one."""
    old = os.umask(0o077)
    try:
        with checkpointer(root) as steps:
            save(steps, 1)
            marked(image(root, 1)).chmod(0o644)
            for step in (2, 3):
                save(steps, step)
                assert image(root, step).stat().st_mode & 0o777 == 0o600
                assert not is_marked(image(root, step))
    finally:
        os.umask(old)


def test_who_opens_the_image_at_the_moment_it_is_taken_ends_nothing_and_sees_no_other_bytes(root: Path) -> None:
    """The kernel tells the holder of a lease by a signal, which ends a process that does not expect it."""

    class Watched(LocalDisk):
        """Somebody opens an image just before it is moved, while its lease is held."""

        def rename(self, old: Path, new: Path) -> None:
            if ".tierkeep-trash-" in str(old) and ".tierkeep-tmp-" in str(new):
                with pytest.raises(BlockingIOError):
                    os.open(old, os.O_RDONLY | os.O_NONBLOCK)
                tried.append(old)
            super().rename(old, new)

    tried: list[Path] = []
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number)) for number in (signal.SIGIO, signal.SIGURG)
    }
    try:
        with checkpointer(root, disk=Watched()) as steps:
            save(steps, 1)
            marked(image(root, 1))
            for step in (2, 3):
                save(steps, step)
                assert not is_marked(image(root, step))
            assert_restores(steps, 3)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(tried) == 1
    assert signal.SIGIO not in came, "its default is to end the process; that of SIGURG is to do nothing"


def test_without_leases_every_image_is_a_new_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with checkpointer(root) as steps:
        for step in (1, 2, 3, 4):
            save(steps, step)
            assert not is_marked(image(root, step))
            marked(image(root, step))
            assert_restores(steps, step)


# The end of a spare


@pytest.fixture
def abandoned(root: Path) -> Iterator[Checkpointer]:
    """A checkpointer with a spare that is not closed before the test ends, as by a crash."""
    steps = checkpointer(root)
    save(steps, 1)
    save(steps, 2)
    assert spares(root) == ["1"]
    yield steps
    steps.close()


def test_the_next_save_sweeps_the_spare_of_a_dead_process(abandoned: Checkpointer, root: Path) -> None:
    with checkpointer(root, keep=None) as steps:
        assert steps.steps() == [2]
        save(steps, 3)
        assert sorted(path.name for path in root.iterdir()) == ["2", "3"]


def test_a_process_whose_spare_another_one_swept_makes_a_new_image(abandoned: Checkpointer, root: Path) -> None:
    with checkpointer(root, keep=None) as steps:
        save(steps, 3)
    assert not spares(root)
    abandoned.keep = None
    save(abandoned, 4)
    for step in (2, 3, 4):
        assert_restores(abandoned, step)


def test_the_spare_goes_with_a_checkpointer_that_is_left_by_an_error(root: Path) -> None:
    def train() -> None:
        with checkpointer(root) as steps:
            save(steps, 1)
            save(steps, 2)
            assert spares(root) == ["1"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert [path.name for path in root.iterdir()] == ["2"]


def test_a_save_that_fails_with_the_spare_in_its_draft_leaves_the_newest_step(root: Path) -> None:
    class Full(LocalDisk):
        full = False

        def write_file(self, path: Path, data: bytes) -> None:
            if self.full and path.name == "tierkeep.json":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            super().write_file(path, data)

    disk = Full()
    with checkpointer(root, disk=disk) as steps:
        save(steps, 1)
        save(steps, 2)
        disk.full = True
        with pytest.raises(OSError, match="No space left"):
            save(steps, 3)
        assert [path.name for path in root.iterdir()] == ["2"]
        assert_restores(steps, 2)
        disk.full = False
        save(steps, 3)
        assert_restores(steps, 3)
