"""Train, be killed in the middle of a save, resume, and lose nothing.

`train_bytes.py` runs twice: once in one go without a single checkpoint, and once with a checkpoint every few steps,
in a process that gets SIGKILL at a random moment between the beginning of a save and its commit in the background, and
again, and again; a fresh process resumes each time from the newest step that was staged. Both must find the same losses
and end in the same weights, bit for bit. Then stock Orbax opens the last checkpoint, and every array it returns is
compared with what was saved.

    python examples/survive_a_crash.py             # what `make demo` runs: a state of 250 MB
    python examples/survive_a_crash.py --tiny      # the same with a small state
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["main"]

HERE = Path(__file__).resolve().parent
SILENCE_DEADLINE_S = 120.0
"""A training process that says nothing for so long is killed, and the demo fails."""
ROUNDS = 3
"""How often each way of writing and reading is measured; the table has the medians."""
MB, GB = 1e6, 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when every comparison held."""
    parser = argparse.ArgumentParser(description="Training that is killed during saves, and loses nothing.")
    parser.add_argument("--kills", type=int, default=3, help="how often the training is killed (default: 3)")
    parser.add_argument("--seed", type=int, help="which saves are hit, and when (default: another one each time)")
    parser.add_argument("--tiny", action="store_true", help="a small state")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="the disk to work on (default: this directory)")
    parser.add_argument("--keep-dir", action="store_true", help="leave the checkpoints there")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10_000) if options.seed is None else options.seed
    size = ["--tiny"] if options.tiny else []

    with _workplace(options.dir, keep=options.keep_dir) as directory:
        root = directory / "checkpoints"
        print("1. Training in one go, without checkpoints.", flush=True)
        expected = run_undisturbed(size)
        print(f"2. Training again with checkpoints, killed during saves (--seed {seed}).", flush=True)
        run = run_killed(size, root, kills=options.kills, chance=random.Random(seed))
        print("3. Comparing.", flush=True)
        n_repeated = compare_losses(expected, run)
        n_arrays = compare_with_orbax(root, run.last_step)
        print("4. Measuring.", flush=True)
        speeds = measure(root, run.last_step, directory)
        print_table(run, speeds, n_losses=len(expected.losses), n_repeated=n_repeated, n_arrays=n_arrays)
    return 0


@dataclass(slots=True)
class Run:
    """What the training processes of one run have found and said."""

    losses: list[tuple[int, str]] = field(default_factory=list)  # each step and its loss.hex(), repeated steps too
    weights: str = ""  # digest of the final weights
    last_step: int = 0  # the newest step whose save has returned: from then on it outlives the process
    doomed_step: int = 0  # the step in whose save the last kill came; 0 when it came too late
    staged_s: list[float] = field(default_factory=list)  # how long training stood still for each save
    save_s: list[float] = field(default_factory=list)  # how long each took until it was on the disk
    n_hits: int = 0  # kills during a save
    n_misses: int = 0  # kills that came when the save was already over


def run_undisturbed(size: Sequence[str]) -> Run:
    """The run that all is compared with."""
    run = Run()
    with TrainingProcess(size) as process:
        _follow(process, run)
    first, last = (float.fromhex(loss) for _, loss in (run.losses[0], run.losses[-1]))
    print(f"   {len(run.losses)} steps, loss {first:.3f} to {last:.3f}", flush=True)
    return run


def run_killed(size: Sequence[str], root: Path, *, kills: int, chance: random.Random) -> Run:
    """Start training again and again until it comes to its end, with SIGKILL until `kills` of them hit a save.

    Each process lives through one save or more, so that the run goes forward whatever `chance` says.
    """
    run = Run()
    while not run.weights:
        doomed_save = chance.randint(2, 3) if run.n_hits < kills else None
        with TrainingProcess([*size, "--root", str(root)]) as process:
            _follow(process, run, doomed_save, chance)
    return run


