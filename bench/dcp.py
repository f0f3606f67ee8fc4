"""What does torch.distributed.checkpoint gain from tierkeep's writer: a whole save, and what an asynchronous one blocks?"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import TYPE_CHECKING, Any

from bench.async_rivals import DcpAsync
from bench.contender import Contender
from bench.limit import Limit
from bench.report import Report, commit, load_averages
from bench.rivals import Dcp
from bench.rounds import add_arguments, better, enter, measure
from bench.state import make_state
from bench.workplace import settle, workplace

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from bench.state import State

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "time saves through torch.distributed.checkpoint: with its file writer, and with tierkeep's"
ROOM = 2.0
"""Room asked for, in states: one checkpoint exists at a time, and an old one may be there while a new one is made."""


class Ours(Contender):
    """dcp.save with tierkeep's writer, opened once; synced by itself."""

    name = "ours"
    note = "dcp.save with StorageWriter"

    def open(self) -> None:
        self._dcp = importlib.import_module("torch.distributed.checkpoint")
        self._writer: Any = importlib.import_module("tierkeep_torch.dcp").StorageWriter()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant

    def save(self, state: State, directory: Path) -> None:
        self._dcp.save(state.tree, checkpoint_id=directory, storage_writer=self._writer, no_dist=True)

    def close(self) -> None:
        self._writer.close()


class OursBlocked(Ours):
    """dcp.async_save with tierkeep's stager and writer: until it returns."""

    name = "ours-blocked"
    note = "dcp.async_save with AsyncStager and StorageWriter"

    def open(self) -> None:
        super().open()
        self._stager: Any = importlib.import_module("tierkeep_torch.dcp").AsyncStager()
        self._future: Any = None

    def save(self, state: State, directory: Path) -> None:
        self._future = self._dcp.async_save(
            state.tree, checkpoint_id=directory, storage_writer=self._writer, async_stager=self._stager, no_dist=True
        )

    def finish(self) -> None:
        if self._future is not None:
            future, self._future = self._future, None
            future.result()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what failed was told where it was measured
            self.finish()
        self._stager.close()
        super().close()


class DcpBlocked(DcpAsync):
    name = "dcp-blocked"
    note = "dcp.async_save as it comes"


def main(args: argparse.Namespace) -> Report:
    """Measure every contender; nothing is left on the disk, also after an interrupt."""
    load = load_averages()
    state = make_state(args.state, args.gb, "torch")
    candidates = [Limit(), Ours(), Dcp(1), Dcp(2), OursBlocked(), DcpBlocked()]
    with workplace(args.dir, round(ROOM * state.nbytes)) as root, enter(candidates, args.only) as field:

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
    return Report("dcp", state.label, state.nbytes, commit(), load, (*better(rows, "dcp"), *field.absent))
