"""The worker: dies and is replaced without anybody noticing, and keeps out of training's way."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.background.saves import (
    DEADLINE_S,
    VALUES,
    HeldWorker,
    Watch,
    arena,
    block,
    images,
    in_thread,
    kill_worker,
    numbers,
    queued,
    restore,
    state,
    until,
    worker_pid,
)
from tierkeep.errors import CheckpointExistsError, StorageError, WorkerError
from tierkeep.memory.client import client
from tierkeep.memory.priority import Throttle
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from tierkeep.checkpointer import Checkpointer
    from tierkeep.events import Event

SAVED = ["begun", "staged", "kept", "written", "committed"]
SLOW = {"write_bytes_per_s": 80 * VALUES}  # a tenth of a second for a save


# Its deaths


def test_a_worker_that_dies_while_it_is_idle_is_replaced(steps: Checkpointer, memory: Path) -> None:
    watch = Watch(steps.events)
    for number in range(5):
        steps.save(number, state(number)).result(DEADLINE_S)
        pid = worker_pid()
        kill_worker()
        assert worker_pid() != pid
        assert not psutil.pid_exists(pid), "it is a zombie"
    steps.save(5, state(5)).result(DEADLINE_S)
    assert watch.times("worker") == {None: 5}
    for number in range(6):
        assert watch.kinds(number) == SAVED
        assert numbers(restore(steps, number)) == {number}
    assert len(images(memory)) == 2


@pytest.mark.parametrize("what", [*SAVED, "progress"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_worker_that_dies_at_any_stage_is_replaced_and_nothing_is_told_twice(
    what: str, in_flight: int, opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(in_flight=in_flight, keep=4)
    killed: list[int] = []

    def kill(event: Event) -> None:
        pid = client().worker_pid
        if event.what == what and event.step is not None and event.step % 3 == 1 and event.step not in killed and pid:
            killed.append(event.step)
            os.kill(pid, signal.SIGKILL)

    steps.events.subscribe(kill)
    watch = Watch(steps.events)
    handles = [steps.save(number, state(number)) for number in range(10)]
    assert [handle.result(DEADLINE_S).outcome for handle in handles] == ["saved"] * 10
    assert killed == [1, 4, 7]
    for number in range(10):
        assert watch.kinds(number) == SAVED
    assert steps.steps() == [6, 7, 8, 9]
    for number in steps.steps():
        assert numbers(restore(steps, number)) == {number}
        steps.verify(number)
    assert len(images(memory)) == in_flight + 1
    assert not list(arena(steps).glob("sealed/*"))


def test_a_worker_that_dies_while_it_writes_is_replaced(opened: Callable[..., Checkpointer], root: Path) -> None:
    steps = opened(limits={"write_bytes_per_s": 20 * VALUES})
    watch = Watch(steps.events)
    handle = steps.save(1, state(1))
    watch.until("kept")
    until(lambda: list(root.glob("1.tierkeep-tmp-*/default/*/d/*")))  # it is at it
    kill_worker()
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert watch.kinds(1) == SAVED
    steps.wait()
    steps.close()
    assert [path.name for path in root.iterdir()] == ["1"]


@pytest.mark.parametrize("then", ["before it is killed", "after it went on"])
def test_a_worker_that_is_stopped_and_killed_has_its_saves_finished_by_the_next(
    then: str, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened(in_flight=2)
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker() as held:
        handles = [steps.save(number, state(number)) for number in (1, 2)]
        if then == "after it went on":
            held.go_on()
        kill_worker()
    for handle in handles:
        assert handle.result(DEADLINE_S).outcome == "saved"
    assert watch.times("committed") == {0: 1, 1: 1, 2: 1}
    assert numbers(restore(steps)) == {2}


def test_images_that_a_worker_was_asked_for_when_it_died_are_made_by_the_next(
    opened: Callable[..., Checkpointer], root: Path, memory: Path
) -> None:
    opened(root.with_name("other")).save(0, state(0)).result(DEADLINE_S)  # so that there is a worker
    steps = opened(in_flight=2)
    with HeldWorker(), in_thread(lambda: steps.save(1, state(1))) as saved:
        until(lambda: queued(steps))
        kill_worker()
        assert saved().result(DEADLINE_S).outcome == "saved"
    until(lambda: len(steps._background._images) == 3)
    assert len(images(memory / f"tierkeep-{os.geteuid()}" / arena(steps).name)) == 3


def test_what_was_told_of_a_failure_is_not_told_again_by_the_next_worker(
    opened: Callable[..., Checkpointer], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = opened()
    steps.save(0, state(0)).result(DEADLINE_S)
    root.rename(root.with_name("elsewhere"))
    root.write_text("in the way")
    handle = _saved_anyway(steps, monkeypatch)
    with pytest.raises(StorageError, match="stands in memory"):
        handle.result(DEADLINE_S)
    kill_worker()
    kill_worker()
    steps.wait(DEADLINE_S)
    root.unlink()
    root.with_name("elsewhere").rename(root)
    steps.wait(DEADLINE_S)
    assert numbers(restore(steps)) == {1}
    steps.close()
    assert numbers(restore(opened(asynchronous=False))) == {1}, "it went to the disk in the end"


def _saved_anyway(steps: Checkpointer, patch: pytest.MonkeyPatch) -> Any:
    """A save whose call does not look at the disk."""
    with patch.context() as context:
        context.setattr(steps._background, "_check_new", lambda *_, **__: None)
        return steps.save(1, state(1))


DYING: dict[str, Callable[[Checkpointer], list[Any]]] = {
    "idle": lambda steps: [],
    "with a save under way": lambda steps: [steps.save(1, state(1))],
    "with two saves under way": lambda steps: [steps.save(1, state(1)), steps.save(2, state(2))],
}


def die_three_times(steps: Checkpointer, saves: Callable[[Checkpointer], list[Any]]) -> list[Any]:
    """What `saves` gives, under way while the worker dies three times in a row."""
    handles: list[Any] | None = None
    for _ in range(3):
        with HeldWorker():
            handles = saves(steps) if handles is None else handles
            kill_worker()
    assert client().worker_pid is None
    return handles or []


@pytest.mark.parametrize("dying", DYING)
@pytest.mark.parametrize("then", ["save", "wait", "close", "restore"])
def test_a_worker_that_dies_again_and_again_is_told_of_once_and_nothing_is_lost(
    dying: str, then: str, opened: Callable[..., Checkpointer], root: Path, memory: Path
) -> None:
    steps = opened(in_flight=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    handles = die_three_times(steps, DYING[dying])
    assert [type(handle.error) for handle in handles] == [WorkerError] * len(handles)
    if then == "restore":
        assert numbers(restore(steps)) == {0}
    elif then == "close" and not handles:
        steps.close()
    elif then == "close":
        with pytest.raises(WorkerError, match=r"died 3 times.*stands in memory"):
            steps.close()
    else:
        for _ in handles[:1]:
            with pytest.raises(WorkerError, match=r"died 3 times.*stands in memory"):
                steps.save(9, state(9)) if then == "save" else steps.wait(DEADLINE_S)
        for number in range(10, 14):
            steps.save(number, state(number)).result(DEADLINE_S)
        steps.wait(DEADLINE_S)
        assert numbers(restore(steps)) == {13}
    if then == "restore" and handles:
        with pytest.raises(WorkerError):
            steps.close()
    steps.close()
    assert not list(memory.iterdir())
    there = opened(asynchronous=False)
    assert there.steps()[: len(handles) + 1] == list(range(len(handles) + 1))
    for step in there.steps():
        assert numbers(restore(there, step)) == {step}


@pytest.mark.parametrize("waits_for", ["its turn", "an image"])
def test_a_save_that_waits_is_told_when_there_is_no_worker_any_more(
    waits_for: str, opened: Callable[..., Checkpointer], root: Path
) -> None:
    opened(root.with_name("other")).save(0, state(0)).result(DEADLINE_S)
    steps = opened(in_flight=1)
    if waits_for == "its turn":
        steps.save(0, state(0)).result(DEADLINE_S)
    held = HeldWorker()
    with held:
        if waits_for == "its turn":
            steps.save(1, state(1))
        with in_thread(lambda: steps.save(2, state(2))) as saved:
            until(lambda: queued(steps))
            kill_worker()
            for _ in range(2):
                with HeldWorker():
                    kill_worker()
            errors = 0
            try:
                saved()
            except WorkerError:
                errors += 1
    for _ in range(3):
        try:
            steps.wait(DEADLINE_S)
        except WorkerError:
            errors += 1
    assert errors <= 1
    steps.save(3, state(3)).result(DEADLINE_S)
    assert steps.latest_step() == 3


def test_deaths_with_saves_between_them_are_not_counted_together(steps: Checkpointer) -> None:
    for number in range(7):
        steps.save(number, state(number)).result(DEADLINE_S)
        kill_worker()
    assert steps.save(7, state(7)).result(DEADLINE_S).outcome == "saved"


class NoProcess:
    """As long as it is entered, no process can be started."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __enter__(self) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        self._patch.setattr(subprocess, "Popen", refuse)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def test_a_worker_that_cannot_be_started_is_an_error_and_the_next_save_works(
    steps: Checkpointer, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    with NoProcess(monkeypatch):
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"could not be started.*Resource temporarily unavailable"):
                steps.save(1, state(1))
        assert steps.save(1, state(1), asynchronous=False).done
    steps.save(2, state(2)).result(DEADLINE_S)
    assert steps.steps() == [1, 2]


