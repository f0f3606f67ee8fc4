"""Tensors as places to restore into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tierkeep.adapter import Destination, Region, Sink
from tierkeep.format import dtypes
from tierkeep.leaf import Box, LeafSpec
from tierkeep.memory.stream import stream

from .stage import _INTS, _numpy_int, check_kind, dtype_name, host_bits

if TYPE_CHECKING:
    import numpy as np

__all__ = ["allocate", "destination", "holds", "marked"]


def holds(name: str) -> bool:
    """Whether torch has tensors of this dtype."""
    return isinstance(getattr(torch, name, None), torch.dtype)


def allocate(spec: LeafSpec, device: Any) -> Destination:
    """A new tensor on `device`, the CPU if None. Raises TypeError if torch has no such dtype."""
    dtype = _torch_dtype(spec.dtype)
    if device is not None and torch.device(device).type == "meta":
        raise TypeError("a meta tensor holds no data: name a device that has memory")
    tensor = torch.empty(spec.shape, dtype=dtype, device=device)
    region = Region(Box.whole(spec.shape), _bit_sink(tensor))
    return Destination(spec, (region,), lambda: marked(tensor, spec.ext), lambda mark: marked(tensor.detach(), mark))


def marked(tensor: torch.Tensor, mark: str | None) -> torch.Tensor:
    """A new tensor with the mark that `stage.mark` found."""
    if mark in ("parameter", "frozen"):
        return torch.nn.Parameter(tensor, requires_grad=mark == "parameter")
    return tensor.requires_grad_() if mark == "requires_grad" else tensor


def destination(target: torch.Tensor, stored: LeafSpec) -> Destination:
    """`target`'s own memory. Raises TypeError if it cannot be written as it stands."""
    check_kind(target)
    if target.is_conj() or target.is_neg():
        raise TypeError("a lazily conjugated or negated tensor cannot be restored into")
    if _overlaps(target):
        raise TypeError("an expanded or overlapping tensor cannot be restored into: its elements share memory")
    data = target.detach()
    name = dtype_name(target.dtype).name
    if stored.dtype != name:
        _check_cast(_torch_dtype(stored.dtype), target.dtype)
    spec = LeafSpec("array", name, tuple(target.shape))
    sink = _bit_sink(data) if stored.dtype == name else _cast_sink(data, stored.dtype)

    def finish() -> torch.Tensor:
        if not target.is_inference():
            torch.autograd.graph.increment_version(target)
        return target

    memory = (data.data_ptr(), data.stride(), spec.shape, name, data.device) if data.numel() else None
    return Destination(spec, (Region(Box.whole(spec.shape), sink),), finish, memory=memory)


def _overlaps(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False


def _check_cast(stored: torch.dtype, own: torch.dtype) -> None:
    """Raises TypeError if torch cannot convert, or only by dropping the imaginary parts."""
    if stored.is_complex and not own.is_complex:
        raise TypeError(f"{stored} in the checkpoint cannot be converted to {own}")
    try:
        torch.empty(1, dtype=own).copy_(torch.empty(1, dtype=torch.uint8).new_zeros(stored.itemsize).view(stored))
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"{stored} in the checkpoint cannot be converted to {own}") from error


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name}")
    return dtype


def _bit_sink(tensor: torch.Tensor) -> Sink:
    dtype = dtype_name(tensor.dtype)
    itemsize = dtype.itemsize
    if tensor.is_cpu:
        view = host_bits(tensor, dtype)

        def put(part: Box, data: np.ndarray[Any, Any]) -> None:
            stream(view if part.shape == view.shape else view[part.slices()], data)
    else:
        device_bits = tensor.view(_INTS[itemsize])

        def put(part: Box, data: np.ndarray[Any, Any]) -> None:
            device_bits[part.slices()].copy_(torch.from_numpy(data.view(_numpy_int(itemsize))))

    return put


def _cast_sink(tensor: torch.Tensor, stored: str) -> Sink:
    dtype = _torch_dtype(stored)
    itemsize = dtypes.lookup(stored).itemsize

    def put(part: Box, data: np.ndarray[Any, Any]) -> None:
        # torch reads a 0-d or strided numpy view alike; the buffer is only borrowed, and copy_ is done with it.
        source = torch.from_numpy(data.view(_numpy_int(itemsize))).view(dtype)
        tensor[part.slices()].copy_(source)

    return put
