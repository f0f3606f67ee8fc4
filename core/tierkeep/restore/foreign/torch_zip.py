"""What torch.save writes, read without torch: a zip of stored entries, in it a pickle and the bytes of its storages.

The pickle goes through `pickles`, so nothing of it is run. Every place is checked against the archive's size before it
is used, and every entry that is read against its CRC-32, where one was recorded: torch can be told to leave them out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...format import dtypes
from ...format.checksum import crc32
from .pickles import PLAIN, Maker, Named, NotRead, Table, read_pickle

__all__ = ["DATA", "DTYPES", "TORCH", "Entry", "Fetch", "Size", "Storage", "TensorRef", "TorchZip", "dtype_of"]

Fetch = Callable[[int, int], "bytes | memoryview"]
"""The bytes from one place to another; raises ValueError where there are none."""

_END, _LOCATOR, _END64 = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
_CENTRAL, _LOCAL, _DESCRIPTOR = b"PK\x01\x02", b"PK\x03\x04", b"PK\x07\x08"
_TAIL_NBYTES = 64 * 1024
_READ_LIMIT = 1 << 30  # bytes of an entry that is no storage
DATA = "data.pkl"

# torch's dtypes, those without a class of storages of their own first.
_UNTYPED = (
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8",
    "bits16", "bits1x8", "bits2x4", "bits4x2", "complex32", "uint16", "uint32", "uint64",
    *(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8)),
)  # fmt: skip
_TYPED = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8", "QInt32Storage": "qint32", "QUInt8Storage": "quint8", "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
DTYPES: Table = {("torch", name): Named("torch.dtype", name) for name in (*_UNTYPED, *_TYPED.values())}


class Size(NamedTuple):
    """A torch.Size."""

    lengths: tuple[int, ...]


class Storage(NamedTuple):
    """A storage that a pickle refers to."""

    dtype: str | None
    """None: bytes."""
    key: str
    numel: int


class TensorRef(NamedTuple):
    """A tensor of a pickle: a view of a storage, in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    mark: str | None = None
    """`parameter`, `frozen` for one without gradients; `requires_grad` for a tensor with them."""
    conj: bool = False
    neg: bool = False
    """The elements are the conjugate, the negative, of those stored."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the bytes of one entry of a zip lie."""

    offset: int
    nbytes: int
    crc: int
    """0 where none was recorded."""

    def check(self, data: Any) -> None:
        """Raises ValueError if these are not the bytes that were written."""
        if self.crc and crc32(data) != self.crc:
            raise ValueError("its bytes do not match their checksum")


