"""The worker: a process that makes checkpoints of sealed images. `python -m tierkeep.memory.worker FD PID`.

It imports no framework. One serves all checkpointers of a training process: it allocates images, and for every image
that was sealed it computes the checksums, makes the memory's own step of it, writes it to the disk and commits it. When
training ends in any way, it finishes what is sealed, sees that the newest step is on the disk, and ends itself.

What it has to do is in the arena, not in the messages: those only say that there is something. So a worker that takes
the place of one that died goes on where that one was, and doing a thing again does no harm.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointExistsError, StorageError, TierkeepError, WorkerError
from ..format.checksum import unseal
from ..format.part import PART, WHOLE
from ..save.commit import DATA, Draft, part_name, sweep
from ..save.job import Job, decode_job
from ..save.plan import SavePlan, decode_plan
from ..save.recycle import Recycler
from ..save.sealed import checksum_image, write_sealed
from ..save.store import retain, store, store_part
from ..step import ITEM, doomed, is_step_name, leftover, list_steps, step_path
from ..tiers.local_disk import LocalDisk
from .arena import NEW, Arena, Settings, remove_arena
from .image import Image
from .priority import Throttle, lower_priority

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Keeper", "main"]

_RECORD_LIMIT = 1 << 31  # bytes
_BROKEN = 70  # exit status, EX_SOFTWARE
_PROGRESS_NBYTES = 64 << 20  # between two reports of how far a save is
_DONE = ".done"  # the ending, among what is being filled, of a job that is over
_FAILED = "failed"  # lies beside a job that the disk refused, which was told


class _Cancelled(Exception):
    pass


class Keeper:
    """What the worker does for one arena.

    Guarantees: jobs are carried out in the order of their numbers, one checksummed while another is written; an image
    is freed only when neither its job nor the newest step of the memory needs it; what fails is reported with its save
    and stays in memory. Two threads, which `finish` joins.
    """

    def __init__(
        self, settings: Settings, report: Callable[..., None], disk: LocalDisk | None = None, wait: bool = True
    ) -> None:
        self._arena = Arena(Path(settings.arena))
        self._report = report
        self._disk = disk or LocalDisk()
        self._throttle = Throttle(settings.write_bytes_per_s)
        self._lock = self._arena.lock_worker() if wait else None
        self._plans: dict[str, SavePlan] = {}
        self._images: dict[tuple[int, int], Image] = {}
        self._recyclers: dict[str, Recycler] = {}
        self._durable: set[Path] = set()
        self._in_memory: Job | None = None
        """The newest save that ended well and stands in the memory's own steps: one that has not may yet be cancelled."""
        self._steps: dict[int, str] = {}
        """Whose save stands there, by step."""
        self._on_disk = -1
        """The number of the newest save that is known to be on the disk."""
        self._unsaved: dict[int, Job] = {}
        """By number: what stands in memory alone, because it was to, or because the disk refused it."""
        self._guard = threading.RLock()
        self._cancelled: set[str] = set()
        self._queued: set[str] = set()
        self._to_checksum: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(tasks,), name=f"tierkeep-{name}")
            for name, tasks in (("checksum", self._to_checksum), ("write", self._to_write))
        ]
        self._recover(settings)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    # What is asked for

    def allocate(self, count: int, nbytes: int) -> None:
        """Makes images, one after the other, each reported when all of its pages are there."""

        def task() -> None:
            for _ in range(count):
                path = self._arena.new_free()
                temporary = self._arena.filling / f"{path.name}{NEW}"
                try:
                    Image.create(temporary, nbytes).close()
                    temporary.rename(path)
                except OSError as error:
                    self._report("no_image", _told(StorageError("allocating an image", error, "nothing was saved")))
                    return
                self._report("image", str(path))

        self._to_checksum.put(task)

    def sealed(self, name: str, fd: int | None = None) -> None:
        """Takes up a job; with `fd`, its image is that memory."""
        if name in self._queued or not (self._arena.sealed / name).exists():  # told again, and done by now
            if fd is not None:
                os.close(fd)
            return
        if fd is None and self._lacks_memory(name):
            return  # training tells of it again, with the memory
        self._queued.add(name)
        self._to_checksum.put(lambda: self._checksum(name, fd))

    def cancel(self, save_id: str) -> None:
        self._cancelled.add(save_id)

    def finish(self, *, closed: bool, alive: Callable[[], bool] = lambda: True) -> TierkeepError | None:
        """Carries out all that is sealed, then puts the newest step on the disk if only memory has it.

        Removes the arena if the training process `closed` it and is `alive`, for else another one may have come to it,
        and unless it has the only copy of something; else the newest step stays in memory for the next process. Returns
        what failed last.
        """
        failed: list[TierkeepError] = []
        for each in sorted(self._arena.sealed.iterdir()):  # sealed in the last moment, and not told
            self.sealed(each.name)
        # The first queue's last task fills the second one's.
        self._to_checksum.put(lambda: self._to_write.put(lambda: self._flush(failed)))
        self._to_checksum.put(lambda: self._to_write.put(None))
        self._to_checksum.put(None)
        for thread in self._threads:
            thread.join()
        for recycler in self._recyclers.values():
            recycler.close()
        with contextlib.suppress(OSError):
            if (root := self._arena.root) is not None:  # what another worker left that died after its last commit
                sweep(self._disk, root, mine=is_step_name)
        for image in self._images.values():
            image.close()
        with contextlib.suppress(OSError):
            if closed and not failed and alive():
                remove_arena(self._arena)
            else:
                for directory in (self._arena.free, self._arena.filling):
                    for entry in list(directory.iterdir()):
                        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if self._lock is not None:
            self._lock.close()
        return failed[-1] if failed else None

    # What was there before

    def _recover(self, settings: Settings) -> None:
        arena = self._arena
        for each in list(arena.steps.iterdir()):
            if leftover(each.name) is not None:
                self._let_go(each)
        for each in list(arena.filling.iterdir()):
            if each.name.endswith(_DONE):
                self._clear(each)
            elif each.name.endswith(NEW):
                each.unlink()
        for step in list_steps(self._disk, arena.steps):
            item = step_path(arena.steps, step) / ITEM
            with contextlib.suppress(OSError, ValueError):
                part = unseal(self._disk.read_file(item / part_name(0) / PART, _RECORD_LIMIT))
                self._steps[step] = str(part["save_id"])
        if settings.fresh:
            for each in list(arena.filling.iterdir()):
                with contextlib.suppress(FileNotFoundError):
                    (each / "image").rename(arena.new_free())
                shutil.rmtree(each)
        jobs = sorted(each.name for each in arena.sealed.iterdir())
        for image in sorted(arena.free.iterdir()):
            self._report("image", str(image))
        for name in jobs:
            if settings.fresh and self._lacks_memory(name):
                _remove(arena.sealed / name)  # it went with the processes that had it
            if not settings.fresh and (arena.sealed / name / _FAILED).exists():
                self._leave(name)
            self.sealed(name)
        known = {name.partition("-")[2] for name in jobs}
        for save_id in settings.pending:
            if save_id not in known:  # its job is only removed once all is done and told
                self._report("lost", save_id)
        self._to_checksum.put(lambda: self._report("recovered"))

    def _leave(self, name: str) -> None:
        """Leaves a job that failed, as was told, until training ends."""
        with contextlib.suppress(OSError, ValueError):
            job = decode_job((self._arena.sealed / name / "job").read_bytes())
            if self._stands_in_memory(job):
                self._unsaved[job.number] = job
                self._set_in_memory(job)
                self._queued.add(name)

    def _lacks_memory(self, name: str) -> bool:
        """Whether the image of a job is memory without a name, which only its training process has."""
        directory = self._arena.sealed / name
        if (directory / "image").exists():
            return False
        return self._plan(decode_job((directory / "job").read_bytes())).image_nbytes > 0

    def _stands_in_memory(self, job: Job) -> bool:
        return self._steps.get(job.step) == job.save_id

    # The first stage

    def _checksum(self, name: str, fd: int | None) -> None:
        directory = self._arena.sealed / name
        job = decode_job((directory / "job").read_bytes())
        try:
            began = time.perf_counter()
            plan = self._plan(job)
            image = self._image(directory, plan, fd)
            progress = self._progress(job, "checksum", plan.image_nbytes)
            crcs = checksum_image(plan, image.array, progress) if image is not None else []
            self._check(job)
            if fd is None and job.item is None:
                self._keep(directory, job, plan, crcs)
                self._report("kept", job.save_id, time.perf_counter() - began)
        except _Cancelled:
            self._drop(directory, job)
            return
        except Exception as error:  # noqa: BLE001  told to the training process, whatever it is
            self._fail(directory, job, error)
            return
        if job.to_disk:
            self._to_write.put(lambda: self._write(directory, job, plan, image, crcs))
        else:
            with self._guard:
                self._unsaved[job.number] = job
                self._set_in_memory(job)
            self._trim()
            self._report("settled", job.save_id)

    def _keep(self, directory: Path, job: Job, plan: SavePlan, crcs: list[list[int]]) -> None:
        """Makes the memory's own step: a second name of the image, and the records beside it."""

        def link(draft: Draft) -> list[list[int]]:
            os.link(directory / "image", draft.image_path(0))
            return crcs

        with self._guard:
            if not self._stands_in_memory(job):
                store(
                    self._disk,
                    step_path(self._arena.steps, job.step),
                    plan,
                    job.values,
                    link,
                    step=True,
                    overwrite=True,
                    metrics=job.metrics,
                    durable={self._arena.steps},
                    recycler=_Overwritten(self._disk, self._let_go),
                    identity=(job.save_id, job.image, job.begun_ns),
                )
                self._steps[job.step] = job.save_id

    def _set_in_memory(self, job: Job) -> None:
        with self._guard:
            if self._in_memory is None or job.number >= self._in_memory.number:
                self._in_memory = job

    # The second stage

    def _write(
        self, directory: Path, job: Job, plan: SavePlan, image: Image | None, crcs: list[list[int]]
    ) -> TierkeepError | None:
        """Puts a save on the disk. Returns what failed, which is told by then."""
        if job.item is not None:
            return self._write_item(directory, job, plan, image, crcs)
        root = Path(job.root)
        path = step_path(root, job.step)
        recycler = self._recyclers.setdefault(job.root, Recycler(self._disk))
        written = time.perf_counter()
        try:
            self._check(job)
            if _save_id(self._disk, path) != job.save_id:  # else another worker died after it had committed it
                sweep(self._disk, root, mine=is_step_name, but=recycler.holds)
                write = self._writing(job, plan, image, crcs, recycler)
                written = store(
                    self._disk,
                    path,
                    plan,
                    job.values,
                    write,
                    step=True,
                    overwrite=job.overwrite,
                    metrics=job.metrics,
                    durable=self._durable,
                    recycler=recycler,
                    identity=(job.save_id, job.image, job.begun_ns),
                )
            with self._guard:
                self._on_disk = max(self._on_disk, job.number)
            self._report("committed", job.save_id, time.perf_counter() - written)
        except _Cancelled:
            self._drop(directory, job)
            return None
        except Exception as error:  # noqa: BLE001  told to the training process, whatever it is
            return self._fail(directory, job, error)
        try:
            retain(self._disk, root, job.keep, job.step, recycler)
        except TierkeepError as error:
            self._report("failed", job.save_id, _told(error))
        self._done(directory, job)
        return None

    def _write_item(
        self, directory: Path, job: Job, plan: SavePlan, image: Image | None, crcs: list[list[int]]
    ) -> TierkeepError | None:
        """Puts one rank's part into the directory of an item."""
        assert job.item is not None
        began = written = time.perf_counter()
        try:
            self._check(job)
            part = Path(job.item) / part_name(job.rank)
            if self._disk.exists(part):  # of a worker that died in it: nobody has seen it
                self._disk.remove_tree(part)
            written = store_part(
                self._disk,
                Path(job.item),
                plan,
                self._writing(job, plan, image, crcs, None),
                identity=(job.part_of, job.image, job.begun_ns),
                rank=job.rank,
                world=job.world,
            )
        except _Cancelled:
            self._drop(directory, job)
            return None
        except Exception as error:  # noqa: BLE001  told to the training process, whatever it is
            return self._fail(directory, job, error)
        self._report("committed", job.save_id, max(0.0, time.perf_counter() - max(written, began)))
        self._done(directory, job)
        return None

    def _writing(
        self, job: Job, plan: SavePlan, image: Image | None, crcs: list[list[int]], recycler: Recycler | None
    ) -> Callable[[Draft], list[list[int]]]:
        """What writes the image of a job into a draft."""
        progress = self._progress(job, "write", plan.image_nbytes)

        def step(nbytes: int) -> None:
            progress(nbytes)
            self._throttle.take(nbytes, lambda: self._check(job))

        def write(draft: Draft) -> list[list[int]]:
            assert image is not None
            began = time.perf_counter()
            target = draft.image_path(job.rank)
            write_sealed(
                self._disk,
                target,
                plan,
                image.array,
                direct=job.direct,
                lanes=job.lanes,
                recycled=recycler is not None and recycler.reuse(target),
                step=step,
            )
            self._report("written", job.save_id, time.perf_counter() - began)
            self._check(job)
            return crcs

        return write

    def _flush(self, failed: list[TierkeepError]) -> None:
        """Puts the newest step on the disk if it stands in memory alone."""
        with self._guard:
            job = self._in_memory
            if job is None or job.number not in self._unsaved or job.number <= self._on_disk:
                return
            del self._unsaved[job.number]
        directory = self._arena.sealed / job.name
        plan = self._plan(job)
        image = self._image(directory, plan, None)
        error = self._write(directory, job, plan, image, _checksums(plan, image))
        if error is not None:
            failed.append(error)

    # The ends of a job

    def _done(self, directory: Path, job: Job) -> None:
        with self._guard:
            self._cancelled.discard(job.save_id)
            if self._stands_in_memory(job):
                self._set_in_memory(job)
                self._trim()  # first: another worker would take what is older, and left, for the newest
            self._end(directory)
            self._queued.discard(job.name)
        self._trim()  # before the next save looks for an image
        self._report("settled", job.save_id)

    def _drop(self, directory: Path, job: Job) -> None:
        """What was cancelled leaves nothing."""
        with self._guard:
            self._cancelled.discard(job.save_id)
            self._forget(directory, job)
        self._report("cancelled", job.save_id)

    def _fail(self, directory: Path, job: Job, error: Exception) -> TierkeepError:
        """Tells of a failure. What stands in memory stays there, to be written when training ends."""
        with self._guard:
            kept = self._stands_in_memory(job) and not isinstance(error, CheckpointExistsError)
            if kept:
                self._unsaved[job.number] = job
                self._set_in_memory(job)
                with contextlib.suppress(OSError):
                    (directory / _FAILED).touch()
        holds = "earlier checkpoints are untouched"
        if kept:
            holds = f"step {job.step} stands in memory; {holds}"
        failure: TierkeepError
        if isinstance(error, TierkeepError):
            failure = error
        elif isinstance(error, OSError):
            path = step_path(Path(job.root), job.step) if job.item is None else job.item
            failure = StorageError(f"saving {path} in the background", error, holds)
        else:
            failure = WorkerError(f"saving step {job.step}: {type(error).__name__}: {error}", holds)
        if not kept:
            self._forget(directory, job)
        self._trim()
        self._report("failed", job.save_id, _told(failure))
        return failure

    def _forget(self, directory: Path, job: Job) -> None:
        """Takes a save out of memory altogether."""
        with self._guard:
            stood = self._stands_in_memory(job)
            if stood and self._in_memory is not None and self._in_memory.save_id == job.save_id:
                self._in_memory = None
            if stood:
                self._remove_step(job.step)
            self._end(directory)
            self._queued.discard(job.name)
            newest = self._in_memory
            if newest is not None and newest.number in self._unsaved and not self._stands_in_memory(newest):
                # The save that is gone had taken its place.
                directory = self._arena.sealed / newest.name
                plan = self._plan(newest)
                image = self._image(directory, plan, None)
                self._keep(directory, newest, plan, _checksums(plan, image))

    def _trim(self) -> None:
        """Lets go of the memory's steps but the newest, as far as no job needs them."""
        with self._guard:
            newest = self._in_memory
            if newest is None:
                return
            for number in [n for n in self._unsaved if n < newest.number]:
                job = self._unsaved.pop(number)
                self._forget(self._arena.sealed / job.name, job)
            sealed = {name.partition("-")[2] for name in os.listdir(self._arena.sealed)}
            for step, save_id in list(self._steps.items()):
                if save_id != newest.save_id and save_id not in sealed:
                    self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        """Takes a step out of memory."""
        path = step_path(self._arena.steps, step)
        del self._steps[step]
        trash = doomed(path)
        with contextlib.suppress(FileNotFoundError):
            path.rename(trash)
        self._let_go(trash)

    def _let_go(self, trash: Path) -> None:
        """Removes what is no step of the memory any more, or never became one."""
        path = trash / ITEM / part_name(0)
        with contextlib.suppress(OSError, ValueError):
            image = str(unseal(self._disk.read_file(path / PART, _RECORD_LIMIT))["image"])
            if image:
                self._free(path / DATA / image)
        _remove(trash)

    def _end(self, directory: Path) -> None:
        """Takes a job away, by one rename: no other worker is to find half of it."""
        done = self._arena.filling / f"{directory.name}{_DONE}"
        with contextlib.suppress(FileNotFoundError):
            directory.rename(done)
        self._clear(done)

    def _clear(self, done: Path) -> None:
        self._free(done / "image")
        _remove(done)

    def _free(self, image: Path) -> None:
        """Gives an image back, under a new name, unless it has a second one: of a job, or of a step of the memory."""
        name = self._arena.new_free()
        with contextlib.suppress(FileNotFoundError):
            if image.stat().st_nlink == 1:
                image.rename(name)
                self._report("image", str(name))

    # What jobs need

    def _plan(self, job: Job) -> SavePlan:
        found = self._plans.get(job.plan)
        if found is None:
            while len(self._plans) >= 8:
                del self._plans[next(iter(self._plans))]
            found = self._plans[job.plan] = decode_plan((self._arena.sealed / job.name / "plan").read_bytes())
        return found

    def _image(self, directory: Path, plan: SavePlan, fd: int | None) -> Image | None:
        """The image of a job, mapped; the mapping is kept, because the image comes again."""
        if not plan.image_nbytes:
            return None
        image = Image.open(directory / "image") if fd is None else Image(fd, plan.image_nbytes)
        if image.nbytes != plan.image_nbytes:
            nbytes, expected = image.nbytes, plan.image_nbytes
            image.close()
            raise WorkerError(f"an image of {nbytes} bytes where {expected} were sealed", "nothing of it is used")
        image.named = fd is None
        with self._guard:
            known = self._images.get(image.identity)
            if known is not None and known.nbytes == image.nbytes:
                image.close()
                return known
            if known is not None:
                self._images.pop(known.identity).close()
            for identity, other in list(self._images.items()):
                if len(self._images) >= 16 or (other.named and not os.fstat(other.fileno()).st_nlink):
                    self._images.pop(identity).close()  # one that is gone comes no more
            self._images[image.identity] = image
        return image

    def _check(self, job: Job) -> None:
        if job.save_id in self._cancelled:
            raise _Cancelled

    def _progress(self, job: Job, stage: str, total: int) -> Callable[[int], None]:
        done = told = 0
        lock = threading.Lock()

        def step(nbytes: int) -> None:
            nonlocal done, told
            self._check(job)
            with lock:
                done += nbytes
                tell = done - told >= _PROGRESS_NBYTES or done == total
                if tell:
                    told = done
            if tell:
                self._report("progress", job.save_id, stage, done, total)

        return step


