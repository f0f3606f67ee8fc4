"""Stock Orbax, writing one tree under every option it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from tests.strangers.compare import mesh, spread

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["WRITERS", "Pair", "tree", "write"]

WRITERS = (
    "standard",
    *(
        f"pytree {version} {store} {codec}"
        for version in ("zarr2", "zarr3")
        for store in ("ocdbt", "files")
        for codec in ("zstd", "raw")
    ),
    "pytree zarr2 ocdbt zstd chunked",
    "pytree zarr3 ocdbt zstd chunked",
    "pytree zarr3 files raw chunked",
)


class Pair(NamedTuple):
    left: Any
    right: Any


def tree(writer: str) -> dict[str, Any]:
    """A tree of all that this way of writing accepts. No two arrays of it have the same bytes."""
    rng = np.random.default_rng(7)

    def some(dtype: Any, *shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(-8, 8, shape).astype(dtype)

    made: dict[str, Any] = {
        "params": {
            "w": spread(some("f4", 16, 24), mesh(4, 2), "x", "y"),
            "b": spread(some(ml_dtypes.bfloat16, 24), mesh(8), "x"),
            "both": spread(some("f4", 8, 6), mesh(4, 2), ("x", "y"), None),
            "copies": spread(some("f2", 4, 3), mesh(8), None),
        },
        "small": [
            jnp.asarray(some(ml_dtypes.int4, 5)),
            {
                "e4m3": jnp.asarray(some(ml_dtypes.float8_e4m3fn, 3, 3)),
                "e5m2": jnp.asarray(some("f4", 4), "float8_e5m2"),
            },
        ],
        "pair": Pair(jnp.asarray(some("i4", 2, 0 + 3)), (jnp.asarray(True), jnp.asarray(some("u2", 3)))),
        "scalar": jnp.float32(-0.0),
        "nan": jnp.asarray(np.array([0x7FC12345, 0xFF800001, 0x80000000, 1], "u4").view("f4")),
        "complex": jnp.asarray(some("c8", 3)),
        "zeros": jnp.zeros((7, 5)),
        "host": {"f8": some("f8", 3, 2), "i8": some("i8", 4), "fortran": np.asfortranarray(some("f4", 3, 5))},
        "step": 12345,
        "rate": 0.1,
        "none": None,
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 2),
    }
    if not writer.startswith("standard"):
        made |= {"text": "a string", "on": True, "half": np.float16(1.5)}
    return made


def write(writer: str, path: Path, state: Any) -> None:
    """Writes `state` as the item directory `path`."""
    if writer == "standard":
        with ocp.StandardCheckpointer() as standard:
            standard.save(path, state)
        return
    options = writer.split()
    handler = ocp.PyTreeCheckpointHandler(
        use_zarr3="zarr3" in options, use_ocdbt="ocdbt" in options, use_compression="zstd" in options
    )
    save_args = None
    if "chunked" in options:
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=48), state)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state, save_args=save_args))
