"""What a power loss may leave: the states of a disk that a recorded run can end in.

What counts as durable: the bytes of a file once that file is synced, an entry of a directory (made, renamed, exchanged,
removed) once that directory is: a rename from one directory to another is two changes, each durable with its own. What
was not synced may be there or not, bytes also in part. Entries of one directory are lost last first, those of several
directories in any mix: a file system with one ordered journal promises more, but not all do. After the model of ALICE
(Pillai et al., 2014) and the crash tests of SQLite.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..options import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["FATES", "ROOT", "Loss", "Operation", "Tree", "aftermath", "losses", "materialise"]

ROOT = 0  # the inode of the recorded directory itself
FATES = ("kept", "lost", "torn", "zeros", "garbage", "pages")
"""What may become of the unsynced bytes of a file: all there; none, and the old size; the first of them; the new size
with zeros, or with garbage, in their place; each page one of these."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One change to the disk, or a sync of a file or directory."""

    kind: str
    """`create`, `mkdir`, `unlink`, `rmdir`, `rename`, `exchange`; `write`, `truncate`; `sync`."""
    path: str
    """What it was called on, below the recorded directory: for people."""
    inode: int
    """The file or directory that it makes, changes or syncs."""
    places: tuple[tuple[int, str], ...] = ()
    """The entries that it changes: (directory, name)."""
    offset: int = 0
    """Where a write begins; the new size of `truncate`."""
    data: bytes = b""


@dataclass(slots=True)
class Tree:
    """Directories and files by inode. An inode that no entry leads to is still there, as on a disk."""

    dirs: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Tree:
        """What stands below `path`: directories and regular files."""
        tree = cls()
        numbers = itertools.count(1)

        def read(path: Path, inode: int) -> None:
            tree.dirs[inode] = {}
            for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
                tree.dirs[inode][entry.name] = child = next(numbers)
                if entry.is_dir(follow_symlinks=False):
                    read(Path(entry.path), child)
                else:
                    tree.files[child] = Path(entry.path).read_bytes()

        read(path, ROOT)
        return tree

    def copy(self) -> Tree:
        return Tree({inode: dict(entries) for inode, entries in self.dirs.items()}, dict(self.files))

    def apply(self, operation: Operation) -> None:
        """What an operation on entries or bytes does."""
        inode, places = operation.inode, operation.places
        match operation.kind:
            case "create" | "mkdir":
                (directory, name) = places[0]
                self.dirs.setdefault(directory, {})[name] = inode
                if operation.kind == "mkdir":
                    self.dirs.setdefault(inode, {})
                else:
                    self.files.setdefault(inode, b"")
            case "unlink" | "rmdir":
                del self.dirs[places[0][0]][places[0][1]]
            case "rename":
                (old, name), (new, other) = places
                self.dirs[new][other] = self.dirs[old].pop(name)
            case "exchange":
                (one, name), (two, other) = places
                self.dirs[one][name], self.dirs[two][other] = self.dirs[two][other], self.dirs[one][name]
            case "write" | "truncate":
                self.files[inode] = _changed(self.files.get(inode, b""), operation)

    def contents(self) -> dict[str, bytes | None]:
        """What a walk from the top finds: the bytes of each file by its path, None for a directory."""
        found: dict[str, bytes | None] = {}

        def walk(inode: int, prefix: str) -> None:
            for name, child in sorted(self.dirs[inode].items()):
                found[prefix + name] = None if child in self.dirs else self.files[child]
                if child in self.dirs:
                    walk(child, f"{prefix}{name}/")

        walk(ROOT, "")
        return found


def _changed(data: bytes, operation: Operation) -> bytes:
    if operation.kind == "truncate":
        return data[: operation.offset].ljust(operation.offset, b"\0")
    end = operation.offset + len(operation.data)
    return data[: operation.offset].ljust(operation.offset, b"\0") + operation.data + data[end:]


@dataclass(frozen=True, slots=True)
class Loss:
    """One way to lose what was not synced."""

    name: str
    entries: Mapping[int, int]
    """For each directory, how many of the operations on its entries are there: the first so many."""
    fate: str
    """One of FATES for every file, or `mixed`: one for each."""
    seed: int = 0


