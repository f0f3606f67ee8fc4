"""`Checkpointer.restore()` without a step: the newest step that verifies, said loudly, and never nothing at all."""

from __future__ import annotations

import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

import tierkeep_jax
import tierkeep_torch
from tests.crash.damage import memory_directory
from tierkeep.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    SkippedStepWarning,
    TierkeepError,
)
from tierkeep.format.checksum import seal
from tierkeep.options import PAGE, SaveOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OPTIONS = SaveOptions(chunk_nbytes=PAGE, block_nbytes=PAGE, lanes=1)
LEAVES = 6


def state(step: int) -> dict[str, Any]:
    """All of one step: every element says which."""
    return {f"leaf {n}": torch.full((2000,), float(step)) for n in range(LEAVES)} | {"step": step}


def step_of(found: dict[str, Any]) -> int:
    """The one step that all of a state is of."""
    steps = {float(np.asarray(value).flat[at]) for name, value in found.items() if name != "step" for at in (0, -1)}
    steps.add(float(found["step"]))
    assert len(steps) == 1, f"a mix of steps {steps}"
    return int(steps.pop())


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_directory() as directory:
        with tierkeep_torch.Checkpointer(directory / "root", options=OPTIONS, asynchronous=False) as steps:
            for step in (1, 2, 3):
                steps.save(step, state(step))
        yield directory / "root"


def image(step: Path) -> Path:
    return max((step / "default" / "ocdbt.process_0" / "d").iterdir(), key=lambda f: f.stat().st_size)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def newer_version(step: Path) -> None:
    file = step / "default" / "tierkeep.json"
    record = msgspec.json.decode(file.read_bytes())
    record.pop("crc32c")
    file.write_bytes(seal(msgspec.json.encode(record | {"version": 99})))


def image_is_a_directory(step: Path) -> None:
    path = image(step)
    path.unlink()
    path.mkdir()


def all_records_gone(step: Path) -> None:
    for file in [*step.rglob("*.json"), *step.rglob("manifest.ocdbt"), step / "default" / "_METADATA"]:
        file.unlink()


def item_is_a_file(step: Path) -> None:
    shutil.rmtree(step / "default")
    (step / "default").write_bytes(b"x")


def item_is_a_link_to_nothing(step: Path) -> None:
    shutil.rmtree(step / "default")
    (step / "default").symlink_to("nothing")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "first byte of the image": lambda step: flip(image(step), 0),
    "middle of the image": lambda step: flip(image(step), 5 * PAGE),
    "last leaf of the image": lambda step: flip(image(step), 10 * PAGE + 100),
    "image cut": lambda step: os.truncate(image(step), 3 * PAGE),
    "image empty": lambda step: os.truncate(image(step), 0),
    "image gone": lambda step: image(step).unlink(),
    "image a directory": image_is_a_directory,
    "part.json flipped": lambda step: flip(step / "default" / "ocdbt.process_0" / "part.json", 40),
    "part.json gone": lambda step: (step / "default" / "ocdbt.process_0" / "part.json").unlink(),
    "tierkeep.json flipped": lambda step: flip(step / "default" / "tierkeep.json", 40),
    "tierkeep.json empty": lambda step: os.truncate(step / "default" / "tierkeep.json", 0),
    "tierkeep.json gone": lambda step: (step / "default" / "tierkeep.json").unlink(),
    "all records gone": all_records_gone,
    "part gone": lambda step: shutil.rmtree(step / "default" / "ocdbt.process_0"),
    "item gone": lambda step: shutil.rmtree(step / "default"),
    "item a file": item_is_a_file,
    "item a link to nothing": item_is_a_link_to_nothing,
    "a newer version": newer_version,
}


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("name", DAMAGES)
def test_the_next_newest_step_comes_back_whole_and_what_was_skipped_is_said(root: Path, name: str, into: bool) -> None:
    DAMAGES[name](root / "3")
    target = state(0) if into else None
    with tierkeep_torch.Checkpointer(root, asynchronous=False) as steps:
        with pytest.warns(SkippedStepWarning, match=r"restored step 2 .*step 3: .*"):
            found = steps.restore(into=target)
        assert step_of(found) == 2
        if target is not None:
            assert found is target
            assert step_of(target) == 2
        with pytest.raises(TierkeepError) as caught:  # named, it is never another one
            steps.restore(3)
        assert "3" in str(caught.value)


