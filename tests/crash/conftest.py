"""How much was tried: the counts that crash tests report are printed at the end of the run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__: list[str] = []

_counts: list[str] = []


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory where there is such a file system: thousands of saves that wait for no disk."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Reports figures of a test by name."""

    def report(**figures: object) -> None:
        _counts.append(f"{request.node.name}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))

    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _counts:
        terminalreporter.section("what the crash tests tried")
        for line in _counts:
            terminalreporter.write_line(line)
