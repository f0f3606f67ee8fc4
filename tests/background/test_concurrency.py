"""Several callers: in one thread inside each other, in several threads, in forks, and in other processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.background import saves
from tests.background.saves import (
    DEADLINE_S,
    Gate,
    GatedAdapter,
    GatedArray,
    HeldWorker,
    in_thread,
    kill_worker,
    numbers,
    queued,
    restore,
    state,
    until,
    worker_pid,
)
from tierkeep.adapter import _numpy_leaf
from tierkeep.errors import BusyError, CheckpointExistsError
from tierkeep.memory.client import Client, client
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer

# A test of this suite's other half may have started JAX in this process, which warns of every fork.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")


class Inside:
    """A leaf that makes a call while the state is flattened: in the middle of a save, as a signal's handler may be."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call


class InsideAdapter(NumpyAdapter):
    def expand(self, value: Any) -> Any:
        if isinstance(value, Inside):
            value.call()
            return _numpy_leaf(1)
        return None


# save-inside-signal-handler
CALLS: dict[str, Callable[[Checkpointer], object]] = {
    "save": lambda steps: steps.save(5, state(5)),
    "synchronous save": lambda steps: steps.save(5, state(5), asynchronous=False),
    "deferred save": lambda steps: steps.save(5, state(5), snapshot="deferred"),
    "wait": lambda steps: steps.wait(),
    "restore": restore,
    "verify": lambda steps: steps.verify(0),
    "metadata": lambda steps: steps.metadata(0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_inside_a_save_is_refused_and_the_save_goes_on(call: str, opened: Callable[..., Checkpointer]) -> None:
    steps = opened(adapter=InsideAdapter())
    steps.save(0, state(0)).result(DEADLINE_S)
    refused: list[BusyError] = []

    def inside() -> None:
        with pytest.raises(BusyError, match=r"inside a save.*signal handler.*flag") as raised:
            CALLS[call](steps)
        refused.append(raised.value)

    for number, asynchronous in ((1, True), (2, False)):
        handle = steps.save(number, state(number) | {"inside": Inside(inside)}, asynchronous=asynchronous)
        assert handle.result(DEADLINE_S).outcome == "saved"
        assert numbers(restore(steps, number)) == {number}
    assert len(refused) == 2
    assert steps.steps() == [0, 1, 2]


def test_a_signals_handler_that_saves_while_a_save_waits_is_told_to_set_a_flag(
    opened: Callable[..., Checkpointer],
) -> None:
    steps = opened()
    steps.save(0, state(0)).result(DEADLINE_S)
    refused: list[BaseException] = []
    held = HeldWorker()

    def handler(*_: object) -> None:
        try:
            steps.save(9, state(9))
        except BusyError as error:
            refused.append(error)
        held.go_on()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with held:
            steps.save(1, state(1))
            main = threading.main_thread().ident
            assert main is not None
            with in_thread(lambda: until(lambda: queued(steps)), lambda: signal.pthread_kill(main, signal.SIGUSR1)):
                handle = steps.save(2, state(2))  # waits for the first, and is interrupted
        assert handle.result(DEADLINE_S).outcome == "saved"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert steps.steps() == [0, 1, 2]


@pytest.mark.parametrize("where", ["turn", "copy", "copying"])
def test_an_interrupt_in_a_save_leaves_nothing_of_it_and_nothing_that_waits_for_it(
    where: str, opened: Callable[..., Checkpointer], memory: Path
) -> None:
    """As by Ctrl-C: while it waits for its turn, in its copy, in a copy by several threads."""
    steps = opened(adapter=GatedAdapter())
    steps.save(0, state(0)).result(DEADLINE_S)
    known = saves.images(memory)
    for number in range(1, 4):
        if where == "turn":
            with HeldWorker():
                first = steps.save(10 * number, state(10 * number))
                with in_thread(lambda: until(lambda: queued(steps)), interrupt), pytest.raises(KeyboardInterrupt):
                    steps.save(number, state(number))
            first.result(DEADLINE_S)
        else:
            gate = Gate()
            if where == "copy":
                gate.passed = _interrupted  # type: ignore[method-assign]
                context: Any = in_thread(lambda: None)
            else:
                context = in_thread(gate.entered, interrupt, gate.stay_open)
            with context, pytest.raises(KeyboardInterrupt):
                steps.save(number, {"x": GatedArray(state(number)["big"], gate)})
        steps.wait(DEADLINE_S)
        assert number not in steps.steps()
        steps.save(100 + number, state(100 + number)).result(DEADLINE_S)
        assert numbers(restore(steps)) == {100 + number}
    assert saves.images(memory) == known


def interrupt() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def _interrupted() -> None:
    raise KeyboardInterrupt


# Threads


def test_threads_that_save_at_once_take_turns(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(in_flight=2)
    threads = 6
    start = threading.Barrier(threads)

    def train(first: int) -> list[int]:
        start.wait(DEADLINE_S)
        return [steps.save(n, state(n)).result(DEADLINE_S).step or 0 for n in range(first, 60, threads)]

    running = [in_thread(lambda first=first: train(first)) for first in range(threads)]  # type: ignore[misc]
    waits = [each.__enter__() for each in running]
    found = [wait() for wait in waits]
    for each in running:
        each.__exit__(None, None, None)
    assert sorted(step for steps_of_one in found for step in steps_of_one) == list(range(60))
    assert steps.steps() == list(range(60))
    for number in range(60):
        assert numbers(restore(steps, number)) == {number}


def test_of_two_threads_that_save_the_same_step_one_is_told_that_it_is_there(
    opened: Callable[..., Checkpointer],
) -> None:
    steps = opened(in_flight=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    start = threading.Barrier(2)

    def train(number: int) -> int | None:
        start.wait(DEADLINE_S)
        try:
            steps.save(1, state(number)).result(DEADLINE_S)
        except CheckpointExistsError:
            return None
        return number

    with in_thread(lambda: train(1)) as one, in_thread(lambda: train(2)) as other:
        won = [number for number in (one(), other()) if number is not None]
    assert len(won) == 1
    assert numbers(restore(steps, 1)) == set(won)


def test_readers_in_other_threads_never_meet_a_torn_step(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(in_flight=2, keep=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set():
            assert len(numbers(restore(steps))) == 1
            reads += 1
        return reads

    with in_thread(read) as one, in_thread(read) as other:
        for number in range(1, 80):
            steps.save(number, state(number), to_disk=number % 3 == 0)
        steps.wait(DEADLINE_S)
        done.set()
        assert one() > 0
        assert other() > 0


# fork-after-threads


def in_fork(call: Callable[[], object]) -> Any:
    """What a call gives in a forked child, as JSON; the name of what it raises, with the message."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(int(DEADLINE_S))  # ends it if it hangs
            try:
                found: Any = ["gave", call()]
            except Exception as error:  # noqa: BLE001  told to the parent
                found = [type(error).__name__, str(error)]
            os.write(writing, json.dumps(found).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        ready, _, _ = select.select([reading], [], [], DEADLINE_S)
        assert ready
        data = os.read(reading, 1 << 16)
        assert data, "the child hung or died"
        return json.loads(data)
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


USES: dict[str, Callable[[Checkpointer], object]] = {
    **CALLS,
    "steps": lambda steps: steps.steps(),
    "latest step": lambda steps: steps.latest_step(),
    "prepare": lambda steps: steps.prepare(state(0)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("lock", ["no lock", "a lock held"])
def test_a_forked_child_is_told_to_open_another_one_and_the_parent_goes_on(
    use: str, lock: str, steps: Checkpointer
) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(1, state(1))
        # Another thread of the parent's may hold any lock: in the child nobody lets go of it.
        let_go = threading.Event()
        held = threading.Event()

        def hold() -> None:
            with steps._background._changed, steps._turn, client()._lock:
                held.set()
                assert let_go.wait(DEADLINE_S)

        with in_thread(hold if lock == "a lock held" else held.set):
            assert held.wait(DEADLINE_S)
            raised, message = in_fork(lambda: USES[use](steps))
            let_go.set()
    assert raised == "BusyError"
    assert "open another one here" in message
    assert handle.result(DEADLINE_S).outcome == "saved"
    steps.save(2, state(2)).result(DEADLINE_S)
    assert steps.steps() == [0, 1, 2]


@pytest.mark.parametrize("call", ["close", "wait_staged", "exit"])
def test_a_forked_child_that_ends_or_closes_does_nothing_to_its_parent(call: str, steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    pid = worker_pid()
    with HeldWorker():
        handle = steps.save(1, state(1))
        if call == "exit":
            child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(0,))
            child.start()
            child.join(DEADLINE_S)
            assert child.exitcode == 0
        else:
            assert in_fork(getattr(steps, call)) == ["gave", None]
        assert not handle.done
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert worker_pid() == pid


def test_a_forked_child_can_open_a_checkpointer_of_its_own(
    steps: Checkpointer, opened: Callable[..., Checkpointer], root: Path, memory: Path
) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)

    def train() -> list[int]:
        with saves.checkpointer(root.with_name("child"), memory) as other:
            other.save(1, state(1)).result(DEADLINE_S)
            assert numbers(restore(other)) == {1}
            with pytest.raises(BusyError):
                saves.checkpointer(root, memory).save(1, state(1))
            return other.steps()

    assert in_fork(train) == ["gave", [1]]
    steps.save(1, state(1)).result(DEADLINE_S)
    steps.close()

    def train_on() -> list[int]:
        with saves.checkpointer(root, memory) as other:
            other.save(2, state(2)).result(DEADLINE_S)
            return other.steps()

    assert in_fork(train_on) == ["gave", [0, 1, 2]]


def test_a_fork_that_lives_on_does_not_keep_the_worker(root: Path, memory: Path) -> None:
    """The child has the parent's end of the worker's socket open: that the parent died is seen all the same."""
    from tests.background.trainer import run_trainer

    ended = run_trainer("killed with a fork alive", root, memory)
    assert ended.status == -9
    assert sorted(path.name for path in root.glob("[0-9]*")) == ["0", "1", "2"]


def test_processes_can_be_started_between_saves(steps: Checkpointer) -> None:
    for number in range(3):
        handle = steps.save(number, state(number))
        assert subprocess.run([sys.executable, "-c", "print(1)"], check=True, capture_output=True).stdout == b"1\n"
        handle.result(DEADLINE_S)


# Others on the same root


def test_a_second_checkpointer_of_the_same_process_is_told_and_can_still_save_and_read(
    steps: Checkpointer, opened: Callable[..., Checkpointer]
) -> None:
    steps.save(1, state(1)).result(DEADLINE_S)
    other = opened()
    for snapshot in ("copy", "deferred"):
        with pytest.raises(BusyError, match=r"one at a time can.*asynchronous=False"):
            other.save(2, state(2), snapshot=snapshot)
    with pytest.raises(BusyError):
        other.prepare(state(2))
    assert other.steps() == [1]
    assert numbers(restore(other)) == {1}
    assert other.save(2, state(2), asynchronous=False).done
    assert steps.steps() == other.steps() == [1, 2]
    steps.save(3, state(3), to_disk=False).result(DEADLINE_S)
    assert numbers(restore(other)) == {3}, "it reads from the other one's memory"
    steps.close()
    other.save(4, state(4)).result(DEADLINE_S)
    assert other.steps() == [1, 2, 3, 4]


@pytest.fixture
def neighbour(root: Path, memory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has saved step 0 into the root, and waits for a line before it ends."""
    code = (
        "import sys, pathlib\n"
        "from tests.background.saves import checkpointer, state\n"
        "root, memory = map(pathlib.Path, sys.argv[1:])\n"
        "with checkpointer(root, memory) as steps:\n"
        "    steps.save(0, state(0)).result(60)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(memory)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        assert ready
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_checkpointer_of_another_process_is_in_the_way_until_it_is_closed(
    neighbour: subprocess.Popen[bytes], opened: Callable[..., Checkpointer]
) -> None:
    steps = opened()
    with pytest.raises(BusyError, match=r"another checkpointer.*asynchronous=False"):
        steps.save(1, state(1))
    assert steps.steps() == [0]
    assert numbers(restore(steps)) == {0}
    assert steps.save(1, state(1), asynchronous=False).done
    assert neighbour.stdin is not None
    neighbour.stdin.write(b"\n")
    assert neighbour.wait(DEADLINE_S) == 0
    steps.save(2, state(2)).result(DEADLINE_S)
    assert steps.steps() == [0, 1, 2]


def test_a_checkpointer_of_a_process_that_died_is_not_in_the_way(
    neighbour: subprocess.Popen[bytes], opened: Callable[..., Checkpointer]
) -> None:
    steps = opened()
    neighbour.kill()
    neighbour.wait(DEADLINE_S)
    steps.save(1, state(1)).result(DEADLINE_S)  # waits for the other worker, if that has something to do
    assert steps.steps() == [0, 1]
    assert numbers(restore(steps)) == {1}


# The worker that all checkpointers of a process share


def test_a_checkpointer_that_comes_when_the_worker_was_told_to_end_gets_another_one(
    opened: Callable[..., Checkpointer], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = opened(), opened(root.with_name("other"))
    one.save(0, state(0)).result(DEADLINE_S)
    held = HeldWorker()
    really = Client.detach

    def detach(self: Client, arena: str) -> None:
        held.__enter__()
        really(self, arena)

    monkeypatch.setattr(Client, "detach", detach)
    with in_thread(one.close) as closed:
        until(lambda: client()._ending)
        monkeypatch.undo()
        with in_thread(lambda: other.save(1, state(1))) as saved:
            until(lambda: len(client()._listeners) == 1)
            held.go_on()
            assert saved().result(DEADLINE_S).outcome == "saved"
        closed()
    assert numbers(restore(other)) == {1}


def test_a_death_of_the_worker_is_no_failure_of_the_others_that_share_it(
    opened: Callable[..., Checkpointer], root: Path
) -> None:
    both = [opened(root.with_name(name)) for name in ("one", "two")]
    for number in range(4):
        for steps in both:
            steps.save(number, state(number))
        kill_worker()
    for steps in both:
        steps.wait(DEADLINE_S)
        assert steps.steps() == [0, 1, 2, 3]
        assert numbers(restore(steps)) == {3}
