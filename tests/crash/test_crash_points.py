"""No power loss, at any operation of a save, an overwrite, a retirement or a cleaning, loses what was promised.

Invariants I1, I4 and I5. `python -m tests.crash.count` prints how much was tried.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.crash.bugs import BUGS, Bug
from tests.crash.loop import Scenario, Tally, crash_everywhere, length_of
from tests.crash.scenarios import KILLED, SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tierkeep.testing.aftermath import Operation

SPARED = [".", "root/2.tierkeep-tmp-…/default/ocdbt.process_0", "root/2.tierkeep-tmp-…/default"]
"""Syncs that a lone save into a durable root could do without: that of the root's own entry, which a killed process may
have left unsynced, and those before the manifests, whose directories are synced again before anything is visible.
"""
BY_NAME = {scenario.name: scenario for scenario in (*SCENARIOS, *KILLED)}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """In memory where there is such a place."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def report(count: Callable[..., None], tally: Tally) -> None:
    count(crash_points=tally.points, states=tally.states, opened=tally.different, violations=len(tally.violations))
    assert not tally.violations, "\n".join(tally.violations[:10])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_power_loss_at_any_operation_loses_nothing_that_was_promised(
    scenario: Scenario, scratch: Path, count: Callable[..., None]
) -> None:
    report(count, crash_everywhere(scenario, scratch, mixes=1, most=3, every=5 if scenario in SCENARIOS[-1:] else 1))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_power_loss_at_any_operation_in_any_order_of_loss(
    scenario: Scenario, scratch: Path, count: Callable[..., None]
) -> None:
    report(count, crash_everywhere(scenario, scratch, mixes=40, most=1000))


@pytest.mark.parametrize("scenario", KILLED, ids=lambda scenario: scenario.name)
def test_a_power_loss_after_another_process_was_killed(
    scenario: Scenario, scratch: Path, count: Callable[..., None]
) -> None:
    tally = Tally()
    for kill_at in range(0, length_of(scenario, scratch), 4):
        tally.add(crash_everywhere(scenario, scratch, mixes=0, most=2, every=100, kill_at=kill_at))
    report(count, tally)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scenario", KILLED, ids=lambda scenario: scenario.name)
def test_a_power_loss_at_any_operation_after_a_kill_at_any_other(
    scenario: Scenario, scratch: Path, count: Callable[..., None]
) -> None:
    tally = Tally()
    for kill_at in range(length_of(scenario, scratch)):
        # Every fourth operation from the kill on: over all kills that is each of them.
        tally.add(crash_everywhere(scenario, scratch, mixes=1, most=3, every=4, kill_at=kill_at))
    report(count, tally)


def test_every_sync_of_a_save_is_needed_but_for_three_that_are_known(scratch: Path, count: Callable[..., None]) -> None:
    left_out: list[str] = []

    def leaves_out(number: int) -> Callable[[], Callable[[Operation], bool]]:
        def one_run() -> Callable[[Operation], bool]:
            seen = itertools.count()

            def this_one(operation: Operation) -> bool:
                if next(seen) != number:
                    return False
                left_out.append(re.sub("[0-9a-f]{16,}", "…", operation.path))
                return True

            return this_one

        return one_run

    needed, spared = 0, []
    for number in itertools.count():
        before = len(left_out)
        tally = crash_everywhere(
            BY_NAME["second save"], scratch, mixes=1, most=3, left_out=leaves_out(number), first=True
        )
        if len(left_out) == before:
            break
        if tally.violations:
            needed += 1
        else:
            spared.append(left_out[-1])
    count(syncs=number, needed=needed, spared=spared)
    assert spared == SPARED


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_that_is_planted_is_caught(
    bug: Bug, scratch: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[..., None]
) -> None:
    scenario = BY_NAME[bug.scenario]
    bug.plant(monkeypatch)
    tally = Tally()
    for kill_at in [None] if scenario.killed is None else range(48, length_of(scenario, scratch)):
        tally.add(
            crash_everywhere(scenario, scratch, mixes=1, most=3, left_out=bug.leaves_out, kill_at=kill_at, first=True)
        )
        if tally.violations:
            break
    assert tally.violations, f"nobody noticed that {bug.name}"
    count(caught_by=tally.violations[0])
