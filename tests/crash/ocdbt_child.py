"""Reads a foreign OCDBT database whose index is changed at random and given a right checksum again.

In a process of its own, because the parsers are TensorStore's: `python -m tests.crash.ocdbt_child ITEM FIRST LAST`
prints `<seed> ok`, `<seed> refused`, or `<seed> raw <error>` for what is no error of tierkeep's.
"""

from __future__ import annotations

import random
import resource
import signal
import struct
import sys
from pathlib import Path

from tests.crash.mutate import mutated_bytes
from tierkeep.checkpointer import Engine
from tierkeep.errors import TierkeepError
from tierkeep.format.checksum import crc32c
from tierkeep.options import MIB, PAGE, RestoreOptions
from tierkeep.testing.numpy_adapter import NumpyAdapter

__all__: list[str] = []

_HEAD_NBYTES = 14  # magic, size, version, compression


def changed(frame: bytes, seed: int) -> bytes:
    """A manifest or a node with another body, its size and checksum set right; in one of ten the head is changed too."""
    body = mutated_bytes(frame[_HEAD_NBYTES:-4], seed)
    head = bytearray(frame[:_HEAD_NBYTES])
    if random.Random(seed).random() < 0.9:
        head[4:12] = struct.pack("<Q", len(body) + _HEAD_NBYTES + 4)
    else:
        head[12:] = mutated_bytes(bytes(head[12:]), seed)
    return (whole := bytes(head) + body) + struct.pack("<I", crc32c(whole))


def main(item: Path, first: int, last: int) -> None:
    engine = Engine(NumpyAdapter())
    options = RestoreOptions(lanes=1, lane_nbytes=8 * PAGE, direct=False)
    (node,) = (item / "d").iterdir()
    files = {path: path.read_bytes() for path in (node, item / "manifest.ocdbt")}
    engine.restore(item, options=options)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4096 * MIB, resource.RLIM_INFINITY))
    for seed in range(first, last):
        path = node if seed % 3 else item / "manifest.ocdbt"
        path.write_bytes(changed(files[path], seed))
        print(seed, end=" ", flush=True)
        signal.alarm(20)
        try:
            engine.restore(item, options=options)
            print("ok", flush=True)
        except TierkeepError:
            print("refused", flush=True)
        except BaseException as error:  # noqa: BLE001  # what it is, is what is asked
            print("raw", type(error).__name__, str(error)[:200].replace("\n", " "), flush=True)
        signal.alarm(0)
        path.write_bytes(files[path])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
