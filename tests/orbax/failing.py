"""A training process one of whose saves fails, run by test_errors: it must be told, go on, and end.

python -m tests.orbax.failing KIND ROOT
"""

from __future__ import annotations

import faulthandler
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from tierkeep.item import StagedItem
from tierkeep_jax.orbax import Restore, Save

__all__: list[str] = []


PATIENCE_S = 50
"""After that it says where it hangs, and its parent ends it."""


def main(kind: str, root: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S)
    state = {"w": np.arange(5)}
    broken: dict[str, Any] = {
        "leaf": Save({"w": state["w"], "odd": len}),
        "write": Save(state),
        "other item": ocp.args.Composite(a=Save(state), b=ocp.args.StandardSave({"text is": "refused"})),
        "json": ocp.args.Composite(a=Save(state), b=ocp.args.JsonSave({"no json": len})),
    }
    with ocp.CheckpointManager(root) as manager:
        if kind == "write":
            _remove_what_is_written_into()
        try:
            manager.save(1, args=broken[kind])
            manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001  the test reads which
            print(f"told: {type(error).__name__}: {error}", flush=True)
    with ocp.CheckpointManager(root) as manager:
        manager.save(2, args=Save(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
        np.testing.assert_array_equal(manager.restore(2, args=Restore())["w"], state["w"])
    print("well", flush=True)


def _remove_what_is_written_into() -> None:
    real = StagedItem.write

    def write(self: StagedItem, item: Path, save_id: str) -> None:
        StagedItem.write = real  # type: ignore[method-assign]
        shutil.rmtree(item)
        real(self, item, save_id)

    StagedItem.write = write  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
