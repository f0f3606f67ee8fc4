"""The exact structure of a state: kept in our own record, rebuilt without importing any class.

A tree is made of `Node`s; an array leaf is its number, a plain value is `Value(number)`, and None is None. Only
tuples, strings and numbers occur, so two trees compare and hash exactly: key types are spelled out, because
`1 == True == 1.0` would otherwise let one structure pass for another.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import fractions
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from .errors import InvalidStateError

__all__ = [
    "FACTORIES",
    "NamedMapping",
    "Node",
    "Tree",
    "Value",
    "container",
    "decode_key",
    "decode_tree",
    "decode_value",
    "encode_key",
    "encode_value",
    "is_own_container",
    "is_sequence",
    "join",
    "rebuild",
    "walk",
]

_DEPTH_LIMIT = 400  # nesting that a record may declare; deeper input is refused, not recursed into


class Value(NamedTuple):
    """A plain value, kept in the record itself."""

    number: int


class Node(NamedTuple):
    """A container of a state."""

    kind: str
    """`dict`, `list`, `tuple`, `namedtuple`, `dataclass`, … or an adapter's own kind."""
    name: str | None
    """The class's name where the kind alone does not say it; never imported."""
    keys: tuple[Any, ...]
    """Encoded keys, in the order of `children`; empty for sequences."""
    children: tuple[Tree, ...]


Tree: TypeAlias = "Node | Value | int | None"

_SEQUENCES = frozenset({"list", "tuple", "deque"})
FACTORIES: Mapping[str, Callable[[], Any] | None] = {
    "None": None, "int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "bool": bool, "tuple": tuple,
}  # fmt: skip


class NamedMapping(dict[Any, Any]):
    """What stands for an object whose class is not imported: its fields, and the name it had."""

    def __init__(self, type_name: str, fields: Mapping[Any, Any]) -> None:
        super().__init__(fields)
        self.type_name = type_name

    def __repr__(self) -> str:
        return f"NamedMapping({self.type_name!r}, {super().__repr__()})"


def is_sequence(kind: str) -> bool:
    return kind in _SEQUENCES


def join(path: Sequence[Any]) -> str:
    """The storage name of a key path, as Orbax derives it."""
    return ".".join(map(str, path))


def walk(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], tuple[int, ...], Tree]]:
    """Every leaf, value, None and empty container: its path as strings, each step's Orbax key type, and itself.

    Key types are Orbax's: 1 for a place in a sequence, 2 for a key or a field.
    """
    stack: list[tuple[tuple[str, ...], tuple[int, ...], Tree]] = [(path, (), tree)]
    while stack:
        path, types, node = stack.pop()
        if isinstance(node, Node) and node.children:
            sequence = is_sequence(node.kind)
            keys = map(str, range(len(node.children))) if sequence else (str(decode_key(k)) for k in node.keys)
            key_type = 1 if sequence else 2
            stack += reversed([((*path, k), (*types, key_type), c) for k, c in zip(keys, node.children, strict=True)])
        else:
            yield path, types, node


def encode_key(key: Any) -> Any:
    """A dict key as a string or a tagged pair; distinct keys of any type stay distinct. Raises TypeError."""
    if type(key) is str:
        key.encode()  # a lone surrogate has no UTF-8 form: UnicodeEncodeError, a ValueError
        return key
    if type(key) is bool or key is None:
        return "const", str(key)
    if type(key) is int:
        return "int", str(key)
    if type(key) is float:
        return "float", key.hex()
    if type(key) is bytes:
        return "bytes", key.hex()
    if type(key) is tuple:
        return "tuple", tuple(map(encode_key, key))
    raise TypeError(
        f"a dict key of type {type(key).__name__} cannot be kept exactly; use str, int, bool, float or bytes"
    )


def decode_key(key: Any) -> Any:
    """The key that `encode_key` was given. Raises ValueError."""
    if isinstance(key, str):
        return key
    tag, text = key
    if tag == "const":
        return {"True": True, "False": False, "None": None}[text]
    if tag == "int":
        return int(text)
    if tag == "float":
        return float.fromhex(text)
    if tag == "bytes":
        return bytes.fromhex(text)
    if tag == "tuple":
        return tuple(map(decode_key, text))
    raise ValueError(f"unknown key tag {tag!r}")


