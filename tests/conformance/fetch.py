"""Puts the public tests of Orbax and PyTorch, at the commits named here, into a cache outside the repository.

    python -m tests.conformance.fetch orbax|pytorch

None of that code is kept in this repository. It comes by `git`: from `<name>.git` in the folder that
TIERKEEP_CONFORMANCE_MIRROR names, or else from GitHub; only the files named here, and only that commit. Prints the
folder they lie in. Ends with status 77 and the reason on stderr where they cannot be had.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SOURCES", "SourceError", "SourceTests", "fetch"]

DEADLINE_S = 300
SKIP_STATUS = 77

_ORBAX = "checkpoint/orbax/checkpoint"
_DCP = "test/distributed/checkpoint"


class SourceError(Exception):
    """The tests cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class SourceTests:
    """Where the tests of one project come from."""

    url: str
    commit: str
    """The pin. The file `SOURCE.json` beside the tests says what was taken."""
    folder: str
    """What tests import from: a folder of the repository."""
    files: tuple[str, ...]
    """Inside `folder`."""


SOURCES = {
    # Of 2026-08-19: run against orbax-checkpoint 0.12.8.
    "orbax": SourceTests(
        url="https://github.com/google/orbax",
        commit="3ff7b24aa0e23db4a575f7dc4bc6f815008ac6fd",
        folder=_ORBAX,
        files=(
            "checkpoint_manager_test.py",
            "_src/checkpointers/async_checkpointer_test.py",
            "_src/checkpointers/checkpointer_test.py",
            "_src/handlers/standard_checkpoint_handler_test.py",
            "_src/handlers/standard_checkpoint_handler_test_utils.py",
            "_src/testing/multiprocess_test.py",
            "_src/testing/oss/multiprocess_test.py",
            "experimental/v1/_src/testing/save_load_test.py",
        ),
    ),
    # The commit that torch 2.13.0 was built from (`torch.version.git_version`).
    "pytorch": SourceTests(
        url="https://github.com/pytorch/pytorch",
        commit="cf30153c4c131c8164ee7798e5022d810682e2cb",
        folder=_DCP,
        files=(
            "e2e/test_e2e_save_and_load.py",
            "e2e/test_fine_tuning.py",
            "e2e/test_pipeline.py",
            "fsdp/test_fsdp_dsd.py",
            "test_compatibility.py",
            "test_dtensor_checkpoint.py",
            "test_dtensor_resharding.py",
            "test_file_system_checkpoint.py",
            "test_file_system_checkpoint_cpu.py",
            "test_format_utils.py",
            "test_fsdp_model_state.py",
            "test_fsdp_optim_state.py",
            "test_fsdp_tp_checkpoint_conversion.py",
            "test_hsdp_checkpoint.py",
            "test_planner.py",
            "test_save_load_api.py",
            "test_tp_checkpoint.py",
        ),
    ),
}


def fetch(name: str) -> Path:
    """The folder of these tests: from the cache, where they are put first if they are not there. Raises SourceError."""
    source = SOURCES[name]
    cache = _cache() / name
    mirror = os.environ.get("TIERKEEP_CONFORMANCE_MIRROR")
    if mirror is None:
        repository, revisions = source.url, [source.commit]
    else:
        # A mirror that lacks the pin gives what is newest there.
        repository, revisions = str(Path(mirror) / f"{name}.git"), [source.commit, "HEAD"]
        if not Path(repository).is_dir():
            raise SourceError(f"TIERKEEP_CONFORMANCE_MIRROR has no {name}.git")
    pinned = cache / source.commit[:12]
    if not (pinned / "SOURCE.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="partial-") as work:
            commit = _take(source, repository, revisions, Path(work))
            found = cache / commit[:12]
            if not (found / "SOURCE.json").exists():
                (Path(work) / "tests").rename(found)
            return found
    return pinned


def _cache() -> Path:
    named = os.environ.get("TIERKEEP_CONFORMANCE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkeep-conformance"


def _take(source: SourceTests, repository: str, revisions: list[str], work: Path) -> str:
    """Puts the files and SOURCE.json into `work / "tests"`; the commit they are of."""
    clone = work / "clone"
    _git("init", "--quiet", str(clone))
    _git("-C", str(clone), "remote", "add", "origin", repository)
    reasons = []
    for revision in revisions:
        try:
            _git("-C", str(clone), "fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", revision)
            break
        except SourceError as error:
            reasons.append(str(error))
    else:
        raise SourceError(f"the tests of {source.url} cannot be had: {'; '.join(reasons)}")
    commit = _git("-C", str(clone), "rev-parse", "FETCH_HEAD").strip()
    wanted = [f"{source.folder}/{file}" for file in source.files]
    held = _git("-C", str(clone), "ls-tree", "-r", "--name-only", "FETCH_HEAD", "--", *wanted).splitlines()
    if not held:
        raise SourceError(f"none of the tests are in {source.url} at {commit}")
    # The blobs of these files come only now, in one request.
    _git("-C", str(clone), "checkout", "--quiet", "FETCH_HEAD", "--", *held)
    tests = clone / source.folder
    missing = sorted(set(wanted) - set(held))
    record = {"url": source.url, "commit": commit, "pinned": source.commit, "missing": missing}
    (tests / "SOURCE.json").write_text(json.dumps(record, indent=1))
    tests.rename(work / "tests")
    return commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],
            env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"git: {error}") from error
    if done.returncode:
        raise SourceError((done.stderr.strip() or f"git {arguments[0]} failed").splitlines()[-1])
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:] not in ([name] for name in SOURCES):
        sys.exit(__doc__)
    try:
        print(fetch(sys.argv[1]))
    except SourceError as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        sys.exit(SKIP_STATUS)
