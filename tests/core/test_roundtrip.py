"""What is saved comes back bit for bit: through tierkeep, through stock TensorStore, through stock Orbax."""

from __future__ import annotations

import collections
import copy
import glob
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkeep.checkpointer import Checkpointer, Engine
from tierkeep.errors import InvalidStateError
from tierkeep.format import dtypes
from tierkeep.format.checksum import crc32c
from tierkeep.leaf import ArrayShard, Box, Leaf
from tierkeep.memory.buffers import Buffers
from tierkeep.options import PAGE, RestoreOptions, SaveOptions
from tierkeep.restore.opened import Opened, open_checkpoint
from tierkeep.restore.plan import Read, plan_reads
from tierkeep.restore.read import execute_reads
from tierkeep.testing import strategies as tk
from tierkeep.testing.numpy_adapter import NumpyAdapter
from tierkeep.tiers.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ENGINE = Engine(NumpyAdapter())
DISK = LocalDisk()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """In memory where there is such a place: the laws save hundreds of times, and each save waits for the disk."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def saved(directory: Path, state: Any, options: SaveOptions, adapter: Any = None) -> Path:
    path = Path(tempfile.mkdtemp(dir=directory)) / "item"
    engine = Engine(adapter or NumpyAdapter(), options)
    engine.save(path, state)
    engine.close()
    return path


# (a) ours


@given(tk.states(), tk.save_options(), tk.restore_options())
def test_any_state_comes_back_as_it_was(
    directory: Path, state: Any, options: SaveOptions, restoring: RestoreOptions
) -> None:
    path = saved(directory, state, options)
    assert tk.exact_form(ENGINE.restore(path, options=restoring)) == tk.exact_form(state)


@given(tk.states(), tk.save_options(), tk.restore_options())
def test_any_state_comes_back_into_a_target_of_its_structure(
    directory: Path, state: Any, options: SaveOptions, restoring: RestoreOptions
) -> None:
    path = saved(directory, state, options)
    target = blank(state)
    restored = ENGINE.restore(path, target, options=restoring)
    assert tk.exact_form(restored) == tk.exact_form(state)
    if isinstance(target, dict | list | np.ndarray):
        assert restored is target


def blank(state: Any) -> Any:
    """The same structure with other content in its arrays, each array writable and its own."""
    if isinstance(state, np.ndarray):
        return np.full_like(state, 1, order="C", subok=False)
    if isinstance(state, tk.Settings):
        return tk.Settings(blank(state.rate), blank(state.extra))
    if isinstance(state, tk.Pair):
        return tk.Pair(*map(blank, state))
    if isinstance(state, Mapping):
        other = copy.copy(state)
        other.update({key: blank(child) for key, child in state.items()})  # type: ignore[attr-defined]
        return other
    if type(state) in (list, tuple, collections.deque):
        return type(state)(map(blank, state))
    return state


@given(tk.states(), tk.save_options(), st.data())
def test_keys_select_exactly_the_leaves_they_match(
    directory: Path, state: Any, options: SaveOptions, data: st.DataObject
) -> None:
    forms = tk.leaf_forms(state)
    chosen = data.draw(st.lists(st.sampled_from(sorted(forms)), min_size=1, unique=True))
    path = saved(directory, state, options)
    part = ENGINE.restore(path, options=RestoreOptions(), keys=[glob.escape(name) for name in chosen])
    # A name above others selects all that is below it.
    expected = {n: f for n, f in forms.items() if any(n == c or n.startswith(c + ".") for c in chosen)}
    assert tk.leaf_forms(part) == expected


@given(tk.states(leaves=tk.arrays() | st.none()), st.data())
def test_a_second_save_with_the_cached_plan_holds_the_new_content(
    directory: Path, state: Any, data: st.DataObject
) -> None:
    other = data.draw(st.just(blank(state)))
    engine = Engine(NumpyAdapter(), SaveOptions(lanes=2))
    place = Path(tempfile.mkdtemp(dir=directory))
    for number, content in enumerate((state, other, state)):
        engine.save(place / str(number), content)
        assert tk.exact_form(engine.restore(place / str(number), options=RestoreOptions())) == tk.exact_form(content)


@given(tk.arrays(), tk.arrays())
def test_one_memory_is_stored_once_and_comes_back_as_one_array(
    directory: Path, array: np.ndarray[Any, Any], other: np.ndarray[Any, Any]
) -> None:
    path = saved(directory, {"a": array, "b": other, "again": array}, SaveOptions(lanes=1))
    restored = ENGINE.restore(path, options=RestoreOptions())
    assert (restored["again"] is restored["a"]) == (array.size > 0)
    assert ENGINE.metadata(path).nbytes == array.nbytes + other.nbytes


# Boxes


class Sharded:
    """An array as the pieces a process holds."""

    def __init__(self, array: np.ndarray[Any, Any], boxes: Sequence[tuple[Box, int]]) -> None:
        self.array = array
        self.boxes = boxes


class ShardedAdapter(NumpyAdapter):
    def expand(self, value: Any) -> Any:
        if not isinstance(value, Sharded):
            return None
        dtype = dtypes.dtype_of_numpy(value.array.dtype)
        assert dtype is not None
        bits = value.array.view(dtypes.bits(dtype.itemsize))
        shards = tuple(ArrayShard(box, bits[box.slices()], replica) for box, replica in value.boxes)
        return Leaf("array", dtype.name, value.array.shape, shards)


@st.composite
def sharded(draw: st.DrawFn) -> Sharded:
    array = draw(tk.arrays(max_axes=3))
    found = draw(tk.grids(array.shape))
    copies = draw(st.integers(1, 2))
    placed = [(box, replica) for replica in reversed(range(copies)) for box in found]
    return Sharded(array, draw(st.permutations(placed)))


@given(sharded(), tk.arrays(), tk.save_options(), tk.restore_options(), st.data())
def test_what_was_saved_in_shards_is_read_in_any_boxes(
    directory: Path,
    state: Sharded,
    other: np.ndarray[Any, Any],
    options: SaveOptions,
    restoring: RestoreOptions,
    data: st.DataObject,
) -> None:
    path = saved(directory, {"w": state, "other": other}, options, ShardedAdapter())
    whole = ENGINE.restore(path, options=restoring)
    assert tk.exact_form(whole["w"]) == tk.exact_form(state.array)
    assert tk.exact_form(stored_array(path, "w")) == stored_form(state.array)
    sources = [state.array, other]
    check_image(path, sources)
    wants = [
        (leaf, data.draw(tk.boxes(sources[leaf].shape)))
        for leaf in data.draw(st.lists(st.sampled_from([0, 1]), max_size=5))
    ]
    got = read_boxes(path, wants, sources, restoring)
    for (leaf, box), array in zip(wants, got, strict=True):
        assert tk.exact_form(array) == tk.exact_form(np.asarray(sources[leaf][box.slices()]))


def check_image(path: Path, sources: Sequence[np.ndarray[Any, Any]]) -> None:
    """Every byte of the image is a chunk's, its checksum's, or zero; what an edge chunk overhangs is zero too."""
    with open_checkpoint(DISK, path, direct=False, holds="") as opened:
        (part,), (image,) = opened.parts, opened.images
        wanted = np.zeros(part.image_nbytes, np.uint8)
        for (leaf, number), chunk in part.chunks.items():
            record = opened.whole.leaves[leaf]
            place = np.unravel_index(number, record.grid) if record.grid else ()
            begin = tuple(int(at) * step for at, step in zip(place, record.chunk, strict=True))
            held = Box(begin, record.chunk).intersect(Box.whole(record.spec.shape))
            assert held is not None
            full = np.zeros(record.chunk_nbytes, np.uint8).view(sources[leaf].dtype).reshape(record.chunk)
            full[held.shifted(begin).slices()] = sources[leaf][held.slices()]
            data = full.tobytes()
            data += crc32c(data).to_bytes(4, "little")
            wanted[chunk.offset : chunk.offset + len(data)] = np.frombuffer(data, np.uint8)
    if image is not None:
        assert image.path.read_bytes() == wanted.tobytes()


def read_boxes(
    path: Path, wants: list[tuple[int, Box]], sources: Sequence[np.ndarray[Any, Any]], options: RestoreOptions
) -> list[np.ndarray[Any, Any]]:
    out = [np.zeros(box.shape, sources[leaf].dtype) for leaf, box in wants]
    filled = [np.zeros(box.shape, np.int64) for _, box in wants]

    def sink(want: int) -> Any:
        bits = out[want].view(dtypes.bits(out[want].itemsize))

        def put(part: Box, data: np.ndarray[Any, Any]) -> None:
            assert data.shape == part.shape
            bits[part.slices()] = data
            filled[want][part.slices()] += 1

        return put

    # 3 pages hold the largest two blocks of `save_options`; a lane below that is the Stored source's to widen.
    lane = max(options.lane_nbytes, 10 * PAGE)
    with open_checkpoint(DISK, path, direct=options.direct, holds="") as opened:
        reads = plan_reads(opened.whole, opened.parts, opened.held_by, wants, lane)
        check_reads(opened, reads, wants, lane)
        execute_reads(opened, reads, [sink(n) for n in range(len(wants))], Buffers(2, lane), 2, "")
    assert all((count == 1).all() for count in filled)
    return out


def check_reads(opened: Opened, reads: Sequence[Read], wants: Sequence[tuple[int, Box]], lane: int) -> None:
    """Requests are aligned, fit a lane and the image; each block of a chunk that fits a lane is verified once."""
    blocks: collections.Counter[tuple[int, int, int]] = collections.Counter()
    for read in reads:
        assert read.offset % PAGE == read.nbytes % PAGE == 0
        assert 0 < read.nbytes <= lane
        assert read.offset + read.nbytes <= opened.parts[read.part].image_nbytes
        for segment in read.segments:
            record = opened.whole.leaves[segment.leaf]
            chunk = opened.parts[read.part].chunks[segment.leaf, segment.number]
            block = opened.parts[read.part].block_nbytes
            assert read.offset <= segment.offset == chunk.offset + segment.first * block
            assert segment.offset + segment.nbytes <= read.offset + read.nbytes
            assert segment.offset + segment.nbytes <= chunk.offset + record.chunk_nbytes
            if record.chunk_nbytes <= lane - 2 * PAGE:
                blocks.update((segment.leaf, segment.number, segment.first + n) for n in range(segment.blocks))
    assert set(blocks.values()) <= {1}
    assert bool(reads) == any(box.size for _, box in wants)


# (b) stock TensorStore


def stored_array(base: Path, name: str) -> np.ndarray[Any, Any]:
    store = {"driver": "ocdbt", "base": f"file://{base}/", "path": name}
    array: np.ndarray[Any, Any] = (
        ts.open({"driver": "zarr3", "kvstore": store}, context=ts.Context()).result().read().result()
    )
    return array


def stored_form(array: np.ndarray[Any, Any]) -> Any:
    """What a stock reader sees of an array: the bits of a dtype that zarr lacks are integers."""
    kind = dtypes.lookup(array.dtype.name).zarr
    return tk.exact_form(
        array if kind == array.dtype.name else np.ascontiguousarray(array).view(kind).reshape(array.shape)
    )


@given(st.lists(tk.arrays(), min_size=1, max_size=4), tk.save_options())
def test_stock_tensorstore_reads_the_same_bits_from_the_whole_and_from_the_part(
    directory: Path, arrays: list[np.ndarray[Any, Any]], options: SaveOptions
) -> None:
    state = {f"leaf{number}": array for number, array in enumerate(arrays)}
    path = saved(directory, {"in": state, "again": arrays[0]}, options)
    ours = ENGINE.restore(path, options=RestoreOptions())
    for base in (path, path / "ocdbt.process_0"):
        for name, array in state.items():
            assert tk.exact_form(stored_array(base, f"in.{name}")) == stored_form(array)
            assert tk.exact_form(ours["in"][name]) == tk.exact_form(array)
        assert tk.exact_form(stored_array(base, "again")) == stored_form(arrays[0])


def test_every_dtype_of_numpy_goes_through_ours_and_through_stock_tensorstore(tmp_path: Path) -> None:
    state = {}
    for name in tk.NUMPY_DTYPES:
        dtype = dtypes.numpy_dtype(name)
        assert dtype is not None
        every = np.arange(2 if name == "bool" else 256, dtype=np.uint8).repeat(dtype.itemsize)
        state[name] = np.ascontiguousarray(every[::-1]).view(dtype)
    path = saved(tmp_path, state, SaveOptions(lanes=2))
    restored = ENGINE.restore(path, options=RestoreOptions())
    for name, array in state.items():
        assert tk.exact_form(restored[name]) == tk.exact_form(array)
        assert tk.exact_form(stored_array(path, name)) == stored_form(array)


# (c) stock Orbax


@pytest.fixture(scope="module")
def stock() -> Iterator[Sequence[Any]]:
    readers = ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()
    yield readers
    for reader in readers:
        reader.close()


ORBAX_KEYS = st.text("ab é_1", min_size=1, max_size=4) | st.integers(0, 3)
ORBAX_STATES = st.builds(
    # Orbax takes a tree of no leaves for no tree.
    lambda state: {"state": state, "array": np.arange(3)},
    tk.states(
        leaves=tk.arrays() | tk.scalars() | st.text("abé", max_size=4) | st.none(),
        mapping_keys=ORBAX_KEYS,
        max_leaves=8,
    ),
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(ORBAX_STATES, tk.save_options())
def test_stock_orbax_reads_the_same_bits(
    directory: Path, stock: Sequence[Any], state: Any, options: SaveOptions
) -> None:
    root = Path(tempfile.mkdtemp(dir=directory))
    with Checkpointer(NumpyAdapter(), root, options=options, asynchronous=False) as ours:
        ours.save(7, state)
    assert tk.exact_form(ENGINE.restore(root / "7", options=RestoreOptions())) == tk.exact_form(state)
    expected = tk.exact_form(as_orbax(state))
    for reader in stock:
        assert tk.exact_form(as_seen(reader.restore(root / "7" / "default"))) == expected
    with ocp.CheckpointManager(root) as manager:
        assert tk.exact_form(as_seen(manager.restore(7))) == expected


def as_orbax(value: Any) -> Any:
    """The poorer view that Orbax has of a state."""
    if isinstance(value, tk.Settings):
        return {"extra": as_orbax(value.extra), "rate": as_orbax(value.rate)}
    if isinstance(value, tk.Pair):
        return {"first": as_orbax(value.first), "second": as_orbax(value.second)}
    if isinstance(value, Mapping):
        return {str(key): as_orbax(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple | collections.deque):
        return [as_orbax(child) for child in value] if value or not isinstance(value, tuple) else ()
    if type(value) is complex or isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        kind = dtypes.lookup(value.dtype.name).zarr
        return value if kind == value.dtype.name else np.ascontiguousarray(value).view(kind).reshape(value.shape)
    return value


def as_seen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_seen(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [as_seen(child) for child in value]
    return value


@given(tk.states(leaves=st.integers(0, 9), mapping_keys=st.text("a./", max_size=3)))
def test_names_that_collide_are_refused_and_all_others_kept(directory: Path, state: Any) -> None:
    # Stock readers take "a" and "a/" for one directory.
    names = [path.removesuffix("/") for path in paths(state)]
    if len(set(names)) < len(names):
        with pytest.raises(InvalidStateError, match=r"stored as|cannot be indexed"):
            saved(directory, state, SaveOptions(lanes=1))
    else:
        path = saved(directory, state, SaveOptions(lanes=1))
        assert tk.exact_form(ENGINE.restore(path, options=RestoreOptions())) == tk.exact_form(state)


def paths(value: Any, above: tuple[str, ...] = ()) -> list[str]:
    if isinstance(value, tk.Pair):
        value = value._asdict()
    elif isinstance(value, tk.Settings):
        value = {"rate": value.rate, "extra": value.extra}
    elif isinstance(value, list | tuple | collections.deque):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        return [".".join(above)]
    return [path for key, child in value.items() for path in paths(child, (*above, str(key)))]
