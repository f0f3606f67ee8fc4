"""The bench measures every contender, says what it found in one shape, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.contender import Contender
from bench.killed import OursMemory
from bench.report import Report, Row
from bench.rounds import better, enter, measure
from bench.stall import hidden
from bench.state import flatten, make_state
from bench.train import check_losses
from bench.training import Training
from bench.workplace import NotEnoughSpaceError, workplace
from tierkeep.memory.arena import own_arena
from tierkeep.options import MemoryOptions

ROOT = Path(__file__).parent.parent
SMALL: dict[str, list[str | Path]] = {
    "save": ["--gb", "0.002"],
    "restore": ["--gb", "0.002"],
    "stall": ["--gb", "0.002", "--open-for", "0"],
    "orbax": ["--gb", "0.002"],
    "train": ["--mb", "2", "--tokens", "8", "--steps", "3", "--every", "2"],
}
RIVALS = {
    "save": {"torch.save", "torch.save-nocrc", "dcp", "safetensors", "orbax", "orbax-raw"},
    "restore": {"torch.load", "dcp", "safetensors", "orbax", "orbax-raw"},
    "stall": {"torch.save", "dcp-async", "dcp-async-reuse", "dcp-async-process"},
    "orbax": {"orbax", "orbax-blocked", "orbax-best", "orbax-best-blocked"},
    "train": {"torch.save", "dcp-async", "dcp-async-process"},
}
OURS = {
    "save": {"ours", "ours-first"},
    "restore": {"ours", "ours-new", "ours-memory"},
    "stall": {"ours", "ours-first", "ours-deferred"},
    "orbax": {"ours", "ours-blocked"},
    "train": {"ours-deferred", "ours-copy"},
}
BASES = {
    "save": {"limit"},
    "restore": {"limit", "limit-new"},
    "stall": {"copy", "plan-first", "plan-cached"},
    "orbax": {"limit"},
    "train": {"none", "copy"},
}


def _bench(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bench", *map(str, arguments)]


def _named(name: str) -> Contender:
    contender = Contender()
    contender.name = name
    return contender


def _environment() -> dict[str, str]:
    # One thread of torch's: several get in each other's way for seconds where tests share the cores.
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def _in_memory(work: Path) -> list[str]:
    """What stands in this host's memory for roots in `work`."""
    found = []
    for each in Path("/dev/shm").glob(f"tierkeep-{os.geteuid()}/*/root"):
        with contextlib.suppress(FileNotFoundError):  # another test's, that has just ended
            found.append(os.fsdecode(each.read_bytes()))
    return [root for root in found if Path(root).is_relative_to(work)]


def _measured(question: str, work: Path, answer_path: Path, *more: str) -> Any:
    """The answer to a small measurement in `work`, which leaves nothing there."""
    work.mkdir()
    options = [*SMALL[question], "--rounds", "1", "--dir", work, "--json", answer_path, *more]
    done = subprocess.run(
        _bench(question, *options), cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(work.iterdir()) == []
    assert _in_memory(work) == []
    answer = json.loads(answer_path.read_text(encoding="utf-8"))
    for row in answer["rows"]:
        assert list(row) == ["name", "seconds", "median_s", "gbps", "note"]
        assert len(row["seconds"]) == 1, f"{row['name']} was not measured: {row['note']}"
        assert row["name"] in done.stdout
    return answer


@pytest.mark.parametrize("question", SMALL)
def test_a_measurement_has_every_row_in_the_one_shape_and_leaves_nothing_behind(question: str, tmp_path: Path) -> None:
    answer = _measured(question, tmp_path / "work", tmp_path / "answer.json")
    assert list(answer) == ["question", "state", "nbytes", "commit", "load", "rows", "ratios"]
    assert answer["question"] == question
    assert answer["nbytes"] == pytest.approx(2_000_000, rel=0.3)
    assert len(answer["load"]) == 3
    rows = {row["name"]: row for row in answer["rows"]}
    assert rows.keys() == RIVALS[question] | OURS[question] | BASES[question]
    assert all(f"{rival}/{ours}" in answer["ratios"] for rival in RIVALS[question] for ours in OURS[question])


def test_the_twin_of_jax_is_measured_beside_orbax(tmp_path: Path) -> None:
    answer = _measured("stall", tmp_path / "work", tmp_path / "answer.json", "--framework", "jax")
    names = {row["name"] for row in answer["rows"]}
    assert names == OURS["stall"] | BASES["stall"] | {"orbax-async", "orbax-async-raw"}


def test_a_step_that_only_memory_has_is_restored_after_its_process_was_killed_and_then_forgotten(
    tmp_path: Path,
) -> None:
    state = make_state("decoder", 0.002, "torch")
    contender = OursMemory("torch", "decoder", 0.002)
    contender.open()
    try:
        contender.save(state, tmp_path / "root")
        arena = own_arena(tmp_path / "root", MemoryOptions().directory)
        assert arena is not None
        assert not (tmp_path / "root" / "1").exists()
        restored = dict(flatten(contender.load(tmp_path / "root", state.empty_copy())))
        assert all(bool((restored[name] == leaf).all()) for name, leaf in state.arrays().items())
    finally:
        contender.close()
    assert not arena.path.exists()


def test_an_interrupted_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    command = _bench("save", "--gb", "0.002", "--rounds", "1000000", "--only", "limit,torch.save", "--dir", tmp_path)
    with subprocess.Popen(command, cwd=ROOT, env=_environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("round 1 ") for line in process.stderr)
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_nobody_knows_is_an_error_that_lists_the_rows() -> None:
    with pytest.raises(SystemExit, match=r"nobody; there are a\b"), enter([_named("a")], ("nobody",)):
        pass


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughSpaceError, match="GB free"), workplace(tmp_path, 10**30):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_a_row_with_a_note() -> None:
    absent = _named("absent")
    absent.open = lambda: importlib.import_module("no_such_package")  # type: ignore[assignment, method-assign]
    with enter([_named("present"), absent], None) as field:
        assert [contender.name for contender in field.contenders] == ["present"]
        assert field.absent == (Row("absent", note="not installed: no_such_package"),)


