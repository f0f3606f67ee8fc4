"""Orbax's own warnings, which it gives for every tree it was shown no likeness of, are not what is tested here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__: list[str] = []


@pytest.fixture(autouse=True, scope="session")
def _no_orbax_warnings() -> Iterator[None]:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
