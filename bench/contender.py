"""What is measured: something that can save a state into a directory and load it from there."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from bench.state import State, Tree

__all__ = ["Contender"]


class Contender:
    """One row of a report. Subclasses import what they need in `open`, so that a missing package is one row's note."""

    name: str
    """The row's name in a report."""
    note: str = ""
    computed_s: float = 0.0
    """How much of the last `save` was training's own work: what is clocked is the rest."""

    def open(self) -> None:
        """Ready to save and load; ImportError when a package is missing."""

    def ready(self, state: State, directory: Path) -> None:
        """What a training run has done long before it saves. Runs outside the clock, before each `save`."""

    def save(self, state: State, directory: Path) -> None:
        """The state is in `directory` (fresh, or used by this contender before) and on the disk.

        Where it is only the blocking part of a save in the background that is measured: the state may be changed.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """What the last `save` began is on the disk. Runs outside the clock."""

    def load(self, directory: Path, into: Tree) -> Any:
        """What was saved, every byte of it in memory.

        `into` is a warm tree of the state's shape, for a contender whose way it is to restore in place.
        """
        raise NotImplementedError

    def clear(self, directory: Path) -> None:
        """Remove what the last `save` left. Runs outside the clock."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Nothing that `open` or `save` started is left."""
