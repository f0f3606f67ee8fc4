"""What the crash tests look at: the steps of a root, what else lies there, and what a process holds."""

from __future__ import annotations

import os
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkeep.checkpointer import Checkpointer
from tierkeep.options import PAGE, SaveOptions
from tierkeep.restore.place import NOTHING
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SMALL", "assert_steps", "checkpointer", "file_bytes", "held", "leftovers", "others", "restore", "state"]

SMALL = SaveOptions(chunk_nbytes=3 * PAGE, block_nbytes=PAGE, lanes=1, lane_nbytes=8 * PAGE)
"""One lane: every run makes the same calls in the same order. Several batches, and chunks that fill a batch."""

_LEFTOVER = re.compile(r"\d+\.tierkeep-(tmp|trash|old)-[0-9a-f]{16}\Z")


def state(seed: int, nbytes: int = 20 * PAGE) -> dict[str, Any]:
    """A state that no other seed gives any part of."""
    rng = np.random.default_rng(seed)
    big = rng.integers(0, 1 << 32, nbytes // 8, np.uint64)
    return {"step": seed, "name": f"state {seed}", "big": big, "deep": {"small": rng.standard_normal((3, 5))}}


def checkpointer(root: Any, **settings: Any) -> Checkpointer:
    """A checkpointer of numpy states."""
    defaults: dict[str, Any] = {"options": SMALL, "asynchronous": False}
    return Checkpointer(NumpyAdapter(), root, **(defaults | settings))


def restore(steps: Checkpointer, step: int | None = None, **relaxations: Any) -> Any:
    """What an adapter's `restore` without a target gives."""
    return steps._restore(step, NOTHING, keys=None, device=None, dry_run=False, options=None, relaxations=relaxations)


def assert_steps(root: Path, expected: Mapping[int, Any]) -> None:
    """Exactly these steps are visible, each one whole and bit for bit what it should be."""
    from tierkeep.testing.strategies import exact_form  # here, so that a child process starts without hypothesis

    with checkpointer(root) as steps:
        assert steps.steps() == sorted(expected)
        for step, value in expected.items():
            assert exact_form(restore(steps, step)) == exact_form(value), step


def file_bytes(path: Path) -> dict[str, bytes]:
    """The content of every file below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def leftovers(root: Path) -> list[str]:
    """Names that only a dead writer leaves."""
    return [path.name for path in root.iterdir() if _LEFTOVER.match(path.name)]


def others(root: Path) -> list[str]:
    """Names that are neither steps nor leftovers."""
    return [p.name for p in root.iterdir() if not _LEFTOVER.match(p.name) and not p.name.isdecimal()]


def held() -> tuple[list[str], list[str]]:
    """What this process holds open, and its threads."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing itself
            continue
    return sorted(found), sorted(thread.name for thread in threading.enumerate())
