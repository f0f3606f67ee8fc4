"""Events: what happens to saves in the background, as it happens."""

from __future__ import annotations

import collections
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Event", "Events"]

_KEPT = 1024  # events that can be looked at afterwards
_log = logging.getLogger("tierkeep")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    what: Literal[
        "begun", "staged", "kept", "written", "committed", "progress", "failed", "skipped", "cancelled", "worker"
    ]
    """A stage that was reached, or `progress` within one; `worker`: the background process was started again."""
    step: int | None
    stage: str = ""
    """For `progress`: `checksum` or `write`."""
    nbytes: int = 0
    """Bytes done; of the whole save for a stage that was reached."""
    total_nbytes: int = 0
    seconds: float = 0.0
    """What the stage took."""
    error: Exception | None = None


class Events:
    """The events of one checkpointer.

    Guarantees: subscribers are called one after the other, in the thread in which a thing happens, which is rarely the
    training's; what one raises is logged and changes nothing. One that waits for a save would wait for itself.
    """

    def __init__(self) -> None:
        self._subscribers: list[Callable[[Event], object]] = []
        self._recent: collections.deque[Event] = collections.deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    @property
    def recent(self) -> list[Event]:
        """The last thousand events, oldest first."""
        with self._lock:
            return list(self._recent)

    def subscribe(self, subscriber: Callable[[Event], object]) -> Callable[[], None]:
        """Has `subscriber` called for every event from now on; returns what ends that."""
        with self._lock:
            self._subscribers.append(subscriber)

        def end() -> None:
            with self._lock:
                if subscriber in self._subscribers:
                    self._subscribers.remove(subscriber)

        return end

    def emit(self, event: Event) -> None:
        with self._lock:
            self._recent.append(event)
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            try:
                subscriber(event)
            except (Exception, SystemExit):  # noqa: BLE001  a subscriber's failure is no failure of the save
                _log.exception("a subscriber to tierkeep's events failed")
