"""Records and images that were changed, by accident or on purpose, are errors and never data."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkeep.checkpointer import Engine
from tierkeep.errors import CorruptCheckpointError, UnsupportedFormatError
from tierkeep.format.checksum import crc32c, seal, unseal
from tierkeep.options import PAGE, RestoreOptions, SaveOptions
from tierkeep.restore.opened import open_checkpoint
from tierkeep.testing import strategies as tk
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINE = Engine(NumpyAdapter(), SaveOptions(chunk_nbytes=5000, block_nbytes=PAGE, lanes=1, lane_nbytes=8 * PAGE))
SHARED = np.arange(40, dtype=np.int16)
STATE = {
    "small": np.arange(10, dtype=np.float32),
    "large": np.arange(3 * 1111, dtype=np.float64).reshape(3, 1111),
    "uneven": np.arange(7001, dtype=np.uint16),
    "tied": [SHARED, SHARED],
    "plain": (1, "text", {2, 3}, b"bytes", None),
    5: np.float16(1.5),
}
WANTED = tk.exact_form(STATE)
REFUSED = (CorruptCheckpointError, UnsupportedFormatError)


class Saved(NamedTuple):
    """One checkpoint that the tests of this file damage and mend again."""

    path: Path
    whole: Path
    part: Path
    image: Path


@pytest.fixture(scope="module")
def saved() -> Iterator[Saved]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "item"
        ENGINE.save(path, STATE)
        part = path / "ocdbt.process_0" / "part.json"
        name = msgspec.json.decode(part.read_bytes())["image"]
        yield Saved(path, path / "tierkeep.json", part, path / "ocdbt.process_0" / "d" / name)
        assert restored(path) == WANTED  # every test mended what it broke


def restored(path: Path) -> Any:
    return tk.exact_form(ENGINE.restore(path, options=RestoreOptions(lanes=1, lane_nbytes=8 * PAGE, direct=False)))


def damaged(path: Path, file: Path, content: bytes) -> Any:
    """What a restore gives, or the error it raises, with other content in a file."""
    kept = file.read_bytes()
    file.write_bytes(content)
    try:
        return restored(path)
    except REFUSED as error:
        return error
    finally:
        file.write_bytes(kept)


# Accidents


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9) | st.text(max_size=3), min_size=1, max_size=4))
def test_a_sealed_record_opens_to_itself(record: dict[str, Any]) -> None:
    sealed = seal(msgspec.json.encode(record))
    assert {k: v for k, v in unseal(sealed).items() if k != "crc32c"} == {
        k: v for k, v in record.items() if k != "crc32c"
    }
    assert msgspec.json.decode(sealed)["crc32c"] == f"{crc32c(msgspec.json.encode(record)[:-1]):08x}"


@pytest.mark.parametrize("name", ["whole", "part"])
def test_a_flip_of_any_byte_of_a_record_is_an_error(saved: Saved, name: str) -> None:
    file: Path = getattr(saved, name)
    good = file.read_bytes()
    for at in range(len(good)):
        flip = (0x01, 0x20, 0x80, 0xFF)[at % 4]
        content = good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :]
        with pytest.raises(ValueError, match=r"."):
            unseal(content)
        if at % 16 == 0 or at > len(good) - 30:
            assert isinstance(damaged(saved.path, file, content), REFUSED)


@pytest.mark.parametrize("name", ["whole", "part"])
def test_a_record_cut_short_or_drawn_out_is_an_error(saved: Saved, name: str) -> None:
    file: Path = getattr(saved, name)
    good = file.read_bytes()
    for n in {*range(0, len(good), 97), len(good) - 1, len(good) - 2, 1}:
        assert isinstance(damaged(saved.path, file, good[:n]), REFUSED)
    for more in (b"\n", b"\0", b"}", b" ", good):
        assert isinstance(damaged(saved.path, file, good + more), REFUSED)
        assert isinstance(damaged(saved.path, file, more + good), REFUSED)


@pytest.mark.parametrize("name", ["part", "image"])
def test_a_missing_file_is_an_error_that_names_it(saved: Saved, name: str) -> None:
    file: Path = getattr(saved, name)
    aside = file.with_name("aside")
    file.rename(aside)
    try:
        with pytest.raises(CorruptCheckpointError, match=file.name) as caught:
            restored(saved.path)
        assert "missing" in str(caught.value)
    finally:
        aside.rename(file)


def extents(saved: Saved) -> list[tuple[str, int, int]]:
    """(leaf, offset, bytes of the array) of every chunk, the overhang of an edge chunk left out."""
    found = []
    with open_checkpoint(LocalDisk(), saved.path, direct=False, holds="") as opened:
        for (leaf, number), chunk in opened.parts[0].chunks.items():
            record = opened.whole.leaves[leaf]
            rows = record.chunk_nbytes
            if record.chunk:
                first = number // max(1, int(np.prod(record.grid[1:]))) * record.chunk[0]
                rows = min(record.chunk[0], record.spec.shape[0] - first) * (record.chunk_nbytes // record.chunk[0])
            found.append((record.name, chunk.offset, rows))
    return found


@settings(max_examples=120)
@given(st.data())
def test_a_flip_in_a_chunk_is_an_error_that_names_leaf_and_file(saved: Saved, data: st.DataObject) -> None:
    name, offset, nbytes = data.draw(st.sampled_from(extents(saved)))
    at = offset + data.draw(st.integers(0, nbytes - 1))
    content = bytearray(saved.image.read_bytes())
    content[at] ^= data.draw(st.integers(1, 255))
    error = damaged(saved.path, saved.image, bytes(content))
    assert isinstance(error, CorruptCheckpointError)
    (finding,) = error.findings
    assert repr(name) in finding
    assert str(saved.image) in finding


def test_flips_in_the_padding_do_no_harm(saved: Saved) -> None:
    content = bytearray(b ^ 0xFF for b in saved.image.read_bytes())
    kept = saved.image.read_bytes()
    with open_checkpoint(LocalDisk(), saved.path, direct=False, holds="") as opened:
        for (leaf, _), chunk in opened.parts[0].chunks.items():
            end = chunk.offset + opened.whole.leaves[leaf].chunk_nbytes
            content[chunk.offset : end] = kept[chunk.offset : end]
    assert bytes(content) != kept
    assert damaged(saved.path, saved.image, bytes(content)) == WANTED


@pytest.mark.parametrize("change", [lambda b: b[:-PAGE], lambda b: b + bytes(PAGE), lambda b: b[:-1], lambda b: b""])
def test_an_image_of_another_size_is_an_error(saved: Saved, change: Callable[[bytes], bytes]) -> None:
    error = damaged(saved.path, saved.image, change(saved.image.read_bytes()))
    assert isinstance(error, CorruptCheckpointError)
    assert saved.image.name in str(error)


def test_the_chunks_of_two_leaves_cannot_change_places(saved: Saved) -> None:
    content = bytearray(saved.image.read_bytes())
    places = [(at, n) for name, at, n in extents(saved) if name == "large"]
    (a, n), (b, _) = places[0], places[-1]
    content[a : a + n], content[b : b + n] = content[b : b + n], content[a : a + n]
    assert isinstance(damaged(saved.path, saved.image, bytes(content)), CorruptCheckpointError)


# Purpose: records that are sealed again after they were edited


HUGE = 2**62


def set_at(*path: Any, to: Any) -> Callable[[Any], None]:
    def edit(record: Any) -> None:
        for step in path[:-1]:
            record = record[step]
        record[path[-1]] = to(record[path[-1]]) if callable(to) else to

    return edit


def leaf(name: str, column: int, to: Any) -> Callable[[Any], None]:
    """Edits one column of a leaf's row: name, kind, dtype, shape, ext, chunk, tie."""

    def edit(record: Any) -> None:
        (row,) = (row for row in record["structure"]["leaves"] if row[0] == name)
        row[column] = to

    return edit