def decode_tree(raw: Any, n_leaves: int, n_values: int) -> Tree:
    """The tree that a record's JSON holds, every number checked. Raises ValueError."""
    return _decode(raw, n_leaves, n_values, 0)


def _decode(raw: Any, n_leaves: int, n_values: int, depth: int) -> Tree:
    if raw is None:
        return None
    if type(raw) is int:
        if not 0 <= raw < n_leaves:
            raise ValueError(f"leaf {raw} of {n_leaves}")
        return raw
    if depth > _DEPTH_LIMIT:
        raise ValueError(f"nesting deeper than {_DEPTH_LIMIT}")
    if not isinstance(raw, list):
        raise ValueError(f"a tree node of type {type(raw).__name__}")
    if len(raw) == 1 and type(raw[0]) is int and 0 <= raw[0] < n_values:
        return Value(raw[0])
    if len(raw) != 4:
        raise ValueError("a tree node that is not [kind, name, keys, children]")
    kind, name, keys, children = raw
    if not isinstance(kind, str) or not isinstance(name, str | None):
        raise ValueError("a tree node without a kind")
    if not isinstance(keys, list) or not isinstance(children, list):
        raise ValueError("a tree node without children")
    if len(keys) != (0 if is_sequence(kind) else len(children)):
        raise ValueError(f"{len(keys)} keys for {len(children)} children")
    node = Node(
        kind, name, tuple(map(_freeze, keys)), tuple(_decode(c, n_leaves, n_values, depth + 1) for c in children)
    )
    try:
        distinct = len(set(map(decode_key, node.keys)))
    except (TypeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"a key that is none: {error}") from error
    if distinct != len(node.keys):
        raise ValueError("a key that stands twice")
    if kind == "deque" and name is not None and not (name.isdecimal() and len(name) < 19):
        raise ValueError(f"a deque of length {name!r}")
    return node


def _freeze(key: Any) -> Any:
    return tuple(map(_freeze, key)) if isinstance(key, list) else key


# Plain values: JSON that says its type. Numbers that fit a 0-d array are leaves, not values.


def _text(value: Any) -> str:
    text = str(value)
    text.encode()  # the path of a file can hold what has no UTF-8 form
    return text


