"""Leaves: the arrays of a state, as boxes that this process holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["ArrayShard", "Box", "Leaf", "LeafSpec", "Shard", "c_order_pieces"]


class Box(NamedTuple):
    """A rectangular part of an array: where it starts and how long it is on each axis."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part, None if there is none. A 0-d box meets every 0-d box."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(e - s for s, e in zip(start, stop, strict=True))
        return None if any(n <= 0 for n in shape) else Box(start, shape)

    def shifted(self, origin: Sequence[int]) -> Box:
        """The same part, seen from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.start, origin, strict=True)), self.shape)


class Shard(Protocol):
    """The part of a leaf that this process holds."""

    @property
    def box(self) -> Box:
        """Where the shard lies in the whole array."""

    @property
    def replica(self) -> int:
        """0 for the copy that is written; others hold the same bytes."""

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        """Copies `part` (relative to the shard) into `out`, of `part.shape` and the leaf's `bits` dtype.

        Called from several threads at once; frees the GIL while it copies much.
        """


class ArrayShard(msgspec.Struct, frozen=True):
    """A shard in host memory, as an array of `bits` dtype with any strides."""

    box: Box
    array: np.ndarray[Any, Any]
    replica: int = 0

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        np.copyto(out, self.part(part))

    def part(self, part: Box) -> np.ndarray[Any, Any]:
        """Its elements, as they lie in memory."""
        return self.array if part.shape == self.box.shape else self.array[part.slices()]


class Leaf(msgspec.Struct, frozen=True):
    """One array (or scalar) of a state, as an adapter hands it over.

    No dataclass, nor is `ArrayShard`, because a state of 10,000 leaves makes 10,000 of them while training waits: frozen
    dataclasses take 3 µs to make, these 0.4.
    """

    kind: str
    """`array` (the framework's own), `ndarray`, `npscalar`, or the Python type: `bool`, `int`, `float`, `complex`."""
    dtype: str
    """Logical dtype, a name of `format.dtypes`."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    shards: tuple[Shard, ...]
    tie: Any = None
    """Leaves of equal, non-None `tie` are the same memory seen in the same way: stored once."""
    ext: str | None = None
    """The adapter's own mark, given back to it at restore; `prng:<implementation>` for the data of a JAX random key."""
    sharding: str | None = None
    """Orbax's JSON of a jax sharding; with it stock Orbax gives back a jax.Array, without it a numpy array."""
    boxes: tuple[Box, ...] | None = None
    """The boxes of all processes' shards, in the same order for all of them; None if `shards` are all there are."""
    changed: Callable[[], str | None] | None = None
    """What has happened to the leaf since, such that its bytes may be others than at the call; None if nothing has."""

    @property
    def spec(self) -> LeafSpec:
        return LeafSpec(self.kind, self.dtype, self.shape, self.ext)


class LeafSpec(NamedTuple):
    """What a leaf is, without its bytes."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    ext: str | None = None


def c_order_pieces(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Splits an array into boxes of at most `most` elements (at least 1), each one run of its C order, in order."""
    if math.prod(shape) <= max(most, 1):
        if math.prod(shape):
            yield Box.whole(shape)
        return
    inner = math.prod(shape[1:])
    rows = most // inner if inner <= most else 0
    if rows:
        for first in range(0, shape[0], rows):
            n = min(rows, shape[0] - first)
            yield Box((first, *(0 for _ in shape[1:])), (n, *shape[1:]))
        return
    for row in range(shape[0]):
        for box in c_order_pieces(shape[1:], most):
            yield Box((row, *box.start), (1, *box.shape))
