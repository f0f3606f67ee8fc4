"""Interleaved rounds: every contender once a round, each round beginning with another, the first not counted."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Row, seconds_text
from bench.state import FRAMEWORKS, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.contender import Contender

__all__ = ["Field", "add_arguments", "add_round_arguments", "better", "enter", "measure", "positive", "say"]


@dataclass(frozen=True, slots=True)
class Field:
    """The contenders that can run here, and the rows of those that cannot."""

    contenders: tuple[Contender, ...]
    absent: tuple[Row, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that questions about one process's saves and restores share."""
    parser.add_argument("--gb", type=positive(float), default=2.0, help="size of the decoder's state (default 2)")
    parser.add_argument("--state", choices=STATES, default="decoder", help="what to save (default decoder)")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="torch", help="whose arrays (default torch)")
    add_round_arguments(parser)


def add_round_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that all questions share."""
    parser.add_argument("--rounds", type=positive(int), default=5, help="rounds counted, after one to warm up")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), metavar="NAME,NAME", help="these rows only")
    parser.add_argument("--dir", type=Path, help="measure on this directory's disk (default: the current directory)")


@contextlib.contextmanager
def enter(candidates: Sequence[Contender], only: Sequence[str] | None) -> Iterator[Field]:
    """Open the candidates (those called one of `only`, if given); close them all at the end."""
    unknown = {name for name in only or () if not any(_matches(candidate, name) for candidate in candidates)}
    if unknown:
        known = ", ".join(candidate.name for candidate in candidates)
        raise SystemExit(f"bench: no row is called {', '.join(sorted(unknown))}; there are {known}")
    contenders: list[Contender] = []
    absent: list[Row] = []
    with contextlib.ExitStack() as stack:
        for candidate in candidates:
            if only and not any(_matches(candidate, name) for name in only):
                continue
            try:
                candidate.open()
            except ImportError as error:
                absent.append(Row(candidate.name, note=f"not installed: {error.name or error}"))
                continue
            stack.callback(candidate.close)
            contenders.append(candidate)
        yield Field(tuple(contenders), tuple(absent))


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    before: Callable[[Contender], None],
    clocked: Callable[[Contender], object],
    after: Callable[[Contender, object, bool], None],
) -> tuple[Row, ...]:
    """Time `clocked` for each contender in each round, less what it says it computed meanwhile.

    `after` also hears whether this was the warm-up round.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        shift = number % len(contenders) if contenders else 0
        for contender in [*contenders[shift:], *contenders[:shift]]:
            before(contender)
            gc.collect()
            start_s = time.perf_counter()
            result = clocked(contender)
            elapsed_s = time.perf_counter() - start_s - contender.computed_s
            say(f"round {number} of {rounds}: {contender.name} {elapsed_s:.3f} s" + " (warm-up)" * (number == 0))
            after(contender, result, number == 0)
            del result
            if number:
                seconds[contender.name].append(elapsed_s)
    return tuple(Row(each.name, tuple(seconds[each.name]), each.note) for each in contenders)


def better(rows: tuple[Row, ...], name: str) -> tuple[Row, ...]:
    """The rows with `name-1`, `name-2` and so on replaced by the best of them, called `name`; its note has the others'."""
    variants = sorted((row for row in rows if _is_variant(row.name, name)), key=lambda row: row.median_s or 0.0)
    if not variants:
        return rows
    best, *others = variants
    note = "; ".join([best.note, *(f"{other.note}: {seconds_text(other.median_s or 0.0)} s" for other in others)])
    merged = Row(name, best.seconds, note)
    return tuple(merged if row is best else row for row in rows if row is best or row not in variants)


def say(line: str) -> None:
    """Progress, apart from the report on standard output."""
    print(line, file=sys.stderr, flush=True)


def _matches(candidate: Contender, name: str) -> bool:
    return candidate.name == name or _is_variant(candidate.name, name)


def _is_variant(name: str, of: str) -> bool:
    return name.startswith(f"{of}-") and name.removeprefix(f"{of}-").isdecimal()


def positive(number: type[int | float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if value <= 0:
            raise argparse.ArgumentTypeError("must be more than 0")
        return value

    return parse
