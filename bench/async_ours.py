"""tierkeep's saves in the background: what training waits for. And what the plan of a save costs, new and known."""

from __future__ import annotations

import importlib
import secrets
import statistics
import time
from typing import TYPE_CHECKING, Any

from bench.contender import Contender
from bench.ours import PACKAGES
from bench.report import seconds_text
from tierkeep.adapter import flatten
from tierkeep.format.ocdbt import DataFile
from tierkeep.memory.collector import collector_paused
from tierkeep.options import SaveOptions
from tierkeep.save.plan import PlanCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.state import State
    from bench.work import Work
    from tierkeep.adapter import Adapter, Snapshot

__all__ = ["OursAsync", "OursAsyncFirst", "OursDeferred", "PlanCached", "PlanFirst", "Run"]

ADAPTERS = {"torch": "TorchAdapter", "jax": "JaxAdapter"}
WORK_PER_COPY = 1.5
"""Forward and backward of the deferred row, in bare copies of the state."""


class Run:
    """One run's checkpointer, for several rows: its images are there once.

    Guarantees: made by the first `checkpointer`, ready for saves when that returns; `close` ends it, also twice.
    """

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._checkpointer: Any = None
        self._step = 0

    def open(self) -> None:
        """ImportError when a package is missing."""
        self._package = importlib.import_module(PACKAGES[self._framework])

    def checkpointer(self, state: State, directory: Path) -> Any:
        """The one checkpointer: in the `directory` of whoever asks first."""
        if self._checkpointer is None:
            self._checkpointer = self._package.Checkpointer(directory, keep=1)
            self._checkpointer.prepare(state.tree)
        return self._checkpointer

    def next_step(self) -> int:
        self._step += 1
        return self._step

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None


class OursAsync(Contender):
    """A save that has returned when the state is copied. Old steps are retired by the checkpointer, as in a run."""

    name = "ours"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._handle: Any = None

    def open(self) -> None:
        self._run.open()

    def ready(self, state: State, directory: Path) -> None:
        self._checkpointer = self._run.checkpointer(state, directory)

    def save(self, state: State, directory: Path) -> None:
        self._handle = self._checkpointer.save(self._run.next_step(), state.tree)

    def finish(self) -> None:
        if self._handle is not None:
            self._handle.result()
            self._handle = None

    def clear(self, directory: Path) -> None:
        """Nothing: its checkpointer keeps one step."""

    def close(self) -> None:
        self._handle = None
        self._run.close()


class OursDeferred(OursAsync):
    """A save that is copied during a forward and backward, and waited for before what would be the optimizer's step."""

    name = "ours-deferred"

    def __init__(self, run: Run, work: Work, copy: Callable[[], float]) -> None:
        super().__init__(run)
        self._work = work
        self._copy = copy
        self._alone: list[float] = []
        self._meanwhile: list[float] = []

    def open(self) -> None:
        super().open()
        self._work.open()

    def ready(self, state: State, directory: Path) -> None:
        super().ready(state, directory)
        # Anew in each round: how fast the machine is at products and at copies changes with its other work.
        self._work.last(WORK_PER_COPY * self._copy())
        self._alone.append(self._work.run())

    def save(self, state: State, directory: Path) -> None:
        self._handle = self._checkpointer.save(self._run.next_step(), state.tree, snapshot="deferred")
        self.computed_s = self._work.run()
        self._checkpointer.wait_staged()
        self._meanwhile.append(self.computed_s)

    def finish(self) -> None:
        super().finish()
        alone_s, meanwhile_s = map(statistics.median, (self._alone, self._meanwhile))
        self.note = (
            f"during a forward and backward of {seconds_text(alone_s)} s, which took {meanwhile_s / alone_s:.2f} times "
            "as long"
        )


class OursAsyncFirst(OursAsync):
    """The first save of a checkpointer that was opened a while before, as by a process whose data is loading."""

    name = "ours-first"

    def __init__(self, framework: str, open_s: float) -> None:
        super().__init__(Run(framework))
        self._open_s = open_s
        self.note = f"of a checkpointer opened {open_s:g} s before"

    def ready(self, state: State, directory: Path) -> None:
        super().ready(state, directory)
        time.sleep(self._open_s)

    def finish(self) -> None:
        super().finish()
        self._run.close()

    def clear(self, directory: Path) -> None:
        Contender.clear(self, directory)


class PlanFirst(Contender):
    """The plan and the index of a structure that was not saved before; the state was looked through already."""

    name = "plan-first"
    note = "plan and index of a structure not seen before"

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._plans = PlanCache()

    def open(self) -> None:
        package = importlib.import_module(f"{PACKAGES[self._framework]}.adapter")
        self._adapter: Adapter = getattr(package, ADAPTERS[self._framework])()

    def ready(self, state: State, directory: Path) -> None:
        self._plans = PlanCache()
        self._look(state)

    def save(self, state: State, directory: Path) -> None:
        with collector_paused():
            plan = self._plans.plan(self._snapshot, SaveOptions())
            image, nodes = (f"d/{secrets.token_hex(16)}" for _ in range(2))
            plan.index.render([DataFile("", image)], nodes, uuid=secrets.token_bytes(16), commit_ns=time.time_ns())

    def _look(self, state: State) -> None:
        start_s = time.perf_counter()
        with collector_paused():
            self._snapshot: Snapshot = flatten(state.tree, self._adapter, pickle_rest=False)
        self._looked_s = time.perf_counter() - start_s


class PlanCached(PlanFirst):
    """The same of a structure that was saved before: what is left is to see that nothing about it has changed."""

    name = "plan-cached"

    def ready(self, state: State, directory: Path) -> None:
        self._look(state)
        if not self._plans.misses:
            self.save(state, directory)
        self.note = f"plan and index of a structure seen before; looking through the state, {seconds_text(self._looked_s)} s, not counted"
