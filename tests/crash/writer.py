"""A process that saves and restores on request, each request in a fork of itself, to be killed from outside or inside.

A fresh interpreter costs 0.3 s and a fork of one without threads a few ms, so that hundreds can be killed. On stdin: one
JSON request a line. On stdout, for each: `pid <n>`, then a `.` for every system call on the root that the fork makes,
then a newline and `end <wait status>`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.crash.steps import SMALL, checkpointer, restore, state
from tierkeep.options import PAGE, SaveOptions
from tierkeep.testing.faulty_disk import Call, FaultyCalls

__all__ = ["AFTER_INTERRUPT"]

DEADLINE_S = 60.0
AFTER_INTERRUPT = 5000
"""The step that a fork saves after an interrupt, with the checkpointer that was interrupted."""
_LANES = SaveOptions(chunk_nbytes=3 * PAGE, block_nbytes=PAGE, lanes=3, lane_nbytes=8 * PAGE)


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.write(1, b"pid %d\n" % os.getpid())
                work(**request)
                status = 0
            except KeyboardInterrupt:  # outside of a save or a restore
                status = 0
            except BaseException:  # noqa: BLE001  whatever it is, the fork ends here
                traceback.print_exc()
            finally:
                os._exit(status)
        os.write(1, b"\nend %d\n" % os.waitpid(pid, 0)[1])


def work(root: str, action: str, step: int, seed: int, lanes: bool, dies_at: int | None, signum: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def at_call(call: Call) -> int:
        os.write(1, b".")
        if call.number == dies_at:
            os.kill(os.getpid(), signum)
        return 0

    keep = 1 if action in ("retire", "recycle") else None
    steps = checkpointer(root, options=_LANES if lanes else SMALL, keep=keep)
    try:
        with FaultyCalls(Path(root).parent, at_call):
            act(steps, action, step, seed)
    except KeyboardInterrupt:
        for thread in threading.enumerate():  # one that was being started then may have begun only now, to end at once
            if thread is not threading.main_thread():
                with contextlib.suppress(RuntimeError):  # it was not even started
                    thread.join(DEADLINE_S)
                assert not thread.is_alive()
        steps.keep = None
        with contextlib.suppress(FileExistsError):
            steps.save(AFTER_INTERRUPT, state(AFTER_INTERRUPT))
    steps.close()


def act(steps: Any, action: str, step: int, seed: int) -> None:
    if action == "restore":
        found = restore(steps)
        assert found["name"] == f"state {found['step']}"
        assert found["big"].tobytes() == state(found["step"])["big"].tobytes()
    else:
        steps.save(step, state(seed), overwrite=action == "overwrite")
        if action == "recycle":  # the next one goes over the image of one that the first retired
            steps.save(step + 1, state(seed + 1))


if __name__ == "__main__":
    main()
