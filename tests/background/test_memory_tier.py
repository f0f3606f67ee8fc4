"""This host's memory as a tier of its own: restored from first, never mixed, found by its own root alone."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.background.saves import (
    DEADLINE_S,
    VALUES,
    arena,
    images,
    numbers,
    restore,
    state,
    worker_pid,
)
from tests.background.trainer import run_trainer
from tierkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SkippedStepWarning,
    StorageError,
)
from tierkeep.memory.arena import MARKER, sweep_arenas
from tierkeep.memory.lanes import run_lanes
from tierkeep.options import PAGE
from tierkeep.restore.place import NOTHING
from tierkeep.tiers.local_disk import ImageReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer


def image_in(step: Path) -> Path:
    """The largest file of a step: its image."""
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def damage(step: Path) -> None:
    with image_in(step).open("r+b") as file:
        file.seek(PAGE)
        file.write(bytes(255 - byte for byte in file.read(PAGE)))


def in_memory(steps: Checkpointer, step: int) -> Path:
    return arena(steps) / "steps" / str(step)


HARMS: dict[str, Callable[[Path], object]] = {
    "damaged": damage,
    "without its image": lambda step: image_in(step).unlink(),
    "without its record": lambda step: (step / "default" / "tierkeep.json").unlink(),
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("harm", HARMS)
def test_the_newest_step_comes_from_memory_whatever_became_of_the_disk(
    harm: str, steps: Checkpointer, root: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for number in range(3):
        steps.save(number, state(number))
    steps.wait(DEADLINE_S)
    HARMS[harm](root / "2")
    assert steps.latest_step() == 2
    for step in (2, None):
        assert numbers(restore(steps, step)) == {2}
    assert not recwarn.list
    assert steps.metadata(2).path.startswith(str(arena(steps)))
    if harm != "gone":
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError)):
            steps.verify(2)  # of the disk


@pytest.mark.parametrize("harm", HARMS)
def test_a_step_that_memory_has_lost_comes_from_the_disk_and_that_is_said(
    harm: str, steps: Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        steps.save(number, state(number))
    steps.wait(DEADLINE_S)
    HARMS[harm](in_memory(steps, 2))
    with caplog.at_level(logging.WARNING, logger="tierkeep"):
        for step in (2, None):
            assert numbers(restore(steps, step)) == {2}
    if harm != "gone":
        assert "step 2 is not restored from memory" in caplog.text
    steps.save(3, state(3)).result(DEADLINE_S)
    assert numbers(restore(steps)) == {3}


def test_a_step_that_is_damaged_everywhere_is_passed_over_with_a_warning(steps: Checkpointer, root: Path) -> None:
    for number in range(3):
        steps.save(number, state(number))
    steps.wait(DEADLINE_S)
    damage(in_memory(steps, 2))
    damage(root / "2")
    with pytest.raises(CorruptCheckpointError):
        restore(steps, 2)
    with pytest.warns(SkippedStepWarning, match="restored step 1"):
        assert numbers(restore(steps)) == {1}


def test_a_step_in_memory_is_copied_from_where_it_lies(steps: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    steps.save(1, state(1)).result(DEADLINE_S)

    def refuse(*_: object) -> int:
        raise AssertionError("read into a buffer")

    monkeypatch.setattr(ImageReader, "read", refuse)
    assert numbers(restore(steps)) == {1}


def while_it_is_read(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Has something happen once, when the next restore has copied all bytes and not yet given them back."""
    waiting = [happens]

    def run_and_then(*args: Any) -> None:
        run_lanes(*args)
        while waiting:
            waiting.pop()()

    monkeypatch.setattr("tierkeep.restore.read.run_lanes", run_and_then)


