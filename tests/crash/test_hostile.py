"""I9: loading executes no code from the checkpoint; nothing outside of it is read, and nothing is allocated because a
checkpoint says so.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import os
import pickle
import shutil
import sys
import tracemalloc
import zipfile
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from tests.crash.damage import ENGINE, FAST, Saved, memory_directory, mended, replaced, restored, save, small_files
from tierkeep.checkpointer import Checkpointer, Engine
from tierkeep.errors import CheckpointExistsError, CorruptCheckpointError, InvalidStateError, TierkeepError
from tierkeep.format.checksum import crc32c, seal
from tierkeep.options import MIB
from tierkeep.testing import strategies as tk
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HUGE = 2**60


@pytest.fixture
def saved() -> Iterator[Saved]:
    with memory_directory() as directory:
        yield save(directory / "item")


class Touch:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def engines() -> Iterator[Engine]:
    yield ENGINE
    yield Engine(importlib.import_module("tierkeep_torch.adapter").TorchAdapter())
    yield Engine(importlib.import_module("tierkeep_jax.adapter").JaxAdapter())


def look_at(engine: Engine, path: Path) -> int:
    """Every call that reads a checkpoint; how many of them raised an error of ours."""
    refused = 0
    for call in (
        lambda: engine.metadata(path),
        lambda: engine.restore(path, options=FAST, dry_run=True),
        lambda: engine.restore(path, options=FAST),
        lambda: engine.restore(path, {"w": np.zeros(1500, "f4")}, options=FAST),
        lambda: engine.verify(path, options=FAST),
    ):
        try:
            call()
        except TierkeepError:
            refused += 1
    return refused


# Pickles


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_in_the_place_of_any_file_is_never_loaded(saved: Saved, protocol: int) -> None:
    marker = saved.path.parent / "executed"
    payload = pickle.dumps(Touch(marker), protocol=protocol)
    pickle.loads(payload)
    assert marker.exists()  # it does what it should
    marker.rmdir()
    for file in [*small_files(saved), saved.image]:
        for content in (payload, payload + file.read_bytes()[len(payload) :]):
            with replaced(file, content):
                for engine in engines():
                    look_at(engine, saved.path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "x.pt", "x.safetensors", "x.npy", "x", "model.safetensors.index.json"]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_is_a_pickle_is_refused_and_never_loaded(name: str, zipped: bool) -> None:
    with memory_directory() as directory:
        marker, file = directory / "executed", directory / name
        payload = pickle.dumps(Touch(marker), protocol=2)
        if zipped:
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("archive/data.pkl", payload)
                archive.writestr("archive/version", "3\n")
                archive.writestr("archive/byteorder", "little")
        else:
            file.write_bytes(payload)
        for engine in engines():
            assert look_at(engine, file) == 5
        assert not marker.exists()


def test_pickles_in_a_step_and_beside_it_are_never_loaded(saved: Saved) -> None:
    root, marker = saved.path.parent / "root", saved.path.parent / "executed"
    payload = pickle.dumps(Touch(marker), protocol=2)
    with checkpointer(root) as steps:
        steps.save(1, {"w": np.zeros(3)}, metrics={"loss": 1.0})
        for place in ("1/_CHECKPOINT_METADATA", ".metadata", "2", "1/default/.metadata", "1/metadata", "_METADATA"):
            (root / place).write_bytes(payload)
        (root / "3").mkdir()
        (root / "3" / "data.pkl").write_bytes(payload)
        assert steps.steps() == [1]
        assert steps.metadata(1).nbytes == 24
        assert steps.restore(1)["w"].tolist() == [0, 0, 0]
        assert steps.verify(1).leaves == 1
    assert not marker.exists()


def test_a_pickle_among_the_values_is_refused_unless_it_is_asked_for(saved: Saved) -> None:
    marker = saved.path.parent / "executed"
    value = {"t": "pickle", "v": base64.b64encode(pickle.dumps(Touch(marker))).decode()}
    edit(saved, whole=lambda record: record["values"].__setitem__(0, value))
    assert ENGINE.metadata(saved.path).nbytes
    assert ENGINE.verify(saved.path, options=FAST).leaves == 4
    for engine in engines():
        with pytest.raises(InvalidStateError, match=r"'p\.0'.*pickle"):
            engine.restore(saved.path, options=FAST)
    assert not marker.exists()


class RootOf(Checkpointer):
    """The core's, with numpy arrays."""

    def restore(self, step: int | None = None, into: Any = None) -> Any:
        from tierkeep.restore.place import NOTHING

        return self._restore(
            step, NOTHING if into is None else into, keys=None, device=None, dry_run=False, options=FAST, relaxations={}
        )


