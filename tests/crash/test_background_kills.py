"""Trainings that save in the background and are killed, or their workers are, or both at once.

What a handle promised before the kill is there after it, bit for bit, and nothing else is left. A kill comes from the
parent after some number of lines that the process wrote, so late by a chance amount, or from inside at a chosen event,
copy or operation on a file: see `background_trainer.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.crash.background_trainer import FAST, KEEP, OPTIONS, Request, index_of, restore
from tierkeep.checkpointer import Checkpointer, Engine
from tierkeep.errors import CorruptCheckpointError
from tierkeep.leaf import ArrayShard, Box, Leaf
from tierkeep.memory.arena import MARKER, Arena
from tierkeep.options import MemoryOptions
from tierkeep.restore.place import NOTHING
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0
"""A process that says nothing for so long is killed, and the test fails."""
END_S = 30.0
"""For a worker to end after its training."""
DEATHS = 5
"""Of one training, which goes on after each."""
SAVES = 10
"""Of one process."""
COUNTED = {"line": 44, "event": 34, "copy": 125, "call": 80}
"""How many there are of each in a process with so many saves."""
WORK = 750
"""And of a worker's operations in it."""


@dataclasses.dataclass(slots=True)
class Seen:
    """What a process said until it ended."""

    restored: tuple[int, int] | None = None
    begun: dict[int, int] = dataclasses.field(default_factory=dict)
    sealed: set[int] = dataclasses.field(default_factory=set)
    kept: set[int] = dataclasses.field(default_factory=set)
    committed: set[int] = dataclasses.field(default_factory=set)
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)
    workers: list[int] = dataclasses.field(default_factory=list)
    """Of each one it started, a file descriptor; -1 for one that had ended before it could be had."""
    closed: bool = False
    status: int = 0

    def take(self, line: str) -> None:
        word, *rest = line.split()
        if word == "worker":
            fd = -1
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(int(rest[0]))
            self.workers.append(fd)
        elif word == "restored":
            self.restored = int(rest[0]), int(rest[1])
        elif word == "begun":
            self.begun[int(rest[0])] = int(rest[1])
        elif word in ("sealed", "kept", "committed"):
            getattr(self, word).add(int(rest[0]))
        elif word == "ended":
            self.ended[int(rest[0])] = " ".join(rest[1:])
        elif word == "closed":
            self.closed = True
        elif word == "failed":
            self.failed.append(line)