@pytest.mark.parametrize("into", [False, True], ids=["new arrays", "a target"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_of_an_image_that_is_filled_anew_while_it_is_read_nothing_is_given_back(
    into: bool, on_disk: bool, opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, reader = opened(), opened()
    steps.save(1, state(1), to_disk=on_disk).result(DEADLINE_S)
    count = itertools.count(2)

    def more() -> None:
        for number in itertools.islice(count, 3):
            steps.save(number, state(number), to_disk=False).result(DEADLINE_S)

    target = state(0) if into else NOTHING
    while_it_is_read(monkeypatch, more)
    found = restore(reader, target=target)
    assert numbers(found) == ({1} if on_disk else {4})
    while_it_is_read(monkeypatch, more)
    with pytest.raises((CheckpointNotFoundError, CorruptCheckpointError), match="while it was read"):
        restore(reader, 4, target=target)


def test_of_a_step_that_is_replaced_while_it_is_read_the_new_one_is_given_back(
    opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, reader = opened(), opened()
    steps.save(1, state(1), to_disk=False).result(DEADLINE_S)
    while_it_is_read(monkeypatch, lambda: steps.save(1, state(2), to_disk=False, overwrite=True).result(DEADLINE_S))
    assert numbers(restore(reader, 1)) == {2}


def test_memory_holds_one_step_that_is_not_under_way(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(in_flight=2)
    for number in range(20):
        steps.save(number, state(number), to_disk=number % 4 == 0)
    steps.wait(DEADLINE_S)
    assert [path.name for path in (arena(steps) / "steps").iterdir()] == ["19"]
    assert steps.steps() == [0, 4, 8, 12, 16, 19]


# ram-tier-overwritten-before-flush
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_is_not_written_over_while_it_goes_to_the_disk(
    in_flight: int, opened: Callable[..., Checkpointer], root: Path
) -> None:
    steps = opened(in_flight=in_flight, disk_every=5, limits={"write_bytes_per_s": 100 * VALUES})  # 0.1 s each
    outcomes = {number: steps.save(number, state(number)) for number in range(21)}
    for number, handle in outcomes.items():
        assert handle.result(DEADLINE_S).outcome == ("saved" if number % 5 == 0 else "in memory")
    steps.close()
    found = opened(asynchronous=False)
    assert found.steps() == [0, 5, 10, 15, 20]
    for number in found.steps():
        assert numbers(restore(found, number)) == {number}
        found.verify(number)


def test_what_memory_holds_is_no_older_than_what_the_disk_holds(steps: Checkpointer) -> None:
    """A synchronous save goes past this memory."""
    steps.save(1, state(1)).result(DEADLINE_S)
    steps.save(1, state(2), overwrite=True, asynchronous=False)
    for step in (1, None):
        assert numbers(restore(steps, step)) == {2}
    steps.save(1, state(3), overwrite=True).result(DEADLINE_S)
    assert numbers(restore(steps)) == {3}
    steps.save(1, state(4), overwrite=True, to_disk=False).result(DEADLINE_S)
    assert numbers(restore(steps)) == {4}
    steps.save(1, state(5), overwrite=True, asynchronous=False)
    assert numbers(restore(steps)) == {5}


def test_a_step_that_stands_on_the_disk_is_not_saved_to_memory_past_it(steps: Checkpointer, root: Path) -> None:
    steps.save(1, state(1)).result(DEADLINE_S)
    steps.save(2, state(2)).result(DEADLINE_S)
    for to_disk in (True, False):
        with pytest.raises(CheckpointExistsError):
            steps.save(1, state(9), to_disk=to_disk)
    assert numbers(restore(steps, 1)) == {1}


def test_the_same_step_can_be_saved_over_in_memory_and_on_the_disk_for_ever(steps: Checkpointer, memory: Path) -> None:
    for number in range(30):
        steps.save(7, state(number), overwrite=True, to_disk=number % 3 == 0).result(DEADLINE_S)
        assert numbers(restore(steps)) == {number}
    assert len(images(memory)) == 2


# Whose memory it is


def test_a_process_that_comes_after_one_that_died_restores_from_memory(
    root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    run_trainer("killed", root, memory)
    shutil.rmtree(root / "2")
    steps = opened()
    assert steps.steps() == [0, 1, 2]
    assert numbers(restore(steps)) == {2}
    steps.save(3, state(3)).result(DEADLINE_S)
    assert steps.steps() == [0, 1, 3]


@pytest.mark.parametrize("how", ["removed", "removed and made anew", "copied", "moved", "copied back"])
def test_memory_belongs_to_the_root_that_it_was_made_for(
    how: str, root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    run_trainer("killed", root, memory)
    assert len(images(memory)) == 1
    elsewhere = root.with_name("elsewhere")
    if how == "removed" or how == "removed and made anew":
        shutil.rmtree(root)
        if how == "removed and made anew":
            root.mkdir()
        steps = opened()
        assert steps.steps() == []
        assert steps.latest_step() is None
        with pytest.raises(CheckpointNotFoundError):
            restore(steps)
        steps.save(1, state(10)).result(DEADLINE_S)
        assert steps.steps() == [1]
        return
    if how == "copied":
        shutil.copytree(root, elsewhere)
    elif how == "moved":
        root.rename(elsewhere)
    else:
        shutil.copytree(root, elsewhere)
        shutil.rmtree(root)
        elsewhere.rename(root)
        elsewhere = root
    if how != "copied back":
        shutil.rmtree(elsewhere / "2")  # in the memory of the other root it still stands
        steps = opened(elsewhere)
        assert steps.steps() == [0, 1]
        steps.save(2, state(20)).result(DEADLINE_S)
        assert numbers(restore(steps)) == {20}
        steps.close()
    steps = opened(root)
    if how == "copied":
        assert numbers(restore(steps)) == {2}
    elif how == "moved":
        assert steps.steps() == []
    steps.save(5, state(5)).result(DEADLINE_S)
    assert steps.latest_step() == 5


def test_what_no_root_names_any_more_is_swept_by_whoever_comes_next(
    root: Path, memory: Path, opened: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    for name in ("one", "two", "three"):
        run_trainer("killed", tmp_path / name, memory)
    assert len(images(memory)) == 3
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "two")
    (tmp_path / "two").mkdir()
    steps = opened()
    steps.save(1, state(1)).result(DEADLINE_S)
    home = arena(steps).parent
    assert len(list(home.iterdir())) == 2, "one of a living process, one of a root that is there"
    with opened(tmp_path / "three") as found:
        assert numbers(restore(found)) == {2}
        found.save(3, state(3)).result(DEADLINE_S)
    assert len(list(home.iterdir())) == 1
    sweep_arenas(str(memory))
    assert list(home.iterdir()) == [arena(steps)], "what is in use was swept"


def test_the_memory_of_a_living_process_is_not_swept(opened: Callable[..., Checkpointer], root: Path) -> None:
    steps = opened()
    steps.save(1, state(1)).result(DEADLINE_S)
    (root / MARKER).unlink()
    other = opened(root.with_name("other"))
    other.save(1, state(1)).result(DEADLINE_S)
    steps.save(2, state(2)).result(DEADLINE_S)
    assert numbers(restore(steps, 2)) == {2}


MARKERS = ["", "x" * 32, "../" * 10 + "ab", "0" * 32, "A" * 32, "\x00" * 32, "ä" * 16]


@pytest.mark.parametrize("marker", MARKERS)
def test_a_marker_that_names_no_memory_of_this_root_is_no_marker(
    marker: str, root: Path, opened: Callable[..., Checkpointer]
) -> None:
    root.mkdir()
    (root / MARKER).write_text(marker)
    steps = opened()
    assert steps.steps() == []
    steps.save(1, state(1)).result(DEADLINE_S)
    assert numbers(restore(steps)) == {1}
    steps.close()
    assert [path.name for path in root.iterdir()] == ["1"]


def test_memory_of_another_user_is_neither_read_nor_written(
    root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    run_trainer("killed", root, memory)
    home = next(memory.iterdir())
    os.chown(home, 12345, -1)
    try:
        steps = opened()
        assert steps.steps() == [0, 1, 2]
        shutil.rmtree(root / "2")
        assert steps.steps() == [0, 1]
        with pytest.raises(StorageError, match="another user"):
            steps.save(3, state(3))
        assert steps.save(3, state(3), asynchronous=False).done
    finally:
        os.chown(home, os.geteuid(), -1)
        shutil.rmtree(home)


def test_a_home_that_is_a_link_is_refused(
    root: Path, memory: Path, tmp_path: Path, opened: Callable[..., Checkpointer]
) -> None:
    (tmp_path / "trap").mkdir()
    home = memory / f"tierkeep-{os.geteuid()}"
    home.symlink_to(tmp_path / "trap")
    steps = opened()
    with pytest.raises(StorageError):
        steps.save(1, state(1))
    assert not list((tmp_path / "trap").iterdir())
    home.unlink()
    steps.save(1, state(1)).result(DEADLINE_S)


def test_two_checkpointers_of_one_process_have_a_memory_each_and_one_worker(
    opened: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    both = [opened(tmp_path / name) for name in ("one", "two")]
    for number in range(5):
        for offset, steps in enumerate(both):
            steps.save(number, state(number + 100 * offset))
    assert arena(both[0]) != arena(both[1])
    pid = worker_pid()
    both[0].close()
    assert worker_pid() == pid
    both[1].save(5, state(105)).result(DEADLINE_S)
    assert numbers(restore(both[1])) == {105}
    again = opened(tmp_path / "one")
    again.save(5, state(5)).result(DEADLINE_S)
    assert again.steps() == both[1].steps() == [0, 1, 2, 3, 4, 5]


def test_a_reader_takes_up_what_a_dead_process_had_sealed(
    root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    """Its worker was killed with it, so nobody has finished its saves."""
    run_trainer("killed with its worker", root, memory)
    assert [path.name for path in sorted(root.glob("[0-9]*"))] == ["0"]
    steps = opened()
    assert steps.steps() == [0, 1]
    assert numbers(restore(steps)) == {1}
    steps.close()
    assert (root / "1").is_dir()
    assert numbers(restore(opened(asynchronous=False), 1)) == {1}
