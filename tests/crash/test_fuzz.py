"""Records changed at random and sealed again, so that the parsers behind the checksum meet them: whatever they hold, a
reader gives a state or raises an error of tierkeep's own, in time and without allocating what they declare.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tests.crash.damage import ENGINE, FAST, Saved, memory_directory, replaced
from tests.crash.mutate import mutated, mutated_bytes
from tierkeep.checkpointer import Engine
from tierkeep.errors import TierkeepError
from tierkeep.format.checksum import crc32c, seal
from tierkeep.options import MIB, RestoreOptions
from tierkeep.restore.place import NOTHING
from tierkeep.testing.numpy_adapter import NumpyAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Count = Callable[..., None]

GENEROUS_S = 20
MEMORY_NBYTES = 4096 * MIB  # of addresses: JAX alone reserves a good part of it for its threads


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A MemoryError where anything large is allocated, an error where a call does not end."""

    def late(number: int, frame: Any) -> None:
        faulthandler.dump_traceback()
        raise AssertionError("it does not end")

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_NBYTES, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def read_in_every_way(engine: Engine, path: Path, target: Any, options: RestoreOptions = FAST) -> int:
    """How many of the calls gave something; the others raised an error of the tree."""
    calls: list[Callable[[], Any]] = [
        lambda: engine.metadata(path),
        lambda: engine.restore(path, NOTHING, options=options, dry_run=True),
        lambda: engine.restore(path, NOTHING, options=options),
        lambda: engine.restore(path, target(), options=options),
        lambda: engine.verify(path, options=options),
    ]
    gave = 0
    for call in calls:
        signal.alarm(GENEROUS_S)
        try:
            repr(call())
            gave += 1
        except TierkeepError:
            pass
        finally:
            signal.alarm(0)
    return gave


class Subject(NamedTuple):
    """A checkpoint whose records are changed, and who reads it."""

    engine: Engine
    saved: Saved
    target: Callable[[], Any]


def numpy_state() -> Any:
    shared = np.arange(6, dtype="i4").reshape(2, 3)
    return {
        "a": np.arange(3000, dtype="f4"),
        "b": [shared, shared, (np.float16(1), True, 5, 2.5, 1j)],
        3: {"empty": np.empty((0, 2)), ("x", 1): None, 2.5: {}, b"k": []},
        "plain": ("text", {1, 2}, frozenset({b"x"}), b"bytes", range(3), slice(1, 2), 10**30),
    }


def torch_state() -> Any:
    torch = importlib.import_module("torch")
    return {
        "model": torch.nn.Linear(3, 2),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "size": torch.Size([2, 3]),
        "plain": [torch.float32, torch.strided, torch.device("cpu")],
        "bits": torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "n": numpy_state(),
    }


def jax_state() -> Any:
    jax = importlib.import_module("jax")
    return {
        "a": jax.numpy.arange(8.0).reshape(2, 4),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "half": jax.numpy.ones(3, "bfloat16"),
        "n": numpy_state(),
    }


def adapter_of(name: str) -> Any:
    if name == "numpy":
        return NumpyAdapter()
    return getattr(importlib.import_module(f"tierkeep_{name}.adapter"), f"{name.capitalize()}Adapter")()


STATES = {"numpy": numpy_state, "torch": torch_state, "jax": jax_state}


