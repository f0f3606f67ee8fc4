"""The handle of a save: its stages, in order, to be polled, waited for and awaited."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.background.saves import DEADLINE_S, HeldWorker, Watch, block, numbers, restore, state
from tierkeep.errors import CheckpointExistsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer
    from tierkeep.handle import SaveHandle, Stage


def stages(handle: SaveHandle) -> list[Stage]:
    return [handle.staged, handle.kept, handle.written, handle.committed]


def test_the_stages_are_reached_one_after_the_other(steps: Checkpointer) -> None:
    orders: list[list[bool]] = []
    handles: list[SaveHandle] = []
    steps.events.subscribe(lambda _: orders.extend([stage.done for stage in stages(handle)] for handle in handles))
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handles.append(steps.save(1, state(1)))
    handles[0].result(DEADLINE_S)
    reached = [sum(order) for order in orders]
    assert reached == sorted(reached)
    assert all(order == sorted(order, reverse=True) for order in orders), "a later stage came before an earlier one"
    assert set(reached) == {1, 2, 3, 4}


def test_a_stage_tells_whether_it_is_reached_its_seconds_and_its_bytes(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(1, state(1))
        assert handle.staged.done
        assert handle.staged.nbytes > 0
        assert handle.wait_staged(0) is True
        for stage in stages(handle)[1:]:
            assert not stage.done
            assert stage.seconds is None
            assert "not yet" in repr(stage)
        assert handle.report is None
    assert handle.wait_written(DEADLINE_S) is True
    assert handle.wait_committed(DEADLINE_S) is True
    report = handle.result(DEADLINE_S)
    for stage in stages(handle):
        assert stage.seconds is not None
        assert stage.seconds >= 0
        assert stage.nbytes > 0
        assert "not yet" not in repr(stage)
    assert handle.done
    assert not handle.skipped
    assert handle.error is None
    assert (report.step, report.outcome, report.path) == (1, "saved", handle.path)
    assert report.image_nbytes >= report.nbytes == handle.staged.nbytes
    assert report.seconds.keys() == {"plan", "wait", "stage", "keep", "write", "commit", "total"}
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert report.seconds["total"] >= report.seconds["stage"]


def test_a_wait_that_is_too_short_says_that_the_save_goes_on(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(1, state(1))
        for wait in (handle.wait_written, handle.wait_committed, handle.result, handle.kept.wait, steps.wait):
            with pytest.raises(TimeoutError, match=r"go(es)? on"):
                wait(0.01)
            with pytest.raises(TimeoutError, match="1"):
                wait(0)
    assert handle.result(DEADLINE_S).outcome == "saved"
    steps.wait(0)
    assert numbers(restore(steps, 1)) == {1}


def test_a_stage_can_be_awaited_again_and_again(steps: Checkpointer) -> None:
    async def train() -> list[bool]:
        with HeldWorker():
            handle = steps.save(1, state(1))
            assert await handle.staged
            waiting = asyncio.gather(*(_await(stage) for stage in (*stages(handle), handle.committed)))
            await asyncio.sleep(0)
            assert not waiting.done()
        return [*await asyncio.wait_for(waiting, DEADLINE_S), await handle.committed]

    steps.save(0, state(0)).result(DEADLINE_S)
    assert asyncio.run(train()) == [True] * 6


async def _await(stage: Stage) -> bool:
    return await stage


def test_an_awaited_stage_raises_what_the_save_failed_of(steps: Checkpointer, root: Path) -> None:
    async def train() -> None:
        with HeldWorker():
            handle = steps.save(1, state(1))
            block(root, 1)
            task = asyncio.create_task(_await(handle.committed))
            await asyncio.sleep(0)
        with pytest.raises(CheckpointExistsError):
            await asyncio.wait_for(task, DEADLINE_S)

    steps.save(0, state(0)).result(DEADLINE_S)
    asyncio.run(train())


def test_the_result_is_there_when_old_steps_are_gone_from_the_disk(
    opened: Callable[..., Checkpointer], root: Path
) -> None:
    steps = opened(keep=2)
    for number in range(12):
        steps.save(number, state(number)).result(DEADLINE_S)
        there = sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
        assert there == list(range(max(0, number - 1), number + 1))


def test_the_step_is_visible_and_whole_when_it_is_committed(steps: Checkpointer, root: Path) -> None:
    for number in range(5):
        handle = steps.save(number, state(number))
        handle.wait_committed(DEADLINE_S)
        assert (root / str(number) / "default" / "tierkeep.json").exists()
        assert steps.verify(number).path == str(root / str(number) / "default")


def test_a_synchronous_save_gives_a_handle_that_has_ended(opened: Callable[..., Checkpointer], memory: Path) -> None:
    steps = opened(asynchronous=False)
    handle = steps.save(1, state(1))
    assert handle.done
    assert [stage.done for stage in (handle.staged, handle.written, handle.committed)] == [True] * 3
    assert handle.wait_staged(0)
    assert handle.wait_written(0)
    assert handle.wait_committed(0)
    assert handle.result(0).outcome == "saved"
    assert handle.cancel() is False
    assert asyncio.run(_await(handle.committed)) is True
    assert numbers(restore(steps)) == {1}
    assert not list(memory.iterdir()), "a synchronous save needs no memory"


def test_synchronous_and_background_saves_become_visible_in_the_order_of_their_calls(steps: Checkpointer) -> None:
    watch = Watch(steps.events)
    steps.save(1, state(1))
    handle = steps.save(2, state(2), asynchronous=False)
    assert watch.times("committed") == {1: 1}
    assert handle.done
    steps.save(3, state(3)).result(DEADLINE_S)
    assert steps.steps() == [1, 2, 3]
    assert [numbers(restore(steps, step)) for step in (1, 2, 3)] == [{1}, {2}, {3}]


def test_a_step_for_memory_alone_ends_in_memory_and_never_commits(steps: Checkpointer, root: Path) -> None:
    handle = steps.save(1, state(1), to_disk=False)
    assert handle.result(DEADLINE_S).outcome == "in memory"
    assert handle.kept.done
    assert handle.kept.wait(0) is True
    assert handle.committed.wait(DEADLINE_S) is False
    assert handle.wait_written(DEADLINE_S) is False
    assert not handle.committed.done
    assert not handle.skipped
    assert asyncio.run(_await(handle.committed)) is False
    assert not (root / "1").exists()
    assert steps.steps() == [1]
    assert numbers(restore(steps)) == {1}


def test_of_every_k_steps_one_goes_to_the_disk_and_so_does_the_newest_at_the_end(
    opened: Callable[..., Checkpointer], root: Path
) -> None:
    with opened(disk_every=4) as steps:
        outcomes = [steps.save(number, state(number)).result(DEADLINE_S).outcome for number in range(10)]
        assert [number for number, outcome in enumerate(outcomes) if outcome == "saved"] == [0, 4, 8]
        assert steps.steps() == [0, 4, 8, 9]
        assert [numbers(restore(steps, step)) for step in (0, 4, 8, 9)] == [{0}, {4}, {8}, {9}]
        assert steps.save(10, state(10), to_disk=True).result(DEADLINE_S).outcome == "saved"
        assert steps.save(12, state(12), to_disk=False).result(DEADLINE_S).outcome == "in memory"
    found = opened(asynchronous=False)
    assert found.steps() == [0, 4, 8, 10, 12]
    assert numbers(restore(found)) == {12}


def test_a_state_without_bytes_is_saved_too(steps: Checkpointer) -> None:
    for number in range(4):
        handle = steps.save(number, {"name": f"number {number}", "nothing": [None, {}]})
        assert handle.result(DEADLINE_S).outcome == "saved"
        assert handle.written.done
        assert restore(steps, number) == {"name": f"number {number}", "nothing": [None, {}]}
    assert steps.save(9, {"name": "kept"}, to_disk=False).result(DEADLINE_S).outcome == "in memory"
    assert restore(steps) == {"name": "kept"}
