"""DCP's own calls with tierkeep's writer and reader, in one process."""

from __future__ import annotations

import gc
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierkeep_torch
from tierkeep.errors import CheckpointExistsError, CorruptCheckpointError, MismatchError, UnsupportedLeafError
from tierkeep_torch import dcp
from tierkeep_torch.dcp import AsyncStager, StorageReader, StorageWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BIG = 70_000  # elements: more than one block


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def state(value: float = 1.0) -> dict[str, Any]:
    weight = torch.arange(BIG, dtype=torch.float32) + value
    return {
        "model": {"weight": weight, "view": torch.arange(60.0).reshape(6, 10).t()[::2] + value},
        "tied": weight,
        "half": torch.full((3, 3), value, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(float(value), dtype=torch.float64),
        "list": [torch.full((2,), float(value)), 5],
        "step": 3,
        "name": "run",
        "object": {1, 2, 3},
        "none": None,
    }


def blank() -> dict[str, Any]:
    def clear(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clear(each) for key, each in value.items()}
        if isinstance(value, list):
            return [clear(each) for each in value]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    cleared: dict[str, Any] = clear(state())
    return cleared


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def test_a_state_comes_back_through_dcp_and_through_tierkeep(tmp_path: Path) -> None:
    state_dict_saver.save(state(), storage_writer=StorageWriter(tmp_path / "a"))
    found = blank()
    state_dict_loader.load(found, storage_reader=StorageReader(tmp_path / "a"))
    assert same(found, state())
    native = tierkeep_torch.load(tmp_path / "a")
    assert same(native, state())
    assert native["tied"].data_ptr() == native["model"]["weight"].data_ptr()
    tierkeep_torch.verify(tmp_path / "a")


def test_a_checkpoint_id_names_the_place_and_one_writer_saves_many(tmp_path: Path) -> None:
    writer, reader = StorageWriter(), StorageReader()
    for value in (1, 2, 3):
        state_dict_saver.save(state(value), checkpoint_id=tmp_path / str(value), storage_writer=writer)
    for value in (3, 1, 2):
        found = blank()
        state_dict_loader.load(found, checkpoint_id=tmp_path / str(value), storage_reader=reader)
        assert same(found, state(value))
    writer.close()


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tensor = torch.arange(BIG, dtype=torch.float32)
    state_dict_saver.save({"a": tensor, "b": tensor}, storage_writer=StorageWriter(tmp_path / "a"))
    nbytes = sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file())
    assert nbytes < 1.3 * tensor.nbytes


