"""Retain: which steps are no longer promised. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Keep", "surplus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Which steps stay: those that any of the rules names. The step saved last always does."""

    last: int = 1
    """The newest so many."""
    every: int | None = None
    """Those whose number this divides."""
    best: int = 0
    """The best so many by `metric`; those without the metric, or with one that is no finite number, rank last."""
    metric: str | None = None
    """The name among the metrics given to `save`."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large metric is good."""

    def __post_init__(self) -> None:
        for name, value, least in (("last", self.last, 1), ("every", self.every, 1), ("best", self.best, 0)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {self.mode!r}")
        if bool(self.best) != (self.metric is not None):
            raise ValueError("best and metric go together: how many, and by what")


def surplus(steps: Mapping[int, Mapping[str, Any]], keep: Keep, saved: int) -> list[int]:
    """The steps to remove, oldest first, of `steps` and their metrics, now that `saved` is durable.

    Steps beyond the one just saved are another run's, whose steps went further: they are neither counted nor removed.
    """
    own = sorted(step for step in steps if step <= saved)
    stays = {saved, *own[-keep.last :]}
    if keep.every is not None:
        stays |= {step for step in own if step % keep.every == 0}
    if keep.best and keep.metric is not None:
        metric = keep.metric
        ranked = sorted(own, key=lambda step: (_rank(steps[step].get(metric), keep.mode), -step))
        stays |= set(ranked[: keep.best])
    return [step for step in own if step not in stays]


def _rank(value: Any, mode: str) -> tuple[int, float]:
    """Best first; what is not a finite number last. Of equals the newer is better."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 1, 0.0
    return 0, float(value) if mode == "min" else -float(value)
