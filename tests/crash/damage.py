"""A tiny checkpoint to be damaged, what a load makes of it, and ways to damage a file and mend it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from tierkeep.checkpointer import Engine
from tierkeep.errors import CorruptCheckpointError, TierkeepError
from tierkeep.options import PAGE, RestoreOptions, SaveOptions
from tierkeep.testing import strategies as tk
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ENGINE",
    "FAST",
    "NEEDED",
    "STATE",
    "WANTED",
    "Saved",
    "flipped",
    "found_by_verify",
    "memory_directory",
    "mended",
    "replaced",
    "restored",
    "save",
    "small_files",
    "verified",
]

FAST = RestoreOptions(lanes=1, lane_nbytes=8 * PAGE, direct=False)
ENGINE = Engine(NumpyAdapter(), SaveOptions(chunk_nbytes=6000, block_nbytes=PAGE, lanes=1, lane_nbytes=8 * PAGE))
_SHARED = np.arange(4, dtype=np.int16)
STATE: dict[Any, Any] = {
    "w": np.arange(1500, dtype=np.float32),  # one chunk, two blocks
    "n": [_SHARED, _SHARED],
    5: np.float16(2),
    "p": ("text", {3}, None),
}
WANTED = tk.exact_form(STATE)
# The files that a load looks at, beside the image: everything else is for stock readers.
NEEDED = frozenset({"tierkeep.json", "part.json"})


class Saved(NamedTuple):
    """One checkpoint."""

    path: Path
    whole: Path
    part: Path
    image: Path

    @classmethod
    def at(cls, path: Path) -> Saved:
        part = path / "ocdbt.process_0" / "part.json"
        image = msgspec.json.decode(part.read_bytes())["image"]
        return cls(path, path / "tierkeep.json", part, path / "ocdbt.process_0" / "d" / image)


@contextlib.contextmanager
def memory_directory() -> Iterator[Path]:
    """A scratch directory, in memory where there is one: these tests write a few bytes very often."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as directory:
        yield Path(directory)


def save(path: Path, state: Any = STATE) -> Saved:
    ENGINE.save(path, state)
    return Saved.at(path)


def small_files(saved: Saved) -> list[Path]:
    """Every file but the image, in order."""
    return sorted(f for f in saved.path.rglob("*") if f.is_file() and f != saved.image)


def restored(path: Path, wanted: Any = WANTED) -> TierkeepError | None:
    """None if a load gives exactly what was saved, or the error it raises; anything else fails the test."""
    raised = None
    try:
        found = tk.exact_form(ENGINE.restore(path, options=FAST, holds="all else holds"))
    except TierkeepError as error:
        raised = error
    if raised is None:
        assert found == wanted, f"{path} gave other data without an error"
        return None
    assert str(path) in str(raised)
    assert "all else holds" in str(raised)
    return raised


def verified(path: Path) -> CorruptCheckpointError | None:
    """What a verification finds; None if it finds nothing."""
    try:
        ENGINE.verify(path, options=FAST, holds="all else holds")
    except CorruptCheckpointError as error:
        return error
    return None


def found_by_verify(path: Path, file: Path) -> bool:
    """Whether a verification finds damage and names the file."""
    error = verified(path)
    return error is not None and any(str(file) in finding for finding in error.findings)


@contextlib.contextmanager
def flipped(file: Path, at: int, mask: int) -> Iterator[None]:
    """One byte of a file changed, in place."""
    fd = os.open(file, os.O_RDWR)
    try:
        good = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([good[0] ^ mask]), at)
        try:
            yield
        finally:
            os.pwrite(fd, good, at)
    finally:
        os.close(fd)


@contextlib.contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    """A file with other content."""
    kept = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(kept)


@contextlib.contextmanager
def mended(path: Path) -> Iterator[Path]:
    """The name is free in the block, whatever was there is at the name that it gives; then it stands there again."""
    aside = path.with_name("aside")
    path.rename(aside)
    try:
        yield aside
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)
