"""How much longer does a training step take when every step is saved?"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from bench.async_rivals import DcpAsync, DcpAsyncProcess
from bench.contender import Contender
from bench.floor import Copy, copies, pairs
from bench.ours import PACKAGES
from bench.report import COPY, NONE, OURS, Report, Row, commit, load_averages, seconds_text
from bench.rivals import TorchSave
from bench.rounds import add_round_arguments, enter, measure, positive
from bench.training import Training
from bench.workplace import settle, workplace

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from bench.state import State

__all__ = ["SUMMARY", "Saver", "add_arguments", "check_losses", "main"]

SUMMARY = "time a real training loop on this machine's cores: every step saved to memory, every few to the disk"
ROOM = 8.0
"""Room asked for, in states: each contender clears what it wrote after its turn."""
TRIALS = 3
DEFERRED = "deferred"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The size of the training, how often it is saved, and the rounds."""
    parser.add_argument("--mb", type=positive(float), default=400.0, help="size of the state (default 400)")
    parser.add_argument("--tokens", type=positive(int), default=256, help="tokens of a step (default 256)")
    parser.add_argument("--every", type=positive(int), default=5, help="steps from one on the disk to the next (5)")
    parser.add_argument("--steps", type=positive(int), default=10, help="steps of one turn (default 10)")
    add_round_arguments(parser)


def main(args: argparse.Namespace) -> Report:
    """Train a few steps with each contender in turn; nothing is left on the disk or in memory."""
    load = load_averages()
    training = Training(args.mb, args.tokens)
    state = training.state()
    losses: list[float] = []
    longest: dict[str, float] = {}
    with (
        workplace(args.dir, round(ROOM * state.nbytes)) as root,
        enter(_candidates(training, state, args.every), args.only) as field,
    ):

        def turn(contender: Contender) -> list[float]:
            assert isinstance(contender, Saver)
            found = []
            start_s = time.perf_counter()
            for number in range(args.steps):
                found.append(training.step())
                contender.after_step(training, root / contender.name, on_disk=number % args.every == 0)
                end_s = time.perf_counter()
                longest[contender.name] = max(longest.get(contender.name, 0.0), end_s - start_s)
                start_s = end_s
            return found

        def ready(contender: Contender) -> None:
            training.reset()
            contender.ready(training.state(), root / contender.name)

        def finish(contender: Contender, result: object, is_warm_up: bool) -> None:
            assert isinstance(result, list)
            check_losses(contender.name, result, losses)
            longest[contender.name] = 0.0 if is_warm_up else longest[contender.name]
            contender.finish()
            contender.clear(root / contender.name)
            settle()

        rows = measure(field.contenders, args.rounds, before=ready, clocked=turn, after=finish)

    def of_a_step(row: Row) -> Row:
        note = f"{row.note}; longest step {seconds_text(longest[row.name])} s"
        return Row(row.name, tuple(each / args.steps for each in row.seconds), note, moved=False)

    label = f"{training.label}, seconds of a step; on the disk every {args.every} steps; state"
    return Report("train", label, state.nbytes, commit(), load, (*map(of_a_step, rows), *field.absent))


def check_losses(name: str, found: list[float], known: list[float]) -> None:
    """Every turn has the losses of the first one, which become `known`. Raises RuntimeError: a save changed training."""
    if not known:
        known.extend(found)
    if known != found:
        raise RuntimeError(f"{name} changed the losses: {found} in place of {known}")


class Saver(Contender):
    """What is done after a training step. Here: nothing."""

    name = NONE
    note = "no checkpoint"

    def after_step(self, training: Training, directory: Path, *, on_disk: bool) -> None:
        """Part of the step's time. What it begins may go on during later steps."""


class CopySaver(Saver):
    """The bare copy of the state, by as many threads as are faster here."""

    name = COPY

    def __init__(self, state: State) -> None:
        self._copies = copies(pairs(state))
        self._fastest: Copy | None = None

    def open(self) -> None:
        for copy in self._copies:
            copy.open()

    def ready(self, state: State, directory: Path) -> None:
        if self._fastest is None:
            self._fastest = min(self._copies, key=lambda copy: min(copy.timed() for _ in range(TRIALS)))
            self.note = f"the bare copy after every step, {self._fastest.note}"

    def after_step(self, training: Training, directory: Path, *, on_disk: bool) -> None:
        assert self._fastest is not None, "ready first"
        self._fastest.copy()

    def close(self) -> None:
        for copy in self._copies:
            copy.close()


class OursSaver(Saver):
    """Every step, in memory or on the disk."""

    def __init__(self, training: Training, snapshot: str, every: int) -> None:
        self.name = f"{OURS}-{snapshot}"
        self.note = f"every step in memory, every {every} on the disk"
        self._training = training
        self._snapshot = snapshot
        self._checkpointer: Any = None
        self._step = 0

    def open(self) -> None:
        self._package = importlib.import_module(PACKAGES["torch"])

    def ready(self, state: State, directory: Path) -> None:
        if self._checkpointer is None:
            self._checkpointer = self._package.Checkpointer(directory, keep=1)
            self._checkpointer.prepare(state.tree)
            if self._snapshot == DEFERRED:
                self._checkpointer.attach(self._training.optimizer)

    def after_step(self, training: Training, directory: Path, *, on_disk: bool) -> None:
        self._step += 1
        self._checkpointer.save(self._step, training.tree(), snapshot=self._snapshot, to_disk=on_disk)

    def finish(self) -> None:
        self._checkpointer.wait()

    def clear(self, directory: Path) -> None:
        """Nothing: its checkpointer keeps one step."""

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None


class RivalSaver(Saver):
    """Those that have no memory to save to: on the disk only, as often as ours is there, one at a time."""

    def __init__(self, rival: Contender, every: int) -> None:
        self.name = rival.name
        self.note = f"every {every} steps on the disk, nothing between"
        self._rival = rival
        self._number = 0

    def open(self) -> None:
        self._rival.open()

    def ready(self, state: State, directory: Path) -> None:
        directory.mkdir()
        self._rival.ready(state, directory)

    def after_step(self, training: Training, directory: Path, *, on_disk: bool) -> None:
        if on_disk:
            self._rival.finish()
            self._number += 1
            self._rival.save(training.state(), directory / str(self._number))

    def finish(self) -> None:
        self._rival.finish()

    def close(self) -> None:
        self._rival.close()


def _candidates(training: Training, state: State, every: int) -> list[Contender]:
    rivals = [DcpAsync(), DcpAsyncProcess(), TorchSave()]
    return [
        Saver(),
        CopySaver(state),
        *(OursSaver(training, snapshot, every) for snapshot in (DEFERRED, "copy")),
        *(RivalSaver(rival, every) for rival in rivals),
    ]
