"""A child process with tests of every kind, for the test of the runner."""

from __future__ import annotations

import os
import sys
import threading
import unittest

from tests.conformance import events

__all__ = ["Stubborn"]


class Stubborn(unittest.TestCase):
    def test_a_passes(self) -> None:
        pass

    def test_b_hangs(self) -> None:
        threading.Event().wait()

    def test_c_ends_its_process(self) -> None:
        os._exit(3)

    def test_d_fails(self) -> None:
        print("said before it failed", flush=True)
        self.fail("as it should")

    def test_e_is_skipped(self) -> None:
        self.skipTest("not today")

    def test_f_skips_a_part(self) -> None:
        with self.subTest("part"):
            self.skipTest("not this part")


if __name__ == "__main__":
    events.run(events.job(), sys.modules[__name__])
