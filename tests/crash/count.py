"""Prints how many power losses are tried, and what they find: `python -m tests.crash.count`, `--full` for all of them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.crash.loop import Tally, crash_everywhere, length_of
from tests.crash.scenarios import KILLED, SCENARIOS


def main(full: bool) -> int:
    """Returns the number of violations."""
    total = Tally()
    print(f"{'scenario':<50}{'crash points':>14}{'states':>10}{'that differ':>13}{'violations':>12}")
    with tempfile.TemporaryDirectory() as path:
        scratch = Path(path)
        for scenario in (*SCENARIOS, *KILLED):
            tally = Tally()
            kills = [None] if scenario.killed is None else range(0, length_of(scenario, scratch), 1 if full else 4)
            for kill_at in kills:
                every = 1 if kill_at is None else 4 if full else 100
                mixes, most = (40, 1000) if full and kill_at is None else (1, 3)
                tally.add(crash_everywhere(scenario, scratch, mixes=mixes, most=most, every=every, kill_at=kill_at))
            _line(scenario.name, tally)
            total.add(tally)
    _line("in all", total)
    print("\n".join(total.violations[:20]))
    return len(total.violations)


def _line(name: str, tally: Tally) -> None:
    print(f"{name:<50}{tally.points:>14}{tally.states:>10}{tally.different:>13}{len(tally.violations):>12}", flush=True)


if __name__ == "__main__":
    sys.exit(min(1, main("--full" in sys.argv)))
