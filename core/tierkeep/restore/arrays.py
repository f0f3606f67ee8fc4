"""numpy arrays and scalars, which every framework's states hold, as places to restore into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..adapter import Destination, Region, Sink
from ..format import dtypes
from ..leaf import Box, LeafSpec
from ..memory.stream import stream

__all__ = ["allocate_numpy", "numpy_destination", "numpy_sink"]

Finish = Callable[[], Any]


def allocate_numpy(spec: LeafSpec) -> Destination:
    """A new numpy array or scalar. Raises TypeError if numpy has no such dtype."""
    dtype = dtypes.numpy_dtype(spec.dtype)
    if dtype is None:
        raise TypeError(f"neither the framework nor numpy has the dtype {spec.dtype} here")
    array = np.empty(spec.shape, dtype)
    finish: Finish = {"ndarray": lambda: array, "npscalar": lambda: array[()]}.get(spec.kind, lambda: array.item())
    return Destination(spec, (Region(Box.whole(spec.shape), numpy_sink(array, spec.dtype)),), finish)


def numpy_destination(target: np.ndarray[Any, Any], stored: LeafSpec | None, *, in_place: bool) -> Destination:
    dtype = dtypes.dtype_of_numpy(target.dtype)
    if dtype is None or target.dtype.byteorder == ">":
        raise TypeError(f"a numpy array of dtype {target.dtype} cannot be restored into")
    if in_place and not target.flags.writeable:
        raise ValueError("a numpy array that is not writable cannot be restored into")
    array = target if in_place else np.empty(target.shape, target.dtype)
    spec = LeafSpec("ndarray", dtype.name, target.shape)
    sink = numpy_sink(array, dtype.name if stored is None else stored.dtype)
    memory = (
        (array.__array_interface__["data"][0], array.strides, array.shape, dtype.name)
        if in_place and array.size
        else None
    )
    return Destination(spec, (Region(Box.whole(target.shape), sink),), lambda: array, memory=memory)


_COMPLEX = frozenset({"complex32", "bcomplex32", "complex64", "complex128"})


def numpy_sink(array: np.ndarray[Any, Any], stored: str) -> Sink:
    """Fills `array`, bit for bit, or by converting from the stored dtype if it has another one.

    Raises TypeError if numpy cannot convert, or only by dropping the imaginary parts.
    """
    own = dtypes.dtype_of_numpy(array.dtype)
    assert own is not None
    if own.name == stored:
        view = array.view(dtypes.bits(own.itemsize))

        def put(part: Box, data: np.ndarray[Any, Any]) -> None:
            stream(view if part.shape == view.shape else view[part.slices()], data)
    else:
        dtype = dtypes.numpy_dtype(stored)

        if dtype is None or (stored in _COMPLEX and own.name not in _COMPLEX):  # which would drop the imaginary parts
            raise TypeError(f"{stored} in the checkpoint cannot be converted to {own.name}")

        def put(part: Box, data: np.ndarray[Any, Any]) -> None:
            with np.errstate(all="ignore"):  # that values may not fit is what a cast is
                array[part.slices()] = data.view(dtype).astype(array.dtype)

    return put
