"""A seeded mutator of JSON: structured changes, so that what is changed still reaches the parsers behind the checksum."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import msgspec

__all__ = ["mutated", "mutated_bytes"]

_NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 7, 255, 4095, 4096, 2**20, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30,
    0.5, -0.0, 1e300, "", ".", "..", "/", "/etc/passwd", "../x", "a/b", "\0", "é", "٣", "1e999999999", "0x1p99999", "nan",
    "9" * 4400, "-1", "inf", "None", "float32", "float6_e2m3fn", "complex128", "bool", "int4", "array", "npscalar", "int",
    "parameter", "prng:fry", "prng:threefry2x32", "torch.sparse_coo", "torch.sparse_csr", "torch.Size", "tuple", "deque", "pytree",
    "namedtuple", "counter", "defaultdict", "odict", "pickle", "fraction", "decimal", "uuid", "range", "slice", "set", "bytes",
    "datetime", "timedelta", "torch.dtype", "torch.device", "cuda:99", "meta", "save", "[]", [], {}, [[]], [0], [[0]], [1, 2],
    ["int", "5"], ["float", "0x1p-1"], ["tuple", [["int", "1"]]], ["const", "None"], {"t": "key", "v": ["int", "1"]},
    {"t": "pickle", "v": "gASVAAAAAAAAAAAu"}, {"t": "set", "v": []}, {"t": "fraction", "v": "1e999999999"}, {"t": [], "v": 1},
)  # fmt: skip


def mutated(document: Any, seed: int) -> Any:
    """The document with one to four changes, always the same ones for a seed."""
    rng = random.Random(seed)
    root = [copy.deepcopy(document)]
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        places = _places(root)
        container, key = rng.choice(places)
        if container is not root:
            with contextlib.suppress(RecursionError):  # copied deep into itself often enough
                _change(rng, container, key, places)
    return root[0]


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 5000:
        node = waiting.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            if isinstance(node[key], dict | list):
                waiting.append(node[key])
    return found


def _change(rng: random.Random, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    old = container[key]
    what = rng.randrange(9)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    elif what == 2:
        other, other_key = rng.choice(places)
        with contextlib.suppress(LookupError):  # an earlier change may have removed it
            container[key] = copy.deepcopy(other[other_key])
    elif what == 3 and type(old) is int:
        container[key] = old + rng.choice((-1, 1, 64, -64, 4096, -4096, 2**40))
    elif what == 4 and isinstance(old, str) and old:
        at = rng.randrange(len(old))
        container[key] = old[:at] + rng.choice(("", "0", "f", "/", ".", "\0", "é", old)) + old[at + 1 :]
    elif what == 5:
        deep: Any = old
        for _ in range(rng.choice((1, 2, 50, 450, 3000))):
            deep = [deep] if rng.random() < 0.9 else {"t": "tuple", "v": deep}
        container[key] = _shallow_enough(deep)
    elif what == 6 and isinstance(old, list):
        rng.shuffle(old)
    else:
        container[key] = copy.deepcopy(rng.choice(_NASTY))


def _shallow_enough(value: Any) -> Any:
    """What the encoder refuses cannot be put into a file this way: half as deep, then."""
    try:
        msgspec.json.encode(value)
    except RecursionError:
        return [["deep"]]
    return value


def mutated_bytes(data: bytes, seed: int) -> bytes:
    """Bytes with one to four of them changed, removed, repeated or made extreme."""
    rng = random.Random(seed)
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(found)) if found else 0
        what = rng.randrange(6)
        if what == 0:
            del found[at : at + rng.choice((1, 1, 4, 16))]
        elif what == 1:
            found[at:at] = bytes(rng.choice((0, 1, 0x7F, 0x80, 0xFF)) for _ in range(rng.choice((1, 4, 9))))
        elif what == 2 and at < len(found):
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif what == 3:
            found[at : at + 9] = b"\xff" * 8 + b"\x01"
        elif at < len(found):
            found[at] ^= 1 << rng.randrange(8)
    return bytes(found)