@pytest.fixture(
    scope="module", params=[("numpy", "numpy"), ("torch", "torch"), ("jax", "jax"), ("torch", "jax")], ids="-".join
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Saved by one adapter, read by another or the same."""
    writer, reader = request.param
    with memory_directory() as directory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says of some sparse layouts that they are in beta
            Engine(adapter_of(writer), ENGINE.options).save(directory / "item", STATES[writer]())
        yield Subject(Engine(adapter_of(reader), ENGINE.options), Saved.at(directory / "item"), STATES[reader])


def sealed(record: Any) -> bytes:
    """As a writer seals it; what is no object cannot be sealed, and is written as it is."""
    text = msgspec.json.encode(
        {k: v for k, v in record.items() if k != "crc32c"} if isinstance(record, dict) else record
    )
    return seal(text) if len(text) > 2 and text.endswith(b"}") else text


def try_records(subject: Subject, part: Any, whole: Any) -> int:
    """Reads a checkpoint with these records, the part's size and checksum in the whole set right."""
    written = sealed(part)
    with contextlib.suppress(TypeError, LookupError):
        whole["parts"][0][1:] = [len(written), crc32c(written)]
    with replaced(subject.saved.part, written), replaced(subject.saved.whole, sealed(whole)):
        return read_in_every_way(subject.engine, subject.saved.path, subject.target)


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(250, 4000), marks=pytest.mark.full)], ids=len)
def test_a_record_changed_at_random_is_a_state_or_an_error_of_ours(
    subject: Subject, seeds: range, count: Count
) -> None:
    part = msgspec.json.decode(subject.saved.part.read_bytes())
    whole = msgspec.json.decode(subject.saved.whole.read_bytes())
    gave = 0
    assert try_records(subject, part, whole) >= 3
    with bounded():
        for seed in seeds:
            try:
                changed = seed % 3
                gave += try_records(
                    subject,
                    mutated(part, seed) if changed == 0 else part,
                    mutated(whole, seed) if changed else msgspec.json.decode(msgspec.json.encode(whole)),
                )
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    count(records=len(seeds), calls=5 * len(seeds), gave_a_state=gave, violations=0)


FINDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "checksums that are a number": ("part", lambda r: r["crcs"].__setitem__(0, 5)),
    "a checksum of 33 bits": ("part", lambda r: r["crcs"][0].__setitem__(0, 2**32)),
    "a leaf of no known kind": ("whole", lambda r: r["structure"]["leaves"][0].__setitem__(1, "odd")),
    "a number with an axis": ("whole", lambda r: r["structure"]["leaves"][0].__setitem__(1, "int")),
    "a fraction of a billion digits": ("whole", lambda r: r["values"].__setitem__(0, {"t": "fraction", "v": "1e999999999"})),
    "a device of no kind": ("whole", lambda r: r["values"].__setitem__(0, {"t": "torch.device", "v": ["x"]})),
    "a dtype that torch lacks": ("whole", lambda r: r["values"].__setitem__(0, {"t": "torch.dtype", "v": "save"})),
    "a random key of no kind": ("whole", lambda r: r["structure"]["leaves"][0].__setitem__(4, "prng:fry")),
    "a parameter of integers": ("whole", lambda r: [row.__setitem__(4, "parameter") for row in r["structure"]["leaves"]]),
    "sparse without its parts": ("whole", lambda r: r["structure"]["tree"].__setitem__(0, "torch.sparse_coo")),
    "files that are a number": ("whole", lambda r: r.__setitem__("files", 5)),
    "a file above": ("whole", lambda r: r["files"].append(["../other", 1, ""])),
    "a file elsewhere": ("whole", lambda r: r["files"].append(["/etc/passwd", 1, ""])),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDS)
def test_what_was_found_by_such_changes_stays_found(subject: Subject, name: str) -> None:
    records = {
        "part": msgspec.json.decode(subject.saved.part.read_bytes()),
        "whole": msgspec.json.decode(subject.saved.whole.read_bytes()),
    }
    which, change = FINDS[name]
    change(records[which])
    with bounded():
        try_records(subject, records["part"], records["whole"])


# What others wrote


@pytest.fixture(scope="module")
def foreign() -> Iterator[Path]:
    """What Orbax would read of a checkpoint, and nothing of our own."""
    with memory_directory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Engine(adapter_of("jax"), ENGINE.options).save(directory / "item", jax_state())
        (directory / "item" / "tierkeep.json").unlink()
        (directory / "item" / "ocdbt.process_0" / "part.json").unlink()
        yield directory / "item"


def try_foreign(engine: Engine, path: Path, file: Path, change: Callable[[Any, int], Any], seeds: range) -> int:
    good = file.read_bytes()
    gave = 0
    with bounded():
        for seed in seeds:
            try:
                with replaced(file, change(good, seed)):
                    gave += read_in_every_way(engine, path, lambda: {"a": np.zeros(4)})
            except BaseException as error:
                error.add_note(f"seed {seed} of {file.name}")
                raise
    return gave


