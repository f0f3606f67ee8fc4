"""Background: the training process's side of a save that it does not wait for.

Training waits for one copy: of its state into an image in shared memory, allocated and mapped before and used for ever.
From there on the worker has all it needs (`tierkeep.memory.worker`). A deferred save does not wait for the copy either.

After FastPersist (decoupled writes), DataStates-LLM (lazy copies while the state does not change), and the in-cluster
checkpointing of PyTorch and Google (reused staging, a separate process, cached metadata), with one copy instead of three.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import pickle
import queue
import secrets
import shutil
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import structs

from ..errors import (
    BusyError,
    ChangedLeafError,
    CheckpointExistsError,
    ClosedError,
    SaveCancelledError,
    StorageError,
    TierkeepError,
    WorkerError,
)
from ..events import Event, Events
from ..format.checksum import unseal
from ..format.part import PART
from ..handle import SaveHandle, SaveReport, Stage
from ..memory.arena import NEW, Arena, FileLock, Settings, make_arena, own_arena, sweep_arenas
from ..memory.budget import check_budget, has_room
from ..memory.client import client
from ..memory.image import Image
from ..step import ITEM, step_path
from .commit import part_name
from .job import Job, decode_job, encode_job
from .plan import encode_plan
from .sealed import fill_image

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..adapter import Adapter, Snapshot
    from ..leaf import Leaf
    from ..options import MemoryOptions, SaveOptions
    from ..tiers.local_disk import LocalDisk
    from ..tiers.retain import Keep
    from .plan import SavePlan

__all__ = ["BackgroundSaves", "Captured"]

_LANES = 8  # threads that copy: more of them find no more memory bandwidth
_UNTOUCHED = "earlier checkpoints are untouched"
_PLANS = 8  # kept in the arena; jobs under way refer to no older ones
_log = logging.getLogger("tierkeep")
_open: set[BackgroundSaves] = set()


class Captured:
    """A state at the time of a save: what it is, and where its bytes are."""

    __slots__ = ("plan", "seconds", "snapshot")

    def __init__(self, snapshot: Snapshot, plan: SavePlan, seconds: float) -> None:
        self.snapshot = snapshot
        self.plan = plan
        self.seconds = seconds


class BackgroundSaves:
    """The saves of one checkpointer that are under way.

    Guarantees: at most `in_flight` at once, and one image more than that; saves end in the order in which they began; no
    reference to a state outlives its staging; a failure is raised once, by the next `save`, `wait` or `close` or by the
    handle. Nothing is started before the first save (or `prepare`). `close` ends all of it; it may be called twice.
    An interrupt (what a signal's handler raises) leaves a save either sealed, which goes on, or without a trace, at the
    latest when this thread saves, waits or closes again; a `close` that was interrupted is called again.
    Not to be used in a forked child, which is told so.
    """

    def __init__(
        self,
        root: Path | None,
        adapter: Adapter,
        disk: LocalDisk,
        options: SaveOptions,
        memory: MemoryOptions,
        events: Events,
    ) -> None:
        self._root = root
        self._adapter = adapter
        self._disk = disk
        self._options = options
        self._memory = memory
        self._events = events
        self._pid = os.getpid()
        self._arena: Arena | None = None
        self._owner: FileLock | None = None
        self._anonymous = False
        self._images: dict[tuple[int, int], Image] = {}
        self._paths: dict[tuple[int, int], Path] = {}
        """Where the free images are."""
        self._used: set[tuple[int, int]] = set()
        """Images that a save or the worker has; the others are free."""
        self._unmapped: set[tuple[int, int]] = set()
        """Images whose length was changed and whose pages are not there yet."""
        self._filling: set[tuple[int, int]] = set()
        """Images taken that still have the name of a free one: what a worker says of it then is of an earlier use."""
        self._coming = 0
        """Images that the worker was asked for."""
        self._no_image: Exception | None = None
        """Why a save that waits for an image gets none."""
        self._saves: dict[str, _Save] = {}
        """Under way, oldest first."""
        self._failures: list[tuple[SaveHandle | None, Exception]] = []
        self._keys: dict[int, tuple[SavePlan, str]] = {}
        # Taken by itself: an interrupt in a condition's own `__enter__` would leave it held.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._copies: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._copier: threading.Thread | None = None
        self._last_number = 0
        self._recovered = threading.Event()
        # One more than can be under way holds the newest step; of items, memory holds none.
        self._most_images = memory.in_flight + (root is not None)
        self._attached = False
        self._closed: list[Exception | None] | None = None
        self._closing = False
        self._ended = False
        self._ending = threading.RLock()

    # What a checkpointer asks for

    def prepare(self, plan: SavePlan) -> None:
        """Has the images for saves of this plan made, in the background. Raises StorageError if there is no room."""
        self._ready()
        self._allocate(plan.image_nbytes, self._most_images)

    def save(
        self,
        path: Path,
        step: int,
        captured: Captured,
        *,
        overwrite: bool,
        metrics: dict[str, Any],
        keep: Keep | None,
        to_disk: bool,
        deferred: bool,
    ) -> SaveHandle:
        """Stages a state, or has it staged, and leaves the rest to the worker."""
        self._put_right()
        self._ready()
        self._check_new(path, step, overwrite=overwrite)
        handle = SaveHandle(step, str(path), self._cancel)
        began = time.perf_counter()
        if not self._await_turn():
            handle.end(SaveReport(str(path), step, 0, 0, {}, "skipped"))
            self._events.emit(Event("skipped", step))
            return handle
        handle.waited_s = time.perf_counter() - began
        job = self._job(captured)
        job = structs.replace(
            job, step=step, metrics=metrics, overwrite=overwrite, to_disk=to_disk, keep=keep, root=str(self._root)
        )
        self._begin(handle, job, captured, deferred=deferred, held=False)
        return handle

    def begin_item(self, name: str) -> SaveHandle:
        """What an item is to be staged, released and abandoned by."""
        return SaveHandle(0, name, self._cancel)

    def stage_item(self, handle: SaveHandle, captured: Captured, *, rank: int, world: int, deferred: bool) -> None:
        """Stages one rank's part of an item; it goes nowhere before `release_item` says where, or `abandon_item`."""
        self._put_right()
        self._ready()
        began = time.perf_counter()
        with self._guard:
            self._wait_until(lambda: len(self._saves) < self._memory.in_flight)
        handle.waited_s = time.perf_counter() - began
        job = structs.replace(self._job(captured), rank=rank, world=world)
        self._begin(handle, job, captured, deferred=deferred, held=True)

    def release_item(self, handle: SaveHandle, item: Path, save_id: str, begun_ns: int) -> None:
        """Has what was staged written into `item`, which stands; all ranks' parts of it have one `save_id`."""
        handle.wait_staged()
        with self._guard:
            save = next((each for each in self._saves.values() if each.handle is handle), None)
            if self._closing or save is None:
                raise ClosedError(f"what saves {handle.path}")
            save.thread = threading.get_ident()  # from here on `close` waits for it
        assert self._arena is not None
        directory = self._arena.filling / save.job.save_id
        try:
            # Its own id stays the key here; the other one goes into the records.
            save.job = structs.replace(save.job, item=str(item), part_of=save_id, begun_ns=begun_ns)
            try:
                self._seal(save, directory)
            except OSError as error:
                raise StorageError(f"sealing {handle.path}", error, "nothing was saved") from error
            self._tell(save)
            self._is_done_with(save)
        except BaseException:
            self._leave(save)
            raise

    def abandon_item(self, handle: SaveHandle) -> None:
        """Lets go of what was staged and not released."""
        with self._guard:
            save = next((each for each in self._saves.values() if each.handle is handle), None)
        if (
            save is None
            or save.thread not in (0, threading.get_ident())
            or save.job.item is not None
            or self._arena is None
        ):
            return
        with contextlib.suppress(Exception):
            handle.wait_staged()
        self._take_back(save)

    def _job(self, captured: Captured) -> Job:
        assert self._arena is not None
        return Job(
            number=self._number(),
            save_id=secrets.token_hex(16),
            image=secrets.token_hex(16),
            begun_ns=time.time_ns(),
            root="",
            step=0,
            plan=self._put_plan(captured.plan),
            values=captured.snapshot.values,
            metrics={},
            overwrite=False,
            to_disk=True,
            keep=None,
            direct=self._options.direct,
            lanes=self._options.lanes,
        )

    def _begin(self, handle: SaveHandle, job: Job, captured: Captured, *, deferred: bool, held: bool) -> None:
        plan = captured.plan
        began = time.perf_counter()
        copies = self._adapter.copies()
        if not deferred:
            self.wait_staged()  # sealed in the order of the saves: of two of the same step the later one stays
        save = _Save(handle, job, plan, captured.seconds, captured.snapshot.leaves)
        save.held = held
        try:
            with self._guard:
                if self._closing:
                    raise ClosedError(f"the checkpointer of {self._root}")
                self._saves[job.save_id] = save  # first: from here on `close` waits for it
            self._acquire(save)
            named = save.image is not None and save.image.named
            if not named:
                self._recovered.wait()  # what the worker finds when it comes to the arena it takes for a dead process's
            handle.waited_s += time.perf_counter() - began
            if save.image is not None and not named:
                save.job = structs.replace(job, to_disk=True)  # memory without a name is no place to stay in
            self._events.emit(Event("begun", job.step, total_nbytes=plan.image_nbytes))
            if deferred:
                self._copy_later(lambda: self._stage_later(save, copies))
            else:
                self._stage(save, copies)
            self._is_done_with(save)
        except BaseException:  # also an interrupt: a save that nobody carries on would be waited for for ever
            self._leave(save)
            raise

    def _is_done_with(self, save: _Save) -> None:
        with self._guard:
            if save.thread == threading.get_ident():
                save.thread = 0
            self._changed.notify_all()

    def _leave(self, save: _Save) -> None:
        """Ends what this thread was doing with a save, wherever it is: one that is sealed goes on, of another nothing is left.

        Doing it again, after another interrupt, does no harm.
        """
        with self._guard:
            if save.thread != threading.get_ident():
                save.cancelled = True  # the copier has it, and ends it
                return
            save.left = True
        assert self._arena is not None
        if save.sealing and not (self._arena.filling / save.job.save_id).exists():
            self._was_sealed(save)
        else:
            self._take_back(save)
        self._is_done_with(save)

    def _take_back(self, save: _Save) -> None:
        self._unstage(save)
        save.handle.end(error=SaveCancelledError(save.handle.step))
        self._end(save)

    def _put_right(self) -> None:
        """Ends what an interrupt left of this thread's saves, if it came even while another one was seen to."""
        here = threading.get_ident()
        with self._guard:
            left = [save for save in self._saves.values() if save.thread == here]
        for save in left:
            self._leave(save)

    def _copy_later(self, task: Callable[[], None]) -> None:
        if self._copier is None:
            self._copies = queue.SimpleQueue()
            self._copier = threading.Thread(target=_serve, args=(self._copies,), name="tierkeep-copy", daemon=True)
        if self._copier.ident is None:
            self._copier.start()
        assert self._copies is not None
        self._copies.put(task)

    def raise_failure(self) -> None:
        """Raises the oldest failure that nobody was told of; it is told now."""
        with self._guard:
            while self._failures:
                handle, error = self._failures.pop(0)
                if handle is None or not handle._told:
                    self._is_told(error)
                    if handle is not None:
                        handle._told = True
                    raise error

    def _is_told(self, error: Exception) -> None:
        """Of several saves that failed for one reason, it is told once. Called with `_changed` held."""
        for handle, other in self._failures:
            if other is error and handle is not None:
                handle._told = True
        self._failures = [each for each in self._failures if each[1] is not error]

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when no save is under way. Raises a failure that nobody was told of, and TimeoutError."""
        self._put_right()
        with self._guard:
            if not self._changed.wait_for(lambda: not self._saves, timeout_s):
                steps = [save.handle.step for save in self._saves.values()]
                raise TimeoutError(f"steps {steps} are still being saved after {timeout_s} s; the saves go on")
        self.raise_failure()

    def wait_staged(self) -> None:
        """Returns when every state that a deferred save was given has been copied, or cannot be."""
        if self._pid != os.getpid():
            return  # a fork has no copier
        here = threading.get_ident()  # what this one copies itself it need not, and cannot, wait for
        with self._guard:
            self._changed.wait_for(lambda: all(save.staged or save.thread == here for save in self._saves.values()))

    def settle(self) -> None:
        """Returns when every save that had begun is whole in memory, on the disk, or has failed."""
        self._put_right()
        with self._guard:
            waiting = list(self._saves.values())
            self._changed.wait_for(lambda: all(save.handle.kept.done or save.handle.done for save in waiting))
            if self._anonymous:
                self._changed.wait_for(lambda: all(save.handle.done for save in waiting))

    def memory_root(self) -> Path | None:
        """Where the steps stand that this host's memory holds; None if it holds none.

        Saves that a process that died left sealed are taken up first, unless another process is training on this root. That
        is not waited for if all of them are steps already, of which only the disk's copy is to be made.
        Raises StorageError if it cannot be told.
        """
        if self._root is None:
            return None
        try:
            arena = self._arena or own_arena(self._root, self._memory.directory)
        except OSError as error:
            raise StorageError(f"looking for the memory of {self._root}", error, "nothing was changed") from error
        if arena is None:
            return None
        if self._arena is None and arena.has_jobs():
            with contextlib.suppress(BusyError):
                self._ready()
        if self._arena is not None and not self._recovered.is_set() and not _stand_in_memory(arena):
            self._recovered.wait()
        return arena.steps

    def close(self) -> None:
        """Ends all saves, sees that the newest step is on the disk, and leaves no process, thread or memory.

        Raises a failure that nobody was told of. Where the disk refuses the newest step, memory keeps it.
        """
        if self._pid != os.getpid():
            return
        with self._ending:
            if self._ended:
                return
            with self._guard:
                self._closing = True
                self._changed.notify_all()
            if self._arena is not None:
                self._close(self._arena)
            self._ended = True
        self.raise_failure()
        failure = self._closed[0] if self._closed else None
        if failure is not None:
            raise failure

    def _close(self, arena: Arena) -> None:
        """Every line of it may be done again: an interrupt may come between any two."""
        self._put_right()
        here = threading.get_ident()
        with self._guard:
            # The worker is told of the end last: what it hears of later has no place any more.
            self._changed.wait_for(lambda: all(save.thread in (0, here) for save in self._saves.values()))
            never_released = [save.handle for save in self._saves.values() if save.held and save.job.item is None]
        if self._copies is not None and self._copier is not None and self._copier.ident is not None:
            self._copies.put(None)
            self._copier.join()
        for handle in never_released:
            self.abandon_item(handle)
        path = str(arena.path)
        self._attach()
        if self._closed is None:
            self._closed = []
        if not self._closed:
            try:
                client().send("close", path)
            except WorkerError as error:
                self._closed.append(error)
            with self._guard:
                self._changed.wait_for(lambda: bool(self._closed))
        client().detach(path)
        for image in self._images.values():
            self._unpin(image)
            image.close()
        with self._guard:
            left = list(self._saves.values())
        for save in left:  # which the handler of a signal closed in the middle of
            save.handle.end(error=ClosedError(f"the checkpointer of {self._root}"))
            self._end(save)
        self._images.clear()
        if self._owner is not None:
            self._owner.close()
        _open.discard(self)

    @property
    def under_way(self) -> list[SaveHandle]:
        with self._guard:
            return [save.handle for save in self._saves.values()]

    # Before a save

    def check_process(self) -> None:
        """Raises BusyError in a forked child, where locks may be held by threads that are not there."""
        if self._pid != os.getpid() and self._arena is not None:
            raise BusyError(
                f"this checkpointer of {self._root} was opened in process {self._pid} and cannot be used in a fork of it: "
                "open another one here. Nothing was done."
            )

    def _ready(self) -> None:
        """Opens the arena. Raises BusyError if another checkpointer has it, StorageError if it cannot be made."""
        if self._arena is None:
            self._pid = os.getpid()  # nothing was begun: a fork may as well be the one to do so
        self.check_process()
        if self._closing:
            raise ClosedError(f"the checkpointer of {self._root}")
        if self._arena is None:
            self._open_arena()
        self._attach()

    def _open_arena(self) -> None:
        directory = self._memory.directory
        owner: FileLock | None
        try:
            sweep_arenas(directory)
            if self._root is None:
                arena, owner = make_arena(None, directory)
            else:
                self._root.mkdir(parents=True, exist_ok=True)
                arena, owner = _own_arena(self._root, directory)
        except OSError as error:
            raise StorageError(f"making memory for {self._root} in {directory}", error, "nothing was saved") from error
        if owner is None:
            raise BusyError(
                f"another checkpointer saves into {self._root} in the background: one at a time can. End it, or pass "
                "asynchronous=False. Nothing was saved."
            )
        _forget_plans(arena)
        self._owner, self._arena = owner, arena

    def _attach(self) -> None:
        """Has the worker open the arena, if it was not told to."""
        if self._attached:
            return
        assert self._arena is not None
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        _open.add(self)
        try:
            client().attach(str(self._arena.path), self, self._memory.nice)
        except Exception:
            _open.discard(self)
            owner, self._arena, self._owner = self._owner, None, None
            if owner is not None:
                owner.close()
            raise
        self._attached = True

    def _check_new(self, path: Path, step: int, *, overwrite: bool) -> None:
        if overwrite:
            return
        with self._guard:
            if any(save.handle.step == step for save in self._saves.values()):
                raise CheckpointExistsError(str(path), "it is being saved; pass overwrite=True to save it again")
        if self._disk.exists(path):  # also if it is for memory alone: it may be the last one, which comes to the disk
            raise CheckpointExistsError(str(path))

    def _await_turn(self) -> bool:
        """Waits until fewer saves are under way than may be; False if the policy is not to wait."""
        most = self._memory.in_flight
        with self._guard:
            if self._memory.when_full == "skip" and len(self._saves) >= most:
                return False
            self._wait_until(lambda: len(self._saves) < most)
        return True

    def _wait_until(self, reached: Callable[[], object]) -> None:
        """Waits, with `_changed` held. Raises ClosedError if the checkpointer is closed meanwhile."""
        self._changed.wait_for(lambda: self._closing or reached())
        if self._closing:
            raise ClosedError(f"the checkpointer of {self._root}")

    def _number(self) -> int:
        """Later saves have larger numbers, also than those of a process before this one."""
        self._last_number = max(self._last_number + 1, time.time_ns())
        return self._last_number

    @property
    def _free(self) -> list[Image]:
        """The images that nobody has."""
        return [image for identity, image in list(self._images.items()) if identity not in self._used]

    def _acquire(self, save: _Save) -> None:
        """Gives a save a free image of its size; the worker is asked for images if there are not enough of them."""
        nbytes = save.plan.image_nbytes
        if not nbytes:
            return
        while True:
            with self._guard:
                if self._no_image is not None:
                    error, self._no_image = self._no_image, None
                    self._is_told(error)
                    raise error
                if free := self._free:
                    image = next((each for each in free if each.nbytes == nbytes), free[0])
                    save.image = image  # first: from here on an interrupt gives it back
                    self._filling.add(image.identity)
                    self._used.add(image.identity)
                    break
                short = self._missing() > 0
            if short:
                self._allocate(nbytes, self._most_images)
                continue
            client().wake()  # all images may be in the hands of one that died
            with self._guard:
                # Some are missing again if the worker that was asked for them died.
                self._wait_until(lambda: self._free or self._no_image is not None or self._missing() > 0)
        if image.nbytes != nbytes:
            try:
                check_budget(nbytes - image.nbytes, self._in_use(), 1, self._memory.budget_nbytes)
                self._unmapped.add(image.identity)
                self._unpin(image)
                image.resize(nbytes)
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                if not isinstance(error, BlockingIOError) and (error.errno != errno.ENOSPC or not image.named):
                    raise StorageError("enlarging an image", error, "nothing was saved") from error
                self._replace(save, named=isinstance(error, BlockingIOError))
                return
        if image.identity in self._unmapped:
            self._map(image)
            self._unmapped.discard(image.identity)

    def _replace(self, save: _Save, *, named: bool) -> None:
        """Takes other memory in the place of an image that cannot be resized where it is."""
        nbytes = save.plan.image_nbytes
        if not named:
            self._say_anonymous(1, nbytes)
        try:
            save.instead = self._create(nbytes) if named else Image.anonymous(nbytes)
        except OSError as error:
            raise StorageError("allocating an image", error, "nothing was saved") from error
        self._unmapped.add(save.instead.identity)
        self._swap(save)
        assert save.image is not None
        self._map(save.image)
        self._unmapped.discard(save.image.identity)

    def _create(self, nbytes: int) -> Image:
        """A new image among those that hold nothing."""
        assert self._arena is not None
        path = self._arena.new_free()
        temporary = self._arena.filling / f"{path.name}{NEW}"
        image = Image.create(temporary, nbytes)
        with self._guard:
            self._paths[image.identity] = path
            self._filling.add(image.identity)
            temporary.rename(path)
        return image

    def _swap(self, save: _Save) -> None:
        """Puts `save.instead` in the place of its image. Doing it again, after an interrupt, does no harm."""
        old, new = save.image, save.instead
        assert old is not None
        assert new is not None
        with self._guard:
            self._used.add(new.identity)
            self._images[new.identity] = new
            if old is not new:
                self._images.pop(old.identity, None)
                self._used.discard(old.identity)
                self._filling.discard(old.identity)
                self._unmapped.discard(old.identity)
                if old.identity in self._paths:
                    self._paths[old.identity].unlink(missing_ok=True)
                    del self._paths[old.identity]
                old.close()
                save.image = new
            save.instead = None

    def _missing(self) -> int:
        return self._most_images - len(self._images) - self._coming

    def _allocate(self, nbytes: int, count: int) -> None:
        """Asks for as many images as are missing of `count`."""
        with self._guard:
            count -= len(self._images) + self._coming
            if count <= 0 or not nbytes:
                return
            check_budget(count * nbytes, self._in_use(), count, self._memory.budget_nbytes)
            anonymous = self._anonymous or not has_room(self._memory.directory, count * nbytes)
        assert self._arena is not None
        if not anonymous:
            try:
                with self._guard:
                    self._coming += count
                client().send("allocate", str(self._arena.path), count, nbytes)
            except BaseException:
                with self._guard:  # who waits asks again; one too many is let go of
                    self._coming = 0
                    self._changed.notify_all()
                raise
            return
        self._say_anonymous(count, nbytes)
        for _ in range(count):
            try:
                self._add(Image.anonymous(nbytes))
            except OSError as error:
                self.heard("no_image", pickle.dumps(StorageError("allocating an image", error, "nothing was saved")))
                return

    def _say_anonymous(self, count: int, nbytes: int) -> None:
        if not self._anonymous:
            self._anonymous = True
            _log.warning(
                "tierkeep: %s has no room for %d images of %.2f GB, so they are memory without a name: "
                "steps are not restored from it, and all of them are written to the disk",
                self._memory.directory,
                count,
                nbytes / 1e9,
            )

    def _in_use(self) -> int:
        return sum(image.nbytes for image in self._images.values())

    def _add(self, image: Image) -> None:
        try:
            self._map(image)
            with self._guard:
                self._coming = max(0, self._coming - 1)
                self._images[image.identity] = image
                self._changed.notify_all()
        except BaseException:
            if self._images.get(image.identity) is not image:
                self._unpin(image)
                image.close()
            raise

    def _map(self, image: Image) -> None:
        image.populate()
        if image.nbytes and image.pinned is None:
            image.pinned = self._adapter.pin(image.array)

    def _unpin(self, image: Image) -> None:
        if image.pinned is not None:
            image.pinned()
            image.pinned = None

    def _put_plan(self, plan: SavePlan) -> str:
        """Makes sure that the worker can read a plan; returns its key."""
        assert self._arena is not None
        known = self._keys.get(id(plan))
        if known is not None and known[0] is plan:
            self._keys[id(plan)] = self._keys.pop(id(plan))  # the last to be forgotten
            return known[1]
        data = encode_plan(plan)
        key = secrets.token_hex(16)
        try:
            (self._arena.plans / key).write_bytes(data)
        except OSError as error:
            raise StorageError("keeping a plan in memory", error, "nothing was saved") from error
        self._keys[id(plan)] = plan, key
        if len(self._keys) > _PLANS + self._memory.in_flight:
            _, old = self._keys.pop(next(iter(self._keys)))
            (self._arena.plans / old).unlink(missing_ok=True)
        return key

    # Staging

    def _stage(self, save: _Save, copies: Any) -> None:
        """Copies a state into its image and seals that. On an error it is left to the caller to `_unstage` it."""
        began = time.perf_counter()
        job, handle = save.job, save.handle
        assert self._arena is not None
        directory = self._arena.filling / job.save_id
        try:
            directory.mkdir()
            if save.image is not None and save.image.named:
                self._paths[save.image.identity].rename(directory / "image")
                with self._guard:
                    del self._paths[save.image.identity]
                    self._filling.discard(save.image.identity)
            if save.image is not None:

                def step(_nbytes: int) -> None:
                    if save.cancelled:
                        raise SaveCancelledError(handle.step)

                # A deferred copy too: with fewer threads than the forward and backward have it would end after them.
                lanes = min(os.cpu_count() or 1, _LANES)
                fill_image(save.plan, save.leaves, save.image.array, lanes=lanes, copies=copies, step=step)
            if changed := _changed(save):
                raise ChangedLeafError(handle.step, changed)
            seconds = time.perf_counter() - began
            save.seconds |= {"wait": handle.waited_s, "stage": seconds}
            if not save.held:
                self._seal(save, directory)
        except BaseException as error:
            failure = _cause(save, error)
            if failure is None:
                raise
            try:
                raise failure from error
            finally:
                del failure  # in the frame, which is in its traceback, it would live until the collector comes by
        finally:
            save.leaves = []
        self._was_staged(save)
        if not save.held:
            self._tell(save)

    def _was_staged(self, save: _Save) -> None:
        handle, seconds = save.handle, save.seconds["stage"]
        with self._guard:
            known, save.staged = save.staged, True
            self._changed.notify_all()
        handle.reach(handle.staged, seconds, save.plan.nbytes)
        if not known:
            self._events.emit(Event("staged", handle.step, "", save.plan.nbytes, save.plan.nbytes, seconds))

    def _was_sealed(self, save: _Save) -> None:
        """Goes on with a save that is sealed, wherever it was interrupted after that."""
        save.leaves = []
        save.sealed = True
        try:
            self._was_staged(save)
        finally:
            self._tell(save)

    def _seal(self, save: _Save, directory: Path) -> None:
        """From here on the save needs this process no more."""
        assert self._arena is not None
        (directory / "job").write_bytes(encode_job(save.job))
        os.link(self._arena.plans / save.job.plan, directory / "plan")  # which may be forgotten there before it is here
        with self._guard:
            save.sealing = True
            directory.rename(self._arena.sealed / save.job.name)
            save.sealed = True

    def _stage_later(self, save: _Save, copies: Any) -> None:
        with self._guard:
            if save.left:
                return  # the call was interrupted, and takes it back
            save.thread = threading.get_ident()  # from here on it is this one's
        try:
            self._stage(save, copies)
        except BaseException as error:  # noqa: BLE001  raised in the training's own thread, at its next call
            if not isinstance(error, TierkeepError):
                error.add_note("".join(traceback.format_tb(error.__traceback__)))
            for each in filter(None, (error, error.__cause__)):
                each.__traceback__ = None  # its frames hold the state and the image, as long as anybody has the error
            self._unstage(save)
            if isinstance(error, SaveCancelledError):
                self._was_cancelled(save)
            elif isinstance(error, Exception):
                self._failed(save, error)
            else:
                self._failed(save, WorkerError(f"copying step {save.job.step}: {error!r}", _UNTOUCHED))
        finally:
            self._is_done_with(save)

    def _tell(self, save: _Save) -> None:
        """Has the worker take up a save that is sealed."""
        assert self._arena is not None
        memory = save.image.fileno() if save.image is not None and not save.image.named else None
        try:
            client().send("sealed", str(self._arena.path), save.job.name, memory is not None, memory=memory)
            if save.cancelled:  # when it was too late not to seal it
                client().send("cancel", str(self._arena.path), save.job.save_id)
        except WorkerError as error:
            self._failed(save, error)

    def _unstage(self, save: _Save) -> None:
        """Takes back what `_stage` did, whatever that is. Doing it again does no harm."""
        assert self._arena is not None
        save.leaves = []
        directory = self._arena.filling / save.job.save_id
        if save.instead is not None:
            self._swap(save)
        if save.image is not None:
            if (staged := directory / "image").exists():
                path = self._arena.new_free()
                self._paths[save.image.identity] = path  # first: an interrupt in between has it done again
                with contextlib.suppress(OSError):
                    staged.rename(path)
            self._give_back(save.image)
        shutil.rmtree(directory, ignore_errors=True)

    def _give_back(self, image: Image) -> None:
        with self._guard:
            self._filling.discard(image.identity)
            self._used.discard(image.identity)
            self._changed.notify_all()

    def _cancel(self, handle: SaveHandle) -> bool:
        with self._guard:
            save = next((each for each in self._saves.values() if each.handle is handle), None)
            if save is None:
                return False
            save.cancelled = True
        if save.sealed and self._arena is not None:
            client().send("cancel", str(self._arena.path), save.job.save_id)
        return True

    # What the worker says, in the client's thread

    def settings(self, *, fresh: bool) -> Settings:
        assert self._arena is not None
        with self._guard:
            pending = tuple(save_id for save_id, save in self._saves.items() if save.sealed)
        return Settings(str(self._arena.path), fresh, pending, self._memory.write_bytes_per_s)

    def restarted(self) -> None:
        self._events.emit(Event("worker", None))
        with self._guard:
            self._coming = 0
            self._changed.notify_all()
        for save in list(self._saves.values()):
            if save.sealed and not save.handle.done:
                self._tell(save)
        if self._closed is not None and self._arena is not None:
            client().send("close", str(self._arena.path))

    def lost(self, error: WorkerError) -> None:
        with self._guard:
            saves = [save for save in self._saves.values() if save.sealed]
        for save in saves:
            self._failed(save, error)
        with self._guard:
            if any(save.image is None and save.plan.image_nbytes for save in self._saves.values()):  # they wait for one
                self._no_image = error
            self._coming = 0
            self._recovered.set()
            if self._closed is not None:
                self._closed.append(error)
            self._changed.notify_all()

    def heard(self, kind: str, *payload: Any) -> None:
        """Takes what the worker says."""
        if kind == "image":
            self._take(Path(payload[0]))
        elif kind == "no_image":
            with self._guard:
                self._coming = 0
                self._no_image = pickle.loads(payload[0])
                self._changed.notify_all()
        elif kind == "recovered":
            self._recovered.set()
        elif kind == "closed":
            with self._guard:
                assert self._closed is not None
                self._closed.append(None if payload[0] is None else pickle.loads(payload[0]))
                self._changed.notify_all()
        else:
            self._heard_of_save(kind, *payload)

    def _heard_of_save(self, kind: str, save_id: str, *payload: Any) -> None:
        save = self._saves.get(save_id)
        if save is None:  # one that another process had begun
            if kind == "failed":
                with self._guard:
                    self._failures.append((None, pickle.loads(payload[0])))
            return
        handle, plan = save.handle, save.plan
        if kind in ("kept", "written", "committed"):
            seconds = payload[0]
            save.seconds[{"kept": "keep", "written": "write", "committed": "commit"}[kind]] = seconds
            stage: Stage = getattr(handle, kind)
            if stage.done:
                return  # by a worker that died
            if kind == "committed":  # of a plan without bytes, nothing was written before
                handle.reach(handle.written, 0.0, 0)
            handle.reach(stage, seconds, plan.image_nbytes)
            what: Literal["kept", "written", "committed"] = kind  # type: ignore[assignment]
            self._events.emit(Event(what, handle.step, "", plan.image_nbytes, plan.image_nbytes, seconds))
            with self._guard:
                self._changed.notify_all()
        elif kind == "progress":
            stage_name, done, total = payload
            self._events.emit(Event("progress", handle.step, stage_name, done, total))
        elif kind == "settled":
            self._succeeded(save)
        elif kind == "failed":
            self._failed(save, pickle.loads(payload[0]))
        elif kind == "cancelled":
            self._was_cancelled(save)
        elif kind == "lost":
            if handle.committed.done:
                self._succeeded(save)
            elif save.cancelled:
                self._was_cancelled(save)
            else:
                what_died = f"the background process died, and step {handle.step} with it"
                self._failed(save, WorkerError(what_died, _UNTOUCHED))

    def _take(self, path: Path) -> None:
        """An image that holds nothing: a new one, or one that comes back."""
        try:
            image = Image.open(path)
        except OSError:
            return  # it was told twice, by a worker that died and by the next
        known = self._images.get(image.identity)
        if known is None:
            if image.nbytes == 0 or len(self._images) >= self._most_images:  # of a run that had more of them
                image.close()
                path.unlink(missing_ok=True)
                return
            self._paths[image.identity] = path
            self._add(image)
            return
        image.close()
        with self._guard:
            if known.identity in self._filling:
                return
            self._paths[known.identity] = path
        self._give_back(known)

    def _succeeded(self, save: _Save) -> None:
        handle = save.handle
        seconds = save.seconds | {"total": handle.seconds_since_begun}
        outcome: Literal["saved", "in memory"] = "saved" if save.job.to_disk else "in memory"
        plan = save.plan
        handle.end(SaveReport(handle.path, handle.step, plan.nbytes, plan.image_nbytes, seconds, outcome))
        self._end(save)

    def _was_cancelled(self, save: _Save) -> None:
        save.handle.end(error=SaveCancelledError(save.handle.step))
        self._events.emit(Event("cancelled", save.handle.step))
        self._end(save)

    def _failed(self, save: _Save, error: Exception) -> None:
        with self._guard:
            self._failures.append((save.handle, error))
        self._events.emit(Event("failed", save.handle.step, error=error))
        if save.handle.committed.done:
            return  # the step stands; what failed came after it
        save.handle.end(error=error)
        self._end(save)

    def _end(self, save: _Save) -> None:
        with self._guard:
            self._saves.pop(save.job.save_id, None)
            if save.image is not None and not save.image.named:
                self._used.discard(save.image.identity)
            self._changed.notify_all()


class _Save:
    """One save under way."""

    __slots__ = (
        "cancelled",
        "handle",
        "held",
        "image",
        "instead",
        "job",
        "leaves",
        "left",
        "plan",
        "sealed",
        "sealing",
        "seconds",
        "staged",
        "thread",
    )

    def __init__(self, handle: SaveHandle, job: Job, plan: SavePlan, planned_s: float, leaves: list[Leaf]) -> None:
        self.handle = handle
        self.job = job
        self.plan = plan
        self.image: Image | None = None
        self.instead: Image | None = None
        """One that is about to take its place."""
        self.leaves = leaves
        self.seconds: dict[str, float] = {"plan": planned_s}
        self.staged = False
        self.sealing = False
        """Whether it may be sealed: it is if it is not among what is filled any more."""
        self.sealed = False
        self.held = False
        """Of an item: it is sealed when it is told where to."""
        self.cancelled = False
        self.left = False
        """By a call that was interrupted, which takes it back."""
        self.thread = threading.get_ident()
        """Which begins or releases it just now; 0 if none does."""


def _changed(save: _Save) -> list[str]:
    """The leaves that were changed since the call, each with what has happened to it."""
    return [
        f"leaf {save.plan.leaves[number].name!r} {reason}"
        for number, leaf in enumerate(save.leaves)
        if leaf.changed is not None and (reason := leaf.changed()) is not None
    ]


def _cause(save: _Save, error: BaseException) -> Exception | None:
    """What an error in staging is to be told as; None if it says that itself."""
    if not isinstance(error, ChangedLeafError) and (changed := _changed(save)):
        return ChangedLeafError(save.handle.step, changed)  # what is gone cannot be copied either
    if isinstance(error, OSError) and not isinstance(error, StorageError):
        return StorageError(f"staging step {save.handle.step}", error, _UNTOUCHED)
    return None


def _own_arena(root: Path, directory: str) -> tuple[Arena, FileLock | None]:
    """The arena of a root, made if there is none, and its lock; None if another process has that."""
    arena = own_arena(root, directory)
    if arena is not None:
        with contextlib.suppress(FileNotFoundError):  # it was removed just now
            return arena, arena.lock_owner()
    return make_arena(root, directory)


def _forget_plans(arena: Arena) -> None:
    """Removes the plans of processes that died, but those that jobs still refer to."""
    with contextlib.suppress(OSError, ValueError):
        used = set()
        for job in arena.sealed.iterdir():
            with contextlib.suppress(FileNotFoundError):  # it ends just now
                used.add(decode_job((job / "job").read_bytes()).plan)
        for plan in arena.plans.iterdir():
            if plan.name not in used:
                plan.unlink()


def _stand_in_memory(arena: Arena) -> bool:
    """Whether every save that is sealed is a step of the memory; False also if that cannot be told."""
    try:
        for directory in list(arena.sealed.iterdir()):
            job = decode_job((directory / "job").read_bytes())
            part = step_path(arena.steps, job.step) / ITEM / part_name(job.rank) / PART
            if unseal(part.read_bytes())["save_id"] != job.save_id:
                return False
    except (OSError, ValueError, KeyError):  # one that ends just now: the worker will tell
        return False
    return True


def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()


def _close_all() -> None:
    """At the end of the interpreter: what was not closed is, so that its saves are finished and nothing is left."""
    for saves in list(_open):
        try:
            saves.close()
        except Exception:  # noqa: BLE001  there is nobody left to raise it to
            _log.exception("tierkeep: a save in the background failed")
