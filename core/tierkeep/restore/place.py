"""Place: match a checkpoint with a target, or with nothing, and say where every wanted byte goes.

Matching happens before anything is read or changed, and finds every difference; filling and rebuilding come after.
"""

from __future__ import annotations

import base64
import collections
import copy
import dataclasses
import fnmatch
import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..adapter import Adapter, Branch, Destination, Region, Sink, Stateful, children_of
from ..errors import InvalidStateError, MismatchError
from ..leaf import Box, LeafSpec
from ..tree import (
    NamedMapping,
    Node,
    Tree,
    Value,
    decode_key,
    decode_value,
    encode_key,
    is_sequence,
    join,
    rebuild,
    walk,
)
from .arrays import allocate_numpy, numpy_destination
from .source import Unread

if TYPE_CHECKING:
    from ..format.part import LeafRecord
    from ..options import RestoreOptions
    from .source import Contents

__all__ = ["NOTHING", "Placement", "place"]

Finish = Callable[[], Any]
NOTHING = object()  # no target: give back what was saved
# What a framework raises of a value or of parts that it cannot make anything of.
_REFUSALS = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, AttributeError)


@dataclasses.dataclass(slots=True)
class Placement:
    """What is wanted of a checkpoint, where it goes, and how the two differ."""

    finish: Finish = lambda: None
    """Called when all sinks are filled: the restored state."""
    forget: Callable[[], None] = lambda: None
    """Lets go of the target's arrays and of new ones; nothing can be called afterwards. Without it they would live until
    the cyclic collector comes by, because what finishes them refers to itself."""
    wants: list[tuple[int, Box]] = dataclasses.field(default_factory=list)
    sinks: list[Sink] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    """Leaves that are restored."""
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    shape: list[str] = dataclasses.field(default_factory=list)
    dtype: list[str] = dataclasses.field(default_factory=list)
    structure: list[str] = dataclasses.field(default_factory=list)

    def check(self, path: str, options: RestoreOptions) -> None:
        """Raises MismatchError listing every difference that `options` does not allow."""
        found = {
            "missing": self.missing if options.missing == "error" else [],
            "unexpected": self.unexpected if options.unexpected == "error" else [],
            "shape": self.shape if options.shape == "error" else [],
            "dtype": self.dtype if options.dtype == "error" else [],
            "structure": self.structure,
        }
        if any(found.values()):
            raise MismatchError(path, **found)


def place(
    whole: Contents,
    target: Any,
    adapter: Adapter,
    options: RestoreOptions,
    *,
    keys: Sequence[str] | None,
    device: Any,
    dry_run: bool,
) -> Placement:
    """Matches `whole` with `target` (NOTHING for none); with `keys`, only the leaves that a pattern selects.

    Without a target, `device` is where the framework's own arrays go, or says so for each leaf's name.

    Raises InvalidStateError if a pattern selects nothing. Differences are collected, not raised.
    """
    tree = whole.tree
    selected = None
    if keys is not None:
        tree, selected = _select(tree, keys)
    placer = _Placer(whole, adapter, options, device, dry_run, selected)
    if target is NOTHING:
        placer.placement.finish = placer.build(tree, ())
    else:
        placer.placement.finish = placer.match(target, tree, ())
    placer.placement.forget = placer.forget
    return placer.placement


def _select(tree: Tree, keys: Sequence[str]) -> tuple[Tree, frozenset[str]]:
    """The tree with only the leaves that one of the patterns selects, by name or by a name above theirs."""
    if isinstance(keys, str):
        keys = [keys]
    if not keys:
        raise InvalidStateError("keys holds no pattern: pass None for everything. Nothing was read.")
    unused = set(keys)
    selected = set()
    names = []
    for path, _, _ in walk(tree):
        above = [join(path[:n]) for n in range(1, len(path) + 1)] or [""]
        names.append(above[-1])
        for pattern in keys:
            if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in above):
                selected.add(above[-1])
                unused.discard(pattern)
    if unused:
        shown = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
        raise InvalidStateError(
            f"no leaf matches {', '.join(sorted(map(repr, unused)))}; the checkpoint has {len(names)}: {shown}. Nothing was read."
        )
    return _pruned(tree, selected, ()), frozenset(selected)


_PARTIAL = frozenset({"dict", "odict", "defaultdict", "counter", "mapping"})  # whole without some of their keys