def json_changed(good: bytes, seed: int) -> bytes:
    return msgspec.json.encode(mutated(msgspec.json.decode(good), seed))


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 1500), marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("name", ["_METADATA", "_strings.json", "array_metadatas/process_0"])
@pytest.mark.parametrize("reader", ["numpy", "jax"])
def test_a_file_of_orbax_changed_at_random_is_a_state_or_an_error_of_ours(
    foreign: Path, reader: str, name: str, seeds: range, count: Count
) -> None:
    engine = Engine(adapter_of(reader), ENGINE.options)
    assert engine.restore(foreign, options=FAST)
    gave = try_foreign(engine, foreign, foreign / name, json_changed, seeds)
    count(files=len(seeds), calls=5 * len(seeds), gave_a_state=gave, violations=0)


def header_changed(good: bytes, seed: int) -> bytes:
    nbytes = int.from_bytes(good[:8], "little")
    header = msgspec.json.encode(mutated(msgspec.json.decode(good[8 : 8 + nbytes]), seed))
    if seed % 10 == 0:
        return mutated_bytes(good[:8], seed) + header + good[8 + nbytes :]
    return len(header).to_bytes(8, "little") + header + good[8 + nbytes :]


@pytest.mark.parametrize("seeds", [range(400), pytest.param(range(400, 8000), marks=pytest.mark.full)], ids=len)
def test_a_safetensors_header_changed_at_random_is_a_state_or_an_error_of_ours(seeds: range, count: Count) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [26, 26]},
    }
    text = msgspec.json.encode(header)
    with memory_directory() as directory:
        file = directory / "x.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(26)))
        gave = 0
        for reader in ("numpy", "torch", "jax"):
            engine = Engine(adapter_of(reader), ENGINE.options)
            engine.restore(file, options=FAST)
            gave += try_foreign(engine, file, file, header_changed, seeds)
        count(headers=3 * len(seeds), gave_a_state=gave, violations=0)


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 2000), marks=pytest.mark.full)], ids=len)
def test_a_safetensors_index_changed_at_random_is_a_state_or_an_error_of_ours(seeds: range) -> None:
    index = {"metadata": {"total_size": 4}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}
    with memory_directory() as directory:
        for name in "ab":
            text = msgspec.json.encode({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
            file = directory / f"{'x' if name == 'a' else 'y'}.safetensors"
            file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        file = directory / "model.safetensors.index.json"
        file.write_bytes(msgspec.json.encode(index))
        assert try_foreign(ENGINE, file, file, json_changed, seeds) > 0


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 10_000), marks=pytest.mark.full)], ids=len)
def test_an_index_of_ocdbt_changed_at_random_is_a_state_or_an_error_of_ours(
    foreign: Path, seeds: range, count: Count
) -> None:
    """TensorStore parses it, in a child; should it end the child, the rest of the seeds goes to another one."""
    at = seeds.start
    outcomes = {"ok": 0, "refused": 0, "ended_by_tensorstore": 0}
    raw = []
    with memory_directory() as directory:
        while at < seeds.stop:
            shutil.copytree(foreign, directory / f"{at}")
            command = [
                sys.executable,
                "-m",
                "tests.crash.ocdbt_child",
                str(directory / f"{at}"),
                str(at),
                str(seeds.stop),
            ]
            path = os.pathsep.join(str(Path(root).resolve()) for root in (*sys.path[:8], ".") if root)
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
            )
            lines = [line.split(maxsplit=2) for line in run.stdout.splitlines()]
            assert lines, run.stderr[-2000:]
            for line in lines:
                if len(line) < 2:
                    outcomes["ended_by_tensorstore"] += 1
                elif line[1] == "raw":
                    raw.append(line)
                else:
                    outcomes[line[1]] += 1
            at = int(lines[-1][0]) + 1
    count(indexes=len(seeds), violations=len(raw), **outcomes)
    assert not raw
