"""The floor: what training waits for at least when its state is copied, the bare copy of the same bytes.

Array by array into memory that was touched before, by one thread or shared out among several, as numpy copies and past
the caches, with nothing checked and nothing laid out.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.contender import Contender
from bench.state import flatten
from tierkeep.memory.stream import stream

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.state import State

__all__ = ["Copy", "Pairs", "copies", "pairs"]

PIECE_NBYTES = 16 << 20
Pairs = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


class Copy(Contender):
    """Guarantees: `close` joins the threads. What it copies, and where to, is `to_copy`, shared by all that copy it."""

    def __init__(self, to_copy: Pairs, number: int, n_threads: int, copy: Callable[..., None]) -> None:
        self.name = f"copy-{number}"
        self.note = f"{n_threads} thread{'s'[: n_threads > 1]}{'' if copy is np.copyto else ', past the caches'}"
        self._to_copy = to_copy
        self._one = copy
        self._n_threads = n_threads
        self._threads: ThreadPoolExecutor | None = None

    def open(self) -> None:
        if self._n_threads > 1:
            self._threads = ThreadPoolExecutor(self._n_threads, thread_name_prefix="bench-copy")

    def save(self, state: State, directory: Path) -> None:
        self.copy()

    def copy(self) -> None:
        """Copy all of it."""
        if self._threads is None:
            for source, target in self._to_copy:
                self._one(target, source)
        else:
            for _ in self._threads.map(lambda pair: self._one(pair[1], pair[0]), self._to_copy):
                pass

    def timed(self) -> float:
        """Copy all of it; how long it took."""
        start_s = time.perf_counter()
        self.copy()
        return time.perf_counter() - start_s

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


def copies(to_copy: Pairs) -> list[Copy]:
    """Every way to copy it: the fastest one is the floor."""
    ways = itertools.product((np.copyto, stream), (1, 2))
    return [Copy(to_copy, number, n_threads, copy) for number, (copy, n_threads) in enumerate(ways, 1)]


def pairs(state: State) -> Pairs:
    """Each array of `state` with memory for it, touched, cut into pieces that threads can share out."""
    found: Pairs = []
    for _, leaf in flatten(state.numpy_tree()):
        if not hasattr(leaf, "dtype"):
            continue
        source = np.asarray(leaf).reshape(-1)
        target = np.empty_like(source)
        target.fill(0)
        step = max(1, PIECE_NBYTES // source.itemsize)
        found += [(source[at : at + step], target[at : at + step]) for at in range(0, source.size, step)]
    return found