def losses(journal: Sequence[Operation], *, seed: int, mixes: int, most: int) -> Iterator[Loss]:
    """What the disk may have lost after `journal`, from nothing to all that was not synced.

    Entries are lost in the order of one journal, by directory, and mixed; at most about `most` of the first two kinds.
    """
    done, synced, low = _entries(journal)
    named = {op.inode: op.path for op in journal if op.kind == "mkdir"}
    yield Loss("all is kept", done, "kept")
    yield Loss("only what was synced is kept", synced, "lost")
    for fate in FATES[1:]:
        yield Loss(f"entries are kept, bytes: {fate}", done, fate, seed)
    yield Loss("bytes are kept, entries only as synced", synced, "kept")
    ordered = [op for op in journal if op.places]
    cuts = list(range(low, len(ordered)))
    for cut in cuts if len(cuts) <= most else sorted({cuts[i * (len(cuts) - 1) // (most - 1)] for i in range(most)}):
        kept = _entries(ordered[:cut])[0]
        last = f"{ordered[cut].kind} {ordered[cut].path}"
        yield Loss(f"from {last} on entries are lost, bytes: garbage", kept, "garbage", seed)
        yield Loss(f"from {last} on entries are lost", kept, "kept")
    unsynced = [directory for directory in done if done[directory] != synced.get(directory, 0)]
    if len(unsynced) > 1:
        for directory in unsynced[-most:]:
            name = named.get(directory, f"directory {directory}")
            yield Loss(f"unsynced entries of {name} are lost", {**done, directory: synced.get(directory, 0)}, "kept")
            yield Loss(f"unsynced entries of {name} only are kept", {**synced, directory: done[directory]}, "torn")
    chance = random.Random(seed)
    for number in range(mixes):
        some = {directory: chance.randint(synced.get(directory, 0), done[directory]) for directory in done}
        yield Loss(f"mix {number} of seed {seed}", some, "mixed", chance.getrandbits(32))


def _entries(journal: Sequence[Operation]) -> tuple[dict[int, int], dict[int, int], int]:
    """By directory, the operations on its entries, and how many of them are synced; of all, those before the last
    synced one.
    """
    done: dict[int, int] = {}
    synced: dict[int, int] = {}
    last: dict[int, int] = {}
    number = low = 0
    for op in journal:
        for directory in {directory for directory, _ in op.places}:
            done[directory] = done.get(directory, 0) + 1
            last[directory] = number + 1
        number += bool(op.places)
        if op.kind == "sync" and op.inode in done:
            synced[op.inode] = done[op.inode]
            low = max(low, last[op.inode])
    return done, synced, low


def aftermath(start: Tree, journal: Sequence[Operation], loss: Loss) -> Tree:
    """The tree that a loss leaves of `start` and all that came after it."""
    tree = start.copy()
    seen: dict[int, int] = {}
    closed: set[int] = set()
    written: dict[int, list[Operation]] = {}
    for op in journal:
        if op.kind == "sync":
            for each in written.pop(op.inode, ()):
                tree.apply(each)
        elif not op.places:
            written.setdefault(op.inode, []).append(op)
        else:
            directories = {directory for directory, _ in op.places}
            for directory in directories:
                seen[directory] = seen.get(directory, 0) + 1
            lost = {d for d in directories if d in closed or seen[d] > loss.entries.get(d, 0)}
            closed |= lost  # what came later in the same directory builds upon it
            if not lost:
                tree.apply(op)
            elif lost != directories:  # a rename from one directory to another
                (old, name), (new, other) = op.places
                if old in lost:
                    tree.dirs[new][other] = op.inode
                else:
                    del tree.dirs[old][name]
            if op.kind == "mkdir":  # it exists, whether an entry leads to it or not
                tree.dirs.setdefault(op.inode, {})
    chance = random.Random(loss.seed)
    for inode, operations in written.items():
        fate = chance.choice(FATES) if loss.fate == "mixed" else loss.fate
        tree.files[inode] = _torn(tree.files.get(inode, b""), operations, fate, chance)
    return tree


def _torn(old: bytes, operations: Sequence[Operation], fate: str, chance: random.Random) -> bytes:
    """What may be left of a file whose last operations were not synced."""
    if fate == "lost":
        return old
    if fate == "torn":
        *before, last = operations[: len(operations) // 2 + 1]
        operations = [*before, Operation(last.kind, "", 0, (), last.offset, last.data[: len(last.data) // 2])]
    new = old
    for op in operations:
        new = _changed(new, op)
    if fate in ("kept", "torn"):
        return new
    torn = bytearray(new)
    for op in operations:
        end = min(op.offset + len(op.data), len(new))
        for begin in range(op.offset, end, PAGE):
            size = min(PAGE, end - begin)
            kind = chance.choice(("kept", "zeros", "garbage")) if fate == "pages" else fate
            if kind != "kept":
                torn[begin : begin + size] = bytes(size) if kind == "zeros" else chance.randbytes(size)
    return bytes(torn)


def materialise(tree: Tree, into: Path) -> None:
    """Makes the tree below `into`, a directory that does not exist yet."""
    into.mkdir()
    for path, data in tree.contents().items():
        if data is None:
            (into / path).mkdir()
        else:
            (into / path).write_bytes(data)
