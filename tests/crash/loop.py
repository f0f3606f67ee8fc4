"""The loop: the power fails one operation later each time, and every state the disk may be in then is opened again."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import os
import random
import secrets
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkeep.checkpointer import Checkpointer, Engine
from tierkeep.errors import CorruptCheckpointError, StorageError, TierkeepError
from tierkeep.format.part import WHOLE
from tierkeep.options import PAGE, RestoreOptions, SaveOptions
from tierkeep.step import leftover
from tierkeep.testing.aftermath import Tree, aftermath, losses, materialise
from tierkeep.testing.crash_disk import CrashDisk, PowerLoss
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.testing.strategies import exact_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tierkeep.testing.aftermath import Operation

__all__ = ["AGAIN", "Scenario", "Tally", "crash_everywhere", "item", "length_of", "number_of", "root", "state"]

SAVING = SaveOptions(chunk_nbytes=PAGE, block_nbytes=PAGE, lanes=1, lane_nbytes=4 * PAGE)
READING = RestoreOptions(lanes=1, lane_nbytes=4 * PAGE, direct=False)
AGAIN = 9
"""The number of the state, and of the step, that is saved after every power loss."""

Visible = dict[str, int]
"""The checkpoints that are visible, by name, and the number of the state that each holds."""


def state(number: int) -> dict[str, Any]:
    """A state of a few pages; no two numbers share their bytes."""
    bits = np.random.default_rng(number)
    return {
        "weight": bits.standard_normal((40, 50)).astype("float32"),
        "scale": bits.integers(0, 99, (7,), "int16"),
        "step": number,
        "note": f"state {number}",
    }


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something that is done to a disk, and what may be visible if the power fails meanwhile."""

    name: str
    place: str
    """The root, or the directory that a single checkpoint is saved in, below the disk."""
    prepare: Callable[[Path], None]
    """Makes what stands there before. Given the place."""
    run: Callable[[Path], None]
    """What the power fails in. Given the place."""
    meanwhile: Sequence[Visible]
    """What may be visible after a power loss before `run` has returned; first, what is visible before it."""
    after: Sequence[Visible]
    """What may be visible once it has, whatever was not synced; more than one only after a kill."""
    again: Callable[[Path], None]
    """The next save after the power loss."""
    finally_: Sequence[Visible]
    """What may be visible after that save."""
    single: bool = False
    """A single checkpoint, not a root of steps."""
    several: bool = False
    """`run` saves more than once, so that what is visible in between is neither from before nor from the end."""
    renameat2: bool = True
    fails: str | None = None
    """The sync of this directory fails, and the save raises."""
    killed: Callable[[Path], None] | None = None
    """Done first, by a process that is killed at some operation; the power fails in the next one."""


@dataclass(slots=True)
class Tally:
    """What was tried."""

    points: int = 0
    """Operations that the power failed at."""
    states: int = 0
    """States of the disk that these may leave."""
    different: int = 0
    """States that were opened: those that differ."""
    violations: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.points += other.points
        self.states += other.states
        self.different += other.different
        self.violations += other.violations


def crash_everywhere(
    scenario: Scenario,
    scratch: Path,
    *,
    mixes: int,
    most: int,
    left_out: Callable[[], Callable[[Operation], bool] | None] = lambda: None,
    every: int = 1,
    kill_at: int | None = None,
    first: bool = False,
) -> Tally:
    """Runs `scenario` again and again, the power failing one operation later each time, until it completes.

    Then, and with `first` until the first violation, opens every state the disk may be left in. With `every`, only
    every so many operations are stopped at, and the end.
    """
    tally = Tally()
    base = _prepared(scenario, scratch)
    complete = _run(scenario, base, scratch, None, left_out(), kill_at)
    known = _known(scenario, complete, kill_at, scratch)
    seen: set[bytes] = set()
    begun = 0 if scenario.killed is None else kill_at or 0
    points = range(begun, len(complete.journal), every)
    for stop_at in [None, *(reversed(points) if first else points)]:  # the end first: most is promised there
        disk = complete if stop_at is None else _run(scenario, base, scratch, stop_at, left_out(), kill_at)
        kinds = [op.kind for op in disk.journal]
        assert kinds == [op.kind for op in complete.journal[: len(kinds)]], "the run is not the same every time"
        assert stop_at is None or len(kinds) == stop_at, "something reached the disk after the power loss"
        tally.points += 1
        may = scenario.after if stop_at is None else scenario.meanwhile
        for loss in losses(disk.journal, seed=len(kinds), mixes=mixes, most=most):
            tree = aftermath(disk.start, disk.journal, loss)
            tally.states += 1
            mark = _digest(tree, stop_at is None)
            if mark in seen:
                continue
            seen.add(mark)
            tally.different += 1
            found = _check(scenario, tree, scratch / "after", may, known)
            if found is not None:
                where = f"after operation {len(kinds)}" if stop_at is not None else "after it returned"
                tally.violations.append(f"{scenario.name}, {where}, {loss.name}: {found}")
                if first:
                    return tally
    return tally


