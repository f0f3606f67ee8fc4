"""Plain TensorStore and zarr directories: no metadata but the arrays' own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
import torch

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import bits, mesh, on, shape
from tierkeep.errors import UnsupportedFormatError

if TYPE_CHECKING:
    from pathlib import Path

ADAPTERS = [pytest.param(tierkeep_jax, id="jax"), pytest.param(tierkeep_torch, id="torch")]
ZARR2 = {"driver": "zarr", "metadata": {"chunks": [3, 4], "compressor": {"id": "blosc", "cname": "lz4"}}}
ZARR2_RAW = {"driver": "zarr", "metadata": {"chunks": [5, 2], "compressor": None, "dimension_separator": "/"}}
ZARR3 = {"driver": "zarr3", "metadata": {"codecs": [{"name": "bytes"}, {"name": "gzip"}]}}
SHARDED = {
    "driver": "zarr3",
    "metadata": {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 8]}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [3, 2],
                    "codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}],
                },
            }
        ],
    },
}
TRANSPOSED = {
    "driver": "zarr3",
    "metadata": {"codecs": [{"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "bytes"}]},
}
SPECS = [
    pytest.param(spec, id=name)
    for name, spec in {
        "zarr2": ZARR2, "zarr2 raw": ZARR2_RAW, "zarr3": ZARR3, "sharded": SHARDED, "transposed": TRANSPOSED
    }.items()
]  # fmt: skip


def put(path: Path, name: str, data: Any, spec: dict[str, Any], *, ocdbt: bool = False) -> None:
    base = {"driver": "file", "path": f"{path}/"}
    store = {"driver": "ocdbt", "base": base, "path": name} if ocdbt else {**base, "path": f"{path}/{name}"}
    array = ts.open({**spec, "kvstore": store}, create=True, dtype=ts.dtype(data.dtype), shape=data.shape).result()
    array.write(data).result()


def matrix(dtype: Any = "f4") -> np.ndarray[Any, Any]:
    return np.arange(7 * 9).reshape(7, 9).astype(dtype)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_single_array_comes_back_as_itself(adapter: Any, spec: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path / "a", "", matrix("f8"), spec)
    assert np.array_equal(np.asarray(adapter.load(tmp_path / "a")), matrix("f8"))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_directory_of_arrays_comes_back_as_nested_dicts(
    adapter: Any, spec: dict[str, Any], ocdbt: bool, tmp_path: Path
) -> None:
    state = {"w": matrix(), "deep": {"er": {"b": matrix("i4"), "bf16": matrix(ml_dtypes.bfloat16)}, "c": matrix("?")}}
    for name in ("w", "deep/er/b", "deep/er/bf16", "deep/c"):
        part: Any = state
        for step in name.split("/"):
            part = part[step]
        put(tmp_path / "c", name, part, spec, ocdbt=ocdbt)
    assert tree_of(adapter.load(tmp_path / "c")) == tree_of(state)


def tree_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: tree_of(state[key]) for key in sorted(state)}
    return bits(state)


@pytest.mark.parametrize("spec", SPECS)
def test_arrays_are_restored_onto_eight_devices_and_in_part(spec: dict[str, Any], tmp_path: Path) -> None:
    data = np.arange(16 * 24, dtype="f4").reshape(16, 24)
    put(tmp_path / "c", "w", data, spec)
    put(tmp_path / "c", "deep/v", matrix(), spec)
    sharding = on(mesh(2, 4), "y", "x")
    target = {"w": shape(data.shape, data.dtype, sharding=sharding)}
    found = tierkeep_jax.load(tmp_path / "c", target, unexpected="ignore")["w"]
    assert found.sharding == sharding
    assert bits(found) == bits(data)
    into = {"deep": {"v": torch.zeros(9, 7).t()}}
    tierkeep_torch.load(tmp_path / "c", into, keys=["deep"])
    assert bits(into["deep"]["v"]) == bits(matrix())


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("version", [2, 3])
def test_groups_are_no_arrays(adapter: Any, version: int, tmp_path: Path) -> None:
    put(tmp_path / "c", "g/a", matrix(), ZARR2 if version == 2 else ZARR3)
    for group in (tmp_path / "c", tmp_path / "c" / "g", tmp_path / "c" / "empty"):
        group.mkdir(exist_ok=True)
        if version == 2:
            (group / ".zgroup").write_text('{"zarr_format": 2}')
            (group / ".zattrs").write_text('{"array": "not one"}')
        else:
            attributes = {"array": "not one"}
            (group / "zarr.json").write_text(
                json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes})
            )
    assert tree_of(adapter.load(tmp_path / "c")) == tree_of({"g": {"a": matrix()}})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_chunk_that_was_never_written_holds_the_fill_value(adapter: Any, tmp_path: Path) -> None:
    spec = {
        "driver": "zarr3",
        "metadata": {
            "data_type": "float32",
            "fill_value": 2.5,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        },
    }
    put(tmp_path / "c", "a", np.full(4, 2.5, "f4"), spec)  # TensorStore leaves out what equals the fill value
    assert [path.name for path in (tmp_path / "c" / "a").rglob("*") if path.is_file()] == ["zarr.json"]
    assert bits(adapter.load(tmp_path / "c")["a"]) == bits(np.full(4, 2.5, "f4"))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_array_without_dimensions_or_elements_is_read(adapter: Any, tmp_path: Path) -> None:
    put(tmp_path / "c", "scalar", np.array(3, "i4"), {"driver": "zarr3"})
    put(tmp_path / "c", "none", np.zeros((0, 3), "f4"), {"driver": "zarr3"})
    assert tree_of(adapter.load(tmp_path / "c")) == tree_of(
        {"scalar": np.array(3, "i4"), "none": np.zeros((0, 3), "f4")}
    )


def test_a_dtype_that_is_no_number_is_an_error_that_names_the_array(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    metadata = {
        "zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "|S5", "compressor": None, "fill_value": None,
        "order": "C", "filters": None,
    }  # fmt: skip
    (tmp_path / "a" / ".zarray").write_text(json.dumps(metadata))
    with pytest.raises(UnsupportedFormatError, match="'a'"):
        tierkeep_jax.load(tmp_path)


def test_jax_gives_64_bit_arrays_as_numpy_unless_it_is_configured_for_them(tmp_path: Path) -> None:
    put(tmp_path / "c", "a", matrix("f8"), ZARR3)
    assert type(tierkeep_jax.load(tmp_path / "c")["a"]) is np.ndarray
    with jax.enable_x64(True):
        assert isinstance(tierkeep_jax.load(tmp_path / "c")["a"], jax.Array)
    assert bits(tierkeep_jax.load(tmp_path / "c", {"a": jnp.zeros((7, 9))}, dtype="cast")["a"]) == bits(matrix("f4"))
