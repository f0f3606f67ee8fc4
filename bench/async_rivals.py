"""The other checkpointers' saves in the background, each as it comes and at its best for what training waits for.

Durable at the end of `finish`, which waits and then syncs what the writer has not.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contender import Contender
from bench.report import seconds_text
from bench.rounds import say
from bench.workplace import sync_tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.state import State

__all__ = ["DcpAsync", "DcpAsyncProcess", "DcpAsyncReuse", "OrbaxAsync", "OrbaxAsyncRaw"]

TRIALS = 3
"""Saves by which the best stager is found, after one that makes its buffers."""


class DcpAsync(Contender):
    """dcp.async_save as it comes: copied into new memory, written by a thread."""

    name = "dcp-async"
    note = "as it comes: a thread"

    def __init__(self) -> None:
        self._future: Any = None
        self._stager: Any = None

    def open(self) -> None:
        self._dcp = importlib.import_module("torch.distributed.checkpoint")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant

    def save(self, state: State, directory: Path) -> None:
        self._directory = directory
        # Not with a FileSystemWriter: that is a stager too, an older one, and would be used as such.
        self._future = self._dcp.async_save(
            state.tree, checkpoint_id=directory, async_stager=self._stager, no_dist=True
        )

    def finish(self) -> None:
        if self._future is not None:
            future, self._future = self._future, None
            future.result()
            sync_tree(self._directory)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what failed was told where it was measured
            self.finish()
        if self._stager is not None:
            self._stager.close()
            self._stager = None


class DcpAsyncReuse(DcpAsync):
    """With the stager that keeps its buffers and is the fastest here. One is kept, because each holds a whole state."""

    name = "dcp-async-reuse"

    def open(self) -> None:
        super().open()
        self._staging = importlib.import_module("torch.distributed.checkpoint.staging")

    def ready(self, state: State, directory: Path) -> None:
        if self._stager is not None:
            return
        stagers = self._stagers(state)
        took: dict[str, float] = {}
        for name, make in stagers.items():
            self._stager = make()
            seconds = []
            for _ in range(1 + TRIALS):
                start_s = time.perf_counter()
                self.save(state, directory)
                seconds.append(time.perf_counter() - start_s)
                self.finish()
                self.clear(directory)
            took[name] = min(seconds[1:])
            say(f"a stager to choose from: {name} {took[name]:.3f} s")
            self._stager.close()
            self._stager = None
        best, *others = sorted(took, key=lambda name: took[name])
        self.note = "; ".join([best, *(f"{other}: {seconds_text(took[other])} s" for other in others)])
        self._stager = stagers[best]()
        self.save(state, directory)
        self.finish()
        self.clear(directory)

    def _stagers(self, state: State) -> dict[str, Callable[[], Any]]:
        staging = self._staging

        def default(*, shared: bool) -> Any:
            options = staging.StagingOptions(
                use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
            )
            return staging.DefaultStager(options)

        def blocking() -> Any:
            stager = staging.BlockingAsyncStager(cache_staged_state_dict=True)
            # It would pin the memory of its cache, which takes an accelerator; this is what it does without one.
            stager.state_dict_cache = staging._create_cpu_state_dict(state.tree)
            return stager

        return {
            "DefaultStager": lambda: default(shared=False),
            "DefaultStager, shared memory": lambda: default(shared=True),
            "BlockingAsyncStager, cached, not pinned": blocking,
        }


class DcpAsyncProcess(DcpAsync):
    """dcp.async_save with a process that writes."""

    name = "dcp-async-process"
    note = "a process writes"

    def open(self) -> None:
        super().open()
        self._saver = importlib.import_module("torch.distributed.checkpoint.state_dict_saver")
        self._executor: Any = importlib.import_module("torch.distributed.checkpoint._async_process_executor")
        self._dist = importlib.import_module("torch.distributed")
        os.environ.setdefault("MASTER_ADDR", "localhost")
        self._folder = tempfile.TemporaryDirectory(prefix="tierkeep-bench-")
        meeting = Path(self._folder.name) / "meeting"
        self._dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)

    def save(self, state: State, directory: Path) -> None:
        self._directory = directory
        kind = self._saver.AsyncCheckpointerType.PROCESS
        self._future = self._dcp.async_save(state.tree, checkpoint_id=directory, async_checkpointer_type=kind)

    def close(self) -> None:
        super().close()
        self._executor._CHECKPOINT_PROCESS = None  # its end is the process's end; torch never lets go of it
        self._dist.destroy_process_group()
        self._folder.cleanup()


class OrbaxAsync(Contender):
    """Orbax's AsyncCheckpointer with the standard handler, as it comes: zstd, OCDBT."""

    name = "orbax-async"

    def open(self) -> None:
        self._ocp = importlib.import_module("orbax.checkpoint")
        self._checkpointer = self._ocp.AsyncCheckpointer(self._ocp.StandardCheckpointHandler())
        self._arguments: Callable[[Any], Any] = self._ocp.args.StandardSave

    def save(self, state: State, directory: Path) -> None:
        self._directory = directory
        self._checkpointer.save(directory, args=self._arguments(state.tree))

    def finish(self) -> None:
        self._checkpointer.wait_until_finished()
        sync_tree(self._directory)

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxAsyncRaw(OrbaxAsync):
    """With compression switched off."""

    name = "orbax-async-raw"

    def open(self) -> None:
        super().open()
        self._checkpointer.close()
        self._checkpointer = self._ocp.AsyncCheckpointer(self._ocp.PyTreeCheckpointHandler(use_compression=False))
        self._arguments = self._ocp.args.PyTreeSave
