"""How long does a restore take when nothing is in the page cache?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.cache import drop
from bench.killed import OursMemory
from bench.limit import Limit, LimitNew
from bench.ours import Ours, OursInto, OursNew
from bench.report import Report, Row, commit, load_averages
from bench.rivals import Dcp, Orbax, OrbaxRaw, Safetensors, TorchLoad
from bench.rounds import add_arguments, enter, measure, say
from bench.state import State, flatten, make_state
from bench.workplace import settle, workplace

if TYPE_CHECKING:
    import argparse

    from bench.contender import Contender

__all__ = ["SUMMARY", "add_arguments", "main"]

SUMMARY = "time restores from a cold cache, every byte in memory before the clock stops"


def main(args: argparse.Namespace) -> Report:
    """Save once with every contender, then measure its restores; nothing is left on the disk."""
    load = load_averages()
    state = make_state(args.state, args.gb, args.framework)
    into = state.empty_copy()
    candidates = _candidates(args.framework, args.state, args.gb)
    notes: dict[str, str] = {}
    with (
        workplace(args.dir, round(1.1 * len(candidates) * state.nbytes)) as root,
        enter(candidates, args.only) as field,
    ):
        for contender in field.contenders:
            say(f"saving for {contender.name}")
            contender.save(state, root / contender.name)
        settle()

        def cool(contender: Contender) -> None:
            notes[contender.name] = drop(root / contender.name) or notes.get(contender.name, "")

        def check(contender: Contender, result: object, is_warm_up: bool) -> None:
            if is_warm_up and not isinstance(contender, Limit):
                _check_whole(contender, result, state)

        rows = measure(
            field.contenders,
            args.rounds,
            before=cool,
            clocked=lambda contender: contender.load(root / contender.name, into),
            after=check,
        )
    rows = tuple(Row(row.name, row.seconds, "; ".join(filter(None, [row.note, notes[row.name]]))) for row in rows)
    return Report("restore", state.label, state.nbytes, commit(), load, (*rows, *field.absent))


def _check_whole(contender: Contender, result: object, state: State) -> None:
    """A reader that leaves something out, or ours if it changes a bit, is not worth timing."""
    arrays = {name: leaf for name, leaf in flatten(result) if hasattr(leaf, "dtype")}
    nbytes = sum(leaf.nbytes for leaf in arrays.values())
    if nbytes < state.nbytes:
        raise RuntimeError(f"{contender.name} restored {nbytes} bytes of {state.nbytes}")
    if isinstance(contender, Ours):
        different = [name for name, leaf in state.arrays().items() if not bool((arrays[name] == leaf).all())]
        if different:
            raise RuntimeError(f"{contender.name} restored other values of {', '.join(different[:5])}")


def _candidates(framework: str, kind: str, gb: float) -> list[Contender]:
    # First, because the process that it starts and kills needs memory for a state and two images.
    memory = OursMemory(framework, kind, gb)
    # A jax array cannot be filled in place: there, restoring always makes new memory.
    if framework == "jax":
        return [memory, OursNew(framework), Limit(), LimitNew(), Safetensors(framework), Orbax(), OrbaxRaw()]
    contenders: list[Contender] = [
        memory,
        OursInto(framework),
        OursNew(framework),
        Limit(),
        LimitNew(),
        TorchLoad(),
        _InPlaceDcp(),
    ]
    return [*contenders, Safetensors(framework), Orbax(), OrbaxRaw()]


class _InPlaceDcp(Dcp):
    """DCP's reader has no threads: one row, of what one thread wrote."""

    def __init__(self) -> None:
        super().__init__(n_threads=1)
        self.name = "dcp"
        self.note = "in place"
