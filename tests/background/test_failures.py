"""A save that fails in the background is told of once, with what still holds, and training goes on."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.background.saves import (
    DEADLINE_S,
    Gate,
    GatedAdapter,
    GatedArray,
    HeldWorker,
    Watch,
    arena,
    block,
    images,
    in_thread,
    numbers,
    restore,
    state,
    until,
)
from tierkeep.errors import CheckpointExistsError, StorageError, TierkeepError
from tierkeep.options import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer
    from tierkeep.handle import SaveHandle


def fail(steps: Checkpointer, step: int) -> SaveHandle:
    """A save that fails in the background, over by now, and not told of."""
    watch = Watch(steps.events)
    steps.prepare(state(step))
    until(lambda: steps._background._free)
    with HeldWorker():
        handle = steps.save(step, state(step))
        block(steps.root, step)
    watch.until("failed", step)
    _ended(handle)
    return handle


def _ended(handle: SaveHandle) -> None:
    """Waits for the end of a save without being told of its failure."""
    with handle._changed:
        assert handle._changed.wait_for(lambda: handle.done, DEADLINE_S)


CALLS: dict[str, Callable[[Checkpointer], object]] = {
    "save": lambda steps: steps.save(8, state(8)),
    "synchronous save": lambda steps: steps.save(8, state(8), asynchronous=False),
    "wait": lambda steps: steps.wait(DEADLINE_S),
    "close": lambda steps: steps.close(),
    "with": lambda steps: steps.__exit__(None, None, None),
    "verify": lambda steps: steps.verify(0),
}


# async-error-not-raised
@pytest.mark.parametrize("call", CALLS)
def test_a_failure_is_raised_once_by_the_next_call_of(call: str, opened: Callable[..., Checkpointer]) -> None:
    steps = opened(keep=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    handle = fail(steps, 1)
    with pytest.raises(CheckpointExistsError, match=r"root/1 .*untouched") as raised:
        CALLS[call](steps)
    assert raised.value is handle.error
    if call in ("close", "with"):
        steps.close()
        steps = opened(keep=2)
    steps.wait(DEADLINE_S)
    assert steps.steps() == [0], "what failed is listed, or the save that only told of it"
    for number in (2, 3):
        steps.save(number, state(number)).result(DEADLINE_S)
    assert steps.steps() == [2, 3], "what failed is counted"
    steps.close()


def test_a_failure_that_the_handle_told_of_is_not_told_again(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    handle = fail(steps, 1)
    for call in (handle.result, handle.wait_committed, handle.wait_written, handle.result):
        with pytest.raises(CheckpointExistsError):
            call(DEADLINE_S)
    assert handle.wait_staged(0) is True, "that stage was reached"
    steps.wait(DEADLINE_S)
    steps.save(2, state(2)).result(DEADLINE_S)
    steps.close()


def test_looking_at_a_handle_does_not_count_as_being_told(steps: Checkpointer) -> None:
    handle = fail(steps, 1)
    assert handle.done
    assert handle.report is None
    assert isinstance(handle.error, CheckpointExistsError)
    with pytest.raises(CheckpointExistsError):
        steps.wait(DEADLINE_S)


def test_each_of_several_failures_is_told_of(opened: Callable[..., Checkpointer], root: Path) -> None:
    steps = opened(in_flight=3)
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handles = [steps.save(number, state(number)) for number in (1, 2, 3)]
        for number in (1, 2, 3):
            block(root, number)
    for handle in handles:
        _ended(handle)
    told = []
    for _ in range(3):
        with pytest.raises(CheckpointExistsError) as raised:
            steps.save(4, state(4))
        told.append(raised.value)
    assert told == [handle.error for handle in handles]
    steps.save(4, state(4)).result(DEADLINE_S)
    assert steps.steps() == [0, 4]


def test_reading_goes_on_when_a_save_has_failed(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    fail(steps, 1)
    assert steps.steps() == [0]
    assert steps.latest_step() == 0
    assert numbers(restore(steps)) == {0}
    assert steps.metadata(0).nbytes > 0
    with pytest.raises(CheckpointExistsError):
        steps.close()


def test_an_error_on_the_way_out_hides_no_failure_and_is_not_hidden_by_one(
    steps: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    fail(steps, 1)

    def train() -> None:
        with steps:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert "a save in the background failed" in caplog.text
    assert "1 already exists" in caplog.text


def test_a_failed_step_leaves_its_image_and_can_be_saved_again(steps: Checkpointer, root: Path, memory: Path) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    known = images(memory)
    for number in range(1, 6):
        handle = fail(steps, number)
        with pytest.raises(CheckpointExistsError):
            handle.result(0)
        assert (root / str(number) / "somebody's").is_dir(), "what is not ours is never touched"
        assert images(memory) == known
        assert not list(arena(steps).glob("sealed/*"))
    (root / "5" / "somebody's").rmdir()
    (root / "5").rmdir()
    steps.save(5, state(5)).result(DEADLINE_S)
    assert numbers(restore(steps, 5)) == {5}


# Where the disk refuses


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class Full:
    """As long as it is entered, a disk is full."""

    def __init__(self, disk: Path) -> None:
        self._filler = disk / "filler"

    def __enter__(self) -> None:
        with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))

    def __exit__(self, *_: object) -> None:
        self._filler.unlink()


@pytest.fixture
def full(small_disk: Path) -> Full:
    return Full(small_disk)


def test_what_a_full_disk_refused_stands_in_memory_and_reaches_the_disk_at_the_end(
    small_disk: Path, full: Full, opened: Callable[..., Checkpointer]
) -> None:
    root = small_disk / "root"
    steps = opened(root, keep=3)
    steps.save(0, state(0)).result(DEADLINE_S)
    steps.prepare(state(0))
    with full:
        handle = steps.save(1, state(1))
        with pytest.raises(StorageError, match=r"root/1 .*No space left.*step 1 stands in memory") as raised:
            handle.result(DEADLINE_S)
        assert raised.value.errno == 28
        assert not list(root.glob("1*")), "a piece of it is left on the disk"
        assert steps.steps() == [0, 1]
        assert numbers(restore(steps)) == {1}
        assert numbers(restore(steps, 0)) == {0}
        steps.wait(DEADLINE_S)
    steps.close()
    assert steps.root.joinpath("1").is_dir()
    other = opened(root, asynchronous=False)
    assert other.steps() == [0, 1]
    assert numbers(restore(other)) == {1}
    other.verify(1)


def test_a_close_that_the_disk_refuses_says_so_and_the_next_process_has_the_step(
    small_disk: Path, full: Full, opened: Callable[..., Checkpointer]
) -> None:
    root = small_disk / "root"
    steps = opened(root)
    steps.save(0, state(0)).result(DEADLINE_S)
    with full:
        steps.save(1, state(1))
        with pytest.raises(StorageError, match="step 1 stands in memory"):
            steps.wait(DEADLINE_S)
        with pytest.raises(StorageError, match="No space left"):
            steps.close()
        steps.close()
        again = opened(root)
        assert again.steps() == [0, 1]
        assert numbers(restore(again)) == {1}
        with pytest.raises(StorageError, match="No space left"):
            again.close()
    last = opened(root)
    assert numbers(restore(last)) == {1}
    last.close()
    assert (root / "1").is_dir()
    assert numbers(restore(opened(root, asynchronous=False), 1)) == {1}


@pytest.mark.parametrize("whole", [True, False])
def test_what_stands_in_memory_is_restored_before_the_worker_has_taken_up_what_the_last_one_left(
    whole: bool, small_disk: Path, full: Full, opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless one of the saves that were left is no step yet: then it must be waited for."""
    steps = opened(small_disk / "root")
    steps.save(0, state(0)).result(DEADLINE_S)
    with full:
        steps.save(1, state(1))
        with pytest.raises(StorageError):
            steps.wait(DEADLINE_S)
        with pytest.raises(StorageError):
            steps.close()
    if not whole:  # as if it had been killed a moment before
        shutil.rmtree(arena(steps) / "steps" / "1")
    again = opened(small_disk / "root")
    heard, recovered = again._background.heard, threading.Event()

    def hear(kind: str, *payload: Any) -> None:
        if kind == "recovered":
            assert recovered.wait(DEADLINE_S)
        heard(kind, *payload)

    monkeypatch.setattr(again._background, "heard", hear)
    with in_thread(lambda: restore(again)) as restored:
        if not whole:
            until(lambda: again._background._recovered._cond._waiters)  # type: ignore[attr-defined]
            recovered.set()
        assert numbers(restored()) == {1}
        recovered.set()


