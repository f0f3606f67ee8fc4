"""Restoring into a target: modules, optimizers and containers, in place; strict, and untouched where it does not fit."""

from __future__ import annotations

import collections
import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tierkeep_torch as tk
from tests.torch.compare import assert_same, snapshot
from tierkeep.errors import MismatchError

if TYPE_CHECKING:
    from pathlib import Path

Module = torch.nn.Module


class Tied(Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.emb(x))


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: torch.optim.SGD(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}
SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "Plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "Lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3)],
        milestones=[2],
    ),
}


def make(optimizer: str, scheduler: str | None, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    made = {"model": model, "opt": OPTIMIZERS[optimizer](list(model.parameters())), "step": 0, "log": []}
    if scheduler is not None:
        made["sched"] = SCHEDULERS[scheduler](made["opt"])
    return made


def train(run: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(run["step"]))

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            run["opt"].zero_grad()
            loss: torch.Tensor = (run["model"](x) - x.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            return loss

        loss = float(run["opt"].step(closure).detach())
        if "sched" in run:
            run["sched"].step(*([loss] if "Plateau" in type(run["sched"]).__name__ else []))
        run["step"] += 1
        run["log"].append(loss)
        losses.append(loss)
    return losses


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, None) for name in OPTIMIZERS] + [("SGD", name) for name in SCHEDULERS],
    ids=str,
)
def test_training_goes_on_bit_for_bit_from_a_restore(optimizer: str, scheduler: str | None, tmp_path: Path) -> None:
    run = make(optimizer, scheduler, seed=0)
    train(run, 3)
    tk.save(run, tmp_path / "c")
    expected = train(run, 3)
    again = make(optimizer, scheduler, seed=1)
    own = {key: again[key] for key in ("model", "opt", "log")}
    places = {name: p.data_ptr() for name, p in again["model"].named_parameters()}
    assert tk.load(tmp_path / "c", again) is again
    assert all(again[key] is value for key, value in own.items())
    assert {name: p.data_ptr() for name, p in again["model"].named_parameters()} == places
    assert again["step"] == 3
    assert train(again, 3) == expected
    assert_same(dict(again["model"].state_dict()), dict(run["model"].state_dict()))
    assert_same(snapshot(again["opt"].state_dict()), snapshot(run["opt"].state_dict()))


def test_state_dicts_work_as_torch_save_users_write_them(tmp_path: Path) -> None:
    run = make("Adam", None, 0)
    train(run, 2)
    tk.save({"model": run["model"].state_dict(), "opt": run["opt"].state_dict(), "epoch": 20}, tmp_path / "c")
    found = tk.load(tmp_path / "c")
    assert type(found["model"]) is collections.OrderedDict
    fresh = make("Adam", None, 1)
    fresh["model"].load_state_dict(found["model"])
    fresh["opt"].load_state_dict(found["opt"])
    assert found["epoch"] == 20
    fresh["step"] = run["step"]
    assert train(fresh, 2) == train(run, 2)
    module = make("Adam", None, 2)["model"]  # a saved state dict fits the module itself too
    tk.load(tmp_path / "c", {"model": module}, unexpected="ignore")
    assert_same(dict(module.state_dict()), dict(found["model"]))


# tied-weights-restore-missing
@pytest.mark.parametrize("saved_tied", [True, False])
def test_tied_modules_restore_strictly(saved_tied: bool, tmp_path: Path) -> None:
    saved = Tied(saved_tied)
    report = tk.save(saved, tmp_path / "c")
    assert report.nbytes == (80 if saved_tied else 160)
    untied = Tied(tied=False)
    tk.load(tmp_path / "c", untied)
    assert_same(dict(untied.state_dict()), dict(saved.state_dict()))
    if saved_tied:
        tied = Tied()
        tk.load(tmp_path / "c", tied)
        assert tied.head.weight is tied.emb.weight
        assert torch.equal(tied.head.weight, saved.head.weight)


