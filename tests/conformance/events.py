"""What a child process does: runs unittest cases one by one, and tells the runner of each start and end."""

from __future__ import annotations

import argparse
import json
import os
import sys
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["Job", "job", "run"]


@dataclass(frozen=True, slots=True)
class Job:
    """What the runner asks for."""

    file: str
    classes: list[str]
    tests: Path
    implementation: str
    """"stock" or "ours"."""
    scratch: Path
    """For what the tests write; the runner removes it."""
    wanted: list[str] | None
    """The tests still to run, in order; None means all."""
    only: str
    processes: int
    rank: int
    port: int
    """For the processes of the job to meet at, on this machine."""


def job() -> Job:
    """The job of this process, or of the one that spawned it."""
    found: dict[str, Any] = json.loads(Path(os.environ["TIERKEEP_CONFORMANCE_JOB"]).read_text())
    return Job(**found | {"tests": Path(found["tests"]), "scratch": Path(found["scratch"])})


def run(task: Job, module: ModuleType) -> None:
    """Runs the cases of the module, and ends the process: threads that tests leave behind are not waited for."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--events", type=int, required=True)
    with os.fdopen(arguments.parse_args().events, "w", buffering=1) as stream:
        # Processes that the tests start must not hold the pipe open.
        os.set_inheritable(stream.fileno(), False)

        def tell(**event: Any) -> None:
            stream.write(json.dumps(event) + "\n")

        cases = {_name(case): case for case in _cases(module)}
        names = [name for name in (task.wanted or cases) if name in cases and task.only in name]
        tell(event="loaded", tests=names)
        result = _Telling(tell)
        unittest.TestSuite([cases[name] for name in names]).run(result)
        for name in names:
            if name not in result.ended:
                outcome, why = result.of_classes or ("fail", "it was not run")
                tell(event="end", test=name, result=outcome, why=why)
        tell(event="finished")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Telling(unittest.TestResult):
    """Tells of each test as it begins and ends."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self.ended: set[str] = set()
        self.of_classes: tuple[str, str] | None = None
        """What kept the tests of a class from being run: the last of it."""
        self._tell = tell
        self._seen = 0, 0, 0, 0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._seen = self._counts()
        self._tell(event="start", test=_name(test))

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        errors, failures, skipped, unexpected = self._seen
        trouble = [text for _, text in self.errors[errors:] + self.failures[failures:]]
        trouble += ["it passed, though expected to fail"] * (len(self.unexpectedSuccesses) - unexpected)
        # A test that skips some of its subtests has run.
        reasons = [reason for case, reason in self.skipped[skipped:] if case is test]
        outcome, why = "pass", ""
        if trouble:
            outcome, why = "fail", "\n".join(trouble)
        elif reasons:
            outcome, why = "skip", "; ".join(reasons)
        self.ended.add(_name(test))
        self._tell(event="end", test=_name(test), result=outcome, why=why[-4000:])

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        if not isinstance(test, unittest.TestCase):
            self.of_classes = "fail", self.errors[-1][1]

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        if not isinstance(test, unittest.TestCase):
            self.of_classes = "skip", reason

    def _counts(self) -> tuple[int, int, int, int]:
        return len(self.errors), len(self.failures), len(self.skipped), len(self.unexpectedSuccesses)


def _cases(module: ModuleType) -> list[unittest.TestCase]:
    """As unittest would find them: the classes that the module defines, in the order of their names."""
    found: list[unittest.TestCase] = []
    for _, value in sorted(vars(module).items()):
        if not isinstance(value, type) or not issubclass(value, unittest.TestCase):
            continue
        if value.__module__ == module.__name__:
            found += [value(method) for method in unittest.TestLoader().getTestCaseNames(value)]
    return found


def _name(case: unittest.TestCase) -> str:
    return f"{type(case).__name__}.{case._testMethodName}"