def length_of(scenario: Scenario, scratch: Path) -> int:
    """The operations of the process that is killed: it can be at each of them."""
    only = dataclasses.replace(scenario, run=_nothing)
    return len(_run(only, _prepared(scenario, scratch), scratch, None, None, None).journal)


def _nothing(place: Path) -> None:
    """Nothing is done."""


def _prepared(scenario: Scenario, scratch: Path) -> Tree:
    path = scratch / "disk"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    with _the_same_every_time(1):
        scenario.prepare(path / scenario.place)
    return Tree.read(path)


def _run(
    scenario: Scenario,
    base: Tree,
    scratch: Path,
    stop_at: int | None,
    left_out: Callable[[Operation], bool] | None,
    kill_at: int | None,
) -> CrashDisk:
    """The disk after `scenario`, stopped at an operation or complete."""
    path = scratch / "disk"
    shutil.rmtree(path, ignore_errors=True)
    materialise(base, path)
    place = path / scenario.place

    def fails(operation: Operation) -> bool:
        if operation.path == scenario.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)
        return left_out is not None and left_out(operation)

    with CrashDisk(path, renameat2=scenario.renameat2, left_out=fails) as disk, _the_same_every_time(2):
        if scenario.killed is not None:
            disk.restart(stop_at=kill_at)
            with contextlib.suppress(PowerLoss):
                scenario.killed(place)
        disk.restart(stop_at=stop_at)
        with contextlib.suppress(PowerLoss, *[StorageError] if scenario.fails else []):
            scenario.run(place)
    return disk


@contextlib.contextmanager
def _the_same_every_time(seed: int) -> Iterator[None]:
    """Random names and the time of day repeat, so that files of two runs can be compared byte by byte."""
    chance = random.Random(seed)
    clock = itertools.count(10**18, 10**9)
    real = secrets.token_hex, secrets.token_bytes, time.time_ns
    secrets.token_hex = lambda nbytes=None: chance.randbytes(nbytes or 32).hex()
    secrets.token_bytes = lambda nbytes=None: chance.randbytes(nbytes or 32)
    time.time_ns = lambda: next(clock)
    try:
        yield
    finally:
        secrets.token_hex, secrets.token_bytes, time.time_ns = real


def _digest(tree: Tree, *rest: object) -> bytes:
    digest = hashlib.blake2b(repr(rest).encode())
    for path, data in tree.contents().items():
        digest.update(repr((path, data)).encode())
    return digest.digest()


Files = dict[str, bytes | None]


def _known(scenario: Scenario, complete: CrashDisk, kill_at: int | None, scratch: Path) -> dict[tuple[str, int], Files]:
    """The files of every checkpoint that may be visible: those from before, when killed, from the end, and in between."""
    known: dict[tuple[str, int], Files] = {}
    moments = {0, kill_at or 0, len(complete.journal)}
    between = {n + 1 for n, op in enumerate(complete.journal) if scenario.several and _renames_in(scenario.place, op)}
    for moment in sorted(moments | between):
        tree = complete.start.copy()
        for op in complete.journal[:moment]:
            tree.apply(op)
        shutil.rmtree(scratch / "known", ignore_errors=True)
        materialise(tree, scratch / "known")
        place = scratch / "known" / scenario.place
        for name in _visible(scenario, place):
            # What is not whole in between is not known, and is found by whoever opens it.
            with contextlib.suppress(*[] if moment in moments else [TierkeepError]):
                number = number_of(place / name)
                if number is not None:
                    known[name, number] = _below(_standing(scratch / "known"), f"{scenario.place}/{name}/")
    return known


def _renames_in(place: str, operation: Operation) -> bool:
    """Whether an operation renames or exchanges entries of a directory."""
    names = operation.path.split(" → ")
    return len(names) == 2 and all(name.rpartition("/")[0] == place for name in names)


def _standing(disk: Path) -> dict[str, bytes | None]:
    """The files below a directory, by path; None for the directories."""
    return {path.relative_to(disk).as_posix(): None if path.is_dir() else path.read_bytes() for path in disk.rglob("*")}


def _below(contents: Mapping[str, bytes | None], prefix: str) -> Files:
    return {path[len(prefix) :]: data for path, data in contents.items() if path.startswith(prefix)}


