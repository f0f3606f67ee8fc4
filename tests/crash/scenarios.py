"""What the power fails in."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from typing import TYPE_CHECKING

from tests.crash.loop import AGAIN, Scenario, item, root
from tierkeep.step import leftover
from tierkeep.testing.crash_disk import CrashDisk, PowerLoss

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KILLED", "SCENARIOS"]

_AFTER = {str(AGAIN): AGAIN}


def _nothing(place: Path) -> None:
    """Not even the place."""


def _leftovers(place: Path) -> None:
    """Steps 1 and 7, and what killed processes left: a draft, a step half removed, one that was swapped out,
    one that a new one stands in for, and one that was moved out of the way before anything came to its place.
    """
    root(1)(place)
    other = place.with_name("other")
    for mark, more, renameat2, run in (
        ("write", 3, True, root(2)),
        ("tierkeep-trash", 6, True, root(3, 4, keep=1)),
        ("exchange", 1, True, root(5, 5, overwrite=True)),
        ("tierkeep-old", 1, False, root(6, 6, overwrite=True)),
        ("tierkeep-old", 2, False, root(7, 7, overwrite=True)),
    ):
        with CrashDisk(_empty(other), renameat2=renameat2) as disk:
            run(other)
        at = next(n for n, op in enumerate(disk.journal) if mark == op.kind or op.path[:-17].endswith(mark))
        with CrashDisk(_empty(other), renameat2=renameat2, stop_at=at + more), contextlib.suppress(PowerLoss):
            run(other)
        for entry in other.iterdir():
            if leftover(entry.name) is not None or entry.name == "7":
                entry.rename(place / entry.name)
        shutil.rmtree(other)
    found = filter(None, (leftover(entry.name) for entry in place.iterdir()))
    assert sorted(found) == [("2", "tmp"), ("3", "trash"), ("5", "tmp"), ("6", "old"), ("6", "tmp"), ("7", "old")]


def _empty(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


SCENARIOS = (
    Scenario(
        "first save into a new root",
        place="new/deep/root",
        prepare=_nothing,
        run=root(1),
        meanwhile=[{}, {"1": 1}],
        after=[{"1": 1}],
        again=root(AGAIN),
        finally_=[_AFTER, {"1": 1, **_AFTER}],
    ),
    Scenario(
        "second save",
        place="root",
        prepare=root(1),
        run=root(2),
        meanwhile=[{"1": 1}, {"1": 1, "2": 2}],
        after=[{"1": 1, "2": 2}],
        again=root(AGAIN),
        finally_=[{"1": 1, **_AFTER}, {"1": 1, "2": 2, **_AFTER}],
    ),
    Scenario(
        "overwrite",
        place="root",
        prepare=root(1),
        run=root(1, overwrite=True, to=[2]),
        meanwhile=[{"1": 1}, {"1": 2}],
        after=[{"1": 2}],
        again=root(AGAIN),
        finally_=[{"1": 1, **_AFTER}, {"1": 2, **_AFTER}],
    ),
    Scenario(
        "overwrite without renameat2",
        place="root",
        prepare=root(1),
        run=root(1, overwrite=True, to=[2]),
        meanwhile=[{"1": 1}, {"1": 2}],  # nothing for a moment, but whoever asks for the steps brings the old one back
        after=[{"1": 2}],
        again=root(AGAIN),
        finally_=[{"1": 1, **_AFTER}, {"1": 2, **_AFTER}],
        renameat2=False,
    ),
    Scenario(
        "overwrite whose last sync fails",
        place="root",
        prepare=root(1),
        run=root(1, overwrite=True, to=[2]),
        meanwhile=[{"1": 1}, {"1": 2}],
        after=[{"1": 1}, {"1": 2}],  # it raised
        again=root(AGAIN),
        finally_=[{"1": 1, **_AFTER}, {"1": 2, **_AFTER}],
        fails="root",
    ),
    Scenario(
        "retirement",
        place="root",
        prepare=root(1),
        run=root(2, keep=1),
        meanwhile=[{"1": 1}, {"1": 1, "2": 2}, {"2": 2}],
        after=[{"2": 2}],
        again=root(AGAIN, keep=1),
        finally_=[_AFTER],
    ),
    Scenario(
        "recycling",  # the image of step 1 becomes that of step 3, and that of step 2 that of step 4
        place="root",
        prepare=root(1),
        run=root(2, 3, 4, keep=1),
        meanwhile=[{"1": 1}, {"1": 1, "2": 2}, {"2": 2}, {"2": 2, "3": 3}, {"3": 3}, {"3": 3, "4": 4}, {"4": 4}],
        after=[{"4": 4}],
        again=root(AGAIN, keep=1),
        finally_=[_AFTER],
        several=True,
    ),
    Scenario(
        "recycling what is overwritten",
        place="root",
        prepare=root(1),
        run=root(1, 1, 1, overwrite=True, keep=1, to=[2, 3, 4]),
        meanwhile=[{"1": 1}, {"1": 2}, {"1": 3}, {"1": 4}],
        after=[{"1": 4}],
        again=root(AGAIN, keep=1),
        finally_=[_AFTER],
        several=True,
    ),
    Scenario(
        "single checkpoint",
        place="models",
        prepare=_nothing,
        run=item(1),
        meanwhile=[{}, {"model": 1}],
        after=[{"model": 1}],
        again=item(AGAIN, overwrite=True),
        finally_=[{"model": AGAIN}],
        single=True,
    ),
    Scenario(
        "single checkpoint overwritten",
        place="models",
        prepare=item(1),
        run=item(2, overwrite=True),
        meanwhile=[{"model": 1}, {"model": 2}],
        after=[{"model": 2}],
        again=item(AGAIN, overwrite=True),
        finally_=[{"model": AGAIN}],
        single=True,
    ),
    Scenario(
        "single checkpoint overwritten without renameat2",
        place="models",
        prepare=item(1),
        run=item(2, overwrite=True),
        meanwhile=[{"model": 1}, {"model": 2}, {}],
        after=[{"model": 2}],
        again=item(AGAIN, overwrite=True),
        finally_=[{"model": AGAIN}],
        single=True,
        renameat2=False,
    ),
    Scenario(
        "cleaning of leftovers",
        place="root",
        prepare=_leftovers,
        run=root(2),
        meanwhile=[{"1": 1, "6": 6, "7": 7}, {"1": 1, "2": 2, "6": 6, "7": 7}],
        after=[{"1": 1, "2": 2, "6": 6, "7": 7}],
        again=root(AGAIN),
        finally_=[{"1": 1, "6": 6, "7": 7, **_AFTER}, {"1": 1, "2": 2, "6": 6, "7": 7, **_AFTER}],
    ),
)

_FIRST_TWO = [{}, {"1": 1}, {"2": 2}, {"1": 1, "2": 2}]
_THREE, _FOUR = (
    [
        {str(step): step for step in steps}
        for count in range(1, most + 1)
        for steps in itertools.combinations(range(1, most + 1), count)
    ]
    for most in (3, 4)
)
_REPLACED = [{"1": 1}, {"1": 2}]

# A process is killed, which loses nothing; the next one goes on, without knowing what of it was ever synced.
KILLED = (
    Scenario(
        "a first save is killed",
        place="new/deep/root",
        prepare=_nothing,
        killed=root(1),
        run=root(2),
        meanwhile=_FIRST_TWO,
        after=[each for each in _FIRST_TWO if "2" in each],
        again=root(AGAIN),
        finally_=[{**each, **_AFTER} for each in _FIRST_TWO],
    ),
    Scenario(
        "an overwrite is killed",
        place="root",
        prepare=root(1),
        killed=root(1, overwrite=True, to=[2]),
        run=root(3),
        meanwhile=[*_REPLACED, *({**each, "3": 3} for each in _REPLACED)],
        after=[{**each, "3": 3} for each in _REPLACED],
        again=root(AGAIN),
        finally_=[{**each, **more, **_AFTER} for each in _REPLACED for more in ({}, {"3": 3})],
    ),
    Scenario(
        "an overwrite without renameat2 is killed",
        place="root",
        prepare=root(1),
        killed=root(1, overwrite=True, to=[2]),
        run=root(3),
        meanwhile=[*_REPLACED, *({**each, "3": 3} for each in _REPLACED)],
        after=[{**each, "3": 3} for each in _REPLACED],
        again=root(AGAIN),
        finally_=[{**each, **more, **_AFTER} for each in _REPLACED for more in ({}, {"3": 3})],
        renameat2=False,
    ),
    Scenario(
        "a retirement is killed",
        place="root",
        prepare=root(1),
        killed=root(2, keep=1),
        run=root(3, keep=1),
        meanwhile=_THREE,
        after=[{"3": 3}],
        again=root(AGAIN, keep=1),
        finally_=[_AFTER],
    ),
    Scenario(
        "a recycling is killed",
        place="root",
        prepare=root(1),
        killed=root(2, 3, keep=1),
        run=root(4, keep=1),
        meanwhile=_FOUR,
        after=[{"4": 4}],
        again=root(AGAIN, keep=1),
        finally_=[_AFTER],
        several=True,
    ),
)
