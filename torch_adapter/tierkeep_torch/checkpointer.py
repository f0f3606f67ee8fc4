"""The calls of the PyTorch adapter: the core's, with this framework filled in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierkeep import checkpointer as core
from tierkeep import engine
from tierkeep.restore.place import NOTHING

from .adapter import TorchAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierkeep.engine import SaveReport, VerifyReport
    from tierkeep.options import MemoryOptions, RestoreOptions, SaveOptions
    from tierkeep.tiers.retain import Keep

__all__ = ["Checkpointer", "load", "save", "verify"]


def save(
    state: Any, path: str | os.PathLike[str], *, overwrite: bool = False, options: SaveOptions | None = None
) -> SaveReport:
    """Saves `state` at `path`, in torch.save's order of arguments.

    `state` is any nest of tensors, modules, optimizers, other objects with `state_dict()` and `load_state_dict()`,
    numbers, strings, None and containers. After the call the checkpoint is a directory at `path`, visible and durable,
    whole; stock Orbax restores it too. On any error nothing is visible and what stood at `path` is as it was.

    Raises CheckpointExistsError if something stands at `path` and `overwrite` is not set; UnsupportedLeafError and
    NameCollisionError naming the key; StorageError with the system's reason.
    """
    if isinstance(state, str | bytes | os.PathLike) and not isinstance(path, str | bytes | os.PathLike):
        raise TypeError("save takes the state first, as torch.save does: save(state, path)")
    return engine.save_checkpoint(TorchAdapter(), path, state, overwrite=overwrite, options=options)


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    keys: Sequence[str] | None = None,
    device: Any = None,
    dry_run: bool = False,
    options: RestoreOptions | None = None,
    **relaxations: Any,
) -> Any:
    """The state at `path` (an item or a step directory), every byte verified.

    Without `into`, what was saved comes back: tensors on `device` (the CPU by default, whatever they were saved from),
    containers and plain values of the same types; objects as the state they gave; a named tuple or dataclass as a
    mapping that remembers its name. With `into`, tensors are filled in place, dicts and lists are updated in place,
    modules and optimizers take their state, and `into` is returned (rebuilt where it is immutable).

    `keys` restores only leaves whose name, or a name above it, matches a pattern such as `"model.*"`. With `dry_run`
    the RestorePlan comes back and nothing is read or changed. Relaxations: `missing="keep"`, `unexpected="ignore"`,
    `shape="keep"`, `dtype="cast"`, `pickle=True`; see RestoreOptions.

    Raises CheckpointNotFoundError, MismatchError listing every difference (the target is untouched), and
    CorruptCheckpointError listing every damaged leaf (the target may be partly filled, with verified bytes only).
    """
    return engine.load_checkpoint(
        TorchAdapter(),
        path,
        NOTHING if into is None else into,
        keys=keys,
        device=device,
        dry_run=dry_run,
        options=options,
        relaxations=relaxations,
    )


def verify(path: str | os.PathLike[str], *, options: RestoreOptions | None = None) -> VerifyReport:
    """Reads all of the checkpoint at `path` once and compares it with its checksums; no memory for it is needed.

    It looks at more than a load does: at padding, and at the files that only stock readers need. Raises
    CorruptCheckpointError listing everything that was found, and CheckpointNotFoundError. Nothing is changed.
    """
    return engine.verify_checkpoint(TorchAdapter(), path, options)


class Checkpointer(core.Checkpointer):
    """The steps of one PyTorch run. See `tierkeep.checkpointer.Checkpointer` for `save` and what holds.

    `root` is created by the first save; `keep` is how many of the newest steps stay, or a `Keep` that names them
    otherwise (None: all). After a save has left the rest durable, what it does not name is removed. Saves go on in the
    background unless `asynchronous` is False; steps that `disk_every` does not divide stay in this host's memory, which
    `memory` has the settings of.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | Keep | None = None,
        options: SaveOptions | None = None,
        memory: MemoryOptions | None = None,
        asynchronous: bool = True,
        disk_every: int = 1,
    ) -> None:
        super().__init__(
            TorchAdapter(),
            root,
            keep=keep,
            options=options,
            memory=memory,
            asynchronous=asynchronous,
            disk_every=disk_every,
        )
        self._hooks: list[Any] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Has every `optimizer.step()` wait for the copies of deferred saves first, until the checkpointer is closed.

        That is what makes `save(..., snapshot="deferred")` safe. What changes the state otherwise (a scheduler of buffers,
        weights set by hand) must wait for the handle's `wait_staged()`; in-place operations that do not are found out, and
        the save fails and names the leaf. What torch does not count as one is not seen: writes through numpy or `.data`,
        the statistics of `batch_norm`, and those of a fused optimizer that is not attached.
        """
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self.wait_staged()))

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().close()

    def restore(
        self,
        step: int | None = None,
        into: Any = None,
        *,
        keys: Sequence[str] | None = None,
        device: Any = None,
        dry_run: bool = False,
        options: RestoreOptions | None = None,
        **relaxations: Any,
    ) -> Any:
        """The state of `step` (the newest if None), as `load` gives it. `into` and the rest are as there.

        Raises CheckpointNotFoundError if there is no such step, MismatchError listing every difference, and
        CorruptCheckpointError listing every damaged leaf.
        """
        return self._restore(
            step,
            NOTHING if into is None else into,
            keys=keys,
            device=device,
            dry_run=dry_run,
            options=options,
            relaxations=relaxations,
        )
