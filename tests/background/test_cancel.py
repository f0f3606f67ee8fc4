"""Cancelling: a save that was cancelled leaves nothing; one that was not is whole; the next one works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.background.saves import (
    DEADLINE_S,
    VALUES,
    Gate,
    GatedAdapter,
    GatedArray,
    Watch,
    arena,
    images,
    in_thread,
    numbers,
    restore,
    state,
    until,
)
from tierkeep.errors import SaveCancelledError
from tierkeep.save.job import decode_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer


def assert_gone(steps: Checkpointer, root: Path, step: int) -> None:
    """Nothing of a step is on the disk or in memory, and its image is free."""
    assert step not in steps.steps()
    assert not list(root.glob(f"{step}*"))
    jobs = [decode_job((path / "job").read_bytes()) for path in arena(steps).glob("sealed/*")]
    assert step not in [job.step for job in jobs]
    assert not list(arena(steps).glob("filling/*"))
    assert not list(arena(steps).glob(f"steps/{step}*"))


SLOW = {"write_bytes_per_s": 2 * VALUES}
"""Seconds for every save: none is over before it is cancelled."""


def test_a_save_that_is_cancelled_at_once_leaves_nothing_and_the_next_one_works(
    opened: Callable[..., Checkpointer], root: Path, memory: Path
) -> None:
    steps = opened(limits=SLOW)
    steps.save(0, state(0), asynchronous=False)
    steps.prepare(state(0))
    until(lambda: len(steps._background._free) == 2)
    known = images(memory)
    for number in range(1, 9):
        handle = steps.save(number, state(number))
        assert handle.cancel() is True
        assert handle.cancel() is True
        assert handle.done
        assert isinstance(handle.error, SaveCancelledError)
        assert handle.error.step == number
        for call in (handle.result, handle.wait_committed):
            with pytest.raises(SaveCancelledError, match="earlier checkpoints are untouched"):
                call(DEADLINE_S)
        steps.wait(DEADLINE_S)
        assert_gone(steps, root, number)
        assert images(memory) == known
        assert numbers(restore(steps)) == {0}
    assert steps.save(9, state(9), to_disk=False).result(DEADLINE_S).outcome == "in memory"
    assert steps.steps() == [0, 9]
    steps.close()
    assert [path.name for path in sorted(root.iterdir())] == ["0", "9"]


def test_a_save_that_is_cancelled_without_further_ado_is_gone_or_whole(steps: Checkpointer, root: Path) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    kept = [0]
    for number in range(1, 41):
        handle = steps.save(number, state(number), to_disk=number % 3 > 0)
        if handle.cancel():
            assert_gone(steps, root, number)
        else:
            kept = [step for step in kept if step % 3 or not step]  # memory has one step
            kept.append(number)
            assert handle.result(DEADLINE_S).outcome == ("saved" if number % 3 else "in memory")
        assert steps.steps() == kept
    for number in kept:
        assert numbers(restore(steps, number)) == {number}


def test_what_is_committed_can_not_be_cancelled(steps: Checkpointer) -> None:
    handle = steps.save(1, state(1))
    handle.wait_committed(DEADLINE_S)
    assert handle.cancel() is False
    handle.result(DEADLINE_S)
    assert handle.cancel() is False
    assert handle.error is None
    assert numbers(restore(steps, 1)) == {1}


def test_a_save_can_be_cancelled_while_it_is_written(opened: Callable[..., Checkpointer], root: Path) -> None:
    steps = opened(limits=SLOW)
    watch = Watch(steps.events)
    handle = steps.save(1, state(1))
    watch.until("kept")
    assert steps.steps() == [1], "it is whole in memory"
    assert handle.cancel() is True
    assert_gone(steps, root, 1)
    steps.save(1, state(2), asynchronous=False)
    assert numbers(restore(steps, 1)) == {2}


def test_a_deferred_save_is_cancelled_between_two_copies(opened: Callable[..., Checkpointer], root: Path) -> None:
    steps = opened(adapter=GatedAdapter())
    watch = Watch(steps.events)
    gate = Gate()
    handle = steps.save(1, {"x": GatedArray(np.arange(VALUES), gate)}, snapshot="deferred")
    gate.entered()
    with in_thread(handle.cancel) as cancelled:
        until(lambda: steps._background._saves and next(iter(steps._background._saves.values())).cancelled)
        gate.open()
        gate.open()
        assert cancelled() is True
    assert gate.copies < VALUES * 8 // (4 * 4096), "it went on copying"
    assert watch.kinds(1) == ["begun", "cancelled"]
    steps.wait(DEADLINE_S)
    assert_gone(steps, root, 1)
    gate.stay_open()
    assert steps.save(1, state(2)).result(DEADLINE_S).outcome == "saved"


def test_a_deferred_save_that_is_cancelled_after_its_last_copy_is_gone(opened: Callable[..., Checkpointer]) -> None:
    """The last moment at which the training process could stop it by itself is over then."""
    steps = opened(adapter=GatedAdapter(), limits=SLOW)
    steps.save(0, state(0), asynchronous=False)
    gate, asked = Gate(), Gate()
    gate.stay_open()

    def changed() -> None:
        asked.passed()

    handle = steps.save(1, {"x": GatedArray(np.arange(VALUES), gate, changed)}, snapshot="deferred")
    asked.entered()  # all is copied
    with in_thread(handle.cancel) as cancelled:
        until(lambda: next(iter(steps._background._saves.values())).cancelled)
        asked.stay_open()
        assert cancelled() is True
    assert handle.staged.done, "it was sealed, and the worker was told"
    assert steps.steps() == [0]


def test_an_earlier_step_in_memory_outlives_a_save_that_is_cancelled_when_it_is_whole_in_memory(
    opened: Callable[..., Checkpointer],
) -> None:
    with opened(limits=SLOW) as steps:
        steps.save(1, state(1), to_disk=False).result(DEADLINE_S)
        handle = steps.save(2, state(2))
        handle.kept.wait(DEADLINE_S)
        assert handle.cancel() is True
        assert steps.steps() == [1]
        assert numbers(restore(steps)) == {1}
    assert numbers(restore(opened(asynchronous=False))) == {1}


def test_a_cancelled_save_of_a_step_that_stands_in_memory_leaves_that_one(opened: Callable[..., Checkpointer]) -> None:
    with opened(limits=SLOW) as steps:
        steps.save(1, state(1), to_disk=False).result(DEADLINE_S)
        handle = steps.save(1, state(2), overwrite=True)
        handle.kept.wait(DEADLINE_S)
        assert handle.cancel() is True
    assert numbers(restore(opened(asynchronous=False), 1)) == {1}
