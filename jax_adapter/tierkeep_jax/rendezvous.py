"""Rendezvous: how the processes of one save agree, through the coordination service of `jax.distributed`.

No device and no collective is used, so that it may be done by any thread while training goes on.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import TYPE_CHECKING, Any

import jax
from jax._src import distributed  # jax has no public name for the client

from tierkeep.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Rendezvous"]

_FAILED = "!"  # stands before the reason; ids and the sign that all is well never begin with it
_WELL = "."
_HOLDS = "nothing was committed; earlier checkpoints are untouched"


class Rendezvous:
    """The ranks of one save: which id it has, and whether all of them have done their part.

    Guarantees: a rank that fails tells all others; none waits longer than `timeout_s` for another. For one rank alone
    nothing is asked of anybody.

    `subject` and `number` are the same on all ranks, and no other save's.
    """

    def __init__(self, subject: str, number: int, rank: int, world: int, timeout_s: float) -> None:
        self._key = f"tierkeep/{hashlib.blake2b(subject.encode(), digest_size=16).hexdigest()}/{number}"
        self._subject = subject
        self._rank = rank
        self._world = world
        self._deadline = time.monotonic() + timeout_s

    def begin(self) -> str:
        """The id of the save: rank 0's. Raises PeerError if that has failed, or says nothing."""
        if self._rank:
            return self._hear("id", 0)
        save_id = secrets.token_hex(16)
        if self._world > 1:
            self._say("id", save_id)
        return save_id

    def end(self, last: Callable[[], object] | None = None) -> None:
        """This rank has done its part: returns when all have, and when rank 0 has then done `last`.

        Raises PeerError naming one that has not.
        """
        if self._world == 1:
            if last is not None:
                last()
            return
        if self._rank:
            self._say(f"ended/{self._rank}", _WELL)
            self._hear("verdict", 0)
            return
        try:
            for rank in range(1, self._world):
                self._hear(f"ended/{rank}", rank)
            for name in ("id", "ended/"):  # which nobody asks for any more
                _client().key_value_delete(f"{self._key}/{name}")
            if last is not None:
                last()
        except BaseException as error:
            self._say("verdict", f"{_FAILED}{error}")
            raise
        self._say("verdict", _WELL)

    def fail(self, error: BaseException) -> None:
        """This rank has not done its part, and tells the others."""
        if self._world == 1:
            return
        told = f"{_FAILED}process {jax.process_index()}: {type(error).__name__}: {str(error).rstrip('.')}"
        for name in (f"ended/{self._rank}",) if self._rank else ("id", "verdict"):
            self._say(name, told)

    def forget(self) -> None:
        """By rank 0, when all ranks have ended."""
        if self._world > 1:
            _client().key_value_delete(f"{self._key}/")

    def _say(self, name: str, value: str) -> None:
        _client().key_value_set(f"{self._key}/{name}", value, allow_overwrite=True)

    def _hear(self, name: str, rank: int) -> str:
        left_s = max(0.0, self._deadline - time.monotonic())
        try:
            value = str(_client().blocking_key_value_get(f"{self._key}/{name}", int(left_s * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise PeerError(
                f"saving {self._subject}: rank {rank} was not heard of in time ({error}); {_HOLDS}."
            ) from error
        if value.startswith(_FAILED):
            raise PeerError(f"saving {self._subject}: {value.removeprefix(_FAILED)}; {_HOLDS}.")
        return value


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise PeerError(f"several processes save together, but jax.distributed is not initialized; {_HOLDS}.")
    return client
