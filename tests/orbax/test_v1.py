"""Orbax's next API with our handler as the one for pytrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from orbax.checkpoint.experimental import v1 as ocp

from tests.jax import trees
from tests.orbax import states
from tierkeep.errors import CorruptCheckpointError, MismatchError, UnsupportedLeafError
from tierkeep.item import StagedItem

if states.OLD:
    pytest.skip("the next API of this Orbax is another one", allow_module_level=True)

from tierkeep_jax import orbax_v1

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Orbax's own, where it restores without a target.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")

STATE: dict[str, Any] = jax.tree.map(lambda leaf: leaf, states.training())
"""With its keys in order, as Orbax gives them to a handler."""


@pytest.fixture
def ours() -> Iterator[Any]:
    """Every pytree goes through our handler; nothing is left at the end."""
    context = ocp.Context()
    context.checkpointables.registry = orbax_v1.registry()
    with context:
        yield context
        made = states.arenas()
        orbax_v1.close()
    states.assert_nothing_left(made)


def test_what_is_saved_is_loaded_and_is_ours(ours: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "one", STATE)
    assert (tmp_path / "one" / "state" / "tierkeep.json").exists()
    trees.assert_same(ocp.load(tmp_path / "one"), STATE)
    trees.assert_same(ocp.load(tmp_path / "one", trees.specs(STATE)), STATE)


def test_it_is_loaded_onto_other_shardings_and_dtypes_and_in_part(ours: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "one", STATE)
    other = jax.sharding.NamedSharding(trees.mesh(2), jax.sharding.PartitionSpec("x"))
    struct: Any = jax.ShapeDtypeStruct
    wanted = {"params": {"w": struct((16, 8), np.float16, sharding=other)}, "step": 0}
    with pytest.raises(MismatchError):
        ocp.load(tmp_path / "one", wanted)
    partial = ocp.Context(ours)
    partial.pytree.loading.partial_load = True
    with partial:
        found = ocp.load(tmp_path / "one", wanted)
    assert found.keys() == {"params", "step"}
    assert found["params"]["w"].sharding == other
    np.testing.assert_array_equal(np.asarray(found["params"]["w"]), np.asarray(STATE["params"]["w"]).astype(np.float16))
    left_out = trees.specs(STATE) | {"host": ocp.PLACEHOLDER}
    trees.assert_same(ocp.load(tmp_path / "one", left_out), STATE | {"host": ...})


def test_metadata_says_what_was_saved_and_is_a_target(ours: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "one", STATE)
    metadata = ocp.metadata(tmp_path / "one").metadata
    assert metadata["params"]["w"].shape == (16, 8)
    assert metadata["params"]["w"].sharding_metadata is not None
    states.assert_same_to_stock(ocp.load(tmp_path / "one", metadata), STATE)


def test_several_checkpointables_go_through_their_own_handlers(ours: Any, tmp_path: Path) -> None:
    saved = {"state": STATE, "more": {"n": np.arange(3)}, "note": {"text": "kept as json"}}
    ocp.save_checkpointables(tmp_path / "one", saved)
    found = ocp.load_checkpointables(tmp_path / "one")
    trees.assert_same(found["state"], STATE)
    trees.assert_same(found["more"], {"n": np.arange(3)})
    assert found["note"] == {"text": "kept as json"}


def test_a_checkpointer_saves_steps_in_the_background(ours: Any, tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path / "run") as checkpointer:
        for step in range(4):
            response = checkpointer.save_async(step, STATE | {"step": step})
            assert response is not None
            response.result()
        assert checkpointer.latest is not None
        assert checkpointer.latest.step == 3
        trees.assert_same(checkpointer.load(1), STATE | {"step": 1})
    assert len(states.arenas()) == 1


def test_stock_orbax_loads_it_and_ours_loads_what_stock_orbax_saved(ours: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "ours", STATE)
    with ocp.Context():
        states.assert_same_to_stock(ocp.load(tmp_path / "ours"), STATE)
        ocp.save(tmp_path / "stock", STATE)
    states.assert_same_to_stock(ocp.load(tmp_path / "stock"), STATE)
    trees.assert_same(ocp.load(tmp_path / "stock", trees.specs(STATE)), STATE)


def test_dtypes_that_the_context_asks_for_are_those_of_the_checkpoint(ours: Any, tmp_path: Path) -> None:
    narrow = ocp.Context(ours)
    narrow.array.saving.storage_options.dtype = np.dtype("bfloat16")
    with narrow:
        ocp.save(tmp_path / "one", {"w": jax.numpy.arange(4.0)})
    assert ocp.load(tmp_path / "one")["w"].dtype == jax.numpy.bfloat16


def test_what_fails_is_raised_by_the_save_and_the_next_one_is_well(
    ours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(UnsupportedLeafError, match="'odd'"):
        orbax_v1._items().stage(orbax_v1._items().begin(tmp_path / "odd", ours.multiprocessing_options), {"odd": len})
    with monkeypatch.context() as patch:
        patch.setattr(StagedItem, "write", refuse)
        response = ocp.save_async(tmp_path / "full", STATE)
        with pytest.raises(OSError, match="No space"):
            response.result()
    assert not (tmp_path / "full").exists()
    ocp.save(tmp_path / "full", STATE)
    trees.assert_same(ocp.load(tmp_path / "full"), STATE)


def test_a_flipped_bit_is_told(ours: Any, tmp_path: Path) -> None:
    ocp.save(tmp_path / "one", {"w": jax.numpy.arange(4096.0)})
    images = (tmp_path / "one" / "state" / "ocdbt.process_0" / "d").iterdir()
    image = max(images, key=lambda path: path.stat().st_size)
    data = bytearray(image.read_bytes())
    data[5000] ^= 1
    image.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="w"):
        ocp.load(tmp_path / "one")
