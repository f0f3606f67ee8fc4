"""Back-pressure: no more saves under way, and no more images, than were allowed, and a clear answer when it is too much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.background.saves import (
    DEADLINE_S,
    Gate,
    GatedAdapter,
    GatedArray,
    HeldWorker,
    Watch,
    arena,
    images,
    in_thread,
    numbers,
    queued,
    restore,
    state,
    until,
)
from tierkeep.errors import CheckpointExistsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_save_that_is_one_too_many_waits_until_another_one_has_ended(
    in_flight: int, opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(in_flight=in_flight)
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)
    held = HeldWorker()
    with held:
        for number in range(1, in_flight + 1):
            assert steps.save(number, state(number)).waited_s < DEADLINE_S
        last = in_flight + 1
        with in_thread(lambda: steps.save(last, state(last))) as saved:
            until(lambda: queued(steps))
            assert last not in watch.times("begun")
            assert len(steps._background.under_way) == in_flight
            assert len(images(memory)) <= in_flight + 1
            held.go_on()
            handle = saved()
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert handle.waited_s > 0
    assert handle.result(0).seconds["wait"] == handle.waited_s
    order = [(event.what, event.step) for event in watch.all() if event.what in ("begun", "committed")]
    assert order.index(("begun", last)) > order.index(("committed", 1))
    assert steps.steps() == list(range(last + 1))
    for number in range(last + 1):
        assert numbers(restore(steps, number)) == {number}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_save_that_is_skipped_says_so_and_leaves_nothing(
    in_flight: int, opened: Callable[..., Checkpointer], root: Path
) -> None:
    steps = opened(in_flight=in_flight, limits={"when_full": "skip"})
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        taken = [steps.save(number, state(number)) for number in range(1, in_flight + 1)]
        sealed = sorted(arena(steps).glob("sealed/*"))
        for number in (90, 91):
            handle = steps.save(number, state(number))
            assert handle.skipped
            assert handle.done
            assert handle.error is None
            report = handle.result(0)
            assert (report.outcome, report.step, report.nbytes) == ("skipped", number, 0)
            assert handle.wait_staged(0) is False
            assert handle.wait_committed(0) is False
            assert handle.cancel() is False
            assert steps.save(number, state(number)).skipped, "what was skipped was not saved, and is no other save"
        assert sorted(arena(steps).glob("sealed/*")) == sealed
        assert not any(handle.skipped for handle in taken)
    for handle in taken:
        assert handle.result(DEADLINE_S).outcome == "saved"
    assert steps.steps() == list(range(in_flight + 1))
    assert not (root / "90").exists()
    assert not steps.save(90, state(90)).skipped
    steps.wait(DEADLINE_S)
    assert steps.steps() == [*range(in_flight + 1), 90]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_there_is_one_image_more_than_saves_under_way_and_they_are_used_for_ever(
    in_flight: int, opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(in_flight=in_flight)
    steps.prepare(state(0))
    until(lambda: len(steps._background._images) == in_flight + 1)
    known = images(memory)
    assert len(known) == in_flight + 1
    for number in range(40):
        steps.save(number, state(number), to_disk=number % 3 == 0, overwrite=number % 5 == 0)
        assert images(memory) <= known
    steps.wait(DEADLINE_S)
    assert images(memory) == known
    steps.save(1, state(100), overwrite=True).result(DEADLINE_S)
    steps.save(1, state(101), overwrite=True, to_disk=False).result(DEADLINE_S)
    steps.save(1, state(102), overwrite=True).result(DEADLINE_S)
    assert images(memory) == known
    assert len(list(arena(steps).glob("steps/*"))) == 1
    assert not list(arena(steps).glob("filling/*"))
    assert not list(arena(steps).glob("sealed/*"))


def test_a_deferred_save_is_under_way_from_the_call_on(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(adapter=GatedAdapter(), limits={"when_full": "skip"})
    gate = Gate()
    handle = steps.save(1, {"x": GatedArray(state(1)["big"], gate)}, snapshot="deferred")
    gate.entered()
    assert not handle.staged.done
    assert steps.save(2, state(2), snapshot="deferred").skipped
    assert steps.save(3, state(3)).skipped
    gate.stay_open()
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert steps.steps() == [1]


def test_a_step_that_is_being_saved_is_not_saved_again_unless_it_is_to_be(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(in_flight=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        first = steps.save(1, state(1))
        with pytest.raises(CheckpointExistsError, match="being saved"):
            steps.save(1, state(2))
        second = steps.save(1, state(3), overwrite=True)
    assert first.result(DEADLINE_S).outcome == second.result(DEADLINE_S).outcome == "saved"
    assert numbers(restore(steps, 1)) == {3}


def test_a_checkpointer_that_is_closed_lets_go_of_a_save_that_waits(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(in_flight=1)
    steps.save(0, state(0)).result(DEADLINE_S)
    held = HeldWorker()
    with held:
        steps.save(1, state(1))
        with in_thread(lambda: steps.save(2, state(2))) as saved:
            until(lambda: queued(steps))
            with in_thread(steps.close) as closed:
                until(lambda: steps._background._closing)
                held.go_on()
                closed()
            error = None
            try:
                saved()
            except Exception as raised:  # noqa: BLE001  any error is as good, so long as there is one or it was saved
                error = raised
    other = opened(asynchronous=False)
    assert other.steps() == ([0, 1] if error is not None else [0, 1, 2])
