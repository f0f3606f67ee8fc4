"""A training process that ends in some way. `python -m tests.background.trainer WAY ROOT MEMORY` says so on stdout."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.background.saves import (
    DEADLINE_S,
    Gate,
    GatedAdapter,
    GatedArray,
    HeldWorker,
    checkpointer,
    kill_worker,
    queued,
    state,
    until,
    worker_pid,
)
from tierkeep.memory.client import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkeep.checkpointer import Checkpointer

__all__ = ["Ended", "run_trainer"]

_REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Ended:
    """How a training process ended, and its workers too by now."""

    status: int
    workers: tuple[int, ...]
    """The processes that saved for it, in order."""
    output: str


def run_trainer(way: str, root: Path, memory: Path) -> Ended:
    """Runs a training process to its end, and waits for that of its workers."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(_REPOSITORY / name) for name in ("core", "torch_adapter", "jax_adapter", "."))
    }
    # Whoever of them lives holds the writing end.
    tether, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.background.trainer", way, str(root), str(memory)],
        cwd=_REPOSITORY,
        env=environment,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    workers: list[int] = []
    output = b""
    try:
        # Workers keep stderr open, so that its end is theirs.
        while chunk := _read(tether):
            output += chunk
        status = process.wait(DEADLINE_S)
    finally:
        for line in output.decode().splitlines():
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if "worker" in said:
                    workers.append(said["worker"])
                if "fork" in said:
                    os.kill(said["fork"], signal.SIGKILL)
        process.kill()
        process.wait()
        os.close(tether)
    for pid in workers:  # its files are closed a moment before it has ended
        with contextlib.suppress(ProcessLookupError):
            ending = os.pidfd_open(pid)
            ready, _, _ = select.select([ending], [], [], DEADLINE_S)
            os.close(ending)
            assert ready
    return Ended(status, tuple(workers), output.decode())


def _read(fd: int) -> bytes:
    ready, _, _ = select.select([fd], [], [], DEADLINE_S)
    assert ready, "neither the training process nor its worker ends"
    return os.read(fd, 1 << 16)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def train(steps: Checkpointer, number: int, **settings: Any) -> None:
    steps.save(number, state(number), **settings)
    say(saved=number)


def committed(steps: Checkpointer) -> None:
    """Steps 0 and 1 on the disk, 2 just sealed."""
    steps.save(0, state(0)).result(DEADLINE_S)
    say(worker=worker_pid())
    train(steps, 1)
    train(steps, 2)


def closed(steps: Checkpointer) -> None:
    committed(steps)
    steps.close()


def killed(steps: Checkpointer) -> None:
    committed(steps)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_with_a_fork_alive(steps: Checkpointer) -> None:
    committed(steps)
    pid = os.fork()
    if not pid:
        os.close(1)
        os.close(2)
        signal.pause()
    say(fork=pid)
    os.kill(os.getpid(), signal.SIGKILL)


def terminated(steps: Checkpointer) -> None:
    committed(steps)
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted(steps: Checkpointer) -> None:
    committed(steps)
    os.kill(os.getpid(), signal.SIGINT)


def exits(steps: Checkpointer) -> None:
    committed(steps)
    sys.exit(3)


def exits_at_once(steps: Checkpointer) -> None:
    committed(steps)
    os._exit(4)


def raises(steps: Checkpointer) -> None:
    committed(steps)
    raise ZeroDivisionError("of training")


def raises_with(steps: Checkpointer) -> None:
    with steps:
        committed(steps)
        raise ZeroDivisionError("of training")


def memory_only(steps: Checkpointer) -> None:
    """The newest step is in memory alone."""
    committed(steps)
    train(steps, 3, to_disk=False)
    steps.wait(DEADLINE_S)


def memory_only_killed(steps: Checkpointer) -> None:
    memory_only(steps)
    os.kill(os.getpid(), signal.SIGKILL)


def worker_killed(steps: Checkpointer) -> None:
    committed(steps)
    kill_worker()
    say(worker=worker_pid())


def worker_killed_at_the_end(steps: Checkpointer) -> None:
    """Nobody has noticed that it is dead when the interpreter ends."""
    committed(steps)
    os.kill(worker_pid(), signal.SIGKILL)


def worker_killed_again_and_again(steps: Checkpointer) -> None:
    committed(steps)
    steps.wait(DEADLINE_S)
    for _ in range(3):
        kill_worker()
    assert client().worker_pid is None


def killed_with_its_worker(steps: Checkpointer) -> None:
    steps.save(0, state(0)).result(DEADLINE_S)
    worker = worker_pid()
    HeldWorker().__enter__()
    train(steps, 1)
    os.kill(worker, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_copying(steps: Checkpointer) -> None:
    """A save is being copied: nothing of it is anywhere."""
    committed(steps)
    steps.wait(DEADLINE_S)
    gate = Gate()
    steps.save(3, {"x": GatedArray(state(3)["big"], gate)}, snapshot="deferred")
    gate.entered()
    os.kill(os.getpid(), signal.SIGKILL)


def deferred(steps: Checkpointer) -> None:
    """The interpreter ends while a deferred save is copied."""
    committed(steps)
    gate = Gate()
    held = state(3)
    steps.save(3, held | {"big": GatedArray(held["big"], gate)}, snapshot="deferred")
    gate.entered()
    atexit.register(gate.stay_open)


def daemonic(steps: Checkpointer) -> None:
    """Training runs in a daemonic process, which may have no children of multiprocessing's kind."""
    child = multiprocessing.get_context("spawn").Process(target=in_child, args=(steps.root, False), daemon=True)
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0


def daemonic_left(steps: Checkpointer) -> None:
    """Its parent ends, and so terminates it."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=in_child, args=(steps.root, theirs), daemon=True)
    child.start()
    assert ours.poll(DEADLINE_S)


def in_child(root: Path, ready: Any) -> None:
    assert multiprocessing.current_process().daemon
    committed(checkpointer(root, Path(sys.argv[-1])))
    if ready:
        ready.send(True)
        signal.pause()


def handled(steps: Checkpointer) -> None:
    """A handler closes the checkpointer in the middle of a save, as many do."""

    def handler(*_: object) -> None:
        steps.close()
        sys.exit(5)

    signal.signal(signal.SIGTERM, handler)
    committed(steps)
    steps.wait()
    with HeldWorker() as held:
        train(steps, 3)
        threading.Thread(target=terminate, args=(steps, held)).start()
        train(steps, 4)  # waits


def terminate(steps: Checkpointer, held: HeldWorker) -> None:
    until(lambda: queued(steps))
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: steps._background._closing)
    held.go_on()


def prepared(steps: Checkpointer) -> None:
    """Nothing was ever saved."""
    steps.prepare(state(0))
    say(worker=worker_pid())


def never_used(steps: Checkpointer) -> None:
    assert steps.steps() == []


def slow(steps: Checkpointer) -> None:
    """The interpreter ends long before the worker could."""
    committed(steps)


WAYS: dict[str, Callable[[Checkpointer], None]] = {
    name.replace("_", " "): way
    for name, way in list(globals().items())
    if callable(way)
    and getattr(way, "__module__", "") == __name__
    and name not in ("say", "train", "run_trainer", "in_child", "terminate")
}


def main(way: str, root: str, memory: str) -> None:
    limits = {"write_bytes_per_s": 200_000} if way == "slow" else {}
    WAYS[way](checkpointer(Path(root), Path(memory), adapter=GatedAdapter(), limits=limits))


if __name__ == "__main__":
    main(*sys.argv[1:])
