"""Stands in for a training step's forward and backward: matrix products that keep every core busy."""

from __future__ import annotations

import importlib
import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Work"]

WIDTH = 512
TRIALS = 5


class Work:
    """A fixed number of products, so that what disturbs them makes them take longer."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._product: Callable[[], object] | None = None
        self._n_products = 1

    def open(self) -> None:
        """ImportError when the framework is missing."""
        if self._framework == "jax":
            jax = importlib.import_module("jax")
            multiply = jax.jit(jax.numpy.matmul)
            matrix = jax.numpy.ones((WIDTH, WIDTH))
            self._product = lambda: multiply(matrix, matrix).block_until_ready()
        else:
            torch = importlib.import_module("torch")
            left, right, out = (torch.ones(WIDTH, WIDTH) for _ in range(3))
            self._product = lambda: torch.mm(left, right, out=out)

    def last(self, wanted_s: float) -> None:
        """From now on a `run` takes about as long as this, and no less, when nothing disturbs it."""
        self._n_products = 1
        self.run()
        self._n_products = max(1, math.ceil(wanted_s / min(self.run() for _ in range(TRIALS))))
        while (took_s := min(self.run() for _ in range(TRIALS))) < wanted_s:
            self._n_products = math.ceil(self._n_products * 1.05 * wanted_s / took_s)

    def run(self) -> float:
        """How long it took."""
        assert self._product is not None, "open first"
        start_s = time.perf_counter()
        for _ in range(self._n_products):
            self._product()
        return time.perf_counter() - start_s
