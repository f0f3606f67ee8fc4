"""The examples do what they say, and the demo's own comparisons would notice if they did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.survive_a_crash import Run, TrainingProcess, compare_losses

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("core", "jax_adapter", "torch_adapter")
DEADLINE_S = 240.0


def test_training_killed_in_a_save_resumes_and_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "examples/survive_a_crash.py", "--tiny", "--kills", "1", "--seed", "4"]
    done = subprocess.run(
        [*command, "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 steps" in done.stdout
    assert "arrays equal in stock Orbax" in done.stdout
    assert not list(tmp_path.iterdir()), "the demo leaves nothing behind"


def test_the_jax_loop_killed_in_a_save_resumes_and_torch_opens_its_parameters(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/jax_nnx_loop.py", "--seed", "4", "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed in the save of step" in done.stdout
    assert "with equal losses; equal parameters" in done.stdout
    assert "5 tensors equal in torch" in done.stdout
    assert not list(tmp_path.iterdir()), "the demo leaves nothing behind"


@pytest.mark.parametrize(
    ("losses", "weights"),
    [
        pytest.param([(1, "0x1p1"), (2, "0x1.8p0"), (2, "0x1p0")], "w", id="a repeated step differs"),
        pytest.param([(1, "0x1p1")], "w", id="a step is missing"),
        pytest.param([(1, "0x1p1"), (2, "0x1p0")], "other", id="the weights differ"),
    ],
)
def test_the_demo_notices_a_run_that_differs(losses: list[tuple[int, str]], weights: str) -> None:
    expected = Run(losses=[(1, "0x1p1"), (2, "0x1p0")], weights="w")

    with pytest.raises(AssertionError, match=r"differ|not"):
        compare_losses(expected, Run(losses=losses, weights=weights))


def test_the_demo_counts_repeated_steps(capsys: pytest.CaptureFixture[str]) -> None:
    expected = Run(losses=[(1, "0x1p1"), (2, "0x1p0")], weights="w")

    assert compare_losses(expected, Run(losses=[*expected.losses, (2, "0x1p0")], weights="w")) == 1
    assert "1.0" in capsys.readouterr().out


def test_training_that_fails_on_its_own_is_an_error() -> None:
    with TrainingProcess(["--no-such-argument"]) as process, pytest.raises(ChildProcessError, match="status"):
        list(process.events())