def _follow(
    process: TrainingProcess, run: Run, doomed_save: int | None = None, chance: random.Random | None = None
) -> None:
    """Listen to one process until it ends; kill it some time after it began its save number `doomed_save`."""
    n_saves, saving, delay_s = 0, 0, None
    begun: dict[int, float] = {}
    for said in process.events():
        match said["event"]:
            case "resumed":
                _check_resumed(said["step"], run)
            case "trained":
                run.losses.append((said["step"], said["loss"]))
            case "saving":
                n_saves, saving, begun[said["step"]] = n_saves + 1, said["step"], time.perf_counter()
                if n_saves == doomed_save and chance is not None:
                    delay_s = chance.uniform(0.0, 0.9 * min(run.save_s, default=0.0))
                    time.sleep(delay_s)
                    process.kill()
            case "staged":
                run.last_step = said["step"]
                run.staged_s.append(said["seconds"])
            case "committed":
                saving = 0 if said["step"] == saving else saving
                run.save_s.append(time.perf_counter() - begun[said["step"]])
            case "finished":
                run.weights = said["weights"]
    if delay_s is not None:
        run.doomed_step = saving
        run.n_hits, run.n_misses = run.n_hits + bool(saving), run.n_misses + (not saving)
        where = f"{delay_s * 1e3:.0f} ms into the save of step {saving}" if saving else "just after a save had ended"
        print(f"   killed {where}; step {run.last_step} was the last one staged", flush=True)


def _check_resumed(step: int, run: Run) -> None:
    """Training goes on from the last step whose save returned, or from the next if that was staged just before the kill."""
    if step not in (run.last_step, run.doomed_step):
        raise AssertionError(f"the save of step {run.last_step} returned, but training resumed from step {step}")
    run.last_step = step
    how = ", whose save outlived the kill" if step == run.doomed_step else ""
    print(f"   resumed from step {step}{how}", flush=True)


