"""Saving, rotating and restoring again and again holds nothing more of anything than after the first few times."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.crash.steps import checkpointer, held, leftovers, others, restore, state
from tierkeep.options import MIB, SaveOptions
from tierkeep.testing.strategies import exact_form

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WARM_UP = 20
GROWTH_NBYTES = 24 * MIB
"""What the allocator may keep beyond the warm-up. One cycle restores 3 MiB: a fifth of it leaked shows in 60 cycles."""


@pytest.mark.parametrize("cycles", [60, pytest.param(500, marks=pytest.mark.full)])
def test_cycles_leave_files_threads_memory_and_disk_space_as_they_were(
    cycles: int, tmp_path: Path, count: Callable[..., None]
) -> None:
    process = psutil.Process()
    options = SaveOptions(chunk_nbytes=MIB // 2, lanes=3, lane_nbytes=4 * MIB)
    used: set[int] = set()
    warm = 0
    with checkpointer(tmp_path, options=options, keep=3) as steps:
        for number in range(cycles):
            value = state(number, 3 * MIB)
            steps.save(number, value)
            if number % 7 == 3:
                steps.save(number, value, overwrite=True)
            assert exact_form(restore(steps)) == exact_form(value)
            if number < WARM_UP:
                before, warm = held(), process.memory_info().rss
            else:
                assert held() == before
                assert steps.steps() == [number - 2, number - 1, number]
                used.add(disk_nbytes(tmp_path))
                assert len(leftovers(tmp_path)) == 1  # its image is the next step's
                assert not others(tmp_path)
    assert not leftovers(tmp_path)
    assert not others(tmp_path)
    grown = process.memory_info().rss - warm
    assert grown < GROWTH_NBYTES
    assert max(used) - min(used) < 64 * 1024  # numbers of more digits in the records
    count(cycles=cycles, grown_nbytes=grown, disk_nbytes=f"{min(used)} to {max(used)}")


def test_a_restored_state_is_freed_when_it_is_let_go_of(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as steps:
        steps.save(1, state(1))
        restore(steps)
        gc.collect()
        gc.disable()
        try:
            found = restore(steps)
            alive = weakref.ref(found["big"])
            del found
            assert alive() is None, "it would live until the cyclic collector comes by"
        finally:
            gc.enable()


def disk_nbytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*"))