class _Overwritten(Recycler):
    """Gives back the image of a step of the memory that another one took the place of."""

    def __init__(self, disk: LocalDisk, let_go: Callable[[Path], None]) -> None:
        super().__init__(disk)
        self._let_go = let_go

    def discard(self, trash: Path, images: list[Path]) -> None:
        self._let_go(trash)


def _serve(tasks: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    try:
        while (task := tasks.get()) is not None:
            task()
    except BaseException:  # noqa: BLE001  a worker that lacks a thread would let training wait for ever: another takes over
        traceback.print_exc()
        os._exit(_BROKEN)


def _checksums(plan: SavePlan, image: Image | None) -> list[list[int]]:
    return checksum_image(plan, image.array, lambda _: None) if image is not None else []


def _save_id(disk: LocalDisk, step: Path) -> str | None:
    """Whose save stands at a step; None if it is none of ours."""
    try:
        return str(unseal(disk.read_file(step / ITEM / WHOLE, _RECORD_LIMIT)).get("save_id"))
    except (OSError, ValueError):
        return None


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _told(error: TierkeepError) -> bytes:
    return pickle.dumps(error)


def main(arguments: Sequence[str]) -> None:
    """Serves the training process at the other end of socket `FD`, whose number is `PID`, until it ends."""
    try:
        _attend(*map(int, arguments))
    except BaseException:  # noqa: BLE001  as in `_serve`: the other threads would keep it from ending
        traceback.print_exc()
        os._exit(_BROKEN)


def _attend(fd: int, parent: int, nice: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends when training does, and not before
        signal.signal(number, signal.SIG_IGN)
    lower_priority(nice)
    channel = Connection(fd)
    sending = threading.Lock()
    keepers: dict[str, Keeper] = {}
    closed: set[str] = set()

    def reporter(arena: str) -> Callable[..., None]:
        def report(*message: Any) -> None:
            with sending, contextlib.suppress(OSError):  # training has ended: it is all in the arena
                channel.send((arena, *message))

        return report

    dead = _ended(parent)
    watched = [channel.fileno(), *([dead] if dead is not None else [])]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if channel.fileno() not in ready:
            break
        try:
            kind, *payload = channel.recv()
        except (EOFError, OSError):
            break
        if kind == "open":
            settings: Settings = payload[0]
            if settings.arena in keepers:  # it was told twice
                continue
            with contextlib.suppress(FileNotFoundError):  # a worker that died while it removed the arena
                keepers[settings.arena] = Keeper(settings, reporter(settings.arena))
                keepers[settings.arena].start()
        elif kind == "allocate":
            arena, count, nbytes = payload
            if arena in keepers:
                keepers[arena].allocate(count, nbytes)
        elif kind == "sealed":
            arena, name, with_memory = payload
            memory = recv_handle(channel) if with_memory else None
            if arena in keepers:
                keepers[arena].sealed(name, memory)
            elif memory is not None:  # of an arena that was closed: what others save goes on
                os.close(memory)
        elif kind == "cancel":
            arena, save_id = payload
            if arena in keepers:
                keepers[arena].cancel(save_id)
        elif kind == "close":
            keeper = keepers.pop(payload[0], None)
            error = None
            if keeper is not None:
                closed.add(payload[0])
                error = keeper.finish(closed=True, alive=lambda: os.getppid() == parent)
            elif payload[0] not in closed:  # else it was told twice, and the arena may have the only copy of something
                remove_arena(Arena(Path(payload[0])))
            reporter(payload[0])("closed", None if error is None else _told(error))
        elif kind == "end":
            break
    for keeper in keepers.values():
        keeper.finish(closed=False)


def _ended(pid: int) -> int | None:
    """Becomes readable when a process ends: the socket alone may be held open by a child that it forked."""
    try:
        found = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
    if os.getppid() != pid:  # it ended before, and its number may be another's
        os.close(found)
        return None
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
