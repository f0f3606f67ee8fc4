"""Processes that are killed while they save, overwrite, retire and restore.

A kill comes after some number of system calls, from the process itself (at that call exactly) or from its parent, which
counts along and so comes late by a chance amount; a few come at once, whatever the process is at.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.crash.steps import assert_steps, checkpointer, file_bytes, leftovers, others, restore, state
from tests.crash.writer import AFTER_INTERRUPT
from tierkeep.memory.lanes import run_lanes
from tierkeep.testing.strategies import exact_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 60.0
"""A process that says nothing for so long is killed, and the test fails."""
ACTIONS = ("save", "overwrite", "retire", "recycle", "restore")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Writer:
    """A `writer.py` process, which is killed, with its fork, at the end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.writer"],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "core"), str(REPOSITORY)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def run(self, root: Path, action: str, **request: Any) -> tuple[int, int]:
        """Has one request done. Returns how it ended, negative the signal's number, and the system calls it made."""
        kill_after, signum = request.pop("kill_after", None), request["signum"]
        line = json.dumps({"root": str(root), "action": action, "lanes": False, "dies_at": None} | request)
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        word, number = self._line().split()
        assert word == b"pid"
        pid = int(number)
        calls = 0
        while True:
            if calls == kill_after:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)  # ours: the writer waits for it only after it has ended
                kill_after = None
            byte = self._byte()
            if byte == b"\n":
                break
            calls += 1
        word, number = self._line().split()
        assert word == b"end"
        return os.waitstatus_to_exitcode(int(number)), calls

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += self._byte()
        return line

    def _byte(self) -> bytes:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        assert ready, "the process says nothing any more"
        byte = os.read(self._process.stdout.fileno(), 1)
        assert byte, "the process has ended"
        return byte


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    with Writer() as process:
        yield process


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the steps 1 and 2."""
    root = tmp_path_factory.mktemp("template") / "root"
    with checkpointer(root) as steps:
        steps.save(1, state(1))
        steps.save(2, state(2))
    return root


def check_after_a_kill(root: Path, template: Path, action: str, step: int, seed: int) -> None:
    """Whatever became of the process: nothing torn, nothing lost, and the next save works and sweeps."""
    with checkpointer(root) as steps:
        visible = [number for number in steps.steps() if number != AFTER_INTERRUPT]
        saved = {step: seed, step + 1: seed + 1} if action == "recycle" else {step: seed}
        new = {number for number in saved if number in visible and restore(steps, number)["step"] == saved[number]}
        for number in new:
            assert exact_form(restore(steps, number)) == exact_form(state(saved[number]))
        old = {1, 2} - new
        if action in ("retire", "recycle") and new:
            old &= set(visible)
        assert visible == sorted(old | new)
        for number in old:
            assert file_bytes(root / str(number)) == file_bytes(template / str(number))
        assert not others(root)
        steps.save(9000, state(9000))
        assert not leftovers(root)
        assert exact_form(restore(steps)) == exact_form(state(9000))


def kill_once(
    writer: Writer, template: Path, place: Path, action: str, signum: int, *, lanes: bool = False, **when: int
) -> tuple[int, int]:
    root = place / "root"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    step, seed = (2, 77) if action == "overwrite" else (3, 78)
    ended = writer.run(root, action, step=step, seed=seed, signum=int(signum), lanes=lanes, **when)
    assert ended[0] in (0, -signum), (action, signum, when, ended)
    check_after_a_kill(root, template, action, step, seed)
    return ended


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    ("signum", "kills"),
    [
        *(pytest.param(signum, 4, id=signum.name) for signum in SIGNALS),
        *(pytest.param(signum, 100, id=f"{signum.name}, often", marks=pytest.mark.full) for signum in SIGNALS),
    ],
)
def test_a_process_killed_at_a_random_moment_leaves_every_step_whole(
    action: str,
    signum: signal.Signals,
    kills: int,
    writer: Writer,
    template: Path,
    tmp_path: Path,
    place: Path,
    count: Callable[..., None],
) -> None:
    if kills < 10:
        place = tmp_path  # on a disk; the many go on in memory, which a killed process's writes outlive alike
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    _, calls = kill_once(writer, template, place, action, signum)  # nobody kills this one
    hit = 0
    try:
        for number in range(kills):
            after = chance.randrange(calls)
            kind = "dies_at" if number % 2 else "kill_after"
            ended, _ = kill_once(writer, template, place, action, signum, lanes=number % 4 > 1, **{kind: after})
            hit += ended != 0
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    count(kills=kills, ended_by_it=hit)


@pytest.mark.full
@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_process_killed_at_any_system_call_leaves_every_step_whole(
    action: str, signum: signal.Signals, writer: Writer, template: Path, place: Path, count: Callable[..., None]
) -> None:
    for number in range(1000):
        _, calls = kill_once(writer, template, place, action, signum, dies_at=number)
        if calls <= number:
            break
    assert calls == number
    count(kills=number)


def test_a_process_killed_again_and_again_goes_forward(
    writer: Writer, tmp_path: Path, count: Callable[..., None]
) -> None:
    """One root through many deaths: what was whole stays, leftovers never pile up, and the end is as it should be."""
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    root = tmp_path / "root"
    whole: dict[int, Any] = {}
    try:
        for step in range(24):
            # In the middle of a save that sweeps what the last death left, if any.
            ended, _ = writer.run(
                root, "save", step=step, seed=step, signum=int(signal.SIGKILL), dies_at=chance.randrange(40, 150)
            )
            with checkpointer(root) as steps:
                visible = steps.steps()
            if ended == 0 or step in visible:
                whole[step] = state(step)
            assert len(leftovers(root)) <= 1
            assert_steps(root, whole)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    writer.run(root, "save", step=100, seed=100, signum=0)
    assert_steps(root, whole | {100: state(100)})
    assert not leftovers(root)
    count(kills=24, saved_before_it=len(whole))


def test_an_interrupt_waits_for_every_lane_and_is_raised() -> None:
    came = threading.Event()
    running: set[int] = set()
    done: list[int] = []

    def handler(*_: object) -> None:
        came.set()
        raise KeyboardInterrupt

    def job(lane: int, number: int) -> None:
        running.add(number)
        if number == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert came.wait(DEADLINE_S)
        done.append(number)
        running.discard(number)

    old = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_lanes(3, range(100_000), job)
    finally:
        signal.signal(signal.SIGINT, old)
    assert not running
    assert 0 in done
    assert len(done) < 100_000
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkeep-lane")]
