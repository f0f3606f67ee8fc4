"""Where memory is short: memory without a name, or an error with figures and ways out, and never a hang."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.background.saves import (
    DEADLINE_S,
    VALUES,
    HeldWorker,
    Watch,
    arena,
    images,
    kill_worker,
    numbers,
    restore,
    state,
    until,
)
from tierkeep.errors import CheckpointExistsError, SaveCancelledError, StorageError
from tierkeep.memory import budget
from tierkeep.options import PAGE, RestoreOptions
from tierkeep.save import background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with room for the records of an arena, and for one small image."""
    place = tmp_path / "narrow"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={40 * PAGE}", "none", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tmpfs has room for an image."""
    monkeypatch.setattr(background, "has_room", lambda directory, nbytes: False)


def use(steps: Checkpointer) -> None:
    """All that can be done with a checkpointer, each done a few times."""
    for number in range(10):
        snapshot = "deferred" if number % 3 == 2 else "copy"
        handle = steps.save(number, state(number), snapshot=snapshot, to_disk=number % 4 != 1)  # type: ignore[arg-type]
        if number == 5:
            assert handle.result(DEADLINE_S).outcome == "saved", "memory without a name is no place to stay in"
    assert numbers(restore(steps)) == {9}
    steps.wait(DEADLINE_S)
    assert steps.steps() == list(range(10))
    steps.save(9, state(90), overwrite=True).result(DEADLINE_S)
    assert numbers(restore(steps)) == {90}
    handle = steps.save(10, state(10))
    with pytest.raises(SaveCancelledError) if handle.cancel() else contextlib.nullcontext():
        handle.result(DEADLINE_S)
    with HeldWorker():
        handle = steps.save(12, state(12))
        (steps.root / "12" / "somebody's").mkdir(parents=True)
    with pytest.raises(CheckpointExistsError):
        handle.result(DEADLINE_S)
    for number in range(13, 17):
        steps.save(number, state(number, VALUES + 1000 * (number % 2)))
    steps.wait(DEADLINE_S)
    for number in range(13, 17):
        assert numbers(restore(steps, number)) == {number}


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("in_flight", [1, 2])
def test_without_room_in_the_tmpfs_saves_go_through_memory_without_a_name(
    in_flight: int, opened: Callable[..., Checkpointer], memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tierkeep"):
        steps = opened(in_flight=in_flight)
        use(steps)
    assert caplog.text.count("has no room") == 1, "said once"
    assert not images(memory)
    assert not list(arena(steps).glob("*/*/*"))
    steps.close()
    assert numbers(restore(opened(asynchronous=False))) == {16}


def test_a_tmpfs_that_is_too_small_is_made_do_with(narrow: Path, opened: Callable[..., Checkpointer]) -> None:
    steps = opened(in_flight=2, limits={"directory": str(narrow)})
    use(steps)
    steps.close()
    assert not list(narrow.iterdir())


@pytest.mark.usefixtures("full")
def test_a_save_without_a_name_in_memory_outlives_its_worker(steps: Checkpointer) -> None:
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)
    for number in range(1, 4):
        with HeldWorker():
            handle = steps.save(number, state(number))
            kill_worker()
        assert handle.result(DEADLINE_S).outcome == "saved"
        assert numbers(restore(steps, number)) == {number}
    assert watch.times("committed") == {0: 1, 1: 1, 2: 1, 3: 1}
    assert not watch.times("failed")


@pytest.mark.usefixtures("full")
def test_the_first_save_can_be_sealed_before_its_worker_has_looked_at_the_arena(
    opened: Callable[..., Checkpointer], root: Path
) -> None:
    for number in range(8):
        steps = opened(root.with_name(f"root{number}"))
        snapshot = "deferred" if number % 2 else "copy"
        handle = steps.save(1, state(1), snapshot=snapshot)  # type: ignore[arg-type]
        assert handle.result(DEADLINE_S).outcome == "saved"
        steps.close()