def compare_losses(expected: Run, run: Run) -> int:
    """Every loss of `run`, repeated steps included, equals the expected one; so do the weights. How many repeat."""
    by_step = dict(expected.losses)
    wrong = [step for step, loss in run.losses if by_step[step] != loss]
    if wrong or set(by_step) != set(dict(run.losses)):
        raise AssertionError(f"the losses differ in steps {wrong or 'that are missing'}")
    if run.weights != expected.weights:
        raise AssertionError("the losses are equal, the final weights are not")
    resumed = dict(run.losses)
    print("   step   undisturbed           killed and resumed")
    for step in sorted(by_step)[:: max(1, len(by_step) // 6)]:
        print(f"   {step:4d}   {float.fromhex(by_step[step])!r:20}  {float.fromhex(resumed[step])!r}")
    return len(run.losses) - len(by_step)


def compare_with_orbax(root: Path, step: int) -> int:
    """Every tensor that tierkeep loads is there in what stock Orbax restores, bit for bit. How many there are."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import numpy as np
    import orbax.checkpoint as ocp
    import torch

    import tierkeep_torch

    # Orbax warns whenever it restores a tree that it was shown no likeness of, its own checkpoints included.
    logging.getLogger("absl").setLevel(logging.ERROR)
    with ocp.CheckpointManager(root) as manager:
        theirs = dict(_leaves(manager.restore(step)))
    n_arrays = 0
    for name, tensor in _leaves(tierkeep_torch.load(root / str(step) / "default")):
        if isinstance(tensor, torch.Tensor):
            mine, other = tensor.detach().numpy(), np.asarray(theirs[name])
            if (mine.dtype, mine.shape) != (other.dtype, other.shape) or mine.tobytes() != other.tobytes():
                raise AssertionError(f"Orbax restores other bits for {name}")
            n_arrays += 1
    return n_arrays


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, named as Orbax names them."""
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, (list, tuple)):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        yield ".".join(path), tree
        return
    for key, value in items:
        yield from _leaves(value, (*path, key))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second, medians: ours, and the same bytes through the same disk without tensors."""

    nbytes: int
    save: float
    write: float
    restore: float
    read: float
    remarks: str
    """How the raw disk was used, and what could not be done here."""


def measure(root: Path, step: int, directory: Path) -> Speeds:
    """Save and restore the last checkpoint's state a few times, turn about with the raw disk, as `bench` does."""
    sys.path.insert(0, str(HERE.parent))  # `bench` is a folder of this repository, not installed
    import tierkeep_torch
    from bench import cache
    from bench.limit import Limit
    from bench.ours import OursInto
    from bench.state import State, flatten

    tree = tierkeep_torch.load(root / str(step) / "default")
    nbytes = sum(leaf.nbytes for _, leaf in flatten(tree) if hasattr(leaf, "nbytes"))
    state = State(label="the last checkpoint", tree=tree, framework="torch", nbytes=nbytes)
    into = state.empty_copy()
    with contextlib.ExitStack() as stack:
        seconds: dict[str, list[float]] = {}
        remarks: dict[str, None] = {}  # a dict for its order
        ways = (OursInto("torch"), Limit())
        for way in ways:
            way.open()
            stack.callback(way.close)
        for _ in range(1 + ROUNDS):  # the first warms up and is not counted
            for way in ways:
                place = directory / way.name
                began = time.perf_counter()
                way.save(state, place)
                saved = time.perf_counter()
                seconds.setdefault(f"{way.name} save", []).append(saved - began)
                os.sync()
                remarks[cache.drop(place)] = None
                began = time.perf_counter()
                way.load(place, into)
                seconds.setdefault(f"{way.name} load", []).append(time.perf_counter() - began)
                way.clear(place)
        remarks[ways[1].note] = None
    save, restore, write, read = (nbytes / statistics.median(of[1:]) for of in seconds.values())
    remark = "; ".join(filter(None, remarks))
    return Speeds(nbytes=nbytes, save=save, write=write, restore=restore, read=read, remarks=remark)


def print_table(run: Run, speeds: Speeds, *, n_losses: int, n_repeated: int, n_arrays: int) -> None:
    """What was found, a line each."""
    kills = f"{run.n_hits}" + (f", and {run.n_misses} just after one" if run.n_misses else "")
    rows = (
        ("kills during a save, survived", kills),
        ("losses equal bit for bit", f"{n_losses} steps, {n_repeated} of them computed twice"),
        ("arrays equal in stock Orbax", f"{n_arrays} of {n_arrays}"),
        ("state", f"{speeds.nbytes / MB:.1f} MB"),
        ("save, on the disk", _share(speeds.save, speeds.write)),
        ("restore, cold cache", _share(speeds.restore, speeds.read)),
        ("raw disk", speeds.remarks),
        (
            "training stood still",
            f"{statistics.median(run.staged_s) * 1e3:.0f} ms a save, the median of {len(run.staged_s)}",
        ),
    )
    print()
    for name, value in rows:
        print(f"   {name:30}  {value}")


def _share(speed: float, limit: float) -> str:
    return f"{speed / GB:.2f} GB/s, {speed / limit:.0%} of what the raw disk did ({limit / GB:.2f} GB/s)"


class TrainingProcess:
    """One `train_bytes.py`, and what it says.

    Guarantees: started by exec, never by fork alone; killed and waited for when the `with` block is left, however
    that happens; no wait is longer than `SILENCE_DEADLINE_S`.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, str(HERE / "train_bytes.py"), *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="reader of a training process")
        self._reader.start()
        self._killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join()

    def kill(self) -> None:
        """The process is gone: SIGKILL cannot be caught, delayed or cleaned up after."""
        self._killed = True
        self._process.kill()
        self._process.wait()

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What it says, until it ends; an error if it fails on its own."""
        while line := self._next_line():
            yield json.loads(line)
        returncode = self._process.wait(timeout=SILENCE_DEADLINE_S)
        if returncode and not self._killed:
            raise ChildProcessError(f"training ended with status {returncode}; what it said is above")

    def _next_line(self) -> str:
        try:
            return self._lines.get(timeout=SILENCE_DEADLINE_S)
        except queue.Empty:
            raise TimeoutError(f"training said nothing for {SILENCE_DEADLINE_S:.0f} s") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")


@contextlib.contextmanager
def _workplace(parent: Path, *, keep: bool) -> Iterator[Path]:
    """A fresh directory in `parent`, removed however the block is left unless it is to be kept."""
    directory = Path(tempfile.mkdtemp(prefix="demo-", dir=parent)).resolve()
    try:
        yield directory
    finally:
        if keep:
            print(f"kept: {directory}")
        else:
            # What saves in the background for a training that was killed just now is still at work in it.
            deadline = time.monotonic() + SILENCE_DEADLINE_S
            while directory.exists() and time.monotonic() < deadline:
                shutil.rmtree(directory, ignore_errors=True)
                time.sleep(0.1)


if __name__ == "__main__":
    # A polite end also cleans up: the training process and the directory go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