def _check(
    scenario: Scenario,
    tree: Tree,
    disk: Path,
    may: Sequence[Visible],
    known: Mapping[tuple[str, int], Files],
) -> str | None:
    """What is wrong with a disk after a power loss, None if nothing is."""
    shutil.rmtree(disk, ignore_errors=True)
    materialise(tree, disk)
    place = disk / scenario.place
    try:
        names = _visible(scenario, place)
        contents = _standing(disk)  # asked for its steps, a checkpointer brings back what was being replaced
        found: Visible = {}
        for name in names:
            files = _below(contents, f"{scenario.place}/{name}/")
            numbers = [number for (each, number), whole in known.items() if each == name and whole == files]
            if not numbers:
                return f"{name} is visible, and is no checkpoint that was saved: {_difference(name, files, known)}"
            found[name] = numbers[0]
        if found not in may:
            return f"visible is {found or 'nothing'}, may be {' or '.join(map(str, may))}"
        for name, number in found.items():
            if number_of(place / name) != number:
                return f"{name} does not come back as it was saved"
        wrong = _strangers(scenario, disk, names)
        if wrong:
            return f"left behind under a name that is not ours: {wrong}"
        if names and not _notices_damage(place / names[-1]):
            return f"damage to {names[-1]} is not noticed"
        scenario.again(place)
        names = _visible(scenario, place)
        whole = {name: number_of(place / name) for name in names}
        if whole not in scenario.finally_:
            return f"after the next save there are {whole}"
        if place.exists() and sorted(names) != sorted(entry.name for entry in place.iterdir()):
            return f"leftovers after the next save: {sorted(entry.name for entry in place.iterdir())}"
    except (ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _visible(scenario: Scenario, place: Path) -> list[str]:
    if scenario.single:
        return [entry.name for entry in (place / "model",) if entry.exists()]
    with Checkpointer(NumpyAdapter(), place, options=SAVING, asynchronous=False) as checkpointer:
        return [str(step) for step in checkpointer.steps()]


def number_of(path: Path) -> int | None:
    """The number of the state that a checkpoint comes back as, verified and bit for bit; None if it is no such state."""
    engine = Engine(NumpyAdapter(), SAVING)
    try:
        found = engine.restore(path, options=READING)
    finally:
        engine.close()
    number = int(found["step"])
    return number if exact_form(found) == _form(number) else None


@functools.cache
def _form(number: int) -> Any:
    return exact_form(state(number))


def _strangers(scenario: Scenario, disk: Path, names: Sequence[str]) -> list[str]:
    """What stands beside the checkpoints and would not be known for a leftover."""
    found: list[str] = []
    at = disk
    for part in scenario.place.split("/"):
        found += [entry.name for entry in at.iterdir() if entry.name != part]
        at /= part
        if not at.exists():
            return found
    return found + [each.name for each in at.iterdir() if each.name not in names and leftover(each.name) is None]


def _notices_damage(path: Path) -> bool:
    """Whether a restore refuses a checkpoint with one byte flipped: in its image, then in its record of the whole."""
    item = path if (path / WHOLE).exists() else path / "default"
    image = max((item / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)
    for file, at in ((image, 100), (item / WHOLE, 200)):
        data = file.read_bytes()
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        engine = Engine(NumpyAdapter(), SAVING)
        try:
            engine.restore(path, options=READING)
            return False
        except CorruptCheckpointError:
            pass
        finally:
            engine.close()
            file.write_bytes(data)
    return True


def _difference(name: str, files: Files, known: Mapping[tuple[str, int], Files]) -> str:
    """The files that differ from the checkpoint it comes nearest to."""
    nearest = min(
        ([path for path in {*files, *whole} if files.get(path, "") != whole.get(path, "")] or ["nothing"])
        for (each, _), whole in known.items()
        if each == name
    )
    return ", ".join(sorted(nearest))


# What is run


def root(
    *steps: int, overwrite: bool = False, keep: int | None = None, to: Sequence[int] | None = None
) -> Callable[[Path], None]:
    """Saves steps of a root one after the other, each with the state of its number, or of the one in `to`."""

    def run(place: Path) -> None:
        with Checkpointer(NumpyAdapter(), place, keep=keep, options=SAVING, asynchronous=False) as checkpointer:
            for step, number in zip(steps, to or steps, strict=True):
                checkpointer.save(step, state(number), overwrite=overwrite)

    return run


def item(number: int, *, overwrite: bool = False) -> Callable[[Path], None]:
    """Saves one checkpoint, outside of any root."""

    def run(place: Path) -> None:
        engine = Engine(NumpyAdapter(), SAVING)
        try:
            engine.save(place / "model", state(number), overwrite=overwrite)
        finally:
            engine.close()

    return run