WHOLE_EDITS: dict[str, Callable[[Any], None]] = {
    "huge shape": leaf("small", 3, [HUGE]),
    "huge shape and chunk": lambda r: (leaf("small", 3, [HUGE])(r), leaf("small", 5, [HUGE])(r), None)[-1],
    "huge zero-size shape": lambda r: (leaf("small", 3, [0, HUGE, HUGE])(r), leaf("small", 5, [1, HUGE, HUGE])(r), None)[-1],
    "many axes": lambda r: (leaf("small", 3, [1] * 99)(r), leaf("small", 5, [1] * 99)(r), None)[-1],
    "beyond 64 bits": leaf("small", 3, [2**64]),
    "negative shape": leaf("small", 3, [-10]),
    "fractional shape": leaf("small", 3, [10.0]),
    "boolean shape": leaf("small", 3, [True]),
    "shape of text": leaf("small", 3, "10"),
    "no chunk": leaf("small", 5, [0]),
    "chunk of other rank": leaf("small", 5, [10, 1]),
    "wider dtype": leaf("small", 2, "float64"),
    "unknown dtype": leaf("small", 2, "float5"),
    "dtype of no name": leaf("small", 2, 4),
    "number of another dtype": leaf("plain.0", 2, "float64"),
    "number with a shape": lambda r: (leaf("plain.0", 3, [1])(r), leaf("plain.0", 5, [1])(r), None)[-1],
    "tie to itself": leaf("small", 6, 0),
    "tie to a later leaf": leaf("small", 6, 2),
    "tie far away": leaf("tied.1", 6, 10**6),
    "tie to another kind": leaf("tied.1", 6, 0),
    "tie untied": leaf("tied.1", 6, None),
    "short row": lambda r: r["structure"]["leaves"][0].pop(),
    "one leaf less": lambda r: r["structure"]["leaves"].pop(),
    "no leaves": set_at("structure", "leaves", to=[]),
    "no tree": set_at("structure", "tree", to=7000),
    "no structure": set_at("structure", to=None),
    "values gone": set_at("values", to=[]),
    "values malformed": set_at("values", to=lambda values: [5 for _ in values]),
    "part above": set_at("parts", 0, 0, to="../ocdbt.process_0"),
    "part elsewhere": set_at("parts", 0, 0, to="/tmp"),
    "part of another name": set_at("parts", 0, 0, to="ocdbt.process_x"),
    "part missing": set_at("parts", 0, 0, to="ocdbt.process_1"),
    "part of another size": set_at("parts", 0, 1, to=5),
    "part of another checksum": set_at("parts", 0, 2, to=5),
    "no parts": set_at("parts", to=[]),
    "parts malformed": set_at("parts", to=[5]),
    "other save": set_at("save_id", to="0" * 32),
    "other digest": set_at("digest", to="0" * 32),
    "newer version": set_at("version", to=99),
    "version of text": set_at("version", to="1"),
    "other format": set_at("format", to="tierkeep.part"),
}  # fmt: skip

