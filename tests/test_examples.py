"""The examples do what they say, and the demo's own comparisons would notice if they did not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.survive_a_crash import Run, TrainingProcess, compare_losses

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("core", "jax_adapter", "torch_adapter")
DEADLINE_S = 240.0


def test_training_killed_in_a_save_resumes_and_loses_nothing(tmp_path: Path) -> None:
    command = ["examples/survive_a_crash.py", "--tiny", "--kills", "1", "--seed", "4"]
    done = _run(*command, "--dir", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 steps" in done.stdout
    assert "arrays equal in stock Orbax" in done.stdout
    assert not list(tmp_path.iterdir()), "the demo leaves nothing behind"


def test_the_jax_loop_killed_in_a_save_resumes_and_torch_opens_its_parameters(tmp_path: Path) -> None:
    done = _run("examples/jax_nnx_loop.py", "--seed", "4", "--dir", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed in the save of step" in done.stdout
    assert "with equal losses; equal parameters" in done.stdout
    assert "5 tensors equal in torch" in done.stdout
    assert not list(tmp_path.iterdir()), "the demo leaves nothing behind"


def test_training_killed_after_a_deferred_save_resumes_from_the_step_that_only_memory_had(tmp_path: Path) -> None:
    command = ["examples/deferred.py", "--width", "32", "--root", str(tmp_path / "run")]

    first = _run(*command, "--die-after", "7")
    second = _run(*command)

    assert first.returncode == -signal.SIGKILL, first.stdout + first.stderr
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed from step 7" in second.stdout
    assert "trained steps 8 to 19" in second.stdout
    assert "on the disk: steps 15, 19" in second.stdout


def test_the_progress_bar_shows_every_save_reach_the_disk(tmp_path: Path) -> None:
    done = _run("examples/progress_bar.py", "--mb", "1", "--limit-mb", "0", "--dir", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["step", f"{step}"] for step in (1, 2, 3)]
    assert done.stdout.count("on the disk") == 3
    assert not list(tmp_path.iterdir()), "the example leaves nothing behind"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """A script of this repository, run to its end."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


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
