"""Items: one rank's part, then the whole, of an item in a directory that somebody else makes visible.

What the drop-ins for other libraries' managers are made of: the directory, the ranks and the moment of the commit are
theirs; the plan, the images, the worker, the writer and the format are the ones of every save.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from .engine import Engine
from .errors import StorageError, TierkeepError
from .events import Events
from .options import MemoryOptions, SaveOptions
from .save.background import BackgroundSaves, Captured
from .save.store import store_part, store_whole
from .save.write import write_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .adapter import Adapter, Snapshot
    from .handle import SaveHandle
    from .save.commit import Draft

__all__ = ["ItemSaver", "StagedItem"]


class StagedItem:
    """One rank's part of an item, copied. Made by `ItemSaver.stage`."""

    def __init__(self, saver: ItemSaver, captured: Captured, handle: SaveHandle, rank: int, world: int) -> None:
        self._saver = saver
        self._captured = captured
        self.handle = handle
        self.rank = rank
        self.world = world

    def write(self, item: Path, save_id: str) -> None:
        """Returns when the part is durable in the directory `item`, which stands. `save_id`: one for all ranks.

        Raises StorageError, or what the staging failed of; the directory is the caller's to remove then.
        """
        self._saver._background.release_item(self.handle, item, save_id, time.time_ns())
        self.handle.result()

    def finish(self, item: Path, save_id: str, *, custom_metadata: Any = None) -> None:
        """By rank 0, once every rank's `write` has returned: makes one item of the parts, durable but for its name.

        `custom_metadata`, as JSON, is what Orbax's metadata of the item shows as such.
        """
        self._saver.finish(self._captured, item, save_id, world=self.world, custom_metadata=custom_metadata)

    def abandon(self) -> None:
        """Lets go of what was staged, if `write` was not called. May be called twice."""
        self._saver._background.abandon_item(self.handle)


class ItemSaver:
    """Saves items for one process of one or several.

    Guarantees: nothing is started before the first `stage`; what was planned and allocated is used again; `close` leaves
    no process, thread or memory, and may be called twice. An item is readable only after `finish`.
    """

    def __init__(
        self, adapter: Adapter, options: SaveOptions | None = None, memory: MemoryOptions | None = None
    ) -> None:
        self._engine = Engine(adapter, options)
        self.events = Events()
        self._background = BackgroundSaves(
            None, adapter, self._engine.disk, self._engine.options, memory or MemoryOptions(), self.events
        )

    def prepare(self, state: Any, *, rank: int = 0, world: int = 1) -> None:
        """Makes the images for items of this structure, in the background."""
        self._background.prepare(self._engine.capture(state, rank=rank, world=world).plan)

    def stage(
        self,
        state: Any,
        *,
        name: str,
        rank: int = 0,
        world: int = 1,
        deferred: bool | Callable[[Captured], bool] = False,
        begun: Callable[[StagedItem], object] = lambda _: None,
    ) -> StagedItem:
        """Copies this rank's part of `state`; after the call the state may be changed, unless it is `deferred`.

        Whether it is can be left to a function, which may replace leaves by copies. `name` stands for the item in
        messages. `begun` is given what this returns before anything is copied, so that also a caller that is interrupted
        can `abandon` it. Raises UnsupportedLeafError, NameCollisionError, StorageError.
        """
        captured = self._engine.capture(state, rank=rank, world=world)
        if not isinstance(deferred, bool):
            deferred = deferred(captured)
        handle = self._background.begin_item(name)
        # Without the leaves: the staging lets go of them when they are copied.
        kept = Captured(captured.snapshot.without_leaves(), captured.plan, captured.seconds)
        staged = StagedItem(self, kept, handle, rank, world)
        begun(staged)
        self._background.stage_item(handle, captured, rank=rank, world=world, deferred=deferred)
        return staged

    def save(self, state: Any, item: Path, save_id: str, *, rank: int = 0, world: int = 1) -> Captured:
        """Writes this rank's part into `item` without an image: copy, checksum and write overlap. Returns when durable.

        What is returned is for `finish`.
        """
        captured = self._engine.capture(state, rank=rank, world=world)
        self.write(captured, item, save_id, rank=rank, world=world)
        return Captured(captured.snapshot.without_leaves(), captured.plan, captured.seconds)

    def plan(self, snapshot: Snapshot, *, world: int) -> Captured:
        """What to `write` of leaves that somebody else found; each is stored by exactly one rank, its `boxes` are all."""
        began = time.perf_counter()
        plan = self._engine.plans.plan(snapshot, self._engine.options, partial=world > 1)
        return Captured(snapshot, plan, time.perf_counter() - began)

    def write(self, captured: Captured, item: Path, save_id: str, *, rank: int = 0, world: int = 1) -> None:
        """Writes this rank's part into `item` without an image. Returns when it is durable."""
        engine = self._engine

        def write(draft: Draft) -> list[list[int]]:
            with engine.buffers.lock:
                return write_image(
                    engine.disk,
                    draft.image_path(rank),
                    captured.plan,
                    captured.snapshot.leaves,
                    engine.buffers,
                    engine.options,
                    recycled=False,
                )

        try:
            store_part(
                engine.disk,
                item,
                captured.plan,
                write,
                identity=(save_id, secrets.token_hex(16), time.time_ns()),
                rank=rank,
                world=world,
            )
        except TierkeepError:
            raise
        except OSError as error:
            raise StorageError(f"saving {item}", error, "earlier checkpoints are untouched") from error

    def finish(
        self, captured: Captured, item: Path, save_id: str, *, world: int = 1, custom_metadata: Any = None
    ) -> None:
        """By rank 0, once every rank's `save` has returned: makes one item of the parts, durable but for its name."""
        plan = captured.plan if custom_metadata is None else captured.plan.with_custom_metadata(custom_metadata)
        try:
            store_whole(
                self._engine.disk,
                item,
                plan,
                captured.snapshot.values,
                identity=(save_id, "", time.time_ns()),
                world=world,
            )
        except OSError as error:
            if isinstance(error, TierkeepError):
                raise
            raise StorageError(f"committing {item}", error, "earlier checkpoints are untouched") from error

    def close(self) -> None:
        """Ends what is under way. Raises a failure that nobody was told of."""
        try:
            self._background.close()
        finally:
            self._engine.close()
