"""What goes wrong in a save is told by its future, once; nothing hangs, nothing is left, the next save is well."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path import atomicity

from tests.jax import trees
from tests.orbax import states
from tierkeep.errors import StorageError, UnsupportedLeafError
from tierkeep.item import StagedItem
from tierkeep.save import background, sealed
from tierkeep_jax.orbax import Handler, Restore, Save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Orbax's own, where it cannot make a directory.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine object _create_paths:pytest.PytestUnraisableExceptionWarning"
)

DEADLINE_S = 60  # Orbax's threads would hold the process for 300


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("leaf", "UnsupportedLeafError: leaf 'odd'"),
        ("write", "StorageError"),
        ("other item", "ValueError: Unsupported type"),
        ("json", "TypeError"),
    ],
)
def test_a_process_whose_save_fails_is_told_goes_on_and_ends(kind: str, told: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.orbax.failing", kind, str(tmp_path / "root")],
        env=states.environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert next(line for line in lines if line.startswith("told: ")).startswith(f"told: {told}")
    assert lines[-1] == "well"


# async-error-not-raised
def test_a_failure_is_told_once_and_the_step_is_not_listed(tmp_path: Path) -> None:
    with states.manager(tmp_path, item_handlers=Handler()) as manager:
        manager.save(1, args=Save({"n": np.arange(3)}))
        manager.wait_until_finished()
        manager.save(2, args=Save({"n": len}))
        with pytest.raises(UnsupportedLeafError, match="leaf 'n'"):
            manager.wait_until_finished()
        assert manager.all_steps() == [1]
        manager.save(3, args=Save({"n": np.arange(4)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3]
        made = states.arenas()
    states.assert_nothing_left(made)


def test_a_synchronous_manager_raises_what_its_save_failed_of(tmp_path: Path) -> None:
    with states.manager(tmp_path, asynchronous=False) as manager:
        with pytest.raises(UnsupportedLeafError, match="leaf 'n'"):
            manager.save(2, args=Save({"n": len}))
        manager.save(3, args=Save({"n": np.arange(4)}))
        assert manager.all_steps() == [3]


@pytest.mark.parametrize("state", [{}, None, []], ids=["an empty dict", "None", "an empty list"])
def test_nothing_to_save_is_told(state: Any, tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(1, args=Save(state))
        with pytest.raises(ValueError, match="empty"):
            manager.wait_until_finished()


def test_a_snapshot_of_no_known_kind_is_told(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(1, args=Save({"n": 1}, snapshot="later"))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'later'"):
            manager.wait_until_finished()


def test_metadata_that_is_no_json_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(1, args=Save({"n": 1}, custom_metadata={"f": len}))
        with pytest.raises(TypeError):
            manager.wait_until_finished()
    assert not any(tmp_path.glob("*/*/ocdbt.process_0"))


def test_a_failing_commit_is_told_and_nothing_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with states.manager(tmp_path) as manager:
        monkeypatch.setattr(StagedItem, "finish", fail)
        manager.save(1, args=Save({"n": np.arange(3)}))
        with pytest.raises(OSError, match="Input/output"):
            manager.wait_until_finished()
        monkeypatch.undo()
        manager.save(1, args=Save({"n": np.arange(3)}), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        trees.assert_same(manager.restore(1, args=Restore()), {"n": np.arange(3)})


def fail_to_make_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: nobody ever tells the handler's thread that it may write. Orbax gives up after a second."""

    async def create(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(multihost, "coordination_timeout", lambda: 1)
    monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, "create", create)


