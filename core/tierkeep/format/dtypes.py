"""Logical dtypes: the name a leaf carries, its width, and the zarr3 dtype its bytes are stored as.

A dtype that zarr3 (as TensorStore 0.1.85 and later reads it) lacks is stored as unsigned integers of the same width; the
logical name stands in our own record, so tierkeep gives the dtype back and stock readers see the bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["NAMES", "Dtype", "bits", "dtype_of_numpy", "lookup", "numpy_dtype"]


@dataclass(frozen=True, slots=True)
class Dtype:
    """One logical dtype."""

    name: str
    itemsize: int
    """Bytes of one element in memory and on disk."""
    zarr: str
    """The zarr3 data type its bytes are declared as."""
    fill: Any
    """The zarr3 fill value; never used, since every chunk is written."""


_NATIVE = {
    1: "bool int8 uint8 int2 int4 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz"
    " float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
_AS_BITS = {
    1: "int1 int3 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 float6_e2m3fn float6_e3m2fn float8_e4m3"
    " float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2",
    2: "bits16",
    4: "complex32 bcomplex32",
}


def _fill(name: str) -> Any:
    if name == "bool":
        return False
    if name.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in name else 0.0


_TABLE = {name: Dtype(name, width, name, _fill(name)) for width, names in _NATIVE.items() for name in names.split()} | {
    name: Dtype(name, width, f"uint{8 * width}", 0) for width, names in _AS_BITS.items() for name in names.split()
}

NAMES = tuple(_TABLE)

# complex128 has no unsigned integer of its width; a same-dtype copy of it keeps every bit.
_BITS = {width: np.dtype(f"u{width}") for width in (1, 2, 4, 8)} | {16: np.dtype("complex128")}


def lookup(name: str) -> Dtype:
    """The dtype of that name. Raises KeyError with the names there are."""
    try:
        return _TABLE[name]
    except KeyError:
        raise KeyError(f"unknown dtype {name!r}; known are {', '.join(sorted(_TABLE))}") from None


def bits(itemsize: int) -> np.dtype[Any]:
    """The numpy dtype that elements of this width are moved as, bit for bit."""
    return _BITS[itemsize]


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """numpy's (or ml_dtypes') own dtype of that name, None where numpy has none."""
    try:
        return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)
    except TypeError:
        return None


@functools.lru_cache(256)
def dtype_of_numpy(dtype: np.dtype[Any]) -> Dtype | None:
    """The logical dtype of a numpy dtype, None for those that cannot be kept (object, datetime, strings, structs)."""
    found = _TABLE.get(dtype.name)
    return found if found is not None and dtype.itemsize == found.itemsize else None
