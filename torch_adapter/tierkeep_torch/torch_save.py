"""torch.save files as a source: through torch's own loader, which takes only what torch calls safe."""

from __future__ import annotations

import pickle
import struct
import zipfile
from typing import TYPE_CHECKING

import torch

from tierkeep.errors import CorruptCheckpointError, TierkeepError, UnsupportedFormatError, UnsupportedLeafError
from tierkeep.restore.foreign.snapshot import SnapshotSource, snapshot_source

from .adapter import TorchAdapter

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_torch_save"]

# What torch's loader stumbles over depends on where the damage is; it documents none of it.
_DAMAGED = (
    RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, AssertionError, struct.error, zipfile.BadZipFile
)  # fmt: skip


def open_torch_save(path: Path) -> SnapshotSource:
    """The file's tensors, mapped, not read. Raises UnsupportedFormatError for a file that would need more than
    tensors and plain values to be loaded; its code is never run.
    """
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            with zipfile.ZipFile(path) as archive:
                if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                    raise UnsupportedFormatError(
                        str(path), "a zip archive, but not one of torch.save", "torch.save files"
                    )
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        return snapshot_source(path, state, TorchAdapter())
    except UnsupportedLeafError as error:
        raise UnsupportedFormatError(
            str(path), f"a torch.save file with leaf {error.key!r}: {error.reason}", "what can be saved"
        ) from error
    except TierkeepError:
        raise
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if line.startswith("WeightsUnpickler error")), lines[0])
        raise UnsupportedFormatError(
            str(path),
            f"a torch.save file with more than tensors and plain values ({reason})",
            "those alone (weights only)",
        ) from error
    except _DAMAGED as error:
        raise CorruptCheckpointError(str(path), [f"{type(error).__name__}: {error}"]) from error
