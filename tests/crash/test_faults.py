"""Every system call of a save and of a restore fails, once or from then on, with everything it can fail with.

A recording run counts the calls; then each one fails in turn. The counts are printed at the end of the run.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.crash.steps import SMALL, assert_steps, checkpointer, file_bytes, held, leftovers, others, restore, state
from tierkeep.errors import CheckpointExistsError, StorageError
from tierkeep.options import PAGE, RestoreOptions, SaveOptions
from tierkeep.restore.place import NOTHING
from tierkeep.testing.faulty_disk import CAN_FAIL, SHORT, Call, FaultyCalls, from_then_on, once
from tierkeep.testing.strategies import exact_form
from tierkeep.tiers.retain import Keep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer

CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EMFILE)
HOWS = {"once": once, "from then on": from_then_on}


class Save(NamedTuple):
    """A save into a root, and what holds before and after."""

    before: tuple[int, ...]
    step: int
    settings: dict[str, Any]
    overwrite: bool = False
    after: tuple[int, ...] | None = None
    """The steps that are left if not all are."""
    first: int | None = None
    """A step that the same checkpointer saves before any call fails."""


SAVES = {
    "a new step": Save((1, 2), 3, {}),
    "the first step": Save((), 1, {}),
    "an overwritten step": Save((1, 2), 2, {}, overwrite=True),
    "a step that retires two": Save((1, 2), 3, {"keep": 1}, after=(3,)),
    "a step into the image of a retired one": Save((1, 2), 4, {"keep": 1}, after=(4,), first=3),
    "an overwritten step into the image of one": Save((1,), 2, {}, overwrite=True, first=2),
    "a step of three lanes": Save((1,), 3, {"options": SaveOptions(chunk_nbytes=3 * PAGE, block_nbytes=PAGE, lanes=3)}),
}
NEW = 1000  # the seed of the state that is saved while calls fail
NEXT = 90  # the step that is saved afterwards


def prepared(place: Path, save: Save) -> Path:
    """A root that holds the steps from before, and the leftovers of a dead writer, which the save sweeps."""
    root = place / "deep" / "root"
    with checkpointer(root) as steps:
        for step in save.before:
            steps.save(step, state(step))
    if save.before:
        shutil.copytree(root / "1", root / "7.tierkeep-tmp-0123456789abcdef")
        shutil.copytree(root / "1", root / "8.tierkeep-trash-0123456789abcdef")
    return root


def copied(source: Path, to: Path) -> Path:
    """A copy of a root to break, under the same parents."""
    if to.parent.exists():
        shutil.rmtree(to.parent)
    if source.exists():
        shutil.copytree(source, to / "root")
    return to / "root"


def faults(calls: list[Call], codes: tuple[int, ...]) -> Iterator[tuple[int, int, str]]:
    for call in calls:
        for code in codes:
            names = CAN_FAIL[code]
            if names is None or call.name in names:
                for how in HOWS:
                    yield call.number, code, how


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        pytest.param("a new step", CODES, id="a new step, everything"),
        *(pytest.param(kind, (errno.EIO,), id=f"{kind}, EIO") for kind in list(SAVES)[1:]),
        *(pytest.param(kind, CODES[1:], id=f"{kind}, the others", marks=pytest.mark.full) for kind in list(SAVES)[1:]),
    ],
)
def test_a_save_whose_calls_fail_is_told_and_leaves_old_steps_as_they_were_and_none_torn(
    kind: str, codes: tuple[int, ...], place: Path, count: Callable[..., None]
) -> None:
    save = SAVES[kind]
    template = prepared(place, save)
    before = held()
    older: dict[int, dict[str, bytes]] = {}

    def run(decide: Callable[[Call], int] | None = None) -> tuple[FaultyCalls, Path, Checkpointer, Exception | None]:
        root = copied(template, place / "broken" / "parent")
        steps = checkpointer(root, **save.settings)
        if save.first is not None:
            steps.save(save.first, state(save.first))
            if save.overwrite:
                steps.save(save.first, state(save.first), overwrite=True)
        older.clear()
        older.update((step, file_bytes(root / str(step))) for step in steps.steps())
        calls = FaultyCalls(place) if decide is None else FaultyCalls(place, decide)
        with calls:
            try:
                steps.save(save.step, state(NEW), overwrite=save.overwrite)
            except OSError as error:
                return calls, root, steps, error
        return calls, root, steps, None

    recorded, *_, nothing = run()
    assert nothing is None
    tried = 0
    survived: Counter[str] = Counter()
    for number, code, how in faults(recorded.calls, codes):
        calls, root, steps, error = run(HOWS[how](number, code))
        where = f"{errno.errorcode[code]} {how} at {calls.failed[:1]}: {error!r}"
        if not calls.failed:
            assert "lanes" in kind, where  # there, a run may make fewer calls
            continue
        tried += 1
        try:
            new = check_after_a_save(save, root, older, error, code)
            survived[calls.failed[0].name] += error is None
            # The same checkpointer goes on, and sweeps what the broken save could not remove.
            steps.keep = None
            steps.save(NEXT, state(NEXT))
            assert not leftovers(root)
            with steps:
                assert exact_form(restore(steps)) == exact_form(state(NEXT))
            assert held() == before
            assert new or error is not None
        except BaseException as broken:
            broken.add_note(where)
            raise
    count(calls=len(recorded.calls), faults=tried, survived=dict(survived))
    assert tried >= len(recorded.calls)
    names = {name: {call.path for call in recorded.calls if call.name == name} for name in ("create", "pwrite")}
    assert (names["pwrite"] <= names["create"]) == (save.first is None)
    if save.first is not None:  # a lease that is refused, or a file that cannot be moved, is made up for by a new one
        assert survived["fcntl"] >= 3
        assert survived["rename"] > 0


def check_after_a_save(
    save: Save, root: Path, older: dict[int, dict[str, bytes]], error: Exception | None, code: int
) -> bool:
    """What must hold of a root, whatever happened to the save. Returns whether the new step is visible."""
    assert not others(root) if root.exists() else True
    with checkpointer(root) as steps:
        visible = steps.steps()
        new = save.step in visible and restore(steps, save.step)["step"] == NEW
        if new:
            assert exact_form(restore(steps, save.step)) == exact_form(state(NEW))
    kept = {step for step in older if not (new and step == save.step)}
    if save.after is not None and new:
        kept &= set(visible)  # some were retired before the error
    assert visible == sorted(kept | ({save.step} if new else set()))
    for step in kept:
        assert file_bytes(root / str(step)) == older[step], step
    if error is None:
        assert new
        return True
    assert isinstance(error, StorageError)
    assert error.errno == code
    assert str(root) in str(error)
    assert str(error).endswith(f"{error.filename!r}") or error.holds in str(error)
    if new:
        assert "whole" in error.holds, error
    else:
        assert "as it was before" in error.holds, error
    return new


RESTORES: dict[str, RestoreOptions] = {
    "from the page cache": RestoreOptions(lanes=1, lane_nbytes=8 * PAGE),
    "past the page cache": RestoreOptions(lanes=1, lane_nbytes=8 * PAGE),
    "buffered": RestoreOptions(lanes=1, lane_nbytes=8 * PAGE, direct=False),
    "by three lanes": RestoreOptions(lanes=3, lane_nbytes=8 * PAGE),
}


@pytest.mark.parametrize("kind", RESTORES)
def test_a_restore_whose_calls_fail_gives_the_right_bits_or_an_error_and_changes_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[..., None]
) -> None:
    place = tmp_path  # a file system in memory has no page cache to ask
    root = place / "root"
    with checkpointer(root) as steps:
        for step in (1, 2):
            steps.save(step, state(step))
    if kind == "past the page cache":
        monkeypatch.setattr(os, "preadv", refusing_to_ask(os.preadv))
    content = file_bytes(root)
    before = held()

    def run(decide: Callable[[Call], int] | None = None) -> tuple[FaultyCalls, Any, Exception | None]:
        calls = FaultyCalls(place) if decide is None else FaultyCalls(place, decide)
        found = error = None
        with calls:
            try:
                with checkpointer(root) as steps:
                    found = restore_with(steps, RESTORES[kind])
                    steps.metadata(1)
            except OSError as caught:
                error = caught
        return calls, found, error

    recorded, found, _ = run()
    assert exact_form(found) == exact_form(state(2))
    tried = survived = 0
    for number, code, how in faults(recorded.calls, (errno.EIO, errno.EACCES, errno.EMFILE)):
        calls, found, error = run(HOWS[how](number, code))
        where = f"{errno.errorcode[code]} {how} at {calls.failed[:1]}: {error!r}"
        tried += bool(calls.failed)
        if error is None:
            survived += 1
        else:
            assert isinstance(error, StorageError), where
            assert error.errno == code, where
            assert str(root) in str(error), where
            assert "untouched" in error.holds or "nothing was changed" in error.holds, where
        assert found is None or exact_form(found) == exact_form(state(2)), where
        assert held() == before, where
    assert file_bytes(root) == content
    assert_steps(root, {1: state(1), 2: state(2)})
    count(calls=len(recorded.calls), faults=tried, survived=survived)


def restore_with(steps: Checkpointer, options: RestoreOptions) -> Any:
    return steps._restore(None, NOTHING, keys=None, device=None, dry_run=False, options=options, relaxations={})


def refusing_to_ask(real: Callable[..., int]) -> Callable[..., int]:
    """A preadv for which nothing is ever in the page cache."""

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real(fd, buffers, offset)

    return preadv


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("direct", [True, False])
def test_calls_that_move_fewer_bytes_than_asked_are_not_seen(
    how: str, direct: bool, place: Path, tmp_path: Path, count: Callable[..., None]
) -> None:
    options = SaveOptions(chunk_nbytes=3 * PAGE, block_nbytes=PAGE, lanes=1, lane_nbytes=8 * PAGE, direct=direct)
    reading = RestoreOptions(lanes=1, lane_nbytes=8 * PAGE, direct=direct)
    tried = 0
    for directory in (place, tmp_path):  # a disk takes only whole sectors past the page cache
        with FaultyCalls(directory) as recorded, checkpointer(directory / "root", options=options) as steps:
            steps.save(0, state(0))
            restore_with(steps, reading)
        for number, _, _ in faults(recorded.calls, (SHORT,)):
            with (
                FaultyCalls(directory, HOWS[how](number, SHORT)) as calls,
                checkpointer(directory / f"root{number}", options=options) as steps,
            ):
                steps.save(0, state(number))
                assert exact_form(restore_with(steps, reading)) == exact_form(state(number))
            assert calls.failed
            assert_steps(directory / f"root{number}", {0: state(number)})
            shutil.rmtree(directory / f"root{number}")
            tried += 1
    count(short_calls=tried)
    assert tried > 20


def test_signals_that_interrupt_calls_are_not_seen(tmp_path: Path) -> None:
    came = 0

    def handler(*_: object) -> None:
        nonlocal came
        came += 1

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        with checkpointer(tmp_path, options=SaveOptions(lanes=1), keep=1) as steps:
            number = 0
            while came < 200:
                number += 1
                steps.save(number, state(number, 64 * PAGE))
                assert exact_form(restore(steps)) == exact_form(state(number, 64 * PAGE))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    with FaultyCalls(tmp_path) as recorded, checkpointer(tmp_path / "a", options=SMALL) as steps:
        steps.save(1, state(1))
    # The one that Python does not repeat by itself.
    number = next(call.number for call in recorded.calls if call.name == "fallocate")
    with FaultyCalls(tmp_path, once(number, errno.EINTR)) as calls, checkpointer(tmp_path / "b") as steps:
        steps.save(1, state(1))
    assert calls.failed
    assert_steps(tmp_path / "b", {1: state(1)})


def test_what_a_file_system_lacks_is_made_up_for(place: Path) -> None:
    lacks = {
        errno.EOPNOTSUPP: {"fallocate", "flock"},
        errno.ENOSYS: {"fallocate", "renameat2"},
        errno.EINVAL: {"renameat2"},
        errno.ENOLCK: {"flock"},
    }
    for code, names in lacks.items():
        root = place / str(code)

        def decide(call: Call, code: int = code, names: set[str] = names) -> int:
            return code if call.name in names else 0

        with FaultyCalls(place, decide) as calls, checkpointer(root) as steps:
            steps.save(1, state(1))
            steps.save(2, state(2))
            steps.save(2, state(3), overwrite=True)
            with pytest.raises(CheckpointExistsError):
                steps.save(1, state(4))
        assert calls.failed
        assert not leftovers(root)
        assert_steps(root, {1: state(1), 2: state(3)})


def test_a_step_that_cannot_be_looked_at_is_never_taken_for_none(place: Path) -> None:
    root = place / "root"
    with checkpointer(root) as steps:
        for step in (1, 2):
            steps.save(step, state(step))

        def decide(call: Call) -> int:
            return errno.EIO if call.name in ("lstat", "stat") and "/2/" in call.path else 0

        for call in (steps.steps, steps.latest_step, lambda: restore(steps), lambda: restore(steps, 2)):
            with FaultyCalls(place, decide), pytest.raises(StorageError, match=str(root)) as caught:
                call()
            assert caught.value.errno == errno.EIO
        with FaultyCalls(place, decide):
            assert exact_form(restore_one(steps)) == exact_form(state(1))


def test_a_step_whose_metrics_cannot_be_read_is_not_retired_for_that(place: Path) -> None:
    root = place / "root"
    with checkpointer(root, keep=Keep(best=1, metric="loss")) as steps:
        for step, loss in ((1, 0.0), (2, 1.0), (3, 2.0)):
            steps.save(step, state(step), metrics={"loss": loss})
        assert steps.steps() == [1, 3]

        def decide(call: Call) -> int:
            return errno.EIO if call.name == "open" and call.path.endswith("/1/_CHECKPOINT_METADATA") else 0

        with FaultyCalls(place, decide) as calls:
            steps.save(4, state(4), metrics={"loss": 3.0})
        assert calls.failed
        steps.save(5, state(5), metrics={"loss": 4.0})
        assert steps.steps() == [1, 5]


def restore_one(steps: Checkpointer) -> Any:
    """The older step, straight from its path."""
    assert steps._engine is not None
    return steps._engine.restore(steps.root / "1", options=RestoreOptions())


def test_the_recording_sees_every_file_that_python_opens_makes_or_removes(place: Path) -> None:
    """A test of the test: the interpreter's own audit trail has no operation that was not counted."""
    root = place / "root"
    seen: Counter[str] = Counter()
    events = {
        "open": "open",
        "os.rename": "rename",
        "os.mkdir": "mkdir",
        "os.rmdir": "rmdir",
        "os.remove": "unlink",
        "os.scandir": "scandir",
        "os.truncate": "ftruncate",
        "fcntl.flock": "flock",
    }
    listening = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if listening and event in events and not (event == "open" and isinstance(args[0], int)):  # open already
            # Relative are the names that are opened below an open directory; a lock's file is a number.
            name = str(args[0])
            seen[events[event]] += name.startswith(str(place)) or not name.startswith("/")

    with checkpointer(root) as steps:  # what is imported late is imported now
        steps.save(1, state(1))
        restore(steps)
    sys.addaudithook(hook)
    try:
        seen.clear()
        with FaultyCalls(place) as calls, checkpointer(root, keep=1) as steps:
            steps.save(2, state(2))
            steps.save(2, state(3), overwrite=True)
            restore(steps)
        audited = Counter(seen)
    finally:
        listening = False
    counted = Counter("open" if call.name == "create" else call.name for call in calls.calls)
    for name, times in audited.items():
        assert times <= counted[name], name
    assert audited["open"] > 20
    assert {"pwrite", "write", "fsync", "fallocate", "renameat2", "preadv", "read", "close"} <= set(counted)
