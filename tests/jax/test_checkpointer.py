"""The steps of a JAX run: kept, listed, restored onto other shardings, and opened by stock Orbax's manager."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tierkeep_jax
from tests.jax import trees
from tierkeep.errors import CheckpointExistsError, CheckpointNotFoundError, ClosedError, UnsupportedLeafError

if TYPE_CHECKING:
    from pathlib import Path

TREE = {
    "w": jax.device_put(
        trees.numpy_array("float32", (16, 8), 1), NamedSharding(trees.mesh(4, 2), PartitionSpec("x", "y"))
    ),
    "layers": [trees.numpy_array("bfloat16", (5,), 2), jax.numpy.arange(6)],
    "key": jax.random.key(7),
    "step": 3,
}


def test_the_newest_steps_are_kept_and_the_newest_is_restored(tmp_path: Path) -> None:
    with tierkeep_jax.Checkpointer(tmp_path / "run", keep=2, asynchronous=False) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(CheckpointNotFoundError):
            checkpointer.restore()
        for step in (1, 5, 10):
            assert checkpointer.save(step, TREE | {"step": step}).result().step == step
        assert checkpointer.steps() == [5, 10]
        assert checkpointer.latest_step() == 10
        trees.assert_same(checkpointer.restore(), TREE | {"step": 10})
        trees.assert_same(checkpointer.restore(5), TREE | {"step": 5})
        with pytest.raises(CheckpointNotFoundError, match="5, 10"):
            checkpointer.restore(1)
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(10, TREE)
        with pytest.raises(UnsupportedLeafError):
            checkpointer.save(11, {"f": len})
        assert checkpointer.steps() == [5, 10]
    with pytest.raises(ClosedError):
        checkpointer.save(12, TREE)


# reused-dir-new-run-deleted
def test_the_step_just_saved_is_never_removed_by_its_own_save(tmp_path: Path) -> None:
    with tierkeep_jax.Checkpointer(tmp_path, keep=2, asynchronous=False) as checkpointer:
        for step in (500, 600, 100):
            checkpointer.save(step, {"n": step})
        assert checkpointer.restore(100) == {"n": 100}
        assert 100 in checkpointer.steps()


@pytest.mark.parametrize(
    ("grid", "spec"), [((8,), ("x",)), ((2, 4), ("y", "x")), ((2, 2), (("x", "y"),)), ((8,), ()), ((1,), ())]
)
def test_a_step_is_restored_onto_any_sharding(
    tmp_path: Path, grid: tuple[int, ...], spec: tuple[str | tuple[str, ...] | None, ...]
) -> None:
    sharding = NamedSharding(trees.mesh(*grid), PartitionSpec(*spec))
    with tierkeep_jax.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, TREE)
        target = TREE | {"w": jax.ShapeDtypeStruct((16, 8), "float32", sharding=sharding), "step": 0}
        found = checkpointer.restore(target=target)
    trees.assert_same(found, TREE)
    assert found["w"].sharding == sharding


# plan-cache-global-key
def test_a_tree_that_changes_is_planned_anew(tmp_path: Path) -> None:
    rows = NamedSharding(trees.mesh(8), PartitionSpec("x"))
    columns = NamedSharding(trees.mesh(8), PartitionSpec(None, "x"))
    data = trees.numpy_array("float32", (8, 8), 1)
    variants = [
        {"a": jax.device_put(data, rows)},
        {"a": jax.device_put(data, columns)},
        {"a": jax.device_put(data.view("int32"), columns)},
        {"a": jax.device_put(data[:4], columns)},
        {"a": jax.device_put(data, rows), "b": 1},
        {"a": jax.device_put(data), "b": 1.0},
        {"a": data, "b": True},
    ]
    with (
        tierkeep_jax.Checkpointer(tmp_path / "a", asynchronous=False) as one,
        tierkeep_jax.Checkpointer(tmp_path / "b", asynchronous=False) as other,
    ):
        for step, tree in enumerate([*variants, *variants]):
            one.save(step, tree)
            other.save(step, variants[-1 - step % len(variants)])
            trees.assert_same(one.restore(step), tree)
            trees.assert_same(other.restore(step), variants[-1 - step % len(variants)])


def test_metadata_names_every_leaf_without_reading_an_array(tmp_path: Path) -> None:
    with tierkeep_jax.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        report = checkpointer.save(1, TREE).result()
        metadata = checkpointer.metadata(1)
    assert {name: (leaf.spec.dtype, leaf.spec.shape) for name, leaf in metadata.leaves.items()} == {
        "w": ("float32", (16, 8)),
        "layers.0": ("bfloat16", (5,)),
        "layers.1": ("int32", (6,)),
        "key": ("uint32", (2,)),
        "step": ("int64", ()),
    }
    assert metadata.nbytes == report.nbytes


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_a_fresh_orbax_manager_restores_a_step(tmp_path: Path) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns when it is shown no likeness of the tree
    with tierkeep_jax.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(4, TREE)
        checkpointer.save(9, TREE | {"step": 9}, metrics={"loss": 0.5})
    expected = dict(trees.leaves(TREE | {"step": np.int64(9)}))
    rows = NamedSharding(trees.mesh(8), PartitionSpec("x"))

    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [4, 9]
        plain = manager.restore(9)
        args = ocp.args.StandardRestore(
            TREE | {"w": jax.ShapeDtypeStruct((16, 8), "float32", sharding=rows), "step": 0}
        )
        placed = manager.restore(9, args=args)
        described = manager.item_metadata(9)

    for found in (plain, placed):
        for name, leaf in trees.leaves(found):
            assert trees.bits_of(np.int64(leaf) if name == "step" else leaf) == trees.bits_of(expected[name]), name
    assert placed["w"].sharding == rows
    assert described is None or described["w"].shape == (16, 8)
