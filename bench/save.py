"""How long does a save take until it is on the disk?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.limit import Limit
from bench.ours import Ours, OursFirst
from bench.report import Report, commit, load_averages
from bench.rivals import Dcp, Orbax, OrbaxRaw, Safetensors, TorchSave, TorchSaveNoCrc
from bench.rounds import add_arguments, better, enter, measure
from bench.state import make_state
from bench.workplace import settle, workplace

if TYPE_CHECKING:
    import argparse

    from bench.contender import Contender

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "time synchronous saves, on the disk before the clock stops"
ROOM = 2.0
"""Room asked for, in states: one checkpoint exists at a time, and an old one may be there while a new one is made."""


def main(args: argparse.Namespace) -> Report:
    """Measure every contender; nothing is left on the disk, also after an interrupt."""
    load = load_averages()
    state = make_state(args.state, args.gb, args.framework)
    with (
        workplace(args.dir, round(ROOM * state.nbytes)) as root,
        enter(_candidates(args.framework), args.only) as field,
    ):

        def clear(contender: Contender, _result: object, _is_warm_up: bool) -> None:
            contender.clear(root / contender.name)
            settle()

        rows = measure(
            field.contenders,
            args.rounds,
            before=lambda _: None,
            clocked=lambda contender: contender.save(state, root / contender.name),
            after=clear,
        )
    return Report("save", state.label, state.nbytes, commit(), load, (*better(rows, "dcp"), *field.absent))


def _candidates(framework: str) -> list[Contender]:
    contenders: list[Contender] = [Ours(framework), OursFirst(framework), Limit()]
    if framework == "torch":
        contenders += [TorchSave(), TorchSaveNoCrc(), Dcp(1), Dcp(2)]
    return [*contenders, Safetensors(framework), Orbax(), OrbaxRaw()]
