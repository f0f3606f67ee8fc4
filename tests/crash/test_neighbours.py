"""A root that others use at the same time, that is copied, moved, linked to, and that holds what is not ours."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from tests.crash.steps import assert_steps, checkpointer, file_bytes, leftovers, restore, state
from tierkeep.errors import CheckpointExistsError, CheckpointNotFoundError
from tierkeep.testing.strategies import exact_form
from tierkeep.tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "core"), str(REPOSITORY)])}
DEADLINE_S = 100.0
"""A process that says nothing for so long is killed, and the test fails."""


class Neighbour:
    """A `neighbour.py` process; killed at the end if it still runs."""

    def __init__(self, root: Path, role: str, *numbers: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.neighbour", str(root), role, *map(str, numbers)],
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        assert self.hear()["event"] == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def hear(self) -> dict[str, Any]:
        line = b""
        assert self.process.stdout is not None
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
            assert ready, "the process says nothing any more"
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, "the process has failed; its traceback is above"
            line += byte
        found: dict[str, Any] = json.loads(line)
        return found


# Several processes on one root


def test_two_processes_save_different_steps_of_one_root(tmp_path: Path) -> None:
    root = tmp_path / "new" / "root"  # both make it
    with Neighbour(root, "save", *range(0, 20, 2)) as even, Neighbour(root, "save", *range(1, 20, 2)) as odd:
        even.go()
        odd.go()
        assert even.hear()["event"] == odd.hear()["event"] == "done"
    assert_steps(root, {step: state(step) for step in range(20)})
    assert not leftovers(root)


def test_of_two_processes_that_save_the_same_step_exactly_one_does(tmp_path: Path, count: Callable[..., None]) -> None:
    rounds = 30
    with Neighbour(tmp_path, "race", 1000, rounds) as one, Neighbour(tmp_path, "race", 2000, rounds) as other:
        one.go()
        other.go()
        for _ in range(rounds):
            one.go()
            other.go()
            assert one.hear()["event"] == other.hear()["event"] == "tried"
        won = {1000: one.hear()["won"], 2000: other.hear()["won"]}
    assert sorted(won[1000] + won[2000]) == list(range(rounds))
    assert_steps(tmp_path, {step: state(seed + step) for seed, steps in won.items() for step in steps})
    assert not leftovers(tmp_path)
    count(rounds=rounds, won_by_one=len(won[1000]))


@pytest.mark.parametrize("kind", ["saves", "overwrites", "deletions"])
def test_a_reader_never_meets_a_torn_step(kind: str, tmp_path: Path, count: Callable[..., None]) -> None:
    with checkpointer(tmp_path, keep=2 if kind == "deletions" else None) as steps:
        steps.save(0, state(0))
        steps.save(1, state(1))
        with Neighbour(tmp_path, "read", 999) as reader:
            reader.go()
            for number in range(2, 42):
                if kind == "overwrites":
                    steps.save(1, state(1000 * number + 1), overwrite=True)
                else:
                    steps.save(number, state(number))
            steps.save(999, state(999))
            found = reader.hear()
    assert found["event"] == "done"
    assert found["reads"] > 0
    if kind == "saves":
        assert found["gone"] == 0
    count(reads=found["reads"], steps_gone_meanwhile=found["gone"])


class Interrupted(LocalDisk):
    """Lets something else happen while the first part record is about to be read."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens: list[Callable[[], object]] = [happens]

    def read_file(self, path: Path, most: int) -> bytes:
        if path.name == "part.json" and self.happens:
            self.happens.pop()()
        return super().read_file(path, most)