class Extra(Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("fresh", "saved"),
    [
        (None, 5),
        (torch.zeros(0), torch.ones(3)),
        ({}, {"x": torch.ones(2), "n": 1}),
        ("a", [1, 2]),
        ({"old": 1}, {"new": (None, torch.ones(1))}),
        (torch.ones(2), None),
    ],
    ids=str,
)
def test_extra_state_comes_back_whatever_the_module_held(fresh: Any, saved: Any, tmp_path: Path) -> None:
    tk.save({"m": torch.nn.Sequential(Extra(saved), Extra(7))}, tmp_path / "c")
    module: Any = torch.nn.Sequential(Extra(fresh), Extra(0))
    with torch.no_grad():
        module[0].w.zero_()
    tk.load(tmp_path / "c", {"m": module})
    assert_same(module[0].extra, saved)
    assert module[1].extra == 7
    assert module[0].w.all()


def test_hooks_of_a_module_see_its_state(tmp_path: Path) -> None:
    def renaming() -> Any:
        module = torch.nn.Linear(2, 2)

        def outgoing(module: Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
            state[prefix + "renamed"] = state.pop(prefix + "weight")

        def incoming(state: dict[str, Any], prefix: str, *rest: Any) -> None:
            state[prefix + "weight"] = state.pop(prefix + "renamed")

        module._register_state_dict_hook(outgoing)
        module._register_load_state_dict_pre_hook(incoming)
        return torch.nn.Sequential(module)

    saved, fresh = renaming(), renaming()
    tk.save(saved, tmp_path / "c")
    assert "0.renamed" in tk.load(tmp_path / "c")
    tk.load(tmp_path / "c", fresh)
    assert torch.equal(fresh[0].weight, saved[0].weight)


def test_a_module_that_defines_its_own_state_takes_it_back(tmp_path: Path) -> None:
    class Own(torch.nn.Linear):
        epoch = 0

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().state_dict(*args, **kwargs) | {"epoch": self.epoch}

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            self.epoch = state.pop("epoch")
            return super().load_state_dict(state, *args, **kwargs)

    saved, fresh = Own(2, 2), Own(2, 2)
    saved.epoch = 9
    tk.save({"m": saved}, tmp_path / "c")
    tk.load(tmp_path / "c", {"m": fresh})
    assert fresh.epoch == 9
    assert torch.equal(fresh.weight, saved.weight)


def test_scaler_and_averaged_model_come_back(tmp_path: Path) -> None:
    def fresh() -> dict[str, Any]:
        model = Net()
        return {
            "scaler": torch.amp.GradScaler("cpu", init_scale=4.0),
            "ema": torch.optim.swa_utils.AveragedModel(model),
        }

    saved, into = fresh(), fresh()
    saved["scaler"].load_state_dict(saved["scaler"].state_dict() | {"scale": 512.0, "_growth_tracker": 3})
    saved["ema"].update_parameters(Net())
    tk.save(saved, tmp_path / "c")
    tk.load(tmp_path / "c", into)
    assert_same(into["scaler"].state_dict(), saved["scaler"].state_dict())
    assert_same(dict(into["ema"].state_dict()), dict(saved["ema"].state_dict()))


# missing-optim-state-becomes-empty-dict
def test_a_parameter_without_optimizer_state_stays_without_it(tmp_path: Path) -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    opt = torch.optim.Adam([used, unused])
    used.sum().backward()
    opt.step()
    tk.save({"opt": opt}, tmp_path / "c")
    fresh = torch.optim.Adam([torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
    tk.load(tmp_path / "c", {"opt": fresh})
    assert list(fresh.state_dict()["state"]) == [0]
    unused.sum().backward()
    opt.step()
    whole = snapshot(opt.state_dict())
    before = copy.deepcopy(whole)
    with pytest.raises(MismatchError) as caught:
        tk.load(tmp_path / "c", {"opt": whole})
    assert set(caught.value.missing) == {"opt.state.1.step", "opt.state.1.exp_avg", "opt.state.1.exp_avg_sq"}
    assert_same(whole, before)


# nontensor-not-updated
def test_plain_values_of_the_target_are_updated_at_every_depth(tmp_path: Path) -> None:
    tk.save({"w": torch.ones(2), "epoch": 20, "name": "new", "nested": {"lr": 0.5, "t": (1, None)}}, tmp_path / "c")
    nested = {"lr": 0.0, "t": (0, None)}
    into = {"w": torch.zeros(2), "epoch": 0, "name": "x", "nested": nested}
    assert tk.load(tmp_path / "c", into) is into
    assert_same(into, {"w": torch.ones(2), "epoch": 20, "name": "new", "nested": {"lr": 0.5, "t": (1, None)}})
    assert into["nested"] is nested


def test_a_plain_value_may_change_its_type_and_none_may_become_a_value(tmp_path: Path) -> None:
    tk.save({"best": 0.5, "tag": None, "n": 2**70, "s": "text"}, tmp_path / "c")
    into = {"best": None, "tag": "x", "n": 1, "s": 0}
    tk.load(tmp_path / "c", into)
    assert into == {"best": 0.5, "tag": None, "n": 2**70, "s": "text"}


def test_immutable_containers_are_rebuilt_around_the_tensors_they_hold(tmp_path: Path) -> None:
    tk.save({"t": (torch.ones(2), [5, torch.ones(1)])}, tmp_path / "c")
    held, inner = torch.zeros(2), [0, torch.zeros(1)]
    into = {"t": (held, inner)}
    tk.load(tmp_path / "c", into)
    assert into["t"][0] is held
    assert into["t"][1] is inner
    assert held.all()
    assert inner[0] == 5
    made = tk.load(tmp_path / "c", keys=["t.0"])
    assert_same(made, {"t": {0: torch.ones(2)}})
    top = (torch.zeros(2), [0, torch.zeros(1)])
    tk.save(into["t"], tmp_path / "d")
    assert tk.load(tmp_path / "d", top)[0] is top[0]
    assert top[0].all()


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_mutable_sequences_keep_their_identity(kind: Any, tmp_path: Path) -> None:
    tk.save({"plain": kind([1, 2]), "tensors": kind([torch.ones(1), 3])}, tmp_path / "c")
    into = {"plain": kind([9, 9, 9]), "tensors": kind([torch.zeros(1), 0])}
    own = dict(into)
    tk.load(tmp_path / "c", into)
    assert into["plain"] is own["plain"]
    assert into["tensors"] is own["tensors"]
    assert_same(into, {"plain": kind([1, 2]), "tensors": kind([torch.ones(1), 3])})


# Strictness


def mismatched() -> tuple[dict[str, Any], dict[str, Any]]:
    saved = {
        "fine": torch.ones(2),
        "model": torch.nn.Linear(2, 2).state_dict(),
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.float64),
        "only_saved": {"x": torch.ones(1), "y": "text"},
        "kind": torch.ones(1),
        "list": [torch.ones(1), torch.ones(1)],
        "epoch": 5,
        "array": np.ones(2),
    }
    target = {
        "fine": torch.zeros(2),
        "model": torch.nn.Linear(2, 3),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(2),
        "only_target": [torch.zeros(1)],
        "kind": {"x": 1},
        "list": [torch.zeros(1)],
        "epoch": 0,
        "array": np.zeros(3),
    }
    return saved, target


def test_one_error_lists_every_difference_and_nothing_is_touched(tmp_path: Path) -> None:
    saved, target = mismatched()
    tk.save(saved, tmp_path / "c")
    before = snapshot(target)
    with pytest.raises(MismatchError) as caught:
        tk.load(tmp_path / "c", target)
    error = caught.value
    names = {kind: sorted(n.split(":")[0] for n in getattr(error, kind)) for kind in ("shape", "dtype", "structure")}
    assert names == {
        "shape": ["array", "model.bias", "model.weight", "shape"],
        "dtype": ["dtype"],
        "structure": ["kind"],
    }
    assert sorted(error.missing) == ["only_target.0"]
    assert sorted(error.unexpected) == ["list.1", "only_saved.x", "only_saved.y"]
    for name in ("array", "model.bias", "dtype", "kind", "only_target.0", "list.1", "only_saved.y"):
        assert name in str(error)
    assert_same(snapshot(target), before)


def test_a_dry_run_tells_the_same_and_touches_nothing(tmp_path: Path) -> None:
    saved, target = mismatched()
    tk.save(saved, tmp_path / "c")
    before = snapshot(target)
    plan = tk.load(tmp_path / "c", target, dry_run=True)
    assert len(plan.shape) == 4
    assert len(plan.casts) == len(plan.structure) == len(plan.missing) == 1
    assert len(plan.unexpected) == 3
    assert set(plan.names) >= {"fine", "list.0"}
    assert_same(snapshot(target), before)


def test_each_relaxation_lets_its_own_difference_pass_and_no_other(tmp_path: Path) -> None:
    tk.save(
        {"a": torch.ones(2), "s": torch.ones(3), "d": torch.ones(2), "extra": torch.ones(1), "n": 3}, tmp_path / "c"
    )
    relaxations: dict[str, Any] = {"missing": "keep", "unexpected": "ignore", "shape": "keep", "dtype": "cast"}

    def target() -> dict[str, Any]:
        return {
            "a": torch.zeros(2),
            "s": torch.full((4,), 7.0),
            "d": torch.zeros(2, dtype=torch.float16),
            "mine": torch.full((2,), 8.0),
            "n": 0,
        }

    for name in relaxations:
        into = target()
        before = snapshot(into)
        with pytest.raises(MismatchError) as caught:
            tk.load(tmp_path / "c", into, **{k: v for k, v in relaxations.items() if k != name})
        told = {k: bool(getattr(caught.value, k)) for k in relaxations}
        assert told == {k: k == name for k in relaxations}
        assert_same(snapshot(into), before)
    into = target()
    tk.load(tmp_path / "c", into, **relaxations)
    # skipped-leaf-uninitialised: what is skipped keeps the caller's values
    expected = target() | {"a": torch.ones(2), "d": torch.ones(2, dtype=torch.float16), "n": 3}
    assert_same(into, expected)


# skipped-leaf-uninitialised
def test_a_module_keeps_its_own_values_where_shapes_differ(tmp_path: Path) -> None:
    tk.save(torch.nn.Linear(2, 2), tmp_path / "c")
    module = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(module.weight, 1.25)
    torch.nn.init.constant_(module.bias, 2.5)
    tk.load(tmp_path / "c", module, shape="keep")
    assert (module.weight == 1.25).all()
    assert (module.bias == 2.5).all()


def test_a_readonly_array_is_told_before_anything_is_touched(tmp_path: Path) -> None:
    tk.save({"a": torch.ones(1), "n": np.ones(2)}, tmp_path / "c")
    locked = np.zeros(2)
    locked.flags.writeable = False
    into: dict[str, Any] = {"a": torch.zeros(1), "n": locked}
    with pytest.raises(MismatchError, match=r"n: .*not writable"):
        tk.load(tmp_path / "c", into)
    assert not into["a"].any()


# tied-weights-restore-missing
def test_two_saved_tensors_do_not_fit_one_tensor_of_the_target(tmp_path: Path) -> None:
    tk.save({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "c")
    one = torch.full((3,), 7.0)
    with pytest.raises(MismatchError, match="b: one memory with a"):
        tk.load(tmp_path / "c", {"a": one, "b": one})
    assert (one == 7).all()


def test_an_optimizer_of_other_groups_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    saved = torch.nn.Linear(3, 2)
    tk.save({"m": saved, "o": torch.optim.SGD(saved.parameters(), 0.1)}, tmp_path / "c")
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, 0.1)
    with pytest.raises(MismatchError, match=r"o: parameter groups of \[2\].*of \[1, 1\]"):
        tk.load(tmp_path / "c", {"m": model, "o": optimizer})
    assert torch.equal(model.weight, before)


def test_a_parameter_tied_to_a_plain_tensor_comes_back_as_a_parameter_on_the_same_memory(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0))
    tk.save({"data": weight.data, "weight": weight, "again": weight}, tmp_path / "c")
    found = tk.load(tmp_path / "c")
    assert type(found["data"]) is torch.Tensor
    assert type(found["weight"]) is torch.nn.Parameter
    assert found["again"] is found["weight"]
    assert found["weight"].data_ptr() == found["data"].data_ptr()
    assert torch.equal(found["weight"].detach(), weight.detach())