def checkpointer(root: Path) -> RootOf:
    return RootOf(NumpyAdapter(), root, options=ENGINE.options, asynchronous=False)


# Names and links


def edit(saved: Saved, *, whole: Callable[[Any], Any] | None = None, part: Callable[[Any], Any] | None = None) -> None:
    """Edits the records, and seals them again as a writer would."""
    records = {name: msgspec.json.decode(file.read_bytes()) for name, file in (("w", saved.whole), ("p", saved.part))}
    if part is not None:
        part(records["p"])
        records["p"].pop("crc32c")
        sealed = seal(msgspec.json.encode(records["p"]))
        saved.part.write_bytes(sealed)
        records["w"]["parts"][0][1:] = [len(sealed), crc32c(sealed)]
    if whole is not None:
        whole(records["w"])
    records["w"].pop("crc32c")
    saved.whole.write_bytes(seal(msgspec.json.encode(records["w"])))


OUTSIDE = [
    "../other",
    "../../item2/ocdbt.process_0",
    "/etc",
    "ocdbt.process_0/../../other",
    "ocdbt.process_0/",
    "",
    ".",
    "..",
    "a\0b",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_record_that_names_a_place_outside_is_refused_and_nothing_there_is_opened(saved: Saved, name: str) -> None:
    save(saved.path.parent / "other")
    good = [file.read_bytes() for file in (saved.whole, saved.part)]
    edits: list[dict[str, Callable[[Any], Any]]] = [
        {"whole": lambda record: record["parts"][0].__setitem__(0, name)},
        {"part": lambda record: record.__setitem__("image", name or "..")},
        {"whole": lambda record: record["files"][0].__setitem__(0, name)},
        {"part": lambda record: record["files"][0].__setitem__(0, name)},
    ]
    for change in edits:
        edit(saved, **change)
        with opened() as names:
            for call in (ENGINE.restore, ENGINE.verify):
                with pytest.raises(CorruptCheckpointError):
                    call(saved.path, options=FAST)
        assert all(path.startswith(str(saved.path)) for path in names)
        for file, content in zip((saved.whole, saved.part), good, strict=True):
            file.write_bytes(content)


_opened: list[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(args[0], str | os.PathLike):
        _opened.append(os.fspath(args[0]))


@contextlib.contextmanager
def opened() -> Iterator[list[str]]:
    """The names that are opened in the block, as the interpreter itself reports them."""
    global _opened
    if not getattr(sys, "_tierkeep_hooked", False):
        sys.addaudithook(_hook)  # for good: a hook cannot be taken back
        sys._tierkeep_hooked = True  # type: ignore[attr-defined]
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def test_what_a_link_out_of_the_directory_leads_to_is_not_opened(saved: Saved) -> None:
    with memory_directory() as outside:
        for place in (saved.whole, saved.part, saved.image, saved.image.parent, saved.part.parent):
            with mended(place) as aside:
                (shutil.copytree if aside.is_dir() else shutil.copy)(aside, outside / place.name)
                place.symlink_to(outside / place.name)
                with opened() as names:
                    assert isinstance(restored(saved.path), CorruptCheckpointError)
                real = [os.path.realpath(name) for name in names]
                assert not any(name.startswith(str(outside)) for name in real)


def test_leaves_with_names_that_lead_upwards_stay_within_the_checkpoint() -> None:
    state: dict[Any, Any] = {
        "../../up": np.arange(3),
        "/abs": np.arange(4),
        "a/../../b": {"..": np.arange(5)},
        "": 1,
        ".": 2,
    }
    with memory_directory() as directory:
        saved = save(directory / "one" / "item", state)
        assert sorted(p.name for p in directory.iterdir()) == ["one"]
        assert sorted(p.name for p in (directory / "one").iterdir()) == ["item"]
        assert restored(saved.path, tk.exact_form(state)) is None


def test_nothing_but_a_checkpoint_is_overwritten_or_swept() -> None:
    with memory_directory() as directory:
        (directory / "precious").mkdir()
        (directory / "precious" / "file").write_bytes(b"x")
        with pytest.raises(CheckpointExistsError):
            ENGINE.save(directory / "precious", {"a": 1}, overwrite=True)
        assert (directory / "precious" / "file").read_bytes() == b"x"


# Sizes


def leaf(column: int, to: Any) -> Callable[[Any], None]:
    return lambda record: record["structure"]["leaves"][0].__setitem__(column, to)


def both(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda record: [change(record) for change in changes]


HUGE_WHOLE: dict[str, Callable[[Any], Any]] = {
    "shape": leaf(3, [HUGE]),
    "shape and chunk": both(leaf(3, [HUGE]), leaf(5, [HUGE])),
    "many small chunks": both(leaf(3, [2**40]), leaf(5, [1])),
    "many axes of one": both(leaf(3, [1] * 10_000), leaf(5, [1] * 10_000)),
    "no elements of many": both(leaf(3, [0, HUGE]), leaf(5, [1, HUGE])),
    "a chunk alone": leaf(5, [HUGE]),
    "size of the part": lambda record: record["parts"][0].__setitem__(1, HUGE),
    "one part many times": lambda record: record.__setitem__("parts", record["parts"] * 10_000),
    "size of a file": lambda record: record["files"][0].__setitem__(1, HUGE),
    "a deque": lambda record: record["structure"]["tree"].__setitem__(slice(0, 2), ["deque", "9" * 18]),
    "an int of digits": lambda record: record["values"].__setitem__(0, {"t": "int", "v": "9" * 100_000}),
    "a fraction": lambda record: record["values"].__setitem__(0, {"t": "fraction", "v": "1e999999999"}),
    "a decimal": lambda record: record["values"].__setitem__(0, {"t": "decimal", "v": "1e999999999999999999"}),
    "a range": lambda record: record["values"].__setitem__(0, {"t": "range", "v": ["0", str(HUGE), "1"]}),
}  # fmt: skip
HUGE_PART: dict[str, Callable[[Any], Any]] = {
    "image": lambda record: record.__setitem__("image_nbytes", HUGE),
    "block": lambda record: record["layout"].__setitem__("block_nbytes", HUGE),
    "offset": lambda record: record["layout"]["offset"].__setitem__(0, HUGE),
    "number": lambda record: record["layout"]["number"].__setitem__(0, HUGE),
    "leaf": lambda record: record["layout"]["leaf"].__setitem__(0, HUGE),
}


@pytest.mark.parametrize("name", [*HUGE_WHOLE, *HUGE_PART])
def test_what_a_record_declares_is_not_allocated(saved: Saved, name: str) -> None:
    edit(saved, whole=HUGE_WHOLE.get(name), part=HUGE_PART.get(name))
    tracemalloc.start()
    try:
        for call in (ENGINE.restore, ENGINE.verify):
            with contextlib.suppress(TierkeepError):
                call(saved.path, options=FAST)
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def test_a_sparse_image_of_a_declared_terabyte_is_not_allocated_for_a_leaf_that_is_small(saved: Saved) -> None:
    edit(saved, part=lambda record: record.__setitem__("image_nbytes", 2**40))
    os.truncate(saved.image, 2**40)
    tracemalloc.start()
    try:
        assert restored(saved.path) is None  # its chunks are where they were, and verify
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


DEEP = 100_000


@pytest.mark.parametrize("kind", ["list", "dict", "node", "key", "value"])
def test_a_record_nested_deeply_is_refused(saved: Saved, kind: str) -> None:
    text = saved.whole.read_bytes()
    record = msgspec.json.decode(text)
    record.pop("crc32c")
    marked = copy.deepcopy(record)
    if kind in ("list", "dict", "node"):
        marked["structure"]["tree"] = "HERE"
    elif kind == "key":
        marked["structure"]["tree"][2][0] = "HERE"
    else:
        marked["values"][0] = {"t": "set", "v": "HERE"}
    begin, end = {"dict": (b'{"a":', b"}"), "node": (b'["list",null,[],[', b"]]"), "key": (b'["tuple",[', b"]]")}.get(
        kind, (b"[", b"]")
    )
    for depth in (402, 900, DEEP):
        deep = msgspec.json.encode(marked).replace(b'"HERE"', begin * depth + b"0" + end * depth)
        saved.whole.write_bytes(seal(deep))
        for engine in engines():
            assert look_at(engine, saved.path) == 5


def test_records_without_digests_of_other_files_are_read(saved: Saved) -> None:
    """They came to version 1 later than the rest."""
    edit(saved, whole=lambda record: record.pop("files"), part=lambda record: record.pop("files"))
    assert restored(saved.path) is None
    assert ENGINE.verify(saved.path, options=FAST).checksums == "tierkeep"
