"""The state has another structure from one save to the next: the right bytes, whatever was saved before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.background.saves import (
    DEADLINE_S,
    VALUES,
    HeldWorker,
    arena,
    images,
    numbers,
    restore,
    state,
    until,
    worker_pid,
)
from tierkeep.testing.strategies import exact_form
from tierkeep.tiers.host_memory import HostMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkeep.checkpointer import Checkpointer


def array(number: int, values: int = VALUES, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
    return (np.arange(values) + number).astype(dtype)


STRUCTURES: dict[str, Callable[[int], Any]] = {
    "larger and larger": lambda n: {"x": array(n, VALUES + 3000 * n)},
    "smaller and smaller": lambda n: {"x": array(n, VALUES * 4 - 3000 * n)},
    "large and small": lambda n: {"x": array(n, VALUES * (1 + 3 * (n % 2)))},
    "another dtype": lambda n: {"x": array(n, VALUES, [np.int64, np.float32, np.uint8][n % 3])},
    "another name": lambda n: {f"x{n % 3}": array(n)},
    "another shape": lambda n: {"x": array(n).reshape([(-1,), (2, -1), (-1, 4)][n % 3])},
    "another container": lambda n: [{"x": array(n)}, [array(n)], (array(n),), array(n)][n % 4],
    "more leaves": lambda n: {str(i): array(n + i, 1000) for i in range(n + 1)},
    "a longer string": lambda n: {"x": array(n), "name": "n" * n * 100},
    "tied or not": lambda n: {"x": (a := array(n)), "y": a if n % 2 else a.copy()},
    "with and without bytes": lambda n: {"x": array(n)} if n % 2 else {"name": str(n)},
    "empty arrays": lambda n: {"x": array(n, VALUES * (n % 2)), "y": np.zeros((0, 3))},
    "one value": lambda n: {"x": array(n)} if n % 2 else {"x": n},
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_a_structure_that_changes_between_saves_is_saved_bit_for_bit(
    structure: str, snapshot: Any, opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(in_flight=2)
    states = [STRUCTURES[structure](number) for number in range(9)]
    for number, value in enumerate(states):
        steps.save(number, value, snapshot=snapshot)
    steps.wait(DEADLINE_S)
    for number, value in enumerate(states):
        assert exact_form(restore(steps, number)) == exact_form(value)
    assert len(images(memory)) <= 3


def test_images_are_as_large_as_the_state_was_last(opened: Callable[..., Checkpointer], memory: Path) -> None:
    """Memory that a large state took is given back when smaller ones follow."""
    steps = opened()
    steps.save(0, state(0, 40 * VALUES)).result(DEADLINE_S)
    steps.prepare(state(0, 40 * VALUES))
    known = images(memory)
    for number in range(1, 4):
        report = steps.save(number, state(number)).result(DEADLINE_S)
    assert images(memory) == known
    assert {image.nbytes for image in steps._background._images.values()} == {report.image_nbytes}


def test_a_plan_is_known_as_long_as_a_save_needs_it(opened: Callable[..., Checkpointer]) -> None:
    """One structure all the time, and a new one after each of its saves."""
    steps = opened(in_flight=2)
    steps.save(0, state(0)).result(DEADLINE_S)
    for number in range(1, 41, 2):
        with HeldWorker():
            usual = steps.save(number, state(number))
            other = steps.save(number + 1, state(number + 1, 1000 + number))
        assert usual.result(DEADLINE_S).outcome == other.result(DEADLINE_S).outcome == "saved"
        assert numbers(restore(steps, number)) == {number}
    assert len(list((arena(steps) / "plans").iterdir())) <= 16, "they pile up"


def test_a_step_in_memory_alone_reaches_the_disk_after_many_other_structures_were_refused(
    opened: Callable[..., Checkpointer], root: Path
) -> None:
    steps = opened(limits={"write_bytes_per_s": 2 * VALUES})  # none of them is over before it is cancelled
    steps.save(1, state(1), to_disk=False).result(DEADLINE_S)
    for number in range(2, 30):
        assert steps.save(number, {f"name{number}": state(number)}).cancel()
    steps.close()
    assert numbers(restore(opened(asynchronous=False), 1)) == {1}


def test_an_unchanged_structure_is_planned_and_told_once(steps: Checkpointer) -> None:
    for number in range(10):
        steps.save(number, state(number))
    steps.wait(DEADLINE_S)
    assert steps._engine is not None
    assert steps._engine.plans.misses == 1
    assert len(list((arena(steps) / "plans").iterdir())) == 1
    until(lambda: steps._background._free)


def test_an_image_that_a_restore_has_mapped_is_never_cut_short(
    opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened()
    steps.save(0, {"x": array(0, VALUES * 4)}, to_disk=False).result(DEADLINE_S)
    (image,) = (path for path in arena(steps).glob("steps/0/default/*/d/*") if path.stat().st_size > VALUES)
    reader = HostMemory().open_image(image, direct=False)
    try:
        nbytes = reader.nbytes
        for number in range(1, 7):  # each image comes around more than once
            steps.save(number, {"x": array(number, VALUES)}, to_disk=False).result(DEADLINE_S)
            assert reader.mapped is not None
            assert len(reader.mapped) == nbytes == os.stat(f"/proc/self/fd/{reader.fileno()}").st_size
            assert reader.mapped[-1] is not None  # a page behind the end would kill this process
            assert np.array_equal(restore(steps)["x"], array(number, VALUES))
    finally:
        reader.close()
    assert len(images(memory)) == 2
    held = [os.readlink(file) for file in Path(f"/proc/{worker_pid()}/fd").iterdir()]
    gone = [file for file in held if file.startswith(str(memory)) and file.endswith("(deleted)")]
    assert not gone, "the worker holds memory that nobody else has"