def test_training_goes_on_past_a_disk_that_is_full_for_a_while(
    small_disk: Path, full: Full, opened: Callable[..., Checkpointer]
) -> None:
    root = small_disk / "root"
    steps = opened(root, in_flight=2)  # without `keep`: an old image that is written over needs no room
    failed = 0
    for number in range(12):
        is_full = number // 3 % 2 == 1
        with full if is_full else contextlib.nullcontext():
            steps.save(number, state(number))
            refused = pytest.raises(StorageError, match="No space left")
            with refused if is_full else contextlib.nullcontext():
                steps.wait(DEADLINE_S)
            failed += is_full
        assert numbers(restore(steps)) == {number}
    assert failed == 6
    with contextlib.suppress(TierkeepError):
        steps.close()
    found = opened(root, asynchronous=False)
    assert found.steps() == [0, 1, 2, 6, 7, 8, 11]
    assert numbers(restore(found)) == {11}
    for step in found.steps():
        found.verify(step)


def test_a_root_that_becomes_a_file_is_told_of(opened: Callable[..., Checkpointer], tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    steps = opened(parent / "root")
    steps.save(0, state(0)).result(DEADLINE_S)
    parent.rename(tmp_path / "elsewhere")
    parent.write_text("a file")
    handle = steps.save(1, state(1)) if _may_look(steps) else None
    if handle is not None:
        with pytest.raises(StorageError, match="1"):
            handle.result(DEADLINE_S)
    parent.unlink()
    (tmp_path / "elsewhere").rename(parent)
    assert steps.save(2, state(2)).result(DEADLINE_S).outcome == "saved"
    assert steps.steps() == [0, 2]


def _may_look(steps: Checkpointer) -> bool:
    return not steps._disk.exists(steps.root / "1")


# Where the copy fails


@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_a_copy_that_fails_leaves_nothing_and_holds_no_array(
    snapshot: Any, opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(adapter=GatedAdapter())
    steps.save(0, state(0)).result(DEADLINE_S)
    known = images(memory)
    for number in range(1, 6):
        gate = Gate()
        gate.passed = _refuse  # type: ignore[method-assign]
        failing = {"small": state(1)["big"], "x": GatedArray(state(1, MIB // 8)["big"], gate)}
        with pytest.raises(MemoryError, match="a copy"):
            steps.save(number, failing, snapshot=snapshot).result(DEADLINE_S)
        steps.wait(DEADLINE_S)
        assert steps.steps() == [0]
        assert not list(arena(steps).glob("filling/*"))
        assert not list(arena(steps).glob("sealed/*"))
        assert images(memory) <= known
    steps.save(9, state(9)).result(DEADLINE_S)
    assert numbers(restore(steps)) == {9}


def _refuse() -> None:
    raise MemoryError("a copy")


def test_the_failure_of_a_deferred_copy_is_told_by_the_call_that_waited_for_it(
    opened: Callable[..., Checkpointer],
) -> None:
    steps = opened(adapter=GatedAdapter())
    for _ in range(100):
        gate = Gate()
        gate.passed = _refuse  # type: ignore[method-assign]
        steps.save(1, {"x": GatedArray(state(1)["big"], gate)}, snapshot="deferred")
        with pytest.raises(MemoryError):
            steps.wait(DEADLINE_S)


def test_an_adapter_that_cannot_begin_to_copy_fails_that_save_alone(
    opened: Callable[..., Checkpointer], memory: Path
) -> None:
    class Adapter(GatedAdapter):
        broken = False

        def copies(self) -> Any:
            if self.broken:
                raise RuntimeError("no device")
            return super().copies()

    adapter = Adapter()
    steps = opened(adapter=adapter)
    steps.save(0, state(0)).result(DEADLINE_S)
    known = images(memory)
    adapter.broken = True
    for snapshot in ("copy", "deferred"):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no device"):
                steps.save(1, state(1), snapshot=snapshot)
            steps.wait(DEADLINE_S)
    adapter.broken = False
    assert steps.save(1, state(1)).result(DEADLINE_S).outcome == "saved"
    assert images(memory) == known


def test_a_plan_that_memory_cannot_hold_fails_that_save_alone(steps: Checkpointer, memory: Path) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    known = images(memory)
    plans = arena(steps) / "plans"
    plans.rename(plans.with_name("away"))
    for _ in range(4):
        with pytest.raises(StorageError, match="plan"):
            steps.save(1, state(1, 7000))
    plans.with_name("away").rename(plans)
    assert steps.save(1, state(1, 7000)).result(DEADLINE_S).outcome == "saved"
    assert images(memory) == known


def test_a_failed_retention_is_told_of_and_the_save_stands(opened: Callable[..., Checkpointer], root: Path) -> None:
    steps = opened(keep=1)
    steps.save(1, state(1)).result(DEADLINE_S)
    marked = subprocess.run(["chattr", "+i", str(root / "1")], check=False, capture_output=True)
    if marked.returncode:
        pytest.skip("nothing can be made to stay here")
    try:
        handle = steps.save(2, state(2))
        assert handle.result(DEADLINE_S).outcome == "saved"
        with pytest.raises(StorageError, match="step 2 is saved and whole"):
            steps.wait(DEADLINE_S)
        steps.wait(DEADLINE_S)
        assert steps.steps() == [1, 2]
    finally:
        subprocess.run(["chattr", "-i", str(root / "1")], check=True)
    steps.save(3, state(3)).result(DEADLINE_S)
    assert steps.steps() == [3]
