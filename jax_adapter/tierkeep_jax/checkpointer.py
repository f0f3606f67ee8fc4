"""The calls of the JAX adapter: the core's, with this framework filled in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tierkeep import checkpointer as core
from tierkeep import engine
from tierkeep.restore.place import NOTHING

from .adapter import JaxAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkeep.engine import SaveReport, VerifyReport
    from tierkeep.options import MemoryOptions, RestoreOptions, SaveOptions
    from tierkeep.tiers.retain import Keep

__all__ = ["Checkpointer", "load", "save", "verify"]


def save(
    path: str | os.PathLike[str], tree: Any, *, overwrite: bool = False, options: SaveOptions | None = None
) -> SaveReport:
    """Saves `tree` at `path`, in Orbax's order of arguments.

    `tree` is any pytree: arrays under any sharding over this process's devices, random keys, numpy arrays, numbers,
    strings, None and containers, registered nodes included. After the call the checkpoint is a directory at `path`,
    visible and durable, whole; stock Orbax restores it too. On any error nothing is visible and what stood at `path`
    is as it was.

    Raises CheckpointExistsError if something stands at `path` and `overwrite` is not set; UnsupportedLeafError and
    NameCollisionError naming the key; StorageError with the system's reason.
    """
    if isinstance(tree, str | bytes | os.PathLike) and not isinstance(path, str | bytes | os.PathLike):
        raise TypeError("save takes the path first, as Orbax does: save(path, tree)")
    return engine.save_checkpoint(JaxAdapter(), path, tree, overwrite=overwrite, options=options)


def load(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    keys: Sequence[str] | None = None,
    device: Any = None,
    dry_run: bool = False,
    options: RestoreOptions | None = None,
    **relaxations: Any,
) -> Any:
    """The tree at `path` (an item or a step directory), every byte verified.

    Without `target`, what was saved comes back: arrays on `device` (a jax device or sharding; the default device if
    None), numpy arrays as numpy arrays, containers and plain values of the same types; a class that would have to be
    imported as a mapping that remembers its name. Arrays of a dtype that jax does not have as configured come back as
    numpy arrays. With `target` (arrays or ShapeDtypeStructs in the tree's own structure), every array comes back with
    the target's shape, dtype and sharding, and only the bytes that its shards need are read, each once.

    `keys` restores only leaves whose name, or a name above it, matches a pattern such as `"params.*"`. With `dry_run`
    the RestorePlan comes back and nothing is read. Relaxations: `missing="keep"`, `unexpected="ignore"`,
    `shape="keep"`, `dtype="cast"`, `pickle=True`; see RestoreOptions.

    Raises CheckpointNotFoundError, MismatchError listing every difference, and CorruptCheckpointError listing every
    damaged leaf. `target` is never changed.
    """
    return engine.load_checkpoint(
        JaxAdapter(),
        path,
        NOTHING if target is None else target,
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
    return engine.verify_checkpoint(JaxAdapter(), path, options)


class Checkpointer(core.Checkpointer):
    """The steps of one JAX run. See `tierkeep.checkpointer.Checkpointer` for `save` and what holds.

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
            JaxAdapter(),
            root,
            keep=keep,
            options=options,
            memory=memory,
            asynchronous=asynchronous,
            disk_every=disk_every,
        )

    def restore(
        self,
        step: int | None = None,
        target: Any = None,
        *,
        keys: Sequence[str] | None = None,
        device: Any = None,
        dry_run: bool = False,
        options: RestoreOptions | None = None,
        **relaxations: Any,
    ) -> Any:
        """The tree of `step` (the newest if None), as `load` gives it. `target` and the rest are as there.

        Raises CheckpointNotFoundError if there is no such step, MismatchError listing every difference, and
        CorruptCheckpointError listing every damaged leaf.
        """
        return self._restore(
            step,
            NOTHING if target is None else target,
            keys=keys,
            device=device,
            dry_run=dry_run,
            options=options,
            relaxations=relaxations,
        )
