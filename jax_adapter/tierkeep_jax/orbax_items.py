"""Items that are saved for Orbax: staged, written when their directory stands, committed by one process of several.

What the handlers for Orbax's two APIs share: which memory is whose, what is let go of when a save comes to nothing, and
what Orbax leaves to the system.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from tierkeep.errors import StorageError, TierkeepError
from tierkeep.format.orbax_metadata import CHECKPOINT_METADATA
from tierkeep.item import ItemSaver
from tierkeep.step import resolve
from tierkeep.tiers.local_disk import LocalDisk

from . import orbax_state
from .rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator

    import orbax.checkpoint as ocp

    from tierkeep.item import StagedItem
    from tierkeep.options import MemoryOptions, SaveOptions
    from tierkeep.save.background import Captured

__all__ = ["Item", "Items"]

_SNAPSHOTS: dict[str, bool | Callable[[Captured], bool]] = {
    "auto": orbax_state.can_wait,
    "copy": False,
    "deferred": True,
}
_TEMPORARY = ".orbax-checkpoint-tmp"
_COMMITTED = "commit_success.txt"
_MOST_DIRECTORIES = 1024
_numbers: dict[str, int] = {}
"""How many saves into a directory this process has begun: the same in all processes that save together."""
_counting = threading.Lock()

Finish = Callable[[], object]


class Items:
    """The items that one handler saves.

    Guarantees: at any time each item that is being saved has a saver of its own, and as many savers are kept as were
    needed at once; an item that nobody finishes is let go of by the next one of its manager, or by `close`. `close` leaves
    no process, thread or memory; it may be called twice, and another item saved afterwards.
    """

    def __init__(
        self, options: SaveOptions | None = None, memory: MemoryOptions | None = None, timeout_s: float = 1200.0
    ) -> None:
        self.disk = LocalDisk()
        self._options = options
        self._memory = memory
        self._timeout_s = timeout_s
        self._guard = threading.Lock()
        self._savers: list[_Saver] = []
        self._items: list[Item] = []
        """Begun, and not committed."""
        self._renamed: list[Path] = []
        """Items that Orbax renames, or has renamed, since the last save."""

    def begin(self, directory: Any, processes: ocp.options.MultiprocessingOptions) -> Item:
        """An item that is to be saved below `directory`, by this process as one of those."""
        path = resolve(directory)
        rank, world = _ranks(processes)
        number = _number(str(path)) if world > 1 else 0
        return Item(path, Rendezvous(str(path), number, rank, world, self._timeout_s), rank, world, self._ended)

    def stage(
        self, item: Item, state: Any, save_args: Any = None, custom_metadata: Any = None, snapshot: str = "auto"
    ) -> None:
        """Copies the state, or has it copied; `item.run` writes it. What fails is told to the other processes too."""
        try:
            if snapshot not in _SNAPSHOTS:
                raise ValueError(f"snapshot must be one of {', '.join(map(repr, _SNAPSHOTS))}, not {snapshot!r}")
            deferred = _SNAPSHOTS[snapshot]
            self._abandon_before(item)
            state = orbax_state.to_save(state, save_args, custom_metadata)
            saver = self._turn(item)
            staged = saver.stage(
                state,
                name=str(item.path),
                rank=item.rank,
                world=item.world,
                deferred=deferred,
                begun=lambda staged: setattr(item, "staged", staged),
            )

            def write(save_id: str) -> Finish:
                self.make_renames_durable()
                staged.write(item.path, save_id)
                return lambda: staged.finish(item.path, save_id, custom_metadata=custom_metadata)

            item.write = write
        except BaseException as error:
            item.fail(error)
            raise

    def save(self, item: Item, state: Any, save_args: Any = None, custom_metadata: Any = None) -> None:
        """Returns when the parts of all processes are durable below the item's directory, which stands."""
        try:
            self._abandon_before(item)
            state = orbax_state.to_save(state, save_args, custom_metadata)
            saver = self._turn(item)

            def write(save_id: str) -> Finish:
                self.make_renames_durable()
                captured = saver.save(state, item.path, save_id, rank=item.rank, world=item.world)
                return lambda: saver.finish(
                    captured, item.path, save_id, world=item.world, custom_metadata=custom_metadata
                )

            item.write = write
        except BaseException as error:
            item.fail(error)
            raise
        item.run()

    def commit(self, directory: Any) -> None:
        """By the primary process, when all have saved: the item is whole and durable, but for its name."""
        path = resolve(directory)
        with self._guard:
            item = next((each for each in self._items if each.path == path), None)
        if item is not None:
            item.commit()
        self.settle(path)

    def settle(self, path: Path) -> None:
        """What Orbax has written around the item is durable; what it renames is to be by the next save."""
        with _storage(f"committing {path}"):
            _sync_step(self.disk, path)
        with self._guard:
            self._renamed.append(path)

    def make_renames_durable(self) -> None:
        with self._guard:
            renamed, self._renamed = self._renamed, []
        for path in renamed:
            with _storage(f"making the name of {path} durable"):
                _sync_renamed(self.disk, path)

    def prepare(self, state: Any, processes: ocp.options.MultiprocessingOptions) -> None:
        """Makes the memory for saves of states like this one, in the background. Raises as a save of it would."""
        rank, world = _ranks(processes)
        with self._guard:
            saver = self._free_saver("", rank, world)
        saver.items.prepare(orbax_state.to_save(state, None), rank=rank, world=world)

    def close(self) -> None:
        """Ends what is under way and lets go of the memory. Raises a failure that nobody was told of."""
        with self._guard:
            items = list(self._items)
        for item in items:
            item.abandon()
        with self._guard:
            savers, self._savers = self._savers, []
            self._items.clear()
        with contextlib.ExitStack() as stack:
            stack.callback(self.make_renames_durable)
            for saver in savers:
                stack.callback(saver.items.close)

    def _turn(self, item: Item) -> ItemSaver:
        """A saver that nobody else uses until the item's save has ended."""
        with self._guard:
            saver = self._free_saver(item.name, item.rank, item.world)
            saver.user = item
            self._items.append(item)
        return saver.items

    def _free_saver(self, name: str, rank: int, world: int) -> _Saver:
        """Several items at once have one each, the same one every time: its plan and its memory fit."""
        free = [saver for saver in self._savers if saver.user is None]
        saver = next((each for each in free if each.name == name), free[0] if free else None)
        if saver is None:
            adapter = orbax_state.OrbaxAdapter(rank, world)
            saver = _Saver(ItemSaver(adapter, self._options, self._memory))
            self._savers.append(saver)
        saver.name = name
        return saver

    def _ended(self, item: Item) -> None:
        """Its saver is free again. What is to be committed here is remembered."""
        with self._guard:
            for saver in self._savers:
                if saver.user is item:
                    saver.user = None
            if item in self._items and (item.rank or item.state is not _State.WRITTEN):
                self._items.remove(item)

    def _abandon_before(self, item: Item) -> None:
        """Lets go of earlier items that nobody is going to finish, now that their manager saves another one."""
        with self._guard:
            left = [each for each in self._items if each.is_left_for(item.path)]
        for each in left:
            each.abandon()


