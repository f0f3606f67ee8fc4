"""Tensors as leaves: their own elements, bit for bit, from whatever memory they are in."""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierkeep.format import dtypes
from tierkeep.leaf import ArrayShard, Box, Leaf, Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

__all__ = ["TensorShard", "check_class", "check_kind", "copies", "dtype_name", "host_bits", "leaf", "mark", "pin"]

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NAMES: dict[torch.dtype, dtypes.Dtype] = {}


@dataclass(frozen=True, slots=True)
class TensorShard:
    """A shard in device memory, as a tensor of integers of the elements' width."""

    box: Box
    tensor: torch.Tensor
    replica: int = 0

    def copy(self, part: Box, out: np.ndarray[Any, Any]) -> None:
        source = self.tensor if part.shape == self.box.shape else self.tensor[part.slices()]
        overlapped = getattr(_local, "overlapped", False)  # then `copies` waits for it
        torch.from_numpy(out.view(_numpy_int(out.dtype.itemsize))).copy_(source, non_blocking=overlapped)


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
    shards = (ArrayShard(Box.whole(shape), array),)
    return Leaf("array", dtype.name, shape, shards, tie, mark(tensor), changed=_watch(data))


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
    return Leaf("array", dtype.name, box.shape, (shard,), tie, mark(tensor), changed=_watch(tensor))


def _watch(tensor: torch.Tensor) -> Callable[[], str | None] | None:
    """Tells whether an operation of torch's changed the tensor in place since; writes past torch are not seen."""
    if tensor.is_inference():  # it keeps no count
        return None
    return functools.partial(_changed, tensor, tensor._version)


def _changed(tensor: torch.Tensor, version: int) -> str | None:
    return None if tensor._version == version else "was changed in place"


def copies() -> Callable[[], AbstractContextManager[object]]:
    """Copies run on a side stream of each CUDA device, after what the current streams have under way now."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return contextlib.nullcontext
    ready = {number: torch.cuda.current_stream(number).record_event() for number in range(torch.cuda.device_count())}
    return functools.partial(_side_streams, ready)


_local = threading.local()
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and thread


@contextlib.contextmanager
def _side_streams(ready: Mapping[int, torch.cuda.Event]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        used = []
        for number, event in ready.items():
            key = number, threading.get_ident()
            stream = _streams.get(key)
            if stream is None:
                if len(_streams) > 64:  # threads come and go
                    _streams.clear()
                stream = _streams[key] = torch.cuda.Stream(number)
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
            used.append(stream)
        _local.overlapped = True
        try:
            yield
        finally:
            _local.overlapped = False
            for stream in used:  # also after an error: the image is somebody else's next
                stream.synchronize()


def pin(memory: np.ndarray[Any, Any]) -> Callable[[], object] | None:
    """Registers memory with CUDA as page-locked, once; None where there is no CUDA or it refuses."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call,unused-ignore]
    address = memory.__array_interface__["data"][0]
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
        return None
    return functools.partial(runtime.cudaHostUnregister, address)


def mark(tensor: torch.Tensor) -> str | None:
    """What is more to a tensor than its elements: a parameter, frozen or not, or one that asks for gradients."""
    if type(tensor) is torch.nn.Parameter:
        return "parameter" if tensor.requires_grad else "frozen"
    return "requires_grad" if tensor.requires_grad and tensor.is_leaf else None


def check_kind(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that has no plain elements of its own."""
    check_class(tensor)
    if tensor.is_meta:
        raise TypeError("a meta tensor has no data: materialise it first")
    if tensor.is_quantized:
        raise TypeError("a quantized tensor is not kept: save int_repr() with its scale and zero point")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(f"a tensor of layout {tensor.layout} is not kept: convert it to a strided one")


def check_class(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor of a class that is not torch's own."""
    cls = type(tensor)
    if cls not in _TENSORS:
        raise TypeError(
            f"a tensor subclass {cls.__module__}.{cls.__qualname__} is not kept: save the plain tensors it is made of"
        )


def dtype_name(dtype: torch.dtype) -> dtypes.Dtype:
    """The logical dtype of a torch dtype. Raises TypeError if there is none."""
    found = _NAMES.get(dtype)
    if found is None:
        try:
            found = _NAMES[dtype] = dtypes.lookup(str(dtype).removeprefix("torch."))
        except KeyError:
            way_out = ": save int_repr() with its scale and zero point" if str(dtype).startswith("torch.q") else ""
            raise TypeError(f"a tensor of dtype {dtype} cannot be kept exactly{way_out}") from None
    return found


class _Memory:
    """Memory that numpy can look at and that stays while it does."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: torch.Tensor, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


_TYPES = {width: dtypes.bits(width).str for width in _INTS}


def host_bits(tensor: torch.Tensor, dtype: dtypes.Dtype) -> np.ndarray[Any, Any]:
    """A CPU tensor's memory as a numpy array of `bits` dtype, same shape and strides, nothing copied.

    Not by `tensor.numpy()`: that marks the storage as not resizable for ever, and FSDP resizes its parameters'.
    Raises TypeError for a tensor whose elements are not what its memory holds, ValueError for one without its memory.
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise TypeError("its elements are not what its memory holds")
    itemsize = dtype.itemsize
    shape = tuple(tensor.shape)
    strides, span = None, tensor.numel() * itemsize
    if not span:  # an older numpy (2.3 is one) takes no address 0, which is that of many empty tensors
        return np.empty(shape, dtypes.bits(itemsize))
    if not tensor.is_contiguous():
        strides = tuple([n * itemsize for n in tensor.stride()])
        span = itemsize + sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)])
    if span and tensor.storage_offset() * itemsize + span > tensor.untyped_storage().nbytes():
        raise ValueError("the tensor's storage is smaller than the tensor: it was freed or resized")
    interface = {
        "shape": shape,
        "typestr": _TYPES[itemsize],
        "data": (tensor.data_ptr(), False),
        "strides": strides,
        "version": 3,
    }
    return np.asarray(_Memory(tensor, interface))


def _numpy_int(itemsize: int) -> np.dtype[Any]:
    return np.dtype({1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}[itemsize])