def test_what_was_staged_and_never_written_is_let_go_of_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with states.manager(tmp_path, item_handlers=Handler()) as manager:
        with monkeypatch.context() as patch:
            fail_to_make_directories(patch)
            manager.save(1, args=Save({"n": np.arange(3)}))
            with pytest.raises(OSError, match="No space"):
                manager.wait_until_finished()
        manager.save(2, args=Save({"n": np.arange(3)}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        made = states.arenas()
        assert len(made) == 1
    states.assert_nothing_left(made)


def test_what_was_staged_and_never_written_is_let_go_of_by_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler()
    with monkeypatch.context() as patch:
        fail_to_make_directories(patch)
        checkpointer = ocp.AsyncCheckpointer(handler)
        checkpointer.save(tmp_path / "one", args=Save({"n": np.arange(3)}))
        with pytest.raises(OSError, match="No space"):
            checkpointer.wait_until_finished()
        made = states.arenas()
        assert len(made) == 1
        checkpointer.close()
    states.assert_nothing_left(made)


@pytest.mark.skipif(not hasattr(ocp.AsyncCheckpointer, "cancel"), reason="this Orbax does not cancel saves")
def test_a_save_that_is_cancelled_leaves_no_step_and_the_next_one_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real: Callable[..., None] = StagedItem.write

    def write(self: StagedItem, item: Path, save_id: str) -> None:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        real(self, item, save_id)

    with ocp.AsyncCheckpointer(Handler()) as checkpointer:
        monkeypatch.setattr(StagedItem, "write", write)
        checkpointer.save(tmp_path / "one", args=Save({"n": np.arange(3)}))
        assert entered.wait(DEADLINE_S)
        canceller = threading.Thread(target=checkpointer.cancel)
        canceller.start()
        go_on.set()
        canceller.join(DEADLINE_S)
        assert not canceller.is_alive()
        checkpointer.wait_until_finished()
        monkeypatch.undo()
        assert not (tmp_path / "one").exists()
        checkpointer.save(tmp_path / "two", args=Save({"n": np.arange(3)}))
        checkpointer.wait_until_finished()
        trees.assert_same(checkpointer.restore(tmp_path / "two"), {"n": np.arange(3)})


def test_a_disk_that_refuses_a_sync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler()

    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    with states.manager(tmp_path, item_handlers=handler) as manager:
        manager.save(1, args=Save({"n": np.arange(3)}))
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(handler._items.disk, "sync_file", refuse)
            manager.save(2, args=Save({"n": np.arange(3)}))
            with pytest.raises(StorageError, match="making the name of"):
                manager.wait_until_finished()
        manager.save(3, args=Save({"n": np.arange(3)}))


# async-snapshot-not-taken-cpu
@pytest.mark.parametrize("wrapped", [False, True], ids=["numpy", "a view of numpy"])
def test_what_is_saved_is_the_state_at_the_call(wrapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(100_000.0)
    state = {"n": array[::2] if wrapped else array}
    expected = state["n"].copy()
    go_on = threading.Event()
    real: Callable[..., None] = StagedItem.write

    def write(self: StagedItem, item: Path, save_id: str) -> None:
        assert go_on.wait(DEADLINE_S)
        real(self, item, save_id)

    monkeypatch.setattr(StagedItem, "write", write)
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save(state))
        array[:] = 999
        go_on.set()
        manager.wait_until_finished()
        trees.assert_same(manager.restore(0, args=Restore()), {"n": expected})


def hold_back_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies that are made by another thread than the caller's wait for the event."""
    go_on = threading.Event()
    real = sealed.fill_image
    main = threading.current_thread()

    def fill_image(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not main:
            assert go_on.wait(DEADLINE_S)
        real(*args, **kwargs)

    monkeypatch.setattr(background, "fill_image", fill_image)
    return go_on


def test_arrays_of_jax_in_host_memory_are_copied_after_the_call_and_those_of_numpy_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = hold_back_copies(monkeypatch)
    few, array = np.arange(10), jax.numpy.arange(10_000_000.0)
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save({"few": few, "w": array}))  # which returns, though nothing is copied
        few[:] = 99
        go_on.set()
        manager.wait_until_finished()
        expected = {"few": np.arange(10), "w": array}
        trees.assert_same(manager.restore(0, args=Restore()), expected)


# async-donated-buffer
@pytest.mark.parametrize("how", ["donated", "deleted"])
@pytest.mark.parametrize("spread", [False, True], ids=["on one device", "over several"])
@pytest.mark.parametrize("snapshot", ["auto", "copy", "deferred"])
def test_an_array_that_is_given_away_after_the_call_is_saved_with_its_old_values(
    snapshot: Any, spread: bool, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = hold_back_copies(monkeypatch)
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    array = jax.numpy.arange(10_000_000.0)
    if spread:
        array = states.spread(array, trees.mesh(4), "x")
    expected = np.asarray(array).copy()
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save({"w": array, "few": np.arange(3)}, snapshot=snapshot))
        if how == "deleted":
            array.delete()
        for _ in range(3):
            array = step(array) if how == "donated" else jax.numpy.zeros(len(expected))
        array.block_until_ready()
        entered.set()
        manager.wait_until_finished()
        np.testing.assert_array_equal(np.asarray(manager.restore(0, args=Restore())["w"]), expected)
