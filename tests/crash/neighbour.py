"""One of several processes on a root. Says on stdout what happened, one JSON a line; waits on stdin for its turn."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.crash.steps import checkpointer, restore, state
from tierkeep.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError

__all__: list[str] = []


def main(root: str, role: str, *numbers: str) -> None:
    say("ready")
    sys.stdin.readline()
    if role == "save":
        save(root, [int(number) for number in numbers])
    elif role == "race":
        race(root, seed=int(numbers[0]), steps=int(numbers[1]))
    else:
        read(root, last=int(numbers[0]))


def save(root: str, numbers: list[int]) -> None:
    with checkpointer(root) as steps:
        for number in numbers:
            steps.save(number, state(number))
    say("done")


def race(root: str, seed: int, steps: int) -> None:
    """Saves the steps that another process saves at the same time, and says which it won."""
    won = []
    with checkpointer(root) as mine:
        for step in range(steps):
            sys.stdin.readline()
            try:
                mine.save(step, state(seed + step))
                won.append(step)
            except CheckpointExistsError:
                pass
            say("tried")
    say("done", won=won)


def read(root: str, last: int) -> None:
    """Restores named steps and the newest, until step `last` is there. Anything but the right bits is told."""
    reads = gone = 0
    with checkpointer(root) as steps:
        found: list[int] = []
        while last not in found:
            found = steps.steps()
            for step in (*found[:1], *found[-1:], None):
                try:
                    value: Any = restore(steps, step)
                except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                    if step is not None and (str(step) not in str(error) or step in steps.steps()):
                        raise  # it is another's error, or no error at all: the step is still there
                    gone += 1
                    continue
                right = state(value["step"])
                assert value["big"].tobytes() == right["big"].tobytes()
                assert value["deep"]["small"].tobytes() == right["deep"]["small"].tobytes()
                assert value["name"] == right["name"]
                assert step is None or value["step"] % 1000 == step
                reads += 1
    say("done", reads=reads, gone=gone)


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event} | facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