class TorchZip:
    """An archive of torch.save. Raises ValueError for a damaged one, NotRead (a ValueError) for another kind of zip."""

    def __init__(self, fetch: Fetch, nbytes: int) -> None:
        self._fetch = fetch
        self._nbytes = nbytes
        self._entries, prefixes = _central(fetch, nbytes), []
        for name in self._entries:
            prefix, slash, rest = name.partition("/")
            if rest == DATA:
                prefixes.append(prefix + slash)
        if len(prefixes) != 1:
            raise NotRead("a zip archive, but not one of torch.save")
        self._prefix = prefixes[0]
        order = self.read("byteorder") if f"{self._prefix}byteorder" in self._entries else b"little"
        if order != b"little":
            raise NotRead(f"of byte order {order[:10]!r}")

    def load(self) -> Any:
        """The object, with `TensorRef` where it has tensors."""
        return read_pickle(self.read(DATA), TORCH, _storage)

    def tensor(self, known: dict[bytes, TensorRef]) -> TensorRef:
        """The object if it is one tensor; ValueError if not. Equal pickles are read once: `known` has those met before.

        Tensors of one shape have one pickle, and of 10,000 small ones it is most of the work.
        """
        data = self.read(DATA)
        found = known.get(data)
        if found is None:
            found = read_pickle(data, TORCH, _storage)
            if type(found) is not TensorRef:
                raise ValueError(f"it holds a {type(found).__name__} and no tensor")
            known[data] = found
        return found

    def read(self, name: str) -> bytes:
        entry = self.entry(name)
        if entry.nbytes > _READ_LIMIT:
            raise NotRead(f"{name} of {entry.nbytes} bytes")
        data = bytes(self._fetch(entry.offset, entry.offset + entry.nbytes))
        try:
            entry.check(data)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return data

    def storage(self, tensor: TensorRef) -> Entry:
        """The bytes of a tensor's storage, which hold all of its elements."""
        storage = tensor.storage
        entry = self.entry(f"data/{storage.key}")
        itemsize = dtype_of(tensor.dtype).itemsize
        declared = storage.numel * (1 if storage.dtype is None else dtype_of(storage.dtype).itemsize)
        if entry.nbytes != declared:
            raise ValueError(f"a storage of {declared} bytes that has {entry.nbytes}")
        if math.prod(tensor.shape):
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
            if (tensor.offset + last + 1) * itemsize > entry.nbytes:
                raise ValueError(f"a tensor of shape {tensor.shape} that reaches beyond its storage")
        return entry

    def entry(self, name: str) -> Entry:
        """Its place, which the archive keeps twice: in the directory at the end and right before the bytes."""
        full = self._prefix + name
        if full not in self._entries:
            raise ValueError(f"it has no entry {name!r}")
        begin, nbytes, crc, flags = self._entries[full]
        head = bytes(self._fetch(begin, begin + 30))
        signature, _, _, method, _, _, _, _, _, n_name, n_extra = struct.unpack("<4sHHHHHIIIHH", head)
        wanted = full.encode()
        if signature != _LOCAL or method or n_name != len(wanted):
            raise ValueError(f"entry {name!r} is not where its directory says")
        if bytes(self._fetch(begin + 30, begin + 30 + n_name)) != wanted:
            raise ValueError(f"entry {name!r} is not where its directory says")
        offset = begin + 30 + n_name + n_extra
        if offset + nbytes > self._nbytes:
            raise ValueError(f"entry {name!r} ends past the archive")
        if not crc and nbytes and flags & 8:
            # None was computed, or it was lost: then the copy of it behind the bytes still has it.
            behind = bytes(self._fetch(offset + nbytes, offset + nbytes + 8))
            if behind != _DESCRIPTOR + bytes(4):
                raise ValueError(f"entry {name!r} has two checksums")
        return Entry(offset, nbytes, crc)


def _central(fetch: Fetch, nbytes: int) -> Mapping[str, tuple[int, int, int, int]]:
    """(offset of its header, size, CRC-32, flags) of every entry, from the directory at the archive's end."""
    if nbytes < 22:
        raise ValueError("too short for a zip archive")
    begin = max(0, nbytes - _TAIL_NBYTES)
    tail = bytes(fetch(begin, nbytes))

    def get(offset: int, length: int) -> bytes:
        if not 0 <= offset <= offset + length <= nbytes:
            raise ValueError("a zip directory beyond the archive")
        if offset >= begin:
            return tail[offset - begin : offset - begin + length]
        if length > _READ_LIMIT:
            raise NotRead(f"a zip directory of {length} bytes")
        return bytes(fetch(offset, offset + length))

    end = nbytes - 22
    signature, *_, count, directory, offset, comment = struct.unpack("<4sHHHHIIH", get(end, 22))
    if signature != _END or comment:
        raise ValueError("no zip archive ends where it should")
    if end >= 20 and get(end - 20, 4) == _LOCATOR:
        _, _, end, _ = struct.unpack("<4sIQI", get(end - 20, 20))
        signature, *_, count, directory, offset = struct.unpack("<4sQHHIIQQQQ", get(end, 56))
        if signature != _END64:
            raise ValueError("no zip archive ends where it should")
    if offset + directory != end:
        raise ValueError("a zip directory that is not where it should be")
    raw, entries, at = get(offset, directory), {}, 0
    for _ in range(count):
        name, entry, at = _central_entry(raw, at)
        if name in entries:
            raise ValueError(f"a zip directory with {name!r} twice")
        entries[name] = entry
    if at != len(raw):
        raise ValueError("a zip directory of another length")
    return entries


