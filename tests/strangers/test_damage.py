"""Damage to what stock Orbax wrote is an error that names the leaf or the file, and never zeros or other data."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import torch

import tierkeep_jax
import tierkeep_torch
from tests.strangers.compare import bits, flat
from tests.strangers.orbax_writers import write
from tierkeep.errors import CorruptCheckpointError, TierkeepError, UnsupportedFormatError
from tierkeep.options import SaveOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATA = np.arange(64 * 64, dtype="f4").reshape(64, 64)


def files(path: Path, name: str) -> list[Path]:
    """The files with the data of the array `name`, of a checkpoint that is not in OCDBT."""
    return [
        found
        for found in sorted((path / name).rglob("*"))
        if found.is_file() and found.name not in ("zarr.json", ".zarray")
    ]


@pytest.mark.parametrize("version", ["zarr2", "zarr3"])
def test_a_chunk_that_is_missing_is_an_error_where_all_were_stored(version: str, tmp_path: Path) -> None:
    write(f"pytree {version} files raw", tmp_path / "c", {"hurt": jnp.asarray(DATA), "whole": jnp.ones(3)})
    metadata = json.loads((tmp_path / "c" / "_METADATA").read_text())
    metadata["store_array_data_equal_to_fill_value"] = True
    (tmp_path / "c" / "_METADATA").write_text(json.dumps(metadata))
    assert flat(tierkeep_jax.load(tmp_path / "c")) == flat({"hurt": DATA, "whole": jnp.ones(3)})
    (gone,) = files(tmp_path / "c", "hurt")
    gone.unlink()
    with pytest.raises(CorruptCheckpointError, match="'hurt'") as caught:
        tierkeep_torch.load(tmp_path / "c")
    assert len(caught.value.findings) == 1
    assert flat(tierkeep_torch.load(tmp_path / "c", keys=["whole"])) == flat({"whole": jnp.ones(3)})


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_a_chunk_missing_from_the_index_is_an_error(chunk: int, tmp_path: Path) -> None:
    """The records of tierkeep's own checkpoints removed, so that only TensorStore looks at them."""
    tierkeep_torch.save(
        {"hurt": torch.from_numpy(DATA), "whole": torch.ones(3)},
        tmp_path / "c",
        options=SaveOptions(chunk_nbytes=max(4096, chunk)),
    )
    (tmp_path / "c" / "tierkeep.json").unlink()
    (tmp_path / "c" / "ocdbt.process_0" / "part.json").unlink()
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/c/"}).result()
    chunks = [key for key in store.list().result() if key.startswith(b"hurt/c/")]
    assert (len(chunks) == 1) == (chunk > 4096)
    store[chunks[-1]] = None
    with pytest.raises(CorruptCheckpointError, match="'hurt'"):
        tierkeep_torch.load(tmp_path / "c")


@pytest.mark.parametrize("version", ["zarr2", "zarr3"])
def test_a_byte_that_changed_in_a_compressed_chunk_is_an_error(version: str, tmp_path: Path) -> None:
    write(f"pytree {version} files zstd", tmp_path / "c", {"hurt": jnp.asarray(DATA), "whole": jnp.ones(3)})
    (file,) = files(tmp_path / "c", "hurt")
    data = bytearray(file.read_bytes())
    data[1] ^= 0x40  # the magic number of the frame
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="'hurt'") as caught:
        tierkeep_jax.load(tmp_path / "c")
    assert len(caught.value.findings) == 1


def test_a_byte_that_changed_anywhere_in_a_chunk_with_crc32c_is_an_error(tmp_path: Path) -> None:
    tierkeep_torch.save({"hurt": torch.from_numpy(DATA), "whole": torch.ones(3)}, tmp_path / "c")
    (tmp_path / "c" / "tierkeep.json").unlink()
    (tmp_path / "c" / "ocdbt.process_0" / "part.json").unlink()
    image = max((tmp_path / "c" / "ocdbt.process_0" / "d").iterdir(), key=lambda path: path.stat().st_size)
    whole = image.read_bytes()
    start = whole.index(DATA.tobytes())
    for at in (0, 1000, DATA.nbytes - 1, DATA.nbytes, DATA.nbytes + 3):  # the last two are the checksum itself
        image.write_bytes(whole[: start + at] + bytes([whole[start + at] ^ 1]) + whole[start + at + 1 :])
        for adapter in (tierkeep_jax, tierkeep_torch):
            with pytest.raises(CorruptCheckpointError, match="'hurt'"):
                adapter.load(tmp_path / "c")


