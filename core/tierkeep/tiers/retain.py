"""Retain: which steps are no longer promised. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["surplus"]


def surplus(steps: Sequence[int], keep: int, saved: int) -> list[int]:
    """The steps to remove, oldest first, so that the newest `keep` stay. The one just saved always stays."""
    ordered = sorted(steps)
    return [step for step in ordered[: max(0, len(ordered) - keep)] if step != saved]
