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


@dataclass(frozen=True, slots=True)
class ForeignContents:
    """As `tierkeep.format.part.Whole`, without what only our own records have."""

    tree: Tree
    leaves: tuple[LeafRecord, ...]
    values: tuple[Any, ...] = ()
    text_keys: bool = False


def record_of(name: str, spec: LeafSpec, tie: int | None = None) -> LeafRecord:
    """A leaf that is one chunk of its own shape. Raises ValueError for a dtype that is not known."""
    try:
        itemsize = dtypes.lookup(spec.dtype).itemsize
    except KeyError as error:
        raise ValueError(f"leaf {name!r}: {error.args[0]}") from error
    shape = tuple(spec.shape)
    chunk = tuple(max(1, n) for n in shape)
    grid = tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))
    return LeafRecord(name, spec, chunk, grid, tie, itemsize, math.prod(chunk) * itemsize)
