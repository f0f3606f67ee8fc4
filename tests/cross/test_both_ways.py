"""What torch saved JAX loads, and the reverse: the same names, dtypes and bits, from the same directory."""

from __future__ import annotations

import math
import tempfile
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import tierkeep_jax
import tierkeep_jax.place
import tierkeep_torch
import tierkeep_torch.place
from tests.jax import trees
from tierkeep.errors import InvalidStateError, MismatchError
from tierkeep.format import dtypes
from tierkeep.tree import NamedMapping

if TYPE_CHECKING:
    from pathlib import Path

BOTH = tuple(name for name in trees.ALL if tierkeep_torch.place.holds(name))
ONLY_JAX = tuple(name for name in trees.ALL if not tierkeep_torch.place.holds(name))
ONLY_TORCH = ("int3", "uint7", "bits8", "bits16", "float4_e2m1fn_x2")


def from_numpy(data: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of the same logical dtype and bits."""
    dtype = getattr(torch, data.dtype.name)
    if not data.size:
        return torch.empty(data.shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8)
    return flat.view(dtype).reshape(data.shape)


def names(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Bits of every leaf of a restored tree, by its name."""
    return {name: trees.bits_of(leaf) for name, leaf in trees.leaves(tree)}


def saved_bits(tree: Any) -> dict[str, tuple[Any, ...]]:
    """The same of a tree that JAX saved, as torch sees it: a random key is its data."""
    return {name: bits[2:] if bits[0] == "key" else bits for name, bits in names(tree).items()}


@settings(max_examples=max(1, settings().max_examples // 2))
@given(data=st.data())
def test_what_jax_saved_torch_loads(data: st.DataObject) -> None:
    with trees.enable_x64(True), tempfile.TemporaryDirectory() as directory:
        tree = data.draw(trees.trees(trees.jax_dtypes()))
        tierkeep_jax.save(f"{directory}/c", tree)

        found = tierkeep_torch.load(f"{directory}/c")

        assert names(found) == saved_bits(tree)
        for (name, mine), (_, theirs) in zip(trees.leaves(found), trees.leaves(trees.plain(tree)), strict=True):
            held = isinstance(theirs, jax.Array) and (mine.dtype != theirs.dtype or type(mine) is not np.ndarray)
            assert isinstance(mine, torch.Tensor) == held, name
            if not isinstance(theirs, jax.Array):
                assert type(mine) is type(theirs), name


@settings(max_examples=max(1, settings().max_examples // 2))
@given(data=st.data())
def test_what_torch_saved_jax_loads_onto_any_sharding(data: st.DataObject) -> None:
    with trees.enable_x64(True), tempfile.TemporaryDirectory() as directory:
        arrays = data.draw(
            st.dictionaries(
                trees.NAMES,
                st.tuples(st.sampled_from(BOTH), trees.SHAPES, trees.SEEDS).map(lambda how: trees.numpy_array(*how)),
                max_size=4,
            )
        )
        tree = {"a": {name: from_numpy(array) for name, array in arrays.items()}, "step": 3, "none": None, "s": "text"}
        tierkeep_torch.save(tree, f"{directory}/c")

        found = tierkeep_jax.load(f"{directory}/c")

        expected = {"a": arrays, "step": 3, "none": None, "s": "text"}
        assert names(found) == names(expected)
        assert all(isinstance(leaf, jax.Array) for leaf in found["a"].values())
        target = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=data.draw(trees.shardings(array.shape)))
            for name, array in arrays.items()
        }
        placed = tierkeep_jax.load(f"{directory}/c", expected | {"a": target})
        assert names(placed) == names(expected)
        for name, leaf in placed["a"].items():
            assert leaf.sharding == target[name].sharding
            for shard in leaf.addressable_shards:
                assert trees.bits_of(shard.data) == trees.bits_of(arrays[name][shard.index])


@pytest.mark.parametrize("dtype", BOTH)
def test_every_dtype_of_both_goes_both_ways_into_targets(tmp_path: Path, dtype: str) -> None:
    with trees.enable_x64(True):
        data = trees.numpy_array(dtype, (8, 6), 1)
        rows = NamedSharding(trees.mesh(8), PartitionSpec("x"))
        tierkeep_jax.save(tmp_path / "jax", {"w": jax.device_put(data, rows)})
        tierkeep_torch.save({"w": from_numpy(data)}, tmp_path / "torch")

        blank = torch.zeros(data.nbytes, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(8, 6)
        assert tierkeep_torch.load(tmp_path / "jax", {"w": blank})["w"] is blank
        assert trees.bits_of(blank) == trees.bits_of(data)
        target = {"w": jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=rows)}
        found = tierkeep_jax.load(tmp_path / "torch", target)["w"]
        assert found.sharding == rows
        assert trees.bits_of(found) == trees.bits_of(data)


@pytest.mark.parametrize("dtype", ONLY_JAX)
def test_a_dtype_that_torch_lacks_comes_back_in_numpy(tmp_path: Path, dtype: str) -> None:
    data = trees.numpy_array(dtype, (3, 5), 1)
    tierkeep_jax.save(tmp_path / "c", {"w": jax.device_put(data), "v": jax.numpy.ones(2)})

    found = tierkeep_torch.load(tmp_path / "c")

    assert type(found["w"]) is np.ndarray
    assert trees.bits_of(found["w"]) == trees.bits_of(data)
    assert isinstance(found["v"], torch.Tensor)
    with pytest.raises(MismatchError, match=dtype):
        tierkeep_torch.load(tmp_path / "c", {"w": torch.zeros(3, 5), "v": torch.zeros(2)})
    array = np.zeros_like(data)
    tierkeep_torch.load(tmp_path / "c", {"w": array, "v": torch.zeros(2)})
    assert trees.bits_of(array) == trees.bits_of(data)


@pytest.mark.parametrize("dtype", ONLY_TORCH)
def test_a_dtype_that_only_torch_has_is_an_error_that_names_the_leaf_and_the_ways_out(
    tmp_path: Path, dtype: str
) -> None:
    kind = getattr(torch, dtype)
    tensor = torch.arange(8 * kind.itemsize, dtype=torch.uint8).view(kind)
    tierkeep_torch.save({"odd": tensor, "w": torch.ones(2)}, tmp_path / "c")

    with pytest.raises(InvalidStateError, match=rf"'odd'.*{dtype}.*keys=.*Nothing was read"):
        tierkeep_jax.load(tmp_path / "c")
    trees.assert_same(tierkeep_jax.load(tmp_path / "c", keys=["w"]), {"w": jax.numpy.ones(2)})
    assert trees.bits_of(tierkeep_torch.load(tmp_path / "c")["odd"]) == trees.bits_of(tensor)


def test_complex32_is_a_numpy_array_in_jax_where_numpy_has_it(tmp_path: Path) -> None:
    tensor = torch.view_as_complex(torch.arange(8, dtype=torch.float16).reshape(4, 2))
    tierkeep_torch.save({"z": tensor}, tmp_path / "c")
    if dtypes.numpy_dtype("complex32") is None:
        with pytest.raises(InvalidStateError, match=r"'z'.*complex32.*keys="):
            tierkeep_jax.load(tmp_path / "c")
    else:
        found = tierkeep_jax.load(tmp_path / "c")["z"]
        assert type(found) is np.ndarray
        assert trees.bits_of(found) == trees.bits_of(tensor)


def test_64_bit_tensors_are_numpy_arrays_in_jax_without_x64(tmp_path: Path) -> None:
    tree = {"i": torch.arange(3), "d": torch.ones(2, dtype=torch.float64), "f": torch.ones(2)}
    tierkeep_torch.save(tree, tmp_path / "c")

    found = tierkeep_jax.load(tmp_path / "c")

    assert names(found) == names(tree)
    assert [type(found["i"]), type(found["d"])] == [np.ndarray, np.ndarray]
    assert isinstance(found["f"], jax.Array)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_their_data_in_torch(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(1, impl=impl), 3)
    tierkeep_jax.save(tmp_path / "c", {"k": keys})

    found = tierkeep_torch.load(tmp_path / "c")

    assert found["k"].dtype is torch.uint32
    assert trees.bits_of(found["k"]) == trees.bits_of(jax.random.key_data(keys))
    tierkeep_torch.save(found, tmp_path / "again")
    raw = tierkeep_jax.load(tmp_path / "again")["k"]
    wrapped = tierkeep_jax.load(tmp_path / "again", {"k": keys})["k"]
    assert trees.bits_of(raw) == trees.bits_of(jax.random.key_data(keys))
    trees.assert_same(wrapped, keys)


def test_what_is_torchs_own_is_plain_in_jax(tmp_path: Path) -> None:
    indices, values = torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    model = torch.nn.Linear(2, 3)
    tree = {
        "model": model,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": sparse,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    tierkeep_torch.save(tree, tmp_path / "c")

    found = tierkeep_jax.load(tmp_path / "c")

    for name, tensor in model.state_dict().items():
        assert isinstance(found["model"][name], jax.Array)
        assert trees.bits_of(found["model"][name]) == trees.bits_of(tensor)
    trees.assert_same(found["parameter"], jax.numpy.ones(2))
    assert found["size"] == (2, 3)
    assert type(found["size"]) is tuple
    assert found["dtype"] == "bfloat16"
    assert found["device"] == "cpu"
    assert type(found["sparse"]) is NamedMapping
    assert trees.bits_of(found["sparse"]["values"]) == trees.bits_of(torch.tensor([1.0, 2.0]))


def test_a_torch_module_takes_what_a_jax_tree_saved(tmp_path: Path) -> None:
    weights = {"weight": jax.numpy.arange(6.0).reshape(3, 2), "bias": jax.numpy.ones(3)}
    tierkeep_jax.save(tmp_path / "c", {"model": weights})
    model = torch.nn.Linear(2, 3)

    tierkeep_torch.load(tmp_path / "c", {"model": model})

    for name, array in weights.items():
        assert trees.bits_of(getattr(model, name)) == trees.bits_of(array)


def test_an_optimizer_of_torch_is_a_tree_in_jax_and_goes_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tierkeep_torch.save({"model": model, "optimizer": optimizer}, tmp_path / "torch")

    tierkeep_jax.save(tmp_path / "jax", tierkeep_jax.load(tmp_path / "torch"))
    other = torch.nn.Linear(2, 3)
    again = torch.optim.AdamW(other.parameters())
    tierkeep_torch.load(tmp_path / "jax", {"model": other, "optimizer": again})

    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert trees.bits_of(one) == trees.bits_of(two)
        for name, value in optimizer.state[one].items():
            assert trees.bits_of(torch.as_tensor(again.state[two][name])) == trees.bits_of(torch.as_tensor(value))


def test_ties_hold_across_frameworks(tmp_path: Path) -> None:
    weight = torch.ones(64)
    tierkeep_torch.save({"a": weight, "b": weight}, tmp_path / "c")
    found = tierkeep_jax.load(tmp_path / "c")
    assert found["a"] is found["b"]

    array = jax.numpy.ones(64)
    tierkeep_jax.save(tmp_path / "d", {"a": array, "b": array})
    loaded = tierkeep_torch.load(tmp_path / "d")
    assert loaded["a"] is loaded["b"]


def test_the_sub_byte_values_are_the_same_numbers_in_both(tmp_path: Path) -> None:
    data = np.arange(-8, 8).astype(ml_dtypes.int4)
    tierkeep_jax.save(tmp_path / "c", {"w": jax.device_put(data)})
    found = tierkeep_torch.load(tmp_path / "c")["w"]
    assert str(found.dtype) == "torch.int4"
    assert math.prod(found.shape) == 16
    assert bytes(found.untyped_storage().tolist()) == data.tobytes()
