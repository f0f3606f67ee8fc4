"""The OCDBT encoder, against stock TensorStore and against a plain encoder of one leaf."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkeep.format.checksum import crc32c
from tierkeep.format.ocdbt import DataFile, Index, IndexTemplate, Value, index_template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UUID = bytes(range(16))
NODES = "d/" + "ab" * 16
IMAGES = [DataFile("", f"d/{digit * 32}") for digit in "739"]
IMAGE_BYTES = [np.random.default_rng(seed).bytes(4096) for seed in range(3)]

LONG = st.builds(lambda unit, n, end: (unit * n + end)[:65_535], st.binary(min_size=1, max_size=3),
                 st.sampled_from([1, 90, 128, 5000, 65_535]), st.binary(max_size=3))  # fmt: skip
KEYS = st.one_of(
    st.binary(max_size=40),
    st.lists(st.sampled_from([b"\0", b"\xff", b"a", b"a/", b"layers.", b"12345678"]), max_size=9).map(b"".join),
    LONG,
)
VALUES = st.one_of(st.binary(max_size=200), st.tuples(st.integers(0, 2), st.integers(0, 2048), st.integers(0, 2048)))
DATABASES = st.dictionaries(KEYS, VALUES, max_size=60)
NODE_LIMITS = st.sampled_from([1, 70, 200, 1000, 100_000_000])


def render(template: IndexTemplate, files: Sequence[DataFile] = IMAGES, node_file: DataFile | str = NODES) -> Index:
    return template.render(files, node_file, uuid=UUID, commit_ns=1_700_000_000_123_456_789)


def write(root: Path, index: Index, nodes: str = NODES, images: Mapping[str, bytes] | None = None) -> None:
    if images is None:
        images = {file.path: content for file, content in zip(IMAGES, IMAGE_BYTES, strict=True)}
    for name, content in {nodes: index.nodes, **images, "manifest.ocdbt": index.manifest}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def base_of(root: Path) -> ts.KvStore:
    return ts.KvStore.open(f"file://{root}/", context=ts.Context()).result()


def database_at(root: Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{root}/"}, context=ts.Context()).result()


def contents(root: Path) -> dict[bytes, bytes]:
    store = database_at(root)
    reads = {key: store.read(key) for key in store.list().result()}
    return {key: bytes(read.result().value) for key, read in reads.items()}


def meant(values: Mapping[bytes, Value], images: Sequence[bytes] = IMAGE_BYTES) -> dict[bytes, bytes]:
    return {
        key: images[value[0]][value[1] : value[1] + value[2]] if isinstance(value, tuple) else value
        for key, value in values.items()
    }


def check_dump(root: Path, index: Index) -> int:
    """Checks order, prefixes and statistics of every node as TensorStore sees them. Returns the height."""
    base = base_of(root)
    dumped: Any = ts.ocdbt.dump(base).result()
    assert ts.ocdbt.undump_manifest(dumped) == index.manifest
    (version,) = dumped["versions"]
    assert version["generation_number"] == 1
    assert version["commit_time"] == 1_700_000_000_123_456_789
    if "location" not in version["root"]:
        assert index.nodes == b""
        assert set(version["root"]["statistics"].values()) == {0}
        return 0
    found = check_node(base, version["root"], version["root_height"], b"")
    assert version["root"]["statistics"]["num_tree_bytes"] == len(index.nodes)
    assert found == sorted(found)
    return int(version["root_height"])


def check_node(base: ts.KvStore, reference: Any, height: int, prefix: bytes) -> list[bytes]:
    node: Any = ts.ocdbt.dump(base, reference["location"]).result()
    assert node["height"] == height
    if "subtree_common_prefix" in reference:  # not the root: nothing that all its keys share is left in them
        entries = node["entries"]
        left_in = common(entries[0]["key"], entries[-1]["key"])
        assert left_in == 0 or (height and any(entry["subtree_common_prefix"] == b"" for entry in entries))
    keys: list[bytes] = []
    nbytes = int(reference["location"].rsplit(":", 1)[1])
    indirect = 0
    for entry in node["entries"]:
        if height:
            below = check_node(base, entry, height - 1, prefix + entry["subtree_common_prefix"])
            assert below[0] == prefix + entry["key"]
            keys += below
            nbytes += entry["statistics"]["num_tree_bytes"]
            indirect += entry["statistics"]["num_indirect_value_bytes"]
        else:
            keys.append(prefix + entry["key"])
            indirect += int(entry.get("indirect_value", ":0").rsplit(":", 1)[1])
    assert reference["statistics"] == {
        "num_keys": len(keys),
        "num_tree_bytes": nbytes,
        "num_indirect_value_bytes": indirect,
    }
    return keys


@settings(deadline=None, max_examples=150)
@given(DATABASES, NODE_LIMITS)
def test_tensorstore_reads_what_was_encoded(values: dict[bytes, Value], max_node_nbytes: int) -> None:
    index = render(index_template(list(values), list(values.values()), max_node_nbytes=max_node_nbytes))
    with tempfile.TemporaryDirectory() as root:
        write(Path(root), index)
        assert contents(Path(root)) == meant(values)
        check_dump(Path(root), index)


@pytest.mark.parametrize(("num_keys", "height"), [(0, 0), (1, 0), (2, 1), (3, 2), (8, 3), (9, 4), (16, 4)])
def test_a_tree_is_as_high_as_its_node_limit_asks(tmp_path: Path, num_keys: int, height: int) -> None:
    values: dict[bytes, Value] = {b"layer/%d" % (i * 7919 % 1000): (0, i, i) for i in range(num_keys)}
    index = render(index_template(list(values), list(values.values()), max_node_nbytes=1))
    write(tmp_path, index)
    assert contents(tmp_path) == meant(values)
    assert check_dump(tmp_path, index) == height


@pytest.mark.parametrize("num_keys", [0, 1, 2, 1000])
@pytest.mark.parametrize("max_node_nbytes", [2000, 100_000_000])
def test_databases_of_every_size_read_back(tmp_path: Path, num_keys: int, max_node_nbytes: int) -> None:
    values: dict[bytes, Value] = {}
    for i in range(num_keys):
        name = b"params.layers.%d.attn.q.weight" % i
        values[name + b"/c/0/0"] = (i % 3, i, 16)
        values[name + b"/zarr.json"] = b'{"zarr_format":3}'
    index = render(index_template(list(values), list(values.values()), max_node_nbytes=max_node_nbytes))
    write(tmp_path, index)
    assert contents(tmp_path) == meant(values)
    check_dump(tmp_path, index)


def test_a_hundred_thousand_keys_read_back(tmp_path: Path) -> None:
    keys = [b"params.layers.%d.mlp.%s.weight/c/0/0" % (i // 2, b"ud"[i % 2 : i % 2 + 1]) for i in range(100_000)]
    values: list[Value] = [(0, i % 4000, 64) for i in range(100_000)]
    write(tmp_path, render(index_template(keys, values)))
    store = database_at(tmp_path)
    assert sorted(store.list().result()) == sorted(keys)
    reads = {i: store.read(keys[i]) for i in range(0, 100_000, 251)}
    for i, read in reads.items():
        assert read.result().value == IMAGE_BYTES[0][i % 4000 : i % 4000 + 64]


def test_more_keys_than_a_node_may_hold_are_split() -> None:
    count = (1 << 20) + 1
    template = index_template([b"%07d" % i for i in range(count)], [b""] * count)
    assert [leaf.num_keys for leaf in template.leaves] == [1 << 20, 1]
    assert [len(level) for level in template.interiors] == [1]


def test_the_format_page_example_comes_out_byte_for_byte() -> None:
    template = index_template([b"w/c/0", b"w/c/1", b"w/zarr.json"], [(0, 0, 4096), (0, 4096, 4096), b"{}"])
    assert render(template, [DataFile("", "d/img")]).nodes == bytes.fromhex(
        "0cdb20de 3f00000000000000 00 00 00 01 05 00 642f696d67 03 04 02 05 01 09 772f632f30 31 7a6172722e6a736f6e"
        "8020 8020 02 01 01 00 00 00 00 8020 7b7d ad38cac1"
    )


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=60))
def test_the_columns_equal_those_of_a_plain_encoder(values: dict[bytes, Value]) -> None:
    nodes = render(index_template(list(values), list(values.values()))).nodes
    assert nodes == plain_leaf(values)


def plain_leaf(values: Mapping[bytes, Value]) -> bytes:
    """One entry at a time, as the format page tells it."""
    entries = sorted(values.items())
    ranges = [value for _, value in entries if isinstance(value, tuple)]
    files = sorted({IMAGES[value[0]] for value in ranges})
    prefixes = [0, *(common(before, key) for (before, _), (key, _) in pairwise(entries))]
    names = [file.path.encode() for file in files]
    name_prefixes = [0, *(common(before, name) for before, name in pairwise(names))]
    sizes = [value[2] if isinstance(value, tuple) else len(value) for _, value in entries]
    body = b"\0" + varints(len(files), *name_prefixes[1:])
    if files:
        body += varints(*(len(name) - cut for name, cut in zip(names, name_prefixes, strict=True)), *[0] * len(files))
        body += b"".join(name[cut:] for name, cut in zip(names, name_prefixes, strict=True))
    body += varints(len(entries), *prefixes[1:])
    body += varints(*(len(key) - cut for (key, _), cut in zip(entries, prefixes, strict=True)))
    body += b"".join(key[cut:] for (key, _), cut in zip(entries, prefixes, strict=True))
    body += varints(*sizes) + bytes(isinstance(value, tuple) for _, value in entries)
    body += varints(*(files.index(IMAGES[value[0]]) for value in ranges), *(value[1] for value in ranges))
    body += b"".join(value for _, value in entries if not isinstance(value, tuple))
    framed = bytes.fromhex("0cdb20de") + (len(body) + 18).to_bytes(8, "little") + b"\0\0" + body
    return framed + crc32c(framed).to_bytes(4, "little")


def common(left: bytes, right: bytes) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def varints(*values: int) -> bytes:
    out = b""
    for value in values:
        while value >= 128:
            out += bytes([value % 128 + 128])
            value //= 128
        out += bytes([value])
    return out


NAMES = st.text("abc0", min_size=1, max_size=8)
FILES = st.builds(
    DataFile,
    st.sampled_from(["", "p/", "p/q/", "ocdbt.process_0/", "ocdbt.process_10/"]),
    st.one_of(NAMES, st.sampled_from(["q/a", "p/q/a", "p/q/b"])),  # one full name may be split in several ways
)


@settings(deadline=None, max_examples=150)
@given(
    DATABASES, NODE_LIMITS, st.lists(st.tuples(st.lists(FILES, min_size=3, max_size=3), NAMES), min_size=1, max_size=3)
)
def test_rendering_again_under_other_names_equals_encoding_afresh(
    values: dict[bytes, Value], max_node_nbytes: int, names: list[tuple[list[DataFile], str]]
) -> None:
    template = index_template(list(values), list(values.values()), max_node_nbytes=max_node_nbytes)
    for files, node_file in names:
        again = render(template, files, "n/" + node_file)
        fresh = index_template(list(values)[::-1], list(values.values())[::-1], max_node_nbytes=max_node_nbytes)
        assert again == render(fresh, files, "n/" + node_file)
        images = {file.base + file.path: bytes([number]) * 4096 for number, file in enumerate(files)}
        by_number = [images[file.base + file.path] for file in files]  # two numbers may name one file
        with tempfile.TemporaryDirectory() as root:
            write(Path(root), again, "n/" + node_file, images)
            assert contents(Path(root)) == meant(values, by_number)
            check_dump(Path(root), again)


@pytest.mark.parametrize("max_node_nbytes", [1, 300, 100_000_000])
def test_tensorstore_writes_overwrites_and_deletes_on_top(tmp_path: Path, max_node_nbytes: int) -> None:
    values: dict[bytes, Value] = {b"a/%d" % i: (i % 3, i, 100) if i % 2 else b"inline %d" % i for i in range(40)}
    write(tmp_path, render(index_template(list(values), list(values.values()), max_node_nbytes=max_node_nbytes)))
    expected = meant(values)
    for key, value in [(b"a/0", b"new"), (b"a/1", bytes(3000)), (b"0", b"first"), (b"b" * 100, b""), (b"a/39", None)]:
        if value is None:
            database_at(tmp_path).delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
            del expected[key]
        else:
            database_at(tmp_path).write(key, value).result()
            expected[key] = value
        assert contents(tmp_path) == expected
    database_at(tmp_path).delete_range(ts.KvStore.KeyRange()).result()
    assert contents(tmp_path) == {}


def test_tensorstore_writes_into_an_empty_database(tmp_path: Path) -> None:
    write(tmp_path, render(index_template([], [])))
    database_at(tmp_path).write(b"k", b"v").result()
    assert contents(tmp_path) == {b"k": b"v"}


@pytest.mark.parametrize("max_node_nbytes", [1, 100_000_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_zarr3_arrays_read_and_take_writes(tmp_path: Path, dtype: str, max_node_nbytes: int) -> None:
    array = np.random.default_rng(5).integers(0, 2, (100, 6)).astype(ts.dtype(dtype).numpy_dtype)
    keys, values, image = image_of({b"model.w/": array, b"model.w.b/": array[:40]})
    index = render(index_template(keys, values, max_node_nbytes=max_node_nbytes), IMAGES[:1])
    write(tmp_path, index, images={IMAGES[0].path: image})
    np.testing.assert_array_equal(open_array(tmp_path, "model.w/").read().result(), array)
    np.testing.assert_array_equal(open_array(tmp_path, "model.w.b/").read().result(), array[:40])
    open_array(tmp_path, "model.w/")[10:50].write(array[50:90]).result()
    changed = array.copy()
    changed[10:50] = array[50:90]
    np.testing.assert_array_equal(open_array(tmp_path, "model.w/").read().result(), changed)
    np.testing.assert_array_equal(open_array(tmp_path, "model.w.b/").read().result(), array[:40])


def image_of(arrays: Mapping[bytes, np.ndarray[Any, Any]]) -> tuple[list[bytes], list[Value], bytes]:
    """Keys and values of arrays as TensorStore stores them, with the chunks one after another in an image."""
    keys: list[bytes] = []
    values: list[Value] = []
    image = b""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    for name, array in arrays.items():
        context = ts.Context()
        grid = {"name": "regular", "configuration": {"chunk_shape": [32, array.shape[1]]}}
        spec = {"driver": "zarr3", "kvstore": "memory://", "metadata": {"chunk_grid": grid, "codecs": codecs}}
        ts.open(spec, create=True, dtype=array.dtype, shape=array.shape, context=context).result().write(array).result()
        store = ts.KvStore.open("memory://", context=context).result()
        for key in store.list().result():
            value = bytes(store.read(key).result().value)
            keys.append(name + key)
            values.append(value if key.endswith(b".json") else (0, len(image), len(value)))
            image += b"" if key.endswith(b".json") else value + bytes(-len(value) % 64)
    return keys, values, image


def open_array(root: Path, name: str) -> ts.TensorStore:
    store = {"driver": "ocdbt", "base": f"file://{root}/", "path": name}
    return ts.open({"driver": "zarr3", "kvstore": store}, context=ts.Context()).result()


@pytest.mark.parametrize("max_node_nbytes", [1, 100_000_000])
def test_two_process_directories_merge_through_their_base_paths(tmp_path: Path, max_node_nbytes: int) -> None:
    arrays = [np.arange(600, dtype=np.float32).reshape(100, 6) + rank for rank in range(2)]
    parts = [image_of({b"rank%d/" % rank: array}) for rank, array in enumerate(arrays)]
    for rank, (keys, values, image) in enumerate(parts):
        template = index_template(keys, values, max_node_nbytes=max_node_nbytes)
        own = tmp_path / f"ocdbt.process_{rank}"
        write(own, render(template, [IMAGES[rank]]), images={IMAGES[rank].path: image})
        np.testing.assert_array_equal(open_array(own, f"rank{rank}/").read().result(), arrays[rank])
    merged = index_template(
        [key for keys, _, _ in parts for key in keys],
        [(rank, *v[1:]) if isinstance(v, tuple) else v for rank, part in enumerate(parts) for v in part[1]],
        max_node_nbytes=max_node_nbytes,
    )
    index = render(merged, [DataFile(f"ocdbt.process_{rank}/", IMAGES[rank].path) for rank in range(2)], "d/merged")
    write(tmp_path, index, "d/merged", {})
    for rank, array in enumerate(arrays):
        np.testing.assert_array_equal(open_array(tmp_path, f"rank{rank}/").read().result(), array)
    check_dump(tmp_path, index)


@pytest.mark.parametrize("max_node_nbytes", [1, 100_000_000])
def test_the_base_of_the_node_file_is_inherited_by_the_files_it_names(tmp_path: Path, max_node_nbytes: int) -> None:
    values: dict[bytes, Value] = {b"k%d" % i: (i % 3, i, 50) for i in range(9)}
    index = render(
        index_template(list(values), list(values.values()), max_node_nbytes=max_node_nbytes),
        node_file=DataFile("ocdbt.process_0/", NODES),
    )
    images = {"ocdbt.process_0/" + file.path: content for file, content in zip(IMAGES, IMAGE_BYTES, strict=True)}
    write(tmp_path, index, "ocdbt.process_0/" + NODES, images)
    assert contents(tmp_path) == meant(values)
    check_dump(tmp_path, index)


def test_a_flipped_byte_is_never_read_as_wrong_data(tmp_path: Path) -> None:
    values: dict[bytes, Value] = {b"w/c/0": (0, 0, 32), b"w/c/1": (0, 32, 32), b"w/zarr.json": b"{}", b"x": b"y"}
    index = render(index_template(list(values), list(values.values()), max_node_nbytes=100))
    write(tmp_path, index)
    assert check_dump(tmp_path, index) > 0
    assert contents(tmp_path) == meant(values)
    for name, whole in ((NODES, index.nodes), ("manifest.ocdbt", index.manifest)):
        for at in range(len(whole)):
            for flip in (1, 0x80, 0xFF):
                (tmp_path / name).write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
                # Every byte of this database is needed to read all of it, so that each flip must be noticed.
                with pytest.raises(ValueError, match=r"Error (reading|decoding)"):
                    contents(tmp_path)
        (tmp_path / name).write_bytes(whole)
    assert contents(tmp_path) == meant(values)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (bytes((1 << 20) + 1), "inline value longer than 1048576 bytes"),
        ((0, (1 << 63) - 5, 5), "no such place in a file"),
        ((0, 1 << 64, 0), "no such place in a file"),
        ((0, -1, 5), "no such place in a file"),
        ((0, 5, -1), "no such place in a file"),
        ((-1, 0, 1), "no such place in a file"),
    ],
)
def test_a_value_that_readers_refuse_is_refused_by_name(value: Value, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"{complaint}.*the-key"):
        index_template([b"z", b"the-key", b"a"], [(0, 0, 1), value, b""])


def test_the_largest_values_and_keys_are_accepted_and_read(tmp_path: Path) -> None:
    values: dict[bytes, Value] = {b"k" * 65_535: bytes(1 << 20), b"far": (0, (1 << 63) - 6, 5)}
    index = render(index_template(list(values), list(values.values())), IMAGES[:1])
    write(tmp_path, index)
    check_dump(tmp_path, index)
    assert database_at(tmp_path).read(b"k" * 65_535).result().value == bytes(1 << 20)


def test_a_key_that_readers_refuse_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"key longer than 65535 bytes: b'kkk.*\(65536 bytes\)"):
        index_template([b"a", b"k" * 65_536], [b"", b""])
    with pytest.raises(ValueError, match="key given twice: b'again'"):
        index_template([b"again", b"a", b"again"], [b"1", b"2", b"3"])
    with pytest.raises(ValueError, match="key given twice: b''"):
        index_template([b"", b""], [b"1", b"2"])


@pytest.mark.parametrize("name", ["../x", "d/../x", "/x", "d//x", "", "d/", "d/.", "d/x.__lock", "d/\0", "x" * 65_536])
def test_a_file_name_that_readers_refuse_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        DataFile("", name)
    with pytest.raises(ValueError, match="file name"):
        render(index_template([b"k"], [b"v"]), node_file=name)


def test_arguments_that_do_not_fit_are_refused() -> None:
    template = index_template([b"k"], [(2, 0, 1)])
    with pytest.raises(ValueError, match="refers to 3 data files, but only 2"):
        render(template, IMAGES[:2])
    with pytest.raises(ValueError, match="uuid"):
        template.render(IMAGES, NODES, uuid=b"short", commit_ns=1)
    with pytest.raises(ValueError, match="commit_ns"):
        template.render(IMAGES, NODES, uuid=UUID, commit_ns=1 << 64)
    with pytest.raises(ValueError, match="1 keys, but 0 values"):
        index_template([b"k"], [])
    for limits in ({"max_node_nbytes": 0}, {"max_node_nbytes": 1 << 32}, {"arity_log2": 0}, {"arity_log2": 17}):
        with pytest.raises(ValueError, match="is not in"):
            index_template([b"k"], [b""], **limits)