PART_EDITS: dict[str, Callable[[Any], object]] = {
    "offset past the image": set_at("layout", "offset", 0, to=10**9),
    "offset near the end": set_at("layout", "offset", 0, to=lambda _: 10**5),
    "huge offset": set_at("layout", "offset", 0, to=HUGE),
    "negative offset": set_at("layout", "offset", 0, to=-64),
    "overlapping offsets": set_at("layout", "offset", to=lambda offsets: [offsets[0]] * len(offsets)),
    "chunk twice": lambda r: [r["layout"][c].append(r["layout"][c][0]) for c in ("leaf", "number", "offset")]
    and r["crcs"].append(r["crcs"][0]),
    "chunk gone": lambda r: [r["layout"][c].pop() for c in ("leaf", "number", "offset")] and r["crcs"].pop(),
    "column shorter": lambda r: r["layout"]["offset"].pop(),
    "number too large": set_at("layout", "number", 0, to=10**6),
    "leaf too large": set_at("layout", "leaf", 0, to=10**6),
    "chunk of a tied leaf": set_at("layout", "leaf", 0, to=4),
    "a checksum less": lambda r: r["crcs"][0].pop(),
    "checksums gone": set_at("crcs", 0, to=[]),
    "checksum changed": set_at("crcs", 0, 0, to=lambda crc: crc ^ 1),
    "checksum of text": set_at("crcs", 0, 0, to="0"),
    "crcs gone": set_at("crcs", to=None),
    "no block": set_at("layout", "block_nbytes", to=0),
    "huge block": set_at("layout", "block_nbytes", to=HUGE),
    "image above": set_at("image", to="../" + "0" * 29),
    "image with a slash": set_at("image", to="0" * 16 + "/" + "0" * 15),
    "image of another name": set_at("image", to="0" * 32),
    "image of no name": set_at("image", to=""),
    "smaller image": set_at("image_nbytes", to=lambda n: n - PAGE),
    "huge image": set_at("image_nbytes", to=HUGE),
    "other save": set_at("save_id", to="0" * 32),
    "newer version": set_at("version", to=2),
    "other format": set_at("format", to="tierkeep"),
}  # fmt: skip


