"""What is refused, what is stored once, which dtypes are converted when, and what a save holds on to."""

from __future__ import annotations

import gc
import os
import weakref
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tierkeep_jax
from tests.jax import trees
from tierkeep.errors import CheckpointExistsError, InvalidStateError, MismatchError, UnsupportedLeafError
from tierkeep.options import MIB

if TYPE_CHECKING:
    from pathlib import Path


def _deleted() -> jax.Array:
    array = jnp.ones(4)
    array.delete()
    return array


def _donated() -> jax.Array:
    array = jnp.ones(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        pytest.param(_deleted, "deleted or donated", id="deleted"),
        pytest.param(_donated, "deleted or donated", id="donated"),
        pytest.param(lambda: jax.ShapeDtypeStruct((2,), "float32"), "only be a target", id="shape"),
        pytest.param(lambda: len, "builtin_function", id="function"),
        pytest.param(lambda: jax.nn.relu, "no exact plain form", id="activation"),
        pytest.param(lambda: np.array(["a"]), "numpy array of dtype", id="strings"),
        pytest.param(lambda: np.array([object()]), "numpy array of dtype", id="objects"),
        pytest.param(lambda: np.ma.masked_array([1.0], [True]), "numpy subclass", id="masked"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, leaf: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedLeafError, match=reason) as raised:
        tierkeep_jax.save(tmp_path / "c", {"a": [jnp.ones(2), leaf()]})
    assert raised.value.key == "a.1"
    assert isinstance(raised.value, TypeError)
    assert not list(tmp_path.iterdir())


def test_a_traced_array_is_refused_by_name(tmp_path: Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        tierkeep_jax.save(tmp_path / "c", {"a": x})
        return x

    with pytest.raises(UnsupportedLeafError, match="outside of jit") as raised:
        jax.jit(step)(jnp.ones(2))
    assert raised.value.key == "a"


@pytest.mark.parametrize("tree", [{"w": jnp.ones(2)}, jnp.ones(2), [1], None])
def test_swapped_arguments_are_a_type_error_that_says_so(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(TypeError, match="path first"):
        tierkeep_jax.save(tree, str(tmp_path / "c"))


def test_a_string_is_a_tree_like_any_other(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", "some text")
    assert tierkeep_jax.load(tmp_path / "c") == "some text"


def test_a_checkpoint_is_only_overwritten_when_asked(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"w": jnp.ones(2)})
    with pytest.raises(CheckpointExistsError):
        tierkeep_jax.save(tmp_path / "c", {"w": jnp.zeros(2)})
    tierkeep_jax.save(tmp_path / "c", {"w": jnp.zeros(2)}, overwrite=True)
    trees.assert_same(tierkeep_jax.load(tmp_path / "c"), {"w": jnp.zeros(2)})


# tied-weights-save, tied-weights-restore-missing
def test_one_array_under_two_names_is_stored_once_and_fits_any_target(tmp_path: Path) -> None:
    sharding = NamedSharding(trees.mesh(8), PartitionSpec("x"))
    one = jnp.arange(16.0)
    sharded = jax.device_put(one, sharding)
    equal = jnp.arange(16.0)
    tree = {"a": one, "b": one, "c": sharded, "d": [sharded], "e": equal}
    report = tierkeep_jax.save(tmp_path / "c", tree)
    assert report.nbytes == 3 * one.nbytes

    found = tierkeep_jax.load(tmp_path / "c")
    assert found["a"] is found["b"]
    assert found["c"] is found["d"][0]
    assert found["e"] is not found["a"]
    trees.assert_same(found, tree)
    untied = {
        "a": jnp.zeros(16),
        "b": jax.device_put(jnp.zeros(16), sharding),
        "c": jnp.zeros(16),
        "d": [jnp.zeros(16)],
    }
    trees.assert_same(tierkeep_jax.load(tmp_path / "c", untied | {"e": jnp.zeros(16)}), tree)


@jax.tree_util.register_pytree_node_class
class MadeWhenFlattened:
    """Its array lives no longer than the flattening."""

    def __init__(self, value: Any, *, sharded: bool) -> None:
        self.value, self.sharded = value, sharded

    def tree_flatten(self) -> tuple[Any, bool]:
        data = np.full(8, self.value, np.float32)
        sharding = NamedSharding(trees.mesh(8), PartitionSpec("x")) if self.sharded else None
        return (jax.device_put(data, sharding),), self.sharded

    @classmethod
    def tree_unflatten(cls, sharded: bool, children: Any) -> MadeWhenFlattened:
        return cls(children[0], sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True])
def test_arrays_made_while_a_node_is_flattened_are_never_taken_for_one_another(tmp_path: Path, sharded: bool) -> None:
    tierkeep_jax.save(tmp_path / "c", {str(n): MadeWhenFlattened(n, sharded=sharded) for n in range(20)})

    found = tierkeep_jax.load(tmp_path / "c")

    assert [float(found[str(n)][0][0]) for n in range(20)] == list(range(20))


# broadcast-stride0-view, fortran-order-garbage, nan-payload-lost
@pytest.mark.parametrize(
    "array",
    [
        np.broadcast_to(np.arange(2.0), (4, 2)),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(12).reshape(3, 4).T,
        np.arange(12)[::-1],
        np.arange(12)[::2],
        np.array([0x7FC00000, 0x7F800001, 0xFFC00000, 0x7FC01234, 0x80000000], np.uint32).view(np.float32),
        np.arange(3, dtype=">i4"),
        np.float32(2.5),
        np.array(7, "uint8"),
    ],
)
def test_numpy_leaves_keep_their_values_and_are_writable_when_restored(tmp_path: Path, array: Any) -> None:
    tierkeep_jax.save(tmp_path / "c", {"a": array})
    found = tierkeep_jax.load(tmp_path / "c")["a"]
    little = np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("<"))
    assert (type(found), found.dtype, found.shape) == (type(array), little.dtype, little.shape)
    assert found.tobytes() == little.tobytes()
    if isinstance(found, np.ndarray):
        assert found.flags.writeable


# zero-size-array, zero-length-axis-chunks
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 5), (), (1,)])
def test_empty_and_scalar_arrays_keep_shape_dtype_and_sharding(tmp_path: Path, shape: tuple[int, ...]) -> None:
    sharding = NamedSharding(trees.mesh(8), PartitionSpec())
    tree = {"a": jnp.ones(shape, "bfloat16"), "b": jax.device_put(jnp.ones(shape), sharding), "c": jnp.ones(5)}
    tierkeep_jax.save(tmp_path / "c", tree)
    trees.assert_same(tierkeep_jax.load(tmp_path / "c"), tree)
    found = tierkeep_jax.load(tmp_path / "c", trees.specs(tree))
    trees.assert_same(found, tree)
    assert found["b"].sharding == sharding