_TAGGED: tuple[tuple[str, type, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("bytes", bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
    ("bytearray", bytearray, lambda v: base64.b64encode(v).decode(), lambda v: bytearray(base64.b64decode(v))),
    ("none", type(None), lambda v: v, lambda _: None),
    ("bool", bool, bool, bool),
    ("int", int, str, int),
    ("float", float, float.hex, float.fromhex),
    ("complex", complex, lambda v: [v.real.hex(), v.imag.hex()], lambda v: complex(*map(float.fromhex, v))),
    ("range", range, lambda v: [str(v.start), str(v.stop), str(v.step)], lambda v: range(*map(int, v))),
    ("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    ("date", datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    ("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    (
        "timedelta",
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: datetime.timedelta(*map(int, v)),
    ),
    ("path", pathlib.PurePath, _text, pathlib.PurePath),
    ("decimal", decimal.Decimal, str, decimal.Decimal),
    # Not by its text alone: "1e999999999" is a number that no memory holds.
    ("fraction", fractions.Fraction, str, lambda v: fractions.Fraction(*map(int, v.split("/")))),
    ("uuid", uuid.UUID, str, uuid.UUID),
)
_ENCODERS = {cls: (tag, encode) for tag, cls, encode, _ in _TAGGED} | dict.fromkeys(
    (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath), ("path", _text)
)
_DECODERS = {tag: decode for tag, _, _, decode in _TAGGED}
_SETS = {"set": set, "frozenset": frozenset}


def encode_value(value: Any) -> Any:
    """A plain value as JSON (`str` as itself, all else tagged), None where it has no exact plain form."""
    cls = type(value)
    if cls is str:
        value.encode()  # a lone surrogate has no UTF-8 form: UnicodeEncodeError, a ValueError
        return value
    if cls in (datetime.datetime, datetime.time) and (
        value.fold or type(value.tzinfo) not in (type(None), datetime.timezone)
    ):
        return None  # text of ISO 8601 keeps neither a zone's rules nor which of two repeated hours is meant
    if cls in _ENCODERS:
        tag, encode = _ENCODERS[cls]
        return {"t": tag, "v": encode(value)}
    if cls is set or cls is frozenset:
        items = [_encode_item(item) for item in value]
        if any(item is None for item in items):
            return None
        return {"t": cls.__name__, "v": sorted(items, key=repr)}
    if cls is slice:
        items = [_encode_item(item) for item in (value.start, value.stop, value.step)]
        return None if any(item is None for item in items) else {"t": "slice", "v": items}
    return None


def decode_value(raw: Any) -> Any:
    """The plain value of a record. Raises ValueError."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, dict) or set(raw) != {"t", "v"}:
        raise ValueError("a value that is neither a string nor tagged")
    tag, payload = raw["t"], raw["v"]
    try:
        if tag in _SETS:
            return _SETS[tag](map(_decode_item, payload))
        if tag == "slice":
            return slice(*map(_decode_item, payload))
        if tag in _DECODERS:
            return _DECODERS[tag](payload)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"a value tagged {tag!r} that is none: {error}") from error
    return payload  # another adapter's value (a torch dtype opened in JAX): its text


def _encode_item(item: Any) -> Any:
    try:
        return {"t": "key", "v": encode_key(item)}
    except TypeError:
        return None


def _decode_item(item: Any) -> Any:
    return decode_key(_freeze(item["v"]))


_OWN = frozenset(
    {dict, list, tuple, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque}
)


def is_own_container(value: Any) -> bool:
    """Whether the core takes a value apart by itself, without asking a framework's registry."""
    return type(value) in _OWN or (isinstance(value, tuple) and hasattr(value, "_fields"))


def rebuild(node: Node, children: Sequence[Any]) -> Any:
    """The container of a node, of plain Python types only; a class that would need an import becomes NamedMapping."""
    kind = node.kind
    if kind == "list":
        return list(children)
    if kind == "tuple":
        return tuple(children)
    if kind == "deque":
        return collections.deque(children, None if node.name is None else int(node.name))
    fields = dict(zip(map(decode_key, node.keys), children, strict=True))
    if kind == "dict":
        return fields
    if kind == "odict":
        return collections.OrderedDict(fields)
    if kind == "defaultdict":
        return collections.defaultdict(FACTORIES.get(node.name or "None"), fields)
    if kind == "counter":
        return collections.Counter(fields)
    return NamedMapping(node.name or kind, fields)


def container(value: Any) -> tuple[Node, tuple[Any, ...]] | None:
    """A plain Python container as a node without children, and its children; None for anything else."""
    cls = type(value)
    if cls is dict:
        return Node("dict", None, tuple(map(encode_key, value)), ()), tuple(value.values())
    if cls is list:
        return Node("list", None, (), ()), tuple(value)
    if cls is tuple:
        return Node("tuple", None, (), ()), value
    if cls is collections.OrderedDict:
        return Node("odict", None, tuple(map(encode_key, value)), ()), tuple(value.values())
    if cls is collections.defaultdict:
        factory = "None" if value.default_factory is None else getattr(value.default_factory, "__name__", "")
        if FACTORIES.get(factory, ()) is not value.default_factory:
            raise InvalidStateError(f"a defaultdict of {value.default_factory!r} cannot be kept: convert it to a dict")
        return Node("defaultdict", factory, tuple(map(encode_key, value)), ()), tuple(value.values())
    if cls is collections.Counter:
        return Node("counter", None, tuple(map(encode_key, value)), ()), tuple(value.values())
    if cls is collections.deque:
        return Node("deque", None if value.maxlen is None else str(value.maxlen), (), ()), tuple(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return Node("namedtuple", name, tuple(cls._fields), ()), tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(field.name for field in dataclasses.fields(value))
        return Node("dataclass", name, fields, ()), tuple(getattr(value, field) for field in fields)
    if cls is NamedMapping:
        name = value.type_name  # saved again, it is still what it stands for
    if isinstance(value, Mapping):
        return Node("mapping", name, tuple(map(encode_key, value)), ()), tuple(value.values())
    return None