def test_named_and_nameless_images_can_be_had_together(
    opened: Callable[..., Checkpointer], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for one of two images was there, and then none: what memory holds under a name stays whole."""
    steps = opened()
    monkeypatch.setattr(steps._background, "_most_images", 1)
    steps.prepare(state(0))
    until(lambda: len(steps._background._images) == 1)
    monkeypatch.setattr(steps._background, "_most_images", 2)
    monkeypatch.setattr(background, "has_room", lambda directory, nbytes: False)
    for number in range(12):
        steps.save(number, state(number))
        restored = restore(steps)
        assert numbers(restored) == {number}
    steps.wait(DEADLINE_S)
    assert len(steps._background._images) == 2
    for path in (arena(steps) / "steps").iterdir():
        assert steps._engine is not None
        assert numbers(steps._engine.restore(path, options=RestoreOptions())) == {int(path.name)}


def test_a_budget_that_is_too_small_is_an_error_with_figures_and_ways_out(
    opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(in_flight=2, limits={"budget_nbytes": 200_000})
    for _ in range(3):
        with pytest.raises(
            StorageError,
            match=r"allocating 3 images, 0\.\d+ GB: the budget is 0\.00 GB.*in_flight.*budget_nbytes.*asynch",
        ) as raised:
            steps.save(1, state(1))
        assert raised.value.errno == 12
    with pytest.raises(StorageError, match="budget"):
        steps.prepare(state(1))
    with pytest.raises(StorageError, match="budget"):
        steps.save(1, state(1), snapshot="deferred")
    steps.wait(DEADLINE_S)
    assert not images(memory)
    assert steps.steps() == []
    assert steps.save(1, state(1), asynchronous=False).done
    assert steps.save(2, state(2, 1000)).result(DEADLINE_S).outcome == "saved"
    assert steps.steps() == [1, 2]


def test_a_state_that_outgrows_the_budget_is_refused_and_a_smaller_one_is_not(
    opened: Callable[..., Checkpointer], memory: Path
) -> None:
    steps = opened(limits={"budget_nbytes": 400_000})
    steps.save(1, state(1)).result(DEADLINE_S)
    for number in range(4):
        with pytest.raises(StorageError, match="the budget is"):
            steps.save(2, state(2, 8 * VALUES))
        steps.save(10 + number, state(10 + number)).result(DEADLINE_S)
    assert steps.latest_step() == 13
    assert numbers(restore(steps)) == {13}


def test_a_state_that_the_host_has_no_memory_for_is_refused(
    steps: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_memory", lambda: (300_000, 8 << 20))
    with pytest.raises(StorageError, match=r"0\.00 GB of memory"):
        steps.save(1, state(1))
    monkeypatch.setattr(budget, "_memory", lambda: (None, 0))  # a kernel that does not say
    assert steps.save(1, state(1)).result(DEADLINE_S).outcome == "saved"


def test_a_tmpfs_that_fills_up_after_it_was_asked_is_an_error_and_no_hang(
    narrow: Path, opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "has_room", lambda directory, nbytes: True)
    steps = opened(limits={"directory": str(narrow)})
    for _ in range(3):
        with pytest.raises(StorageError, match="No space left"):
            steps.save(1, state(1, 4 * VALUES))
    monkeypatch.undo()
    assert steps.save(1, state(1, 4 * VALUES)).result(DEADLINE_S).outcome == "saved"
    assert numbers(restore(steps)) == {1}
    steps.close()
    assert not list(narrow.iterdir())


def test_a_state_that_outgrows_the_tmpfs_is_saved_all_the_same(
    narrow: Path, opened: Callable[..., Checkpointer]
) -> None:
    """The images it has are too small, and cannot be made larger there."""
    steps = opened(limits={"directory": str(narrow)})
    steps.save(1, state(1, 400)).result(DEADLINE_S)
    for number in range(2, 6):
        steps.save(number, state(number, 4 * VALUES)).result(DEADLINE_S)
        assert numbers(restore(steps)) == {number}
    steps.close()
    assert not list(narrow.iterdir())
