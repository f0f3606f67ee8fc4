"""Every error tierkeep raises, sorted by what a handler would do.

    TierkeepError
    ├── InvalidStateError (ValueError)            change the state, nothing was written
    │   ├── UnsupportedLeafError (TypeError)
    │   ├── NameCollisionError
    │   └── ChangedLeafError                      let a deferred save be staged before the state is changed
    ├── CheckpointExistsError (FileExistsError)   choose another step or path, or overwrite
    ├── CheckpointNotFoundError (FileNotFoundError)
    ├── MismatchError (ValueError)                change the target, or name a relaxation
    ├── CorruptCheckpointError (ValueError)       restore another copy or an older step
    ├── UnsupportedFormatError (ValueError)       use another version of tierkeep
    ├── StorageError (OSError)                    free space, mend permissions, then save again
    ├── SaveCancelledError (RuntimeError)         somebody asked for it
    ├── WorkerError (RuntimeError)                save again, or save synchronously
    ├── PeerError (RuntimeError)                  look at the process that is named, then save again
    ├── BusyError (RuntimeError)                  end the other process, or save synchronously
    └── ClosedError (RuntimeError)                open a new checkpointer

    SkippedStepWarning (UserWarning)              an older step was restored: look at why, or make it an error

Facts are attributes, and every message ends with what still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BusyError",
    "ChangedLeafError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ClosedError",
    "CorruptCheckpointError",
    "InvalidStateError",
    "MismatchError",
    "NameCollisionError",
    "PeerError",
    "SaveCancelledError",
    "SkippedStepWarning",
    "StorageError",
    "TierkeepError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "WorkerError",
]

_LISTED = 20  # findings named in a message; the attributes hold them all


class TierkeepError(Exception):
    """Base of all errors of tierkeep."""

    def __reduce__(self) -> tuple[Any, ...]:
        args = self.args
        if isinstance(self, OSError) and self.filename is not None:
            args = (*args, self.filename)  # OSError leaves it out of `args`
        return _rebuild, (type(self), args, self.__dict__)


class InvalidStateError(TierkeepError, ValueError):
    """The state cannot be saved as it is. Nothing was written."""


class UnsupportedLeafError(InvalidStateError, TypeError):
    """A leaf is of a kind that cannot be kept exactly. Nothing was written."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"leaf {key!r}: {reason}. Nothing was written; earlier checkpoints are untouched.")
        self.key = key
        self.reason = reason


