"""The calls: paths, steps, order of arguments, lifetimes."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import tierkeep_torch as tk
from tests.torch.compare import assert_same
from tierkeep.errors import CheckpointExistsError, CheckpointNotFoundError, ClosedError, StorageError
from tierkeep.options import SaveOptions

STATE = {"w": torch.arange(3.0), "n": 1}


# tilde-literal-dir
def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    tk.save(STATE, "~/c")
    with tk.Checkpointer("~/run", asynchronous=False) as checkpointer:
        checkpointer.save(1, STATE)
    assert sorted(p.name for p in (tmp_path / "home").iterdir()) == ["c", "run"]
    assert not (tmp_path / "~").exists()
    assert_same(tk.load("~/c"), STATE)


# relative-path-and-cwd
def test_a_relative_root_stays_where_it_was_when_the_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = tk.Checkpointer("run", asynchronous=False)
    checkpointer.save(1, STATE)
    monkeypatch.chdir("elsewhere")
    checkpointer.save(2, STATE)
    assert checkpointer.steps() == [1, 2]
    assert_same(checkpointer.restore(1), STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "run"]
    assert_same(tk.load("../run/2"), STATE)


class Place:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


# relative-path-and-cwd
@pytest.mark.parametrize(
    "name", ["a b", "é\U0001f600", "100%25?x#y", "a/../b", "c/", "new\nline", "-rf", "*", "x" * 250, "d/e/f", "\udcff"]
)
def test_any_name_of_a_path_works(name: str, tmp_path: Path) -> None:
    tk.save(STATE, f"{tmp_path}/{name}")
    path: Any
    for path in (f"{tmp_path}/{name}", tmp_path / name, os.fsencode(f"{tmp_path}/{name}"), Place(tmp_path / name)):
        assert_same(tk.load(path), STATE)
    with tk.Checkpointer(os.fsencode(f"{tmp_path}/root {name[:200]}"), asynchronous=False) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(1, STATE)
        assert_same(checkpointer.restore(), STATE)


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://b", "file:///tmp/x", "https://h/p"])
def test_a_url_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: tk.save(STATE, url), lambda: tk.load(url), lambda: tk.Checkpointer(url, asynchronous=False)):
        with pytest.raises(ValueError, match="URL"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 5, ["a"], "", True])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call in (
        lambda: tk.save(STATE, path),
        lambda: tk.load(path),
        lambda: tk.Checkpointer(path, asynchronous=False),
    ):
        with pytest.raises((TypeError, ValueError), match="path"):
            call()


def test_swapped_arguments_are_a_type_error_that_says_so(tmp_path: Path) -> None:
    for path in (str(tmp_path / "c"), tmp_path / "c", os.fsencode(tmp_path / "c")):
        with pytest.raises(TypeError, match=r"state first.*save\(state, path\)"):
            tk.save(path, STATE)  # type: ignore[arg-type]
    checkpointer = tk.Checkpointer(tmp_path, asynchronous=False)
    with pytest.raises(TypeError, match=r"save\(step, state\)"):
        checkpointer.save(STATE, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        tk.load(STATE, tmp_path / "c")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    tk.save("a string is a state", tmp_path / "c")
    assert tk.load(tmp_path / "c") == "a string is a state"


@pytest.mark.parametrize("step", [True, -1, "5", 1.0, None, 10**18, [1]])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        with pytest.raises((TypeError, ValueError), match="step"):
            checkpointer.save(step, STATE)
        assert not (tmp_path / "run").exists()
        checkpointer.save(1, STATE)
        if step is not None:
            with pytest.raises((TypeError, ValueError), match="step"):
                checkpointer.restore(step)
        with pytest.raises((TypeError, ValueError), match="step"):
            checkpointer.metadata(step)


def test_any_whole_number_is_a_step(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in (0, 10**18 - 1, np.int64(7), torch.tensor(9)):
            report = checkpointer.save(step, STATE)  # type: ignore[arg-type]
            assert type(report.step) is int
            assert_same(checkpointer.restore(step), STATE)  # type: ignore[arg-type]
        assert checkpointer.steps() == [0, 7, 9, 10**18 - 1]
        assert checkpointer.latest_step() == 10**18 - 1


def test_steps_are_listed_in_order_and_the_newest_is_restored(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.latest_step() is None
        with pytest.raises(CheckpointNotFoundError, match="none"):
            checkpointer.restore()
        for step in (10, 9, 100):
            checkpointer.save(step, {"step": step})
        assert checkpointer.steps() == [9, 10, 100]
        assert checkpointer.restore() == {"step": 100}
        assert checkpointer.restore(9) == {"step": 9}
        with pytest.raises(CheckpointNotFoundError, match="9, 10, 100"):
            checkpointer.restore(11)
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.metadata(11)


def test_metadata_tells_what_a_step_holds(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        report = checkpointer.save(3, {"a": {"w": torch.ones(2, 3).bfloat16()}, "n": 1}).result()
        assert report.path == str(tmp_path / "3")
        assert set(report.seconds) >= {"plan", "write", "commit", "total"}
        found = checkpointer.metadata(3)
    assert found.leaves["a.w"].spec.shape == (2, 3)
    assert found.leaves["a.w"].spec.dtype == "bfloat16"
    assert found.nbytes == report.nbytes == 20


def test_a_step_directory_and_its_item_both_load(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(3, STATE)
    assert_same(tk.load(tmp_path / "3"), STATE)
    assert_same(tk.load(tmp_path / "3" / "default"), STATE)


def test_an_existing_step_is_untouched_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, STATE)
        with pytest.raises(CheckpointExistsError, match="untouched"):
            checkpointer.save(1, {"other": 2})
        assert_same(checkpointer.restore(1), STATE)
        checkpointer.save(1, {"other": 2}, overwrite=True)
        assert checkpointer.restore(1) == {"other": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("what", ["file", "empty", "full", "dangling", "root"])
def test_overwrite_replaces_nothing_but_a_checkpoint(what: str, tmp_path: Path) -> None:
    path = tmp_path / "c"
    if what == "file":
        path.write_text("mine")
    elif what == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.mkdir()
        if what == "full":
            (path / "thesis.txt").write_text("mine")
        if what == "root":
            tk.save(STATE, path / "1")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(CheckpointExistsError):
            tk.save(STATE, path, overwrite=overwrite)
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


# last-link-points-elsewhere
def test_overwriting_and_retiring_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    tk.save({"n": 1}, tmp_path / "far")
    (tmp_path / "link").symlink_to(tmp_path / "far")
    tk.save({"n": 2}, tmp_path / "link", overwrite=True)
    assert tk.load(tmp_path / "far") == {"n": 1}
    assert tk.load(tmp_path / "link") == {"n": 2}
    with tk.Checkpointer(tmp_path / "run", keep=1, asynchronous=False) as checkpointer:
        checkpointer.save(1, {"n": 1})
        (tmp_path / "real" / "1").rename(tmp_path / "moved")
        (tmp_path / "real" / "1").symlink_to(tmp_path / "moved")
        assert checkpointer.restore(1) == {"n": 1}
        checkpointer.save(2, {"n": 2})
        assert checkpointer.steps() == [2]
    assert tk.load(tmp_path / "moved") == {"n": 1}
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["2"]


# purge-races-inflight-save: names that are not ours
def test_foreign_names_beside_steps_are_neither_listed_nor_touched(tmp_path: Path) -> None:
    for name in ("notes.txt", "12"):
        (tmp_path / name).write_text("mine")
    for name in ("step-abc", "tmp", "007", "-1", "1.5", "99", "9" * 30):
        (tmp_path / name).mkdir()
    before = {p.name for p in tmp_path.iterdir()}
    with tk.Checkpointer(tmp_path, keep=2, asynchronous=False) as checkpointer:
        assert checkpointer.steps() == []
        for step in (1, 2, 3):
            checkpointer.save(step, STATE)
        assert checkpointer.steps() == [2, 3]
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(12, STATE)
    assert {p.name for p in tmp_path.iterdir()} == before | {"2", "3"}
    assert (tmp_path / "12").read_text() == "mine"


# limit-lowered-no-catchup, reused-dir-new-run-deleted
def test_keep_holds_the_newest_steps_and_always_the_one_just_saved(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in range(5):
            checkpointer.save(step, {"s": step})
    with tk.Checkpointer(tmp_path, keep=2, asynchronous=False) as checkpointer:
        checkpointer.save(10, {"s": 10})
        assert checkpointer.steps() == [4, 10]
        checkpointer.save(1, {"s": 1})  # a new run in an old directory
        assert 1 in checkpointer.steps()
        assert checkpointer.restore(1) == {"s": 1}
    for keep in (0, -1, True, 1.5, "2"):
        with pytest.raises(ValueError, match="keep"):
            tk.Checkpointer(tmp_path, keep=keep, asynchronous=False)  # type: ignore[arg-type]


def test_a_root_that_is_a_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(StorageError) as caught:
        tk.Checkpointer(tmp_path / "f", asynchronous=False)
    assert caught.value.filename == str(tmp_path / "f")
    below = tk.Checkpointer(tmp_path / "f" / "run", asynchronous=False)
    for call in (below.steps, below.restore, lambda: below.save(1, STATE)):
        with pytest.raises(StorageError):
            call()
    assert (tmp_path / "f").read_text() == "mine"


def test_closing_twice_is_fine_and_use_after_it_is_told(tmp_path: Path) -> None:
    checkpointer = tk.Checkpointer(tmp_path, asynchronous=False)
    with checkpointer as entered:
        assert entered is checkpointer
        checkpointer.save(1, STATE)
    checkpointer.close()
    checkpointer.close()
    for call in (
        checkpointer.steps,
        checkpointer.latest_step,
        checkpointer.restore,
        lambda: checkpointer.save(2, STATE),
        lambda: checkpointer.metadata(1),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert_same(tk.load(tmp_path / "1"), STATE)


def test_an_error_inside_the_context_still_closes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        checkpointer.steps()


@pytest.mark.parametrize("word", [{"missing": "nope"}, {"dtype": True}, {"strict": False}])
def test_an_unknown_relaxation_is_refused(word: dict[str, Any], tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c")
    with pytest.raises((TypeError, ValueError), match=next(iter(word))):
        tk.load(tmp_path / "c", **word)


def test_saves_and_restores_from_several_threads_all_hold(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:

        def work(number: int) -> None:
            try:
                for step in range(number * 10, number * 10 + 3):
                    checkpointer.save(step, {"t": torch.full((1000,), float(step))})
                    assert checkpointer.restore(step)["t"][0] == step
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        for step in checkpointer.steps():
            assert (checkpointer.restore(step)["t"] == step).all()
        assert len(checkpointer.steps()) == 12


def test_descriptors_threads_and_names_stay_flat_over_many_saves(tmp_path: Path) -> None:
    process = psutil.Process()
    with tk.Checkpointer(tmp_path, keep=2, asynchronous=False) as checkpointer:
        checkpointer.save(0, STATE)
        before = (process.num_fds(), process.num_threads())
        for step in range(1, 50):
            checkpointer.save(step, STATE)
            checkpointer.restore(step, dict(STATE))
        assert (process.num_fds(), process.num_threads()) == before
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names.pop(0).startswith("47.tierkeep-trash-")  # its image is the next step's
        assert names == ["48", "49"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["48", "49"]


# source-kept-alive-after-write
def test_no_memory_of_the_state_is_held_after_save_and_restore(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in range(2):
            tensor, array = torch.ones(10), np.ones(10)
            storage: Any = weakref.ref(tensor.untyped_storage())
            refs: list[Any] = [weakref.ref(tensor), weakref.ref(array)]
            state = {"t": tensor, "a": array, "v": tensor[2:]}
            checkpointer.save(step, state)
            checkpointer.restore(step, state)
            del tensor, array, state
            gc.collect()
            assert [ref() for ref in refs] == [None, None]
            assert storage() is None


# plan-cache-global-key
def test_a_state_that_changes_its_structure_is_planned_anew(tmp_path: Path) -> None:
    states: list[Any] = [
        {"a": torch.ones(3)},
        {"a": torch.ones(4)},
        {"a": torch.ones(3).bfloat16()},
        {"a": torch.ones(3), "b": 1},
        {"a": torch.ones(3), "b": True},
        {"a": torch.ones(3), "b": 1.0},
        {"a": [torch.ones(3)]},
        {"a": (torch.ones(3),)},
        {"b": torch.ones(3)},
        {1: torch.ones(3)},
        {True: torch.ones(3)},
        {"a": torch.nn.Parameter(torch.ones(3))},
        {"a": np.ones(3, np.float32)},
        {"a": "x", "b": "y"},
    ]
    with (
        tk.Checkpointer(tmp_path / "x", asynchronous=False) as one,
        tk.Checkpointer(tmp_path / "y", asynchronous=False) as other,
    ):
        for turn, state in enumerate(states * 2):
            (one if turn % 2 else other).save(turn, state)
            one.save(1000 + turn, state)
            assert_same(one.restore(1000 + turn), state)
            assert_same((one if turn % 2 else other).restore(turn), state)


def test_values_at_the_call_are_saved(tmp_path: Path) -> None:
    tensor = torch.zeros(5)
    with tk.Checkpointer(tmp_path, options=SaveOptions(lanes=1), asynchronous=False) as checkpointer:
        for step in range(3):
            tensor.fill_(step)
            checkpointer.save(step, {"t": tensor})
        assert [float(checkpointer.restore(step)["t"][0]) for step in range(3)] == [0, 1, 2]


# load-revives-saved-device
def test_a_restore_goes_to_the_named_device_or_the_cpu(tmp_path: Path) -> None:
    tk.save(STATE | {"dev": torch.device("cuda:7")}, tmp_path / "c")
    for device in (None, "cpu", torch.device("cpu")):
        assert tk.load(tmp_path / "c", device=device)["w"].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_go_to_the_cpu_and_back(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, device="cuda"), "b": torch.randn(7, device="cuda").bfloat16()[::2]}
    tk.save(state, tmp_path / "c")
    found = tk.load(tmp_path / "c")
    assert found["w"].device.type == "cpu"
    assert_same(found, {key: value.cpu() for key, value in state.items()})
    again = tk.load(tmp_path / "c", device="cuda")
    assert again["w"].is_cuda
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    tk.load(tmp_path / "c", into)
    assert all(torch.equal(into[key], state[key]) for key in state)


# tilde-literal-dir
def test_an_unknown_user_is_refused_and_a_pure_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="~no-such-user"):
        tk.save(STATE, "~no-such-user/c")
    tk.save(STATE, pathlib.PurePath("plain"))
    tk.save(STATE, "./~tilde")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "~tilde"]


# cross-device-rename
def test_a_root_on_another_file_system_than_the_temporary_directory_works(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    with (
        tempfile.TemporaryDirectory(dir=other) as root,
        tk.Checkpointer(root, keep=1, asynchronous=False) as checkpointer,
    ):
        for step in (1, 2):
            checkpointer.save(step, STATE)
            checkpointer.save(step, STATE, overwrite=True)
        assert_same(checkpointer.restore(), STATE)
        checkpointer.close()
        assert os.listdir(root) == ["2"]
