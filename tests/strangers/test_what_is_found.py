"""What stands at a path is found from its content; an error says what was looked for and what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import torch

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import flat
from tierkeep.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

ADAPTERS = [pytest.param(tierkeep_jax, id="jax"), pytest.param(tierkeep_torch, id="torch")]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_of_several_items_the_error_names_them_and_each_is_read_by_its_own_path(adapter: Any, tmp_path: Path) -> None:
    items = {"params": {"w": jnp.arange(6.0)}, "opt": {"mu": jnp.ones(3)}}
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        manager.save(
            7,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(items["params"]),
                opt=ocp.args.PyTreeSave(items["opt"]),
                config=ocp.args.JsonSave({"layers": 2}),
            ),
        )
        manager.wait_until_finished()
    step = tmp_path / "root" / "7"
    with pytest.raises(CheckpointNotFoundError, match="opt, params: name one"):
        adapter.load(step)
    for name, item in items.items():
        assert flat(adapter.load(step / name)) == flat(item)
    with pytest.raises(CheckpointNotFoundError, match="_METADATA"):
        adapter.load(step / "config")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_only_item_of_a_step_is_read_whatever_its_name(adapter: Any, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardSave({"w": jnp.arange(6.0)}), config=ocp.args.JsonSave({}))
        manager.save(7, args=args)
        manager.wait_until_finished()
    assert flat(adapter.load(tmp_path / "root" / "7")) == flat({"w": jnp.arange(6.0)})


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("writer", ["orbax", "torch", "jax"])
def test_a_root_of_steps_is_an_error_that_names_the_newest(adapter: Any, writer: str, tmp_path: Path) -> None:
    if writer == "orbax":
        with ocp.CheckpointManager(tmp_path / "root") as manager:
            for step in (9, 10):
                manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
            manager.wait_until_finished()
    else:
        made: Any = tierkeep_jax if writer == "jax" else tierkeep_torch
        with made.Checkpointer(tmp_path / "root", asynchronous=False) as checkpointer:
            for step in (9, 10):
                checkpointer.save(step, {"w": jnp.ones(3) if writer == "jax" else torch.ones(3)})
    with pytest.raises(CheckpointNotFoundError, match="a root of steps: name one, such as 10"):
        adapter.load(tmp_path / "root")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_where_nothing_is_the_error_says_what_was_looked_for(adapter: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"missing: looked for anything at that path"):
        adapter.load(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("hello")
    (tmp_path / "file").write_text("hello")
    (tmp_path / "nothing").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError, match=r"link: looked for"):
        adapter.load(tmp_path / "link")
    for name in ("empty", "other", "file", "nothing"):
        with pytest.raises(CheckpointNotFoundError, match=name) as caught:
            adapter.load(tmp_path / name)
        for word in ("tierkeep.json", "_METADATA", "zarr", "OCDBT", ".metadata", "safetensors", "torch.save"):
            assert word in str(caught.value), (name, word)


def test_a_save_of_orbax_that_did_not_finish_is_no_step(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}))
        manager.wait_until_finished()
    (tmp_path / "root" / "2").rename(tmp_path / "root" / "2.orbax-checkpoint-tmp")
    with tierkeep_jax.Checkpointer(tmp_path / "root", asynchronous=False) as checkpointer:
        assert checkpointer.steps() == [1]
        assert flat(checkpointer.restore()) == flat({"w": jnp.full(3, 1)})
