"""safetensors files, single and sharded with an index; damaged and hostile ones."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import bits, flat, mesh, on, shape
from tierkeep.errors import CheckpointNotFoundError, CorruptCheckpointError, MismatchError, UnsupportedFormatError

if TYPE_CHECKING:
    from pathlib import Path

ADAPTERS = [pytest.param(tierkeep_jax, id="jax"), pytest.param(tierkeep_torch, id="torch")]


FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def state() -> dict[str, torch.Tensor]:
    """Every dtype that the format and both frameworks know; names with dots, as models have them."""
    made = {
        "model.w": torch.arange(24 * 16, dtype=torch.float32).reshape(24, 16),
        "model.b": torch.randn(16, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "scalar": torch.tensor(-0.0),
        "none": torch.zeros(0, 3),
        "nan": torch.tensor([0x7FC12345, -1, 1], dtype=torch.int32).view(torch.float32),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
        "bool": torch.tensor([True, False, True]),
    }
    for number, dtype in enumerate(
        ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float64", *FLOAT8)
    ):
        width = getattr(torch, dtype).itemsize
        made[dtype] = torch.arange(5 * width, dtype=torch.uint8).add(number).view(getattr(torch, dtype))
    return made


def sharded(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Two files and their index, as the transformers library writes them."""
    path.mkdir()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", ["file", "directory", "index", "sharded directory", "other name"])
def test_every_way_to_name_them_gives_the_same_tensors(adapter: Any, name: str, tmp_path: Path) -> None:
    if name in ("index", "sharded directory"):
        path = sharded(tmp_path / "c", state())
        path = path if name == "index" else path.parent
    else:
        (tmp_path / "c").mkdir()
        path = tmp_path / "c" / ("weights" if name == "other name" else "model.safetensors")
        save_file(state(), path, metadata={"format": "pt"})
        path = path.parent if name == "directory" else path
    found = adapter.load(path)
    assert {key: bits(value) for key, value in found.items()} == {key: bits(value) for key, value in state().items()}


def test_jax_restores_onto_eight_devices_and_reads_each_byte_once(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(512 * 512, dtype=torch.float32).reshape(512, 512), "v": torch.ones(7)}
    save_file(tensors, tmp_path / "m.safetensors")
    sharding = on(mesh(2, 4), "x", "y")
    target = {"w": shape((512, 512), jnp.float32, sharding=sharding), "v": jnp.zeros(7)}
    found = tierkeep_jax.load(tmp_path / "m.safetensors", target)
    assert found["w"].sharding == sharding
    assert flat(found) == flat(tensors)
    plan = tierkeep_jax.load(tmp_path / "m.safetensors", target, dry_run=True)
    size = (tmp_path / "m.safetensors").stat().st_size
    assert plan.nbytes <= size + 3 * 4096
    plan = tierkeep_jax.load(tmp_path / "m.safetensors", target, keys=["v"], dry_run=True)
    assert plan.nbytes <= 2 * 4096
    assert plan.names == ("v",)


def test_torch_fills_a_module(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, dtype=torch.bfloat16))
    index = sharded(tmp_path / "c", {name: value.clone() for name, value in model.state_dict().items()})
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, dtype=torch.bfloat16))
    tierkeep_torch.load(index, other)
    assert flat(other.state_dict()) == flat(model.state_dict())
    narrower = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, dtype=torch.bfloat16))
    with pytest.raises(MismatchError) as caught:
        tierkeep_torch.load(index, narrower)
    assert len(caught.value.shape) == 2


def test_several_files_without_an_index_are_an_error_that_names_them(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "a.safetensors")
    save_file(state(), tmp_path / "b.safetensors")
    with pytest.raises(CheckpointNotFoundError, match=r"holds a\.safetensors, b\.safetensors"):
        tierkeep_torch.load(tmp_path)


# Damage