# silent-dtype-cast-on-load
@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (jnp.float32(1.0000001), "bfloat16"),
        (jnp.int32(16777217), "float32"),
        (jnp.float32(0.3), "float8_e4m3fn"),
        (jnp.int8(5), "int4"),
        (jnp.bfloat16(3), "int32"),
        (jnp.float32(1e30), "float16"),
        (jnp.float32(jnp.nan), "int32"),
    ],
)
def test_another_dtype_is_an_error_unless_a_cast_is_asked_for(tmp_path: Path, saved: jax.Array, target: str) -> None:
    tierkeep_jax.save(tmp_path / "c", {"x": jnp.full(3, saved), "n": np.full(3, saved)})
    like: dict[str, Any] = {"x": jax.ShapeDtypeStruct((3,), target), "n": np.zeros(3, jnp.zeros(1, target).dtype)}

    with pytest.raises(MismatchError) as raised:
        tierkeep_jax.load(tmp_path / "c", like)
    assert len(raised.value.dtype) == 2
    for told, name in zip(raised.value.dtype, ("x", "n"), strict=True):
        assert told.startswith(f"{name}: ")
        assert str(saved.dtype) in told
        assert target in told

    found = tierkeep_jax.load(tmp_path / "c", like, dtype="cast")
    with np.errstate(all="ignore"):
        expected = np.full(3, np.asarray(saved)).astype(like["n"].dtype)
    assert trees.bits_of(found["x"]) == trees.bits_of(found["n"]) == trees.bits_of(expected)


def test_imaginary_parts_are_never_dropped(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"x": jnp.full(3, 1 + 2j), "n": np.full(3, 1 + 2j)})
    for like in ({"x": jnp.zeros(3)}, {"n": np.zeros(3)}):
        with pytest.raises(MismatchError, match=r"complex.* cannot be converted to float"):
            tierkeep_jax.load(tmp_path / "c", like, dtype="cast", unexpected="ignore")


def test_64_bit_arrays_come_back_in_numpy_without_x64(tmp_path: Path) -> None:
    names = ("complex128", "float64", "int64", "uint64")
    arrays = {name: trees.numpy_array(name, (3, 5), 1) for name in names}
    with trees.enable_x64(True):
        tierkeep_jax.save(tmp_path / "c", jax.device_put(arrays))
        trees.assert_same(tierkeep_jax.load(tmp_path / "c"), jax.device_put(arrays))

    trees.assert_same(tierkeep_jax.load(tmp_path / "c"), arrays)
    trees.assert_same(tierkeep_jax.load(tmp_path / "c", arrays), arrays)
    with pytest.raises(MismatchError, match="jax_enable_x64"):
        tierkeep_jax.load(tmp_path / "c", {name: jax.ShapeDtypeStruct((3, 5), name) for name in names})


