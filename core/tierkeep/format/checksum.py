"""crc32c, and JSON objects sealed with it.

fastcrc (MIT) was chosen by measurement: it takes any buffer, frees the GIL and reaches 37 GB/s on one core
(awscrt 32 GB/s at 13 MB more to install; google-crc32c refuses memoryviews; `crc32c` is LGPL).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
from fastcrc import crc32 as _crc32

__all__ = ["Buffer", "crc32", "crc32c", "seal", "unseal"]

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]

_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n\Z')
_TAIL_NBYTES = len(b',"crc32c":"00000000"}\n')


def crc32c(data: Buffer, value: int = 0) -> int:
    """The CRC-32C of `data`, or of what `value` stands for followed by `data`."""
    return _crc32.iscsi(data, value)  # type: ignore[arg-type,no-any-return,unused-ignore]  # its stub says bytes


def crc32(data: Buffer, value: int = 0) -> int:
    """The CRC-32 that zip files have of their entries, as `crc32c`; 27 GB/s on one core, where zlib reaches 3.5."""
    return _crc32.iso_hdlc(data, value)  # type: ignore[arg-type,no-any-return,unused-ignore]


def seal(record: bytes) -> bytes:
    """A JSON object with a last member `crc32c` over every byte before it: still JSON, and no byte can change."""
    if len(record) < 3 or not record.endswith(b"}"):
        raise ValueError("only a JSON object with members can be sealed")
    body = record[:-1]
    return body + b',"crc32c":"%08x"}\n' % crc32c(body)


def unseal(data: bytes) -> dict[str, Any]:
    """The sealed object. Raises ValueError saying what is wrong; never returns an altered one."""
    found = _TAIL.search(data, max(0, len(data) - _TAIL_NBYTES))
    if found is None:
        raise ValueError("it does not end with a checksum (truncated, extended or not ours)")
    body = data[: found.start()]
    if crc32c(body) != int(found[1], 16):
        raise ValueError("its checksum does not match its bytes")
    record = msgspec.json.decode(body + b"}")
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    return record
