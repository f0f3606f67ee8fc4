"""The smallest adapter there is: numpy arrays and plain values, no framework."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from ..restore.arrays import allocate_numpy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import numpy as np

    from ..adapter import Branch, Destination, Stateful
    from ..leaf import Leaf, LeafSpec
    from ..tree import Node, Value

__all__ = ["NumpyAdapter"]


class NumpyAdapter:
    """Takes what the core knows by itself; arrays of any framework come back as numpy arrays."""

    name = "numpy"
    in_place = True

    def expand(self, value: Any) -> Leaf | Branch | Stateful | Value | None:
        return None

    def encode_value(self, value: Any) -> Any:
        return None

    def decode_value(self, tag: str, payload: Any) -> Any:
        return None

    def rebuild(self, node: Node, children: Sequence[Any]) -> Any:
        return None

    def allocate(self, spec: LeafSpec, device: Any) -> Destination:
        return allocate_numpy(spec._replace(kind="ndarray"))

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        return None

    def copies(self) -> Callable[[], AbstractContextManager[object]]:
        return contextlib.nullcontext

    def pin(self, memory: np.ndarray[Any, Any]) -> Callable[[], object] | None:
        return None