def _central_entry(raw: bytes, at: int) -> tuple[str, tuple[int, int, int, int], int]:
    if at + 46 > len(raw):
        raise ValueError("a zip directory of another length")
    (signature, _, _, flags, method, _, _, crc, packed, nbytes, n_name, n_extra, n_comment, _, _, _, offset) = (
        struct.unpack_from("<4sHHHHHHIIIHHHHHII", raw, at)
    )
    if signature != _CENTRAL:
        raise ValueError("a zip directory with something else in it")
    name = raw[at + 46 : at + 46 + n_name].decode()
    extra = raw[at + 46 + n_name : at + 46 + n_name + n_extra]
    numbers = [nbytes, packed, offset]
    while len(extra) >= 4:  # what does not fit 32 bits stands in a field of its own, in this order
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = [number for number in range(3) if numbers[number] == 0xFFFFFFFF]
            for number, value in zip(wide, struct.unpack_from(f"<{len(wide)}Q", extra, 4), strict=True):
                numbers[number] = value
        extra = extra[4 + length :]
    nbytes, packed, offset = numbers
    if method or flags & 1 or packed != nbytes:
        raise NotRead(f"a zip archive whose entry {name!r} is compressed or encrypted")
    return name, (offset, nbytes, crc, flags), at + 46 + n_name + n_extra + n_comment


def dtype_of(name: str) -> dtypes.Dtype:
    """Raises NotRead for a dtype that is known to torch, but cannot be kept."""
    try:
        return dtypes.lookup(name)
    except KeyError:
        raise NotRead(f"a tensor of dtype {name}") from None


# What names stand for in torch's pickles.


def lengths_of(value: Any) -> tuple[int, ...]:
    if type(value) is Size:
        return value.lengths
    if type(value) is not tuple or not all(type(n) is int and 0 <= n < 2**63 for n in value) or len(value) > 64:
        raise ValueError("a shape or strides that no array has")
    return value


def _storage(value: Any) -> Storage:
    if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
        raise ValueError("a persistent id that is none of torch's")
    _, kind, key, _, numel = value
    if type(kind) is not Named or kind.tag != "storage" or type(key) is not str or type(numel) is not int:
        raise ValueError("a persistent id that is none of torch's")
    return Storage(kind.text or None, key, numel)


def _tensor(
    storage: Any, offset: Any, size: Any, strides: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> TensorRef:
    if type(storage) is not Storage or storage.dtype is None:
        raise ValueError("a tensor of what is no storage")
    return _ref(storage, storage.dtype, offset, size, strides, requires_grad, metadata)


def _tensor_with_dtype(
    storage: Any, offset: Any, size: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRef:
    if type(storage) is not Storage or type(dtype) is not Named or dtype.tag != "torch.dtype":
        raise ValueError("a tensor of what is no storage")
    return _ref(storage, dtype.text, offset, size, strides, requires_grad, metadata)


def _ref(
    storage: Storage, dtype: str, offset: Any, size: Any, strides: Any, requires_grad: Any, metadata: Any
) -> TensorRef:
    shape, steps = lengths_of(size), lengths_of(strides)
    if len(shape) != len(steps) or type(offset) is not int or offset < 0 or storage.numel < 0:
        raise ValueError("a tensor of a shape that no array has")
    bits = {} if metadata is None else metadata
    if type(bits) is not dict or not all(key in ("conj", "neg") and type(bit) is bool for key, bit in bits.items()):
        raise NotRead("a tensor with properties of its own")
    mark = "requires_grad" if requires_grad is True else None
    return TensorRef(storage, dtype, offset, shape, steps, mark, bits.get("conj", False), bits.get("neg", False))


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> TensorRef:
    if type(data) is not TensorRef:
        raise ValueError("a parameter of what is no tensor")
    return data._replace(mark="parameter" if requires_grad else "frozen")


def _device(kind: Any, index: Any = None) -> Named:
    if type(kind) is not str or type(index) not in (int, type(None)):
        raise ValueError("a device that is none")
    return Named("torch.device", kind if index is None else f"{kind}:{index}")


def _layout(name: Any) -> Named:
    if type(name) is not str:
        raise ValueError("a layout that is none")
    return Named("torch.layout", name.removeprefix("torch."))


TORCH: Table = {
    **PLAIN,
    **DTYPES,
    ("torch", "Size"): Maker(lambda lengths=(): Size(lengths_of(lengths))),
    ("torch", "device"): Maker(_device),
    ("torch.serialization", "_get_layout"): Maker(_layout),
    **{("torch", name): Named("storage", dtype) for name, dtype in _TYPED.items()},
    ("torch.storage", "UntypedStorage"): Named("storage", ""),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_with_dtype),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
}
"""Names of torch, besides Python's and numpy's, that tensors and plain values are pickled with."""
