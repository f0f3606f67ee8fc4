"""tierkeep itself, held to the same interface as its rivals; nothing is added for durability, which it promises.

Saves wait for the disk here; what training waits for when it does not is `bench.async_ours`.
"""

from __future__ import annotations

import importlib
import shutil
from typing import TYPE_CHECKING, Any

from bench.contender import Contender
from bench.memory import MemoryPeak

if TYPE_CHECKING:
    from pathlib import Path

    from bench.state import State, Tree

__all__ = ["PACKAGES", "Ours", "OursFirst", "OursInto", "OursNew"]

PACKAGES = {"torch": "tierkeep_torch", "jax": "tierkeep_jax"}


class Ours(Contender):
    """One checkpointer, opened once, saving step after step; a restore goes into new memory."""

    name = "ours"

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._checkpointer: Any = None
        self._step = 0

    def open(self) -> None:
        self._package = importlib.import_module(PACKAGES[self._framework])

    def save(self, state: State, directory: Path) -> None:
        # The peak of the first save, before any other contender has left memory that could be used again.
        peak = MemoryPeak() if self._checkpointer is None else None
        self._opened(directory).save(self._step + 1, state.tree)
        self._step += 1
        if peak is not None:
            extra_nbytes = peak.extra_nbytes()
            if extra_nbytes is not None:
                self.note = f"peak extra memory {extra_nbytes / 2**20:.0f} MiB"

    def load(self, directory: Path, into: Tree) -> Any:
        return self._ready(self._opened(directory).restore(self._step))

    def clear(self, directory: Path) -> None:
        shutil.rmtree(directory / str(self._step), ignore_errors=True)

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _opened(self, directory: Path) -> Any:
        if self._checkpointer is None:
            self._checkpointer = self._package.Checkpointer(directory, keep=None, asynchronous=False)
        return self._checkpointer

    def _ready(self, tree: Any) -> Any:
        return importlib.import_module("jax").block_until_ready(tree) if self._framework == "jax" else tree


class OursFirst(Ours):
    """A checkpointer opened, used once and closed: what a process's first save costs."""

    name = "ours-first"

    def save(self, state: State, directory: Path) -> None:
        super().save(state, directory)
        self.close()
        self.note = "checkpointer opened and closed each time"


class OursNew(Ours):
    """A restore that makes the state, as a reader without a model does."""

    name = "ours-new"
    note = "into new memory"

    def save(self, state: State, directory: Path) -> None:
        super().save(state, directory)
        self.note = type(self).note


class OursInto(Ours):
    """A restore into the tensors of a live state, as a job that resumes does: its model is there."""

    note = "in place"

    def save(self, state: State, directory: Path) -> None:
        super().save(state, directory)
        self.note = type(self).note

    def load(self, directory: Path, into: Tree) -> Any:
        return self._opened(directory).restore(self._step, into=into)
