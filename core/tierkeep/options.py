"""What a save and a restore can be told, validated when it is built and passed down as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["KIB", "MIB", "PAGE", "MemoryOptions", "RestoreOptions", "SaveOptions"]

KIB = 1024
MIB = 1024 * KIB
PAGE = 4096  # bytes; alignment of O_DIRECT memory, offsets and lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOptions:
    """How a save lays out and writes its bytes. The defaults suit a local NVMe disk."""

    chunk_nbytes: int = 16 * MIB
    """Bytes aimed at for one zarr chunk. A chunk divides every shard boundary, so it can be larger or smaller."""
    block_nbytes: int = 1 * MIB
    """Bytes between two recorded running checksums of a chunk: the least that a partial read has to verify."""
    declare_crc: bool = True
    """Name the crc32c codec in the zarr metadata, so that stock readers verify too (slower there, same bytes)."""
    lanes: int = 12
    """Threads that copy, checksum and write; each owns one buffer of `lane_nbytes`."""
    lane_nbytes: int = 16 * MIB + 64 * KIB
    """Bytes of one lane's buffer: the memory of a synchronous save is `lanes * lane_nbytes`, whatever the state."""
    direct: bool = True
    """Write with O_DIRECT where the file system takes it; buffered elsewhere."""
    pickle: bool = False
    """Pickle objects that have no exact plain form. The restore must allow it too."""

    def __post_init__(self) -> None:
        _at_least("chunk_nbytes", self.chunk_nbytes, 1)
        _at_least("block_nbytes", self.block_nbytes, PAGE)
        _at_least("lanes", self.lanes, 1)
        _check_lane(self.lane_nbytes, self.block_nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """The images of saves in the background, and the process that writes them."""

    in_flight: int = 1
    """Saves that may be under way at once. There is one image more, which holds the newest step."""
    when_full: Literal["wait", "skip"] = "wait"
    """When as many are under way: the next save waits for one to end, or is skipped and says so."""
    directory: str = "/dev/shm"
    """A tmpfs. Where it has no room for the images they are memory without a name: no later process finds that, so every
    step is written to the disk."""
    budget_nbytes: int | None = None
    """The most that all images together may take; None: what the host has free."""
    write_bytes_per_s: float | None = None
    """The most the background writes to the disk; None: what the disk takes."""
    nice: int = 10
    """Added to the niceness of the background process; its disk requests come after others'. 0 leaves both alone."""

    def __post_init__(self) -> None:
        _at_least("in_flight", self.in_flight, 1)
        _one_of("when_full", self.when_full, ("wait", "skip"))
        if self.budget_nbytes is not None:
            _at_least("budget_nbytes", self.budget_nbytes, 1)
        if self.write_bytes_per_s is not None and not self.write_bytes_per_s > 0:
            raise ValueError(f"write_bytes_per_s must be more than 0, not {self.write_bytes_per_s!r}")
        _at_least("nice", self.nice, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreOptions:
    """How a restore reads, and which differences between checkpoint and target it accepts."""

    missing: Literal["error", "keep"] = "error"
    """A leaf of the target that the checkpoint lacks: an error, or the target's value stays."""
    unexpected: Literal["error", "ignore"] = "error"
    """A leaf of the checkpoint that the target lacks: an error, or it is left out."""
    shape: Literal["error", "keep"] = "error"
    """A leaf of another shape: an error, or the target's value stays."""
    dtype: Literal["error", "cast"] = "error"
    """A leaf of another dtype: an error, or its values are converted to the target's dtype."""
    lanes: int = 12
    """Threads that read, verify and place; each owns one buffer of `lane_nbytes`."""
    lane_nbytes: int = 16 * MIB + 64 * KIB
    """Bytes of one lane's buffer."""
    direct: bool = True
    """Read with O_DIRECT what is not in the page cache; through the page cache otherwise."""
    pickle: bool = False
    """Unpickle objects that were saved with `SaveOptions(pickle=True)`. This runs code from the checkpoint."""

    def __post_init__(self) -> None:
        _one_of("missing", self.missing, ("error", "keep"))
        _one_of("unexpected", self.unexpected, ("error", "ignore"))
        _one_of("shape", self.shape, ("error", "keep"))
        _one_of("dtype", self.dtype, ("error", "cast"))
        _at_least("lanes", self.lanes, 1)
        _check_lane(self.lane_nbytes, PAGE)


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def _check_lane(lane_nbytes: int, block_nbytes: int) -> None:
    least = 4 * max(block_nbytes, PAGE)
    _at_least("lane_nbytes", lane_nbytes, least)
    if lane_nbytes % PAGE:
        raise ValueError(f"lane_nbytes must be a multiple of {PAGE}, not {lane_nbytes}")
