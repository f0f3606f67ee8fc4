"""Lanes: the threads that move bytes, several requests in flight, each with a buffer of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Turns", "run_lanes"]


class Turns(threading.Semaphore):
    """Held while bytes are copied: more copies at once than cores only push each other out of the cache."""

    def __init__(self) -> None:
        super().__init__(os.cpu_count() or 1)


def run_lanes(lanes: int, jobs: Iterable[int], job: Callable[[int, int], None]) -> None:
    """Runs `job(lane, number)` for every number, `lanes` at a time; returns when all threads are done.

    The first error, or an interrupt, stops the lanes after the job each is at, and is raised.
    """
    numbers = list(jobs)
    lanes = min(lanes, len(numbers))
    if lanes <= 1:
        for number in numbers:
            job(0, number)
        return
    waiting = iter(numbers)
    lock = threading.Lock()
    begun: list[int] = []
    ended: list[int] = []
    errors: list[BaseException] = []
    ending: queue.SimpleQueue[None] = queue.SimpleQueue()
    stop = False

    def run(lane: int) -> None:
        nonlocal stop
        begun.append(lane)  # before it looks at `stop`: a lane that is not in here has done nothing, and will not
        try:
            while not stop:
                with lock:
                    number = next(waiting, None)
                if number is None:
                    break
                job(lane, number)
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            stop = True
            errors.append(error)
        finally:
            ended.append(lane)
            ending.put(None)

    threads = [threading.Thread(target=run, args=(lane,), name=f"tierkeep-lane-{lane}") for lane in range(lanes)]
    # A signal's handler may raise here at any time. A lane that outlived the call would go on to fill buffers that the
    # next save uses, and to write to a file that is closed. What waits is one C call, because locks of Python's own
    # classes (a pool's, a future's, a thread's `join`) may be left held, or be taken for released, when interrupted.
    interrupt: BaseException | None = None
    try:
        for thread in threads:
            thread.start()
        while len(ended) < lanes:
            ending.get()
    except BaseException as error:  # noqa: BLE001  raised below, as the next one is
        stop = True
        interrupt = error
    while interrupt is not None and len(ended) < len(begun):
        try:
            ending.get()
        except BaseException as error:  # noqa: BLE001
            interrupt = error
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # it was not even started
            thread.join()
    # Not left in the frame, which is in its traceback: what the jobs worked on would live until the collector comes by.
    try:
        if interrupt is not None:
            raise interrupt
        if errors:
            raise errors[0]
    finally:
        interrupt = None
        errors.clear()
