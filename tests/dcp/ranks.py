"""One of the processes that save and load together through DCP. `python -m tests.dcp.ranks ACTION COUNT RANK ROOT`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tierkeep_torch.dcp import AsyncStager, StorageReader, StorageWriter

__all__ = ["whole"]

PLACEMENTS = {"rows": 0, "columns": 1, "uneven": 0, "one": 0, "empty": 1, "copies": None}


def whole() -> dict[str, torch.Tensor]:
    """What all processes together hold."""
    return {
        "rows": torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6),
        "columns": torch.arange(4 * 10, dtype=torch.int32).reshape(4, 10),
        "uneven": torch.arange(3 * 5).reshape(3, 5).to(torch.bfloat16),
        "one": torch.arange(4.0).reshape(1, 4),
        "empty": torch.zeros(3, 0),
        "copies": torch.arange(7).to(torch.float16),
    }


def sharded(count: int, *, turned: bool = False, blank: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (count,))
    found = {}
    for name, tensor in whole().items():
        axis = PLACEMENTS[name]
        if turned and axis is not None:
            axis = 1 - axis
        value = torch.zeros_like(tensor) if blank else tensor
        found[name] = distribute_tensor(value, mesh, [Replicate() if axis is None else Shard(axis)])
    return found


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))


def trained(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        train(model, optimizer, step)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(8, 16, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value = loss.detach()
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def main(action: str, count: int, rank: int, root: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{root}/meet-{action}-{count}", rank=rank, world_size=count)
    if action == "save":
        state = {"model": sharded(count), "plain": torch.arange(5), "step": 7, "mine": {"rank": rank}}
        state_dict_saver.save(state, storage_writer=StorageWriter(root / "tensors"))
        state_dict_saver.save(
            {"mine": torch.full((3,), rank)}, storage_writer=StorageWriter(root / "apart"), use_collectives=False
        )
    elif action == "fail":
        writer = StorageWriter(root / "failed")
        state = {f"rank {rank}": torch.zeros(3, device="meta" if rank else "cpu")}
        with pytest.raises(CheckpointException, match="'rank 1': a meta tensor has no data") as failure:
            state_dict_saver.save(state, storage_writer=writer)
        assert list(failure.value.failures) == [1]
        writer.close()
    elif action == "second-coordinates":
        state_dict_saver.save_state_dict(
            {"model": sharded(count), "plain": torch.arange(5)}, StorageWriter(root / "second"), coordinator_rank=1
        )
    elif action == "load":
        target: dict[str, Any] = {
            "model": sharded(count, turned=True, blank=True), "plain": torch.zeros(5, dtype=torch.int64), "step": 0,
        }  # fmt: skip
        state_dict_loader.load(target, storage_reader=StorageReader(root / "tensors"))
        for name, tensor in whole().items():
            assert torch.equal(target["model"][name].full_tensor(), tensor), name
        assert torch.equal(target["plain"], torch.arange(5))
        assert target["step"] == 7
        if count == 2:
            own = {"mine": {"rank": -1}}
            state_dict_loader.load(own, storage_reader=StorageReader(root / "tensors"))
            assert own == {"mine": {"rank": rank}}
            apart = {"mine": torch.zeros(3, dtype=torch.int64)}
            state_dict_loader.load(apart, storage_reader=StorageReader(root / "apart"))
            assert apart["mine"].tolist() == [rank] * 3
    else:
        mesh = init_device_mesh("cpu", (count,))
        model = model_of()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if action == "fsdp-save":
            optimizer = trained(model, 3)
            weights, moments = get_state_dict(model, optimizer)
            stager = AsyncStager()
            future: Any = state_dict_saver.async_save(
                {"model": weights, "optimizer": moments},
                storage_writer=StorageWriter(root / "fsdp"),
                process_group=dist.new_group(),  # the background's own: the default one is training's
                async_stager=stager,
            )
            loss = train(model, optimizer, 3)  # while it is being saved
            future.result()
            stager.close()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            weights, moments = get_state_dict(model, optimizer)
            state_dict_loader.load(
                {"model": weights, "optimizer": moments}, storage_reader=StorageReader(root / "fsdp")
            )
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            loss = train(model, optimizer, 3)
        if rank == 0:
            (root / f"loss-{action}-{count}").write_text(loss.hex())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
