"""What does Orbax's CheckpointManager gain from tierkeep's handler: a whole save, and what an asynchronous one blocks?"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from bench.contender import Contender
from bench.limit import Limit
from bench.report import Report, commit, load_averages
from bench.rounds import add_arguments, better, enter, measure
from bench.state import make_state
from bench.workplace import settle, sync_tree, workplace

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from bench.state import State

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "time saves of JAX arrays through Orbax's CheckpointManager: with its own handlers, and with tierkeep's"
ROOM = 3.0
"""Room asked for, in states: one step exists at a time, and an old one may be there while a new one is made."""
BEST = "orbax-best"
RAW = {"zarr2": {"use_compression": False}, "zarr3": {"use_compression": False, "use_zarr3": True}}


class Manager(Contender):
    """Saves steps of one manager that stays open, as in a run; each one is waited for, and then synced."""

    def __init__(self, handler: str) -> None:
        self._kind = handler
        self._manager: Any = None
        self._step = 0

    def open(self) -> None:
        self._ocp = importlib.import_module("orbax.checkpoint")
        if self._kind == "ours":
            ours = importlib.import_module("tierkeep_jax.orbax")
            self._handler, self._arguments = ours.Handler(), ours.Save
        elif self._kind == "standard":
            self._handler, self._arguments = self._ocp.StandardCheckpointHandler(), self._ocp.args.StandardSave
        else:
            self._handler = self._ocp.PyTreeCheckpointHandler(**RAW[self._kind])
            self._arguments = self._ocp.args.PyTreeSave

    def ready(self, state: State, directory: Path) -> None:
        if self._manager is None:
            self._manager = self._ocp.CheckpointManager(directory, item_handlers=self._handler)

    def save(self, state: State, directory: Path) -> None:
        self._begin(state)
        self.finish()
        sync_tree(directory)

    def _begin(self, state: State) -> None:
        self._step += 1
        self._manager.save(self._step, args=self._arguments(state.tree))

    def finish(self) -> None:
        self._manager.wait_until_finished()

    def clear(self, directory: Path) -> None:
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


class Blocked(Manager):
    """Until `save` returns."""

    def save(self, state: State, directory: Path) -> None:
        self._begin(state)


def main(args: argparse.Namespace) -> Report:
    """Measure every contender; nothing is left on the disk or in memory, also after an interrupt."""
    load = load_averages()
    state = make_state(args.state, args.gb, "jax")
    with workplace(args.dir, round(ROOM * state.nbytes)) as root, enter(_candidates(), args.only) as field:

        def finish(contender: Contender, _result: object, _is_warm_up: bool) -> None:
            contender.finish()
            contender.clear(root / contender.name)
            settle()

        rows = measure(
            field.contenders,
            args.rounds,
            before=lambda contender: contender.ready(state, root / contender.name),
            clocked=lambda contender: contender.save(state, root / contender.name),
            after=finish,
        )
    rows = tuple(
        dataclasses.replace(row, moved=False) if row.name.endswith("-blocked") else row
        for row in better(better(rows, BEST), f"{BEST}-blocked")
    )
    return Report("orbax", state.label, state.nbytes, commit(), load, (*rows, *field.absent))


def _candidates() -> list[Contender]:
    found: list[Contender] = [Limit()]
    for name, kind, note in (
        ("ours", "ours", "tierkeep_jax.orbax.Handler"),
        ("orbax", "standard", "StandardSave as it comes"),
        *((f"{BEST}-{number}", kind, f"{kind}, not compressed") for number, kind in enumerate(RAW, 1)),
    ):
        for cls, ending in ((Manager, ""), (Blocked, "-blocked")):
            contender = cls(kind)
            head, _, number = name.rpartition("-")
            contender.name = f"{head}{ending}-{number}" if head.endswith("best") else f"{name}{ending}"
            contender.note = note if cls is Manager else f"{note}, until it returns"
            found.append(contender)
    return found
