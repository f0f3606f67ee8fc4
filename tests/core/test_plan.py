"""Laws of the save planner: pure, so that every layout can be tried."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tierkeep.adapter import Snapshot
from tierkeep.errors import InvalidStateError, NameCollisionError
from tierkeep.format import dtypes
from tierkeep.format.ocdbt import DataFile
from tierkeep.leaf import ArrayShard, Box, Leaf
from tierkeep.options import PAGE, SaveOptions
from tierkeep.save.plan import PlanCache, SavePlan, chunk_shape, plan_save
from tierkeep.testing import strategies as tk
from tierkeep.tree import Node

NOTHING: Any = np.empty(0, np.uint8)  # planning never looks at content


@st.composite
def leaves(draw: st.DrawFn) -> Leaf:
    shape = draw(tk.shapes(max_axes=3))
    copies = draw(st.integers(1, 3))
    shards = [ArrayShard(box, NOTHING, replica) for box in draw(tk.grids(shape)) for replica in range(copies)]
    return Leaf("array", draw(st.sampled_from(dtypes.NAMES)), shape, tuple(draw(st.permutations(shards))))


def snapshot_of(found: list[Leaf]) -> Snapshot:
    keys = tuple(f"leaf{number}" for number in range(len(found)))
    return Snapshot(Node("dict", None, keys, tuple(range(len(found)))), found, [])


@given(tk.shapes().flatmap(lambda shape: st.tuples(st.just(shape), tk.grids(shape))), st.sampled_from([1, 2, 4, 8, 16]),
       st.integers(1, 1 << 16))  # fmt: skip
def test_every_shard_boundary_is_a_chunk_boundary(
    shape_and_grid: tuple[tuple[int, ...], list[Box]], itemsize: int, target: int
) -> None:
    shape, grid = shape_and_grid
    chunk = chunk_shape(shape, grid, itemsize, target)
    assert len(chunk) == len(shape)
    assert all(1 <= c <= max(n, 1) for c, n in zip(chunk, shape, strict=True))
    for box in grid:
        for start, length, step, n in zip(box.start, box.shape, chunk, shape, strict=True):
            assert start % step == 0 or length == 0
            assert (start + length) % step == 0 or start + length == n
    if len(grid) == 1:  # nothing forces a larger chunk
        assert math.prod(chunk) * itemsize <= max(target, itemsize)


@given(st.lists(leaves(), max_size=5), tk.save_options())
def test_extents_cover_every_element_once_and_lie_apart_in_the_image(found: list[Leaf], options: SaveOptions) -> None:
    plan = plan_save(snapshot_of(found), options)
    seen = [np.zeros(leaf.shape, np.int64) for leaf in found]
    for extent in plan.extents:
        leaf, laid = found[extent.leaf], plan.leaves[extent.leaf]
        shard = leaf.shards[extent.shard].box
        place = np.unravel_index(extent.number, laid.grid) if laid.grid else ()
        begin = tuple(int(at) * step for at, step in zip(place, laid.chunk, strict=True))
        held = Box(tuple(map(sum, zip(extent.part.start, shard.start, strict=True))), extent.part.shape)
        assert held == Box(begin, laid.chunk).intersect(Box.whole(leaf.shape))
        assert shard.intersect(held) == held
        assert leaf.shards[extent.shard].replica == 0
        seen[extent.leaf][held.slices()] += 1
        assert extent.nbytes == math.prod(laid.chunk) * dtypes.lookup(leaf.dtype).itemsize
    assert all((count == 1).all() for count in seen)
    check_image(plan, options)


def check_image(plan: SavePlan, options: SaveOptions) -> None:
    for extent in plan.extents:
        assert extent.offset % (PAGE if extent.nbytes >= PAGE else 64) == 0
    for one, other in pairwise(plan.extents):
        assert one.offset + one.nbytes + 4 <= other.offset
    assert plan.image_nbytes % PAGE == 0
    end = number = 0
    for batch in plan.batches:
        assert (batch.offset, batch.first) == (end, number)
        assert batch.last > batch.first
        assert batch.offset % PAGE == batch.nbytes % PAGE == 0
        assert batch.nbytes <= options.lane_nbytes or batch.last - batch.first == 1
        for extent in plan.extents[batch.first : batch.last]:
            assert batch.offset <= extent.offset
            assert extent.offset + extent.nbytes + 4 <= batch.offset + batch.nbytes
        end, number = batch.offset + batch.nbytes, batch.last
    assert (end, number) == (plan.image_nbytes, len(plan.extents))
    assert len({(extent.leaf, extent.number) for extent in plan.extents}) == len(plan.extents)


@given(leaves(), st.data())
def test_a_part_that_no_shard_holds_is_an_error_that_names_the_leaf(leaf: Leaf, data: st.DataObject) -> None:
    held = [shard.box for shard in leaf.shards if shard.box.size]
    if not held:
        return
    gone = data.draw(st.sampled_from(held))
    holed = structs.replace(leaf, shards=tuple(shard for shard in leaf.shards if shard.box != gone))
    with pytest.raises(InvalidStateError, match=r"leaf 'leaf0'.*Nothing was written"):
        plan_save(snapshot_of([holed]), SaveOptions())


@given(leaves(), st.data())
def test_shards_that_overlap_are_an_error_that_names_the_leaf(leaf: Leaf, data: st.DataObject) -> None:
    box = data.draw(tk.boxes(leaf.shape))
    known = {shard.box for shard in leaf.shards}
    if not box.size or box in known:
        return
    overlapping = structs.replace(leaf, shards=(*leaf.shards, ArrayShard(box, NOTHING)))
    with pytest.raises(InvalidStateError, match=r"leaf 'leaf0'.*overlap.*Nothing was written"):
        plan_save(snapshot_of([overlapping]), SaveOptions())


@pytest.mark.parametrize("box", [Box((2,), (4,)), Box((-1,), (3,)), Box((0, 0), (2, 2)), Box((2,), (-2,))])
def test_a_shard_outside_its_array_is_an_error_that_names_the_leaf(box: Box) -> None:
    shards = (ArrayShard(Box((0,), (2,)), NOTHING), ArrayShard(box, NOTHING))
    with pytest.raises(InvalidStateError, match=r"leaf 'leaf0'.*not within \(4,\)"):
        plan_save(snapshot_of([Leaf("array", "int8", (4,), shards)]), SaveOptions())


def leaf_of(**changes: Any) -> Leaf:
    box = changes.pop("box", Box((0,), (8,)))
    shards: tuple[ArrayShard, ...] = (ArrayShard(box, NOTHING, changes.pop("replica", 0)),)
    if box != Box((0,), (8,)):
        shards += (ArrayShard(Box((box.shape[0],), (8 - box.shape[0],)), NOTHING),)
    return Leaf(**({"kind": "array", "dtype": "int8", "shape": (8,), "shards": shards} | changes))


BASE = [leaf_of(), leaf_of()]
CHANGED: dict[str, tuple[Snapshot, SaveOptions]] = {
    "kind": (snapshot_of([leaf_of(kind="ndarray"), leaf_of()]), SaveOptions()),
    "dtype": (snapshot_of([leaf_of(dtype="uint8"), leaf_of()]), SaveOptions()),
    "shape": (snapshot_of([leaf_of(shape=(4,), shards=(ArrayShard(Box((0,), (4,)), NOTHING),)), leaf_of()]), SaveOptions()),
    "number of leaves": (snapshot_of([leaf_of()] * 3), SaveOptions()),
    "box": (snapshot_of([leaf_of(box=Box((0,), (4,))), leaf_of()]), SaveOptions()),
    "replica": (snapshot_of([leaf_of(replica=1), leaf_of()]), SaveOptions()),
    "tie": (snapshot_of([leaf_of(tie="one"), leaf_of(tie="one")]), SaveOptions()),
    "ext": (snapshot_of([leaf_of(ext="mark"), leaf_of()]), SaveOptions()),
    "sharding": (snapshot_of([leaf_of(sharding="{}"), leaf_of()]), SaveOptions()),
    "name": (dataclasses.replace(snapshot_of(BASE), tree=Node("dict", None, ("leaf0", "other"), (0, 1))), SaveOptions()),
    "key type": (
        dataclasses.replace(snapshot_of(BASE), tree=Node("dict", None, (("int", "0"), "leaf1"), (0, 1))), SaveOptions()),
    "container": (dataclasses.replace(snapshot_of(BASE), tree=Node("list", None, (), (0, 1))), SaveOptions()),
    "class": (dataclasses.replace(snapshot_of(BASE), tree=Node("dict", "C", ("leaf0", "leaf1"), (0, 1))), SaveOptions()),
    "order": (dataclasses.replace(snapshot_of(BASE), tree=Node("dict", None, ("leaf0", "leaf1"), (1, 0))), SaveOptions()),
    "chunk_nbytes": (snapshot_of(BASE), SaveOptions(chunk_nbytes=4)),
    "block_nbytes": (snapshot_of(BASE), SaveOptions(block_nbytes=8192)),
    "declare_crc": (snapshot_of(BASE), SaveOptions(declare_crc=False)),
    "lane_nbytes": (snapshot_of(BASE), SaveOptions(lane_nbytes=1 << 23)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGED)
def test_the_cache_gives_one_plan_for_one_structure_and_another_for_any_change(change: str) -> None:
    cache = PlanCache()
    first = cache.plan(snapshot_of(BASE), SaveOptions())
    # Equal by value, made anew; leaves that are tied to nothing may name any memory.
    assert cache.plan(snapshot_of([leaf_of(tie=1), leaf_of(tie=2)]), SaveOptions()) is first
    assert cache.misses == 1
    snapshot, options = CHANGED[change]
    assert cache.plan(snapshot, options) is not first
    assert cache.misses == 2
    assert cache.plan(snapshot_of(BASE), SaveOptions()) is first
    assert cache.misses == 2


def test_the_cache_keeps_the_plans_used_last() -> None:
    cache = PlanCache(most=2)
    many = [snapshot_of([leaf_of()] * n) for n in range(1, 4)]
    for snapshot in (many[0], many[1], many[0], many[2], many[0]):
        cache.plan(snapshot, SaveOptions())
    assert cache.misses == 3
    cache.plan(many[1], SaveOptions())
    assert cache.misses == 4


@given(st.lists(leaves(), min_size=1, max_size=3), tk.save_options())
def test_a_plan_is_a_function_of_the_structure_alone(found: list[Leaf], options: SaveOptions) -> None:
    one, other = (plan_save(snapshot_of(list(found)), options) for _ in range(2))
    names = SavePlan.__struct_fields__
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    rendered = [
        plan.index.render([DataFile("", "d/image")], "d/nodes", uuid=bytes(16), commit_ns=0) for plan in (one, other)
    ]
    assert rendered[0] == rendered[1]


def test_names_that_collide_are_an_error_that_names_both() -> None:
    tree = Node("dict", None, ("a.b", "a"), (0, Node("dict", None, ("b",), (1,))))
    with pytest.raises(NameCollisionError) as caught:
        plan_save(Snapshot(tree, BASE, []), SaveOptions())
    assert caught.value.name == "a.b"
    assert {caught.value.first, caught.value.second} == {"('a.b',)", "('a', 'b')"}


def test_an_array_of_more_axes_than_stock_readers_take_is_refused_by_name() -> None:
    shape = (1,) * 33
    leaf = Leaf("array", "uint8", shape, (ArrayShard(Box.whole(shape), NOTHING),))
    with pytest.raises(InvalidStateError, match="'leaf0' has 33 axes"):
        plan_save(snapshot_of([leaf]), SaveOptions())


@pytest.mark.parametrize("other", [("uint8", (4,)), ("int8", (2, 2))])
def test_leaves_that_are_tied_but_not_alike_are_refused_by_name(other: tuple[str, tuple[int, ...]]) -> None:
    found = [
        Leaf("array", dtype, shape, (ArrayShard(Box.whole(shape), NOTHING),), tie="same")
        for dtype, shape in (("int8", (4,)), other)
    ]
    with pytest.raises(InvalidStateError, match="'leaf1' is tied to 'leaf0'"):
        plan_save(snapshot_of(found), SaveOptions())
