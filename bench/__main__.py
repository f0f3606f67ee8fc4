"""`python -m bench QUESTION`: run one measurement, print its table, and with `--json FILE` keep its figures.

Each question is a module of this package with `SUMMARY`, `add_arguments(parser)` and `main(args) -> Report`. To add
one, name it in `QUESTIONS`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.workplace import NotEnoughSpaceError

if TYPE_CHECKING:
    from types import FrameType, ModuleType

    from bench.report import Report

__all__ = ["main"]

QUESTIONS = ("save", "restore", "stall", "train", "dcp", "orbax")


def main(argv: list[str] | None = None) -> int:
    """Run the question named on the command line; the exit status is 0 when it was measured to the end."""
    modules = {question: importlib.import_module(f"bench.{question}") for question in QUESTIONS}
    args = _parser(modules).parse_args(argv)
    # Orbax starts a JAX backend even for NumPy arrays: do not let it look for accelerators unless told to.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job is born ignoring it
        signal.signal(number, _interrupt)
    try:
        report: Report = modules[args.question].main(args)
    except NotEnoughSpaceError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; its files were removed", file=sys.stderr)
        return 130
    print(report.table(command=" ".join(["python -m bench", *(sys.argv[1:] if argv is None else argv)])))
    if args.json is not None:
        args.json.write_text(report.json(), encoding="utf-8")
    return 0


def _parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure tierkeep and its rivals here.")
    subparsers = parser.add_subparsers(dest="question", required=True)
    for question, module in modules.items():
        subparser = subparsers.add_parser(question, help=module.SUMMARY, description=module.SUMMARY)
        subparser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
        module.add_arguments(subparser)
    return parser


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
