"""How long does training wait when it saves in the background?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from bench.async_ours import OursAsync, OursAsyncFirst, OursDeferred, PlanCached, PlanFirst, Run
from bench.async_rivals import DcpAsync, DcpAsyncProcess, DcpAsyncReuse, OrbaxAsync, OrbaxAsyncRaw
from bench.floor import copies, pairs
from bench.report import COPY, Report, Row, commit, load_averages
from bench.rivals import TorchSave
from bench.rounds import add_arguments as add_shared_arguments
from bench.rounds import better, enter, measure
from bench.state import State, make_state
from bench.work import Work
from bench.workplace import settle, workplace

if TYPE_CHECKING:
    import argparse

    from bench.contender import Contender

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "time for which a save in the background blocks training, each on the disk before the next one's turn"
ROOM = 5.0
"""Room asked for, in states: ours keeps a step, a retired one to write over and one being made; others one or two."""
OPEN_S = 5.0
COPIES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `save`, and how long the checkpointer of a first save has been open."""
    add_shared_arguments(parser)
    parser.add_argument(
        "--open-for", type=float, default=OPEN_S, metavar="SECONDS", help=f"for ours-first (default {OPEN_S:g})"
    )


def main(args: argparse.Namespace) -> Report:
    """Measure every contender; nothing is left on the disk or in memory, also after an interrupt."""
    load = load_averages()
    state = make_state(args.state, args.gb, args.framework)
    with (
        workplace(args.dir, round(ROOM * state.nbytes)) as root,
        enter(_candidates(state, args.open_for), args.only) as field,
    ):

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
    rows = tuple(_told(row) for row in hidden(better(rows, COPY)))
    return Report("stall", state.label, state.nbytes, commit(), load, (*rows, *field.absent))


def hidden(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows with the note of the deferred one saying which share of the bare copy training did not wait for."""
    copy_s = next((row.median_s for row in rows if row.name == COPY), None)

    def told(row: Row) -> Row:
        if row.name != OursDeferred.name or not copy_s or row.median_s is None:
            return row
        note = f"{1 - row.median_s / copy_s:.0%} of the copy hidden; {row.note}"
        return dataclasses.replace(row, note=note)

    return tuple(map(told, rows))


def _told(row: Row) -> Row:
    """A plan moves no bytes."""
    return dataclasses.replace(row, moved=False) if row.name in (PlanFirst.name, PlanCached.name) else row


def _candidates(state: State, open_s: float) -> list[Contender]:
    framework = state.framework
    ways = copies(pairs(state))

    def copy_s() -> float:
        return min(copy.timed() for copy in ways for _ in range(COPIES))

    run = Run(framework)
    contenders: list[Contender] = [
        *ways,
        OursAsync(run),
        OursDeferred(run, Work(framework), copy_s),
        OursAsyncFirst(framework, open_s),
        PlanFirst(framework),
        PlanCached(framework),
    ]
    if framework == "torch":
        return [*contenders, DcpAsync(), DcpAsyncReuse(), DcpAsyncProcess(), TorchSave()]
    return [*contenders, OrbaxAsync(), OrbaxAsyncRaw()]