@pytest.mark.parametrize("writer", ["pytree zarr2 ocdbt zstd", "pytree zarr3 files zstd"])
def test_a_file_that_is_missing_or_cut_short_is_an_error_or_does_not_matter(writer: str, tmp_path: Path) -> None:
    state = {"a": jnp.asarray(DATA), "b": jnp.ones(3), "s": "text"}
    write(writer, tmp_path / "c", state)
    raised = 0
    for path in sorted((tmp_path / "c").rglob("*")):
        if not path.is_file():
            continue
        whole = path.read_bytes()
        for kept in (None, 0, len(whole) // 2, len(whole) - 1):
            path.unlink(missing_ok=True)
            if kept is not None:
                path.write_bytes(whole[:kept])
            try:
                found = flat(tierkeep_torch.load(tmp_path / "c"))
            except TierkeepError:
                raised += 1
                continue
            # Without Orbax's metadata it is a directory of arrays. Where Orbax leaves out chunks of the fill value, one
            # that is missing cannot be told from them.
            excused = kept is None and (path.name == "_METADATA" or path.parent.parent.name == "c")
            assert excused or found == flat(state), (path, kept)
        path.write_bytes(whole)
    assert raised >= 8


def edited(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))

    return edit


def text(content: str) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.write_text(content)

    return replace


METADATA = {
    "empty": text(""),
    "no JSON": text("{"),
    "a list": text("[]"),
    "an object": text("{}"),
    "nested deeply": text("[" * 100_000 + "]" * 100_000),
    "no tree": edited(lambda raw: raw.pop("tree_metadata")),
    "a tree of numbers": edited(lambda raw: raw["tree_metadata"].update({"('a',)": 5})),
    "keys of numbers": edited(lambda raw: raw["tree_metadata"]["('a',)"].update(key_metadata=5)),
    "a path too deep": edited(
        lambda raw: raw["tree_metadata"]["('a',)"].update(key_metadata=[{"key": "x", "key_type": 2}] * 5000)
    ),
    "a key type of text": edited(lambda raw: raw["tree_metadata"]["('a',)"]["key_metadata"][0].update(key_type="x")),
    "a leaf that is not there": edited(lambda raw: raw["tree_metadata"]["('a',)"]["key_metadata"][0].update(key="z")),
    "one leaf twice": edited(lambda raw: raw["tree_metadata"].update({"again": raw["tree_metadata"]["('a',)"]})),
    "a leaf below a leaf": edited(
        lambda raw: raw["tree_metadata"].update(
            {
                "again": {
                    "key_metadata": [{"key": "a", "key_type": 2}, {"key": "c", "key_type": 2}],
                    "value_metadata": {"value_type": "None", "skip_deserialize": True},
                }
            }
        )
    ),
    "a path out of it": edited(
        lambda raw: raw["tree_metadata"]["('a',)"]["key_metadata"][0].update(key="../../../other/a")
    ),
    "zarr of the other version": edited(lambda raw: raw.update(use_zarr3=False)),
    "no OCDBT": edited(lambda raw: raw.update(use_ocdbt=False)),
    "a string that is not there": edited(
        lambda raw: raw["tree_metadata"]["('a',)"]["value_metadata"].update(value_type="string")
    ),
}


@pytest.mark.parametrize("name", METADATA)
def test_damaged_metadata_is_an_error(name: str, tmp_path: Path) -> None:
    write("pytree zarr3 ocdbt zstd", tmp_path / "c", {"a": jnp.ones(4), "b": [jnp.ones(3)], "s": "text"})
    METADATA[name](tmp_path / "c" / "_METADATA")
    for adapter in (tierkeep_jax, tierkeep_torch):
        with pytest.raises(CorruptCheckpointError, match=str(tmp_path / "c")):
            adapter.load(tmp_path / "c")


