"""What the tests of background saves are made of: checkpointers, states, gates, and a worker that can be held up."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tierkeep.checkpointer import Checkpointer
from tierkeep.format import dtypes
from tierkeep.leaf import ArrayShard, Box, Leaf
from tierkeep.memory.client import client
from tierkeep.options import PAGE, MemoryOptions, SaveOptions
from tierkeep.restore.place import NOTHING
from tierkeep.save import sealed
from tierkeep.save.stage import stage_image
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from tierkeep.adapter import Adapter
    from tierkeep.events import Event, Events

__all__ = [
    "DEADLINE_S",
    "OPTIONS",
    "VALUES",
    "Gate",
    "GatedAdapter",
    "GatedArray",
    "HeldWorker",
    "Watch",
    "arena",
    "block",
    "checkpointer",
    "gate_copies",
    "images",
    "in_thread",
    "kill_worker",
    "numbers",
    "queued",
    "restore",
    "state",
    "until",
    "worker_pid",
]

DEADLINE_S = 20.0
"""What has not happened by then never will."""
OPTIONS = SaveOptions(chunk_nbytes=4 * PAGE, block_nbytes=PAGE, lanes=3, lane_nbytes=8 * PAGE)
"""Several chunks and batches even of small states."""
VALUES = 16 * PAGE // 8


def checkpointer(
    root: Path,
    memory: Path,
    *,
    adapter: Adapter | None = None,
    in_flight: int = 1,
    limits: dict[str, Any] | None = None,
    **settings: Any,
) -> Checkpointer:
    """One of numpy states, whose arena is below `memory`; `limits` are other MemoryOptions."""
    chosen: dict[str, Any] = {"directory": str(memory), "nice": 0} | (limits or {})
    options = MemoryOptions(in_flight=in_flight, **chosen)
    return Checkpointer(adapter or NumpyAdapter(), root, memory=options, **{"options": OPTIONS} | settings)


def state(number: int, values: int = VALUES) -> dict[str, Any]:
    """A state of which every value is `number`."""
    return {
        "step": number,
        "big": np.full(values, number, np.int64),
        "deep": [np.full((3, 5), number, np.float32), np.full(values // 8 + 7, number, np.int16)],
        "name": str(number),
    }


def numbers(found: Any) -> set[int]:
    """All values that a state has: one number, unless it is torn."""
    arrays = [found["big"], *found["deep"]]
    return {found["step"], int(found["name"])}.union(*(np.unique(array).astype(int).tolist() for array in arrays))


def restore(steps: Checkpointer, step: int | None = None, target: Any = NOTHING, **relaxations: Any) -> Any:
    """What an adapter's `restore` gives, without a target unless there is one."""
    return steps._restore(step, target, keys=None, device=None, dry_run=False, options=None, relaxations=relaxations)


# The arena


def arena(steps: Checkpointer) -> Path:
    """The directory of a checkpointer that has saved something."""
    found = steps._background._arena
    assert found is not None
    return found.path


def images(memory: Path) -> set[int]:
    """The inodes of all images below a directory, whatever they are called at present."""
    found = set()
    for directory, _, names in os.walk(memory):  # unlike `rglob`, it does not mind what is renamed meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                file = os.stat(os.path.join(directory, name))
                if file.st_size >= VALUES * 8:  # plans and records are smaller
                    found.add(file.st_ino)
    return found


# The worker


def worker_pid() -> int:
    pid = client().worker_pid
    assert pid is not None
    return pid


class HeldWorker:
    """As long as this is entered the worker does nothing, and what it is told waits."""

    def __init__(self) -> None:
        self.pid = worker_pid()

    def __enter__(self) -> Self:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)


def kill_worker() -> None:
    """Kills the worker; returns when its death was noticed, and another one started if one was."""
    killed = client()
    process, thread = killed._process, killed._thread
    assert process is not None
    assert thread is not None
    process.send_signal(signal.SIGKILL)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


# Events


