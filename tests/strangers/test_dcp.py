"""Checkpoints of torch.distributed.checkpoint, read without its pickle's code and without torch in the core."""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import functools
import io
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import bits, flat, mesh, on, shape
from tests.strangers.two_ranks import whole
from tests.torch.compare import assert_same, from_bytes
from tierkeep.checkpointer import Engine
from tierkeep.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidStateError,
    MismatchError,
    TierkeepError,
    UnsupportedFormatError,
)
from tierkeep.format import dtypes
from tierkeep.leaf import Box
from tierkeep.memory.buffers import Buffers
from tierkeep.options import PAGE, RestoreOptions, SaveOptions
from tierkeep.restore.foreign.pickles import PLAIN, NotRead, read_pickle
from tierkeep.restore.foreign.torch_zip import TORCH, TorchZip
from tierkeep.restore.locate import open_source
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tierkeep.adapter import Sink

ADAPTERS = [pytest.param(tierkeep_jax, id="jax"), pytest.param(tierkeep_torch, id="torch")]
WRITERS: dict[str, dict[str, Any]] = {
    "one thread": {},
    "two threads": {"thread_count": 2},
    "a file for each": {"single_file_per_rank": False},
}
SMALL = RestoreOptions(lanes=1, lane_nbytes=8 * PAGE, direct=False)
ENGINE = Engine(NumpyAdapter(), SaveOptions(lanes=1, lane_nbytes=8 * PAGE, block_nbytes=PAGE))
DEADLINE_S = 120


def save(path: Path, state: dict[str, Any], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs without a process group is what is wanted
        save_distributed(state, storage_writer=FileSystemWriter(path, **options), no_dist=True)
    return path


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(4, dtype=torch.bfloat16)},
        "opt": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "list": [torch.arange(3), [torch.zeros(2, 2), 5], {"x": torch.ones(1)}],
        "transposed": torch.arange(20.0).reshape(4, 5).t(),
        "part": torch.arange(20).reshape(4, 5)[1:3, ::2],
        "scalar": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "step": 12,
        "name": "a run",
        "nothing": None,
        "mixed": (1, torch.arange(4), "x"),
    }


# What comes back


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_and_plain_values_come_back(adapter: Any, writer: str, tmp_path: Path) -> None:
    found = adapter.load(save(tmp_path / "c", state(), **WRITERS[writer]))
    assert flat(found) == flat(state())
    assert type(found["list"]) is list
    assert type(found["list"][1]) is list
    assert found["opt"]["groups"][0]["betas"] == (0.9, 0.99)
    assert found["nothing"] is None
    assert list(found) == list(state())


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        # Of the others torch itself saves no tensors.
        if name.startswith(("q", "bits")) or (
            name.lstrip("u").startswith("int") and dtype.itemsize == 1 and "8" not in name
        ):
            continue
        data = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, 12 * dtype.itemsize, np.uint8)
        saved[name] = {
            "dense": from_bytes(data.tobytes(), dtype, (3, 4)), "turned": from_bytes(data.tobytes(), dtype, (3, 4)).t()
        }  # fmt: skip
    assert len(saved) > 20
    path = save(tmp_path / "c", saved)
    assert_same(tierkeep_torch.load(path), {name: saved[name] for name in saved})
    into = copy.deepcopy({name: {k: torch.empty_like(t) for k, t in part.items()} for name, part in saved.items()})
    tierkeep_torch.load(path, into)
    assert_same(into, saved)
    known = [name for name in saved if dtypes.numpy_dtype(name) is not None]
    assert {"bfloat16", "float8_e4m3fn", "bool", "complex64"} <= set(known)
    assert flat(tierkeep_jax.load(path, keys=known)) == flat({name: saved[name] for name in known})


def test_plain_values_of_many_types_come_back_as_they_were(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "numbers": [1, -1, 2**40, 2**70, 2.5, float("inf"), True, 1j],
        "text": ["", "ä", "x" * 300],
        "bytes": (b"", b"\xff", bytearray(b"x")),
        "sets": ({1, "a"}, frozenset({2})),
        "ordered": (collections.OrderedDict(b=1, a=2), collections.defaultdict(set), collections.Counter("aab")),
        "deque": (collections.deque([1, 2], 3),),
        "keys": ({0: 1, "a": {(1, 2): None}, None: 2, 1.5: 3},),
        "dates": (datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC)),
        "numpy": (np.arange(6.0).reshape(2, 3).T, np.float32(2), np.array(True), np.random.default_rng(1).bytes(3)),
        "torch": (torch.float8_e5m2, torch.device("cuda", 1), torch.strided, torch.Size([2, 3])),
        "tensors": (torch.arange(3).to(torch.uint16), [torch.ones(2).expand(3, 2)], torch.ones(3, dtype=torch.cfloat).conj()),
        "parameter": (torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    }  # fmt: skip
    path = save(tmp_path / "c", saved)
    assert_same(tierkeep_torch.load(path), saved)
    assert tierkeep_torch.verify(path).leaves > 20


