"""Tensors as leaves: their own elements, bit for bit, from whatever memory they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierkeep.format import dtypes
from tierkeep.leaf import ArrayShard, Box, Leaf, Shard

__all__ = ["TensorShard", "check_kind", "dtype_name", "host_bits", "leaf"]

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_IN_NUMPY = frozenset(
    [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
_NAMES: dict[torch.dtype, dtypes.Dtype] = {}


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A shard in device memory, as a tensor of integers of the elements' width."""

    box: Box
    tensor: torch.Tensor
    replica: int = 0

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        source = self.tensor if part.shape == self.box.shape else self.tensor[part.slices()]
        torch.from_numpy(out.view(_numpy_int(out.dtype.itemsize))).copy_(source)


def leaf(tensor: torch.Tensor) -> Leaf:
    """A dense tensor as a leaf. Raises TypeError with the reason if its bits cannot be kept.

    Every call on a tensor costs about as much as the copy of a small one, so what is asked here is asked once.
    """
    if type(tensor) not in _TENSORS or not tensor.is_cpu or tensor.is_nested:
        return _uncommon_leaf(tensor)
    dtype = dtype_name(tensor.dtype)
    data = tensor.detach()
    try:
        array = host_bits(data, dtype)
    except (RuntimeError, TypeError):  # lazily conjugated or negated, or not strided
        return _uncommon_leaf(tensor)
    shape = array.shape
    tie = (data.data_ptr(), dtype.name, shape, array.strides) if array.size else None
    return Leaf("array", dtype.name, shape, (ArrayShard(Box.whole(shape), array),), tie, _mark(tensor))


def _uncommon_leaf(tensor: torch.Tensor) -> Leaf:
    check_kind(tensor)
    dtype = dtype_name(tensor.dtype)
    data = tensor.detach().resolve_conj().resolve_neg()
    box = Box.whole(tuple(data.shape))
    shard: Shard
    if data.is_cpu:
        shard = ArrayShard(box, host_bits(data, dtype))
    else:
        shard = TensorShard(box, data.view(_INTS[dtype.itemsize]))
    tie = (data.data_ptr(), dtype.name, box.shape, data.stride(), data.device) if data.numel() else None
    return Leaf("array", dtype.name, box.shape, (shard,), tie, _mark(tensor))


def _mark(tensor: torch.Tensor) -> str | None:
    if type(tensor) is torch.nn.Parameter:
        return "parameter" if tensor.requires_grad else "frozen"
    return "requires_grad" if tensor.requires_grad and tensor.is_leaf else None


def check_kind(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that has no plain elements of its own."""
    cls = type(tensor)
    if cls not in _TENSORS:
        raise TypeError(
            f"a tensor subclass {cls.__module__}.{cls.__qualname__} is not kept: save the plain tensors it is made of"
        )
    if tensor.is_meta:
        raise TypeError("a meta tensor has no data: materialise it first")
    if tensor.is_quantized:
        raise TypeError("a quantized tensor is not kept: save int_repr() with its scale and zero point")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"a tensor of layout {tensor.layout} is not kept: convert it to a strided one")


def dtype_name(dtype: torch.dtype) -> dtypes.Dtype:
    """The logical dtype of a torch dtype. Raises TypeError if there is none."""
    found = _NAMES.get(dtype)
    if found is None:
        try:
            found = _NAMES[dtype] = dtypes.lookup(str(dtype).removeprefix("torch."))
        except KeyError:
            raise TypeError(f"a tensor of dtype {dtype} cannot be kept exactly") from None
    return found


def host_bits(tensor: torch.Tensor, dtype: dtypes.Dtype) -> np.ndarray[Any, Any]:
    """A CPU tensor's memory as a numpy array of `bits` dtype, same shape and strides, nothing copied.

    Raises RuntimeError or TypeError for a tensor that numpy cannot see.
    """
    seen = tensor if dtype.name in _IN_NUMPY else tensor.view(_INTS[dtype.itemsize])
    return seen.numpy().view(dtypes.bits(dtype.itemsize))


def _numpy_int(itemsize: int) -> np.dtype[Any]:
    return np.dtype({1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[itemsize])