class NameCollisionError(InvalidStateError):
    """Two leaves would be stored under one name. Nothing was written."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(
            f"leaves {first} and {second} are both stored as {name!r}: rename one of them. "
            "Nothing was written; earlier checkpoints are untouched."
        )
        self.name = name
        self.first = first
        self.second = second


class ChangedLeafError(InvalidStateError):
    """Leaves were changed or given away while a deferred save copied them. Nothing of the save is kept."""

    def __init__(self, step: int, findings: Sequence[str]) -> None:
        listed = list(findings[:_LISTED])
        if len(findings) > _LISTED:
            listed.append(f"… and {len(findings) - _LISTED} more")
        super().__init__(
            f"step {step} is not saved, because the state was changed before it was copied: {'; '.join(listed)}. "
            "Wait for the handle's wait_staged() before such a change. Earlier checkpoints are untouched."
        )
        self.step = step
        self.findings = tuple(findings)


class CheckpointExistsError(TierkeepError, FileExistsError):
    """A checkpoint already stands at the path. It is untouched."""

    def __init__(self, path: str, reason: str = "choose another, or pass overwrite=True") -> None:
        super().__init__(f"{path} already exists and is untouched: {reason}.")
        self.path = path


class CheckpointNotFoundError(TierkeepError, FileNotFoundError):
    """No checkpoint at the path or step; the message says what was looked for."""

    def __init__(self, path: str, looked_for: str, holds: str = "nothing was changed") -> None:
        super().__init__(f"no checkpoint at {path}: looked for {looked_for}; {holds}.")
        self.path = path
        self.looked_for = looked_for


class MismatchError(TierkeepError, ValueError):
    """The checkpoint and the target differ; every difference is listed. The target is untouched."""

    def __init__(
        self,
        path: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shape: Sequence[str] = (),
        dtype: Sequence[str] = (),
        structure: Sequence[str] = (),
    ) -> None:
        kinds = (
            ('in the target but not in the checkpoint (missing="keep" keeps the target\'s)', missing),
            ('in the checkpoint but not in the target (unexpected="ignore" leaves them out)', unexpected),
            ('of another shape (shape="keep" keeps the target\'s)', shape),
            ('of another dtype (dtype="cast" converts)', dtype),
            ("of another structure", structure),
        )
        lines = [f"checkpoint {path} does not fit the target:"]
        for title, names in kinds:
            if names:
                lines.append(f"  {len(names)} {title}:")
                lines += [f"    {name}" for name in names[:_LISTED]]
                if len(names) > _LISTED:
                    lines.append(f"    … and {len(names) - _LISTED} more")
        lines.append("The target and the checkpoint are untouched.")
        super().__init__("\n".join(lines))
        self.path = path
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.shape = tuple(shape)
        self.dtype = tuple(dtype)
        self.structure = tuple(structure)


class CorruptCheckpointError(TierkeepError, ValueError):
    """Stored bytes are not the bytes that were saved. They were not returned as data."""

    def __init__(self, path: str, findings: Sequence[str], holds: str = "no other checkpoint was touched") -> None:
        listed = list(findings[:_LISTED])
        if len(findings) > _LISTED:
            listed.append(f"… and {len(findings) - _LISTED} more")
        super().__init__(f"{path} is damaged: " + "; ".join(listed) + f". What still holds: {holds}.")
        self.path = path
        self.findings = tuple(findings)
        self.holds = holds
        self.partly_filled = False
        """The target holds some of this checkpoint by now: verified bytes only, but not all of them."""


class UnsupportedFormatError(TierkeepError, ValueError):
    """The checkpoint is of a format or version that this tierkeep does not read. It is untouched."""

    def __init__(self, path: str, found: str, reads: str) -> None:
        super().__init__(f"{path} is {found}; this tierkeep reads {reads}. The checkpoint is untouched.")
        self.path = path
        self.found = found


class StorageError(TierkeepError, OSError):
    """The file system refused an operation. `errno` and `filename` are the system's."""

    def __init__(self, action: str, error: OSError, holds: str) -> None:
        super().__init__(error.errno, f"{action}: {error.strerror or error}; {holds}", error.filename)
        self.action = action
        self.holds = holds


class SaveCancelledError(TierkeepError, RuntimeError):
    """A save was cancelled before it was visible. Nothing of it is left."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the save of step {step} was cancelled; earlier checkpoints are untouched.")
        self.step = step


class WorkerError(TierkeepError, RuntimeError):
    """The process that saves in the background failed."""

    def __init__(self, what: str, holds: str) -> None:
        super().__init__(f"{what}; {holds}.")
        self.holds = holds


class PeerError(TierkeepError, RuntimeError):
    """Another one of the processes that save together failed, or was not heard of in time. Nothing was committed."""


class BusyError(TierkeepError, RuntimeError):
    """Another checkpointer saves into this root in the background, or this call is made inside another one."""


class ClosedError(TierkeepError, RuntimeError):
    """The checkpointer was closed. What it committed is whole."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed: open a new one. Everything it committed is whole.")


class SkippedStepWarning(UserWarning):
    """The newest step could not be restored, and an older one was. Filter it as an error to stop there instead."""


def _rebuild(cls: type[TierkeepError], args: tuple[Any, ...], facts: dict[str, Any]) -> TierkeepError:
    error = cls.__new__(cls, *args)
    if isinstance(error, OSError):
        OSError.__init__(error, *args)  # sets errno, strerror and filename, which are not in `__dict__`
    else:
        error.args = args
    error.__dict__.update(facts)
    return error