def sealed_again(record: dict[str, Any]) -> bytes:
    record.pop("crc32c", None)
    return seal(msgspec.json.encode(record))


def edited(saved: Saved, part_edit: Callable[[Any], Any] | None, whole_edit: Callable[[Any], Any] | None) -> Any:
    """What a restore makes of records that were edited and sealed again, the part's checksum in the whole too."""
    part = copy.deepcopy(msgspec.json.decode(saved.part.read_bytes()))
    whole = copy.deepcopy(msgspec.json.decode(saved.whole.read_bytes()))
    if part_edit is not None:
        part_edit(part)
        record = sealed_again(part)
        whole["parts"][0][1:] = [len(record), crc32c(record)]
    else:
        record = saved.part.read_bytes()
    if whole_edit is not None:
        whole_edit(whole)
    kept = saved.part.read_bytes()
    saved.part.write_bytes(record)
    try:
        return damaged(saved.path, saved.whole, sealed_again(whole))
    finally:
        saved.part.write_bytes(kept)


def test_records_sealed_again_without_an_edit_are_whole(saved: Saved) -> None:
    assert edited(saved, lambda record: None, lambda record: None) == WANTED


@pytest.mark.parametrize("name", WHOLE_EDITS)
def test_a_whole_record_edited_on_purpose_is_refused(saved: Saved, name: str) -> None:
    assert isinstance(edited(saved, None, WHOLE_EDITS[name]), REFUSED)


@pytest.mark.parametrize("name", PART_EDITS)
def test_a_part_record_edited_on_purpose_is_refused(saved: Saved, name: str) -> None:
    assert isinstance(edited(saved, PART_EDITS[name], None), REFUSED)


@pytest.mark.parametrize("name", ["part", "whole"])
def test_a_record_nested_without_end_is_refused(saved: Saved, name: str) -> None:
    deep = seal(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    if name == "whole":
        assert isinstance(damaged(saved.path, saved.whole, deep), REFUSED)
        return
    whole = msgspec.json.decode(saved.whole.read_bytes())
    whole["parts"][0][1:] = [len(deep), crc32c(deep)]
    kept = saved.part.read_bytes()
    saved.part.write_bytes(deep)
    try:
        assert isinstance(damaged(saved.path, saved.whole, sealed_again(whole)), REFUSED)
    finally:
        saved.part.write_bytes(kept)
