"""I3: a byte that changed after it was staged is never returned as data.

Every byte of a small checkpoint is flipped, and every file of it cut, drawn out, swapped, removed or made something
else. A load either gives the saved bits or raises an error that names the file and says what still holds; `verify`
finds every one of these damages, also those that a load has no need to see.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from tests.crash.damage import (
    ENGINE,
    FAST,
    NEEDED,
    STATE,
    Saved,
    flipped,
    found_by_verify,
    memory_directory,
    mended,
    replaced,
    restored,
    save,
    small_files,
    verified,
)
from tierkeep.checkpointer import Engine
from tierkeep.errors import CorruptCheckpointError, StorageError
from tierkeep.format.part import parse_part
from tierkeep.options import PAGE, SaveOptions
from tierkeep.restore.opened import open_checkpoint
from tierkeep.testing import strategies as tk
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tiers.local_disk import ImageReader, LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Count = Callable[..., None]


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    """One checkpoint that every test damages and mends again."""
    with memory_directory() as directory:
        made = save(directory / "item")
        yield made
        assert restored(made.path) is None
        assert verified(made.path) is None


def masks(at: int) -> tuple[int, int]:
    """One bit, and another value altogether."""
    return 1 << at % 8, 0xFF - (at * 37) % 0x7F


def chunks_of(saved: Saved) -> list[tuple[str, int, int]]:
    """(leaf, offset, bytes) of every chunk in the image."""
    with open_checkpoint(LocalDisk(), saved.path, direct=False, holds="") as found:
        return [
            (found.whole.leaves[leaf].name, chunk.offset, found.whole.leaves[leaf].chunk_nbytes)
            for (leaf, _), chunk in found.parts[0].chunks.items()
        ]


class WatchedDisk(LocalDisk):
    """Notes which files are opened."""

    def __init__(self) -> None:
        self.opened: set[Path] = set()

    def read_file(self, path: Path, most: int) -> bytes:
        self.opened.add(path)
        return super().read_file(path, most)

    def read_head(self, path: Path, most: int) -> bytes:
        self.opened.add(path)
        return super().read_head(path, most)

    def open_image(self, path: Path, *, direct: bool) -> ImageReader:
        self.opened.add(path)
        return super().open_image(path, direct=direct)


# Flips


def test_a_load_opens_the_two_records_and_the_image_and_nothing_else(saved: Saved) -> None:
    """So a byte of any other file cannot matter to it."""
    disk = WatchedDisk()
    Engine(NumpyAdapter(), disk=disk).restore(saved.path, options=FAST)
    assert disk.opened == {saved.whole, saved.part, saved.image}


def test_no_flip_in_a_small_file_gives_other_data(saved: Saved, count: Count) -> None:
    loads = verifies = 0
    for file in small_files(saved):
        for at in range(file.stat().st_size):
            for mask in masks(at):
                with flipped(file, at, mask):
                    if file.name in NEEDED:
                        error = restored(saved.path)
                        assert error is not None, (file, at, mask)
                        assert file.name in str(error)
                        loads += 1
                    elif at % 16 == 0:
                        assert restored(saved.path) is None
                        loads += 1
                    if mask == masks(at)[0]:
                        assert found_by_verify(saved.path, file), (file, at, mask)
                        verifies += 1
    count(flips_loaded=loads, flips_verified=verifies, violations=0)
    assert verifies == sum(file.stat().st_size for file in small_files(saved))


def test_no_flip_in_the_image_gives_other_data(saved: Saved, count: Count) -> None:
    chunks = chunks_of(saved)
    nbytes = saved.image.stat().st_size
    verifies = 0
    for at in range(nbytes):
        name = next((name for name, offset, n in chunks if offset <= at < offset + n), None)
        bit, other = masks(at)
        with flipped(saved.image, at, bit):
            error = restored(saved.path)
            if name is None:  # padding, or a checksum that only stock readers look at
                assert error is None
            else:
                assert isinstance(error, CorruptCheckpointError)
                (finding,) = error.findings
                assert repr(name) in finding
                assert str(saved.image) in finding
        if name is None or at % 4 == 0:
            with flipped(saved.image, at, other):
                assert found_by_verify(saved.path, saved.image), at
            verifies += 1
    count(flips_loaded=nbytes, flips_verified=verifies, violations=0)


def large_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        f"leaf {n}": (np.arange(1 + 900 * n) % 2).astype(dtype)
        for n, dtype in enumerate(("u1", "i2", "f4", "f8", "c16", "bool", "u8", "f2"))
    }
    state["cut on two axes"] = np.arange(70 * 90, dtype="i4").reshape(70, 90)
    state["edges"] = np.ones((33, 65), "f8")
    state["empty"] = np.empty((0, 3), "f4")
    state["numbers"] = [1, 2.5, True, np.float32(7)]
    return state


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_no_flip_at_the_ends_or_in_the_middle_of_any_chunk_gives_other_data(where: float, count: Count) -> None:
    engine = Engine(NumpyAdapter(), SaveOptions(chunk_nbytes=5000, block_nbytes=PAGE, lanes=1))
    state = large_state()
    wanted = tk.exact_form(state)
    with memory_directory() as directory:
        engine.save(directory / "item", state)
        made = Saved.at(directory / "item")
        chunks = chunks_of(made)
        caught = 0
        for _, offset, nbytes in chunks:
            with flipped(made.image, offset + int(where * (nbytes - 1)), 0x10):
                caught += restored(made.path, wanted) is not None  # the overhang of an edge chunk is nobody's data
                assert found_by_verify(made.path, made.image)
            with flipped(made.image, offset + nbytes + int(where * 3), 0x10):
                assert restored(made.path, wanted) is None
                assert found_by_verify(made.path, made.image)
        assert caught >= len(chunks) * (0.9 if where < 1.0 else 0.7)
        count(flips_loaded=2 * len(chunks), flips_verified=2 * len(chunks), violations=0)


def test_a_reader_that_compares_no_checksum_is_caught_by_these_tests(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(data: bytes, whole: Any) -> Any:
        part = parse_part(data, whole)
        for key, chunk in part.chunks.items():
            part.chunks[key] = type(chunk)(chunk.offset, ())
        return part

    monkeypatch.setattr("tierkeep.restore.opened.parse_part", parse)
    with flipped(saved.image, chunks_of(saved)[0][1], 1), pytest.raises(AssertionError, match="other data"):
        restored(saved.path)


# Lengths


def test_no_file_cut_short_gives_other_data(saved: Saved, count: Count) -> None:
    tried = 0
    for file in [*small_files(saved), saved.image]:
        good = file.read_bytes()
        every = 1 if file.name in NEEDED else 509 if file == saved.image else 7
        for nbytes in {*range(0, len(good), every), len(good) - 1}:
            with replaced(file, good[:nbytes]):
                error = restored(saved.path)
                assert (error is not None) == (file.name in NEEDED or file == saved.image), (file, nbytes)
                assert error is None or file.name in str(error)
                assert found_by_verify(saved.path, file) or file.name in str(verified(saved.path))
            tried += 1
    count(cuts=tried, violations=0)


@pytest.mark.parametrize(
    "more", [b"\0", b"}", b"\n", bytes(PAGE), None], ids=["zero", "brace", "line", "page", "twice"]
)
def test_no_file_drawn_out_gives_other_data(saved: Saved, more: bytes | None) -> None:
    for file in [*small_files(saved), saved.image]:
        good = file.read_bytes()
        for content in (good + (more or good), (more or good) + good):
            with replaced(file, content):
                error = restored(saved.path)
                assert (error is not None) == (file.name in NEEDED or file == saved.image)
                assert error is None or file.name in str(error)
                assert verified(saved.path) is not None


def test_a_file_drawn_out_by_a_gigabyte_of_nothing_is_not_read(saved: Saved) -> None:
    for file in (saved.part, saved.image):
        nbytes = file.stat().st_size
        os.truncate(file, nbytes + 2**30)
        try:
            error = restored(saved.path)
            assert error is not None
            assert file.name in str(error)
        finally:
            os.truncate(file, nbytes)


# Files of other steps


def other_state() -> dict[str, Any]:
    """Of the same structure: every file of it has the same length, and other content."""
    state: dict[str, Any] = dict(STATE)
    state["w"] = STATE["w"] + 1
    return state


def same_place(saved: Saved, other: Saved, file: Path) -> Path:
    """The file of the other checkpoint that is what this one is here; node files and images have names of their own."""
    if file == saved.image:
        return other.image
    place = other.path / file.relative_to(saved.path)
    if place.exists():
        return place
    (found,) = (f for f in place.parent.iterdir() if f != other.image)
    return found


def test_no_file_of_another_step_in_the_place_of_this_ones_gives_other_data(saved: Saved) -> None:
    with memory_directory() as directory:
        other = save(directory / "other", other_state())
        changed = 0
        for file in [*small_files(saved), saved.image]:
            content = same_place(saved, other, file).read_bytes()
            if content == file.read_bytes():
                continue
            changed += 1
            with replaced(file, content):
                error = restored(saved.path)
                assert (error is not None) == (file.name in NEEDED or file == saved.image)
                assert error is None or "part.json" in str(error) or file.name in str(error)
                assert verified(saved.path) is not None, file
        assert changed >= 7  # only Orbax's files are the same in both


@pytest.mark.parametrize("place", ["ocdbt.process_0", "ocdbt.process_0/d", "d", "tierkeep.json part.json"])
def test_no_directory_of_another_step_in_the_place_of_this_ones_gives_other_data(saved: Saved, place: str) -> None:
    with memory_directory() as directory:
        other = save(directory / "other", other_state())
        if place == "tierkeep.json part.json":  # both records: they agree, but name an image that is not there
            with replaced(saved.whole, other.whole.read_bytes()), replaced(saved.part, other.part.read_bytes()):
                error = restored(saved.path, "neither state")
                assert error is not None
                assert other.image.name in str(error)
            return
        with mended(saved.path / place):
            shutil.copytree(other.path / place, saved.path / place)
            assert (restored(saved.path) is not None) == (place != "d")
            assert verified(saved.path) is not None


def test_the_images_of_two_steps_exchanged_are_damage_to_both() -> None:
    with memory_directory() as directory:
        one, two = save(directory / "one"), save(directory / "two", other_state())
        first, second = one.image.read_bytes(), two.image.read_bytes()
        one.image.write_bytes(second)
        two.image.write_bytes(first)
        assert isinstance(restored(one.path), CorruptCheckpointError)
        assert isinstance(restored(two.path, tk.exact_form(other_state())), CorruptCheckpointError)


def test_files_that_change_places_within_a_checkpoint_give_no_other_data(saved: Saved) -> None:
    files = [*small_files(saved), saved.image]
    for one in files:
        for other in files:
            if one < other:
                first, second = one.read_bytes(), other.read_bytes()
                with replaced(one, second), replaced(other, first):
                    restored(saved.path)
                    assert first == second or verified(saved.path) is not None


# Something else than a file


def link_to_nothing(path: Path, aside: Path, outside: Path) -> None:
    path.symlink_to("nothing")


def link_to_itself(path: Path, aside: Path, outside: Path) -> None:
    path.symlink_to(path.name)


def link_outside(path: Path, aside: Path, outside: Path) -> None:
    """To the same content: what is refused is to look there at all."""
    copy = outside / "copy"
    if not copy.exists():
        (shutil.copytree if aside.is_dir() else shutil.copy)(aside, copy)
    path.symlink_to(copy)


def link_outside_by_dots(path: Path, aside: Path, outside: Path) -> None:
    link_outside(path, aside, outside)
    target = os.path.relpath(path.readlink(), path.parent)
    path.unlink()
    path.symlink_to(target)


def removed(path: Path, aside: Path, outside: Path) -> None:
    pass


def directory(path: Path, aside: Path, outside: Path) -> None:
    path.mkdir()
    (path / "something").write_bytes(b"in it")


def pipe(path: Path, aside: Path, outside: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, aside: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:  # its name may be no longer than 107 bytes
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def empty_file(path: Path, aside: Path, outside: Path) -> None:
    path.touch()


def without_rights(path: Path, aside: Path, outside: Path) -> None:
    (shutil.copytree if aside.is_dir() else shutil.copy)(aside, path)
    path.chmod(0)


THINGS = [
    removed, directory, pipe, unix_socket, empty_file, link_to_nothing, link_to_itself, link_outside,
    link_outside_by_dots,
]  # fmt: skip


@pytest.mark.parametrize("make", THINGS)
def test_something_else_in_the_place_of_a_file_is_an_error_or_does_not_matter(
    saved: Saved, make: Callable[[Path, Path, Path], None]
) -> None:
    for file in [*small_files(saved), saved.image]:
        with memory_directory() as outside, mended(file) as aside:
            make(file, aside, outside)
            error = restored(saved.path)
            assert (error is not None) == (file.name in NEEDED or file == saved.image), file
            assert error is None or isinstance(error, CorruptCheckpointError)
            assert error is None or file.name in str(error)
            assert verified(saved.path) is not None


@pytest.mark.parametrize("make", THINGS)
@pytest.mark.parametrize("place", ["d", "ocdbt.process_0", "ocdbt.process_0/d"])
def test_something_else_in_the_place_of_a_directory_is_an_error_or_does_not_matter(
    saved: Saved, place: str, make: Callable[[Path, Path, Path], None]
) -> None:
    path = saved.path / place
    with memory_directory() as outside, mended(path) as aside:
        make(path, aside, outside)
        error = restored(saved.path)
        assert (error is not None) == (place != "d")
        assert error is None or isinstance(error, CorruptCheckpointError)
        assert error is None or place.partition("/")[0] in str(error)
        assert verified(saved.path) is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_error_that_names_it(saved: Saved) -> None:
    for file in (saved.whole, saved.part, saved.image):
        with memory_directory() as outside, mended(file) as aside:
            without_rights(file, aside, outside)
            error = restored(saved.path)
            assert isinstance(error, StorageError)
            assert file.name in str(error)


def test_links_to_the_checkpoint_and_within_it_are_followed(saved: Saved) -> None:
    with memory_directory() as elsewhere:
        (elsewhere / "link").symlink_to(saved.path)
        assert restored(elsewhere / "link") is None
        assert verified(elsewhere / "link") is None
    for file in (saved.whole, saved.part, saved.image):
        with mended(file) as aside:
            file.symlink_to(aside.name)
            assert restored(saved.path) is None
            assert verified(saved.path) is None


def test_without_its_record_a_checkpoint_of_ours_is_not_taken_for_one_of_orbax(saved: Saved) -> None:
    """What Orbax knows of it is poorer: a tuple would come back as a list, the key 5 as text, ties untied."""
    for also in (None, "_METADATA", "manifest.ocdbt"):
        with mended(saved.whole):
            kept = None if also is None else (saved.path / also).read_bytes()
            if also is not None:
                (saved.path / also).unlink()
            error = restored(saved.path)
            assert isinstance(error, CorruptCheckpointError)
            assert "tierkeep.json" in str(error)
            if also is not None and kept is not None:
                (saved.path / also).write_bytes(kept)


# Verify


def test_verify_reads_every_byte_once_and_says_so(saved: Saved) -> None:
    report = ENGINE.verify(saved.path, options=FAST)
    assert report.path == str(saved.path)
    assert report.leaves == 4
    assert report.checksums == "tierkeep"
    files = [*small_files(saved), saved.image]
    assert report.nbytes == sum(f.stat().st_size for f in files) - saved.whole.stat().st_size


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("lane_nbytes", [4 * PAGE, 7 * PAGE, 2**20])
def test_verify_lists_every_damaged_chunk_whatever_its_lanes(lanes: int, lane_nbytes: int) -> None:
    engine = Engine(NumpyAdapter(), SaveOptions(chunk_nbytes=30_000, block_nbytes=5 * PAGE, lanes=2))
    options = FAST.__class__(lanes=lanes, lane_nbytes=lane_nbytes, direct=False)
    with memory_directory() as directory:
        engine.save(directory / "item", large_state())
        made = Saved.at(directory / "item")
        assert engine.verify(made.path, options=options).checksums == "tierkeep"
        content = bytearray(made.image.read_bytes())
        chunks = chunks_of(made)
        for _, offset, nbytes in chunks:
            content[offset + nbytes // 2] ^= 4
        made.image.write_bytes(content)
        with pytest.raises(CorruptCheckpointError) as caught:
            engine.verify(made.path, options=options)
        assert len(caught.value.findings) == len(chunks)
        assert {name for name, _, _ in chunks} == {f.split("'")[1] for f in caught.value.findings}


# Stock readers: they look at other files, and must not get other arrays either


ARRAYS = {"w": STATE["w"], "n.0": STATE["n"][0], "5": np.float16(2)}


def stock_reads(path: Path) -> bool:
    """Whether stock TensorStore gives every array, with exactly its bits; False if it raises an error."""
    base = {"driver": "file", "path": f"{path}/"}
    for name, wanted in ARRAYS.items():
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        try:
            found = ts.open({"driver": "zarr3", "kvstore": kvstore}, context=ts.Context()).result().read().result()
        except (ValueError, OSError):
            return False
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), f"{name} is other data to TensorStore"
    return True


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.full)])
def test_no_flip_in_an_index_gives_tensorstore_other_arrays(saved: Saved, every: int, count: Count) -> None:
    tried = 0
    assert stock_reads(saved.path)
    assert stock_reads(saved.path / "ocdbt.process_0")
    for file in small_files(saved):
        if file.name == "manifest.ocdbt" or file.parent.name == "d":
            database = saved.path if file.parent.name != "d" and file.parent == saved.path else file.parent
            database = database.parent if database.name == "d" else database
            for at in range(tried % every, file.stat().st_size, every):
                with flipped(file, at, masks(at)[at // every % 2]):
                    assert not stock_reads(database), (file, at)
                tried += 1
    count(flips_read_by_tensorstore=tried, violations=0)


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.full)])
def test_no_flip_in_the_image_gives_tensorstore_other_arrays(saved: Saved, every: int, count: Count) -> None:
    tried = 0
    for _, offset, nbytes in chunks_of(saved):
        for at in {*range(offset, offset + nbytes + 4, every), offset + nbytes, offset + nbytes + 3}:
            with flipped(saved.image, at, masks(at)[1]):
                assert not stock_reads(saved.path), at
            tried += 1
    count(flips_read_by_tensorstore=tried, violations=0)


# In a process of its own: where Orbax meets an error it leaves tasks behind that nobody awaits.
ORBAX_READS = """
import json, sys
import jax, numpy as np, orbax.checkpoint as ocp
path, places = sys.argv[1], json.loads(sys.argv[2])
with ocp.PyTreeCheckpointer() as checkpointer:
    for file, at in places:
        with open(file, "r+b", buffering=0) as raw:
            def put(mask):
                raw.seek(at)
                byte = raw.read(1)[0]
                raw.seek(at)
                raw.write(bytes([byte ^ mask]))
            put(4)
            try:
                tree = checkpointer.restore(path)
                leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
                found = {
                    ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in keys): np.asarray(leaf).tobytes().hex()
                    for keys, leaf in leaves if not isinstance(leaf, str)
                }
            except Exception:
                found = None
            put(4)
            print("found", json.dumps(found))
"""


def test_no_flip_gives_orbax_other_arrays(saved: Saved, count: Count) -> None:
    pytest.importorskip("orbax.checkpoint")
    metadata = saved.path / "_METADATA"
    merged = [f for f in small_files(saved) if f.parent in (saved.path, saved.path / "d") and f.name not in NEEDED]
    places = [(str(f), at) for f in merged for at in range(5, f.stat().st_size, f.stat().st_size // 5)]
    places += [(str(saved.image), offset + 3) for _, offset, _ in chunks_of(saved)]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORBAX_READS, str(saved.path), json.dumps(places)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    reads = [json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("found ")]
    assert len(reads) == len(places), run.stderr[-2000:]
    wanted = {name: np.asarray(array).tobytes().hex() for name, array in ARRAYS.items()}
    for (file, at), found in zip(places, reads, strict=True):
        if found is not None:
            assert all(found[name] == wanted[name] for name in wanted.keys() & found.keys()), (file, at)
            assert wanted.keys() <= found.keys() or file == str(metadata), (file, at)
    refused = sum(found is None for found in reads)
    count(flips_read_by_orbax=len(places), refused=refused, violations=0)
    assert refused >= len(places) // 2