@pytest.mark.parametrize("name", DAMAGES)
def test_when_no_step_can_be_read_all_are_listed_and_nothing_comes_back(root: Path, name: str) -> None:
    for step in (1, 2, 3):
        DAMAGES[name](root / str(step))
    for open_root in (tierkeep_torch.Checkpointer, tierkeep_jax.Checkpointer):
        with open_root(root) as steps:
            with pytest.raises(CorruptCheckpointError) as caught:
                steps.restore()
            for step in (1, 2, 3):
                assert any(f"step {step}" in finding for finding in caught.value.findings)


def test_several_damaged_steps_are_all_named(root: Path) -> None:
    DAMAGES["image cut"](root / "3")
    DAMAGES["tierkeep.json flipped"](root / "2")
    with tierkeep_jax.Checkpointer(root, asynchronous=False) as steps:
        with pytest.warns(SkippedStepWarning, match=r"step 3: .*step 2: .*tierkeep\.json") as said:
            assert step_of(steps.restore()) == 1
        assert len(said) == 1
        assert said[0].filename == __file__


def test_a_whole_newest_step_comes_back_in_silence(root: Path) -> None:
    with tierkeep_torch.Checkpointer(root, asynchronous=False) as steps, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_of(steps.restore()) == 3


def test_the_warning_can_be_made_an_error(root: Path) -> None:
    DAMAGES["image cut"](root / "3")
    with tierkeep_torch.Checkpointer(root, asynchronous=False) as steps, warnings.catch_warnings():
        warnings.simplefilter("error", SkippedStepWarning)
        with pytest.raises(SkippedStepWarning):
            steps.restore()


def test_a_target_that_does_not_fit_is_no_reason_to_go_back(root: Path) -> None:
    with tierkeep_torch.Checkpointer(root, asynchronous=False) as steps:
        steps.save(4, {"other": torch.ones(3)})
        target = state(0)
        with pytest.raises(MismatchError):
            steps.restore(into=target)
        assert step_of(target) == 0


def test_damage_behind_a_relaxation_that_keeps_leaves_is_raised_rather_than_mixed(root: Path) -> None:
    """Step 3 fills some of the target; what step 2 then leaves as it is would be of step 3."""
    with tierkeep_torch.Checkpointer(root, options=OPTIONS, asynchronous=False) as steps:
        steps.save(4, state(4) | {"more": torch.full((2000,), 4.0)})
        at = max(range(LEAVES * 2), key=lambda page: image(root / "4").read_bytes()[page * PAGE] != 0)
        flip(image(root / "4"), at * PAGE)
        target = state(0) | {"more": torch.zeros(2000)}
        with pytest.raises(CorruptCheckpointError) as caught:
            steps.restore(into=target, missing="keep")
        assert caught.value.partly_filled


def test_a_root_without_steps_is_told_from_one_whose_steps_are_damaged(root: Path) -> None:
    with (
        tierkeep_torch.Checkpointer(root.parent / "new", asynchronous=False) as steps,
        pytest.raises(CheckpointNotFoundError),
    ):
        steps.restore()
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step) / "default")
    with tierkeep_torch.Checkpointer(root, asynchronous=False) as steps:
        assert steps.latest_step() == 3
        with pytest.raises(CorruptCheckpointError):
            steps.restore()


def test_verify_of_a_step_finds_what_a_restore_finds(root: Path) -> None:
    with tierkeep_torch.Checkpointer(root, asynchronous=False) as steps:
        assert [steps.verify(step).checksums for step in steps.steps()] == ["tierkeep"] * 3
        DAMAGES["middle of the image"](root / "3")
        with pytest.raises(CorruptCheckpointError, match="steps 1, 2"):
            steps.verify(3)
        assert tierkeep_torch.verify(root / "2").leaves == tierkeep_jax.verify(root / "2").leaves == LEAVES + 1
        with pytest.raises(CheckpointNotFoundError):
            steps.verify(9)
