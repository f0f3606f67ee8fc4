"""Lanes: the threads that move bytes, several requests in flight, each with a buffer of its own."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
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

    The first error stops the lanes after the job each is at, and is raised.
    """
    numbers = list(jobs)
    lanes = min(lanes, len(numbers))
    waiting = iter(numbers)
    lock = threading.Lock()
    stop = threading.Event()

    def run(lane: int) -> None:
        while not stop.is_set():
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            try:
                job(lane, number)
            except BaseException:
                stop.set()
                raise

    if lanes <= 1:
        run(0)
        return
    with ThreadPoolExecutor(lanes, thread_name_prefix="tierkeep-lane") as pool:
        futures = [pool.submit(run, lane) for lane in range(lanes)]
    for future in futures:
        future.result()
