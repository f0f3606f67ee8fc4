"""Restoring a part of a checkpoint, by patterns of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkeep_torch as tk
from tests.torch.compare import assert_same
from tierkeep.errors import InvalidStateError
from tierkeep.options import SaveOptions

if TYPE_CHECKING:
    from pathlib import Path

STATE: dict[str, Any] = {
    "model": {"a": torch.arange(4.0), "ab": torch.ones(2), "deep": {"w": torch.ones(3), "n": 1}},
    "opt": [torch.full((2,), 2.0), {"lr": 0.5}],
    "log": [1, 2, 3],
    "epoch": 3,
    "a[0]": "odd",
    "none": None,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tk.save(STATE, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["model.*"], {"model": STATE["model"]}),
        (["model"], {"model": STATE["model"]}),
        ("epoch", {"epoch": 3}),
        (["model.a"], {"model": {"a": STATE["model"]["a"]}}),
        (["*.w"], {"model": {"deep": {"w": torch.ones(3)}}}),
        (["model.a?", "epoch"], {"model": {"ab": torch.ones(2)}, "epoch": 3}),
        (["opt.1"], {"opt": {1: {"lr": 0.5}}}),
        (["a[0]"], {"a[0]": "odd"}),
        (["none"], {"none": None}),
        (["*"], STATE),
    ],
    ids=str,
)
def test_a_pattern_selects_leaves_and_what_lies_below_a_name(keys: Any, expected: Any, saved: Path) -> None:
    assert_same(tk.load(saved, keys=keys), expected)
    plan = tk.load(saved, keys=keys, dry_run=True)
    assert plan.nbytes <= tk.load(saved, dry_run=True).nbytes


@pytest.mark.parametrize("keys", [["nothing.*"], ["model.*", "Model.*"], [], "", ["model.a.b"], ["mode"]], ids=str)
def test_a_pattern_that_matches_nothing_is_an_error(keys: Any, saved: Path) -> None:
    into = {"model": {"a": torch.zeros(4)}}
    with pytest.raises(InvalidStateError) as caught:
        tk.load(saved, into, keys=keys)
    assert "Nothing was read" in str(caught.value)
    assert not into["model"]["a"].any()


def test_only_what_is_selected_changes_in_the_target(saved: Path) -> None:
    into = {
        "model": {"a": torch.zeros(4), "ab": torch.zeros(2), "deep": {"w": torch.zeros(3), "n": 0}},
        "opt": [torch.zeros(2), {"lr": 0.0}],
        "log": [7, 8],
        "epoch": 0,
        "mine": "own",
    }
    tk.load(saved, into, keys=["model.deep.*", "opt.0"])
    assert into["model"]["deep"]["n"] == 1  # type: ignore[index]
    assert into["model"]["deep"]["w"].all()  # type: ignore[index]
    assert into["opt"][0].all()  # type: ignore[index]
    assert not into["model"]["a"].any()  # type: ignore[index]
    assert (into["opt"][1], into["log"], into["epoch"], into["mine"]) == ({"lr": 0.0}, [7, 8], 0, "own")  # type: ignore[index]
    tk.load(saved, into, keys=["log"])
    assert into["log"] == [1, 2, 3]


def test_a_selection_restores_one_module_of_a_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    tk.save({"model": model, "opt": torch.optim.Adam(model.parameters())}, tmp_path / "c")
    fresh = torch.nn.Linear(3, 2)
    tk.load(tmp_path / "c", {"model": fresh}, keys=["model"])
    assert torch.equal(fresh.weight, model.weight)
    bias = torch.nn.Linear(3, 2)
    own = bias.weight.detach().clone()
    tk.load(tmp_path / "c", {"model": bias}, keys=["model.bias"])
    assert torch.equal(bias.bias, model.bias)
    assert torch.equal(bias.weight, own)


def test_a_part_costs_only_its_own_reads(tmp_path: Path) -> None:
    state = {f"k{n}": torch.randn(100_000) for n in range(20)}
    tk.save(state, tmp_path / "c", options=SaveOptions(chunk_nbytes=100_000))
    plan = tk.load(tmp_path / "c", keys=["k7"], dry_run=True)
    assert plan.names == ("k7",)
    assert 400_000 <= plan.nbytes < 480_000
    assert_same(tk.load(tmp_path / "c", keys=["k7"]), {"k7": state["k7"]})


def test_part_of_a_named_tuple_or_sparse_tensor_comes_back_as_a_dict_of_its_parts(tmp_path: Path) -> None:
    tk.save({"size": torch.Size([2, 3]), "s": torch.eye(2).to_sparse()}, tmp_path / "c")
    found = tk.load(tmp_path / "c", keys=["s.values", "size.1"])
    assert_same(found, {"size": {1: 3}, "s": {"values": torch.ones(2)}})
