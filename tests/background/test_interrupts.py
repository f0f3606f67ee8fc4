"""An interrupt may come wherever Python sees to signals: all goes on afterwards, and no image, save or process is lost."""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.background.saves import (
    DEADLINE_S,
    OPTIONS,
    VALUES,
    Watch,
    arena,
    checkpointer,
    numbers,
    restore,
    state,
    until,
)
from tierkeep import checkpointer as checkpointers
from tierkeep import handle as handles
from tierkeep.errors import CheckpointExistsError, ClosedError
from tierkeep.item import ItemSaver, StagedItem
from tierkeep.memory import client as clients
from tierkeep.memory.client import client
from tierkeep.options import MemoryOptions
from tierkeep.save import background
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

    from tierkeep.checkpointer import Checkpointer

_WHERE = {module.__file__ for module in (background, checkpointers, clients, handles)}
_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD")
"""The beginnings of the instructions after which CPython has the handlers of signals called."""


class Interrupted:
    """Raises KeyboardInterrupt in this thread at one of the places where a signal's handler may, the `at`-th it comes to."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.where = ""
        """Where it was raised; empty if there are not as many."""

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self._before)
        return kind is KeyboardInterrupt

    def _called(self, frame: FrameType, _event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _WHERE:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code.co_code
        before = ""

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "opcode":
                checked, before = before.startswith(_AFTER), dis.opname[code[frame.f_lasti]]
                if checked and not self.where:
                    self._left -= 1
                    if not self._left:
                        self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                        raise KeyboardInterrupt
            return trace

        return trace


def assert_in_order(steps: Checkpointer, number: int, watch: Watch) -> None:
    """After the interrupt of a save of step `number`: the next one is well, and nothing is left of either."""
    with contextlib.suppress(CheckpointExistsError):
        steps.wait(DEADLINE_S)
    values = VALUES * (1 + (number + 1) % 3)  # the images have another size, too
    steps.save(number + 1, state(number + 1, values)).result(DEADLINE_S)
    assert numbers(restore(steps)) == {number + 1}
    committed = watch.times("committed")
    assert committed[number] == (number in steps.steps())
    assert committed[number + 1] == 1
    if committed[number]:
        assert numbers(restore(steps, number)) == {number}
    saves, at = steps._background, arena(steps)
    assert not saves._saves
    until(lambda: len(saves._free) == len(saves._images) - 1 == 1)  # the newest step has the other one
    assert not saves._filling
    assert not saves._coming
    assert not list((at / "filling").iterdir())
    assert not list((at / "sealed").iterdir())
    assert {path.name for path in (at / "free").iterdir()} == {saves._paths[i.identity].name for i in saves._free}


@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_wherever_a_save_is_interrupted_the_next_one_is_well_and_nothing_is_lost(
    snapshot: Any, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened(keep=3)
    watch = Watch(steps.events)
    steps.save(0, state(0)).result(DEADLINE_S)
    at, where = 0, "before"
    while where:
        at += 1
        with Interrupted(at) as interrupted:
            steps.save(2 * at, state(2 * at, VALUES * (1 + at % 2)), snapshot=snapshot)
            steps.wait(DEADLINE_S)
        where = interrupted.where
        try:
            assert_in_order(steps, 2 * at, watch)
        except BaseException as error:
            error.add_note(f"interrupted at {where}, the {at}th place")
            raise
    assert at > 100


def places(most: int) -> list[Any]:
    """Which interrupts are tried: a few of them, or in the long run all that there may be."""
    few = {1 + 17 * n for n in range(8)}
    return [pytest.param(n, marks=[] if n in few else pytest.mark.full) for n in range(1, most)]


@pytest.mark.parametrize("at", places(400))
def test_wherever_the_first_save_is_interrupted_the_next_one_is_well(
    at: int, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened()
    watch = Watch(steps.events)
    with Interrupted(at):
        steps.save(2, state(2))
    steps.prepare(state(3))
    assert_in_order(steps, 2, watch)


@pytest.mark.parametrize("at", places(400))
def test_a_close_that_was_interrupted_is_called_again_and_leaves_nothing(
    at: int, root: Path, memory: Path, opened: Callable[..., Checkpointer]
) -> None:
    steps = checkpointer(root, memory)
    steps.save(1, state(1)).result(DEADLINE_S)
    steps.save(2, state(2), to_disk=False)
    with Interrupted(at):
        steps.close()
    with pytest.raises(ClosedError):
        steps.save(3, state(3))
    steps.close()
    assert client().worker_pid is None
    assert not list(memory.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkeep")]
    assert numbers(restore(opened(asynchronous=False))) == {2}


def test_wherever_an_item_is_interrupted_the_next_one_is_well(memory: Path, tmp_path: Path) -> None:
    saver = ItemSaver(NumpyAdapter(), OPTIONS, MemoryOptions(directory=str(memory), nice=0))
    at, where = 0, "before"
    while where:
        at += 1
        (item := tmp_path / f"{at}").mkdir()
        begun: list[StagedItem] = []
        with Interrupted(at) as interrupted:
            saver.stage(state(at), name="item", begun=begun.append).write(item, "0" * 32)
        where = interrupted.where
        for staged in begun:
            staged.abandon()
        (after := tmp_path / f"{at} after").mkdir()
        saver.stage(state(at), name="after").write(after, "1" * 32)
        saver._background.wait(DEADLINE_S)
        assert (after / "ocdbt.process_0" / "part.json").exists(), where
        assert len(saver._background._free) == len(saver._background._images) == 1, where
    saver.close()
    assert not list(memory.iterdir())
    assert at > 100