def test_a_planner_that_keeps_no_paths_gives_flat_keys(tmp_path: Path) -> None:
    saved = {"a.b": torch.ones(2), "deep": {"c": torch.arange(3), 1: [4]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save_distributed(saved, checkpoint_id=tmp_path / "c", planner=planner, no_dist=True)
    assert_same(tierkeep_torch.load(tmp_path / "c"), saved)


def test_conjugates_and_negatives_are_what_they_stand_for(tmp_path: Path) -> None:
    number = torch.complex(*torch.arange(-15.0, 15.0, dtype=torch.float64).reshape(2, 5, 3))
    saved = {str(t.dtype): {"conj": t.conj(), "neg": t.conj().imag} for t in (number, number.to(torch.complex64))}
    path = save(tmp_path / "c", saved)
    assert flat(tierkeep_torch.load(path)) == flat(saved)
    assert flat(tierkeep_torch.load(path, options=SMALL)) == flat(saved)


# Into targets


def training(optimizer: Callable[..., torch.optim.Optimizer], *, steps: int) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    made: dict[str, Any] = {"model": model, "opt": optimizer(model.parameters())}
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        made["opt"].step()
    return made


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd without state": functools.partial(torch.optim.SGD, lr=0.1),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["into a fresh one", "into one that has run"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_modules_and_optimizers_are_filled(name: str, steps: int, tmp_path: Path) -> None:
    saved = training(OPTIMIZERS[name], steps=3)
    states = {key: value.state_dict() for key, value in saved.items()}
    path = save(tmp_path / "c", states)
    into = training(OPTIMIZERS[name], steps=steps)
    tierkeep_torch.load(path, into)
    assert_same({key: value.state_dict() for key, value in into.items()}, states)
    for made in (saved, into):  # and goes on alike
        made["opt"].zero_grad()
        made["model"](torch.arange(15.0).reshape(5, 3)).sum().backward()
        made["opt"].step()
    assert flat(into["model"].state_dict()) == flat(saved["model"].state_dict())


def test_a_state_by_names_of_parameters_is_filled_in_place(tmp_path: Path) -> None:
    saved, into = training(torch.optim.AdamW, steps=2), training(torch.optim.AdamW, steps=1)
    states: list[dict[str, Any]] = []
    for made in (saved, into):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, optimizer = get_state_dict(made["model"], made["opt"])
        states.append({"model": model, "optim": optimizer})
    path = save(tmp_path / "c", states[0])
    tierkeep_torch.load(path, states[1])
    assert flat(states[1]) == flat(states[0])
    assert flat(into["model"].state_dict()) == flat(saved["model"].state_dict())


def test_an_empty_container_of_the_target_is_no_difference_because_torch_keeps_none(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "empty": {}, "lists": [{}, {}], "deep": {"er": {}}}
    path = save(tmp_path / "c", saved)
    into = {**saved, "w": torch.zeros(2)}
    tierkeep_torch.load(path, into)
    assert_same(into, saved)
    with pytest.raises(MismatchError) as caught:
        tierkeep_torch.load(path, {**into, "empty": {"x": torch.ones(1)}})
    assert caught.value.missing == ("empty.x",)


def test_jax_restores_onto_eight_devices(tmp_path: Path) -> None:
    tensor = torch.arange(16 * 24.0).reshape(24, 16).t()
    path = save(tmp_path / "c", {"w": tensor, "n": 3, "l": [torch.ones(4)]})
    sharding = on(mesh(4, 2), "x", "y")
    target = {"w": shape((16, 24), jnp.float32, sharding=sharding), "n": 0, "l": [jnp.zeros(4)]}
    found = tierkeep_jax.load(path, target)
    assert found["w"].sharding == sharding
    assert flat(found) == flat({"w": tensor, "n": 3, "l": [torch.ones(4)]})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_part_of_it_reads_nothing_else(adapter: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "c", state(), single_file_per_rank=False)
    assert flat(adapter.load(path, keys=["model.w", "step"])) == flat(
        {"model": {"w": state()["model"]["w"]}, "step": 12}
    )
    plan = adapter.load(path, keys=["model.w"], dry_run=True)
    (read,) = plan.reads
    assert read[0].startswith(str(path))
    for file in path.iterdir():  # the only file that is needed is the only one that is touched
        if file.suffix == ".distcp" and str(file) != read[0] and file.stat().st_size > 1400:
            file.write_bytes(bytes(file.stat().st_size))
    assert flat(adapter.load(path, keys=["model.w"])) == flat({"model": {"w": state()["model"]["w"]}})


def test_another_dtype_or_shape_is_an_error_that_lists_both_and_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(3), "b": torch.ones(2)})
    into = {"a": torch.zeros(3, dtype=torch.float16), "b": torch.zeros(4)}
    with pytest.raises(MismatchError) as caught:
        tierkeep_torch.load(path, into)
    assert (len(caught.value.dtype), len(caught.value.shape)) == (1, 1)
    assert not into["a"].any()
    tierkeep_torch.load(path, into, dtype="cast", shape="keep")
    assert into["a"].tolist() == [1, 1, 1]


# Pieces


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.strangers.two_ranks", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(root)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        output = [process.communicate(timeout=DEADLINE_S)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output)
    return root


@pytest.mark.multiprocess
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_two_processes_saved_is_read_by_one(adapter: Any, ranks: Path) -> None:
    assert flat(adapter.load(ranks / "together")) == flat(whole())
    target = {
        "model": {"rows": shape((8, 6), np.float32, on(mesh(4, 2), "x", "y")), "uneven": jnp.zeros((3, 5), "bfloat16")}
    }
    if adapter is tierkeep_torch:
        target = {"model": {name: torch.zeros_like(whole()["model"][name]) for name in ("rows", "uneven")}}
    found = adapter.load(ranks / "together", target, unexpected="ignore")
    assert flat(found) == flat({"model": {name: whole()["model"][name] for name in ("rows", "uneven")}})


@pytest.mark.multiprocess
def test_only_the_pieces_that_a_box_meets_are_read_and_each_once(ranks: Path) -> None:
    with open_source(LocalDisk(), ranks / "together", direct=False, holds="") as source:
        number = next(n for n, leaf in enumerate(source.contents.leaves) if leaf.name == "model.rows")
        rows = [Box((first, 0), (2, 6)) for first in range(0, 8, 2)]
        assert [len(source.reads([(number, row)], 1 << 20)) for row in rows] == [1, 1, 1, 1]
        assert len(source.reads([(number, row) for row in rows], 1 << 20)) == 2
        assert len(source.reads([(number, Box((3, 1), (2, 2)))], 1 << 20)) == 2


@pytest.mark.multiprocess
def test_metadata_of_every_rank_are_refused_and_the_error_says_why(ranks: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match=r"each of 2 ranks.*use_collectives=False"):
        tierkeep_torch.load(ranks / "apart")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_metadata_of_the_only_rank_are_those_of_the_whole(adapter: Any, tmp_path: Path) -> None:
    save(tmp_path / "c", state()).joinpath(".metadata").rename(tmp_path / "c" / "__0.metadata")
    assert flat(adapter.load(tmp_path / "c")) == flat(state())