class Training:
    """One training through many deaths: a root, its memory, and what was promised so far."""

    def __init__(self, disk: Path, memory: Path, chance: random.Random) -> None:
        self.root = disk / "root"
        self.memory = memory / "memory"
        self.memory.mkdir()
        self.chance = chance
        self.begun: dict[int, int] = {}
        """The step of every save, by its index."""
        self.sealed = -1
        """The newest save that was sealed, by its index."""
        self.closed = -1
        """The newest save when the memory was last given up."""
        self.committed: set[int] = set()
        self.told: list[str] = []
        """What the last process was asked, what it said and what it complained of, for people."""
        self._tethers: list[int] = []
        self._pidfds: list[int] = []
        self._errors = disk / "errors"

    def run(self, *, kill: str = "", after: int = 0, **request: Any) -> Seen:
        """Has a process go on with it until it ends; after so many lines `kill` (`trainer`, `worker`, `both`) is."""
        ours, theirs = os.pipe()
        self._tethers.append(ours)
        asked = Request(
            root=str(self.root),
            memory=str(self.memory),
            first=max(self.begun, default=-1) + 1,
            saves=SAVES,
            in_flight=self.chance.choice((1, 2)),
            seed=self.chance.randrange(1 << 32),
            tether=theirs,
            **request,
        )
        self.told = [f"{asked}, kills {kill or 'none'} after line {after}"]
        with open(self._errors, "wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.background_trainer", msgspec.json.encode(asked).decode()],
                cwd=REPOSITORY,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "core"), str(REPOSITORY)])},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=[theirs],
            )
        os.close(theirs)
        seen = Seen()
        try:
            for number, line in enumerate(self._lines(process)):
                seen.take(line)
                if kill and number >= after and self._strike(kill, process, seen):
                    kill = ""
            seen.status = process.wait(DEADLINE_S)
        finally:
            self._pidfds += [fd for fd in seen.workers if fd >= 0]
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            self.told += [self._errors.read_text()[-3000:]]
        self._check_restored(seen)
        self.begun |= seen.begun
        self.sealed = max(self.sealed, *seen.sealed, -1)
        self.committed |= seen.committed
        return seen

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[str]:
        assert process.stdout is not None
        rest = b""
        while True:
            ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
            assert ready, "the process says nothing any more"
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self.told.append(line.decode())
                yield line.decode()

    def _strike(self, kill: str, process: subprocess.Popen[bytes], seen: Seen) -> bool:
        """False if there is nobody to be killed yet."""
        worker = seen.workers[-1] if seen.workers else -1
        if kill == "worker" and worker < 0:
            return False
        if kill != "worker":
            process.kill()
        if kill != "trainer" and worker >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
        return True

    def _check_restored(self, seen: Seen) -> None:
        """What a process found when it began: the newest save of all that were sealed before, or one after it."""
        if seen.begun or seen.closed:
            found = -1 if seen.restored is None else seen.restored[0]
            assert found >= self.sealed, f"restored save {found}, not {self.sealed}"
        if seen.restored is not None:
            index, step = seen.restored
            assert self.begun.get(index) == step

    def wait_for_workers(self) -> None:
        """Returns when every process that was started has ended."""
        for tether in self._tethers:
            ready, _, _ = select.select([tether], [], [], END_S)
            assert ready, f"a worker has not ended {END_S} s after its training"
            assert os.read(tether, 1) == b""
            os.close(tether)
        self._tethers.clear()

    def newest(self) -> tuple[int, int] | None:
        """Index and step of what this process restores, starting nothing."""
        memory = MemoryOptions(directory=str(self.memory))
        with Checkpointer(NumpyAdapter(), self.root, options=OPTIONS, memory=memory) as steps:
            return None if steps.latest_step() is None else index_of(restore(steps))

    def on_disk(self) -> dict[int, int]:
        """The index of every step that stands on the disk, each read whole, with the memory out of the way."""
        found = {}
        with contextlib.closing(Engine(NumpyAdapter(), OPTIONS)) as engine:
            for path in self.root.iterdir() if self.root.exists() else ():
                if not path.name.isdecimal():
                    continue
                engine.verify(path, options=FAST)
                found[int(path.name)], step = index_of(engine.restore(path, NOTHING, options=FAST))
                assert step == int(path.name)
                assert self.begun[found[step]] == step
        for index in self.committed:
            step = self.begun[index]
            newer = [other for other in found if other > step]
            assert len(newer) >= KEEP or found.get(step, -1) >= index, f"step {step}, save {index}, was committed"
        return found

    def check_left(self) -> None:
        """After the training process was killed: its worker ends, having finished what was sealed, and leaves no more."""
        self.wait_for_workers()
        newest = self.newest()
        disk = self.on_disk()
        names = {path.name for path in self.root.iterdir()} if self.root.exists() else set()
        arenas = [Arena(path) for home in self.memory.iterdir() for path in home.iterdir()]
        if newest is None:
            assert self.sealed < 0, f"save {self.sealed} was sealed"
            assert not disk
        else:
            index, step = newest
            assert index >= self.sealed, f"restored save {index}, not {self.sealed}"
            assert self.begun[index] == step
            assert max(disk) == step
            assert disk[step] == index, f"save {disk[step]} is on the disk, and {index} in memory"
        assert len(disk) <= KEEP
        names -= {MARKER, f"{MARKER}.new"}
        assert names == set(map(str, disk)), names
        assert len(arenas) <= 1
        for arena in arenas:
            found = {each.name: os.listdir(each) for each in arena.path.iterdir() if each.is_dir()}
            # Three structures of the last process, and what the jobs that it found were of.
            assert len(found.pop("plans", [])) <= 6
            left = {name: names for name, names in found.items() if names}
            stands = newest is not None and newest[0] > self.closed
            assert left == ({"steps": [str(newest[1])]} if newest and stands else {}), left

    def check_closed(self, seen: Seen) -> None:
        """After the training process ended by itself: every save ended well, and nothing but the steps is left."""
        assert not seen.failed
        assert seen.closed
        assert seen.status == 0
        assert seen.ended.keys() == seen.begun.keys() == seen.sealed == seen.kept
        assert {index for index, outcome in seen.ended.items() if outcome == "saved"} <= seen.committed
        self.wait_for_workers()
        left = [path.name for path in self.memory.rglob("*")]
        assert not left, left
        disk = self.on_disk()
        assert len(disk) <= KEEP, disk
        names = {path.name for path in self.root.iterdir()}
        assert names == set(map(str, disk)), names
        last = max(seen.begun)
        assert disk[max(disk)] == last, disk
        assert self.begun[last] == max(disk)
        self.closed = last

    def end(self) -> None:
        """Nobody kills this one."""
        self.check_closed(self.run())

    def close(self) -> None:
        """Kills what a test that failed has left."""
        for fd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        for tether in self._tethers:
            os.close(tether)
        for path in (self.root, self.memory):
            shutil.rmtree(path, ignore_errors=True)


