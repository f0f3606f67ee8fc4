"""torch.save files: tensors and plain values through torch's safe loader, and never a pickle's code."""

from __future__ import annotations

import collections
import json
import os
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import bits, flat, mesh, on, shape
from tests.strangers.orbax_writers import write
from tierkeep.errors import CorruptCheckpointError, TierkeepError, UnsupportedFormatError

if TYPE_CHECKING:
    from pathlib import Path

ADAPTERS = [pytest.param(tierkeep_jax, id="jax"), pytest.param(tierkeep_torch, id="torch")]
FORMATS = [pytest.param(True, id="zip"), pytest.param(False, id="legacy")]


def state() -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {
        "model": collections.OrderedDict(w=torch.arange(12.0).reshape(3, 4), b=torch.ones(4, dtype=torch.bfloat16)),
        "opt": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}}, "param_groups": [{"lr": 0.1}]},
        "tied": [shared, shared],
        "view": torch.arange(20.0).reshape(4, 5)[1:3, ::2].t(),
        "step": 12,
        "name": "a run",
        "none": None,
        "pair": (1, 2.5, True),
    }


def touched(path: Path) -> Any:
    """An object whose pickle makes a file at `path` when it is loaded."""

    class Touch:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path),)

    return Touch()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("zipped", FORMATS)
