"""A training process that saves in the background, save after save, and dies, or its worker does, or both.

`python -m tests.crash.background_trainer REQUEST` with a `Request` as JSON. On stdout a line for everything that a
handle promises, at once, so that whoever reads knows what was promised before a kill:

    worker PID, restored INDEX STEP, begun INDEX STEP, sealed INDEX, kept INDEX, committed INDEX, ended INDEX OUTCOME,
    failed ..., struck WHO, closing, closed

An index numbers the saves of a root through all processes; every value of a state tells it. A kill comes at the n-th
event, at the n-th copy of a shard (half of it made), or at the n-th operation on files, of the training process or of
its worker, each counted in the process itself: no clock decides anything.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tierkeep.checkpointer import Checkpointer
from tierkeep.format import dtypes
from tierkeep.leaf import ArrayShard, Box, Leaf
from tierkeep.memory import worker
from tierkeep.memory.client import client
from tierkeep.memory.priority import Throttle
from tierkeep.options import PAGE, MemoryOptions, RestoreOptions, SaveOptions
from tierkeep.restore.place import NOTHING
from tierkeep.save import sealed
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkeep.events import Event
    from tierkeep.handle import SaveHandle

__all__ = ["DISK_EVERY", "FAST", "KEEP", "OPTIONS", "Request", "index_of", "main", "restore"]

DEADLINE_S = 60.0
KEEP = 2
DISK_EVERY = 3
OPTIONS = SaveOptions(chunk_nbytes=32 * PAGE, block_nbytes=8 * PAGE, lanes=2, lane_nbytes=64 * PAGE)
FAST = RestoreOptions(lanes=2, lane_nbytes=64 * PAGE)
_SIZES = (40_000, 130_000, 500_000)  # values of 8 bytes
_MODULE = "tests.crash.background_trainer"
_FILE_OPERATIONS = frozenset({"open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.scandir"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    root: str
    memory: str
    """The directory for the arena."""
    first: int
    """The index of the first save."""
    saves: int
    in_flight: int
    seed: int
    tether: int
    """A file descriptor that the process and its workers hold open: its other end tells when the last one has ended."""
    who: str = ""
    """Who dies here: `trainer`, `worker`, `both`; empty if it is somebody else who sees to it."""
    counted: str = ""
    """What is counted: `event`, `copy` or `call` in the training process, `work` in its worker, by `work_at`."""
    at: int = 0
    """When."""
    work_at: tuple[int, ...] = ()
    """When the first worker dies, the second, and so on."""
    orphaned: bool = False
    """A worker counts what it does once training has ended."""


def values(index: int) -> int:
    """How many values a state has: the structure changes every third save."""
    return _SIZES[index // 3 % len(_SIZES)]


def fill(state: dict[str, Any], index: int, step: int) -> dict[str, Any]:
    """Makes it the state of a save, in place where its arrays have the right size."""
    count = values(index)
    for name, shape in (("big", (count // 4 * 3,)), ("square", (count // 40, 10))):
        if name not in state or state[name].shape != shape:
            state[name] = np.empty(shape, np.uint64)
        flat = state[name].reshape(-1)
        flat[...] = _POSITIONS[: flat.size]
        flat |= np.uint64(index << 32)
    state |= {"index": index, "name": f"save {index}", "step": step}
    return state


_POSITIONS = np.arange(max(_SIZES), dtype=np.uint64)


def index_of(found: dict[str, Any]) -> tuple[int, int]:
    """The index and the step of a state, of which every value is what it should be: AssertionError if not."""
    index, step = found["index"], found["step"]
    expected = fill({}, index, step)
    assert found.keys() == expected.keys()
    assert found["name"] == expected["name"], (index, found["name"])
    for name in ("big", "square"):
        differ = np.flatnonzero(found[name].reshape(-1) != expected[name].reshape(-1))
        others = sorted({int(value) >> 32 for value in found[name].reshape(-1)[differ]})
        assert not len(differ), f"{len(differ)} values of save {index} are those of {others[:5]}"
    return index, step


def restore(steps: Checkpointer) -> dict[str, Any]:
    """The newest step."""
    found = steps._restore(None, NOTHING, keys=None, device=None, dry_run=False, options=FAST, relaxations={})
    assert isinstance(found, dict)
    return found


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Fate:
    """Counts until somebody dies."""

    def __init__(self, at: int, strike: Callable[[], bool]) -> None:
        self._at = at
        self._strike = strike
        """Returns False if it is to be tried again at the next count."""
        self._lock = threading.RLock()
        self._count = 0

    def tick(self) -> None:
        with self._lock:
            self._count += 1
            if self._count >= self._at > 0 and self._strike():
                self._at = 0


def watch_files(tick: Callable[[], None], *places: str) -> None:
    """Calls `tick` before every operation on a file below `places`."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _FILE_OPERATIONS and args:
            path = args[0]
            inside = isinstance(path, str | os.PathLike) and os.fspath(path).startswith(places)
            if inside or (event in ("os.remove", "os.rmdir") and args[-1] != -1):  # `rmtree` names no whole paths
                tick()

    sys.addaudithook(hook)


class DyingShard:
    """A shard in the middle of whose copy the process may die."""

    replica = 0

    def __init__(self, array: np.ndarray[Any, Any], tick: Callable[[], None]) -> None:
        self._shard = ArrayShard(Box.whole(array.shape), array.view(dtypes.bits(array.itemsize)))
        self._tick = tick
        self.box = self._shard.box

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        half = part.shape[0] // 2
        self._shard.copy(Box(part.start, (half, *part.shape[1:])), out[:half])
        self._tick()
        self._shard.copy(part, out)


