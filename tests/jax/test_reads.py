"""What a restore reads: each byte once onto any sharding, and only the blocks that are wanted."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tierkeep_jax
from tests.jax import trees
from tierkeep.adapter import Destination
from tierkeep.checkpointer import Engine
from tierkeep.leaf import Box, LeafSpec
from tierkeep.options import KIB, MIB, PAGE, RestoreOptions, SaveOptions
from tierkeep.restore.place import NOTHING
from tierkeep.tiers.local_disk import ImageReader, LocalDisk
from tierkeep_jax.adapter import JaxAdapter

if TYPE_CHECKING:
    from pathlib import Path

ROWS, COLUMNS = 1024, 512


class CountingDisk(LocalDisk):
    """Remembers every range of an image that was read."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def open_image(self, path: Path, *, direct: bool) -> ImageReader:
        ranges, lock = self.ranges, threading.Lock()

        class Counting(ImageReader):
            def read(self, offset: int, out: memoryview) -> int:
                n = super().read(offset, out)
                with lock:
                    ranges.append((offset, offset + n))
                return n

        return Counting(path, direct)

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def assert_disjoint(self) -> None:
        self.ranges.sort()
        for (_, end), (begin, _) in zip(self.ranges, self.ranges[1:], strict=False):
            assert end <= begin, "a byte was read twice"


def restore(path: Path, target: Any, adapter: Any = None, **options: Any) -> tuple[Any, CountingDisk, Any]:
    """The restored tree, what was read for it, and what a dry run had promised."""
    disk = CountingDisk()
    engine = Engine(adapter or JaxAdapter(), disk=disk)
    try:
        plan = engine.restore(path, target, options=RestoreOptions(**options), dry_run=True)
        assert not disk.ranges, "a dry run reads no array"
        found = engine.restore(path, target, options=RestoreOptions(**options))
    finally:
        engine.close()
    return found, disk, plan


@pytest.mark.parametrize("chunk_nbytes", [64 * KIB, 16 * MIB])
@pytest.mark.parametrize(
    ("grid", "spec"),
    [
        pytest.param((8,), ("x",), id="rows"),
        pytest.param((8,), (None, "x"), id="columns"),
        pytest.param((4, 2), ("x", "y"), id="both"),
        pytest.param((4, 2), (None, "y"), id="partly replicated"),
        pytest.param((8,), (), id="replicated"),
    ],
)
def test_a_restore_onto_eight_devices_reads_each_byte_once(
    tmp_path: Path, grid: tuple[int, ...], spec: tuple[str | None, ...], chunk_nbytes: int
) -> None:
    sharding = NamedSharding(trees.mesh(*grid), PartitionSpec(*spec))
    tree = {
        "w": trees.numpy_array("float32", (ROWS, COLUMNS), 1),
        "small": {str(n): trees.numpy_array("bfloat16", (8, 16), n) for n in range(20)},
    }
    report = tierkeep_jax.save(tmp_path / "c", jax.device_put(tree), options=SaveOptions(chunk_nbytes=chunk_nbytes))
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    found, disk, plan = restore(tmp_path / "c", target)

    trees.assert_same(found, jax.device_put(tree))
    assert {leaf.sharding for leaf in jax.tree.leaves(found)} == {sharding}
    disk.assert_disjoint()
    assert report.nbytes <= disk.nbytes <= report.image_nbytes
    assert disk.nbytes == plan.nbytes == sum(nbytes for _, _, nbytes in plan.reads)


def test_a_restore_from_eight_shards_onto_eight_others_reads_each_byte_once(tmp_path: Path) -> None:
    data = trees.numpy_array("float32", (ROWS, COLUMNS), 1)
    rows = jax.device_put(data, NamedSharding(trees.mesh(8), PartitionSpec("x")))
    columns = NamedSharding(trees.mesh(2, 4), PartitionSpec("y", "x"))
    report = tierkeep_jax.save(tmp_path / "c", rows)

    found, disk, _ = restore(tmp_path / "c", jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=columns))

    trees.assert_same(found, rows)
    disk.assert_disjoint()
    assert report.nbytes <= disk.nbytes <= report.image_nbytes


def test_only_the_leaves_of_a_partial_target_are_read(tmp_path: Path) -> None:
    tree = {str(n): jax.numpy.full((64, 1024), n, "float32") for n in range(20)}
    tierkeep_jax.save(tmp_path / "c", tree)

    found, disk, plan = restore(tmp_path / "c", {"7": tree["7"]}, unexpected="ignore")

    trees.assert_same(found, {"7": tree["7"]})
    assert plan.names == ("7",)
    assert tree["7"].nbytes <= disk.nbytes <= tree["7"].nbytes + 2 * PAGE


class OneBox(JaxAdapter):
    """Wants one box of every array: what one process of many would."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def destination(self, target: Any, stored: LeafSpec) -> Destination | None:
        whole = super().destination(target, stored)
        if whole is None:
            return None
        array = np.zeros(self.box.shape, "u4")

        def put(part: Box, data: np.ndarray[Any, Any]) -> None:
            array[part.slices()] = data

        region = next(iter(whole.regions))
        return Destination(whole.spec, (type(region)(self.box, put),), lambda: array)


@pytest.mark.parametrize("box", [Box((512, 0), (16, COLUMNS)), Box((256, 128), (8, 64)), Box((1023, 0), (1, 1))])
def test_only_the_blocks_of_a_wanted_box_are_read_and_verified(tmp_path: Path, box: Box) -> None:
    block = 64 * KIB
    data = trees.numpy_array("float32", (ROWS, COLUMNS), 1)
    tierkeep_jax.save(tmp_path / "c", jax.device_put(data), options=SaveOptions(block_nbytes=block))

    found, disk, _ = restore(tmp_path / "c", jax.ShapeDtypeStruct(data.shape, data.dtype), OneBox(box))

    assert found.tobytes() == data[box.slices()].tobytes()
    span = ((box.shape[0] - 1) * COLUMNS + box.shape[1]) * 4
    assert disk.nbytes <= span + 2 * block + PAGE


def test_tied_arrays_are_read_once(tmp_path: Path) -> None:
    array = jax.numpy.arange(float(2**16))
    report = tierkeep_jax.save(tmp_path / "c", {"a": array, "b": array})
    assert report.nbytes == array.nbytes

    found, disk, plan = restore(tmp_path / "c", NOTHING)

    assert found["a"] is found["b"]
    assert plan.tied == (("b", "a"),)
    assert disk.nbytes <= report.image_nbytes
