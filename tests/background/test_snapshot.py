"""I2: what a save captured is the state at the call, or, deferred, the state that nobody was to change until it was copied."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.background.saves import (
    DEADLINE_S,
    VALUES,
    Gate,
    GatedAdapter,
    GatedArray,
    HeldWorker,
    Watch,
    in_thread,
    numbers,
    queued,
    restore,
    state,
    until,
)
from tierkeep.errors import ChangedLeafError, InvalidStateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer
    from tierkeep.handle import SaveHandle


def fill(held: dict[str, Any], number: int) -> None:
    """Makes it the state of another number, in place."""
    held["step"] = number
    held["name"] = str(number)
    for array in (held["big"], *held["deep"]):
        array[...] = number


# async-snapshot-not-taken-cpu, pinned-buffer-reused
@pytest.mark.parametrize(("saves", "in_flight"), [(40, 1), (40, 2), pytest.param(500, 2, marks=pytest.mark.full)])
def test_no_step_is_torn_when_the_state_is_changed_as_soon_as_save_returns(
    saves: int, in_flight: int, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened(in_flight=in_flight, keep=saves)
    held = state(0)
    for number in range(saves):
        fill(held, number)
        steps.save(number, held)
        fill(held, 9999)
    steps.wait(DEADLINE_S)
    assert steps.steps() == list(range(saves))
    torn = [number for number in range(saves) if numbers(restore(steps, number)) != {number}]
    assert not torn


@pytest.mark.parametrize("saves", [40, pytest.param(500, marks=pytest.mark.full)])
def test_no_step_is_torn_when_the_state_of_a_deferred_save_is_changed_after_its_wait(
    saves: int, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened(in_flight=2)
    held = state(0)
    for number in range(saves):
        fill(held, number)
        handle = steps.save(number, held, snapshot="deferred")
        if number % 2:
            steps.wait_staged()
            assert handle.staged.done
        else:
            assert handle.wait_staged(DEADLINE_S)
        fill(held, 9999)
    steps.wait(DEADLINE_S)
    torn = [number for number in range(saves) if numbers(restore(steps, number)) != {number}]
    assert not torn


def test_python_values_are_those_of_the_call_even_when_deferred(opened: Callable[..., Checkpointer]) -> None:
    steps = opened(adapter=GatedAdapter())
    gate = Gate()
    held = {"n": 1, "f": 0.5, "name": "at the call", "list": [1, 2], "x": GatedArray(np.arange(VALUES), gate)}
    handle = steps.save(1, held, snapshot="deferred")
    gate.entered()
    held["n"], held["f"], held["name"] = 2, 1.5, "later"
    held["list"].append(3)  # type: ignore[attr-defined]
    held["new"] = "not there"
    gate.stay_open()
    handle.result(DEADLINE_S)
    found = restore(steps)
    assert found.pop("x").tolist() == list(range(VALUES))
    assert found == {"n": 1, "f": 0.5, "name": "at the call", "list": [1, 2]}


# Deferred, under every interleaving that can be forced: where the copy stands when something else happens


def _training(opened: Callable[..., Checkpointer]) -> tuple[Checkpointer, np.ndarray[Any, Any], Gate]:
    steps = opened(adapter=GatedAdapter(), in_flight=2)
    return steps, np.arange(VALUES), Gate()


COPIES = VALUES * 8 // (4 * 4096)  # a chunk each


@pytest.mark.parametrize("copied", range(COPIES + 1))
def test_wherever_the_copy_stands_when_training_goes_on_the_step_is_the_state_at_the_call(
    copied: int, opened: Callable[..., Checkpointer]
) -> None:
    steps, array, gate = _training(opened)
    handle = steps.save(1, {"x": GatedArray(array, gate)}, snapshot="deferred")
    for _ in range(copied):
        gate.open()
    until(lambda: gate.copies == copied)
    with in_thread(steps.wait_staged, lambda: array.fill(-1)) as training:
        if copied < COPIES:
            until(lambda: queued(steps))
            assert not handle.staged.done
            assert array[1] == 1, "the wait let the state be changed"
        gate.stay_open()
        training()
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert gate.copies == COPIES
    assert restore(steps, 1)["x"].tolist() == list(range(VALUES))


@pytest.mark.parametrize(("first", "second"), list(itertools.product(["copy", "deferred"], repeat=2)))
def test_saves_that_follow_a_deferred_one_end_after_it(
    first: Any, second: Any, opened: Callable[..., Checkpointer]
) -> None:
    """The later one of two saves of a step is the one that stays, however they were copied."""
    steps = opened(adapter=GatedAdapter(), in_flight=3)
    gate = Gate()
    watch = Watch(steps.events)
    slow = steps.save(0, {"x": GatedArray(np.full(VALUES, 0), gate)}, snapshot="deferred")
    gate.entered()

    def follow() -> tuple[SaveHandle, SaveHandle]:
        return (
            steps.save(1, {"x": np.full(VALUES, 1)}, snapshot=first),
            steps.save(1, {"x": np.full(VALUES, 2)}, snapshot=second, overwrite=True),
        )

    with in_thread(follow) as following:
        if "copy" in (first, second):
            until(lambda: queued(steps))
        gate.stay_open()
        handles = following()
    steps.wait(DEADLINE_S)
    assert all(handle.result(0).outcome == "saved" for handle in (slow, *handles))
    assert [event.step for event in watch.all() if event.what == "committed"] == [0, 1, 1]
    assert set(restore(steps, 1)["x"].tolist()) == {2}


def test_a_restore_waits_for_the_deferred_save_before_it(opened: Callable[..., Checkpointer]) -> None:
    steps, array, gate = _training(opened)
    steps.save(1, {"x": GatedArray(array, gate)}, snapshot="deferred")
    gate.entered()
    with in_thread(lambda: restore(steps)) as restored:
        until(lambda: queued(steps))
        gate.stay_open()
        assert restored()["x"].tolist() == array.tolist()


def test_a_close_waits_for_the_deferred_save_before_it(opened: Callable[..., Checkpointer]) -> None:
    steps, array, gate = _training(opened)
    handle = steps.save(1, {"x": GatedArray(array, gate)}, snapshot="deferred")
    gate.entered()
    with in_thread(steps.close) as closed:
        until(lambda: steps._background._closing)
        assert not handle.staged.done
        gate.stay_open()
        closed()
    assert handle.result(0).outcome == "saved"
    assert restore(opened(asynchronous=False))["x"].tolist() == array.tolist()


def save_after(steps: Checkpointer, handle: SaveHandle) -> None:
    steps.wait_staged()
    until(lambda: handle.done)
    steps.save(2, state(2))


TELLING: dict[str, Callable[[Checkpointer, SaveHandle], object]] = {
    "save": lambda steps, handle: save_after(steps, handle),
    "wait": lambda steps, handle: steps.wait(DEADLINE_S),
    "handle": lambda steps, handle: handle.result(DEADLINE_S),
    "close": lambda steps, handle: steps.close(),
}


@pytest.mark.parametrize("call", TELLING)
@pytest.mark.parametrize("copied", range(COPIES))
def test_a_leaf_that_was_changed_before_it_was_copied_is_named_and_nothing_is_saved(
    copied: int, call: str, opened: Callable[..., Checkpointer], root: Path
) -> None:
    steps, array, gate = _training(opened)
    steps.save(0, state(0)).result(DEADLINE_S)
    changed: list[str] = []
    leaf = GatedArray(array, gate, lambda: changed[0] if changed else None)
    handle = steps.save(1, {"fine": np.arange(3), "layers": [{"w": leaf}]}, snapshot="deferred")
    for _ in range(copied):
        gate.open()
    until(lambda: gate.copies == copied)
    changed.append("was changed in place")
    gate.stay_open()
    with pytest.raises(ChangedLeafError, match=r"'layers\.0\.w' was changed in place.*untouched") as raised:
        TELLING[call](steps, handle)
    assert raised.value.step == 1
    assert raised.value.findings == ("leaf 'layers.0.w' was changed in place",)
    assert isinstance(raised.value, InvalidStateError)
    assert not list(root.glob("1*"))
    steps.close()
    again = opened()
    assert again.steps() == [0]
    assert numbers(restore(again)) == {0}
    again.save(1, state(1)).result(DEADLINE_S)


def test_a_copy_that_fails_because_its_leaf_is_gone_says_that(opened: Callable[..., Checkpointer]) -> None:
    steps, array, gate = _training(opened)
    gate.passed = _gone  # type: ignore[method-assign]
    handle = steps.save(1, {"x": GatedArray(array, gate, lambda: "was deleted or donated")}, snapshot="deferred")
    with pytest.raises(ChangedLeafError, match="'x' was deleted or donated"):
        handle.result(DEADLINE_S)


def _gone() -> None:
    raise RuntimeError("the array has been deleted")


# source-kept-alive-after-write
@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_nothing_refers_to_an_array_once_it_is_copied(snapshot: Any, steps: Checkpointer) -> None:
    class Watched(np.ndarray[Any, Any]):
        """Plain arrays take no weak references to their memory."""

    steps.save(0, state(0)).result(DEADLINE_S)
    gc.collect()
    gc.disable()  # an array in a cycle would live until the collector comes by
    try:
        for number in range(1, 4):
            memory = np.arange(VALUES).view(Watched)
            alive = weakref.ref(memory)
            array = np.asarray(memory)  # its base is `memory`
            with HeldWorker():
                handle = steps.save(number, {"x": array, "y": [array[1:]]}, snapshot=snapshot)
                handle.wait_staged(DEADLINE_S)
                del memory, array
                if snapshot == "copy":
                    assert alive() is None, "it is copied, and still held"
            handle.result(DEADLINE_S)
            steps.wait(DEADLINE_S)
            assert alive() is None
    finally:
        gc.enable()


def test_preparing_copies_and_keeps_nothing(steps: Checkpointer, root: Path) -> None:
    class Watched(np.ndarray[Any, Any]):
        pass

    memory = np.arange(VALUES).view(Watched)
    alive = weakref.ref(memory)
    steps.prepare({"x": np.asarray(memory)})
    del memory
    assert alive() is None
    assert not list(root.glob("[0-9]*"))
    assert steps.steps() == []
    assert steps.save(1, {"x": np.arange(VALUES)}).result(DEADLINE_S).outcome == "saved"
