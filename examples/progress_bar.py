"""A bar for each save in the background, drawn by rich from what a checkpointer's `events` tell.

It needs `pip install rich`. By default the state has 200 MB and is written at 200 MB/s, which is slow enough to see.

    python examples/progress_bar.py
    python examples/progress_bar.py --mb 2000 --limit-mb 0
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tierkeep.options import MemoryOptions
from tierkeep_torch import Checkpointer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkeep.events import Event

__all__ = ["main"]


class Bars:
    """Called for every event, in whichever thread: checksumming fills the first half of a bar, writing the rest."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[int, TaskID] = {}

    def __call__(self, event: Event) -> None:
        if event.step is None:
            self._progress.log("the background process was started again")
        elif event.what == "begun":
            total = 2 * event.total_nbytes
            self._tasks[event.step] = self._progress.add_task(f"step {event.step}", total=total, doing="copying")
        elif event.step in self._tasks:
            self._show(self._tasks[event.step], event)

    def _show(self, task: TaskID, event: Event) -> None:
        if event.what == "progress":
            before = event.total_nbytes if event.stage == "write" else 0
            doing = "writing" if event.stage == "write" else "checksumming"
            self._progress.update(task, completed=before + event.nbytes, doing=doing)
        elif event.what == "committed":
            self._progress.update(task, completed=2 * event.total_nbytes, doing="on the disk")
        elif event.what in ("failed", "cancelled"):
            self._progress.update(task, doing=str(event.error or event.what))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Saves in the background, with a progress bar.")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="the disk to work on (default: this directory)")
    parser.add_argument("--steps", type=int, default=3, help="how many saves (default: 3)")
    parser.add_argument("--mb", type=float, default=200, help="the state, in MB (default: 200)")
    parser.add_argument(
        "--limit-mb", type=float, default=200, help="written in a second, in MB; 0: what the disk takes"
    )
    arguments = parser.parse_args(argv)

    state = {"weights": torch.zeros(int(arguments.mb * 1e6 / 4))}
    memory = MemoryOptions(write_bytes_per_s=arguments.limit_mb * 1e6 or None)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[doing]}"))
    with (
        tempfile.TemporaryDirectory(prefix="demo-", dir=arguments.dir) as directory,
        Progress(*columns) as progress,
        Checkpointer(directory, keep=1, memory=memory) as checkpointer,
    ):
        checkpointer.events.subscribe(Bars(progress))
        for step in range(1, arguments.steps + 1):
            state["weights"] += 1  # stands for training
            checkpointer.save(step, state)
    return 0


if __name__ == "__main__":
    sys.exit(main())
