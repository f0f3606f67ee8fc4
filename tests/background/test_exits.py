"""However training ends, nothing is left that should not be, and what was sealed is on the disk."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.background.saves import images, numbers, restore
from tests.background.trainer import Ended, run_trainer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer

ENDS: dict[str, tuple[int, list[int]]] = {
    "committed": (0, [0, 1, 2]),
    "closed": (0, [0, 1, 2]),
    "exits": (3, [0, 1, 2]),
    "raises": (1, [0, 1, 2]),
    "raises with": (1, [0, 1, 2]),
    "interrupted": (-2, [0, 1, 2]),
    "memory only": (0, [0, 1, 2, 3]),
    "deferred": (0, [0, 1, 2, 3]),
    "slow": (0, [0, 1, 2]),
    "daemonic": (0, [0, 1, 2]),
    "handled": (5, [0, 1, 2, 3]),
    "worker killed": (0, [0, 1, 2]),
    "worker killed at the end": (0, [0, 1, 2]),
    "worker killed again and again": (0, [0, 1, 2]),
}
"""Ways to end with the interpreter's leave: the status, and the steps that are on the disk."""

DEATHS: dict[str, tuple[int, list[int]]] = {
    "killed": (-9, [0, 1, 2]),
    "terminated": (-15, [0, 1, 2]),
    "exits at once": (4, [0, 1, 2]),
    "memory only killed": (-9, [0, 1, 2, 3]),
    "killed while copying": (-9, [0, 1, 2]),
    "daemonic left": (0, [0, 1, 2]),
}
"""Ways to end without it."""


def assert_no_process_is_left(ended: Ended) -> None:
    for pid in ended.workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # as a rule it is gone; who adopted it may not have looked yet
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


def on_disk(root: Path) -> list[int]:
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


@pytest.mark.parametrize("way", ENDS)
def test_an_end_with_the_interpreters_leave_leaves_nothing(
    way: str, root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    status, steps = ENDS[way]
    ended = run_trainer(way, root, memory)
    assert ended.status == status, ended.output
    assert ("Traceback" in ended.output) == (way in ("raises", "raises with", "interrupted")), ended.output
    assert ended.workers
    assert_no_process_is_left(ended)
    assert not list(memory.iterdir())
    assert sorted(path.name for path in root.iterdir()) == [str(step) for step in steps]
    found = opened(asynchronous=False)
    assert found.steps() == steps
    for step in steps:
        assert numbers(restore(found, step)) == {step}


@pytest.mark.parametrize("way", DEATHS)
def test_a_death_leaves_the_newest_step_in_memory_and_everything_that_was_sealed_on_the_disk(
    way: str, root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    status, steps = DEATHS[way]
    ended = run_trainer(way, root, memory)
    assert ended.status == status, ended.output
    assert "Traceback" not in ended.output
    assert_no_process_is_left(ended)
    assert on_disk(root) == steps
    (home,) = memory.iterdir()
    (left,) = home.iterdir()
    for name in ("free", "filling", "sealed"):
        assert not os.listdir(left / name)
    assert os.listdir(left / "steps") == [str(steps[-1])]
    assert len(images(memory)) == 1

    reader = opened(asynchronous=False)
    for step in steps:
        assert numbers(restore(reader, step)) == {step}
    after = opened()
    assert after.latest_step() == steps[-1]
    assert numbers(restore(after)) == {steps[-1]}
    assert after.metadata(steps[-1]).path.startswith(str(memory))
    number = steps[-1] + 1
    after.save(number, {"n": number}).wait_committed(60)
    after.close()
    assert not list(memory.iterdir())


@pytest.mark.parametrize("way", ["prepared", "never used"])
def test_a_process_that_saved_nothing_leaves_nothing(way: str, root: Path, memory: Path) -> None:
    ended = run_trainer(way, root, memory)
    assert ended.status == 0, ended.output
    assert_no_process_is_left(ended)
    assert not list(memory.iterdir())
    assert not root.exists() or not list(root.iterdir())


def test_a_save_is_finished_by_the_worker_of_the_next_process_if_both_died(
    root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    run_trainer("killed with its worker", root, memory)
    assert on_disk(root) == [0]
    assert len(images(memory)) == 3 or len(images(memory)) == 2
    steps = opened()
    assert numbers(restore(steps)) == {1}
    steps.close()
    assert on_disk(root) == [0, 1]