class _State(enum.Enum):
    BEGUN = enum.auto()
    WRITING = enum.auto()
    WRITTEN = enum.auto()
    ENDED = enum.auto()


class _Saver:
    """A saver, and whose turn it is."""

    def __init__(self, items: ItemSaver) -> None:
        self.items = items
        self.name = ""
        self.user: Item | None = None


class Item:
    """One item that is being saved."""

    def __init__(self, path: Path, meeting: Rendezvous, rank: int, world: int, ended: Callable[[Item], object]) -> None:
        self.path = path
        self.rank = rank
        self.world = world
        self.state = _State.BEGUN
        self.write: Callable[[str], Finish] | None = None
        """Makes the part durable as one of the save of that id; returns what makes an item of all parts."""
        self.staged: StagedItem | None = None
        self.is_lost: Callable[[], bool] = lambda: False
        """Whether whoever was to run it has ended without doing so."""
        self.let_go: Callable[[], object] = lambda: None
        """Called when it will not be run."""
        self._finish: Finish | None = None
        self._meeting = meeting
        self._ended = ended
        self._guard = threading.Lock()

    @property
    def name(self) -> str:
        """The item's own name; empty if it is no part of a step, as far as its path tells."""
        of_step = _TEMPORARY in self.path.parent.name or _TEMPORARY not in self.path.name
        return _final_name(self.path) if of_step else ""

    def cancel(self) -> None:
        """Stops it. What was written goes with its directory."""
        self.abandon()
        if self.staged is not None:
            self.staged.handle.cancel()

    def run(self, *, commit: bool = False) -> None:
        """Returns when the parts of all processes are durable. Raises what one of them failed of.

        With `commit` the primary process makes an item of them before any returns.
        """
        with self._guard:
            if self.state is not _State.BEGUN:
                raise concurrent.futures.CancelledError
            self.state = _State.WRITING
        assert self.write is not None
        try:
            self._finish = self.write(self._meeting.begin())
        except BaseException as error:
            self.fail(error)
            raise
        try:
            self._meeting.end(self._finish if commit and not self.rank else None)
        except BaseException:
            self._end(_State.ENDED)
            raise
        self._end(_State.ENDED if commit else _State.WRITTEN)

    def commit(self) -> None:
        """By the primary process: makes an item of the parts of all processes."""
        try:
            if self._finish is not None:
                self._finish()
                self._meeting.forget()
        finally:
            self._end(_State.ENDED)

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # the error that led here is the one to raise
            self._meeting.fail(error)
        self._end(_State.ENDED)

    def abandon(self) -> None:
        """Lets go of it, if it is not being written just now."""
        with self._guard:
            if self.state is _State.WRITING:
                return
            unused = self.state is _State.BEGUN
            self.state = _State.ENDED
        if unused:
            self.let_go()
        self._end(_State.ENDED)

    def is_left_for(self, path: Path) -> bool:
        """Whether nobody finishes this one any more when the item at `path` is saved."""
        if path == self.path:
            return True
        step, other = path.parent, self.path.parent
        if _TEMPORARY in step.name and _TEMPORARY in other.name and step.parent == other.parent and step != other:
            return True  # another step of the same manager
        return self.state is _State.BEGUN and self.is_lost()

    def _end(self, state: _State) -> None:
        self.state = state
        if self.staged is not None:
            self.staged.abandon()  # which does nothing if it was written
        self._ended(self)


