"""The exact structure of a state: types, keys, order, empties; and the objects that give their state."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tierkeep_torch as tk
from tests.torch.compare import assert_same, snapshot
from tierkeep.errors import InvalidStateError, MismatchError, NameCollisionError, UnsupportedLeafError
from tierkeep.options import SaveOptions
from tierkeep.tree import NamedMapping


class Pair(NamedTuple):
    w: Any
    n: int = 0


@dataclasses.dataclass
class Run:
    w: Any
    n: int = 0
    seen: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    w: Any
    n: int = 0


class Colour(enum.Enum):
    RED = 1


def round_trip(state: Any, path: Path) -> Any:
    tk.save(state, path / "c")
    return tk.load(path / "c")


T = torch.arange(3.0)

STRUCTURES: dict[str, Any] = {
    # empty-leaf-inside-sequence
    "none_inside": (1, None, 2),
    "empty_dict_inside": (1, {}, 2),
    "empty_tuple_inside": (1, (), 2),
    "only_none": [None],
    "nested_empties": [[], [1], {}, (), {"a": {}}, [[[]]]],
    "optax_like": ((), (T, ()), [(), {}]),
    "all_none": None,
    "nothing": {},
    # int-keys-become-str
    "int_keys": {n: T + n for n in (0, 2, 10, 1, 11, -3)},
    "odd_keys": {True: 1, 2.5: 2, b"x": 3, (1, "a", None): 4, None: 5, "s": 6},
    "optimizer_like": {"state": {0: {"step": T}, 10: {"step": T}}, "param_groups": [{"params": [0, 10]}]},
    # separator-collision: what can be told apart
    "slash": {"a/b": 1, "a": {"b": 2}},
    "percent": {"a%2Fb": T, "a/b": T + 1},
    "empty_key": {"": T},
    "empty_key_below": {"a": {"": T, " ": T + 1}},
    "dots": {".": T, "..": T + 1, "../../x": T + 2, "/etc/x": T + 3},
    "zarr_names": {"zarr.json": T, "c": {"0": T + 1}, "": {"c": 1}, "manifest.ocdbt": T},
    # key-to-filename-limit
    "long_keys": {"x" * 300: T, "\U0001f600" * 100: T + 1, "Case": T + 2, "case": T + 3, "new\nline": 1, "nul\0": 2},
    # kinds of containers
    "ordered": collections.OrderedDict([("b", T), ("a", 1)]),
    "default": collections.defaultdict(list, {"a": [T]}),
    "counter": collections.Counter("abca"),
    "deque": collections.deque([1, T], maxlen=5),
    "size": {"shape": torch.Size([2, 3]), "empty": torch.Size([])},
    # plain values
    "numbers": [0, -1, 2**62, 2**63, -(2**80), True, 1.5, -0.0, float("inf"), float("nan"), 5e-324, 1 + 2j, -0j],
    "texts": ["", "é\U0001f600\n\0", b"", b"\xff\0", bytearray(b"ab")],
    "sets": [{1, 2}, frozenset({"a", None}), set(), range(1, 9, 2), slice(1, None, 2)],
    "times": [
        datetime.datetime(2024, 1, 2, 3, 4, 5, 6, datetime.UTC),
        datetime.date(2024, 1, 2),
        datetime.time(1, 2),
        datetime.timedelta(-1, 2, 3),
    ],
    "exact": [decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=5), pathlib.PurePosixPath("a/b")],
    "torch_values": [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3)],
    "torch_formats": [torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format],
    "numpy": [np.float32(1.5), np.bool_(True), np.int8(-3), np.arange(3), np.array(2.5), np.zeros((0, 2), np.int8)],
    # a state need not be a container
    "tensor": T,
    "text": "hello",
    "number": 5,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_state_comes_back_as_it_was_without_a_target(name: str, tmp_path: Path) -> None:
    assert_same(round_trip(STRUCTURES[name], tmp_path), STRUCTURES[name])


@pytest.mark.parametrize("name", sorted(set(STRUCTURES) - {"all_none"}))
def test_a_state_fits_itself_as_a_target(name: str, tmp_path: Path) -> None:
    saved = STRUCTURES[name]
    tk.save(saved, tmp_path / "c")
    assert_same(tk.load(tmp_path / "c", saved), saved)


def test_the_order_of_keys_is_the_order_they_were_put_in(tmp_path: Path) -> None:
    state = {str(n): n for n in (10, 9, 2, 1)} | {"z": {5: 1, 3: 2}}
    assert list(round_trip(state, tmp_path)) == ["10", "9", "2", "1", "z"]


# separator-collision, int-keys-become-str
@pytest.mark.parametrize(
    "state",
    [
        {"a.b": 1, "a": {"b": 2}},
        {"a.b": T, "a": {"b": "text"}},
        {"a": {"b.c": T}, "a.b": {"c": T}},
        {0: 1, "0": 2},
        {True: 1, "True": 2},
        {"a": [1], "a.0": 2},
        {"a/": T, "a": T + 1},
        {"": {"": 1}, ".": 2},
    ],
    ids=str,
)
def test_two_leaves_of_one_storage_name_are_refused_by_both_names(state: Any, tmp_path: Path) -> None:
    with pytest.raises(NameCollisionError) as caught:
        tk.save(state, tmp_path / "c")
    assert caught.value.first
    assert caught.value.second
    assert list(tmp_path.iterdir()) == []


# key-to-filename-limit
@pytest.mark.parametrize("depth", [1, 50, 200, 290])
def test_deep_nesting_is_kept(depth: int, tmp_path: Path) -> None:
    state: Any = T
    for level in range(depth):
        state = {"k": state} if level % 2 else [state]
    assert_same(round_trip(state, tmp_path), state)


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: list[Any] = [1]
    state.append({"again": state})
    with pytest.raises(UnsupportedLeafError, match="nested deeper"):
        tk.save(state, tmp_path / "c")


# namedtuple-new-class
def test_classes_are_not_imported_and_their_fields_and_name_are_kept(tmp_path: Path) -> None:
    state = {"p": Pair(T, 5), "r": Run(T, 6), "f": Frozen(T, 7), "u": collections.UserDict(a=T)}
    found = round_trip(state, tmp_path)
    for key, name in (("p", "Pair"), ("r", "Run"), ("f", "Frozen"), ("u", "collections.UserDict")):
        assert isinstance(found[key], NamedMapping)
        assert found[key].type_name.endswith(name)
    assert found["p"]["n"] == 5
    assert found["r"] == {"w": found["r"]["w"], "n": 6, "seen": 3}
    assert torch.equal(found["f"]["w"], T)
    assert round_trip(found, tmp_path / "again")["p"].type_name == found["p"].type_name


# namedtuple-new-class
def test_a_target_gives_its_own_classes(tmp_path: Path) -> None:
    tk.save({"p": Pair(T, 5), "r": Run(T, 6), "f": Frozen(T, 7), "u": collections.UserDict(a=T)}, tmp_path / "c")
    into: dict[str, Any] = {
        "p": Pair(torch.zeros(3)),
        "r": Run(torch.zeros(3)),
        "f": Frozen(torch.zeros(3)),
        "u": collections.UserDict(a=torch.zeros(3)),
    }
    run, user, place = into["r"], into["u"], into["p"].w.data_ptr()
    found = tk.load(tmp_path / "c", into)
    assert found is into
    assert isinstance(into["p"], Pair)
    assert isinstance(into["f"], Frozen)
    assert into["r"] is run
    assert into["u"] is user
    assert (into["p"].n, run.n, run.seen, into["f"].n) == (5, 6, 3, 7)
    assert into["p"].w.data_ptr() == place
    for one in (into["p"].w, run.w, into["f"].w, user["a"]):
        assert torch.equal(one, T)
    assert_same(tk.load(tmp_path / "c", tk.load(tmp_path / "c"))["p"]["n"], 5)  # what came without one fits too


# namedtuple-new-class: a renamed field
def test_a_renamed_field_is_named_on_both_sides(tmp_path: Path) -> None:
    class Renamed(NamedTuple):
        weight: Any
        n: int = 0

    tk.save({"p": Pair(T, 5)}, tmp_path / "c")
    with pytest.raises(MismatchError) as caught:
        tk.load(tmp_path / "c", {"p": Renamed(torch.zeros(3))})
    assert caught.value.missing == ("p.weight",)
    assert caught.value.unexpected == ("p.w",)


# flatten-depends-on-content
@pytest.mark.parametrize("target", [[], [{"k": 9}], [1, 2, 3, 4]], ids=str)
def test_a_plain_list_is_restored_as_it_was_saved_whatever_its_length(target: list[Any], tmp_path: Path) -> None:
    tk.save({"log": [{"k": 1}, {"k": 2}], "w": T}, tmp_path / "c")
    into = {"log": target, "w": torch.zeros(3)}
    tk.load(tmp_path / "c", into)
    assert into["log"] == [{"k": 1}, {"k": 2}]
    assert into["log"] is target
    tk.save({"log": [], "w": T}, tmp_path / "d")
    tk.load(tmp_path / "d", into)
    assert into["log"] == []


# flatten-depends-on-content: a dict that grew a key
def test_a_dict_that_grew_a_key_is_a_named_mismatch(tmp_path: Path) -> None:
    tk.save({"sched": {"last": 3}}, tmp_path / "c")
    with pytest.raises(MismatchError) as caught:
        tk.load(tmp_path / "c", {"sched": {"last": 0, "new": 1}})
    assert caught.value.missing == ("sched.new",)
    into = {"sched": {"last": 0, "new": 1}}
    tk.load(tmp_path / "c", into, missing="keep")
    assert into == {"sched": {"last": 3, "new": 1}}


@pytest.mark.parametrize(("saved", "target"), [([1, 2], {"a": 1}), ({"a": 1}, [1, 2]), (5, [1]), ([T], T), (T, 5)])
def test_a_container_does_not_pass_for_another(saved: Any, target: Any, tmp_path: Path) -> None:
    tk.save({"x": saved}, tmp_path / "c")
    into = {"x": target}
    before = snapshot(into)
    with pytest.raises(MismatchError, match="x"):
        tk.load(tmp_path / "c", into)
    assert_same(snapshot(into), before)


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [object(), Custom(1), Colour.RED, lambda: 1, len, int, {object()}, {Custom: 1}, {Colour.RED: 1}, "\ud800", ...],
    ids=lambda v: type(v).__name__,
)
def test_what_has_no_exact_form_is_refused_by_name_and_nothing_is_pickled(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        tk.save({"a": [T, {"b": value}]}, tmp_path / "c")
    assert caught.value.key == "a.1.b"
    assert list(tmp_path.iterdir()) == []


def test_a_key_without_utf8_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match=r"(?i)utf-8"):
        tk.save({"\ud800": 1}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_pickle_must_be_allowed_on_both_sides(tmp_path: Path) -> None:
    state = {"w": T, "in": [Custom(7)]}
    tk.save(state, tmp_path / "c", options=SaveOptions(pickle=True))
    with pytest.raises(InvalidStateError, match=r"'in\.0'.*pickle=True"):
        tk.load(tmp_path / "c")
    with pytest.raises(InvalidStateError, match=r"'in\.0'"):
        tk.load(tmp_path / "c", {"w": torch.zeros(3), "in": [Custom(0)]})
    assert tk.load(tmp_path / "c", pickle=True)["in"] == [Custom(7)]
    into = {"w": torch.zeros(3), "in": [Custom(0)]}
    tk.load(tmp_path / "c", into, pickle=True)
    assert into["in"] == [Custom(7)]
    assert_same(tk.load(tmp_path / "c", keys=["w"]), {"w": T})


class Bomb:
    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (Bomb.path,)

    path: Path


# pickle-metadata-executes-code
def test_a_pickle_in_a_checkpoint_is_not_run_unless_allowed(tmp_path: Path) -> None:
    Bomb.path = tmp_path / "ran"
    tk.save({"x": Bomb(), "w": T}, tmp_path / "c", options=SaveOptions(pickle=True))
    calls: tuple[Any, ...] = (
        lambda: tk.load(tmp_path / "c"),
        lambda: tk.load(tmp_path / "c", dry_run=True),
        lambda: tk.load(tmp_path / "c", {"x": 1, "w": torch.zeros(3)}),
    )
    for call in calls:
        with pytest.raises(InvalidStateError):
            call()
    assert not Bomb.path.exists()


# Objects that give their state


class Counter:
    """A data loader, a scaler: anything with the two methods."""

    def __init__(self, n: int) -> None:
        self.n, self.buffer = n, [torch.full((2,), float(n))] * n

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n, self.buffer = state["n"], state["buffer"]


def test_an_object_with_state_dict_takes_its_state_back(tmp_path: Path) -> None:
    tk.save({"loader": Counter(3), "deep": [Counter(1)]}, tmp_path / "c")
    fresh: dict[str, Any] = {"loader": Counter(0), "deep": [Counter(5)]}
    loader = fresh["loader"]
    tk.load(tmp_path / "c", fresh)
    assert fresh["loader"] is loader
    assert loader.n == 3
    assert_same(loader.buffer, Counter(3).buffer)
    assert fresh["deep"][0].n == 1
    assert_same(tk.load(tmp_path / "c")["loader"], Counter(3).state_dict())


def test_an_object_that_cannot_take_its_state_back_is_refused_by_name(tmp_path: Path) -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(UnsupportedLeafError, match=r"'a\.0'.*load_state_dict"):
        tk.save({"a": [Half()]}, tmp_path / "c")
    tk.save({"a": [{}]}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"a\.0.*load_state_dict"):
        tk.load(tmp_path / "c", {"a": [Half()]})


def test_random_states_of_torch_numpy_and_python_come_back(tmp_path: Path) -> None:
    import random

    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    found = round_trip(state, tmp_path)
    assert_same(found, state)
    random.setstate(found["python"])
    torch.set_rng_state(found["torch"])