def test_a_tensor_of_another_dtype_is_an_error_that_names_it_unless_a_cast_is_asked_for(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((4,), 1.5)}, tmp_path / "a")
    target = {"w": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(MismatchError, match="w: float32 in the checkpoint, int64 in the target"):
        dcp.load(target, tmp_path / "a")
    assert target["w"].tolist() == [0, 0, 0, 0]
    state_dict_loader.load(target, storage_reader=StorageReader(tmp_path / "a", dtype="cast"))
    assert target["w"].tolist() == [1, 1, 1, 1]


def test_a_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    dcp.save(state(), tmp_path / "a")
    image = max((file for file in (tmp_path / "a").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(image.read_bytes())
    data[1000] ^= 4
    image.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="weight"):
        dcp.load(blank(), tmp_path / "a")


def test_dcps_own_error_is_turned_into_one_that_handlers_catch(tmp_path: Path) -> None:
    assert not issubclass(CheckpointException, Exception)
    with pytest.raises(FileNotFoundError):
        dcp.load({"w": torch.zeros(1)}, tmp_path / "nothing")


def test_an_overwrite_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(state(1), tmp_path / "a")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("tierkeep_torch.dcp.publish", fails)
        with pytest.raises(OSError, match="what stood there is untouched"):
            dcp.save(state(2), tmp_path / "a")
    found = blank()
    dcp.load(found, tmp_path / "a")
    assert same(found, state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    dcp.save(state(2), tmp_path / "a")
    dcp.load(found, tmp_path / "a")
    assert same(found, state(2))


def test_a_tensor_that_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"'model\.weight': a meta tensor has no data"):
        dcp.save({"model": {"weight": torch.zeros(3, device="meta")}}, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_what_a_failed_save_left_goes_with_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StorageWriter(tmp_path / "a")
    with pytest.raises(CheckpointException, match="UnsupportedLeafError") as failure:
        state_dict_saver.save({"w": torch.zeros(3, device="meta")}, storage_writer=writer)
    assert [path.name.startswith("a.") for path in tmp_path.iterdir()] == [True]
    with monkeypatch.context() as patch:  # as in a process that was forked meanwhile, and ends
        patch.setattr(os, "getpid", lambda: -1)
        writer.__del__()
    assert [path.name.startswith("a.") for path in tmp_path.iterdir()] == [True]
    del writer, failure
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_stands_is_not_overwritten_if_that_is_asked_for(tmp_path: Path) -> None:
    dcp.save(state(1), tmp_path / "a")
    with pytest.raises(CheckpointException, match=f"{CheckpointExistsError.__name__}.*Checkpoint already exists"):
        state_dict_saver.save(state(2), storage_writer=StorageWriter(tmp_path / "a", overwrite=False))


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD])
def test_a_state_that_is_changed_after_async_save_returns_was_saved_as_it_was(
    kind: AsyncCheckpointerType, tmp_path: Path
) -> None:
    stager = AsyncStager()
    live = state(0)
    for value in range(5):
        live["model"]["weight"].fill_(value)
        future = dcp.async_save(live, tmp_path / str(value), stager=stager, async_checkpointer_type=kind, no_dist=True)
        live["model"]["weight"].fill_(-1)
        future.result()
        found = blank()
        dcp.load(found, tmp_path / str(value))
        assert bool((found["model"]["weight"] == value).all())
    stager.close()


def test_a_checkpoint_of_dcps_own_is_read_through_our_reader(tmp_path: Path) -> None:
    state_dict_saver.save(state(), storage_writer=FileSystemWriter(tmp_path / "a"))
    found = blank()
    del found["object"]  # kept by DCP as a pickle of a kind that is not restored without running it
    state_dict_loader.load(found, storage_reader=StorageReader(tmp_path / "a"))
    expected = state()
    del expected["object"]
    assert same(found, expected)


def test_a_step_saved_by_a_checkpointer_is_read_through_our_reader(tmp_path: Path) -> None:
    saved = state()
    tierkeep_torch.save(saved, tmp_path / "a")
    found = blank()
    del found["none"]
    state_dict_loader.load(found, storage_reader=StorageReader(tmp_path / "a"))
    del saved["none"]
    assert same(found, saved)


def test_stock_dcp_is_left_alone(tmp_path: Path) -> None:
    state_dict_saver.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "a"))
    target = {"w": torch.zeros(3)}
    state_dict_loader.load(target, storage_reader=FileSystemReader(tmp_path / "a"))
    assert target["w"].tolist() == [1, 1, 1]


def test_a_directory_that_was_made_for_a_checkpoint_becomes_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    dcp.save(state(), tmp_path / "empty")
    tierkeep_torch.verify(tmp_path / "empty")
    assert not (tmp_path / "empty" / "default").exists()


def test_beside_other_files_a_checkpoint_goes_below_the_path_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for value in (1, 2):
        dcp.save(state(value), tmp_path)
        found = blank()
        dcp.load(found, tmp_path)
        assert same(found, state(value))
        assert same(tierkeep_torch.load(tmp_path), state(value))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["default", "notes"]
    assert (tmp_path / "notes").read_text() == "mine"
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        state_dict_saver.save(state(3), storage_writer=StorageWriter(tmp_path, overwrite=False))


def test_a_save_beside_other_files_that_fails_leaves_the_directory_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").write_text("mine")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tierkeep_torch.dcp.publish", fails)
    with pytest.raises(OSError, match="what stood there is untouched"):
        dcp.save(state(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_checkpoint_of_dcps_own_and_the_steps_of_a_checkpointer_are_not_written_over(tmp_path: Path) -> None:
    state_dict_saver.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "stock"))
    with pytest.raises(CheckpointExistsError, match="DCP's own checkpoint"):
        dcp.save({"w": torch.zeros(3)}, tmp_path / "stock")
    target = {"w": torch.zeros(3)}
    dcp.load(target, tmp_path / "stock")
    assert target["w"].tolist() == [1, 1, 1]
    with tierkeep_torch.Checkpointer(tmp_path / "run", asynchronous=False) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)})
        with pytest.raises(CheckpointExistsError, match="steps of a checkpointer"):
            dcp.save({"w": torch.zeros(3)}, tmp_path / "run")
        assert checkpointer.restore()["w"].tolist() == [1, 1, 1]


def test_a_save_and_a_load_have_ids_that_planners_can_ask_for(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "a"), StorageReader(tmp_path / "a")
    state_dict_saver.save({"w": torch.ones(3)}, storage_writer=writer)
    meta = writer.storage_meta()
    assert meta is not None
    assert (meta.save_id, str(meta.checkpoint_id)) == (writer.save_id, str(tmp_path / "a"))
    found = reader.read_metadata().storage_meta
    assert found is not None
    assert (found.save_id, found.load_id) == (writer.save_id, reader.load_id)
    assert reader.read_metadata().version == CURRENT_DCP_VERSION
