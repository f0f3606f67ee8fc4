"""The contents of a checkpoint that others wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...format import dtypes
from ...format.part import LeafRecord

if TYPE_CHECKING:
    from ...leaf import LeafSpec
    from ...tree import Tree

__all__ = ["ForeignContents", "record_of"]

_LEAF_LIMIT = 1 << 53  # bytes; a leaf that declares more is refused, not allocated


@dataclass(frozen=True, slots=True)
class ForeignContents:
    """As `tierkeep.format.part.Whole`, without what only our own records have."""

    tree: Tree
    leaves: tuple[LeafRecord, ...]
    values: tuple[Any, ...] = ()
    text_keys: bool = False
    empty_kept: bool = True


def record_of(name: str, spec: LeafSpec, tie: int | None = None) -> LeafRecord:
    """A leaf that is one chunk of its own shape. Raises ValueError for an unknown dtype or an impossible size."""
    try:
        itemsize = dtypes.lookup(spec.dtype).itemsize
    except KeyError as error:
        raise ValueError(f"leaf {name!r}: {error.args[0]}") from error
    shape = tuple(spec.shape)
    chunk = tuple(max(1, n) for n in shape)
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    nbytes = math.prod(chunk) * itemsize
    if nbytes > _LEAF_LIMIT:
        raise ValueError(f"leaf {name!r} declares the shape {shape}, more than any memory holds")
    return LeafRecord(name, spec, chunk, grid, tie, itemsize, nbytes)