class Watch:
    """The events of a checkpointer, to be waited for."""

    def __init__(self, events: Events) -> None:
        self.seen: list[Event] = []
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._end = events.subscribe(self._queue.put)

    def until(self, what: str, step: int | None = None) -> Event:
        """The next event of this kind."""
        while True:
            event = self._queue.get(timeout=DEADLINE_S)
            self.seen.append(event)
            if event.what == what and (step is None or event.step == step):
                return event

    def all(self) -> list[Event]:
        """What has happened so far."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.seen.append(self._queue.get_nowait())
        return self.seen

    def kinds(self, step: int) -> list[str]:
        """The stages that one step's saves reached, and how they ended, in order."""
        return [event.what for event in self.all() if event.step == step and event.what != "progress"]

    def times(self, what: str) -> collections.Counter[int | None]:
        """How often something happened, by step."""
        return collections.Counter(event.step for event in self.all() if event.what == what)


# Threads


@contextlib.contextmanager
def in_thread(*calls: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Makes calls in a thread of its own; what is yielded waits for them, and gives what the last one gave or raises."""
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(([call() for call in calls][-1], None))
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            outcome.put((None, error))

    def wait() -> Any:
        found, error = outcome.get(timeout=DEADLINE_S)
        if error is not None:
            raise error
        return found

    thread = threading.Thread(target=run, daemon=True)  # one that hangs is a failure, and not to be waited for
    thread.start()
    yield wait
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def until(reached: Callable[[], object]) -> None:
    """Waits for what nothing tells of, such as that another thread has begun to wait."""
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)  # decides nothing: only how often it is asked


def queued(steps: Checkpointer) -> bool:
    """Whether a thread waits for something to change in the saves of a checkpointer."""
    return bool(steps._background._changed._waiters)  # type: ignore[attr-defined]


# Copies that are held up


class Gate:
    """What a copy has to pass: `entered` tells that one stands before it, `open` lets one through, `stay_open` all."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._opened = threading.Semaphore(0)
        self._stays_open = False
        self._counting = threading.Lock()
        self.copies = 0

    def entered(self) -> None:
        assert self._entered.acquire(timeout=DEADLINE_S)

    def open(self) -> None:
        self._opened.release()

    def stay_open(self) -> None:
        self._stays_open = True
        self._opened.release(1000)

    def passed(self) -> None:
        self._entered.release()
        if not self._stays_open:
            assert self._opened.acquire(timeout=DEADLINE_S)
        with self._counting:
            self.copies += 1


class GatedArray:
    """An array that can only be copied through a gate, and that may tell that it was changed."""

    def __init__(
        self, array: np.ndarray[Any, Any], gate: Gate, changed: Callable[[], str | None] | None = None
    ) -> None:
        self.array = array
        self.gate = gate
        self.changed = changed


class _GatedShard:
    replica = 0

    def __init__(self, gated: GatedArray) -> None:
        array = gated.array
        self._gate = gated.gate
        self._shard = ArrayShard(Box.whole(array.shape), array.view(dtypes.bits(array.itemsize)))
        self.box = self._shard.box

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        self._gate.passed()
        self._shard.copy(part, out)


class GatedAdapter(NumpyAdapter):
    """Knows gated arrays."""

    def expand(self, value: Any) -> Any:
        if not isinstance(value, GatedArray):
            return None
        array = value.array
        return Leaf("ndarray", array.dtype.name, array.shape, (_GatedShard(value),), changed=value.changed)


def gate_copies(patch: pytest.MonkeyPatch, gate: Gate) -> None:
    """From now on every batch of any state can only be copied through a gate."""
    really = stage_image

    def gated(*args: Any) -> None:
        gate.passed()
        really(*args)

    patch.setattr(sealed, "stage_image", gated)


# Failures


def block(root: Path, step: int) -> Path:
    """Puts something into a step's place that is no checkpoint, so that no save may replace it; returns its path."""
    path = root / str(step)
    (path / "somebody's").mkdir(parents=True)
    return path