def _pruned(tree: Tree, selected: set[str], path: tuple[Any, ...]) -> Tree:
    if not isinstance(tree, Node) or not tree.children:
        return tree
    sequence = is_sequence(tree.kind)
    steps = list(range(len(tree.children))) if sequence else [decode_key(k) for k in tree.keys]
    kept = []
    for number, (step, child) in enumerate(zip(steps, tree.children, strict=True)):
        below = (*path, step)
        if any(join([*below, *p]) in selected for p, _, _ in walk(child)):
            kept.append((number, _pruned(child, selected, below)))
    if len(kept) == len(tree.children):
        return tree._replace(children=tuple(child for _, child in kept))
    keys: tuple[Any, ...]
    if sequence:  # what is left of a sequence is a mapping from place to element
        keys = tuple(("int", str(number)) for number, _ in kept)
        return Node("dict", None, keys, tuple(child for _, child in kept))
    kind = tree.kind if tree.kind in _PARTIAL else "dict"
    return Node(kind, tree.name, tuple(tree.keys[n] for n, _ in kept), tuple(child for _, child in kept))


class _Placer:
    def __init__(
        self,
        whole: Contents,
        adapter: Adapter,
        options: RestoreOptions,
        device: Any,
        dry_run: bool,
        selected: frozenset[str] | None,
    ) -> None:
        self.whole = whole
        self.adapter = adapter
        self.options = options
        self.device = device
        self.dry_run = dry_run
        self.selected = selected
        self.placement = Placement()
        # By owner and mark: tied leaves come back as one object, or at least as one memory.
        self.built: dict[tuple[int, str | None], Finish] = {}
        self.allocated: dict[int, Destination] = {}
        self.filled: dict[Any, int] = {}  # memory that is being filled, and the leaf it is filled from

    def forget(self) -> None:
        self.built.clear()
        self.allocated.clear()
        self.filled.clear()
        self.placement.sinks = []
        self.placement.finish = self.placement.forget = lambda: None

    # Without a target

    def build(self, tree: Tree, path: tuple[Any, ...]) -> Finish:
        if tree is None:
            return lambda: None
        if type(tree) is int:
            return self.build_leaf(tree)
        if isinstance(tree, Value):
            return self.value(tree, path)
        assert isinstance(tree, Node)
        node = tree
        steps = self.steps(node)
        children = [self.build(child, (*path, step)) for step, child in zip(steps, node.children, strict=True)]

        def finish() -> Any:
            made = [child() for child in children]
            try:
                own = self.adapter.rebuild(node, made)
                return rebuild(node, made) if own is None else own
            except _REFUSALS as error:
                raise _unmakeable(join(path), node.kind, error) from error

        return finish

    def build_leaf(self, number: int) -> Finish:
        record = self.whole.leaves[number]
        owner = number if record.tie is None else record.tie
        self.placement.names.append(record.name)
        key = (owner, record.spec.ext)
        if key not in self.built:
            known = self.allocated.get(owner)
            if known is not None and known.again is not None:
                again = known.again
                make = _once(lambda: again(record.spec.ext))
            else:
                make = _once(self.allocate(owner, record).finish)

            def finish() -> Any:
                try:
                    return make()
                except _REFUSALS as error:
                    raise _unmakeable(record.name, record.spec.ext or record.spec.kind, error) from error

            self.built[key] = finish
        return self.built[key]

    def allocate(self, owner: int, record: LeafRecord) -> Destination:
        """New memory for a leaf, which is going to be filled."""
        if self.dry_run:
            destination = _unplaced(record.spec)
        else:
            own = record.spec.kind == "array"
            try:
                device = self.device(record.name) if callable(self.device) else self.device
                destination = self.adapter.allocate(record.spec, device) if own else allocate_numpy(record.spec)
            except TypeError as error:
                raise InvalidStateError(
                    f"leaf {record.name!r}: {error}; name the leaves to restore with keys=, or restore this one "
                    "with the framework that saved it. Nothing was read."
                ) from error
        self.allocated[owner] = destination
        self.fill(owner, destination)
        return destination

    def value(self, value: Value, path: Sequence[Any]) -> Finish:
        raw = self.whole.values[value.number]
        if isinstance(raw, Unread):
            raise raw.error
        if isinstance(raw, dict) and set(raw) == {"t", "v"}:
            if raw["t"] == "pickle":
                if not self.options.pickle:
                    raise InvalidStateError(
                        f"leaf {join(path)!r} was saved as a pickle, which runs code when it is loaded: "
                        "pass pickle=True if you trust the checkpoint. Nothing was read."
                    )
                return lambda: pickle.loads(base64.b64decode(raw["v"]))
            try:
                own = self.adapter.decode_value(raw["t"], raw["v"])
            except _REFUSALS as error:  # of another version of the framework, or nothing it ever had
                raise InvalidStateError(f"leaf {join(path)!r}: {error}. Nothing was read.") from error
            if own is not None:
                return lambda: own
        plain = decode_value(raw)
        return lambda: plain

    def fill(self, owner: int, destination: Destination) -> None:
        if destination.memory is not None:
            earlier = self.filled.get(destination.memory)
            if earlier is not None:
                if earlier != owner:
                    one, other = self.whole.leaves[earlier].name, self.whole.leaves[owner].name
                    self.placement.structure.append(
                        f"{other}: one memory with {one} in the target, two in the checkpoint"
                    )
                return
            self.filled[destination.memory] = owner
        for region in destination.regions:
            if region.box.size:
                self.placement.wants.append((owner, region.box))
                self.placement.sinks.append(region.sink)

    def steps(self, node: Node) -> list[Any]:
        return list(range(len(node.children))) if is_sequence(node.kind) else [decode_key(k) for k in node.keys]

    # With a target

    def match(self, target: Any, tree: Tree, path: tuple[Any, ...]) -> Finish:
        if isinstance(tree, Value) and isinstance(self.whole.values[tree.number], Unread):
            return self.value(tree, path)  # raises
        stored = self.whole.leaves[tree].spec if type(tree) is int else None
        try:
            destination = self.destination(target, stored)
            branch = None if destination is not None else children_of(target, self.adapter)
        except (TypeError, ValueError) as error:
            self.placement.structure.append(f"{join(path)}: {error}")
            return lambda: target
        if destination is not None:
            return self.match_leaf(target, destination, tree, path)
        if isinstance(branch, Stateful):
            return self.match_stateful(target, branch, tree, path)
        if tree is None and branch is not None and not branch.children and self.whole.text_keys:
            return lambda: target  # Orbax writes None for a named tuple without fields
        if branch is not None and branch.load is not None:
            return self.match_loaded(target, branch, tree, path)
        sequences = branch is not None and is_sequence(branch.node.kind)
        if isinstance(tree, Node) and not is_sequence(tree.kind):
            sequences = False
        if branch is None or (sequences and self.is_plain(branch.children)):
            return self.match_plain(target, branch, tree, path)
        # A selection can leave a mapping from places of what was a sequence: it fits a sequence too.
        if not isinstance(tree, Node) or (
            self.selected is None
            and not self.whole.text_keys
            and is_sequence(branch.node.kind) != is_sequence(tree.kind)
        ):
            self.placement.structure.append(f"{join(path)}: {self.told(tree)} for a target of {_kind(target)}")
            return lambda: target
        return self.match_branch(target, branch, tree, path)

    def destination(self, target: Any, stored: LeafSpec | None) -> Destination | None:
        if isinstance(target, np.ndarray):
            return numpy_destination(target, stored, in_place=self.adapter.in_place)
        spec = stored if stored is not None else LeafSpec("array", "uint8", ())
        return self.adapter.destination(target, spec)

    def match_leaf(self, target: Any, destination: Destination, tree: Tree, path: Sequence[Any]) -> Finish:
        name = join(path)
        if type(tree) is not int:
            self.placement.structure.append(f"{name}: {self.told(tree)} for a target of {_kind(target)}")
            return lambda: target
        record = self.whole.leaves[tree]
        spec = destination.spec
        if record.spec.shape != spec.shape:
            self.placement.shape.append(f"{name}: {record.spec.shape} in the checkpoint, {spec.shape} in the target")
            return lambda: target
        if record.spec.dtype != spec.dtype:
            self.placement.dtype.append(f"{name}: {record.spec.dtype} in the checkpoint, {spec.dtype} in the target")
        self.placement.names.append(name)
        self.fill(tree if record.tie is None else record.tie, destination)
        return destination.finish

    def match_stateful(self, target: Any, stateful: Stateful, tree: Tree, path: tuple[Any, ...]) -> Finish:
        load = stateful.load
        refused = stateful.check(tree) if stateful.check is not None else None
        if refused is not None:
            self.placement.structure.append(f"{join(path)}: {refused}")
            return lambda: target
        if stateful.in_place:
            return self.loaded(target, self.match(stateful.state, tree, path), load)
        return self.loaded(target, self.build(self.as_owned(tree, stateful.state), path), load)

    def as_owned(self, tree: Tree, state: Any) -> Tree:
        """The structure with keys as an object of this state has them, where only their text is known, and with the
        empty containers that it has, where the checkpoint keeps none: an optimizer numbers its parameters, and one that
        has not begun has no state.
        """
        if not self.whole.text_keys or not isinstance(tree, Node):
            return tree
        if is_sequence(tree.kind):
            owned = list(state) if isinstance(state, list | tuple) else []
            owned += [None] * (len(tree.children) - len(owned))
            return tree._replace(children=tuple(map(self.as_owned, tree.children, owned)))
        own = state if isinstance(state, Mapping) else {}
        keys = [decode_key(key) for key in tree.keys]
        if keys and not any(key in own for key in keys) and all(map(_is_number, keys)):
            keys = [int(key) for key in keys]
        children = [self.as_owned(child, own.get(key)) for key, child in zip(keys, tree.children, strict=True)]
        if not self.whole.empty_kept:
            for key, value in own.items():
                if type(key) in (str, int) and key not in keys and isinstance(value, dict | list):
                    keys.append(key)
                    children.append(Node("dict" if isinstance(value, dict) else "list", None, (), ()))
        return tree._replace(keys=tuple(map(encode_key, keys)), children=tuple(children))

    def match_loaded(self, target: Any, branch: Branch, tree: Tree, path: tuple[Any, ...]) -> Finish:
        """A target that takes its parts as a whole: of the same kind and name, its arrays of the same dtypes."""
        assert branch.load is not None
        name = join(path)
        if not isinstance(tree, Node) or tree.kind != branch.node.kind or tree.keys != branch.node.keys:
            self.placement.structure.append(f"{name}: {self.told(tree)} for a target of {branch.node.kind}")
            return lambda: target
        if tree.name != branch.node.name:
            self.placement.shape.append(f"{name}: {tree.name} in the checkpoint, {branch.node.name} in the target")
            return lambda: target
        for child, part, key in zip(branch.children, tree.children, branch.node.keys, strict=True):
            if type(part) is int and self.is_array(part):
                stored = self.whole.leaves[part].spec
                try:
                    own = self.destination(child, stored)
                except (TypeError, ValueError) as error:
                    self.placement.structure.append(f"{join((*path, decode_key(key)))}: {error}")
                    continue
                if own is not None and own.spec.dtype != stored.dtype:
                    self.placement.dtype.append(
                        f"{join((*path, decode_key(key)))}: {stored.dtype} in the checkpoint, {own.spec.dtype} in the target"
                    )
        return self.loaded(target, self.build(tree, path), branch.load)

    def loaded(self, target: Any, inner: Finish, load: Callable[[Any], object] | None) -> Finish:
        def finish() -> Any:
            state = inner()
            if load is not None:
                load(state)
            return target

        return finish

    def match_plain(self, target: Any, branch: Branch | None, tree: Tree, path: tuple[Any, ...]) -> Finish:
        """A target without arrays takes whatever plain values were saved; arrays it has no place for are unexpected."""
        arrays = [self.whole.leaves[n].name for _, _, n in walk(tree) if type(n) is int and self.is_array(n)]
        if arrays and (branch is not None or target is None):
            self.placement.unexpected += arrays
            return lambda: target
        if arrays or (target is not None and isinstance(tree, Node) != (branch is not None)):
            self.placement.structure.append(f"{join(path)}: {self.told(tree)} for a target of {_kind(target)}")
            return lambda: target
        made = self.build(tree, path)
        if not (self.adapter.in_place and type(target) in (list, collections.deque)):
            return made

        def finish() -> Any:
            value = made()
            if type(value) is not type(target):
                return value
            target.clear()
            target.extend(value)
            return target

        return finish

    def match_branch(self, target: Any, branch: Branch, tree: Tree, path: tuple[Any, ...]) -> Finish:
        assert isinstance(tree, Node)
        sequence = is_sequence(branch.node.kind)
        steps = list(range(len(branch.children))) if sequence else [decode_key(k) for k in branch.node.keys]
        saved: Mapping[Any, Tree] = dict(zip(self.steps(tree), tree.children, strict=True))
        children: list[tuple[Any, Finish]] = []
        if self.whole.text_keys:
            saved = {str(step): child for step, child in saved.items()}
        known = {self.known_as(step) for step in steps}
        for step, child in zip(steps, branch.children, strict=True):
            key = self.known_as(step)
            if key in saved:
                children.append((step, self.match(child, saved[key], (*path, step))))
            else:
                if self.selected is None and (self.whole.empty_kept or not self.is_empty(child)):
                    self.placement.missing += self.names_below(child, (*path, step))
                children.append((step, lambda child=child: child))  # type: ignore[misc]
        for step, child_tree in saved.items():
            if step not in known:
                self.placement.unexpected += [join((*path, step, *p)) for p, _, _ in walk(child_tree)]
        return lambda: _remake(target, branch, [(step, finish()) for step, finish in children], self.adapter)

    def known_as(self, step: Any) -> Any:
        return str(step) if self.whole.text_keys else step

    def names_below(self, value: Any, path: tuple[Any, ...]) -> list[str]:
        try:
            branch = children_of(value, self.adapter)
        except (TypeError, ValueError):  # it could not be restored into either: missing is what matters
            branch = None
        if isinstance(branch, Stateful):
            return self.names_below(branch.state, path)
        if branch is None or not branch.children:
            return [join(path)]
        keys = range(len(branch.children)) if is_sequence(branch.node.kind) else map(decode_key, branch.node.keys)
        return [
            name for k, child in zip(keys, branch.children, strict=True) for name in self.names_below(child, (*path, k))
        ]

    def is_plain(self, children: Sequence[Any]) -> bool:
        for child in children:
            try:
                if (
                    isinstance(child, np.ndarray)
                    or self.adapter.destination(child, LeafSpec("array", "uint8", ())) is not None
                ):
                    return False
                branch = children_of(child, self.adapter)
            except (TypeError, ValueError):  # an array that cannot be restored into, which its own match reports
                return False
            if isinstance(branch, Stateful) or (branch is not None and not self.is_plain(branch.children)):
                return False
            if branch is not None and (branch.rebuild is not None or branch.node.kind in ("namedtuple", "dataclass")):
                return False  # its class comes from the target, so the two are matched part by part
        return True

    def is_empty(self, value: Any) -> bool:
        """A container without anything in it, however deep."""
        try:
            branch = children_of(value, self.adapter)
        except (TypeError, ValueError):
            return False
        return isinstance(branch, Branch) and branch.load is None and all(map(self.is_empty, branch.children))

    def is_array(self, number: int) -> bool:
        return self.whole.leaves[number].spec.kind in ("array", "ndarray")

    def told(self, tree: Tree) -> str:
        if tree is None:
            return "None in the checkpoint"
        if type(tree) is int:
            spec = self.whole.leaves[tree].spec
            what = "an array" if self.is_array(tree) else "a number"
            return f"{what} ({spec.dtype} {spec.shape}) in the checkpoint"
        return "a plain value in the checkpoint" if isinstance(tree, Value) else f"a {tree.kind} in the checkpoint"  # type: ignore[union-attr]