def _ranks(processes: ocp.options.MultiprocessingOptions) -> tuple[int, int]:
    """This process's rank among those that save together, the primary one first, and their number."""
    primary = processes.primary_host
    if primary is None:
        return 0, 1  # each process has a directory of its own
    active = set(processes.active_processes or range(jax.process_count()))
    order = [primary, *sorted(active - {primary})]
    return order.index(jax.process_index()), len(order)


def _number(directory: str) -> int:
    """Of this save into a directory."""
    with _counting:
        number = _numbers[directory] = _numbers.pop(directory, 0) + 1
        if len(_numbers) > _MOST_DIRECTORIES:
            del _numbers[next(iter(_numbers))]
        return number


# What Orbax leaves to the system


def _final_name(path: Path) -> str:
    return path.name.partition(_TEMPORARY)[0]


def _sync_step(disk: LocalDisk, item: Path) -> None:
    """Before Orbax's renames: what it wrote into the step without making it durable, other items included."""
    _sync_files(disk, item)
    disk.sync_dir(item)
    step = item.parent
    if not disk.exists(step / CHECKPOINT_METADATA):
        return  # no step: the item alone is what Orbax saves
    for directory, _, names in os.walk(step):
        if directory == str(item) or Path(directory).is_relative_to(item):
            continue
        for name in names:
            disk.sync_file(Path(directory, name))
        disk.sync_dir(Path(directory))


def _sync_renamed(disk: LocalDisk, item: Path) -> None:
    """After them: the names themselves, and what Orbax has written last. What is gone by now needs nothing."""
    step = item.parent
    if _TEMPORARY in step.name:
        step = step.with_name(_final_name(step))
    final = step / _final_name(item)
    for directory in (final, step, step.parent):
        with contextlib.suppress(FileNotFoundError):
            if directory is not step.parent:
                _sync_files(disk, directory)
            disk.sync_dir(directory)


def _sync_files(disk: LocalDisk, directory: Path) -> None:
    for name in (CHECKPOINT_METADATA, _COMMITTED):
        with contextlib.suppress(FileNotFoundError):
            disk.sync_file(directory / name)


@contextlib.contextmanager
def _storage(action: str) -> Iterator[None]:
    try:
        yield
    except TierkeepError:
        raise
    except OSError as error:
        raise StorageError(action, error, "earlier checkpoints are untouched") from error
