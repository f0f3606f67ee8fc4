"""What a measurement found, as JSON of one shape for every question and as a table for a README."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["COPY", "LIMIT", "NEW", "NONE", "OURS", "Report", "Row", "commit", "load_averages", "seconds_text"]

OURS = "ours"
LIMIT = "limit"
COPY = "copy"  # the floor of what a save blocks: the bare copy of the state
NONE = "none"  # the floor of a training step: one without checkpoints
PLANS = ("plan-first", "plan-cached")  # a part of a save, new and known: compared with each other only
NEW = "-new"  # ends the names of rows that are read into new memory, which are compared with each other


@dataclass(frozen=True, slots=True)
class Row:
    """One contender's times; without any, `note` says why."""

    name: str
    seconds: tuple[float, ...] = ()
    note: str = ""
    moved: bool = True
    """Whether the whole state was moved in that time, so that bytes per second mean something."""

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to one question."""

    question: str
    state: str
    nbytes: int
    commit: str
    load: tuple[float, float, float]
    """Load averages over 1, 5 and 15 minutes before the measurement began."""
    rows: tuple[Row, ...]

    def ratios(self) -> dict[str, float]:
        """`ours/limit` is a share of the limit's throughput; every other ratio a quotient of times.

        `<rival>/ours` 2.0: ours takes half. The same for each row named `ours-…`, which is also compared with the limit
        and with `ours` itself. `<row>/copy` and `<row>/none` 1.1: a tenth more than the least that it could take.
        """
        medians = {row.name: row.median_s for row in self.rows if row.median_s is not None}
        ratios = {}
        for name, median_s in medians.items():
            if _is_ours(name):
                for limit in sorted(filter(_is_limit, medians)):
                    if limit == LIMIT or name.endswith(NEW):
                        ratios[f"{name}/{limit}"] = medians[limit] / median_s
            ratios |= {f"{name}/{base}": median_s / medians[base] for base in _bases(name, medians)}
        return ratios

    def json(self) -> str:
        """The figures in the one shape that every question shares."""
        rows = [
            {
                "name": row.name,
                "seconds": list(row.seconds),
                "median_s": row.median_s,
                "gbps": self._gbps(row),
                "note": row.note,
            }
            for row in self.rows
        ]
        answer = {
            "question": self.question,
            "state": self.state,
            "nbytes": self.nbytes,
            "commit": self.commit,
            "load": list(self.load),
            "rows": rows,
            "ratios": self.ratios(),
        }
        return json.dumps(answer, indent=2, ensure_ascii=False) + "\n"

    def table(self, command: str) -> str:
        """Markdown: what was measured and by which command, then one line a row, fastest first."""
        ratios = self.ratios()
        n_rounds = max((len(row.seconds) for row in self.rows), default=0)
        machine = f"{os.cpu_count()} cores, load {self.load[0]:.1f} before"
        lines = [
            f"`{command}`",
            "",
            f"{self.state}, {_size(self.nbytes)}; {machine}; commit {self.commit}; {n_rounds} interleaved rounds.",
            "",
            "| | GB/s | median s | min to max s | against ours | |",
            "|---|---:|---:|---:|---:|---|",
        ]
        for row in sorted(self.rows, key=lambda row: row.median_s or float("inf")):
            if row.median_s is None:
                cells = [row.name, "", "", "", "", row.note]
            else:
                gbps = self._gbps(row)
                cells = [
                    row.name,
                    "" if gbps is None else f"{gbps:.2f}" if gbps >= 0.1 else f"{gbps:.2g}",
                    seconds_text(row.median_s),
                    f"{seconds_text(min(row.seconds))} to {seconds_text(max(row.seconds))}",
                    _against(row.name, ratios),
                    row.note,
                ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _gbps(self, row: Row) -> float | None:
        return self.nbytes / row.median_s / 1e9 if row.moved and row.median_s is not None else None


def commit() -> str:
    """The commit of the tree that this file lies in, `+changes` if tracked files differ from it; or `unknown`."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        return name + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load_averages() -> tuple[float, float, float]:
    """Load over 1, 5 and 15 minutes."""
    return os.getloadavg()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _is_ours(name: str) -> bool:
    return name == OURS or name.startswith(f"{OURS}-")


def _is_limit(name: str) -> bool:
    return name.removesuffix(NEW) == LIMIT


def _bases(name: str, there: Collection[str]) -> list[str]:
    """The rows that one is divided by, of those that are there."""
    if _is_limit(name) or name == NONE:
        bases = []
    elif name in PLANS:
        bases = [other for other in PLANS[1:] if other != name]
    elif name == COPY:
        bases = [NONE]
    elif name == OURS:
        bases = [COPY, NONE]
    elif _is_ours(name):
        bases = [COPY, NONE, OURS]
    else:
        bases = [COPY, NONE, *filter(_is_ours, there)]
    return [base for base in bases if base in there]


def _against(name: str, ratios: dict[str, float]) -> str:
    """The cell that compares a row: a rival with ours, anything else with what it can be at best."""
    if f"{name}/{NONE}" in ratios:
        return f"{ratios[f'{name}/{NONE}']:.2f} times {NONE}"
    for ours in (OURS, OURS + NEW):
        if not _is_ours(name) and f"{name}/{ours}" in ratios:
            return f"{ratios[f'{name}/{ours}']:.2f} times as long"
    found = []
    for key, ratio in ratios.items():
        row, _, base = key.partition("/")
        if row == name:
            found.append(f"{ratio:.0%} of {base}" if _is_limit(base) else f"{ratio:.2f} times {base}")
    return ", ".join(found)


def seconds_text(seconds: float) -> str:
    """Seconds as a report says them."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
