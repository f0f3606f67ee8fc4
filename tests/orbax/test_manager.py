"""Orbax's CheckpointManager with our handler: its ways to name one, its options, and what stands on the disk."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.jax import trees
from tests.orbax import states
from tierkeep.item import StagedItem
from tierkeep.options import MemoryOptions, SaveOptions
from tierkeep_jax.orbax import Handler, Restore, Save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEADLINE_S = 20
STOCK = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


def registry(handler: Handler) -> Any:
    found = ocp.handlers.DefaultCheckpointHandlerRegistry()
    found.add(None, Save, handler)
    found.add(None, Restore, handler)
    return found


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "lazily": dict,
    "by a registry": lambda: {"handler_registry": registry(Handler())},
    "by a registry with the item's name": lambda: {
        "handler_registry": ocp.handlers.create_default_handler_registry(default=Handler())
    },
    "as the only handler": lambda: {"item_handlers": Handler()},
}


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("way", WAYS)
def test_a_manager_saves_and_restores_whichever_way_it_finds_the_handler(
    way: str, asynchronous: bool, tmp_path: Path
) -> None:
    with states.manager(tmp_path, asynchronous=asynchronous, **WAYS[way]()) as manager:
        for step in (1, 2):
            assert manager.save(step, args=Save(states.training(step)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        trees.assert_same(manager.restore(1, args=Restore()), states.training(1))
        trees.assert_same(manager.restore(2, args=Restore(trees.specs(states.training(2)))), states.training(2))
        assert manager.item_metadata(2).tree["params"]["w"].shape == (16, 8)
    with states.manager(tmp_path, asynchronous=asynchronous, **WAYS[way]()) as manager:
        trees.assert_same(manager.restore(2, args=Restore()), states.training(2))


@pytest.mark.parametrize("way", ["item_handlers", "item_names", "lazily"])
def test_several_items_stand_beside_each_other_and_beside_json(way: str, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "item_handlers": {
            "item_handlers": {"model": Handler(), "optimizer": Handler(), "note": ocp.JsonCheckpointHandler()}
        },
        "item_names": {"item_names": ("model", "optimizer", "note")},
        "lazily": {},
    }
    with states.manager(tmp_path, **ways[way]) as manager:
        for step in (1, 2):
            args = ocp.args.Composite(
                model=Save(states.training(step)),
                optimizer=Save({"mu": np.full(3, step)}),
                note=ocp.args.JsonSave({"step": step}),
            )
            manager.save(step, args=args)
        manager.wait_until_finished()
        assert sorted(path.name for path in (tmp_path / "2").iterdir() if path.is_dir()) == [
            "model",
            "note",
            "optimizer",
        ]
        wanted = ocp.args.Composite(model=Restore(), optimizer=Restore(), note=ocp.args.JsonRestore())
        found = manager.restore(1, args=wanted)
        trees.assert_same(found.model, states.training(1))
        trees.assert_same(found.optimizer, {"mu": np.full(3, 1)})
        assert found.note == {"step": 1}
    with states.manager(tmp_path) as manager:
        found = manager.restore(2, args=ocp.args.Composite(optimizer=Restore()))
        trees.assert_same(found.optimizer, {"mu": np.full(3, 2)})
        assert found.keys() == {"optimizer"}


def test_one_handler_serves_several_items_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = threading.Event()
    real: Callable[..., None] = StagedItem.write

    def write(self: StagedItem, item: Path, save_id: str) -> None:
        assert saved.wait(DEADLINE_S)  # a save waits for no item of its own step to be written
        real(self, item, save_id)

    monkeypatch.setattr(StagedItem, "write", write)
    with states.manager(tmp_path, handler_registry=registry(Handler())) as manager:
        for step in range(3):
            items = {name: Save({"n": np.full(5 + place, step)}) for place, name in enumerate("abc")}
            manager.save(step, args=ocp.args.Composite(**items))
            saved.set()
            manager.wait_until_finished()
            saved.clear()
        assert len(states.arenas()) == 3
        for step in range(3):
            wanted = ocp.args.Composite(a=Restore(), b=Restore(), c=Restore())
            found = manager.restore(step, args=wanted)
            for place, name in enumerate("abc"):
                trees.assert_same(found[name], {"n": np.full(5 + place, step)})


def test_the_best_steps_by_a_metric_and_the_newest_are_kept(tmp_path: Path) -> None:
    loss = {1: 0.9, 2: 0.1, 3: 0.5, 4: 0.7}
    options: dict[str, Any] = {
        "max_to_keep": 2,
        "best_fn": lambda metrics: metrics["loss"],
        "best_mode": "min",
        "keep_checkpoints_without_metrics": False,
    }
    with states.manager(tmp_path, **options) as manager:
        for step, value in loss.items():
            manager.save(step, args=Save(states.training(step)), metrics={"loss": value})
        manager.wait_until_finished()
        assert manager.best_step() == 2
        assert manager.all_steps() == [2, 3]
        trees.assert_same(manager.restore(2, args=Restore()), states.training(2))
        assert manager.metrics(2) == {"loss": 0.1}


def test_old_steps_go_and_steps_between_are_not_saved(tmp_path: Path) -> None:
    with states.manager(tmp_path, max_to_keep=2, save_interval_steps=2) as manager:
        saved = [step for step in range(8) if manager.save(step, args=Save({"n": step}))]
        manager.wait_until_finished()
        assert saved == [0, 2, 4, 6]
        assert manager.all_steps() == [4, 6]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["4", "6"]


def test_custom_metadata_of_step_item_and_root_come_back(tmp_path: Path) -> None:
    with states.manager(tmp_path, metadata={"run": "seven"}) as manager:
        args = Save({"n": np.arange(3)}, custom_metadata={"of": ["the", "item"], "n": 1})
        manager.save(1, args=args, custom_metadata={"of": "the step"})
        manager.wait_until_finished()
        assert manager.item_metadata(1).custom_metadata == {"of": ["the", "item"], "n": 1}
        assert manager.metadata(1).custom_metadata == {"of": "the step"}
        assert manager.metadata().custom_metadata == {"run": "seven"}
        manager.save(2, args=Save({"n": np.arange(3)}))
        manager.wait_until_finished()
        assert manager.item_metadata(2).custom_metadata is None
        trees.assert_same(manager.restore(1, args=Restore()), {"n": np.arange(3)})
    ocp.StandardCheckpointHandler().metadata(tmp_path / "1" / "default")


def test_item_metadata_is_what_stock_orbax_says_of_the_state(tmp_path: Path) -> None:
    state = {key: value for key, value in states.training().items() if key != "key"}
    with states.manager(tmp_path / "ours", item_handlers=Handler()) as manager:
        manager.save(0, args=Save(state))
        manager.wait_until_finished()
        ours = manager.item_metadata(0)
    with states.manager(tmp_path / "stock", item_handlers=ocp.StandardCheckpointHandler()) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        stock = manager.item_metadata(0)
    structures: list[Any] = [jax.tree.structure(ours.tree), jax.tree.structure(stock.tree)]
    assert structures[0] == structures[1]
    for one, other in zip(jax.tree.leaves(ours.tree), jax.tree.leaves(stock.tree), strict=True):
        assert type(one) is type(other)
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


def test_a_step_names_stock_orbax_s_handler_unless_told_otherwise(tmp_path: Path) -> None:
    for name, handler, expected in (
        ("stock", Handler(), STOCK),
        ("own", Handler(stock_name=False), "tierkeep_jax.orbax.Handler"),
    ):
        with states.manager(tmp_path / name, item_handlers=handler) as manager:
            manager.save(3, args=Save({"n": np.arange(3)}))
            manager.wait_until_finished()
        record = json.loads((tmp_path / name / "3" / "_CHECKPOINT_METADATA").read_text())
        assert record["item_handlers"] == {"default": expected}
        with states.manager(tmp_path / name) as manager:
            trees.assert_same(manager.restore(3), {"n": np.arange(3)})


def test_restore_without_arguments_goes_through_a_handler_that_the_manager_was_given(tmp_path: Path) -> None:
    state = {"pair": (np.arange(3), None)}  # which stock Orbax would give back as a list
    with states.manager(tmp_path, item_handlers=Handler()) as manager:
        manager.save(0, args=Save(state))
        trees.assert_same(manager.restore(0), state)
    with states.manager(tmp_path, item_handlers=Handler()) as manager:
        trees.assert_same(manager.restore(0), state)


def test_a_handler_is_used_again_after_its_manager_was_closed(tmp_path: Path) -> None:
    handler = Handler()
    for step in range(2):
        with states.manager(tmp_path, item_handlers=handler) as manager:
            manager.save(step, args=Save({"n": np.arange(step + 3)}))
    with states.manager(tmp_path, item_handlers=handler) as manager:
        trees.assert_same(manager.restore(1), {"n": np.arange(4)})


def test_checkpointers_without_a_manager_save_and_restore(tmp_path: Path) -> None:
    state = states.training()
    with ocp.Checkpointer(Handler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=Save(state))
        checkpointer.save(tmp_path / "by name", state)
        trees.assert_same(checkpointer.restore(tmp_path / "one"), state)
        checkpointer.save(tmp_path / "one", {"n": np.arange(3)}, force=True)
        trees.assert_same(checkpointer.restore(tmp_path / "one"), {"n": np.arange(3)})
    with ocp.AsyncCheckpointer(Handler()) as checkpointer:
        checkpointer.save(tmp_path / "later", args=Save(state))
        checkpointer.wait_until_finished()
        trees.assert_same(checkpointer.restore(tmp_path / "later", args=Restore(trees.specs(state))), state)
    with ocp.StandardCheckpointer() as checkpointer:
        states.assert_same_to_stock(checkpointer.restore(tmp_path / "by name"), state)


def test_a_manager_that_is_closed_leaves_no_process_no_memory_and_no_temporary_directory(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(a=Save({"n": np.arange(9)}), b=Save({"n": np.arange(3)})))
        manager.wait_until_finished()
        made = states.arenas()
        assert len(made) == 2
        manager.save(1, args=ocp.args.Composite(a=Save({"n": np.arange(9)}), b=Save({"n": np.arange(3)})))
        manager.wait_until_finished()
        assert states.arenas() == made
    states.assert_nothing_left(made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("name", ["text keys", "not compressed"])
def test_options_of_the_engine_are_the_handler_s(name: str, tmp_path: Path) -> None:
    handler = Handler(
        options=SaveOptions(chunk_nbytes=64, declare_crc=name == "text keys"), memory=MemoryOptions(nice=0)
    )
    with states.manager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=Save({"n": np.arange(100)}))
        manager.wait_until_finished()
        assert manager.item_metadata(0).tree["n"].storage.chunk_shape < (100,)
        trees.assert_same(manager.restore(0), {"n": np.arange(100)})


def test_memory_that_was_prepared_is_what_the_first_save_uses(tmp_path: Path) -> None:
    handler = Handler()
    handler.prepare({"n": np.arange(1000)})
    made = states.arenas()
    assert len(made) == 1
    with states.manager(tmp_path, item_handlers=handler) as manager:
        manager.save(0, args=Save({"n": np.arange(1000)}))
        manager.wait_until_finished()
        assert states.arenas() == made
        trees.assert_same(manager.restore(0), {"n": np.arange(1000)})
    states.assert_nothing_left(made)


# tilde-literal-dir, relative-path-and-cwd: what is saved goes where Orbax's own path leads.
def test_odd_paths_lead_where_orbax_leads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "with space" / "ünicode%20?" / "end"
    with states.manager(root) as manager:
        manager.save(0, args=Save({"n": np.arange(3)}))
        monkeypatch.chdir(tmp_path)
        manager.wait_until_finished()
        trees.assert_same(manager.restore(0, args=Restore()), {"n": np.arange(3)})
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="://"):
        Handler().restore("gs://bucket/step")
