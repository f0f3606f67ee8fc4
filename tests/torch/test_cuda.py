"""State on a CUDA device: through pinned images on a side stream, and back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkeep_torch as tk
from tierkeep.errors import ChangedLeafError
from tierkeep.options import MemoryOptions

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MANY = 4 << 20  # elements: some chunks of 16 MiB


def state(value: float) -> dict[str, Any]:
    return {
        "big": torch.full((MANY,), value, device="cuda"),
        "view": torch.full((512, 1024), value, device="cuda").t()[::2],
        "half": torch.full((1000,), value, device="cuda", dtype=torch.bfloat16),
        "small": torch.full((), value, device="cuda", dtype=torch.float64),
        "host": torch.full((777,), value),
        "step": int(value),
    }


def same(found: dict[str, Any], value: float) -> bool:
    wanted = state(value)
    return all(
        torch.equal(found[key].cpu(), wanted[key].cpu())
        if isinstance(wanted[key], torch.Tensor)
        else found[key] == wanted[key]
        for key in wanted
    )


def test_a_state_on_the_device_comes_back_to_the_host_and_into_the_device(tmp_path: Path) -> None:
    tk.save(state(3), tmp_path / "one")
    assert same(tk.load(tmp_path / "one"), 3)
    target = state(0)
    tk.load(tmp_path / "one", into=target)
    assert target["big"].is_cuda
    assert same(target, 3)
    assert tk.load(tmp_path / "one", device="cuda")["half"].is_cuda


def test_images_are_pinned_once_and_let_go_of(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")  # CUDA is up
    checkpointer = tk.Checkpointer(tmp_path)
    for step in range(4):
        checkpointer.save(step, state(step)).result()
    images = list(checkpointer._background._images.values())
    assert 1 <= len(images) <= 2
    assert all(image.pinned is not None and torch.from_numpy(image.array).is_pinned() for image in images)
    checkpointer.close()
    assert same(tk.load(tmp_path / "3"), 3)


def test_what_is_changed_right_after_a_save_returns_is_not_in_it(tmp_path: Path) -> None:
    live = state(0)
    tensors = [live[key] for key in ("big", "view", "half", "small")]
    with tk.Checkpointer(tmp_path, memory=MemoryOptions(in_flight=2)) as checkpointer:
        checkpointer.prepare(live)
        for step in range(20):
            for tensor in (*tensors, live["host"]):
                tensor.fill_(step)
            live["step"] = step
            checkpointer.save(step, live)  # the fills above may still be under way on the device
    for step in range(20):
        assert same(tk.load(tmp_path / str(step)), step), step


def test_a_deferred_save_is_copied_while_the_device_computes_and_before_the_optimizer_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(2048, 2048, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = []
    with tk.Checkpointer(tmp_path) as checkpointer:
        checkpointer.attach(optimizer)
        checkpointer.prepare({"model": model})
        for step in range(10):
            saved.append({name: value.clone() for name, value in model.state_dict().items()})
            checkpointer.save(step, {"model": model}, snapshot="deferred")
            model(torch.randn(512, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for step, wanted in enumerate(saved):
        found = tk.load(tmp_path / str(step))["model"]
        assert all(torch.equal(found[name], wanted[name].cpu()) for name in wanted), step


def test_a_tensor_that_changes_under_a_deferred_save_is_named(tmp_path: Path) -> None:
    live = state(1)
    with tk.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, live).result()
        handle = checkpointer.save(2, live, snapshot="deferred")
        live["big"].add_(1)
        with contextlib.suppress(ChangedLeafError):
            handle.result()
        if handle.error is not None:
            assert "'big'" in str(handle.error)
            assert checkpointer.steps() == [1]
        else:  # the copy was faster
            assert same(checkpointer.restore(2), 1)