def sink(array: np.ndarray[Any, Any]) -> Sink:
    def put(part: Box, data: np.ndarray[Any, Any]) -> None:
        assert data.shape == part.shape
        array[part.slices()] += data + 1  # each element once: a second time would show

    return put


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Larger than the smaller of the lanes they are read through, in every order, with checksums and without."""
    root = tmp_path_factory.mktemp("arrays")
    data = torch.arange(30 * 20 * 16, dtype=torch.int32).reshape(30, 20, 16)
    saved = {"a": data, "b": data.permute(2, 0, 1), "c": data.transpose(0, 1), "d": data[0], "e": data[:, 0, 0]}
    save(root / "checked", saved)
    with without_checksums():
        save(root / "unchecked", saved)
    save(
        root / "safetensors",
        {k: v.contiguous() for k, v in saved.items()},
        serialization_format=SerializationFormat.SAFETENSORS,
    )
    torch.save(saved, root / "saved.pt")
    return root


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@settings(
    max_examples=max(1, settings().max_examples // 4),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
@given(data=st.data())
def test_any_box_of_an_array_is_read_whole_and_once_through_any_lane(arrays: Path, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from("abcde"))
    expected = torch.load(arrays / "saved.pt")[key].numpy().view("u4")
    start = tuple(data.draw(st.integers(0, n - 1)) for n in expected.shape)
    box = Box(start, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, expected.shape, strict=True)))
    for name in ("checked", "unchecked", "safetensors"):
        for lane_nbytes in (4 * PAGE, 1 << 20):
            out, buffers = np.zeros(box.shape, "u4"), Buffers(2, lane_nbytes)
            with open_source(LocalDisk(), arrays / name, direct=False, holds="") as source:
                number = next(n for n, leaf in enumerate(source.contents.leaves) if leaf.name == key)
                source.read([(number, box)], [sink(out)], buffers, 2, "")
            buffers.close()
            assert np.array_equal(out - 1, expected[box.slices()])


def test_two_boxes_of_one_piece_are_both_filled(arrays: Path) -> None:
    expected = torch.load(arrays / "saved.pt")["b"].numpy().view("u4")
    boxes = [Box((0, 0, 0), (9, 30, 20)), Box((4, 3, 2), (12, 20, 10))]
    for lane_nbytes in (4 * PAGE, 1 << 20):
        found, buffers = [np.zeros(box.shape, "u4") for box in boxes], Buffers(2, lane_nbytes)
        with open_source(LocalDisk(), arrays / "checked", direct=False, holds="") as source:
            source.read([(1, box) for box in boxes], list(map(sink, found)), buffers, 2, "")
        buffers.close()
        for box, out in zip(boxes, found, strict=True):
            assert np.array_equal(out - 1, expected[box.slices()])


# Safetensors


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_pieces_in_safetensors_are_read(adapter: Any, threads: int, tmp_path: Path) -> None:
    saved = {"w": torch.arange(12.0).reshape(3, 4), "deep": [{"b": torch.ones(3, dtype=torch.bfloat16)}], "n": 3}
    saved |= {"scalar": torch.tensor(2), "none": torch.zeros(0, 2), "f8": torch.ones(2).to(torch.float8_e4m3fn)}
    path = save(tmp_path / "c", saved, thread_count=threads, serialization_format=SerializationFormat.SAFETENSORS)
    assert flat(adapter.load(path)) == flat(saved)
    assert flat(adapter.load(path, keys=["deep"])) == flat({"deep": saved["deep"]})


def test_damage_to_a_safetensors_header_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    saved = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.int16)}
    path = save(tmp_path / "c", saved, serialization_format=SerializationFormat.SAFETENSORS)
    file = path / "__0_0.distcp"
    whole_file = file.read_bytes()
    header = 8 + int.from_bytes(whole_file[:8], "little")
    raised = 0
    for at in range(header):
        raised += looked_at(path, flip(file, whole_file, at), saved) is None
    assert raised > header // 2
    for kept in (0, 7, header, len(whole_file) - 1):
        file.write_bytes(whole_file[:kept])
        with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
            tierkeep_torch.load(path)


# Damage


def like(value: Any) -> Any:
    """A target for a state: zeros in the place of tensors."""
    if isinstance(value, dict):
        return {key: like(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(like, value))
    return np.zeros(value.shape, str(value.dtype).removeprefix("torch.")) if isinstance(value, torch.Tensor) else value


def flip(file: Path, content: bytes, at: int) -> Path:
    """Changes one bit of a byte, each in its turn."""
    file.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
    return file


def looked_at(path: Path, file: Path, saved: dict[str, Any]) -> Any:
    """What a damaged checkpoint gives into a target: None for an error of ours. Anything but what was saved fails."""
    try:
        found = ENGINE.restore(path, like(saved), options=SMALL)
    except TierkeepError:
        return None
    assert flat(found) == flat(saved), file
    return found


SMALL_STATE = {
    "m": {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(2, 3), "b": torch.arange(4, dtype=torch.int16)},
    "l": [torch.tensor(3.5), 12],
    "s": "text",
    "e": torch.zeros(0, 3),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = save(tmp_path / "c", SMALL_STATE)
    assert looked_at(path, path, SMALL_STATE) is not None
    return path


def test_no_flip_in_the_metadata_gives_other_data(small: Path) -> None:
    file = small / ".metadata"
    content = file.read_bytes()
    raised = sum(looked_at(small, flip(file, content, at), SMALL_STATE) is None for at in range(len(content)))
    assert raised > len(content) // 2


def test_no_flip_in_the_file_of_pieces_gives_other_data(small: Path) -> None:
    file = small / "__0_0.distcp"
    content = file.read_bytes()
    raised = tried = 0
    for place in (place_of(metadata_of(small), key) for key in ("m.w", "s")):
        for at in range(place.offset, place.offset + place.length, 2):
            if content[at - 1 : at + 2] != b"ZZZ":  # padding
                raised += looked_at(small, flip(file, content, at), SMALL_STATE) is None
                tried += 1
    assert raised > tried // 4
    for tensor in (SMALL_STATE["m"]["w"], SMALL_STATE["m"]["b"]):  # type: ignore[index]
        data = tensor.numpy().tobytes()
        assert content.count(data) == 1
        for at in range(content.index(data), content.index(data) + len(data)):
            assert looked_at(small, flip(file, content, at), SMALL_STATE) is None


def test_a_flip_in_a_piece_larger_than_a_lane_is_found_before_any_of_it_is_handed_out(tmp_path: Path) -> None:
    saved = {"w": torch.arange(40_000, dtype=torch.int32), "v": torch.ones(3)}
    file = save(tmp_path / "c", saved) / "__0_0.distcp"
    content = file.read_bytes()
    flip(file, content, content.index(saved["w"].numpy().tobytes()) + 150_001)
    into = {"w": torch.zeros(40_000, dtype=torch.int32), "v": torch.zeros(3)}
    for options in (SMALL, RestoreOptions()):
        with pytest.raises(CorruptCheckpointError, match=r"'w'.*checksum") as caught:
            tierkeep_torch.load(tmp_path / "c", into, options=options)
        assert len(caught.value.findings) == 1
        assert not into["w"].any()
        with pytest.raises(CorruptCheckpointError, match="'w'"):
            tierkeep_torch.verify(tmp_path / "c")
    assert flat(tierkeep_torch.load(tmp_path / "c", keys=["v"])) == flat({"v": saved["v"]})


def test_without_checksums_whole_files_are_read_and_cut_ones_are_errors(tmp_path: Path) -> None:
    with without_checksums():
        path = save(tmp_path / "c", SMALL_STATE)
    assert looked_at(path, path, SMALL_STATE) is not None
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    for tensor in (SMALL_STATE["m"]["w"], SMALL_STATE["m"]["b"]):  # type: ignore[index]
        data = tensor.numpy().tobytes()
        flip(file, content, content.index(data) - 1)  # padding
        assert looked_at(path, path, SMALL_STATE) is not None
        flip(file, content, content.index(data) + len(data))  # what stands behind it
        assert looked_at(path, path, SMALL_STATE) is None


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_cut_short_is_an_error(adapter: Any, name: str, small: Path) -> None:
    content = (small / name).read_bytes()
    for kept in (*range(0, len(content), 97), len(content) - 1):
        (small / name).write_bytes(content[:kept])
        with pytest.raises(CorruptCheckpointError, match=r"metadata|distcp"):
            adapter.load(small)


def test_a_missing_file_is_an_error_that_names_it_and_what_it_held(tmp_path: Path) -> None:
    path = save(tmp_path / "c", SMALL_STATE, thread_count=2)
    (path / "__0_1.distcp").rename(path / "aside")
    with pytest.raises(CorruptCheckpointError, match=r"missing.*__0_1\.distcp.*leaves") as caught:
        tierkeep_torch.load(path)
    assert len(caught.value.findings) == 1
    (path / "__0_1.distcp").symlink_to(path.parent / "c" / "aside")
    assert flat(tierkeep_torch.load(path)) == flat(SMALL_STATE)
    (path / "aside").rename(path.parent / "outside")
    (path / "__0_1.distcp").unlink()
    (path / "__0_1.distcp").symlink_to(path.parent / "outside")
    with pytest.raises(CorruptCheckpointError, match="out of the checkpoint"):
        tierkeep_torch.load(path)
    (path / "__0_1.distcp").unlink()
    (path / "__0_1.distcp").mkdir()
    with pytest.raises(CorruptCheckpointError, match="directory"):
        tierkeep_torch.load(path)


@pytest.mark.parametrize(
    "other", [{"w": torch.ones(4, 3)}, {"w": torch.ones(3, 4, dtype=torch.int32)}, {"w": torch.ones(12)}]
)
def test_the_file_of_another_checkpoint_is_an_error_that_names_the_leaf(other: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(3, 4)})
    foreign = save(tmp_path / "other", other)
    (path / "__0_0.distcp").write_bytes((foreign / "__0_0.distcp").read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"'w'.*float32 \(3, 4\) should be"):
        tierkeep_torch.load(path)


def edit(path: Path, change: Callable[[Any], Any], protocol: int | None = None) -> None:
    """Edits the metadata as torch would have written it."""
    raw = metadata_of(path)
    changed = change(raw)
    (path / ".metadata").write_bytes(pickle.dumps(raw if changed is None else changed, protocol))


def metadata_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def tensor_of(raw: Any, key: str = "m.w") -> Any:
    return raw.state_dict_metadata[key]


def place_of(raw: Any, key: str = "m.w") -> Any:
    return next(place for index, place in raw.storage_data.items() if index.fqn == key)


def replaced(raw: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(place_of(raw), name, value)


def chunks(*boxes: tuple[Sequence[int], Sequence[int]]) -> list[Any]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


def parted(raw: Any, *boxes: tuple[Sequence[int], Sequence[int]]) -> None:
    tensor_of(raw).chunks = chunks(*boxes)


def unplaced(raw: Any, key: str) -> None:
    del raw.storage_data[next(index for index in raw.storage_data if index.fqn == key)]


def moved(raw: Any, key: str) -> None:
    replaced(raw, offset=place_of(raw, key).offset, length=place_of(raw, key).length)


def added(raw: Any, path: tuple[str | int, ...]) -> None:
    """One more key, of the tensor that another has."""
    key = ".".join(map(str, path))
    raw.state_dict_metadata[key] = tensor_of(raw, "e")
    raw.planner_data[key] = path


def resized(raw: Any, *lengths: int) -> None:
    tensor_of(raw).size = torch.Size(lengths)
    tensor_of(raw).chunks = chunks(([0] * len(lengths), lengths))


METADATA: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no chunks": ("'m.w': its parts reach to 0 of 2", lambda raw: tensor_of(raw).chunks.clear()),
    "a gap": ("'m.w': its parts reach to 1 of 2", lambda raw: parted(raw, ([0, 0], [1, 3]))),
    "a gap inside": ("'m.w': its parts hold 5 of 6", lambda raw: parted(raw, ([0, 0], [1, 3]), ([1, 1], [1, 2]))),
    "an overlap": ("'m.w': parts overlap", lambda raw: parted(raw, ([0, 0], [2, 2]), ([0, 1], [1, 2]))),
    "beyond the whole": ("'m.w': its parts reach to 4 of 3", lambda raw: parted(raw, ([0, 0], [2, 4]))),
    "other axes": ("'m.w': a part with other axes", lambda raw: parted(raw, ([0], [6]))),
    "a larger whole": ("'m.w': its parts reach to 2 of 3", lambda raw: setattr(tensor_of(raw), "size", torch.Size([3, 3]))),
    "another shape": (r"'m.w'.*float32 \(2, 3\) where float32 \(3, 2\) should be", lambda raw: resized(raw, 3, 2)),
    "another shape of nothing": (
        "'e': its parts reach to 3 of 4", lambda raw: setattr(tensor_of(raw, "e"), "size", torch.Size([0, 4]))
    ),
    "2^60 elements": ("'m.w': .* bytes hold its part", lambda raw: resized(raw, 2**30, 2**30)),
    "2^40 elements": ("'m.w': .* bytes hold its part", lambda raw: resized(raw, 2**20, 2**20)),
    "2^124 elements": ("'m.w': .* bytes hold its part", lambda raw: resized(raw, 2**62, 2**62)),
    "another dtype": (
        "'m.w'.*float32.*where int32", lambda raw: setattr(tensor_of(raw).properties, "dtype", torch.int32)
    ),
    "no place": ("'m.w': no file holds its part", lambda raw: unplaced(raw, "m.w")),
    "no place of a value": ("'s': no file holds it", lambda raw: unplaced(raw, "s")),
    "the place of another": ("'m.[wb]'.*nor a safetensors blob", lambda raw: moved(raw, "m.b")),
    "the place of a value": ("overlap in __0_0", lambda raw: moved(raw, "s")),
    "the place of another that is like it": ("'m.[wv]'.*nor a safetensors blob", lambda raw: moved(raw, "m.v")),
    "a place within another": (
        "overlap in __0_0", lambda raw: replaced(raw, offset=place_of(raw, "m.b").offset + 8, length=1000)
    ),
    "a place beyond the file": (r"'m.w': __0_0\.distcp ends", lambda raw: replaced(raw, offset=2**40)),
    "a place one off": (
        "'m.w'.*__0_0", lambda raw: replaced(raw, offset=place_of(raw).offset + 1, length=place_of(raw).length - 1)
    ),
    "a place too short": ("'m.w'.*__0_0", lambda raw: replaced(raw, length=place_of(raw).length - 1)),
    "a place of nothing": ("'m.w': 0 bytes hold", lambda raw: replaced(raw, length=0)),
    "a negative place": ("'m.w': a place that is none", lambda raw: replaced(raw, offset=-1)),
    "a place of text": ("'m.w': a place that is none", lambda raw: replaced(raw, offset="x")),
    "a file outside": ("'m.w': a file .* outside", lambda raw: replaced(raw, relative_path="../c/__0_0.distcp")),
    "an absolute file": ("'m.w': a file .* outside", lambda raw: replaced(raw, relative_path="/etc/passwd")),
    "the directory": ("'m.w': a file .* outside", lambda raw: replaced(raw, relative_path=".")),
    "a name with a zero": ("'m.w': a file .* outside", lambda raw: replaced(raw, relative_path="a\0b")),
    "no file": ("missing.*gone.distcp, with leaf 'm.w'", lambda raw: replaced(raw, relative_path="gone.distcp")),
    "the path of another": (
        "'m.w' has the path of another", lambda raw: raw.planner_data.update({"m.w": ("m", "b")})
    ),
    "a path that is none": ("'m.w' has a path that is none", lambda raw: raw.planner_data.update({"m.w": "m.w"})),
    "an empty path": ("'m.w' has a path that is none", lambda raw: raw.planner_data.update({"m.w": ()})),
    "a path below a leaf": ("'s' is above another", lambda raw: added(raw, ("s", "t"))),
    "a place in a list far away": ("a list with a place", lambda raw: added(raw, ("l", 2**60))),
    "a list that is a dict": ("'l' is both a list and a dict", lambda raw: added(raw, ("l", "x"))),
    "no tensors": ("no state_dict_metadata", lambda raw: setattr(raw, "state_dict_metadata", None)),
    "no places": ("no state_dict_metadata and storage_data", lambda raw: setattr(raw, "storage_data", None)),
    "tensors that are numbers": ("'m.w': something else", lambda raw: raw.state_dict_metadata.update({"m.w": 5})),
    "places that are numbers": (
        "where a _StorageInfo should be", lambda raw: raw.storage_data.update(dict.fromkeys(raw.storage_data, 5))
    ),
    "a number": ("where a Metadata should be", lambda raw: 5),
    "a list": ("where a Metadata should be", lambda raw: [raw]),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_contradict_themselves_or_the_files_are_an_error(name: str, small: Path) -> None:
    match, change = METADATA[name]
    edit(small, change)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=match):
            tierkeep_torch.load(small)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_metadata_of_any_later_protocol_are_read(small: Path) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        edit(small, lambda raw: None, protocol)
        assert flat(tierkeep_torch.load(small)) == flat(SMALL_STATE)


def test_metadata_of_older_torch_are_read(small: Path) -> None:
    """Until 2.2 some classes were in another module, and `_StorageInfo` had no transforms."""
    edit(small, lambda raw: delattr(raw, "storage_meta"), 2)
    content = (small / ".metadata").read_bytes()
    module = b"ctorch.distributed.checkpoint.metadata\n"
    for name, before in ((b"TensorProperties", b"TensorProperties"), (b"_MEM_FORMAT_ENCODING", b"MEM_FORMAT_ENCODING")):
        assert module + name in content
        content = content.replace(module + name, b"ctorch.distributed._shard.sharded_tensor.metadata\n" + before)
    (small / ".metadata").write_bytes(content)
    assert flat(tierkeep_torch.load(small)) == flat(SMALL_STATE)


def test_replicas_that_stand_twice_are_one(small: Path) -> None:
    edit(small, lambda raw: tensor_of(raw).chunks.extend(tensor_of(raw).chunks))
    assert flat(tierkeep_torch.load(small)) == flat(SMALL_STATE)


def test_empty_pieces_need_no_place(small: Path) -> None:
    edit(small, lambda raw: tensor_of(raw).chunks.append(*chunks(([2, 0], [0, 3]))))
    assert flat(tierkeep_torch.load(small)) == flat(SMALL_STATE)


# One value that cannot be read


class Odd:
    """What only this module knows."""


def test_an_object_that_is_no_plain_value_is_an_error_only_if_it_is_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "odd": [Odd()], "n": 1})
    calls: list[Callable[[], Any]] = [
        lambda: tierkeep_torch.load(path),
        lambda: tierkeep_torch.load(path, {"w": torch.zeros(2), "odd": None, "n": 0}),
        lambda: tierkeep_torch.load(path, pickle=True),
        lambda: tierkeep_jax.load(path, keys=["odd"]),
    ]
    for call in calls:
        with pytest.raises(UnsupportedFormatError, match=r"'odd'.*test_dcp\.Odd"):
            call()
    assert flat(tierkeep_torch.load(path, keys=["w", "n"])) == flat({"w": torch.ones(2), "n": 1})
    into = {"w": torch.zeros(2), "n": 0}
    tierkeep_torch.load(path, into, unexpected="ignore")
    assert flat(into) == flat({"w": torch.ones(2), "n": 1})
    with pytest.raises(MismatchError) as caught:
        tierkeep_torch.load(path, into)
    assert caught.value.unexpected == ("odd",)
    assert tierkeep_torch.verify(path).nbytes == 16


@pytest.mark.parametrize(
    "value",
    [
        list,
        collections.OrderedDict,
        torch.ones(2).untyped_storage(),
        {1j: 1},
        {frozenset({1}): 1},
        {torch.float32: 1},
        {0: 1, "0": 2},
        np.array([None]),
        np.array(["x"]),
        np.array([1], ">i4"),
        len,
        range(3),
        NotRead,
    ],
    ids=repr,
)
def test_what_has_no_plain_form_is_refused_and_the_key_named(value: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "odd": (value,)})
    with pytest.raises(UnsupportedFormatError, match=r"'odd' of more than tensors and plain values \("):
        tierkeep_torch.load(path)
    assert flat(tierkeep_torch.load(path, keys=["w"])) == flat({"w": torch.ones(2)})


def test_a_value_that_is_damaged_is_an_error_only_if_it_is_asked_for_and_verify_tells_it(small: Path) -> None:
    file = small / "__0_0.distcp"
    content = file.read_bytes()
    flip(file, content, content.index(b"text") + 1)
    with pytest.raises(CorruptCheckpointError, match=r"'s'.*checksum"):
        tierkeep_torch.load(small)
    with pytest.raises(CorruptCheckpointError, match=r"'s'.*checksum"):
        tierkeep_torch.verify(small)
    assert flat(tierkeep_torch.load(small, keys=["m"])) == flat({"m": SMALL_STATE["m"]})


def test_a_date_that_no_calendar_has_is_damage(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"when": datetime.datetime(2024, 1, 2, 3, 4, 5)})
    archived(
        path,
        lambda entries: entries.update(
            {key: data.replace(b"\2\3\4\5", b"\2\x7e\4\5") for key, data in entries.items()}
        ),
    )
    assert b"\2\x7e\4\5" in (path / "__0_0.distcp").read_bytes()
    with pytest.raises(CorruptCheckpointError, match="'when'"):
        tierkeep_torch.load(path)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_a_dtype_or_layout_that_cannot_be_kept_is_an_error_that_names_the_leaf(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    path = save(tmp_path / "c", {"w": torch.ones(2), "q": (quantized,), "sparse": (torch.eye(2).to_sparse(),)})
    for key in ("q", "sparse"):
        with pytest.raises(UnsupportedFormatError, match=rf"'{key}'.*_rebuild"):
            tierkeep_torch.load(path, keys=[key])
    assert flat(tierkeep_torch.load(path, keys=["w"])) == flat({"w": torch.ones(2)})
    edit(path, lambda raw: setattr(tensor_of(raw, "w").properties, "dtype", torch.qint8))
    with pytest.raises(UnsupportedFormatError, match=r"'w'.*qint8"):
        tierkeep_torch.load(path, {"w": torch.zeros(2)}, unexpected="ignore")


def test_compressed_pieces_are_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2), "n": 1}, _extensions=[ZStandard()])
    for key in ("w", "n"):
        with pytest.raises(UnsupportedFormatError, match=rf"'{key}'.*stream\.zstd"):
            tierkeep_torch.load(path, keys=[key])


def archived(path: Path, change: Callable[[dict[str, bytes]], object], method: int = zipfile.ZIP_STORED) -> None:
    """Writes the only archive of a checkpoint anew, with other entries, by another program than torch."""
    file = path / "__0_0.distcp"
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    change(entries)
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)

    def place(raw: Any) -> None:
        (found,) = raw.storage_data.values()
        found.offset, found.length = 0, file.stat().st_size

    edit(path, place)


def test_archives_of_other_programs_are_read_or_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.arange(6)})
    archived(path, lambda entries: None)
    assert flat(tierkeep_torch.load(path)) == flat({"w": torch.arange(6)})
    archived(path, lambda entries: entries.pop("archive/byteorder"))  # older versions of torch wrote none
    assert flat(tierkeep_torch.load(path)) == flat({"w": torch.arange(6)})
    archived(path, lambda entries: entries.update({"archive/byteorder": b"big"}))
    with pytest.raises(UnsupportedFormatError, match=r"'w'.*byte order b'big'"):
        tierkeep_torch.load(path)
    archived(path, lambda entries: entries.pop("archive/byteorder"), zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedFormatError, match=r"'w'.*compressed"):
        tierkeep_torch.load(path)
    archived(path, lambda entries: entries.pop("archive/data.pkl"))
    with pytest.raises(UnsupportedFormatError, match=r"'w'.*not one of torch\.save"):
        tierkeep_torch.load(path)


BAD_ARCHIVES: dict[str, Callable[[dict[str, bytes]], object]] = {
    "no storage": lambda entries: entries.pop("archive/data/0"),
    "a shorter storage": lambda entries: entries.update({"archive/data/0": bytes(40)}),
    "a longer storage": lambda entries: entries.update({"archive/data/0": bytes(56)}),
    "no pickle": lambda entries: entries.update({"archive/data.pkl": b""}),
    "another object": lambda entries: entries.update({"archive/data.pkl": pickle.dumps([1], 2)}),
    "more than the storage": lambda entries: entries.update(
        {"archive/data.pkl": entries["archive/data.pkl"].replace(b"K\x06\x85", b"K\x07\x85")}
    ),
    "strides beyond the storage": lambda entries: entries.update(
        {"archive/data.pkl": entries["archive/data.pkl"].replace(b"K\x01\x85", b"K\x02\x85")}
    ),
}


@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_an_archive_that_contradicts_itself_is_an_error_that_names_the_leaf(name: str, tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.arange(6)})
    archived(path, lambda entries: None)
    before = (path / "__0_0.distcp").read_bytes()
    archived(path, BAD_ARCHIVES[name])
    assert (path / "__0_0.distcp").read_bytes() != before
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        tierkeep_torch.load(path)


# Code


def touched(path: Path) -> Any:
    """An object whose pickle makes a directory at `path` when it is loaded."""

    class Touch:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(path),)

    return Touch()


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_the_metadata_or_a_piece_never_runs(adapter: Any, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    payload = pickle.dumps(touched(mark), protocol)
    pickle.loads(payload)
    assert mark.exists()  # it does what it should
    mark.rmdir()
    path = save(tmp_path / "c", {"w": torch.arange(6)})
    metadata = (path / ".metadata").read_bytes()
    archived(path, lambda entries: entries.update({"archive/data.pkl": payload}))
    refused(adapter, path)
    (path / ".metadata").write_bytes(payload)
    refused(adapter, path)
    (path / ".metadata").write_bytes(metadata)
    edit(path, lambda raw: setattr(raw, "planner_data", {"w": touched(mark)}), protocol)
    refused(adapter, path)
    save(path, {"w": torch.arange(6)}, overwrite=True)
    edit(path, lambda raw: raw.state_dict_metadata.update({touched(mark): 1}), protocol)
    refused(adapter, path)
    path = save(tmp_path / "d", {"w": torch.arange(6), "n": touched(mark)})
    refused(adapter, path)
    assert not mark.exists()


def refused(adapter: Any, path: Path) -> None:
    for options in ({}, {"pickle": True}, {"dry_run": True, "keys": ["n"]}):
        with contextlib.suppress(InvalidStateError), pytest.raises(TierkeepError):
            adapter.load(path, **options)


def zip_of(pickled: bytes) -> TorchZip:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    content = memory.getvalue()
    return TorchZip(lambda begin, end: content[begin:end], len(content))


def op(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


HOSTILE = {
    "a function": op(text("os"), text("system"), b"\x93", text("true"), b"\x85R"),
    "a function of Python 2": b"cposix\nsystem\n(X\x04\x00\x00\x00truetR.",
    "getattr": op(text("builtins"), text("getattr"), b"\x93", text("x"), text("y"), b"\x86R"),
    "eval": op(text("builtins"), text("eval"), b"\x93", text("1"), b"\x85R"),
    "a dotted name": op(text("torch"), text("Size.__class__"), b"\x93"),
    "an attribute of what is allowed": op(text("collections"), text("OrderedDict.fromkeys"), b"\x93", b")R"),
    "torch.load": op(text("torch"), text("load"), b"\x93", text("x"), b"\x85R"),
    "a call of a value": op(text("x"), b")R"),
    "a call of a tuple": op(b")", b")R"),
    "state for a class": op(text("collections"), text("OrderedDict"), b"\x93", b"N", b"}", text("a"), b"Ns\x86b"),
    "state for a dict": op(b"}", b"}", text("a"), b"Nsb"),
    "a name that is no text": op(b"K\x01", text("x"), b"\x93"),
    "an extension": op(b"\x82\x01"),
    "an object by its class and arguments": b"(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "an instance": b"(X\x04\x00\x00\x00trueios\nsystem\n.",
    "out of band": b"\x80\x05\x97.",
    "a persistent id that is none": op(text("x"), b"Q"),
    "a range as a list": op(text("builtins"), text("list"), b"\x93", text("builtins"), text("range"), b"\x93"),
    "a list of many": op(text("builtins"), text("list"), b"\x93", b"J\xff\xff\xff\x7f\x85R"),
    "bytes of many": op(text("builtins"), text("bytes"), b"\x93", b"J\xff\xff\xff\x7f\x85R"),
    "a bytearray of many": op(text("builtins"), text("bytearray"), b"\x93", b"J\xff\xff\xff\x7f\x85R"),
    "a memo of many": op(b"Nr\xff\xff\xff\x7fj\xff\xff\xff\x7e"),
    "a text of many": op(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x00"),
    "a key nested deeply": op(b"}N", b"\x85" * 300_000, b"Ns"),
    "a member nested deeply": op(b"\x8f(N", b"\x85" * 300_000, b"\x90"),
    "a key that is a list": op(b"}]Ns"),
    "nothing": b"",
    "no end": b"\x80\x04N",
    "two values": op(b"NN"),
    "more behind it": op(b"N") + b"N.",
    "an empty stack": op(b"\x85"),
    "a mark too few": op(b"t"),
    "a memo that is not there": op(b"h\x05"),
    "append to a tuple": op(b")Na"),
    "keys of a list": op(b"]NNs"),
    "a key that stands twice": op(b"}(", text("a"), b"N", text("a"), b"Nu"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_an_error_and_costs_no_more_than_its_length(name: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_pickle(HOSTILE[name], TORCH)
    if len(HOSTILE[name]) > 1000:  # to trace what it takes would take longer than all else
        return
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"."):
            read_pickle(HOSTILE[name], PLAIN)
        with pytest.raises(ValueError, match=r"."):
            zip_of(HOSTILE[name]).load()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shared", [True, False], ids=["one object many times", "in itself"])
def test_a_value_that_grows_without_end_is_refused(shared: bool, tmp_path: Path) -> None:
    value: Any = [1.0]
    if shared:
        for _ in range(60):
            value = [value, value]
    else:
        value.append(value)
    path = save(tmp_path / "c", {"w": torch.ones(2), "v": (value,), "n": 3})
    assert (path / "__0_0.distcp").stat().st_size < 10_000
    with pytest.raises(UnsupportedFormatError, match=r"'v'.*(nested|over and over)"):
        tierkeep_torch.load(path)
    assert flat(tierkeep_torch.load(path, keys=["w", "n"])) == flat({"w": torch.ones(2), "n": 3})


def test_a_class_in_the_metadata_that_is_not_torchs_own_is_refused_by_name(small: Path) -> None:
    edit(small, lambda raw: setattr(raw, "extra", Odd()))
    with pytest.raises(UnsupportedFormatError, match=r"test_dcp\.Odd in its \.metadata"):
        tierkeep_torch.load(small)


def test_a_table_names_what_it_does_not_have() -> None:
    with pytest.raises(NotRead, match=r"^os\.system$|^posix\.system$"):
        read_pickle(HOSTILE["a function"], TORCH)


def test_the_core_reads_it_without_torch(small: Path) -> None:
    """In a child process, since this one has loaded everything."""
    code = (
        "import pathlib, sys; from tierkeep.engine import Engine; from tierkeep.options import RestoreOptions;"
        "from tierkeep.testing.numpy_adapter import NumpyAdapter;"
        "found = Engine(NumpyAdapter()).restore(pathlib.Path(sys.argv[1]), options=RestoreOptions());"
        "print(found['m']['w'].tolist(), 'torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "core")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(small)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] False\n"


# Beyond 32 bits


def test_an_archive_of_more_than_four_gigabytes_is_read_and_only_where_it_is_wanted(tmp_path: Path) -> None:
    """Its storage is a hole in a file; no checksum was recorded, so nothing but the wanted bytes is read."""
    rows, row = 5 * 2**20, 1024
    path = save(tmp_path / "c", {"w": torch.zeros(2, row, dtype=torch.uint8)})
    file = path / "__0_0.distcp"
    with zipfile.ZipFile(file) as archive:
        pickled = archive.read("archive/data.pkl")
    pickled = pickled.replace(b"M\x00\x08", b"\x8a\x05" + (rows * row).to_bytes(5, "little"))  # elements of the storage
    pickled = pickled.replace(b"K\x02M\x00\x04\x86", b"J" + struct.pack("<i", rows) + b"M\x00\x04\x86")  # the shape
    names = [b"archive/data.pkl", b"archive/data/0"]
    begins, at = [], 0
    with file.open("wb") as out:
        for name, content in zip(names, (pickled, None), strict=True):
            begins.append(at)
            crc, nbytes = (zlib.crc32(content), len(content)) if content else (0, rows * row)
            out.seek(at)
            out.write(struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, 0, 0, 0, 0, crc, 0, 0, len(name), 0) + name)
            out.write(content or b"first")
            at += 30 + len(name) + nbytes
        out.seek(at - 4)
        out.write(b"last")
        directory = b""
        for name, begin, (crc, nbytes) in zip(
            names, begins, ((zlib.crc32(pickled), len(pickled)), (0, rows * row)), strict=True
        ):
            extra = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, begin)
            directory += struct.pack(
                "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 0, 0, 0, 0, 0, 0, crc, *[2**32 - 1] * 2, len(name), len(extra), 0, 0, 0, 0, 2**32 - 1
            ) + name + extra  # fmt: skip
        out.write(directory)
        end = at + len(directory)
        out.write(struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0, 0, 0, 0, 2, 2, len(directory), at))
        out.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        out.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 2, 2, *[2**32 - 1] * 2, 0))

    def enlarge(raw: Any) -> None:
        tensor_of(raw, "w").size = torch.Size([rows, row])
        tensor_of(raw, "w").chunks = chunks(([0, 0], [rows, row]))
        place_of(raw, "w").length = file.stat().st_size

    edit(path, enlarge)
    boxes = [Box((0, 0), (2, 8)), Box((rows - 1, row - 4), (1, 4))]
    found = [np.zeros(box.shape, np.uint8) for box in boxes]

    def put(out: np.ndarray[Any, Any]) -> Sink:
        return lambda part, data: np.copyto(out[part.slices()], data)

    buffers = Buffers(1, 1 << 20)
    with open_source(LocalDisk(), path, direct=False, holds="") as source:
        source.read([(0, box) for box in boxes], list(map(put, found)), buffers, 1, "")
    buffers.close()
    assert found[0].tobytes() == b"first" + bytes(11)
    assert found[1].tobytes() == b"last"


# What stands beside it


def test_a_directory_without_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(2)})
    (path / ".metadata").rename(path / ".metadata.tmp")  # a save that did not finish
    with pytest.raises(CheckpointNotFoundError, match=r"\.metadata"):
        tierkeep_torch.load(path)


def test_bits_of_the_file_are_those_of_torchs_own_reader(small: Path) -> None:
    into = {"m": {key: torch.zeros_like(tensor) for key, tensor in SMALL_STATE["m"].items()}}  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_distributed(into, checkpoint_id=small, no_dist=True)
    found = tierkeep_torch.load(small, keys=["m"])["m"]
    assert {key: bits(value) for key, value in found.items()} == {key: bits(value) for key, value in into["m"].items()}