@pytest.mark.parametrize("then", ["save", "close"])
def test_a_worker_that_cannot_be_replaced_is_an_error_and_what_it_had_is_not_lost(
    then: str, opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = opened(in_flight=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(1, state(1))
        with NoProcess(monkeypatch):
            kill_worker()
            with pytest.raises(WorkerError, match="could not be started"):
                handle.result(DEADLINE_S)
            if then == "close":
                with pytest.raises(WorkerError, match="could not be started"):
                    steps.close()
            else:
                failed = steps.save(2, state(2))
                with pytest.raises(WorkerError, match="could not be started"):
                    failed.result(DEADLINE_S)
    if then == "save":
        steps.save(3, state(3)).result(DEADLINE_S)
        assert steps.steps() == [0, 1, 2, 3]
        steps.close()
    again = opened()
    assert again.steps()[:2] == [0, 1]
    assert numbers(restore(again, 1)) == {1}


def test_an_arena_that_somebody_removed_is_an_error_and_no_hang(
    opened: Callable[..., Checkpointer], memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one who tidies up /dev/shm by hand does."""
    steps = opened()
    steps.save(0, state(0)).result(DEADLINE_S)
    shutil.rmtree(next(memory.iterdir()))
    for number in (1, 2):
        with pytest.raises((StorageError, WorkerError)):
            steps.save(number, state(number)).result(DEADLINE_S)
    assert steps.steps() == [0]
    assert numbers(restore(steps)) == {0}
    assert steps.save(3, state(3), asynchronous=False).done
    _close_somehow(steps)
    again = opened()
    assert again.save(4, state(4)).result(DEADLINE_S).outcome == "saved"
    assert again.steps() == [0, 3, 4]
    capfd.readouterr()


def _close_somehow(steps: Checkpointer) -> None:
    try:
        steps.close()
    except (StorageError, WorkerError):
        steps.close()


def test_what_the_training_process_cannot_take_is_an_error_and_no_hang(
    opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an image that it cannot map."""
    monkeypatch.setattr(logging.getLogger("tierkeep"), "disabled", True)  # pytest would keep the traceback's frames

    class Adapter(NumpyAdapter):
        broken = True

        def pin(self, memory: np.ndarray[Any, Any]) -> Any:
            if self.broken:
                raise RuntimeError("no memory can be locked")
            return None

    adapter = Adapter()
    steps = opened(adapter=adapter)
    with pytest.raises(WorkerError, match="no memory can be locked"):
        steps.save(1, state(1))
    adapter.broken = False
    steps.close()
    again = opened()
    again.save(2, state(2)).result(DEADLINE_S)
    assert again.steps() == [2]


# What it is


def test_it_imports_no_framework_and_no_tensorstore(steps: Checkpointer) -> None:
    steps.save(1, state(1)).result(DEADLINE_S)
    mapped = Path(f"/proc/{worker_pid()}/maps").read_text()
    assert "numpy" in mapped
    for name in ("torch", "jax", "tensorstore", "orbax"):
        assert name not in mapped.replace("torch_adapter", "").replace("jax_adapter", ""), name
    code = (
        "import sys, tierkeep.memory.worker\n"
        "print(sorted({'torch', 'jax', 'jaxlib', 'tensorstore', 'orbax', 'asyncio'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("nice", [0, 7])
def test_it_is_as_nice_as_it_was_told_to_be(nice: int, opened: Callable[..., Checkpointer]) -> None:
    steps = opened(limits={"nice": nice})
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    for number in range(2):
        steps.save(number, state(number)).result(DEADLINE_S)
        process = psutil.Process(worker_pid())
        assert process.nice() == min(ours + nice, 19)
        # Those of numpy's are there before, and have nothing to do.
        priorities = [os.getpriority(os.PRIO_PROCESS, thread.id) for thread in process.threads()]
        assert priorities.count(min(ours + nice, 19)) >= 3
        if nice:
            assert process.ionice() == (psutil.IOPRIO_CLASS_BE, 7)
        kill_worker()
    assert os.getpriority(os.PRIO_PROCESS, 0) == ours


def test_signals_that_are_meant_for_training_do_not_end_it(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    pid = worker_pid()
    assert os.getsid(pid) == pid, "a Ctrl-C at the terminal would reach it"
    with HeldWorker():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid, number)
        handle = steps.save(1, state(1))
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert worker_pid() == pid


def test_it_starts_in_whatever_directory_training_is(
    steps: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    for name in ("numpy", "msgspec", "tierkeep", "pickle", "queue"):
        (tmp_path / "work" / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path / "work")
    assert steps.save(1, state(1)).result(DEADLINE_S).outcome == "saved"


def test_it_holds_no_more_of_training_than_its_end_of_the_socket(
    opened: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    with (tmp_path / "a file of training's").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        steps = opened()
        steps.save(1, state(1)).result(DEADLINE_S)
        links = [os.readlink(f"/proc/{worker_pid()}/fd/{fd}") for fd in os.listdir(f"/proc/{worker_pid()}/fd")]
    assert file.name not in links
    assert sum(link.startswith("socket:") for link in links) == 1
    assert links.count("/dev/null") >= 2, "its stdin and stdout are nobody's"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.slept += seconds


def test_a_throttle_lets_so_many_bytes_a_second_through() -> None:
    clock = Clock()
    throttle = Throttle(100.0, clock=clock, sleep=clock.sleep)
    for _ in range(50):
        throttle.take(10)
    assert clock.slept == pytest.approx(4.9)  # the first of them at once
    clock.now += 1000
    before = clock.slept
    throttle.take(10)
    assert clock.slept == before, "idleness is not saved up, and not punished either"
    for _ in range(20):
        throttle.take(10)
    assert clock.slept - before == pytest.approx(2.0)


def test_a_throttle_without_a_limit_asks_no_clock() -> None:
    def never(*_: float) -> Any:
        raise AssertionError

    Throttle(None, clock=never, sleep=never).take(1 << 40)


def test_what_waits_for_a_throttle_can_be_stopped() -> None:
    clock = Clock()
    throttle = Throttle(1.0, clock=clock, sleep=clock.sleep)
    throttle.take(1000)

    def stop() -> None:
        if clock.slept > 1:
            raise StopIteration

    with pytest.raises(StopIteration):
        throttle.take(1, stop)
    assert clock.slept < 2


def test_a_limit_to_the_bandwidth_is_kept(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(limits=SLOW)
    report = steps.save(1, state(1)).result(DEADLINE_S)
    # All but the first batches wait, and a batch is a third of the image at the most.
    assert report.seconds["write"] >= 0.3 * report.image_nbytes / SLOW["write_bytes_per_s"]


def test_a_failure_in_the_background_survives_its_way_between_processes(steps: Checkpointer, root: Path) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(1, state(1))
        path = block(root, 1)
    with pytest.raises(CheckpointExistsError) as raised:
        handle.result(DEADLINE_S)
    assert raised.value.path == str(path)
    assert isinstance(raised.value, FileExistsError)
