"""Retention: which steps go, that they go for good, and that nothing else does."""

from __future__ import annotations

import errno
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkeep.checkpointer import Checkpointer
from tierkeep.errors import StorageError
from tierkeep.save import commit
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tiers.local_disk import LocalDisk
from tierkeep.tiers.retain import Keep, surplus

if TYPE_CHECKING:
    from pathlib import Path

VALUES = st.one_of(st.none(), st.floats(), st.integers(-5, 5), st.just("text"))
KEEPS = st.builds(
    lambda last, every, best, mode: Keep(last=last, every=every, best=best, metric="loss" if best else None, mode=mode),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 7)),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
)


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(3, step, np.float32)}


def checkpointer(root: Path, keep: int | Keep | None = None, disk: LocalDisk | None = None) -> Checkpointer:
    return Checkpointer(NumpyAdapter(), root, keep=keep, disk=disk, asynchronous=False)


def names(root: Path) -> list[str]:
    """What stands in a root; of the spare, which is kept for its image, all but the digits that are random."""
    return sorted(re.sub(r"(\.tierkeep-trash-)[0-9a-f]{16}\Z", r"\1…", entry.name) for entry in root.iterdir())


@given(st.dictionaries(st.integers(0, 40), VALUES, min_size=1), KEEPS, st.data())
def test_what_goes_is_no_rule_s_and_never_the_one_just_saved_or_one_beyond_it(
    metrics: dict[int, Any], keep: Keep, data: st.DataObject
) -> None:
    saved = data.draw(st.sampled_from(sorted(metrics)))
    gone = surplus({step: {"loss": value} for step, value in metrics.items()}, keep, saved)
    own = sorted(step for step in metrics if step <= saved)
    assert gone == sorted(gone)
    assert set(gone) <= set(own) - {saved} - set(own[-keep.last :])
    assert keep.every is None or not any(step % keep.every == 0 for step in gone)
    left = [step for step in own if step not in gone]
    assert surplus({step: {"loss": metrics[step]} for step in left}, keep, saved) == []  # it converges at once
    if keep.best:
        finite = [s for s in own if isinstance(metrics[s], int | float) and math.isfinite(metrics[s])]
        best = sorted(finite, key=lambda s: (metrics[s] if keep.mode == "min" else -metrics[s], -s))[: keep.best]
        assert set(best) <= set(left)
    if not keep.best and keep.every is None:
        assert len(left) == min(keep.last, len(own))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_none_infinite_and_missing_metrics_rank_last(mode: Any) -> None:
    metrics: dict[int, dict[str, Any]] = {
        1: {"loss": 0.5}, 2: {"loss": math.nan}, 3: {"loss": 0.3}, 4: {"loss": None}, 5: {"loss": math.inf}, 6: {}, 7: {},
    }  # fmt: skip
    gone = surplus(metrics, Keep(last=1, best=2, metric="loss", mode=mode), 7)
    assert gone == [2, 4, 5, 6]


def test_a_worsening_metric_never_takes_the_latest(tmp_path: Path) -> None:
    found = checkpointer(tmp_path / "r", Keep(last=1, best=3, metric="loss"))
    for step in range(100, 600, 100):
        found.save(step, state(step), metrics={"loss": np.float32(step)})
    assert found.steps() == [100, 200, 300, 500]
    assert found.latest_step() == 500


def test_a_lowered_limit_is_caught_up_with_in_one_save(tmp_path: Path) -> None:
    everything = checkpointer(tmp_path / "r")
    for step in range(10):
        everything.save(step, state(step))
    found = checkpointer(tmp_path / "r", 2)
    found.save(10, state(10))
    assert found.steps() == [9, 10]


def test_a_new_run_in_an_old_root_keeps_its_own_steps_and_leaves_the_old_run_s_alone(tmp_path: Path) -> None:
    old = checkpointer(tmp_path / "r")
    for step in (500, 600, 700):
        old.save(step, state(step))
    found = checkpointer(tmp_path / "r", 3)
    for step in (100, 200, 300, 400):
        found.save(step, state(step))
    assert found.steps() == [200, 300, 400, 500, 600, 700]


def test_names_that_are_not_ours_and_steps_that_others_wrote_stay(tmp_path: Path) -> None:
    root = tmp_path / "r"
    found = checkpointer(root, 1)
    found.save(5, state(5))
    theirs = ["notes.txt", "step-abc", "007", "-1", "tmp", "1.tierkeep-tmp-mine", "best"]
    for name in theirs:
        (root / name).mkdir()
    (root / "3" / "default").mkdir(parents=True)  # a step, but nothing of it is tierkeep's
    (root / "4").mkdir()
    for step in (6, 7):
        found.save(step, state(step))
    assert names(root) == sorted([*theirs, "3", "4", "7", "6.tierkeep-trash-…"])
    found.close()
    assert names(root) == sorted([*theirs, "3", "4", "7"])


