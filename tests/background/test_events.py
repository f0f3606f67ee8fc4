"""Events: everything that happens to a save is told, once, in order, and subscribers can do no harm."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.background.saves import (
    DEADLINE_S,
    Gate,
    GatedAdapter,
    GatedArray,
    HeldWorker,
    Watch,
    block,
    in_thread,
    kill_worker,
    numbers,
    restore,
    state,
    until,
)
from tierkeep.errors import CheckpointExistsError, TierkeepError
from tierkeep.options import MIB, SaveOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer
    from tierkeep.events import Event

SAVED = ["begun", "staged", "kept", "written", "committed"]


@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_each_save_tells_of_its_stages_once_and_in_order(snapshot: Any, steps: Checkpointer) -> None:
    watch = Watch(steps.events)
    for number in range(6):
        steps.save(number, state(number), snapshot=snapshot)
    steps.wait(DEADLINE_S)
    for number in range(6):
        assert watch.kinds(number) == SAVED
    for event in watch.all():
        if event.what != "begun":
            assert 0 < event.nbytes <= event.total_nbytes
            assert event.seconds >= 0
        assert event.error is None
    assert [event.step for event in watch.all() if event.what == "committed"] == list(range(6))
    assert steps.events.recent == watch.all()


def test_a_step_for_memory_alone_tells_of_two_stages(steps: Checkpointer) -> None:
    watch = Watch(steps.events)
    steps.save(1, state(1), to_disk=False).result(DEADLINE_S)
    assert watch.kinds(1) == SAVED[:3]


def test_what_did_not_end_well_is_told_with_the_reason(root: Path, opened: Callable[..., Checkpointer]) -> None:
    steps = opened(adapter=GatedAdapter())
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        failing = steps.save(1, state(1))
        block(root, 1)
    with pytest.raises(CheckpointExistsError):
        failing.result(DEADLINE_S)
    gate = Gate()
    leaving = steps.save(2, {"x": GatedArray(state(2)["big"], gate)}, snapshot="deferred")
    gate.entered()
    with in_thread(leaving.cancel) as cancelled:
        until(lambda: next(iter(steps._background._saves.values())).cancelled)
        gate.stay_open()
        assert cancelled()
    assert watch.kinds(1)[-1] == "failed"
    assert watch.kinds(2)[-1] == "cancelled"
    assert [event.error for event in watch.all() if event.what == "failed"] == [failing.error]

    other = opened(root.with_name("other"), limits={"when_full": "skip"})
    watch = Watch(other.events)
    other.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        other.save(1, state(1))
        assert other.save(2, state(2)).skipped
    other.wait(DEADLINE_S)
    assert watch.kinds(2) == ["skipped"]
    assert watch.kinds(1) == SAVED


def test_progress_only_grows_and_reaches_the_whole(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(options=SaveOptions(chunk_nbytes=8 * MIB))
    watch = Watch(steps.events)
    report = steps.save(1, state(1, 180 * MIB // 8)).result(DEADLINE_S)  # some are told at every 64 MiB
    for stage in ("checksum", "write"):
        told = [event for event in watch.all() if event.what == "progress" and event.stage == stage]
        done = [event.nbytes for event in told]
        assert len(done) > 1
        assert done == sorted(set(done))
        assert done[-1] == report.image_nbytes
        assert {event.total_nbytes for event in told} == {report.image_nbytes}
        assert {event.step for event in told} == {1}


def test_progress_reaches_the_whole_of_a_small_save_too(steps: Checkpointer) -> None:
    watch = Watch(steps.events)
    report = steps.save(1, state(1)).result(DEADLINE_S)
    told = [event for event in watch.all() if event.what == "progress"]
    assert [(event.stage, event.nbytes) for event in told] == [
        ("checksum", report.image_nbytes),
        ("write", report.image_nbytes),
    ]


@pytest.mark.parametrize("error", [ValueError, TierkeepError, RuntimeError, SystemExit])
def test_a_subscriber_that_raises_changes_nothing(
    error: type[BaseException], steps: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(event: Event) -> None:
        if error is SystemExit and event.what in ("begun", "staged"):
            return  # in the training's own thread it ends the process, as anywhere else
        raise error(f"at {event.what}")

    steps.events.subscribe(raises)
    watch = Watch(steps.events)
    with caplog.at_level(logging.CRITICAL):
        for number in range(3):
            assert steps.save(number, state(number)).result(DEADLINE_S).outcome == "saved"
        steps.wait(DEADLINE_S)
        steps.close()
    assert watch.kinds(2) == SAVED


def test_a_subscription_ends_when_it_is_told_to(steps: Checkpointer) -> None:
    seen: list[Event] = []
    end = steps.events.subscribe(seen.append)
    steps.save(1, state(1)).result(DEADLINE_S)
    assert seen
    end()
    end()
    seen.clear()
    steps.save(2, state(2)).result(DEADLINE_S)
    assert not seen


def test_the_last_events_can_be_looked_at_afterwards_and_are_bounded(steps: Checkpointer) -> None:
    for number in range(200):
        steps.save(number, {"n": number}, overwrite=True)
    steps.wait(DEADLINE_S)
    recent = steps.events.recent
    assert len(recent) == 1024
    assert recent[-1].step == 199


def test_a_new_worker_is_told_of_and_no_stage_twice(steps: Checkpointer) -> None:
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(1, state(1))
        kill_worker()
    handle.result(DEADLINE_S)
    assert watch.times("worker") == {None: 1}
    assert watch.kinds(1) == SAVED
    assert numbers(restore(steps)) == {1}
