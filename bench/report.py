"""What a measurement found, as JSON of one shape for every question and as a table for a README."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIMIT", "NEW", "OURS", "Report", "Row", "commit", "load_averages"]

OURS = "ours"
LIMIT = "limit"
NEW = "-new"  # ends the names of rows that are read into new memory, which are compared with each other


@dataclass(frozen=True, slots=True)
class Row:
    """One contender's times; without any, `note` says why."""

    name: str
    seconds: tuple[float, ...] = ()
    note: str = ""

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
        """`ours/limit` is a share of the limit's throughput; `<rival>/ours` a quotient of times, 2.0: ours takes half.

        Rows named `ours-…` are compared with the limit too; `ours-new` with `limit-new`, and every rival with it.
        """
        medians = {row.name: row.median_s for row in self.rows if row.median_s is not None}
        limits = {name for name in medians if name.removesuffix(NEW) == LIMIT}
        ratios = {}
        for name, median_s in medians.items():
            if _is_ours(name):
                for limit in sorted(limits):
                    if limit == LIMIT or name.endswith(NEW):
                        ratios[f"{name}/{limit}"] = medians[limit] / median_s
            elif name not in limits:
                for ours in (OURS, OURS + NEW):
                    if ours in medians:
                        ratios[f"{name}/{ours}"] = median_s / medians[ours]
        return ratios

    def json(self) -> str:
        """The figures in the one shape that every question shares."""
        rows = [
            {
                "name": row.name,
                "seconds": list(row.seconds),
                "median_s": row.median_s,
                "gbps": None if row.median_s is None else self.nbytes / row.median_s / 1e9,
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
                if _is_ours(row.name):
                    limits = [
                        f"{ratios[key]:.0%} of {key.partition('/')[2]}"
                        for key in ratios
                        if key.startswith(f"{row.name}/")
                    ]
                    against = ", ".join(limits)
                else:
                    ratio = ratios.get(f"{row.name}/{OURS}", ratios.get(f"{row.name}/{OURS}{NEW}"))
                    against = "" if ratio is None else f"{ratio:.2f} times as long"
                gbps = self.nbytes / row.median_s / 1e9
                spread = f"{_seconds(min(row.seconds))} to {_seconds(max(row.seconds))}"
                cells = [
                    row.name,
                    f"{gbps:.2f}" if gbps >= 0.1 else f"{gbps:.2g}",
                    _seconds(row.median_s),
                    spread,
                    against,
                    row.note,
                ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)


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


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.3f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
