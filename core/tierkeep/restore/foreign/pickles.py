"""Pickles as data: an interpreter of what pickles of plain values consist of, and of nothing else.

Nothing is imported, looked up or called because a pickle says so: a name stands for what a fixed table has for it, and
anything else is an error that names it. Memory grows with the pickle's length alone. Python's own unpickler, with such
a table, still allocates by what a memo's number declares, changes the classes of the table by BUILD, and overflows the
C stack when it hashes a tuple nested some 200,000 times; those are no errors that can be caught. This one takes 0.40 s
for the metadata of 10,000 tensors (1.2 million operations), where `pickle.load` takes 0.27 s.
"""

from __future__ import annotations

import collections
import datetime
import math
import pathlib
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...format import dtypes

__all__ = ["PLAIN", "Maker", "Named", "NotRead", "NumpyArray", "Record", "Table", "read_pickle"]

_KEY_DEPTH = 8  # tuples within tuples as a dict's key


class NotRead(ValueError):
    """What a pickle holds is known for what it is, or named, but is no plain value."""


class Maker(NamedTuple):
    """What a name of a pickle stands for: makes a plain value of the arguments it is given."""

    make: Callable[..., Any]


class Named(NamedTuple):
    """A value that only a framework has, as a checkpoint's record keeps it: a dtype, say."""

    tag: str
    text: str


