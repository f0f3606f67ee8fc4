"""Hypothesis strategies for states, arrays and options, for the laws of adapters and tiers; needs `hypothesis`.

`exact_form` says what it means for a restored state to be the saved one: types, keys, order, and every bit.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import fractions
import itertools
import math
import pathlib
import struct
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from ..format import dtypes
from ..leaf import Box
from ..options import PAGE, RestoreOptions, SaveOptions
from ..tree import NamedMapping

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NUMPY_DTYPES",
    "Pair",
    "Settings",
    "array_bits",
    "arrays",
    "boxes",
    "exact_form",
    "grids",
    "keys",
    "leaf_forms",
    "plain_values",
    "restore_options",
    "save_options",
    "scalars",
    "shapes",
    "states",
]

NUMPY_DTYPES = tuple(name for name in dtypes.NAMES if dtypes.numpy_dtype(name) is not None)
"""The logical dtypes that numpy, or ml_dtypes, has."""


class Pair(NamedTuple):
    """A named tuple to be found in states."""

    first: Any
    second: Any


@dataclasses.dataclass
class Settings:
    """A dataclass to be found in states."""

    rate: Any
    extra: Any


# Arrays


def shapes(max_axes: int = 4, max_side: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with 0-d, zero-size and one-element axes among them, and now and then a long axis."""
    small = st.lists(st.integers(0, max_side), max_size=max_axes).map(tuple)
    return small | st.sampled_from([(), (0,), (3, 0, 2), (5000,), (3, 1111), (700, 3)])


@st.composite
def array_bits(draw: st.DrawFn, dtype: str, shape: tuple[int, ...], *, any_layout: bool = True) -> np.ndarray[Any, Any]:
    """An array of random bits, NaN payloads and -0.0 among them, in any memory layout that a view can have.

    A bool keeps to its two values: numpy and stock readers know no other.
    """
    found = dtypes.numpy_dtype(dtype)
    assert found is not None, f"numpy has no dtype {dtype}"
    layout = draw(st.sampled_from(_LAYOUTS)) if any_layout and shape else "c"
    seed = draw(st.integers(0, 2**32 - 1))
    held = shape
    if layout == "strided":
        held = tuple(2 * n for n in shape)
    elif layout == "broadcast":
        held = tuple(1 if axis % 2 == 0 and n else n for axis, n in enumerate(shape))
    elif layout == "reversed_axes":
        held = shape[::-1]
    raw = np.random.default_rng(seed).integers(0, 256, (*held, found.itemsize), np.uint8)
    if dtype == "bool":
        raw &= 1
    special = _SPECIAL.get(dtype)
    array = raw.view(found).reshape(held)
    if special is not None and array.size:
        array.reshape(-1)[:: draw(st.integers(2, 5))] = special[seed % len(special)]
    if layout == "strided":
        array = array[tuple(slice(1, None, 2) for _ in shape)]
    elif layout == "broadcast":
        array = np.broadcast_to(array, shape)
    elif layout == "reversed_axes":
        array = array.T
    elif layout == "fortran":
        array = np.asarray(array, order="F")
    elif layout == "negative":
        array = array[tuple(slice(None, None, -1) for _ in shape)]
    assert array.shape == shape
    return array


_LAYOUTS = ("c", "strided", "broadcast", "reversed_axes", "fortran", "negative")
_SPECIAL: Mapping[str, np.ndarray[Any, Any]] = {
    "float32": np.array([0x80000000, 0x7FC00001, 0x7F800001, 0xFF800000], "u4").view("f4"),
    "float64": np.array([1 << 63, 0x7FF8000000000123, 0x7FF0000000000001], "u8").view("f8"),
    "float16": np.array([0x8000, 0x7E01, 0x7C01], "u2").view("f2"),
}


