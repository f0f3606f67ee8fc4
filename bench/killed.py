"""A training process that is killed after a save, and the memory image that it leaves: what a restore finds there.

`python -m bench.killed FRAMEWORK STATE GB ROOT` is that process. It saves the state in the background, says so when the
step is whole in memory, and waits to be killed; it ends by itself when its standard input does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.ours import PACKAGES, Ours
from bench.state import make_state
from tierkeep.memory.arena import own_arena, remove_arena
from tierkeep.options import MemoryOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.state import State, Tree

__all__ = ["OursMemory", "main"]

SOURCES = Path(__file__).parent.parent
STEP = 1
SAVED = "saved"


class OursMemory(Ours):
    """A restore from the image that a killed process left in this host's memory, by a checkpointer opened for it.

    Guarantees: nothing of the step is on the disk when it is restored; the process that was killed and its worker have
    ended; `close` removes the image.
    """

    name = "ours-memory"

    def __init__(self, framework: str, kind: str, gb: float) -> None:
        super().__init__(framework)
        self._kind = kind
        self._gb = gb
        self._in_place = framework == "torch"
        self._root: Path | None = None

    def save(self, state: State, directory: Path) -> None:
        self._root = directory
        command = [sys.executable, "-m", "bench.killed", self._framework, self._kind, str(self._gb), str(directory)]
        # Where this process imports from, that one does too.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCES), *sys.path]))}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as child:
            try:
                assert child.stdout is not None
                said = child.stdout.readline()
            finally:
                child.kill()
        if said.strip() != SAVED:
            raise RuntimeError(f"the process that was to be killed after its save ended with {child.returncode}")
        self._await_worker()
        shutil.rmtree(directory / str(STEP))  # so that there is nowhere else to restore from
        self.note = (
            f"{'in place' if self._in_place else 'into new memory'}, from the image of a process that was killed"
        )

    def load(self, directory: Path, into: Tree) -> Any:
        with self._package.Checkpointer(directory) as checkpointer:
            return self._ready(checkpointer.restore(into=into) if self._in_place else checkpointer.restore())

    def close(self) -> None:
        if self._root is not None:
            arena = self._await_worker()
            if arena is not None:
                remove_arena(arena)

    def _await_worker(self) -> Any:
        """The image's arena, once the worker has finished what was sealed; None if there is none."""
        assert self._root is not None
        arena = own_arena(self._root, MemoryOptions().directory)
        if arena is not None:
            with contextlib.suppress(FileNotFoundError):
                arena.lock_worker().close()
        return arena


def main(arguments: Sequence[str]) -> None:
    """Save, say so, and wait to be killed."""
    framework, kind, gb, root = arguments
    state = make_state(kind, float(gb), framework)
    checkpointer = importlib.import_module(PACKAGES[framework]).Checkpointer(root)
    checkpointer.save(STEP, state.tree).kept.wait()
    print(SAVED, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
