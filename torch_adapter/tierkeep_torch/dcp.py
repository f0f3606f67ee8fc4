"""torch.distributed.checkpoint (DCP) on tierkeep: a storage writer, a storage reader and a stager.

`dcp.save(state_dict, storage_writer=StorageWriter(path))` and `dcp.load(state_dict, storage_reader=StorageReader(path))`
work as they do with the file system's own, with any planner, sharding and number of ranks. What stands at the path is an
item as every tierkeep save makes it: it appears by one rename when all ranks are done, every byte is checksummed, and
`tierkeep_torch.load` and Orbax read it too.

`save`, `async_save` and `load` here are DCP's own with these filled in, and with errors that `except Exception` catches.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import pickle
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec import structs
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver, storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tierkeep.adapter import Snapshot
from tierkeep.engine import Engine
from tierkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    MismatchError,
    StorageError,
    TierkeepError,
    UnsupportedLeafError,
)
from tierkeep.format.part import Whole
from tierkeep.item import ItemSaver
from tierkeep.leaf import ArrayShard, Box, Leaf
from tierkeep.memory.buffers import Buffers
from tierkeep.options import RestoreOptions, SaveOptions
from tierkeep.restore.foreign.dcp import is_metadata
from tierkeep.restore.locate import open_source
from tierkeep.restore.source import Stored
from tierkeep.save.commit import Draft, is_checkpoint, publish, sweep
from tierkeep.step import ITEM, is_step_name, resolve, temporary
from tierkeep.tiers.local_disk import LocalDisk
from tierkeep.tree import Node, Tree, Value, decode_value, encode_value, walk

from . import place, stage
from .adapter import TorchAdapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner

    from tierkeep.format.part import LeafRecord
    from tierkeep.leaf import Shard
    from tierkeep.restore.source import Source
    from tierkeep.save.background import Captured

__all__ = ["AsyncStager", "StorageReader", "StorageWriter", "async_save", "load", "save"]

_SAVED = "torch.save"  # tag of an object that is kept as the bytes that the planner made of it
_RANKS = "torch.save.ranks"  # of one that differs between the ranks: each one's bytes
_ONE_OBJECT_NBYTES = 16 << 20  # of an object that differs by rank, sent to the coordinator
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_SCALARS = frozenset({"bool", "int", "float", "complex"})


@dataclass(frozen=True)
class _Shared:
    """What the coordinator tells all ranks of a save."""

    path: str
    """The directory that the parts go to, renamed at the end."""
    save_id: str
    world: int
    tensors: dict[str, tuple[str, tuple[int, ...], tuple[Box, ...]]]
    """Key: dtype, shape, and the boxes of all ranks."""
    objects: tuple[str, ...]
    paths: dict[str, tuple[Any, ...]]
    """Where each key stands in the state."""


@dataclass(frozen=True)
class _Objects:
    """What one rank tells the coordinator of the objects that it has."""

    mine: dict[str, bytes]
    digests: dict[str, bytes] = field(default_factory=dict)


class StorageWriter(storage.StorageWriter):
    """Writes DCP checkpoints as tierkeep items. Can be pickled, as the process-based `async_save` asks.

    `path` may be left to `checkpoint_id`. What stands there already is replaced whole, by one exchange, when all ranks
    are done, unless `overwrite` is False; a save that fails leaves it as it was. With `use_collectives=False` every rank
    saves an item of its own below the path. All ranks see one file system.

    In a directory with files that are no checkpoint the item is the directory `default` below it: they stay, and a
    reader of the path finds it.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = True, options: SaveOptions | None = None
    ) -> None:
        super().__init__()
        self._overwrite = overwrite
        self._options = options
        self._disk = LocalDisk()
        self._saver: ItemSaver | None = None
        self._path: Path | None = None if path is None else resolve(path)
        self._rank = 0
        self._alone = False
        self._is_coordinator = True
        self._shared: _Shared | None = None
        self._captured: Captured | None = None
        self._draft: Path | None = None
        self._drafted_by = 0
        self._final: Path | None = None
        self.save_id = secrets.token_hex(16)
        """Of the save under way, in `storage_meta` too."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_saver": None, "_captured": None, "_shared": None, "_draft": None, "_final": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return "" if self._path is None else self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = resolve(checkpoint_id)
        self.save_id = secrets.token_hex(16)
        self._drop()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._path is None:
            raise ValueError("a path is needed: StorageWriter(path), or checkpoint_id=")
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank") or 0
        self._alone = not kwargs.get("use_collectives", True)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the directory of the draft, and tells every rank what all of them hold."""
        final = self._named()
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            sweep(self._disk, final.parent, mine=lambda name: name == final.name)
            if self._disk.exists(final):
                with contextlib.suppress(OSError):  # an empty directory was made for it; anything else stays
                    final.rmdir()
            if self._holds_others(final):
                final /= ITEM
                sweep(self._disk, final.parent, mine=lambda name: name == ITEM)
            if self._disk.exists(final) and not self._overwrite:
                # In DCP's words, which its users match on.
                raise CheckpointExistsError(str(final), "Checkpoint already exists and self.overwrite=False")
            self._final = final
            self._draft, self._drafted_by = temporary(final), os.getpid()
            self._disk.make_dir(self._draft)
        except OSError as error:
            if isinstance(error, TierkeepError):
                raise
            raise StorageError(f"saving {final}", error, "what stood there is untouched") from error
        shared = _share(str(self._draft), self.save_id, plans)
        return [replace(plan, storage_data=shared) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's part; durable when the future is done."""
        shared = cast("_Shared", plan.storage_data)
        self._shared = shared
        found: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        objects: dict[str, bytes] = {}
        results = []
        for item in plan.items:
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                objects[key] = _bytes_of(planner, item)
                results.append(WriteResult(item.index, len(objects[key]), None))
                continue
            assert item.tensor_data is not None
            tensor = cast("torch.Tensor", planner.resolve_data(item))
            box = Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
            found.setdefault(key, []).append((box, tensor))
            results.append(WriteResult(item.index, tensor.nbytes, None))
        rank = 0 if self._alone else self._rank
        snapshot = _snapshot(shared, found)
        saver = self._opened()
        captured = saver.plan(snapshot, world=shared.world)
        saver.write(captured, resolve(shared.path), shared.save_id, rank=rank, world=shared.world)
        self._captured = type(captured)(snapshot.without_leaves(), captured.plan, captured.seconds)
        others = _objects_beside(planner, shared, objects) if shared.world > 1 else {}
        results.append(WriteResult(MetadataIndex(f"tierkeep/rank {rank}"), 0, _Objects(objects, others)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Makes one item of the parts and puts it in its place, durably."""
        assert self._shared is not None
        assert self._captured is not None
        assert self._final is not None
        shared, captured, final = self._shared, self._captured, self._final
        told = [result.storage_data for each in results for result in each if isinstance(result.storage_data, _Objects)]
        captured.snapshot.values[:] = [_merge(key, told) for key in shared.objects]
        draft = resolve(shared.path)
        try:
            self._opened().finish(captured, draft, shared.save_id, world=shared.world)
            publish(
                self._disk,
                Draft.within(draft, (shared.save_id, "", time.time_ns())),
                final,
                metrics=None,
                overwrite=self._overwrite,
            )
        except OSError as error:
            if isinstance(error, TierkeepError):
                raise
            raise StorageError(f"saving {final}", error, "what stood there is untouched") from error
        finally:
            self._drop()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            resolve(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Lets go of the buffers, which are made again when they are needed, and removes what a failed save left."""
        self._drop()
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def __del__(self) -> None:
        # DCP tells a writer nothing of a rank that failed: the draft is left, of a path that may never be saved to again.
        # A process that was forked has a copy of the writer, and leaves the draft of its parent alone.
        if self.__dict__.get("_draft") is not None and self._drafted_by == os.getpid():
            self._drop()

    def _opened(self) -> ItemSaver:
        if self._saver is None:
            self._saver = ItemSaver(TorchAdapter(), self._options)
        return self._saver

    def _named(self) -> Path:
        assert self._path is not None
        return self._path / f"rank_{self._rank}" if self._alone else self._path

    def _holds_others(self, path: Path) -> bool:
        """Whether files stand there that no checkpoint is made of. Raises CheckpointExistsError if one is, of others."""
        if not self._disk.is_dir(path) or is_checkpoint(self._disk, path):
            return False
        names = [entry.name for entry in self._disk.list_dir(path)]
        if any(map(is_metadata, names)):
            raise CheckpointExistsError(str(path), "it is DCP's own checkpoint, so it is not overwritten")
        if any(is_step_name(name) and is_checkpoint(self._disk, path / name) for name in names):
            raise CheckpointExistsError(str(path), "it holds the steps of a checkpointer: choose a name below it")
        return True

    def _drop(self) -> None:
        """Removes what is left of a save that did not end well."""
        draft, self._draft = self._draft, None
        self._shared = self._captured = self._final = None
        if draft is not None:
            with contextlib.suppress(OSError):
                if self._disk.exists(draft):
                    self._disk.remove_tree(draft)


class StorageReader(storage.StorageReader):
    """Reads tierkeep's items for DCP, and whatever else `tierkeep_torch.load` reads, DCP's own checkpoints among it.

    Every rank reads only the bytes that its shards need, each verified. A tensor of another dtype is an error, unless
    `dtype="cast"`.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, options: RestoreOptions | None = None, **relaxations: Any
    ) -> None:
        super().__init__()
        self._options = replace(options or RestoreOptions(), **relaxations)
        self._path: Path | None = None if path is None else resolve(path)
        self._disk = LocalDisk()
        self._rank: int | None = None
        self._item: Path | None = None
        self.load_id = secrets.token_hex(16)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return "" if self._path is None else self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = resolve(checkpoint_id)
        self.load_id = secrets.token_hex(16)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, in DCP's terms; of this rank's own item, if `rank` is given."""
        if self._path is None:
            raise ValueError("a path is needed: StorageReader(path), or checkpoint_id=")
        rank = kwargs.get("rank")
        self._item = self._path if rank is None else self._path / f"rank_{rank}"
        with self._opened() as source:
            return _metadata(source, self.load_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank")
        if self._item is None:
            self._item = self._path

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the planner's tensors and objects. Raises CorruptCheckpointError and MismatchError, naming the keys."""
        with self._opened() as source:
            leaves = source.contents.leaves
            numbers = {leaf.name: number for number, leaf in enumerate(leaves)}
            values = _values_by_name(source)
            tensors = []
            for item in plan.items:
                key = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    if key in values:
                        planner.load_bytes(item, io.BytesIO(_stream(key, values[key], self._rank)))
                    elif key not in numbers:
                        planner.load_bytes(item, io.BytesIO(_torch_saved(None)))
                    else:
                        scalar = _scalar(source, numbers[key], self._options)
                        planner.load_bytes(item, io.BytesIO(_torch_saved(scalar)))
                else:
                    tensors.append(item)
            self._read(source, numbers, tensors, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(
        self, source: Source, numbers: Mapping[str, int], items: Sequence[ReadItem], planner: LoadPlanner
    ) -> None:
        leaves = source.contents.leaves
        wants, sinks, done, wrong = [], [], [], []
        for item in items:
            record = leaves[numbers[item.storage_index.fqn]]
            target = planner.resolve_tensor(item)
            spec = record.spec._replace(shape=tuple(item.lengths), kind="array", ext=None)
            own = stage.dtype_name(target.dtype).name
            if own != spec.dtype and self._options.dtype != "cast":
                wrong.append(f"{record.name}: {spec.dtype} in the checkpoint, {own} in the target")
                continue
            if tuple(target.shape) != spec.shape:
                raise MismatchError(
                    str(source.path),
                    shape=[f"{record.name}: {spec.shape} is wanted of a target of {tuple(target.shape)}"],
                )
            found = place.destination(target.detach(), spec)
            owner = numbers[item.storage_index.fqn] if record.tie is None else record.tie
            if found.regions[0].box.size:
                wants.append((owner, Box(tuple(item.storage_offsets), tuple(item.lengths))))
                sinks.append(found.regions[0].sink)
            done.append((item, target))
        if wrong:
            raise MismatchError(str(source.path), dtype=wrong)
        buffers = Buffers(self._options.lanes, self._options.lane_nbytes)
        try:
            source.read(wants, sinks, buffers, self._options.lanes, "no other checkpoint was touched")
        finally:
            buffers.close()
        for item, target in done:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return StorageWriter.validate_checkpoint_id(checkpoint_id)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Source]:
        assert self._item is not None
        holds = "no other checkpoint was touched"
        try:
            with open_source(self._disk, self._item, direct=self._options.direct, holds=holds) as source:
                yield source
        except OSError as error:
            if isinstance(error, TierkeepError):
                raise
            raise StorageError(f"restoring {self._item}", error, f"the checkpoint is untouched; {holds}") from error


class AsyncStager(DefaultStager):
    """Copies a state dict into memory that is allocated once: pinned where there is CUDA, shared with other processes.

    DCP's own `DefaultStager` does that when it is kept, which `dcp.async_save` by itself never does: it allocates, faults
    in and frees all of it in every save. Keep this one as long as the run, and `close()` it.
    """

    def __init__(self, options: StagingOptions | None = None) -> None:
        cuda = torch.cuda.is_available()
        super().__init__(
            options
            or StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=cuda
            )
        )


def save(state_dict: dict[str, Any], path: str | os.PathLike[str], **arguments: Any) -> Metadata:
    """`dcp.save` to a tierkeep item at `path`. What a rank fails of is raised as an Exception."""
    writer = StorageWriter(path)
    with _told(), contextlib.closing(writer):
        return cast("Metadata", state_dict_saver.save(state_dict, storage_writer=writer, **arguments))


def load(state_dict: dict[str, Any], path: str | os.PathLike[str], **arguments: Any) -> None:
    """`dcp.load` from whatever checkpoint is at `path`, in place. What a rank fails of is raised as an Exception."""
    if not LocalDisk().exists(resolve(path)):  # DCP would say that its metadata is None
        raise CheckpointNotFoundError(str(resolve(path)), "anything at that path")
    with _told():
        state_dict_loader.load(state_dict, storage_reader=StorageReader(path), **arguments)


def async_save(
    state_dict: dict[str, Any], path: str | os.PathLike[str], *, stager: AsyncStager, **arguments: Any
) -> Any:
    """`dcp.async_save` to a tierkeep item at `path`, staged by a `stager` that is kept from one save to the next."""
    with _told():
        return state_dict_saver.async_save(
            state_dict, storage_writer=StorageWriter(path), async_stager=stager, **arguments
        )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """DCP's own error is none that `except Exception` catches."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: failure[0] for rank, failure in error.failures.items()}
        first = failures[min(failures)]
        if isinstance(first, Exception):
            first.add_note(f"ranks that failed: {', '.join(map(str, sorted(failures)))}")
            raise first from None
        raise RuntimeError(str(error)) from error


def _share(path: str, save_id: str, plans: Sequence[SavePlan]) -> _Shared:
    tensors: dict[str, tuple[str, tuple[int, ...], list[Box]]] = {}
    objects: dict[str, None] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for plan in plans:
        paths |= plan.planner_data or {}
        for item in plan.items:
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                objects[key] = None
                continue
            data = item.tensor_data
            assert data is not None
            dtype = stage.dtype_name(data.properties.dtype).name
            known = tensors.setdefault(key, (dtype, tuple(data.size), []))
            if known[:2] != (dtype, tuple(data.size)):
                raise UnsupportedLeafError(key, f"ranks save it as {known[:2]} and as {(dtype, tuple(data.size))}")
            known[2].append(Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
    twice = [key for key in objects if key in tensors]
    if twice:
        raise UnsupportedLeafError(twice[0], "one rank saves a tensor under this key, another one something else")
    ordered = {key: (dtype, shape, tuple(sorted(set(boxes)))) for key, (dtype, shape, boxes) in sorted(tensors.items())}
    known_paths = {key: tuple(where) for key, where in paths.items() if ".".join(map(str, where)) == key}
    return _Shared(path, save_id, len(plans), ordered, tuple(sorted(objects)), known_paths)


def _placed(shard: Shard, box: Box) -> Shard:
    """The same memory as another part of a whole."""
    return structs.replace(shard, box=box) if isinstance(shard, ArrayShard) else replace(shard, box=box)  # type: ignore[type-var]


def _snapshot(shared: _Shared, found: Mapping[str, Sequence[tuple[Box, torch.Tensor]]]) -> Snapshot:
    """The whole state's structure, with the shards that this rank stores."""
    snapshot = Snapshot()
    entries: dict[str, Tree] = {}
    for key, (dtype, shape, boxes) in shared.tensors.items():
        shards, tie = [], None
        for box, tensor in found.get(key, ()):
            try:
                leaf = stage.leaf(tensor.detach())
            except TypeError as error:
                raise UnsupportedLeafError(key, str(error)) from error
            if leaf.dtype != dtype or leaf.shape != box.shape:
                raise UnsupportedLeafError(
                    key, f"the planner resolved {leaf.dtype} {leaf.shape} where it planned {dtype}"
                )
            shards.append(_placed(leaf.shards[0], box))
            tie = leaf.tie if len(found[key]) == 1 else None
        entries[key] = len(snapshot.leaves)
        snapshot.leaves.append(
            Leaf("array", dtype, shape, tuple(shards), tie, boxes=boxes if shared.world > 1 else None)
        )
    for number, key in enumerate(shared.objects):
        entries[key] = Value(number)
        snapshot.values.append(None)
    snapshot.tree = _nest({shared.paths.get(key, (key,)): node for key, node in entries.items()})
    return snapshot


def _nest(entries: Mapping[tuple[Any, ...], Tree]) -> Tree:
    """Nested containers from paths: a level whose keys are 0, 1, 2… is a list."""
    levels: dict[Any, dict[tuple[Any, ...], Tree]] = {}
    for path, node in entries.items():
        if not path:
            return node
        levels.setdefault(path[0], {})[path[1:]] = node
    keys = list(levels)
    children = tuple(_nest(below) for below in levels.values())
    if keys and all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):
        return Node(
            "list", None, (), tuple(child for _, child in sorted(zip(keys, children, strict=True), key=lambda x: x[0]))
        )
    return Node("dict", None, tuple(map(str, keys)), children)


def _bytes_of(planner: SavePlanner, item: WriteItem) -> bytes:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UnsupportedLeafError(item.index.fqn, f"the planner gave a {type(data).__name__} where bytes were planned")
    return data.getvalue()


def _objects_beside(planner: SavePlanner, shared: _Shared, mine: Mapping[str, bytes]) -> dict[str, bytes]:
    """What this rank has under the keys that another one stores: the planner takes them all for the same."""
    found = {}
    for key in shared.objects:
        if key in mine:
            continue
        with contextlib.suppress(Exception):  # it has nothing under that key
            found[key] = _bytes_of(planner, WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
    return {key: data if len(data) <= _ONE_OBJECT_NBYTES else _digest(data) for key, data in found.items()}


def _digest(data: bytes) -> bytes:
    return b"digest" + hashlib.blake2b(data).digest()


def _merge(key: str, told: Sequence[_Objects]) -> Any:
    """The record of an object: a plain value if it is one, else its bytes; every rank's, if they differ."""
    by_rank = [each.mine.get(key, each.digests.get(key)) for each in told]
    whole = next(each.mine[key] for each in told if key in each.mine)
    differ = any(data not in (None, whole, _digest(whole)) for data in by_rank)
    if not differ:
        return _plain(whole) or {"t": _SAVED, "v": base64.b64encode(whole).decode()}
    if any(data is not None and data.startswith(b"digest") for data in by_rank):
        raise UnsupportedLeafError(
            key, "ranks hold different objects under this key, too large to keep each rank's own"
        )
    kept = [None if data is None else base64.b64encode(data).decode() for data in by_rank]
    return {"t": _RANKS, "v": kept}


def _plain(data: bytes) -> Any:
    """The value that a planner saved, as a record of ours, if that is exact; None if not."""
    try:
        value = torch.load(io.BytesIO(data), weights_only=True)
        return encode_value(value) if type(value) in _PLAIN else None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError):
        return None


def _torch_saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _stream(key: str, raw: Any, rank: int | None) -> bytes:
    """What the planner saved under a key, as it takes it back."""
    if isinstance(raw, dict) and raw.get("t") == _SAVED:
        return base64.b64decode(raw["v"])
    if isinstance(raw, dict) and raw.get("t") == _RANKS:
        kept = raw["v"]
        own = rank or 0
        if own >= len(kept) or kept[own] is None:
            raise UnsupportedLeafError(key, f"it differs between ranks, and rank {own} of the save had none")
        return base64.b64decode(kept[own])
    return _torch_saved(decode_value(raw))


def _values_by_name(source: Source) -> dict[str, Any]:
    contents = source.contents
    return {
        ".".join(path): contents.values[node.number] for path, _, node in walk(contents.tree) if isinstance(node, Value)
    }


def _scalar(source: Source, number: int, options: RestoreOptions) -> Any:
    """A Python number that another way of saving keeps as an array."""
    record = source.contents.leaves[number]
    found = Engine(TorchAdapter())
    try:
        value = found.restore(source.path, options=options, keys=[record.name])
    finally:
        found.close()
    while isinstance(value, dict | list | tuple):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


def _metadata(source: Source, load_id: str) -> Metadata:
    contents = source.contents
    # Of one that is not ours neither is known here.
    whole = source.opened.whole if isinstance(source, Stored) and isinstance(source.opened.whole, Whole) else None
    entries: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for path, types, node in walk(contents.tree):
        key = ".".join(path)
        if node is None or isinstance(node, Value):
            entries[key] = BytesStorageMetadata()
        elif type(node) is int:
            entries[key] = _storage(contents.leaves[node])
        else:
            continue
        paths[key] = tuple(int(name) if kind == 1 else name for name, kind in zip(path, types, strict=True))
    return Metadata(
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data={},
        storage_meta=StorageMeta(
            checkpoint_id=str(source.path), save_id=None if whole is None else whole.save_id, load_id=load_id
        ),
        version=None if whole is None else CURRENT_DCP_VERSION,
    )


def _storage(record: LeafRecord) -> Any:
    """A tensor, as one chunk: a rank asks for the part of it that it wants, and only that is read."""
    if record.spec.kind in _SCALARS:
        return BytesStorageMetadata()
    dtype = getattr(torch, record.spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedLeafError(record.name, f"torch has no dtype {record.spec.dtype}")
    size = torch.Size(record.spec.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
