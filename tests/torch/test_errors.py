"""Broken disks and broken files: a clear error, nothing lost, nothing half-visible, and the next save works."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tierkeep_torch as tk
from tests.torch.compare import as_bytes, assert_same
from tierkeep.checkpointer import Checkpointer, Engine
from tierkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SkippedStepWarning,
    StorageError,
    TierkeepError,
    UnsupportedFormatError,
)
from tierkeep.format.checksum import seal, unseal
from tierkeep.options import RestoreOptions, SaveOptions
from tierkeep.tiers.local_disk import ImageWriter, LocalDisk
from tierkeep_torch.adapter import TorchAdapter

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"a": torch.arange(3000.0), "b": {"w": torch.ones(5).bfloat16(), "s": "text"}, "n": 4}
SMALL = SaveOptions(chunk_nbytes=4000, lanes=2)


class FailingDisk(LocalDisk):
    """Refuses the `nth` operation that changes the disk, and all after it, as a full disk does."""

    def __init__(self, nth: int, code: int) -> None:
        self.left, self.code, self.failed = nth, code, False

    def use(self, path: Path) -> None:
        self.left -= 1
        if self.left < 0:
            self.failed = True
            raise OSError(self.code, os.strerror(self.code), str(path))

    def create_image(self, path: Path, nbytes: int, *, direct: bool, recycled: bool = False) -> ImageWriter:
        self.use(path)
        image = super().create_image(path, nbytes, direct=direct, recycled=recycled)
        write, sync = image.write, image.sync

        def failing_write(offset: int, data: memoryview) -> None:
            self.use(path)
            write(offset, data)

        def failing_sync() -> None:
            self.use(path)
            sync()

        image.write, image.sync = failing_write, failing_sync  # type: ignore[method-assign]
        return image

    def write_file(self, path: Path, data: bytes) -> None:
        self.use(path)
        super().write_file(path, data)

    def make_dir(self, path: Path, *, parents: bool = False) -> None:
        self.use(path)
        super().make_dir(path, parents=parents)

    def rename(self, old: Path, new: Path) -> None:
        self.use(new)
        super().rename(old, new)

    def rename_new(self, old: Path, new: Path) -> bool:
        self.use(new)
        return super().rename_new(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        self.use(other)
        return super().exchange(one, other)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_fills_at_any_point_leaves_the_older_step_and_no_trace(code: int, tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        checkpointer.save(1, {"old": torch.ones(3)})
    for nth in range(100):
        disk = FailingDisk(nth, code)
        engine = Checkpointer(TorchAdapter(), tmp_path, options=SMALL, disk=disk)
        try:
            engine.save(2, STATE)
        except StorageError as error:
            assert error.errno == code  # noqa: PT017
            assert "earlier checkpoints are untouched" in str(error)  # noqa: PT017
            assert [p.name for p in tmp_path.iterdir()] == ["1"], nth
            assert engine.steps() == [1]
            assert_same(tk.load(tmp_path / "1"), {"old": torch.ones(3)})
            disk.left = 1000  # there is room again: the same checkpointer goes on
            engine.save(2, STATE)
            assert_same(tk.load(tmp_path / "2"), STATE)
            shutil.rmtree(tmp_path / "2")
        else:
            break
    assert not disk.failed
    assert nth > 10
    assert_same(tk.load(tmp_path / "2"), STATE)


def test_an_overwrite_that_fails_at_any_point_leaves_the_old_or_the_new_step_whole(tmp_path: Path) -> None:
    path = tmp_path / "c"
    tk.save({"old": torch.ones(3)}, path)
    for nth in range(100):
        disk = FailingDisk(nth, errno.ENOSPC)
        try:
            Engine(TorchAdapter(), SMALL, disk).save(path, STATE, overwrite=True)
        except StorageError:
            assert_same(tk.load(path), {"old": torch.ones(3)})
            assert [p.name for p in tmp_path.iterdir()] == ["c"], nth
        else:
            break
    assert_same(tk.load(path), STATE)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_place_that_cannot_be_written_is_told_with_the_reason_and_the_path(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    for path in (tmp_path / "f" / "c", tmp_path / "f" / "deep" / "c", tmp_path / ("x" * 300)):
        with pytest.raises(StorageError) as caught:
            tk.save(STATE, path)
        assert caught.value.errno in (errno.ENOTDIR, errno.ENAMETOOLONG)
        assert str(path) in str(caught.value)
    with pytest.raises(CheckpointExistsError):
        tk.save(STATE, tmp_path / "f")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_an_unwritable_directory_is_told_and_the_next_place_works(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StorageError) as caught:
        tk.save(STATE, tmp_path / "locked" / "c")
    assert caught.value.errno == errno.EACCES
    tk.save(STATE, tmp_path / "c")


def test_what_is_not_there_is_told_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "f").write_text("mine")
    for name in ("nothing", "empty", "f", "f/below"):
        with pytest.raises(CheckpointNotFoundError, match="looked for") as caught:
            tk.load(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)


def files_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file())


DAMAGES = {
    "first": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x80]) + data[len(data) // 2 + 1 :],
    "last": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "shorter": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


# crc-not-verified-on-load, missing-chunk-reads-as-fill
@pytest.mark.parametrize("damage", [*DAMAGES, "removed", "directory"])
def test_damage_to_any_file_gives_the_saved_bits_or_an_error_of_ours(damage: str, tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c", options=SMALL)
    names = [p.relative_to(tmp_path / "c") for p in files_of(tmp_path / "c")]
    told = set()
    change: Any = DAMAGES.get(damage)
    for name in names:
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        path = tmp_path / "d" / name
        data = path.read_bytes()
        path.unlink()
        if damage == "directory":
            path.mkdir()
        elif damage != "removed":
            path.write_bytes(change(data))
        target = {"a": torch.zeros(3000), "b": {"w": torch.zeros(5).bfloat16(), "s": ""}, "n": 0}
        for into in (None, target):
            try:
                found = tk.load(tmp_path / "d", into)
            except TierkeepError as error:
                told.add(name.name if name.name.endswith("json") else name.parts[0])
                assert str(tmp_path / "d") in str(error)  # noqa: PT017
            else:
                assert_same(found, STATE)
        shutil.rmtree(tmp_path / "d")
    assert told >= {"part.json", "tierkeep.json"}
    assert "ocdbt.process_0" in told or damage == "last"  # the last byte of the image is padding


# crc-not-verified-on-load
def test_a_flipped_bit_anywhere_in_the_data_names_the_leaf_and_the_file(tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c", options=SMALL)
    image = max(files_of(tmp_path / "c"), key=lambda p: p.stat().st_size)
    data = image.read_bytes()
    for leaf, needle in (("a", as_bytes(STATE["a"])[4000:4100]), ("b.w", as_bytes(STATE["b"]["w"]))):  # type: ignore[arg-type,index]
        at = data.index(needle) + 5
        for bit in (0, 7):
            image.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            with pytest.raises(CorruptCheckpointError) as caught:
                tk.load(tmp_path / "c")
            (finding,) = caught.value.findings
            assert repr(leaf) in finding
            assert str(image) in finding
            other = "b" if leaf == "a" else "a"
            assert_same(tk.load(tmp_path / "c", keys=[other]), {other: STATE[other]})
    image.write_bytes(data)
    assert_same(tk.load(tmp_path / "c"), STATE)


# crc-not-verified-on-load: parts that are swapped
def test_chunks_images_and_records_of_elsewhere_are_never_taken_for_ones_own(tmp_path: Path) -> None:
    for name, value in (("c", 1.0), ("d", 2.0)):
        tk.save({"x": torch.full((1024,), value), "y": torch.full((1024,), -value)}, tmp_path / name)
    own, other = (max(files_of(tmp_path / n), key=lambda p: p.stat().st_size) for n in "cd")
    data = own.read_bytes()
    x, y = data.index(as_bytes(torch.full((1024,), 1.0))), data.index(as_bytes(torch.full((1024,), -1.0)))
    swapped = bytearray(data)
    swapped[x : x + 4096], swapped[y : y + 4096] = data[y : y + 4096], data[x : x + 4096]
    for changed in (bytes(swapped), other.read_bytes()):
        own.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError) as caught:
            tk.load(tmp_path / "c")
        assert len(caught.value.findings) == 2
    own.write_bytes(data)
    shutil.copy(tmp_path / "d" / "ocdbt.process_0" / "part.json", tmp_path / "c" / "ocdbt.process_0" / "part.json")
    with pytest.raises(CorruptCheckpointError, match=r"part\.json"):
        tk.load(tmp_path / "c")


def test_a_damaged_step_tells_what_still_holds(tmp_path: Path) -> None:
    with tk.Checkpointer(tmp_path, asynchronous=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE)
        image = max(files_of(tmp_path / "2"), key=lambda p: p.stat().st_size)
        image.write_bytes(bytes(image.stat().st_size))
        with pytest.raises(CorruptCheckpointError, match=r"steps 1 in .* untouched"):
            checkpointer.restore(2)
        with pytest.warns(SkippedStepWarning, match=r"restored step 1 of .*, not the newest: step 2: .* is damaged"):
            assert_same(checkpointer.restore(), STATE)
        assert_same(checkpointer.restore(1), STATE)
        checkpointer.save(2, STATE, overwrite=True)
        assert_same(checkpointer.restore(), STATE)


def rewritten(path: Path, change: Any) -> None:
    record = unseal(path.read_bytes())
    change(record)
    path.write_bytes(seal(json.dumps(record).encode()))


def test_an_unknown_version_is_named_and_untouched(tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c")
    rewritten(tmp_path / "c" / "tierkeep.json", lambda r: r.update(version=99))
    before = {p: p.read_bytes() for p in files_of(tmp_path / "c")}
    with pytest.raises(UnsupportedFormatError, match="99") as caught:
        tk.load(tmp_path / "c")
    assert caught.value.path == str(tmp_path / "c" / "tierkeep.json")
    assert {p: p.read_bytes() for p in files_of(tmp_path / "c")} == before


def test_an_unknown_dtype_is_an_unsupported_format(tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c")

    def change(record: Any) -> None:
        record["structure"]["leaves"][0][2] = "float7"

    rewritten(tmp_path / "c" / "tierkeep.json", change)
    with pytest.raises(UnsupportedFormatError, match="float7"):
        tk.load(tmp_path / "c")


# pickle-metadata-executes-code: sizes and names that lie
@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["structure"]["leaves"][0].__setitem__(3, [2**60]),
        lambda r: r["structure"]["leaves"][0].__setitem__(3, [2**62, 2**62]),
        lambda r: r["structure"]["leaves"][0].__setitem__(5, [0]),
        lambda r: r["structure"]["leaves"][0].__setitem__(3, [-1]),
        lambda r: r["structure"].__setitem__("tree", 99),
        lambda r: r["structure"].__setitem__("tree", ["dict", None, [], [0]]),
        lambda r: r["parts"][0].__setitem__(0, "../../etc"),
        lambda r: r["parts"].append(["ocdbt.process_1", 5, 5]),
        lambda r: r.__setitem__("parts", []),
        lambda r: r.__setitem__("values", []),
        lambda r: r.__setitem__("format", "other"),
        lambda r: r.pop("structure"),
    ],
)
def test_a_record_that_lies_is_refused_before_anything_is_allocated(change: Any, tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c")
    rewritten(tmp_path / "c" / "tierkeep.json", change)
    with pytest.raises(CorruptCheckpointError, match=r"tierkeep\.json|leaf|missing|part"):
        tk.load(tmp_path / "c")


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b"null", b"\x80\x04.", b"\xff" * 100])
def test_nonsense_in_place_of_a_record_is_a_damaged_checkpoint(data: bytes, tmp_path: Path) -> None:
    tk.save(STATE, tmp_path / "c")
    (tmp_path / "c" / "tierkeep.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"tierkeep\.json"):
        tk.load(tmp_path / "c")
    (tmp_path / "c" / "tierkeep.json").write_bytes(seal(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"))
    with pytest.raises(CorruptCheckpointError, match=r"tierkeep\.json"):
        tk.load(tmp_path / "c")


def test_damage_found_while_restoring_in_place_never_hands_out_damaged_bytes(tmp_path: Path) -> None:
    state = {f"k{n}": torch.full((1024,), float(n + 1)) for n in range(8)}
    tk.save(state, tmp_path / "c")
    image = max(files_of(tmp_path / "c"), key=lambda p: p.stat().st_size)
    data = bytearray(image.read_bytes())
    data[data.index(as_bytes(state["k3"])) + 9] ^= 4
    image.write_bytes(data)
    into = {key: torch.zeros(1024) for key in state}
    for options in (RestoreOptions(), RestoreOptions(direct=False, lanes=1)):
        with pytest.raises(CorruptCheckpointError, match="'k3'"):
            tk.load(tmp_path / "c", into, options=options)
        for key, value in into.items():
            assert torch.equal(value, torch.zeros(1024)) or torch.equal(value, state[key])
        assert not into["k3"].any()


def test_every_error_is_ours_the_fitting_builtin_and_survives_pickling(tmp_path: Path) -> None:
    import pickle

    tk.save(STATE, tmp_path / "c")
    calls: list[Any] = [
        lambda: tk.save({"k": object()}, tmp_path / "x"),
        lambda: tk.save({"a.b": 1, "a": {"b": 1}}, tmp_path / "x"),
        lambda: tk.save(STATE, tmp_path / "c"),
        lambda: tk.load(tmp_path / "x"),
        lambda: tk.load(tmp_path / "c", {"a": 1}),
        lambda: tk.save(STATE, tmp_path / "c" / "tierkeep.json" / "x"),
    ]
    builtins = [TypeError, ValueError, FileExistsError, FileNotFoundError, ValueError, OSError]
    for call, builtin in zip(calls, builtins, strict=True):
        with pytest.raises(TierkeepError) as caught:
            call()
        assert isinstance(caught.value, builtin)
        again = pickle.loads(pickle.dumps(caught.value))
        assert type(again) is type(caught.value)
        assert str(again) == str(caught.value)
        assert again.__dict__ == caught.value.__dict__
