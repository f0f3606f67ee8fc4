"""torch.save files as a source: through torch's own loader, which takes only what torch calls safe."""

from __future__ import annotations

import pickle
import zipfile
from typing import TYPE_CHECKING

import torch

from tierkeep.errors import CorruptCheckpointError, UnsupportedFormatError
from tierkeep.restore.foreign.snapshot import SnapshotSource, snapshot_source

from .adapter import TorchAdapter

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["open_torch_save"]


def open_torch_save(path: Path) -> SnapshotSource:
    """The file's tensors, mapped, not read. Raises UnsupportedFormatError for a file that would need more than
    tensors and plain values to be loaded; its code is never run.
    """
    zipped = zipfile.is_zipfile(path)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            if not any(name.endswith("/data.pkl") for name in archive.namelist()):
                raise UnsupportedFormatError(str(path), "a zip archive, but not one of torch.save", "torch.save files")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        reason = next((line for line in lines if line.startswith("WeightsUnpickler error")), lines[0])
        raise UnsupportedFormatError(
            str(path),
            f"a torch.save file with more than tensors and plain values ({reason})",
            "those alone (weights only)",
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CorruptCheckpointError(str(path), [str(error)]) from error
    return snapshot_source(path, state, TorchAdapter())
