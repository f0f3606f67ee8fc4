"""Runs the public tests of torch.distributed.checkpoint with the stock storage, or with ours in its place.

python -m tests.conformance.run_dcp [--with stock|ours] [--suite NAME ...] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.conformance import fetch, runner

__all__ = ["suites"]

_CHILD = "tests.conformance.dcp_child"


def suites(tests: Path) -> tuple[runner.Suite, ...]:
    """One for each file that there is."""
    missing = json.loads((tests / "SOURCE.json").read_text())["missing"]
    missing = {name.removeprefix(f"{fetch.SOURCES['pytorch'].folder}/") for name in missing}
    return tuple(
        # Each test starts four processes that import torch first.
        runner.Suite(Path(file).stem.removeprefix("test_"), _CHILD, file, test_deadline_s=300)
        for file in fetch.SOURCES["pytorch"].files
        if file not in missing
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="implementation", choices=("stock", "ours"), default="stock")
    parser.add_argument("--suite", action="append", help="a file, without test_ and .py")
    parser.add_argument("--only", default="", help="run only tests whose name contains this")
    parser.add_argument("--json", type=Path, help="also write every outcome here")
    parser.add_argument("--verbose", action="store_true", help="print why a test failed")
    arguments = parser.parse_args()
    try:
        tests = fetch.fetch("pytorch")
    except fetch.SourceError as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return fetch.SKIP_STATUS
    return runner.command_line("dcp", suites(tests), tests, arguments)


if __name__ == "__main__":
    sys.exit(main())
