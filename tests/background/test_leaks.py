"""Saving again and again holds nothing more of anything than after the first few times, whether saves fail or not."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.background.saves import (
    DEADLINE_S,
    HeldWorker,
    arena,
    block,
    numbers,
    restore,
    state,
    until,
    worker_pid,
)
from tests.crash.steps import held
from tierkeep.errors import CheckpointExistsError
from tierkeep.options import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer

WARM_UP = 20
GROWTH_NBYTES = 24 * MIB
"""What the allocators of both processes may keep beyond the warm-up: a state of 2 MiB leaked by each save shows."""
VALUES = MIB // 4 - 1000


def measure(steps: Checkpointer, memory: Path, root: Path) -> dict[str, Any]:
    """What is held when no save is under way."""
    worker = psutil.Process(worker_pid())
    names = sorted(path.parent.name if path.name.isalnum() else path.name for path in arena(steps).iterdir())
    return {
        "files and threads": held(),
        "files of the worker": worker.num_fds(),
        "processes": len(psutil.Process().children(recursive=True)),
        "in the arena": names,
        "free": len(os.listdir(arena(steps) / "free")),
        "plans": len(os.listdir(arena(steps) / "plans")),
        "filling": os.listdir(arena(steps) / "filling"),
        "sealed": os.listdir(arena(steps) / "sealed"),
        "steps": len(os.listdir(arena(steps) / "steps")),
        "arenas": len(list(memory.glob("*/*"))),
        "on the disk": len(list(root.iterdir())),
        "disk space": sum(path.stat().st_blocks * 512 for path in root.rglob("*")) // (256 << 10),
    }


@pytest.mark.parametrize("saves", [60, pytest.param(300, marks=pytest.mark.full)])
@pytest.mark.parametrize("failing", [False, True])
def test_saves_leave_memory_files_threads_processes_and_disk_space_as_they_were(
    saves: int, failing: bool, opened: Callable[..., Checkpointer], root: Path, memory: Path
) -> None:
    steps = opened(keep=3, in_flight=2)
    training = psutil.Process()
    failed = 0
    before: dict[str, Any] = {}
    warm = 0
    threads: list[int] = []
    for number in range(saves):
        value = state(number, VALUES)
        settings: dict[str, Any] = {"snapshot": "deferred" if number % 2 else "copy", "to_disk": number % 5 != 3}
        if failing and number % 20 == 7:
            steps.wait(DEADLINE_S)
            with HeldWorker():
                steps.save(number, value, **settings | {"to_disk": True})
                path = block(root, number)
            with pytest.raises(CheckpointExistsError):
                steps.wait(DEADLINE_S)
            shutil.rmtree(path)
            failed += 1
        elif failing and number % 20 == 17:
            steps.save(number, value, **settings).cancel()
            failed += 1
        else:
            steps.save(number, value, **settings)
        if number >= WARM_UP - 1 and number % 10 == 9:
            steps.wait(DEADLINE_S)
            assert numbers(restore(steps)) == {number}
            steps.save(number, value, overwrite=True).result(DEADLINE_S)
            now = measure(steps, memory, root)
            threads.append(psutil.Process(worker_pid()).num_threads())
            rss = training.memory_info().rss + psutil.Process(worker_pid()).memory_info().rss
            if not before:
                before, warm = now, rss
            assert now == before
    assert rss - warm < GROWTH_NBYTES
    # A thread that was joined may still be counted for a moment; one that was left stays.
    until(lambda: psutil.Process(worker_pid()).num_threads() <= min(threads))
    assert before
    assert failed == (saves // 10 if failing else 0)