def test_ratios_are_shares_of_the_limit_and_quotients_of_times() -> None:
    rows = (
        Row("limit", (1.0, 3.0, 2.0)),
        Row("ours", (2.5,)),
        Row("ours-first", (4.0,)),
        Row("torch.save", (5.0, 5.0)),
        Row("orbax", note="not installed: orbax"),
    )
    report = Report("save", "a state", 10**9, "unknown", (0.0, 0.0, 0.0), rows)
    assert report.ratios() == {
        "ours/limit": 0.8,
        "ours-first/limit": 0.5,
        "ours-first/ours": 1.6,
        "torch.save/ours": 2.0,
        "torch.save/ours-first": 1.25,
    }
    absent = json.loads(report.json())["rows"][-1]
    assert absent == {"name": "orbax", "seconds": [], "median_s": None, "gbps": None, "note": "not installed: orbax"}
    assert "not installed: orbax" in report.table("a command")


def test_what_blocks_training_is_told_in_copies_and_a_training_step_in_steps_without_checkpoints() -> None:
    rows = (Row("copy", (2.0,)), Row("ours", (2.5,)), Row("dcp-async", (5.0,)))
    report = Report("stall", "a state", 10**9, "unknown", (0.0, 0.0, 0.0), rows)
    assert report.ratios() == {"ours/copy": 1.25, "dcp-async/copy": 2.5, "dcp-async/ours": 2.0}
    assert "1.25 times copy" in report.table("a command")

    rows = (Row("none", (2.0,), moved=False), Row("copy", (3.0,), moved=False), Row("ours-copy", (6.0,), moved=False))
    report = Report("train", "a loop", 10**9, "unknown", (0.0, 0.0, 0.0), rows)
    assert report.ratios() == {"copy/none": 1.5, "ours-copy/copy": 2.0, "ours-copy/none": 3.0}
    assert "3.00 times none" in report.table("a command")
    assert [row["gbps"] for row in json.loads(report.json())["rows"]] == [None, None, None]


def test_a_plan_is_compared_with_itself_alone() -> None:
    rows = (Row("ours", (2.5,)), Row("plan-first", (6.0,), moved=False), Row("plan-cached", (0.5,), moved=False))
    report = Report("stall", "a state", 10**9, "unknown", (0.0, 0.0, 0.0), rows)
    assert report.ratios() == {"plan-first/plan-cached": 12.0}


def test_the_share_of_the_copy_that_is_hidden_is_what_training_did_not_wait_for() -> None:
    copy, deferred = Row("copy", (2.0, 2.0)), Row("ours-deferred", (0.5, 0.5), "a note")
    assert hidden((copy, deferred))[1].note == "75% of the copy hidden; a note"
    assert hidden((deferred,)) == (deferred,)


def test_of_several_variants_the_better_one_is_reported() -> None:
    rows = (Row("ours", (1.0,)), Row("dcp-1", (3.0,), "1 thread"), Row("dcp-2", (2.0,), "2 threads"))
    assert better(rows, "dcp") == (Row("ours", (1.0,)), Row("dcp", (2.0,), "2 threads; 1 thread: 3.00 s"))


def test_training_has_the_same_losses_after_every_reset_and_a_save_that_changes_them_is_found_out() -> None:
    training = Training(0.2, n_tokens=8)
    known: list[float] = []
    for _ in range(2):
        training.reset()
        check_losses("honest", [training.step() for _ in range(3)], known)
    assert len(set(known)) == 3
    training.reset()
    training.tree()["model"]["2.weight"].mul_(2)
    with pytest.raises(RuntimeError, match="careless changed the losses"):
        check_losses("careless", [training.step() for _ in range(3)], known)


def test_what_training_computes_meanwhile_is_not_counted() -> None:
    contender = _named("a")

    def clocked(_: Contender) -> None:
        contender.computed_s = 10.0

    (row,) = measure([contender], 1, before=lambda _: None, clocked=clocked, after=lambda *_: None)
    assert row.seconds[0] < 0


def test_every_contender_runs_once_a_round_and_rounds_begin_with_different_ones() -> None:
    contenders = [_named(name) for name in "abc"]
    order: list[str] = []
    rows = measure(
        contenders,
        3,
        before=lambda _: None,
        clocked=lambda contender: order.append(contender.name),
        after=lambda *_: None,
    )
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert [len(row.seconds) for row in rows] == [3, 3, 3]
