"""One of the processes that save a checkpoint together with stock torch.distributed.checkpoint: run by test_dcp.

python -m tests.strangers.two_ranks COUNT RANK ROOT
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

__all__ = ["whole"]

PLACEMENTS = {
    "rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "one": Shard(0), "empty": Shard(1), "copies": Replicate()
}  # fmt: skip


def whole() -> dict[str, Any]:
    """What all processes together hold."""
    return {
        "model": {
            "rows": torch.arange(8 * 6, dtype=torch.float32).reshape(8, 6),
            "columns": torch.arange(4 * 10, dtype=torch.int32).reshape(4, 10),
            "uneven": torch.arange(3 * 5).reshape(3, 5).to(torch.bfloat16),
            "one": torch.arange(4.0).reshape(1, 4),
            "empty": torch.zeros(3, 0),
            "copies": torch.arange(7).to(torch.float16),
        },
        "plain": torch.arange(5),
        "step": 7,
    }


def main(count: int, rank: int, root: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    state = whole()
    state["model"] = {
        name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) for name, tensor in state["model"].items()
    }
    save(state, storage_writer=FileSystemWriter(root / "together", thread_count=2))
    save(state, storage_writer=FileSystemWriter(root / "apart"), use_collectives=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
