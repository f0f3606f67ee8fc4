"""A step that stands in memory and on the disk is restored from memory, unless the disk has a later save of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.background.saves import DEADLINE_S, HeldWorker, numbers, restore, state
from tierkeep.errors import CheckpointExistsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkeep.checkpointer import Checkpointer


@pytest.mark.parametrize("other", [False, True], ids=["by the same checkpointer", "by another one"])
def test_a_synchronous_save_over_a_step_that_memory_has_is_what_a_restore_gives(
    other: bool, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened()
    steps.save(5, state(1)).result(DEADLINE_S)
    writer = opened(asynchronous=False) if other else steps

    writer.save(5, state(2), overwrite=True, asynchronous=False)

    assert numbers(restore(steps, 5)) == {2}
    assert numbers(restore(steps)) == {2}
    assert steps.metadata(5).path == str(steps.root / "5" / "default")


def test_a_save_in_the_background_over_a_step_on_the_disk_is_what_a_restore_gives_before_it_is_written(
    opened: Callable[..., Checkpointer],
) -> None:
    steps = opened()
    steps.save(5, state(1), asynchronous=False)

    steps.save(5, state(2), overwrite=True, to_disk=False).result(DEADLINE_S)

    with HeldWorker():
        assert numbers(restore(steps, 5)) == {2}
        assert numbers(restore(steps)) == {2}


def test_a_step_on_the_disk_is_not_saved_again_to_memory_alone_unless_it_is_to_be(
    opened: Callable[..., Checkpointer],
) -> None:
    steps = opened()
    steps.save(5, state(1)).result(DEADLINE_S)

    with pytest.raises(CheckpointExistsError):
        steps.save(5, state(2), to_disk=False)
    steps.save(5, state(3), to_disk=False, overwrite=True)
    steps.close()  # the newest step: it would be lost if the disk's could not be overwritten

    assert numbers(restore(opened(), 5)) == {3}
