"""Which cases of other savers' bug reports are covered here, and where: a case is named beside the test that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

__all__: list[str] = []

CASES = {
    "test_dtypes": [
        "bf16-through-numpy",
        "dtype-size-table-stale",
        "extended-float-via-npy",
        "nan-payload-lost",
        "same-memory-two-dtypes",
        "silent-dtype-cast-on-load",
    ],
    "test_tensors": [
        "broadcast-stride0-view",
        "fortran-order-garbage",
        "slice-saves-whole-storage",
        "tensor-subclass-quantised",
        "tied-weights-save",
        "views-of-one-flat-buffer",
        "zero-length-axis-chunks",
        "zero-size-array",
    ],
    "test_structure": [
        "empty-leaf-inside-sequence",
        "flatten-depends-on-content",
        "int-keys-become-str",
        "key-to-filename-limit",
        "namedtuple-new-class",
        "pickle-metadata-executes-code",
        "separator-collision",
    ],
    "test_into": [
        "missing-optim-state-becomes-empty-dict",
        "nontensor-not-updated",
        "skipped-leaf-uninitialised",
        "tied-weights-restore-missing",
    ],
    "test_api": [
        "cross-device-rename",
        "last-link-points-elsewhere",
        "limit-lowered-no-catchup",
        "load-revives-saved-device",
        "plan-cache-global-key",
        "purge-races-inflight-save",
        "relative-path-and-cwd",
        "reused-dir-new-run-deleted",
        "source-kept-alive-after-write",
        "tilde-literal-dir",
    ],
    "test_errors": ["crc-not-verified-on-load", "missing-chunk-reads-as-fill"],
}


@pytest.mark.parametrize(("file", "case"), [(file, case) for file, cases in CASES.items() for case in cases])
def test_every_case_is_named_beside_a_test(file: str, case: str) -> None:
    lines = (Path(__file__).parent / f"{file}.py").read_text().splitlines()
    assert any(re.match(rf"\s*# .*\b{re.escape(case)}\b", line) for line in lines)
