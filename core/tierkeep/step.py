"""The layout of a root: which names are steps, and which are ours while a step is made or removed."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from .format.orbax_metadata import CHECKPOINT_METADATA

if TYPE_CHECKING:
    from .tiers.local_disk import LocalDisk

__all__ = ["ITEM", "doomed", "is_step_name", "leftover", "list_steps", "replaced", "resolve", "step_path", "temporary"]

ITEM = "default"  # the item of a step, Orbax's name for the only one
_LEFTOVER = re.compile(r"(.+)\.tierkeep-(tmp|trash|old)-[0-9a-f]{16}\Z", re.DOTALL)
_STEP = re.compile(r"(0|[1-9]\d{0,18})\Z")


def resolve(path: object) -> Path:
    """An absolute path: `~` expanded, fixed at the call whatever the working directory is later.

    Raises TypeError for what is no path, ValueError for the empty one.
    """
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a path must be str, bytes or os.PathLike, not {type(path).__name__}")
    text = os.fsdecode(os.fspath(path))
    if not text:
        raise ValueError("the path is empty")
    if "://" in text:
        raise ValueError(f"{text} is a URL: this release keeps checkpoints in local directories")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ValueError(f"the home directory of {text} is not known: write ./{text} for a directory of that name")
    return Path(os.path.abspath(expanded))


def step_path(root: Path, step: int) -> Path:
    """Where a step stands. Raises TypeError or ValueError for what cannot be a step."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(
            f"a step must be a whole number, not {type(step).__name__}; a save takes it first: save(step, state)"
        )
    number = step.__index__()
    if not 0 <= number < 10**18:
        raise ValueError(f"a step must be from 0 to 10^18 - 1, not {number}")
    return root / str(number)


def temporary(path: Path) -> Path:
    """A name beside `path`, in the same file system, that nobody else uses."""
    return path.with_name(f"{_short(path.name)}.tierkeep-tmp-{secrets.token_hex(8)}")


def doomed(path: Path) -> Path:
    """A name for what is no longer visible and may be removed at any time."""
    return path.with_name(f"{_short(path.name)}.tierkeep-trash-{secrets.token_hex(8)}")


def replaced(path: Path) -> Path:
    """A name for what a new checkpoint takes the place of, where the two names cannot be swapped at once."""
    return path.with_name(f"{_short(path.name)}.tierkeep-old-{secrets.token_hex(8)}")


def leftover(name: str) -> tuple[str, str] | None:
    """(what it was made for, its state: `tmp`, `trash` or `old`) of a name that is ours; None for any other."""
    found = _LEFTOVER.match(name)
    return None if found is None else (found[1], found[2])


def _short(name: str) -> str:
    """What of a name leaves room for an ending: file systems take 255 bytes."""
    return os.fsdecode(os.fsencode(name)[:200])


def is_step_name(name: str) -> bool:
    return _STEP.match(name) is not None


def list_steps(disk: LocalDisk, root: Path) -> list[int]:
    """The steps that stand in a root, oldest first, damaged ones too. Names that are not ours are left out."""
    try:
        entries = disk.list_dir(root)
    except FileNotFoundError:
        return []
    return sorted(
        int(entry.name)
        for entry in entries
        if _STEP.match(entry.name) and _leads_to_dir(disk, entry) and _holds_item(disk, Path(entry.path))
    )


def _leads_to_dir(disk: LocalDisk, entry: os.DirEntry[str]) -> bool:
    # `entry.is_dir()` raises for a link that leads back to itself.
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and disk.is_dir(Path(entry.path)))


def _holds_item(disk: LocalDisk, path: Path) -> bool:
    """Whether a directory was made as a step: its name alone does not make it one, damage does not undo it."""
    return disk.exists(path / CHECKPOINT_METADATA) or disk.exists(path / ITEM)
