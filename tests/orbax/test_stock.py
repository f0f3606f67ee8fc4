"""What our handler leaves is a checkpoint of stock Orbax's; and what stock Orbax leaves our handler restores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.jax import trees
from tests.orbax import states
from tests.orbax.stock_reads import flat
from tierkeep_jax.orbax import Handler, Restore, Save

DEADLINE_S = 120


def stock_reads(root: Path, step: int, out: Path) -> dict[str, Any]:
    """What stock Orbax gives in a process without tierkeep."""
    script = Path(__file__).parent / "stock_reads.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), str(root), str(step), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_stock_orbax_restores_it_where_there_is_no_tierkeep(tmp_path: Path) -> None:
    state = states.training()
    with states.manager(tmp_path / "run") as manager:
        manager.save(4, args=Save(state))
    found = stock_reads(tmp_path / "run", 4, tmp_path / "found")
    expected = json.loads(json.dumps(flat(state)))
    assert found.pop("handler").endswith(".StandardCheckpointHandler")
    assert found == dict.fromkeys(("without arguments", "standard", "pytree"), expected)


def test_stock_orbax_restores_what_it_would_not_have_saved(tmp_path: Path) -> None:
    state = states.beyond_orbax()
    with states.manager(tmp_path / "run") as manager:
        manager.save(0, args=Save(state))
    found = stock_reads(tmp_path / "run", 0, tmp_path / "found")["without arguments"]
    assert found["empty"] == ["float32", [0, 3], "", True]
    assert found["none of it"] == ["int16", [4, 0], "", False]
    assert found["text"] == "grün"
    assert json.loads(found["bytes"]) == {"t": "bytes", "v": "AP8="}
    assert found["flag"] == ["bool", [], "01", False]
    assert found["complex"] == ["complex128", [], np.complex128(1 - 2j).tobytes().hex(), False]
    assert found["pair.0"] == ["float32", [2], np.ones(2, "f4").tobytes().hex(), True]


@pytest.mark.parametrize(
    "state", [jax.numpy.arange(5), np.float32(3), 7, "text"], ids=lambda state: type(state).__name__
)
def test_a_single_leaf_is_a_state_too(state: Any, tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save(state))
        trees.assert_same(manager.restore(0, args=Restore()), state)
        if not isinstance(state, str):
            trees.assert_same(manager.restore(0, args=Restore(state)), state)


def test_what_stock_orbax_refuses_comes_back_as_it_was(tmp_path: Path) -> None:
    state = states.beyond_orbax()
    with states.manager(tmp_path) as manager:
        manager.save(0, args=Save(state))
        trees.assert_same(manager.restore(0, args=Restore()), state)
        trees.assert_same(manager.restore(0, args=Restore(state)), state)


@pytest.mark.parametrize("options", [{}, {"use_zarr3": True}, {"use_ocdbt": False}, {"use_compression": False}])
def test_our_handler_restores_what_stock_orbax_saved(options: dict[str, Any], tmp_path: Path) -> None:
    state = states.training()
    with states.manager(tmp_path, item_handlers=ocp.PyTreeCheckpointHandler(**options)) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
    with states.manager(tmp_path, item_handlers=Handler()) as manager:
        found = manager.restore(0)
        states.assert_same_to_stock(found, state)
        assert found["params"]["w"].sharding == state["params"]["w"].sharding
        trees.assert_same(manager.restore(0, args=Restore(trees.specs(state))), state)


def test_one_manager_goes_on_where_stock_orbax_has_begun_and_back(tmp_path: Path) -> None:
    with states.manager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(states.training(1)))
    with states.manager(tmp_path) as manager:
        trees.assert_same(manager.restore(1, args=Restore(trees.specs(states.training(1)))), states.training(1))
        manager.save(2, args=Save(states.training(2)))
    with states.manager(tmp_path) as manager:
        states.assert_same_to_stock(manager.restore(2, args=ocp.args.StandardRestore()), states.training(2))
        manager.save(3, args=ocp.args.StandardSave(states.training(3)))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]
