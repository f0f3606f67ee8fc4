"""Training that hardly stops for its checkpoints: every step is kept in memory, every fifth on the disk.

`save(..., snapshot="deferred")` returns at once. The state is copied while the next forward and backward run, and
`attach` has the optimizer wait for the copy before it changes anything.

    python examples/deferred.py --root run                   # again: it goes on where it ended
    python examples/deferred.py --root run --die-after 17    # killed when only memory has step 17; run it again
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tierkeep_torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

DISK_EVERY = 5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Training with deferred snapshots, a checkpoint every step.")
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints go and are resumed from")
    parser.add_argument("--steps", type=int, default=12, help="how many steps this run trains (default: 12)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--die-after", type=int, help="the step after whose save the process kills itself")
    arguments = parser.parse_args(argv)
    train(arguments.root, arguments.steps, arguments.width, arguments.die_after)
    print(f"on the disk: steps {', '.join(map(str, _on_disk(arguments.root)))}")
    return 0


def train(root: Path, steps: int, width: int, die_after: int | None) -> None:
    """Train `steps` more steps, from the newest one there is, in memory or on the disk."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.ReLU(), torch.nn.Linear(4 * width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    with Checkpointer(root, keep=2, disk_every=DISK_EVERY) as checkpointer:
        checkpointer.attach(optimizer)
        if checkpointer.latest_step() is not None:
            checkpointer.restore(into=state)
            print(f"resumed from step {state['step']}", flush=True)
        begin = state["step"] + 1
        in_save_s = []
        for step in range(begin, begin + steps):
            model(torch.randn(64, width)).square().mean().backward()  # the last step is being copied meanwhile
            optimizer.step()  # waits until it is
            optimizer.zero_grad()
            began = time.perf_counter()
            checkpointer.save(step, state | {"step": step}, snapshot="deferred")
            in_save_s.append(time.perf_counter() - began)
            if step == die_after:
                checkpointer.wait_staged()  # what is not copied yet is lost with the process
                os.kill(os.getpid(), signal.SIGKILL)
    if in_save_s:
        print(
            f"trained steps {begin} to {step}; a save took {statistics.median(in_save_s) * 1e3:.1f} ms of them (median)"
        )


def _on_disk(root: Path) -> list[int]:
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())


if __name__ == "__main__":
    sys.exit(main())