# extended-float-via-npy, dtype-size-table-stale
@pytest.mark.parametrize("dtype", trees.ALL)
def test_every_dtype_of_jax_and_ml_dtypes_is_exact(tmp_path: Path, dtype: str) -> None:
    with trees.enable_x64(True):
        data = trees.numpy_array(dtype, (4, 6), 1)
        sharded = jax.device_put(data, NamedSharding(trees.mesh(4, 2), PartitionSpec("x", "y")))
        tree = {"whole": jax.device_put(data), "sharded": sharded, "numpy": data}
        tierkeep_jax.save(tmp_path / "c", tree)
        trees.assert_same(tierkeep_jax.load(tmp_path / "c"), tree)
        trees.assert_same(tierkeep_jax.load(tmp_path / "c", trees.specs(tree)), tree)


@pytest.mark.parametrize("dtype", ["float6_e2m3fn", "float6_e3m2fn", "complex32"])
def test_what_only_numpy_has_comes_back_in_numpy(tmp_path: Path, dtype: str) -> None:
    if not hasattr(ml_dtypes, dtype):
        pytest.skip(f"this ml_dtypes has no {dtype}")
    data = np.arange(5, dtype=np.float32).astype(getattr(ml_dtypes, dtype))
    tierkeep_jax.save(tmp_path / "c", {"a": data, "b": data[1]})
    found = tierkeep_jax.load(tmp_path / "c")
    assert trees.bits_of(found["a"]) == trees.bits_of(data)
    assert trees.bits_of(found["b"]) == trees.bits_of(data[1])


def test_a_target_that_jax_cannot_hold_is_a_mismatch_of_its_name(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"a": jnp.ones(2), "b": [jnp.ones(2)]})
    with pytest.raises(MismatchError) as raised:
        tierkeep_jax.load(tmp_path / "c", {"a": jnp.ones(3), "c": jnp.ones(2)})
    assert raised.value.missing == ("c",)
    assert raised.value.unexpected == ("b.0",)
    assert [told.split(":")[0] for told in raised.value.shape] == ["a"]


def test_restored_arrays_are_on_the_device_that_was_asked_for(tmp_path: Path) -> None:
    tierkeep_jax.save(tmp_path / "c", {"a": jnp.ones((8, 2)), "n": np.ones(2)})
    device = jax.devices()[5]
    found = tierkeep_jax.load(tmp_path / "c", device=device)
    assert found["a"].devices() == {device}
    assert type(found["n"]) is np.ndarray


# source-kept-alive-after-write
def test_no_array_is_held_after_a_save(tmp_path: Path) -> None:
    class Watched:
        """Keeps what weak references need."""

    sharding = NamedSharding(trees.mesh(8), PartitionSpec("x"))
    with tierkeep_jax.Checkpointer(tmp_path / "run", keep=1, asynchronous=False) as checkpointer:
        for step in range(3):
            tree = {
                "whole": jnp.arange(float(2**12)) + step,
                "sharded": jax.device_put(jnp.arange(64.0) + step, sharding),
                "numpy": np.arange(64.0) + step,
                "key": jax.random.split(jax.random.key(step), 8),
            }
            checkpointer.save(step, tree)
            watched = [weakref.ref(leaf) for name, leaf in tree.items() if name != "key"]
            del tree
            gc.collect()
            assert [name() is None for name in watched] == [True] * 3


def test_memory_does_not_grow_with_saves_of_fresh_arrays(tmp_path: Path) -> None:
    process = psutil.Process()
    with tierkeep_jax.Checkpointer(tmp_path / "run", keep=1, asynchronous=False) as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"w": np.full(16 * MIB // 8, float(step))})
        gc.collect()
        before = process.memory_info().rss
        for step in range(3, 9):
            checkpointer.save(step, {"w": np.full(16 * MIB // 8, float(step))})
        gc.collect()
        assert process.memory_info().rss - before < 48 * MIB


# async-donated-buffer
def test_a_saved_array_can_still_be_donated_in_place(tmp_path: Path) -> None:
    advance = jax.jit(lambda x: x + 1, donate_argnums=0)
    sharding = NamedSharding(trees.mesh(8), PartitionSpec("x"))
    for number, array in enumerate((advance(jnp.zeros(64)), advance(jax.device_put(jnp.zeros(64), sharding)))):
        pointers = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        tierkeep_jax.save(tmp_path / str(number), {"w": array})
        after = advance(array)
        assert array.is_deleted()
        assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == pointers
        trees.assert_same(tierkeep_jax.load(tmp_path / str(number)), {"w": jnp.ones(64)})


def test_paths_are_taken_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(("a", "./b/", tmp_path / "é %?", os.fsencode(tmp_path / "bytes"))):
        tierkeep_jax.save(path, number)  # type: ignore[arg-type]
        assert tierkeep_jax.load(path) == number  # type: ignore[arg-type]
    with pytest.raises(InvalidStateError, match="no leaf matches"):
        tierkeep_jax.load("a", keys=["nothing"])