def test_tensors_and_plain_values_come_back(adapter: Any, zipped: bool, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    found = adapter.load(tmp_path / "c.pt")
    assert flat(found) == flat(state())
    assert list(found["opt"]["state"]) == [0]
    assert type(found["model"]) is collections.OrderedDict
    assert found["pair"] == (1, 2.5, True)
    assert found["none"] is None
    if adapter is tierkeep_torch:
        assert found["tied"][0] is found["tied"][1]


@pytest.mark.parametrize("zipped", FORMATS)
def test_jax_restores_onto_eight_devices(zipped: bool, tmp_path: Path) -> None:
    tensor = torch.arange(16 * 24.0).reshape(24, 16).t()
    torch.save({"w": tensor, "n": 3}, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    sharding = on(mesh(4, 2), "x", "y")
    target = {"w": shape((16, 24), jnp.float32, sharding=sharding), "n": 0}
    found = tierkeep_jax.load(tmp_path / "c.pt", target)
    assert found["w"].sharding == sharding
    assert flat(found) == flat({"w": tensor, "n": 3})
    assert flat(tierkeep_jax.load(tmp_path / "c.pt", keys=["n"])) == flat({"n": 3})


@pytest.mark.parametrize("zipped", FORMATS)
def test_torch_fills_modules_and_optimizers(zipped: bool, tmp_path: Path) -> None:
    def training() -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved = training()
    states = {key: value.state_dict() for key, value in saved.items()}
    torch.save(states, tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    into = training()
    tierkeep_torch.load(tmp_path / "c.pt", into)
    assert {key: flat(value.state_dict()) for key, value in into.items()} == {k: flat(v) for k, v in states.items()}


@pytest.mark.parametrize("zipped", FORMATS)
def test_a_pickled_module_is_refused_and_its_class_is_named(zipped: bool, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsupportedFormatError, match=r"Linear.*weights only"):
        tierkeep_torch.load(tmp_path / "c.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")  # torch's own, of a protocol it seldom meets
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("zipped", FORMATS)
def test_code_in_a_torch_save_file_never_runs(adapter: Any, zipped: bool, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = {"a": torch.ones(2), "b": touched(mark)}
    torch.save(hostile, tmp_path / "c.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    with pytest.raises(TierkeepError, match=r"c\.pt"):
        adapter.load(tmp_path / "c.pt")
    with pytest.raises(TierkeepError, match=r"c\.pt"):
        adapter.load(tmp_path / "c.pt", {"a": jnp.ones(2) if adapter is tierkeep_jax else torch.ones(2)}, pickle=True)
    assert not mark.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_plain_pickle_is_refused_and_never_runs(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for content in (touched(mark), {"a": touched(mark)}, {"a": 1}):
        (tmp_path / "c.pkl").write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(TierkeepError, match=r"c\.pkl"):
            tierkeep_torch.load(tmp_path / "c.pkl")
    assert not mark.exists()


def test_pickles_in_the_files_of_other_formats_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    payload = pickle.dumps(touched(mark), 2)
    write("pytree zarr3 ocdbt raw", tmp_path / "orbax", {"a": jnp.arange(4.0), "s": "text"})
    tierkeep_torch.save({"a": torch.arange(4.0), "s": "text"}, tmp_path / "own")
    for name in ("orbax", "own"):
        files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
        assert len(files) >= 4
        for path in files:
            whole = path.read_bytes()
            path.write_bytes(payload)
            try:
                found = tierkeep_torch.load(tmp_path / name)
            except TierkeepError:
                found = None  # a file that matters
            assert found is None or flat(found)["a"] == bits(np.arange(4, dtype="f4")), path
            path.write_bytes(whole)
    for name in ("m.safetensors", "m.safetensors.index.json", "c.npz", "zarr.json"):
        (tmp_path / name).write_bytes(payload)
        with pytest.raises(TierkeepError):
            tierkeep_torch.load(tmp_path / name)
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "zarr.json").write_bytes(payload)
    with pytest.raises(TierkeepError):
        tierkeep_torch.load(tmp_path / "zarr")
    assert not mark.exists()


def test_an_object_array_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    np.savez(tmp_path / "c.npz", a=np.array([touched(mark)], object), allow_pickle=True)
    metadata = {
        "zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "compressor": None, "fill_value": None,
        "order": "C", "filters": [{"id": "pickle"}],
    }  # fmt: skip
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / ".zarray").write_text(json.dumps(metadata))
    (tmp_path / "zarr" / "0").write_bytes(pickle.dumps(touched(mark)))
    for name in ("c.npz", "zarr"):
        with pytest.raises(TierkeepError):
            tierkeep_torch.load(tmp_path / name)
    assert not mark.exists()


def test_other_zip_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", a=np.ones(3))
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("hello.txt", "hello")
    for name in ("c.npz", "c.zip"):
        with pytest.raises(UnsupportedFormatError, match=r"a zip archive, but not one of torch\.save"):
            tierkeep_torch.load(tmp_path / name)


@pytest.mark.parametrize("zipped", FORMATS)
def test_a_truncated_file_is_an_error(zipped: bool, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "c.pt", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "c.pt").read_bytes()
    for kept in (0, 3, 4, 20, 200, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        (tmp_path / "c.pt").write_bytes(whole[:kept])
        with pytest.raises(TierkeepError, match=r"c\.pt"):
            tierkeep_torch.load(tmp_path / "c.pt")


def test_a_tensor_that_declares_more_than_memory_holds_is_an_error(tmp_path: Path) -> None:
    torch.save({"huge": torch.zeros(1).expand(2**60)}, tmp_path / "c.pt")
    for adapter in (tierkeep_jax, tierkeep_torch):
        with pytest.raises(CorruptCheckpointError, match="huge"):
            adapter.load(tmp_path / "c.pt")


def test_a_leaf_that_cannot_be_kept_is_an_error_that_names_it(tmp_path: Path) -> None:
    torch.save({"odd": torch.empty(3, device="meta"), "even": torch.ones(2)}, tmp_path / "c.pt")
    with pytest.raises(UnsupportedFormatError, match=r"odd.*meta"):
        tierkeep_torch.load(tmp_path / "c.pt")


def test_a_file_that_torch_cannot_load_is_damaged(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        archive.writestr("c/data.pkl", b"\x80\x02garbage")
        archive.writestr("c/version", b"3\n")
    with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match=r"c\.pt"):
        tierkeep_torch.load(tmp_path / "c.pt")