class DyingAdapter(NumpyAdapter):
    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def expand(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return None
        return Leaf("ndarray", value.dtype.name, value.shape, (DyingShard(value, self._tick),))


class Trainer:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.fate = Fate(request.at, self.strike)
        self.workers = 0
        self.index = 0
        self.deferred: collections.deque[int] = collections.deque()
        self.handles: dict[int, SaveHandle] = {}
        self.said: set[tuple[int, str]] = set()
        self.lock = threading.RLock()

    def strike(self) -> bool:
        """Kills who is to die; False if there is nobody."""
        who = self.request.who
        if who != "trainer":
            process = client()._process
            if process is None or process.returncode is not None:
                return False
            say("struck", "worker")
            process.send_signal(signal.SIGKILL)
        if who != "worker":
            say("struck", "trainer")
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    def tick(self, what: str) -> None:
        if what == self.request.counted:
            self.fate.tick()

    def run(self) -> None:
        request = self.request
        self.wrap_workers()
        watch_files(lambda: self.tick("call"), request.root, request.memory)
        memory = MemoryOptions(in_flight=request.in_flight, directory=request.memory, nice=0)
        steps = Checkpointer(
            DyingAdapter(lambda: self.tick("copy")),
            request.root,
            keep=KEEP,
            options=OPTIONS,
            memory=memory,
            disk_every=DISK_EVERY,
        )
        steps.events.subscribe(self.heard)
        step = -1
        if steps.latest_step() is not None:
            index, step = index_of(restore(steps))
            assert steps.latest_step() == step
            say("restored", index, step)
        # A state for every save under way, and one more: a deferred save holds its own until it is staged.
        states: list[dict[str, Any]] = [{} for _ in range(request.in_flight + 1)]
        using: list[SaveHandle | None] = [None] * len(states)
        for index in range(request.first, request.first + request.saves):
            chance = random.Random(f"{request.seed} {index}")
            again = step >= 0 and chance.random() < 0.25
            deferred = chance.random() < 0.4
            to_disk = chance.choice((None, None, None, None, True, False))
            step += not again
            slot = index % len(states)
            before = using[slot]
            if before is not None:
                before.wait_staged(DEADLINE_S)
            self.index = index
            if deferred:
                self.deferred.append(index)
            state = fill(states[slot], index, step)  # over what the save before that was given
            handle = using[slot] = steps.save(
                step, state, overwrite=again, snapshot="deferred" if deferred else "copy", to_disk=to_disk
            )
            if not deferred:
                state["big"][...] = 0  # it may be changed now
            with self.lock:
                self.handles[index] = handle
            self.report()
        for handle in list(self.handles.values()):
            handle.result(DEADLINE_S)
        self.report()
        say("closing")
        steps.close()
        say("closed")

    def heard(self, event: Event) -> None:
        if event.what == "progress":
            return
        if event.what == "begun":
            say("begun", self.index, event.step)
        elif event.what == "staged":
            in_training = threading.current_thread() is threading.main_thread()
            say("sealed", self.index if in_training else self.deferred.popleft())
        elif event.what in ("failed", "cancelled"):
            say("failed", event.step, repr(event.error))
        self.report()
        self.tick("event")

    def report(self) -> None:
        """Says what the handles tell."""
        with self.lock:
            for index, handle in list(self.handles.items()):
                done = handle.done
                for stage in (handle.kept, handle.committed):
                    if stage.done and (index, stage.name) not in self.said:
                        self.said.add((index, stage.name))
                        say(stage.name, index)
                if done:
                    del self.handles[index]
                    say(
                        *(("ended", index, handle.report.outcome) if handle.report else ("failed", index, handle.error))
                    )

    def wrap_workers(self) -> None:
        """Has workers count too, and hold the tether."""
        start: Any = subprocess.Popen

        def popen(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
            request = dataclasses.replace(self.request, work_at=self.request.work_at[self.workers :])
            self.workers += 1
            where = command.index("tierkeep.memory.worker")
            counting = msgspec.json.encode(request).decode()
            command = [*command[:where], _MODULE, "worker", counting, *command[where + 1 :]]
            process: subprocess.Popen[bytes] = start(
                command, **settings | {"pass_fds": [*settings["pass_fds"], request.tether]}
            )
            say("worker", process.pid)
            return process

        subprocess.Popen = popen  # type: ignore[assignment,misc]


def work(request: Request, arguments: list[str]) -> None:
    """Is a worker, until it dies."""
    trainer = int(arguments[1])

    def strike() -> bool:
        if request.who == "both" and os.getppid() == trainer:
            os.kill(trainer, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def tick() -> None:
        if not (request.orphaned and os.getppid() == trainer):
            fate.tick()

    def counting(do: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            tick()
            return do(*args)

        return counted

    fate = Fate(request.work_at[0] if request.work_at else 0, strike)
    watch_files(tick, request.root, request.memory)
    for place, name in ((sealed, "checksum_batch"), (Throttle, "take")):  # each once for every batch
        setattr(place, name, counting(getattr(place, name)))
    worker.main(arguments)


def main(arguments: list[str]) -> None:
    if arguments[0] == "worker":
        work(msgspec.json.decode(arguments[1], type=Request), arguments[2:])
    else:
        Trainer(msgspec.json.decode(arguments[0], type=Request)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
