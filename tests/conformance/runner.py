"""Runs one suite of somebody else's tests in child processes, with a deadline for each test.

A child (`events.py` says how) loads the suite, runs it test by test, and writes each start and each end to a pipe. A
test that does not end in time, or ends its process, has failed: the processes are killed and new ones run the rest.
With several processes each runs every test, and a test passes where it passed in all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EXPECTED", "ROOT", "Outcome", "Suite", "command_line", "run_suite", "unexpected"]

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("expected.json")
SOURCE_ROOTS = ("core", "jax_adapter", "torch_adapter", "")

_RANK = {"pass": 0, "skip": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Suite:
    """One file of tests."""

    name: str
    child: str
    """The module that a child process runs."""
    file: str
    """Of the fetched tests, or the name of an installed module."""
    classes: tuple[str, ...] = ()
    """The test classes, where not all that the file defines are meant."""
    processes: int = 1
    test_deadline_s: float = 120.0
    load_deadline_s: float = 180.0
    """For imports, up to the first test."""


@dataclass(frozen=True, slots=True)
class Outcome:
    result: str
    """"pass", "fail" or "skip"."""
    why: str = ""
    seconds: float = 0.0


def run_suite(
    suite: Suite, tests: Path, implementation: str, report: Callable[[str, Outcome], None], only: str = ""
) -> dict[str, Outcome]:
    """What became of each test, by `Class.test`. `only` keeps those whose name contains it."""
    outcomes: dict[str, Outcome] = {}
    wanted: list[str] | None = None
    while wanted is None or wanted:
        with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
            run = _Run(suite, Path(scratch), report, outcomes)
            run.start(_commands(suite, tests, implementation, scratch, wanted, only))
            try:
                run.watch()
            finally:
                run.kill()
        if run.names is None or not (run.names or only):
            outcomes[_LOADING] = Outcome("fail", run.trouble or "there is no test")
            report(_LOADING, outcomes[_LOADING])
            break
        wanted = [name for name in run.names if name not in outcomes]
    return outcomes


_LOADING = "loading the tests"


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[bytes]
    pipe: int
    log: Path
    pending: bytes = b""
    finished: bool = False
    ends: dict[str, Outcome] = field(default_factory=dict)


class _Run:
    """The processes of one start.

    Guarantees: after `kill` none of them, nor any process of their groups, is left.
    """

    def __init__(
        self, suite: Suite, scratch: Path, report: Callable[[str, Outcome], None], outcomes: dict[str, Outcome]
    ) -> None:
        self.names: list[str] | None = None
        self.trouble = ""
        self._suite = suite
        self._scratch = scratch
        self._report = report
        self._outcomes = outcomes
        self._children: list[_Child] = []
        self._starts: dict[str, float] = {}

    def start(self, commands: list[tuple[list[str], dict[str, str]]]) -> None:
        for rank, (command, environment) in enumerate(commands):
            read, write = os.pipe()
            log = self._scratch / f"log{rank}"
            with log.open("wb") as stream:
                process = subprocess.Popen(
                    [*command, "--events", str(write)],
                    cwd=self._scratch,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write,),
                    start_new_session=True,
                )
            os.close(write)
            self._children.append(_Child(process, read, log))

    def watch(self) -> None:
        """Returns when all have finished, or one has not, and then the test at fault has its outcome."""
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            deadline = time.monotonic() + self._suite.load_deadline_s
            while not all(child.finished for child in self._children):
                ready = selector.select(deadline - time.monotonic())
                if not ready and time.monotonic() >= deadline:
                    self._fail("not done before the deadline")
                    return
                for key, _ in ready:
                    child = key.data
                    data = os.read(child.pipe, 1 << 16)
                    if not data:
                        selector.unregister(child.pipe)
                        if not child.finished:
                            status = child.process.wait(self._suite.test_deadline_s)
                            self._fail(f"the process ended with status {status}")
                            return
                    elif self._take(child, data):
                        deadline = time.monotonic() + self._suite.test_deadline_s

    def kill(self) -> None:
        for child in self._children:
            # The group of the child, which is one of our own making, and may outlive the child itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            os.close(child.pipe)
        self._children.clear()

    def _take(self, child: _Child, data: bytes) -> bool:
        """Whether a test began or ended."""
        *lines, child.pending = (child.pending + data).split(b"\n")
        for line in lines:
            event: dict[str, Any] = json.loads(line)
            kind = event["event"]
            if kind == "loaded":
                self.names = event["tests"]
            elif kind == "start":
                self._starts.setdefault(event["test"], time.monotonic())
            elif kind == "end":
                child.ends[event["test"]] = Outcome(event["result"], event["why"])
                self._merge(event["test"])
            elif kind == "finished":
                child.finished = True
        return bool(lines)

    def _merge(self, name: str) -> None:
        if all(name in child.ends for child in self._children):
            worst = max((child.ends[name] for child in self._children), key=lambda outcome: _RANK[outcome.result])
            if worst.result == "fail":
                # What the processes that it spawned had to say is only there.
                worst = Outcome("fail", f"{worst.why}\n{self._tails()}")
            self._record(name, worst)

    def _record(self, name: str, outcome: Outcome) -> None:
        now = time.monotonic()
        self._outcomes[name] = Outcome(outcome.result, outcome.why, round(now - self._starts.get(name, now), 2))
        self._report(name, self._outcomes[name])

    def _tails(self) -> str:
        texts = [child.log.read_text(errors="replace") for child in self._children]
        return "\n".join(f"the end of the output of process {rank}:\n{text[-3000:]}" for rank, text in enumerate(texts))

    def _fail(self, reason: str) -> None:
        self.trouble = f"{reason}\n{self._tails()}"
        left = [name for name in self.names or () if name not in self._outcomes]
        # The first that has begun and not ended in all processes; between two tests, the next one.
        at_fault = next((name for name in left if name in self._starts), left[0] if left else None)
        if at_fault is not None:
            ended = [child.ends[at_fault].why for child in self._children if at_fault in child.ends]
            self._record(at_fault, Outcome("fail", "\n".join([*ended, self.trouble])))


def _commands(
    suite: Suite, tests: Path, implementation: str, scratch: str, wanted: list[str] | None, only: str
) -> list[tuple[list[str], dict[str, str]]]:
    job = {
        "file": suite.file,
        "classes": suite.classes,
        "tests": str(tests),
        "implementation": implementation,
        "scratch": scratch,
        "wanted": wanted,
        "only": only,
        "processes": suite.processes,
        "port": _free_port(),
    }
    found = []
    for rank in range(suite.processes):
        path = Path(scratch) / f"job{rank}.json"
        path.write_text(json.dumps(job | {"rank": rank}))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*_given_path(), *(str(ROOT / root) for root in SOURCE_ROOTS)]),
            "TIERKEEP_CONFORMANCE_JOB": str(path),
            "TMPDIR": scratch,
        }
        found.append(([sys.executable, "-m", suite.child], environment))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def _given_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def unexpected(project: str, implementation: str, found: dict[str, dict[str, Outcome]]) -> list[str]:
    """What expected.json does not say: a test that did not pass and is not listed, or that is listed and passed.

    For "ours" a test that fails, or is skipped, with the stock classes too needs no entry of its own.
    """
    listed: dict[str, dict[str, Any]] = json.loads(EXPECTED.read_text())[project]
    wrong = []
    for suite, outcomes in found.items():
        for name, outcome in outcomes.items():
            key = f"{suite}/{name}"
            entry = listed[implementation].get(key)
            allowed = entry or listed["stock"].get(key)
            if allowed is None:
                if outcome.result != "pass":
                    wrong.append(f"{key}: {outcome.result}, not in expected.json\n{outcome.why}")
            elif entry is not None and entry["result"] not in (outcome.result, "varies"):
                wrong.append(f"{key}: {outcome.result}, but expected.json says {entry['result']}\n{outcome.why}")
    return wrong


def command_line(project: str, suites: tuple[Suite, ...], tests: Path, arguments: Any) -> int:
    """Runs the suites that the arguments choose; a line for each test, then the summary as JSON."""
    # So that the children do not outlive a runner that is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [suite for suite in suites if not arguments.suite or suite.name in arguments.suite]
    found: dict[str, dict[str, Outcome]] = {}
    for suite in chosen:

        def report(name: str, outcome: Outcome, suite: Suite = suite) -> None:
            print(f"{outcome.result} {suite.name}/{name} ({outcome.seconds} s)", flush=True)
            if outcome.result == "fail" and arguments.verbose:
                print(outcome.why, flush=True)

        found[suite.name] = run_suite(suite, tests, arguments.implementation, report, arguments.only)
    wrong = unexpected(project, arguments.implementation, found)
    summary = {
        "project": project,
        "with": arguments.implementation,
        "source": json.loads((tests / "SOURCE.json").read_text()),
        "counts": {suite: _counts(outcomes) for suite, outcomes in found.items()},
        "unexpected": wrong,
    }
    if arguments.json is not None:
        outcomes = {
            f"{suite}/{name}": {"result": outcome.result, "seconds": outcome.seconds, "why": outcome.why}
            for suite, results in found.items()
            for name, outcome in results.items()
        }
        arguments.json.write_text(json.dumps(summary | {"outcomes": outcomes}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 1 if wrong else 0


def _counts(outcomes: dict[str, Outcome]) -> dict[str, int]:
    results = [outcome.result for outcome in outcomes.values()]
    return {result: results.count(result) for result in _RANK}