def test_a_step_that_is_overwritten_while_it_is_opened_comes_back_new_and_whole(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as other:
        other.save(0, state(0))
        for call in ("restore", "the newest", "metadata"):
            other.save(1, state(1), overwrite=True)
            disk = Interrupted(lambda: other.save(1, state(2), overwrite=True))
            with checkpointer(tmp_path, disk=disk) as steps:
                if call == "metadata":
                    assert steps.metadata(1).nbytes > 0
                else:
                    assert exact_form(restore(steps, 1 if call == "restore" else None)) == exact_form(state(2))
            assert not disk.happens


def test_a_step_that_is_retired_while_it_is_opened_is_told_and_the_newest_is_looked_for_again(tmp_path: Path) -> None:
    with checkpointer(tmp_path, keep=1) as other:
        other.save(1, state(1))
        disk = Interrupted(lambda: other.save(2, state(2)))
        with checkpointer(tmp_path, disk=disk) as steps:
            assert exact_form(restore(steps)) == exact_form(state(2))  # and no warning that a step was passed over
        disk = Interrupted(lambda: other.save(3, state(3)))
        with checkpointer(tmp_path, disk=disk) as steps, pytest.raises(CheckpointNotFoundError, match="/2"):
            restore(steps, 2)


def test_the_draft_of_a_living_process_stays_and_that_of_a_dead_one_is_swept(tmp_path: Path) -> None:
    class Watching(LocalDisk):
        """Looks at the neighbours from the middle of a save."""

        def write_file(self, path: Path, data: bytes) -> None:
            if path.name == "tierkeep.json":
                with checkpointer(tmp_path) as other:
                    other.save(2, state(2))
                seen.append(leftovers(tmp_path))
            super().write_file(path, data)

    seen: list[list[str]] = []
    with checkpointer(tmp_path) as steps:
        steps.save(0, state(0))
    dead = [f"{n}.tierkeep-{kind}-0123456789abcdef" for n, kind in ((7, "tmp"), (8, "trash"))]
    for name in dead:
        shutil.copytree(tmp_path / "0", tmp_path / name)
    unknown = ["notes.txt", "step-abc", "tmp", "5.tierkeep-tmp", "9.orbax-checkpoint-tmp", "x.tierkeep-tmp-12", "007"]
    for name in unknown:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text(name)
    (tmp_path / "4").write_text("a file with a number for a name")
    with checkpointer(tmp_path, disk=Watching(), keep=1) as steps:
        steps.save(3, state(3))
    (living,) = seen[0]  # only the one of the save that is going on
    assert living.startswith("3.")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*unknown, "3", "4"])
    assert all((tmp_path / name / "mine").read_text() == name for name in unknown)
    assert (tmp_path / "4").read_text() == "a file with a number for a name"
    assert_steps(tmp_path, {3: state(3)})


