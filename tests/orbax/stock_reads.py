"""Stock Orbax, where tierkeep cannot be imported: restores a root in every way there is, for test_stock.

python stock_reads.py ROOT STEP FOUND
"""

from __future__ import annotations

import json
import sys
from typing import Any

if __name__ == "__main__":
    for absent in ("tierkeep", "tierkeep_jax"):
        sys.modules[absent] = None  # type: ignore[assignment]

import jax
import numpy as np
import orbax.checkpoint as ocp

__all__ = ["flat"]


def flat(tree: Any) -> dict[str, Any]:
    """Every leaf by its name: dtype, shape, bytes and whether it is jax's, or the value."""
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): _bits(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _bits(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ["key", str(jax.random.key_impl(leaf)), _bits(jax.random.key_data(leaf))]
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        array = np.asarray(leaf)
        return [array.dtype.name, list(array.shape), array.tobytes().hex(), isinstance(leaf, jax.Array)]
    return leaf


def main(root: str, step: int, out: str) -> None:
    found: dict[str, Any] = {}
    with ocp.CheckpointManager(root) as manager:
        found["without arguments"] = flat(manager.restore(step))
    with ocp.CheckpointManager(root) as manager:
        found["standard"] = flat(manager.restore(step, args=ocp.args.StandardRestore()))
        found["handler"] = manager.metadata(step).item_handlers["default"]
    with ocp.CheckpointManager(root) as manager:
        found["pytree"] = flat(manager.restore(step, args=ocp.args.PyTreeRestore()))
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
