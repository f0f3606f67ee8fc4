"""Several processes save and load together through DCP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tierkeep_torch
from tests.dcp.ranks import whole

pytestmark = pytest.mark.multiprocess
REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 120


def together(action: str, count: int, root: Path) -> None:
    """Runs an action on `count` ranks; all end well before the deadline."""
    command = [sys.executable, "-m", "tests.dcp.ranks", action, str(count)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(root)], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    try:
        told = [rank.communicate(timeout=DEADLINE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(told)


def test_what_two_ranks_save_any_number_of_ranks_loads_in_any_sharding(tmp_path: Path) -> None:
    together("save", 2, tmp_path)
    together("load", 2, tmp_path)
    together("load", 1, tmp_path)
    found = tierkeep_torch.load(tmp_path / "tensors")
    for name, tensor in whole().items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["step"] == 7
    assert found["mine"] == {"rank": [0, 1]}  # each rank's own, which DCP mixes up
    assert len(tierkeep_torch.verify(tmp_path / "tensors").path) > 0
    assert sorted(path.name for path in tmp_path.iterdir() if "tierkeep" in path.name) == []


def test_a_rank_that_fails_is_told_to_all_and_nothing_is_left(tmp_path: Path) -> None:
    together("fail", 2, tmp_path)
    assert list(tmp_path.glob("failed*")) == []


def test_another_rank_than_the_first_may_coordinate(tmp_path: Path) -> None:
    together("second-coordinates", 2, tmp_path)
    found = tierkeep_torch.load(tmp_path / "second")
    for name, tensor in whole().items():
        assert torch.equal(found["model"][name], tensor), name
    assert torch.equal(found["plain"], torch.arange(5))


def test_training_under_fsdp_goes_on_to_the_same_loss_on_another_number_of_ranks(tmp_path: Path) -> None:
    together("fsdp-save", 2, tmp_path)
    together("fsdp-load", 1, tmp_path)
    saved, loaded = (float.fromhex((tmp_path / name).read_text()) for name in ("loss-fsdp-save-2", "loss-fsdp-load-1"))
    assert saved == pytest.approx(loaded, rel=1e-6)  # the sum over two ranks rounds in another order
