"""Locate: from a path to an opened source, its format found from the content."""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from ..format.orbax_metadata import METADATA
from ..format.part import PART, WHOLE
from ..save.commit import MANIFEST
from ..step import ITEM, is_step_name
from .opened import open_checkpoint
from .source import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..tiers.local_disk import LocalDisk
    from .source import Source

__all__ = ["find_item", "open_source"]

_ZARR = ("zarr.json", ".zarray", ".zgroup", MANIFEST)
_LOOKED_FOR = (
    f"a checkpoint directory ({WHOLE}, or Orbax's {METADATA}) in it and in {ITEM}/, zarr arrays or an OCDBT database, "
    "torch.distributed.checkpoint's .metadata, a .safetensors file or index, a torch.save file"
)
_DIRECTORIES = 200
_PROCESS = re.compile(r"ocdbt\.process_\d+\Z")
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80\x02"


@contextlib.contextmanager
def open_source(disk: LocalDisk, path: Path, *, direct: bool, holds: str) -> Iterator[Source]:
    """Opens whatever checkpoint is at `path`; closes its files at the end.

    Raises CheckpointNotFoundError naming what was looked for, UnsupportedFormatError for a format that is known but
    not read, CorruptCheckpointError naming the file for one that is damaged.
    """
    try:
        disk.size(path)
    except (FileNotFoundError, NotADirectoryError):  # a link that leads nowhere is nothing too
        raise CheckpointNotFoundError(str(path), "anything at that path", holds) from None
    with contextlib.ExitStack() as stack:
        if disk.is_dir(path):
            yield _open_directory(disk, path, direct, holds, stack)
        else:
            yield _open_file(disk, path, direct, holds, stack)


def find_item(disk: LocalDisk, path: Path) -> Path | None:
    """The item directory at `path`: itself, its item of the usual name, or its only one; None if there is none.

    Raises CheckpointNotFoundError, naming them, if there are several to choose from.
    """
    for item in (path, path / ITEM):
        if _is_item(disk, item):
            return item
    items = [entry.name for entry in disk.list_dir(path) if entry.is_dir() and _is_item(disk, path / entry.name)]
    if len(items) == 1:
        return path / items[0]
    if items and not all(is_step_name(name) for name in items):
        raise CheckpointNotFoundError(str(path), f"one item, but it holds {', '.join(sorted(items))}: name one")
    return None


def _is_item(disk: LocalDisk, path: Path) -> bool:
    return disk.exists(path / WHOLE) or disk.exists(path / METADATA)


def _open_directory(disk: LocalDisk, path: Path, direct: bool, holds: str, stack: contextlib.ExitStack) -> Source:
    item = find_item(disk, path)
    if item is not None and disk.exists(item / WHOLE):
        return Stored(stack.enter_context(open_checkpoint(disk, item, direct=direct, holds=holds)))
    _refuse_half_of_ours(disk, item or path, holds)
    # Only needed for what others wrote: opening our own takes neither the time nor the memory of TensorStore.
    from .foreign import dcp, orbax, safetensors

    if item is not None:
        return orbax.open_orbax(disk, item, holds)
    names = sorted(entry.name for entry in disk.list_dir(path))
    indexes = [name for name in names if name.endswith(safetensors.INDEX_SUFFIX)]
    tensors = [name for name in names if name.endswith(safetensors.SUFFIX)]
    if len(indexes) == 1 or (not indexes and len(tensors) == 1):
        file = path / (indexes or tensors)[0]
        return stack.enter_context(safetensors.open_safetensors(disk, file, direct=direct, holds=holds))
    steps = [name for name in names if is_step_name(name)]
    if steps and not any(mark in names for mark in _ZARR):
        last = max(steps, key=int)
        raise CheckpointNotFoundError(str(path), f"one checkpoint, but it is a root of steps: name one, such as {last}")
    if _holds_zarr(disk, path):
        found = orbax.open_zarr(disk, path, holds)
        if found is not None:
            return found
    if any(map(dcp.is_metadata, names)):
        return dcp.open_dcp(disk, path, names, direct=direct, holds=holds)
    if indexes or tensors:
        several = ", ".join((indexes or tensors)[:8])
        raise CheckpointNotFoundError(str(path), f"one file or index, but it holds {several}: name one", holds)
    raise CheckpointNotFoundError(str(path), _LOOKED_FOR, holds)


def _refuse_half_of_ours(disk: LocalDisk, path: Path, holds: str) -> None:
    """Without our record of the whole, a checkpoint of ours would come back poorer: other dtypes, keys and containers."""
    for entry in disk.list_dir(path):
        part = path / entry.name / PART
        if _PROCESS.match(entry.name) and disk.exists(part):
            findings = [f"missing: {path / WHOLE} (remove {part} too to have the rest read as Orbax reads it)"]
            raise CorruptCheckpointError(str(path), findings, holds)


def _holds_zarr(disk: LocalDisk, path: Path) -> bool:
    """Whether zarr metadata stands in the directory or near below it; looks at no more than `_DIRECTORIES`."""
    waiting = [path]
    for _ in range(_DIRECTORIES):
        if not waiting:
            return False
        entries = disk.list_dir(waiting.pop(0))
        if any(entry.name in _ZARR for entry in entries):
            return True
        waiting += [path / entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return False


def _open_file(disk: LocalDisk, path: Path, direct: bool, holds: str, stack: contextlib.ExitStack) -> Source:
    from .foreign import safetensors

    head = disk.read_head(path, 16)
    named = path.name.endswith((safetensors.SUFFIX, safetensors.INDEX_SUFFIX))
    if named or safetensors.is_safetensors(head, disk.size(path)):
        return stack.enter_context(safetensors.open_safetensors(disk, path, direct=direct, holds=holds))
    if head.startswith((_ZIP, _PICKLE)):
        # The one format whose reader needs its framework: torch's own loader, which takes only what torch calls safe.
        try:
            torch_save: Any = importlib.import_module("tierkeep_torch.torch_save")
        except ImportError as error:
            raise UnsupportedFormatError(str(path), "a torch.save file", "them with torch installed") from error
        source: Source = torch_save.open_torch_save(path)
        return source
    raise CheckpointNotFoundError(str(path), _LOOKED_FOR, holds)
