"""Every kind of pytree: the target's own classes with a target, plain containers without one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import equinox
import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import tierkeep_jax
from tests.jax import trees
from tierkeep.errors import InvalidStateError, MismatchError, NameCollisionError
from tierkeep.tree import NamedMapping

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = {"w": jnp.arange(16.0).reshape(4, 4), "b": jnp.ones(4)}


class Point(NamedTuple):
    x: Any
    y: Any


class Renamed(NamedTuple):
    x: Any
    z: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Unknown to jax, and with an `__init__` that cannot make it again."""

    w: Any
    doubled: Any = dataclasses.field(init=False, default=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    name: str = dataclasses.field(metadata={"static": True}, default="a")


@jax.tree_util.register_pytree_node_class
class WithoutKeys:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[Any, None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> WithoutKeys:
        return cls(*parts)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A node without children: what it holds is structure, so it comes from the target."""

    rate: float


@flax.struct.dataclass
class Flax:
    w: Any
    step: int
    apply: Any = flax.struct.field(pytree_node=False, default=None)


def _nnx_model() -> nnx.Module:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))


def _trees() -> dict[str, Any]:
    model = _nnx_model()
    mlp = equinox.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    return {
        "namedtuple": Point(jnp.ones(3), [Point(1, None), Point(2, None)]),
        "a list of namedtuples without arrays": [Point(1, 2.5), Point("a", None)],
        "dataclass": Frozen(jnp.ones(3)),
        "registered dataclass": Registered(jnp.ones(3), "b"),
        "registered node": WithoutKeys(jnp.ones(2), [jnp.zeros(1), None]),
        "static node": {"s": Static(0.5), "w": jnp.ones(2)},
        "Partial": jax.tree_util.Partial(max, jnp.ones(2), key=jnp.zeros(2)),
        "flax.struct": Flax(jnp.ones(3), 7, len),
        "FrozenDict": flax.core.FrozenDict({"a": {"b": jnp.ones(2)}}),
        "TrainState": TrainState.create(apply_fn=len, params=PARAMS, tx=optax.adamw(1e-3)),
        "nnx.State": nnx.state(model),
        "nnx.Module": model,
        "nnx.Optimizer": nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param),
        "optax sgd": optax.sgd(0.1).init(PARAMS),
        "optax adamw": optax.adamw(1e-3).init(PARAMS),
        "optax chain": optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1.0, 0.0, 10))).init(PARAMS),
        "optax masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}).init(PARAMS),
        "optax partition": optax.partition(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-2, momentum=0.9)}, {"w": "a", "b": "b"}
        ).init(PARAMS),
        "optax hyperparameters": optax.inject_hyperparams(optax.adam)(1e-3).init(PARAMS),
        "equinox": equinox.nn.Linear(2, 3, key=jax.random.key(0)),
        "equinox, filtered": equinox.filter(mlp, equinox.is_array),
    }


@pytest.mark.parametrize("name", _trees())
def test_a_target_gives_its_own_classes_and_is_never_changed(tmp_path: Path, name: str) -> None:
    tree = _trees()[name]
    blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if _is_float(leaf) else leaf, _trees()[name])
    before = jax.tree.map(lambda leaf: np.asarray(leaf).copy() if _is_float(leaf) else leaf, blank)
    tierkeep_jax.save(tmp_path / "c", tree)

    found = tierkeep_jax.load(tmp_path / "c", blank)

    assert type(found) is type(tree)
    assert _structure(found) == _structure(blank)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        _assert_equal(one, other)
    for one, other in zip(jax.tree.leaves(blank), jax.tree.leaves(before), strict=True):
        if _is_float(one):
            assert np.asarray(one).tobytes() == other.tobytes(), "the target was changed"


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Frozen):
        assert type(other) is Frozen
        one, other = one.w, other.w
    if isinstance(one, jax.Array):
        assert trees.bits_of(one) == trees.bits_of(other)
    else:
        assert (type(one), one) == (type(other), other)


@pytest.mark.parametrize("name", _trees())
def test_without_a_target_classes_are_mappings_that_remember_their_names(tmp_path: Path, name: str) -> None:
    tree = _trees()[name]
    tierkeep_jax.save(tmp_path / "c", tree)

    found = tierkeep_jax.load(tmp_path / "c")

    if type(tree) in (dict, list, tuple):
        assert type(found) is type(tree)
    else:
        assert type(found) is NamedMapping
        assert found.type_name == f"{type(tree).__module__}.{type(tree).__qualname__}"
    expected = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    arrays = [leaf for leaf in jax.tree.leaves(_plain(found)) if isinstance(leaf, jax.Array)]
    if name != "dataclass":  # a leaf to jax
        assert sorted(map(trees.bits_of, arrays)) == sorted(map(trees.bits_of, expected))


def _plain(tree: Any) -> Any:
    """Mappings as lists: jax does not know NamedMapping."""
    if isinstance(tree, dict):
        return [_plain(value) for value in tree.values()]
    return [_plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def test_a_target_of_shapes_gives_the_same_classes(tmp_path: Path) -> None:
    model = _nnx_model()
    tierkeep_jax.save(tmp_path / "c", nnx.state(model))

    abstract = nnx.state(nnx.eval_shape(_nnx_model))
    found = tierkeep_jax.load(tmp_path / "c", abstract)

    assert _structure(found) == _structure(nnx.state(model))
    nnx.update(model, found)


# namedtuple-new-class
@pytest.mark.parametrize("target", [Renamed(jnp.ones(2), 1), {"p": Renamed(jnp.ones(2), 1)}])
def test_a_renamed_field_is_named_in_the_mismatch(tmp_path: Path, target: Any) -> None:
    saved = Point(jnp.ones(2), 1)
    tierkeep_jax.save(tmp_path / "c", saved if isinstance(target, Renamed) else {"p": saved})

    with pytest.raises(MismatchError) as raised:
        tierkeep_jax.load(tmp_path / "c", target)

    prefix = "" if isinstance(target, Renamed) else "p."
    assert raised.value.missing == (f"{prefix}z",)
    assert raised.value.unexpected == (f"{prefix}y",)


# empty-leaf-inside-sequence
@pytest.mark.parametrize(
    "tree",
    [
        (1, None, 2),
        (1, {}, 2),
        (1, (), 2),
        [None],
        [[], [1]],
        (jnp.ones(2), None, [], (jnp.zeros(1), {})),
        {},
        [],
        (),
        None,
    ],
)
def test_places_and_empty_containers_are_exact(tmp_path: Path, tree: Any) -> None:
    tierkeep_jax.save(tmp_path / "c", tree)

    trees.assert_same(tierkeep_jax.load(tmp_path / "c"), tree)
    trees.assert_same(tierkeep_jax.load(tmp_path / "c", tree), tree)


# int-keys-become-str, separator-collision
@pytest.mark.parametrize(
    "tree",
    [
        {n: jnp.full(2, n) for n in range(12)},
        {10: 1, -2: 2, 2: 3},
        {True: 1, None: 2, b"k": 3, 2.5: 4},
        {"a/b": 1, "a": {"b": 2}},
        {"": 1},
        {"a": {"": 1}},
        {"a%2Fb": 1},
        {"0": [1], "1": {"0": 2}},
    ],
)
def test_keys_keep_type_order_and_text(tmp_path: Path, tree: Any) -> None:
    tierkeep_jax.save(tmp_path / "c", tree)

    trees.assert_same(tierkeep_jax.load(tmp_path / "c"), tree)
    trees.assert_same(tierkeep_jax.load(tmp_path / "c", tree), tree)


@pytest.mark.parametrize("tree", [{"a.b": 1, "a": {"b": 2}}, {0: 1, "0": 2}])
def test_leaves_of_one_name_are_refused_by_name(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(NameCollisionError):
        tierkeep_jax.save(tmp_path / "c", tree)
    assert not list(tmp_path.iterdir())


# flatten-depends-on-content
def test_plain_lists_take_the_saved_length(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"log": [{"k": 1}, {"k": 2}], "w": jnp.ones(2)})

    assert tierkeep_jax.load(tmp_path / "c", {"log": [], "w": jnp.zeros(2)})["log"] == [{"k": 1}, {"k": 2}]


# nontensor-not-updated
def test_plain_values_come_from_the_checkpoint_and_the_target_stays(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"w": jnp.ones(2), "epoch": 20, "name": "y", "nested": {"lr": 0.5}})
    target = {"w": jnp.zeros(2), "epoch": 0, "name": "x", "nested": {"lr": 0.0}}

    found = tierkeep_jax.load(tmp_path / "c", target)

    trees.assert_same(found, {"w": jnp.ones(2), "epoch": 20, "name": "y", "nested": {"lr": 0.5}})
    trees.assert_same(target, {"w": jnp.zeros(2), "epoch": 0, "name": "x", "nested": {"lr": 0.0}})


# skipped-leaf-uninitialised
@pytest.mark.parametrize("kept", [jnp.full(3, 7.0), np.full(3, 7.0)])
def test_a_leaf_kept_for_its_shape_has_the_targets_values(tmp_path: Path, kept: Any) -> None:
    tierkeep_jax.save(tmp_path / "c", {"a": jnp.ones(2), "b": jnp.ones(4)})

    found = tierkeep_jax.load(tmp_path / "c", {"a": jnp.ones(2), "b": kept}, shape="keep")

    trees.assert_same(found, {"a": jnp.ones(2), "b": kept})


# missing-optim-state-becomes-empty-dict
def test_a_missing_leaf_is_named_or_kept(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"mu": {"a": jnp.ones(2)}})
    target = {"mu": {"a": jnp.zeros(2), "b": jnp.full(2, 7.0)}}

    with pytest.raises(MismatchError) as raised:
        tierkeep_jax.load(tmp_path / "c", target)
    assert raised.value.missing == ("mu.b",)

    kept = tierkeep_jax.load(tmp_path / "c", target, missing="keep")
    trees.assert_same(kept, {"mu": {"a": jnp.ones(2), "b": jnp.full(2, 7.0)}})


def test_keys_select_leaves_by_name(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"params": PARAMS, "opt": {"mu": PARAMS}})

    trees.assert_same(tierkeep_jax.load(tmp_path / "c", keys=["params.*"]), {"params": PARAMS})
    with pytest.raises(InvalidStateError, match="no leaf matches"):
        tierkeep_jax.load(tmp_path / "c", keys=["param.*"])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_come_back_as_keys_under_any_sharding(tmp_path: Path, impl: str) -> None:
    key = jax.random.key(3, impl=impl)
    many = jax.random.split(key, 8)
    sharded = jax.device_put(many, NamedSharding(trees.mesh(8), PartitionSpec("x")))
    tree = {"one": key, "many": many, "sharded": sharded, "again": key}
    report = tierkeep_jax.save(tmp_path / "c", tree)
    assert report.nbytes == sum(jax.random.key_data(tree[name]).nbytes for name in ("one", "many", "sharded"))

    columns = NamedSharding(trees.mesh(2, 4), PartitionSpec("y"))
    target = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=None) for name, leaf in tree.items()}
    target["many"] = jax.ShapeDtypeStruct(many.shape, many.dtype, sharding=columns)
    for found in (tierkeep_jax.load(tmp_path / "c"), tierkeep_jax.load(tmp_path / "c", target)):
        trees.assert_same(found, tree)
    assert found["many"].sharding == columns

    other = jax.random.key(0, impl="rbg" if impl == "threefry2x32" else "threefry2x32")
    with pytest.raises(MismatchError, match="random key"):
        tierkeep_jax.load(tmp_path / "c", {"one": other}, unexpected="ignore")