def test_abandoned_drafts_do_not_pile_up(tmp_path: Path) -> None:
    """Three killed saves at different steps leave the room that one takes, once the next save is through."""
    root = tmp_path / "root"
    source = (
        "from tests.crash.writer import work; import sys; work(sys.argv[1], 'save', int(sys.argv[2]), 1, False, 60, 9)"
    )
    for step in (1, 2, 3):
        done = subprocess.run(
            [sys.executable, "-c", source, str(root), str(step)],
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert [name.partition(".")[0] for name in leftovers(root)] == [str(step)], "the one before was swept"
    with checkpointer(root) as steps:
        steps.save(4, state(4))
    assert [path.name for path in root.iterdir()] == ["4"]


# Roots that are somewhere else than they were


@pytest.mark.parametrize("how", ["cp -r", "rsync -a", "tar", "shutil.move", "rename"])
def test_a_copied_or_moved_root_is_as_good(how: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new place"
    with checkpointer(old) as steps:
        for step in (1, 2):
            steps.save(step, state(step))
    content = file_bytes(old)
    if not shutil.which(how.split()[0]) and how in ("cp -r", "rsync -a", "tar"):
        pytest.skip(f"there is no {how} here")
    if how == "tar":
        subprocess.run(["tar", "cf", tmp_path / "t.tar", "-C", old, "."], check=True, timeout=DEADLINE_S)
        new.mkdir()
        subprocess.run(["tar", "xf", tmp_path / "t.tar", "-C", new], check=True, timeout=DEADLINE_S)
        shutil.rmtree(old)
    elif how == "shutil.move":
        shutil.move(old, new)
    elif how == "rename":
        old.rename(new)
    else:
        source = f"{old}/" if how.startswith("rsync") else str(old)
        subprocess.run([*how.split(), source, str(new)], check=True, timeout=DEADLINE_S)
        shutil.rmtree(old)
    assert file_bytes(new) == content
    with checkpointer(new) as steps:
        steps.save(3, state(3))
        steps.save(1, state(11), overwrite=True)
    assert_steps(new, {1: state(11), 2: state(2), 3: state(3)})


def test_a_root_that_moves_under_an_open_checkpointer_is_a_new_root_for_the_next_save(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "a") as steps:
        steps.save(1, state(1))
        (tmp_path / "a").rename(tmp_path / "b")
        assert steps.steps() == []
        steps.save(2, state(2))
    assert_steps(tmp_path / "a", {2: state(2)})
    assert_steps(tmp_path / "b", {1: state(1)})


def test_a_step_that_is_copied_by_hand_is_a_step(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "a") as steps:
        steps.save(1, state(1))
    shutil.copytree(tmp_path / "a" / "1", tmp_path / "b" / "12")
    assert_steps(tmp_path / "b", {12: state(1)})


def test_a_root_in_memory_and_temporary_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever written outside of the root, so that no rename crosses file systems."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("there is no file system in memory here")
    for root, temporary in ((memory / f"tierkeep-{os.getpid()}", tmp_path), (tmp_path / "root", memory)):
        monkeypatch.setenv("TMPDIR", str(temporary))
        names = {path.name for path in temporary.iterdir()}
        try:
            with checkpointer(root, keep=1) as steps:
                steps.save(1, state(1))
                steps.save(1, state(2), overwrite=True)
                steps.save(3, state(3))
            assert_steps(root, {3: state(3)})
            assert {path.name for path in temporary.iterdir()} - {"root"} <= names | {p.name for p in memory.iterdir()}
        finally:
            shutil.rmtree(root, ignore_errors=True)


def test_a_root_behind_links_is_the_root_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "link to link").symlink_to(tmp_path / "link")
    with checkpointer(tmp_path / "link to link", keep=2) as steps:
        for step in (1, 2, 3):
            steps.save(step, state(step))
        steps.save(3, state(33), overwrite=True)
    assert (tmp_path / "link").is_symlink()
    for name in ("real", "link", "link to link"):
        assert_steps(tmp_path / name, {2: state(2), 3: state(33)})


def test_links_among_the_steps_are_never_followed_out_of_the_root(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "other run") as steps:
        steps.save(5, state(5))
    content = file_bytes(tmp_path / "other run")
    root = tmp_path / "root"
    root.mkdir()
    (root / "1").symlink_to(tmp_path / "other run" / "5")
    (root / "2").symlink_to("2")  # a loop
    (root / "latest").symlink_to("nowhere")
    (root / "8.tierkeep-trash-0123456789abcdef").symlink_to(tmp_path / "other run")
    with checkpointer(root, keep=1) as steps:
        steps.save(3, state(3))
        assert steps.latest_step() == 3
        steps.save(4, state(4))
        steps.save(4, state(44), overwrite=True)
    assert file_bytes(tmp_path / "other run") == content
    assert os.readlink(root / "latest") == "nowhere"
    assert not (root / "3").exists()
    with checkpointer(root) as steps:
        assert exact_form(restore(steps, 4)) == exact_form(state(44))


def test_a_relative_root_stays_where_it_was_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with checkpointer("runs/a") as steps:
        steps.save(1, state(1))
        monkeypatch.chdir(tmp_path / "there")
        steps.save(2, state(2))
        assert steps.steps() == [1, 2]
    assert_steps(tmp_path / "here" / "runs" / "a", {1: state(1), 2: state(2)})
    assert not list((tmp_path / "there").iterdir())


@pytest.mark.parametrize("name", ["a b", " leading", "ünï cödé ⛵", "new\nline", "%s{0}$HOME", "-rf", "1", "#*?[x]"])
def test_any_name_can_be_a_root(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    with checkpointer(root, keep=1) as steps:
        for step in (1, 2):
            steps.save(step, state(step))
        steps.save(2, state(3), overwrite=True)
    assert_steps(root, {2: state(3)})
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_that_is_no_unicode_can_be_a_root(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path) + b"/\xff\xfe"
    with checkpointer(root) as steps:
        steps.save(1, state(1))
    assert_steps(Path(os.fsdecode(root)), {1: state(1)})


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with checkpointer("~/runs") as steps:
        steps.save(1, state(1))
    assert_steps(tmp_path / "runs", {1: state(1)})


@pytest.mark.parametrize(
    ("umask", "directory", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0, 0o777, 0o666)]
)
def test_modes_are_what_the_umask_leaves(umask: int, directory: int, file: int, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        with checkpointer(tmp_path / "new" / "root") as steps:
            steps.save(1, state(1))
            steps.save(1, state(2), overwrite=True)
    finally:
        os.umask(old)
    found = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new").rglob("*") if p.is_file()}
    assert found == {file}
    below = [tmp_path / "new", *(p for p in (tmp_path / "new").rglob("*") if p.is_dir())]
    assert {stat.S_IMODE(p.stat().st_mode) for p in below} == {directory}


# Forks and daemons. Each runs in a process of its own: this one has threads of other tests' libraries.


def run_python(source: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source, str(root)],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_forked_child_and_its_parent_both_go_on(tmp_path: Path) -> None:
    run_python(
        """
import os, subprocess, sys
from tests.crash.steps import SMALL, checkpointer, restore, state
from tierkeep.options import SaveOptions
with checkpointer(sys.argv[1], options=SaveOptions(chunk_nbytes=4096, lanes=3)) as steps:
    steps.save(1, state(1))
    assert restore(steps)["step"] == 1
    for step in (2, 4):
        pid = os.fork()
        if pid == 0:
            try:
                steps.save(step, state(step))
                assert restore(steps)["step"] == step
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        subprocess.run(["true"], check=True)
        steps.save(step + 1, state(step + 1))
        assert restore(steps)["step"] == step + 1
""",
        tmp_path,
    )
    assert_steps(tmp_path, {step: state(step) for step in range(1, 6)})
    assert not leftovers(tmp_path)


def test_a_child_forked_in_the_middle_of_a_save_does_not_keep_the_draft_alive_for_the_parent(tmp_path: Path) -> None:
    run_python(
        """
import os, signal, sys
from tests.crash.steps import checkpointer, state
from tierkeep.tiers.local_disk import LocalDisk
class Forking(LocalDisk):
    child = 0
    def write_file(self, path, data):
        if path.name == "tierkeep.json":
            self.child = os.fork()
            if self.child == 0:
                signal.pause()
        super().write_file(path, data)
disk = Forking()
try:
    with checkpointer(sys.argv[1], disk=disk) as steps:
        steps.save(1, state(1))
finally:
    if disk.child:
        os.kill(disk.child, signal.SIGKILL)
        os.waitpid(disk.child, 0)
""",
        tmp_path,
    )
    assert_steps(tmp_path, {1: state(1)})
    with checkpointer(tmp_path) as steps:
        steps.save(2, state(2))
    assert not leftovers(tmp_path)


def test_a_daemonic_child_and_a_pool_worker_save_and_restore(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=save_and_restore, args=(tmp_path, 1), daemon=True)
    child.start()
    child.join(DEADLINE_S)
    alive = child.is_alive()
    if alive:
        child.kill()
    assert not alive
    assert child.exitcode == 0
    with context.Pool(1) as pool:
        assert pool.apply_async(save_and_restore, (tmp_path, 2)).get(DEADLINE_S) == 2
        pool.terminate()
        pool.join()
    assert_steps(tmp_path, {1: state(1), 2: state(2)})


def save_and_restore(root: Path, step: int) -> int:
    with checkpointer(root) as steps:
        steps.save(step, state(step))
        found = restore(steps)
    assert np.array_equal(found["big"], state(step)["big"])
    return int(found["step"])


def test_another_process_may_take_the_step_between_the_first_look_and_the_last(tmp_path: Path) -> None:
    class Taking(LocalDisk):
        def rename_new(self, old: Path, new: Path) -> bool:
            if not done:
                done.append(True)
                with checkpointer(tmp_path) as other:
                    other.save(int(new.name), state(8))
            return super().rename_new(old, new)

    done: list[bool] = []
    with checkpointer(tmp_path, disk=Taking()) as steps, pytest.raises(CheckpointExistsError):
        steps.save(1, state(9))
    assert_steps(tmp_path, {1: state(8)})
    assert not leftovers(tmp_path)


def test_a_step_retired_by_another_process_is_no_error_of_ours(tmp_path: Path) -> None:
    class Retiring(LocalDisk):
        def rename(self, old: Path, new: Path) -> None:
            if old.name == "1" and old.exists():
                shutil.rmtree(old)
            super().rename(old, new)

    with checkpointer(tmp_path, disk=Retiring(), keep=1) as steps:
        steps.save(1, state(1))
        steps.save(2, state(2))
    assert_steps(tmp_path, {2: state(2)})
    with contextlib.suppress(FileNotFoundError):
        assert not leftovers(tmp_path)
