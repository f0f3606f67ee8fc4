"""A training process that ends in a given way. `python -m tests.background.ending HOW ROOT MEMORY`.

It says `sealed N` for every state that was staged, and `worker PID`. Steps that 3 does not divide stay in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from tests.background.saves import checkpointer, state
from tierkeep.memory.client import client

__all__ = ["SAVES"]

SAVES = 5


def main(how: str, root: str, memory: str) -> None:
    if how == "daemonic":
        process = multiprocessing.get_context("spawn").Process(target=train, args=("end", root, memory), daemon=True)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    train(how, root, memory)


def train(how: str, root: str, memory: str) -> None:
    steps = checkpointer(Path(root), Path(memory), disk_every=3, keep=2)
    for number in range(1, SAVES + 1):
        handle = steps.save(number, state(number))
        handle.wait_staged()
        print(f"sealed {number}", flush=True)
    print(f"worker {client().worker_pid}", flush=True)
    if how == "deferred":
        steps.save(SAVES + 1, state(SAVES + 1), snapshot="deferred")
    elif how == "close":
        steps.close()
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "exception":
        raise ArithmeticError("training diverged")
    elif how == "with":
        with steps:
            raise ArithmeticError("training diverged")
    elif how == "worker killed":
        pid = client().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    elif how in ("SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, how))


if __name__ == "__main__":
    main(*sys.argv[1:])
