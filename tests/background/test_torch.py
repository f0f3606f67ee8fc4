"""PyTorch training that is saved in the background: its parameters change in place, at once and all the time."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tierkeep_torch as tk
from tests.background.saves import DEADLINE_S, OPTIONS, Gate, gate_copies, in_thread, queued, until
from tierkeep.errors import ChangedLeafError
from tierkeep.options import MemoryOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE = 160  # several batches


@pytest.fixture
def steps(root: Path, memory: Path) -> Iterator[tk.Checkpointer]:
    options = MemoryOptions(directory=str(memory), in_flight=2, nice=0)
    checkpointer = tk.Checkpointer(root, options=OPTIONS, memory=options)
    yield checkpointer
    checkpointer.close()
    assert not list(memory.iterdir())


class Training:
    """A model whose every parameter is minus the number of steps that it was trained for."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, 3))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def values(found: Any) -> set[float]:
    return set().union(*(tensor.unique().tolist() for tensor in found["model"].values()))


# async-snapshot-not-taken-cpu
@pytest.mark.parametrize("saves", [40, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_no_step_is_torn_by_an_optimizer_that_goes_on_at_once(
    saves: int, snapshot: Any, steps: tk.Checkpointer
) -> None:
    training = Training()
    if snapshot == "deferred":
        steps.attach(training.optimizer)
    for number in range(saves):
        steps.save(number, training.state(), snapshot=snapshot)
        training.step()
    steps.wait(DEADLINE_S)
    torn = [number for number in range(saves) if values(steps.restore(number)) != {float(-number)}]
    assert not torn


def test_a_tensor_that_is_filled_as_soon_as_save_returns_is_saved_as_it_was(steps: tk.Checkpointer) -> None:
    held: dict[str, Any] = {
        "contiguous": torch.arange(4096.0),
        "transposed": torch.arange(4096.0).reshape(64, 64).t(),
        "half": torch.arange(100).to(torch.bfloat16),
        "numpy": np.arange(4096),
    }
    expected = {name: value.tolist() for name, value in held.items()}
    handle = steps.save(1, held)
    for value in held.values():
        value[...] = 999
    handle.result(DEADLINE_S)
    assert {name: value.tolist() for name, value in steps.restore(1).items()} == expected


def test_an_optimizer_that_is_attached_waits_for_the_copy(
    steps: tk.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    gate_copies(monkeypatch, gate)
    training = Training()
    steps.attach(training.optimizer)
    handle = steps.save(1, training.state(), snapshot="deferred")
    gate.entered()
    with in_thread(training.step) as stepped:
        until(lambda: queued(steps))
        assert values(training.state()) == {0.0}, "it did not wait"
        gate.open()
        assert values(training.state()) == {0.0}
        assert handle.report is None
        gate.stay_open()
        stepped()
    assert handle.staged.done
    assert values(training.state()) == {-1.0}
    assert handle.result(DEADLINE_S).outcome == "saved"
    assert values(steps.restore(1)) == {0.0}


def test_every_optimizer_that_is_attached_waits(steps: tk.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate_copies(monkeypatch, gate)
    one, other = Training(), Training()
    steps.attach(one.optimizer)
    steps.attach(other.optimizer)
    handle = steps.save(1, {"one": one.state(), "other": other.state()}, snapshot="deferred")
    gate.entered()
    with in_thread(other.step) as stepped:
        until(lambda: queued(steps))
        gate.stay_open()
        stepped()
    handle.result(DEADLINE_S)
    assert values(steps.restore(1)["other"]) == {0.0}


CHANGES: dict[str, Callable[[Any], object]] = {
    "an optimizer that is not attached": Training.step,
    "an operation in place": lambda training: training.model[1].weight.add_(1),
    "a part": lambda training: training.model[1].weight[0, 0].fill_(3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", ["save", "wait", "handle", "close"])
@pytest.mark.parametrize("copied", [0, 1])
def test_a_tensor_that_is_changed_before_it_is_copied_is_found_out_and_nothing_is_saved(
    change: str, call: str, copied: int, steps: tk.Checkpointer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    steps.save(0, training.state()).result(DEADLINE_S)
    gate = Gate()
    gate_copies(monkeypatch, gate)
    handle = steps.save(1, training.state(), snapshot="deferred")
    for _ in range(copied):
        gate.open()
    until(lambda: gate.copies == copied)
    with torch.no_grad():
        CHANGES[change](training)
    gate.stay_open()
    until(lambda: handle.done)
    with pytest.raises(ChangedLeafError, match=r"'model\.1\.weight' was changed in place") as raised:
        {
            "save": lambda: steps.save(2, training.state()),
            "wait": lambda: steps.wait(DEADLINE_S),
            "handle": lambda: handle.wait_committed(DEADLINE_S),
            "close": steps.close,
        }[call]()
    assert raised.value.step == 1
    if call != "close":
        steps.wait(DEADLINE_S)
        assert steps.steps() == [0]
        assert values(steps.restore()) == {0.0}
        assert steps.save(1, training.state()).result(DEADLINE_S).outcome == "saved"
    assert not list(root.glob("1.*"))


def test_the_hooks_are_gone_when_the_checkpointer_is_closed(root: Path, memory: Path) -> None:
    training = Training()
    checkpointer = tk.Checkpointer(root, options=OPTIONS, memory=MemoryOptions(directory=str(memory), nice=0))
    before = len(training.optimizer._optimizer_step_pre_hooks)
    checkpointer.attach(training.optimizer)
    assert len(training.optimizer._optimizer_step_pre_hooks) == before + 1
    checkpointer.save(1, training.state(), snapshot="deferred")
    checkpointer.close()
    assert len(training.optimizer._optimizer_step_pre_hooks) == before
    alive = weakref.ref(checkpointer)
    del checkpointer
    gc.collect()
    assert alive() is None, "the optimizer still knows it"
    training.step()


# source-kept-alive-after-write
@pytest.mark.parametrize("snapshot", ["copy", "deferred"])
def test_no_tensor_is_held_once_its_save_has_ended(snapshot: Any, steps: tk.Checkpointer) -> None:
    gc.collect()
    gc.disable()
    try:
        for number in range(5):
            tensor = torch.arange(8192.0) + number
            alive = weakref.ref(tensor.untyped_storage())
            watched = weakref.ref(tensor)
            steps.save(number, {"x": tensor, "view": tensor[1:]}, snapshot=snapshot).result(DEADLINE_S)
            steps.wait(DEADLINE_S)
            del tensor
            assert watched() is None
            assert alive() is None
    finally:
        gc.enable()


def test_parameters_are_restored_into_a_model_that_goes_on(steps: tk.Checkpointer) -> None:
    training = Training()
    for number in range(3):
        steps.save(number, training.state(), to_disk=number == 0)
        training.step()
    other = Training()
    steps.restore(2, into=other.state())
    assert values(other.state()) == {-2.0}
