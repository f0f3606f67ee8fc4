"""What Orbax writes and renames without a sync is durable by the next save or by close, the bytes before they are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.orbax import states
from tierkeep.tiers.local_disk import LocalDisk
from tierkeep_jax.orbax import Handler, Save

if TYPE_CHECKING:
    from pathlib import Path

TEMPORARY = ".orbax-checkpoint-tmp"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file and directory that this process makes durable, in order; each one is there when that is done."""
    found: list[Path] = []
    for name in ("sync_file", "sync_dir"):
        real = getattr(LocalDisk, name)

        def sync(self: LocalDisk, path: Path, real: Any = real) -> None:
            real(self, path)
            found.append(path)

        monkeypatch.setattr(LocalDisk, name, sync)
    return found


def test_everything_in_a_step_is_durable_before_it_gets_its_name(tmp_path: Path, synced: list[Path]) -> None:
    with states.manager(tmp_path) as manager:
        state = {"n": np.arange(3)}
        manager.save(1, args=ocp.args.Composite(state=Save(state), note=ocp.args.JsonSave({"a": 1})))
        manager.wait_until_finished()
        step = tmp_path / f"1{TEMPORARY}"
        before = {path.relative_to(step) for path in synced if path.is_relative_to(step)}
    parts = {tuple(part.removesuffix(TEMPORARY) for part in path.parts) for path in before}
    assert {(), ("_CHECKPOINT_METADATA",), ("state",), ("note",), ("note", "metadata")} <= parts


@pytest.mark.parametrize("how", ["the next save", "close"])
def test_the_names_are_durable_by(how: str, tmp_path: Path, synced: list[Path]) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(state=Save({"n": np.arange(3)})))
        manager.wait_until_finished()
        assert tmp_path / "1" not in synced
        if how == "the next save":
            manager.save(2, args=ocp.args.Composite(state=Save({"n": np.arange(3)})))
            manager.wait_until_finished()
            assert tmp_path / "1" in synced
    step = 1 if how == "close" else 2
    last = synced[-6:] if how == "close" else synced
    assert {tmp_path / f"{step}" / "state", tmp_path / f"{step}", tmp_path} <= set(last)
    assert tmp_path / "1" / "_CHECKPOINT_METADATA" in synced


def test_a_checkpointer_s_names_are_durable_too(tmp_path: Path, synced: list[Path]) -> None:
    with ocp.Checkpointer(Handler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=Save({"n": np.arange(3)}))
        assert tmp_path / f"one{TEMPORARY}" / "_CHECKPOINT_METADATA" in synced
        assert tmp_path / "one" not in synced
    assert {tmp_path / "one", tmp_path} <= set(synced)
    assert not any(path.is_relative_to(tmp_path / "others") for path in synced)


def test_a_step_that_is_gone_by_then_is_no_error(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=Save({"n": np.arange(3)}))
            manager.wait_until_finished()
            manager.delete(step)
