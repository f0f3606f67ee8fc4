"""I7, the slow way round: what tierkeep wrote is the same bits through its own reader and through the Orbax path."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierkeep_jax
import tierkeep_torch
from tests.jax import trees
from tests.strangers.compare import flat
from tierkeep.format import dtypes
from tierkeep.leaf import Box
from tierkeep.memory.buffers import Buffers
from tierkeep.options import SaveOptions
from tierkeep.restore.locate import open_source
from tierkeep.tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierkeep.adapter import Sink

# What Orbax has a dtype for; the rest stands in our own record alone.
STOCK = tuple(name for name in trees.ALL if dtypes.lookup(name).zarr == name)
FEW = settings(
    max_examples=max(1, settings().max_examples // 4),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)


@contextlib.contextmanager
def both_ways(adapter: Any, state: Any, options: SaveOptions) -> Iterator[tuple[Path, Path]]:
    """One state saved twice: as it is, and without tierkeep's own records."""
    with tempfile.TemporaryDirectory() as folder:
        own, foreign = Path(folder) / "own", Path(folder) / "foreign"
        for path in (own, foreign):
            if adapter is tierkeep_jax:
                tierkeep_jax.save(path, state, options=options)
            else:
                tierkeep_torch.save(state, path, options=options)
        (foreign / "tierkeep.json").unlink()
        (foreign / "ocdbt.process_0" / "part.json").unlink()
        yield own, foreign


def options() -> st.SearchStrategy[SaveOptions]:
    return st.builds(SaveOptions, chunk_nbytes=st.sampled_from([24, 4096, 16 * 2**20]), declare_crc=st.booleans())


@FEW
@given(data=st.data())
def test_a_tree_is_the_same_both_ways_and_onto_any_sharding(data: st.DataObject) -> None:
    names = [name for name in trees.jax_dtypes() if name in STOCK]
    tree = {"root": data.draw(trees.trees(names, plain=False))}
    with both_ways(tierkeep_jax, tree, data.draw(options())) as (own, foreign):
        arrays = {name: leaf for name, leaf in trees.leaves(tree) if isinstance(leaf, jax.Array)}
        native, stock = dict(trees.leaves(tierkeep_jax.load(own))), dict(trees.leaves(tierkeep_jax.load(foreign)))
        for name in arrays:
            assert trees.bits_of(stock[name]) == trees.bits_of(native[name]), name
        if any(isinstance(leaf, np.ndarray | np.generic) for _, leaf in trees.leaves(tree)):
            return  # numpy's dtypes that Orbax lacks are integers on this way
        target = data.draw(trees.targets(tree))
        restored = tierkeep_jax.load(foreign, target)
        assert flat(restored) == flat(tierkeep_jax.load(own, target))
        for (name, one), (_, other) in zip(trees.leaves(restored), trees.leaves(target), strict=True):
            if isinstance(other, jax.ShapeDtypeStruct) and other.sharding is not None:
                assert one.sharding == other.sharding, name


def sink(array: np.ndarray[Any, Any]) -> Sink:
    def put(part: Box, data: np.ndarray[Any, Any]) -> None:
        assert data.shape == part.shape
        array[part.slices()] += data + 1  # each element once: a second time would show

    return put


@FEW
@given(data=st.data())
def test_any_box_of_an_array_is_read_whole_and_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 12), max_size=3).map(tuple))
    array = np.random.default_rng(1).integers(0, 2**31, shape, np.uint32)
    state = {"a": torch.from_numpy(array.view(np.int32))}
    disk = LocalDisk()
    with both_ways(tierkeep_torch, state, data.draw(options())) as paths:
        for _ in range(4):
            start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
            box = Box(start, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))
            for path in paths:
                out = np.zeros(box.shape, np.uint32)
                buffers = Buffers(2, 64 * 1024)
                with open_source(disk, path, direct=False, holds="") as source:
                    source.read([(0, box)], [sink(out)], buffers, 2, "")
                buffers.close()
                assert np.array_equal(out - 1, array[box.slices()])
