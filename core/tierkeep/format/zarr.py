"""zarr3 metadata and keys of a leaf, as TensorStore writes them. The only place that does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from . import dtypes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["METADATA_KEY", "chunk_key", "key_prefix", "metadata"]

METADATA_KEY = b"zarr.json"


def metadata(dtype: str, shape: Sequence[int], chunk: Sequence[int], declare_crc: bool) -> bytes:
    """The `zarr.json` of a plain array on a regular grid, uncompressed, little-endian."""
    stored = dtypes.lookup(dtype)
    codecs: list[dict[str, object]] = [
        {"name": "bytes", "configuration": {"endian": "little"}} if stored.itemsize > 1 else {"name": "bytes"}
    ]
    if declare_crc:
        codecs.append({"name": "crc32c"})
    return msgspec.json.encode(
        {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "chunk_key_encoding": {"name": "default"},
            "codecs": codecs,
            "data_type": stored.zarr,
            "fill_value": stored.fill,
            "node_type": "array",
            "shape": list(shape),
            "zarr_format": 3,
        }
    )


def key_prefix(name: str) -> bytes:
    """What TensorStore puts before the keys of the array at path `name`."""
    return (name if not name or name.endswith("/") else name + "/").encode()


def chunk_key(number: int, grid: Sequence[int]) -> bytes:
    """The key of chunk `number` (C order) of a grid: `c/0/2`, or `c` for a 0-d array."""
    places = []
    for n in reversed(grid):
        number, place = divmod(number, n)
        places.append(place)
    return "/".join(["c", *map(str, reversed(places))]).encode()