def trainer_dies(training: Training) -> int:
    chance = training.chance
    counted = chance.choice(list(COUNTED))
    at = chance.randrange(1, COUNTED[counted])
    if counted == "line":
        seen = training.run(kill="trainer", after=at)
    else:
        seen = training.run(who="trainer", counted=counted, at=at)
    if seen.status == 0:
        training.check_closed(seen)
        return 0
    assert seen.status == -signal.SIGKILL
    if chance.random() < 0.6:  # else the next process comes while the worker is at it
        training.check_left()
    return 1


def worker_dies(training: Training) -> int:
    chance = training.chance
    counted = chance.choice((*COUNTED, "work", "work"))
    at = chance.randrange(1, COUNTED.get(counted, WORK))
    work_at = tuple(chance.randrange(1, WORK) for _ in range(chance.choice((0, 1))))
    if counted == "line":
        seen = training.run(kill="worker", after=at, work_at=work_at)
    elif counted == "work":
        seen = training.run(who="worker", work_at=(at, *work_at))
    else:
        seen = training.run(who="worker", counted=counted, at=at, work_at=work_at)
    training.check_closed(seen)
    return len(seen.workers) - 1


def both_die(training: Training) -> int:
    chance = training.chance
    counted = chance.choice((*COUNTED, "work", "orphaned"))
    at = chance.randrange(1, COUNTED.get(counted, WORK))
    if counted == "line":
        seen = training.run(kill="both", after=at)
    elif counted == "work":
        seen = training.run(who="both", work_at=(at,))
    elif counted == "orphaned":  # the worker dies while it finishes what training has left
        at = chance.randrange(1, COUNTED["event"])
        work_at = (chance.randrange(1, 200),)
        seen = training.run(who="trainer", counted="event", at=at, work_at=work_at, orphaned=True)
    else:
        seen = training.run(who="both", counted=counted, at=at)
    if seen.status == 0:
        training.check_closed(seen)
        return 0
    assert seen.status == -signal.SIGKILL
    training.wait_for_workers()
    training.on_disk()
    return 1


