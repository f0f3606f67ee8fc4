"""With ours in their place, the stock classes' own tests still pass: all but what expected.json lists with a reason."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.conformance import fetch, run_dcp, run_orbax, runner

if TYPE_CHECKING:
    from pathlib import Path

# The runner has a deadline for each of the tests that it runs; this one is for a runner that hangs itself.
DEADLINE_S = 3600

# By the first part of the suites' names: what has to be there.
OURS = {"orbax": "tierkeep_jax.orbax", "orbax_v1": "tierkeep_jax.orbax_v1", "dcp": "tierkeep_torch.dcp"}


def _run(kind: str, implementation: str) -> list[str]:
    if os.environ.get("TIERKEEP_CONFORMANCE") is None and implementation == "stock":
        pytest.skip("the stock classes are run where TIERKEEP_CONFORMANCE is set")
    if implementation == "ours" and importlib.util.find_spec(OURS[kind]) is None:
        pytest.skip(f"there is no {OURS[kind]}")
    project = kind.removesuffix("_v1")
    try:
        tests: Path = fetch.fetch({"orbax": "orbax", "dcp": "pytorch"}[project])
    except fetch.SourceError as reason:
        pytest.skip(str(reason))
    suites = run_dcp.suites(tests) if project == "dcp" else run_orbax.SUITES
    chosen = [suite for suite in suites if suite.name.startswith("v1_") == (kind == "orbax_v1")]
    found = {suite.name: runner.run_suite(suite, tests, implementation, lambda *_: None) for suite in chosen}
    return runner.unexpected(project, implementation, found)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("kind", list(OURS))
def test_ours_fail_nothing_that_stock_passes(kind: str) -> None:
    wrong = _run(kind, "ours")

    assert not wrong, "\n\n".join(wrong)


@pytest.mark.full
@pytest.mark.multiprocess
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("kind", list(OURS))
def test_stock_fails_what_is_expected_of_it(kind: str) -> None:
    wrong = _run(kind, "stock")

    assert not wrong, "\n\n".join(wrong)


def test_a_test_that_hangs_or_ends_its_process_has_failed_and_the_others_run(tmp_path: Path) -> None:
    suite = runner.Suite("stubborn", "tests.conformance.stubborn_child", "", test_deadline_s=2, load_deadline_s=60)

    found = runner.run_suite(suite, tmp_path, "stock", lambda *_: None)

    results = {name.removeprefix("Stubborn.test_"): outcome.result for name, outcome in found.items()}
    assert results == {
        "a_passes": "pass",
        "b_hangs": "fail",
        "c_ends_its_process": "fail",
        "d_fails": "fail",
        "e_is_skipped": "skip",
        "f_skips_a_part": "pass",
    }
    assert "not done before the deadline" in found["Stubborn.test_b_hangs"].why
    assert "the process ended with status 3" in found["Stubborn.test_c_ends_its_process"].why
    assert "as it should" in found["Stubborn.test_d_fails"].why
    assert "said before it failed" in found["Stubborn.test_d_fails"].why


def test_every_expectation_has_a_reason() -> None:
    listed = json.loads(runner.EXPECTED.read_text())

    for project, implementations in listed.items():
        for implementation, entries in implementations.items():
            for name, entry in entries.items():
                where = f"{project}, {implementation}, {name}"
                assert entry["result"] in ("fail", "skip", "varies"), where
                assert entry["why"], where
