"""Keys, plain values and trees come back exactly, and what is malformed is refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import importlib
import inspect
import os
import pathlib
import pickle
import pkgutil
import zoneinfo
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierkeep
from tierkeep import errors
from tierkeep.adapter import flatten
from tierkeep.errors import InvalidStateError, StorageError, TierkeepError, UnsupportedLeafError
from tierkeep.testing import strategies as tk
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tree import (
    NamedMapping,
    Node,
    Value,
    container,
    decode_key,
    decode_tree,
    decode_value,
    encode_key,
    encode_value,
    rebuild,
)

KEYS = st.recursive(
    st.text(st.characters(codec="utf-8"))
    | st.integers()
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


def through_json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


@given(KEYS)
def test_a_key_comes_back_with_its_type(key: Any) -> None:
    decoded = decode_key(frozen(through_json(encode_key(key))))
    assert typed(decoded) == typed(key)


def typed(key: Any) -> Any:
    if type(key) is tuple:
        return tuple(map(typed, key))
    return type(key), key.hex() if type(key) is float else key


@given(KEYS, KEYS)
def test_two_keys_share_a_form_only_if_they_are_one(one: Any, other: Any) -> None:
    assert (encode_key(one) == encode_key(other)) == (typed(one) == typed(other))


@pytest.mark.parametrize(
    "several", [[1, True, 1.0, "1", b"1"], [0, False, 0.0, -0.0, None, ""], [(1,), (True,), ("1",)]]
)
def test_keys_that_python_takes_for_equal_have_different_forms(several: list[Any]) -> None:
    assert len({encode_key(key) for key in several}) == len(several)


@pytest.mark.parametrize("key", [frozenset(), object(), 1j, ("a", object())])
def test_a_key_of_another_type_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="key of type"):
        encode_key(key)


@given(tk.plain_values())
def test_a_plain_value_comes_back_exactly(value: Any) -> None:
    decoded = decode_value(through_json(encode_value(value)))
    assert tk.exact_form(decoded) == tk.exact_form(value)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        {1, frozenset({2})},
        slice(None, [], None),
        datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
        datetime.datetime(2020, 7, 1, fold=1),
        datetime.time(1, fold=1),
        dataclasses.make_dataclass("D", ["x"]),
    ],
    ids=repr,
)
def test_a_value_without_an_exact_plain_form_is_refused_by_key(value: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="no exact plain form") as caught:
        flatten({"a": {5: [value]}}, NumpyAdapter(), pickle_rest=False)
    assert caught.value.key == "a.5.0"


@pytest.mark.parametrize(
    "value",
    ["\udc00", {"\udc00"}, {("\udc00",): 1}, {"\udc00": 1}, pathlib.Path(os.fsdecode(b"\xff")), slice("\udc00", None)],
    ids=ascii,
)
def test_text_without_a_utf8_form_is_refused_before_anything_is_written(value: Any) -> None:
    with pytest.raises(InvalidStateError):
        flatten({"a": value}, NumpyAdapter(), pickle_rest=False)


@pytest.mark.parametrize(
    "raw",
    [
        5,
        [],
        None,
        {},
        {"t": "int"},
        {"t": "int", "v": "x"},
        {"t": "int", "v": []},
        {"t": "bytes", "v": 3},
        {"t": "bytes", "v": "é"},
        {"t": "set", "v": 3},
        {"t": "set", "v": [3]},
        {"t": "set", "v": [{}]},
        {"t": "set", "v": [{"t": "key", "v": ["const", "Maybe"]}]},
        {"t": "slice", "v": []},
        {"t": "range", "v": ["0", "1", "0"]},
        {"t": "uuid", "v": 5},
        {"t": "datetime", "v": 5},
        {"t": "timedelta", "v": ["9" * 30]},
        {"t": "decimal", "v": "x"},
        {"t": "fraction", "v": "1/0"},
        {"t": [], "v": 1},
    ],
)
def test_a_malformed_value_is_a_value_error(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_value(raw)


@given(tk.states())
def test_a_tree_comes_back_from_its_json(state: Any) -> None:
    snapshot = flatten(state, NumpyAdapter(), pickle_rest=False)
    again = decode_tree(through_json(snapshot.tree), len(snapshot.leaves), len(snapshot.values))
    assert again == snapshot.tree
    assert type(again) is type(snapshot.tree)


def nested(depth: int) -> list[Any]:
    raw: list[Any] = ["list", None, [], []]
    for _ in range(depth):
        raw = ["list", None, [], [raw]]
    return raw


@pytest.mark.parametrize(
    "raw",
    [
        2,
        -1,
        True,
        1.0,
        "x",
        {},
        [],
        [2],
        [True],
        [0, 1],
        ["list", None, [], [], []],
        [5, None, [], []],
        ["dict", 5, [], []],
        ["dict", None, {}, []],
        ["dict", None, [], {}],
        ["dict", None, ["a"], []],
        ["dict", None, [], [0]],
        ["list", None, ["a"], [0]],
        ["dict", None, ["a", "a"], [0, 1]],
        ["dict", None, [5], [0]],
        ["dict", None, [None], [0]],
        ["dict", None, [[]], [0]],
        ["dict", None, [["int", "x"]], [0]],
        ["dict", None, [["int", None]], [0]],
        ["dict", None, [["int", "1", "2"]], [0]],
        ["dict", None, [["const", "Maybe"]], [0]],
        ["dict", None, [["float", "0x1p99999"]], [0]],
        ["dict", None, [["what", "1"]], [0]],
        ["dict", None, [["tuple", 5]], [0]],
        ["dict", None, [{"a": 1}], [0]],
        ["deque", "-1", [], []],
        ["deque", "many", [], []],
        ["deque", "9" * 40, [], []],
    ],
    ids=lambda raw: repr(raw)[:40],
)
def test_a_malformed_tree_is_a_value_error(raw: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_tree(raw, 2, 2)


def test_a_tree_nested_too_deep_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nesting deeper"):
        decode_tree(nested(500), 0, 0)


def test_a_well_formed_tree_is_taken() -> None:
    raw = ["dict", None, ["a", ["int", "1"]], [0, ["tuple", None, [], [[1], None]]]]
    inner = Node("tuple", None, (), (Value(1), None))
    assert decode_tree(raw, 1, 2) == Node("dict", None, ("a", ("int", "1")), (0, inner))
    assert decode_tree(nested(300), 0, 0) is not None


@pytest.mark.parametrize(
    "value", [collections.deque([1], 3), collections.Counter("aab"), collections.defaultdict(int, a=1), {}, (), []]
)
def test_a_plain_container_is_rebuilt_with_what_it_carries(value: Any) -> None:
    found = container(value)
    assert found is not None
    again = rebuild(*found)
    assert again == value
    assert type(again) is type(value)
    for name in ("maxlen", "default_factory"):
        assert getattr(again, name, None) == getattr(value, name, None)


def test_what_stands_for_a_class_keeps_the_classes_name_when_it_is_saved_again() -> None:
    found = container(tk.Settings(1, 2))
    assert found is not None
    first = rebuild(*found)
    assert isinstance(first, NamedMapping)
    found = container(first)
    assert found is not None
    again = rebuild(*found)
    assert isinstance(again, NamedMapping)
    assert again == first == {"rate": 1, "extra": 2}
    assert again.type_name == first.type_name == "tierkeep.testing.strategies.Settings"


def test_a_defaultdict_that_would_need_an_import_is_refused() -> None:
    with pytest.raises(InvalidStateError, match="defaultdict"):
        container(collections.defaultdict(datetime.datetime.now))


# Errors

ERRORS: list[TierkeepError] = [
    TierkeepError("what"),
    InvalidStateError("what"),
    UnsupportedLeafError("a.b", "no form"),
    errors.NameCollisionError("a.b", "('a.b',)", "('a', 'b')"),
    errors.CheckpointExistsError("/runs/5", "choose another"),
    errors.CheckpointNotFoundError("/runs/5", "a step", "nothing was changed"),
    errors.MismatchError("/runs/5", missing=["a"], unexpected=["b"], shape=["c"], dtype=["d"], structure=["e"] * 50),
    errors.CorruptCheckpointError("/runs/5", ["leaf 'a'"] * 50, "step 4 is intact"),
    errors.UnsupportedFormatError("/runs/5", "of version 9", "version 1"),
    StorageError("saving", OSError(28, "No space left on device", "/runs/5"), "step 4 is intact"),
    StorageError("saving", OSError("no number"), "step 4 is intact"),
    errors.ChangedLeafError(5, ["leaf 'a' was donated"] * 2),
    errors.SaveCancelledError(5),
    errors.WorkerError("the background process died 3 times", "step 4 is intact"),
    errors.PeerError("rank 3 was not heard of"),
    errors.BusyError("another checkpointer saves into /runs"),
    errors.ClosedError("the checkpointer"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_facts(error: TierkeepError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        for name in ("errno", "strerror", "filename"):
            assert getattr(again, name, None) == getattr(error, name, None)


def test_every_error_is_in_the_tree_and_pickled_here() -> None:
    classes = {value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__}
    assert {cls.__name__ for cls in classes} == set(errors.__all__)
    classes -= {errors.SkippedStepWarning}
    assert {type(error) for error in ERRORS} == classes
    assert all(issubclass(cls, TierkeepError) for cls in classes)
    drawing = (errors.__doc__ or "").split("\n")
    for cls in classes:
        assert any(cls.__name__ in line for line in drawing)


# Modules


def core_modules() -> list[str]:
    return [module.name for module in pkgutil.walk_packages(tierkeep.__path__, "tierkeep.")]


@pytest.mark.parametrize("name", core_modules())
def test_all_names_what_the_module_has(name: str) -> None:
    module = importlib.import_module(name)
    if hasattr(module, "__path__") and not hasattr(module, "__all__"):
        return  # a folder, whose files have the names
    assert len(set(module.__all__)) == len(module.__all__)
    for member in module.__all__:
        assert hasattr(module, member), f"{name}.__all__ names {member}"
