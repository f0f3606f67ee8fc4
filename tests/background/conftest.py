"""Every test here leaves no process, thread, open file or memory behind, whatever it does."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.background.saves import DEADLINE_S, checkpointer
from tierkeep.errors import TierkeepError
from tierkeep.memory.client import client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierkeep.checkpointer import Checkpointer

__all__: list[str] = []

_TMPFS = "/dev/shm"


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """SIGINT interrupts, also where the tests were started in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in a tmpfs for this test's arenas."""
    if not os.access(_TMPFS, os.W_OK):
        pytest.skip(f"no {_TMPFS} here")
    with tempfile.TemporaryDirectory(dir=_TMPFS, prefix="tierkeep-test-") as path:
        yield Path(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def opened(root: Path, memory: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Opens checkpointers, of `root` unless another one is named; they are closed at the end, and leave nothing."""
    found: list[Checkpointer] = []
    before = _held()

    def open_(at: Path | None = None, **settings: Any) -> Checkpointer:
        found.append(checkpointer(at or root, memory, **settings))
        return found[-1]

    yield open_
    _close(found)
    assert client().worker_pid is None
    assert not list(memory.iterdir())
    assert not psutil.Process().children()
    assert _held() == before


@pytest.fixture
def steps(opened: Callable[..., Checkpointer]) -> Checkpointer:
    """One checkpointer with the usual settings."""
    return opened()


def _close(found: list[Checkpointer]) -> None:
    """Closes all; a close that hangs is ended with the worker."""
    closing = threading.Thread(target=_close_each, args=(found,), daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    if closing.is_alive():
        pid = client().worker_pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail("close does not return")


def _close_each(found: list[Checkpointer]) -> None:
    for steps in found:
        with contextlib.suppress(TierkeepError):  # what it tells of is looked at in the test, where it is to tell
            steps.close()


def _held() -> tuple[list[str], list[str]]:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(files), sorted(thread.name for thread in threading.enumerate() if "tierkeep" in thread.name)
