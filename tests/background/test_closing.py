"""`close` comes while another thread is in the middle of a save: that is told of, and nothing waits for ever."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.background.saves import (
    DEADLINE_S,
    OPTIONS,
    Gate,
    GatedAdapter,
    GatedArray,
    in_thread,
    numbers,
    queued,
    restore,
    state,
    until,
    worker_pid,
)
from tierkeep.errors import ClosedError, SaveCancelledError
from tierkeep.format.part import PART
from tierkeep.item import ItemSaver
from tierkeep.memory.client import Client, client
from tierkeep.options import MemoryOptions
from tierkeep.save.background import BackgroundSaves
from tierkeep.save.commit import part_name
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tierkeep.checkpointer import Checkpointer

SAVE_ID = "0" * 32


@pytest.fixture
def saver(memory: Path) -> Iterator[ItemSaver]:
    """One of items, that leaves nothing."""
    made = ItemSaver(NumpyAdapter(), OPTIONS, MemoryOptions(directory=str(memory), nice=0))
    yield made
    made.close()
    assert client().worker_pid is None
    assert not list(memory.iterdir())


@pytest.fixture
def item(tmp_path: Path) -> Path:
    path = tmp_path / "item"
    path.mkdir()
    return path


@pytest.fixture(params=["_seal", "_tell"])
def gate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """What is to be sealed, or is and the worker is to be told of, has to pass it."""
    gate = Gate()
    real = getattr(BackgroundSaves, request.param)

    def gated(*args: Any) -> None:
        gate.passed()
        real(*args)

    monkeypatch.setattr(BackgroundSaves, request.param, gated)
    return gate


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of messages that the worker was sent, in order."""
    kinds: list[str] = []
    real = Client.send

    def send(self: Client, *message: Any, **memory: Any) -> None:
        kinds.append(message[0])
        real(self, *message, **memory)

    monkeypatch.setattr(Client, "send", send)
    return kinds


def test_an_item_that_is_being_sealed_when_its_saver_is_closed_is_written_and_the_worker_told_of_the_end_last(
    saver: ItemSaver, item: Path, gate: Gate, said: list[str]
) -> None:
    staged = saver.stage(state(1), name="item")
    with in_thread(lambda: staged.write(item, SAVE_ID)) as written:
        gate.entered()
        with in_thread(saver.close) as closed:
            until(lambda: saver._background._changed._waiters)  # type: ignore[attr-defined]
            gate.stay_open()
            closed()
        written()
    assert said[-2:] == ["sealed", "close"]
    assert (item / part_name(0) / PART).exists()


def test_an_item_that_is_written_after_its_saver_was_closed_is_told_so(saver: ItemSaver, item: Path) -> None:
    staged = saver.stage(state(1), name="item")
    saver.close()
    with pytest.raises(ClosedError, match="closed"):
        staged.write(item, SAVE_ID)
    with pytest.raises(SaveCancelledError):
        staged.handle.result(DEADLINE_S)
    staged.abandon()
    assert not list(item.iterdir())


def test_a_save_that_is_being_sealed_when_its_checkpointer_is_closed_is_a_step_and_the_worker_told_of_the_end_last(
    opened: Callable[..., Checkpointer], gate: Gate, said: list[str]
) -> None:
    steps = opened()
    with in_thread(lambda: steps.save(1, state(1))) as saved:
        gate.entered()
        with in_thread(steps.close) as closed:
            until(lambda: queued(steps))
            gate.stay_open()
            closed()
        handle = saved()
    assert said[-2:] == ["sealed", "close"]
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert numbers(restore(opened(asynchronous=False))) == {1}


@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_a_save_whose_state_is_being_copied_when_its_checkpointer_is_closed_is_a_step(
    snapshot: Any, opened: Callable[..., Checkpointer]
) -> None:
    steps = opened(adapter=GatedAdapter())
    gate = Gate()
    with in_thread(lambda: steps.save(1, {"x": GatedArray(state(1)["big"], gate)}, snapshot=snapshot)) as saved:
        gate.entered()
        with in_thread(steps.close) as closed:
            until(lambda: steps._background._closing)
            gate.stay_open()
            closed()
        assert saved().result(DEADLINE_S).outcome == "saved"
    assert opened(asynchronous=False).steps() == [1]


def test_a_save_that_has_just_begun_when_its_checkpointer_is_closed_is_told_so(
    opened: Callable[..., Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = opened()
    steps.save(0, state(0)).result(DEADLINE_S)
    begun, go_on = threading.Event(), threading.Event()
    real = BackgroundSaves._begin

    def begin(*args: Any, **settings: Any) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        real(*args, **settings)

    monkeypatch.setattr(BackgroundSaves, "_begin", begin)
    with in_thread(lambda: steps.save(1, state(1))) as saved:
        assert begun.wait(DEADLINE_S)
        steps.close()
        go_on.set()
        with pytest.raises(ClosedError):
            saved()
    assert opened(asynchronous=False).steps() == [0]


def test_what_the_worker_hears_of_an_arena_that_is_closed_ends_nobody_elses_saves(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    pid = worker_pid()
    for message in (("sealed", "/gone", "0-0", False), ("allocate", "/gone", 1, 1), ("cancel", "/gone", "0")):
        client().send(*message)
    steps.save(1, state(1)).result(DEADLINE_S)
    assert worker_pid() == pid