class Record:
    """An object of a class that is not imported: the class's name here, and the state the object was pickled with."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = {}

    def field(self, name: str, default: Any = None) -> Any:
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class NumpyArray:
    """A numpy array or scalar: what its pickle says, checked when it is asked for."""

    __slots__ = ("data", "dtype", "fortran", "scalar", "shape")

    def __init__(self, *, scalar: bool) -> None:
        self.scalar = scalar
        self.shape: Any = ()
        self.dtype: Any = None
        self.fortran: Any = False
        self.data: Any = None

    def array(self) -> np.ndarray[Any, Any]:
        """Raises NotRead for a dtype that cannot be kept, ValueError for one that does not fit its data."""
        dtype = self.dtype.dtype() if isinstance(self.dtype, _NumpyDtype) else None
        shape = self.shape
        if dtype is None or type(self.data) is not bytes or type(shape) is not tuple:
            raise NotRead("a numpy array of objects")
        if not all(type(n) is int and 0 <= n < 2**63 for n in shape) or len(shape) > 64:
            raise ValueError("a numpy array of a shape that no array has")
        if math.prod(shape) * dtype.itemsize != len(self.data):
            raise ValueError(f"a numpy array of shape {shape} with {len(self.data)} bytes of {dtype}")
        order: Any = "F" if self.fortran else "C"
        found = np.frombuffer(self.data, dtype).reshape(shape, order=order)
        return np.ascontiguousarray(found).reshape(shape)


class _NumpyDtype:
    __slots__ = ("name", "state")

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name
        self.state: Any = ()

    def dtype(self) -> np.dtype[Any]:
        order = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "|"
        if isinstance(self.name, str) and re.fullmatch(r"[biufc]\d{1,2}", self.name) and order in ("<", "|", "="):
            try:
                found = np.dtype(self.name)
            except TypeError as error:
                raise ValueError(f"a numpy array of dtype {self.name}") from error
            if dtypes.dtype_of_numpy(found) is not None:
                return found
        raise NotRead("a numpy array of a dtype that is no number's, or big-endian")


Table = Mapping[tuple[str, str], Any]


def read_pickle(data: bytes, table: Table, storage: Callable[[Any], Any] | None = None) -> Any:
    """The value of a pickle of protocol 2 or later whose names are all in `table`; `storage` takes persistent ids.

    Raises NotRead for a name that is not, or an operation that plain values do not need; ValueError for damage.
    """
    try:
        return _Interpreter(data, table, storage).run()
    except ValueError:
        raise
    except (LookupError, TypeError, AttributeError, ArithmeticError, struct.error) as error:
        raise ValueError(f"a pickle that is none ({type(error).__name__}: {error})") from error


class _Interpreter:
    def __init__(self, data: bytes, table: Table, storage: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.table = table
        self.storage = storage
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks that marks interrupted
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, memo, operations = self.data, self.memo, _OPERATIONS
        end = len(data)
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == _MEMOIZE:  # this and the next are half of all
                memo[len(memo)] = self.stack[-1]
                continue
            if code == _GET:
                self.stack.append(memo[data[self.at]])
                self.at += 1
                continue
            if code == _STOP:
                if self.at != end or len(self.stack) != 1 or self.below:
                    raise ValueError("a pickle that does not end where it should")
                return self.stack[0]
            operation = operations.get(code)
            if operation is None:
                if code in _OTHERS:
                    raise NotRead(f"a pickle with the operation {bytes([code])!r}, which plain values do not need")
                raise ValueError("a pickle that is none")
            operation(self)
        raise ValueError("a pickle that is cut short")

    def take(self, nbytes: int) -> bytes:
        begin = self.at
        self.at = begin + nbytes
        if self.at > len(self.data):
            raise ValueError("a pickle that is cut short")
        return self.data[begin : self.at]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode()

    def push(self, value: Any) -> None:
        """On the stack there is by then: to find `value` may have ended a mark."""
        self.stack.append(value)

    def items(self) -> list[Any]:
        """What was pushed since the last mark."""
        found = self.stack
        self.stack = self.below.pop()
        return found

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def name(self, module: Any, name: Any) -> None:
        found = self.table.get((module, name)) if type(module) is type(name) is str else None
        if found is None:
            raise NotRead(f"{module!s:.100}.{name!s:.100}")
        self.stack.append(found)

    def make(self) -> None:
        args = self.stack.pop()
        maker = self.stack.pop()
        if type(maker) is not Maker or type(args) is not tuple:
            raise ValueError("a pickle that calls what is no class")
        self.stack.append(maker.make(*args))

    def make_with_names(self) -> None:
        if self.stack.pop() != {}:
            raise NotRead("an object made of named arguments")
        self.make()

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is Record:
            if type(state) is tuple and len(state) == 2 and isinstance(state[1], dict):  # of a class with slots
                state = {**(state[0] or {}), **state[1]}
            made.state = state
        elif type(made) is _NumpyDtype:
            made.state = state
        elif type(made) is NumpyArray:
            _, made.shape, made.dtype, made.fortran, made.data = state
        else:
            raise NotRead("an object with a state of its own")

    def append(self, values: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) not in (list, collections.deque):
            raise ValueError("a pickle that appends to what is no list")
        into.extend(values)

    def set_items(self, values: list[Any]) -> None:
        into = self.stack[-1]
        if type(into) not in _MAPPINGS or len(values) % 2:
            raise ValueError("a pickle that sets keys of what is no mapping")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) is not str:
                _check_key(key, 0)
            if key in into:  # one of the two had another name
                raise ValueError("a pickle that sets a key twice")
            into[key] = value

    def add(self, values: list[Any]) -> None:
        if type(self.stack[-1]) is not set:
            raise ValueError("a pickle that adds to what is no set")
        self.stack[-1].update(_set(values))

    def persistent(self) -> None:
        if self.storage is None:
            raise NotRead("a pickle with a persistent id")
        self.stack.append(self.storage(self.stack.pop()))

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise ValueError("a pickle that takes more than it put")
        made = tuple(self.stack[-count:])
        self.stack[-count:] = [made]


def _check_key(key: Any, depth: int) -> None:
    """Only what hashes without going deep, and by itself."""
    if type(key) is tuple and depth < _KEY_DEPTH:
        for item in key:
            _check_key(item, depth + 1)
    elif type(key) not in _KEYS:
        raise NotRead(f"a dict or set with a key of type {type(key).__name__}")


_KEYS = frozenset({str, int, bool, float, bytes, type(None), complex, Record, Named})
_MAPPINGS = frozenset({dict, collections.OrderedDict, collections.defaultdict, collections.Counter})
_STOP, _GET, _MEMOIZE = b".h\x94"
# Of protocol 0 and 1 alone, of registered extensions, of memory beside the pickle, and of objects in themselves.
_OTHERS = frozenset(b"FIPLSVgipdlo012\x82\x83\x84\x97\x98")


def _operations() -> dict[int, Callable[[_Interpreter], object]]:
    """Of protocols 2 to 5, without `_OTHERS`."""

    def counted(nbytes: int, decode: Callable[[bytes], Any]) -> Callable[[_Interpreter], object]:
        return lambda to: to.stack.append(decode(to.take(to.number(nbytes))))

    def push(make: Callable[[], Any]) -> Callable[[_Interpreter], object]:
        return lambda to: to.stack.append(make())

    def signed(data: bytes) -> int:
        return int.from_bytes(data, "little", signed=True)

    text = bytes.decode  # a surrogate has no UTF-8 form, and pickles of one are refused
    found: dict[bytes, Callable[[_Interpreter], object]] = {
        b"\x80": lambda to: to.take(1),  # the protocol: what follows says itself what it is
        b"\x95": lambda to: to.take(8),  # a frame's length
        b"(": _Interpreter.mark,
        b"j": lambda to: to.stack.append(to.memo[to.number(4)]),
        b"q": lambda to: to.put(to.number(1)),
        b"r": lambda to: to.put(to.number(4)),
        b"N": push(lambda: None),
        b"\x88": push(lambda: True),
        b"\x89": push(lambda: False),
        b"K": lambda to: to.stack.append(to.number(1)),
        b"M": lambda to: to.stack.append(to.number(2)),
        b"J": lambda to: to.stack.append(signed(to.take(4))),
        b"\x8a": counted(1, signed),
        b"\x8b": counted(4, signed),
        b"G": lambda to: to.stack.append(struct.unpack(">d", to.take(8))[0]),
        b"\x8c": counted(1, text),
        b"X": counted(4, text),
        b"\x8d": counted(8, text),
        b"U": counted(1, lambda data: data.decode("ascii")),
        b"T": counted(4, lambda data: data.decode("ascii")),
        b"C": counted(1, bytes),
        b"B": counted(4, bytes),
        b"\x8e": counted(8, bytes),
        b"\x96": counted(8, bytearray),
        b")": push(tuple),
        b"\x85": lambda to: to.tuple_of(1),
        b"\x86": lambda to: to.tuple_of(2),
        b"\x87": lambda to: to.tuple_of(3),
        b"t": lambda to: to.push(tuple(to.items())),
        b"]": push(list),
        b"a": lambda to: to.append([to.stack.pop()]),
        b"e": lambda to: to.append(to.items()),
        b"}": push(dict),
        b"s": lambda to: to.set_items([to.stack.pop(-2), to.stack.pop()]),
        b"u": lambda to: to.set_items(to.items()),
        b"\x8f": push(set),
        b"\x90": lambda to: to.add(to.items()),
        b"\x91": lambda to: to.push(frozenset(_set(to.items()))),
        b"c": lambda to: to.name(to.line(), to.line()),
        b"\x93": lambda to: to.name(to.stack.pop(-2), to.stack.pop()),
        b"R": _Interpreter.make,
        b"\x81": _Interpreter.make,
        b"\x92": _Interpreter.make_with_names,
        b"b": _Interpreter.build,
        b"Q": _Interpreter.persistent,
    }
    return {code[0]: operation for code, operation in found.items()}


# What names stand for. Each takes only arguments that pickles of its class have: others could make it large.


def _set(items: Any = ()) -> set[Any]:
    if type(items) not in (list, tuple):
        raise NotRead("a set of what is no list")
    for item in items:
        _check_key(item, 0)
    return set(items)


def _ordered(items: Any = ()) -> collections.OrderedDict[Any, Any]:
    made: collections.OrderedDict[Any, Any] = collections.OrderedDict()
    for key, value in items if type(items) in (list, tuple) else items.items():
        _check_key(key, 0)
        made[key] = value
    return made


def _default(factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is None:
        return collections.defaultdict(None)
    if type(factory) not in (Named, Maker) or factory not in _FACTORIES:
        raise NotRead("a defaultdict of what is no plain type")
    return collections.defaultdict(_FACTORIES[factory])


def _deque(items: Any = (), most: Any = None) -> collections.deque[Any]:
    if type(items) not in (list, tuple) or type(most) not in (int, type(None)):
        raise NotRead("a deque of what is no list")
    return collections.deque(items, most)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    if type(counts) not in (dict, type(None)):
        raise NotRead("a counter of what is no dict")
    return collections.Counter(counts)


def _bytes(text: Any = "", encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise NotRead("bytes of what is no text")
    return text.encode("latin1")


def _bytearray(data: Any = b"", encoding: Any = "latin-1") -> bytearray:
    return bytearray(data if type(data) is bytes else _bytes(data, encoding))


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


def _numpy_scalar(dtype: Any, data: Any) -> NumpyArray:
    made = NumpyArray(scalar=True)
    made.dtype, made.data = dtype, data
    return made


_SET = Maker(_set)
_FACTORIES: dict[Any, Callable[[], Any]] = {
    _SET: set, **{Named("class", cls.__name__): cls for cls in (int, float, list, dict, str, bool, tuple)}
}  # fmt: skip
_BUILTINS: dict[str, Any] = {
    "set": _SET,
    "frozenset": Maker(lambda items=(): frozenset(_set(items))),
    "complex": Maker(_complex),
    "bytearray": Maker(_bytearray),
    "bytes": Maker(_bytes),
    **{name.text: name for name in _FACTORIES if name is not _SET},
}
_PATHS = {
    "PosixPath": pathlib.PurePosixPath, "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath, "PureWindowsPath": pathlib.PureWindowsPath,
}  # fmt: skip
_NUMPY = {"scalar": Maker(_numpy_scalar), "_reconstruct": Maker(lambda *_: NumpyArray(scalar=False))}
_DATES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)
PLAIN: Table = {
    **{(module, name): made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
    ("_codecs", "encode"): Maker(_bytes),
    ("collections", "OrderedDict"): Maker(_ordered),
    ("collections", "defaultdict"): Maker(_default),
    ("collections", "deque"): Maker(_deque),
    ("collections", "Counter"): Maker(_counter),
    **{("datetime", cls.__name__): Maker(cls) for cls in _DATES},
    **{(module, name): Maker(cls) for module in ("pathlib", "pathlib._local") for name, cls in _PATHS.items()},
    **{(f"{core}.multiarray", name): made for core in ("numpy.core", "numpy._core") for name, made in _NUMPY.items()},
    ("numpy", "ndarray"): Named("class", "ndarray"),
    ("numpy", "dtype"): Maker(_NumpyDtype),
}
"""Names of Python and numpy that plain values are pickled with, also by Python 2 or under its names."""

_OPERATIONS = _operations()