@pytest.mark.parametrize("writer", ["pytree zarr2 ocdbt raw", "pytree zarr3 files raw"])
@pytest.mark.parametrize("key", ["../secret/x", "/secret/x", "a/../../secret/x"])
def test_a_name_that_leaves_the_directory_is_an_error(key: str, writer: str, tmp_path: Path) -> None:
    write(writer, tmp_path / "c", {"a": jnp.ones(4)})
    write("pytree zarr3 files raw", tmp_path / "secret", {"x": jnp.full(4, 7.0)})
    edited(lambda raw: raw["tree_metadata"]["('a',)"]["key_metadata"][0].update(key=key))(tmp_path / "c" / "_METADATA")
    with pytest.raises(CorruptCheckpointError, match="secret"):
        tierkeep_torch.load(tmp_path / "c")


def test_two_leaves_that_orbax_stored_under_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    write("pytree zarr3 ocdbt raw", tmp_path / "c", {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}})
    with pytest.raises(CorruptCheckpointError, match=r"\('a', 'b'\).*\('a.b',\)"):
        tierkeep_jax.load(tmp_path / "c")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"s": 5}', "{"])
def test_damaged_strings_are_an_error(content: str, tmp_path: Path) -> None:
    write("pytree zarr3 ocdbt zstd", tmp_path / "c", {"a": jnp.ones(4), "s": "text"})
    (tmp_path / "c" / "_strings.json").write_text(content)
    with pytest.raises(CorruptCheckpointError, match="_strings"):
        tierkeep_jax.load(tmp_path / "c")


@pytest.mark.parametrize("content", ["", "[]", "5", '{"array_metadatas": 5}', '{"array_metadatas": [{}]}', "{"])
def test_damaged_array_metadata_is_an_error(content: str, tmp_path: Path) -> None:
    write("pytree zarr3 ocdbt zstd", tmp_path / "c", {"a": jnp.ones(4)})
    (tmp_path / "c" / "array_metadatas" / "process_0").write_text(content)
    with pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        tierkeep_jax.load(tmp_path / "c")


@pytest.mark.parametrize("shape", [[2**60], [2**31, 2**29], [2**62, 2]])
@pytest.mark.parametrize("version", ["zarr2", "zarr3"])
def test_an_array_that_declares_more_than_memory_holds_is_an_error(
    version: str, shape: list[int], tmp_path: Path
) -> None:
    write(f"pytree {version} files raw", tmp_path / "c", {"a": jnp.ones(4), "b": jnp.ones(3)})
    file = tmp_path / "c" / "a" / ("zarr.json" if version == "zarr3" else ".zarray")
    raw = json.loads(file.read_text())
    raw["shape"] = shape
    if version == "zarr2":
        raw["chunks"] = [4] * len(shape)
    else:
        raw["chunk_grid"]["configuration"]["chunk_shape"] = [4] * len(shape)
        raw["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    file.write_text(json.dumps(raw))
    tracemalloc.start()
    try:
        for adapter in (tierkeep_jax, tierkeep_torch):
            with pytest.raises((CorruptCheckpointError, UnsupportedFormatError), match="'a'"):
                adapter.load(tmp_path / "c")
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_a_target_is_untouched_where_the_metadata_is_damaged(tmp_path: Path) -> None:
    write("pytree zarr3 ocdbt zstd", tmp_path / "c", {"a": jnp.ones(4)})
    (tmp_path / "c" / "manifest.ocdbt").write_bytes(b"nothing of the kind")
    into = {"a": torch.full((4,), 7.0)}
    with pytest.raises(CorruptCheckpointError, match="'a'"):
        tierkeep_torch.load(tmp_path / "c", into)
    assert bits(into["a"]) == bits(np.full(4, 7, "f4"))
