"""Runs the public tests of Orbax with the stock handlers, or with ours in their place.

python -m tests.conformance.run_orbax [--with stock|ours] [--suite NAME ...] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.conformance import fetch, runner

__all__ = ["SUITES"]

_CHILD = "tests.conformance.orbax_child"
_V1 = "experimental.v1._src"

SUITES = (
    runner.Suite(
        "standard_handler",
        _CHILD,
        "_src.handlers.standard_checkpoint_handler_test",
        ("StandardCheckpointHandlerTestBase", "StandardCheckpointHandlerTestJaxRandomKeys"),
    ),
    runner.Suite(
        "standard_handler_two_processes",
        _CHILD,
        "_src.handlers.standard_checkpoint_handler_test",
        ("StandardCheckpointHandlerTestBase", "StandardCheckpointHandlerTestJaxRandomKeys"),
        processes=2,
    ),
    runner.Suite("checkpointer", _CHILD, "_src.checkpointers.checkpointer_test", ("CheckpointerTest",)),
    runner.Suite(
        "async_checkpointer", _CHILD, "_src.checkpointers.async_checkpointer_test", ("AsyncCheckpointerTest",)
    ),
    runner.Suite("checkpoint_manager", _CHILD, "checkpoint_manager_test", ("CheckpointManagerTest",)),
    runner.Suite(
        "checkpoint_manager_two_processes", _CHILD, "checkpoint_manager_test", ("CheckpointManagerTest",), processes=2
    ),
    runner.Suite(
        "v1_checkpointer",
        _CHILD,
        f"{_V1}.training.checkpointer_test_base",
        ("CheckpointerTestBase.Test", "CheckpointerTestBase.DeprecationsTest"),
    ),
    runner.Suite("v1_save_load", _CHILD, f"{_V1}.testing.save_load_test", ("SaveLoadTest", "SynchronizationTest")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="implementation", choices=("stock", "ours"), default="stock")
    parser.add_argument("--suite", action="append", choices=[suite.name for suite in SUITES])
    parser.add_argument("--only", default="", help="run only tests whose name contains this")
    parser.add_argument("--json", type=Path, help="also write every outcome here")
    parser.add_argument("--verbose", action="store_true", help="print why a test failed")
    arguments = parser.parse_args()
    try:
        tests = fetch.fetch("orbax")
    except fetch.SourceError as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return fetch.SKIP_STATUS
    return runner.command_line("orbax", SUITES, tests, arguments)


if __name__ == "__main__":
    sys.exit(main())