def test_a_deletion_that_was_interrupted_is_finished_by_the_next_save(tmp_path: Path) -> None:
    root = tmp_path / "r"

    class Stuck(LocalDisk):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EIO, "stuck", str(path))

    with checkpointer(root, 1, Stuck()) as stuck:
        for step in (1, 2, 3):
            stuck.save(step, state(step))
        assert stuck.steps() == [3]  # invisible at once, though their bytes are still there
    assert names(root) == ["1.tierkeep-trash-…", "2.tierkeep-trash-…", "3"]
    with checkpointer(root, 1) as found:
        found.save(4, state(4))
        assert names(root) == ["3.tierkeep-trash-…", "4"]
    assert names(root) == ["4"]


def test_a_step_that_another_process_retired_meanwhile_is_no_failure(tmp_path: Path) -> None:
    class Raced(LocalDisk):
        def rename(self, old: Path, new: Path) -> None:
            if "trash" in new.name:
                LocalDisk().remove_tree(old)
            super().rename(old, new)

    found = checkpointer(tmp_path / "r", 1, Raced())
    found.save(1, state(1))
    found.save(2, state(2))
    assert found.steps() == [2]


def test_a_step_that_cannot_be_removed_is_told_and_the_new_one_is_whole(tmp_path: Path) -> None:
    class Fixed(LocalDisk):
        def rename(self, old: Path, new: Path) -> None:
            if "trash" in new.name:
                raise PermissionError(errno.EACCES, "fixed", str(old))
            super().rename(old, new)

    found = checkpointer(tmp_path / "r", 1, Fixed())
    found.save(1, state(1))
    with pytest.raises(StorageError, match="step 2 is saved and whole"):
        found.save(2, state(2))
    assert found.steps() == [1, 2]


def test_drafts_of_dead_writers_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    root = tmp_path / "r"
    found = checkpointer(root)
    found.save(1, state(1))
    dead = root / "2.tierkeep-tmp-0123456789abcdef"
    (dead / "default").mkdir(parents=True)
    draft = commit.Draft.start(LocalDisk(), root / "3", "default", 0)
    assert draft.lock is not None
    found.save(4, state(4))
    assert not dead.exists()
    assert draft.path.is_dir()
    draft.lock.close()
    found.save(5, state(5))
    assert names(root) == ["1", "4", "5"]


def test_what_was_being_replaced_comes_back_if_nothing_came_to_its_place(tmp_path: Path) -> None:
    root = tmp_path / "r"
    found = checkpointer(root)
    found.save(1, state(1))
    (root / "1").rename(root / "1.tierkeep-old-0123456789abcdef")  # a crash between the two renames
    found.save(2, state(2))
    assert found.steps() == [1, 2]
    shutil.copytree(root / "1", root / "1.tierkeep-old-0123456789abcdef")  # a crash after the second
    found.save(1, state(7), overwrite=True)
    assert found.steps() == [1, 2]
    assert names(root) == ["1", "1.tierkeep-trash-…", "2"]
    found.close()
    assert names(root) == ["1", "2"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"last": 0}, "last must be"),
        ({"every": 0}, "every must be"),
        ({"best": 2}, "best and metric go together"),
        ({"metric": "loss"}, "best and metric go together"),
        ({"mode": "most"}, "mode must be"),
        ({"last": True}, "last must be"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_when_it_is_built(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Keep(**wrong)


def test_a_metric_that_is_no_number_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    found = checkpointer(tmp_path / "r")
    with pytest.raises(TypeError, match="metric 'loss' must be a number"):
        found.save(1, state(1), metrics={"loss": "low"})
    assert found.steps() == []


def test_what_was_being_replaced_is_there_for_a_reader_unless_a_living_writer_is_at_it(tmp_path: Path) -> None:
    root = tmp_path / "r"
    found = checkpointer(root)
    found.save(1, state(1))
    draft = commit.Draft.start(LocalDisk(), root / "1", "default", 0)
    assert draft.lock is not None
    (root / "1").rename(root / "1.tierkeep-old-0123456789abcdef")  # between the two renames of an overwrite
    assert found.steps() == []
    draft.lock.close()  # it died there
    assert found.steps() == [1]
    assert found.metadata(1).nbytes == 12
