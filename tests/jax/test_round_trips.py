"""Any pytree, dtype, shape and sharding comes back bit for bit: onto another sharding, through stock Orbax, as numpy."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierkeep_jax
from tests.jax import trees
from tierkeep.checkpointer import Engine
from tierkeep.format import dtypes
from tierkeep.options import RestoreOptions, SaveOptions
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator

# What of jax's dtypes stock zarr3 has; the rest it sees as unsigned integers of the same width.
STOCK = tuple(name for name in trees.ALL if dtypes.lookup(name).zarr == name)
X64 = pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
SMALL_CHUNKS = st.builds(
    SaveOptions,
    chunk_nbytes=st.sampled_from([1, 24, 16 * 2**20]),
    declare_crc=st.booleans(),
    lanes=st.sampled_from([1, 8]),
)


@pytest.fixture(autouse=True)
def _no_orbax_warnings() -> Iterator[None]:
    logger = logging.getLogger("absl")  # Orbax warns whenever it restores a tree it was shown no likeness of
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@contextlib.contextmanager
def saved(tree: Any, options: SaveOptions | None = None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "item"
        tierkeep_jax.save(path, tree, options=options)
        yield path


def fewer(n: int) -> settings:
    """Fewer examples than the profile's: each of these is slow."""
    return settings(
        max_examples=max(1, settings().max_examples // n),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )


@X64
@fewer(1)
@given(data=st.data())
def test_a_tree_comes_back_as_it_was_and_onto_any_other_sharding(x64: bool, data: st.DataObject) -> None:
    with trees.enable_x64(x64):
        tree = data.draw(trees.trees(trees.jax_dtypes()))
        options = data.draw(SMALL_CHUNKS)
        with saved(tree, options) as path:
            trees.assert_same(tierkeep_jax.load(path), trees.plain(tree))
            target = data.draw(trees.targets(tree))
            before = [trees.bits_of(leaf) for _, leaf in trees.leaves(target) if isinstance(leaf, jax.Array)]
            found = tierkeep_jax.load(path, target)
            trees.assert_same(found, tree)
            for (name, one), (_, other) in zip(trees.leaves(found), trees.leaves(target), strict=True):
                if isinstance(other, jax.ShapeDtypeStruct) and other.sharding is not None:
                    assert one.sharding == other.sharding, name
            assert before == [trees.bits_of(leaf) for _, leaf in trees.leaves(target) if isinstance(leaf, jax.Array)]


@fewer(2)
@given(data=st.data())
def test_what_jax_saved_is_read_with_numpy_alone(data: st.DataObject) -> None:
    with trees.enable_x64(True):
        tree = data.draw(trees.trees(trees.jax_dtypes()))
        with saved(tree, data.draw(SMALL_CHUNKS)) as path:
            found = Engine(NumpyAdapter()).restore(path, options=RestoreOptions())
        for (name, one), (_, other) in zip(trees.leaves(found), trees.leaves(tree), strict=True):
            if isinstance(other, jax.Array):
                assert type(one) is np.ndarray, name
                bits = trees.bits_of(other)
                assert trees.bits_of(one) == (bits[2:] if bits[0] == "key" else bits), name


@X64
@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@fewer(4)
@given(data=st.data())
def test_stock_orbax_restores_the_same_bits(x64: bool, data: st.DataObject) -> None:
    with trees.enable_x64(x64):
        names = [name for name in trees.jax_dtypes() if name in STOCK]
        tree = {"root": data.draw(trees.trees(names, numpy_names=STOCK, plain=False))}
        arrays = {name: leaf for name, leaf in trees.leaves(tree) if isinstance(leaf, jax.Array | np.ndarray)}
        target = trees.specs(tree)
        with saved(tree, data.draw(SMALL_CHUNKS)) as path:
            with ocp.StandardCheckpointer() as standard:
                _compare(standard.restore(path), arrays)
                _compare(standard.restore(path, target), arrays)
            with ocp.PyTreeCheckpointer() as pytree:
                _compare(pytree.restore(path), arrays)


def _compare(found: Any, arrays: dict[str, Any]) -> None:
    theirs = dict(trees.leaves(found))
    for name, array in arrays.items():
        if array.size:  # of an empty array Orbax may give its type back in another class
            assert trees.bits_of(theirs[name]) == trees.bits_of(array), name