def survive(die: Callable[[Training], int], kills: int, disk: Path, memory: Path, seed: int) -> dict[str, Any]:
    """Has trainings die so often, each `DEATHS` times; returns what came of it, a violation of any promise included."""
    chance = random.Random(seed)
    died = processes = 0
    violations: list[str] = []
    while died < kills and processes < 4 * kills:
        training = Training(disk, memory, chance)
        try:
            for _ in range(DEATHS):
                processes += 1
                died += die(training)
                if died >= kills:
                    break
            processes += 1
            training.end()
        except Exception as error:  # noqa: BLE001  the next one may show another
            violations.append("\n".join([*traceback.format_exception(error)[-3:], *training.told]))
        finally:
            training.close()
    return {"kills": died, "processes": processes, "violations": violations}


OFTEN = pytest.mark.full


@pytest.mark.parametrize(
    ("die", "kills"),
    [
        pytest.param(trainer_dies, 15, id="the training process"),
        pytest.param(worker_dies, 15, id="its worker"),
        pytest.param(both_die, 8, id="both"),
        pytest.param(trainer_dies, 200, id="the training process, often", marks=OFTEN),
        pytest.param(worker_dies, 200, id="its worker, often", marks=OFTEN),
        pytest.param(both_die, 100, id="both, often", marks=OFTEN),
    ],
)
@pytest.mark.timeout(1800)
def test_whoever_is_killed_nothing_that_was_sealed_is_lost(
    die: Callable[[Training], int], kills: int, tmp_path: Path, place: Path, count: Callable[..., None]
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    # On a disk; the many go on in memory, which a killed process's writes outlive alike.
    found = survive(die, kills, tmp_path if kills < 50 else place, place, seed)
    violations = found.pop("violations")
    count(**found, violations=len(violations))
    assert not violations, f"seed {seed}, {len(violations)} violations:\n\n" + "\n\n".join(violations[:5])
    assert found["kills"] >= kills


def test_a_save_is_sealed_after_the_deferred_one_before_it(tmp_path: Path, place: Path) -> None:
    """Else the earlier of two saves of the same step would be the one that stays."""
    called, overtaken = threading.Event(), threading.Event()

    class Slow(ArrayShard, frozen=True):
        def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
            if self.array[0] == 1:
                assert called.wait(DEADLINE_S)
                overtaken.wait(0.2)  # it never comes
            super().copy(part, out)
            if self.array[0] == 2:
                overtaken.set()

    class Adapter(NumpyAdapter):
        def expand(self, value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return None
            if value[0] == 2:
                called.set()
            return Leaf("ndarray", value.dtype.name, value.shape, (Slow(Box.whole(value.shape), value),))

    memory = MemoryOptions(in_flight=2, directory=str(place))
    with Checkpointer(Adapter(), tmp_path / "root", options=OPTIONS, memory=memory) as steps:
        first = steps.save(1, {"a": np.full(9, 1, np.uint64)}, snapshot="deferred")
        second = steps.save(1, {"a": np.full(9, 2, np.uint64)}, overwrite=True)
        assert first.result(DEADLINE_S).outcome == second.result(DEADLINE_S).outcome == "saved"
        assert restore(steps)["a"].tolist() == [2] * 9
    with contextlib.closing(Engine(NumpyAdapter(), OPTIONS)) as engine:
        assert engine.restore(tmp_path / "root" / "1", NOTHING, options=FAST)["a"].tolist() == [2] * 9


def test_a_restore_after_a_kill_reads_the_memory_and_no_byte_of_the_disk(tmp_path: Path, place: Path) -> None:
    training = Training(tmp_path, place, random.Random(1))
    try:
        training.run(kill="trainer", after=COUNTED["line"] // 2)
        training.check_left()
        newest = training.newest()
        assert newest is not None
        for file in training.root.rglob("*"):
            if file.is_file() and file.name != MARKER:
                file.write_bytes(bytes(file.stat().st_size))
        assert training.newest() == newest
        shutil.rmtree(training.memory)
        with pytest.raises(CorruptCheckpointError):
            training.newest()
    finally:
        training.close()
