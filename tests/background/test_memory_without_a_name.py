"""Where the tmpfs has no room, images are memory without a name: saves work, and every step goes to the disk."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.background.saves import DEADLINE_S, HeldWorker, Watch, arena, kill_worker, numbers, restore, state
from tierkeep.save import background

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer


_BOTH_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.background.saves import HeldWorker, checkpointer, state
from tierkeep.save import background

background.has_room = lambda *_: False
steps = checkpointer(Path(sys.argv[1]), Path(sys.argv[2]))
steps.save(0, state(0)).result()
with HeldWorker() as held:
    steps.save(1, state(1))
    os.kill(held.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "has_room", lambda *_: False)


def test_saves_reach_the_disk_and_a_warning_says_that_memory_is_no_tier(
    opened: Callable[..., Checkpointer], caplog: pytest.LogCaptureFixture
) -> None:
    steps = opened(in_flight=2, keep=2)

    with caplog.at_level(logging.WARNING, "tierkeep"):
        handles = [steps.save(number, state(number)) for number in range(4)]
        steps.wait(DEADLINE_S)

    assert [handle.result(0).outcome for handle in handles] == ["saved"] * 4
    assert len([record for record in caplog.records if "has no room" in record.message]) == 1
    assert steps.steps() == [2, 3]
    assert [numbers(restore(steps, number)) for number in (2, 3)] == [{2}, {3}]


def test_a_step_that_is_for_memory_alone_is_written_to_the_disk_all_the_same(
    opened: Callable[..., Checkpointer], root: Path
) -> None:
    steps = opened(disk_every=10)

    assert steps.save(3, state(3)).result(DEADLINE_S).outcome == "saved"
    assert (root / "3" / "default").is_dir()
    assert numbers(restore(steps)) == {3}


def test_a_state_of_another_size_is_saved_in_the_same_memory(opened: Callable[..., Checkpointer]) -> None:
    steps = opened()
    for number, values in enumerate((1000, 70_000, 3000)):
        steps.save(number, state(number, values)).result(DEADLINE_S)
        assert numbers(restore(steps, number)) == {number}


def test_a_worker_that_takes_another_s_place_is_given_the_memory_again(opened: Callable[..., Checkpointer]) -> None:
    steps = opened()
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)

    with HeldWorker():
        handle = steps.save(1, state(1))
        kill_worker()

    assert handle.result(DEADLINE_S).outcome == "saved"
    assert watch.times("worker") == {None: 1}
    assert numbers(restore(steps, 1)) == {1}


def test_what_went_with_both_processes_is_given_up_and_saves_go_on(
    opened: Callable[..., Checkpointer], root: Path, memory: Path
) -> None:
    died = subprocess.run(
        [sys.executable, "-c", _BOTH_KILLED, str(root), str(memory)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=DEADLINE_S,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL

    steps = opened()
    assert steps.steps() == [0]
    assert not list((arena(steps) / "sealed").iterdir())
    assert steps.save(1, state(2)).result(DEADLINE_S).outcome == "saved"
    assert numbers(restore(steps)) == {2}
