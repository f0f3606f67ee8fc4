"""Saving in the background again and again holds nothing more of anything than after the first few times."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.background.saves import checkpointer, images, numbers, restore, state
from tierkeep.errors import CheckpointExistsError
from tierkeep.memory.client import client
from tierkeep.options import MIB

if TYPE_CHECKING:
    from pathlib import Path

WARM_UP = 20
GROWTH_NBYTES = 16 * MIB
"""What allocators may keep. A state has 2.4 MB: a tenth of it leaked shows in 60 saves."""
VALUES = 250_000


@pytest.mark.parametrize("failing", [False, True], ids=["all well", "every tenth fails"])
@pytest.mark.parametrize("saves", [60, pytest.param(300, marks=pytest.mark.full)])
def test_saves_leave_files_threads_processes_and_memory_as_they_were(
    saves: int, failing: bool, root: Path, memory: Path
) -> None:
    process = psutil.Process()
    used: set[tuple[int, int, int, int, int]] = set()
    warm = worker_warm = 0
    with checkpointer(root, memory, keep=2, in_flight=2) as steps:
        for number in range(saves):
            foreign = failing and number % 10 == 9
            if foreign:  # something that is no checkpoint takes the step's place while the save is under way
                steps.wait()
                (root / str(number)).mkdir()
            try:
                handle = steps.save(number, state(number, VALUES), overwrite=foreign)
                handle.result()
                assert not foreign
            except CheckpointExistsError:
                assert foreign
                (root / str(number)).rmdir()
            worker = psutil.Process(client().worker_pid)
            if number == WARM_UP:
                gc.collect()
                warm, worker_warm = process.memory_info().rss, worker.memory_info().rss
            if number > WARM_UP and not foreign:
                used.add(
                    (
                        process.num_fds(),
                        process.num_threads(),
                        worker.num_threads(),
                        len(process.children()),
                        len(images(memory)),
                    )
                )
        gc.collect()
        grown = process.memory_info().rss - warm
        worker_grown = worker.memory_info().rss - worker_warm
        assert numbers(restore(steps)) == {steps.latest_step()}
    assert len({each[3] for each in used}) == 1, used
    assert max(each[0] for each in used) - min(each[0] for each in used) <= 1, (
        used
    )  # an image that comes back is opened
    assert max(each[1] for each in used) - min(each[1] for each in used) <= 1, used
    assert max(each[4] for each in used) <= 3, used
    assert grown < GROWTH_NBYTES
    assert worker_grown < GROWTH_NBYTES + 3 * VALUES * 9  # its mappings of the images
    assert not list(memory.iterdir())
    assert len(list(root.iterdir())) == 2