def arrays(
    *, names: Sequence[str] = NUMPY_DTYPES, max_axes: int = 4, max_side: int = 7, any_layout: bool = True
) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Arrays of any of the dtypes, any shape and any bits."""
    return st.tuples(st.sampled_from(names), shapes(max_axes, max_side)).flatmap(
        lambda both: array_bits(*both, any_layout=any_layout)
    )


# States


def keys() -> st.SearchStrategy[Any]:
    """Keys of a mapping. Text holds neither `.` nor `/`, so that no two paths are stored under one name."""
    text = st.text(st.characters(codec="utf-8", exclude_characters="./"), max_size=6)
    plain = (
        text
        | st.integers(-3, 12)
        | st.booleans()
        | st.none()
        | st.just(0.5)
        | st.just(-(2**70))
        | st.binary(max_size=3)
    )
    return plain.filter(lambda key: "." not in str(key) or key == 0.5) | st.tuples(st.integers(0, 3), text)


def scalars(*, names: Sequence[str] = NUMPY_DTYPES) -> st.SearchStrategy[Any]:
    """Numbers of Python and of numpy."""
    return (
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=True)
        | st.complex_numbers(allow_nan=True)
        | st.sampled_from(names).flatmap(lambda name: array_bits(name, (), any_layout=False)).map(lambda a: a[()])
    )


def plain_values() -> st.SearchStrategy[Any]:
    """Values that are kept in the record itself."""
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    zones = st.none() | st.integers(-1439, 1439).map(lambda m: datetime.timezone(datetime.timedelta(minutes=m)))
    item = text | st.integers(-(2**80), 2**80) | st.binary(max_size=4) | st.booleans() | st.none() | st.just(-0.0)
    hashable = item | st.tuples(item, item)
    return st.one_of(
        text,
        st.binary(max_size=12),
        st.binary(max_size=12).map(bytearray),
        st.integers(2**63, 2**300).flatmap(lambda n: st.sampled_from([n, -n - 1])),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.builds(slice, item, item, item),
        st.builds(range, st.integers(-9, 9), st.integers(-(2**70), 2**70), st.integers(1, 5)),
        st.datetimes(timezones=zones).map(lambda d: d.replace(fold=0)),
        st.dates(),
        st.times().map(lambda t: t.replace(fold=0)),
        st.timedeltas(),
        st.decimals(allow_nan=False),
        st.fractions(),
        st.uuids(),
        st.sampled_from(["a/b", ".", "../é"]).map(pathlib.PurePath),
    )


def states(
    *,
    names: Sequence[str] = NUMPY_DTYPES,
    leaves: st.SearchStrategy[Any] | None = None,
    mapping_keys: st.SearchStrategy[Any] | None = None,
    max_leaves: int = 12,
) -> st.SearchStrategy[Any]:
    """Nests of dict, list, tuple, OrderedDict, named tuple and others, empty ones too, around `leaves`.

    Unless `leaves` are given, they are arrays, numbers, plain values and None. Some stand at several places.
    """
    if leaves is None:
        leaves = _leaves(names)
    return st.recursive(
        leaves,
        lambda inner: _containers(inner, keys() if mapping_keys is None else mapping_keys),
        max_leaves=max_leaves,
    )


# Composites have a short repr, which Hypothesis makes often: that of nested alternatives grows without bound.


@st.composite
def _leaves(draw: st.DrawFn, names: Sequence[str]) -> Any:
    return draw(arrays(names=names) | scalars(names=names) | plain_values() | st.none())


@st.composite
def _containers(draw: st.DrawFn, inner: st.SearchStrategy[Any], some_keys: st.SearchStrategy[Any]) -> Any:
    kind = draw(st.sampled_from(_CONTAINERS))
    if kind in (Pair, Settings):
        return kind(draw(inner), draw(inner))
    if kind in (list, tuple, collections.deque):
        return kind(draw(st.lists(inner, max_size=3)))
    if kind is None:  # one value at two places
        value = draw(inner)
        return {"one": value, "again": value}
    items = draw(st.lists(st.tuples(some_keys, inner), max_size=4, unique_by=lambda item: str(item[0])))
    return collections.defaultdict(list, items) if kind is collections.defaultdict else kind(items)


_CONTAINERS: tuple[Any, ...] = (
    dict,
    list,
    tuple,
    collections.OrderedDict,
    collections.deque,
    collections.defaultdict,
    Pair,
    Settings,
    None,
)


# What is equal


def exact_form(value: Any) -> Any:
    """A form of a state that two states share only if types, keys, order and all bits are the same.

    Classes that are not imported at restore have the form of what stands for them.
    """
    cls = type(value)
    if cls in (list, tuple, collections.deque):
        return cls.__name__, tuple(map(exact_form, value))
    if isinstance(value, tuple):
        return "fields", _class_name(cls), _items(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return "fields", _class_name(cls), _items(fields)
    if isinstance(value, NamedMapping):
        return "fields", value.type_name, _items(value.items())
    if isinstance(value, Mapping):
        return cls.__name__, _items(value.items())
    return _leaf_form(value)


def leaf_forms(value: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """The form of every leaf and empty container of a state, by storage name."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, list | tuple | collections.deque):
        value = dict(enumerate(value)) or value
    if not isinstance(value, Mapping) or not value:
        return {".".join(path): exact_form(value)}
    return {name: form for k, child in value.items() for name, form in leaf_forms(child, (*path, str(k))).items()}


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _items(items: Any) -> tuple[Any, ...]:
    return tuple((_leaf_form(key), exact_form(child)) for key, child in items)


