"""Open: from an item directory of our own to records that are verified and cover every byte they promise."""

from __future__ import annotations

import contextlib
import errno
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError
from ..format.checksum import crc32c
from ..format.part import PART, VERSION, WHOLE, Part, UnsupportedVersion, Whole, parse_part, parse_whole
from ..save.commit import DATA

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..tiers.local_disk import ImageReader, LocalDisk
    from .source import Contents

__all__ = ["Opened", "open_checkpoint", "read_checked"]

_RECORD_LIMIT = 1 << 31  # bytes; no record of a real state comes near
# What opening says of a name at which something else stands than the file that was saved.
_OTHER_KIND = frozenset({errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint ready to be read: its records agree, and its images have the sizes they should."""

    path: Path
    """The item directory, or the file."""
    whole: Contents
    parts: tuple[Part, ...]
    images: tuple[ImageReader | None, ...]
    """One for each part; None for a part without bytes."""
    held_by: tuple[dict[int, int], ...]
    """For each leaf: grid number to part."""


@contextlib.contextmanager
def open_checkpoint(disk: LocalDisk, path: Path, *, direct: bool, holds: str) -> Iterator[Opened]:
    """Opens the checkpoint whose item directory is `path`; closes its files at the end.

    Raises CorruptCheckpointError naming the file for a record that is damaged, a part that is missing or another
    checkpoint's, an image that is missing or of another size, a file that is none or that a link leads out of the
    directory for, and chunks that no part holds. Nothing is allocated by what a record declares before that is checked.
    """
    whole = _read_whole(disk, path, holds)
    parts: list[Part] = []
    findings: list[str] = []
    with contextlib.ExitStack() as stack:
        images: list[ImageReader | None] = []
        for name, nbytes, crc in whole.parts:
            try:
                _check_inside(disk, path, path / name / PART)
                data = disk.read_file(path / name / PART, min(nbytes, _RECORD_LIMIT))
                if len(data) != nbytes or crc32c(data) != crc:
                    raise ValueError("it is not the record that was committed")
                part = parse_part(data, whole)
                parts.append(part)
                images.append(_open_image(disk, path, path / name / DATA, part, direct, stack))
            except FileNotFoundError as error:
                findings.append(f"missing: {error.filename}")
            except OSError as error:
                findings.append(_misplaced(error))
            except (ValueError, RecursionError) as error:
                findings.append(f"{path / name / PART}: {error}")
        if findings:
            raise CorruptCheckpointError(str(path), findings, holds)
        yield Opened(path, whole, tuple(parts), tuple(images), _cover(path, whole, parts, holds))


def read_checked(disk: LocalDisk, item: Path, file: Path, most: int, findings: list[str]) -> bytes | None:
    """A file of the checkpoint at `item`; None, with what stands there instead among the findings, if it is none."""
    try:
        _check_inside(disk, item, file)
        return disk.read_file(file, most)
    except FileNotFoundError as error:
        findings.append(f"missing: {error.filename}")
    except OSError as error:
        findings.append(_misplaced(error))
    except ValueError as error:
        findings.append(f"{file}: {error}")
    return None


def _read_whole(disk: LocalDisk, path: Path, holds: str) -> Whole:
    try:
        _check_inside(disk, path, path / WHOLE)
        return parse_whole(disk.read_file(path / WHOLE, _RECORD_LIMIT))
    except FileNotFoundError as error:
        if disk.exists(path / WHOLE):  # a link that leads nowhere
            raise CorruptCheckpointError(str(path), [f"missing: {error.filename}"], holds) from error
        raise CheckpointNotFoundError(str(path), WHOLE, holds) from None
    except OSError as error:
        raise CorruptCheckpointError(str(path), [_misplaced(error)], holds) from error
    except UnsupportedVersion as error:
        raise UnsupportedFormatError(str(path / WHOLE), str(error), f"version {VERSION}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(str(path), [f"{path / WHOLE}: {error}"], holds) from error


def _check_inside(disk: LocalDisk, item: Path, file: Path) -> None:
    """Links may lead to an item and within it; what they lead to outside it is not read, whatever it is."""
    if not disk.is_inside(file, item):
        raise ValueError(f"a link leads {file.name} out of the checkpoint")


def _misplaced(error: OSError) -> str:
    """What stands where a file should. Raises `error` again if that is not what it says."""
    if error.errno not in _OTHER_KIND:
        raise error
    return f"{error.filename}: {error.strerror}"


def _open_image(
    disk: LocalDisk, item: Path, path: Path, part: Part, direct: bool, stack: contextlib.ExitStack
) -> ImageReader | None:
    if not part.image:
        if part.image_nbytes:
            raise ValueError(f"{part.image_nbytes} bytes without an image")
        return None
    _check_inside(disk, item, path / part.image)
    image = disk.open_image(path / part.image, direct=direct)
    stack.callback(image.close)
    if image.nbytes != part.image_nbytes:
        raise ValueError(f"image {part.image} has {image.nbytes} bytes, not {part.image_nbytes}")
    return image


def _cover(path: Path, whole: Whole, parts: list[Part], holds: str) -> tuple[dict[int, int], ...]:
    """Which part holds each chunk. Every chunk of every leaf must be held, and no image by more than its size."""
    held: tuple[dict[int, int], ...] = tuple({} for _ in whole.leaves)
    findings: list[str] = []
    for number, part in enumerate(parts):
        # Two leaves may be one memory, but then it is the same whole chunk.
        places = {(chunk.offset, whole.leaves[leaf].chunk_nbytes) for (leaf, _), chunk in part.chunks.items()}
        if sum(nbytes for _, nbytes in places) > part.image_nbytes:
            findings.append(f"part {number} declares more bytes than its image has")
        for leaf, place in part.chunks:
            held[leaf].setdefault(place, number)
    for leaf, record in enumerate(whole.leaves):
        if record.tie is None and len(held[leaf]) != math.prod(record.grid):
            findings.append(f"leaf {record.name!r}: {len(held[leaf])} of {math.prod(record.grid)} chunks are stored")
    if findings:
        raise CorruptCheckpointError(str(path), findings, holds)
    return held
