"""The training process's end of the worker: starts it, hears from it, and starts another one if it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import WorkerError

if TYPE_CHECKING:
    from .arena import Settings

__all__ = ["Client", "Listener", "client"]

_DEATHS = 3  # in a row, without a save between them, after which no other worker is started by itself
_UNTOUCHED = "earlier checkpoints are untouched"
_END_S = 60.0  # for a worker that has nothing left to do; after that it is killed
_log = logging.getLogger("tierkeep")


class Listener(Protocol):
    """One checkpointer, as its worker's client knows it. Called in the client's thread."""

    def settings(self, *, fresh: bool) -> Settings: ...

    def heard(self, kind: str, *payload: Any) -> None:
        """Takes a message of the worker."""

    def restarted(self) -> None:
        """Another worker was started, and told to open the arena: what the last one may not have heard is said again."""

    def lost(self, error: WorkerError) -> None:
        """There is no worker, and none is started until somebody asks for one."""


class Client:
    """The worker of this process.

    Guarantees: there is one at most, started without a fork of this process's memory; it is reaped; the thread that
    listens to it is joined when the last listener leaves. What is sent while there is none is not lost, because it is in
    the arena too.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._thread: threading.Thread | None = None
        self._ending = False
        self._deaths = 0

    def attach(self, arena: str, listener: Listener, nice: int) -> None:
        """Has the worker open an arena for `listener`, starting it if there is none. Raises WorkerError."""
        with self._lock:
            if self._process is None and self._listeners:
                self._revive()
            elif self._process is None:
                self._start(nice)
            self._listeners[arena] = listener
            self._send("open", listener.settings(fresh=True))

    def detach(self, arena: str) -> None:
        """The arena is closed. With the last one the worker ends, and this returns when it has."""
        with self._lock:
            self._listeners.pop(arena, None)
            if self._listeners:
                return
            process, thread = self._process, self._thread
            if process is not None:
                self._ending = True
                self._send("end")
        if process is not None:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def send(self, *message: Any, memory: int | None = None) -> None:
        """Tells the worker something; with `memory`, hands it that file descriptor too."""
        with self._lock:
            if self._process is None and self._listeners:
                self.wake()  # which has the listeners say all of it again, this too
            else:
                self._send(*message, memory=memory)

    def wake(self) -> None:
        """Starts another worker if the last one died for good. Raises WorkerError."""
        with self._lock:
            if self._process is None and self._listeners:
                self._revive()

    @property
    def worker_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _send(self, *message: Any, memory: int | None = None) -> None:
        channel, process = self._channel, self._process
        if channel is None or process is None:
            return
        with contextlib.suppress(OSError):  # it has died: the next one finds it in the arena
            channel.send(message)
            if memory is not None:
                send_handle(channel, memory, process.pid)

    def _start(self, nice: int = 0) -> None:
        self._nice = nice or getattr(self, "_nice", 0)
        # Where this process imports from, the worker does too, whatever directory it runs in.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", "tierkeep.memory.worker"]
        process: subprocess.Popen[bytes] | None = None
        channel: Connection | None = None
        thread: threading.Thread | None = None
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), str(self._nice)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a Ctrl-C is meant for training
            )
            channel = Connection(ours.fileno())
            thread = threading.Thread(target=self._listen, args=(process, channel), name="tierkeep-worker", daemon=True)
            self._ending = False
            self._process, self._channel, self._thread = process, channel, thread
            thread.start()
        except BaseException as error:
            if thread is not None and thread.ident is not None:
                raise  # an interrupt, of what was done
            self._process = self._channel = self._thread = None
            if channel is not None:
                channel.close()  # which ends the process
                ours.detach()
            if process is not None:
                process.kill()
                process.wait()
            if isinstance(error, OSError):
                what = f"the process that saves in the background could not be started: {error}"
            elif isinstance(error, RuntimeError):  # the interpreter ends, or there are too many
                what = f"the thread that listens to it could not be started: {error}"
            else:
                raise
            raise WorkerError(what, _UNTOUCHED) from error
        finally:
            theirs.close()
            if thread is None or thread.ident is None:
                with contextlib.suppress(OSError):
                    ours.close()
            else:
                ours.detach()

    def _listen(self, process: subprocess.Popen[bytes], channel: Connection) -> None:
        while True:
            try:
                arena, kind, *payload = channel.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                listener = self._listeners.get(arena)
                if kind == "settled":
                    self._deaths = 0
            if listener is None:
                continue
            try:
                listener.heard(kind, *payload)
            except Exception as error:  # noqa: BLE001  whoever waits for it would wait for ever
                _log.exception("tierkeep could not take what its background process said")
                listener.lost(WorkerError(f"taking {kind!r} of the background process: {error!r}", _UNTOUCHED))
        status = process.wait()
        with self._lock:
            channel.close()
            self._process = self._channel = None
            if not self._listeners:
                return
            if not self._ending:  # else somebody came when it had been told to end
                self._deaths += 1
                _log.warning("tierkeep's background process ended with status %d", status)
            listeners = list(self._listeners.values())
            if self._deaths < _DEATHS:
                try:
                    self._revive()
                    return
                except WorkerError as error:
                    failure = error
            else:
                holds = "what it had not saved stands in memory, and another one is started by the next save"
                failure = WorkerError(f"the background process died {self._deaths} times, last of {status}", holds)
            self._deaths = 0
        for listener in listeners:
            listener.lost(failure)

    def _revive(self) -> None:
        self._start()
        for listener in self._listeners.values():
            self._send("open", listener.settings(fresh=False))
            listener.restarted()


_client: Client | None = None
_making = threading.Lock()


def client() -> Client:
    """The client of this process: a forked child's is another one than its parent's."""
    global _client
    with _making:
        if _client is None or _client.pid != os.getpid():
            _client = Client()
        return _client