def _leaf_form(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return "array", value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return "scalar", value.dtype.name, value.tobytes()
    if type(value) is float:
        return "float", struct.pack("<d", value)
    if type(value) is complex:
        return "complex", struct.pack("<dd", value.real, value.imag)
    if type(value) in (set, frozenset):
        return type(value).__name__, frozenset(map(_leaf_form, value))
    if type(value) is slice:
        return "slice", *map(_leaf_form, (value.start, value.stop, value.step))
    if type(value) is tuple:
        return "tuple", tuple(map(_leaf_form, value))
    if isinstance(value, pathlib.PurePath):
        return "path", str(value)
    if isinstance(value, decimal.Decimal | fractions.Fraction | uuid.UUID):
        return type(value).__name__, str(value)
    return type(value).__name__, bytes(value) if type(value) is bytearray else value


# Boxes and options


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], *, most: int = 3) -> list[Box]:
    """Boxes that tile an array without gap or overlap: cuts on each axis, evenly spaced or not."""
    found: list[Box] = [Box((), ())]
    for n in shape:
        inner = draw(st.lists(st.integers(1, n - 1), max_size=most - 1, unique=True)) if n > 1 else []
        cuts = [0, *sorted(inner), n]
        spans = [(a, b - a) for a, b in itertools.pairwise(cuts)]
        found = [Box((*box.start, a), (*box.shape, m)) for box in found for a, m in spans]
    return found


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any part of an array, an empty one too."""
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(0, n - a)) for a, n in zip(start, shape, strict=True)))


@st.composite
def save_options(draw: st.DrawFn) -> SaveOptions:
    """Small chunks, blocks and lanes, so that small arrays meet every boundary: chunks larger than a lane too."""
    block = draw(st.sampled_from([PAGE, PAGE + 1, 5000, 3 * PAGE]))
    least = math.ceil(4 * block / PAGE)
    return SaveOptions(
        chunk_nbytes=draw(st.sampled_from([1, 7, 64, 1000, PAGE, 20_000, 1 << 20])),
        block_nbytes=block,
        declare_crc=draw(st.booleans()),
        lanes=draw(st.integers(1, 3)),
        lane_nbytes=PAGE * draw(st.integers(least, least + 3)),
        direct=draw(st.booleans()),
    )


@st.composite
def restore_options(draw: st.DrawFn) -> RestoreOptions:
    """Small lanes, smaller than chunks and blocks can be."""
    return RestoreOptions(
        lanes=draw(st.integers(1, 3)), lane_nbytes=PAGE * draw(st.integers(4, 16)), direct=draw(st.booleans())
    )
