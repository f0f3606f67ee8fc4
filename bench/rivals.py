"""The other checkpointers, each at its usual settings and, where that is faster, at its best.

Every `save` ends with `sync_tree`, which costs nothing where the writer has synced its files itself. Packages are
imported by name in `open`: one that is missing is a note in the report.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from bench.contender import Contender
from bench.workplace import sync_tree

if TYPE_CHECKING:
    from pathlib import Path

    from bench.state import State, Tree

__all__ = ["Dcp", "Orbax", "OrbaxRaw", "Safetensors", "TorchLoad", "TorchSave", "TorchSaveNoCrc"]

PAGE_NBYTES = 4096


class TorchSave(Contender):
    """torch.save, its zip file's checksums on."""

    name = "torch.save"
    crc = True

    def open(self) -> None:
        self._torch = importlib.import_module("torch")

    def save(self, state: State, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        serialization = self._torch.serialization
        before = serialization.get_crc32_options()
        serialization.set_crc32_options(self.crc)
        try:
            with open(directory / "state.pt", "wb") as file:
                self._torch.save(state.tree, file)
                file.flush()
                os.fsync(file.fileno())
        finally:
            serialization.set_crc32_options(before)
        sync_tree(directory)

    def load(self, directory: Path, into: Tree) -> Any:
        return self._torch.load(directory / "state.pt", weights_only=True, mmap=False)


class TorchSaveNoCrc(TorchSave):
    name = "torch.save-nocrc"
    crc = False


class TorchLoad(TorchSave):
    """The same under the name that a restore is known by."""

    name = "torch.load"
    note = "weights_only, not mapped"


class Safetensors(Contender):
    """The arrays alone, under flat names: the format holds nothing else."""

    name = "safetensors"

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self.note = "arrays only, no checksums"

    def open(self) -> None:
        self._torch = importlib.import_module("torch") if self._framework == "torch" else None
        self._package = importlib.import_module("safetensors.torch" if self._torch else "safetensors.flax")

    def save(self, state: State, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._package.save_file(state.arrays(), directory / "state.safetensors")
        sync_tree(directory)

    def load(self, directory: Path, into: Tree) -> Any:
        arrays = self._package.load_file(directory / "state.safetensors")
        if self._torch:
            # `load_file` only maps the file (milliseconds for gigabytes): read a byte of every page.
            for tensor in arrays.values():
                tensor.flatten().view(self._torch.uint8)[::PAGE_NBYTES].sum()
        return arrays


class Dcp(Contender):
    """torch.distributed.checkpoint in one process; it restores in place."""

    def __init__(self, n_threads: int) -> None:
        self.name = f"dcp-{n_threads}"
        self.note = f"{n_threads} thread{'s'[: n_threads > 1]}"
        self._n_threads = n_threads

    def open(self) -> None:
        self._dcp = importlib.import_module("torch.distributed.checkpoint")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant

    def save(self, state: State, directory: Path) -> None:
        writer = self._dcp.FileSystemWriter(directory, thread_count=self._n_threads, sync_files=True)
        self._dcp.save(state.tree, storage_writer=writer, no_dist=True)
        sync_tree(directory)

    def load(self, directory: Path, into: Tree) -> Any:
        self._dcp.load(into, storage_reader=self._dcp.FileSystemReader(directory), no_dist=True)
        return into


class Orbax(Contender):
    """Orbax's StandardCheckpointer as it comes: zstd, OCDBT. Torch tensors are given as NumPy views of their memory."""

    name = "orbax"

    def open(self) -> None:
        self._ocp = importlib.import_module("orbax.checkpoint")
        self._jax = importlib.import_module("jax")
        self._checkpointer = self._ocp.StandardCheckpointer()

    def save(self, state: State, directory: Path) -> None:
        self._checkpointer.save(directory, state.numpy_tree() if state.framework == "torch" else state.tree)
        self._checkpointer.wait_until_finished()
        sync_tree(directory)

    def load(self, directory: Path, into: Tree) -> Any:
        return self._jax.block_until_ready(self._checkpointer.restore(directory))

    def close(self) -> None:
        self._checkpointer.close()


class OrbaxRaw(Orbax):
    """Orbax with compression switched off."""

    name = "orbax-raw"

    def open(self) -> None:
        super().open()
        self._checkpointer.close()
        self._checkpointer = self._ocp.Checkpointer(self._ocp.PyTreeCheckpointHandler(use_compression=False))

    def save(self, state: State, directory: Path) -> None:
        tree = state.numpy_tree() if state.framework == "torch" else state.tree
        self._checkpointer.save(directory, args=self._ocp.args.PyTreeSave(tree))
        sync_tree(directory)

    def load(self, directory: Path, into: Tree) -> Any:
        return self._jax.block_until_ready(self._checkpointer.restore(directory, args=self._ocp.args.PyTreeRestore()))
