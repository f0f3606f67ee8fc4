"""Job: what a sealed image is to become, as a record beside it that any process can carry out."""

from __future__ import annotations

from typing import Any

import msgspec

from ..tiers.retain import Keep  # noqa: TC001  msgspec looks it up

__all__ = ["Job", "decode_job", "encode_job"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One save whose image is staged: from here on it needs the training process no more."""

    number: int
    """Saves of one checkpointer are carried out in this order."""
    save_id: str
    image: str
    """The name of the image in the checkpoint, 32 hex digits, never used before."""
    begun_ns: int
    root: str
    """The root of its step; empty for an item."""
    step: int
    plan: str
    """Key of the plan, which lies beside the jobs."""
    values: list[Any]
    """Plain values as JSON."""
    metrics: dict[str, Any]
    overwrite: bool
    to_disk: bool
    """Whether it is to be written to the root, or to stay in memory until a newer one takes its place."""
    keep: Keep | None
    direct: bool
    lanes: int
    item: str | None = None
    """A directory that somebody else makes visible, for one rank's part of it; None for a step of the root."""
    part_of: str = ""
    """The `save_id` that all ranks' parts of the item have."""
    rank: int = 0
    world: int = 1

    @property
    def name(self) -> str:
        """What its directory is called: names sort as numbers do."""
        return f"{self.number:020d}-{self.save_id}"


def encode_job(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes) -> Job:
    """Raises ValueError for what is no job."""
    return msgspec.msgpack.decode(data, type=Job)