def container(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD = {
    "length of 2^60": ({"a": entry("F32", [1], 0, 4)}, bytes(4), 2**60),
    "length beyond the file": ({"a": entry("F32", [1], 0, 4)}, bytes(4), 5000),
    "length of all ones": ({"a": entry("F32", [1], 0, 4)}, bytes(4), 2**64 - 1),
    "header cut short": ({"a": entry("F32", [1], 0, 4)}, bytes(4), 12),
    "no JSON": (b"{ no json ", bytes(4), None),
    "a list": (b"[1, 2, 3, 4]", bytes(4), None),
    "nested deeply": (b"[" * 50_000 + b"]" * 50_000, b"", None),
    "beyond the file": ({"a": entry("F32", [4], 0, 16)}, bytes(12), None),
    "begins beyond the file": ({"a": entry("F32", [0], 100, 100)}, bytes(12), None),
    "backwards": ({"a": entry("F32", [1], 8, 4)}, bytes(12), None),
    "negative": ({"a": entry("F32", [1], -4, 0)}, bytes(12), None),
    "too few bytes": ({"a": entry("F32", [4], 0, 12)}, bytes(16), None),
    "too many bytes": ({"a": entry("F32", [1], 0, 12)}, bytes(16), None),
    "2^60 elements": ({"a": entry("F32", [2**30, 2**30], 0, 4)}, bytes(4), None),
    "2^60 elements of none": ({"a": entry("F32", [2**62, 2**62, 0], 0, 4)}, bytes(4), None),
    "more than 64 bits": ({"a": entry("F32", [2**70], 0, 2**72)}, bytes(4), None),
    "negative length": ({"a": entry("F32", [-1, -1], 0, 4)}, bytes(4), None),
    "a shape of text": ({"a": entry("F32", "x", 0, 4)}, bytes(4), None),
    "a shape of fractions": ({"a": entry("F32", [1.0], 0, 4)}, bytes(4), None),
    "a shape of truths": ({"a": entry("F32", [True], 0, 4)}, bytes(4), None),
    "a dtype that is a list": ({"a": entry(["F32"], [1], 0, 4)}, bytes(4), None),  # type: ignore[arg-type]
    "an entry that is a number": ({"a": 5}, bytes(4), None),
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12), None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_an_error_and_allocates_nothing(name: str, tmp_path: Path) -> None:
    header, data, length = BAD[name]
    path = container(tmp_path / "m.safetensors", header, data, length=length)
    tracemalloc.start()
    try:
        for given in (path, tmp_path):
            with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=r"m\.safetensors"):
                tierkeep_torch.load(given)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    for kept in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "m.safetensors").write_bytes(whole[:kept])
        with pytest.raises((CorruptCheckpointError, CheckpointNotFoundError), match=r"m\.safetensors"):
            tierkeep_torch.load(tmp_path / "m.safetensors")


def test_a_dtype_that_is_not_known_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    path = container(tmp_path / "m.safetensors", {"odd": entry("F6_E2M3", [4], 0, 3)}, bytes(3))
    with pytest.raises(UnsupportedFormatError, match=r"odd.*F6_E2M3"):
        tierkeep_torch.load(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "..", "", "a/../../x.safetensors", "a\x00b"])
def test_an_index_that_leaves_its_directory_is_an_error(name: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "c").mkdir()
    index = tmp_path / "c" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptCheckpointError, match="index"):
        tierkeep_torch.load(index)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "{", '{"weight_map": {"a": "gone"}}']
)
def test_a_damaged_index_is_an_error(text: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"index"):
        tierkeep_torch.load(tmp_path)


def test_a_tensor_that_the_index_names_and_no_file_holds_is_an_error(tmp_path: Path) -> None:
    index = sharded(tmp_path / "c", {"a": torch.ones(2), "b": torch.ones(3)})
    raw = json.loads(index.read_text())
    raw["weight_map"]["lost"] = raw["weight_map"]["a"]
    index.write_text(json.dumps(raw))
    with pytest.raises(CorruptCheckpointError, match="lost"):
        tierkeep_torch.load(index)
    raw["weight_map"] = {"a": raw["weight_map"]["b"]}  # it is in the other file
    index.write_text(json.dumps(raw))
    with pytest.raises(CorruptCheckpointError, match="'a'"):
        tierkeep_torch.load(index)


def test_values_are_the_files_own_whatever_reads_them(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "m.safetensors")
    numpy = {key: np.asarray(value) for key, value in tierkeep_jax.load(tmp_path / "m.safetensors").items()}
    assert flat(numpy) == flat(tierkeep_torch.load(tmp_path / "m.safetensors"))