def _is_number(key: Any) -> bool:
    return isinstance(key, str) and key.isdecimal() and len(key) < 19 and str(int(key)) == key


def _kind(target: Any) -> str:
    return "None" if target is None else type(target).__name__


def _unmakeable(name: str, kind: str, error: Exception) -> InvalidStateError:
    """For what the framework refuses to make of a record that verifies."""
    return InvalidStateError(
        f"{name!r}: no {kind} can be made of what the checkpoint holds: {error}. "
        "What was read is verified; the checkpoint is untouched."
    )


def _once(finish: Finish) -> Finish:
    made: list[Any] = []

    def again() -> Any:
        if not made:
            made.append(finish())
        return made[0]

    return again


def _remake(target: Any, branch: Branch, children: list[tuple[Any, Any]], adapter: Adapter) -> Any:
    """The target's own container around its restored children: itself where targets are filled in place."""
    values = [value for _, value in children]
    if branch.rebuild is not None:
        return branch.rebuild(values)
    if adapter.in_place and isinstance(target, MutableMapping | list | collections.deque):
        for step, value in children:
            target[step] = value
        return target
    if isinstance(target, tuple):
        cls = type(target)
        return cls._make(values) if hasattr(cls, "_make") else tuple(values)
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        frozen = target.__dataclass_params__.frozen  # type: ignore[attr-defined]
        made = target if adapter.in_place and not frozen else copy.copy(target)
        for step, value in children:  # not by its __init__, which need not take every field
            object.__setattr__(made, step, value)
        return made
    if isinstance(target, NamedMapping):
        return NamedMapping(target.type_name, dict(children))
    return rebuild(branch.node, values)


def _unplaced(spec: LeafSpec) -> Destination:
    return Destination(spec, (Region(Box.whole(spec.shape), lambda part, data: None),), lambda: None)
